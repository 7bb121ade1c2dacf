//! IPv6: chunks by the blocks allocated to the registries, each a sorted list of ranges.
//!
//! ```text
//!   slot   │ the answer         : 30 │ 0 : 2 │
//!          │ offset of the block : 30 │ 1 : 2 │    narrow, for 2: wide
//!   narrow │ ranges │ start : 64 │ start : 64 │ ... │ answer : 16 │ answer : 16 │ ...
//!   wide   │ ranges │ start : 128      │ ...        │ answer : 16 │ ...
//! ```
//!
//! The answer of an address is that of the last range that starts at or before it, found by binary
//! search. This is the structure of DXR (Zec, Rizzo, Mikuc, *DXR: towards a billion routing lookups
//! per second in software*, 2012). The search touches the starts only, 8 per cache line. The starts
//! of a narrow block have no bits beyond the 64th, which holds for nearly all prefixes of the
//! Internet's table.

// The writer adds lengths within a bounded block; look-ups use `wrapping_`.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec;
use alloc::vec::Vec;

use super::key::{Key, Lookup};
use super::space::BlockAllocator;

const LEAF: u32 = 0;
const NARROW: u32 = 1;
const WIDE: u32 = 2;

/// Prefix length of the blocks that IANA allocates to the registries.
const BLOCK_BITS: u32 = 12;
const BLOCKS: usize = 1 << BLOCK_BITS;
/// Further bits that select a chunk in an allocated block.
const DENSE_BITS: u32 = 14;
/// The allocated blocks, by their leading 12 bits (IANA, IPv6 global unicast address assignments,
/// 2024). Other blocks are one chunk each: almost nothing is routed there.
const DENSE: [u16; 11] =
    [0x200, 0x240, 0x241, 0x260, 0x261, 0x262, 0x263, 0x280, 0x2a0, 0x2a1, 0x2c0];

/// The first chunk of each block; the last element is the number of chunks.
static FIRST_CHUNK: [u32; BLOCKS + 1] = first_chunks();

const fn is_dense(block: usize) -> bool {
    let mut i = 0;
    while i < DENSE.len() {
        #[allow(clippy::indexing_slicing)] // Bounded by the loop.
        if DENSE[i] as usize == block {
            return true;
        }
        i += 1;
    }
    false
}

const fn first_chunks() -> [u32; BLOCKS + 1] {
    let mut first = [0; BLOCKS + 1];
    let (mut block, mut chunks) = (0, 0);
    while block < BLOCKS {
        chunks += if is_dense(block) { 1 << DENSE_BITS } else { 1 };
        block += 1;
        #[allow(clippy::indexing_slicing)] // Bounded by the loop.
        {
            first[block] = chunks;
        }
    }
    first
}

/// The first chunk of a block, and the number of bits that select among its chunks.
#[inline(always)]
fn chunks_of(block: usize) -> (u32, u32) {
    let first = FIRST_CHUNK.get(block).copied().unwrap_or(0);
    let next = FIRST_CHUNK.get(block.wrapping_add(1)).copied().unwrap_or(0);
    (first, next.wrapping_sub(first).trailing_zeros())
}

/// The index of the last range for which `is_before` is true; it is assumed for the first one.
#[inline]
fn last_index_where(ranges: usize, is_before: impl Fn(usize) -> bool) -> usize {
    let (mut base, mut left) = (0usize, ranges);
    while left > 1 {
        let half = left / 2;
        let middle = base.wrapping_add(half);
        // Branchless: the branch would be unpredictable.
        base = core::hint::select_unpredictable(is_before(middle), middle, base);
        left = left.wrapping_sub(half);
    }
    base
}

impl Key for u128 {
    type Tables = Tables;
    const CHUNKS: usize = BLOCKS - DENSE.len() + (DENSE.len() << DENSE_BITS);

    #[inline(always)]
    fn chunk(self) -> usize {
        let (first, bits) = chunks_of((self >> (128 - BLOCK_BITS)) as usize);
        let within = (self >> (64 - BLOCK_BITS)) as u64;
        let within = within.checked_shr(64u32.wrapping_sub(bits)).unwrap_or(0);
        first as usize + within as usize
    }

    fn chunk_prefix(chunk: usize) -> (u128, u8) {
        let block = FIRST_CHUNK.partition_point(|first| *first as usize <= chunk).saturating_sub(1);
        let (first, bits) = chunks_of(block);
        let start = (block as u128) << (128 - BLOCK_BITS);
        let within = chunk.saturating_sub(first as usize) as u128;
        (start | within << (128 - BLOCK_BITS - bits), (BLOCK_BITS + bits) as u8)
    }

    fn block(self, len: u8) -> (u128, u128) {
        let host = u128::MAX.checked_shr(len.into()).unwrap_or(0);
        (self & !host, self | host)
    }

    fn next(self) -> Option<u128> {
        self.checked_add(1)
    }
}

/// What IPv6 look-ups read: 0.7 MiB of slots, and blocks, which take six MiB for the Internet's table.
pub(crate) struct Tables {
    slots: Vec<u32>,
    words: Vec<u64>,
    space: BlockAllocator,
}

impl Default for Tables {
    fn default() -> Tables {
        let slots = vec![0; u128::CHUNKS];
        Tables { slots, words: Vec::new(), space: BlockAllocator::new(0) }
    }
}

/// Encodes a block. Returns its words and kind.
fn encode(ranges: &[(u128, u32)]) -> (Vec<u64>, u32) {
    let is_narrow = ranges.iter().all(|(start, _)| *start as u64 == 0);
    let mut words = Vec::with_capacity(ranges.len() * 2 + ranges.len() / 4 + 2);
    words.push(ranges.len() as u64);
    for (start, _) in ranges {
        words.push((start >> 64) as u64);
        if !is_narrow {
            words.push(*start as u64);
        }
    }
    for four in ranges.chunks(4) {
        words.push(four.iter().rev().fold(0, |all, r| all << 16 | u64::from(r.1)));
    }
    (words, if is_narrow { NARROW } else { WIDE })
}

impl Lookup<u128> for Tables {
    #[inline]
    fn lookup(&self, address: u128) -> u32 {
        let slot = self.slots.get(address.chunk()).copied().unwrap_or(0);
        let (kind, offset) = (slot & 3, (slot >> 2) as usize);
        if kind == LEAF {
            return slot >> 2;
        }
        let Some((ranges, rest)) = self.words.get(offset..).and_then(<[u64]>::split_first) else {
            return 0;
        };
        let ranges = *ranges as usize;
        let high = |i: usize| rest.get(i).copied().unwrap_or(0);
        let (range, starts) = if kind == NARROW {
            let most = (address >> 64) as u64;
            (last_index_where(ranges, |i| high(i) <= most), ranges)
        } else {
            let start = |i: usize| {
                let i = i.wrapping_mul(2);
                u128::from(high(i)) << 64 | u128::from(high(i.wrapping_add(1)))
            };
            (last_index_where(ranges, |i| start(i) <= address), ranges.wrapping_mul(2))
        };
        let word = high(starts.wrapping_add(range >> 2));
        (word >> (16 * (range & 3))) as u32 & 0xffff
    }

    fn set(&mut self, chunk: usize, ranges: &[(u128, u32)], units: u32) -> u32 {
        let Some(slot) = self.slots.get_mut(chunk) else { return 0 };
        if units > 0 {
            self.space.free((*slot >> 2) as usize, units as usize);
        }
        if let [(_, answer)] = *ranges {
            *slot = answer << 2 | LEAF;
            return 0;
        }
        let (block, kind) = encode(ranges);
        let offset = self.space.allocate(block.len());
        *slot = (offset as u32) << 2 | kind;
        let end = offset + block.len();
        if self.words.len() < end {
            self.words.resize(end, 0);
        }
        if let Some(to) = self.words.get_mut(offset..end) {
            to.copy_from_slice(&block);
        }
        block.len() as u32
    }
}

#[cfg(test)]
impl Tables {
    /// Whether every chunk has answer 0, and all memory is free.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| *slot == 0) && self.space.is_empty(0)
    }
}
