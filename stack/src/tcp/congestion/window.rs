//! What all window-based controllers share: cwnd, the slow start threshold and the rules of RFC
//! 5681 for slow start (the first with HyStart++), time-outs and idle periods.
//!
//! Deviation: slow start counts every acknowledged byte (RFC 3465 without the limit L), as Linux
//! does, because one ACK usually covers a super-segment.

use super::Ack;
use super::hystart::HyStart;

/// Upper bound of cwnd: above the largest scaled window, 2^30.
pub(crate) const MAX_CWND: u64 = 1 << 31;

/// The congestion window of a connection, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub cwnd: u64,
    pub ssthresh: u64,
    /// Payload of a full segment.
    pub mss: u64,
    initial_window: u64,
    hystart: HyStart,
}

impl Window {
    pub(crate) fn new(mss: u32, initial_segments: u32) -> Window {
        let mss = u64::from(mss.max(1));
        let initial_window = initial_window(mss, u64::from(initial_segments));
        Window {
            cwnd: initial_window,
            ssthresh: MAX_CWND,
            mss,
            initial_window,
            hystart: HyStart::new(),
        }
    }

    /// IW of RFC 6928, bytes.
    pub(crate) fn initial(&self) -> u64 {
        self.initial_window
    }

    #[inline]
    pub(crate) fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// See [`Congestion::set_mss`](super::Congestion::set_mss).
    pub(crate) fn set_mss(&mut self, mss: u32, initial_segments: u32) {
        let untouched = self.cwnd == self.initial_window;
        self.mss = u64::from(mss.max(1));
        self.initial_window = initial_window(self.mss, u64::from(initial_segments));
        if untouched {
            self.cwnd = self.initial_window;
        }
        self.cwnd = self.cwnd.max(self.mss);
    }

    /// Slow start (RFC 5681 section 3.1). Returns the bytes left for congestion avoidance.
    #[inline]
    pub(crate) fn slow_start(&mut self, ack: &Ack) -> u64 {
        let mut acked = ack.acked;
        if self.cwnd >= self.ssthresh {
            return acked;
        }
        if self.ssthresh == MAX_CWND {
            // The first slow start (RFC 9406 section 4.3).
            match self.hystart.growth(ack) {
                Some(bytes) => acked = bytes,
                None => {
                    self.ssthresh = self.cwnd;
                    return acked;
                }
            }
        }
        let step = acked.min(self.ssthresh.saturating_sub(self.cwnd));
        self.cwnd = self.cwnd.saturating_add(step).min(MAX_CWND);
        acked.saturating_sub(step)
    }

    /// Multiplicative decrease to `reduced`, but not below two segments (RFC 5681 section 3.1,
    /// equation 4).
    pub(crate) fn reduce_to(&mut self, reduced: u64) {
        self.ssthresh = reduced.max(self.mss.saturating_mul(2));
        self.cwnd = self.ssthresh;
    }

    /// One segment (LW of RFC 5681 section 3.1).
    pub(crate) fn collapse(&mut self) {
        self.cwnd = self.mss;
    }

    /// At most the initial window (RW of RFC 5681 section 4.1).
    pub(crate) fn restart(&mut self) {
        self.cwnd = self.cwnd.min(self.initial_window);
    }

    /// Undoes a spurious reduction (RFC 4015 section 3.2, RFC 9438 section 4.9).
    pub(crate) fn undo(&mut self, saved: &Window) {
        self.cwnd = self.cwnd.max(saved.cwnd);
        self.ssthresh = self.ssthresh.max(saved.ssthresh);
    }
}

/// IW of RFC 6928 section 2, bytes: for 10 segments min(10 MSS, max(2 MSS, 14600)).
fn initial_window(mss: u64, segments: u64) -> u64 {
    let whole = mss.saturating_mul(segments.max(1));
    let cap = mss.saturating_mul(2).max(segments.saturating_mul(1460));
    whole.min(cap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_initial_window_is_ten_segments_but_not_much_more_than_14600_bytes() {
        assert_eq!(Window::new(1448, 10).cwnd, 14_480);
        assert_eq!(Window::new(1460, 10).cwnd, 14_600);
        assert_eq!(Window::new(9000, 10).cwnd, 18_000);
    }

    #[test]
    fn slow_start_counts_every_acknowledged_byte_up_to_the_threshold() {
        let mut w = Window::new(1448, 10);
        assert_eq!(w.slow_start(&Ack::of(14_480)), 0);
        assert_eq!(w.cwnd, 28_960);
        w.ssthresh = 30_000;
        assert_eq!(w.slow_start(&Ack::of(2000)), 960);
        assert_eq!(w.cwnd, 30_000);
    }
}
