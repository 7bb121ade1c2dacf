//! UDP: on its way up, and what their users ask of a shard.

use alloc::boxed::Box;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fulmar_base::{
    Counter, DropReason, FlowKey, GsoKind, Instant, Probe, SlotId, Stage, with_zone, zone_of,
};
use fulmar_ip::{Delivered, ErrorKind, QuotedError};
use fulmar_mbuf::{Chain, FairShare, Purpose};
use fulmar_socket::{SocketError, Step};
use fulmar_udp::{BindError, BindOptions, Datagram, Incoming, UdpError, UdpSocket};

use crate::layers::Core;
use crate::net::{Net, Sink};
use crate::shard::Shard;
use crate::sockets::{Socket, UdpEntry};
use crate::templates::HeaderOptions;
use crate::udp_output::MAX_SEGMENTS;

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

impl<P: Probe> Shard<P> {
    pub(crate) fn udp_entry(&mut self, id: SlotId) -> Result<&mut UdpEntry, SocketError> {
        match self.core.sockets.get_mut(id) {
            Some(Socket::Udp(s)) => Ok(s),
            Some(_) => Err(SocketError::NotSupported),
            None => Err(SocketError::BadHandle),
        }
    }

    /// A packet for UDP, and for this shard.
    pub(crate) fn udp_input(&mut self, now: Instant, d: Delivered) {
        let (about, group) = (d.ip_header, d.is_group);
        let segment_bytes = d.offload.gso.filter(|g| g.kind == GsoKind::Udp);
        let segment_bytes = segment_bytes.map(|g| usize::from(g.segment_bytes));
        let Some((datagram, to)) = self.recognise(d, segment_bytes.is_some()) else { return };
        match to {
            Some(id) => match segment_bytes.filter(|n| *n > 0 && *n < datagram.payload.len()) {
                None => self.deliver_datagram(id, datagram),
                Some(segment_bytes) => self.deliver_run(id, datagram, segment_bytes),
            },
            None => {
                self.core.net.counters.drop_packet(DropReason::UdpNoSocket);
                let Net { pool, counters, ip, link, probe, .. } = &mut self.core.net;
                pool.free(datagram.payload);
                if !group {
                    let sink = &mut Sink { link, probe };
                    ip.port_unreachable(now, pool, counters, &about, sink);
                }
            }
        }
    }

    /// Checks a packet and finds its socket. One that a full queue is to drop is dropped before it is
    /// summed: the price of a flood is to be small.
    fn recognise(&mut self, d: Delivered, is_run: bool) -> Option<(Datagram, Option<SlotId>)> {
        let Shard { core, udp, rx, .. } = self;
        let (Core { net, sockets, .. }, udp, foresight) = (core, &udp.table, &rx.foresight);
        let Net { pool, counters, probe, .. } = net;
        let Delivered { src, dst, zone, chain, offload, .. } = d;
        let packet = Incoming { src, dst, zone, chain, offload };
        let share = pool.share_of(Purpose::Receive);
        let look = |from, to: SocketAddr, charge| {
            if probe.stage(Stage::Demultiplexed).is_break() {
                return Err(None);
            }
            let is_port = to.port() != 0;
            let found = is_port.then(|| foresight.socket_of_datagram(udp, to, from)).flatten();
            let refusal = match found.and_then(|id| sockets.get(id)) {
                // Of a run some may fit.
                Some(Socket::Udp(s)) if !is_run => drop_reason(&s.socket, charge, share),
                _ => None,
            };
            refusal.map_or(Ok(found), |reason| Err(Some(reason)))
        };
        fulmar_udp::input_with_lookup(packet, pool, counters, look).ok()
    }

    /// A run of datagrams that came as one super-frame: each is delivered by itself, unless the socket takes
    /// runs. They are copied apart, since a queue that refers to a frame of 64 KiB for each of them would soon be full.
    fn deliver_run(&mut self, id: SlotId, run: Datagram, segment_bytes: usize) {
        let takes_runs = matches!(self.core.sockets.get(id), Some(Socket::Udp(s)) if s.socket.gro);
        if let Some(segment_bytes) = u16::try_from(segment_bytes).ok().filter(|_| takes_runs) {
            return self
                .deliver_datagram(id, Datagram { segment_bytes: Some(segment_bytes), ..run });
        }
        let Datagram { src, dst, payload, .. } = run;
        if payload.len().div_ceil(segment_bytes) > MAX_SEGMENTS {
            self.core.net.counters.drop_packet(DropReason::BadOffload);
            return self.core.net.pool.free(payload);
        }
        let mut at = 0;
        while at < payload.len() {
            let len = segment_bytes.min(payload.len() - at);
            let Ok(mut one) = self.core.net.pool.alloc_chain(len, 0, Purpose::Receive) else {
                self.core.net.counters.drop_packet(DropReason::NoBuffer);
                break;
            };
            for piece in one.slices_mut() {
                at += payload.copy_to(at, piece);
            }
            self.core.net.counters.add(Counter::CopiedBytes, len as u64);
            self.deliver_datagram(id, Datagram { src, dst, payload: one, segment_bytes: None });
        }
        self.core.net.pool.free(payload);
    }

    fn deliver_datagram(&mut self, id: SlotId, datagram: Datagram) {
        let Some(Socket::Udp(s)) = self.core.sockets.get_mut(id) else {
            return self.core.net.pool.free(datagram.payload);
        };
        let Net { pool, counters, .. } = &mut self.core.net;
        let share = pool.share_of(Purpose::Receive);
        if share.is_contended()
            && let Some(reason) =
                drop_reason(&s.socket, fulmar_udp::charge(&datagram.payload), share)
        {
            counters.drop_packet(reason);
            return pool.free(datagram.payload);
        }
        let is_news = s.socket.deliver(datagram, pool, counters);
        if self.ends_at(Stage::TransportInput) {
            return;
        }
        if is_news {
            self.notify(id);
        }
        self.pass(Stage::ReaderWoken);
    }

    /// An ICMP error about a datagram of ours.
    pub(crate) fn udp_icmp_error(&mut self, now: Instant, e: QuotedError) {
        let Some(id) = self.udp.table.lookup(e.local, e.remote) else {
            return self.core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        };
        let error = match e.kind {
            ErrorKind::PortUnreachable => UdpError::ConnectionRefused,
            ErrorKind::TooBig { mtu } => {
                if !self.may_be_too_big(id, &e) {
                    return self.core.net.counters.drop_packet(DropReason::IcmpNoFlow);
                }
                if !self.core.net.ip.lower_datagram_mtu(now, e.remote.ip(), mtu) {
                    return self.core.net.counters.drop_packet(DropReason::IcmpMtuKnown);
                }
                UdpError::MessageTooLong
            }
            _ => UdpError::HostUnreachable,
        };
        let Some(Socket::Udp(s)) = self.core.sockets.get_mut(id) else { return };
        if s.socket.on_error(e.remote, error) {
            self.notify(id);
        } else if !matches!(e.kind, ErrorKind::TooBig { .. } | ErrorKind::ResolutionFailed) {
            // Only a connected socket is told.
            self.core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        }
    }

    /// Whether a datagram that a router found too big may be one of the socket: it has sent to that
    /// peer lately, and forbids IPv4 routers to fragment, without which they never say so.
    fn may_be_too_big(&self, id: SlotId, e: &QuotedError) -> bool {
        let Some(Socket::Udp(s)) = self.core.sockets.get(id) else { return false };
        let may_say = s.socket.dont_fragment || e.remote.is_ipv6();
        let own = s.template.as_deref().filter(|t| t.is_to(&e.remote));
        let from = s.socket.local.filter(|l| l.port() == 0).map(|_| e.local);
        may_say && own.or_else(|| self.udp.templates.find(id, from, &e.remote)).is_some()
    }

    /// Opens a datagram socket. With several shards it takes what is sent to its port on any queue; if
    /// sockets of several shards are bound to one port, each flow goes to one of them, by its hash.
    ///
    /// # Errors
    /// The address is not ours, or is in use.
    pub fn udp_bind(
        &mut self,
        local: SocketAddr,
        options: BindOptions,
    ) -> Result<SlotId, SocketError> {
        self.udp_bind_where(local, options, |_| true)
    }

    /// Opens a datagram socket with one peer. Its port is one whose packets the hash of the flow brings
    /// to this shard's queue.
    ///
    /// # Errors
    /// As [`Shard::udp_bind`] and [`Shard::udp_connect`].
    pub fn udp_open(&mut self, remote: SocketAddr) -> Result<SlotId, SocketError> {
        let remote = unmap(remote);
        let choice = self.core.net.ip.route(remote.ip(), zone_of(remote));
        let src = choice.map_err(|_| SocketError::NetworkUnreachable)?.src;
        let home = self.core.siblings.home();
        let comes_home =
            |port| home.owns(&FlowKey::new(with_zone(src, port, zone_of(remote)), remote));
        let socket = self.udp_bind_where(
            with_zone(src, 0, zone_of(remote)),
            BindOptions::default(),
            comes_home,
        )?;
        match self.udp_connect(socket, remote) {
            Ok(()) => Ok(socket),
            Err(e) => {
                self.close_datagram(socket);
                Err(e)
            }
        }
    }

    fn udp_bind_where(
        &mut self,
        local: SocketAddr,
        options: BindOptions,
        fits: impl Fn(u16) -> bool,
    ) -> Result<SlotId, SocketError> {
        self.core.check_usable()?;
        if options.any_port && local.port() != 0 {
            return Err(SocketError::Invalid);
        }
        let ip = local.ip();
        if !ip.is_unspecified()
            && !self.core.net.ip.accepts(ip)
            && !self.core.net.ip.is_broadcast(ip)
        {
            return Err(SocketError::AddressNotAvailable);
        }
        let id = self.core.sockets.insert(Socket::Udp(Box::new(UdpEntry {
            socket: UdpSocket::new(),
            binding: None,
            v6_only: options.v6_only,
            short: Default::default(),
            template: None,
            watch: Default::default(),
        })));
        // A port of the shard's choice is one that no other shard has.
        let is_free = |port| fits(port) && self.core.siblings.claims_port(port);
        match self.udp.table.bind(id, local, options, is_free) {
            Ok(bound) => {
                self.core.siblings.add_port(bound.local.port());
                if let Ok(entry) = self.udp_entry(id) {
                    entry.binding = Some(bound.slot);
                    entry.socket.local = Some(bound.local);
                }
                Ok(id)
            }
            Err(e) => {
                self.core.sockets.remove(id);
                Err(bind_error(e))
            }
        }
    }

    /// Lets go of a binding; without another one the shard no longer has the port.
    fn unbind(&mut self, slot: u32, local: Option<SocketAddr>) {
        self.udp.table.unbind(slot);
        if let Some(local) = local.filter(|l| !self.udp.table.is_port_bound(l.port())) {
            self.core.siblings.remove_port(local.port());
        }
    }

    /// Fixes the only peer of a datagram socket.
    ///
    /// # Errors
    /// No route, or another socket has the pair.
    pub fn udp_connect(&mut self, id: SlotId, remote: SocketAddr) -> Result<(), SocketError> {
        let remote = unmap(remote);
        let choice = self.core.net.ip.route(remote.ip(), zone_of(remote));
        let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
        let entry = self.udp_entry(id)?;
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
        check_family(bound, entry.v6_only, remote)?;
        let ip = if bound.ip().is_unspecified() { choice.src } else { bound.ip() };
        let local = with_zone(ip, bound.port(), zone_of(remote));
        self.udp.table.connect(binding, local, remote).map_err(bind_error)?;
        let entry = self.udp_entry(id)?;
        entry.socket.remote = Some(remote);
        entry.socket.local = Some(local);
        entry.template = None;
        self.udp.templates.remove(id);
        Ok(())
    }

    /// Takes the oldest datagram. Free its payload with [`Shard::free`].
    ///
    /// # Errors
    /// An error that came back for an earlier datagram.
    pub fn udp_receive(&mut self, id: SlotId) -> Result<Step<Datagram>, SocketError> {
        let down = self.down();
        let entry = self.udp_entry(id)?;
        // The error first, as Linux has it.
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        if let Some(d) = entry.socket.receive() {
            self.pass(Stage::ReceiveTaken);
            return Ok(Step::Done(d));
        }
        if let Some(e) = down {
            return Err(e);
        }
        Ok(Step::WaitData(1))
    }

    /// Takes the oldest datagram. A small one is copied into `into` and its buffer is free at once: that
    /// is shorter than to take the lock again for it. A larger one is the caller's to copy.
    ///
    /// # Errors
    /// As [`Shard::udp_receive`].
    pub fn udp_receive_into(
        &mut self,
        id: SlotId,
        into: &mut [u8],
    ) -> Result<Step<TakenDatagram>, SocketError> {
        let d = match self.udp_receive(id)? {
            Step::Done(d) => d,
            Step::WaitData(n) => return Ok(Step::WaitData(n)),
            Step::WaitSpace(n) => return Ok(Step::WaitSpace(n)),
        };
        if d.payload.len() > SMALL_DATAGRAM_BYTES {
            return Ok(Step::Done(TakenDatagram::Whole(d)));
        }
        let mut bytes = 0;
        if !self.stops_at(Stage::ReceiveTaken) {
            bytes = d.payload.copy_to(0, into);
            self.core.net.counters.add(Counter::CopiedBytes, bytes as u64);
            self.pass(Stage::ReceiveCopied);
        }
        self.core.net.pool.free(d.payload);
        Ok(Step::Done(TakenDatagram::Copied(bytes, d.src)))
    }

    /// Copies the oldest datagram without taking it.
    ///
    /// # Errors
    /// As [`Shard::udp_receive`].
    pub fn udp_peek(
        &mut self,
        id: SlotId,
        into: &mut [u8],
    ) -> Result<Step<(usize, SocketAddr)>, SocketError> {
        let down = self.down();
        let entry = self.udp_entry(id)?;
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        match entry.socket.peek() {
            Some(d) => Ok(Step::Done((d.payload.copy_to(0, into), d.src))),
            None => down.map_or(Ok(Step::WaitData(1)), Err),
        }
    }

    /// Runs `f` on the engine's part of a datagram socket, for options.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn with_udp<R>(
        &mut self,
        id: SlotId,
        f: impl FnOnce(&mut UdpSocket) -> R,
    ) -> Result<R, SocketError> {
        let entry = self.udp_entry(id)?;
        let of = |socket: &UdpSocket| (HeaderOptions::of(socket), socket.remote);
        let before = of(&entry.socket);
        let said = f(&mut entry.socket);
        if of(&entry.socket) != before {
            // Datagrams go by it without asking whether it is for these.
            entry.template = None;
        }
        Ok(said)
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

    pub(crate) fn close_datagram(&mut self, id: SlotId) {
        match self.core.sockets.remove(id) {
            Some(Socket::Udp(mut s)) => {
                if let Some(slot) = s.binding {
                    self.unbind(slot, s.socket.local);
                }
                s.socket.release(&mut self.core.net.pool);
            }
            Some(Socket::Ping(s)) => self.close_ping(*s),
            Some(Socket::EchoListener(s)) => self.close_echo_listener(*s),
            _ => {}
        }
    }
}

/// Why a datagram that is charged so much would be dropped: the socket's own limit, or, once half of
/// the receive share is in use, the socket's fair part of it.
#[inline]
fn drop_reason(socket: &UdpSocket, charge: usize, share: FairShare) -> Option<DropReason> {
    if share.is_contended() && charge > share.allowance(socket.truesize(), false) {
        return Some(DropReason::UdpBufferFull);
    }
    socket.drop_reason(charge)
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
    v6_only: bool,
    remote: SocketAddr,
) -> Result<(), SocketError> {
    let ok = match (bound.ip(), remote.ip()) {
        (IpAddr::V4(_), IpAddr::V4(_)) | (IpAddr::V6(_), IpAddr::V6(_)) => true,
        (IpAddr::V6(ip), IpAddr::V4(_)) => ip == Ipv6Addr::UNSPECIFIED && !v6_only,
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
