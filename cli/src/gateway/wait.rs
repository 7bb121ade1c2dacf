//! A command that waits for its program, and prints the gateway's summary and what was refused after it.
//!
//! The command forwards signals that it gets to the program; signals of the terminal reach both anyway. The command
//! ends as the program did: with its status, or by its signal.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use std::os::fd::AsFd;

use crate::failure::{During, Outcome};

/// The variable with the number of the descriptor for the summary: the writing end of a pipe to the waiting command.
pub const VARIABLE: &str = "FULMAR_GATEWAY_SUMMARY_FD";
/// How long the summary is waited for: the gateway delivers what the program has sent for 60 s at most.
const SUMMARY_TIMEOUT_MS: u16 = 65_000;
/// Bytes of the summary at most.
const MAX_SUMMARY_BYTES: u64 = 1 << 20;

/// Whether another process waits for this one, which is to become the program.
pub fn is_waited_for() -> bool {
    summary_fd().is_some()
}

fn summary_fd() -> Option<RawFd> {
    std::env::var(VARIABLE).ok()?.parse().ok()
}

/// Whether a descriptor is the one for the summary.
pub fn is_summary_fd(fd: RawFd) -> bool {
    summary_fd() == Some(fd)
}

/// The file to which the gateway writes the summary, if a command waits for it.
pub fn open_summary() -> io::Result<Option<File>> {
    let Some(number) = summary_fd() else { return Ok(None) };
    let file = OpenOptions::new().write(true).open(format!("/proc/self/fd/{number}"))?;
    close_summary_fd();
    Ok(Some(file))
}

/// The kernel kills the program that this process becomes when the waiting command is killed.
pub fn end_with_waiting() {
    if is_waited_for() {
        // Without it the program stays.
        let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    }
}

/// Closes the descriptor for the summary, if there is one: the program must not inherit it.
pub fn close_summary_fd() {
    if let Some(number) = summary_fd() {
        let _ = nix::unistd::close(number);
    }
}

/// Starts this command once more, which becomes the program, waits for its exit, then prints the summary.
///
/// # Errors
/// The step that failed.
pub fn run_and_wait() -> Outcome<ExitCode> {
    let signals = catch().during("cannot catch signals")?;
    let (summary, writer) =
        nix::unistd::pipe().map_err(io::Error::from).during("cannot make a pipe")?;
    // The writing end is inherited, the reading end is not.
    let kept = fcntl(&summary, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(io::Error::from);
    kept.during("cannot make a pipe")?;
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    let mut command = Command::new("/proc/self/exe");
    command.arg0(name).args(arguments).env(VARIABLE, writer.as_raw_fd().to_string());
    let mut child = command.spawn().during("cannot start the program's process")?;
    drop(writer);
    let status = wait(&mut child, &signals).during("cannot wait for the program")?;
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

fn wait(child: &mut Child, signals: &SignalFd) -> io::Result<ExitStatus> {
    let pid = Pid::from_raw(child.id() as i32);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let Some(info) = signals.read_signal()? else { continue };
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
