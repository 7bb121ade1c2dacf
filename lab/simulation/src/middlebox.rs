//! Middleboxes that change or drop segments on their way to a station (RFC 3449, RFC 8041 and the measurements that
//! they cite).
//!
//! Options are overwritten by no-ops, so that nothing moves. What is sent is right again: checksums are corrected.

use fulmar_stack::base::Instant;
use fulmar_stack::device::Packet;
use fulmar_stack::mbuf::Pool;
use fulmar_stack::wire::dissect::Network;
use fulmar_stack::wire::protocol;
use fulmar_stack::wire::tcp::{Flags, Header};

use super::moves::{correct, rewritten};

/// Bytes of the headers in front of TCP.
const ETHER_BYTES: usize = 14;
const V4_CHECKSUM: usize = 10;
/// Bytes of a TCP header without options.
const TCP_BYTES: usize = 20;
const FLAGS: usize = 12;
const CHECKSUM: usize = 16;
/// The kinds of options.
pub const MSS: u8 = 2;
pub const WINDOW_SCALE: u8 = 3;
pub const SACK_PERMITTED: u8 = 4;
pub const TIMESTAMPS: u8 = 8;
pub const FAST_OPEN: u8 = 34;
pub const ACCECN: [u8; 2] = [172, 174];
const END: u8 = 0;
const NOP: u8 = 1;
/// Headers up to the end of TCP's options over IPv6.
const HEAD_BYTES: usize = ETHER_BYTES + 40 + 60;

/// The segments to which an action applies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Segments {
    /// SYNs without ACK.
    Syns,
    /// SYN,ACKs.
    SynAcks,
    /// Segments without SYN.
    Others,
    /// Every one.
    All,
}

/// The effect of a middlebox on a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Segments with payload are dropped.
    DropData,
    /// Segments with this option are dropped.
    DropOption(u8),
    /// Segments with a flag of ECN are dropped.
    DropEcn,
    /// The option is overwritten by no-ops.
    Strip(u8),
    /// A bit of the Fast Open cookie is flipped.
    ForgeCookie,
    /// The flags AE, CWR and ECE are cleared.
    ClearEcnFlags,
    /// The ECN field of IP is cleared.
    Bleach,
    /// ECN-capable packets are marked.
    MarkCapable,
    /// Packets are marked, ECN-capable or not.
    MarkAll,
    /// ECT(0) becomes ECT(1), and the reverse.
    SwapCapable,
}

/// An action, the segments to which it applies, and when it begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Middlebox {
    /// Its effect.
    pub action: Action,
    /// To which segments.
    pub segments: Segments,
    /// When it begins.
    pub from: Instant,
}

/// The verdict about a frame.
pub enum Verdict {
    /// It passes, changed or not.
    Pass(Packet),
    /// It is dropped.
    Drop(Packet),
    /// No buffer for the copy of a shared frame.
    NoBuffer,
}

impl Segments {
    fn has(self, flags: Flags) -> bool {
        match self {
            Segments::Syns => flags.contains(Flags::SYN) && !flags.contains(Flags::ACK),
            Segments::SynAcks => flags.contains(Flags::SYN | Flags::ACK),
            Segments::Others => !flags.contains(Flags::SYN),
            Segments::All => true,
        }
    }
}

/// Where TCP lies in a frame.
#[derive(Clone, Copy)]
struct Segment {
    l4: usize,
    flags: Flags,
    header_bytes: usize,
    payload_bytes: usize,
}

impl Segment {
    fn parse(head: &[u8], frame_bytes: usize) -> Option<Segment> {
        let n = Network::parse(head, frame_bytes).filter(|n| n.protocol == protocol::TCP)?;
        let (_, flags, header_bytes) = Header::peek(head.get(n.l4..)?)?;
        let payload_bytes = n.end.checked_sub(n.l4 + header_bytes)?;
        Some(Segment { l4: n.l4, flags, header_bytes, payload_bytes })
    }
}

impl Middlebox {
    /// The verdict about a frame that arrives now.
    pub fn pass(&self, now: Instant, p: Packet, pool: &mut Pool) -> Verdict {
        let mut head = [0; HEAD_BYTES];
        let n = p.chain.copy_to(0, &mut head);
        let segment = Segment::parse(&head[..n], p.chain.len());
        let Some(s) = segment.filter(|s| now >= self.from && self.segments.has(s.flags)) else {
            return Verdict::Pass(p);
        };
        let options = head.get(s.l4 + TCP_BYTES..(s.l4 + s.header_bytes).min(n)).unwrap_or(&[]);
        let is_dropped = match self.action {
            Action::DropData => s.payload_bytes > 0,
            Action::DropOption(kind) => find(options, kind).is_some(),
            Action::DropEcn => s.flags.intersects(Flags::ECN),
            _ => false,
        };
        if is_dropped {
            return Verdict::Drop(p);
        }
        let needs_sum = !p.offload.needs_csum;
        let changed = rewritten(p, pool, |head| self.change(head, &s, needs_sum));
        changed.map_or(Verdict::NoBuffer, Verdict::Pass)
    }

    fn change(&self, head: &mut [u8], s: &Segment, needs_sum: bool) {
        let Some((before, tcp)) = head.split_at_mut_checked(s.l4) else { return };
        match self.action {
            Action::DropData | Action::DropOption(_) | Action::DropEcn => {}
            Action::Strip(kind) => change_options(tcp, s.header_bytes, needs_sum, |options| {
                while let Some(at) = find(options, kind) {
                    options[at].fill(NOP);
                }
            }),
            Action::ForgeCookie => change_options(tcp, s.header_bytes, needs_sum, |options| {
                if let Some(cookie) = find(options, FAST_OPEN).filter(|o| o.len() > 2) {
                    options[cookie.end - 1] ^= 1;
                }
            }),
            Action::ClearEcnFlags => change_flags(tcp, needs_sum),
            Action::Bleach => change_field(before, |_| 0),
            Action::MarkCapable => change_field(before, |field| if field == 0 { 0 } else { 3 }),
            Action::MarkAll => change_field(before, |_| 3),
            Action::SwapCapable => change_field(before, |field| match field {
                1 | 2 => 3 - field,
                other => other,
            }),
        }
    }
}

/// Where an option of a kind lies.
fn find(options: &[u8], kind: u8) -> Option<std::ops::Range<usize>> {
    let mut at = 0;
    while let Some(&k) = options.get(at) {
        let bytes = match k {
            END => return None,
            NOP => 1,
            _ => usize::from(*options.get(at + 1)?).max(2),
        };
        if k == kind {
            return (at + bytes <= options.len()).then_some(at..at + bytes);
        }
        at += bytes;
    }
    None
}

fn change_options(
    tcp: &mut [u8],
    header_bytes: usize,
    needs_sum: bool,
    change: impl Fn(&mut [u8]),
) {
    let Some(options) = tcp.get_mut(TCP_BYTES..header_bytes) else { return };
    let old = options.to_vec();
    change(options);
    let new = options.to_vec();
    if needs_sum {
        correct(tcp, CHECKSUM, &old, &new);
    }
}

fn change_flags(tcp: &mut [u8], needs_sum: bool) {
    let Some(&[a, b]) = tcp.get(FLAGS..FLAGS + 2) else { return };
    let new = (u16::from_be_bytes([a, b]) & !Flags::ECN.0).to_be_bytes();
    tcp[FLAGS..FLAGS + 2].copy_from_slice(&new);
    if needs_sum {
        correct(tcp, CHECKSUM, &[a, b], &new);
    }
}

/// Changes the ECN field: the lower bits of the second byte of IPv4, and of those across the first two of IPv6 (RFC
/// 3168 section 5).
fn change_field(before: &mut [u8], change: impl Fn(u8) -> u8) {
    let Some(ip) = before.get_mut(ETHER_BYTES..) else { return };
    let Some(&[a, b]) = ip.get(..2) else { return };
    let shift = if a >> 4 == 6 { 4 } else { 0 };
    let field = change(b >> shift & 3);
    ip[1] = b & !(3 << shift) | field << shift;
    if shift == 0 {
        let new = [a, ip[1]];
        correct(ip, V4_CHECKSUM, &[a, b], &new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_behind_others() {
        let options = [MSS, 4, 5, 180, NOP, NOP, SACK_PERMITTED, 2, NOP, WINDOW_SCALE, 3, 7];
        assert_eq!(find(&options, MSS), Some(0..4));
        assert_eq!(find(&options, SACK_PERMITTED), Some(6..8));
        assert_eq!(find(&options, WINDOW_SCALE), Some(9..12));
        assert_eq!(find(&options, TIMESTAMPS), None);
        assert_eq!(find(&options[..11], WINDOW_SCALE), None);
    }

    #[test]
    fn the_ecn_field_lies_where_ip_has_it() {
        let mut v6 = [0; ETHER_BYTES + 40];
        v6[ETHER_BYTES..ETHER_BYTES + 2].copy_from_slice(&[0x60, 0x2f]);
        change_field(&mut v6, |_| 3);
        assert_eq!(v6[ETHER_BYTES..ETHER_BYTES + 2], [0x60, 0x3f]);
        let mut v4 = [0; ETHER_BYTES + 20];
        v4[ETHER_BYTES..ETHER_BYTES + 2].copy_from_slice(&[0x45, 0xb6]);
        change_field(&mut v4, |field| 3 - field);
        assert_eq!(v4[ETHER_BYTES..ETHER_BYTES + 2], [0x45, 0xb5]);
    }
}
