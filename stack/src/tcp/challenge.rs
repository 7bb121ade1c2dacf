//! The rate limit on challenge ACKs (RFC 5961 section 7). It also ends ACK loops between two
//! desynchronized peers.

use crate::base::{Duration, Instant};

/// Challenge ACKs per connection and second. RFC 5961 suggests 10 in 5 s for the whole host. A
/// per-connection limit is not a side channel to other connections, so it may be higher.
const PER_PERIOD: u8 = 10;
const PERIOD: Duration = Duration::from_secs(1);

/// A fixed-window counter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChallengeLimit {
    since: Instant,
    used: u8,
}

impl ChallengeLimit {
    pub(crate) const fn new() -> ChallengeLimit {
        ChallengeLimit { since: Instant::ZERO, used: 0 }
    }

    /// Accounts for one more challenge ACK. Returns false if the limit is reached.
    pub(crate) fn allow(&mut self, now: Instant) -> bool {
        if now.since(self.since) >= PERIOD {
            *self = ChallengeLimit { since: now, used: 0 };
        }
        if self.used >= PER_PERIOD {
            return false;
        }
        self.used = self.used.saturating_add(1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_ten_challenge_acks_are_sent_per_second() {
        let mut l = ChallengeLimit::new();
        let at = Instant::from_millis;
        assert_eq!((0..100).filter(|_| l.allow(at(5000))).count(), 10);
        assert!(!l.allow(at(5999)));
        assert!(l.allow(at(6000)));
    }
}
