//! Medians with an interval that assumes nothing about the distribution, and the rule when to stop.
//!
//! The interval is made of order statistics: of n independent values the number below the true
//! median is binomial(n, 1/2), so the k-th smallest and the k-th largest enclose it with probability
//! 1 - 2 P(X < k). The largest k with at least 95 % is taken. Below six values no such k exists; the
//! whole range stands in, and [`Estimate::confidence`] says how little it promises. No resampling,
//! no seed. (Conover, Practical Nonparametric Statistics, section 3.2.)

/// A measurement stops when the half-width of its interval is under this.
pub const HALF_WIDTH_PCT: f64 = 2.5;
/// Values that a 95 % interval needs.
pub const RUNS_FOR_INTERVAL: usize = 6;
/// Stands where an interval would, of a figure that was measured once.
pub const ONE_ROUND: &str = "one round";
const WANTED: f64 = 0.95;

/// A median and the interval in which the true one lies.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    /// The middle value, or the mean of the middle two.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// How many values there were.
    pub runs: usize,
    /// With which probability the interval holds the true median: 0.95 or a little more, less only
    /// below six values.
    pub confidence: f64,
}

impl Estimate {
    /// The estimate from these values; `None` without any. Values that are not finite are left out.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let (rank, confidence) = interval_rank(n)?;
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Some(Estimate {
            median,
            low: sorted[rank - 1],
            high: sorted[n - rank],
            runs: n,
            confidence,
        })
    }

    /// Half of the interval's width, in percent of the median.
    pub fn half_width_pct(&self) -> f64 {
        if self.median == 0.0 {
            return if self.low == self.high { 0.0 } else { f64::INFINITY };
        }
        (self.high - self.low) / 2.0 / self.median.abs() * 100.0
    }

    /// The interval as text, with `decimals` decimals. One value has none, and is not made to look
    /// as if it had.
    pub fn interval(&self, decimals: usize) -> String {
        match self.runs {
            1 => ONE_ROUND.to_owned(),
            _ => format!("{:.decimals$}–{:.decimals$}", self.low, self.high),
        }
    }

    /// True when more runs are not worth their time.
    pub fn is_closed(&self) -> bool {
        self.runs >= RUNS_FOR_INTERVAL && self.half_width_pct() < HALF_WIDTH_PCT
    }
}

/// The rank k of the interval's ends, counted from either side, and its confidence.
fn interval_rank(n: usize) -> Option<(usize, f64)> {
    // P(X = i) for i = 0, 1, ...; 2^-n stays a normal number up to a thousand runs.
    let mut probability = 0.5f64.powi(i32::try_from(n).ok().filter(|&n| n > 0)?);
    let mut below = probability;
    let mut best = (1, 1.0 - 2.0 * below);
    for k in 2..=n / 2 {
        probability *= (n - k + 2) as f64 / (k - 1) as f64;
        below += probability;
        if 1.0 - 2.0 * below < WANTED {
            break;
        }
        best = (k, 1.0 - 2.0 * below);
    }
    Some((best.0, best.1.max(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_are_those_of_the_published_table() {
        // Ranks of the 95 % interval for a median, as textbooks print them.
        for (n, k) in [(6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (20, 6), (25, 8), (50, 18)] {
            assert_eq!(interval_rank(n).expect("not empty").0, k, "n = {n}");
        }
        assert!((interval_rank(10).expect("ten").1 - 0.97852).abs() < 1e-4);
        assert!(interval_rank(0).is_none());
    }

    #[test]
    fn five_values_promise_less_than_95_percent() {
        let e = Estimate::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).expect("five values");
        assert_eq!((e.median, e.low, e.high), (3.0, 1.0, 5.0));
        assert!((e.confidence - 0.9375).abs() < 1e-9);
        assert!(!e.is_closed());
    }

    #[test]
    fn one_value_has_no_interval() {
        assert_eq!(Estimate::of(&[447.85]).expect("one value").interval(2), "one round");
        assert_eq!(Estimate::of(&[1.0, 2.0]).expect("two values").interval(1), "1.0–2.0");
    }

    #[test]
    fn an_even_number_of_values_has_the_middle_of_two_as_median() {
        assert_eq!(Estimate::of(&[1.0, 2.0, 4.0, 9.0]).expect("four").median, 3.0);
    }

    #[test]
    fn six_close_values_are_enough_and_five_are_not() {
        let close = [1.0, 1.01, 1.02, 1.01, 1.0, 1.02];
        assert!(Estimate::of(&close).expect("six").is_closed());
        assert!(!Estimate::of(&close[..5]).expect("five").is_closed());
        let far = [1.0, 1.1, 0.9, 1.0, 1.0, 1.0];
        assert!(!Estimate::of(&far).expect("six").is_closed());
    }

    #[test]
    fn an_empty_or_invalid_sample_gives_no_estimate() {
        assert_eq!(Estimate::of(&[]), None);
        assert_eq!(Estimate::of(&[f64::NAN, f64::INFINITY]), None);
        assert_eq!(Estimate::of(&[f64::NAN, 2.0]).expect("one is left").runs, 1);
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_median_and_its_confidence_is_what_binomials_say(
            values in proptest::collection::vec(-1e6f64..1e6, 1..80),
        ) {
            let e = Estimate::of(&values).expect("not empty");
            prop_assert!(e.low <= e.median && e.median <= e.high);
            prop_assert_eq!(e.runs, values.len());
            prop_assert!(e.runs < RUNS_FOR_INTERVAL || e.confidence >= WANTED);
            // The model: equal numbers of values below `low` and above `high`. One rank further in would give less than
            // 95 % confidence.
            let below = values.iter().filter(|v| **v < e.low).count();
            let above = values.iter().filter(|v| **v > e.high).count();
            prop_assert_eq!(below, above);
            let n = values.len() as u64;
            if 2 * (below as u64 + 2) <= n {
                let further: f64 = (0..=below as u64 + 1).map(|i| choose(n, i)).sum();
                prop_assert!(1.0 - 2.0 * further * 0.5f64.powi(n as i32) < WANTED);
            }
        }
    }

    fn choose(n: u64, k: u64) -> f64 {
        (0..k).map(|i| (n - i) as f64 / (i + 1) as f64).product()
    }
}
