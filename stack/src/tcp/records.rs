//! Record boundaries in the stream (MSG_EOR of send(2)): no segment spans one, in the first transmission or a
//! retransmission. The receiver sees a stream; the boundaries serve tools that measure or steer by segments,
//! as on Linux.
//!
//! At most [`MAX_RECORDS`] boundaries are unacknowledged; at the limit a writer waits as for space in the send
//! buffer.

use alloc::collections::VecDeque;

/// 8 KiB per connection in the worst case.
const MAX_RECORDS: usize = 1024;

/// The ends of records above `snd.una`: positions after their last bytes, ascending.
#[derive(Clone, Debug, Default)]
pub(crate) struct Records {
    ends: VecDeque<u64>,
}

impl Records {
    /// A record ends before `end`. `end` must not decrease from call to call.
    pub(crate) fn push(&mut self, end: u64) {
        if self.ends.back() != Some(&end) {
            self.ends.push_back(end);
        }
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.ends.len() >= MAX_RECORDS
    }

    /// `snd.una` advances to `una`.
    #[inline]
    pub(crate) fn acked_to(&mut self, una: u64) {
        while self.ends.front().is_some_and(|end| *end <= una) {
            self.ends.pop_front();
        }
    }

    /// `to`, or the end of the record at `from` if that is less.
    #[inline]
    pub(crate) fn end_within(&self, from: u64, to: u64) -> u64 {
        if self.ends.is_empty() {
            return to;
        }
        let behind = self.ends.partition_point(|end| *end <= from);
        self.ends.get(behind).map_or(to, |end| to.min(*end))
    }

    /// `from`, or the start of the record before `to` if that is more.
    pub(crate) fn start_within(&self, from: u64, to: u64) -> u64 {
        let below = self.ends.partition_point(|end| *end < to);
        let last = below.checked_sub(1).and_then(|i| self.ends.get(i));
        last.map_or(from, |end| from.max(*end))
    }

    /// Whether a record ends before `pos`.
    #[inline]
    pub(crate) fn ends_at(&self, pos: u64) -> bool {
        !self.ends.is_empty() && self.ends.binary_search(&pos).is_ok()
    }
}
