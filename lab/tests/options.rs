//! Options that a command has no use for, or numbers that nothing can be done with, end it with a
//! sentence before anything is measured; none is passed over, none ends it by running out of memory.

use std::process::{Command, Output, Stdio};

fn fulmar(line: &str) -> Output {
    let words = line.split_whitespace();
    Command::new(env!("CARGO_BIN_EXE_fulmar-lab")).args(words).output().expect("it runs")
}

/// What it is refused with.
fn refusal(line: &str) -> String {
    let out = fulmar(line);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{line}: {said}");
    assert!(!said.contains("panicked") && !said.contains("backtrace"), "{line}: {said}");
    assert!(out.stdout.is_empty(), "{line}: it began");
    said
}

#[test]
fn numbers_out_of_bounds_are_answered_with_the_bounds() {
    for (line, bounds) in [
        ("bench recv --buffers 99999999", "from 1 to 16384"),
        ("bench recv --buffers 0", "from 1 to 16384"),
        ("bench recv --runs 0", "from 1 to 1000"),
        ("bench send --bytes 0", "from 1 to 16384"),
        ("bench send --buffer 99999999", "from 1 to 16384"),
        ("bench sendfile --bytes 99999999", "from 1 to 16384"),
        ("bench stream --runs 0", "from 1 to 1000"),
        ("bench udp --threads 99999", "from 1 to 64"),
        ("bench scale --sockets 99999999999", "from 1 to 4000000"),
        ("bench scale --connections 99999999", "from 0 to 400000"),
        ("bench scale --threads 0", "from 1 to 64"),
        ("bench trust --runs 0", "from 1 to 1000"),
        ("bench wake --rates 99999999999", "from 0 to 10000000"),
        ("reproduce sosend --runs 0", "from 1 to 1000"),
        ("bench recv --seconds 0", "more than 0 seconds"),
    ] {
        let said = refusal(line);
        assert!(said.contains(bounds), "{line}: {said}");
    }
}

#[test]
fn unsupported_options_of_a_command_are_refused() {
    for (line, option) in [
        ("reproduce path --placement same-cpu", "--placement"),
        ("reproduce path --pcap x", "--pcap"),
        ("reproduce profile --runs 3", "--runs"),
        ("path udp-send --stack kernel --threads 2", "--threads"),
        ("path --live --threads 2", "--threads"),
    ] {
        let said = refusal(line);
        assert!(said.contains(option), "{line}: {said}");
    }
}

#[test]
fn exclusive_options_are_in_the_help_and_the_usage_stays_whole() {
    for bench in ["stream", "send", "sendfile", "recv", "scale", "trust", "udp", "wake"] {
        let said = refusal(&format!("bench {bench} --quick --seconds 3"));
        assert!(said.contains(&format!("Usage: fulmar-lab bench {bench} [OPTIONS]")), "{said}");
        let help = fulmar(&format!("bench {bench} --help")).stdout;
        let help = String::from_utf8_lossy(&help).into_owned();
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("not with --seconds"), "{help}");
    }
}

#[test]
fn the_help_of_reproduce_lists_the_comparison_of_each_table() {
    let help = String::from_utf8_lossy(&fulmar("reproduce --help").stdout).into_owned();
    for table in ["sosend, sendfile  ", "placement  ", "path  ", "profile  "] {
        assert!(help.contains(table), "{table} is not in {help}");
    }
}

#[test]
fn reports_that_cannot_be_written_are_refused_before_anything_is_measured() {
    let missing = std::env::temp_dir().join("no-such-folder-of-fulmar").join("x.json");
    let missing = missing.display();
    for bench in ["bench recv", "bench scale", "path udp-send", "reproduce path"] {
        for option in ["--json", "--report"] {
            let said = refusal(&format!("{bench} {option} {missing}"));
            assert!(
                said.contains("cannot write") && said.contains("No such file"),
                "{bench}: {said}"
            );
        }
    }
    let said = refusal("bench udp --json x --report x");
    assert!(said.contains("the same file"), "{said}");
}

#[test]
fn a_closed_pipe_gives_a_sentence_without_a_panic() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulmar-lab"));
    let child = command.arg("reproduce").stdout(writer).stderr(Stdio::piped()).spawn();
    let out = child.expect("it runs").wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("Broken pipe") && !said.contains("panicked"), "{said}");
}
