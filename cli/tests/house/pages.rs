//! The pages of the repository stay true as far as a program can tell: what they link to and the
//! names that they give in code type exist.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Pages outside of `docs`.
const AT_ROOT: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
/// Pages that name in code type only what is in the source.
const NAMING: [&str; 5] = [
    "ARCHITECTURE.md",
    "docs/published.md",
    "docs/choices.md",
    "docs/placement.md",
    "docs/threads.md",
];

/// Where the sources are.
const SOURCES: [&str; 6] = ["stack", "sockets", "tokio", "gateway", "cli", "lab"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All pages: those at the root and those in `docs`.
fn pages() -> Vec<String> {
    let entries = fs::read_dir(root().join("docs")).expect("a directory").filter_map(Result::ok);
    let names = entries.map(|entry| format!("docs/{}", entry.file_name().to_string_lossy()));
    let mut pages: Vec<String> = names.filter(|name| name.ends_with(".md")).collect();
    pages.extend(AT_ROOT.map(str::to_owned));
    pages.sort();
    pages
}

/// A page without its blocks of code, with the target of each link next to its text: `[a](b.md)` for `[a]` where the
/// page has a line `[a]: b.md`.
fn prose(page: &str) -> String {
    let text: String = page.split("```").step_by(2).collect();
    let (definitions, lines): (Vec<&str>, Vec<&str>) =
        text.lines().partition(|line| line.starts_with('[') && line.contains("]: "));
    definitions
        .iter()
        .filter_map(|line| line.split_once(": "))
        .fold(lines.join("\n"), |text, (name, target)| {
            text.replace(name, &format!("{name}({target})"))
        })
}

/// Targets of links inside the repository.
fn links(page: &str) -> impl Iterator<Item = &str> {
    let targets = page.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let files = targets.map(|(target, _)| target.split('#').next().unwrap_or_default());
    files.filter(|t| !t.is_empty() && !t.starts_with("http"))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|w| w.starts_with(|c: char| c.is_alphabetic() || c == '_') && w.len() > 1)
}

/// Every word of every Rust source and manifest below a directory.
fn collect_words(dir: &Path, into: &mut HashSet<String>) {
    for entry in fs::read_dir(dir).expect("a directory").filter_map(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            collect_words(&path, into);
        } else if path.extension().is_some_and(|x| x == "rs" || x == "toml") {
            into.extend(words(&read(&path)).map(str::to_owned));
        }
    }
}

#[test]
fn every_link_leads_to_a_file() {
    for page in pages() {
        let from = root().join(&page);
        for target in links(&prose(&read(&from))) {
            let found = from.parent().is_some_and(|folder| folder.join(target).exists());
            assert!(found, "{page} links to {target}, which is not there");
        }
    }
}

#[test]
fn every_name_on_a_page_about_the_source_is_in_it() {
    let mut known = HashSet::new();
    SOURCES.iter().for_each(|folder| collect_words(&root().join(folder), &mut known));
    for page in NAMING {
        let text = prose(&read(&root().join(page)));
        let unknown = unknown_names(&text, &known);
        assert!(unknown.is_empty(), "{page} names what the source does not have: {unknown:?}");
    }
}

/// What the source says of each type: the files that declare it or implement something for it. A type that another
/// name is given to (`Config as TcpConfig`) is found under both.
fn files_of_types(dir: &Path, into: &mut HashMap<String, String>) {
    for entry in fs::read_dir(dir).expect("a directory").filter_map(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            files_of_types(&path, into);
        } else if path.extension().is_some_and(|x| x == "rs") {
            let text = read(&path);
            let types: HashSet<&str> =
                text.lines().filter(|l| declares(l)).flat_map(words).collect();
            types.into_iter().for_each(|t| *into.entry(t.to_owned()).or_default() += &text);
        }
    }
}

fn without_visibility(line: &str) -> &str {
    let all = ["pub ", "pub(crate) ", "pub(super) "];
    all.iter().find_map(|visibility| line.strip_prefix(visibility)).unwrap_or(line)
}

fn declares(line: &str) -> bool {
    ["struct ", "enum ", "trait ", "impl ", "impl<", "type "]
        .iter()
        .any(|start| without_visibility(line).starts_with(start))
}

/// `Type::member` in code type, of types that the source has.
fn members(page: &str) -> impl Iterator<Item = (&str, &str)> {
    let names = page.split('`').skip(1).step_by(2).filter_map(|code| code.split_once("::"));
    names.filter_map(|(of, member)| {
        let is_member = of.starts_with(char::is_uppercase) && !member.contains("::");
        is_member.then_some((of, words(member).next()?))
    })
}

#[test]
fn every_member_that_a_page_names_is_one_of_its_type() {
    let mut files = HashMap::new();
    SOURCES.iter().for_each(|folder| files_of_types(&root().join(folder), &mut files));
    let mut missing = Vec::new();
    // What has changed may be gone.
    for page in pages().into_iter().filter(|p| *p != "CHANGELOG.md") {
        for (of, member) in members(&prose(&read(&root().join(&page)))) {
            let Some(text) = files.get(of) else { continue };
            let forms = [format!("fn {member}("), format!("fn {member}<"), format!("{member}: ")];
            let is_variant = member.starts_with(char::is_uppercase) && text.contains(member);
            if !is_variant && !forms.iter().any(|form| text.contains(form)) {
                missing.push(format!("{page}: {of}::{member}"));
            }
        }
    }
    assert!(missing.is_empty(), "the source has no such members: {missing:?}");
}

/// The names that a page says are in a file, with that file: code type right before "in [...](file)" or "([...](file))",
/// joined by commas and "and", and the text of the link itself if it is a name. `f` of [`f`](file) is such a name.
fn placed_names(page: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(opening) = page[at..].find("](").map(|i| at + i) {
        let rest = &page[opening + 2..];
        let Some(end) = rest.find(')') else { break };
        at = opening + 2;
        let target = &rest[..end];
        let Some(start) = page[..opening].rfind('[') else { continue };
        if target.starts_with("http") || !target.ends_with(".rs") {
            continue;
        }
        let text = &page[start + 1..opening];
        if let Some(name) = text.strip_prefix('`').and_then(|t| t.strip_suffix('`'))
            && !name.ends_with(".rs")
            && !target.ends_with(&format!("/{name}.rs"))
        {
            found.push((name, target));
        }
        let before = &page[..start];
        let Some(mut before) = before.strip_suffix(" in ").or_else(|| before.strip_suffix(" ("))
        else {
            continue;
        };
        while let Some(rest) = before.strip_suffix('`') {
            let Some(quote) = rest.rfind('`') else { break };
            found.push((&rest[quote + 1..], target));
            before = &rest[..quote];
            before = [" and ", ", "].iter().find_map(|j| before.strip_suffix(j)).unwrap_or("");
        }
    }
    found
}

#[test]
fn a_name_is_in_the_file_that_the_page_links_to() {
    let mut missing = Vec::new();
    for page in pages() {
        let from = root().join(&page);
        for (name, target) in placed_names(&prose(&read(&from))) {
            let file = from.parent().expect("a page is in a folder").join(target);
            // A link that leads nowhere is another test's.
            let Ok(text) = fs::read_to_string(&file) else { continue };
            let known: HashSet<&str> = words(&text).collect();
            if !words(name).all(|word| known.contains(word)) {
                missing.push(format!("{page}: {name} in {target}"));
            }
        }
    }
    assert!(missing.is_empty(), "the linked files have no such names: {missing:#?}");
}

fn unknown_names<'a>(page: &'a str, known: &HashSet<String>) -> Vec<&'a str> {
    page.split('`').skip(1).step_by(2).flat_map(words).filter(|w| !known.contains(*w)).collect()
}

#[test]
fn a_link_and_a_name_are_found() {
    let page =
        "See [`a`](stack/a.rs), [d] and [b](https://b.example).\n```\n](c)\n```\n[d]: d.md\n";
    assert_eq!(links(&prose(page)).collect::<Vec<_>>(), ["stack/a.rs", "d.md"]);
    assert_eq!(words("Shard::step(now, 3)").collect::<Vec<_>>(), ["Shard", "step", "now"]);
    let page =
        "`a`, `B::b` and `c` in [`x.rs`](x.rs); `d` is not. [`E`](y.rs) (`f` ([`z.rs`](z.rs)))";
    let placed = [("c", "x.rs"), ("B::b", "x.rs"), ("a", "x.rs"), ("E", "y.rs"), ("f", "z.rs")];
    assert_eq!(placed_names(page), placed);
}
