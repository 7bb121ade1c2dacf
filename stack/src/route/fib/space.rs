//! The allocator of a table's memory.

// Sums of offsets and lengths within existing memory.
#![allow(clippy::arithmetic_side_effects)]

use alloc::collections::{BTreeMap, BTreeSet};

use crate::route::raw::LINE_WORDS;

/// A best-fit allocator of blocks in memory that grows. The unit of lengths is up to the table.
pub(super) struct BlockAllocator {
    /// Start of the unused rest of the memory.
    top: usize,
    /// Free blocks below `top`: offset to length. No two are adjacent, and none ends at `top`.
    free_blocks: BTreeMap<usize, usize>,
    /// The same as (length, offset).
    by_length: BTreeSet<(usize, usize)>,
}

impl BlockAllocator {
    /// An allocator of the units from `first` on, all free.
    pub(super) fn new(first: usize) -> BlockAllocator {
        BlockAllocator { top: first, free_blocks: BTreeMap::new(), by_length: BTreeSet::new() }
    }

    /// Allocates a block: the smallest free one that is long enough.
    pub(super) fn allocate(&mut self, count: usize) -> usize {
        let Some((len, offset)) = self.by_length.range((count, 0)..).next().copied() else {
            let offset = self.top;
            self.top += count;
            return offset;
        };
        self.remove_free(offset, len);
        if len > count {
            self.insert_free(offset + count, len - count);
        }
        offset
    }

    /// Frees a block and coalesces it with adjacent free blocks.
    pub(super) fn free(&mut self, offset: usize, count: usize) {
        let (mut offset, mut count) = (offset, count);
        if let Some(len) = self.free_blocks.get(&(offset + count)).copied() {
            self.remove_free(offset + count, len);
            count += len;
        }
        if let Some((before, len)) =
            self.free_blocks.range(..offset).next_back().map(|(p, l)| (*p, *l))
            && before + len == offset
        {
            self.remove_free(before, len);
            (offset, count) = (before, count + len);
        }
        match offset + count == self.top {
            true => self.top = offset,
            false => self.insert_free(offset, count),
        }
    }

    fn insert_free(&mut self, offset: usize, len: usize) {
        self.free_blocks.insert(offset, len);
        self.by_length.insert((len, offset));
    }

    fn remove_free(&mut self, offset: usize, len: usize) {
        self.free_blocks.remove(&offset);
        self.by_length.remove(&(len, offset));
    }
}

/// An allocator of blocks of words that span as few cache lines as possible: a block that fits a
/// line is within one, a longer block starts at one.
pub(super) struct LineAllocator {
    /// Allocator of whole lines.
    whole: BlockAllocator,
    /// Free parts of lines: offset to length. No two are adjacent, and none is a whole line.
    free_blocks: BTreeMap<usize, usize>,
    by_length: BTreeSet<(usize, usize)>,
}

impl LineAllocator {
    /// An allocator of the lines from `first` on.
    pub(super) fn new(first: usize) -> LineAllocator {
        let whole = BlockAllocator::new(first);
        LineAllocator { whole, free_blocks: BTreeMap::new(), by_length: BTreeSet::new() }
    }

    /// Allocates a block of at least one word: in the smallest free part of a line that is long
    /// enough, else in new lines.
    pub(super) fn allocate(&mut self, words: usize) -> usize {
        let (offset, len) = match self.by_length.range((words, 0)..).next().copied() {
            Some((len, offset)) => {
                self.remove_free(offset, len);
                (offset, len)
            }
            None => {
                let lines = words.div_ceil(LINE_WORDS);
                (self.whole.allocate(lines) * LINE_WORDS, lines * LINE_WORDS)
            }
        };
        if len > words {
            self.insert_free(offset + words, len - words);
        }
        offset
    }

    /// Frees a block.
    pub(super) fn free(&mut self, offset: usize, words: usize) {
        let rest = words % LINE_WORDS;
        if words > rest {
            self.whole.free(offset / LINE_WORDS, words / LINE_WORDS);
        }
        if rest > 0 {
            self.free_part(offset + words - rest, rest);
        }
    }

    /// Frees a part of a line and coalesces it with adjacent free parts.
    fn free_part(&mut self, offset: usize, len: usize) {
        let (mut offset, mut len) = (offset, len);
        let line = offset / LINE_WORDS;
        let end = offset + len;
        if end / LINE_WORDS == line
            && let Some(after) = self.free_blocks.get(&end).copied()
        {
            self.remove_free(end, after);
            len += after;
        }
        let before = self.free_blocks.range(line * LINE_WORDS..offset).next_back();
        if let Some((before, part)) = before.map(|(p, l)| (*p, *l))
            && before + part == offset
        {
            self.remove_free(before, part);
            (offset, len) = (before, len + part);
        }
        match len {
            LINE_WORDS => self.whole.free(line, 1),
            _ => self.insert_free(offset, len),
        }
    }

    fn insert_free(&mut self, offset: usize, len: usize) {
        self.free_blocks.insert(offset, len);
        self.by_length.insert((len, offset));
    }

    fn remove_free(&mut self, offset: usize, len: usize) {
        self.free_blocks.remove(&offset);
        self.by_length.remove(&(len, offset));
    }
}

#[cfg(test)]
impl BlockAllocator {
    /// Whether all units from `first` on are free.
    pub(super) fn is_empty(&self, first: usize) -> bool {
        self.top == first && self.free_blocks.is_empty() && self.by_length.is_empty()
    }
}

#[cfg(test)]
impl LineAllocator {
    /// Whether all lines from `first` on are free.
    pub(super) fn is_empty(&self, first: usize) -> bool {
        let is_whole = self.free_blocks.is_empty() && self.by_length.is_empty();
        is_whole && self.whole.is_empty(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIRST: usize = 3;

    proptest! {
        #[test]
        fn blocks_never_overlap_and_span_as_few_lines_as_possible(
            steps in prop::collection::vec((1usize..30, any::<prop::sample::Index>(), 0u8..3), 1..200),
        ) {
            let mut lines = LineAllocator::new(FIRST);
            let (mut is_taken, mut blocks) = (Vec::new(), Vec::<(usize, usize)>::new());
            for (words, which, what) in steps {
                if what == 0 && !blocks.is_empty() {
                    let (offset, words) = blocks.swap_remove(which.index(blocks.len()));
                    is_taken[offset..offset + words].fill(false);
                    lines.free(offset, words);
                    continue;
                }
                let offset = lines.allocate(words);
                prop_assert!(offset >= FIRST * LINE_WORDS);
                let last = (offset + words - 1) / LINE_WORDS;
                prop_assert_eq!(last - offset / LINE_WORDS, (words - 1) / LINE_WORDS);
                is_taken.resize(is_taken.len().max(offset + words), false);
                prop_assert!(is_taken[offset..offset + words].iter().all(|taken| !taken));
                is_taken[offset..offset + words].fill(true);
                blocks.push((offset, words));
                // The memory grows only if it is well used.
                let used: usize = blocks.iter().map(|b| b.1).sum();
                prop_assert!(is_taken.len() < 400 || used > is_taken.len() / 8);
            }
            blocks.into_iter().for_each(|(offset, words)| lines.free(offset, words));
            prop_assert!(lines.is_empty(FIRST), "all of it is one block again");
        }
    }
}
