//! The sockets of published ports.
//!
//! A port without an address is bound once for each IP version that the guest has. The host's programs may have it at
//! one of them: a port that is optional is published at the other, any other port is not published at all.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use fulmar_stack::base::SlotId;
use fulmar_stack::shard::Slab;
use nix::sys::socket::{SockType, SockaddrStorage, bind, setsockopt, sockopt};

use super::host_socket;
use super::poll::Token;
use super::{Context, Settings};
use crate::config::BindAddresses;
use crate::ports::Forward;
use crate::published::PublishedPort;

/// A socket of a published port.
pub(super) struct Published<S> {
    pub socket: S,
    pub port: Arc<PublishedPort>,
    /// It waits for its turn.
    is_queued: bool,
}

/// The sockets of the published ports of one transport.
pub(crate) struct PublishedSockets<S>(Slab<Published<S>>);

impl<S> Default for PublishedSockets<S> {
    fn default() -> Self {
        PublishedSockets(Slab::default())
    }
}

impl<S: AsFd> PublishedSockets<S> {
    /// Binds a port with `open` and watches its sockets for arrivals (edge-triggered).
    ///
    /// # Errors
    /// The first address that cannot be bound, unless the port is optional and another one is. Nothing is bound then.
    pub(super) fn publish(
        &mut self,
        cx: &Context<'_>,
        forward: &Forward,
        token: fn(SlotId) -> Token,
        open: impl Fn(SocketAddr, &Settings) -> io::Result<S>,
    ) -> io::Result<()> {
        let port = Arc::new(PublishedPort::new(forward.clone()));
        let (mut is_bound, mut refused) = (false, None);
        for at in bind_addresses(forward, |v4| cx.settings.guest_address(v4).is_some()) {
            let bound = open(at, cx.settings).and_then(|socket| {
                self.watch(
                    cx,
                    Published { socket, port: Arc::clone(&port), is_queued: false },
                    token,
                )
            });
            match bound {
                Ok(()) => is_bound = true,
                Err(e) if is_missing_version(&e, forward) => {}
                Err(e) => refused = refused.or(Some(e)),
            }
        }
        match refused {
            Some(e) if !(is_bound && forward.is_optional) => {
                self.remove(|published| Arc::ptr_eq(&published.port, &port));
                Err(e)
            }
            _ => Ok(()),
        }
    }

    fn watch(
        &mut self,
        cx: &Context<'_>,
        published: Published<S>,
        token: fn(SlotId) -> Token,
    ) -> io::Result<()> {
        let id = self.0.insert(published);
        let Some(Published { socket, .. }) = self.0.get(id) else { return Ok(()) };
        let watched = cx.poll.add_arrivals(socket.as_fd(), token(id));
        if watched.is_err() {
            self.0.remove(id);
        }
        watched
    }

    /// The socket of an event.
    pub(super) fn get(&self, id: SlotId) -> Option<&Published<S>> {
        self.0.get(id)
    }

    /// The socket has its turn later. False: it waits already, or is closed.
    pub(super) fn queue(&mut self, id: SlotId) -> bool {
        let published = self.0.get_mut(id);
        published.is_some_and(|published| !std::mem::replace(&mut published.is_queued, true))
    }

    /// The socket whose turn it is.
    pub(crate) fn begin_turn(&mut self, id: SlotId) -> Option<&Published<S>> {
        let published = self.0.get_mut(id)?;
        published.is_queued = false;
        Some(published)
    }

    /// Takes out the sockets of a port, which are closed with their last owner.
    pub(crate) fn unpublish(&mut self, forward: &Forward) -> Vec<S> {
        self.remove(|published| published.port.forward == *forward)
    }

    fn remove(&mut self, is_meant: impl Fn(&Published<S>) -> bool) -> Vec<S> {
        let meant = self.0.iter().filter(|(_, published)| is_meant(published));
        let ids: Vec<SlotId> = meant.map(|(id, _)| id).collect();
        let removed = ids.into_iter().filter_map(|id| self.0.remove(id));
        removed.map(|published| published.socket).collect()
    }

    /// Closes all sockets.
    pub(super) fn clear(&mut self) {
        self.0 = Slab::default();
    }

    /// The sockets with their ports.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Published<S>> {
        self.0.iter().map(|(_, published)| published)
    }

    /// The ports, once for each of their sockets.
    pub(super) fn ports(&self) -> impl Iterator<Item = &Arc<PublishedPort>> {
        self.0.iter().map(|(_, published)| &published.port)
    }
}

/// The addresses at which a port is bound.
fn bind_addresses(forward: &Forward, has: impl Fn(bool) -> bool) -> Vec<SocketAddr> {
    let any = |is_v4: bool| match is_v4 {
        true => SocketAddr::from(([0u8; 4], forward.from)),
        false => SocketAddr::from(([0u16; 8], forward.from)),
    };
    match forward.bind.address {
        Some(address) => vec![SocketAddr::new(address, forward.from)],
        None => [true, false].into_iter().filter(|v| has(*v)).map(any).collect(),
    }
}

/// Whether the host has no such IP version at all.
fn is_missing_version(e: &io::Error, forward: &Forward) -> bool {
    let lacks = matches!(e.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL));
    lacks && forward.bind.address.is_none()
}

/// A bound socket for a published port.
///
/// # Errors
/// The address is in use or not the host's, or the port is privileged.
pub(crate) fn open_bound(
    at: SocketAddr,
    forward: &Forward,
    kind: SockType,
    addresses: BindAddresses,
) -> io::Result<OwnedFd> {
    let fd = host_socket::open(at.is_ipv4(), kind, None)?;
    if kind == SockType::Stream {
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    }
    if at.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    if addresses == BindAddresses::Any {
        // Of IPv6 sockets, too (ip(7)).
        setsockopt(&fd, sockopt::IpFreebind, &true)?;
    }
    if let Some(interface) = &forward.bind.interface {
        setsockopt(&fd, sockopt::BindToDevice, &interface.into())?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(at))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::PortSpec;

    #[test]
    fn a_socket_waits_for_one_turn_however_often_it_becomes_ready() {
        let spec: PortSpec = "80".parse().unwrap();
        let port = Arc::new(PublishedPort::new(spec.forwards().remove(0)));
        let mut sockets = PublishedSockets::<OwnedFd>::default();
        let socket = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let id = sockets.0.insert(Published { socket, port, is_queued: false });
        for _ in 0..3 {
            assert!(sockets.queue(id));
            assert!((0..100).all(|_| !sockets.queue(id)));
            assert!(sockets.begin_turn(id).is_some());
        }
        sockets.clear();
        assert!(!sockets.queue(id) && sockets.begin_turn(id).is_none());
    }
}
