//! Children of a bench: this program again, in another role, dead the moment we are.
//!
//! A kernel peer must be a process of its own (its CPU account, its namespace), so the program
//! re-executes itself: `PROGRAM lab-child SPEC`. The first statement of `main` is [`dispatch`]; in
//! a child it does not return. A child gets PR_SET_PDEATHSIG = SIGKILL before it runs, so that it
//! cannot outlive the *thread* that made it: make children on a thread that lives as long as they
//! should. Reports travel as one JSON object per line on the child's standard output.

use crate::egress::numbers;
use crate::gateway::idle;
use crate::send::shm;
use crate::serve::client;
use crate::wake::rig as wake;
use crate::{peer, recv, sys};
use fulmar_gateway::netns::Netns;
use serde_json::Value;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const ROLE: &str = "lab-child";

/// Runs the child's role and exits, if this process was started as a child; else returns at once.
pub fn dispatch() {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() != Some(ROLE) {
        return;
    }
    let spec = args.next().unwrap_or_default();
    let outcome = serde_json::from_str(&spec).map_err(io::Error::from).and_then(|s| serve(&s));
    if let Err(e) = outcome {
        eprintln!("fulmar-lab: the peer of the benchmark failed: {e}");
        std::process::exit(1);
    }
    std::process::exit(0);
}

fn serve(spec: &Value) -> io::Result<()> {
    match spec.get("role").and_then(Value::as_str) {
        Some(shm::ROLE) => shm::serve(spec),
        Some(recv::SHM_ROLE) => recv::serve(spec),
        Some(wake::ROLE) => wake::serve(spec),
        Some(client::ROLE) => client::serve(spec),
        Some(idle::ROLE) => idle::serve(spec),
        Some(numbers::ROLE) => numbers::serve(spec),
        _ => peer::serve(spec),
    }
}

/// A running child. Dropping it kills it.
pub struct Handle {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Handle {
    /// Starts a child with `spec`, in `netns`.
    pub fn spawn(spec: &Value, netns: &Netns) -> io::Result<Handle> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(ROLE).arg(spec.to_string()).stdin(Stdio::null()).stdout(Stdio::piped());
        sys::die_with_parent(&mut command, Some(netns.raw_fd()));
        let mut child = command.spawn()?;
        let out =
            child.stdout.take().ok_or_else(|| io::Error::other("the peer process has no pipe"))?;
        Ok(Handle { child, lines: BufReader::new(out) })
    }

    /// Its process id, for [`crate::cpu::process_cpu`].
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next report.
    ///
    /// # Errors
    /// TimedOut; UnexpectedEof when the child ended without a report (it said why on stderr).
    pub fn report(&mut self, timeout: Duration) -> io::Result<Value> {
        let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        if self.lines.buffer().is_empty() && !sys::wait_readable(self.lines.get_ref().as_fd(), ms)?
        {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the peer process did not report in time",
            ));
        }
        let mut line = String::new();
        if self.lines.read_line(&mut line)? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the peer process ended early",
            ));
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
