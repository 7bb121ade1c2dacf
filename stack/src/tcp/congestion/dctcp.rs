//! DCTCP (RFC 8257): the window is reduced by half of the share of marked bytes. For networks under one administration
//! whose queues mark at a low step threshold; a mark of a classic AQM needs a larger reduction (RFC 8257 section 6).
//!
//! Accurate feedback (RFC 9768) reports the share in bytes, so that the receiver's state machine of RFC 8257 section
//! 3.2, which encodes runs of marks in ECE, is not needed. With a peer that has the feedback of RFC 3168 only, the
//! share is unknown and stays one: the window is halved once per round trip, as RFC 3168 requires. Losses, time-outs
//! and growth are handled as by NewReno (section 3.5).

use super::marks::{MarkedShare, ONE};
use super::new_reno::NewReno;
use super::{Ack, Controller, Sample, Window};
use crate::base::Instant;

/// The state of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dctcp {
    reno: NewReno,
    share: MarkedShare,
    /// DCTCP.WindowEnd: the observation window ends with the first ACK of bytes that were sent when this many bytes
    /// had been delivered.
    end: u64,
}

impl Dctcp {
    pub(super) fn new(window: Window) -> Dctcp {
        Dctcp { reno: NewReno::new(window), share: MarkedShare::new(), end: 0 }
    }
}

impl Controller for Dctcp {
    const TAKES_SAMPLES: bool = true;

    #[inline]
    fn window(&self) -> &Window {
        self.reno.window()
    }

    fn window_mut(&mut self) -> &mut Window {
        self.reno.window_mut()
    }

    #[inline]
    fn on_ack(&mut self, ack: &Ack) {
        self.reno.on_ack(ack);
    }

    fn on_sample(&mut self, s: &Sample) {
        let Some(marked) = s.total_marked else { return };
        if s.prior_delivered.is_some_and(|prior| prior >= self.end) {
            self.share.end_round(s.total_delivered, marked);
            self.end = s.total_delivered;
        }
    }

    fn on_loss(&mut self) {
        self.reno.on_loss();
    }

    /// Section 3.3, step 9: cwnd = cwnd * (1 - DCTCP.Alpha / 2).
    fn on_ecn(&mut self, _now: Instant) {
        let cwnd = self.window().cwnd;
        let cut = cwnd.saturating_mul(self.share.alpha) / (2 * ONE);
        self.reno.reduce_to(cwnd.saturating_sub(cut));
    }

    fn on_timeout(&mut self) {
        self.reno.on_timeout();
    }

    fn on_undo(&mut self) {
        self.reno.on_undo();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: u64 = 100_000;

    /// Round trips of which `marked` bytes are marked.
    fn rounds(c: &mut Dctcp, count: u64, marked: u64) {
        for n in 1..=count {
            c.on_sample(&Sample {
                total_delivered: n * ROUND,
                total_marked: Some(n * marked),
                prior_delivered: Some(c.end),
                ..Sample::at(Instant::ZERO)
            });
        }
    }

    fn controller() -> Dctcp {
        let mut c = Dctcp::new(Window::new(1000, 10));
        c.window_mut().cwnd = ROUND;
        c
    }

    #[test]
    fn a_reduction_is_half_of_the_share_and_a_half_without_accurate_feedback() {
        let mut c = controller();
        c.on_sample(&Sample { total_delivered: ROUND, ..Sample::at(Instant::ZERO) });
        c.on_ecn(Instant::ZERO);
        assert_eq!(c.window().cwnd, ROUND / 2);
        let mut c = controller();
        rounds(&mut c, 200, ROUND / 10);
        c.on_ecn(Instant::ZERO);
        let expected = ROUND * 95 / 100;
        assert!(c.window().cwnd.abs_diff(expected) < 200, "{}", c.window().cwnd);
        c.on_loss();
        assert!(c.window().cwnd.abs_diff(expected / 2) < 200, "a loss halves");
    }

    #[test]
    fn alpha_changes_once_per_round_trip() {
        let mut c = controller();
        rounds(&mut c, 1, 0);
        let alpha = c.share.alpha;
        let inside = Sample {
            total_delivered: 2 * ROUND,
            total_marked: Some(ROUND),
            prior_delivered: Some(ROUND - 1),
            ..Sample::at(Instant::ZERO)
        };
        c.on_sample(&inside);
        assert_eq!(c.share.alpha, alpha);
    }
}
