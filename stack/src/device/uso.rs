//! UDP coalescing on transmit: consecutive datagrams of a flow in a burst are sent as one UDP GSO super-frame.
//!
//! ```text
//!   burst  A B B B B b C   ──►   A   headers of B* + B + B + B + B + b   C
//! ```
//!
//! For devices that segment UDP super-frames (`Caps::udp_gso`): a TAP and AF_PACKET pass them to the kernel, which
//! processes the headers once and segments only for a receiver without UDP GRO. The receiver gets the same datagrams in
//! the same order.
//!
//! Datagrams are coalesced if their checksums are still to be computed (segmentation computes them; a datagram with a
//! complete or a zero checksum passes unchanged), if they are unfragmented, without IP options, extension headers or
//! padding, if addresses, ports, type of service and time to live are equal, and if each is as long as the first; the
//! last one may be shorter. IPv4 identifications are not kept: segmentation increments that of the first.
//!
//! The frames are neither changed nor moved: [`join`] reads the front of a burst and makes new headers, and the driver
//! gathers the payloads. So a refusal of the device has no effect. Cost: parsing the headers of each datagram. Source:
//! Documentation/networking/segmentation-offloads.rst, UDP_SEGMENT in udp(7).

use crate::base::{Gso, GsoKind, Offload};
use crate::wire::checksum::{Sum, checksum};
use crate::wire::{eth, protocol};

use crate::device::offload::{addresses, largest};
use crate::device::{Caps, Packet};

/// Fewer datagrams are not coalesced: segmenting two datagrams costs the receiver the time that the sender saves.
pub const LEAST: usize = 3;
/// Datagrams of a super-frame at most: `UDP_MAX_SEGMENTS` of Linux before 6.9.
pub const MOST: usize = 64;

const UDP_HEADER_BYTES: usize = 8;
const UDP_CSUM: u16 = 6;
const V4_L4: usize = eth::HEADER_BYTES + 20;
const V6_L4: usize = eth::HEADER_BYTES + 40;
/// Ethernet, IPv6, UDP.
const MAX_HEADER_BYTES: usize = V6_L4 + UDP_HEADER_BYTES;

/// The super-frame of the first datagrams of a burst.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Joined {
    /// How many datagrams.
    pub count: usize,
    /// The offload request of the super-frame.
    pub offload: Offload,
    headers: [u8; MAX_HEADER_BYTES],
    header_bytes: usize,
}

impl Joined {
    /// The headers of the super-frame. They replace the bytes before the payload of each datagram, which have the same
    /// length and are all in its first mbuf.
    pub fn headers(&self) -> &[u8] {
        self.headers.get(..self.header_bytes).unwrap_or_default()
    }
}

/// A datagram that may be coalesced.
#[derive(Clone, Copy)]
struct Datagram<'a> {
    /// The first mbuf, with all headers.
    front: &'a [u8],
    l4: usize,
    payload_bytes: usize,
}

/// Coalesces the first datagrams of `packets`. `most_segs`: mbufs at most that the device gathers. `None`: the first
/// [`LEAST`] cannot be coalesced.
pub fn join<'a>(
    packets: impl IntoIterator<Item = &'a Packet>,
    caps: &Caps,
    most_segs: usize,
) -> Option<Joined> {
    let mut packets = packets.into_iter();
    let first = packets.next()?;
    let head = parse(first)?;
    let gso = request(&head)?;
    let most_bytes = largest(gso, caps)?.saturating_add(eth::HEADER_BYTES);
    let mut frame_bytes = first.chain.len();
    if frame_bytes > caps.mtu.saturating_add(eth::HEADER_BYTES) {
        return None;
    }
    let (mut count, mut segs, mut last) = (1usize, first.chain.segs(), head);
    while count < MOST && last.payload_bytes == head.payload_bytes {
        let Some((next, p)) = packets.next().and_then(|p| Some((parse(p)?, p))) else { break };
        let fits = frame_bytes.saturating_add(next.payload_bytes) <= most_bytes
            && segs.saturating_add(p.chain.segs()) <= most_segs;
        if !fits || !follows(&last, &next) {
            break;
        }
        count = count.saturating_add(1);
        segs = segs.saturating_add(p.chain.segs());
        frame_bytes = frame_bytes.saturating_add(next.payload_bytes);
        last = next;
    }
    if count < LEAST { None } else { whole(&head, first.offload, gso, count, frame_bytes) }
}

/// How many frames at the front of `packets` precede datagrams that [`join`] may coalesce.
pub fn before_join<'a>(packets: impl IntoIterator<Item = &'a Packet>, caps: &Caps) -> usize {
    let mut at = 0usize;
    let mut run = 0usize;
    let mut last: Option<Datagram<'_>> = None;
    for p in packets {
        let seen = if caps.udp_gso { parse(p) } else { None };
        let continues = last.zip(seen).is_some_and(|(last, seen)| follows(&last, &seen));
        run = if continues { run.saturating_add(1) } else { usize::from(seen.is_some()) };
        at = at.saturating_add(1);
        if run == LEAST {
            return at.saturating_sub(LEAST);
        }
        last = seen;
    }
    at
}

fn parse(p: &Packet) -> Option<Datagram<'_>> {
    let o = &p.offload;
    if !o.needs_csum || o.csum_offset != UDP_CSUM || o.gso.is_some() {
        return None;
    }
    let front = p.chain.front()?.as_slice();
    let l4 = usize::from(o.csum_start);
    let l3 = front.get(eth::HEADER_BYTES..l4)?;
    let l3_bytes = p.chain.len().checked_sub(eth::HEADER_BYTES)?;
    let l4_bytes = p.chain.len().checked_sub(l4)?;
    let is_whole = match (u16_at(front, 12)?, l4) {
        (eth::IPV4, V4_L4) => {
            l3.first() == Some(&0x45)
                && u16_at(l3, 6)? & 0x3fff == 0
                && l3.get(9) == Some(&protocol::UDP)
                && usize::from(u16_at(l3, 2)?) == l3_bytes
        }
        (eth::IPV6, V6_L4) => {
            l3.first()? >> 4 == 6
                && l3.get(6) == Some(&protocol::UDP)
                && usize::from(u16_at(l3, 4)?) == l4_bytes
        }
        _ => false,
    };
    let is_datagram = usize::from(u16_at(front, l4.checked_add(4)?)?) == l4_bytes;
    let payload_at = l4.checked_add(UDP_HEADER_BYTES)?;
    let payload_bytes = p.chain.len().checked_sub(payload_at).filter(|n| *n > 0)?;
    let has_headers = front.len() >= payload_at;
    (is_whole && is_datagram && has_headers).then_some(Datagram { front, l4, payload_bytes })
}

/// Whether `next` may be the segment after `last`.
fn follows(last: &Datagram<'_>, next: &Datagram<'_>) -> bool {
    let (a, b) = (last.front, next.front);
    let same = |from: usize, to: usize| match (a.get(from..to), b.get(from..to)) {
        (Some(a), Some(b)) => a == b,
        _ => false,
    };
    let l4 = last.l4;
    if l4 != next.l4 || next.payload_bytes > last.payload_bytes {
        return false;
    }
    let ports = same(l4, l4.saturating_add(4));
    if l4 == V6_L4 {
        // All but the length: traffic class and flow label, next header, hop limit, addresses.
        return same(0, 18) && same(20, V6_L4) && ports;
    }
    // All but length, identification and checksum.
    same(0, 16) && same(20, 24) && same(26, V4_L4) && ports
}

fn request(head: &Datagram<'_>) -> Option<Gso> {
    Some(Gso {
        kind: GsoKind::Udp,
        segment_bytes: u16::try_from(head.payload_bytes).ok()?,
        header_bytes: u16::try_from(head.l4.checked_add(UDP_HEADER_BYTES)?).ok()?,
        ecn: false,
    })
}

/// The headers of the first datagram with the lengths and checksums of the super-frame.
fn whole(
    head: &Datagram<'_>,
    offload: Offload,
    gso: Gso,
    count: usize,
    frame_bytes: usize,
) -> Option<Joined> {
    let header_bytes = usize::from(gso.header_bytes);
    let mut headers = [0; MAX_HEADER_BYTES];
    let h = headers.get_mut(..header_bytes)?;
    h.copy_from_slice(head.front.get(..header_bytes)?);
    let (source, destination, _) = addresses(h)?;
    let l4_bytes = frame_bytes.checked_sub(head.l4)?;
    if head.l4 == V4_L4 {
        put_u16(h, 16, u16::try_from(frame_bytes.checked_sub(eth::HEADER_BYTES)?).ok()?)?;
        put_u16(h, 24, 0)?;
        let sum = checksum(h.get(eth::HEADER_BYTES..V4_L4)?);
        put_u16(h, 24, sum)?;
    } else {
        put_u16(h, 18, u16::try_from(l4_bytes).ok()?)?;
    }
    put_u16(h, head.l4.checked_add(4)?, u16::try_from(l4_bytes).ok()?)?;
    let mut pseudo = Sum::new();
    pseudo.add_pseudo(source, destination, protocol::UDP, l4_bytes as u32);
    put_u16(h, head.l4.checked_add(usize::from(UDP_CSUM))?, pseudo.fold())?;
    Some(Joined { count, offload: Offload { gso: Some(gso), ..offload }, headers, header_bytes })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes.get_mut(at..at.checked_add(2)?)?.copy_from_slice(&value.to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests;
