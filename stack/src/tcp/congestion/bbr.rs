//! BBR version 3 (draft-ietf-ccwg-bbr), in integer arithmetic: rates in bytes per second, volumes in
//! bytes, gains in percent.
//!
//! BBR measures the path: the rate at which it delivers at most ([`model`]), and its least round-trip
//! time. It sends at that rate and keeps about two bandwidth-delay products in flight. The state
//! machine ([`states`]) probes for a higher rate from time to time, and then drains the queue. Losses
//! set bounds ([`bounds`]): while it probes, only losses above a threshold; otherwise any loss.
//!
//! Functions carry the draft's name in their description where it is another. Differences:
//! - Growth of the rate is looked for on each ACK of a round, as in Linux: see
//!   [`FullPipe::update`](model::FullPipe::update).
//! - One lost segment of 20 to 50 is not too many for a probe, although it is more than two percent: at one percent of
//!   random losses a window below 50 segments would seldom grow. Google's BBR of QUIC asks for two losses of any number
//!   (`probe_bw_full_loss_count`); but where many flows have a few segments each, a single one is a large share.
//! - After losses of a probe the long-term bound is at least 70 percent of the target, which is not below three send
//!   quanta (Google's BBR version 3 for Linux: `bbr_target_inflight`). The bandwidth-delay product alone is less than a
//!   super-segment if the round-trip time is a few microseconds.
//! - The random parts of waiting times come from a hash of time and deliveries: the engine has no
//!   randomness.
//! - The draft leaves the response to ECN open. With accurate feedback (RFC 9768) it is that of [`ecn`]. With RFC
//!   3168 a reported mark counts as a lossy round, and ends Startup and a probe for bandwidth.

mod bounds;
mod ecn;
mod model;
mod states;
#[cfg(test)]
mod tests;

use super::window::MAX_CWND;
use super::{Controller, Lost, PathModel, Sample, Window};
use crate::base::{Duration, Instant};
use crate::tcp::rtt::nanos;
use alloc::boxed::Box;
use bounds::{Bounds, Latest, LossRound, Recovery, Undo};
use core::ops::{Deref, DerefMut};
use ecn::Marks;
use model::{
    Acked, Aggregation, FullPipe, INFINITE, Jitter, MaxBandwidth, MinRtt, Rounds, percent,
};
use states::{Cycle, ProbeRtt, State};

/// 100 % less BBR.PacingMarginPercent.
const PACING_PERCENT: u64 = 99;

/// BBR.MinPipeCwnd, segments.
const MIN_PIPE_SEGMENTS: u64 = 4;

/// BBR.offload_budget is three send quanta: one in transmission, one being segmented, one unacknowledged.
const OFFLOAD_QUANTA: u64 = 3;

/// Upper bound of a send quantum, bytes.
const MAX_QUANTUM_BYTES: u64 = 64 << 10;

/// The controller of a connection. Boxed, since most connections use another algorithm.
#[derive(Clone, Debug)]
pub(crate) struct Bbr(Box<Machine>);

/// The state of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    window: Window,
    state: State,
    /// C.pacing_rate; 0 before the first ACK.
    pacing_rate: u64,
    /// BBR.bw.
    rate: u64,
    /// C.delivered at the last event.
    delivered: u64,
    rounds: Rounds,
    max_rate: MaxBandwidth,
    min_rtt: MinRtt,
    aggregation: Aggregation,
    full: FullPipe,
    cycle: Cycle,
    probe_rtt: ProbeRtt,
    /// BBR.drain_start_round.
    drain_from: u64,
    /// BBR.idle_restart.
    is_restarting: bool,
    bounds: Bounds,
    latest: Latest,
    loss: LossRound,
    marks: Marks,
    undo: Undo,
    /// BBR.prior_cwnd.
    prior_cwnd: u64,
    jitter: Jitter,
}

impl Bbr {
    pub(super) fn new(mut window: Window) -> Bbr {
        window.ssthresh = MAX_CWND;
        Bbr(Box::new(Machine {
            window,
            state: State::Startup,
            pacing_rate: 0,
            rate: 0,
            delivered: 0,
            rounds: Rounds::default(),
            max_rate: MaxBandwidth::default(),
            min_rtt: MinRtt::new(),
            aggregation: Aggregation::new(),
            full: FullPipe::default(),
            cycle: Cycle::new(),
            probe_rtt: ProbeRtt::default(),
            drain_from: 0,
            is_restarting: false,
            bounds: Bounds::new(),
            latest: Latest::default(),
            loss: LossRound::default(),
            marks: Marks::new(),
            undo: Undo::new(),
            prior_cwnd: 0,
            jitter: Jitter::default(),
        }))
    }
}

impl Deref for Bbr {
    type Target = Machine;
    fn deref(&self) -> &Machine {
        &self.0
    }
}

impl DerefMut for Bbr {
    fn deref_mut(&mut self) -> &mut Machine {
        &mut self.0
    }
}

impl Machine {
    /// UpdateModelAndState.
    fn update_model(&mut self, s: &Sample) {
        self.update_latest(s);
        self.rounds.update(s.prior_delivered, s.total_delivered);
        self.update_marks(s);
        self.max_rate.update(s);
        self.adapt_short_term();
        self.aggregation.update(&Acked {
            now: s.now,
            bytes: s.newly_acked,
            rate: self.rate,
            cwnd: self.window.cwnd,
            is_round_start: self.rounds.is_start,
            is_full: self.full.was_reached,
        });
        self.full.update(s, &self.rounds);
        self.check_startup(s);
        self.check_drain(s);
        self.update_cycle(s);
        self.min_rtt.update(s.rtt, s.now);
        self.check_probe_rtt(s);
        self.advance_latest(s);
        self.rate = self.max_rate.get().min(self.bounds.rate_short);
    }

    /// SetPacingRateWithGain: until the pipe has been full once, the rate only rises.
    fn set_pacing_rate(&mut self, gain: u64) {
        let rate = percent(percent(self.rate, gain), PACING_PERCENT);
        if rate > 0 && (self.full.was_reached || rate > self.pacing_rate) {
            self.pacing_rate = rate;
        }
    }

    /// InitPacingRate.
    fn initial_pacing_rate(&self, srtt: Duration) -> u64 {
        let ns = if srtt.is_zero() { 1_000_000 } else { nanos(srtt) };
        let bytes = self.window.initial().saturating_mul(1_000_000_000);
        percent(crate::tcp::arith::div_rem(bytes, ns).0, State::Startup.pacing_gain())
    }

    /// SetCwnd.
    fn set_cwnd(&mut self, s: &Sample) {
        let extra = self.aggregation.get();
        let gained = self.bdp_multiple(self.rate, self.state.cwnd_gain());
        let max_inflight = self.quantized(gained.saturating_add(extra));
        let grown = self.window.cwnd.saturating_add(s.newly_acked);
        if self.full.was_reached {
            self.window.cwnd = grown.min(max_inflight);
        } else if self.window.cwnd < max_inflight || s.total_delivered < self.window.initial() {
            self.window.cwnd = grown;
        }
        self.window.cwnd = self.window.cwnd.max(self.min_pipe_cwnd());
        if self.state == State::ProbeRtt {
            self.window.cwnd = self.window.cwnd.min(self.probe_rtt_cwnd());
        }
        self.window.cwnd = self.window.cwnd.min(self.cwnd_bound()).min(MAX_CWND);
    }

    /// QuantizationBudget.
    fn quantized(&self, inflight: u64) -> u64 {
        let quantum = (self.pacing_rate / 1000).min(MAX_QUANTUM_BYTES);
        let quantum = quantum.max(self.window.mss.saturating_mul(2));
        let budget = quantum.saturating_mul(OFFLOAD_QUANTA).max(self.min_pipe_cwnd());
        let growth = if self.state == State::Up { self.window.mss.saturating_mul(2) } else { 0 };
        inflight.max(budget).saturating_add(growth)
    }

    fn min_pipe_cwnd(&self) -> u64 {
        self.window.mss.saturating_mul(MIN_PIPE_SEGMENTS)
    }

    /// SaveCwnd: the last window that neither recovery nor ProbeRTT has reduced.
    fn save_cwnd(&mut self) {
        let is_reduced = self.loss.recovery != Recovery::None || self.state == State::ProbeRtt;
        let kept = if is_reduced { self.prior_cwnd } else { 0 };
        self.prior_cwnd = self.window.cwnd.max(kept);
    }

    fn restore_cwnd(&mut self) {
        self.window.cwnd = self.window.cwnd.max(self.prior_cwnd).min(MAX_CWND);
    }
}

impl Controller for Bbr {
    const TAKES_SAMPLES: bool = true;
    const USES_PRR: bool = false;

    fn window(&self) -> &Window {
        &self.window
    }

    fn window_mut(&mut self) -> &mut Window {
        &mut self.window
    }

    /// UpdateOnACK.
    fn on_sample(&mut self, s: &Sample) {
        if self.min_rtt.ns == INFINITE && !s.srtt.is_zero() {
            // The sample of the handshake.
            self.min_rtt.update(Some(s.srtt), s.now);
            self.aggregation.since = s.now;
            self.pacing_rate = self.pacing_rate.max(self.initial_pacing_rate(s.srtt));
        }
        self.delivered = s.total_delivered;
        self.update_model(s);
        let gain = self.state.pacing_gain();
        self.set_pacing_rate(gain);
        self.set_cwnd(s);
    }

    fn on_lost(&mut self, lost: &Lost) {
        self.delivered = lost.total_delivered;
        self.handle_lost(lost);
    }

    /// OnEnterFastRecovery. The first lost run has saved the state.
    fn on_loss(&mut self) {
        if !self.loss.is_lossy {
            self.save_state();
        }
        self.loss.recovery = Recovery::Fast;
    }

    /// With accurate feedback [`ecn`] responds to the share of marked bytes instead.
    fn on_ecn(&mut self, now: Instant) {
        if !self.marks.is_eligible {
            self.note_loss();
            self.end_acceleration(now);
        }
    }

    fn on_repaired_loss(&mut self) {
        self.note_loss();
    }

    fn on_recovered(&mut self) {
        if core::mem::take(&mut self.loss.recovery) != Recovery::None {
            self.restore_cwnd();
        }
    }

    /// OnEnterRTO.
    fn on_timeout(&mut self) {
        self.save_state();
        self.loss.recovery = Recovery::Timeout;
        self.window.collapse();
    }

    /// BBR keeps its model while idle.
    fn on_idle(&mut self) {}

    /// HandleRestartFromIdle.
    fn on_restart(&mut self, now: Instant) {
        self.is_restarting = true;
        self.aggregation.since = now;
        if self.state.is_probe_bw() {
            self.set_pacing_rate(100);
        } else if self.state == State::ProbeRtt {
            self.check_probe_rtt_done(now);
        }
    }

    fn on_undo(&mut self) {
        self.loss.recovery = Recovery::None;
        self.undo_losses();
    }

    fn pacing_rate(&self, srtt: Duration) -> Option<u64> {
        Some(if self.pacing_rate > 0 { self.pacing_rate } else { self.initial_pacing_rate(srtt) })
    }

    fn is_probing_rtt(&self) -> bool {
        self.state == State::ProbeRtt
    }

    fn model(&self) -> Option<PathModel> {
        Some(PathModel {
            phase: self.state.name(),
            rate: self.rate,
            min_rtt: self.min_rtt.known(),
            pacing_gain: self.state.pacing_gain(),
            cwnd_gain: self.state.cwnd_gain(),
        })
    }
}
