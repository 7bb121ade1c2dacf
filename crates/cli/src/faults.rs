//! The text form of injected faults: `loss=1%,reorder=1%,dup=1%,corrupt=0.1%,delay=5ms,seed=7`.

use std::str::FromStr;
use std::time::Duration;

/// What `--faults` asks for. Rates are fractions of packets, 0.0 to 1.0, in both directions.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FaultSpec {
    /// Packets that vanish.
    pub loss: f64,
    /// Packets that arrive after later ones.
    pub reorder: f64,
    /// Packets that arrive twice.
    pub duplicate: f64,
    /// Packets of which one bit is flipped.
    pub corrupt: f64,
    /// By how much every packet is late.
    pub delay: Duration,
    /// Where the random numbers start: the same seed gives the same decisions.
    pub seed: u64,
}

impl FromStr for FaultSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<FaultSpec, String> {
        let mut spec = FaultSpec::default();
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("`{part}` is not of the form key=value"))?;
            spec.set(key.trim(), value.trim())?;
        }
        Ok(spec)
    }
}

impl FaultSpec {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "loss" => self.loss = fraction(value)?,
            "reorder" => self.reorder = fraction(value)?,
            "dup" | "duplicate" => self.duplicate = fraction(value)?,
            "corrupt" => self.corrupt = fraction(value)?,
            "delay" => self.delay = milliseconds(value)?,
            "seed" => self.seed = value.parse().map_err(|_| format!("`{value}` is not a seed"))?,
            _ => {
                return Err(format!(
                    "`{key}` is not a fault: there are loss, reorder, dup, corrupt, delay, seed"
                ));
            }
        }
        Ok(())
    }
}

/// `1%` or `0.01`.
fn fraction(text: &str) -> Result<f64, String> {
    let (number, scale) = match text.strip_suffix('%') {
        Some(number) => (number, 0.01),
        None => (text, 1.0),
    };
    let value = number.parse::<f64>().map(|n| n * scale).ok();
    let in_range = value.filter(|v| (0.0..=1.0).contains(v));
    in_range.ok_or_else(|| format!("`{text}` is not a share: write 1% or 0.01"))
}

/// `5ms`.
fn milliseconds(text: &str) -> Result<Duration, String> {
    let number = text.strip_suffix("ms").and_then(|n| n.parse().ok());
    number.map(Duration::from_millis).ok_or_else(|| format!("`{text}` is not a delay: write 5ms"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_fault_is_read() {
        let spec: FaultSpec =
            "loss=1%,reorder=0.02,dup=3%,corrupt=0.1%,delay=5ms,seed=7".parse().unwrap();
        assert!((spec.loss - 0.01).abs() < 1e-12);
        assert!((spec.reorder - 0.02).abs() < 1e-12);
        assert!((spec.duplicate - 0.03).abs() < 1e-12);
        assert!((spec.corrupt - 0.001).abs() < 1e-12);
        assert_eq!((spec.delay, spec.seed), (Duration::from_millis(5), 7));
    }

    #[test]
    fn nonsense_is_named() {
        for (text, word) in [
            ("loss", "key=value"),
            ("lost=1%", "`lost`"),
            ("loss=101%", "`101%`"),
            ("loss=-1%", "`-1%`"),
            ("loss=NaN", "`NaN`"),
            ("delay=5", "`5`"),
            ("seed=x", "`x`"),
        ] {
            let error = text.parse::<FaultSpec>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_no_rate_leaves_the_unit_interval(text in "[a-z]{0,8}=?[-0-9.%a-z,=]{0,40}") {
            if let Ok(s) = text.parse::<FaultSpec>() {
                for rate in [s.loss, s.reorder, s.duplicate, s.corrupt] {
                    prop_assert!((0.0..=1.0).contains(&rate));
                }
            }
        }
    }
}
