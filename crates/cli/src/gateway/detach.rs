//! The processes of a gateway. The command starts itself again, in a stage that the environment names:
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
//! So the program has the process id, the terminal, the parent and the signals of the command, and neither the gateway
//! nor its watcher ([`watch`](super::watch)) is a child of it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::plan::Guest;
use super::wait;
use super::words::{Came, Words};
use crate::failure::{During, Failure, Outcome};

/// The variable that names the stage.
const STAGE: &str = "FULMAR_GATEWAY_STAGE";
const READY: &str = "ready\n";
const GO: &[u8] = b"go\n";
const MAX_LINE_BYTES: u64 = 64;

/// Which process of a gateway this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The one that the user started.
    Command,
    /// Waits until the process has made its namespaces, then starts the gateway.
    Attach(u32),
    /// Starts the gateway of this process, and tells the program when it has lost it.
    Watch(u32),
    /// The gateway, for this process or for the guest that the options name.
    Serve(Option<u32>),
}

impl Stage {
    /// Of this process.
    pub fn current() -> Stage {
        let text = std::env::var(STAGE).unwrap_or_default();
        let (word, pid) = text.split_once(' ').unwrap_or((&text, ""));
        match (word, pid.parse()) {
            ("attach", Ok(pid)) => Stage::Attach(pid),
            ("watch", Ok(pid)) => Stage::Watch(pid),
            ("serve", pid) => Stage::Serve(pid.ok()),
            _ => Stage::Command,
        }
    }

    fn variable(self) -> String {
        match self {
            Stage::Command => String::new(),
            Stage::Attach(pid) => format!("attach {pid}"),
            Stage::Watch(pid) => format!("watch {pid}"),
            Stage::Serve(Some(pid)) => format!("serve {pid}"),
            Stage::Serve(None) => "serve".into(),
        }
    }

    /// This command with the same arguments, in another stage.
    fn command(self) -> Command {
        let mut arguments = std::env::args_os();
        let name = arguments.next().unwrap_or_else(|| OsString::from("fulmar"));
        let mut command = Command::new("/proc/self/exe");
        command.arg0(name).args(arguments).env(STAGE, self.variable());
        command
    }
}

fn spawn(command: &mut Command) -> Outcome<Child> {
    command.spawn().during("cannot start the gateway's process")
}

/// Starts the gateway, or the process that starts and watches it, and waits until the network is up. `Err` in the
/// outcome: it failed, has said why, and this is its status.
pub fn start(stage: Stage) -> Outcome<Result<Child, u8>> {
    let mut command = stage.command();
    let mut child = spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        let _ = BufReader::new(out.take(MAX_LINE_BYTES)).read_line(&mut line);
    }
    if line == READY { Ok(Ok(child)) } else { status_of(&mut child).map(Err) }
}

/// A gateway whose standard error is a pipe.
pub struct Heard {
    pub gateway: Child,
    pub words: Words,
}

/// The same of a gateway whose words go on to standard error, from its start.
pub fn start_heard(stage: Stage) -> Outcome<Result<Heard, u8>> {
    let mut command = stage.command();
    let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut gateway = spawn(piped)?;
    let (Some(out), Some(err)) = (gateway.stdout.take(), gateway.stderr.take()) else {
        unreachable!("invariant: both are pipes")
    };
    let started = Words::to_stderr(err).and_then(|mut words| {
        let line = first_line(out, &mut words)?;
        Ok((words, line))
    });
    let (mut words, line) = started.during("cannot pass on what the gateway says")?;
    if line == READY.as_bytes() {
        return Ok(Ok(Heard { gateway, words }));
    }
    let rest = words.finish();
    rest.during("cannot pass on what the gateway says")?;
    status_of(&mut gateway).map(Err)
}

/// The first line, or what there was of it at the end, while words go on.
fn first_line(mut out: impl Read + AsFd, words: &mut Words) -> io::Result<Vec<u8>> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while (line.len() as u64) < MAX_LINE_BYTES && !line.ends_with(b"\n") {
        match words.turn(Some(out.as_fd()))? {
            Came::Words => {}
            // What came before the end of the words is there, and then the end of this, too.
            Came::Other | Came::End if out.read(&mut byte)? == 0 => break,
            Came::Other | Came::End => line.extend(byte),
        }
    }
    Ok(line)
}

/// Of a process that ends because it has failed.
fn status_of(child: &mut Child) -> Outcome<u8> {
    let status = child.wait().during("cannot wait for the gateway's process")?;
    let code = status.code().and_then(|c| u8::try_from(c).ok()).filter(|c| *c != 0);
    Ok(code.unwrap_or(1))
}

/// Who goes on with this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heir {
    /// A gateway, or one of the processes that start it.
    Gateway,
    /// The guest's program.
    Program,
}

/// Closes what the caller of the command has left open: a lock or a pipe would be held as long as the gateway runs. What
/// an option names stays, as of `--netns /proc/self/fd/3`; to a program also what its own arguments name, and what a
/// service manager passes (sd_listen_fds(3)). To be called before anything is opened.
pub fn close_inherited(guest: &Guest, heir: Heir) -> io::Result<()> {
    let of_program = match (guest, heir) {
        (Guest::Program(command), Heir::Gateway) => command.len(),
        _ => 0,
    };
    let line: Vec<OsString> = std::env::args_os().collect();
    let line = line.get(..line.len().saturating_sub(of_program)).unwrap_or_default();
    let named: BTreeSet<RawFd> = line.iter().flat_map(|a| descriptors_of(a)).collect();
    let passed = if heir == Heir::Program { passed_by_manager() } else { 0..0 };
    let names = std::fs::read_dir("/proc/self/fd")?.flatten().map(|entry| entry.file_name());
    let open: Vec<RawFd> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
    let is_wanted = |fd: &RawFd| {
        *fd <= libc::STDERR_FILENO
            || named.contains(fd)
            || passed.contains(fd)
            || wait::is_for_last_words(*fd)
    };
    for fd in open.into_iter().filter(|fd| !is_wanted(fd)) {
        // That of the folder is closed already.
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

/// Waits until the process that is to be attached to has made its namespaces. False: it has given up.
pub fn is_told_to_go() -> bool {
    let mut line = Vec::new();
    let _ = io::stdin().lock().take(GO.len() as u64).read_to_end(&mut line);
    line == GO
}

/// A gateway to be, which waits for the namespaces of this process.
pub struct Waiting(Child);

impl Waiting {
    /// Starts it. Before this process makes its namespaces.
    pub fn start() -> Outcome<Waiting> {
        let mut command = Stage::Attach(std::process::id()).command();
        spawn(command.stdin(Stdio::piped()).stdout(Stdio::null())).map(Waiting)
    }

    /// Lets it attach, and waits until the network is up. `None`: it is; otherwise the status of the failure.
    pub fn go(mut self) -> Outcome<Option<u8>> {
        if let Some(mut stdin) = self.0.stdin.take() {
            // If it is gone its status says why.
            let _ = stdin.write_all(GO);
        }
        let status = self.0.wait().during("cannot wait for the gateway's process")?;
        let code = status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1);
        Ok(Some(code).filter(|c| *c != 0))
    }

    /// Ends it, because there will be no namespaces.
    pub fn give_up(mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Becomes a program. Returns only if that fails: the status by the convention of env(1), and the sentence.
pub fn become_program(command: &[OsString]) -> (u8, Failure) {
    let shell = std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let (program, arguments) = match command.split_first() {
        Some((program, arguments)) => (program.clone(), arguments),
        None => (shell, &[][..]),
    };
    let mut command = Command::new(&program);
    wait::hide(command.args(arguments).env_remove(STAGE));
    wait::leave();
    let error = command.exec();
    let what = format!("cannot run `{}`", program.to_string_lossy());
    match error.kind() {
        io::ErrorKind::NotFound => {
            (127, Failure::new(format!("{what}: there is no such program; check the name")))
        }
        io::ErrorKind::PermissionDenied => {
            (126, Failure::new(format!("{what}: it is not executable")))
        }
        _ => (126, Failure::new(format!("{what}: {error}"))),
    }
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
    fn more_words_than_a_pipe_takes_keep_nobody_from_being_ready() {
        let script = "head -c 300000 /dev/zero | tr '\\0' '\\n' >&2; echo ready";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        let mut words = Words::between(child.stderr.take().unwrap(), null);
        let line = first_line(child.stdout.take().unwrap(), &mut words).unwrap();
        assert_eq!(line, READY.as_bytes());
        words.finish().unwrap();
        assert!(child.wait().unwrap().success());
    }
}
