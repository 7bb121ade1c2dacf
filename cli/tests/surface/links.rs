//! The links of the pages.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path, PathBuf};

use crate::between;
use crate::pages::{LIBRARIES, made, pages_of};

/// What rustdoc makes for all libraries together; a link to it is not one of the libraries.
const OF_RUSTDOC: [&str; 4] = ["static.files/", "search.html", "settings.html", "help.html"];

/// The values of an attribute of all tags.
fn values<'a>(html: &'a str, attribute: &str) -> impl Iterator<Item = &'a str> {
    let start = format!(" {attribute}=\"");
    let mut rest = html;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(&start)?;
        let (value, after) = after.split_once('"')?;
        rest = after;
        Some(value)
    })
}

/// Whether a link leads to a page of rustdoc's own, or away from this machine.
fn is_foreign(href: &str) -> bool {
    // rustdoc writes the path of an item that it does not find as it is: `crate::Type`.
    let has_scheme = href.split_once(':').is_some_and(|(scheme, rest)| {
        !scheme.is_empty()
            && scheme.chars().all(|c| c.is_ascii_alphanumeric())
            && !rest.starts_with(':')
    });
    // Of tokio's text for a method of its trait.
    let is_of_tokio = href.starts_with("AsyncWrite::");
    has_scheme || is_of_tokio || OF_RUSTDOC.iter().any(|own| href.contains(own))
}

/// The path without `..`.
fn resolved(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts
}

/// The file that a link of a page leads to.
fn target(page: &Path, file: &str) -> PathBuf {
    let folder = page.parent().unwrap_or(page);
    if file.is_empty() { page.to_owned() } else { resolved(&folder.join(file)) }
}

/// The ids of the pages that were read.
#[derive(Default)]
struct Ids(HashMap<PathBuf, Option<HashSet<String>>>);

impl Ids {
    /// The ids of a page, and of the page that it leads to by itself. `None`: the file does not exist.
    fn of(&mut self, path: &Path) -> Option<&HashSet<String>> {
        let read = || {
            let mut html = std::fs::read_to_string(path).ok()?;
            if let Some(next) = between(&html, "content=\"0;URL=", "\"") {
                html = std::fs::read_to_string(target(path, next)).ok()?;
            }
            Some(values(&html, "id").map(str::to_owned).collect())
        };
        self.0.entry(path.to_owned()).or_insert_with(read).as_ref()
    }
}

/// The part of a page whose links are the library's: the implementations for all types have the texts of other
/// libraries, which rustdoc copies with their links.
fn own_part(html: &str) -> &str {
    html.split("<h2 id=\"blanket-implementations\"").next().unwrap_or(html)
}

/// Whether a link of a page leads to a place that exists.
fn is_alive(page: &Path, href: &str, ids: &mut Ids) -> bool {
    let (file, id) = href.split_once('#').unwrap_or((href, ""));
    let target = target(page, file);
    let Some(found) = ids.of(&target) else { return false };
    // The lines of a source are found by a script.
    let is_source = target.starts_with(made().join("src"));
    id.is_empty() || is_source || found.contains(id)
}

#[test]
fn every_link_of_a_page_leads_to_a_place() {
    let (mut ids, mut dead, mut count) = (Ids::default(), Vec::new(), 0);
    for page in LIBRARIES.iter().flat_map(pages_of) {
        for href in values(own_part(&page.html), "href").filter(|href| !is_foreign(href)) {
            count += 1;
            if !is_alive(&page.path, href, &mut ids) {
                dead.push(format!("{}::{}: {href}", page.module, page.name));
            }
        }
    }
    assert!(count > 10_000, "only {count} links are read from the pages");
    assert!(dead.is_empty(), "{} dead links:\n{}", dead.len(), dead.join("\n"));
}

#[test]
fn a_link_to_nowhere_is_dead() {
    let page = made().join("fulmar/index.html");
    let is_alive = |href| is_alive(&page, href, &mut Ids::default());
    assert!(is_alive("struct.Stack.html#method.builder") && is_alive("#structs") && is_alive("#"));
    assert!(!is_alive("struct.Stack.html#method.none"));
    // A private place leads to the public one.
    assert!(is_alive("api/stack/struct.Stack.html#method.builder"));
    assert!(!is_alive("api/stack/struct.Stack.html#method.none"));
    assert!(!is_alive("struct.None.html"));
    assert!(!is_alive("#none"));
    assert!(is_foreign("https://docs.rs") && is_foreign("../static.files/a.css"));
    assert!(!is_foreign("crate::shard::Shard"));
    assert!(!is_foreign("../fulmar/struct.Stack.html#impl-From%3Ca::B%3E-for-C"));
}
