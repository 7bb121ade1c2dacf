//! A datagram on its way down.
//!
//! ```text
//!   check: the socket, its pending error, the two ends
//!     │ a template holds and the datagram fits its path     │ else
//!     ▼                                                     ▼
//!   buffer, copy, headers in one piece              route, buffer, copy, udp::output, Ip::output
//!     │                                                     │ leaves a template
//!     └──────────────► the transmit burst ◄─────────────────┘
//! ```

use std::net::{IpAddr, SocketAddr};

use fulmar_base::{Counter, Instant, Offload, Probe, SlotId, Stage, Variation, with_zone, zone_of};
use fulmar_ip::{FrameSink, Outgoing, Traffic};
use fulmar_mbuf::{Chain, Mbuf, Purpose};
use fulmar_netdev::Packet;
use fulmar_socket::{SocketError, Step};
use fulmar_udp::UdpSocket;
use fulmar_wire::protocol;
use fulmar_wire::udp::HEADER_BYTES;

use crate::net::{Net, Sink};
use crate::shard::Shard;
use crate::sockets::Socket;
use crate::templates::{HeaderOptions, UdpTemplate};
use crate::udp_calls::{check_family, udp_error, unmap};

/// Room in front of a payload, so that all headers go into its own mbuf.
const HEADROOM: usize = fulmar_udp::HEADROOM_BYTES;

/// Payload that is written into one buffer together with its headers, by the sender itself: what fits the
/// second class of the pool.
const ONE_PIECE_BYTES: usize = 2048 - HEADROOM;

/// Datagrams of one run at most, as on Linux (UDP_MAX_SEGMENTS).
pub(crate) const MAX_SEGMENTS: usize = 128;

/// What is to be sent: one datagram, or a run of datagrams of equal size.
pub(crate) struct Letter<I> {
    /// The payload.
    pub parts: I,
    /// Its length.
    pub bytes: usize,
    /// To whom; `None`: to the connected peer.
    pub to: Option<SocketAddr>,
    /// Payload of each datagram of a run.
    pub segment_bytes: Option<u16>,
    /// An error that came back earlier is told now.
    pub tells_error: bool,
}

impl<I> Letter<I> {
    /// Datagrams that it becomes.
    fn datagrams(&self) -> usize {
        match self.segment_bytes {
            Some(segment) if segment > 0 => self.bytes.div_ceil(usize::from(segment)).max(1),
            _ => 1,
        }
    }

    fn offload(&self) -> Offload {
        fulmar_udp::offload_of(self.bytes, self.segment_bytes)
    }
}

/// The two ends of a datagram to be sent, and what its socket says of it.
struct Ends {
    bound: SocketAddr,
    remote: SocketAddr,
    /// The destination was named with it.
    is_named: bool,
    broadcast: bool,
    options: HeaderOptions,
}

/// What the routes say about a datagram.
struct Way {
    src: IpAddr,
    is_broadcast: bool,
}

impl<P: Probe> Shard<P> {
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
        let parts = parts.iter().copied();
        let letter = Letter { parts, bytes, to, segment_bytes: None, tells_error: true };
        match self.output_letter(now, id, &letter)? {
            Some(()) => self.finish_datagrams(now),
            None => self.net.link.set_now(now),
        }
        Ok(bytes)
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
            Err(e @ (SocketError::NoBuffer | SocketError::WouldBlock)) => {
                self.wait_to_send(now, id, e);
                Ok(Step::WaitSpace(1))
            }
            other => other.map(Step::Done),
        }
    }

    /// A datagram found no memory, or no room in the device.
    pub(crate) fn wait_to_send(&mut self, now: Instant, id: SlotId, why: SocketError) {
        match why {
            SocketError::NoBuffer => self.wait_for_memory(now, id),
            _ => self.note_shortage(now, id),
        }
    }

    /// As [`Shard::udp_send_step`] to the connected peer, for many datagrams one by one: straight to the
    /// device if nothing is in the way.
    ///
    /// # Errors
    /// As [`Shard::udp_send_step`].
    #[inline(always)]
    pub fn udp_send_connected(
        &mut self,
        now: Instant,
        id: SlotId,
        payload: &[u8],
    ) -> Result<Step<usize>, SocketError> {
        if self.stops_at(Stage::Locked) || self.udp_send_at_once(now, id, payload) {
            return Ok(Step::Done(payload.len()));
        }
        self.udp_send_slowly(now, id, payload)
    }

    /// As [`Shard::udp_send_connected`], by the way that every datagram can go.
    #[inline(never)]
    fn udp_send_slowly(
        &mut self,
        now: Instant,
        id: SlotId,
        payload: &[u8],
    ) -> Result<Step<usize>, SocketError> {
        self.udp_send_step(now, id, &[payload], None)
    }

    /// The way of a letter into the burst; `None` if a probe has ended it.
    pub(crate) fn output_letter<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        letter: &Letter<I>,
    ) -> Result<Option<()>, SocketError> {
        if self.stops_at(Stage::Locked) {
            return Ok(None);
        }
        if let Some(sent) = self.output_connected(now, id, letter) {
            return sent;
        }
        let ends = self.check_datagram(id, letter)?;
        if self.ends_at(Stage::SendChecked) {
            return Ok(None);
        }
        match self.output_by_template(now, id, &ends, letter) {
            Some(sent) => sent,
            None => self.output_long(now, id, &ends, letter),
        }
    }

    /// A letter to the connected peer by the headers of the socket, if they hold for it: what
    /// [`Shard::check_datagram`] and [`Shard::output_by_template`] do, but nothing is copied to be asked
    /// about. `None`: these are to say what it is.
    #[inline(always)]
    fn output_connected<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        letter: &Letter<I>,
    ) -> Option<Result<Option<()>, SocketError>> {
        if letter.to.is_some() || self.is_down() || self.forgets_templates() {
            return None;
        }
        let Shard { sockets, net, .. } = self;
        let Some(Socket::Udp(entry)) = sockets.get(id) else { return None };
        let (socket, template) = (&entry.socket, entry.template.as_deref()?);
        let has_error = letter.tells_error && socket.has_error();
        if has_error || letter.datagrams() > MAX_SEGMENTS {
            return None;
        }
        let transport_bytes = letter.bytes.saturating_add(HEADER_BYTES);
        let offload = letter.offload();
        // It is for this peer and these options: whoever changes them takes it away.
        let serves =
            net.ip.holds(template.ip(), now) && template.ip().fits(transport_bytes, &offload);
        if !(net.probe.varies(Variation::NoLookUp) || serves) {
            return None;
        }
        if net.ends_at(Stage::SendChecked) {
            return Some(Ok(None));
        }
        Some(net.output_by(now, id, template, letter, offload))
    }

    /// The socket of a datagram to be sent, and its two ends.
    fn check_datagram<I>(&mut self, id: SlotId, letter: &Letter<I>) -> Result<Ends, SocketError> {
        if let Some(e) = self.down() {
            return Err(e);
        }
        let entry = self.udp_entry(id)?;
        if letter.tells_error
            && let Some(e) = entry.socket.take_error()
        {
            return Err(udp_error(e));
        }
        let UdpSocket { local, remote, broadcast, .. } = entry.socket;
        let remote = unmap(letter.to.or(remote).ok_or(SocketError::DestinationRequired)?);
        if remote.port() == 0 || letter.datagrams() > MAX_SEGMENTS {
            return Err(SocketError::Invalid);
        }
        let bound = local.ok_or(SocketError::Invalid)?;
        check_family(bound, entry.v6_only, remote)?;
        let options = HeaderOptions::of(&entry.socket);
        Ok(Ends { bound, remote, is_named: letter.to.is_some(), broadcast, options })
    }

    /// Sends by ready-made headers; `None` if there are none that hold for it.
    #[inline]
    fn output_by_template<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        ends: &Ends,
        letter: &Letter<I>,
    ) -> Option<Result<Option<()>, SocketError>> {
        if self.forgets_templates() {
            return None;
        }
        let Shard { sockets, templates, net, .. } = self;
        let template = match sockets.get(id) {
            Some(Socket::Udp(s)) if !ends.is_named => s.template.as_deref()?,
            _ => templates.find(id, &ends.remote)?,
        };
        let transport_bytes = letter.bytes.saturating_add(HEADER_BYTES);
        let offload = letter.offload();
        let serves = template.is_for(&ends.remote, &ends.options)
            && net.ip.holds(template.ip(), now)
            && template.ip().fits(transport_bytes, &offload);
        let serves = net.probe.varies(Variation::NoLookUp) || serves;
        serves.then(|| net.output_by(now, id, template, letter, offload))
    }

    /// Whether a measurement wants every layer to be asked.
    #[inline(always)]
    pub(crate) fn forgets_templates(&self) -> bool {
        self.net.probe.varies_in([Variation::NoTemplate, Variation::TablesEachTime])
    }

    /// Sends by asking every layer, and remembers what they said.
    fn output_long<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        ends: &Ends,
        letter: &Letter<I>,
    ) -> Result<Option<()>, SocketError> {
        let way = self.choose_way(ends, letter)?;
        if self.ends_at(Stage::PathChosen) {
            return Ok(None);
        }
        let payload = self.net.fill_datagram(id, letter.parts.clone(), letter.bytes)?;
        let Some(payload) = payload else { return Ok(None) };
        let remote = ends.remote;
        let local = with_zone(way.src, ends.bound.port(), zone_of(remote));
        let (chain, _) = fulmar_udp::output(&mut self.net.pool, local, remote, payload)
            .map_err(|_| SocketError::NoBuffer)?;
        if self.ends_at(Stage::TransportOutput) {
            self.net.pool.free(chain);
            return Ok(None);
        }
        self.net.link.set_now(now);
        self.net.send_packet(
            now,
            Outgoing {
                src: way.src,
                dst: remote.ip(),
                zone: zone_of(remote),
                protocol: protocol::UDP,
                ttl: ends.options.ttl,
                dscp_ecn: ends.options.dscp_ecn,
                chain,
                offload: letter.offload(),
                traffic: Traffic::Own,
                dont_fragment: ends.options.dont_fragment,
            },
        )?;
        self.net.note_sent(letter);
        if !way.is_broadcast && !self.forgets_templates() {
            self.keep_template(now, id, ends, local);
        }
        Ok(Some(()))
    }

    /// Remembers the headers of what was just sent.
    fn keep_template(&mut self, now: Instant, id: SlotId, ends: &Ends, local: SocketAddr) {
        let Shard { sockets, templates, net, .. } = self;
        let zone = zone_of(ends.remote);
        let made = UdpTemplate::new(&net.ip, now, (local, ends.remote), zone, ends.options);
        let Some(made) = made else { return };
        match sockets.get_mut(id) {
            Some(Socket::Udp(s)) if !ends.is_named => match &mut s.template {
                Some(template) => **template = made,
                none => *none = Some(Box::new(made)),
            },
            _ => templates.keep(id, made),
        }
    }

    /// The source address that the routes give, if as much payload may go. What is longer than the
    /// path's packets goes in fragments, unless the socket forbids it; runs never do.
    fn choose_way<I>(&self, ends: &Ends, letter: &Letter<I>) -> Result<Way, SocketError> {
        let (ip, remote) = (&self.net.ip, ends.remote);
        let bound = Some(ends.bound.ip()).filter(|ip| !ip.is_unspecified());
        // A broadcast address is one to listen on, as on Linux.
        let bound = bound.filter(|bound| !ip.is_broadcast(*bound));
        if bound.is_some_and(|bound| !ip.is_local(bound)) {
            return Err(SocketError::NetworkUnreachable);
        }
        let choice = ip.route_from(bound, remote.ip(), zone_of(remote));
        let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
        if choice.is_broadcast && !ends.broadcast {
            return Err(SocketError::AccessDenied);
        }
        let is_run = letter.offload().gso.is_some();
        let largest_packet =
            if ends.options.dont_fragment { choice.datagram_mtu } else { usize::MAX };
        let most = |packet_bytes| fulmar_udp::max_payload(packet_bytes, remote.ip());
        let segment_bytes = letter.segment_bytes.filter(|_| is_run).map_or(0, usize::from);
        let whole_fits = letter.bytes <= most(if is_run { usize::MAX } else { largest_packet });
        if !whole_fits || segment_bytes > most(choice.datagram_mtu) {
            return Err(SocketError::MessageTooLong);
        }
        Ok(Way { src: bound.unwrap_or(choice.src), is_broadcast: choice.is_broadcast })
    }

    /// The end of a call that has sent datagrams: one crossing.
    #[inline]
    pub(crate) fn finish_datagrams(&mut self, now: Instant) {
        if self.net.link.loopback.is_empty() {
            self.flush();
        } else {
            self.finish_call(now);
        }
    }
}

impl<P: Probe> Net<P> {
    #[inline(always)]
    pub(crate) fn ends_at(&mut self, stage: Stage) -> bool {
        self.probe.stage(stage).is_break()
    }

    #[inline(always)]
    pub(crate) fn ends_at_one_of<const N: usize>(&mut self, stages: [Stage; N]) -> bool {
        self.probe.stages(stages).is_break()
    }

    /// Whether a datagram may take so much of the send share: what streams need at the least stays.
    #[inline(always)]
    fn admits_datagram(&self, bytes: usize) -> bool {
        let share = self.pool.share_of(Purpose::Send);
        !share.is_contended() || bytes <= share.for_datagrams()
    }

    /// The payload in one mbuf (or a few), with room for every header in front; `None` if a probe
    /// has ended the path.
    #[inline]
    pub(crate) fn fill_datagram<'a>(
        &mut self,
        id: SlotId,
        parts: impl Iterator<Item = &'a [u8]>,
        bytes: usize,
    ) -> Result<Option<Chain>, SocketError> {
        if !self.admits_datagram(bytes) {
            return Err(SocketError::NoBuffer);
        }
        let is_early = self.probe.varies(Variation::EarlyEncapsulation);
        let headroom = if is_early { 0 } else { HEADROOM };
        let chain = match self.probe.varies(Variation::StockPerSocket) {
            false => self.pool.alloc_chain(bytes, headroom, Purpose::Send),
            true => self.stocks.take(id, bytes, headroom, &mut self.pool),
        };
        let mut chain = chain.map_err(|_| SocketError::NoBuffer)?;
        if self.ends_at(Stage::SendReserved) {
            self.pool.free(chain);
            return Ok(None);
        }
        chain.fill(parts);
        if self.ends_at(Stage::SendCopied) {
            self.pool.free(chain);
            return Ok(None);
        }
        Ok(Some(chain))
    }

    /// Sends by ready-made headers.
    #[inline(always)]
    fn output_by<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        template: &UdpTemplate,
        letter: &Letter<I>,
        offload: Offload,
    ) -> Result<Option<()>, SocketError> {
        if self.ends_at(Stage::PathChosen) {
            return Ok(None);
        }
        if offload.gso.is_none() && self.writes_in_one_piece(letter.bytes) {
            return self.output_in_one_piece(now, template, letter);
        }
        self.output_in_pieces(now, id, template, letter, offload)
    }

    /// Whether so much payload may be written where its headers are, by whoever sends it: all fits one
    /// buffer, its sum is the device's business, and no measurement wants another way.
    #[inline(always)]
    pub(crate) fn writes_in_one_piece(&self, bytes: usize) -> bool {
        bytes <= ONE_PIECE_BYTES
            && self.link.caps().tx_csum
            && !self.probe.varies_in([Variation::EarlyEncapsulation, Variation::StockPerSocket])
    }

    /// A frame in one buffer, headers and payload; `None` if a probe has ended the path.
    #[inline(always)]
    pub(crate) fn one_piece<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        template: &UdpTemplate,
        letter: &Letter<I>,
    ) -> Result<Option<Mbuf>, SocketError> {
        if !self.admits_datagram(letter.bytes) {
            return Err(SocketError::NoBuffer);
        }
        let headers = template.header_bytes();
        let room = HEADROOM.saturating_sub(headers);
        let m = self.pool.alloc(letter.bytes.saturating_add(headers), room, Purpose::Send);
        let mut m = m.map_err(|_| SocketError::NoBuffer)?;
        if self.ends_at(Stage::SendReserved) || !self.write_piece(template, letter, &mut m) {
            self.pool.free_mbuf(m);
            return Ok(None);
        }
        Ok(Some(m))
    }

    /// Sends what fits one small buffer with its headers: from the pool to the burst it is one word, the
    /// handle of that buffer. (Larger values that are handed on are stored in words and read in vectors,
    /// which waits for the stores.)
    #[inline(always)]
    fn output_in_one_piece<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        template: &UdpTemplate,
        letter: &Letter<I>,
    ) -> Result<Option<()>, SocketError> {
        let Some(m) = self.one_piece(template, letter)? else { return Ok(None) };
        self.link.set_now(now);
        let (chain, offload) = (Chain::from(m), *template.offload());
        if !self.link.takes_at_once(chain.len()) {
            return self.put_slowly(Packet { chain, offload }, letter);
        }
        self.link.put_fitting(Packet { chain, offload });
        if self.ends_at(Stage::BurstQueued) {
            self.link.forget(&mut self.pool);
        }
        self.note_sent(letter);
        Ok(Some(()))
    }

    /// The burst is full, or the frame is none that the device takes as it is.
    #[cold]
    fn put_slowly<I>(
        &mut self,
        packet: Packet,
        letter: &Letter<I>,
    ) -> Result<Option<()>, SocketError> {
        let Net { pool, counters, link, probe, .. } = self;
        let Packet { chain, offload } = packet;
        if let Err(chain) = (Sink { link, probe }).frame(pool, counters, chain, offload) {
            pool.free(chain);
            return Err(SocketError::WouldBlock);
        }
        self.note_sent(letter);
        Ok(Some(()))
    }

    /// Headers and payload, whose room is taken at once; false if a probe has ended the path.
    #[inline(always)]
    fn write_piece<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        template: &UdpTemplate,
        letter: &Letter<I>,
        m: &mut Mbuf,
    ) -> bool {
        let headers = template.header_bytes();
        let Some(room) = m.append(headers.saturating_add(letter.bytes)) else { return false };
        let Some((headers, mut room)) = room.split_at_mut_checked(headers) else { return false };
        for part in letter.parts.clone() {
            let Some((to, rest)) = room.split_at_mut_checked(part.len()) else { return false };
            copy(to, part);
            room = rest;
        }
        if self.ends_at(Stage::SendCopied) {
            return false;
        }
        matches!(self.write_headers(template, letter, headers), Ok(Some(())))
    }

    /// Sends by ready-made headers what is larger, or is to be summed on the way.
    #[inline(never)]
    fn output_in_pieces<'a, I: Iterator<Item = &'a [u8]> + Clone>(
        &mut self,
        now: Instant,
        id: SlotId,
        template: &UdpTemplate,
        letter: &Letter<I>,
        offload: Offload,
    ) -> Result<Option<()>, SocketError> {
        let payload = self.fill_datagram(id, letter.parts.clone(), letter.bytes)?;
        let Some(mut chain) = payload else { return Ok(None) };
        if self.prepend(template, letter, &mut chain)?.is_none() {
            self.pool.free(chain);
            return Ok(None);
        }
        self.link.set_now(now);
        let offload = offload.shift(template.ip().header_bytes() as u16);
        let Net { pool, counters, link, probe, .. } = self;
        if let Err(chain) = (Sink { link, probe }).frame(pool, counters, chain, offload) {
            pool.free(chain);
            return Err(SocketError::WouldBlock);
        }
        self.note_sent(letter);
        Ok(Some(()))
    }

    /// Puts all headers in front, in one piece; `None` if a probe has ended the path.
    #[inline]
    fn prepend<I>(
        &mut self,
        template: &UdpTemplate,
        letter: &Letter<I>,
        chain: &mut Chain,
    ) -> Result<Option<()>, SocketError> {
        let room = chain.prepend(template.header_bytes(), &mut self.pool, Purpose::Control);
        self.write_headers(template, letter, room.map_err(|_| SocketError::NoBuffer)?)
    }

    /// Writes all headers, which `room` has the length of; `None` if a probe has ended the path.
    #[inline(always)]
    fn write_headers<I>(
        &mut self,
        template: &UdpTemplate,
        letter: &Letter<I>,
        room: &mut [u8],
    ) -> Result<Option<()>, SocketError> {
        let ident = self.ip.ident_by(template.ip());
        // At most 65,535, or the datagram would not have fitted the template.
        let length = letter.bytes.saturating_add(HEADER_BYTES) as u16;
        let parts = room.split_last_chunk_mut::<HEADER_BYTES>();
        let (lower, header) = parts.ok_or(SocketError::NoBuffer)?;
        template.udp().emit(length, header);
        if self.ends_at_one_of([Stage::TransportOutput, Stage::RouteFound]) {
            return Ok(None);
        }
        template.ip().emit(length, ident, lower).ok_or(SocketError::NoBuffer)?;
        if self.ends_at_one_of([Stage::IpOutput, Stage::EtherOutput]) {
            return Ok(None);
        }
        Ok(Some(()))
    }

    #[inline(always)]
    pub(crate) fn note_sent<I>(&mut self, letter: &Letter<I>) {
        self.counters.add(Counter::UdpOut, letter.datagrams() as u64);
        self.counters.add(Counter::CopiedBytes, letter.bytes as u64);
    }

    fn send_packet(&mut self, now: Instant, packet: Outgoing) -> Result<(), SocketError> {
        let Net { pool, counters, ip, link, probe, .. } = self;
        use fulmar_ip::OutputError as E;
        ip.output(now, pool, counters, packet, &mut Sink { link, probe }).map_err(|e| match e {
            E::NoRoute => SocketError::NetworkUnreachable,
            E::TooBig { .. } => SocketError::MessageTooLong,
            E::NoBuffer => SocketError::NoBuffer,
            E::HostUnreachable => SocketError::HostUnreachable,
            E::Full => SocketError::WouldBlock,
        })
    }
}

/// Copies bytes to a place of their length: the fewest in two steps that overlap, since a call costs more.
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

/// Copies the first `N` bytes and the last, which are all of `N` to twice as many; false if there are fewer.
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
