//! Flattens nested prefixes into a list of ranges. Each range extends to the start of the next one;
//! adjacent ranges have different answers.

use alloc::vec::Vec;

use crate::route::fib::Key;

/// Appends the ranges of an address block, with `cover` where no inner prefix matches. `inner` are
/// the prefixes inside the block, ordered by address, shorter first.
pub(crate) fn flatten<K: Key>(
    ranges: &mut Vec<(K, u32)>,
    first: K,
    last: K,
    cover: u32,
    inner: impl Iterator<Item = (K, u8, u32)>,
) {
    let mut ranges = Ranges(ranges);
    // Stack of the prefixes that contain the current address, outermost first: last address and
    // answer.
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
    /// Closes the prefixes that end before `at`, except the outermost.
    fn close(&mut self, open: &mut Vec<(K, u32)>, at: Option<K>) {
        while let [.., outer, (end, _)] = open.as_slice() {
            if at.is_some_and(|at| *end >= at) {
                return;
            }
            // If the outer prefix ends here too, its own end determines the next answer.
            if *end != outer.0
                && let Some(next) = end.next()
            {
                self.push(next, outer.1);
            }
            open.pop();
        }
    }

    /// Starts a range at `start`, replacing one that starts there and merging equal answers.
    fn push(&mut self, start: K, answer: u32) {
        if self.0.last().is_some_and(|last| last.0 == start) {
            self.0.pop();
        }
        if self.0.last().is_none_or(|last| last.1 != answer) {
            self.0.push((start, answer));
        }
    }
}
