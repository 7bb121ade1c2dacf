//! netperf's account of CPU: how busy all CPUs of the machine were, from `/proc/stat`.
//!
//! Utilisation is 0 to 100 percent of the *whole* machine: the average over the CPUs of everything
//! that is not idle, so that waiting for disks and time taken by the hypervisor count as busy.
//!
//! `/proc/stat` counts in ticks of 10 ms: a second of one CPU is known to a percent.

use crate::sys;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// The number of this method in results.
pub const METHOD_PROC_STAT: u32 = 8;
/// Ticks of one CPU: user, nice, system, idle, iowait, irq, softirq, steal (proc(5)). Guest time
/// is part of user time.
type Ticks = [u64; 8];
const IDLE: usize = 3;

/// The counters of all CPUs at a moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reading {
    at: Instant,
    cpus: Vec<Ticks>,
}

impl Reading {
    /// Reads the time, and `/proc/stat` too if CPU is to be measured.
    ///
    /// # Errors
    /// The file cannot be read or has no CPUs.
    pub fn take(measures_cpu: bool) -> io::Result<Reading> {
        let cpus =
            if measures_cpu { parse(&fs::read_to_string("/proc/stat")?) } else { Vec::new() };
        if measures_cpu && cpus.is_empty() {
            return Err(io::Error::other("/proc/stat has no line for a CPU"));
        }
        Ok(Reading { at: Instant::now(), cpus })
    }

    /// The difference to `later`.
    pub fn until(&self, later: &Reading) -> Usage {
        let elapsed = later.at.saturating_duration_since(self.at);
        let pairs = self.cpus.iter().zip(&later.cpus);
        let shares: Vec<[f64; 8]> = pairs.map(|(a, b)| percents(a, b)).collect();
        let mean = |of: &dyn Fn(&[f64; 8]) -> f64| {
            shares.iter().map(of).sum::<f64>() / shares.len().max(1) as f64
        };
        let peak = shares.iter().map(busy).enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
        Usage {
            elapsed,
            cpu_percent: mean(&busy),
            user_percent: mean(&|s| s[0]),
            system_percent: mean(&|s| s[2]),
            iowait_percent: mean(&|s| s[4]),
            irq_percent: mean(&|s| s[5]),
            softirq_percent: mean(&|s| s[6]),
            peak: peak.unwrap_or_default(),
        }
    }
}

fn parse(text: &str) -> Vec<Ticks> {
    let lines = text.lines().filter(|l| l.starts_with("cpu") && !l.starts_with("cpu "));
    lines.filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Ticks> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let mut ticks = Ticks::default();
    for tick in &mut ticks {
        *tick = words.next()?.parse().ok()?;
    }
    Some(ticks)
}

/// Each state's share of a CPU's time, in percent. A CPU without a tick was idle.
fn percents(before: &Ticks, after: &Ticks) -> [f64; 8] {
    let mut spent = [0.0; 8];
    for (s, (b, a)) in spent.iter_mut().zip(before.iter().zip(after)) {
        *s = a.saturating_sub(*b) as f64;
    }
    let all: f64 = spent.iter().sum();
    if all == 0.0 {
        spent[IDLE] = 100.0;
        return spent;
    }
    spent.map(|s| 100.0 * s / all)
}

fn busy(shares: &[f64; 8]) -> f64 {
    100.0 - shares[IDLE]
}

/// The difference between two readings; the percentages are of the whole machine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Usage {
    /// Wall time.
    pub elapsed: Duration,
    /// Everything but idle.
    pub cpu_percent: f64,
    /// Percent in programs.
    pub user_percent: f64,
    /// Percent in the kernel.
    pub system_percent: f64,
    /// Percent waiting for disks.
    pub iowait_percent: f64,
    /// Percent in hardware interrupts.
    pub irq_percent: f64,
    /// Percent in software interrupts.
    pub softirq_percent: f64,
    /// The busiest CPU and its load.
    pub peak: (usize, f64),
}

/// What a calibration says: the ticks of a CPU in a second. Clients take 0 for an account that is
/// not to be trusted.
pub fn rate() -> f32 {
    sys::ticks_per_second() as f32
}

/// CPUs of this machine, as `/proc/stat` shows them.
pub fn cpus() -> u32 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    u32::try_from(parse(&text).len()).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(at: Instant, text: &str) -> Reading {
        Reading { at, cpus: parse(text) }
    }

    #[test]
    fn utilisation_is_the_average_of_all_cpus_of_what_is_not_idle() {
        let start = Instant::now();
        let before = "cpu  0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 1";
        let after = "cpu  9 9 9 9 9 9 9 9\ncpu0 20 0 30 0 0 0 50 0\ncpu1 5 0 5 80 4 0 0 6 0 0\n";
        let end = start + Duration::from_secs(1);
        let usage = reading(start, before).until(&reading(end, after));
        assert_eq!(usage.elapsed, Duration::from_secs(1));
        assert!((usage.cpu_percent - 60.0).abs() < 1e-9, "{usage:?}");
        assert!((usage.user_percent - 12.5).abs() < 1e-9);
        assert!((usage.softirq_percent - 25.0).abs() < 1e-9);
        assert!((usage.iowait_percent - 2.0).abs() < 1e-9);
        assert_eq!(usage.peak.0, 0);
    }

    #[test]
    fn a_cpu_without_a_tick_was_idle_and_a_decreasing_counter_counts_as_zero() {
        let now = Instant::now();
        let a = reading(now, "cpu0 5 0 0 5 0 0 0 0\n");
        assert_eq!(a.until(&a).cpu_percent, 0.0);
        let b = reading(now, "cpu0 4 0 0 6 0 0 0 0\n");
        assert_eq!(a.until(&b).cpu_percent, 0.0);
    }

    #[test]
    fn damaged_lines_are_left_out() {
        assert!(parse("cpu0 1 2 3\ncpu1 a b c d e f g h\ncpuX\n").is_empty());
        assert_eq!(parse("cpu7 1 2 3 4 5 6 7 8\n"), [[1, 2, 3, 4, 5, 6, 7, 8]]);
    }

    #[test]
    fn this_machine_has_cpus_and_without_measuring_nothing_is_read() {
        assert!(cpus() >= 1);
        let now = Reading::take(true).expect("/proc/stat");
        assert!(!now.cpus.is_empty());
        let blind = Reading::take(false).expect("only the clock");
        assert!(blind.cpus.is_empty());
    }
}
