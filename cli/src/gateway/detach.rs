//! The processes of a gateway. The command executes itself again; a variable says which process it is:
//!
//! ```text
//! the command ── an existing guest ──────────────────────────────► Serve: the gateway
//!      │                                                            │ "ready" on standard output, then detached
//!      │  a program                                                 ▼
//!      ├──► Attach(pid): waits for a line, then ──► Watch(pid) ──► Serve
//!      ├─ makes namespaces, writes that line, waits for the end of Attach
//!      └─ becomes the program
//! ```
//!
//! Each Serve starts a Follow ([`follow`](super::follow)), and with a policy file a ReadPolicy
//! ([`reload`](super::reload)), before it leaves the host's namespaces.
//!
//! So the program has the process id, the terminal, the parent and the signals of the command, and neither the gateway
//! nor its watcher ([`watch`](super::watch)) is a child of it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::plan::Guest;
use super::stderr::{StderrRelay, Woken};
use super::wait;
use crate::exec;
use crate::failure::{During, Failure, Outcome};

/// The variable that says which process this is.
const VARIABLE: &str = "FULMAR_GATEWAY_PROCESS";
const READY: &str = "ready\n";
const GO: &[u8] = b"go\n";
const MAX_LINE_BYTES: u64 = 64;

/// The process of a gateway that this process is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Process {
    /// The one that the user started.
    Command,
    /// Waits until the process has made its namespaces, then starts the gateway.
    Attach(u32),
    /// Starts the gateway of this process, and tells the program if the gateway exits first.
    Watch(u32),
    /// Follows the host's network for a gateway.
    Follow,
    /// Reads the policy file for a gateway.
    ReadPolicy,
    /// The gateway, for this process or for the guest that the options name.
    Serve(Option<u32>),
}

impl Process {
    /// Which process this is.
    pub fn current() -> Process {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        let (word, pid) = text.split_once(' ').unwrap_or((&text, ""));
        match (word, pid.parse()) {
            ("attach", Ok(pid)) => Process::Attach(pid),
            ("watch", Ok(pid)) => Process::Watch(pid),
            ("follow", _) => Process::Follow,
            ("policy", _) => Process::ReadPolicy,
            ("serve", pid) => Process::Serve(pid.ok()),
            _ => Process::Command,
        }
    }

    fn variable(self) -> String {
        match self {
            Process::Command => String::new(),
            Process::Attach(pid) => format!("attach {pid}"),
            Process::Watch(pid) => format!("watch {pid}"),
            Process::Follow => "follow".into(),
            Process::ReadPolicy => "policy".into(),
            Process::Serve(Some(pid)) => format!("serve {pid}"),
            Process::Serve(None) => "serve".into(),
        }
    }

    /// This command with the same arguments, as another process.
    fn command(self) -> Command {
        let mut arguments = std::env::args_os();
        let name = arguments.next().unwrap_or_else(|| OsString::from("fulmar"));
        let mut command = Command::new("/proc/self/exe");
        command.arg0(name).args(arguments).env(VARIABLE, self.variable());
        command
    }
}

fn spawn(command: &mut Command) -> Outcome<Child> {
    command.spawn().during("cannot start the gateway's process")
}

/// Starts the gateway, or the process that starts and watches it, and waits until the network is up. The inner `Err` is
/// the status of one that has failed and has said why.
pub fn start(process: Process) -> Outcome<Result<Child, u8>> {
    let mut command = process.command();
    let mut child = spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        let _ = BufReader::new(out.take(MAX_LINE_BYTES)).read_line(&mut line);
    }
    if line == READY { Ok(Ok(child)) } else { status_of(&mut child).map(Err) }
}

/// Starts the process that follows the host's network. Returns the pipe from it.
pub fn start_follower() -> Outcome<OwnedFd> {
    let mut command = Process::Follow.command();
    // A reader of the gateway's streams to their end does not wait for it.
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = spawn(command.env_remove(wait::VARIABLE))?;
    let no_pipe = || Failure::new("cannot start the gateway's process: no output pipe");
    child.stdout.take().map(OwnedFd::from).ok_or_else(no_pipe)
}

/// Starts the process that reads the policy file. Returns the pipes to it and from it.
pub fn start_policy_reader() -> Outcome<(OwnedFd, OwnedFd)> {
    let mut command = Process::ReadPolicy.command();
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = spawn(command.env_remove(wait::VARIABLE))?;
    match (child.stdin.take(), child.stdout.take()) {
        (Some(ask), Some(answers)) => Ok((ask.into(), answers.into())),
        _ => Err(Failure::new("cannot start the gateway's process: no pipe")),
    }
}

/// A gateway whose standard error is a pipe.
pub struct WithStderr {
    pub gateway: Child,
    pub stderr: StderrRelay,
}

/// As [`start`]; the gateway's standard error is copied from its start on.
pub fn start_with_stderr(process: Process) -> Outcome<Result<WithStderr, u8>> {
    let mut command = process.command();
    let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut gateway = spawn(piped)?;
    let (Some(out), Some(err)) = (gateway.stdout.take(), gateway.stderr.take()) else {
        unreachable!("invariant: both are pipes")
    };
    let started = StderrRelay::to_stderr(err).and_then(|mut stderr| {
        let line = first_line(out, &mut stderr)?;
        Ok((stderr, line))
    });
    let (mut stderr, line) = started.during("cannot forward the gateway's messages")?;
    if line == READY.as_bytes() {
        return Ok(Ok(WithStderr { gateway, stderr }));
    }
    let rest = stderr.finish();
    rest.during("cannot forward the gateway's messages")?;
    status_of(&mut gateway).map(Err)
}

/// Reads the first line, or a part of it before the end of the stream, and copies standard error meanwhile.
fn first_line(mut out: impl Read + AsFd, stderr: &mut StderrRelay) -> io::Result<Vec<u8>> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while (line.len() as u64) < MAX_LINE_BYTES && !line.ends_with(b"\n") {
        match stderr.turn(Some(out.as_fd()))? {
            Woken::Output => {}
            // A process that has exited has closed standard output, too: the read does not block.
            Woken::Other | Woken::Closed if out.read(&mut byte)? == 0 => break,
            Woken::Other | Woken::Closed => line.extend(byte),
        }
    }
    Ok(line)
}

/// The status of a process that exits because it has failed: not 0.
fn status_of(child: &mut Child) -> Outcome<u8> {
    let status = child.wait().during("cannot wait for the gateway's process")?;
    let code = status.code().and_then(|c| u8::try_from(c).ok()).filter(|c| *c != 0);
    Ok(code.unwrap_or(1))
}

/// The role that this process takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Becomes {
    /// A gateway, or one of the processes that start it.
    Gateway,
    /// The guest's program.
    Program,
}

/// Closes descriptors that the caller of the command has left open: a lock or a pipe would be held as long as the
/// gateway runs. Descriptors that an option names stay, by their path as in `--netns /proc/self/fd/3` or by their number
/// (`kept`). A program also keeps the
/// descriptors in its own arguments and those that a service manager passes (sd_listen_fds(3)). To be called before
/// this process opens a descriptor.
pub fn close_inherited(guest: &Guest, becomes: Becomes, kept: &[RawFd]) -> io::Result<()> {
    let of_program = match (guest, becomes) {
        (Guest::Program(command), Becomes::Gateway) => command.len(),
        _ => 0,
    };
    let line: Vec<OsString> = std::env::args_os().collect();
    let line = line.get(..line.len().saturating_sub(of_program)).unwrap_or_default();
    let named: BTreeSet<RawFd> = line.iter().flat_map(|a| descriptors_of(a)).collect();
    let passed = if becomes == Becomes::Program { passed_by_manager() } else { 0..0 };
    close_but(|fd| {
        named.contains(&fd) || kept.contains(&fd) || passed.contains(&fd) || wait::is_pipe(fd)
    })
}

/// Closes all descriptors but the standard streams: the last step of a process that becomes a program of `--strict`.
pub fn close_others() -> io::Result<()> {
    close_but(|_| false)
}

fn close_but(is_wanted: impl Fn(RawFd) -> bool) -> io::Result<()> {
    let names = std::fs::read_dir("/proc/self/fd")?.flatten().map(|entry| entry.file_name());
    let open: Vec<RawFd> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
    for fd in open.into_iter().filter(|fd| *fd > libc::STDERR_FILENO && !is_wanted(*fd)) {
        // The descriptor of the folder is closed already.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}

/// The descriptors whose paths are in an argument: /proc/self/fd/3, /dev/fd/3.
fn descriptors_of(argument: &OsStr) -> Vec<RawFd> {
    let text = argument.to_string_lossy();
    let number = |after: &str| {
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        after.get(..digits)?.parse().ok()
    };
    text.split("/fd/").skip(1).filter_map(number).collect()
}

/// Descriptors that a service manager has opened for this process.
fn passed_by_manager() -> Range<RawFd> {
    const FIRST: RawFd = 3;
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    match (number("LISTEN_PID"), number("LISTEN_FDS")) {
        (Some(pid), Some(count)) if pid == std::process::id() => {
            FIRST..FIRST.saturating_add_unsigned(count)
        }
        _ => 0..0,
    }
}

/// Waits until the guest's process has made its namespaces. False: it has failed to.
pub fn wait_for_namespaces() -> bool {
    let mut line = Vec::new();
    let _ = io::stdin().lock().take(GO.len() as u64).read_to_end(&mut line);
    line == GO
}

/// A process that starts the gateway once this one has made its namespaces.
pub struct PendingGateway(Child);

impl PendingGateway {
    /// Starts it. To be called before this process makes its namespaces.
    pub fn start() -> Outcome<PendingGateway> {
        let mut command = Process::Attach(std::process::id()).command();
        spawn(command.stdin(Stdio::piped()).stdout(Stdio::null())).map(PendingGateway)
    }

    /// Lets it attach, and waits until the network is up. Returns the status of a failure.
    pub fn attach(mut self) -> Outcome<Option<u8>> {
        if let Some(mut stdin) = self.0.stdin.take() {
            // If it has exited its status says why.
            let _ = stdin.write_all(GO);
        }
        let status = self.0.wait().during("cannot wait for the gateway's process")?;
        let code = status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1);
        Ok(Some(code).filter(|c| *c != 0))
    }

    /// Ends it: this process could not make its namespaces.
    pub fn cancel(mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Becomes a program, with neither variable nor descriptor of the gateway. Returns only if that fails: see
/// [`exec::become_program`].
pub fn become_program(command: &[OsString]) -> (u8, Failure) {
    wait::end_with_waiting();
    wait::close_pipes();
    exec::become_program(command, |program| program.env_remove(VARIABLE).env_remove(wait::VARIABLE))
}

/// Tells the process that started this one that the network is up.
pub fn say_ready(out: &mut impl Write) {
    // A reader that is gone does not need to know.
    let _ = out.write_all(READY.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_that_an_argument_names_are_found() {
        let names = |argument: &str| descriptors_of(OsStr::new(argument));
        assert_eq!(names("--netns=/proc/self/fd/3"), [3]);
        assert_eq!(names("/dev/fd/63"), [63]);
        assert_eq!(names("cat /proc/7/fd/3 </dev/fd/12"), [3, 12]);
        for none in
            ["--fd", "/proc/self/ns/net", "fd/3", "/dev/fd/", "/dev/fd/x", "/fd/99999999999"]
        {
            assert!(names(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn more_output_than_a_pipe_takes_does_not_delay_the_ready_line() {
        let script = "head -c 300000 /dev/zero | tr '\\0' '\\n' >&2; echo ready";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        let mut relay = StderrRelay::between(child.stderr.take().unwrap(), null);
        let line = first_line(child.stdout.take().unwrap(), &mut relay).unwrap();
        assert_eq!(line, READY.as_bytes());
        relay.finish().unwrap();
        assert!(child.wait().unwrap().success());
    }
}
