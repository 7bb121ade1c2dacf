//! Shared bytes on their way home. Whoever drops the last reference to them elsewhere (a reader on
//! another stack, a device) tells nobody, so while some are out the shard looks for them now and
//! then.

use fulmar_base::{Duration, Instant};

/// The first look after something has moved, well below what a person notices, and the longest pause
/// between two looks: then nothing has moved for so long that an idle stack should stay idle.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// When to look next.
#[derive(Default)]
pub struct Returns {
    look_at: Option<Instant>,
    pause: Duration,
    /// Parts that were out at the last look.
    out: usize,
}

impl Returns {
    /// When to look at the latest, if anything is out.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.look_at
    }

    /// A step has drained the remote-free list; so many parts are out still.
    #[inline]
    pub fn plan(&mut self, now: Instant, out: usize) {
        if out > 0 || self.look_at.is_some() {
            self.plan_next(now, out);
        }
    }

    #[inline(never)]
    fn plan_next(&mut self, now: Instant, out: usize) {
        if out == 0 {
            *self = Returns::default();
        } else if out != self.out {
            *self = Returns { look_at: Some(now + FIRST_LOOK), pause: FIRST_LOOK, out };
        } else if self.look_at.is_none_or(|at| now >= at) {
            self.pause = (self.pause + self.pause).min(LONGEST_PAUSE);
            self.look_at = Some(now + self.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_follow_each_other_at_longer_and_longer_times_until_something_has_moved() {
        let (mut returns, mut now) = (Returns::default(), Instant::from_millis(1));
        let mut pauses = Vec::new();
        for _ in 0..10 {
            returns.plan(now, 3);
            let next = returns.next_deadline().unwrap();
            pauses.push(next.since(now));
            now = next;
        }
        assert!(pauses.is_sorted() && pauses[9] == LONGEST_PAUSE, "{pauses:?}");
        returns.plan(now, 2);
        assert_eq!(returns.next_deadline(), Some(now + FIRST_LOOK));
        returns.plan(now, 0);
        assert_eq!(returns.next_deadline(), None);
    }
}
