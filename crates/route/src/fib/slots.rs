//! What look-ups read: one slot per chunk of the address space, and blocks of words behind them.
//!
//! A slot says either the answer for its whole chunk, or where the block of the chunk's ranges lies.
//! A change writes a new block, then the slot; the old block is free at once. A reader who was on
//! it notices, since the slot is not what it was, and starts again. So readers take no lock and write
//! nothing, and memory is bounded by what the table holds.
//!
//! ```text
//!   slot   │ place of the block, or the answer : 32 │ ranges, or 0 : 16 │ version : 16 │
//! ```
//!
//! The version tells a slot that became the same again. It would be mistaken only if a chunk changed
//! a multiple of 65,536 times during one look-up and its block came back to the same place; the cost
//! would be one packet on the way to another next hop.

#![forbid(unsafe_code)]

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::FibError;
use crate::raw::{Growth, SEGMENT_WORDS, Words};

/// Blocks are multiples of so many words, so that few sizes exist.
const GRAIN_WORDS: usize = 4;

/// The shared half.
pub(super) struct Slots {
    slots: Box<[AtomicU64]>,
    words: Words,
}

/// The writer's half: which words are free.
pub(super) struct Space {
    growth: Growth,
    /// Free blocks: their first words, with their lengths. No two of one segment touch.
    free: BTreeMap<usize, usize>,
    /// The same by length.
    by_length: BTreeSet<(usize, usize)>,
    free_words: usize,
    scratch: Vec<u32>,
}

const fn pack(place: u32, ranges: u16, version: u16) -> u64 {
    (place as u64) << 32 | (ranges as u64) << 16 | version as u64
}

const fn unpack(slot: u64) -> (u32, u16, u16) {
    ((slot >> 32) as u32, (slot >> 16) as u16, slot as u16)
}

impl Slots {
    pub(super) fn new(chunks: usize) -> (Slots, Space) {
        let (words, growth) = Words::new();
        let slots = core::iter::repeat_with(|| AtomicU64::new(0)).take(chunks).collect();
        let space = Space {
            growth,
            free: BTreeMap::new(),
            by_length: BTreeSet::new(),
            free_words: 0,
            scratch: Vec::new(),
        };
        (Slots { slots, words }, space)
    }

    /// The answer for a chunk: its one answer, or what `find` sees in its block of `ranges` times
    /// `words` words.
    #[inline]
    pub(super) fn read(
        &self,
        chunk: usize,
        words: usize,
        find: impl Fn(&[AtomicU32], usize) -> u32,
    ) -> u32 {
        let Some(slot) = self.slots.get(chunk) else { return 0 };
        loop {
            let seen = slot.load(Ordering::Acquire);
            let (place, ranges, _) = unpack(seen);
            if ranges == 0 {
                return place;
            }
            let ranges = usize::from(ranges);
            let block = self.words.block(place as usize, ranges.wrapping_mul(words));
            let answer = find(block, ranges);
            // If a word was of a later block, the store to the slot that freed ours happened before
            // (the fence in `write`), and the load below sees it.
            fence(Ordering::Acquire);
            if slot.load(Ordering::Relaxed) == seen {
                return answer;
            }
        }
    }

    /// Loads what the search of a chunk will look at first, so that it is near when it comes; the
    /// slot must be near already.
    #[inline]
    pub(super) fn touch(&self, chunk: usize, words: usize) -> u32 {
        let slot = self.slots.get(chunk).map_or(0, |s| s.load(Ordering::Acquire));
        let (place, ranges, _) = unpack(slot);
        let middle = usize::from(ranges / 2).wrapping_mul(words);
        let block = self.words.block((place as usize).wrapping_add(middle), 1);
        block.first().map_or(0, |w| w.load(Ordering::Relaxed))
    }

    /// The slot of a chunk, whatever it says.
    #[inline]
    pub(super) fn slot(&self, chunk: usize) -> u64 {
        self.slots.get(chunk).map_or(0, |s| s.load(Ordering::Relaxed))
    }

    /// Whether the chunk has one answer.
    #[cfg(test)]
    pub(super) fn is_leaf(&self, chunk: usize) -> bool {
        self.slots.get(chunk).is_none_or(|s| unpack(s.load(Ordering::Relaxed)).1 == 0)
    }

    /// Bytes of the slots.
    pub(super) fn bytes(&self) -> usize {
        self.slots.len().saturating_mul(size_of::<AtomicU64>()).saturating_add(size_of::<Words>())
    }

    /// Gives a chunk one answer.
    pub(super) fn set_leaf(&self, space: &mut Space, chunk: usize, answer: u32, words: usize) {
        self.set(space, chunk, answer, 0, words);
    }

    /// Gives a chunk ranges of `words` words each.
    ///
    /// # Errors
    /// [`FibError::Full`]: the table is as it was.
    pub(super) fn set_ranges(
        &self,
        space: &mut Space,
        chunk: usize,
        block: &[u32],
        words: usize,
    ) -> Result<(), FibError> {
        let ranges = block.len().checked_div(words).and_then(|n| u16::try_from(n).ok());
        let ranges = ranges.ok_or(FibError::Full)?;
        let place = space.take(&self.words, block.len()).ok_or(FibError::Full)?;
        // The slot that freed these words was stored before: see `read`.
        fence(Ordering::Release);
        for (word, value) in self.words.block(place, block.len()).iter().zip(block) {
            word.store(*value, Ordering::Relaxed);
        }
        self.set(space, chunk, place as u32, ranges, words);
        Ok(())
    }

    fn set(&self, space: &mut Space, chunk: usize, place: u32, ranges: u16, words: usize) {
        let Some(slot) = self.slots.get(chunk) else { return };
        let (old, old_ranges, version) = unpack(slot.load(Ordering::Relaxed));
        slot.store(pack(place, ranges, version.wrapping_add(1)), Ordering::Release);
        if old_ranges > 0 {
            space.give(old as usize, usize::from(old_ranges).saturating_mul(words));
        }
    }
}

impl Space {
    /// Bytes of blocks, used and free; and of them free.
    pub(super) fn bytes(&self) -> (usize, usize) {
        (self.growth.bytes(), self.free_words.saturating_mul(size_of::<AtomicU32>()))
    }

    /// Room to build a block in.
    pub(super) fn scratch(&mut self) -> Vec<u32> {
        let mut scratch = core::mem::take(&mut self.scratch);
        scratch.clear();
        scratch
    }

    /// Keeps the room for the next block.
    pub(super) fn keep(&mut self, scratch: Vec<u32>) {
        self.scratch = scratch;
    }

    /// The place of a block of so many words: the smallest free one that is long enough. `None` if
    /// it is longer than a segment or there are too many.
    fn take(&mut self, words: &Words, count: usize) -> Option<usize> {
        let count = count.checked_next_multiple_of(GRAIN_WORDS)?;
        if count > SEGMENT_WORDS {
            return None;
        }
        if self.by_length.range((count, 0)..).next().is_none() {
            let place = words.grow(&mut self.growth)?;
            self.put(place, SEGMENT_WORDS);
        }
        let (len, place) = *self.by_length.range((count, 0)..).next()?;
        self.cut(place, len);
        let rest = len.saturating_sub(count);
        if rest > 0 {
            self.put(place.saturating_add(count), rest);
        }
        Some(place)
    }

    /// Frees a block and joins it with free neighbours of its segment.
    fn give(&mut self, place: usize, count: usize) {
        let (mut place, mut count) = (place, count.next_multiple_of(GRAIN_WORDS));
        let end = place.saturating_add(count);
        if let Some(len) = self.free.get(&end).copied().filter(|_| end % SEGMENT_WORDS != 0) {
            self.cut(end, len);
            count = count.saturating_add(len);
        }
        if let Some((before, len)) = self.free.range(..place).next_back().map(|(p, l)| (*p, *l))
            && before.saturating_add(len) == place
            && place % SEGMENT_WORDS != 0
        {
            self.cut(before, len);
            (place, count) = (before, count.saturating_add(len));
        }
        self.put(place, count);
    }

    fn put(&mut self, place: usize, len: usize) {
        self.free.insert(place, len);
        self.by_length.insert((len, place));
        self.free_words = self.free_words.saturating_add(len);
    }

    fn cut(&mut self, place: usize, len: usize) {
        self.free.remove(&place);
        self.by_length.remove(&(len, place));
        self.free_words = self.free_words.saturating_sub(len);
    }
}
