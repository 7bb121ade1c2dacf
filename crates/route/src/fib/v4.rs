//! IPv4: chunks of 64 blocks of 256 addresses (/24).
//!
//! ```text
//!   slot     │ place of the chunk's block : 32 │
//!   block    │ runs, one bit per /24 : 64 │ entry : 8 │ entry : 8 │ ... │ record │ ...
//!   record   │ which /24 : 8 │ ranges : 8 │ start : 8, answer : 16 │ ...
//! ```
//!
//! A bit of `runs` says that its /24 begins a run: that its entry is another than that of the /24
//! before. The entry of an address is the one whose number is the count of bits up to its own: the leaf
//! compression of Poptrie (Asai and Ohara, *Poptrie: a compressed trie with population count for fast
//! and scalable software IP routing table lookup*, 2015), on one level. An entry is the number of an
//! answer in a small table, or says that there is a record: for a /24 with longer prefixes in it, whose
//! ranges are searched (as in DXR: Zec, Rizzo, Mikuc, 2012), or for an answer that found no place in
//! the small table.
//!
//! Why so: what a look-up costs is the misses of caches that it waits for, and how many look-ups a core
//! has under way at a time. So it reads a line of the slots, which stay in the second-level cache, and
//! one of the block, most of which fit a line; and it is few instructions that wait for either, and
//! nearly no branch that is hard to foresee. One byte per run, since what is small is in a near cache
//! more often.
//!
//! A change writes a new block, then the slot, then counts itself; the old block is free at once. A
//! reader who was on it notices, since the count is not what it was, and looks again.

#![forbid(unsafe_code)]
// The writer's sums are of bytes in a block of bounded length; look-ups use `wrapping_`.
#![allow(clippy::arithmetic_side_effects)]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, Ordering::Relaxed};

use super::changes::Changes;
use super::key::{Sealed, Shared};
use super::{FibError, MAX_ANSWER, Space};
use crate::raw::Blocks;

/// Leading bits of an address that choose the chunk: the others are 6 that choose the /24, and 8.
const CHUNK_BITS: u32 = 18;
const LOW_BITS: u32 = 32 - CHUNK_BITS;
const CHUNKS: usize = 1 << CHUNK_BITS;

/// Room for blocks: 32 MiB, of which the Internet's table takes five.
const ROOM_WORDS: usize = 4 << 20;
const WORD_BYTES: usize = size_of::<u64>();
/// An entry that stands for a record.
const ESCAPE: u8 = 255;
/// Words of the block of one run that every number has, so that a chunk of one answer needs none.
const OWN_WORDS: usize = 2;

/// What look-ups in IPv4 read.
pub struct Tables {
    slots: Box<[AtomicU32; CHUNKS]>,
    blocks: Blocks<ROOM_WORDS>,
    /// The answers that entries stand for; 0 is the first one's, and else that of a free number.
    answers: [AtomicU32; ESCAPE as usize],
    changes: Changes,
}

/// What the writer knows of the memory.
pub struct Control {
    space: Space,
    /// Number of entries of each answer's number.
    uses: [u32; 256],
    /// The number of each answer, 0 if it has none.
    numbers: Box<[u8]>,
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
    fn slot(&self, address: u32) -> usize {
        self.slots.get(address.chunk()).map_or(0, |s| s.load(Ordering::Acquire)) as usize
    }

    #[inline(always)]
    fn word(&self, at: usize) -> u64 {
        self.blocks.word(at)
    }

    #[inline(always)]
    fn byte(&self, at: usize) -> u8 {
        (self.word(at / WORD_BYTES) >> (8 * (at % WORD_BYTES))) as u8
    }

    /// The answer in the block at `place`. Whether nothing changed is for the caller to ask.
    #[inline(always)]
    fn answer(&self, address: u32, place: usize) -> u32 {
        // The bits up to the address's own; the first is always set.
        let until = u64::MAX >> (63 ^ (address >> 8 & 63));
        let entry = self.blocks.byte_by_ones(place, until);
        match self.answers.get(entry) {
            Some(answer) => answer.load(Relaxed),
            None => self.in_record(address, place),
        }
    }

    /// Looks for the record of the address's /24, and in it. Rare, and not to take registers from what
    /// is not.
    #[cold]
    #[inline(never)]
    fn in_record(&self, address: u32, place: usize) -> u32 {
        let runs = self.word(place);
        let which = (address >> 8 & 63) as u8;
        let entries = place.wrapping_add(1).wrapping_mul(WORD_BYTES);
        let mut at = entries.wrapping_add(runs.count_ones() as usize);
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

    /// The bytes of a block's entries.
    fn entries_at(&self, place: usize) -> impl Iterator<Item = u8> {
        let first = (place + 1) * WORD_BYTES;
        (0..self.word(place).count_ones() as usize).map(move |i| self.byte(first + i))
    }
}

impl Control {
    /// The number that stands for an answer, a free one if it has none yet. `None` if all are taken.
    fn number(&mut self, tables: &Tables, answer: u32) -> Option<u8> {
        let known = self.numbers.get_mut(answer as usize)?;
        if *known != 0 || answer == 0 {
            return Some(*known);
        }
        let mut numbers = (0..ESCAPE).zip(&tables.answers).skip(1);
        let (number, place) = numbers.find(|(_, a)| a.load(Relaxed) == 0)?;
        place.store(answer, Relaxed);
        *known = number;
        Some(number)
    }

    /// Adds to the uses of numbers. One that is not used any more is free.
    fn count_uses(&mut self, tables: &Tables, numbers: impl Iterator<Item = u8>, by: u32) {
        for number in numbers.filter(|n| *n != 0 && *n != ESCAPE).map(usize::from) {
            let (Some(uses), Some(answer)) =
                (self.uses.get_mut(number), tables.answers.get(number))
            else {
                continue;
            };
            *uses = uses.wrapping_add(by);
            if *uses > 0 {
                continue;
            }
            // Readers who still come by this number notice the change that freed it.
            if let Some(known) = self.numbers.get_mut(answer.swap(0, Relaxed) as usize) {
                *known = 0;
            }
        }
    }

    /// Entries and records of a chunk's ranges.
    fn encode(&mut self, tables: &Tables, ranges: &[(u32, u32)]) -> Block {
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
            let number = only.and_then(|answer| self.number(tables, answer));
            if number.is_none() {
                block.add_record(which, outer, here);
            }
            if number.is_none() || number != last {
                block.runs |= 1 << which;
                block.entries.push(number.unwrap_or(ESCAPE));
            }
            last = number;
        }
        block
    }
}

impl Block {
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

    /// The number of the chunk's one entry, if it needs no block.
    fn own_number(&self) -> Option<u8> {
        match self.entries.as_slice() {
            [number] if *number != ESCAPE => Some(*number),
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
    type Control = Control;

    fn new() -> (Tables, Control) {
        let blocks = Blocks::new();
        let own = usize::from(ESCAPE) * OWN_WORDS;
        for (number, own) in blocks.room(0, own).chunks(OWN_WORDS).enumerate() {
            own.iter().zip([1, number as u64]).for_each(|(word, value)| word.store(value, Relaxed));
        }
        let tables = Tables {
            slots: boxed(|| AtomicU32::new(0)),
            blocks,
            answers: [const { AtomicU32::new(0) }; ESCAPE as usize],
            changes: Changes::default(),
        };
        let space = Space::new(own, ROOM_WORDS);
        let numbers = alloc::vec![0; MAX_ANSWER as usize + 1].into_boxed_slice();
        (tables, Control { space, uses: [0; 256], numbers })
    }

    #[inline]
    fn lookup(&self, address: u32) -> u32 {
        loop {
            let before = self.changes.before();
            let answer = self.answer(address, self.slot(address));
            if self.changes.is_still(before) {
                return answer;
            }
        }
    }

    #[inline]
    fn lookup_burst(&self, addresses: &[u32], answers: &mut [u32]) {
        for (addresses, answers) in addresses.chunks(PIECE).zip(answers.chunks_mut(PIECE)) {
            let before = self.changes.before();
            let mut blocks = [(0usize, 0u64); PIECE];
            for ((place, _), address) in blocks.iter_mut().zip(addresses) {
                *place = self.slot(*address);
            }
            for (place, runs) in &mut blocks {
                *runs = self.word(*place);
            }
            for ((answer, address), (place, _)) in answers.iter_mut().zip(addresses).zip(blocks) {
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
        control: &mut Control,
        chunk: usize,
        ranges: &[(u32, u32)],
        units: u32,
    ) -> Result<u32, FibError> {
        let Some(slot) = self.slots.get(chunk) else { return Err(FibError::Full) };
        self.changes.fence();
        let block = control.encode(self, ranges);
        let mut new_units = 0;
        let place = match block.own_number() {
            Some(number) => usize::from(number) * OWN_WORDS,
            None => {
                new_units = block.words();
                let Some(place) = control.space.take(new_units) else {
                    // The numbers that it brought go again.
                    control.count_uses(self, block.entries.iter().copied(), 1);
                    control.count_uses(self, block.entries.iter().copied(), u32::MAX);
                    return Err(FibError::Full);
                };
                block.write(self.blocks.room(place, new_units));
                place
            }
        };
        control.count_uses(self, block.entries.iter().copied(), 1);
        let old = slot.swap(place as u32, Ordering::Release) as usize;
        self.changes.count();
        // What the old block takes up is free from here on.
        self.changes.fence();
        control.count_uses(self, self.entries_at(old), u32::MAX);
        if units > 0 {
            control.space.give(old, units as usize);
        }
        Ok(new_units as u32)
    }

    fn bytes(&self, control: &Control) -> (usize, usize) {
        let (touched, free) = control.space.usage();
        let fixed = size_of::<Tables>() + CHUNKS * size_of::<AtomicU32>();
        (fixed + touched * WORD_BYTES, free * WORD_BYTES)
    }
}

/// Look-ups that are under way together: more than a core has misses in flight.
const PIECE: usize = 32;

/// An array that never was on the stack.
fn boxed<T, const N: usize>(one: impl FnMut() -> T) -> Box<[T; N]> {
    let all: Box<[T]> = core::iter::repeat_with(one).take(N).collect();
    all.try_into().unwrap_or_else(|_| unreachable!("N were made"))
}

impl Sealed for u32 {
    type Shared = Tables;
    type Control = Control;
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
