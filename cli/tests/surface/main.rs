//! The public items of the libraries, each in a line of `api.txt` of its package: a change of the surface is a change of
//! that file. `FULMAR_UPDATE=1 cargo test -p fulmar-cli --test surface` writes it.
//!
//! They are read from the pages that rustdoc makes, which every toolchain has, and are what a user sees: items that are
//! hidden there are not in the list.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folders of the libraries, and their names as crates.
const LIBRARIES: [(&str, &str); 3] =
    [("stack", "fulmar_stack"), ("sockets", "fulmar"), ("tokio", "fulmar_tokio")];

/// The parts of a page that are about all types or repeat others; they are last.
const ENDS: [&str; 4] = [
    "<h2 id=\"synthetic-implementations",
    "<h2 id=\"implementors",
    "<h2 id=\"foreign-impls",
    "<h2 id=\"aliased-type",
];

/// The starts of paths that a user cannot write.
const INNER: [&str; 2] = ["crate::", "super::"];

/// The starts of the names that rustdoc gives to declarations on a page.
const DECLARATIONS: [&str; 8] = [
    "method.",
    "tymethod.",
    "associatedconstant.",
    "associatedtype.",
    "structfield.",
    "variant.",
    "reexport.",
    "impl-",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Makes the pages, and returns their folder.
fn pages() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root().join("target"), PathBuf::from);
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    // Without the packages that need the feature `internals`.
    let made = Command::new(cargo)
        .args(["doc", "--quiet", "--locked", "--no-deps"])
        .args(["-p", "fulmar-stack", "-p", "fulmar", "-p", "fulmar-tokio", "--target-dir"])
        .arg(&target)
        .env("RUSTDOCFLAGS", "-D warnings")
        .current_dir(root())
        .status();
    assert!(made.expect("cargo runs").success(), "cargo doc failed");
    target.join("doc")
}

/// The text of a piece of a page.
fn text(html: &str) -> String {
    let without_notes = html.split("<a href=\"#\" class=\"tooltip\"").next().unwrap_or_default();
    let (mut text, mut is_tag) = (String::new(), false);
    for c in without_notes.chars() {
        match c {
            '<' => is_tag = true,
            // A tag may stand for the end of a line.
            '>' if is_tag => is_tag = false,
            c if !is_tag => text.push(c),
            _ => {}
        }
    }
    let marks = [
        ("&nbsp;", " "),
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ];
    let text = marks.iter().fold(text, |text, (from, to)| text.replace(from, to));
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What is between the first `start` and the next `end`.
fn between<'a>(html: &'a str, start: &str, end: &str) -> Option<&'a str> {
    html.split_once(start)?.1.split_once(end).map(|(found, _)| found)
}

/// The declarations of a page, in its order.
fn declarations(page: &str) -> Vec<String> {
    let end = ENDS.iter().filter_map(|end| page.find(end)).min().unwrap_or(page.len());
    let page = page[..end].replace("<div class=\"where\">", " ");
    // Methods of the target of `Deref` have lines of their own.
    let page =
        match (page.find("<h2 id=\"deref-methods"), page.find("<h2 id=\"trait-implementations")) {
            (Some(from), Some(to)) if from < to => page[..from].to_owned() + &page[to..],
            _ => page,
        };
    let item = between(&page, "<pre class=\"rust item-decl\"><code>", "</code></pre>");
    let mut found: Vec<String> =
        item.map(|item| head(&text(&item.replace("</div>", " ")))).into_iter().collect();
    for part in page.split(" id=\"").skip(1) {
        let Some((name, rest)) = part.split_once('"') else { continue };
        let tag = rest.split('>').next().unwrap_or_default();
        if tag.contains("trait-impl") || !DECLARATIONS.iter().any(|start| name.starts_with(start)) {
            continue;
        }
        let code =
            between(rest, "code-header\">", "</h").or_else(|| between(rest, "<code>", "</code>"));
        let code = code.map(text).unwrap_or_default();
        let is_inherent = name.starts_with("impl-") && !name.contains("-for-");
        if !code.is_empty() && !is_inherent {
            found.push(code);
        }
    }
    found
}

/// The declaration of a type without its parts, which have lines of their own.
fn head(declaration: &str) -> String {
    let is_of_parts = ["struct ", "enum ", "union ", "trait "];
    match declaration.split_once('{') {
        Some((head, _)) if is_of_parts.iter().any(|kind| declaration.contains(kind)) => {
            head.trim().to_owned()
        }
        _ => declaration.to_owned(),
    }
}

/// The lines of the pages in a folder and below it. `module`: its path.
fn lines_below(folder: &Path, module: &str, lines: &mut Vec<String>) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            lines_below(&path, &format!("{module}::{name}"), lines);
            continue;
        }
        let Some(name) = name.strip_suffix(".html") else { continue };
        // Of a macro there are two pages.
        if ["all", "sidebar-items"].contains(&name) || name.ends_with('!') {
            continue;
        }
        let page = std::fs::read_to_string(&path).expect("a page");
        // Of a private place there is a page that leads to the public one.
        if page.contains("http-equiv=\"refresh\"") {
            continue;
        }
        let links = page.split("<code>").skip(1);
        let inner = links.filter(|text| INNER.iter().any(|start| text.starts_with(start)));
        let inner: Vec<&str> = inner.filter_map(|text| text.split('<').next()).collect();
        assert!(inner.is_empty(), "{} shows inner paths: {inner:?}", path.display());
        let place = match name.split_once('.') {
            Some((_, item)) => format!("{module}::{item}"),
            None => {
                lines.push(format!("{module}: module"));
                module.to_owned()
            }
        };
        lines.extend(declarations(&page).into_iter().map(|line| format!("{place}: {line}")));
    }
}

/// The lines that only one of the two has, each with its sign.
fn difference(kept: &str, found: &str) -> String {
    let only = |sign: char, of: &str, other: &str| -> Vec<String> {
        let other: std::collections::HashSet<&str> = other.lines().collect();
        of.lines()
            .filter(|line| !other.contains(line))
            .map(|line| format!("{sign} {line}"))
            .collect()
    };
    [only('-', kept, found), only('+', found, kept)].concat().join("\n")
}

#[test]
fn every_public_item_is_in_the_list_of_its_package() {
    let pages = pages();
    let mut changed = String::new();
    for (folder, library) in LIBRARIES {
        let mut lines = Vec::new();
        lines_below(&pages.join(library), library, &mut lines);
        assert!(lines.len() > 50, "{library}: only {} lines are read from its pages", lines.len());
        let found = lines.join("\n") + "\n";
        let file = root().join(folder).join("api.txt");
        if std::env::var_os("FULMAR_UPDATE").is_some() {
            std::fs::write(&file, &found).expect("the list is written");
        }
        let kept = std::fs::read_to_string(&file).unwrap_or_default();
        if kept != found {
            changed += &format!("{folder}/api.txt:\n{}\n", difference(&kept, &found));
        }
    }
    assert!(
        changed.is_empty(),
        "the public items are not those of the lists; if the change is meant: \
         FULMAR_UPDATE=1 cargo test -p fulmar-cli --test surface\n{changed}"
    );
}

#[test]
fn the_declarations_of_a_page_are_read() {
    let page = "<pre class=\"rust item-decl\"><code><div class=\"code-attribute\">#[non_exhaustive]</div>pub struct \
        A {\n    pub f: <a href=\"x\">u8</a>,\n}</code></pre><span id=\"structfield.f\" class=\"structfield\">\
        <code>f: <a>u8</a></code></span><section id=\"impl-A\" class=\"impl\"><h3 class=\"code-header\">impl A</h3>\
        </section><section id=\"method.b\" class=\"method\"><h4 class=\"code-header\">pub fn <a>b</a>() -&gt; \
        <a>Vec</a>&lt;u8&gt; <a href=\"#\" class=\"tooltip\">i</a></h4></section><section id=\"impl-Clone-for-A\">\
        <h3 class=\"code-header\">impl Clone for A</h3></section><section id=\"method.clone\" class=\"method \
        trait-impl\"><h4 class=\"code-header\">fn clone(&amp;self)</h4></section>\
        <h2 id=\"synthetic-implementations\"><section id=\"impl-Send-for-A\"><h3 class=\"code-header\">impl Send for \
        A</h3></section>";
    let expected =
        ["#[non_exhaustive] pub struct A", "f: u8", "pub fn b() -> Vec<u8>", "impl Clone for A"];
    assert_eq!(declarations(page), expected);
}
