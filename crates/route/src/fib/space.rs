//! Which part of a table's memory is free.

#![forbid(unsafe_code)]
// Sums of places and lengths within memory that exists.
#![allow(clippy::arithmetic_side_effects)]

use alloc::collections::{BTreeMap, BTreeSet};

use crate::raw::LINE_WORDS;

/// Blocks of units (of what, is up to the table) in a memory that is bounded.
pub struct Space {
    /// Where the memory begins that no block has been in, or is in any more.
    top: usize,
    limit: usize,
    /// Free blocks below `top`: their places, with their lengths. No two touch, and none touches it.
    free: BTreeMap<usize, usize>,
    /// The same by length.
    by_length: BTreeSet<(usize, usize)>,
    free_units: usize,
    /// The most that `top` has been.
    touched: usize,
}

impl Space {
    /// Units from `first` to `limit`, all of them free.
    pub(super) fn new(first: usize, limit: usize) -> Space {
        let (free, by_length) = (BTreeMap::new(), BTreeSet::new());
        Space { top: first, limit, free, by_length, free_units: 0, touched: first }
    }

    /// Units that blocks have been in, and how many of them are free.
    pub(super) fn usage(&self) -> (usize, usize) {
        (self.touched, self.free_units + self.touched - self.top)
    }

    /// The place of a block: the smallest free one that is long enough. `None` if there is no room.
    pub(super) fn take(&mut self, count: usize) -> Option<usize> {
        let Some((len, place)) = self.by_length.range((count, 0)..).next().copied() else {
            let place = self.top;
            self.top = place.checked_add(count).filter(|end| *end <= self.limit)?;
            self.touched = self.touched.max(self.top);
            return Some(place);
        };
        self.cut(place, len);
        if len > count {
            self.put(place + count, len - count);
        }
        Some(place)
    }

    /// Frees a block and joins it with its free neighbours.
    pub(super) fn give(&mut self, place: usize, count: usize) {
        let (mut place, mut count) = (place, count);
        if let Some(len) = self.free.get(&(place + count)).copied() {
            self.cut(place + count, len);
            count += len;
        }
        if let Some((before, len)) = self.free.range(..place).next_back().map(|(p, l)| (*p, *l))
            && before + len == place
        {
            self.cut(before, len);
            (place, count) = (before, count + len);
        }
        match place + count == self.top {
            true => self.top = place,
            false => self.put(place, count),
        }
    }

    fn put(&mut self, place: usize, len: usize) {
        self.free.insert(place, len);
        self.by_length.insert((len, place));
        self.free_units += len;
    }

    fn cut(&mut self, place: usize, len: usize) {
        self.free.remove(&place);
        self.by_length.remove(&(len, place));
        self.free_units -= len;
    }
}

/// The same of blocks of words such that none lies across more cache lines than it must: one that fits a
/// line lies in one, a longer one begins with one.
pub struct Lines {
    /// In lines.
    whole: Space,
    /// Free parts of lines, by place and by length. No two touch, and none is a whole line.
    free: BTreeMap<usize, usize>,
    by_length: BTreeSet<(usize, usize)>,
    free_words: usize,
}

impl Lines {
    /// Words from `first` (up to the next line they stay free) to `limit`.
    pub(super) fn new(first: usize, limit: usize) -> Lines {
        let whole = Space::new(first.div_ceil(LINE_WORDS), limit / LINE_WORDS);
        Lines { whole, free: BTreeMap::new(), by_length: BTreeSet::new(), free_words: 0 }
    }

    /// Words that blocks have been in, and how many of them are free.
    pub(super) fn usage(&self) -> (usize, usize) {
        let (touched, free) = self.whole.usage();
        (touched * LINE_WORDS, free * LINE_WORDS + self.free_words)
    }

    /// The place of a block of at least one word: in the smallest free part of a line that holds it, else
    /// in lines of its own. `None` if there is no room.
    pub(super) fn take(&mut self, words: usize) -> Option<usize> {
        let (place, len) = match self.by_length.range((words, 0)..).next().copied() {
            Some((len, place)) => {
                self.cut(place, len);
                (place, len)
            }
            None => {
                let lines = words.div_ceil(LINE_WORDS);
                (self.whole.take(lines)? * LINE_WORDS, lines * LINE_WORDS)
            }
        };
        if len > words {
            self.put(place + words, len - words);
        }
        Some(place)
    }

    /// Frees a block.
    pub(super) fn give(&mut self, place: usize, words: usize) {
        let rest = words % LINE_WORDS;
        if words > rest {
            self.whole.give(place / LINE_WORDS, words / LINE_WORDS);
        }
        if rest > 0 {
            self.give_part(place + words - rest, rest);
        }
    }

    /// Frees a part of a line and joins it with the free parts beside it.
    fn give_part(&mut self, place: usize, len: usize) {
        let (mut place, mut len) = (place, len);
        let line = place / LINE_WORDS;
        let end = place + len;
        if end / LINE_WORDS == line
            && let Some(behind) = self.free.get(&end).copied()
        {
            self.cut(end, behind);
            len += behind;
        }
        let before = self.free.range(line * LINE_WORDS..place).next_back();
        if let Some((before, part)) = before.map(|(p, l)| (*p, *l))
            && before + part == place
        {
            self.cut(before, part);
            (place, len) = (before, len + part);
        }
        match len {
            LINE_WORDS => self.whole.give(line, 1),
            _ => self.put(place, len),
        }
    }

    fn put(&mut self, place: usize, len: usize) {
        self.free.insert(place, len);
        self.by_length.insert((len, place));
        self.free_words += len;
    }

    fn cut(&mut self, place: usize, len: usize) {
        self.free.remove(&place);
        self.by_length.remove(&(len, place));
        self.free_words -= len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIRST: usize = 21;
    const LIMIT: usize = 512;

    proptest! {
        #[test]
        fn blocks_never_meet_and_lie_across_no_more_lines_than_they_must(
            steps in prop::collection::vec((1usize..30, any::<prop::sample::Index>(), 0u8..3), 1..200),
        ) {
            let mut lines = Lines::new(FIRST, LIMIT);
            let (mut is_taken, mut blocks) = (vec![false; LIMIT], Vec::<(usize, usize)>::new());
            for (words, which, what) in steps {
                if what == 0 && !blocks.is_empty() {
                    let (place, words) = blocks.swap_remove(which.index(blocks.len()));
                    is_taken[place..place + words].fill(false);
                    lines.give(place, words);
                } else if let Some(place) = lines.take(words) {
                    prop_assert!(place >= FIRST && place + words <= LIMIT);
                    let last = (place + words - 1) / LINE_WORDS;
                    prop_assert_eq!(last - place / LINE_WORDS, (words - 1) / LINE_WORDS);
                    prop_assert!(is_taken[place..place + words].iter().all(|taken| !taken));
                    is_taken[place..place + words].fill(true);
                    blocks.push((place, words));
                } else {
                    // Only a table that is nearly full refuses.
                    prop_assert!(is_taken.iter().filter(|taken| **taken).count() > LIMIT / 4);
                }
                let (touched, free) = lines.usage();
                prop_assert_eq!(touched - free - 24, blocks.iter().map(|b| b.1).sum::<usize>());
            }
            blocks.into_iter().for_each(|(place, words)| lines.give(place, words));
            prop_assert!(lines.free.is_empty() && lines.by_length.is_empty());
            prop_assert_eq!(lines.take(LIMIT - 24), Some(24), "all of it is one block again");
        }
    }
}
