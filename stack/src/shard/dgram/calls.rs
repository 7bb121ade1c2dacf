//! Calls of datagram sockets: opening, receiving, options. Sending is in `output.rs` and `many.rs`.

use alloc::boxed::Box;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::task::Poll;

use crate::base::{Counter, FlowKey, SlotId, Stage, with_zone, zone_of};
use crate::mbuf::Chain;
use crate::socket::{SocketError, soreceive};
use crate::tcp::LoanCharge;
use crate::udp::{BindError, BindOptions, Datagram, UdpError, UdpSocket};

use crate::shard::conn::socket_options::HeaderOptions;
use crate::shard::dgram::layer::Udp;
use crate::shard::layers::Core;
use crate::shard::sockets::{Socket, UdpEntry};
use crate::shard::world::Shard;

/// Payload that is copied to a receiver under the lock.
const SMALL_DATAGRAM_BYTES: usize = 512;

/// A datagram that was taken.
#[derive(Debug)]
pub enum TakenDatagram {
    /// So many bytes of it were copied; its sender.
    Copied(usize, SocketAddr),
    /// It is to be copied, and freed then.
    Whole(Datagram),
}

/// The calls of datagram sockets.
pub struct UdpSockets<'a> {
    pub(crate) shard: &'a mut Shard,
}

impl Shard {
    /// Datagram sockets.
    #[inline(always)]
    pub fn udp(&mut self) -> UdpSockets<'_> {
        UdpSockets { shard: self }
    }

    /// The pending error of any socket, once.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn take_error(&mut self, id: SlotId) -> Result<Option<SocketError>, SocketError> {
        match self.core.sockets.get_mut(id).ok_or(SocketError::BadHandle)? {
            Socket::Tcp(s) => Ok(s.error.or_else(|| s.tcb.take_error().map(Into::into))),
            Socket::Udp(s) => Ok(s.socket.take_error().map(udp_error)),
            Socket::Listener(_) | Socket::Ping(_) | Socket::EchoListener(_) => Ok(None),
        }
    }

    /// Gives bytes that were detached back to the pool.
    pub fn free(&mut self, chain: Chain) {
        self.core.net.counters.add(Counter::CopiedBytes, chain.len() as u64);
        self.core.net.pool.free(chain);
    }
}

impl UdpSockets<'_> {
    /// Opens a datagram socket. With several shards it takes what is sent to its port on any queue; if
    /// sockets of several shards are bound to one port, each flow goes to one of them, by its hash.
    ///
    /// # Errors
    /// The address is not ours, or is in use.
    pub fn bind(&mut self, local: SocketAddr, options: BindOptions) -> Result<SlotId, SocketError> {
        self.shard.core.check_usable()?;
        self.shard.udp.bind(local, options, |_| true, &mut self.shard.core)
    }

    /// Opens a datagram socket with one peer. Its port is one whose packets the hash of the flow brings
    /// to this shard's queue.
    ///
    /// # Errors
    /// As [`UdpSockets::bind`] and [`UdpSockets::connect`].
    pub fn open(&mut self, remote: SocketAddr) -> Result<SlotId, SocketError> {
        let remote = unmap(remote);
        let choice = self.shard.core.net.ip.route(remote.ip(), zone_of(remote));
        let src = choice.map_err(|_| SocketError::NetworkUnreachable)?.src;
        let ownership = self.shard.core.siblings.ownership();
        let is_ours =
            |port| ownership.owns(&FlowKey::new(with_zone(src, port, zone_of(remote)), remote));
        self.shard.core.check_usable()?;
        let local = with_zone(src, 0, zone_of(remote));
        let socket =
            self.shard.udp.bind(local, BindOptions::default(), is_ours, &mut self.shard.core)?;
        match self.connect(socket, remote) {
            Ok(()) => Ok(socket),
            Err(e) => {
                self.shard.udp.close(socket, &mut self.shard.core);
                Err(e)
            }
        }
    }

    /// Fixes the only peer of a datagram socket.
    ///
    /// # Errors
    /// No route, or another socket has the pair.
    pub fn connect(&mut self, id: SlotId, remote: SocketAddr) -> Result<(), SocketError> {
        let remote = unmap(remote);
        let choice = self.shard.core.net.ip.route(remote.ip(), zone_of(remote));
        let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
        let entry = self.shard.core.sockets.udp(id)?;
        if entry.socket.local.is_some_and(|l| l.port() == 0) {
            // Bound to every port.
            return Err(SocketError::Invalid);
        }
        if choice.is_broadcast && !entry.socket.broadcast {
            return Err(SocketError::AccessDenied);
        }
        let (Some(bound), Some(binding)) = (entry.socket.local, entry.binding) else {
            return Err(SocketError::Invalid);
        };
        check_family(bound, entry.only_v6, remote)?;
        let ip = if bound.ip().is_unspecified() { choice.src } else { bound.ip() };
        let local = with_zone(ip, bound.port(), zone_of(remote));
        self.shard.udp.table.connect(binding, local, remote).map_err(bind_error)?;
        let entry = self.shard.core.sockets.udp(id)?;
        entry.socket.remote = Some(remote);
        entry.socket.local = Some(local);
        entry.template = None;
        self.shard.udp.templates.remove(id);
        Ok(())
    }

    /// Takes the oldest datagram. Free its payload with [`Shard::free`].
    ///
    /// # Errors
    /// An error that came back for an earlier datagram.
    pub fn receive(&mut self, id: SlotId) -> Result<Poll<Datagram>, SocketError> {
        let down = self.shard.core.events.down;
        let entry = self.shard.core.sockets.udp(id)?;
        // The error first, as Linux has it.
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        if let Some(d) = entry.socket.receive() {
            self.shard.core.net.pass(Stage::ReceiveTaken);
            return Ok(Poll::Ready(d));
        }
        if let Some(e) = down {
            return Err(e);
        }
        Ok(Poll::Pending)
    }

    /// Takes the oldest datagram. A small one is copied into `into` and its buffer freed, which is
    /// shorter than taking the lock again. A larger one is copied by the caller.
    ///
    /// # Errors
    /// As [`UdpSockets::receive`].
    pub fn receive_into(
        &mut self,
        id: SlotId,
        into: &mut [u8],
    ) -> Result<Poll<TakenDatagram>, SocketError> {
        let Poll::Ready(d) = self.receive(id)? else { return Ok(Poll::Pending) };
        if d.payload.len() > SMALL_DATAGRAM_BYTES {
            return Ok(Poll::Ready(TakenDatagram::Whole(d)));
        }
        let bytes = d.payload.copy_to(0, into);
        self.shard.core.net.counters.add(Counter::CopiedBytes, bytes as u64);
        self.shard.core.net.pass(Stage::ReceiveCopied);
        self.shard.core.net.pool.free(d.payload);
        Ok(Poll::Ready(TakenDatagram::Copied(bytes, d.src)))
    }

    /// Copies the oldest datagram without taking it.
    ///
    /// # Errors
    /// As [`UdpSockets::receive`].
    pub fn peek(
        &mut self,
        id: SlotId,
        into: &mut [u8],
    ) -> Result<Poll<(usize, SocketAddr)>, SocketError> {
        let down = self.shard.core.events.down;
        let entry = self.shard.core.sockets.udp(id)?;
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        match entry.socket.peek() {
            Some(d) => Ok(Poll::Ready((d.payload.copy_to(0, into), d.src))),
            None => down.map_or(Ok(Poll::Pending), Err),
        }
    }

    /// Gives `f` the protocol state of a datagram socket, to read or set its options.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn with_socket<R>(
        &mut self,
        id: SlotId,
        f: impl FnOnce(&mut UdpSocket) -> R,
    ) -> Result<R, SocketError> {
        let entry = self.shard.core.sockets.udp(id)?;
        let of = |socket: &UdpSocket| (HeaderOptions::of(socket), socket.remote);
        let before = of(&entry.socket);
        let result = f(&mut entry.socket);
        if of(&entry.socket) != before {
            // It is not checked against the options when a datagram is sent.
            entry.template = None;
        }
        Ok(result)
    }

    /// As [`UdpSockets::receive`], for an application that keeps the payload. Give it back with
    /// [`Shard::take_back`].
    ///
    /// # Errors
    /// As [`UdpSockets::receive`].
    pub fn lend(&mut self, id: SlotId) -> Result<Poll<(Datagram, LoanCharge)>, SocketError> {
        let Poll::Ready(mut d) = self.receive(id)? else { return Ok(Poll::Pending) };
        // Without memory for a copy the datagram itself is lent, and charged.
        let payload = soreceive::keepable(d.payload, &mut self.shard.core.net.pool, false);
        d.payload = payload.unwrap_or_else(|as_it_is| as_it_is);
        let lent = LoanCharge::of(&d.payload);
        self.shard.core.net.window.lend(lent.storage_bytes);
        if let Some(Socket::Udp(entry)) = self.shard.core.sockets.get_mut(id) {
            entry.socket.lend(lent.storage_bytes);
        }
        self.shard.core.net.count_loan(lent.bytes);
        Ok(Poll::Ready((d, lent)))
    }
}

/// A v4-mapped destination is an IPv4 destination.
pub(crate) fn unmap(a: SocketAddr) -> SocketAddr {
    match a {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(IpAddr::V4(v4), v6.port()),
            None => a,
        },
        SocketAddr::V4(_) => a,
    }
}

/// Whether a socket bound to `bound` may send to `remote`.
pub(crate) fn check_family(
    bound: SocketAddr,
    only_v6: bool,
    remote: SocketAddr,
) -> Result<(), SocketError> {
    let ok = match (bound.ip(), remote.ip()) {
        (IpAddr::V4(_), IpAddr::V4(_)) | (IpAddr::V6(_), IpAddr::V6(_)) => true,
        (IpAddr::V6(ip), IpAddr::V4(_)) => ip == Ipv6Addr::UNSPECIFIED && !only_v6,
        (IpAddr::V4(_), IpAddr::V6(_)) => false,
    };
    if ok && remote.ip() != IpAddr::V4(Ipv4Addr::UNSPECIFIED) && !remote.ip().is_multicast() {
        return Ok(());
    }
    Err(if ok { SocketError::NetworkUnreachable } else { SocketError::FamilyNotSupported })
}

fn bind_error(e: BindError) -> SocketError {
    match e {
        BindError::InUse | BindError::NoPorts => SocketError::AddressInUse,
        BindError::NotBound => SocketError::Invalid,
    }
}

pub(crate) fn udp_error(e: UdpError) -> SocketError {
    match e {
        UdpError::ConnectionRefused => SocketError::ConnectionRefused,
        UdpError::HostUnreachable => SocketError::HostUnreachable,
        UdpError::MessageTooLong => SocketError::MessageTooLong,
    }
}

impl Udp {
    /// Opens a datagram socket on a port that `fits`, if it may choose one.
    fn bind(
        &mut self,
        local: SocketAddr,
        options: BindOptions,
        fits: impl Fn(u16) -> bool,
        core: &mut Core,
    ) -> Result<SlotId, SocketError> {
        if options.any_port && local.port() != 0 {
            return Err(SocketError::Invalid);
        }
        let ip = local.ip();
        if !ip.is_unspecified() && !core.net.ip.accepts(ip) && !core.net.ip.is_broadcast(ip) {
            return Err(SocketError::AddressNotAvailable);
        }
        let id = core.sockets.insert(Socket::Udp(Box::new(UdpEntry {
            socket: UdpSocket::new(),
            binding: None,
            only_v6: options.only_v6,
            blocked: Default::default(),
            template: None,
            watch: Default::default(),
        })));
        // A port of the shard's choice is one that no other shard has.
        let is_free = |port| fits(port) && core.siblings.claims_port(port);
        match self.table.bind(id, local, options, is_free) {
            Ok(bound) => {
                core.siblings.add_port(bound.local.port());
                if let Ok(entry) = core.sockets.udp(id) {
                    entry.binding = Some(bound.slot);
                    entry.socket.local = Some(bound.local);
                }
                Ok(id)
            }
            Err(e) => {
                core.sockets.remove(id);
                Err(bind_error(e))
            }
        }
    }

    /// Closes a datagram socket. Without another binding the shard no longer has the port.
    pub(crate) fn close(&mut self, id: SlotId, core: &mut Core) {
        let Some(Socket::Udp(mut s)) = core.sockets.remove(id) else { return };
        if let Some(slot) = s.binding {
            self.table.unbind(slot);
            if let Some(local) = s.socket.local.filter(|l| !self.table.is_port_bound(l.port())) {
                core.siblings.remove_port(local.port());
            }
        }
        s.socket.release(&mut core.net.pool);
    }
}
