//! The links of the pages.

use std::collections::HashMap;
use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

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
    let has_scheme = href.split_once(':').is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric())
    });
    has_scheme || OF_RUSTDOC.iter().any(|own| href.contains(own))
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

/// The ids of the pages that were read.
#[derive(Default)]
struct Ids(HashMap<PathBuf, Option<HashSet<String>>>);

impl Ids {
    /// Those of a page. `None`: there is no such file.
    fn of(&mut self, path: &Path) -> Option<&HashSet<String>> {
        let read = || {
            let html = std::fs::read_to_string(path).ok()?;
            Some(values(&html, "id").map(str::to_owned).collect())
        };
        self.0.entry(path.to_owned()).or_insert_with(read).as_ref()
    }
}

/// Whether a link of a page leads to a place that exists.
fn is_alive(page: &Path, href: &str, ids: &mut Ids) -> bool {
    let (file, id) = href.split_once('#').unwrap_or((href, ""));
    let folder = page.parent().unwrap_or(page);
    let target = if file.is_empty() { page.to_owned() } else { resolved(&folder.join(file)) };
    let Some(found) = ids.of(&target) else { return false };
    // The lines of a source are found by a script.
    let is_source = target.starts_with(made().join("src"));
    id.is_empty() || is_source || found.contains(id)
}

#[test]
fn every_link_of_a_page_leads_to_a_place() {
    let (mut ids, mut dead, mut count) = (Ids::default(), Vec::new(), 0);
    for page in LIBRARIES.iter().flat_map(pages_of) {
        for href in values(&page.html, "href").filter(|href| !is_foreign(href)) {
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
    assert!(!is_alive("struct.None.html"));
    assert!(!is_alive("#none"));
    assert!(is_foreign("https://docs.rs") && is_foreign("../static.files/a.css"));
    assert!(!is_foreign("../fulmar/struct.Stack.html#impl-From%3Ca::B%3E-for-C"));
}
