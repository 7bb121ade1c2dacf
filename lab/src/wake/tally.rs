//! Counters of the loop of a program, and its latencies.
//!
//! Latencies are kept twice: all of them, and the 99th percentile of each **stretch** of [`STRETCH_NS`]. A virtual
//! machine that loses its CPUs for a millisecond ten times a second has more than a hundredth of its frames in those
//! gaps, so that the 99th percentile of all frames mostly measures the host. The median stretch is one without a gap:
//! it shows the latency that the program itself adds.

use std::io;

use hdrhistogram::Histogram;

/// The length of a stretch: twenty of the longest holds, and thousands of frames of a flood.
const STRETCH_NS: u64 = 10_000_000;
/// Frames that a stretch needs for its 99th percentile to mean something.
const ENOUGH: u64 = 500;
/// The most stretches that are kept: a hundred seconds.
const STRETCHES: usize = 10_000;

/// The counts.
pub struct Tally {
    pub packets: u64,
    pub sent: u64,
    latencies: Option<Latencies>,
}

struct Latencies {
    /// All, to three digits.
    all: Histogram<u64>,
    /// Those of the current stretch, to two digits: small enough to be cleared in less than a microsecond.
    stretch: Histogram<u32>,
    stretch_ends: u64,
    /// The 99th percentile of each stretch that is over.
    p99: Vec<u64>,
}

impl Tally {
    /// From 10 ns to 10 s.
    pub fn new(measures: bool) -> io::Result<Tally> {
        let latencies = measures.then(Latencies::new).transpose()?;
        Ok(Tally { packets: 0, sent: 0, latencies })
    }

    /// A latency, found at a time of any clock; both in ns.
    pub fn record(&mut self, now: u64, ns: u64) {
        if let Some(l) = &mut self.latencies {
            l.record(now, ns);
        }
    }

    /// 50, 99 and 99.9 % of all.
    pub fn quantiles(&self) -> Option<[u64; 3]> {
        let all = &self.latencies.as_ref().filter(|l| !l.all.is_empty())?.all;
        Some([0.5, 0.99, 0.999].map(|q| all.value_at_quantile(q)))
    }

    /// The median of the stretches' 99th percentiles.
    pub fn stretch_p99(&self) -> Option<u64> {
        let mut p99 = self.latencies.as_ref()?.p99.clone();
        p99.sort_unstable();
        p99.get(p99.len() / 2).copied()
    }
}

impl Latencies {
    fn new() -> io::Result<Latencies> {
        const RANGE: (u64, u64) = (10, 10_000_000_000);
        let failed = |e: hdrhistogram::CreationError| io::Error::other(e.to_string());
        Ok(Latencies {
            all: Histogram::new_with_bounds(RANGE.0, RANGE.1, 3).map_err(failed)?,
            stretch: Histogram::new_with_bounds(RANGE.0, RANGE.1, 2).map_err(failed)?,
            stretch_ends: 0,
            p99: Vec::with_capacity(STRETCHES),
        })
    }

    fn record(&mut self, now: u64, ns: u64) {
        if now >= self.stretch_ends {
            self.end_stretch(now);
        }
        self.all.saturating_record(ns);
        self.stretch.saturating_record(ns);
    }

    fn end_stretch(&mut self, now: u64) {
        if self.stretch.len() >= ENOUGH && self.p99.len() < STRETCHES {
            self.p99.push(self.stretch.value_at_quantile(0.99));
        }
        self.stretch.reset();
        self.stretch_ends = now + STRETCH_NS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 200,000 frames per second, each of which takes as long as `latency` says of its number.
    fn flow(frames: u64, latency: impl Fn(u64) -> u64) -> Tally {
        let mut tally = Tally::new(true).expect("a histogram");
        (0..frames).for_each(|n| tally.record(1 + n * 5_000, latency(n)));
        tally
    }

    fn is_about(ns: Option<u64>, expected: u64) -> bool {
        ns.is_some_and(|ns| ns.abs_diff(expected) <= expected / 50)
    }

    #[test]
    fn gaps_in_a_few_stretches_are_in_all_latencies_and_not_in_the_median_stretch() {
        // In every fourth stretch of 2,000 frames the CPU is away for a millisecond.
        let tally = flow(100_000, |n| if n % 8_000 < 200 { 1_000_000 } else { 50_000 });
        assert!(is_about(tally.quantiles().map(|q| q[1]), 1_000_000));
        assert!(is_about(tally.stretch_p99(), 50_000));
    }

    #[test]
    fn a_repeated_delay_is_in_every_stretch() {
        // One frame in fifty waits: twenty times in a stretch.
        let tally = flow(100_000, |n| if n % 50 == 0 { 90_000 } else { 10_000 });
        assert!(is_about(tally.stretch_p99(), 90_000));
    }

    #[test]
    fn stretches_with_few_frames_say_nothing() {
        let mut tally = Tally::new(true).expect("a histogram");
        (0..1000).for_each(|n| tally.record(n * 100_000, 10_000));
        assert_eq!(tally.stretch_p99(), None);
        assert!(is_about(tally.quantiles().map(|q| q[1]), 10_000));
    }
}
