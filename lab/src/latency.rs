//! Latencies of transactions, as a histogram.

use std::io;
use std::time::Duration;

use hdrhistogram::Histogram;

/// From 10 ns to 10 s, to three digits.
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub fn new() -> io::Result<Latencies> {
        let histogram = Histogram::new_with_bounds(10, 10_000_000_000, 3);
        Ok(Latencies(histogram.map_err(|e| io::Error::other(e.to_string()))?))
    }

    pub fn record(&mut self, latency: Duration) {
        self.0.saturating_record(latency.as_nanos() as u64);
    }

    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// The median and the 99th percentile, in ns.
    pub fn percentiles(&self) -> [u64; 2] {
        [0.5, 0.99].map(|q| self.0.value_at_quantile(q))
    }
}
