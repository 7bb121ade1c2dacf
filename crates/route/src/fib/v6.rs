//! IPv6: chunks by the blocks that the registries were given, each a sorted list of ranges.
//!
//! ```text
//!   slot   │ the answer         : 30 │ 0 : 2 │
//!          │ place of the block : 30 │ 1 : 2 │    narrow, for 2: wide
//!   narrow │ ranges │ start : 64 │ start : 64 │ ... │ answer : 16 │ answer : 16 │ ...
//!   wide   │ ranges │ start : 128      │ ...        │ answer : 16 │ ...
//! ```
//!
//! The answer of an address is that of the last range that starts at or before it, found by binary
//! search: the structure of DXR (Zec, Rizzo, Mikuc, *DXR: towards a billion routing lookups per second
//! in software*, 2012), whose search goes through the starts alone, 8 in a cache line. Starts of a
//! narrow block have no bits behind the 64th, as nearly all have that are in the Internet's table.
//!
//! A change writes a new block, then the slot, then counts itself; the old block is free at once. A
//! reader who was on it notices, since the count is not what it was, and looks again.

#![forbid(unsafe_code)]
// The writer's sums are of words in a block of bounded length; look-ups use `wrapping_`.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use super::changes::Changes;
use super::key::{Sealed, Shared};
use super::{FibError, Space};
use crate::raw::Blocks;

/// Room for blocks: 64 MiB, of which the Internet's table takes a tenth.
const ROOM_WORDS: usize = 8 << 20;

const LEAF: u32 = 0;
const NARROW: u32 = 1;
const WIDE: u32 = 2;

/// Leading bits of a block: the size of the blocks that IANA gives to the registries.
const BLOCK_BITS: u32 = 12;
const BLOCKS: usize = 1 << BLOCK_BITS;
/// Further bits that choose a chunk in the blocks that are in use.
const DENSE_BITS: u32 = 14;
/// The blocks that the registries were given, by their leading 12 bits (IANA, IPv6 global unicast
/// address assignments, 2024). All else is a chunk per block: next to nothing is routed there.
const DENSE: [u16; 11] =
    [0x200, 0x240, 0x241, 0x260, 0x261, 0x262, 0x263, 0x280, 0x2a0, 0x2a1, 0x2c0];

/// The first chunk of each block, and behind the last one the number of chunks.
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

/// The first chunk of a block, and the bits that choose among its chunks.
#[inline(always)]
fn chunks_of(block: usize) -> (u32, u32) {
    let first = FIRST_CHUNK.get(block).copied().unwrap_or(0);
    let next = FIRST_CHUNK.get(block.wrapping_add(1)).copied().unwrap_or(0);
    (first, next.wrapping_sub(first).trailing_zeros())
}

/// The number of the last range that `is_before` is true for; the first one's is taken for granted.
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

impl Sealed for u128 {
    type Shared = Tables;
    type Control = Space;
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

/// What look-ups in IPv6 read.
pub struct Tables {
    blocks: Blocks<{ u128::CHUNKS }, ROOM_WORDS>,
    changes: Changes,
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

    /// Whether the answer was looked up while nothing changed is for the caller to ask.
    #[inline(always)]
    fn answer(&self, address: u128, slot: u32) -> u32 {
        let (kind, place) = (slot & 3, (slot >> 2) as usize);
        if kind == LEAF {
            return slot >> 2;
        }
        let ranges = self.word(place) as usize;
        let first = place.wrapping_add(1);
        let high = |i: usize| self.word(first.wrapping_add(i));
        let (range, starts) = if kind == NARROW {
            let most = (address >> 64) as u64;
            (last_where(ranges, |i| high(i) <= most), ranges)
        } else {
            let start = |i: usize| {
                let i = i.wrapping_mul(2);
                u128::from(high(i)) << 64 | u128::from(high(i.wrapping_add(1)))
            };
            (last_where(ranges, |i| start(i) <= address), ranges.wrapping_mul(2))
        };
        let word = high(starts.wrapping_add(range >> 2));
        (word >> (16 * (range & 3))) as u32 & 0xffff
    }

    fn set(&self, chunk: usize, slot: u32) {
        self.blocks.slot(chunk).store(slot, Ordering::Release);
        self.changes.count();
    }
}

/// The words of a block, and its kind.
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
    type Control = Space;

    fn new(advise: impl FnOnce(*const u8, usize)) -> (Tables, Space) {
        let blocks = Blocks::new(advise);
        (Tables { blocks, changes: Changes::default() }, Space::new(0, ROOM_WORDS))
    }

    #[inline]
    fn lookup(&self, address: u128) -> u32 {
        loop {
            let before = self.changes.before();
            let answer = self.answer(address, self.slot(address.chunk()));
            if self.changes.is_still(before) {
                return answer;
            }
        }
    }

    #[inline]
    fn lookup_burst(&self, addresses: &[u128], answers: &mut [u32]) {
        for (addresses, answers) in addresses.chunks(PIECE).zip(answers.chunks_mut(PIECE)) {
            let before = self.changes.before();
            let mut slots = [0; PIECE];
            for (slot, address) in slots.iter_mut().zip(addresses) {
                *slot = self.slot(address.chunk());
                // Of a slot that says the answer itself it is any place at all.
                self.blocks.prefetch((*slot >> 2) as usize);
            }
            for ((answer, address), slot) in answers.iter_mut().zip(addresses).zip(slots) {
                *answer = self.answer(*address, slot);
            }
            if !self.changes.is_still(before) {
                for (answer, address) in answers.iter_mut().zip(addresses) {
                    *answer = self.lookup(*address);
                }
            }
        }
    }

    fn changes(&self) -> u64 {
        self.changes.before()
    }

    fn publish(
        &self,
        space: &mut Space,
        chunk: usize,
        ranges: &[(u128, u32)],
        units: u32,
    ) -> Result<u32, FibError> {
        self.changes.fence();
        let old = self.slot(chunk);
        let new_units = if let [(_, answer)] = *ranges {
            self.set(chunk, answer << 2 | LEAF);
            0
        } else {
            let (block, kind) = encode(ranges);
            let place = space.take(block.len()).ok_or(FibError::Full)?;
            let room = self.blocks.room(place, block.len());
            for (word, value) in room.iter().zip(&block) {
                word.store(*value, Ordering::Relaxed);
            }
            self.set(chunk, (place as u32) << 2 | kind);
            block.len()
        };
        if units > 0 {
            space.give((old >> 2) as usize, units as usize);
        }
        Ok(new_units as u32)
    }

    fn bytes(&self, space: &Space) -> (usize, usize) {
        let (touched, free) = space.usage();
        let slots = u128::CHUNKS * size_of::<AtomicU32>();
        (slots + touched * size_of::<u64>(), free * size_of::<u64>())
    }
}

/// Look-ups that are under way together: more than a core has misses in flight.
const PIECE: usize = 32;
