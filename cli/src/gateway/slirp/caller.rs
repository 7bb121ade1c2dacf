//! What the caller of a gateway in the foreground shares with it: a descriptor on which it waits for the network, one
//! whose end is the end, and the socket of the API.

use std::fs::File;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;

use fulmar_gateway::netns::copy_descriptor;
use fulmar_gateway::{FdHandler, Gateway};

use super::api::{Bound, Joined};
use super::forwards::Guest;
use crate::failure::{During, Failure, Outcome};
use crate::gateway::log::Log;

/// What is written when the network is up.
const READY: &[u8] = b"1";

/// The descriptors of a caller, before the gateway is built. The default: none.
#[derive(Default)]
pub struct Caller {
    ready: Option<File>,
    exit: Option<OwnedFd>,
    api: Option<Bound>,
}

impl Caller {
    /// Takes the descriptors over, which a program that is executed does not inherit any more, and binds the socket.
    ///
    /// # Errors
    /// A sentence: the descriptor is not open, the socket cannot be bound.
    pub(super) fn new(
        [ready, exit]: [Option<RawFd>; 2],
        socket: Option<&Path>,
        guest: Guest,
    ) -> Outcome<Caller> {
        let ready = ready.map(|number| opened("--ready-fd", number)).transpose()?;
        let exit = exit.map(|number| opened("--exit-fd", number)).transpose()?;
        let api = socket.map(|path| Bound::new(path, guest)).transpose()?;
        Ok(Caller { ready: ready.map(File::from), exit, api })
    }

    /// Lets the loop of a gateway watch for the end, and publish ports.
    ///
    /// # Errors
    /// A sentence: the descriptor cannot be watched.
    pub fn join(self, gateway: &mut Gateway) -> Outcome<Joining> {
        if let Some(exit) = self.exit {
            let watched = gateway.on_readable(exit, exit_handler());
            watched.map_err(|e| {
                Failure::new(format!(
                    "--exit-fd: cannot watch the descriptor: {e}; expected the end of a pipe or a socket"
                ))
            })?;
        }
        let api = self.api.map(|bound| bound.join(gateway)).transpose();
        Ok(Joining { ready: self.ready, api: api.during("cannot prepare the API socket")? })
    }
}

/// A copy of a descriptor of the caller; the descriptor itself is closed, but for a standard stream.
fn opened(option: &str, number: RawFd) -> Outcome<OwnedFd> {
    let copied = copy_descriptor(number).map_err(|_| {
        Failure::new(format!("{option}: {number} is not an open descriptor of this process"))
    })?;
    if number > libc::STDERR_FILENO {
        let _ = nix::unistd::close(number);
    }
    Ok(copied)
}

/// Ends the loop when the other end is closed. What is written there means nothing.
fn exit_handler() -> FdHandler {
    Box::new(|exit: &OwnedFd, _| {
        let mut ignored = [0; 256];
        match nix::unistd::read(exit, &mut ignored) {
            Ok(1..) => ControlFlow::Continue(()),
            Err(e) if is_temporary(e) => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    })
}

fn is_temporary(e: nix::Error) -> bool {
    matches!(e, nix::Error::EAGAIN | nix::Error::EINTR)
}

/// The descriptors of a caller of a gateway that is about to run.
pub struct Joining {
    ready: Option<File>,
    api: Option<Joined>,
}

impl Joining {
    /// Starts the thread of the API, as contained as the calling one, then tells the caller that the network is up.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(self, log: &Log) -> io::Result<()> {
        self.api.map(Joined::start).transpose()?;
        let Some(mut ready) = self.ready else { return Ok(()) };
        // Another gateway may outlive a caller that is gone; this one ends as the caller wants.
        if let Err(e) = ready.write_all(READY) {
            log.fail(&format!("--ready-fd: cannot write: {e}"));
        }
        Ok(())
    }
}
