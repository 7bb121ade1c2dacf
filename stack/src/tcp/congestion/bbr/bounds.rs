//! Bounds from losses: the long-term bound of what may be in flight, found by probing, and the
//! short-term bounds of rate and flight that the other states adapt to; and their undo.

use super::Machine;
use super::model::{INFINITE, percent};
use super::states::State;
use crate::base::Instant;
use crate::tcp::arith::div_rem;
use crate::tcp::congestion::{Lost, Sample};

/// BBR.LossThresh, percent.
const LOSS_PERCENT: u64 = 2;
/// From this many segments in flight on, a single lost segment does not end a probe.
const LONE_LOSS_SEGMENTS: u64 = 20;
/// BBR.Beta, percent.
const BETA_PERCENT: u64 = 70;
/// BBR.Headroom, percent.
const HEADROOM_PERCENT: u64 = 15;

/// The bounds; [`INFINITE`] if there is none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// BBR.bw_shortterm, bytes per second.
    pub rate_short: u64,
    /// BBR.inflight_shortterm and BBR.inflight_longterm, bytes.
    pub inflight_short: u64,
    pub inflight_long: u64,
    /// BBR.bw_probe_up_acked, BBR.probe_up_acked_per_inc, BBR.bw_probe_up_rounds.
    pub up_acked: u64,
    pub acked_per_step: u64,
    pub up_rounds: u32,
}

impl Bounds {
    pub(super) fn new() -> Bounds {
        Bounds {
            rate_short: INFINITE,
            inflight_short: INFINITE,
            inflight_long: INFINITE,
            up_acked: 0,
            acked_per_step: INFINITE,
            up_rounds: 0,
        }
    }

    /// ResetShortTermModel.
    pub(super) fn reset_short(&mut self) {
        (self.rate_short, self.inflight_short) = (INFINITE, INFINITE);
    }
}

/// Loss recovery in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Recovery {
    #[default]
    None,
    Fast,
    Timeout,
}

/// Losses of the current round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LossRound {
    /// BBR.is_loss_in_round.
    pub is_lossy: bool,
    pub recovery: Recovery,
    /// Discontiguous ranges lost in this and in the last round.
    ranges: u32,
    pub ranges_in_last: u32,
    /// The end of the last range.
    end: u64,
}

/// Delivery signals of the current loss round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latest {
    /// BBR.bw_latest, bytes per second.
    pub rate: u64,
    /// BBR.inflight_latest, bytes.
    pub in_flight: u64,
    /// BBR.loss_round_delivered: the round ends with the first ACK of bytes that were sent when
    /// C.delivered was at least this.
    end: u64,
    /// BBR.loss_round_start.
    pub is_round_start: bool,
}

/// The state before losses, to be restored if they were spurious.
#[derive(Clone, Copy, Debug)]
pub(super) struct Undo {
    /// Startup or Up, if losses ended it.
    pub state: Option<State>,
    rate_short: u64,
    inflight_short: u64,
    inflight_long: u64,
}

impl Undo {
    pub(super) fn new() -> Undo {
        Undo { state: None, rate_short: 0, inflight_short: 0, inflight_long: 0 }
    }
}

impl Machine {
    /// UpdateLatestDeliverySignals.
    pub(super) fn update_latest(&mut self, s: &Sample) {
        self.latest.rate = self.latest.rate.max(s.rate);
        self.latest.in_flight = self.latest.in_flight.max(s.delivered);
        self.latest.is_round_start = s.prior_delivered.is_some_and(|p| p >= self.latest.end);
        if self.latest.is_round_start {
            self.latest.end = s.total_delivered;
            self.loss.ranges_in_last = core::mem::take(&mut self.loss.ranges);
        }
    }

    /// AdvanceLatestDeliverySignals.
    pub(super) fn advance_latest(&mut self, s: &Sample) {
        if self.latest.is_round_start {
            (self.latest.rate, self.latest.in_flight) = (s.rate, s.delivered);
        }
    }

    /// ResetCongestionSignals.
    pub(super) fn reset_congestion_signals(&mut self) {
        self.loss.is_lossy = false;
        (self.latest.rate, self.latest.in_flight) = (0, 0);
    }

    /// AdaptLowerBoundsFromCongestion, once per round.
    pub(super) fn adapt_short_term(&mut self) {
        if !self.latest.is_round_start {
            return;
        }
        let by_marks = self.marked_inflight_bound();
        if self.loss.is_lossy && !self.state.is_accelerating() {
            let bounds = &mut self.bounds;
            if bounds.rate_short == INFINITE {
                bounds.rate_short = self.max_rate.get();
            }
            if bounds.inflight_short == INFINITE {
                bounds.inflight_short = self.window.cwnd;
            }
            bounds.rate_short = self.latest.rate.max(percent(bounds.rate_short, BETA_PERCENT));
            bounds.inflight_short =
                self.latest.in_flight.max(percent(bounds.inflight_short, BETA_PERCENT));
        }
        if !self.state.is_accelerating() {
            self.bounds.inflight_short = self.bounds.inflight_short.min(by_marks);
        }
        self.loss.is_lossy = false;
        self.marks.is_in_round = false;
    }

    /// NoteLoss.
    pub(super) fn note_loss(&mut self) {
        if !self.loss.is_lossy {
            self.latest.end = self.delivered;
            self.save_state();
        }
        self.loss.is_lossy = true;
    }

    /// HandleLostPacket.
    pub(super) fn handle_lost(&mut self, lost: &Lost) {
        self.note_loss();
        if lost.start != self.loss.end || self.loss.ranges == 0 {
            self.loss.ranges = self.loss.ranges.saturating_add(1);
        }
        self.loss.end = lost.start.saturating_add(lost.bytes);
        if self.cycle.is_probe_sample && self.is_too_high(lost.lost, lost.tx_in_flight) {
            let in_flight = inflight_at_loss(lost);
            let in_flight = (!lost.is_app_limited).then_some(in_flight);
            self.handle_too_high(in_flight, lost.now);
        }
    }

    /// IsInflightTooHigh. A single lost segment is tolerated with [`LONE_LOSS_SEGMENTS`] or more in
    /// flight.
    pub(super) fn is_too_high(&self, lost: u64, tx_in_flight: u64) -> bool {
        let is_small = tx_in_flight < self.window.mss.saturating_mul(LONE_LOSS_SEGMENTS);
        let lone = if is_small { 0 } else { self.window.mss };
        lost > percent(tx_in_flight, LOSS_PERCENT).max(lone)
    }

    /// HandleInflightTooHigh. `in_flight`: `None` if the sample was application-limited.
    pub(super) fn handle_too_high(&mut self, in_flight: Option<u64>, now: Instant) {
        self.cycle.was_too_high = true;
        self.cycle.is_probe_sample = false;
        if let Some(in_flight) = in_flight {
            self.bounds.inflight_long = in_flight.max(self.least_long_term());
        }
        if self.state == State::Up {
            self.undo.state = Some(State::Up);
            self.start_down(now);
        }
    }

    /// The lower bound of `inflight_long` after losses: BBR.Beta of the target, which is not below three send quanta
    /// (see the module).
    fn least_long_term(&self) -> u64 {
        percent(self.inflight(100).min(self.window.cwnd), BETA_PERCENT)
    }

    /// The path is congested: Startup and a probe for bandwidth end.
    pub(super) fn end_acceleration(&mut self, now: Instant) {
        match self.state {
            State::Startup => self.full.was_reached = true,
            State::Up => {
                self.cycle.was_too_high = true;
                self.cycle.is_probe_sample = false;
                self.bounds.inflight_long = self.latest.in_flight.max(self.least_long_term());
                self.start_down(now);
            }
            _ => {}
        }
    }

    /// The second part of AdaptLongTermModel: without too many losses the bound rises.
    pub(super) fn raise_long_term(&mut self, s: &Sample) {
        if self.is_too_high(s.lost, s.tx_in_flight)
            || self.is_marked_too_high(s)
            || self.bounds.inflight_long == INFINITE
        {
            return;
        }
        self.bounds.inflight_long = self.bounds.inflight_long.max(s.tx_in_flight);
        if self.state == State::Up {
            self.probe_upward(s);
        }
    }

    /// RaiseInflightLongtermSlope: the steps of a round double.
    pub(super) fn raise_slope(&mut self) {
        let growth = 1u64 << self.bounds.up_rounds.min(30);
        self.bounds.up_rounds = self.bounds.up_rounds.saturating_add(1).min(30);
        self.bounds.acked_per_step = div_rem(self.window.cwnd, growth).0.max(self.window.mss);
    }

    /// ProbeInflightLongtermUpward.
    fn probe_upward(&mut self, s: &Sample) {
        if !s.is_cwnd_limited || self.window.cwnd < self.bounds.inflight_long {
            return;
        }
        let acked = self.bounds.up_acked.saturating_add(s.newly_acked);
        let (steps, rest) = div_rem(acked, self.bounds.acked_per_step);
        self.bounds.up_acked = rest;
        let growth = steps.saturating_mul(self.window.mss);
        self.bounds.inflight_long = self.bounds.inflight_long.saturating_add(growth);
        if self.rounds.is_start {
            self.raise_slope();
        }
    }

    /// InflightWithHeadroom.
    pub(super) fn inflight_with_headroom(&self) -> u64 {
        let long = self.bounds.inflight_long;
        if long == INFINITE {
            return INFINITE;
        }
        let headroom = percent(long, HEADROOM_PERCENT).max(self.window.mss);
        long.saturating_sub(headroom).max(self.min_pipe_cwnd())
    }

    /// BoundCwndForModel.
    pub(super) fn cwnd_bound(&self) -> u64 {
        let long = match self.state {
            State::Cruise | State::ProbeRtt => self.inflight_with_headroom(),
            state if state.is_probe_bw() => self.bounds.inflight_long,
            _ => INFINITE,
        };
        long.min(self.bounds.inflight_short).max(self.min_pipe_cwnd())
    }

    /// SaveStateUponLoss.
    pub(super) fn save_state(&mut self) {
        self.save_cwnd();
        self.undo = Undo {
            state: None,
            rate_short: self.bounds.rate_short,
            inflight_short: self.bounds.inflight_short,
            inflight_long: self.bounds.inflight_long,
        };
    }

    /// HandleSpuriousLossDetection.
    pub(super) fn undo_losses(&mut self) {
        self.restore_cwnd();
        self.loss.is_lossy = false;
        self.full.reset(0);
        let (bounds, undo) = (&mut self.bounds, self.undo);
        bounds.rate_short = bounds.rate_short.max(undo.rate_short);
        bounds.inflight_short = bounds.inflight_short.max(undo.inflight_short);
        bounds.inflight_long = bounds.inflight_long.max(undo.inflight_long);
        self.undo = Undo::new();
        match undo.state {
            Some(State::Startup) if self.state != State::Startup => {
                self.full.was_reached = false;
                if self.state != State::ProbeRtt {
                    self.state = State::Startup;
                }
            }
            Some(State::Up) if !matches!(self.state, State::Up | State::ProbeRtt) => {
                self.start_refill();
            }
            _ => {}
        }
    }
}

/// InflightAtLoss: the flight at which losses crossed the threshold, within the run that was lost.
fn inflight_at_loss(lost: &Lost) -> u64 {
    let before = lost.tx_in_flight.saturating_sub(lost.bytes);
    let lost_before = lost.lost.saturating_sub(lost.bytes);
    let tolerated = percent(before, LOSS_PERCENT).saturating_sub(lost_before);
    let (prefix, _) = div_rem(tolerated.saturating_mul(100), 100 - LOSS_PERCENT);
    before.saturating_add(prefix)
}
