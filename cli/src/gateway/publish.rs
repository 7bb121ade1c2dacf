//! Ports of the host that are published while the gateway runs: a thread that serves clients asks the relay's loop,
//! which alone has the ports.
//!
//! ```text
//!   thread ── a command, and a wake-up ──► the relay's loop: (un)publishes
//!          ◄── done ─────────────────────
//! ```

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::Forward;
use fulmar_gateway::{FdHandler, Gateway, Handle};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::stat::{Mode, umask};

use crate::failure::{Failure, Outcome};

/// Binds a Unix socket to which only the caller's user may connect (mode 0600). To be called while the process has one
/// thread. `what` the socket is, for the message.
///
/// # Errors
/// A sentence: something is at the path, or the path is too long.
pub fn bind_private(what: &str, path: &Path) -> Outcome<UnixListener> {
    let others = umask(Mode::S_IRWXG | Mode::S_IRWXO | Mode::S_IXUSR);
    let bound = UnixListener::bind(path);
    umask(others);
    bound.map_err(|e| match e.kind() {
        io::ErrorKind::InvalidInput => Failure::new(format!(
            "cannot bind the {what} {}: the path is too long (at most 107 bytes)",
            path.display()
        )),
        _ => Failure::file(&format!("cannot bind the {what}"), path, &e),
    })
}

/// Removes a socket, and nothing else. Where that fails, the bind fails.
pub fn remove_socket(path: &Path) {
    if fs::symlink_metadata(path).is_ok_and(|about| about.file_type().is_socket()) {
        let _ = fs::remove_file(path);
    }
}

/// A request of a thread to the loop.
struct Command {
    protocol: Protocol,
    forward: Forward,
    is_published: bool,
}

impl Command {
    fn run(&self, gateway: &mut Handle<'_>) -> io::Result<()> {
        match (self.protocol, self.is_published) {
            (Protocol::Udp, true) => gateway.publish_udp(&self.forward),
            (_, true) => gateway.publish_tcp(&self.forward),
            (Protocol::Udp, false) => {
                gateway.unpublish_udp(&self.forward);
                Ok(())
            }
            (_, false) => {
                gateway.unpublish_tcp(&self.forward);
                Ok(())
            }
        }
    }
}

/// The loop of the relay as a thread sees it.
pub struct Relay {
    /// Wakes the loop.
    wake: EventFd,
    ask: SyncSender<Command>,
    told: Receiver<io::Result<()>>,
}

impl Relay {
    /// Lets the loop of a gateway publish what a thread asks for.
    ///
    /// # Errors
    /// No descriptor.
    pub fn of(gateway: &mut Gateway) -> io::Result<Relay> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let ((ask, asked), (tell, told)) = (sync_channel(1), sync_channel(1));
        gateway.on_readable(wake.as_fd().try_clone_to_owned()?, handler(asked, tell))?;
        Ok(Relay { wake, ask, told })
    }

    /// Publishes a port.
    ///
    /// # Errors
    /// The host's kernel refused it, or the gateway is ending.
    pub fn publish(&self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        self.command(Command { protocol, forward: forward.clone(), is_published: true })
    }

    /// Withdraws a port.
    ///
    /// # Errors
    /// The gateway is ending.
    pub fn unpublish(&self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        self.command(Command { protocol, forward: forward.clone(), is_published: false })
    }

    /// Has the loop do something, and waits until it is done.
    fn command(&self, command: Command) -> io::Result<()> {
        let is_ending = || io::Error::other("the gateway is ending");
        self.ask.send(command).map_err(|_| is_ending())?;
        self.wake.write(1)?;
        self.told.recv().map_err(|_| is_ending())?
    }
}

fn handler(asked: Receiver<Command>, tell: SyncSender<io::Result<()>>) -> FdHandler {
    Box::new(move |wake: &OwnedFd, gateway| {
        let mut count = [0; 8];
        let _ = nix::unistd::read(wake, &mut count);
        while let Ok(command) = asked.try_recv() {
            // The thread waits for it.
            let _ = tell.try_send(command.run(gateway));
        }
        ControlFlow::Continue(())
    })
}

/// Why a port was not published, and what to do.
pub fn why_refused(e: &io::Error, port: u16) -> String {
    match e.kind() {
        io::ErrorKind::PermissionDenied => format!(
            "port {port} is privileged, and the gateway has no rights; lower \
             net.ipv4.ip_unprivileged_port_start, or choose a port from 1024 on"
        ),
        _ => e.to_string(),
    }
}
