//! The Internet checksum (RFC 1071): the one's complement sum of 16-bit words.
//!
//! The sum is computed in memory order in 64 bits and swapped once at the end: the one's complement sum is
//! independent of byte order (RFC 1071 section 2(B)), and 2^64 - 1 is a multiple of 2^16 - 1, so sums of wide
//! words fold to the same result. The sum of bytes at an odd offset is rotated by eight bits.
//!
//! Bytes that are copied are summed in the same pass, unit by unit ([`copy_and_sum_units`]), so that a later
//! checksum does not read them again.
//!
//! Cost: beyond the first-level cache a copy with sums runs at memory speed, like a plain copy. The main loop
//! adds 64-bit words into four independent 128-bit lanes, with an add and an add-with-carry per word;
//! `examples/checksum_rate.rs` measures it.

use core::net::IpAddr;
use core::num::NonZeroU16;

/// Bytes per iteration of the main loop: one word per lane.
const BLOCK_BYTES: usize = 32;

/// Bytes of a unit, the range of memory whose sum is stored: a segment of 1,448 bytes is eleven whole units
/// and two partial ones, of which a quarter unit each is read again on average.
pub const UNIT_BYTES: usize = 128;

/// The folded sum of a unit ([`UNIT_BYTES`] bytes) in memory order. It is never zero, since 0xffff is the same
/// in one's complement, so `Option<UnitSum>` takes two bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct UnitSum(NonZeroU16);

impl UnitSum {
    /// Computes the sum of a unit.
    #[inline]
    pub fn of(unit: &[u8; UNIT_BYTES]) -> UnitSum {
        // Halves of 32-bit words in lanes of 32 bits: no lane can overflow. The compiler vectorizes the
        // loop on every target and reuses the loads of the copy.
        let mut lanes = [0u32; 16];
        for block in unit.as_chunks::<64>().0 {
            for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<4>().0) {
                let word = u32::from_ne_bytes(*word);
                *lane = lane.wrapping_add(word & 0xffff).wrapping_add(word >> 16);
            }
        }
        let total = lanes.into_iter().fold(0, u32::wrapping_add);
        let folded = fold_in_memory_order(total.into()) as u16;
        UnitSum(NonZeroU16::new(folded).unwrap_or(NonZeroU16::MAX))
    }
}

impl From<UnitSum> for Sum {
    #[inline]
    fn from(unit: UnitSum) -> Sum {
        Sum { acc: u64::from(unit.0.get()), odd: false }
    }
}

/// A running one's complement sum over a stream of bytes.
///
/// The stream may be added in parts of any length, also odd ones.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sum {
    /// The sum in memory order, with end-around carry at 64 bits.
    acc: u64,
    /// Whether the number of bytes is odd.
    odd: bool,
}

impl Sum {
    /// The sum of no bytes.
    #[inline]
    pub const fn new() -> Sum {
        Sum { acc: 0, odd: false }
    }

    /// Adds the next bytes of the stream.
    #[inline]
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        self.append(Sum { acc: sum_of(bytes), odd: bytes.len() & 1 != 0 });
    }

    /// Adds the next two bytes of the stream, in network order.
    #[inline]
    pub(crate) fn add_u16(&mut self, word: u16) {
        self.append(Sum { acc: u64::from(word.to_be()), odd: false });
    }

    /// Adds the sum of the next bytes of the stream, such as a payload summed while it was copied.
    #[inline]
    pub fn append(&mut self, next: Sum) {
        let turned = if self.odd { next.acc.rotate_left(8) } else { next.acc };
        self.acc = add_with_carry(self.acc, turned);
        self.odd ^= next.odd;
    }

    /// The sum without the last bytes of the stream, whose sum is `back`. A sum of zeroes may become 0xffff,
    /// which differs only in [`Sum::fold`].
    #[inline]
    #[must_use]
    pub(crate) fn without_back(self, back: Sum) -> Sum {
        let odd = self.odd ^ back.odd;
        let turned = if odd { back.acc.rotate_left(8) } else { back.acc };
        Sum { acc: add_with_carry(self.acc, !turned), odd }
    }

    /// The sum without the first bytes of the stream, whose sum is `front`. Zeroes as in
    /// [`Sum::without_back`].
    #[inline]
    #[must_use]
    pub(crate) fn without_front(self, front: Sum) -> Sum {
        let rest = add_with_carry(self.acc, !front.acc);
        // In a sum of 16-bit words a rotation by eight bits is its own inverse.
        let acc = if front.odd { rest.rotate_left(8) } else { rest };
        Sum { acc, odd: self.odd ^ front.odd }
    }

    /// Adds the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
    ///
    /// `len` is the length of transport header and payload in bytes. The pseudo-header is not part of the
    /// stream and may be added at any time. Its words are the same for both IP versions, except for leading
    /// zeroes, which do not change the sum.
    #[inline]
    pub fn add_pseudo(&mut self, src: IpAddr, dst: IpAddr, protocol: u8, len: u32) {
        let rest = add_with_carry(u64::from(len.to_be()), u64::from(u16::from(protocol).to_be()));
        self.acc = add_with_carry(self.acc, rest);
        self.add_address(src);
        self.add_address(dst);
    }

    #[inline]
    fn add_address(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(a) => {
                let word = u64::from(u32::from_ne_bytes(a.octets()));
                self.acc = add_with_carry(self.acc, word);
            }
            IpAddr::V6(a) => {
                for word in a.octets().as_chunks::<8>().0 {
                    self.acc = add_with_carry(self.acc, u64::from_ne_bytes(*word));
                }
            }
        }
    }

    /// The 16-bit sum, *not* complemented: that of the pseudo-header is the initial checksum field for
    /// checksum offload.
    #[inline]
    pub const fn fold(&self) -> u16 {
        u16::from_be(fold_in_memory_order(self.acc) as u16)
    }

    /// The checksum: the complemented 16-bit sum. Zero if the bytes contain a correct checksum.
    #[inline]
    pub const fn finish(&self) -> u16 {
        !self.fold()
    }

    /// The checksum of UDP: never zero, which would mean *no checksum* (RFC 768).
    #[inline]
    pub const fn finish_udp(&self) -> u16 {
        match self.finish() {
            0 => 0xffff,
            sum => sum,
        }
    }

    /// Whether the bytes, which include their checksum, are valid.
    #[inline]
    pub const fn is_valid(&self) -> bool {
        self.finish() == 0
    }
}

/// The checksum of contiguous bytes.
#[inline]
pub fn checksum(bytes: &[u8]) -> u16 {
    let mut sum = Sum::new();
    sum.add_bytes(bytes);
    sum.finish()
}

/// The checksum of a few words in host byte order.
#[inline]
pub(crate) const fn of_words<const N: usize>(words: &[u32; N]) -> u16 {
    let mut acc = 0u64;
    let mut rest: &[u32] = words;
    while let [word, tail @ ..] = rest {
        acc = acc.wrapping_add(*word as u64);
        rest = tail;
    }
    u16::from_be(Sum { acc, odd: false }.finish())
}

/// The one's complement sum of a few sums and fields in host byte order; zero only if all are. Cheaper than a
/// [`Sum`], for header templates whose constant fields are summed already.
#[inline(always)]
pub const fn added<const N: usize>(numbers: [u16; N]) -> u16 {
    const { assert!(N < 0x8000, "the carries fit") };
    let (mut sum, mut rest): (u32, &[u16]) = (0, &numbers);
    while let [number, tail @ ..] = rest {
        sum = sum.wrapping_add(*number as u32);
        rest = tail;
    }
    let sum = (sum & 0xffff).wrapping_add(sum >> 16);
    (sum & 0xffff).wrapping_add(sum >> 16) as u16
}

/// Copies units until the shortest of the three slices ends, and stores the sum of each, in one pass. The rest of `dst`
/// is not written.
#[inline]
pub fn copy_and_sum_units(dst: &mut [u8], src: &[u8], sums: &mut [Option<UnitSum>]) {
    let units = dst.as_chunks_mut().0.iter_mut().zip(src.as_chunks::<UNIT_BYTES>().0);
    for ((to, from), sum) in units.zip(sums) {
        *to = *from;
        *sum = Some(UnitSum::of(from));
    }
}

/// Adds with end-around carry; the result is zero only if both are.
#[inline]
const fn add_with_carry(a: u64, b: u64) -> u64 {
    let (sum, carry) = a.overflowing_add(b);
    sum.wrapping_add(carry as u64)
}

/// Folds a sum to 16 bits, in memory order.
#[inline]
const fn fold_in_memory_order(acc: u64) -> u64 {
    let halves = (acc >> 32).wrapping_add(acc & 0xffff_ffff);
    let quarters = (halves >> 32).wrapping_add((halves >> 16) & 0xffff);
    let sum = quarters.wrapping_add(halves & 0xffff);
    let sum = (sum >> 16).wrapping_add(sum & 0xffff);
    (sum >> 16).wrapping_add(sum & 0xffff)
}

/// The sum of bytes at an even offset, in memory order.
#[inline]
fn sum_of(bytes: &[u8]) -> u64 {
    let (blocks, tail) = bytes.as_chunks::<BLOCK_BYTES>();
    // The upper half of a lane counts carries: it cannot overflow.
    let mut lanes = [0u128; BLOCK_BYTES / 8];
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = lane.wrapping_add(u128::from(u64::from_ne_bytes(*word)));
        }
    }
    let total = lanes.into_iter().fold(sum_of_tail(tail), u128::wrapping_add);
    add_with_carry(total as u64, (total >> 64) as u64)
}

/// The sum of less than a block.
#[inline]
fn sum_of_tail(tail: &[u8]) -> u128 {
    let (words, mut tail) = tail.as_chunks::<8>();
    let mut sum = 0u128;
    for word in words {
        sum = sum.wrapping_add(u128::from(u64::from_ne_bytes(*word)));
    }
    if let Some((word, rest)) = tail.split_first_chunk::<4>() {
        sum = sum.wrapping_add(u128::from(u32::from_ne_bytes(*word)));
        tail = rest;
    }
    if let Some((word, rest)) = tail.split_first_chunk::<2>() {
        sum = sum.wrapping_add(u128::from(u16::from_ne_bytes(*word)));
        tail = rest;
    }
    if let [last] = tail {
        // An odd last byte is padded with zero (RFC 1071 section 4.1).
        sum = sum.wrapping_add(u128::from(u16::from_ne_bytes([*last, 0])));
    }
    sum
}

#[cfg(test)]
mod tests;
