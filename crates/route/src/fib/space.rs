//! Which part of a table's memory is free.

#![forbid(unsafe_code)]
// Sums of places and lengths within memory that exists.
#![allow(clippy::arithmetic_side_effects)]

use alloc::collections::{BTreeMap, BTreeSet};

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
