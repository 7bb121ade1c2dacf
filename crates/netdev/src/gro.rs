//! Receive aggregation in software: TCP segments of one burst that follow each other become one, by
//! reference, so that ip and tcp are run once for all of them. For devices that hand over packets of
//! MTU size; super-frames pass as they are.
//!
//! ```text
//!   burst  A1 B1 A2 A3 udp B2 A4(FIN)   ──►   A1+A2+A3  B1+B2  udp  A4
//! ```
//!
//! What is joined: the same flow, each segment where the last one ended, headers that differ in
//! nothing but lengths, numbers, window, PSH and the IPv4 identification; no fragments, no IP options,
//! no flags but ACK, PSH and equal ones of ECN; at most an IP packet of 64 KiB. The options must be the same to the byte,
//! timestamps included, so that none is lost. Both checksums are verified first, segment by segment:
//! what fails is passed on as it is, to be dropped and counted where everything else is. PSH ends a
//! run, and so does any other sound segment of its flow, so that a flow keeps its order; different flows
//! may overtake each other within the burst. Payloads that land in the smallest buffers are left
//! alone: the receive queue copies them together.
//!
//! Nothing is held back: what came in with a burst goes up with it. At most [`RUNS`] flows are joined
//! at a time, the oldest gives way. Cost: a look at the headers per segment, and the sum of its bytes
//! that is computed in any case. Source: the rules of Linux's GRO, but that acknowledgement, window and segment size
//! may change within a run, and that the smallest payloads are left alone. A joined frame is no super-frame: its
//! segments are forgotten.

use fulmar_base::{Counter, Counters, Offload};
use fulmar_mbuf::{Chain, Pool};
use fulmar_wire::checksum::{Sum, checksum};
use fulmar_wire::{eth, protocol};

use crate::{Burst, Packet};

/// Flows whose segments are joined at a time.
pub const RUNS: usize = 8;

/// Payloads up to this many bytes lie in the drivers' small buffers.
const TINY_BYTES: usize = 256;

const ACK: u8 = 0x10;
const PSH: u8 = 0x08;
const ECE: u8 = 0x40;
const CWR: u8 = 0x80;
/// Where the headers begin and end.
const V4_L4: usize = eth::HEADER_BYTES + 20;
const V6_L4: usize = eth::HEADER_BYTES + 40;

/// What a frame means for the runs.
enum Look {
    /// No TCP segment: passes.
    Other,
    /// Perhaps a TCP segment, of a flow that is not known: every run ends.
    Unclear,
    /// A TCP segment that cannot be joined: the run of its flow ends.
    Single(u64),
    /// It may begin a run, or go on with one.
    Segment(Seen),
}

/// The headers of a segment that may be joined.
#[derive(Clone, Copy)]
struct Seen {
    /// Tells flows apart, nearly: ports and a part of the sender's address.
    tag: u64,
    is_v4: bool,
    l4: usize,
    payload_at: usize,
    payload_bytes: usize,
    seq: u32,
    ack: u32,
    window: [u8; 2],
    is_pushed: bool,
}

/// A segment that others may be joined to.
#[derive(Clone, Copy)]
struct Run {
    /// The first segment, with the numbers of the last one.
    head: Seen,
    /// Its place among the frames that go up.
    at: usize,
    /// Where the next one begins.
    next: u32,
    frame_bytes: usize,
    segments: u64,
}

/// The runs of a burst. Holds no frame itself.
#[derive(Default)]
pub struct Gro {
    runs: [Option<Run>; RUNS],
    /// The next to give way.
    oldest: usize,
}

impl Gro {
    /// No runs.
    pub fn new() -> Gro {
        Gro::default()
    }

    /// Joins what can be joined of the frames of one burst.
    pub fn join(&mut self, burst: &mut Burst, pool: &mut Pool, counters: &mut Counters) {
        // Of datagrams there is nothing to join: they stay where they lie.
        if !burst.iter().any(|p| matches!(look(p), Look::Segment(_))) {
            return;
        }
        let frames = burst.len();
        let mut out = 0usize;
        for taken in 1..=frames {
            let Some(p) = burst.pop_front() else { break };
            // What goes up lies behind what is still to be looked at.
            let up = Up { burst, from: frames.saturating_sub(taken) };
            let Some(p) = self.take(p, up, out, pool, counters) else { continue };
            out = out.saturating_add(1);
            if let Err(p) = burst.push(p) {
                debug_assert!(false, "a frame has just left the burst");
                pool.free(p.chain);
            }
        }
        self.end_all(&mut Up { burst, from: 0 }, counters);
        self.oldest = 0;
    }

    /// Takes the next frame: joins it to a run (`None`), or lets it pass as number `out` of those that
    /// go up.
    fn take(
        &mut self,
        mut p: Packet,
        mut up: Up<'_>,
        out: usize,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Option<Packet> {
        let seen = match look(&p) {
            Look::Other => return Some(p),
            Look::Unclear => {
                self.end_all(&mut up, counters);
                return Some(p);
            }
            Look::Single(tag) => {
                self.end_flow(tag, &mut up, counters);
                return Some(p);
            }
            Look::Segment(seen) => seen,
        };
        if !is_sound(&mut p, &seen) {
            return Some(p);
        }
        match self.join_one(p, &seen, &mut up, pool) {
            Ok(()) if !seen.is_pushed => None,
            Ok(()) => {
                self.end_flow(seen.tag, &mut up, counters);
                None
            }
            Err(p) => {
                self.end_flow(seen.tag, &mut up, counters);
                self.begin(&p, &seen, out, &mut up, counters);
                Some(p)
            }
        }
    }

    /// Joins a segment to the run that it continues, if there is one.
    fn join_one(
        &mut self,
        p: Packet,
        seen: &Seen,
        up: &mut Up<'_>,
        pool: &mut Pool,
    ) -> Result<(), Packet> {
        let run = self.runs.iter_mut().flatten().find(|r| r.head.tag == seen.tag);
        let Some(run) = run else { return Err(p) };
        let Some(first) = up.frame(run.at) else { return Err(p) };
        if !run.is_continued_by(first, &p, seen) {
            return Err(p);
        }
        run.append(first, p.chain, seen, pool);
        Ok(())
    }

    /// A segment that later ones may be joined to.
    fn begin(
        &mut self,
        p: &Packet,
        seen: &Seen,
        at: usize,
        up: &mut Up<'_>,
        counters: &mut Counters,
    ) {
        // Its headers will be written.
        let is_writable = p.chain.front().is_some_and(|m| m.is_unique() && !m.is_external());
        if seen.is_pushed || !is_writable {
            return;
        }
        let free = self.runs.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.oldest);
        if free.is_none() {
            self.end(slot, up, counters);
            self.oldest = if slot.saturating_add(1) < RUNS { slot.saturating_add(1) } else { 0 };
        }
        if let Some(slot) = self.runs.get_mut(slot) {
            *slot = Some(Run {
                head: *seen,
                at,
                next: seen.seq.wrapping_add(seen.payload_bytes as u32),
                frame_bytes: p.chain.len(),
                segments: 1,
            });
        }
    }

    fn end_all(&mut self, up: &mut Up<'_>, counters: &mut Counters) {
        for slot in 0..RUNS {
            self.end(slot, up, counters);
        }
    }

    fn end_flow(&mut self, tag: u64, up: &mut Up<'_>, counters: &mut Counters) {
        let slot = self.runs.iter().position(|r| r.is_some_and(|r| r.head.tag == tag));
        if let Some(slot) = slot {
            self.end(slot, up, counters);
        }
    }

    /// Nothing more is joined to a run: its first segment gets the headers of the whole.
    fn end(&mut self, slot: usize, up: &mut Up<'_>, counters: &mut Counters) {
        let Some(run) = self.runs.get_mut(slot).and_then(Option::take) else { return };
        if run.segments < 2 {
            return;
        }
        counters.add(Counter::GroJoined, run.segments.saturating_sub(1));
        if let Some(first) = up.frame(run.at) {
            run.write_headers(first);
        }
    }
}

/// The frames of a burst that go up: those behind the first `from`.
struct Up<'a> {
    burst: &'a mut Burst,
    from: usize,
}

impl Up<'_> {
    fn frame(&mut self, at: usize) -> Option<&mut Packet> {
        self.burst.get_mut(self.from.saturating_add(at))
    }
}

impl Run {
    /// Whether the segment `next` is the next one of the run that begins with `first`.
    fn is_continued_by(&self, first: &Packet, next: &Packet, seen: &Seen) -> bool {
        let total = self.frame_bytes.saturating_add(seen.payload_bytes);
        let ahead = seen.ack.wrapping_sub(self.head.ack) as i32;
        seen.seq == self.next
            && total.saturating_sub(eth::HEADER_BYTES) <= usize::from(u16::MAX)
            && ahead >= 0
            && (self.head.is_v4, self.head.payload_at) == (seen.is_v4, seen.payload_at)
            && same_headers(front(first), front(next), seen)
    }

    fn append(&mut self, first: &mut Packet, mut chain: Chain, seen: &Seen, pool: &mut Pool) {
        chain.trim_front(seen.payload_at, pool);
        first.chain.append(chain);
        self.next = self.next.wrapping_add(seen.payload_bytes as u32);
        self.frame_bytes = self.frame_bytes.saturating_add(seen.payload_bytes);
        self.segments = self.segments.saturating_add(1);
        let (ack, window, is_pushed) = (seen.ack, seen.window, seen.is_pushed);
        self.head = Seen { ack, window, is_pushed, ..self.head };
    }

    /// Lengths, acknowledgement, window and PSH of the whole, and the IPv4 checksum. The transport's
    /// was verified and is not verified again.
    fn write_headers(&self, first: &mut Packet) {
        first.offload = Offload { csum_valid: true, ..Offload::default() };
        let Some(mut front) = first.chain.front_mut() else { return };
        let Some(bytes) = front.as_mut_slice() else {
            debug_assert!(false, "the front of a run has no other writer");
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

/// What a frame is. The headers of what can be joined lie in its first mbuf.
fn look(p: &Packet) -> Look {
    let bytes = front(p);
    let at = match u16_at(bytes, 12) {
        Some(eth::IPV4) => look_at_v4(bytes, p.chain.len()),
        Some(eth::IPV6) => look_at_v6(bytes, p.chain.len()),
        Some(_) => return Look::Other,
        None => return Look::Unclear,
    };
    match at {
        Ok((l4, is_exact)) => {
            let Some(mut seen) = look_at_tcp(bytes, l4, p.chain.len()) else {
                return Look::Unclear;
            };
            seen.1 &= is_exact && p.offload.gso.is_none();
            if seen.1 { Look::Segment(seen.0) } else { Look::Single(seen.0.tag) }
        }
        Err(look) => look,
    }
}

/// Where TCP begins, and whether the frame is as long as the packet.
fn look_at_v4(bytes: &[u8], frame_bytes: usize) -> Result<(usize, bool), Look> {
    let header = bytes.get(eth::HEADER_BYTES..V4_L4).ok_or(Look::Unclear)?;
    let [version, _, len_hi, len_lo, _, _, frag_hi, frag_lo, _, proto, ..] = header else {
        return Err(Look::Unclear);
    };
    if *proto != protocol::TCP {
        return Err(Look::Other);
    }
    let is_fragment = u16::from_be_bytes([*frag_hi, *frag_lo]) & 0x3fff != 0;
    if *version != 0x45 || is_fragment || checksum(header) != 0 {
        return Err(Look::Unclear);
    }
    let packet_bytes = usize::from(u16::from_be_bytes([*len_hi, *len_lo]));
    Ok((V4_L4, packet_bytes.saturating_add(eth::HEADER_BYTES) == frame_bytes))
}

fn look_at_v6(bytes: &[u8], frame_bytes: usize) -> Result<(usize, bool), Look> {
    let header = bytes.get(eth::HEADER_BYTES..V6_L4).ok_or(Look::Unclear)?;
    let [version, _, _, _, len_hi, len_lo, next, ..] = header else { return Err(Look::Unclear) };
    match *next {
        protocol::TCP if version >> 4 == 6 => {
            let bytes = usize::from(u16::from_be_bytes([*len_hi, *len_lo]));
            Ok((V6_L4, bytes.saturating_add(V6_L4) == frame_bytes))
        }
        protocol::UDP | protocol::ICMPV6 => Err(Look::Other),
        _ => Err(Look::Unclear),
    }
}

/// The segment, and whether it is one that can be joined.
fn look_at_tcp(bytes: &[u8], l4: usize, frame_bytes: usize) -> Option<(Seen, bool)> {
    let offset = *bytes.get(l4.checked_add(12)?)?;
    let flags = *bytes.get(l4.checked_add(13)?)?;
    let header_bytes = usize::from(offset >> 4).checked_mul(4)?;
    let payload_at = l4.checked_add(header_bytes)?;
    let payload_bytes = frame_bytes.checked_sub(payload_at)?;
    let ports = u64::from(u32_at(bytes, l4)?);
    // Behind the addresses of either version: the last four bytes of the sender's.
    let from = u32_at(bytes, if l4 == V4_L4 { 26 } else { 34 })?;
    let seen = Seen {
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
    Some((seen, is_plain && is_whole && payload_bytes > TINY_BYTES))
}

/// Whether two segments have the same headers but for lengths, IPv4 identification and checksums, and
/// the numbers, window and flags of TCP.
fn same_headers(a: &[u8], b: &[u8], seen: &Seen) -> bool {
    let same = |from: usize, to: usize| {
        let (Some(a), Some(b)) = (a.get(from..to), b.get(from..to)) else { return false };
        a == b
    };
    let l4 = seen.l4;
    let ip = if seen.is_v4 {
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
        && same(options_at, seen.payload_at)
}

/// Whether the segment is as it was sent; then it need not be summed again.
fn is_sound(p: &mut Packet, seen: &Seen) -> bool {
    if p.is_checksum_trusted() {
        return true;
    }
    let mut sum = Sum::new();
    let (from, to) = if seen.is_v4 { (26, V4_L4) } else { (22, V6_L4) };
    sum.add_bytes(front(p).get(from..to).unwrap_or_default());
    sum.add_u16(protocol::TCP.into());
    sum.add_u16(p.chain.len().saturating_sub(seen.l4) as u16);
    let mut skip = seen.l4;
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
