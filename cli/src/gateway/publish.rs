//! Ports of the host, which the relay has or, with `--splice-only`, the splicing thread of the guest; and how they are
//! published while the gateway runs: a thread that serves clients asks the relay's loop.
//!
//! ```text
//!   thread ── a command, and a wake-up ──► the relay's loop: (un)publishes
//!          ◄── done ─────────────────────
//! ```

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_gateway::config::Publish;
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::Forward;
use fulmar_gateway::published::PublishedPort;
use fulmar_gateway::splice::Splicer;
use fulmar_gateway::{FdHandler, Gateway, Handle, SetupError};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::stat::{Mode, umask};

use super::auto::{loopback, loopback_of};
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
    fn run(&self, ports: &HostPorts, gateway: &mut Handle<'_>) -> io::Result<()> {
        if self.is_published {
            return ports.publish(gateway, self.protocol, &self.forward);
        }
        ports.unpublish(gateway, self.protocol, &self.forward);
        Ok(())
    }
}

/// Ports of the host. The relay has them, or with `--splice-only` the thread in the guest's namespace. The default: the
/// relay.
#[derive(Clone, Default)]
pub struct HostPorts(Option<Arc<Mutex<SplicedPorts>>>);

impl HostPorts {
    /// Ports between the loopback interfaces alone. `guest` connects in the guest's namespace.
    pub fn spliced(guest: Splicer) -> HostPorts {
        HostPorts(Some(Arc::new(Mutex::new(SplicedPorts { guest, open: Vec::new() }))))
    }

    /// Publishes a port.
    ///
    /// # Errors
    /// The host's kernel refused it, or it leads elsewhere than from loopback to loopback.
    pub fn publish(
        &self,
        gateway: &mut Handle<'_>,
        protocol: Protocol,
        forward: &Forward,
    ) -> io::Result<()> {
        match (self.lock(), protocol) {
            (Some(mut spliced), _) => spliced.publish(protocol, forward),
            (None, Protocol::Udp) => gateway.publish_udp(forward),
            (None, _) => gateway.publish_tcp(forward),
        }
    }

    /// Withdraws a port.
    pub fn unpublish(&self, gateway: &mut Handle<'_>, protocol: Protocol, forward: &Forward) {
        match (self.lock(), protocol) {
            (Some(mut spliced), _) => spliced.unpublish(protocol, forward),
            (None, Protocol::Udp) => gateway.unpublish_udp(forward),
            (None, _) => gateway.unpublish_tcp(forward),
        }
    }

    /// Publishes the ports of the options, before the gateway runs. The relay has published its own.
    ///
    /// # Errors
    /// A sentence: a port that is not optional could not be published.
    pub fn publish_first(&self, publish: &Publish) -> Outcome {
        let Some(mut spliced) = self.lock() else { return Ok(()) };
        for (protocol, forwards) in [(Protocol::Tcp, &publish.tcp), (Protocol::Udp, &publish.udp)] {
            for forward in forwards {
                match spliced.publish(protocol, forward) {
                    Err(e) if !forward.is_optional => {
                        let refused = SetupError::Publish(Box::new(forward.clone()), e);
                        return Err(Failure::new(refused.to_string()));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Whether the thread in the guest's namespace has them.
    pub fn are_spliced(&self) -> bool {
        self.0.is_some()
    }

    fn lock(&self) -> Option<MutexGuard<'_, SplicedPorts>> {
        self.0.as_ref().map(|spliced| spliced.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Ports of the host's loopback interface, with the numbers of their sockets in the splicer.
struct SplicedPorts {
    guest: Splicer,
    open: Vec<(Protocol, Forward, Vec<u64>)>,
}

impl SplicedPorts {
    /// Binds a port at both IP versions or not at all, unless it is optional, as the relay does.
    fn publish(&mut self, protocol: Protocol, forward: &Forward) -> io::Result<()> {
        if forward.to_address.is_some_and(|to| !to.is_loopback())
            || forward.bind.interface.is_some()
        {
            return Err(not_loopback());
        }
        let port = Arc::new(PublishedPort::new(forward.clone()));
        let to = |is_v4| {
            let own = loopback_of(forward.to, is_v4);
            forward.to_address.map_or(own, |to| SocketAddr::new(to, forward.to))
        };
        let (mut sockets, mut refused) = (Vec::new(), None);
        for at in own_addresses(forward)? {
            let bound = match protocol {
                Protocol::Udp => UdpSocket::bind(at).map(|socket| {
                    self.guest.listen_datagrams(socket, to(at.is_ipv4()), Arc::clone(&port))
                }),
                _ => TcpListener::bind(at).map(|listener| {
                    // The same version first; a server may listen on one only.
                    let mut both = vec![to(at.is_ipv4()), to(!at.is_ipv4())];
                    both.dedup();
                    self.guest.listen(listener, both, Arc::clone(&port))
                }),
            };
            match bound {
                Ok(id) => sockets.push(id),
                // The host has no such IP version.
                Err(e)
                    if e.kind() == io::ErrorKind::AddrNotAvailable
                        && forward.bind.address.is_none() => {}
                Err(e) => refused = Some(e),
            }
        }
        match refused {
            Some(e) if sockets.is_empty() || !forward.is_optional => {
                sockets.iter().for_each(|id| self.guest.unlisten(*id));
                Err(e)
            }
            _ => {
                self.open.push((protocol, forward.clone(), sockets));
                Ok(())
            }
        }
    }

    fn unpublish(&mut self, protocol: Protocol, forward: &Forward) {
        self.open.retain(|(of, own, sockets)| {
            let stays = *of != protocol || own != forward;
            if !stays {
                sockets.iter().for_each(|id| self.guest.unlisten(*id));
            }
            stays
        });
    }
}

/// The addresses of the host's loopback interface at which a port is bound.
fn own_addresses(forward: &Forward) -> io::Result<Vec<SocketAddr>> {
    match forward.bind.address {
        None => Ok(loopback(forward.from).to_vec()),
        Some(any) if any.is_unspecified() => Ok(vec![loopback_of(forward.from, any.is_ipv4())]),
        Some(address) if address.is_loopback() => Ok(vec![SocketAddr::new(address, forward.from)]),
        Some(_) => Err(not_loopback()),
    }
}

pub fn not_loopback() -> io::Error {
    io::Error::other("--splice-only publishes from loopback addresses to loopback addresses only")
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
    pub fn of(gateway: &mut Gateway, ports: HostPorts) -> io::Result<Relay> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let ((ask, asked), (tell, told)) = (sync_channel(1), sync_channel(1));
        gateway.on_readable(wake.as_fd().try_clone_to_owned()?, handler(ports, asked, tell))?;
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

fn handler(
    ports: HostPorts,
    asked: Receiver<Command>,
    tell: SyncSender<io::Result<()>>,
) -> FdHandler {
    Box::new(move |wake: &OwnedFd, gateway| {
        let mut count = [0; 8];
        let _ = nix::unistd::read(wake, &mut count);
        while let Ok(command) = asked.try_recv() {
            // The thread waits for it.
            let _ = tell.try_send(command.run(&ports, gateway));
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
