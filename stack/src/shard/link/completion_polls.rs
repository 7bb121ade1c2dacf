//! Zero-copy completions: when the last reference to shared bytes is dropped elsewhere (by a reader on
//! another stack, by a device) no event reports it, so the shard polls while some are out.

use crate::base::{Duration, Instant};

/// The delay of the first poll after a change, which a person does not notice, and the longest interval between two
/// polls. After that interval without a change an idle stack should stay idle.
const FIRST_POLL: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The time of the next poll.
#[derive(Default)]
pub(crate) struct CompletionPolls {
    poll_at: Option<Instant>,
    pause: Duration,
    /// Parts that were out at the last poll.
    out: usize,
}

impl CompletionPolls {
    /// When to poll at the latest, if parts are out.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.poll_at
    }

    /// Schedules the next poll. The remote-free list was just drained; `out` parts are still out.
    #[inline]
    pub(crate) fn plan(&mut self, now: Instant, out: usize) {
        if out > 0 || self.poll_at.is_some() {
            self.plan_next(now, out);
        }
    }

    #[inline(never)]
    fn plan_next(&mut self, now: Instant, out: usize) {
        if out == 0 {
            *self = CompletionPolls::default();
        } else if out != self.out {
            *self = CompletionPolls { poll_at: Some(now + FIRST_POLL), pause: FIRST_POLL, out };
        } else if self.poll_at.is_none_or(|at| now >= at) {
            self.pause = (self.pause + self.pause).min(LONGEST_PAUSE);
            self.poll_at = Some(now + self.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_back_off_until_a_part_is_returned() {
        let (mut completion_polls, mut now) = (CompletionPolls::default(), Instant::from_millis(1));
        let mut pauses = Vec::new();
        for _ in 0..10 {
            completion_polls.plan(now, 3);
            let next = completion_polls.next_deadline().unwrap();
            pauses.push(next.since(now));
            now = next;
        }
        assert!(pauses.is_sorted() && pauses[9] == LONGEST_PAUSE, "{pauses:?}");
        completion_polls.plan(now, 2);
        assert_eq!(completion_polls.next_deadline(), Some(now + FIRST_POLL));
        completion_polls.plan(now, 0);
        assert_eq!(completion_polls.next_deadline(), None);
    }
}
