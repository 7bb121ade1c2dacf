//! How each IP version is cut into chunks, and how the ranges of a chunk are written.

#![forbid(unsafe_code)]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

/// An address as a number. Implemented for `u32` (IPv4) and `u128` (IPv6), and for nothing else.
pub trait Key: Copy + Ord + core::fmt::Debug + sealed::Sealed + 'static {
    /// Bits of an address.
    const BITS: u8;
    /// The largest answer that can be stored.
    const MAX_ANSWER: u32;
    #[doc(hidden)]
    const CHUNKS: usize;
    /// Words of one range.
    #[doc(hidden)]
    const WORDS: usize;
    /// The chunk of an address; it grows with the address.
    #[doc(hidden)]
    fn chunk(self) -> usize;
    /// First address of a chunk, and its prefix length.
    #[doc(hidden)]
    fn chunk_prefix(chunk: usize) -> (Self, u8);
    /// The first and the last address with the same `len` leading bits.
    #[doc(hidden)]
    fn block(self, len: u8) -> (Self, Self);
    /// The next address, or `None` after the last.
    #[doc(hidden)]
    fn next(self) -> Option<Self>;
    /// Appends a range that starts at this address.
    #[doc(hidden)]
    fn encode(self, answer: u32, out: &mut Vec<u32>);
    /// The answer of the last of `ranges` ranges that starts at or before this address.
    #[doc(hidden)]
    fn find(self, block: &[AtomicU32], ranges: usize) -> u32;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for u128 {}
}

/// The index of the last range that `is_before` is true for; the first one's is taken for granted.
#[inline]
fn last_where(ranges: usize, is_before: impl Fn(usize) -> bool) -> usize {
    let (mut base, mut left) = (0usize, ranges);
    while left > 1 {
        let half = left / 2;
        let middle = base.wrapping_add(half);
        // No branch: which way it goes is a coin flip.
        base = core::hint::select_unpredictable(is_before(middle), middle, base);
        left = left.wrapping_sub(half);
    }
    base
}

#[inline]
fn word(block: &[AtomicU32], at: usize) -> u32 {
    block.get(at).map_or(0, |w| w.load(Ordering::Relaxed))
}

/// Leading bits of an IPv4 address that choose the chunk.
const CHUNK_BITS_V4: u32 = 18;
/// The other bits: where in the chunk a range starts. Answers have the rest of the word.
const LOW_BITS_V4: u32 = 32 - CHUNK_BITS_V4;
const ANSWER_BITS_V4: u32 = 32 - LOW_BITS_V4;

impl Key for u32 {
    const BITS: u8 = 32;
    const MAX_ANSWER: u32 = (1 << ANSWER_BITS_V4) - 1;
    const CHUNKS: usize = 1 << CHUNK_BITS_V4;
    const WORDS: usize = 1;

    #[inline]
    fn chunk(self) -> usize {
        (self >> LOW_BITS_V4) as usize
    }

    fn chunk_prefix(chunk: usize) -> (u32, u8) {
        ((chunk as u32) << LOW_BITS_V4, CHUNK_BITS_V4 as u8)
    }

    fn block(self, len: u8) -> (u32, u32) {
        let host = u32::MAX.checked_shr(len.into()).unwrap_or(0);
        (self & !host, self | host)
    }

    fn next(self) -> Option<u32> {
        self.checked_add(1)
    }

    fn encode(self, answer: u32, out: &mut Vec<u32>) {
        out.push((self << CHUNK_BITS_V4) | answer);
    }

    #[inline]
    fn find(self, block: &[AtomicU32], ranges: usize) -> u32 {
        // Start and answer in one word: the largest that may stand for this address.
        let most = (self << CHUNK_BITS_V4) | u32::MAX_ANSWER;
        word(block, last_where(ranges, |i| word(block, i) <= most)) & u32::MAX_ANSWER
    }
}

/// Bits behind the leading three of a global unicast address (2000::/3, RFC 4291 section 2.4, IANA's
/// registry) that choose the chunk. The other seven eighths of the space are one chunk each: next to
/// nothing is routed there.
const CHUNK_BITS_V6: u32 = 18;
const GLOBAL: u32 = 1;
const CHUNK_LEN_V6: u8 = 3 + CHUNK_BITS_V6 as u8;
const LOW_BITS_V6: u32 = 128 - 3 - CHUNK_BITS_V6;

impl Key for u128 {
    const BITS: u8 = 128;
    const MAX_ANSWER: u32 = u32::MAX;
    const CHUNKS: usize = (1 << CHUNK_BITS_V6) + 7;
    const WORDS: usize = 5;

    #[inline]
    fn chunk(self) -> usize {
        let eighth = (self >> 125) as usize;
        match eighth as u32 {
            0 => 0,
            GLOBAL => ((self >> LOW_BITS_V6) as usize & ((1 << CHUNK_BITS_V6) - 1)).wrapping_add(1),
            _ => eighth.wrapping_add((1 << CHUNK_BITS_V6) - 1),
        }
    }

    fn chunk_prefix(chunk: usize) -> (u128, u8) {
        const LAST_GLOBAL: usize = 1 << CHUNK_BITS_V6;
        match chunk {
            0 => (0, 3),
            1..=LAST_GLOBAL => {
                let within = (chunk.wrapping_sub(1) as u128) << LOW_BITS_V6;
                (u128::from(GLOBAL) << 125 | within, CHUNK_LEN_V6)
            }
            _ => ((chunk.wrapping_sub(LAST_GLOBAL).wrapping_add(1) as u128) << 125, 3),
        }
    }

    fn block(self, len: u8) -> (u128, u128) {
        let host = u128::MAX.checked_shr(len.into()).unwrap_or(0);
        (self & !host, self | host)
    }

    fn next(self) -> Option<u128> {
        self.checked_add(1)
    }

    fn encode(self, answer: u32, out: &mut Vec<u32>) {
        let part = |shift: u32| (self >> shift) as u32;
        out.extend([part(96), part(64), part(32), part(0), answer]);
    }

    #[inline]
    fn find(self, block: &[AtomicU32], ranges: usize) -> u32 {
        let start = |i: usize| {
            let at = i.wrapping_mul(Self::WORDS);
            let part = |n: usize| u128::from(word(block, at.wrapping_add(n)));
            part(0) << 96 | part(1) << 64 | part(2) << 32 | part(3)
        };
        let range = last_where(ranges, |i| start(i) <= self);
        word(block, range.wrapping_mul(Self::WORDS).wrapping_add(4))
    }
}
