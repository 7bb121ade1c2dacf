//! The host's sockets for ports of the guest: one for each, whatever peers the guest writes to by it
//! (endpoint-independent mapping, RFC 4787 section 4.1), bound to the guest's own port number where it is free.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use fulmar_stack::base::{Instant, SlotId};
use fulmar_stack::shard::Slab;
use nix::errno::Errno;
use nix::sys::socket::{SockType, SockaddrStorage, bind, getsockname, setsockopt, sockopt};

use super::super::datagrams::socket_addr;
use super::super::host_socket;
use crate::config::Outbound;

/// The host's services have the ports below. A guest's port with such a number gets another one (RFC 4787 REQ-3).
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

/// A port of the guest, and which destinations its socket is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PortKey {
    pub guest: SocketAddr,
    /// The IP version of the destinations as the host knows them.
    pub is_v4: bool,
    /// They are on the host's loopback, where [`Outbound`] does not apply.
    pub is_loopback: bool,
    /// Several addresses of the guest's may lead to one of the host: each has a socket, so that the answers can be
    /// told apart.
    pub alias: u8,
}

/// A socket for a port of the guest.
pub(super) struct Port {
    pub key: PortKey,
    pub socket: Arc<OwnedFd>,
    /// Its port on the host.
    pub bound: u16,
    /// Flows that leave by it; without any it is closed.
    pub flows: usize,
    /// When the guest last sent something by it.
    pub sent_at: Instant,
    pub is_queued: bool,
    /// Calls in a row that failed with an error which the error queue does not have.
    pub failures: usize,
    /// The last turn in which datagrams came from the host.
    pub last_receive_turn: u64,
}

/// The sockets for the guest's ports.
#[derive(Default)]
pub(super) struct Ports {
    ports: Slab<Port>,
    by_key: HashMap<PortKey, SlotId>,
}

impl Ports {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.ports.len()
    }

    /// A port.
    pub(super) fn get(&self, id: SlotId) -> Option<&Port> {
        self.ports.get(id)
    }

    /// A port.
    pub(super) fn get_mut(&mut self, id: SlotId) -> Option<&mut Port> {
        self.ports.get_mut(id)
    }

    /// The port of a key.
    pub(super) fn find(&self, key: &PortKey) -> Option<SlotId> {
        self.by_key.get(key).copied()
    }

    /// The ports with a number on the host.
    pub(crate) fn bound_to(&self, number: u16) -> Vec<SlotId> {
        let bound = self.ports.iter().filter(|(_, port)| port.bound == number);
        bound.map(|(id, _)| id).collect()
    }

    /// Adds a socket that was opened.
    pub(super) fn insert(&mut self, key: PortKey, socket: OwnedFd, now: Instant) -> SlotId {
        let bound = getsockname::<SockaddrStorage>(socket.as_raw_fd()).ok();
        let id = self.ports.insert(Port {
            key,
            bound: bound.and_then(|a| socket_addr(&a)).map_or(0, |a| a.port()),
            socket: Arc::new(socket),
            flows: 0,
            sent_at: now,
            is_queued: false,
            failures: 0,
            last_receive_turn: 0,
        });
        self.by_key.insert(key, id);
        id
    }

    /// Removes a port.
    pub(super) fn remove(&mut self, id: SlotId) -> Option<Port> {
        let port = self.ports.remove(id)?;
        self.by_key.remove(&port.key);
        Some(port)
    }
}

impl PortKey {
    /// The key of a guest's port for a destination as the host knows it.
    pub(super) fn of(guest: SocketAddr, leads_to: SocketAddr) -> PortKey {
        let (is_v4, is_loopback) = (leads_to.is_ipv4(), leads_to.ip().is_loopback());
        PortKey { guest, is_v4, is_loopback, alias: 0 }
    }

    /// Opens a socket of the host for it.
    ///
    /// # Errors
    /// No descriptor, or what `outbound` names is gone.
    pub(super) fn open(&self, outbound: &Outbound) -> nix::Result<OwnedFd> {
        let fd = host_socket::open(self.is_v4, SockType::Datagram, None)?;
        match self.is_v4 {
            true => setsockopt(&fd, sockopt::Ipv4RecvErr, &true)?,
            false => {
                setsockopt(&fd, sockopt::Ipv6RecvErr, &true)?;
                setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
            }
        }
        // Older kernels hand over each datagram by itself.
        let _ = setsockopt(&fd, sockopt::UdpGroSegment, &true);
        let any = match (self.is_v4, self.is_loopback) {
            (true, false) => Ipv4Addr::UNSPECIFIED.into(),
            (false, false) => Ipv6Addr::UNSPECIFIED.into(),
            (true, true) => Ipv4Addr::LOCALHOST.into(),
            (false, true) => Ipv6Addr::LOCALHOST.into(),
        };
        let to = SocketAddr::new(any, 0);
        if let Some(interface) = outbound.interface_for(to) {
            setsockopt(&fd, sockopt::BindToDevice, &interface.into())?;
        }
        let own = outbound.address_for(to).unwrap_or(any);
        let number = self.guest.port();
        let at = |port| SockaddrStorage::from(SocketAddr::new(own, port));
        let is_wanted = number >= FIRST_UNPRIVILEGED_PORT;
        match is_wanted.then(|| bind(fd.as_raw_fd(), &at(number))) {
            Some(Ok(())) => Ok(fd),
            None | Some(Err(Errno::EADDRINUSE | Errno::EACCES)) => {
                bind(fd.as_raw_fd(), &at(0))?;
                Ok(fd)
            }
            Some(Err(e)) => Err(e),
        }
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
