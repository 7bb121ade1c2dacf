//! DCTCP (RFC 8257): the window is reduced by half of the share of marked bytes. For networks of one owner whose queues
//! mark early, at a step; a mark of a queue that drops otherwise asks for more (RFC 8257 section 6).
//!
//! The share comes with accurate feedback (RFC 9768), byte by byte, so that the receiver's state machine of RFC 8257
//! section 3.2, which tells runs of marks by the echo of RFC 3168, is not needed. With a peer of RFC 3168 the share is
//! not known and stays one: the window is halved once per round trip, as RFC 3168 asks for. Losses, time-outs and growth
//! are those of NewReno (section 3.5).

use super::new_reno::NewReno;
use super::{Ack, Controller, Sample, Window};
use crate::arith::div_rem;
use fulmar_base::Instant;

/// Shares are in 2^-20.
const ONE: u64 = 1 << 20;

/// g = 1/16 (section 4.2), as a shift.
const GAIN_SHIFT: u32 = 4;

/// The state of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dctcp {
    reno: NewReno,
    /// DCTCP.Alpha: the estimated share of marked bytes.
    alpha: u64,
    /// The observation window ends when bytes are delivered that were sent after so many had been: DCTCP.WindowEnd.
    end: u64,
    /// Bytes delivered, and marked ones, before the observation window.
    delivered: u64,
    marked: u64,
}

impl Dctcp {
    /// Alpha begins at one (section 3.3): the first mark halves the window.
    pub(super) fn new(window: Window) -> Dctcp {
        Dctcp { reno: NewReno::new(window), alpha: ONE, end: 0, delivered: 0, marked: 0 }
    }

    /// Section 3.3, steps 5 to 7: Alpha = Alpha * (1 - g) + g * M.
    fn update_alpha(&mut self, delivered: u64, marked: u64) {
        let acked = delivered.saturating_sub(self.delivered).max(1);
        let ce = marked.saturating_sub(self.marked).min(acked);
        let share = div_rem(ce.saturating_mul(ONE), acked).0;
        let kept = self.alpha.saturating_sub(self.alpha >> GAIN_SHIFT);
        self.alpha = kept.saturating_add(share >> GAIN_SHIFT).min(ONE);
        (self.delivered, self.marked) = (delivered, marked);
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
            self.update_alpha(s.total_delivered, marked);
            self.end = s.total_delivered;
        }
    }

    fn on_loss(&mut self) {
        self.reno.on_loss();
    }

    /// Section 3.3, step 9: cwnd = cwnd * (1 - DCTCP.Alpha / 2).
    fn on_ecn(&mut self, _now: Instant) {
        let cwnd = self.window().cwnd;
        let cut = cwnd.saturating_mul(self.alpha) / (2 * ONE);
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

    /// A round trip of which `marked` bytes are marked.
    fn round(c: &mut Dctcp, marked: u64) {
        let total = c.delivered + ROUND;
        c.on_sample(&Sample {
            total_delivered: total,
            total_marked: Some(c.marked + marked),
            prior_delivered: Some(c.end),
            ..Sample::at(Instant::ZERO)
        });
    }

    fn controller() -> Dctcp {
        let mut c = Dctcp::new(Window::new(1000, 10));
        c.window_mut().cwnd = ROUND;
        c
    }

    #[test]
    fn alpha_follows_the_share_of_marked_bytes() {
        let mut c = controller();
        assert_eq!(c.alpha, ONE);
        (0..200).for_each(|_| round(&mut c, ROUND / 4));
        assert!(c.alpha.abs_diff(ONE / 4) < ONE / 1000, "{}", c.alpha);
        (0..300).for_each(|_| round(&mut c, 0));
        assert!(c.alpha < ONE / 10_000, "{}", c.alpha);
        (0..300).for_each(|_| round(&mut c, 2 * ROUND));
        assert!(c.alpha <= ONE && c.alpha > ONE - ONE / 1000, "more marks than bytes: {}", c.alpha);
    }

    #[test]
    fn a_reduction_is_half_of_the_share_and_a_half_without_accurate_feedback() {
        let mut c = controller();
        c.on_sample(&Sample { total_delivered: ROUND, ..Sample::at(Instant::ZERO) });
        c.on_ecn(Instant::ZERO);
        assert_eq!(c.window().cwnd, ROUND / 2);
        let mut c = controller();
        (0..200).for_each(|_| round(&mut c, ROUND / 10));
        c.on_ecn(Instant::ZERO);
        let expected = ROUND * 95 / 100;
        assert!(c.window().cwnd.abs_diff(expected) < 200, "{}", c.window().cwnd);
        c.on_loss();
        assert!(c.window().cwnd.abs_diff(expected / 2) < 200, "a loss halves");
    }

    #[test]
    fn alpha_changes_once_per_round_trip() {
        let mut c = controller();
        round(&mut c, 0);
        let alpha = c.alpha;
        let inside = Sample {
            total_delivered: 2 * ROUND,
            total_marked: Some(ROUND),
            prior_delivered: Some(ROUND - 1),
            ..Sample::at(Instant::ZERO)
        };
        c.on_sample(&inside);
        assert_eq!(c.alpha, alpha);
    }
}
