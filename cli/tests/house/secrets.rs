//! Secrets that can be guessed are for simulations: nothing in the product uses them.

use std::fs;
use std::path::Path;

/// Where they are made, and the door for simulations.
const ALLOWED: [&str; 2] = ["sockets/src/api/stack.rs", "stack/src/base/secrets.rs"];

/// Sources below a directory that name them outside of tests and models.
fn users(dir: &Path, crates: &Path, into: &mut Vec<String>) {
    for entry in fs::read_dir(dir).expect("a directory").filter_map(Result::ok) {
        let path = entry.path();
        if path.ends_with("models") || path.ends_with("models.rs") {
            continue;
        }
        if path.is_dir() {
            users(&path, crates, into);
        } else if path.extension().is_some_and(|x| x == "rs") && !path.ends_with("tests.rs") {
            let text = fs::read_to_string(&path).expect("a source");
            let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            if code.contains("for_simulation") {
                let name = path.strip_prefix(crates).expect("a path below").display();
                into.push(name.to_string());
            }
        }
    }
}

#[test]
fn only_simulations_have_secrets_that_can_be_guessed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for package in ["stack", "sockets", "tokio", "gateway", "cli"] {
        users(&root.join(package).join("src"), &root, &mut found);
    }
    found.sort();
    assert_eq!(found, ALLOWED);
}
