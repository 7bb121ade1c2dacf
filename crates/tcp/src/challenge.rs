//! The rate limit on answers to segments that should not have come (RFC 5961 section 7, and the
//! ACK loops of two confused peers).

use fulmar_base::{Duration, Instant};

/// Answers per connection and second. RFC 5961 suggests 10 in 5 s; a per-connection limit leaks
/// nothing to other connections, so it may be higher.
const PER_PERIOD: u8 = 10;
const PERIOD: Duration = Duration::from_secs(1);

/// A small bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    since: Instant,
    used: u8,
}

impl Limit {
    pub(crate) const fn new() -> Limit {
        Limit { since: Instant::ZERO, used: 0 }
    }

    /// Whether one more answer may go.
    pub(crate) fn allow(&mut self, now: Instant) -> bool {
        if now.since(self.since) >= PERIOD {
            *self = Limit { since: now, used: 0 };
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
    fn ten_answers_a_second_and_no_more() {
        let mut l = Limit::new();
        let at = Instant::from_millis;
        assert_eq!((0..100).filter(|_| l.allow(at(5000))).count(), 10);
        assert!(!l.allow(at(5999)));
        assert!(l.allow(at(6000)));
    }
}
