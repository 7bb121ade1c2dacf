//! A command that waits for its program, and prints the gateway's summary and what was refused after it.
//!
//! The command forwards signals that it gets to the program; signals of the terminal reach both anyway. The command
//! ends as the program did: with its status, or by its signal.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus};

use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use std::os::fd::AsFd;

use super::ask::{self, Socket, Terminal, Whom};
use crate::failure::{During, Outcome};

/// The variable with the numbers of the descriptors of pipes to and from the waiting command: for the summary, and for the
/// questions and answers of [`ask`]. Behind them is the path of a terminal for the program.
pub const VARIABLE: &str = "FULMAR_GATEWAY_PIPES";
/// How long the summary is waited for: the gateway delivers what the program has sent for 60 s at most.
const SUMMARY_TIMEOUT_MS: u16 = 65_000;
/// Bytes of the summary at most.
const MAX_SUMMARY_BYTES: u64 = 1 << 20;

/// Whether another process waits for this one, which is to become the program.
pub fn is_waited_for() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// The descriptors, and the path of the terminal.
fn passed() -> (Vec<RawFd>, Option<PathBuf>) {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let (numbers, path) = text.split_once(' ').unwrap_or((&text, ""));
    let numbers = numbers.split(',').filter_map(|number| number.parse().ok()).collect();
    (numbers, Some(PathBuf::from(path)).filter(|_| !path.is_empty()))
}

/// Whether a descriptor is one of the pipes.
pub fn is_pipe(fd: RawFd) -> bool {
    passed().0.contains(&fd)
}

/// The gateway's ends of the pipes.
pub struct Pipes {
    /// To which the summary is written; `None`: no command waits for it.
    pub summary: Option<File>,
    /// `None`: nothing is asked.
    pub ask: Option<ask::Pipes>,
}

/// Opens the gateway's ends of the pipes.
///
/// # Errors
/// A pipe is gone.
pub fn open_pipes() -> io::Result<Pipes> {
    let path = |number: &RawFd| format!("/proc/self/fd/{number}");
    let to =
        |number| OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path(number));
    let (numbers, _) = passed();
    let summary = numbers.first().map(|number| OpenOptions::new().write(true).open(path(number)));
    let ask = match numbers.get(1..3) {
        Some([questions, answers]) => {
            Some(ask::Pipes { questions: to(questions)?, answers: File::open(path(answers))? })
        }
        _ => None,
    };
    let summary = summary.transpose()?;
    close_pipes();
    Ok(Pipes { summary, ask })
}

/// The kernel kills the program that this process becomes when the waiting command is killed.
pub fn end_with_waiting() {
    if is_waited_for() {
        // Without it the program stays.
        let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    }
}

/// Closes the pipes, if there are any: the program must not inherit them.
pub fn close_pipes() {
    for number in passed().0 {
        let _ = nix::unistd::close(number);
    }
}

/// Enters the terminal of the program, if it has one.
///
/// # Errors
/// A sentence: the terminal cannot be opened.
pub fn enter_terminal() -> Outcome {
    let Some(path) = passed().1 else { return Ok(()) };
    ask::enter_terminal(&path).during("cannot enter the program's terminal")
}

/// What the waiting command does meanwhile.
enum Meanwhile {
    Nothing,
    Terminal(Box<Terminal>),
    Socket(Socket),
}

impl Meanwhile {
    /// Until a signal has come. An end that has gone ends it: the gateway sees the end of its pipes.
    fn until_signal(&mut self, signals: &SignalFd) {
        let done = match self {
            Meanwhile::Nothing => Ok(()),
            Meanwhile::Terminal(terminal) => terminal.serve_until(signals.as_fd()),
            Meanwhile::Socket(socket) => socket.serve_until(signals.as_fd()),
        };
        if done.is_err() {
            drop(std::mem::replace(self, Meanwhile::Nothing).finish());
        }
    }

    /// Gives the terminal back. The gateway takes the end of the returned pipe for the end of all answers.
    fn finish(self) -> Option<File> {
        match self {
            Meanwhile::Nothing => None,
            Meanwhile::Terminal(terminal) => terminal.finish(),
            Meanwhile::Socket(socket) => Some(socket.finish()),
        }
    }
}

/// A pipe whose first end is this process's own, and whose other end is inherited.
fn pipe_from() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = nix::unistd::pipe()?;
    fcntl(&reader, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok((reader, writer))
}

/// The same in the other direction.
fn pipe_to() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = nix::unistd::pipe()?;
    fcntl(&writer, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok((writer, reader))
}

/// Starts this command once more, which becomes the program, waits for its exit, then prints the summary.
///
/// # Errors
/// The step that failed.
pub fn run_and_wait(ask: Option<&Whom>) -> Outcome<ExitCode> {
    let signals = catch().during("cannot catch signals")?;
    let (summary, writer) = pipe_from().during("cannot make a pipe")?;
    let (mut inherited, mut path) = (vec![writer], PathBuf::new());
    let mut meanwhile = Meanwhile::Nothing;
    if let Some(whom) = ask {
        let (questions, their_questions) = pipe_from().during("cannot make a pipe")?;
        let (answers, their_answers) = pipe_to().during("cannot make a pipe")?;
        let (questions, answers) = (File::from(questions), File::from(answers));
        meanwhile = match whom {
            Whom::Terminal => {
                let terminal = Terminal::open(questions, answers)?;
                path = terminal.path().to_owned();
                Meanwhile::Terminal(Box::new(terminal))
            }
            Whom::Socket(path) => Meanwhile::Socket(Socket::open(path, questions, answers)?),
        };
        inherited.extend([their_questions, their_answers]);
    }
    let numbers: Vec<_> = inherited.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    let mut command = Command::new("/proc/self/exe");
    let passed = format!("{} {}", numbers.join(","), path.display());
    command.arg0(name).args(arguments).env(VARIABLE, passed);
    let mut child = command.spawn().during("cannot start the program's process")?;
    drop(inherited);
    let status = wait(&mut child, &signals, &mut meanwhile);
    let _answers = meanwhile.finish();
    let status = status.during("cannot wait for the program")?;
    print_summary(summary, &signals).during("cannot print the summary")?;
    Ok(end_like(status))
}

/// Signals that are passed on to the program, and SIGCHLD.
const CAUGHT: [Signal; 9] = [
    Signal::SIGCHLD,
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGHUP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGALRM,
];

/// Unblocks the signals that the waiting command has blocked for itself: the program would inherit the mask.
pub fn unblock() {
    let set: SigSet = CAUGHT.into_iter().collect();
    let _ = set.thread_unblock();
}

fn catch() -> io::Result<SignalFd> {
    let set: SigSet = CAUGHT.into_iter().collect();
    set.thread_block()?;
    Ok(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)?)
}

fn wait(
    child: &mut Child,
    signals: &SignalFd,
    meanwhile: &mut Meanwhile,
) -> io::Result<ExitStatus> {
    let pid = Pid::from_raw(child.id() as i32);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        meanwhile.until_signal(signals);
        let Some(info) = signals.read_signal()? else { continue };
        if let (Meanwhile::Terminal(terminal), libc::SIGWINCH) =
            (&*meanwhile, info.ssi_signo as i32)
        {
            terminal.resize();
        }
        // The kernel's own signals come from the terminal, to the whole group (sigaction(2), SI_KERNEL).
        let is_sent = info.ssi_code <= 0;
        let signal = Signal::try_from(info.ssi_signo as i32);
        if let (true, Ok(signal)) = (is_sent, signal)
            && signal != Signal::SIGCHLD
        {
            // It may have ended meanwhile.
            let _ = kill(pid, signal);
        }
    }
}

fn print_summary(summary: OwnedFd, signals: &SignalFd) -> io::Result<()> {
    let mut text = Vec::new();
    if wait_for_summary(&summary, signals)? {
        File::from(summary).take(MAX_SUMMARY_BYTES).read_to_end(&mut text)?;
    }
    io::stderr().write_all(&text)
}

/// Waits for the summary. False: a signal came first, or the time-out.
fn wait_for_summary(summary: &OwnedFd, signals: &SignalFd) -> io::Result<bool> {
    loop {
        let wanted = [summary.as_fd(), signals.as_fd()];
        let mut ready = wanted.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        if poll(&mut ready, PollTimeout::from(SUMMARY_TIMEOUT_MS))? == 0 {
            return Ok(false);
        }
        if ready[0].any().unwrap_or(false) {
            return Ok(true);
        }
        let came = signals.read_signal()?.and_then(|i| Signal::try_from(i.ssi_signo as i32).ok());
        // SIGCHLD is the program's exit, and a change of the window's size does not end the command.
        if came.is_some_and(|signal| !matches!(signal, Signal::SIGCHLD | Signal::SIGWINCH)) {
            return Ok(false);
        }
    }
}

/// Ends by the signal that ended the program, without a core of this process, or returns its status.
fn end_like(status: ExitStatus) -> ExitCode {
    if let Some(signal) = status.signal().and_then(|s| Signal::try_from(s).ok()) {
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
        let set: SigSet = [signal].into_iter().collect();
        let _ = set.thread_unblock();
        let _ = raise(signal);
    }
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(code as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_waited_for_until_a_signal_of_the_user() {
        let signals = catch().unwrap();
        let (summary, writer) = nix::unistd::pipe().unwrap();
        raise(Signal::SIGWINCH).unwrap();
        raise(Signal::SIGTERM).unwrap();
        assert!(!wait_for_summary(&summary, &signals).unwrap(), "there are none");
        drop(writer);
        raise(Signal::SIGWINCH).unwrap();
        assert!(wait_for_summary(&summary, &signals).unwrap(), "their end is one, too");
    }
}
