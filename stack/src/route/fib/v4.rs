//! IPv4: chunks of 64 blocks of 256 addresses (/24).
//!
//! ```text
//!   slot     │ offset of the chunk's block : 32 │
//!   block    │ runs, one bit per /24 : 64 │ entry : 8 │ entry : 8 │ ... │ record │ ...
//!   record   │ which /24 : 8 │ ranges : 8 │ start : 8, answer : 16 │ ...
//! ```
//!
//! Bit n of `runs` is set if /24 number n + 1 starts a run: its entry differs from that of the
//! previous /24. The index of an address's entry is the population count of the bits below its own
//! /24. This is the leaf compression of Poptrie (Asai and Ohara, *Poptrie: a compressed trie with
//! population count for fast and scalable software IP routing table lookup*, 2015), on one level.
//! An entry is an answer of at most 254, or the escape value for a record. A record holds the
//! ranges of a /24 with longer prefixes, which are searched (as in DXR: Zec, Rizzo, Mikuc, 2012),
//! or a larger answer.
//!
//! Rationale: the cost of a look-up is its cache misses, and the number of look-ups that a core
//! overlaps. A look-up reads one line of the slots, most of which stay in the second-level cache,
//! and usually one line of the block, which spans as few lines as possible. It has few
//! instructions, so that many look-ups fit the reorder buffer, and almost no unpredictable branch.
//! Entries are one byte, to keep the table small and cached.
//!
//! An update writes a new block, then the slot, then the count. The old block is free immediately:
//! a reader of it detects the changed count and retries.

#![forbid(unsafe_code)]
// The writer adds lengths within a bounded block; look-ups use `wrapping_`.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::FibError;
use super::changes::SeqCount;
use super::key::{Sealed, Shared};
use super::space::LineAllocator;
use crate::route::raw::{BlockSlots, Offset};

/// Leading bits of an address that select the chunk. Of the others, 6 select the /24, and 8 are
/// searched.
const CHUNK_BITS: u32 = 18;
const LOW_BITS: u32 = 32 - CHUNK_BITS;
const CHUNKS: usize = 1 << CHUNK_BITS;

/// Memory for blocks: 32 MiB, of which the Internet's table uses five.
const MEMORY_WORDS: usize = 4 << 20;
const WORD_BYTES: usize = size_of::<u64>();
/// The escape value: an entry with a record.
const ESCAPE: u8 = 255;
/// Words of the permanent one-run block of each entry value, so that a chunk with one answer needs
/// no block.
const SINGLE_RUN_WORDS: usize = 2;

/// Memory that IPv4 look-ups read.
pub struct Tables {
    blocks: BlockSlots<CHUNKS, MEMORY_WORDS>,
    seq: SeqCount,
}

/// A block under construction.
#[derive(Default)]
struct Block {
    runs: u64,
    entries: Vec<u8>,
    records: Vec<u8>,
}

impl Tables {
    #[inline(always)]
    fn offset(&self, address: u32) -> Offset {
        self.blocks.offset(address.chunk())
    }

    #[inline(always)]
    fn byte(&self, at: usize) -> u8 {
        (self.blocks.word(at / WORD_BYTES) >> (8 * (at % WORD_BYTES))) as u8
    }

    /// The answer in the block at `offset`. The caller must check the count.
    #[inline(always)]
    fn answer(&self, address: u32, offset: Offset) -> u32 {
        match self.blocks.byte_by_popcount(offset, address >> 8 & 63) {
            entry if entry == usize::from(ESCAPE) => self.lookup_record(address, offset),
            entry => entry as u32,
        }
    }

    /// Finds the record of the address's /24 and searches it. Rare; out of line, so that it uses no
    /// registers of the fast path.
    #[cold]
    #[inline(never)]
    fn lookup_record(&self, address: u32, offset: Offset) -> u32 {
        let offset = offset.number();
        let which = (address >> 8 & 63) as u8;
        let entries = offset.wrapping_add(1).wrapping_mul(WORD_BYTES);
        let mut at = entries.wrapping_add(self.runs(offset));
        for _ in 0..64 {
            let ranges = match self.byte(at.wrapping_add(1)) {
                0 => 256,
                n => usize::from(n),
            };
            let first = at.wrapping_add(2);
            if self.byte(at) == which {
                return self.search_ranges(first, ranges, address as u8);
            }
            at = first.wrapping_add(3 * ranges);
        }
        // A block that is being overwritten may contain anything.
        0
    }

    /// Retries a look-up that raced with an update.
    #[cold]
    #[inline(never)]
    fn lookup_retry(&self, address: u32) -> u32 {
        loop {
            let before = self.seq.begin();
            let answer = self.answer(address, self.offset(address));
            if self.seq.is_unchanged(before) {
                return answer;
            }
        }
    }

    /// The answer of the last of `ranges` ranges that start at or before `low`.
    fn search_ranges(&self, first: usize, ranges: usize, low: u8) -> u32 {
        let offset = |i: usize| first.wrapping_add(i.wrapping_mul(3));
        let (mut range, mut left) = (0usize, ranges);
        while left > 1 {
            let half = left / 2;
            let middle = range.wrapping_add(half);
            range = if self.byte(offset(middle)) <= low { middle } else { range };
            left -= half;
        }
        let at = offset(range);
        u16::from_le_bytes([self.byte(at.wrapping_add(1)), self.byte(at.wrapping_add(2))]).into()
    }

    /// Number of runs of a block, which is the number of entries.
    fn runs(&self, offset: usize) -> usize {
        self.blocks.word(offset).count_ones().wrapping_add(1) as usize
    }
}

impl Block {
    /// Builds the block of a chunk's ranges.
    fn of(ranges: &[(u32, u32)]) -> Block {
        let mut block = Block::default();
        let (mut before, mut last, mut rest) = (0, None, ranges);
        for which in 0..64u8 {
            let in_block = |start: u32| (start >> 8 & 63) as u8 == which;
            let count = rest.iter().take_while(|r| in_block(r.0)).count();
            let (here, later) = rest.split_at(count);
            rest = later;
            let outer = before;
            before = here.last().map_or(outer, |r| r.1);
            let only = match here {
                [] => Some(outer),
                [(start, answer)] if start & 0xff == 0 => Some(*answer),
                _ => None,
            };
            if here.is_empty() && last.is_some() {
                continue;
            }
            let entry = only.and_then(|a| u8::try_from(a).ok()).filter(|e| *e != ESCAPE);
            if entry.is_none() {
                block.add_record(which, outer, here);
            }
            if entry.is_none() || entry != last {
                // The first run has no bit.
                block.runs |= u64::from(which > 0) << (which.max(1) - 1);
                block.entries.push(entry.unwrap_or(ESCAPE));
            }
            last = entry;
        }
        block
    }

    /// Adds the record of a /24. `outer` is the answer of its first addresses if no range starts
    /// there.
    fn add_record(&mut self, which: u8, outer: u32, here: &[(u32, u32)]) {
        let starts_late = here.first().is_none_or(|r| r.0 & 0xff != 0);
        let ranges = here.len() + usize::from(starts_late);
        // 256 is encoded as 0.
        self.records.extend([which, ranges as u8]);
        let outer = starts_late.then_some((0, outer));
        for (start, answer) in outer.into_iter().chain(here.iter().copied()) {
            let [low, high] = (answer as u16).to_le_bytes();
            self.records.extend([start as u8, low, high]);
        }
    }

    /// The entry of a chunk with a single one, which needs no block.
    fn single_entry(&self) -> Option<u8> {
        match self.entries.as_slice() {
            [entry] if *entry != ESCAPE => Some(*entry),
            _ => None,
        }
    }

    fn words(&self) -> usize {
        1 + (self.entries.len() + self.records.len()).div_ceil(WORD_BYTES)
    }

    /// Writes the block into `words`.
    fn write(&self, words: &[AtomicU64]) {
        let mut bytes = self.entries.iter().chain(&self.records).copied();
        let (Some(runs), rest) = (words.first(), words.iter().skip(1)) else { return };
        runs.store(self.runs, Relaxed);
        for word in rest {
            let next = core::array::from_fn(|_| bytes.next().unwrap_or(0));
            word.store(u64::from_le_bytes(next), Relaxed);
        }
    }
}

impl Shared<u32> for Tables {
    type Control = LineAllocator;

    fn new(advise: impl FnOnce(*const u8, usize)) -> (Tables, LineAllocator) {
        let blocks = BlockSlots::new(advise);
        let own = usize::from(ESCAPE) * SINGLE_RUN_WORDS;
        for (entry, own) in blocks.block(0, own).chunks(SINGLE_RUN_WORDS).enumerate() {
            own.iter().zip([0, entry as u64]).for_each(|(word, value)| word.store(value, Relaxed));
        }
        (Tables { blocks, seq: SeqCount::default() }, LineAllocator::new(own, MEMORY_WORDS))
    }

    #[inline]
    fn lookup(&self, address: u32) -> u32 {
        let before = self.seq.begin();
        let answer = self.answer(address, self.offset(address));
        if self.seq.is_unchanged(before) { answer } else { self.lookup_retry(address) }
    }

    #[inline]
    fn lookup_burst(&self, addresses: &[u32], answers: &mut [u32]) {
        for (addresses, answers) in addresses.chunks(BATCH).zip(answers.chunks_mut(BATCH)) {
            let before = self.seq.begin();
            let mut offsets = [Offset::default(); BATCH];
            for (offset, address) in offsets.iter_mut().zip(addresses) {
                *offset = self.offset(*address);
                self.blocks.prefetch(*offset);
            }
            for ((answer, address), offset) in answers.iter_mut().zip(addresses).zip(offsets) {
                *answer = self.answer(*address, offset);
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
        space: &mut LineAllocator,
        chunk: usize,
        ranges: &[(u32, u32)],
        units: u32,
    ) -> Result<u32, FibError> {
        self.seq.fence_before_write();
        let block = Block::of(ranges);
        let (offset, new_units) = match block.single_entry() {
            Some(entry) => (usize::from(entry) * SINGLE_RUN_WORDS, 0),
            None => {
                let words = block.words();
                let offset = space.allocate(words).ok_or(FibError::Full)?;
                block.write(self.blocks.block(offset, words));
                (offset, words)
            }
        };
        let old = self.blocks.set(chunk, offset);
        self.seq.advance();
        // From here on the old block may be reused.
        if units > 0 {
            space.free(old, units as usize);
        }
        Ok(new_units as u32)
    }

    fn bytes(&self, space: &LineAllocator) -> (usize, usize) {
        let (touched, free) = space.usage();
        let fixed = size_of::<Tables>() + CHUNKS * size_of::<AtomicU32>();
        (fixed + touched * WORD_BYTES, free * WORD_BYTES)
    }
}

/// Overlapped look-ups of a burst: more than a core's outstanding misses.
const BATCH: usize = 32;

impl Sealed for u32 {
    type Shared = Tables;
    type Control = LineAllocator;
    const CHUNKS: usize = CHUNKS;

    #[inline(always)]
    fn chunk(self) -> usize {
        (self >> LOW_BITS) as usize
    }

    fn chunk_prefix(chunk: usize) -> (u32, u8) {
        ((chunk as u32) << LOW_BITS, CHUNK_BITS as u8)
    }

    fn block(self, len: u8) -> (u32, u32) {
        let host = u32::MAX.checked_shr(len.into()).unwrap_or(0);
        (self & !host, self | host)
    }

    fn next(self) -> Option<u32> {
        self.checked_add(1)
    }
}
