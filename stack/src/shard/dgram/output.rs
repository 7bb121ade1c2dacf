//! UDP output: one fast path and one slow path.
//!
//! ```text
//!   fast: a valid template, the datagram fits its path
//!           buffer, copy, headers in front ────────────────────────────┐
//!     │ else, without side effects                                     ▼
//!   slow: socket, pending error, endpoints, route, buffer, copy,   transmit burst
//!         udp::output, Ip::output; leaves a template ──────────────────┘
//! ```
//!
//! A datagram of a connected socket that fits one buffer goes through the fast path as one piece of code, in
//! which no value larger than a word is passed on until the frame is in the burst. Both paths send the same
//! frames (`tests/udp/templates.rs`).

use alloc::boxed::Box;
use core::net::{IpAddr, SocketAddr};
use core::task::Poll;

use crate::base::{Counter, Instant, MtuDiscovery, Offload, SlotId, Stage, with_zone, zone_of};
use crate::device::Packet;
use crate::ip::{FrameSink, Ip, Outgoing, Traffic};
use crate::mbuf::{Chain, Mbuf, Purpose};
use crate::socket::SocketError;
use crate::udp::UdpSocket;
use crate::wire::protocol;
use crate::wire::udp::HEADER_BYTES;

use crate::shard::conn::socket_options::HeaderOptions;
use crate::shard::dgram::calls::{UdpSockets, check_family, udp_error, unmap};
use crate::shard::dgram::layer::Udp;
use crate::shard::layers::Core;
use crate::shard::link::net::{Net, Sink};
use crate::shard::link::templates::UdpTemplate;
use crate::shard::sockets::Socket;
use crate::shard::world::Shard;

/// Headroom of a payload, so that all headers are in the same mbuf.
const HEADROOM: usize = crate::udp::HEADROOM_BYTES;

/// Payload that is written into one buffer together with its headers, by the sender itself: what fits the
/// second class of the pool.
const LINEAR_BYTES: usize = 2048 - HEADROOM;

/// Datagrams of one run at most, as on Linux (UDP_MAX_SEGMENTS).
pub(crate) const MAX_SEGMENTS: usize = 128;

/// One datagram to be sent, or a run of datagrams of equal size.
pub(crate) struct SendRequest<I> {
    /// The payload.
    pub parts: I,
    /// Its length.
    pub bytes: usize,
    /// Its destination; `None`: the connected peer.
    pub to: Option<SocketAddr>,
    /// The source; `None`: the address of the socket.
    pub from: Option<SocketAddr>,
    /// Payload of each datagram of a run.
    pub segment_bytes: Option<u16>,
    /// TOS or traffic class; `None`: that of the socket.
    pub dscp_ecn: Option<u8>,
    /// The treatment of a pending error of the socket.
    pub error: PendingError,
}

impl<I> SendRequest<I> {
    /// Datagrams that it becomes.
    fn datagrams(&self) -> usize {
        match self.segment_bytes {
            Some(segment) if segment > 0 => self.bytes.div_ceil(usize::from(segment)).max(1),
            _ => 1,
        }
    }

    fn offload(&self) -> Offload {
        crate::udp::offload_of(self.bytes, self.segment_bytes)
    }
}

/// The treatment of a pending error of the socket (SO_ERROR).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PendingError {
    /// The call returns it.
    Return,
    /// The next call returns the error: this call has sent datagrams.
    Leave,
}

/// Source and destination of a datagram, and the options of its socket.
struct Endpoints {
    bound: SocketAddr,
    remote: SocketAddr,
    /// The destination was given with the datagram.
    has_destination: bool,
    /// The source that was given with the datagram.
    from: Option<SocketAddr>,
    broadcast: bool,
    options: HeaderOptions,
}

/// The route of a datagram.
struct Route {
    src: IpAddr,
    is_broadcast: bool,
}

impl UdpSockets<'_> {
    /// Sends one datagram, to the connected peer or to `to`. Returns its payload bytes.
    ///
    /// # Errors
    /// The pending error of an earlier datagram; [`SocketError::DestinationRequired`];
    /// [`SocketError::MessageTooLong`]; [`SocketError::NetworkUnreachable`]; [`SocketError::NoBuffer`];
    /// [`SocketError::WouldBlock`]: the device is full.
    pub fn send(
        self,
        now: Instant,
        id: SlotId,
        parts: &[&[u8]],
        to: Option<SocketAddr>,
    ) -> Result<usize, SocketError> {
        let UdpSockets { shard } = self;
        let bytes: usize = parts.iter().map(|p| p.len()).sum();
        let request = SendRequest {
            parts: parts.iter().copied(),
            bytes,
            to,
            from: None,
            segment_bytes: None,
            dscp_ecn: None,
            error: PendingError::Return,
        };
        shard.udp.output(now, id, &request, &mut shard.core)?;
        shard.finish_datagrams(now);
        Ok(bytes)
    }

    /// As [`UdpSockets::send`], for a sender that can wait for buffers and for the device: wait for
    /// `WRITABLE` and repeat.
    ///
    /// # Errors
    /// As [`UdpSockets::send`], but for [`SocketError::NoBuffer`] and [`SocketError::WouldBlock`].
    pub fn send_step(
        self,
        now: Instant,
        id: SlotId,
        parts: &[&[u8]],
        to: Option<SocketAddr>,
    ) -> Result<Poll<usize>, SocketError> {
        let UdpSockets { shard } = self;
        match shard.udp().send(now, id, parts, to) {
            Err(e @ (SocketError::NoBuffer | SocketError::WouldBlock)) => {
                shard.core.wait_to_send(now, id, e);
                Ok(Poll::Pending)
            }
            other => other.map(Poll::Ready),
        }
    }

    /// As [`UdpSockets::send_step`] to the connected peer, with the fast path inline: for many datagrams one by one.
    ///
    /// # Errors
    /// As [`UdpSockets::send_step`].
    #[inline(always)]
    pub fn send_connected(
        self,
        now: Instant,
        id: SlotId,
        payload: &[u8],
    ) -> Result<Poll<usize>, SocketError> {
        let UdpSockets { shard } = self;
        let (parts, bytes) = (core::iter::once(payload), payload.len());
        let request = SendRequest {
            parts,
            bytes,
            to: None,
            from: None,
            segment_bytes: None,
            dscp_ecn: None,
            error: PendingError::Return,
        };
        match shard.udp.output_fast(now, id, &request, &mut shard.core) {
            Some(Ok(())) => {
                shard.finish_datagrams(now);
                Ok(Poll::Ready(bytes))
            }
            _ => shard.udp().send_one(now, id, payload),
        }
    }

    /// As [`UdpSockets::send_connected`], out of line.
    #[inline(never)]
    fn send_one(
        self,
        now: Instant,
        id: SlotId,
        payload: &[u8],
    ) -> Result<Poll<usize>, SocketError> {
        self.send_step(now, id, &[payload], None)
    }
}

impl Shard {
    /// The end of a call that has sent datagrams: one `tx_burst`.
    #[inline(always)]
    pub(crate) fn finish_datagrams(&mut self, now: Instant) {
        if self.core.defers_transmit(now) {
            return;
        }
        if self.core.net.link.loopback.is_empty() {
            self.core.net.flush();
        } else {
            self.finish_call(now);
        }
    }
}

impl Udp {
    /// Brings a datagram into the burst.
    pub(crate) fn output<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        request: &SendRequest<I>,
        core: &mut Core,
    ) -> Result<(), SocketError> {
        match self.output_fast(now, id, request, core) {
            Some(sent) => sent,
            None => self.output_slow(now, id, request, core),
        }
    }

    /// Fast path: by ready-made headers, if there are some that hold for this datagram. Otherwise it returns
    /// `None` without side effects and [`Udp::output_slow`] runs.
    #[inline(always)]
    fn output_fast<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        request: &SendRequest<I>,
        core: &mut Core,
    ) -> Option<Result<(), SocketError>> {
        if core.events.down.is_some() {
            return None;
        }
        let Core { sockets, net, .. } = core;
        let Some(Socket::Udp(entry)) = sockets.get(id) else { return None };
        let has_error = request.error == PendingError::Return && entry.socket.has_error();
        if has_error || request.datagrams() > MAX_SEGMENTS {
            return None;
        }
        let template = match &request.to {
            // It is for this peer and these options: every change of them drops it.
            None if request.from.is_some() => return None,
            None => entry.template.as_deref()?,
            Some(to) => {
                let remote = unmap(*to);
                let template = self.templates.find(id, request.from, &remote)?;
                template.has_options(&HeaderOptions::of(&entry.socket)).then_some(template)?
            }
        };
        let transport_bytes = request.bytes.saturating_add(HEADER_BYTES);
        let fits = match request.segment_bytes {
            None => template.ip().fits_without_gso(transport_bytes),
            Some(_) => template.ip().fits(transport_bytes, &request.offload()),
        };
        if !(fits && net.ip.is_template_valid(template.ip(), now)) {
            return None;
        }
        net.stages.pass_all([Stage::SendChecked, Stage::PathChosen]);
        let is_linear = request.segment_bytes.is_none() && net.is_linear(request.bytes);
        Some(match is_linear {
            true => net.send_linear(now, template, request),
            false => net.send_chained(now, template, request),
        })
    }

    /// Slow path through every layer; leaves a template.
    #[inline(never)]
    fn output_slow<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        request: &SendRequest<I>,
        core: &mut Core,
    ) -> Result<(), SocketError> {
        let endpoints = &check_datagram(id, request, core)?;
        core.net.pass(Stage::SendChecked);
        let route = choose_route(&core.net.ip, endpoints, request)?;
        core.net.pass(Stage::PathChosen);
        let payload = core.net.fill_datagram(request.parts.clone(), request.bytes)?;
        let remote = endpoints.remote;
        let local = with_zone(route.src, endpoints.bound.port(), zone_of(remote));
        let (chain, _) = crate::udp::output(&mut core.net.pool, local, remote, payload)
            .map_err(|_| SocketError::NoBuffer)?;
        core.net.pass(Stage::TransportOutput);
        core.net.link.set_now(now);
        core.net.send_packet(
            now,
            Outgoing {
                src: route.src,
                dst: remote.ip(),
                zone: zone_of(remote),
                protocol: protocol::UDP,
                ttl: endpoints.options.ttl,
                dscp_ecn: request.dscp_ecn.unwrap_or(endpoints.options.dscp_ecn),
                chain,
                offload: request.offload(),
                traffic: Traffic::Own,
                mtu_discovery: endpoints.options.mtu_discovery,
            },
        )?;
        core.net.note_sent(request);
        if !route.is_broadcast {
            self.keep_template(now, id, endpoints, local, core);
        }
        Ok(())
    }

    /// Keeps the headers of the datagram just sent as a template.
    fn keep_template(
        &mut self,
        now: Instant,
        id: SlotId,
        endpoints: &Endpoints,
        local: SocketAddr,
        core: &mut Core,
    ) {
        let Core { sockets, net, .. } = core;
        let &Endpoints { remote, options, .. } = endpoints;
        let made = UdpTemplate::new(&net.ip, now, local, remote, zone_of(remote), options);
        let Some(made) = made.map(|made| made.with_source(endpoints.from)) else { return };
        let is_own = !endpoints.has_destination && endpoints.from.is_none();
        match sockets.get_mut(id) {
            Some(Socket::Udp(s)) if is_own => match &mut s.template {
                Some(template) => **template = made,
                none => *none = Some(Box::new(made)),
            },
            _ => self.templates.insert(id, made),
        }
    }
}

/// The endpoints of a datagram, once its socket has no pending error.
fn check_datagram<I>(
    id: SlotId,
    request: &SendRequest<I>,
    core: &mut Core,
) -> Result<Endpoints, SocketError> {
    if let Some(e) = core.events.down {
        return Err(e);
    }
    let entry = core.sockets.udp(id)?;
    if request.error == PendingError::Return
        && let Some(e) = entry.socket.take_error()
    {
        return Err(udp_error(e));
    }
    let UdpSocket { local, remote, broadcast, .. } = entry.socket;
    let remote = unmap(request.to.or(remote).ok_or(SocketError::DestinationRequired)?);
    if remote.port() == 0 || request.datagrams() > MAX_SEGMENTS {
        return Err(SocketError::Invalid);
    }
    let bound = local.ok_or(SocketError::Invalid)?;
    check_family(bound, entry.only_v6, remote)?;
    let (from, options) = (request.from, HeaderOptions::of(&entry.socket));
    let bound = source_of(bound, from)?;
    if from.is_some() && bound.is_ipv4() != remote.is_ipv4() {
        return Err(SocketError::FamilyNotSupported);
    }
    let has_destination = request.to.is_some();
    Ok(Endpoints { bound, remote, has_destination, from, broadcast, options })
}

/// The source of a datagram whose socket is bound to `bound`. A socket that is bound to every port gives it
/// with each datagram, others may give another address.
fn source_of(bound: SocketAddr, from: Option<SocketAddr>) -> Result<SocketAddr, SocketError> {
    let Some(from) = from.map(unmap) else {
        return if bound.port() == 0 { Err(SocketError::Invalid) } else { Ok(bound) };
    };
    match (bound.port(), from.port()) {
        (0, 0) => Err(SocketError::Invalid),
        (port, 0) => Ok(SocketAddr::new(from.ip(), port)),
        (0, _) => Ok(from),
        (port, named) if port == named => Ok(from),
        _ => Err(SocketError::Invalid),
    }
}

/// The route, if the payload may be sent. A datagram longer than the path MTU is fragmented unless the
/// socket sets DF; runs are never fragmented.
fn choose_route<I>(
    ip: &Ip,
    endpoints: &Endpoints,
    request: &SendRequest<I>,
) -> Result<Route, SocketError> {
    let remote = endpoints.remote;
    let bound = Some(endpoints.bound.ip()).filter(|ip| !ip.is_unspecified());
    // A broadcast address is one to listen on, as on Linux.
    let bound = bound.filter(|bound| !ip.is_broadcast(*bound));
    if bound.is_some_and(|bound| !ip.accepts(bound)) {
        return Err(SocketError::NetworkUnreachable);
    }
    let choice = ip.route_from(bound, remote.ip(), zone_of(remote));
    let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
    if choice.is_broadcast && !endpoints.broadcast {
        return Err(SocketError::AccessDenied);
    }
    let is_run = request.offload().gso.is_some();
    let (largest_packet, largest_segment) = match endpoints.options.mtu_discovery {
        MtuDiscovery::Off => (usize::MAX, choice.datagram_mtu),
        MtuDiscovery::On => (choice.datagram_mtu, choice.datagram_mtu),
        MtuDiscovery::Probe => (choice.link_mtu, choice.link_mtu),
    };
    let most = |packet_bytes| crate::udp::max_payload(packet_bytes, remote.ip());
    let segment_bytes = request.segment_bytes.filter(|_| is_run).map_or(0, usize::from);
    let whole_fits = request.bytes <= most(if is_run { usize::MAX } else { largest_packet });
    if !whole_fits || segment_bytes > most(largest_segment) {
        return Err(SocketError::MessageTooLong);
    }
    Ok(Route { src: bound.unwrap_or(choice.src), is_broadcast: choice.is_broadcast })
}

impl Net {
    /// Whether a datagram may take these bytes of the send share: the minimum of streams stays free.
    #[inline(always)]
    fn admits_datagram(&self, bytes: usize) -> bool {
        let share = self.pool.share_of(Purpose::Send);
        !share.is_contended() || bytes <= share.for_datagrams()
    }

    /// The payload in one mbuf (or a few), with headroom for every header.
    #[inline]
    pub(crate) fn fill_datagram<'a>(
        &mut self,
        parts: impl Iterator<Item = &'a [u8]>,
        bytes: usize,
    ) -> Result<Chain, SocketError> {
        if !self.admits_datagram(bytes) {
            return Err(SocketError::NoBuffer);
        }
        let chain = self.pool.alloc_chain(bytes, HEADROOM, Purpose::Send);
        let mut chain = chain.map_err(|_| SocketError::NoBuffer)?;
        self.pass(Stage::SendReserved);
        chain.fill(parts);
        self.pass(Stage::SendCopied);
        Ok(chain)
    }

    /// Whether payload and headers are written into one buffer: the payload fits, and the device
    /// computes the checksum.
    #[inline(always)]
    fn is_linear(&self, bytes: usize) -> bool {
        bytes <= LINEAR_BYTES && self.link.caps().tx_csum
    }

    /// Sends a datagram in one buffer, headers and payload: from the pool to the burst it is one word, the
    /// handle of that buffer. (Larger values that are handed on are stored in words and read in vectors, which
    /// waits for the stores.)
    #[inline(always)]
    fn send_linear<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        template: &UdpTemplate,
        request: &SendRequest<I>,
    ) -> Result<(), SocketError> {
        if !self.admits_datagram(request.bytes) {
            return Err(SocketError::NoBuffer);
        }
        let headers = template.header_bytes();
        let headroom = HEADROOM.saturating_sub(headers);
        let m = self.pool.alloc(request.bytes.saturating_add(headers), headroom, Purpose::Send);
        let mut m = m.map_err(|_| SocketError::NoBuffer)?;
        self.pass(Stage::SendReserved);
        if let Err(e) = self.write_linear(template, request, &mut m) {
            self.pool.free_mbuf(m);
            return Err(e);
        }
        self.link.set_now(now);
        if !self.link.fits_linear(m.len()) {
            return self.put(Chain::from(m), *template.offload(), request);
        }
        self.link.push_linear(Packet { chain: Chain::from(m), offload: *template.offload() });
        self.pass(Stage::BurstQueued);
        self.note_sent(request);
        Ok(())
    }

    /// Queues a frame where the burst is full, the frame needs software offload, or it is a chain.
    #[inline(never)]
    fn put<I>(
        &mut self,
        chain: Chain,
        offload: Offload,
        request: &SendRequest<I>,
    ) -> Result<(), SocketError> {
        let Net { pool, counters, link, stages, .. } = self;
        if let Err(chain) = (Sink { link, stages }).frame(pool, counters, chain, offload) {
            pool.free(chain);
            return Err(SocketError::WouldBlock);
        }
        self.note_sent(request);
        Ok(())
    }

    /// Writes headers and payload.
    #[inline(always)]
    fn write_linear<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        template: &UdpTemplate,
        request: &SendRequest<I>,
        m: &mut Mbuf,
    ) -> Result<(), SocketError> {
        const SHORT: SocketError = SocketError::NoBuffer;
        let headers = template.header_bytes();
        let buffer = m.append(headers.saturating_add(request.bytes)).ok_or(SHORT)?;
        let (headers, mut buffer) = buffer.split_at_mut_checked(headers).ok_or(SHORT)?;
        for part in request.parts.clone() {
            let (to, rest) = buffer.split_at_mut_checked(part.len()).ok_or(SHORT)?;
            copy(to, part);
            buffer = rest;
        }
        self.pass(Stage::SendCopied);
        self.write_headers(template, request, headers)
    }

    /// Sends a datagram that is larger, or whose checksum is computed in software, as a chain behind its headers.
    #[inline(never)]
    fn send_chained<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        template: &UdpTemplate,
        request: &SendRequest<I>,
    ) -> Result<(), SocketError> {
        let mut chain = self.fill_datagram(request.parts.clone(), request.bytes)?;
        if let Err(e) = self.prepend(template, request, &mut chain) {
            self.pool.free(chain);
            return Err(e);
        }
        self.link.set_now(now);
        let offload = request.offload().shift(template.ip().header_bytes() as u16);
        self.put(chain, offload, request)
    }

    /// Prepends all headers.
    #[inline]
    fn prepend<I>(
        &mut self,
        template: &UdpTemplate,
        request: &SendRequest<I>,
        chain: &mut Chain,
    ) -> Result<(), SocketError> {
        let headers = chain.prepend(template.header_bytes(), &mut self.pool, Purpose::Control);
        self.write_headers(template, request, headers.map_err(|_| SocketError::NoBuffer)?)
    }

    /// Writes all headers into a slice of their length.
    #[inline(always)]
    fn write_headers<I>(
        &mut self,
        template: &UdpTemplate,
        request: &SendRequest<I>,
        headers: &mut [u8],
    ) -> Result<(), SocketError> {
        let ident = self.ip.draw_ident_for(template.ip());
        // At most 65,535, or the datagram would not have fitted the template.
        let length = request.bytes.saturating_add(HEADER_BYTES) as u16;
        let parts = headers.split_last_chunk_mut::<HEADER_BYTES>();
        let (lower, header) = parts.ok_or(SocketError::NoBuffer)?;
        template.udp().emit(length, header);
        self.stages.pass_all([Stage::TransportOutput, Stage::RouteFound]);
        template.ip().emit(length, ident, lower).ok_or(SocketError::NoBuffer)?;
        if let Some(dscp_ecn) = request.dscp_ecn {
            template.ip().set_dscp_ecn(lower, dscp_ecn);
        }
        self.stages.pass_all([Stage::IpOutput, Stage::EtherOutput]);
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn note_sent<I>(&mut self, request: &SendRequest<I>) {
        self.counters.add(Counter::UdpOut, request.datagrams() as u64);
        self.counters.add(Counter::CopiedBytes, request.bytes as u64);
    }

    fn send_packet(&mut self, now: Instant, packet: Outgoing) -> Result<(), SocketError> {
        use crate::ip::OutputError as E;
        self.with_ip(now, |ip, cx| ip.output(cx, packet)).map_err(|e| match e {
            E::NoRoute => SocketError::NetworkUnreachable,
            E::TooBig { .. } => SocketError::MessageTooLong,
            E::NoBuffer => SocketError::NoBuffer,
            E::HostUnreachable => SocketError::HostUnreachable,
            E::Full => SocketError::WouldBlock,
        })
    }
}

/// Copies a slice into one of the same length: 8 to 32 bytes in two overlapping moves, since a call costs more.
#[inline(always)]
fn copy(to: &mut [u8], from: &[u8]) {
    let is_done = match from.len() {
        8..=16 => copy_ends::<8>(to, from),
        17..=32 => copy_ends::<16>(to, from),
        _ => false,
    };
    if !is_done {
        to.copy_from_slice(from);
    }
}

/// Copies the first `N` bytes and the last `N`, which cover a slice of `N` to `2 * N` bytes. False if the slice is
/// shorter.
#[inline(always)]
fn copy_ends<const N: usize>(to: &mut [u8], from: &[u8]) -> bool {
    let (Some(first), Some(last)) = (from.first_chunk::<N>(), from.last_chunk::<N>()) else {
        return false;
    };
    let (first, last) = (*first, *last);
    if let Some(to) = to.first_chunk_mut() {
        *to = first;
    }
    if let Some(to) = to.last_chunk_mut() {
        *to = last;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_of_every_length_are_copied_whole_and_no_further() {
        let from: Vec<u8> = (1..=70).collect();
        for len in 0..=from.len() {
            let mut to = [0; 80];
            copy(&mut to[..len], &from[..len]);
            assert_eq!(to[..len], from[..len], "{len}");
            assert!(to[len..].iter().all(|b| *b == 0), "{len}");
        }
    }
}
