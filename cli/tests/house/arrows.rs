//! Which room may name which: the one table, and the proof that the sources keep it.
//!
//! A room is a module of a package, or a whole package. Its arrows are the paths in its sources. Tests and models may
//! look at anything.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Module, modules, named, root};

/// A room, its folder, the rooms that it may name, the libraries from outside that it may name.
type Room = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const ENGINES: &[&str] = &["base", "wire", "mbuf", "route", "device", "ip", "udp", "tcp", "socket"];
const BELOW_RUNTIME: &[&str] = &["base", "mbuf", "device", "ip", "udp", "tcp", "socket", "shard"];
/// The gateway has a loop of its own. Of `runtime` it has the account, the rings between shards, the busy-poll policy and
/// the secrets.
const BELOW_GATEWAY: &[&str] = &[
    "base", "wire", "mbuf", "route", "device", "ip", "udp", "tcp", "socket", "shard", "runtime",
    "netns",
];
const BELOW_API: &[&str] = &[
    "base", "wire", "mbuf", "route", "device", "ip", "udp", "tcp", "socket", "shard", "runtime",
    "drivers",
];
const BELOW_LAB: &[&str] = &[
    "base",
    "wire",
    "mbuf",
    "route",
    "device",
    "ip",
    "udp",
    "tcp",
    "socket",
    "shard",
    "runtime",
    "drivers",
    "api",
    "async",
    "netns",
    "nic",
    "simulation",
    "testbed",
];

/// `io_uring` is what benches compare with the stack, `hyper`, `quinn` (with certificates of `rcgen`) and
/// `tokio` are what async programs are made of, `ipstack` and `netstack_smoltcp` other stacks; `addr2line` and `inferno`
/// draw profiles, `hdrhistogram` latencies.
const LAB_OUTSIDE: &[&str] = &[
    "clap",
    "libc",
    "futures_util",
    "indicatif",
    "ipstack",
    "netstack_smoltcp",
    "serde_json",
    "addr2line",
    "hdrhistogram",
    "http_body_util",
    "hyper",
    "hyper_util",
    "inferno",
    "io_uring",
    "nix",
    "quinn",
    "rcgen",
    "tokio",
];

/// From the bottom up. `tcp` never names `ip` and `ip` never names `device`: they meet in `shard`.
const ROOMS: &[Room] = &[
    ("base", "stack/src/base", &[], &["siphasher"]),
    ("wire", "stack/src/wire", &["base"], &[]),
    ("mbuf", "stack/src/mbuf", &["wire"], &["libc"]),
    ("route", "stack/src/route", &["base"], &[]),
    ("device", "stack/src/device", &["base", "wire", "mbuf"], &[]),
    ("ip", "stack/src/ip", &["base", "wire", "mbuf", "route"], &[]),
    ("udp", "stack/src/udp", &["base", "wire", "mbuf"], &[]),
    ("tcp", "stack/src/tcp", &["base", "wire", "mbuf"], &[]),
    ("socket", "stack/src/socket", &["base", "mbuf", "tcp"], &[]),
    ("shard", "stack/src/shard", ENGINES, &["hashbrown", "siphasher"]),
    ("runtime", "sockets/src/runtime", BELOW_RUNTIME, &["smallvec", "libc", "nix"]),
    (
        "drivers",
        "sockets/src/drivers",
        &["base", "wire", "mbuf", "device"],
        &["libc", "io_uring", "nix"],
    ),
    ("api", "sockets/src/api", BELOW_API, &["bytes", "nix", "serde", "serde_json"]),
    (
        "async",
        "tokio/src",
        &["api"],
        &["axum", "futures_core", "http", "hyper_util", "quinn", "tokio", "tonic", "tower_service"],
    ),
    ("ipstack", "compat/ipstack/src", &["api", "async"], &["etherparse", "thiserror", "tokio"]),
    (
        "netstack",
        "compat/netstack-smoltcp/src",
        &["api", "async"],
        &["futures_core", "futures_sink", "smoltcp", "tokio"],
    ),
    (
        "netns",
        "gateway/src/netns",
        &[],
        &[
            "libc",
            "nix",
            "netlink_packet_core",
            "netlink_packet_route",
            "netlink_packet_sock_diag",
            "netlink_sys",
        ],
    ),
    (
        "gateway",
        "gateway/src",
        BELOW_GATEWAY,
        &[
            "aes_gcm",
            "caps",
            "data_encoding",
            "dhcproto",
            "hickory_proto",
            "hkdf",
            "httparse",
            "landlock",
            "libc",
            "nix",
            "seccompiler",
            "serde",
            "serde_json",
            "sha2",
            "smallvec",
            "toml",
        ],
    ),
    (
        "cli",
        "cli/src",
        &["api", "gateway", "netns"],
        &[
            "clap",
            "clap_complete",
            "clap_mangen",
            "indicatif",
            "nix",
            "ratatui",
            "rustix",
            "serde",
            "serde_json",
            "sha2",
            "terminal_size",
            "libc",
        ],
    ),
    // The laboratory. The product never names it.
    ("nic", "lab/nic/src", &["base", "wire", "mbuf", "device", "drivers", "runtime"], &["nix"]),
    (
        "testbed",
        "lab/testbed/src",
        &["base", "wire", "mbuf", "device", "ip", "tcp", "socket", "shard", "runtime", "drivers"],
        &[],
    ),
    (
        "fuzz",
        "lab/fuzz/src",
        &["base", "wire", "mbuf", "device", "ip", "tcp", "socket", "shard", "gateway"],
        &["aes_gcm", "arbitrary", "hkdf", "libfuzzer_sys", "sha2"],
    ),
    (
        "simulation",
        "lab/simulation/src",
        &[
            "base", "wire", "mbuf", "route", "device", "ip", "udp", "tcp", "socket", "shard",
            "runtime", "drivers", "testbed",
        ],
        &[],
    ),
    (
        "packetdrill",
        "lab/packetdrill/src",
        &["base", "wire", "mbuf", "route", "device", "ip", "socket", "tcp", "shard"],
        &["libc"],
    ),
    ("lab", "lab/src", BELOW_LAB, LAB_OUTSIDE),
];

/// Libraries from outside that a manifest of the workspace names, as a source spells them.
fn libraries() -> BTreeSet<String> {
    let mut manifests = vec![root().join("lab/Cargo.toml")];
    let compat = ["compat/ipstack", "compat/netstack-smoltcp"];
    for folder in ["stack", "sockets", "tokio", "gateway", "cli"].into_iter().chain(compat) {
        manifests.push(root().join(folder).join("Cargo.toml"));
    }
    for folder in std::fs::read_dir(root().join("lab")).expect("the laboratory") {
        manifests.push(folder.expect("an entry").path().join("Cargo.toml"));
    }
    let texts = manifests.iter().filter_map(|m| std::fs::read_to_string(m).ok());
    let of = |text: String| -> Vec<String> {
        let sections = text.split("\n[").filter(|s| s.split(']').next() == Some("dependencies"));
        let names = sections.flat_map(|s| s.lines().filter_map(|l| Some(l.split_once(" = ")?.0)));
        let names = names.filter(|n| !n.starts_with("fulmar") && !n.starts_with('#'));
        names.map(|n| n.trim().replace('-', "_")).collect()
    };
    texts.flat_map(of).collect()
}

/// The room that holds a module, found by its package and the path from the package's root.
fn room_of(package: &str, module: &[String]) -> Option<&'static str> {
    // A door of the package `fulmar`, not a room.
    let module = module.strip_prefix(&["internals".to_owned()]).unwrap_or(module);
    let first = module.first().map_or("", String::as_str);
    let within = |folder: &str| {
        let at = ROOMS.iter().find(|r| r.1 == folder)?;
        Some(at.0)
    };
    match package {
        "stack" => within(&format!("stack/src/{first}")),
        "sockets" => within(&format!("sockets/src/{first}")).or(Some("api")),
        "gateway" => within(&format!("gateway/src/{first}")).or(Some("gateway")),
        other => within(&format!("{other}/src")),
    }
}

/// The folder of the package that a crate's name stands for.
fn package_of(name: &str) -> Option<String> {
    match name {
        "fulmar" => Some("sockets".to_owned()),
        "fulmar_lab" => Some("lab".to_owned()),
        _ => {
            let short = name.strip_prefix("fulmar_")?;
            let is_product = ["stack", "tokio", "gateway", "cli"].contains(&short);
            Some(if is_product { short.to_owned() } else { format!("lab/{short}") })
        }
    }
}

/// What each room names outside its tests: rooms, and libraries.
type Arrows = BTreeMap<&'static str, BTreeSet<String>>;

fn arrows_of(package: &str, sources: &BTreeMap<Module, String>, into: &mut Arrows) {
    let libraries = libraries();
    for (own, source) in sources {
        let Some(from) = room_of(package, &own[1..]) else { continue };
        let names = into.entry(from).or_default();
        for path in named(own, source) {
            let Some(first) = path.first() else { continue };
            let to = match first.as_str() {
                "crate" => room_of(package, &path[1..]).map(str::to_owned),
                name if libraries.contains(name) => Some(name.to_owned()),
                name => package_of(name).and_then(|p| room_of(&p, &path[1..]).map(str::to_owned)),
            };
            names.extend(to.filter(|to| to != from));
        }
    }
}

fn packages() -> Vec<String> {
    let folders: BTreeSet<_> =
        ROOMS.iter().filter_map(|r| Some(r.1.split_once("/src")?.0.to_owned())).collect();
    folders.into_iter().collect()
}

fn arrows() -> Arrows {
    let mut arrows = Arrows::new();
    for package in packages() {
        arrows_of(&package, &modules(&root().join(&package).join("src")), &mut arrows);
    }
    arrows
}

/// The arrows that the table does not have, as sentences.
fn forbidden(arrows: &Arrows) -> Vec<String> {
    let mut wrong = Vec::new();
    for (from, names) in arrows {
        let (_, _, may_name, libraries) = ROOMS.iter().find(|r| r.0 == *from).expect("a room");
        let is_allowed = |to: &&String| {
            let to = to.as_str();
            // Under `cfg(fulmar_loom)` alone.
            may_name.contains(&to) || libraries.contains(&to) || to == "models"
        };
        let refused = names.iter().filter(|to| !is_allowed(to));
        wrong.extend(refused.map(|to| format!("{from} may not name {to}")));
    }
    wrong
}

#[test]
fn no_room_names_a_room_outside_its_row() {
    let wrong = forbidden(&arrows());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_arrow_of_the_table_is_used() {
    let found = arrows();
    let mut unused = Vec::new();
    for (room, _, may_name, libraries) in ROOMS {
        let names = found.get(room).unwrap_or_else(|| panic!("{room} has no sources"));
        // Bundles of rooms are shared by rows.
        let own = if may_name.len() < 8 { *may_name } else { &[] };
        let all = own.iter().chain(*libraries).filter(|n| !names.contains(**n));
        unused.extend(all.map(|n| format!("{room} does not name {n}")));
    }
    assert!(unused.is_empty(), "{}", unused.join("\n"));
}

#[test]
fn a_forbidden_arrow_is_found() {
    let of = |package: &str, module: &str, source: &str| {
        let own = ["crate"].into_iter().chain(module.split('/')).map(str::to_owned).collect();
        let mut arrows = Arrows::new();
        arrows_of(package, &BTreeMap::from([(own, source.to_owned())]), &mut arrows);
        forbidden(&arrows)
    };
    assert_eq!(of("stack", "tcp/input", "use crate::ip::Ip;"), ["tcp may not name ip"]);
    assert_eq!(
        of("stack", "ip/input", "fn f(d: &super::super::device::D) {}"),
        ["ip may not name device"]
    );
    assert_eq!(of("stack", "ip", "use crate::{base, device::D};"), ["ip may not name device"]);
    assert_eq!(
        of("sockets", "drivers/tap", "use fulmar_stack::shard::Shard;"),
        ["drivers may not name shard"]
    );
    assert_eq!(
        of("sockets", "runtime/host", "crate::api::Stack::new()"),
        ["runtime may not name api"]
    );
    assert_eq!(of("stack", "base/time", "fn f() { libc::time() }"), ["base may not name libc"]);
    assert_eq!(
        of("gateway", "netns/route", "use crate::rules::Rules;"),
        ["netns may not name gateway"]
    );
    assert_eq!(of("cli", "nc", "use fulmar_lab::stats;"), ["cli may not name lab"]);
    assert!(of("stack", "shard/input", "use crate::tcp::Tcb;").is_empty());
}

#[test]
fn the_table_has_no_cycle() {
    for (at, (room, _, may_name, _)) in ROOMS.iter().enumerate() {
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
    let page = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page");
    let mut of_page = rows_of_the_page(&page);
    let mut of_table: Vec<(String, Vec<String>)> = ROOMS
        .iter()
        .map(|(room, _, names, _)| {
            ((*room).to_owned(), names.iter().map(|n| (*n).to_owned()).collect())
        })
        .collect();
    of_page.iter_mut().chain(&mut of_table).for_each(|(_, names)| names.sort());
    of_page.sort();
    of_table.sort();
    assert_eq!(of_page, of_table);
}

#[test]
fn the_engines_need_no_operating_system() {
    let lib = std::fs::read_to_string(root().join("stack/src/lib.rs")).expect("a lib.rs");
    assert!(lib.contains("#![cfg_attr(not(any(test, feature = \"std\")), no_std)]"));
    assert!(!lib.contains("extern crate std"));
}
