//! No circle of files that name each other has more than three files.
//!
//! An arrow goes from a file to the file of each module that it names, by `use` or by a path from
//! `crate`. Tests and models may look at anything.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Module, modules, named, root, without_tests};

/// The largest circle, in files: a type, its constructor and its parts.
const MOST: usize = 3;

/// The files that each file names.
type Arrows = BTreeMap<Module, BTreeSet<Module>>;

fn arrows(sources: &BTreeMap<Module, String>) -> Arrows {
    let file_of = |path: Module| {
        (1..=path.len()).rev().map(|n| path[..n].to_vec()).find(|m| sources.contains_key(m))
    };
    let of = |(own, source): (&Module, &String)| {
        let files = named(own, source).into_iter().filter_map(file_of).filter(|to| to != own);
        (own.clone(), files.collect())
    };
    sources.iter().map(of).collect()
}

fn reachable(arrows: &Arrows, from: &Module) -> BTreeSet<Module> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(file) = next.pop() {
        for to in &arrows[file] {
            if seen.insert(to.clone()) {
                next.push(to);
            }
        }
    }
    seen
}

/// Files that can all be reached from each other, more than [`MOST`] of them, as sentences.
fn circles(room: &str, arrows: &Arrows) -> BTreeSet<String> {
    let reach: BTreeMap<_, _> = arrows.keys().map(|m| (m, reachable(arrows, m))).collect();
    let circle_of = |file: &Module| {
        let both = reach[file].iter().filter(|m| reach[m].contains(file));
        both.map(|m| m[1..].join("/")).collect::<Vec<_>>()
    };
    let circles = arrows.keys().map(circle_of).filter(|c| c.len() > MOST);
    circles.map(|c| format!("{room}: {}", c.join(" "))).collect()
}

#[test]
fn circles_of_files_have_at_most_three_files() {
    let mut found = BTreeSet::new();
    for package in ["stack", "sockets", "gateway", "cli"] {
        let mut modules = modules(&root().join(package).join("src"));
        // The root of a room declares and passes on.
        let is_root = |m: &Module| match package {
            "stack" | "sockets" => m.len() <= 2,
            _ => m.len() == 1 || m[1..] == ["netns"],
        };
        modules.retain(|m, _| !is_root(m));
        assert!(modules.len() > 20, "{package} has modules");
        found.append(&mut circles(package, &arrows(&modules)));
    }
    assert!(found.is_empty(), "{}", Vec::from_iter(found).join("\n"));
}

#[test]
fn a_circle_is_found_however_its_files_are_named() {
    let sources = |last: &str| {
        let of = |path: &str, source: &str| {
            let module = ["crate"].into_iter().chain(path.split('/')).map(str::to_owned);
            (module.collect::<Module>(), source.to_owned())
        };
        BTreeMap::from([
            of("a", "use crate::b::{self, c::{D, E}};"),
            of("b", "fn f() { crate::b::c::d() }"),
            of("b/c", "use super::super::e::F;"),
            of("e", last),
        ])
    };
    let circle = arrows(&sources("pub use crate::{\n    a::A,\n    z,\n};"));
    assert_eq!(circles("x", &circle), BTreeSet::from(["x: a b b/c e".to_owned()]));
    assert!(circles("x", &arrows(&sources("use crate::b::c::D;"))).is_empty());
    assert_eq!(without_tests("a // b\nc\n#[cfg(test)]\nmod tests {}"), "a \nc");
}
