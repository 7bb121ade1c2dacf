//! Reads the sources as the tests of the structure need them: rooms, and the modules that a file names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The path of a module. The first part is `crate` or the name of another crate.
pub type Module = Vec<String>;

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

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

/// The modules below `src` with their source, without unit tests and comments. The root is `crate`.
pub fn modules(src: &Path) -> BTreeMap<Module, String> {
    let mut files = Vec::new();
    files_below(src, &mut files);
    let module = |path: PathBuf| {
        let below = path.strip_prefix(src).expect("below src").with_extension("");
        let parts = below.iter().map(|part| part.to_string_lossy().into_owned());
        let parts = parts.filter(|part| !["mod", "lib", "main"].contains(&part.as_str()));
        let module = std::iter::once("crate".to_owned()).chain(parts).collect();
        let source = std::fs::read_to_string(&path).expect("a source file");
        (module, without_tests(&source))
    };
    let mut modules: BTreeMap<Module, String> = BTreeMap::new();
    for (module, source) in files.into_iter().map(module) {
        *modules.entry(module).or_default() += &source;
    }
    modules
}

pub fn without_tests(source: &str) -> String {
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

/// The modules that a file names by `use` or by a path. `self` and `super` are resolved; other paths stay as they are.
pub fn named(own: &Module, source: &str) -> Vec<Module> {
    let mut paths = Vec::new();
    for statement in source.split(';') {
        let Some((_, tree)) = statement.rsplit_once("use ") else { continue };
        let tree: String = tree.split_whitespace().collect();
        paths.extend(each_path(&tree));
    }
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let words = source.split(|c| !is_path(c)).filter(|w| w.contains("::"));
    paths.extend(words.map(str::to_owned));
    paths.iter().map(|path| resolved(own, path)).collect()
}

fn resolved(own: &Module, path: &str) -> Module {
    let mut module = Module::new();
    for (at, part) in path.split("::").filter(|p| !p.is_empty()).enumerate() {
        match part {
            "self" if at == 0 => module = own.clone(),
            "super" if at == 0 => module = own[..own.len() - 1].to_vec(),
            "super" => drop(module.pop()),
            name => module.push(name.to_owned()),
        }
    }
    module
}
