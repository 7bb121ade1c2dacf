//! Options that benches have in common.

use crate::cpu::Placement;
use clap::ValueEnum;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// How long, and where the report goes.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Common {
    /// Finish in about 20 seconds: only the main measurements, with wider intervals (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    pub quick: bool,
    /// Time for the rounds in seconds, without the set-up
    #[arg(long, value_parser = budget)]
    pub seconds: Option<Duration>,
    /// Maximum number of rounds; each variant runs once per round
    #[arg(long, default_value_t = 200, value_parser = runs)]
    pub runs: usize,
    /// Write the figures to this file (JSON)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the report to this file (HTML)
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

impl Common {
    /// Time for the rounds: with --quick, and unless anything else is asked for.
    pub fn budget(&self, quick: Duration, full: Duration) -> Duration {
        if self.quick { quick } else { self.seconds.unwrap_or(full) }
    }

    /// Where the JSON and the page go.
    pub fn files(&self) -> (Option<&Path>, Option<&Path>) {
        (self.json.as_deref(), self.report.as_deref())
    }
}

/// Which stack is measured.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Stack {
    /// fulmar and the baselines it is compared with
    Fulmar,
    /// Only this machine's kernel
    Kernel,
    /// Both
    #[default]
    Both,
}

impl Stack {
    /// Whether fulmar's is.
    pub fn has_fulmar(self) -> bool {
        self != Stack::Kernel
    }

    /// Whether the kernel's is.
    pub fn has_kernel(self) -> bool {
        self != Stack::Fulmar
    }
}

/// A placement by its name.
///
/// # Errors
/// There is none of that name.
pub fn placement(text: &str) -> Result<Placement, String> {
    let all = [Placement::SameCpu, Placement::TwoCpus, Placement::Unpinned];
    one_of(all, |p| p.name(), &text.replace('-', "_"))
        .map_err(|_| "expected same-cpu, two-cpus or unpinned".to_owned())
}

/// A switch by its name.
///
/// # Errors
/// It is neither.
pub fn on_or_off(text: &str) -> Result<bool, String> {
    one_of([true, false], |on| if on { "on" } else { "off" }, text)
}

/// The one of this name.
///
/// # Errors
/// There is none: all names.
pub fn one_of<T: Copy>(
    all: impl IntoIterator<Item = T>,
    name: impl Fn(T) -> &'static str,
    text: &str,
) -> Result<T, String> {
    let all: Vec<T> = all.into_iter().collect();
    all.iter().copied().find(|one| name(*one) == text).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|one| name(*one)).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// Reads a number from `least` to `most`.
pub fn within<T>(
    least: T,
    most: T,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Copy + Send + Sync + 'static,
{
    move |text: &str| {
        let number = text.parse().ok().filter(|n| (least..=most).contains(n));
        number.ok_or_else(|| format!("expected a number from {least} to {most}"))
    }
}

/// Reads a number of rounds. The intervals' ranks are exact up to a thousand.
///
/// # Errors
/// It is none.
pub fn runs(text: &str) -> Result<usize, String> {
    within(1, 1000)(text)
}

/// Reads a number of seconds above zero, with decimals, at most a year.
///
/// # Errors
/// It is none.
pub fn budget(text: &str) -> Result<Duration, String> {
    const YEAR: f64 = 365.0 * 86_400.0;
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= YEAR => Ok(Duration::from_secs_f64(s)),
        Ok(0.0) => Err("expected more than 0 seconds".to_owned()),
        _ => Err("expected a number of seconds, such as 0.5".to_owned()),
    }
}

/// The given values, or else the default.
pub fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

/// Options as a command line gives them, for tests.
#[cfg(test)]
pub(crate) fn parsed<T: clap::Args>(line: &str) -> Result<T, String> {
    let words = std::iter::once("bench").chain(line.split_whitespace());
    let matches = T::augment_args(clap::Command::new("bench")).try_get_matches_from(words);
    matches.and_then(|m| T::from_arg_matches(&m)).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_outside_is_answered_with_what_would_do() {
        let read = within(1u64, 16);
        assert_eq!((read("1"), read("16")), (Ok(1), Ok(16)));
        for text in ["0", "17", "-1", "1.5", "", "99999999999999999999", "x"] {
            assert_eq!(read(text), Err("expected a number from 1 to 16".to_owned()), "{text}");
        }
        assert!(runs("0").is_err() && runs("1000").is_ok());
        assert_eq!(budget("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "x", "-1", "NaN", "inf", "1e99"] {
            assert!(budget(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_that_there_is_not_is_answered_with_those_that_there_are() {
        assert_eq!(placement("two-cpus"), Ok(Placement::TwoCpus));
        assert!(placement("three").unwrap_err().contains("same-cpu, two-cpus or unpinned"));
        assert_eq!((on_or_off("on"), on_or_off("off")), (Ok(true), Ok(false)));
        assert!(on_or_off("maybe").unwrap_err().contains("on, off"));
    }

    #[test]
    fn quick_and_seconds_exclude_each_other_and_both_are_bounds() {
        let budget = |line: &str| {
            let common: Common = parsed(line).expect(line);
            common.budget(Duration::from_secs(8), Duration::from_secs(60)).as_secs()
        };
        assert_eq!((budget(""), budget("--quick"), budget("--seconds 5")), (60, 8, 5));
        assert!(parsed::<Common>("--quick --seconds 5").is_err());
        assert!(parsed::<Common>("--runs 0").is_err());
    }
}
