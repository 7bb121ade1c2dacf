//! What users see of the libraries: the pages that rustdoc makes, which every toolchain has.
//!
//! Each public item is a line of `api.txt` of its package: a change of the surface is a change of that file.
//! `FULMAR_UPDATE=1 cargo test -p fulmar-cli --test surface` writes it. Items that are hidden on the pages are not in the
//! list. Each type has an example, and each link leads to a place.

mod links;
mod pages;

use pages::{HIDDEN_FEATURES, LIBRARIES, Library, Page, features_of, packages, pages_of, root};

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

/// The lines of the pages of a library.
fn lines_of(library: &Library) -> Vec<String> {
    let mut lines = Vec::new();
    for page in pages_of(library).iter().filter(|page| !page.is_redirect()) {
        let links = page.html.split("<code>").skip(1);
        let inner = links.filter(|text| INNER.iter().any(|start| text.starts_with(start)));
        let inner: Vec<&str> = inner.filter_map(|text| text.split('<').next()).collect();
        assert!(inner.is_empty(), "{} shows inner paths: {inner:?}", page.path.display());
        let place = match page.item() {
            Some((_, item)) => format!("{}::{item}", page.module),
            None => {
                lines.push(format!("{}: module", page.module));
                page.module.clone()
            }
        };
        lines.extend(declarations(&page.html).into_iter().map(|line| format!("{place}: {line}")));
    }
    lines
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
    let mut changed = String::new();
    for library in &LIBRARIES {
        let (lines, folder) = (lines_of(library), library.folder);
        assert!(lines.len() > 50, "{folder}: only {} lines are read from its pages", lines.len());
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

/// Whether the text about the item of a page has an example. Examples of its methods do not count.
fn has_example(html: &str) -> bool {
    let about = between(html, "<details class=\"toggle top-doc\"", "</details>");
    about.is_some_and(|about| about.contains("rust-example-rendered"))
}

/// Whether a page has to have an example: that of a type, a trait, or a function for programs.
fn needs_example(page: &Page) -> bool {
    match page.item() {
        Some(("struct" | "enum" | "trait", _)) => true,
        Some(("fn", _)) => ["fulmar::devices", "fulmar_tokio"].contains(&page.module.as_str()),
        _ => false,
    }
}

#[test]
fn every_type_has_an_example() {
    let libraries = LIBRARIES.iter().filter(|library| library.name != "fulmar_stack");
    let pages = libraries.flat_map(pages_of).filter(|page| !page.is_redirect());
    let pages: Vec<Page> = pages.filter(needs_example).collect();
    assert!(pages.len() > 100, "only {} types are found", pages.len());
    let without: Vec<String> = pages
        .iter()
        .filter(|page| !has_example(&page.html))
        .map(|page| format!("{}::{}", page.module, page.name))
        .collect();
    assert!(without.is_empty(), "{} without an example:\n{}", without.len(), without.join("\n"));
}

#[test]
fn an_example_of_a_method_is_not_one_of_the_type() {
    let example = "<div class=\"example-wrap\"><pre class=\"rust rust-example-rendered\">";
    let about = "<details class=\"toggle top-doc\" open><summary>";
    assert!(has_example(&format!("{about}text{example}</details><h2>Methods</h2>")));
    assert!(!has_example(&format!("{about}text</details><h2>Methods</h2>{example}")));
    assert!(!has_example(example));
}

#[test]
fn docs_rs_shows_every_feature_for_users() {
    for package in packages() {
        let (shown, name) = (features_of(&package), &package["name"]);
        let features = package["features"].as_object().expect("a table");
        let is_public = |feature: &&String| {
            let is_default = package["features"]["default"].as_array();
            let is_default = is_default.into_iter().flatten().any(|one| one == feature.as_str());
            *feature != "default" && !is_default && !HIDDEN_FEATURES.contains(&feature.as_str())
        };
        if package["publish"].is_null() {
            let expected: Vec<&String> = features.keys().filter(is_public).collect();
            let mut shown: Vec<&String> = shown.iter().collect();
            shown.sort();
            assert_eq!(shown, expected, "{name}: package.metadata.docs.rs");
        }
    }
}
