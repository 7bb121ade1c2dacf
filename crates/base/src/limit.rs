//! Token buckets for what strangers can make us send.

use crate::{Duration, Instant};

/// Lets `burst` through at once and `rate` per second over time (RFC 4443 section 2.4(f)).
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    /// Time that one token costs.
    cost: Duration,
    /// Time that a full bucket is worth.
    most: Duration,
    /// Time saved up, at most `most`.
    saved: Duration,
    filled: Instant,
}

impl TokenBucket {
    /// A full bucket. A rate of zero lets nothing through.
    pub fn new(rate_per_s: u32, burst: u32) -> TokenBucket {
        let cost = Duration::from_secs(1).checked_div(rate_per_s).unwrap_or(Duration::MAX);
        let most = if rate_per_s == 0 { Duration::ZERO } else { cost.saturating_mul(burst) };
        TokenBucket { cost, most, saved: most, filled: Instant::ZERO }
    }

    /// Takes a token, if there is one.
    pub fn take(&mut self, now: Instant) -> bool {
        self.saved = self.saved.saturating_add(now.since(self.filled)).min(self.most);
        self.filled = now.max(self.filled);
        let left = self.saved.checked_sub(self.cost);
        self.saved = left.unwrap_or(self.saved);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let mut b = TokenBucket::new(10, 3);
        let at = Instant::from_millis;
        assert_eq!((0..9).filter(|_| b.take(at(5))).count(), 3);
        assert!(!b.take(at(104)));
        assert!(b.take(at(105)));
        assert!(!b.take(at(105)));
        // A long silence saves up one burst, not more.
        assert_eq!((0..9).filter(|_| b.take(at(60_000))).count(), 3);
    }

    #[test]
    fn a_rate_of_zero_lets_nothing_through() {
        let mut b = TokenBucket::new(0, 5);
        assert!(!b.take(Instant::from_millis(1_000_000)));
    }

    #[test]
    fn a_clock_that_steps_back_gives_nothing() {
        let mut b = TokenBucket::new(1000, 1);
        assert!(b.take(Instant::from_millis(100)));
        assert!(!b.take(Instant::from_millis(50)));
        assert!(!b.take(Instant::from_millis(100)));
        assert!(b.take(Instant::from_millis(101)));
    }
}
