//! The response to marks under accurate feedback (RFC 9768): that of Google's BBR version 3 for Linux, since the draft
//! leaves it open. It responds to the share of marked bytes, as DCTCP does, and is meant for queues with a low step
//! threshold. Such queues are on short paths: with a round-trip time above [`MAX_RTT_NS`] a mark is treated as that of
//! a classic AQM (RFC 3168).

use super::Machine;
use super::model::{INFINITE, percent};
use super::states::State;
use crate::tcp::congestion::Sample;
use crate::tcp::congestion::marks::{MarkedShare, ONE};

/// ecn_factor = 1/3: how much of the share a bound is cut by.
const FACTOR_DIVISOR: u64 = 3;
/// ecn_thresh: beyond this share there is too much in flight, percent.
const THRESHOLD_PERCENT: u64 = 50;
/// ecn_max_rtt_us.
const MAX_RTT_NS: u64 = 5_000_000;
/// full_ecn_cnt: rounds beyond the threshold that end Startup.
const STARTUP_ROUNDS: u8 = 2;

/// ECN state of the controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    /// Feedback is accurate, and the path was short once.
    pub is_eligible: bool,
    /// ecn_alpha.
    share: MarkedShare,
    /// ecn_in_round.
    pub is_in_round: bool,
    /// Rounds of Startup in a row beyond the threshold.
    startup_rounds: u8,
}

impl Marks {
    pub(super) fn new() -> Marks {
        Marks {
            is_eligible: false,
            share: MarkedShare::new(),
            is_in_round: false,
            startup_rounds: 0,
        }
    }

    /// A bound of the flight, cut by alpha * ecn_factor.
    pub(super) fn cut(&self, inflight: u64) -> u64 {
        let scaled = (inflight >> 20).saturating_mul(self.share.alpha);
        let rest = (inflight & (ONE - 1)).saturating_mul(self.share.alpha) >> 20;
        inflight.saturating_sub(scaled.saturating_add(rest) / FACTOR_DIVISOR)
    }
}

impl Machine {
    /// Once per ACK, after the rounds are updated.
    pub(super) fn update_marks(&mut self, s: &Sample) {
        let Some(marked) = s.total_marked else { return };
        self.marks.is_eligible |= self.min_rtt.ns <= MAX_RTT_NS;
        self.marks.is_in_round |= s.newly_marked > 0;
        if self.marks.is_eligible && self.rounds.is_start {
            let share = self.marks.share.end_round(s.total_delivered, marked);
            self.check_startup_marks(share);
        }
    }

    /// Startup ends after two rounds of which at least half was marked.
    fn check_startup_marks(&mut self, share: u64) {
        if self.state != State::Startup || self.full.was_reached {
            return;
        }
        let is_high = share >= percent(ONE, THRESHOLD_PERCENT);
        self.marks.startup_rounds =
            if is_high { self.marks.startup_rounds.saturating_add(1) } else { 0 };
        if self.marks.startup_rounds >= STARTUP_ROUNDS {
            self.full.was_reached = true;
            self.bounds.inflight_long = self.bdp().max(self.latest.in_flight);
        }
    }

    /// The part of IsInflightTooHigh that marks decide.
    pub(super) fn is_marked_too_high(&self, s: &Sample) -> bool {
        self.marks.is_eligible && s.marked > percent(s.delivered, THRESHOLD_PERCENT)
    }

    /// The short-term bound of the flight after a round with marks: no bound without any.
    pub(super) fn marked_inflight_bound(&self) -> u64 {
        if !self.marks.is_eligible || !self.marks.is_in_round {
            return INFINITE;
        }
        let bound = match self.bounds.inflight_short {
            INFINITE => self.window.cwnd,
            bytes => bytes,
        };
        self.marks.cut(bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_cut_by_a_third_of_the_share() {
        let mut m = Marks::new();
        assert_eq!(m.cut(3_000_000), 2_000_000);
        for round in 1..300u64 {
            m.share.end_round(round * 1000, round * 250);
        }
        assert!(m.share.alpha.abs_diff(ONE / 4) < ONE / 1000);
        assert!(m.cut(1200).abs_diff(1100) <= 1);
        assert!(m.cut(u64::MAX >> 1) < u64::MAX >> 1);
    }
}
