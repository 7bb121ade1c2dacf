//! Guests of a gateway, and gateways that are left behind.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::FULMAR;
use crate::support::{PATIENCE, text};

/// A process in a network namespace of its own, which is gone with the value.
pub struct Guest(pub Child);

impl Guest {
    pub fn new() -> Guest {
        let mut command = Command::new("unshare");
        // It says when it is there.
        command.args(["--net", "sh", "-c", "echo; exec sleep 1000"]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("unshare(1)");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "\n");
        Guest(child)
    }

    pub fn pid(&self) -> String {
        self.0.id().to_string()
    }

    pub fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// What a command prints in the guest's namespace.
    pub fn see(&self, command: &str) -> String {
        let inside = ["-t", &self.pid(), "-n", "sh", "-c", command];
        let output = Command::new("nsenter").args(inside).output().expect("nsenter(1)");
        text(&output.stdout)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.end();
    }
}

/// A name in the temporary directory, of which nothing is left at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("fulmar-gateway-{}-{name}", std::process::id())))
    }

    pub fn text(&self) -> String {
        self.0.display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
        let _ = fs::remove_dir(&self.0);
    }
}

pub fn pasta(arguments: &[&str]) -> Output {
    Command::new(FULMAR).arg("--pasta").args(arguments).output().expect("it starts")
}

/// Starts a detached gateway; returns its process id.
pub fn detached(arguments: &[&str]) -> u32 {
    let file = Scratch::new("pid");
    let output = pasta(&[&["-P", &file.text()], arguments].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr) + &text(&output.stdout), "", "it has nothing to say");
    let pid: u32 = fs::read_to_string(&file.0).unwrap().trim().parse().unwrap();
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/comm")).unwrap(), "pasta\n");
    pid
}

pub fn is_running(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie has ended: who reaps orphans here does not matter.
    state.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}
