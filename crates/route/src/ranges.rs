//! What nested prefixes say of an address, as a list of ranges: each goes from its start to the next one's,
//! and neighbours differ in their answers.

use alloc::vec::Vec;

use crate::Key;

/// Appends the ranges of a block of addresses, first to last: those of prefixes inside, in order of
/// address, shorter first, and `cover` where there are none.
pub(crate) fn fill<K: Key>(
    ranges: &mut Vec<(K, u32)>,
    (first, last): (K, K),
    cover: u32,
    inner: impl Iterator<Item = (K, u8, u32)>,
) {
    let mut ranges = Ranges(ranges);
    // The prefixes around the present address, outermost first: where each ends, and its answer.
    let mut open = Vec::with_capacity(8);
    open.push((last, cover));
    ranges.push(first, cover);
    for (start, len, answer) in inner {
        ranges.close(&mut open, Some(start));
        open.push((start.block(len).1, answer));
        ranges.push(start, answer);
    }
    ranges.close(&mut open, None);
}

struct Ranges<'a, K>(&'a mut Vec<(K, u32)>);

impl<K: Key> Ranges<'_, K> {
    /// Ends the prefixes that end before `at`, but never the outermost.
    fn close(&mut self, open: &mut Vec<(K, u32)>, at: Option<K>) {
        while let [.., outer, (end, _)] = open.as_slice() {
            if at.is_some_and(|at| *end >= at) {
                return;
            }
            // Where the outer one ends too, its own end says what follows.
            if *end != outer.0
                && let Some(next) = end.next()
            {
                self.push(next, outer.1);
            }
            open.pop();
        }
    }

    /// From `start` on the answer is another; a second word for the same start replaces the first.
    fn push(&mut self, start: K, answer: u32) {
        if self.0.last().is_some_and(|last| last.0 == start) {
            self.0.pop();
        }
        if self.0.last().is_none_or(|last| last.1 != answer) {
            self.0.push((start, answer));
        }
    }
}
