//! Token buckets that limit replies to unauthenticated packets.
//!
//! A limit shared by all peers is a side channel: an attacker sends packets with a forged source that
//! consume tokens, then probes from its own address how many are left (CVE-2016-5696, CVE-2020-25705).
//! Therefore both the capacity of the bucket and the cost of a token are random.

use crate::base::{Instant, Random};

/// A token bucket with a mean rate and a maximum burst (RFC 4443 section 2.4(f)).
///
/// The capacity is drawn from half the burst to the whole burst each time the bucket fills up. A permit
/// costs from zero to two tokens, one on average.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenBucket {
    /// Time in which one token accrues; 0 if the rate is 0.
    token_ns: i64,
    /// The largest capacity: `burst` tokens, as time.
    burst_ns: i64,
    /// The present capacity, from `burst_ns / 2` to `burst_ns`.
    capacity_ns: i64,
    /// The present fill, at most `capacity_ns`; below 0 after a permit that cost more than was left.
    level_ns: i64,
    updated: Instant,
}

impl TokenBucket {
    /// Creates a full bucket. A rate of zero permits nothing.
    pub(crate) fn new(rate_per_s: u32, burst: u32) -> TokenBucket {
        const SECOND_NS: i64 = 1_000_000_000;
        let token_ns = SECOND_NS.checked_div(rate_per_s.into()).unwrap_or(0);
        let burst_ns = token_ns.saturating_mul(burst.into());
        let updated = Instant::ZERO;
        TokenBucket { token_ns, burst_ns, capacity_ns: burst_ns, level_ns: burst_ns, updated }
    }

    /// Takes a token. False if none is left.
    pub(crate) fn take(&mut self, now: Instant, random: &mut Random) -> bool {
        let elapsed_ns = i64::try_from(now.since(self.updated).as_nanos()).unwrap_or(i64::MAX);
        let level_ns = self.level_ns.saturating_add(elapsed_ns);
        self.updated = now.max(self.updated);
        if level_ns >= self.capacity_ns {
            let half_ns = self.burst_ns >> 1;
            // The capacity is never below one token.
            self.capacity_ns =
                half_ns.saturating_add(random_below(half_ns, random)).max(self.token_ns);
        }
        self.level_ns = level_ns.min(self.capacity_ns);
        let has_token = self.burst_ns > 0 && self.level_ns >= self.token_ns;
        if has_token {
            let cost_ns = random_below(self.token_ns.saturating_mul(2), random);
            self.level_ns = self.level_ns.saturating_sub(cost_ns);
        }
        has_token
    }
}

/// A random time below `ns`.
fn random_below(ns: i64, random: &mut Random) -> i64 {
    (i128::from(ns).wrapping_mul(random.number().into()) >> 32) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{KeyUse, Secrets};

    fn random() -> Random {
        Secrets::for_simulation(1).random(KeyUse::IcmpLimit)
    }

    /// How many of `asked` permits at one instant are granted.
    fn burst(b: &mut TokenBucket, r: &mut Random, s: u64, asked: usize) -> usize {
        (0..asked).filter(|_| b.take(Instant::from_millis(s * 1000), r)).count()
    }

    #[test]
    fn a_burst_passes_and_then_the_mean_rate() {
        let (mut b, mut r) = (TokenBucket::new(100, 50), random());
        let passed = burst(&mut b, &mut r, 0, 1000);
        assert!((20..=75).contains(&passed), "{passed}");
        let at = |n| Instant::from_millis(n);
        // One request per millisecond for a minute.
        let passed = (1..=60_000).filter(|n| b.take(at(*n), &mut r)).count();
        assert!((5800..=6300).contains(&passed), "{passed}");
        // A long idle time accrues one burst, not more.
        let passed = burst(&mut b, &mut r, 10_000, 1000);
        assert!((20..=75).contains(&passed), "{passed}");
    }

    #[test]
    fn the_number_of_permits_in_a_burst_is_unpredictable() {
        let (mut b, mut r) = (TokenBucket::new(1000, 50), random());
        let counts: Vec<usize> = (1..=400).map(|s| burst(&mut b, &mut r, 10 * s, 200)).collect();
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(*least < 30 && *most > 50, "{least} to {most}");
        let commonest = (0..200).map(|n| counts.iter().filter(|c| **c == n).count()).max();
        assert!(commonest < Some(40), "one count occurs {commonest:?} times in 400");
    }

    #[test]
    fn a_rate_of_zero_permits_nothing() {
        let (mut b, mut r) = (TokenBucket::new(0, 5), random());
        assert!(!b.take(Instant::from_millis(1_000_000), &mut r));
    }

    #[test]
    fn a_clock_that_steps_back_accrues_no_tokens() {
        let (mut b, mut r) = (TokenBucket::new(1, 10), random());
        while b.take(Instant::from_millis(100_000), &mut r) {}
        assert!((0..100_000).all(|n| !b.take(Instant::from_millis(n), &mut r)));
    }
}
