//! HyStart++ (RFC 9406): slow start ends when the round-trip time grows, before the queue of the
//! bottleneck overflows.
//!
//! The least round-trip time of a round is compared with that of the round before. Growth beyond a
//! threshold starts conservative slow start, with a quarter of the growth. After five such rounds
//! congestion avoidance begins; if the round-trip time falls again, slow start resumes.
//!
//! Deviation: an ACK counts fully, without the limit L of section 4.2, because one ACK usually
//! covers a super-segment (see `window`).

use super::Ack;

/// MIN_RTT_THRESH and MAX_RTT_THRESH (section 4.3).
const MIN_THRESHOLD_NS: u64 = 4_000_000;
const MAX_THRESHOLD_NS: u64 = 16_000_000;
/// MIN_RTT_DIVISOR.
const THRESHOLD_DIVISOR: u64 = 8;
/// N_RTT_SAMPLE.
const SAMPLES: u8 = 8;
/// CSS_GROWTH_DIVISOR.
const CONSERVATIVE_DIVISOR: u64 = 4;
/// CSS_ROUNDS.
const CONSERVATIVE_ROUNDS: u8 = 5;

/// Conservative slow start.
#[derive(Clone, Copy, Debug)]
struct Conservative {
    /// The least round-trip time that started it (cssBaselineMinRtt).
    baseline_ns: u64,
    rounds: u8,
}

/// The state of a connection's first slow start.
#[derive(Clone, Copy, Debug)]
pub(super) struct HyStart {
    /// windowEnd: the round ends when this position is acknowledged.
    round_end: u64,
    /// Least round-trip times of the last and of this round; `u64::MAX` without a sample.
    last_ns: u64,
    least_ns: u64,
    samples: u8,
    conservative: Option<Conservative>,
}

impl HyStart {
    pub(super) const fn new() -> HyStart {
        HyStart {
            round_end: 0,
            last_ns: u64::MAX,
            least_ns: u64::MAX,
            samples: 0,
            conservative: None,
        }
    }

    /// Bytes by which the window grows for an ACK (section 4.2). `None`: slow start is over.
    pub(super) fn growth(&mut self, ack: &Ack) -> Option<u64> {
        if let Some(rtt) = ack.rtt {
            self.least_ns = self.least_ns.min(crate::tcp::rtt::nanos(rtt).max(1));
            self.samples = self.samples.saturating_add(1);
            self.compare_rtt();
        }
        if ack.una >= self.round_end {
            self.begin_round(ack.snd_nxt);
        }
        match self.conservative {
            Some(c) if c.rounds >= CONSERVATIVE_ROUNDS => None,
            Some(_) => Some(ack.acked / CONSERVATIVE_DIVISOR),
            None => Some(ack.acked),
        }
    }

    fn compare_rtt(&mut self) {
        if self.samples < SAMPLES {
            return;
        }
        match self.conservative {
            None if self.last_ns != u64::MAX => {
                let threshold = self.last_ns / THRESHOLD_DIVISOR;
                let threshold = threshold.clamp(MIN_THRESHOLD_NS, MAX_THRESHOLD_NS);
                if self.least_ns >= self.last_ns.saturating_add(threshold) {
                    let baseline_ns = self.least_ns;
                    self.conservative = Some(Conservative { baseline_ns, rounds: 0 });
                }
            }
            Some(c) if self.least_ns < c.baseline_ns => self.conservative = None,
            _ => {}
        }
    }

    fn begin_round(&mut self, snd_nxt: u64) {
        self.round_end = snd_nxt;
        self.last_ns = self.least_ns;
        self.least_ns = u64::MAX;
        self.samples = 0;
        if let Some(c) = &mut self.conservative {
            c.rounds = c.rounds.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Window;
    use super::*;
    use crate::base::{Duration, Instant};

    /// Rounds with one ACK per segment of the window, each with its round-trip time.
    fn rounds(window: &mut Window, end: &mut u64, rtts_ms: &[u64]) {
        for ms in rtts_ms {
            let (una, segments) = (*end, window.cwnd / window.mss);
            *end = una + window.cwnd;
            for i in 1..=segments {
                window.slow_start(&Ack {
                    now: Instant::ZERO,
                    acked: window.mss,
                    srtt: Duration::ZERO,
                    rtt: Some(Duration::from_millis(*ms)),
                    una: una + i * window.mss,
                    snd_nxt: una + i * window.mss + window.cwnd,
                });
            }
        }
    }

    #[test]
    fn a_steady_round_trip_time_leaves_slow_start_alone() {
        let (mut w, mut end) = (Window::new(1000, 10), 0);
        rounds(&mut w, &mut end, &[40, 41, 43, 44, 42, 43]);
        assert!(w.in_slow_start());
        assert!(w.cwnd >= 640_000, "{}", w.cwnd);
    }

    #[test]
    fn a_growing_round_trip_time_ends_slow_start_after_five_conservative_rounds() {
        let (mut w, mut end) = (Window::new(1000, 10), 0);
        rounds(&mut w, &mut end, &[40, 40, 40]);
        let before = w.cwnd;
        rounds(&mut w, &mut end, &[50, 55, 60]);
        assert!(w.in_slow_start());
        // A quarter of the growth: less than two fifths in each round, instead of all.
        assert!(w.cwnd < before * 4, "{before} to {}", w.cwnd);
        rounds(&mut w, &mut end, &[60, 60, 60, 60]);
        assert!(!w.in_slow_start());
        assert_eq!(w.ssthresh, w.cwnd);
    }

    #[test]
    fn a_passing_delay_does_not_end_slow_start() {
        let (mut w, mut end) = (Window::new(1000, 10), 0);
        rounds(&mut w, &mut end, &[40, 40, 50, 51, 40, 40, 41, 40]);
        assert!(w.in_slow_start());
    }

    #[test]
    fn eight_samples_are_needed() {
        let (mut w, mut end) = (Window::new(1000, 4), 0);
        rounds(&mut w, &mut end, &[40]);
        w.cwnd = 4000;
        rounds(&mut w, &mut end, &[90]);
        assert_eq!(w.cwnd, 8000);
    }
}
