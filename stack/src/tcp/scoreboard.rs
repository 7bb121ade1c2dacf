//! The scoreboard: what was sent and is not yet acknowledged cumulatively, when it was last sent,
//! and what became of it (RFC 6675 section 3, RFC 8985 section 5.1).
//!
//! ```text
//!  snd_una                                                    snd_nxt
//!     | lost | again |SACKED| in flight |SACKED|    in flight   |
//!     |<-end |<- end |<-end |<-   end   | ...  one `Run` each   |
//!                                       fack --^
//! ```
//!
//! Runs cover `snd.una..snd.nxt` without gaps, so each stores only its end. A run has one
//! transmission time. Segments sent within a short time of each other, an [`Scoreboard::sent`]
//! argument, share a run, so a flight has few runs however many segments it has.
//!
//! There are at most [`MAX_RUNS`]. Beyond, a SACK block that would need another run is ignored, new
//! data joins the last run, and a retransmission stands for the whole run that it is part of. Each
//! costs at most a later or a needless retransmission. The table is allocated with the first
//! segment and keeps its capacity.
//!
//! Cost: sending and cumulative acknowledgement take constant time. A SACK block takes a binary
//! search, and a move of at most half of the table if it splits a run. [`Scoreboard::mark_lost`]
//! looks at every run in the worst case; it is called only while bytes are SACKed or a recovery
//! lasts.

use crate::base::{Duration, Instant};
use alloc::collections::VecDeque;

/// 24 KiB per connection in the worst case.
pub(crate) const MAX_RUNS: usize = 1024;

/// Positions up to `end`, from the end of the run before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    end: u64,
    /// When it was sent last. Of segments that share a run: when the first was sent.
    sent_at: Instant,
    /// Reported by a SACK block.
    sacked: bool,
    /// Lost, and not retransmitted since.
    lost: bool,
    /// It was retransmitted at least once.
    retransmitted: bool,
}

impl Run {
    /// Sent once and still in flight.
    fn is_plain(&self) -> bool {
        !self.sacked && !self.lost && !self.retransmitted
    }
}

/// A transmission, in the order of RFC 8985 section 6.1: by time, then by sequence number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Transmission {
    pub sent_at: Instant,
    pub end: u64,
}

/// The bytes that the cumulative acknowledgement and the SACK blocks of one ACK delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Delivered {
    /// Bytes delivered, each counted once (DeliveredData of RFC 9937).
    pub bytes: u64,
    /// The latest delivered transmission of bytes sent once.
    pub original: Option<Transmission>,
    /// The latest delivered transmission of bytes sent more than once. Which copy was delivered is
    /// ambiguous.
    pub retransmitted: Option<Transmission>,
    /// Bytes sent once were delivered after bytes with a higher sequence number (RFC 8985 section
    /// 6.2 step 3).
    pub reordered: bool,
    /// Start of the lowest delivered bytes that were sent once.
    pub lowest_original: Option<u64>,
}

/// Bytes that are marked as lost: `start..start + bytes`, sent last at `sent_at`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LostRun {
    pub start: u64,
    pub bytes: u64,
    pub sent_at: Instant,
}

/// The answer of [`Scoreboard::mark_lost`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Losses {
    /// Bytes newly marked as lost.
    pub bytes: u64,
    /// A retransmission was among them.
    pub retransmission: bool,
    /// When the reordering window of all remaining runs has passed, if nothing is delivered
    /// meanwhile (RFC 8985 section 6.2 step 5: the latest).
    pub next: Option<Instant>,
}

/// The bytes that were sent and not acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Scoreboard {
    /// Start of the first run: `snd.una`.
    start: u64,
    runs: VecDeque<Run>,
    /// Sum of SACKed runs, bytes.
    sacked: u64,
    /// Sum of lost runs, bytes.
    lost: u64,
    /// No lost run starts below this position.
    lost_from: u64,
    /// End of the highest bytes delivered (RACK.fack).
    fack: u64,
}

impl Scoreboard {
    pub(crate) const fn new() -> Scoreboard {
        Scoreboard {
            start: 0,
            runs: VecDeque::new(),
            sacked: 0,
            lost: 0,
            lost_from: u64::MAX,
            fack: 0,
        }
    }

    /// Runs start at `start`: what is before it, a SYN and its data, has none.
    pub(crate) fn begin(&mut self, start: u64) {
        self.start = self.start.max(start);
    }

    /// Neither SACKed nor lost bytes.
    #[inline]
    pub(crate) fn is_clean(&self) -> bool {
        self.sacked == 0 && self.lost == 0
    }

    /// SACKed bytes.
    #[inline]
    pub(crate) fn sacked_bytes(&self) -> u64 {
        self.sacked
    }

    /// Lost bytes that were not retransmitted since.
    #[inline]
    pub(crate) fn lost_bytes(&self) -> u64 {
        self.lost
    }

    /// When the first bytes were sent last.
    pub(crate) fn first_sent_at(&self) -> Option<Instant> {
        self.runs.front().map(|r| r.sent_at)
    }

    /// Whether the first byte is SACKed: the peer has reneged (RFC 2018 section 8).
    pub(crate) fn has_reneged(&self) -> bool {
        self.runs.front().is_some_and(|r| r.sacked)
    }

    fn start_of(&self, index: usize) -> u64 {
        let before = index.checked_sub(1).and_then(|i| self.runs.get(i));
        before.map_or(self.start, |r| r.end)
    }

    /// Index of the run that contains `pos`.
    fn find(&self, pos: u64) -> usize {
        self.runs.partition_point(|r| r.end <= pos)
    }

    /// Bytes up to `end` were sent for the first time. They share the last run if its first bytes
    /// were sent at most `within` ago.
    #[inline]
    pub(crate) fn sent(&mut self, end: u64, now: Instant, within: Duration) {
        if let Some(last) = self.runs.back_mut()
            && last.is_plain()
            && now.since(last.sent_at) <= within
        {
            last.end = last.end.max(end);
            return;
        }
        self.push(end, now);
    }

    fn push(&mut self, end: u64, now: Instant) {
        if self.runs.len() < MAX_RUNS {
            let run = Run { end, sent_at: now, sacked: false, lost: false, retransmitted: false };
            self.runs.push_back(run);
            return;
        }
        let last = self.runs.len().saturating_sub(1);
        let bytes = self.bytes_of(last);
        let Some(run) = self.runs.back_mut() else { return };
        if run.sacked {
            // Forgets a SACK block: at worst a needless retransmission.
            self.sacked = self.sacked.saturating_sub(bytes);
            run.sacked = false;
        }
        if run.lost {
            self.lost = self.lost.saturating_sub(bytes);
            run.lost = false;
        }
        run.sent_at = now;
        run.end = run.end.max(end);
    }

    fn bytes_of(&self, index: usize) -> u64 {
        let end = self.runs.get(index).map_or(0, |r| r.end);
        end.saturating_sub(self.start_of(index))
    }

    /// `snd.una` advances to `una`.
    #[inline]
    pub(crate) fn acked_to(&mut self, una: u64, delivered: &mut Delivered) {
        while let Some(run) = self.runs.front().copied() {
            if run.end > una {
                if una > self.start {
                    self.take_front(&run, una, delivered);
                }
                break;
            }
            self.take_front(&run, run.end, delivered);
            self.runs.pop_front();
        }
        self.start = self.start.max(una);
        self.fack = self.fack.max(una);
    }

    /// The bytes of the first run up to `end` are acknowledged.
    #[inline]
    fn take_front(&mut self, run: &Run, end: u64, delivered: &mut Delivered) {
        let bytes = end.saturating_sub(self.start);
        if run.sacked {
            self.sacked = self.sacked.saturating_sub(bytes);
        } else {
            self.deliver(run, self.start, end, delivered);
        }
        if run.lost {
            self.lost = self.lost.saturating_sub(bytes);
        }
        self.start = end;
    }

    /// `start..end` of a run that is not SACKed was delivered.
    #[inline]
    fn deliver(&mut self, run: &Run, start: u64, end: u64, delivered: &mut Delivered) {
        delivered.bytes = delivered.bytes.saturating_add(end.saturating_sub(start));
        let sent = Some(Transmission { sent_at: run.sent_at, end });
        if run.retransmitted {
            delivered.retransmitted = delivered.retransmitted.max(sent);
        } else {
            delivered.original = delivered.original.max(sent);
            delivered.reordered |= end < self.fack;
            let lowest = delivered.lowest_original.map_or(start, |s| s.min(start));
            delivered.lowest_original = Some(lowest);
        }
        self.fack = self.fack.max(end);
    }

    /// A SACK block reports `start..end`, which is inside the sent and unacknowledged bytes.
    pub(crate) fn sack(&mut self, start: u64, end: u64, delivered: &mut Delivered) {
        let start = start.max(self.start);
        let first = self.find(start);
        let Some(run) = self.runs.get(first) else { return };
        if start >= end || (run.sacked && run.end >= end) {
            return;
        }
        let Some(first) = self.split_unless_sacked(start) else { return };
        let Some(behind) = self.split_unless_sacked(end) else { return };
        for i in first..behind {
            let (from, bytes) = (self.start_of(i), self.bytes_of(i));
            let Some(run) = self.runs.get(i).copied().filter(|r| !r.sacked) else { continue };
            self.deliver(&run, from, run.end, delivered);
            self.sacked = self.sacked.saturating_add(bytes);
            if run.lost {
                self.lost = self.lost.saturating_sub(bytes);
            }
            if let Some(run) = self.runs.get_mut(i) {
                (run.sacked, run.lost) = (true, false);
            }
        }
        self.merge_sacked(first, behind);
    }

    /// Splits the run that contains `pos` there, unless it is SACKed: then it stays whole. Returns
    /// the index of the run that starts at, or is SACKed and contains, `pos`; for the end of
    /// everything sent, the index behind the last. `None` if the table is full.
    fn split_unless_sacked(&mut self, pos: u64) -> Option<usize> {
        let at = self.find(pos);
        if self.runs.get(at).is_some_and(|r| r.sacked) {
            return Some(at);
        }
        self.split(pos)
    }

    /// Splits the run that contains `pos` there. Returns the index of the run that starts at `pos`.
    fn split(&mut self, pos: u64) -> Option<usize> {
        let at = self.find(pos);
        let Some(run) = self.runs.get(at).copied() else { return Some(at) };
        if self.start_of(at) >= pos {
            return Some(at);
        }
        if self.runs.len() >= MAX_RUNS {
            return None;
        }
        self.runs.insert(at, Run { end: pos, ..run });
        at.checked_add(1)
    }

    /// Merges the SACKed runs `first..behind`, and SACKed neighbours, into one.
    fn merge_sacked(&mut self, first: usize, behind: usize) {
        let is_sacked = |i: usize| self.runs.get(i).is_some_and(|r| r.sacked);
        let low = first.checked_sub(1).filter(|i| is_sacked(*i)).unwrap_or(first);
        let high = if is_sacked(behind) { behind } else { behind.saturating_sub(1) };
        if low < high && high < self.runs.len() {
            self.runs.drain(low..high);
        }
    }

    /// Loss detection of RFC 8985 section 6.2 step 5: a run sent before `rack`, the latest delivered
    /// transmission, is lost if it was sent at least `window` ago. `on_lost` is called for each.
    pub(crate) fn mark_lost(
        &mut self,
        rack: Transmission,
        window: Duration,
        now: Instant,
        mut on_lost: impl FnMut(&LostRun),
    ) -> Losses {
        let mut losses = Losses::default();
        let mut start = self.start;
        for run in &mut self.runs {
            let bytes = run.end.saturating_sub(start);
            let from = core::mem::replace(&mut start, run.end);
            if run.sacked || run.lost {
                continue;
            }
            if (Transmission { sent_at: run.sent_at, end: run.end }) >= rack {
                if run.retransmitted {
                    continue;
                }
                // Runs sent once are in the order of their times, and a retransmission of later
                // bytes was sent later still.
                break;
            }
            // With a coarse clock a retransmission is as old as its original: it is not marked in
            // the same tick.
            let least = Duration::from_nanos(u64::from(run.retransmitted));
            let due = crate::tcp::timers::later(run.sent_at, window.max(least));
            if due > now {
                losses.next = Some(losses.next.map_or(due, |at| at.max(due)));
                continue;
            }
            run.lost = true;
            self.lost = self.lost.saturating_add(bytes);
            self.lost_from = self.lost_from.min(from);
            losses.bytes = losses.bytes.saturating_add(bytes);
            losses.retransmission |= run.retransmitted;
            on_lost(&LostRun { start: from, bytes, sent_at: run.sent_at });
        }
        losses
    }

    /// Marks the bytes before `end` as lost, unless they are SACKed. If the table is full, the run
    /// that contains `end` is marked whole.
    pub(crate) fn mark_lost_to(&mut self, end: u64, on_lost: impl FnMut(&LostRun)) {
        let behind = match self.split(end) {
            Some(at) => at,
            None => self.find(end).saturating_add(1),
        };
        self.mark_lost_if(|i, _| i < behind, on_lost);
    }

    /// Marks the bytes sent at or before `at` as lost (RFC 8985 section 6.3).
    pub(crate) fn mark_lost_sent_before(&mut self, at: Instant, on_lost: impl FnMut(&LostRun)) {
        self.mark_lost_if(|_, run| run.sent_at <= at, on_lost);
    }

    /// Marks everything as lost that is not SACKed.
    pub(crate) fn mark_all_lost(&mut self, on_lost: impl FnMut(&LostRun)) {
        self.mark_lost_if(|_, _| true, on_lost);
    }

    fn mark_lost_if(
        &mut self,
        is_lost: impl Fn(usize, &Run) -> bool,
        mut on_lost: impl FnMut(&LostRun),
    ) {
        let mut start = self.start;
        for (i, run) in self.runs.iter_mut().enumerate() {
            let from = core::mem::replace(&mut start, run.end);
            if run.sacked || run.lost || !is_lost(i, run) {
                continue;
            }
            let bytes = run.end.saturating_sub(from);
            run.lost = true;
            self.lost = self.lost.saturating_add(bytes);
            self.lost_from = self.lost_from.min(from);
            on_lost(&LostRun { start: from, bytes, sent_at: run.sent_at });
        }
    }

    /// The first lost bytes: the first lost run, and adjacent lost runs until the bytes exceed `enough`. One
    /// retransmitted segment may cover several runs.
    pub(crate) fn first_lost(&self, enough: u64) -> Option<(u64, u64)> {
        if self.lost == 0 {
            return None;
        }
        let first = self.find(self.lost_from);
        let index = (first..self.runs.len()).find(|i| self.runs.get(*i).is_some_and(|r| r.lost))?;
        let (start, mut end) = (self.start_of(index), self.runs.get(index)?.end);
        for run in self.runs.range(index..).skip(1).take_while(|r| r.lost) {
            if end.saturating_sub(start) > enough {
                break;
            }
            end = run.end;
        }
        Some((start, end))
    }

    /// `start..end` was retransmitted.
    pub(crate) fn retransmitted(&mut self, start: u64, end: u64, now: Instant) {
        let is_first_lost = self.first_lost(0).is_some_and(|(from, _)| from >= start);
        let first = self.split(start).unwrap_or_else(|| self.find(start));
        let behind = self.split(end).unwrap_or_else(|| self.find(end).saturating_add(1));
        for i in first..behind {
            let bytes = self.bytes_of(i);
            let Some(run) = self.runs.get_mut(i).filter(|r| !r.sacked) else { continue };
            if run.lost {
                self.lost = self.lost.saturating_sub(bytes);
            }
            (run.sent_at, run.lost, run.retransmitted) = (now, false, true);
        }
        if self.lost == 0 {
            self.lost_from = u64::MAX;
        } else if is_first_lost {
            self.lost_from = self.lost_from.max(end);
        }
        self.merge_equal(first);
    }

    /// Merges the run at `index` with the one before it if they differ in nothing but their end.
    fn merge_equal(&mut self, index: usize) {
        let Some(before) = index.checked_sub(1) else { return };
        let (Some(a), Some(b)) = (self.runs.get(before), self.runs.get(index)) else { return };
        if !a.sacked && (Run { end: b.end, ..*a }) == *b {
            self.runs.remove(before);
        }
    }

    /// Nothing counts as lost any more: the recovery was spurious.
    pub(crate) fn clear_lost(&mut self) {
        self.runs.iter_mut().for_each(|r| r.lost = false);
        self.lost = 0;
        self.lost_from = u64::MAX;
    }

    /// Discards the SACKed state: the peer has reneged.
    pub(crate) fn clear_sacked(&mut self) {
        self.runs.iter_mut().for_each(|r| r.sacked = false);
        self.sacked = 0;
        self.fack = self.start;
    }

    /// Runs in the table.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.runs.len()
    }
}

#[cfg(test)]
mod tests;
