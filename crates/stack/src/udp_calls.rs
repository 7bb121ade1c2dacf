//! UDP and echo requests: on their way up, and what their users ask of a shard.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fulmar_base::{
    Counter, DropReason, FlowKey, Instant, Probe, SlotId, Stage, with_zone, zone_of,
};
use fulmar_ip::{Delivered, EchoReply, ErrorKind, Outgoing, QuotedError};
use fulmar_mbuf::{Chain, Purpose};
use fulmar_socket::{SocketError, Step};
use fulmar_udp::{BindError, BindOptions, Datagram, UdpError, UdpSocket};
use fulmar_wire::protocol;

use crate::net::{Net, Sink};
use crate::shard::Shard;
use crate::sockets::{Echo, PING_REPLIES, PingEntry, Socket, UdpEntry};

/// Datagrams up to this size are laid together into one mbuf with room for the headers.
const HEADROOM: usize = fulmar_udp::HEADROOM_BYTES;

/// The two ends of a datagram to be sent, and what its socket says of it.
struct Ends {
    bound: SocketAddr,
    remote: SocketAddr,
    ttl: Option<u8>,
    dscp_ecn: u8,
    broadcast: bool,
    dont_fragment: bool,
}

impl<P: Probe> Shard<P> {
    fn udp_entry(&mut self, id: SlotId) -> Result<&mut UdpEntry, SocketError> {
        match self.sockets.get_mut(id) {
            Some(Socket::Udp(s)) => Ok(s),
            Some(_) => Err(SocketError::NotSupported),
            None => Err(SocketError::BadHandle),
        }
    }

    /// A packet for UDP.
    pub(crate) fn udp_input(&mut self, now: Instant, d: Delivered) {
        if let Some(key) = ports_of(&d)
            && !d.broadcast_or_multicast
            && let Some(owner) = self.is_stray(&key)
        {
            return self.put_aside(owner, d);
        }
        let Net { pool, counters, .. } = &mut self.net;
        let about = d.ip_header;
        let group = d.broadcast_or_multicast;
        let Ok(datagram) =
            fulmar_udp::input(d.src, d.dst, d.zone, d.chain, d.offload, pool, counters)
        else {
            return;
        };
        if self.ends_at(Stage::Demultiplexed) {
            return self.net.pool.free(datagram.payload);
        }
        let to = self.socket_of_datagram(&datagram);
        match to {
            Some(id) => self.deliver_datagram(id, datagram),
            None => {
                self.net.counters.drop_packet(DropReason::UdpNoSocket);
                let Net { pool, counters, ip, link, probe, .. } = &mut self.net;
                pool.free(datagram.payload);
                if !group {
                    let sink = &mut Sink { link, probe };
                    ip.port_unreachable(now, pool, counters, &about, sink);
                }
            }
        }
    }

    fn deliver_datagram(&mut self, id: SlotId, datagram: Datagram) {
        let Some(Socket::Udp(s)) = self.sockets.get_mut(id) else {
            return self.net.pool.free(datagram.payload);
        };
        let Net { pool, counters, .. } = &mut self.net;
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
        let Some(id) = self.udp.lookup(e.local, e.remote) else {
            return self.net.counters.drop_packet(DropReason::IcmpNoFlow);
        };
        if let ErrorKind::TooBig { mtu } = e.kind {
            self.net.ip.lower_path_mtu(now, e.remote.ip(), mtu);
        }
        let error = match e.kind {
            ErrorKind::PortUnreachable => UdpError::ConnectionRefused,
            ErrorKind::TooBig { .. } => UdpError::MessageTooLong,
            _ => UdpError::HostUnreachable,
        };
        if let Some(Socket::Udp(s)) = self.sockets.get_mut(id)
            && s.socket.on_error(e.remote, error)
        {
            self.notify(id);
        }
    }

    /// Opens a datagram socket.
    ///
    /// # Errors
    /// The address is not ours, or is in use.
    pub fn udp_bind(
        &mut self,
        local: SocketAddr,
        options: BindOptions,
    ) -> Result<SlotId, SocketError> {
        if self.is_down() {
            return Err(SocketError::NetworkDown);
        }
        if self.sockets.len() >= self.config.max_sockets {
            return Err(SocketError::NoBuffer);
        }
        let ip = local.ip();
        if !ip.is_unspecified() && !self.net.ip.is_local(ip) && !self.net.ip.is_broadcast(ip) {
            return Err(SocketError::AddressNotAvailable);
        }
        let id = self.sockets.insert(Socket::Udp(Box::new(UdpEntry {
            socket: UdpSocket::new(),
            binding: None,
            v6_only: options.v6_only,
            is_short: false,
            watch: Default::default(),
        })));
        match self.udp.bind(id, local, options, |_| true) {
            Ok(bound) => {
                if let Ok(entry) = self.udp_entry(id) {
                    entry.binding = Some(bound.slot);
                    entry.socket.local = Some(bound.local);
                }
                Ok(id)
            }
            Err(e) => {
                self.sockets.remove(id);
                Err(bind_error(e))
            }
        }
    }

    /// Fixes the only peer of a datagram socket.
    ///
    /// # Errors
    /// No route, or another socket has the pair.
    pub fn udp_connect(&mut self, id: SlotId, remote: SocketAddr) -> Result<(), SocketError> {
        let remote = unmap(remote);
        let choice = self.net.ip.route(remote.ip(), zone_of(remote));
        let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
        let entry = self.udp_entry(id)?;
        if choice.is_broadcast && !entry.socket.broadcast {
            return Err(SocketError::AccessDenied);
        }
        let (Some(bound), Some(binding)) = (entry.socket.local, entry.binding) else {
            return Err(SocketError::Invalid);
        };
        check_family(bound, entry.v6_only, remote)?;
        let ip = if bound.ip().is_unspecified() { choice.src } else { bound.ip() };
        let local = with_zone(ip, bound.port(), zone_of(remote));
        self.udp.connect(binding, local, remote).map_err(bind_error)?;
        let entry = self.udp_entry(id)?;
        entry.socket.remote = Some(remote);
        entry.socket.local = Some(local);
        Ok(())
    }

    /// Sends one datagram, to the connected peer or to `to`.
    ///
    /// # Errors
    /// An error that came back earlier; no destination; too long; no route; no buffer.
    pub fn udp_send(
        &mut self,
        now: Instant,
        id: SlotId,
        parts: &[&[u8]],
        to: Option<SocketAddr>,
    ) -> Result<usize, SocketError> {
        let bytes: usize = parts.iter().map(|p| p.len()).sum();
        match self.output_datagram(now, id, parts, bytes, to)? {
            Some(()) => self.finish_datagram(now),
            None => self.net.link.set_now(now),
        }
        Ok(bytes)
    }

    /// The way of a datagram into the burst; `None` if a probe has ended it.
    fn output_datagram(
        &mut self,
        now: Instant,
        id: SlotId,
        parts: &[&[u8]],
        bytes: usize,
        to: Option<SocketAddr>,
    ) -> Result<Option<()>, SocketError> {
        if self.stops_at(Stage::Locked) {
            return Ok(None);
        }
        let ends = self.check_datagram(id, to)?;
        if self.ends_at(Stage::SendChecked) {
            return Ok(None);
        }
        let (src, most_bytes) = self.choose_path(&ends)?;
        if bytes > most_bytes {
            return Err(SocketError::MessageTooLong);
        }
        if self.ends_at(Stage::PathChosen) {
            return Ok(None);
        }
        let Some(payload) = self.fill(parts, bytes)? else { return Ok(None) };
        let Ends { bound, remote, .. } = ends;
        let local = with_zone(src, bound.port(), zone_of(remote));
        let (chain, offload) = fulmar_udp::output(&mut self.net.pool, local, remote, payload)
            .map_err(|_| SocketError::NoBuffer)?;
        if self.ends_at(Stage::TransportOutput) {
            self.net.pool.free(chain);
            return Ok(None);
        }
        self.net.link.set_now(now);
        self.send_packet(
            now,
            Outgoing {
                src,
                dst: remote.ip(),
                zone: zone_of(remote),
                protocol: protocol::UDP,
                ttl: ends.ttl,
                dscp_ecn: ends.dscp_ecn,
                chain,
                offload,
                dont_fragment: ends.dont_fragment,
            },
        )?;
        self.net.counters.count(Counter::UdpOut);
        self.net.counters.add(Counter::CopiedBytes, bytes as u64);
        Ok(Some(()))
    }

    /// The socket of a datagram to be sent, and its two ends.
    fn check_datagram(&mut self, id: SlotId, to: Option<SocketAddr>) -> Result<Ends, SocketError> {
        if self.is_down() {
            return Err(SocketError::NetworkDown);
        }
        let entry = self.udp_entry(id)?;
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        let remote = to.or(entry.socket.remote).ok_or(SocketError::DestinationRequired)?;
        let remote = unmap(remote);
        if remote.port() == 0 {
            return Err(SocketError::Invalid);
        }
        let bound = entry.socket.local.ok_or(SocketError::Invalid)?;
        check_family(bound, entry.v6_only, remote)?;
        let UdpSocket { ttl, dscp_ecn, broadcast, dont_fragment, .. } = entry.socket;
        Ok(Ends { bound, remote, ttl, dscp_ecn, broadcast, dont_fragment })
    }

    /// The source address that the routes give, and how much payload may go. What is longer than the
    /// path's packets goes in fragments, unless the socket forbids it.
    fn choose_path(&self, ends: &Ends) -> Result<(IpAddr, usize), SocketError> {
        let remote = ends.remote;
        let bound = Some(ends.bound.ip()).filter(|ip| !ip.is_unspecified());
        let choice = self.net.ip.route_from(bound, remote.ip(), zone_of(remote));
        let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
        if choice.is_broadcast && !ends.broadcast {
            return Err(SocketError::AccessDenied);
        }
        let src = bound.unwrap_or(choice.src);
        let largest_packet = if ends.dont_fragment { choice.mtu } else { usize::MAX };
        Ok((src, fulmar_udp::max_payload(largest_packet, remote.ip())))
    }

    /// As [`Shard::udp_send`], for a sender that can wait for buffers and for the device: wait for
    /// `WRITABLE` and repeat.
    ///
    /// # Errors
    /// As [`Shard::udp_send`], but for those two.
    pub fn udp_send_step(
        &mut self,
        now: Instant,
        id: SlotId,
        parts: &[&[u8]],
        to: Option<SocketAddr>,
    ) -> Result<Step<usize>, SocketError> {
        match self.udp_send(now, id, parts, to) {
            Err(SocketError::NoBuffer | SocketError::WouldBlock) => {
                self.note_shortage(now, id);
                Ok(Step::WaitSpace(1))
            }
            other => other.map(Step::Done),
        }
    }

    /// The payload in one mbuf (or a few), with room for every header in front; `None` if a probe
    /// has ended the path.
    fn fill(&mut self, parts: &[&[u8]], bytes: usize) -> Result<Option<Chain>, SocketError> {
        let pool = &mut self.net.pool;
        let mut chain =
            pool.alloc_chain(bytes, HEADROOM, Purpose::Send).map_err(|_| SocketError::NoBuffer)?;
        if self.ends_at(Stage::SendReserved) {
            self.net.pool.free(chain);
            return Ok(None);
        }
        chain.fill(parts.iter().copied());
        if self.ends_at(Stage::SendCopied) {
            self.net.pool.free(chain);
            return Ok(None);
        }
        Ok(Some(chain))
    }

    fn send_packet(&mut self, now: Instant, packet: Outgoing) -> Result<(), SocketError> {
        let Net { pool, counters, ip, link, probe, .. } = &mut self.net;
        use fulmar_ip::OutputError as E;
        ip.output(now, pool, counters, packet, &mut Sink { link, probe }).map_err(|e| match e {
            E::NoRoute => SocketError::NetworkUnreachable,
            E::TooBig { .. } => SocketError::MessageTooLong,
            E::NoBuffer => SocketError::NoBuffer,
            E::HostUnreachable => SocketError::HostUnreachable,
            E::Full => SocketError::WouldBlock,
        })
    }

    fn finish_datagram(&mut self, now: Instant) {
        if self.net.link.loopback.is_empty() {
            self.flush();
        } else {
            self.finish_call(now);
        }
    }

    /// Takes the oldest datagram. Free its payload with [`Shard::free`].
    ///
    /// # Errors
    /// An error that came back for an earlier datagram.
    pub fn udp_receive(&mut self, id: SlotId) -> Result<Step<Datagram>, SocketError> {
        let down = self.is_down();
        let entry = self.udp_entry(id)?;
        // The error first, as Linux has it.
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        if let Some(d) = entry.socket.receive() {
            self.pass(Stage::ReceiveTaken);
            return Ok(Step::Done(d));
        }
        if down {
            return Err(SocketError::NetworkDown);
        }
        Ok(Step::WaitData(1))
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
        let down = self.is_down();
        let entry = self.udp_entry(id)?;
        if let Some(e) = entry.socket.take_error() {
            return Err(udp_error(e));
        }
        match entry.socket.peek() {
            Some(d) => Ok(Step::Done((d.payload.copy_to(0, into), d.src))),
            None if down => Err(SocketError::NetworkDown),
            None => Ok(Step::WaitData(1)),
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
        Ok(f(&mut self.udp_entry(id)?.socket))
    }

    /// The pending error of any socket, once.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn take_error(&mut self, id: SlotId) -> Result<Option<SocketError>, SocketError> {
        match self.sockets.get_mut(id).ok_or(SocketError::BadHandle)? {
            Socket::Tcp(s) => Ok(s.error.or_else(|| s.tcb.take_error().map(Into::into))),
            Socket::Udp(s) => Ok(s.socket.take_error().map(udp_error)),
            Socket::Listener(_) | Socket::Ping(_) => Ok(None),
        }
    }

    /// Gives bytes that were detached back to the pool.
    pub fn free(&mut self, chain: Chain) {
        self.net.counters.add(Counter::CopiedBytes, chain.len() as u64);
        self.net.pool.free(chain);
    }

    pub(crate) fn close_datagram(&mut self, id: SlotId) {
        match self.sockets.remove(id) {
            Some(Socket::Udp(mut s)) => {
                if let Some(slot) = s.binding {
                    self.udp.unbind(slot);
                }
                s.socket.release(&mut self.net.pool);
            }
            Some(Socket::Ping(s)) => {
                for echo in s.replies {
                    if let Ok(chain) = echo.outcome {
                        self.net.pool.free(chain);
                    }
                }
            }
            _ => {}
        }
    }

    /// Opens a socket for echo requests.
    pub fn ping_open(&mut self) -> SlotId {
        let used: Vec<u16> = self.pings().map(|(_, p)| p.ident).collect();
        let ident = self.secret.ports_for(0u8).find(|i| !used.contains(i)).unwrap_or(1);
        self.sockets.insert(Socket::Ping(Box::new(PingEntry {
            ident,
            replies: VecDeque::new(),
            watch: Default::default(),
        })))
    }

    fn pings(&self) -> impl Iterator<Item = (SlotId, &PingEntry)> {
        self.sockets.iter().filter_map(|(id, s)| match s {
            Socket::Ping(p) => Some((id, &**p)),
            _ => None,
        })
    }

    /// Sends an echo request with `bytes` of payload.
    ///
    /// # Errors
    /// No route, too long, no buffer.
    pub fn ping_send(
        &mut self,
        now: Instant,
        id: SlotId,
        to: SocketAddr,
        seq: u16,
        bytes: &[u8],
    ) -> Result<(), SocketError> {
        let Some(Socket::Ping(p)) = self.sockets.get(id) else {
            return Err(SocketError::BadHandle);
        };
        let ident = p.ident;
        let route = self.net.ip.route(to.ip(), zone_of(to));
        route.map_err(|_| SocketError::NetworkUnreachable)?;
        if bytes.len() > fulmar_udp::max_payload(usize::MAX, to.ip()) {
            return Err(SocketError::MessageTooLong);
        }
        let Some(payload) = self.fill(&[bytes], bytes.len())? else { return Ok(()) };
        let Net { pool, counters, ip, link, probe, .. } = &mut self.net;
        link.set_now(now);
        let sink = &mut Sink { link, probe };
        ip.echo_request(now, pool, counters, to, (ident, seq), payload, sink)
            .map_err(|_| SocketError::HostUnreachable)?;
        self.finish_datagram(now);
        Ok(())
    }

    /// The next answer.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`], [`SocketError::NetworkDown`].
    pub fn ping_receive(&mut self, id: SlotId) -> Result<Step<Echo>, SocketError> {
        let down = self.is_down();
        match self.sockets.get_mut(id) {
            Some(Socket::Ping(p)) => match p.replies.pop_front() {
                Some(echo) => Ok(Step::Done(echo)),
                None if down => Err(SocketError::NetworkDown),
                None => Ok(Step::WaitData(1)),
            },
            _ => Err(SocketError::BadHandle),
        }
    }

    pub(crate) fn echo_reply(&mut self, r: EchoReply) {
        let (ident, from) = (r.ident, r.from);
        let echo = Echo { from, seq: r.seq, hop_limit: r.hop_limit, outcome: Ok(r.payload) };
        self.give_echo(ident, echo);
    }

    pub(crate) fn ping_error(&mut self, now: Instant, e: QuotedError) {
        let is_ours = self.pings().any(|(_, p)| p.ident == e.local.port());
        let error = match e.kind {
            ErrorKind::TooBig { mtu } => {
                if is_ours {
                    self.net.ip.lower_path_mtu(now, e.remote.ip(), mtu);
                }
                SocketError::MessageTooLong
            }
            _ => SocketError::HostUnreachable,
        };
        let echo =
            Echo { from: e.remote.ip(), seq: e.seq as u16, hop_limit: 0, outcome: Err(error) };
        self.give_echo(e.local.port(), echo);
    }

    fn give_echo(&mut self, ident: u16, echo: Echo) {
        let owner = self.pings().find(|(_, p)| p.ident == ident).map(|(id, _)| id);
        let Some(id) = owner else {
            self.net.counters.drop_packet(DropReason::IcmpNoFlow);
            if let Ok(chain) = echo.outcome {
                self.net.pool.free(chain);
            }
            return;
        };
        if let Some(Socket::Ping(p)) = self.sockets.get_mut(id) {
            if p.replies.len() >= PING_REPLIES
                && let Some(Echo { outcome: Ok(chain), .. }) = p.replies.pop_front()
            {
                self.net.pool.free(chain);
            }
            p.replies.push_back(echo);
        }
        self.notify(id);
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
fn check_family(bound: SocketAddr, v6_only: bool, remote: SocketAddr) -> Result<(), SocketError> {
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

fn udp_error(e: UdpError) -> SocketError {
    match e {
        UdpError::ConnectionRefused => SocketError::ConnectionRefused,
        UdpError::HostUnreachable => SocketError::HostUnreachable,
        UdpError::MessageTooLong => SocketError::MessageTooLong,
    }
}

/// The flow of a delivered UDP packet; `None` if it is too short to have ports.
fn ports_of(d: &Delivered) -> Option<FlowKey> {
    let [s0, s1, d0, d1] = *d.chain.front()?.as_slice().first_chunk::<4>()?;
    let local = with_zone(d.dst, u16::from_be_bytes([d0, d1]), d.zone);
    let remote = with_zone(d.src, u16::from_be_bytes([s0, s1]), d.zone);
    Some(FlowKey::new(local, remote))
}
