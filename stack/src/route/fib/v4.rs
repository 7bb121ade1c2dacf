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

// The writer adds lengths within a bounded block; look-ups use `wrapping_`.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec;
use alloc::vec::Vec;

use super::key::{Key, Lookup};
use super::space::LineAllocator;
use crate::route::raw::{LINE_WORDS, Line, Select, word};

/// Leading bits of an address that select the chunk. Of the others, 6 select the /24, and 8 are
/// searched.
const CHUNK_BITS: u32 = 18;
const LOW_BITS: u32 = 32 - CHUNK_BITS;
const CHUNKS: usize = 1 << CHUNK_BITS;

const WORD_BYTES: usize = size_of::<u64>();
/// The escape value: an entry with a record.
const ESCAPE: u8 = 255;
/// Words of the permanent one-run block of each entry value, so that a chunk with one answer needs
/// no block.
const SINGLE_RUN_WORDS: usize = 2;
/// Lines of the permanent blocks.
const PERMANENT_LINES: usize = 64;

/// What IPv4 look-ups read: 1 MiB of slots, and blocks, which take five MiB for the Internet's table.
pub(crate) struct Tables {
    slots: Vec<u32>,
    /// The last line is spare.
    lines: Vec<Line>,
    space: LineAllocator,
    select: Select,
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
    fn byte(&self, at: usize) -> u8 {
        (word(&self.lines, at / WORD_BYTES) >> (8 * (at % WORD_BYTES))) as u8
    }

    /// Finds the record of the address's /24 and searches it. Rare; out of line, so that it uses no
    /// registers of the fast path.
    #[cold]
    #[inline(never)]
    fn lookup_record(&self, address: u32, offset: usize) -> u32 {
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
        0
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
        word(&self.lines, offset).count_ones().wrapping_add(1) as usize
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

    /// Writes the block at a word of `lines`.
    fn write(&self, lines: &mut [Line], offset: usize) {
        let mut bytes = self.entries.iter().chain(&self.records).copied();
        let rest = core::iter::repeat_with(|| {
            let next = core::array::from_fn(|_| bytes.next().unwrap_or(0));
            u64::from_le_bytes(next)
        });
        let words = core::iter::once(self.runs).chain(rest).take(self.words());
        let to = lines.iter_mut().skip(offset / LINE_WORDS).flat_map(|line| &mut line.0);
        to.skip(offset % LINE_WORDS).zip(words).for_each(|(to, from)| *to = from);
    }
}

impl Default for Tables {
    fn default() -> Tables {
        let four = |n: u64| Line([0, n, 0, n + 1, 0, n + 2, 0, n + 3]);
        let mut lines: Vec<Line> = (0..PERMANENT_LINES as u64).map(|line| four(4 * line)).collect();
        lines.push(Line([0; LINE_WORDS]));
        let space = LineAllocator::new(PERMANENT_LINES);
        Tables { slots: vec![0; CHUNKS], lines, space, select: Select::new() }
    }
}

impl Lookup<u32> for Tables {
    #[inline]
    fn lookup(&self, address: u32) -> u32 {
        let Some(slot) = self.slots.get(address.chunk()) else { return 0 };
        let offset = *slot as usize;
        match self.select.byte_by_popcount(&self.lines, offset, address >> 8 & 63) {
            ESCAPE => self.lookup_record(address, offset),
            entry => entry.into(),
        }
    }

    fn set(&mut self, chunk: usize, ranges: &[(u32, u32)], units: u32) -> u32 {
        let Some(slot) = self.slots.get_mut(chunk) else { return 0 };
        if units > 0 {
            self.space.free(*slot as usize, units as usize);
        }
        let block = Block::of(ranges);
        if let Some(entry) = block.single_entry() {
            *slot = u32::from(entry) * SINGLE_RUN_WORDS as u32;
            return 0;
        }
        let words = block.words();
        let offset = self.space.allocate(words);
        *slot = offset as u32;
        let lines = (offset + words).div_ceil(LINE_WORDS) + 1;
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; LINE_WORDS]));
        }
        block.write(&mut self.lines, offset);
        words as u32
    }
}

impl Key for u32 {
    type Tables = Tables;
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

#[cfg(test)]
impl Tables {
    /// Whether every chunk has answer 0, and all memory is free.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| *slot == 0) && self.space.is_empty(PERMANENT_LINES)
    }
}
