//! Runs the command under test, inside a sandbox of its own where the kernel's side is needed.
//!
//! A test starts itself again inside `sandbox`, where `fulmar0` and the kernel's 10.77.0.1 and fd77::1 are.
//! Where the system forbids sandboxes the test says so and passes, or fails under
//! FULMAR_REQUIRE_KERNEL_TESTS=1.

use crate::FULMAR;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const INSIDE: &str = "FULMAR_TEST_INSIDE";
const REQUIRED: &str = "FULMAR_REQUIRE_KERNEL_TESTS";
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the body of a test inside a sandbox, by running that test alone there.
pub fn in_sandbox<F: Fn()>(body: F) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let name = test_of::<F>();
    let probe = Command::new(FULMAR).args(["sandbox", "--", "true"]).output().expect("it starts");
    if !probe.status.success() {
        return skip(name, &String::from_utf8_lossy(&probe.stderr));
    }
    let status = Command::new(FULMAR)
        .args(["sandbox", "--"])
        .arg(std::env::current_exe().expect("a path"))
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .expect("it starts");
    assert!(status.success(), "{name} failed inside the sandbox");
}

/// The test in which a closure of type `F` stands, as the harness names it: of `command::nat::the_test::{{closure}}`
/// `nat::the_test`.
pub fn test_of<F>() -> &'static str {
    let path = std::any::type_name::<F>();
    let (_, path) = path.split_once("::").expect("a path through the test");
    path.split_once("::{{").map_or(path, |(test, _)| test)
}

/// Says aloud that a test did not run; the harness does not capture this writer.
pub fn skip(name: &str, why: &str) {
    assert!(std::env::var_os(REQUIRED).is_none(), "{name} must not be skipped: {why}");
    let _ = writeln!(io::stderr(), "SKIPPED {name}: {}", why.trim());
}

pub fn fulmar(arguments: &str) -> Command {
    let mut command = Command::new(FULMAR);
    command.args(arguments.split_whitespace());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command to its end with this standard input.
pub fn run_with(arguments: &str, input: &[u8]) -> Output {
    let mut child = fulmar(arguments).spawn().expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let input = input.to_vec();
    let writer = thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().expect("it ends");
    let _ = writer.join().expect("the writer ends");
    output
}

pub fn run(arguments: &str) -> Output {
    run_with(arguments, b"")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Fails with both outputs unless the command ended well.
pub fn assert_success(output: &Output) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{:?}\n{out}\n{err}", output.status);
}

/// Waits until the command ends, or kills it and fails.
pub fn wait(mut child: Child) -> Output {
    let started = Instant::now();
    while child.try_wait().expect("a state").is_none() {
        if started.elapsed() > PATIENCE {
            let _ = child.kill();
            let output = child.wait_with_output().expect("its output");
            panic!("it did not end: {}", text(&output.stderr));
        }
        thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("its output")
}

/// A program of another project to compare with: of `scripts/setup peers`, or installed.
pub fn peer(name: &str) -> Option<PathBuf> {
    let target = Path::new(FULMAR).parent()?.parent()?;
    let unpacked = target.join("peers/bin").join(name);
    let path = std::env::var_os("PATH")?;
    let installed = std::env::split_paths(&path).map(|folder| folder.join(name));
    [unpacked].into_iter().chain(installed).find(|file| file.is_file())
}
