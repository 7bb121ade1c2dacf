//! Predicted headers: the header bytes that successive frames of a TCP flow have in common.
//!
//! ```text
//!   Ethernet       | IPv4                                       | TCP
//!   to from type   | 45 tos .len. .id.. frag ttl 06 .sum src dst | ports .the rest…
//!   compared       | compared ───── not ──── compared ─ not ──────── compared   not
//! ```
//!
//! A receiver that has checked all headers of one frame need not check in the next one the bytes that are
//! equal. Over IPv6 all bytes but the payload length are compared.
//!
//! Not here: whether the rest of the TCP header makes sense, and the checksums. IPv4 with options,
//! fragments, and IPv6 with extension headers are never predicted.

use core::ops::Range;

use crate::wire::{eth, ipv4, ipv6, protocol};

/// Where TCP begins behind IPv4 without options, and behind IPv6 without extension headers.
const L4_V4: usize = eth::HEADER_BYTES + ipv4::HEADER_BYTES;
const L4_V6: usize = eth::HEADER_BYTES + ipv6::HEADER_BYTES;

/// Up to the end of the two ports.
const FRONT_V4: usize = L4_V4 + 4;
const FRONT_V6: usize = L4_V6 + 4;

/// Version 4 and IHL 5: a header without options.
const VERSION_IHL_V4: u8 = 0x45;
/// The bits of the flags and offset field of an IPv4 header that are 0 in a whole packet: all but
/// DF.
const IS_FRAGMENT: u16 = 0xbfff;

/// The common headers of the frames of one TCP flow, in one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PredictedHeaders(Front);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Front {
    V4([u8; FRONT_V4]),
    V6([u8; FRONT_V6]),
}

impl PredictedHeaders {
    /// The headers of a frame, which starts at its Ethernet header. `None`: frames like this are not
    /// predicted.
    pub fn of(frame: &[u8]) -> Option<PredictedHeaders> {
        match *frame {
            [_, _, _, _, _, _, _, _, _, _, _, _, 0x08, 0x00, VERSION_IHL_V4, _, ..] => {
                let front = frame.first_chunk::<FRONT_V4>()?;
                let is_whole = u16_at(front, 20) & IS_FRAGMENT == 0;
                let is_tcp = front.get(23) == Some(&protocol::TCP);
                (is_whole && is_tcp).then_some(PredictedHeaders(Front::V4(*front)))
            }
            [_, _, _, _, _, _, _, _, _, _, _, _, 0x86, 0xdd, version, ..] => {
                let front = frame.first_chunk::<FRONT_V6>()?;
                let is_tcp = version >> 4 == 6 && front.get(20) == Some(&protocol::TCP);
                is_tcp.then_some(PredictedHeaders(Front::V6(*front)))
            }
            _ => None,
        }
    }

    /// Offset of the TCP header in a frame of `frame_bytes` of the same flow, of which `frame` has at least
    /// the headers up to the ports. `None`: another flow, an IP packet that does not end with the frame, or
    /// other headers that need a full parse.
    #[inline]
    pub fn predict(&self, frame: &[u8], frame_bytes: usize) -> Option<usize> {
        match &self.0 {
            Front::V4(known) => {
                let front = frame.first_chunk::<FRONT_V4>()?;
                let is_match = is_same(front, known, 26..FRONT_V4)
                    && is_same(front, known, 0..16)
                    && is_same(front, known, 20..24);
                let ip_bytes = usize::from(u16_at(front, 16));
                let is_whole_frame = ip_bytes.checked_add(eth::HEADER_BYTES) == Some(frame_bytes);
                (is_match && is_whole_frame).then_some(L4_V4)
            }
            Front::V6(known) => {
                let front = frame.first_chunk::<FRONT_V6>()?;
                let is_match = is_same(front, known, 20..FRONT_V6) && is_same(front, known, 0..18);
                let ip_bytes = usize::from(u16_at(front, 18));
                let is_whole_frame = ip_bytes.checked_add(L4_V6) == Some(frame_bytes);
                (is_match && is_whole_frame).then_some(L4_V6)
            }
        }
    }

    /// The ECN field of the IP header (RFC 3168 section 5).
    #[inline]
    pub fn ecn(&self) -> u8 {
        match &self.0 {
            Front::V4(front) => front[eth::HEADER_BYTES + 1] & 3,
            // Traffic class: the low half of the first byte, the high half of the second.
            Front::V6(front) => front[eth::HEADER_BYTES + 1] >> 4 & 3,
        }
    }

    /// Whether the IP header has a checksum of its own, which is not verified here.
    #[inline]
    pub fn is_v4(&self) -> bool {
        matches!(self.0, Front::V4(_))
    }
}

#[inline(always)]
fn is_same<const N: usize>(a: &[u8; N], b: &[u8; N], part: Range<usize>) -> bool {
    a.get(part.clone()) == b.get(part)
}

/// A field of two bytes.
#[inline]
fn u16_at(front: &[u8], at: usize) -> u16 {
    let field = front.get(at..).and_then(|f| f.first_chunk());
    field.map_or(0, |f| u16::from_be_bytes(*f))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A frame of `frame_bytes` with the headers of a stream.
    fn frame(is_v4: bool, frame_bytes: usize) -> Vec<u8> {
        let mut f: Vec<u8> = (0..frame_bytes).map(|i| i as u8).collect();
        if is_v4 {
            f[12..16].copy_from_slice(&[0x08, 0, 0x45, 0]);
            f[16..18].copy_from_slice(&((frame_bytes - 14) as u16).to_be_bytes());
            f[20..24].copy_from_slice(&[0x40, 0, 64, protocol::TCP]);
        } else {
            f[12..16].copy_from_slice(&[0x86, 0xdd, 0x60, 0]);
            f[18..20].copy_from_slice(&((frame_bytes - 54) as u16).to_be_bytes());
            f[20..22].copy_from_slice(&[protocol::TCP, 64]);
        }
        f
    }

    #[test]
    fn predicted_headers_match_segments_of_the_same_stream() {
        for (is_v4, l4, free) in [(true, 34, [18, 19, 24, 25]), (false, 54, [60, 61, 62, 63])] {
            let known = PredictedHeaders::of(&frame(is_v4, 100)).expect("a stream's");
            assert_eq!(known.is_v4(), is_v4);
            let mut next = frame(is_v4, 1000);
            for at in free.into_iter().chain(l4 + 4..l4 + 32) {
                next[at] ^= 0xff;
            }
            assert_eq!(known.predict(&next[..l4 + 20], 1000), Some(l4));
        }
    }

    #[test]
    fn any_other_byte_that_differs_makes_it_another_frame() {
        for (is_v4, l4) in [(true, 34), (false, 54)] {
            let known = PredictedHeaders::of(&frame(is_v4, 100)).expect("a stream's");
            let may_differ = |at: &usize| is_v4 && matches!(at, 18 | 19 | 24 | 25);
            for at in (0..l4 + 4).filter(|at| !may_differ(at)) {
                let mut next = frame(is_v4, 100);
                next[at] ^= 1;
                assert_eq!(known.predict(&next, 100), None, "byte {at}");
            }
        }
    }

    #[test]
    fn padding_fragments_options_and_other_protocols_are_not_recognised() {
        for is_v4 in [true, false] {
            let f = frame(is_v4, 100);
            let known = PredictedHeaders::of(&f).expect("a stream's");
            assert_eq!(known.predict(&f, 101), None);
            assert_eq!(known.predict(&f, 99), None);
        }
        for (is_v4, at, byte) in [
            (true, 14, 0x46),
            (true, 20, 0x20),
            (true, 21, 1),
            (true, 23, protocol::UDP),
            (false, 20, protocol::UDP),
            (false, 14, 0x40),
            (true, 13, 6),
        ] {
            let mut f = frame(is_v4, 100);
            f[at] = byte;
            assert_eq!(PredictedHeaders::of(&f), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_predicted_within_their_length_or_not_at_all(
            a in proptest::collection::vec(any::<u8>(), 0..80),
            cut in 0usize..80,
            is_v4: bool,
        ) {
            let _ = PredictedHeaders::of(&a);
            let f = frame(is_v4, 80);
            let known = PredictedHeaders::of(&f).expect("a stream's");
            let need = if is_v4 { FRONT_V4 } else { FRONT_V6 };
            prop_assert_eq!(known.predict(&f[..cut], 80).is_some(), cut >= need);
            let _ = known.predict(&a, a.len());
        }
    }
}
