//! netperf's way of saying how sure a figure is: the test is repeated until the confidence interval
//! of each mean is as narrow as was asked for, or the most repetitions are reached.
//!
//! The width of an interval is relative to its mean: `2 × t(n−1) × sqrt(variance ÷ (n−1)) ÷ mean`,
//! with the population's variance and Student's t, as netperf computes it.

/// Student's t at 95 %, for 1 to 30 degrees of freedom.
const T95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];
/// Student's t at 99 %.
const T99: [f64; 30] = [
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012,
    2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845, 2.831, 2.819, 2.807, 2.797, 2.787, 2.779,
    2.771, 2.763, 2.756, 2.750,
];
/// Repetitions at least and at most, whatever is asked for.
pub const RUNS: (usize, usize) = (3, 30);

/// How often a test is done and how sure its result is to be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Goal {
    /// 95 or 99 percent; [`Level::None`] does the test once.
    pub level: Level,
    /// The interval's full width as a part of the mean: 0.05 is ±2.5 %.
    pub width: f64,
    /// Repetitions at least.
    pub min: usize,
    /// Repetitions at most.
    pub max: usize,
}

/// The confidence level of the interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// No confidence interval.
    None,
    /// 95 %.
    P95,
    /// 99 %.
    P99,
}

impl Level {
    /// The level in percent.
    pub fn percent(self) -> u32 {
        match self {
            Level::None => 0,
            Level::P95 => 95,
            Level::P99 => 99,
        }
    }
}

impl Goal {
    /// One run.
    pub fn once() -> Goal {
        Goal { level: Level::None, width: 0.0, min: 1, max: 1 }
    }

    /// From netperf's -i (most, least) and -I (percent, width in percent), of which either or both
    /// are given.
    ///
    /// # Errors
    /// Another level than 95 and 99.
    pub fn from_options(
        runs: Option<(usize, usize)>,
        interval: Option<(u32, Option<f64>)>,
    ) -> Result<Goal, String> {
        let (max, min) = match (runs, interval) {
            (None, None) => return Ok(Goal::once()),
            (None, Some(_)) => (10, 3),
            (Some((max, min)), _) => (max.max(min), min),
        };
        let level = match interval.map(|i| i.0) {
            Some(95) => Level::P95,
            None | Some(99) => Level::P99,
            Some(other) => return Err(format!("{other} % is neither 95 nor 99")),
        };
        let width = interval.and_then(|i| i.1).map_or(0.05, |percent| percent / 100.0);
        let bounded = |n: usize| n.clamp(RUNS.0, RUNS.1);
        Ok(Goal { level, width, min: bounded(min), max: bounded(max) })
    }

    fn t(&self, n: usize) -> f64 {
        let table = if self.level == Level::P95 { &T95 } else { &T99 };
        n.checked_sub(2).and_then(|i| table.get(i)).copied().unwrap_or(f64::INFINITY)
    }
}

/// The values of one figure, a value per run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Values(Vec<f64>);

impl Values {
    /// Adds the value of one more run.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// How many there are.
    pub fn runs(&self) -> usize {
        self.0.len()
    }

    /// Their mean.
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len().max(1) as f64
    }

    /// The full width of the interval as a part of the mean; 0 where all values are the same,
    /// infinite with a single one.
    pub fn width(&self, goal: &Goal) -> f64 {
        let n = self.0.len();
        if n < 2 {
            return f64::INFINITY;
        }
        let mean = self.mean();
        let variance = self.0.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        if variance == 0.0 {
            return 0.0;
        }
        (2.0 * goal.t(n) * (variance / (n - 1) as f64).sqrt() / mean).abs()
    }
}

/// Whether the runs are enough.
pub fn is_enough(goal: &Goal, runs: usize, figures: &[&Values]) -> bool {
    runs >= goal.min && (runs >= goal.max || figures.iter().all(|f| f.width(goal) <= goal.width))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(of: &[f64]) -> Values {
        Values(of.to_vec())
    }

    #[test]
    fn options_are_bounded_and_complete_each_other() {
        let goal = |runs, interval| Goal::from_options(runs, interval).expect("a goal");
        assert_eq!(goal(None, None), Goal::once());
        let both = goal(Some((20, 5)), Some((95, Some(10.0))));
        assert_eq!((both.level, both.max, both.min), (Level::P95, 20, 5));
        assert!((both.width - 0.1).abs() < 1e-12);
        let only_i = goal(Some((100, 1)), None);
        assert_eq!((only_i.level, only_i.max, only_i.min), (Level::P99, 30, 3));
        assert!((only_i.width - 0.05).abs() < 1e-12);
        let only_interval = goal(None, Some((99, None)));
        assert_eq!((only_interval.max, only_interval.min), (10, 3));
        assert_eq!((goal(Some((4, 9)), None).max, goal(Some((4, 9)), None).min), (9, 9));
        assert!(Goal::from_options(None, Some((90, None))).is_err());
    }

    #[test]
    fn the_width_is_netperfs_formula() {
        let goal = Goal { level: Level::P95, width: 0.05, min: 3, max: 10 };
        // Mean 10, population variance 2/3: 2 × 4.303 × sqrt(2/3 ÷ 2) ÷ 10.
        let width = values(&[9.0, 10.0, 11.0]).width(&goal);
        assert!((width - 0.496_867).abs() < 1e-5, "{width}");
        assert_eq!(values(&[7.0, 7.0]).width(&goal), 0.0);
        assert_eq!(values(&[7.0]).width(&goal), f64::INFINITY);
    }

    #[test]
    fn runs_end_when_all_figures_are_sure_or_at_the_most() {
        let goal = Goal { level: Level::P95, width: 0.05, min: 3, max: 5 };
        let (sure, unsure) = (values(&[1.0; 3]), values(&[1.0, 2.0, 3.0]));
        assert!(is_enough(&goal, 3, &[&sure, &sure]));
        assert!(!is_enough(&goal, 3, &[&sure, &unsure]));
        assert!(!is_enough(&goal, 2, &[&sure]));
        assert!(is_enough(&goal, 5, &[&unsure]));
        assert!(is_enough(&Goal::once(), 1, &[&values(&[1.0])]));
    }
}
