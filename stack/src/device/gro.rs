//! Generic receive offload (GRO) for TCP: consecutive segments of a flow in one burst are coalesced, by reference, so
//! that IP and TCP process them once. For devices that receive packets of MTU size; super-frames pass unchanged.
//!
//! ```text
//!   burst  A1 B1 A2 A3 udp B2 A4(FIN)   ──►   A1+A2+A3  B1+B2  udp  A4
//! ```
//!
//! Segments are coalesced if they are of one flow and in sequence, and their headers are equal except for lengths,
//! sequence and acknowledgement number, window, PSH, and the IPv4 identification. Not coalesced: fragments, packets
//! with IP options, segments with flags other than ACK, PSH and equal ECN flags, and what would exceed an IP packet of
//! 64 KiB. TCP options, timestamps included, must be equal byte by byte. Both checksums of each segment are verified
//! first; a segment with a wrong one passes unchanged, and the layers drop and count it. PSH ends a run, and so does
//! any other valid segment of the flow, so that a flow keeps its order; flows may be reordered against each other
//! within the burst. Payloads in the smallest buffers are not coalesced: the receive queue copies them together.
//!
//! Nothing is held back: every frame of a burst leaves with it. At most [`RUNS`] flows are coalesced at a time; one
//! more replaces the oldest. Cost: parsing the headers of each segment, and its checksum, which is verified in any
//! case. Source: Linux's GRO, except that acknowledgement number, window and segment size may change within a run, that
//! the smallest payloads are excluded, and that a coalesced frame is not a super-frame: segment boundaries are not
//! kept.

use crate::base::{Counter, Counters, Offload};
use crate::mbuf::{Chain, Pool};
use crate::wire::checksum::{Sum, checksum};
use crate::wire::{eth, protocol};

use crate::device::{Burst, Packet};

/// Flows whose segments are coalesced at a time.
pub const RUNS: usize = 8;

/// Longest payload that the drivers keep in their small buffers.
const TINY_BYTES: usize = 256;

const ACK: u8 = 0x10;
const PSH: u8 = 0x08;
const ECE: u8 = 0x40;
const CWR: u8 = 0x80;
/// Offset of the transport header.
const V4_L4: usize = eth::HEADER_BYTES + 20;
const V6_L4: usize = eth::HEADER_BYTES + 40;

/// The class of a frame.
enum Class {
    /// Not a TCP segment: passes unchanged.
    Other,
    /// Possibly a TCP segment, of an unknown flow: ends every run.
    Unclear,
    /// A TCP segment that cannot be coalesced: ends the run of its flow.
    Single(u64),
    /// A TCP segment that may begin or continue a run.
    Segment(Headers),
}

/// The headers of a segment that may be coalesced.
#[derive(Clone, Copy)]
struct Headers {
    /// Hash of the flow: ports and a part of the sender's address. Flows may collide.
    tag: u64,
    is_v4: bool,
    l4: usize,
    payload_at: usize,
    payload_bytes: usize,
    seq: u32,
    ack: u32,
    window: [u8; 2],
    /// PSH is set.
    is_pushed: bool,
}

/// Consecutive segments, coalesced into the first one.
#[derive(Clone, Copy)]
struct Run {
    /// The headers of the first segment, with acknowledgement number, window and PSH of the last one.
    head: Headers,
    /// Index of the first segment in the output.
    at: usize,
    /// Sequence number of the next segment.
    next: u32,
    frame_bytes: usize,
    segments: u64,
}

/// The runs of a burst.
#[derive(Default)]
pub struct Gro {
    runs: [Option<Run>; RUNS],
    /// The run that is replaced next.
    oldest: usize,
}

impl Gro {
    /// No runs.
    pub fn new() -> Gro {
        Gro::default()
    }

    /// Coalesces segments of one burst in place.
    pub fn coalesce(&mut self, burst: &mut Burst, pool: &mut Pool, counters: &mut Counters) {
        // Without a segment nothing is moved.
        if !burst.iter().any(|p| matches!(classify(p), Class::Segment(_))) {
            return;
        }
        let frames = burst.len();
        let mut out = 0usize;
        for taken in 1..=frames {
            let Some(p) = burst.pop_front() else { break };
            // Output frames are appended to the burst, after the frames that are still to be processed.
            let output = Output { burst, from: frames.saturating_sub(taken) };
            let Some(p) = self.take(p, output, out, pool, counters) else { continue };
            out = out.saturating_add(1);
            if let Err(p) = burst.push(p) {
                debug_assert!(false, "a frame has just left the burst");
                pool.free(p.chain);
            }
        }
        self.end_all(&mut Output { burst, from: 0 }, counters);
        self.oldest = 0;
    }

    /// Takes the next frame: coalesces it (`None`), or returns it to become number `out` of the output.
    fn take(
        &mut self,
        mut p: Packet,
        mut output: Output<'_>,
        out: usize,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Option<Packet> {
        let headers = match classify(&p) {
            Class::Other => return Some(p),
            Class::Unclear => {
                self.end_all(&mut output, counters);
                return Some(p);
            }
            Class::Single(tag) => {
                self.end_flow(tag, &mut output, counters);
                return Some(p);
            }
            Class::Segment(headers) => headers,
        };
        if !has_valid_checksum(&mut p, &headers) {
            return Some(p);
        }
        match self.append_to_run(p, &headers, &mut output, pool) {
            Ok(()) if !headers.is_pushed => None,
            Ok(()) => {
                self.end_flow(headers.tag, &mut output, counters);
                None
            }
            Err(p) => {
                self.end_flow(headers.tag, &mut output, counters);
                self.begin(&p, &headers, out, &mut output, counters);
                Some(p)
            }
        }
    }

    /// Appends a segment to the run that it continues, if there is one.
    fn append_to_run(
        &mut self,
        p: Packet,
        headers: &Headers,
        output: &mut Output<'_>,
        pool: &mut Pool,
    ) -> Result<(), Packet> {
        let run = self.runs.iter_mut().flatten().find(|r| r.head.tag == headers.tag);
        let Some(run) = run else { return Err(p) };
        let Some(first) = output.frame(run.at) else { return Err(p) };
        if !run.is_continued_by(first, &p, headers) {
            return Err(p);
        }
        run.append(first, p.chain, headers, pool);
        Ok(())
    }

    /// Begins a run with a segment.
    fn begin(
        &mut self,
        p: &Packet,
        headers: &Headers,
        at: usize,
        output: &mut Output<'_>,
        counters: &mut Counters,
    ) {
        // The headers of the first segment are rewritten at the end of the run.
        let is_writable = p.chain.front().is_some_and(|m| m.is_unique() && !m.is_external());
        if headers.is_pushed || !is_writable {
            return;
        }
        let free = self.runs.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.oldest);
        if free.is_none() {
            self.end(slot, output, counters);
            self.oldest = if slot.saturating_add(1) < RUNS { slot.saturating_add(1) } else { 0 };
        }
        if let Some(slot) = self.runs.get_mut(slot) {
            *slot = Some(Run {
                head: *headers,
                at,
                next: headers.seq.wrapping_add(headers.payload_bytes as u32),
                frame_bytes: p.chain.len(),
                segments: 1,
            });
        }
    }

    fn end_all(&mut self, output: &mut Output<'_>, counters: &mut Counters) {
        for slot in 0..RUNS {
            self.end(slot, output, counters);
        }
    }

    fn end_flow(&mut self, tag: u64, output: &mut Output<'_>, counters: &mut Counters) {
        let slot = self.runs.iter().position(|r| r.is_some_and(|r| r.head.tag == tag));
        if let Some(slot) = slot {
            self.end(slot, output, counters);
        }
    }

    /// Ends a run: its first segment gets the headers of the coalesced frame.
    fn end(&mut self, slot: usize, output: &mut Output<'_>, counters: &mut Counters) {
        let Some(run) = self.runs.get_mut(slot).and_then(Option::take) else { return };
        if run.segments < 2 {
            return;
        }
        counters.add(Counter::GroJoined, run.segments.saturating_sub(1));
        if let Some(first) = output.frame(run.at) {
            run.write_headers(first);
        }
    }
}

/// The output frames of a burst: those after the first `from`.
struct Output<'a> {
    burst: &'a mut Burst,
    from: usize,
}

impl Output<'_> {
    fn frame(&mut self, at: usize) -> Option<&mut Packet> {
        self.burst.get_mut(self.from.saturating_add(at))
    }
}

impl Run {
    /// Whether the segment `next` continues the run that begins with `first`.
    fn is_continued_by(&self, first: &Packet, next: &Packet, headers: &Headers) -> bool {
        let total = self.frame_bytes.saturating_add(headers.payload_bytes);
        let ahead = headers.ack.wrapping_sub(self.head.ack) as i32;
        headers.seq == self.next
            && total.saturating_sub(eth::HEADER_BYTES) <= usize::from(u16::MAX)
            && ahead >= 0
            && (self.head.is_v4, self.head.payload_at) == (headers.is_v4, headers.payload_at)
            && same_headers(front(first), front(next), headers)
    }

    fn append(&mut self, first: &mut Packet, mut chain: Chain, headers: &Headers, pool: &mut Pool) {
        chain.trim_front(headers.payload_at, pool);
        first.chain.append(chain);
        self.next = self.next.wrapping_add(headers.payload_bytes as u32);
        self.frame_bytes = self.frame_bytes.saturating_add(headers.payload_bytes);
        self.segments = self.segments.saturating_add(1);
        let (ack, window, is_pushed) = (headers.ack, headers.window, headers.is_pushed);
        self.head = Headers { ack, window, is_pushed, ..self.head };
    }

    /// Writes lengths, acknowledgement number, window, PSH and the IPv4 checksum of the coalesced frame. The TCP
    /// checksum was verified by segment, and is marked as valid.
    fn write_headers(&self, first: &mut Packet) {
        first.offload = Offload { csum_valid: true, ..Offload::default() };
        let Some(mut front) = first.chain.front_mut() else { return };
        let Some(bytes) = front.as_mut_slice() else {
            debug_assert!(false, "the first mbuf of a run is writable");
            return;
        };
        let l4 = self.head.l4;
        let packet_bytes = self.frame_bytes.saturating_sub(eth::HEADER_BYTES);
        if self.head.is_v4 {
            put(bytes, 16, &(packet_bytes as u16).to_be_bytes());
            put(bytes, 24, &[0, 0]);
            let sum = checksum(bytes.get(eth::HEADER_BYTES..V4_L4).unwrap_or_default());
            put(bytes, 24, &sum.to_be_bytes());
        } else {
            let payload_bytes = packet_bytes.saturating_sub(V6_L4 - eth::HEADER_BYTES);
            put(bytes, 18, &(payload_bytes as u16).to_be_bytes());
        }
        put(bytes, l4.saturating_add(8), &self.head.ack.to_be_bytes());
        put(bytes, l4.saturating_add(14), &self.head.window);
        if self.head.is_pushed
            && let Some(flags) = bytes.get_mut(l4.saturating_add(13))
        {
            *flags |= PSH;
        }
    }
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    if let Some(field) = bytes.get_mut(at..at.saturating_add(what.len())) {
        field.copy_from_slice(what);
    }
}

fn front(p: &Packet) -> &[u8] {
    p.chain.front().map_or(&[], |m| m.as_slice())
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Classifies a frame. The headers of a segment that can be coalesced are in its first mbuf.
fn classify(p: &Packet) -> Class {
    let bytes = front(p);
    let at = match u16_at(bytes, 12) {
        Some(eth::IPV4) => parse_v4(bytes, p.chain.len()),
        Some(eth::IPV6) => parse_v6(bytes, p.chain.len()),
        Some(_) => return Class::Other,
        None => return Class::Unclear,
    };
    match at {
        Ok((l4, is_exact)) => {
            let Some(mut headers) = parse_tcp(bytes, l4, p.chain.len()) else {
                return Class::Unclear;
            };
            headers.1 &= is_exact && p.offload.gso.is_none();
            if headers.1 { Class::Segment(headers.0) } else { Class::Single(headers.0.tag) }
        }
        Err(class) => class,
    }
}

/// The offset of the TCP header, and whether the frame has no bytes after the IP packet.
fn parse_v4(bytes: &[u8], frame_bytes: usize) -> Result<(usize, bool), Class> {
    let header = bytes.get(eth::HEADER_BYTES..V4_L4).ok_or(Class::Unclear)?;
    let [version, _, len_hi, len_lo, _, _, frag_hi, frag_lo, _, proto, ..] = header else {
        return Err(Class::Unclear);
    };
    if *proto != protocol::TCP {
        return Err(Class::Other);
    }
    let is_fragment = u16::from_be_bytes([*frag_hi, *frag_lo]) & 0x3fff != 0;
    if *version != 0x45 || is_fragment || checksum(header) != 0 {
        return Err(Class::Unclear);
    }
    let packet_bytes = usize::from(u16::from_be_bytes([*len_hi, *len_lo]));
    Ok((V4_L4, packet_bytes.saturating_add(eth::HEADER_BYTES) == frame_bytes))
}

fn parse_v6(bytes: &[u8], frame_bytes: usize) -> Result<(usize, bool), Class> {
    let header = bytes.get(eth::HEADER_BYTES..V6_L4).ok_or(Class::Unclear)?;
    let [version, _, _, _, len_hi, len_lo, next, ..] = header else { return Err(Class::Unclear) };
    match *next {
        protocol::TCP if version >> 4 == 6 => {
            let bytes = usize::from(u16::from_be_bytes([*len_hi, *len_lo]));
            Ok((V6_L4, bytes.saturating_add(V6_L4) == frame_bytes))
        }
        protocol::UDP | protocol::ICMPV6 => Err(Class::Other),
        _ => Err(Class::Unclear),
    }
}

/// The headers of a segment, and whether it can be coalesced.
fn parse_tcp(bytes: &[u8], l4: usize, frame_bytes: usize) -> Option<(Headers, bool)> {
    let offset = *bytes.get(l4.checked_add(12)?)?;
    let flags = *bytes.get(l4.checked_add(13)?)?;
    let header_bytes = usize::from(offset >> 4).checked_mul(4)?;
    let payload_at = l4.checked_add(header_bytes)?;
    let payload_bytes = frame_bytes.checked_sub(payload_at)?;
    let ports = u64::from(u32_at(bytes, l4)?);
    // The last four bytes of the sender's address.
    let from = u32_at(bytes, if l4 == V4_L4 { 26 } else { 34 })?;
    let headers = Headers {
        tag: ports << 32 | u64::from(from),
        is_v4: l4 == V4_L4,
        l4,
        payload_at,
        payload_bytes,
        seq: u32_at(bytes, l4.checked_add(4)?)?,
        ack: u32_at(bytes, l4.checked_add(8)?)?,
        window: *bytes.get(l4.checked_add(14)?..)?.first_chunk()?,
        is_pushed: flags & PSH != 0,
    };
    let is_plain = flags & !(PSH | ECE | CWR) == ACK && offset & 0x0e == 0;
    let is_whole = header_bytes >= 20 && payload_at <= bytes.len();
    Some((headers, is_plain && is_whole && payload_bytes > TINY_BYTES))
}

/// Whether two segments have equal headers, except for lengths, IPv4 identification, checksums, sequence and
/// acknowledgement number, window and PSH.
fn same_headers(a: &[u8], b: &[u8], headers: &Headers) -> bool {
    let same = |from: usize, to: usize| {
        let (Some(a), Some(b)) = (a.get(from..to), b.get(from..to)) else { return false };
        a == b
    };
    let l4 = headers.l4;
    let ip = if headers.is_v4 {
        // Service and ECN; fragmentation, time to live, protocol; addresses.
        same(0, 16) && same(20, 24) && same(26, V4_L4)
    } else {
        same(0, 18) && same(20, V6_L4)
    };
    let options_at = l4.saturating_add(20);
    let flags = |of: &[u8]| of.get(l4.saturating_add(13)).map(|flags| flags & !PSH);
    // Ports, length of the header and flags, urgent pointer, options.
    ip && same(l4, l4.saturating_add(4))
        && same(l4.saturating_add(12), l4.saturating_add(13))
        && flags(a) == flags(b)
        && same(l4.saturating_add(18), options_at)
        && same(options_at, headers.payload_at)
}

/// Whether the TCP checksum is correct; marks it as verified then.
fn has_valid_checksum(p: &mut Packet, headers: &Headers) -> bool {
    if p.is_checksum_trusted() {
        return true;
    }
    let mut sum = Sum::new();
    let (from, to) = if headers.is_v4 { (26, V4_L4) } else { (22, V6_L4) };
    sum.add_bytes(front(p).get(from..to).unwrap_or_default());
    sum.add_u16(protocol::TCP.into());
    sum.add_u16(p.chain.len().saturating_sub(headers.l4) as u16);
    let mut skip = headers.l4;
    for bytes in p.chain.slices() {
        let from = skip.min(bytes.len());
        skip = skip.saturating_sub(from);
        sum.add_bytes(bytes.get(from..).unwrap_or_default());
    }
    p.offload.csum_valid = sum.finish() == 0;
    p.offload.csum_valid
}

#[cfg(test)]
mod tests;
