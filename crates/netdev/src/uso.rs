//! Transmit aggregation in software: datagrams of one flow that follow each other in a burst cross
//! together, as the super-datagram that they could have been cut from.
//!
//! ```text
//!   burst  A B B B B b C   ──►   A   headers of B* + B + B + B + B + b   C
//! ```
//!
//! For devices that cut super-datagrams (`Caps::udp_gso`), or whose far side does: a TAP and
//! AF_PACKET hand them to the kernel, which looks at their headers once for all of them and cuts them
//! when, and if, they reach a receiver that wants them one by one. The receiver gets the same
//! datagrams in the same order.
//!
//! What is joined: UDP datagrams that still lack their checksum (what the pieces get is computed anew,
//! so a checksum that is already there, right, wrong or none, passes as it is), whole, without IP
//! options or extension headers, as long as their frame; the same addresses, ports, type of service and
//! time to live; each as long as the first, the last one perhaps shorter. IPv4 identifications are not
//! kept: the pieces count on from that of the first.
//!
//! Nothing is written to the frames, moved or held back: [`join`] looks at the front of a burst and
//! makes new headers, and the driver gathers the payloads from where they lie. So a device that refuses
//! leaves everything as it was. Cost: a look at the headers per datagram. Source:
//! Documentation/networking/segmentation-offloads.rst, UDP_SEGMENT in udp(7).

use fulmar_base::{Gso, GsoKind, Offload};
use fulmar_wire::checksum::{Sum, checksum};
use fulmar_wire::{eth, protocol};

use crate::offload::{addresses, largest};
use crate::{Caps, Packet};

/// Fewer datagrams are not joined: cutting two again costs the receiver what joining saves the sender.
pub const LEAST: usize = 3;
/// Datagrams that are joined at most, as many as Linux has its own users join (`UDP_MAX_SEGMENTS`
/// before 6.9).
pub const MOST: usize = 64;

const UDP_HEADER_BYTES: usize = 8;
const UDP_CSUM: u16 = 6;
const V4_L4: usize = eth::HEADER_BYTES + 20;
const V6_L4: usize = eth::HEADER_BYTES + 40;
/// Ethernet, IPv6, UDP.
const MAX_HEADER_BYTES: usize = V6_L4 + UDP_HEADER_BYTES;

/// How the first datagrams of a burst can cross as one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Joined {
    /// How many datagrams.
    pub count: usize,
    /// What the device is asked to do with the whole.
    pub offload: Offload,
    headers: [u8; MAX_HEADER_BYTES],
    header_bytes: usize,
}

impl Joined {
    /// The headers of the whole. Behind them come the payloads: of each datagram what is behind as many
    /// bytes, which lie in its first mbuf.
    pub fn headers(&self) -> &[u8] {
        self.headers.get(..self.header_bytes).unwrap_or_default()
    }
}

/// The headers of a datagram that may be joined.
#[derive(Clone, Copy)]
struct Seen<'a> {
    /// The first mbuf, with all of them.
    front: &'a [u8],
    l4: usize,
    payload_bytes: usize,
}

/// Looks at the first datagrams. `most_segs`: mbufs that the device gathers in all. `None`: the first
/// [`LEAST`] cannot be joined.
pub fn join<'a>(
    packets: impl IntoIterator<Item = &'a Packet>,
    caps: &Caps,
    most_segs: usize,
) -> Option<Joined> {
    let mut packets = packets.into_iter();
    let first = packets.next()?;
    let head = look(first)?;
    let gso = request(&head)?;
    let most_bytes = largest(gso, caps)?.saturating_add(eth::HEADER_BYTES);
    let mut frame_bytes = first.chain.len();
    if frame_bytes > caps.mtu.saturating_add(eth::HEADER_BYTES) {
        return None;
    }
    let (mut count, mut segs, mut last) = (1usize, first.chain.segs(), head);
    while count < MOST && last.payload_bytes == head.payload_bytes {
        let Some((next, p)) = packets.next().and_then(|p| Some((look(p)?, p))) else { break };
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

/// How many frames of `packets`, from the front, come before datagrams that [`join`] would join.
pub fn before_join<'a>(packets: impl IntoIterator<Item = &'a Packet>, caps: &Caps) -> usize {
    let mut at = 0usize;
    let mut run = 0usize;
    let mut last: Option<Seen<'_>> = None;
    for p in packets {
        let seen = if caps.udp_gso { look(p) } else { None };
        let goes_on = last.zip(seen).is_some_and(|(last, seen)| follows(&last, &seen));
        run = if goes_on { run.saturating_add(1) } else { usize::from(seen.is_some()) };
        at = at.saturating_add(1);
        if run == LEAST {
            return at.saturating_sub(LEAST);
        }
        last = seen;
    }
    at
}

fn look(p: &Packet) -> Option<Seen<'_>> {
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
    (is_whole && is_datagram && has_headers).then_some(Seen { front, l4, payload_bytes })
}

/// Whether `next` may be the piece behind `last`.
fn follows(last: &Seen<'_>, next: &Seen<'_>) -> bool {
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
        // All but the length: class and label, next header and limit, addresses.
        return same(0, 18) && same(20, V6_L4) && ports;
    }
    // All but length, identification and checksum.
    same(0, 16) && same(20, 24) && same(26, V4_L4) && ports
}

fn request(head: &Seen<'_>) -> Option<Gso> {
    Some(Gso {
        kind: GsoKind::Udp,
        segment_bytes: u16::try_from(head.payload_bytes).ok()?,
        header_bytes: u16::try_from(head.l4.checked_add(UDP_HEADER_BYTES)?).ok()?,
        ecn: false,
    })
}

/// The first datagram's headers with the lengths and sums of the whole.
fn whole(
    head: &Seen<'_>,
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
