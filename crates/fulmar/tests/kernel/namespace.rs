//! Runs a test in a network namespace of its own, by starting the test program again in one.

use std::io::Write;
use std::process::Command;

const INSIDE: &str = "FULMAR_INSIDE_NAMESPACE";
const REQUIRE: &str = "FULMAR_REQUIRE_KERNEL_TESTS";
const TUN: &str = "/dev/net/tun";

/// Runs `body` in a fresh network namespace. `here` is the path of a function inside the test.
pub fn run(here: &str, body: fn()) {
    // `kernel::tcp::the_test::here`, of which the harness knows `tcp::the_test`.
    let path: Vec<&str> = here.split("::").filter(|p| *p != "here").skip(1).collect();
    let test = &path.join("::");
    if std::env::var_os(INSIDE).is_some() {
        ip("link set lo up");
        return crate::support::within(body);
    }
    let Some(arguments) = ["-n", "-Urn"].into_iter().find(|a| is_allowed(a)) else {
        return skip(test, "no right to create a network namespace (`unshare -n`, `unshare -Urn`)");
    };
    if let Err(e) = std::fs::OpenOptions::new().read(true).write(true).open(TUN) {
        return skip(test, &format!("cannot open {TUN}: {e}"));
    }
    let program = std::env::current_exe().expect("the test program has a path");
    let status = Command::new("unshare")
        .arg(arguments)
        .arg(program)
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .status()
        .expect("unshare ran a moment ago");
    assert!(status.success(), "{test} failed in its namespace: {status}");
}

fn is_allowed(arguments: &str) -> bool {
    Command::new("unshare").args([arguments, "true"]).output().is_ok_and(|o| o.status.success())
}

fn skip(test: &str, why: &str) {
    assert!(std::env::var_os(REQUIRE).is_none(), "{test} cannot run: {why}");
    // Not `eprintln`: the test harness hides what a passing test prints by it.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// Runs `ip` with these words; returns what it printed.
pub fn ip(words: &str) -> String {
    command("ip", words)
}

/// Runs a program with these words; returns what it printed.
pub fn command(program: &str, words: &str) -> String {
    let output = Command::new(program)
        .args(words.split_whitespace())
        .output()
        .unwrap_or_else(|e| panic!("{program} (iproute2) is needed: {e}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
