//! Tests that each need a process of one thread, because they enter namespaces or give up rights for good. So there is
//! no harness: the program starts itself again for each part. An argument names a part, or tests of `relay`.

// The calls of the operating system under test.
#![allow(unsafe_code)]

mod contain;
mod follow;
mod guest;
mod netns;
mod relay;
mod resolv;

use std::process::{Command, ExitCode};

const PART: &str = "FULMAR_TEST_PART";
const PARTS: [(&str, fn()); 6] = [
    ("contain", contain::main),
    ("follow", follow::main),
    ("guest", guest::main),
    ("netns", netns::main),
    ("relay", relay::main),
    ("resolv", resolv::main),
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(PART) {
        let (_, part) = PARTS.iter().find(|(n, _)| *n == name).expect("a part of this name");
        part();
        return ExitCode::SUCCESS;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let named = |name: &str| arguments.iter().any(|a| a == name);
    let is_any_named = PARTS.iter().any(|(name, _)| named(name));
    let has_filter = arguments.iter().any(|a| !a.starts_with('-'));
    let mut failed = Vec::new();
    for (name, _) in PARTS {
        let (is_wanted, passed_on) = match (is_any_named, has_filter) {
            (true, _) => (named(name), &[][..]),
            (false, true) => (name == "relay", &arguments[..]),
            (false, false) => (true, &[][..]),
        };
        if !is_wanted {
            continue;
        }
        println!("part {name}");
        let this = std::env::current_exe().expect("a path");
        let status =
            Command::new(this).args(passed_on).env(PART, name).status().expect("it starts");
        if !status.success() {
            failed.push(format!("{name}: {status}"));
        }
    }
    for part in &failed {
        eprintln!("FAILED {part}");
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
