//! Numbers on the command line: an option has a least and a most value, which its error message names.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

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

/// Reads a number of seconds, with decimals, at most a year.
///
/// # Errors
/// The text is not such a number.
pub fn seconds(text: &str) -> Result<Duration, String> {
    const YEAR: f64 = 365.0 * 86_400.0;
    let number = text.parse::<f64>().ok().filter(|s| (0.0..=YEAR).contains(s));
    number
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected a number of seconds up to a year, such as 0.5".to_owned())
}

/// Reads a number of seconds above zero.
///
/// # Errors
/// The text is not such a number.
pub fn budget(text: &str) -> Result<Duration, String> {
    let given = seconds(text)?;
    if given.is_zero() { Err("expected more than 0 seconds".to_owned()) } else { Ok(given) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_have_decimals_and_a_limit() {
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for text in ["", "x", "-1", "NaN", "inf", "1e99"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_number_outside_is_answered_with_what_would_do() {
        let read = within(1u64, 16);
        assert_eq!((read("1"), read("16")), (Ok(1), Ok(16)));
        for text in ["0", "17", "-1", "1.5", "", "99999999999999999999", "x"] {
            assert_eq!(read(text), Err("expected a number from 1 to 16".to_owned()), "{text}");
        }
        assert!(budget("0").is_err() && budget("x").is_err());
        assert_eq!(budget("0.5"), Ok(Duration::from_millis(500)));
    }
}
