//! Options of a SYN in the order of another system. The order of options has no meaning (RFC 9293 section 3.1),
//! but scripts compare it.

use fulmar_stack::wire::{ipv4, ipv6, protocol};

const SYN: u8 = 2;
const PSH: u8 = 8;
/// Bytes of a TCP header without options.
const TCP_BYTES: usize = 20;

const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const TIMESTAMPS: u8 = 8;
const FAST_OPEN: u8 = 34;

/// Rewrites the options of a SYN as FreeBSD lays them out: the largest segment, the window scale behind a no-op,
/// SACK-permitted, timestamps, Fast Open, and ends of the list as padding. The checksum stays right, since the sum of the
/// words changes by a difference that is added to it.
pub fn reorder_options(packet: &mut [u8]) {
    let Some(segment) = tcp_segment(packet) else { return };
    let header_bytes = usize::from(segment[12] >> 4) * 4;
    if segment[13] & SYN == 0 || header_bytes > segment.len() {
        return;
    }
    let options = &segment[TCP_BYTES..header_bytes];
    let Some(ordered) = in_freebsd_order(options) else { return };
    let before = sum_of(options);
    let after = sum_of(&ordered);
    let sum = u16::from_be_bytes([segment[16], segment[17]]);
    // RFC 1624: HC' = ~(~HC + ~m + m').
    let sum = !fold(u32::from(!sum) + u32::from(!before) + u32::from(after));
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    segment[TCP_BYTES..header_bytes].copy_from_slice(&ordered);
}

/// Clears PSH. Linux sets it on every packet of several segments (`tcp_transmit_skb`), for receivers that aggregate;
/// RFC 9293 section 3.9.1.2 asks for it on the last segment of a write. Scripts whose own PSH are taken away are
/// compared without.
pub fn clear_push(packet: &mut [u8]) {
    let Some(segment) = tcp_segment(packet) else { return };
    if segment[13] & PSH == 0 {
        return;
    }
    let sum = u16::from_be_bytes([segment[16], segment[17]]);
    let sum = !fold(u32::from(!sum) + u32::from(!u16::from(PSH)));
    segment[13] &= !PSH;
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
}

/// The TCP header and payload of a packet without IPv6 extensions.
fn tcp_segment(packet: &mut [u8]) -> Option<&mut [u8]> {
    let (protocol, at) = match packet.first()? >> 4 {
        4 => (*packet.get(9)?, usize::from(packet[0] & 15) * 4),
        6 => (*packet.get(6)?, ipv6::HEADER_BYTES),
        _ => return None,
    };
    let is_tcp = protocol == protocol::TCP && at >= ipv4::HEADER_BYTES;
    packet.get_mut(at..).filter(|s| is_tcp && s.len() >= TCP_BYTES)
}

/// `None` if the list is malformed or would grow.
fn in_freebsd_order(options: &[u8]) -> Option<Vec<u8>> {
    let mut found: Vec<&[u8]> = Vec::new();
    let mut rest = options;
    while let Some(&kind) = rest.first() {
        let length = if kind <= NOP { 1 } else { usize::from(*rest.get(1)?).max(2) };
        let (option, tail) = rest.split_at_checked(length)?;
        if kind > NOP {
            found.push(option);
        }
        rest = tail;
    }
    let mut ordered = Vec::new();
    for kind in [MSS, WINDOW_SCALE, SACK_PERMITTED, TIMESTAMPS, FAST_OPEN] {
        let Some(option) = found.iter().find(|o| o[0] == kind) else { continue };
        // The values of timestamps are aligned to words.
        let is_unaligned = |length: usize| match kind {
            WINDOW_SCALE => length % 4 != 1,
            TIMESTAMPS => length % 4 != 2,
            _ => false,
        };
        while is_unaligned(ordered.len()) {
            ordered.push(NOP);
        }
        ordered.extend_from_slice(option);
    }
    let is_same = ordered.len() <= options.len();
    ordered.resize(options.len(), 0);
    is_same.then_some(ordered)
}

fn sum_of(bytes: &[u8]) -> u16 {
    let (words, _) = bytes.as_chunks::<2>();
    fold(words.iter().map(|w| u32::from(u16::from_be_bytes(*w))).sum())
}

fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_stack::wire::checksum::checksum;

    #[test]
    fn options_of_a_syn_change_places_and_the_checksum_stays_right() {
        let mut packet = vec![0x45, 0, 0, 60, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        packet.extend([0, 80, 31, 64, 0, 0, 0, 1, 0, 0, 0, 0, 0xa0, SYN, 255, 255, 0, 0, 0, 0]);
        packet.extend([2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 7, 0, 0, 0, 0, 1, 3, 3, 6]);
        let sum = checksum(&packet[20..]);
        packet[36..38].copy_from_slice(&sum.to_be_bytes());
        reorder_options(&mut packet);
        let expected = [2, 4, 5, 180, 1, 3, 3, 6, 4, 2, 8, 10, 0, 0, 0, 7, 0, 0, 0, 0];
        assert_eq!(packet[40..], expected);
        assert_eq!(checksum(&packet[20..]), 0, "the sum over a right checksum is zero");
    }
}
