//! Our own scripts, by stock packetdrill where `PACKETDRILL` names it.

use std::fs;
use std::path::{Path, PathBuf};

use fulmar_packetdrill::suite;

fn scripts() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    let entries = fs::read_dir(dir).expect("the scripts").map(|e| e.expect("an entry").path());
    let mut scripts: Vec<_> =
        entries.filter(|p| p.extension().is_some_and(|e| e == "pkt")).collect();
    scripts.sort();
    scripts
}

#[test]
fn every_script_says_which_rule_it_plays() {
    for path in scripts() {
        let text = fs::read_to_string(&path).expect("a script");
        let first = text.lines().next().unwrap_or("");
        let names_a_rule = ["RFC ", "(7)", "virtual clock"].iter().any(|w| first.contains(w));
        assert!(first.starts_with("// ") && names_a_rule, "{}: {first}", path.display());
    }
}

/// `libfulmar_packetdrill.so`, which cargo builds beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    test.with_file_name("libfulmar_packetdrill.so")
}

#[test]
fn every_script_passes_under_stock_packetdrill() {
    let Some(program) = std::env::var_os("PACKETDRILL") else {
        println!(
            "skipped: PACKETDRILL does not name a packetdrill; `make conformance` fetches and builds one"
        );
        return;
    };
    let place = suite::Place { program: program.into(), library: library(), only: String::new() };
    let own = suite::by_name("own").expect("the suite");
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    assert_eq!(suite::run_all(&place, &[(own, dir)]), Ok(true));
}
