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
//!
//! An update writes a new block, then the slot, then the count. The old block is free immediately:
//! a reader of it detects the changed count and retries.

#![forbid(unsafe_code)]
// The writer adds lengths within a bounded block; look-ups use `wrapping_`.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use super::changes::SeqCount;
use super::key::{Sealed, Shared};
use super::{BlockAllocator, FibError};
use crate::route::raw::Blocks;

/// Memory for blocks: 64 MiB, of which the Internet's table uses a tenth.
const MEMORY_WORDS: usize = 8 << 20;

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

impl Sealed for u128 {
    type Shared = Tables;
    type Control = BlockAllocator;
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

/// Memory that IPv6 look-ups read.
pub struct Tables {
    blocks: Blocks<{ u128::CHUNKS }, MEMORY_WORDS>,
    seq: SeqCount,
}

impl Tables {
    #[inline(always)]
    fn slot(&self, chunk: usize) -> u32 {
        self.blocks.slot(chunk).load(Ordering::Acquire)
    }

    #[inline(always)]
    fn word(&self, at: usize) -> u64 {
        self.blocks.word(at)
    }

    /// The answer for an address by its slot. The caller must check the count.
    #[inline(always)]
    fn answer(&self, address: u128, slot: u32) -> u32 {
        let (kind, offset) = (slot & 3, (slot >> 2) as usize);
        if kind == LEAF {
            return slot >> 2;
        }
        let ranges = self.word(offset) as usize;
        let first = offset.wrapping_add(1);
        let high = |i: usize| self.word(first.wrapping_add(i));
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

    fn set(&self, chunk: usize, slot: u32) {
        self.blocks.slot(chunk).store(slot, Ordering::Release);
        self.seq.advance();
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

impl Shared<u128> for Tables {
    type Control = BlockAllocator;

    fn new(advise: impl FnOnce(*const u8, usize)) -> (Tables, BlockAllocator) {
        let blocks = Blocks::new(advise);
        (Tables { blocks, seq: SeqCount::default() }, BlockAllocator::new(0, MEMORY_WORDS))
    }

    #[inline]
    fn lookup(&self, address: u128) -> u32 {
        loop {
            let before = self.seq.begin();
            let answer = self.answer(address, self.slot(address.chunk()));
            if self.seq.is_unchanged(before) {
                return answer;
            }
        }
    }

    #[inline]
    fn lookup_burst(&self, addresses: &[u128], answers: &mut [u32]) {
        for (addresses, answers) in addresses.chunks(BATCH).zip(answers.chunks_mut(BATCH)) {
            let before = self.seq.begin();
            let mut slots = [0; BATCH];
            for (slot, address) in slots.iter_mut().zip(addresses) {
                *slot = self.slot(address.chunk());
                // For a leaf slot this prefetches an arbitrary offset.
                self.blocks.prefetch((*slot >> 2) as usize);
            }
            for ((answer, address), slot) in answers.iter_mut().zip(addresses).zip(slots) {
                *answer = self.answer(*address, slot);
            }
            if !self.seq.is_unchanged(before) {
                for (answer, address) in answers.iter_mut().zip(addresses) {
                    *answer = self.lookup(*address);
                }
            }
        }
    }

    fn generation(&self) -> u64 {
        self.seq.begin()
    }

    fn publish(
        &self,
        space: &mut BlockAllocator,
        chunk: usize,
        ranges: &[(u128, u32)],
        units: u32,
    ) -> Result<u32, FibError> {
        self.seq.fence_before_write();
        let old = self.slot(chunk);
        let new_units = if let [(_, answer)] = *ranges {
            self.set(chunk, answer << 2 | LEAF);
            0
        } else {
            let (block, kind) = encode(ranges);
            let offset = space.allocate(block.len()).ok_or(FibError::Full)?;
            let target = self.blocks.block(offset, block.len());
            for (word, value) in target.iter().zip(&block) {
                word.store(*value, Ordering::Relaxed);
            }
            self.set(chunk, (offset as u32) << 2 | kind);
            block.len()
        };
        if units > 0 {
            space.free((old >> 2) as usize, units as usize);
        }
        Ok(new_units as u32)
    }

    fn bytes(&self, space: &BlockAllocator) -> (usize, usize) {
        let (touched, free) = space.usage();
        let slots = u128::CHUNKS * size_of::<AtomicU32>();
        (slots + touched * size_of::<u64>(), free * size_of::<u64>())
    }
}

/// Overlapped look-ups of a burst: more than a core's outstanding misses.
const BATCH: usize = 32;
