//! Round-trip times as ping sums them up.

use crate::format::millis;
use std::fmt;
use std::time::Duration;

/// Statistics of a run of echo requests.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    sent: u64,
    received: u64,
    min: Duration,
    max: Duration,
    sum_ns: f64,
    sum_of_squares_ns: f64,
}

impl Summary {
    /// A request went out.
    pub fn sent(&mut self) {
        self.sent += 1;
    }

    /// Its reply came back after `rtt`.
    pub fn received(&mut self, rtt: Duration) {
        self.min = if self.received == 0 { rtt } else { self.min.min(rtt) };
        self.max = self.max.max(rtt);
        self.received += 1;
        let ns = rtt.as_nanos() as f64;
        self.sum_ns += ns;
        self.sum_of_squares_ns += ns * ns;
    }

    /// Whether a reply came.
    pub fn has_replies(&self) -> bool {
        self.received > 0
    }

    fn mean_ns(&self) -> f64 {
        self.sum_ns / self.received.max(1) as f64
    }

    /// ping's "mdev": the standard deviation of all round trips, not of a sample.
    fn deviation_ns(&self) -> f64 {
        let mean_of_squares = self.sum_of_squares_ns / self.received.max(1) as f64;
        (mean_of_squares - self.mean_ns().powi(2)).max(0.0).sqrt()
    }

    /// The two closing lines, after `elapsed` in all.
    pub fn lines(&self, host: &str, elapsed: Duration) -> String {
        let lost = self.sent.saturating_sub(self.received);
        let loss = Percent(lost as f64 * 100.0 / self.sent.max(1) as f64);
        let mut text = format!(
            "--- {host} ping statistics ---\n\
             {} packets transmitted, {} received, {loss} packet loss, time {}ms\n",
            self.sent,
            self.received,
            elapsed.as_millis()
        );
        if self.has_replies() {
            let ns = |ns: f64| millis(Duration::from_nanos(ns as u64));
            text += &format!(
                "rtt min/avg/max/mdev = {}/{}/{}/{} ms\n",
                millis(self.min),
                ns(self.mean_ns()),
                millis(self.max),
                ns(self.deviation_ns())
            );
        }
        text
    }
}

/// Whole percents without decimals, others with up to six digits.
struct Percent(f64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.4}", self.0);
        write!(f, "{}%", text.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(sent: u64, rtts_ms: &[u64]) -> String {
        let mut s = Summary::default();
        (0..sent).for_each(|_| s.sent());
        rtts_ms.iter().for_each(|&ms| s.received(Duration::from_millis(ms)));
        s.lines("h", Duration::from_secs(2))
    }

    #[test]
    fn round_trips_are_summed_up_as_ping_does() {
        assert_eq!(
            of(4, &[1, 3, 5]),
            "--- h ping statistics ---\n\
             4 packets transmitted, 3 received, 25% packet loss, time 2000ms\n\
             rtt min/avg/max/mdev = 1.000/3.000/5.000/1.633 ms\n"
        );
    }

    #[test]
    fn silence_has_no_times() {
        let text = of(3, &[]);
        assert!(text.contains("0 received, 100% packet loss") && !text.contains("rtt"));
    }

    #[test]
    fn loss_keeps_its_decimals() {
        assert!(of(3, &[1, 1]).contains("33.3333% packet loss"));
        assert!(of(0, &[]).contains(" 0% packet loss"));
    }
}
