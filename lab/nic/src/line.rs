//! One direction of the wire: when the last bit of a frame has left.

use fulmar_stack::base::{Duration, Instant};

/// Bytes of a packet on the wire in addition to its frame: preamble, check sequence and gap (IEEE 802.3).
const WIRE_OVERHEAD_BYTES: usize = 24;
/// Frames shorter than this are padded (IEEE 802.3, without the check sequence).
const SHORTEST_BYTES: usize = 60;

/// See the module's header.
pub struct Line {
    /// Bits per second, 0 for no limit.
    rate_bps: u64,
    /// When the last bit of everything sent so far has left.
    busy_until: Instant,
}

impl Line {
    pub fn new(rate_bps: u64) -> Line {
        Line { rate_bps, busy_until: Instant::ZERO }
    }

    pub fn has_rate(&self) -> bool {
        self.rate_bps > 0
    }

    /// Whether everything sent so far has left.
    pub fn is_free(&self, now: Instant) -> bool {
        self.busy_until <= now
    }

    /// When everything sent so far has left.
    pub fn busy_until(&self) -> Instant {
        self.busy_until
    }

    /// Sends a frame, not before `at`; returns when its last bit has left. A train of packets
    /// repeats its headers.
    pub fn transmit(
        &mut self,
        at: Instant,
        bytes: usize,
        packets: usize,
        headers: usize,
    ) -> Instant {
        let start = self.busy_until.max(at);
        let on_wire = (bytes + (packets - 1) * headers).max(SHORTEST_BYTES * packets)
            + packets * WIRE_OVERHEAD_BYTES;
        self.busy_until = start + self.time(on_wire as u64);
        self.busy_until
    }

    fn time(&self, bytes: u64) -> Duration {
        if self.rate_bps == 0 {
            return Duration::ZERO;
        }
        let ns = u128::from(bytes) * 8_000_000_000 / u128::from(self.rate_bps);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_leave_at_line_rate_and_trains_repeat_their_headers() {
        let mut line = Line::new(10_000_000_000);
        let start = Instant::from_millis(1);
        // 1514 + 24 bytes at 0.8 ns each.
        assert_eq!(line.transmit(start, 1514, 1, 0).since(start).as_nanos(), 1230);
        assert_eq!(line.transmit(start, 60, 1, 0).since(start).as_nanos(), 1230 + 67);
        let mut line = Line::new(10_000_000_000);
        // Two packets of 66 + 1448 bytes.
        assert_eq!(line.transmit(start, 66 + 2896, 2, 66).since(start).as_nanos(), 2460);
        let mut free = Line::new(0);
        assert_eq!(free.transmit(start, 1514, 1, 0), start);
    }
}
