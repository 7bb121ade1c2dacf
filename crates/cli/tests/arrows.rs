//! Which room may name which: the one table, and the proof that the workspace keeps it.
//!
//! The data are `cargo metadata`'s own, so an arrow cannot hide. Dev-dependencies are free: a test
//! may look at anything; so is what only the models of `make loom` link.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// A room, the rooms it may name, the libraries from outside that it may name.
type Room = (&'static str, &'static [&'static str], &'static [&'static str]);

const BELOW_SHARD: &[&str] =
    &["base", "wire", "mbuf", "route", "netdev", "ip", "udp", "tcp", "socket"];
const BELOW_RUNTIME: &[&str] = &["base", "mbuf", "netdev", "ip", "udp", "tcp", "socket", "shard"];
/// `runtime` for the account of CPU time alone: the gateway has a loop of its own.
const BELOW_GATEWAY: &[&str] = &[
    "base", "wire", "mbuf", "route", "netdev", "ip", "udp", "tcp", "socket", "shard", "runtime",
    "netns",
];
const BELOW_FULMAR: &[&str] = &[
    "base", "wire", "mbuf", "route", "netdev", "ip", "udp", "tcp", "socket", "shard", "runtime",
    "drivers",
];
const BELOW_LAB: &[&str] = &[
    "base",
    "wire",
    "mbuf",
    "route",
    "netdev",
    "ip",
    "udp",
    "tcp",
    "socket",
    "shard",
    "runtime",
    "drivers",
    "fulmar",
    "netns",
    "cli",
    "nic",
    "simulation",
    "testbed",
];

/// The last two are tables that a bench compares with, and `io-uring` is what it compares with the
/// stack; `addr2line` and `inferno` draw profiles, `hdrhistogram` latencies.
const LAB_OUTSIDE: &[&str] = &[
    "clap",
    "libc",
    "indicatif",
    "serde_json",
    "addr2line",
    "hdrhistogram",
    "inferno",
    "io-uring",
    "nix",
    "prefix-trie",
    "ip_network_table-deps-treebitmap",
];

/// From the bottom up. `tcp` never names `ip` and `ip` never names `netdev`: they meet in `shard`.
const ROOMS: &[Room] = &[
    ("base", &[], &[]),
    ("wire", &["base"], &[]),
    ("mbuf", &["base", "wire"], &["libc"]),
    ("route", &["base"], &[]),
    ("netdev", &["base", "wire", "mbuf"], &[]),
    ("ip", &["base", "wire", "mbuf", "route"], &[]),
    ("udp", &["base", "wire", "mbuf"], &[]),
    ("tcp", &["base", "wire", "mbuf"], &[]),
    ("socket", &["base", "mbuf", "udp", "tcp"], &[]),
    ("shard", BELOW_SHARD, &["hashbrown", "siphasher", "smallvec"]),
    ("runtime", BELOW_RUNTIME, &["smallvec", "libc"]),
    ("drivers", &["base", "wire", "mbuf", "netdev"], &["libc", "io-uring"]),
    ("fulmar", BELOW_FULMAR, &["bytes", "nix", "serde_json"]),
    (
        "netns",
        &[],
        &[
            "libc",
            "nix",
            "netlink-packet-core",
            "netlink-packet-route",
            "netlink-packet-sock-diag",
            "netlink-sys",
        ],
    ),
    (
        "gateway",
        BELOW_GATEWAY,
        &["caps", "dhcproto", "landlock", "libc", "nix", "resolv-conf", "seccompiler", "smallvec"],
    ),
    (
        "cli",
        &["fulmar", "gateway", "netns"],
        &[
            "clap",
            "clap_complete",
            "clap_mangen",
            "indicatif",
            "nix",
            "ratatui",
            "serde_json",
            "sha2",
            "terminal_size",
            "libc",
        ],
    ),
    // The laboratory. The product never names it, but for the models.
    ("models", &[], &[]),
    ("nic", &["base", "wire", "mbuf", "netdev", "drivers", "runtime"], &["nix"]),
    (
        "testbed",
        &["base", "wire", "mbuf", "netdev", "ip", "tcp", "socket", "shard", "runtime", "drivers"],
        &[],
    ),
    (
        "fuzz",
        &["base", "wire", "mbuf", "netdev", "ip", "tcp", "socket", "shard"],
        &["arbitrary", "libfuzzer-sys"],
    ),
    ("simulation", BELOW_FULMAR, &[]),
    (
        "packetdrill",
        &["base", "wire", "mbuf", "route", "netdev", "ip", "socket", "tcp", "shard"],
        &["libc"],
    ),
    ("lab", BELOW_LAB, LAB_OUTSIDE),
];

/// The rooms that must build where there is no operating system: no clock, no I/O can hide in them.
const NO_STD: &[&str] =
    &["base", "wire", "mbuf", "route", "netdev", "ip", "udp", "tcp", "socket", "shard"];

/// `fulmar-tcp` is the room `tcp`; `fulmar` is its own room; anything else is not ours.
fn room_of(package: &str) -> Option<&str> {
    if package == "fulmar" { Some(package) } else { package.strip_prefix("fulmar-") }
}

fn metadata() -> Value {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path"])
        .arg(manifest)
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

/// For every room of the workspace, what it names outside its tests.
fn arrows(metadata: &Value) -> BTreeMap<String, Vec<String>> {
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let text = |v: &Value| v.as_str().expect("a string").to_owned();
    packages
        .iter()
        .map(|p| {
            let all = p["dependencies"].as_array().expect("a list of dependencies");
            let is_of_models = |d: &&Value| d["target"].as_str() == Some("cfg(fulmar_loom)");
            let named = all.iter().filter(|d| d["kind"].as_str() != Some("dev"));
            let named = named.filter(|d| !is_of_models(d));
            let name = text(&p["name"]);
            (room_of(&name).unwrap_or(&name).to_owned(), named.map(|d| text(&d["name"])).collect())
        })
        .collect()
}

/// The arrows that the table does not have, as sentences.
fn forbidden(arrows: &BTreeMap<String, Vec<String>>, rooms: &[Room]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (from, names) in arrows {
        let Some((_, may_name, libraries)) = rooms.iter().find(|r| r.0 == from) else {
            wrong.push(format!("{from} is not a room of the table"));
            continue;
        };
        for to in names {
            let allowed = match room_of(to) {
                Some(room) => may_name.contains(&room),
                None => libraries.contains(&to.as_str()),
            };
            if !allowed {
                wrong.push(format!("{from} may not name {to}"));
            }
        }
    }
    wrong
}

#[test]
fn no_room_names_a_room_outside_its_row() {
    let wrong = forbidden(&arrows(&metadata()), ROOMS);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_room_of_the_table_exists() {
    let found = arrows(&metadata());
    for (room, _, _) in ROOMS {
        assert!(found.contains_key(*room), "{room} is in the table but not in the workspace");
    }
}

#[test]
fn a_forbidden_arrow_is_found() {
    let of = |from: &str, to: &str| {
        forbidden(&BTreeMap::from([(from.to_owned(), vec![to.to_owned()])]), ROOMS)
    };
    assert_eq!(of("tcp", "fulmar-ip"), ["tcp may not name fulmar-ip"]);
    assert_eq!(of("ip", "fulmar-netdev"), ["ip may not name fulmar-netdev"]);
    assert_eq!(of("drivers", "fulmar-shard"), ["drivers may not name fulmar-shard"]);
    assert_eq!(of("base", "rand"), ["base may not name rand"]);
    assert_eq!(of("attic", "libc"), ["attic is not a room of the table"]);
    assert!(of("shard", "fulmar-tcp").is_empty());
}

#[test]
fn the_table_has_no_cycle() {
    for (at, (room, may_name, _)) in ROOMS.iter().enumerate() {
        for below in *may_name {
            let place = ROOMS.iter().position(|r| r.0 == *below);
            assert!(place.is_some_and(|p| p < at), "{room} names {below}, which is not below it");
        }
    }
}

/// The rows of the page's table: a room, and the rooms that it may name.
fn rows_of_the_page(page: &str) -> Vec<(String, Vec<String>)> {
    let mut rows: Vec<(String, Vec<String>)> = Vec::new();
    for line in page.lines().filter(|l| l.starts_with("| [`")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [rooms, _, may_name] = cells[..] else { continue };
        let names = match may_name {
            "all above" => rows.iter().map(|r| r.0.clone()).collect(),
            list => list.split(", ").filter(|n| *n != "–").map(str::to_owned).collect(),
        };
        let rooms = rooms.split('`').skip(1).step_by(2);
        let new: Vec<_> = rooms.map(|room| (room.to_owned(), Vec::clone(&names))).collect();
        rows.extend(new);
        // Other tables follow.
        if rows.last().is_some_and(|r| r.0 == "lab") {
            break;
        }
    }
    rows
}

#[test]
fn the_page_has_the_same_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("ARCHITECTURE.md")).expect("the page");
    let mut of_page = rows_of_the_page(&page);
    let mut of_table: Vec<(String, Vec<String>)> = ROOMS
        .iter()
        .map(|(room, names, _)| {
            ((*room).to_owned(), names.iter().map(|n| (*n).to_owned()).collect())
        })
        .collect();
    of_page.iter_mut().chain(&mut of_table).for_each(|(_, names)| names.sort());
    of_page.sort();
    of_table.sort();
    assert_eq!(of_page, of_table);
}

#[test]
fn the_engines_declare_that_they_need_no_operating_system() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for room in NO_STD {
        let lib = std::fs::read_to_string(crates.join(room).join("src/lib.rs")).expect("a lib.rs");
        let is_no_std = |l: &str| l.starts_with("#![cfg_attr(not(") && l.ends_with("), no_std)]");
        assert!(lib.lines().any(is_no_std), "{room} is not no_std");
        assert!(!lib.contains("extern crate std"), "{room} brings std back");
    }
}
