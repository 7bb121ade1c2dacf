//! Numbers on the command line: every option has a least and a most, and says them.

use crate::seconds;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// Rounds of a bench at most: the intervals' ranks are exact up to here.
const MOST_RUNS: usize = 1000;

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
        number.ok_or_else(|| format!("give a number from {least} to {most}"))
    }
}

/// Reads a number of rounds.
pub fn runs(text: &str) -> Result<usize, String> {
    within(1, MOST_RUNS)(text)
}

/// Reads the seconds that something may take, which takes some.
pub fn budget(text: &str) -> Result<Duration, String> {
    let given = seconds(text)?;
    if given.is_zero() { Err("give more than 0 seconds".to_owned()) } else { Ok(given) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_outside_is_answered_with_what_would_do() {
        let read = within(1u64, 16);
        assert_eq!((read("1"), read("16")), (Ok(1), Ok(16)));
        for text in ["0", "17", "-1", "1.5", "", "99999999999999999999", "x"] {
            assert_eq!(read(text), Err("give a number from 1 to 16".to_owned()), "{text}");
        }
        assert!(runs("0").is_err() && runs("1000").is_ok());
        assert!(budget("0").is_err() && budget("x").is_err());
        assert_eq!(budget("0.5"), Ok(Duration::from_millis(500)));
    }
}
