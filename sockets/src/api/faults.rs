//! The text form of an impaired path: `loss=1%,reorder=1%,dup=1%,corrupt=0.1%,delay=5ms,seed=7`.

use std::str::FromStr;
use std::time::Duration;

use fulmar_stack::device::impair::{Aqm, Impairments, Policer};

/// An impaired path as a text describes it, in both directions.
///
/// ```
/// use fulmar::devices::{self, FaultSpec};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// let faults: FaultSpec = "loss=1%,delay=20ms,rate=10mbit,seed=7".parse()?;
/// let device = devices::impaired(device, faults.seed, &faults.path, &faults.path);
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct FaultSpec {
    /// The impairments of packets.
    pub path: Impairments,
    /// Where the random numbers start: the same seed gives the same decisions.
    pub seed: u64,
}

impl Default for FaultSpec {
    fn default() -> FaultSpec {
        let reorder_delay = Duration::from_millis(5);
        let path = Impairments { reorder_pkts: 4, reorder_delay, ..Impairments::default() };
        FaultSpec { path, seed: 0 }
    }
}

impl FromStr for FaultSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<FaultSpec, String> {
        let mut spec = FaultSpec::default();
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("invalid fault `{part}`: expected key=value"))?;
            spec.set(key.trim(), value.trim())?;
        }
        let path = &mut spec.path;
        if path.rate_bps.is_none() && (path.aqm != Aqm::DropTail || text.contains("queue=")) {
            return Err("a queue requires a rate: add rate=10mbit".to_owned());
        }
        // Rates are rates of packets.
        let strikes = path.loss + path.reorder + path.duplicate + path.corrupt > 0.0;
        let has_bottleneck = path.rate_bps.is_some() || path.policer.is_some();
        path.cut = if strikes || has_bottleneck { 1.0 } else { 0.0 };
        Ok(spec)
    }
}

impl FaultSpec {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let path = &mut self.path;
        match key {
            "loss" => path.loss = fraction(value)?,
            "loss-run" => path.loss_run_pkts = packets(value)?.into(),
            "reorder" => path.reorder = fraction(value)?,
            "reorder-by" => path.reorder_pkts = packets(value)?,
            "dup" | "duplicate" => path.duplicate = fraction(value)?,
            "corrupt" => path.corrupt = fraction(value)?,
            "delay" => path.delay = time(value)?,
            "jitter" => path.jitter = time(value)?,
            "mtu" => path.mtu = Some(mtu(value)?),
            "rate" => path.rate_bps = Some(rate(value)?),
            "queue" => path.queue_bytes = bytes(value)?,
            "aqm" => (path.aqm, path.ecn) = aqm(value)?,
            "police" => path.policer = Some(policer(value)?),
            "seed" => self.seed = value.parse().map_err(|_| format!("invalid seed `{value}`"))?,
            _ => {
                return Err(format!(
                    "unknown fault `{key}`: expected loss, loss-run, reorder, reorder-by, dup, corrupt, delay, \
                     jitter, mtu, rate, queue, aqm, police or seed"
                ));
            }
        }
        Ok(())
    }
}

/// At least the size that each IPv4 host accepts (RFC 1122 section 3.3.2).
fn mtu(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().filter(|n| (576..=65_535).contains(n));
    bytes.ok_or_else(|| format!("invalid MTU `{text}`: expected 576-65535"))
}

/// `1%` or `0.01`.
fn fraction(text: &str) -> Result<f64, String> {
    let (number, scale) = match text.strip_suffix('%') {
        Some(number) => (number, 0.01),
        None => (text, 1.0),
    };
    let value = number.parse::<f64>().map(|n| n * scale).ok();
    let in_range = value.filter(|v| (0.0..=1.0).contains(v));
    in_range
        .ok_or_else(|| format!("invalid probability `{text}`: expected, for example, 1% or 0.01"))
}

/// A number followed by one of `units`, which are multiples of the result.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let (_, scale) =
        units.iter().find(|(unit, _)| text[digits.len()..].eq_ignore_ascii_case(unit))?;
    digits.parse::<u64>().ok()?.checked_mul(*scale)
}

/// `5ms` or `200us`, at most an hour.
fn time(text: &str) -> Result<Duration, String> {
    let us = scaled(text, &[("us", 1), ("ms", 1_000), ("s", 1_000_000)]);
    let us = us.filter(|us| *us <= 3_600_000_000);
    us.map(Duration::from_micros)
        .ok_or_else(|| format!("invalid delay `{text}`: expected, for example, 5ms or 200us"))
}

/// `10mbit`, as tc(8) writes it.
fn rate(text: &str) -> Result<u64, String> {
    let units = [("kbit", 1_000), ("mbit", 1_000_000), ("gbit", 1_000_000_000)];
    let found = scaled(text, &units).filter(|bps| *bps > 0);
    found.ok_or_else(|| {
        format!("invalid rate `{text}`: expected, for example, 500kbit, 10mbit or 1gbit")
    })
}

/// `64k`.
fn bytes(text: &str) -> Result<usize, String> {
    let found = scaled(text, &[("", 1), ("k", 1 << 10), ("m", 1 << 20)]);
    let found = found.and_then(|n| usize::try_from(n).ok()).filter(|n| *n <= 1 << 30);
    found.ok_or_else(|| format!("invalid size `{text}`: expected, for example, 65536, 64k or 1m"))
}

fn packets(text: &str) -> Result<u32, String> {
    let found = text.parse().ok().filter(|n| (1..=1000).contains(n));
    found.ok_or_else(|| format!("invalid number of packets `{text}`: expected 1-1000"))
}

/// `codel`, `codel+ecn` or `mark:1ms`.
fn aqm(text: &str) -> Result<(Aqm, bool), String> {
    match (text, text.strip_prefix("mark:")) {
        ("droptail", _) => Ok((Aqm::DropTail, false)),
        ("codel", _) => Ok((Aqm::CODEL, false)),
        ("codel+ecn", _) => Ok((Aqm::CODEL, true)),
        (_, Some(above)) => Ok((Aqm::Step { above: time(above)? }, true)),
        _ => Err(format!(
            "unknown queue management `{text}`: expected droptail, codel, codel+ecn or mark:1ms"
        )),
    }
}

/// A packet of the usual MTU on the wire.
const LEAST_BURST_BYTES: u64 = 1538;

/// `10mbit:64k`: a rate and a burst.
fn policer(text: &str) -> Result<Policer, String> {
    let (at, burst) = text.split_once(':').ok_or_else(|| {
        format!("invalid policer `{text}`: expected a rate and a burst, such as 10mbit:64k")
    })?;
    match (rate(at)?, bytes(burst)? as u64) {
        (_, burst_bytes) if burst_bytes < LEAST_BURST_BYTES => Err(format!(
            "a burst of `{burst}` bytes is smaller than a packet: raise it, for example to 64k"
        )),
        (rate_bps, burst_bytes) => Ok(Policer { rate_bps, burst_bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_fault_is_read() {
        let spec: FaultSpec =
            "loss=1%,reorder=0.02,dup=3%,corrupt=0.1%,delay=5ms,seed=7".parse().unwrap();
        assert!((spec.path.loss - 0.01).abs() < 1e-12);
        assert!((spec.path.reorder - 0.02).abs() < 1e-12);
        assert!((spec.path.duplicate - 0.03).abs() < 1e-12);
        assert!((spec.path.corrupt - 0.001).abs() < 1e-12);
        assert_eq!((spec.path.delay, spec.seed), (Duration::from_millis(5), 7));
        assert_eq!((spec.path.reorder_pkts, spec.path.cut), (4, 1.0));
    }

    #[test]
    fn every_bottleneck_is_read() {
        let text =
            "rate=10mbit,queue=64k,aqm=codel+ecn,jitter=200us,loss-run=3,reorder-by=9,mtu=1300";
        let path = text.parse::<FaultSpec>().unwrap().path;
        assert_eq!((path.rate_bps, path.queue_bytes), (Some(10_000_000), 64 << 10));
        assert_eq!((path.aqm, path.ecn), (Aqm::CODEL, true));
        assert_eq!(path.jitter, Duration::from_micros(200));
        assert_eq!((path.loss_run_pkts, path.reorder_pkts, path.mtu), (3.0, 9, Some(1300)));
        let path = "police=1gbit:1m,rate=1gbit,aqm=mark:1ms".parse::<FaultSpec>().unwrap().path;
        assert_eq!(path.policer, Some(Policer { rate_bps: 1_000_000_000, burst_bytes: 1 << 20 }));
        assert_eq!(path.aqm, Aqm::Step { above: Duration::from_millis(1) });
        assert!(path.ecn && path.cut == 1.0);
    }

    #[test]
    fn an_invalid_fault_is_named_in_the_error() {
        for (text, word) in [
            ("loss", "key=value"),
            ("mtu=575", "`575`"),
            ("lost=1%", "`lost`"),
            ("loss=101%", "`101%`"),
            ("loss=-1%", "`-1%`"),
            ("loss=NaN", "`NaN`"),
            ("delay=5", "`5`"),
            ("seed=x", "`x`"),
            ("rate=0mbit", "`0mbit`"),
            ("rate=10", "`10`"),
            ("queue=2g", "`2g`"),
            ("aqm=red", "`red`"),
            ("aqm=mark:x", "`x`"),
            ("police=1mbit", "`1mbit`"),
            ("police=1mbit:100", "`100`"),
            ("queue=64k", "rate"),
            ("aqm=codel", "rate"),
            ("loss-run=0", "`0`"),
            ("jitter=99999s", "`99999s`"),
        ] {
            let error = text.parse::<FaultSpec>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_parses_without_a_panic_to_rates_of_the_unit_interval(text in "[a-z]{0,8}=?[-0-9.%a-z,=]{0,40}") {
            if let Ok(s) = text.parse::<FaultSpec>() {
                for rate in [s.path.loss, s.path.reorder, s.path.duplicate, s.path.corrupt] {
                    prop_assert!((0.0..=1.0).contains(&rate));
                }
            }
        }
    }
}
