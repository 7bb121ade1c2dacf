//! A command that stays while its program runs, because it has something to say at the end.
//!
//! Signals that are sent to the command go on to the program; those of the terminal reach both anyway. The command
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

/// The descriptor for the gateway's last words, a number.
const LAST_WORDS: &str = "FULMAR_GATEWAY_LAST_WORDS";
/// The gateway delivers what the program has left for a minute at most; it is not waited for much longer.
const PATIENCE_MS: u16 = 65_000;
/// Last words at most.
const MAX_WORDS_BYTES: u64 = 1 << 20;

/// Whether this process is the program to be, which another one waits for.
pub fn is_waited_for() -> bool {
    number().is_some()
}

fn number() -> Option<RawFd> {
    std::env::var(LAST_WORDS).ok()?.parse().ok()
}

/// Whether a descriptor is that for last words.
pub fn is_for_last_words(fd: RawFd) -> bool {
    number() == Some(fd)
}

/// Where the gateway's last words go: to the command that waits.
pub fn last_words() -> io::Result<Option<File>> {
    let Some(number) = number() else { return Ok(None) };
    let file = OpenOptions::new().write(true).open(format!("/proc/self/fd/{number}"))?;
    leave();
    Ok(Some(file))
}

/// Closes the descriptor for last words, if there is one: the program has nothing to do with it.
pub fn leave() {
    if let Some(number) = number() {
        let _ = nix::unistd::close(number);
    }
}

/// The program's environment is without this variable.
pub fn hide(command: &mut Command) {
    command.env_remove(LAST_WORDS);
}

/// Starts this command once more to become the program, waits for its end, then prints what the gateway says.
///
/// # Errors
/// The step that failed.
pub fn run_and_wait() -> Outcome<ExitCode> {
    let signals = catch().during("cannot catch signals")?;
    let (words, writer) =
        nix::unistd::pipe().map_err(io::Error::from).during("cannot make a pipe")?;
    // The writing end is inherited, the reading end is not.
    let kept = fcntl(&words, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(io::Error::from);
    kept.during("cannot make a pipe")?;
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    let mut command = Command::new("/proc/self/exe");
    command.arg0(name).args(arguments).env(LAST_WORDS, writer.as_raw_fd().to_string());
    let mut child = command.spawn().during("cannot start the program's process")?;
    drop(writer);
    let status = wait(&mut child, &signals).during("cannot wait for the program")?;
    print_last_words(words, &signals).during("cannot print the summary")?;
    Ok(end_like(status))
}

/// Signals that are passed on, and that of the program's end.
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

/// Takes the signals that the command has blocked for itself, for the program: a new process inherits the mask.
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

fn print_last_words(words: OwnedFd, signals: &SignalFd) -> io::Result<()> {
    let mut text = Vec::new();
    if have_come(&words, signals)? {
        File::from(words).take(MAX_WORDS_BYTES).read_to_end(&mut text)?;
    }
    io::stderr().write_all(&text)
}

/// Waits for the summary until it comes, a signal ends the wait, or the time is over.
fn have_come(words: &OwnedFd, signals: &SignalFd) -> io::Result<bool> {
    loop {
        let wanted = [words.as_fd(), signals.as_fd()];
        let mut ready = wanted.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        if poll(&mut ready, PollTimeout::from(PATIENCE_MS))? == 0 {
            return Ok(false);
        }
        if ready[0].any().unwrap_or(false) {
            return Ok(true);
        }
        let came = signals.read_signal()?.and_then(|i| Signal::try_from(i.ssi_signo as i32).ok());
        // The program has ended already, and a window may change its size.
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
    fn last_words_are_waited_for_until_a_signal_of_the_user() {
        let signals = catch().unwrap();
        let (words, writer) = nix::unistd::pipe().unwrap();
        raise(Signal::SIGWINCH).unwrap();
        raise(Signal::SIGTERM).unwrap();
        assert!(!have_come(&words, &signals).unwrap(), "there are none");
        drop(writer);
        raise(Signal::SIGWINCH).unwrap();
        assert!(have_come(&words, &signals).unwrap(), "their end is one, too");
    }
}
