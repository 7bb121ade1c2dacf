//! The harnesses as property tests: every input of the corpus, and inputs drawn anew.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

/// The inputs kept for a harness.
fn corpus(of: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(of);
    let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    entries.map(|e| e.expect("an entry of the corpus").path()).collect()
}

fn replay(of: &str, harness: fn(&[u8])) {
    let inputs = corpus(of);
    assert!(inputs.len() >= 50, "the corpus of {of} has {} inputs", inputs.len());
    for path in inputs {
        let input = fs::read(&path).expect("an input of the corpus");
        // The name of the input that fails stands above the panic.
        let caught = std::panic::catch_unwind(|| harness(&input));
        if let Err(panic) = caught {
            eprintln!("the input that failed: {}", path.display());
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn the_corpus_of_the_parsers_breaks_nothing() {
    replay("parsers", fulmar_fuzz::parsers);
}

#[test]
fn the_corpus_of_the_stack_breaks_nothing() {
    replay("stack", fulmar_fuzz::stack);
}

#[test]
fn the_corpus_of_first_streams_breaks_nothing() {
    replay("first_stream", fulmar_fuzz::first_stream);
}

#[test]
fn the_corpus_of_first_datagrams_breaks_nothing() {
    replay("first_datagrams", fulmar_fuzz::first_datagrams);
}

#[test]
fn the_corpus_of_gateway_messages_breaks_nothing() {
    replay("gateway_messages", fulmar_fuzz::gateway_messages);
}

#[test]
fn the_corpus_of_policy_files_breaks_nothing() {
    replay("policy_file", fulmar_fuzz::policy_file);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parsers_withstand_arbitrary_bytes(input in proptest::collection::vec(any::<u8>(), 0..300)) {
        fulmar_fuzz::parsers(&input);
    }

    #[test]
    fn first_streams_withstand_arbitrary_bytes(input in proptest::collection::vec(any::<u8>(), 0..300)) {
        fulmar_fuzz::first_stream(&input);
    }

    #[test]
    fn first_datagrams_withstand_arbitrary_bytes(input in proptest::collection::vec(any::<u8>(), 0..600)) {
        fulmar_fuzz::first_datagrams(&input);
    }

    #[test]
    fn gateway_messages_withstand_arbitrary_bytes(input in proptest::collection::vec(any::<u8>(), 0..300)) {
        fulmar_fuzz::gateway_messages(&input);
    }

    #[test]
    fn policy_files_withstand_arbitrary_text(input in "\\PC{0,200}") {
        fulmar_fuzz::policy_file(input.as_bytes());
    }

    #[test]
    fn stacks_withstand_arbitrary_scripts(input in proptest::collection::vec(any::<u8>(), 0..2000)) {
        fulmar_fuzz::stack(&input);
    }
}
