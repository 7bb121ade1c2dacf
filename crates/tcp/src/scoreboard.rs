//! The SACK scoreboard (RFC 6675 section 3): which bytes beyond `snd_una` the peer has reported.
//!
//! ```text
//!  snd_una        lost_edge                    snd_nxt
//!     |  hole  |SSSS| hole |SS|SS.. hole |SSSS|  not reported |
//!     |<-- lost --->|<------------- not known to be lost ---->|
//! ```
//!
//! Positions are unwrapped sequence numbers (see `tcb`). Ranges are sorted, disjoint and not
//! adjacent. There are at most [`MAX_RANGES`]: a block that would need one more is ignored, which
//! costs at most a needless retransmission. The vector is allocated with the first block and keeps
//! its capacity.

use alloc::vec::Vec;

/// 4 KiB per connection in the worst case.
pub(crate) const MAX_RANGES: usize = 256;

/// DupThresh (RFC 6675 section 2).
pub(crate) const DUP_THRESH: usize = 3;

/// SACKed positions `start..end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    start: u64,
    end: u64,
}

impl Range {
    fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// The ranges that the peer has selectively acknowledged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scoreboard {
    ranges: Vec<Range>,
    /// Sum of all ranges, bytes.
    bytes: u64,
}

impl Scoreboard {
    pub(crate) const fn new() -> Scoreboard {
        Scoreboard { ranges: Vec::new(), bytes: 0 }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// SACKed bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The position after the highest SACKed byte (HighData), 0 if there is none.
    pub(crate) fn highest(&self) -> u64 {
        self.ranges.last().map_or(0, |r| r.end)
    }

    /// The lowest SACKed position.
    pub(crate) fn lowest(&self) -> Option<u64> {
        self.ranges.first().map(|r| r.start)
    }

    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
        self.bytes = 0;
    }

    /// Records `start..end`. Returns the number of newly SACKed bytes.
    pub(crate) fn insert(&mut self, start: u64, end: u64) -> u64 {
        if start >= end {
            return 0;
        }
        // The ranges first..last touch or overlap the new one and are merged with it.
        let first = self.ranges.partition_point(|r| r.end < start);
        let last = self.ranges.partition_point(|r| r.start <= end).max(first);
        let Some(merged) = self.ranges.get(first..last) else { return 0 };
        if merged.is_empty() && self.ranges.len() >= MAX_RANGES {
            return 0;
        }
        let already_sacked = merged.iter().fold(0u64, |n, r| n.saturating_add(r.bytes()));
        let union = Range {
            start: merged.first().map_or(start, |r| r.start.min(start)),
            end: merged.last().map_or(end, |r| r.end.max(end)),
        };
        self.replace(first, last, union);
        let newly_sacked = union.bytes().saturating_sub(already_sacked);
        self.bytes = self.bytes.saturating_add(newly_sacked);
        newly_sacked
    }

    fn replace(&mut self, first: usize, last: usize, with: Range) {
        match self.ranges.get_mut(first) {
            Some(slot) if first < last => {
                *slot = with;
                self.ranges.drain(first.saturating_add(1)..last);
            }
            _ => self.ranges.insert(first, with),
        }
    }

    /// Removes everything below `pos`, which is cumulatively acknowledged.
    pub(crate) fn acked_to(&mut self, pos: u64) {
        if self.ranges.first().is_none_or(|r| r.start >= pos) {
            return;
        }
        let below_pos = self.ranges.partition_point(|r| r.end <= pos);
        let below: u64 = self.ranges.drain(..below_pos).map(|r| r.bytes()).sum();
        self.bytes = self.bytes.saturating_sub(below);
        if let Some(r) = self.ranges.first_mut().filter(|r| r.start < pos) {
            self.bytes = self.bytes.saturating_sub(pos.saturating_sub(r.start));
            r.start = pos;
        }
    }

    /// IsLost (RFC 6675 section 4) as a position: a byte that is not SACKed is lost iff it is below
    /// the returned position, that is iff DupThresh discontiguous ranges, or more than (DupThresh -
    /// 1) * SMSS bytes, are SACKed above it. 0 if nothing is lost.
    pub(crate) fn lost_edge(&self, mss: u64) -> u64 {
        let enough = mss.saturating_mul(2);
        let mut bytes = 0u64;
        for (count, r) in self.ranges.iter().rev().enumerate() {
            bytes = bytes.saturating_add(r.bytes());
            if bytes > enough || count.saturating_add(1) >= DUP_THRESH {
                return r.start;
            }
        }
        0
    }

    /// SACKed bytes in `from..to`.
    pub(crate) fn bytes_within(&self, from: u64, to: u64) -> u64 {
        let first = self.ranges.partition_point(|r| r.end <= from);
        let overlap = |r: &Range| r.end.min(to).saturating_sub(r.start.max(from));
        let inside = self.ranges.iter().skip(first).take_while(|r| r.start < to);
        inside.map(overlap).fold(0, u64::saturating_add)
    }

    /// The first hole in `from..to`.
    pub(crate) fn first_hole(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        let next = self.ranges.partition_point(|r| r.end <= from);
        let mut start = from;
        for r in self.ranges.iter().skip(next) {
            if r.start > start {
                let end = r.start.min(to);
                return (start < end).then_some((start, end));
            }
            start = r.end;
        }
        (start < to).then_some((start, to))
    }

    /// The last hole in `from..to`.
    pub(crate) fn last_hole(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        let mut end = to;
        for r in self.ranges.iter().rev() {
            if r.end < end {
                let start = r.end.max(from);
                return (start < end).then_some((start, end));
            }
            end = end.min(r.start);
        }
        (from < end).then_some((from, end))
    }
}

#[cfg(test)]
mod tests;
