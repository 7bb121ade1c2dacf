//! Within a room: no circle of files that name each other has more than three of them.
//!
//! An arrow goes from a file to the file of each module that it names, by `use` or by a path from
//! `crate`. Tests and models may look at anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Files of a circle at most: a type, what makes it and what it is made of.
const MOST: usize = 3;

/// The path of a module, from the root of its crate.
type Module = Vec<String>;

/// The files that each file names.
type Arrows = BTreeMap<Module, BTreeSet<Module>>;

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let is_test = path.file_stem().is_some_and(|n| n == "tests" || n == "models");
        match path.is_dir() {
            _ if is_test => {}
            true => files_below(&path, found),
            false => found.extend(path.extension().is_some_and(|e| e == "rs").then_some(path)),
        }
    }
}

/// The modules of a crate with their source, without unit tests and comments.
fn modules(src: &Path) -> BTreeMap<Module, String> {
    let mut files = Vec::new();
    files_below(src, &mut files);
    let module = |path: PathBuf| {
        let below = path.strip_prefix(src).expect("below src").with_extension("");
        let mut module: Module =
            below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        module.retain(|part| part != "mod");
        let source = std::fs::read_to_string(&path).expect("a source file");
        (module, without_tests(&source))
    };
    files.into_iter().map(module).filter(|(m, _)| m != &["lib"] && m != &["main"]).collect()
}

fn without_tests(source: &str) -> String {
    let end = source.find("\n#[cfg(test)]\nmod ").unwrap_or(source.len());
    let lines = source[..end].lines().map(|l| l.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// `a::{b, c::{d}}` as `a::b` and `a::c::d`.
fn each_path(tree: &str) -> Vec<String> {
    let Some(open) = tree.find('{') else { return vec![tree.to_owned()] };
    let (front, rest) = tree.split_at(open);
    let inner = rest[1..].rsplit_once('}').map_or("", |(inner, _)| inner);
    let (mut depth, mut start, mut paths) = (0, 0, Vec::new());
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                paths.extend(each_path(&inner[start..at]).iter().map(|p| format!("{front}{p}")));
                start = at + 1;
            }
            _ => {}
        }
    }
    paths
}

/// What a file names, as paths from the root of the crate.
fn named(own: &Module, source: &str) -> Vec<Module> {
    let mut paths = Vec::new();
    for statement in source.split(';') {
        let Some((_, tree)) = statement.rsplit_once("use ") else { continue };
        let tree: String = tree.split_whitespace().collect();
        paths.extend(each_path(&tree));
    }
    for (at, _) in source.match_indices("crate::") {
        let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let rest = &source[at..];
        paths.push(rest[..rest.find(|c| !is_path(c)).unwrap_or(rest.len())].to_owned());
    }
    paths.iter().filter_map(|path| from_root(own, path)).collect()
}

fn from_root(own: &Module, path: &str) -> Option<Module> {
    let mut parts = path.split("::");
    let mut module = match parts.clone().next()? {
        "crate" => Module::new(),
        "self" | "super" => own.clone(),
        _ => return None,
    };
    if parts.clone().next()? != "super" {
        parts.next();
    }
    for part in parts {
        match part {
            "super" => drop(module.pop()),
            name => module.push(name.to_owned()),
        }
    }
    Some(module)
}

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
        both.map(|m| m.join("/")).collect::<Vec<_>>()
    };
    let circles = arrows.keys().map(circle_of).filter(|c| c.len() > MOST);
    circles.map(|c| format!("{room}: {}", c.join(" "))).collect()
}

#[test]
fn no_circle_of_files_has_more_than_three() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = BTreeSet::new();
    for room in std::fs::read_dir(crates).expect("the rooms") {
        let room = room.expect("a room").path();
        let name = room.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if room.join("src").is_dir() {
            found.append(&mut circles(&name, &arrows(&modules(&room.join("src")))));
        }
    }
    assert!(found.is_empty(), "{}", Vec::from_iter(found).join("\n"));
}

#[test]
fn a_circle_is_found_however_its_files_are_named() {
    let sources = |last: &str| {
        let of = |path: &str, source: &str| {
            (path.split('/').map(str::to_owned).collect::<Module>(), source.to_owned())
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
