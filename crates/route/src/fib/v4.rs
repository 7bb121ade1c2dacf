//! IPv4: chunks of 64 blocks of 256 addresses (/24).
//!
//! ```text
//!   slot     │ place of the chunk's block : 32 │
//!   block    │ runs, one bit per /24 : 64 │ entry : 8 │ entry : 8 │ ... │ record │ ...
//!   record   │ which /24 : 8 │ ranges : 8 │ start : 8, answer : 16 │ ...
//! ```
//!
//! Bit n of `runs` says that /24 number n + 1 begins a run: that its entry is another than that of the
//! /24 before. The entry of an address is the one whose number is the count of bits below that of its own
//! /24: the leaf compression of Poptrie (Asai and Ohara, *Poptrie: a compressed trie with population count
//! for fast and scalable software IP routing table lookup*, 2015), on one level. An entry is an answer of
//! 254 at most, or says that there is a record: for a /24 with longer prefixes in it, whose ranges are
//! searched (as in DXR: Zec, Rizzo, Mikuc, 2012), or for a larger answer.
//!
//! Why so: what a look-up costs is the misses of caches that it waits for, and how many look-ups a core
//! has under way at a time. So it reads a line of the slots, most of which stay in the second-level cache,
//! and one of the block, which lies across no more lines than it must; and it is few instructions, since
//! all of them stay in the core until those before are done, with nearly no branch that is hard to
//! foresee. One byte per run, since what is small is in a near cache more often.
//!
//! A change writes a new block, then the slot, then counts itself; the old block is free at once. A
//! reader who was on it notices, since the count is not what it was, and looks again.

#![forbid(unsafe_code)]
// The writer's sums are of bytes in a block of bounded length; look-ups use `wrapping_`.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::FibError;
use super::changes::Changes;
use super::key::{Sealed, Shared};
use super::space::Lines;
use crate::raw::{Place, Places};

/// Leading bits of an address that choose the chunk: the others are 6 that choose the /24, and 8.
const CHUNK_BITS: u32 = 18;
const LOW_BITS: u32 = 32 - CHUNK_BITS;
const CHUNKS: usize = 1 << CHUNK_BITS;

/// Room for blocks: 32 MiB, of which the Internet's table takes five.
const ROOM_WORDS: usize = 4 << 20;
const WORD_BYTES: usize = size_of::<u64>();
/// An entry that stands for a record.
const ESCAPE: u8 = 255;
/// Words of the block of one run that every entry has, so that a chunk of one answer needs none.
const OWN_WORDS: usize = 2;

/// What look-ups in IPv4 read.
pub struct Tables {
    places: Places<CHUNKS, ROOM_WORDS>,
    changes: Changes,
}

/// A block while it is written.
#[derive(Default)]
struct Block {
    runs: u64,
    entries: Vec<u8>,
    records: Vec<u8>,
}

impl Tables {
    #[inline(always)]
    fn place(&self, address: u32) -> Place {
        self.places.place(address.chunk())
    }

    #[inline(always)]
    fn byte(&self, at: usize) -> u8 {
        (self.places.word(at / WORD_BYTES) >> (8 * (at % WORD_BYTES))) as u8
    }

    /// The answer in the block at `place`. Whether nothing changed is for the caller to ask.
    #[inline(always)]
    fn answer(&self, address: u32, place: Place) -> u32 {
        match self.places.byte_by_ones(place, address >> 8 & 63) {
            entry if entry == usize::from(ESCAPE) => self.in_record(address, place),
            entry => entry as u32,
        }
    }

    /// Looks for the record of the address's /24, and in it. Rare, and not to take registers from what
    /// is not.
    #[cold]
    #[inline(never)]
    fn in_record(&self, address: u32, place: Place) -> u32 {
        let place = place.number();
        let which = (address >> 8 & 63) as u8;
        let entries = place.wrapping_add(1).wrapping_mul(WORD_BYTES);
        let mut at = entries.wrapping_add(self.runs(place));
        for _ in 0..64 {
            let ranges = match self.byte(at.wrapping_add(1)) {
                0 => 256,
                n => usize::from(n),
            };
            let first = at.wrapping_add(2);
            if self.byte(at) == which {
                return self.in_ranges(first, ranges, address as u8);
            }
            at = first.wrapping_add(3 * ranges);
        }
        // What is being overwritten may look like anything.
        0
    }

    /// The answer for an address, when the table has changed during a look-up.
    #[cold]
    #[inline(never)]
    fn look_again(&self, address: u32) -> u32 {
        loop {
            let before = self.changes.before();
            let answer = self.answer(address, self.place(address));
            if self.changes.is_still(before) {
                return answer;
            }
        }
    }

    /// The answer of the last of `ranges` ranges that starts at or before `low`.
    fn in_ranges(&self, first: usize, ranges: usize, low: u8) -> u32 {
        let place = |i: usize| first.wrapping_add(i.wrapping_mul(3));
        let (mut range, mut left) = (0usize, ranges);
        while left > 1 {
            let half = left / 2;
            let middle = range.wrapping_add(half);
            range = if self.byte(place(middle)) <= low { middle } else { range };
            left -= half;
        }
        let at = place(range);
        u16::from_le_bytes([self.byte(at.wrapping_add(1)), self.byte(at.wrapping_add(2))]).into()
    }

    /// How many runs, and so entries, a block has.
    fn runs(&self, place: usize) -> usize {
        self.places.word(place).count_ones().wrapping_add(1) as usize
    }
}

impl Block {
    /// Entries and records of a chunk's ranges.
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

    /// A record for a /24 whose first addresses have `outer` if no range starts there.
    fn add_record(&mut self, which: u8, outer: u32, here: &[(u32, u32)]) {
        let starts_late = here.first().is_none_or(|r| r.0 & 0xff != 0);
        let ranges = here.len() + usize::from(starts_late);
        // 256 is written as 0.
        self.records.extend([which, ranges as u8]);
        let outer = starts_late.then_some((0, outer));
        for (start, answer) in outer.into_iter().chain(here.iter().copied()) {
            let [low, high] = (answer as u16).to_le_bytes();
            self.records.extend([start as u8, low, high]);
        }
    }

    /// The chunk's one entry, if it needs no block.
    fn only(&self) -> Option<u8> {
        match self.entries.as_slice() {
            [entry] if *entry != ESCAPE => Some(*entry),
            _ => None,
        }
    }

    fn words(&self) -> usize {
        1 + (self.entries.len() + self.records.len()).div_ceil(WORD_BYTES)
    }

    /// Writes itself into as many words as it has.
    fn write(&self, room: &[AtomicU64]) {
        let mut bytes = self.entries.iter().chain(&self.records).copied();
        let (Some(runs), rest) = (room.first(), room.iter().skip(1)) else { return };
        runs.store(self.runs, Relaxed);
        for word in rest {
            let next = core::array::from_fn(|_| bytes.next().unwrap_or(0));
            word.store(u64::from_le_bytes(next), Relaxed);
        }
    }
}

impl Shared<u32> for Tables {
    type Control = Lines;

    fn new(advise: impl FnOnce(*const u8, usize)) -> (Tables, Lines) {
        let places = Places::new(advise);
        let own = usize::from(ESCAPE) * OWN_WORDS;
        for (entry, own) in places.room(0, own).chunks(OWN_WORDS).enumerate() {
            own.iter().zip([0, entry as u64]).for_each(|(word, value)| word.store(value, Relaxed));
        }
        (Tables { places, changes: Changes::default() }, Lines::new(own, ROOM_WORDS))
    }

    #[inline]
    fn lookup(&self, address: u32) -> u32 {
        let before = self.changes.before();
        let answer = self.answer(address, self.place(address));
        if self.changes.is_still(before) { answer } else { self.look_again(address) }
    }

    #[inline]
    fn lookup_burst(&self, addresses: &[u32], answers: &mut [u32]) {
        for (addresses, answers) in addresses.chunks(PIECE).zip(answers.chunks_mut(PIECE)) {
            let before = self.changes.before();
            let mut places = [Place::default(); PIECE];
            for (place, address) in places.iter_mut().zip(addresses) {
                *place = self.place(*address);
                self.places.prefetch(*place);
            }
            for ((answer, address), place) in answers.iter_mut().zip(addresses).zip(places) {
                *answer = self.answer(*address, place);
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
        space: &mut Lines,
        chunk: usize,
        ranges: &[(u32, u32)],
        units: u32,
    ) -> Result<u32, FibError> {
        self.changes.fence();
        let block = Block::of(ranges);
        let (place, new_units) = match block.only() {
            Some(entry) => (usize::from(entry) * OWN_WORDS, 0),
            None => {
                let words = block.words();
                let place = space.take(words).ok_or(FibError::Full)?;
                block.write(self.places.room(place, words));
                (place, words)
            }
        };
        let old = self.places.set(chunk, place);
        self.changes.count();
        // What the old block takes up is free from here on.
        if units > 0 {
            space.give(old, units as usize);
        }
        Ok(new_units as u32)
    }

    fn bytes(&self, space: &Lines) -> (usize, usize) {
        let (touched, free) = space.usage();
        let fixed = size_of::<Tables>() + CHUNKS * size_of::<AtomicU32>();
        (fixed + touched * WORD_BYTES, free * WORD_BYTES)
    }
}

/// Look-ups that are under way together: more than a core has misses in flight.
const PIECE: usize = 32;

impl Sealed for u32 {
    type Shared = Tables;
    type Control = Lines;
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
