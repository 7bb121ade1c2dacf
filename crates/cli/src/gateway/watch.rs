//! The process between a program and its gateway: it starts the gateway, passes on what it says while the program
//! runs, and tells the program if the gateway ends first.
//!
//! A gateway that is killed takes the guest's interface with it. Nothing in the namespace notices: a program that reads
//! from a connection would wait for ever. So its connections are aborted (ECONNABORTED), and one sentence says why.
//!
//! All of it goes to the standard error that the program was started with, the last sentence to the system's log, too. The
//! watcher writes nothing after the end of the program: a reader of standard error finds its end then, not the gateway's.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use fulmar_gateway::attach::Target;
use fulmar_netns::abort_connections;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::detach::{self, Heard, Stage, say_ready};
use super::log::Log;
use super::plan::Guest;
use super::words::{Came, Words};
use super::{fault, wait};
use crate::failure::{During, Failure, Outcome};

/// Starts the gateway of a process, and waits for its end.
///
/// # Errors
/// A sentence about the step of the set-up that failed.
pub fn watch(pid: u32, name: &str, guest: &Guest) -> Outcome<ExitCode> {
    let _ = nix::unistd::setsid();
    let program = fulmar_netns::pidfd_open(pid).during("cannot watch the program")?;
    let Heard { mut gateway, mut words } = match detach::start_heard(Stage::Serve(Some(pid)))? {
        Ok(heard) => heard,
        Err(status) => return Ok(ExitCode::from(status)),
    };
    wait::leave();
    // While the process is still this command: the namespaces of a program that may not be read cannot be opened.
    let target = Target::Process { pid, userns: None };
    let netns = target.attach().map_err(|e| Failure::new(e.to_string()))?;
    leave_all_but_stderr().during("cannot detach")?;
    pass_on(&mut words, &program).during("cannot pass on what the gateway says")?;
    let ended = gateway.wait().during("cannot wait for the gateway's process")?;
    if has_ended(&program) {
        return Ok(ExitCode::SUCCESS);
    }
    let aborted = netns.run(abort_connections);
    let sentence = sentence(ended, &program_of(guest), &aborted);
    let log = Log::to_stderr(name, true);
    log.use_system();
    log.fail(&sentence);
    let said = words.end_with(&format!("{name}: {sentence}\n"), &program);
    said.during("cannot say that the gateway has ended")?;
    Ok(ExitCode::FAILURE)
}

/// Says that the network is up, and leaves the terminal and the folder of the command to the program.
fn leave_all_but_stderr() -> io::Result<()> {
    say_ready(&mut io::stdout());
    // The folder can be unmounted.
    nix::unistd::chdir("/")?;
    let null = OpenOptions::new().write(true).open("/dev/null")?;
    Ok(nix::unistd::dup2_stdout(&null)?)
}

/// Passes on what the gateway says until it ends; nothing any more when the program has ended.
fn pass_on(words: &mut Words, program: &OwnedFd) -> io::Result<()> {
    loop {
        match words.turn(Some(program.as_fd()))? {
            Came::Words => {}
            Came::Other => return words.discard(),
            Came::End => return Ok(()),
        }
    }
}

/// Whether the process behind a pidfd is gone.
fn has_ended(process: &OwnedFd) -> bool {
    let mut ready = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    poll(&mut ready, PollTimeout::ZERO).is_ok_and(|n| n > 0)
}

fn program_of(guest: &Guest) -> String {
    let word = |command: &[OsString]| command.first().map(|p| p.to_string_lossy().into_owned());
    match guest {
        Guest::Program(command) => word(command).unwrap_or_else(|| "the shell".into()),
        Guest::Existing(_) => "the program".into(),
    }
}

fn sentence(ended: ExitStatus, program: &str, aborted: &io::Result<usize>) -> String {
    let how = match (ended.signal().map(Signal::try_from), ended.code()) {
        (Some(Ok(signal)), _) => format!("was killed by {signal}"),
        (Some(Err(_)), _) => "was killed by a signal".into(),
        (None, Some(0)) => "has ended".into(),
        (None, Some(fault::STATUS)) => "has ended because of a fault of its own".into(),
        (None, _) => "has failed".into(),
    };
    let connections = match aborted {
        Ok(_) => "its connections are aborted".to_owned(),
        Err(e) => format!("its open connections hear nothing of it: {e}"),
    };
    format!("the gateway {how}: {program} has no network any more; {connections}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_says_how_the_gateway_ended_and_what_is_left() {
        let said = |raw| sentence(ExitStatus::from_raw(raw), "curl", &Ok(1));
        let rest = ": curl has no network any more; its connections are aborted";
        assert_eq!(said(9), format!("the gateway was killed by SIGKILL{rest}"));
        assert_eq!(said(0), format!("the gateway has ended{rest}"));
        assert_eq!(
            said(101 << 8),
            format!("the gateway has ended because of a fault of its own{rest}")
        );
        assert_eq!(said(1 << 8), format!("the gateway has failed{rest}"));
        let unsupported = Err(io::Error::from_raw_os_error(95));
        let without = sentence(ExitStatus::from_raw(9), "curl", &unsupported);
        assert!(without.contains("its open connections hear nothing of it"), "{without}");
    }
}
