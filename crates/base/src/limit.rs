//! Token buckets for what strangers can make us send.
//!
//! A limit that all peers share can be counted with: a stranger sends what takes tokens in another's
//! name, then asks in its own whether any are left (CVE-2016-5696, CVE-2020-25705). So neither the
//! number of tokens in a full bucket nor what an answer costs is the same twice.

use crate::{Instant, Random};

/// Lets up to about `burst` through at once and `rate` per second over time (RFC 4443 section 2.4(f)).
///
/// A bucket that is full holds from half of `burst` to all of it, drawn each time it fills; what is taken
/// costs from nothing to two tokens, one on average.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    /// Time that one token costs on average; 0: there are none.
    cost_ns: i64,
    /// Time that the fullest bucket is worth.
    most_ns: i64,
    /// Time that this bucket is worth when it is full: half of `most_ns` or more.
    full_ns: i64,
    /// Time saved up, at most `full_ns`; below 0 after a dear token.
    saved_ns: i64,
    filled: Instant,
}

impl TokenBucket {
    /// A full bucket. A rate of zero lets nothing through.
    pub fn new(rate_per_s: u32, burst: u32) -> TokenBucket {
        const SECOND_NS: i64 = 1_000_000_000;
        let cost_ns = SECOND_NS.checked_div(rate_per_s.into()).unwrap_or(0);
        let most_ns = cost_ns.saturating_mul(burst.into());
        let filled = Instant::ZERO;
        TokenBucket { cost_ns, most_ns, full_ns: most_ns, saved_ns: most_ns, filled }
    }

    /// Takes a token, if there is one.
    pub fn take(&mut self, now: Instant, random: &mut Random) -> bool {
        let passed_ns = i64::try_from(now.since(self.filled).as_nanos()).unwrap_or(i64::MAX);
        let saved_ns = self.saved_ns.saturating_add(passed_ns);
        self.filled = now.max(self.filled);
        if saved_ns >= self.full_ns {
            let half_ns = self.most_ns >> 1;
            // A bucket of one token is full with one.
            self.full_ns = half_ns.saturating_add(part(half_ns, random)).max(self.cost_ns);
        }
        self.saved_ns = saved_ns.min(self.full_ns);
        let is_there = self.most_ns > 0 && self.saved_ns >= self.cost_ns;
        if is_there {
            let cost_ns = part(self.cost_ns.saturating_mul(2), random);
            self.saved_ns = self.saved_ns.saturating_sub(cost_ns);
        }
        is_there
    }
}

/// A random part of a time.
fn part(ns: i64, random: &mut Random) -> i64 {
    (i128::from(ns).wrapping_mul(random.number().into()) >> 32) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KeyUse, Secrets};

    fn random() -> Random {
        Secrets::for_simulation(1).random(KeyUse::IcmpLimit)
    }

    /// What passes of `asked` at once from a full bucket.
    fn burst(b: &mut TokenBucket, r: &mut Random, s: u64, asked: usize) -> usize {
        (0..asked).filter(|_| b.take(Instant::from_millis(s * 1000), r)).count()
    }

    #[test]
    fn about_a_burst_passes_and_then_about_the_rate() {
        let (mut b, mut r) = (TokenBucket::new(100, 50), random());
        let passed = burst(&mut b, &mut r, 0, 1000);
        assert!((20..=75).contains(&passed), "{passed}");
        let at = |n| Instant::from_millis(n);
        // Asked for each millisecond over a minute, beside what was saved.
        let passed = (1..=60_000).filter(|n| b.take(at(*n), &mut r)).count();
        assert!((5800..=6300).contains(&passed), "{passed}");
        // A long silence saves up one burst, not more.
        let passed = burst(&mut b, &mut r, 10_000, 1000);
        assert!((20..=75).contains(&passed), "{passed}");
    }

    #[test]
    fn what_passes_cannot_be_counted_with() {
        let (mut b, mut r) = (TokenBucket::new(1000, 50), random());
        let counts: Vec<usize> = (1..=400).map(|s| burst(&mut b, &mut r, 10 * s, 200)).collect();
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(*least < 30 && *most > 50, "{least} to {most}");
        let commonest = (0..200).map(|n| counts.iter().filter(|c| **c == n).count()).max();
        assert!(commonest < Some(40), "one count comes {commonest:?} times of 400");
    }

    #[test]
    fn a_rate_of_zero_lets_nothing_through() {
        let (mut b, mut r) = (TokenBucket::new(0, 5), random());
        assert!(!b.take(Instant::from_millis(1_000_000), &mut r));
    }

    #[test]
    fn a_clock_that_steps_back_gives_nothing() {
        let (mut b, mut r) = (TokenBucket::new(1, 10), random());
        while b.take(Instant::from_millis(100_000), &mut r) {}
        assert!((0..100_000).all(|n| !b.take(Instant::from_millis(n), &mut r)));
    }
}
