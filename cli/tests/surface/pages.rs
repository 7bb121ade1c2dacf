//! The pages that rustdoc makes of the libraries, each with the features that docs.rs shows.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

/// A library: its folder, its package, and its name as a crate.
pub struct Library {
    pub folder: &'static str,
    pub package: &'static str,
    pub name: &'static str,
}

const fn library(folder: &'static str, package: &'static str, name: &'static str) -> Library {
    Library { folder, package, name }
}

/// In the order of their dependencies: the links of a page lead to pages that exist when it is made.
pub const LIBRARIES: [Library; 3] = [
    library("stack", "fulmar-stack", "fulmar_stack"),
    library("sockets", "fulmar", "fulmar"),
    library("tokio", "fulmar-tokio", "fulmar_tokio"),
];

/// Features that are not for users.
pub const HIDDEN_FEATURES: [&str; 2] = ["internals", "fuzzing"];

/// A page of a library.
pub struct Page {
    pub path: PathBuf,
    /// The module of its item, such as `fulmar::stat`; of the page of a module that module.
    pub module: String,
    /// Its name without `.html`: `struct.Stat`, or `index`.
    pub name: String,
    pub html: String,
}

impl Page {
    /// Whether it only leads to another page: the item was in a private module.
    pub fn is_redirect(&self) -> bool {
        self.html.contains("http-equiv=\"refresh\"")
    }

    /// The kind of its item and the item; `None`: the page of a module, and lists.
    pub fn item(&self) -> Option<(&str, &str)> {
        self.name.split_once('.')
    }
}

/// The folder of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// The packages of the repository as cargo describes them.
pub fn packages() -> Vec<Value> {
    let made = cargo().args(["metadata", "--locked", "--no-deps", "--format-version=1"]).output();
    let text = made.expect("cargo runs").stdout;
    let mut all: Value = serde_json::from_slice(&text).expect("a document");
    match all["packages"].take() {
        Value::Array(packages) => packages,
        other => panic!("no packages: {other}"),
    }
}

/// The features with which docs.rs builds a package, beside the default ones.
pub fn features_of(package: &Value) -> Vec<String> {
    let named = package["metadata"]["docs"]["rs"]["features"].as_array();
    named.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Makes the pages once, and returns their folder. Each library has a call of its own, as on docs.rs: the features of one
/// library have no effect on another.
pub fn made() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let target = std::env::var_os("CARGO_TARGET_DIR");
        let target = target.map_or(root().join("target"), PathBuf::from);
        let packages = packages();
        for library in &LIBRARIES {
            let package = packages.iter().find(|p| p["name"] == library.package);
            let features = features_of(package.expect("a package of this name")).join(",");
            let made = cargo()
                .args(["doc", "--quiet", "--locked", "--no-deps", "-p", library.package])
                .args(["--features", &features, "--target-dir"])
                .arg(&target)
                .env("RUSTDOCFLAGS", "-D warnings")
                .status();
            assert!(made.expect("cargo runs").success(), "cargo doc of {} failed", library.package);
        }
        target.join("doc").canonicalize().expect("the pages are there")
    })
}

/// The pages of a library, in the order of their paths, without the lists of all items.
pub fn pages_of(library: &Library) -> Vec<Page> {
    let mut pages = Vec::new();
    walk(&made().join(library.name), library.name, &mut pages);
    assert!(pages.len() > 20, "{}: only {} pages", library.name, pages.len());
    pages
}

fn walk(folder: &Path, module: &str, pages: &mut Vec<Page>) {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            walk(&path, &format!("{module}::{name}"), pages);
            continue;
        }
        let Some(name) = name.strip_suffix(".html") else { continue };
        // Of a macro there are two pages.
        if ["all", "sidebar-items"].contains(&name) || name.ends_with('!') {
            continue;
        }
        let html = std::fs::read_to_string(&path).expect("a page");
        pages.push(Page { module: module.to_owned(), name: name.to_owned(), html, path });
    }
}
