//! The process between a program and its gateway: it starts the gateway, copies its standard error while the program
//! runs, and tells the program if the gateway exits first.
//!
//! A gateway that is killed takes the guest's interface with it. Nothing in the namespace notices: a program that reads
//! from a connection would wait for ever. So its connections are aborted (ECONNABORTED), and one sentence says why.
//!
//! All output goes to the standard error that the program was started with, the last sentence to the system's log, too.
//! The watcher closes standard error when the program exits, so that its reader does not wait for the gateway.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::thread;

use fulmar_gateway::attach::Target;
use fulmar_gateway::keep;
use fulmar_gateway::netns::abort_connections;
use fulmar_gateway::program::Resolvers;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::detach::{self, Process, WithStderr, say_ready};
use super::log::Log;
use super::plan::Guest;
use super::stderr::{StderrRelay, Woken};
use super::{panics, wait};
use crate::failure::{During, Failure, Outcome};

/// Starts the gateway of a process, and waits for its end. `resolvers`: the servers and domains of the
/// program's own resolv.conf; `None`: the program has the host's.
///
/// # Errors
/// A sentence about the step of the set-up that failed.
pub fn watch(
    pid: u32,
    name: &str,
    guest: &Guest,
    resolvers: Option<Resolvers>,
) -> Outcome<ExitCode> {
    let _ = nix::unistd::setsid();
    let program = fulmar_gateway::netns::pidfd_open(pid).during("cannot watch the program")?;
    let started = detach::start_with_stderr(Process::Serve(Some(pid)))?;
    let WithStderr { mut gateway, mut stderr } = match started {
        Ok(started) => started,
        Err(status) => return Ok(ExitCode::from(status)),
    };
    wait::close_pipes();
    // While the process is still this command: the namespaces of a program that may not be read cannot be opened.
    let target = Target::Process { pid, userns: None };
    let netns = target.attach().map_err(|e| Failure::new(e.to_string()))?;
    if let Some(resolvers) = resolvers {
        keep_resolv_conf(pid, resolvers, &program).during("cannot watch the program's files")?;
    }
    detach_but_for_stderr().during("cannot detach")?;
    copy_stderr(&mut stderr, &program).during("cannot forward the gateway's messages")?;
    let ended = gateway.wait().during("cannot wait for the gateway's process")?;
    if has_exited(&program) {
        return Ok(ExitCode::SUCCESS);
    }
    let aborted = netns.run(abort_connections);
    let sentence = sentence(ended, &program_of(guest), &aborted);
    let log = Log::to_stderr(name, true);
    log.use_system();
    log.fail(&sentence);
    let said = stderr.end_with(&format!("{name}: {sentence}\n"), &program);
    said.during("cannot report the end of the gateway")?;
    Ok(ExitCode::FAILURE)
}

/// Keeps the program's resolv.conf in its place, on a thread of its own.
fn keep_resolv_conf(pid: u32, resolvers: Resolvers, program: &OwnedFd) -> io::Result<()> {
    let mounts = OwnedFd::from(File::open(format!("/proc/{pid}/ns/mnt"))?);
    let end = program.try_clone()?;
    thread::Builder::new().name("resolv.conf".into()).spawn(move || {
        // Where it cannot be kept the program has the file until the host's is replaced.
        let _ = keep::keep_resolv_conf(mounts, &resolvers, end.as_fd());
    })?;
    Ok(())
}

/// Says that the network is up, and leaves standard output and the working directory of the command.
fn detach_but_for_stderr() -> io::Result<()> {
    say_ready(&mut io::stdout());
    // Its file system can be unmounted.
    nix::unistd::chdir("/")?;
    let null = OpenOptions::new().write(true).open("/dev/null")?;
    Ok(nix::unistd::dup2_stdout(&null)?)
}

/// Copies the gateway's standard error until it exits; once the program has exited it is discarded.
fn copy_stderr(stderr: &mut StderrRelay, program: &OwnedFd) -> io::Result<()> {
    loop {
        match stderr.turn(Some(program.as_fd()))? {
            Woken::Output => {}
            Woken::Other => return stderr.discard(),
            Woken::Closed => return Ok(()),
        }
    }
}

/// Whether the process of a pidfd has exited.
fn has_exited(process: &OwnedFd) -> bool {
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
        (None, Some(panics::STATUS)) => "has ended because of an internal error".into(),
        (None, _) => "has failed".into(),
    };
    let connections = match aborted {
        Ok(_) => "its connections are aborted".to_owned(),
        Err(e) => format!("its open connections cannot be aborted: {e}"),
    };
    format!("the gateway {how}: {program} no longer has a network; {connections}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_says_how_the_gateway_ended_and_what_is_left() {
        let said = |raw| sentence(ExitStatus::from_raw(raw), "curl", &Ok(1));
        let rest = ": curl no longer has a network; its connections are aborted";
        assert_eq!(said(9), format!("the gateway was killed by SIGKILL{rest}"));
        assert_eq!(said(0), format!("the gateway has ended{rest}"));
        assert_eq!(
            said(101 << 8),
            format!("the gateway has ended because of an internal error{rest}")
        );
        assert_eq!(said(1 << 8), format!("the gateway has failed{rest}"));
        let unsupported = Err(io::Error::from_raw_os_error(95));
        let without = sentence(ExitStatus::from_raw(9), "curl", &unsupported);
        assert!(without.contains("its open connections cannot be aborted"), "{without}");
    }
}
