//! The state machine: Startup, Drain, the four phases of ProbeBW, ProbeRTT.
//!
//! ```text
//!   Startup --> Drain --> Down --> Cruise --> Refill --> Up --+
//!                          ^                                  |
//!                          +----------------------------------+
//!   any --> ProbeRTT --> Cruise, or Startup if the pipe was never full
//! ```

use super::Machine;
use super::bounds::Recovery;
use super::model::{INFINITE, percent, volume};
use crate::base::{Duration, Instant};
use crate::tcp::arith::div_rem;
use crate::tcp::congestion::Sample;
use crate::tcp::timers::later;

/// BBR.state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Startup,
    Drain,
    Down,
    Cruise,
    Refill,
    Up,
    ProbeRtt,
}

/// BBR.ack_phase: what ACKs tell about probing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AckPhase {
    Init,
    Refilling,
    ProbeStarting,
    ProbeFeedback,
    ProbeStopping,
}

/// BBRStartupFullLossCnt.
const STARTUP_LOSS_RANGES: u32 = 6;
/// Rounds in Drain, at most.
const DRAIN_ROUNDS: u64 = 3;
/// BBR.ProbeRTTDuration.
const PROBE_RTT_DURATION: Duration = Duration::from_millis(200);
/// T_reno_bound: rounds between two probes, at most.
const RENO_ROUNDS: u64 = 63;

impl State {
    /// Its name for display.
    pub(super) fn name(self) -> &'static str {
        match self {
            State::Startup => "startup",
            State::Drain => "drain",
            State::Down => "probe-bw-down",
            State::Cruise => "probe-bw-cruise",
            State::Refill => "probe-bw-refill",
            State::Up => "probe-bw-up",
            State::ProbeRtt => "probe-rtt",
        }
    }

    /// BBR.pacing_gain, percent.
    pub(super) fn pacing_gain(self) -> u64 {
        match self {
            State::Startup => 277,
            State::Drain => 50,
            State::Down => 90,
            State::Cruise | State::Refill | State::ProbeRtt => 100,
            State::Up => 125,
        }
    }

    /// BBR.cwnd_gain, percent.
    pub(super) fn cwnd_gain(self) -> u64 {
        match self {
            State::Up => 225,
            State::ProbeRtt => 50,
            _ => 200,
        }
    }

    /// IsInAProbeBWState.
    pub(super) fn is_probe_bw(self) -> bool {
        matches!(self, State::Down | State::Cruise | State::Refill | State::Up)
    }

    /// IsProbingBW.
    pub(super) fn is_accelerating(self) -> bool {
        matches!(self, State::Startup | State::Refill | State::Up)
    }
}

/// The cycle of ProbeBW.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cycle {
    pub ack_phase: AckPhase,
    /// BBR.is_bw_probe_sample: what is delivered now was sent while probing.
    pub is_probe_sample: bool,
    /// BBR.cycle_stamp, BBR.bw_probe_wait.
    began: Instant,
    wait: Duration,
    /// BBR.prev_probe_too_high, BBR.prev_probe_precautionary.
    pub was_too_high: bool,
    was_precautionary: bool,
}

impl Cycle {
    pub(super) fn new() -> Cycle {
        Cycle {
            ack_phase: AckPhase::Init,
            is_probe_sample: false,
            began: Instant::ZERO,
            wait: Duration::ZERO,
            was_too_high: false,
            was_precautionary: false,
        }
    }
}

/// ProbeRTT in progress.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProbeRtt {
    /// When it may end, once little is in flight.
    done_at: Option<Instant>,
    is_round_done: bool,
}

impl Machine {
    /// CheckStartupDone.
    pub(super) fn check_startup(&mut self, s: &Sample) {
        self.check_startup_losses(s);
        if self.state == State::Startup && self.full.was_reached {
            self.state = State::Drain;
            self.drain_from = self.rounds.count;
        }
    }

    /// CheckStartupHighLoss: a round in fast recovery with too many losses, in several ranges.
    fn check_startup_losses(&mut self, s: &Sample) {
        if self.state != State::Startup || self.full.was_reached {
            return;
        }
        let is_sustained = !s.has_sack
            || (self.latest.is_round_start && self.loss.ranges_in_last >= STARTUP_LOSS_RANGES);
        let is_fast = self.loss.recovery == Recovery::Fast;
        if is_fast && is_sustained && self.is_too_high(s.lost, s.tx_in_flight) {
            self.undo.state = Some(State::Startup);
            self.full.was_reached = true;
            self.bounds.inflight_long = self.bdp().max(self.latest.in_flight);
        }
    }

    /// CheckDrainDone.
    pub(super) fn check_drain(&mut self, s: &Sample) {
        let is_late = self.rounds.count > self.drain_from.saturating_add(DRAIN_ROUNDS);
        if self.state == State::Drain && (s.in_flight <= self.inflight(100) || is_late) {
            self.start_down(s.now);
        }
    }

    pub(super) fn start_down(&mut self, now: Instant) {
        self.reset_congestion_signals();
        self.bounds.acked_per_step = INFINITE;
        self.pick_wait(now);
        self.cycle.began = now;
        self.cycle.ack_phase = AckPhase::ProbeStopping;
        self.rounds.begin(self.delivered);
        self.state = State::Down;
    }

    /// PickProbeWait: two to three seconds, or up to 63 rounds.
    fn pick_wait(&mut self, now: Instant) {
        let salt = now.as_nanos() ^ self.delivered;
        self.rounds.since_probe = self.jitter.below(2, salt);
        let extra = self.jitter.below(1000, salt);
        self.cycle.wait = Duration::from_secs(2).saturating_add(Duration::from_millis(extra));
    }

    pub(super) fn start_refill(&mut self) {
        self.bounds.reset_short();
        self.bounds.up_rounds = 0;
        self.bounds.up_acked = 0;
        self.cycle.was_precautionary = false;
        self.cycle.ack_phase = AckPhase::Refilling;
        self.rounds.begin(self.delivered);
        self.state = State::Refill;
    }

    fn start_up(&mut self, s: &Sample) {
        self.cycle.is_probe_sample = true;
        self.cycle.ack_phase = AckPhase::ProbeStarting;
        self.rounds.begin(self.delivered);
        self.full.reset(s.rate);
        self.state = State::Up;
        self.raise_slope();
    }

    /// UpdateProbeBWCyclePhase.
    pub(super) fn update_cycle(&mut self, s: &Sample) {
        if !self.full.was_reached || self.adapt_long_term(s) {
            return;
        }
        match self.state {
            State::Down | State::Cruise if self.is_time_to_probe(s.now) => self.start_refill(),
            State::Down if self.is_time_to_cruise(s.in_flight) => self.state = State::Cruise,
            State::Refill if self.rounds.is_start => self.start_up(s),
            State::Up => self.update_up(s),
            _ => {}
        }
    }

    fn update_up(&mut self, s: &Sample) {
        if self.is_time_to_go_down(s) {
            self.cycle.was_too_high = false;
            self.start_down(s.now);
        }
    }

    /// The first part of AdaptLongTermModel. Returns whether it has changed the state.
    fn adapt_long_term(&mut self, s: &Sample) -> bool {
        let phase = self.cycle.ack_phase;
        if self.rounds.is_start && phase == AckPhase::ProbeStarting {
            self.cycle.ack_phase = AckPhase::ProbeFeedback;
        } else if self.rounds.is_start && phase == AckPhase::ProbeStopping && self.end_probe(s) {
            return true;
        }
        if self.cycle.is_probe_sample && self.is_marked_too_high(s) {
            let was_up = self.state == State::Up;
            self.handle_too_high((!s.is_app_limited).then_some(s.tx_in_flight), s.now);
            return was_up;
        }
        self.raise_long_term(s);
        false
    }

    /// A round trip after probing has stopped: its last samples have come. A precautionary probe that
    /// caused no losses is followed by another at once.
    fn end_probe(&mut self, s: &Sample) -> bool {
        self.cycle.is_probe_sample = false;
        self.cycle.ack_phase = AckPhase::Init;
        if !self.state.is_probe_bw() {
            return false;
        }
        if !s.is_app_limited {
            self.max_rate.advance();
        }
        let again = self.cycle.was_precautionary && !self.cycle.was_too_high;
        if again {
            self.start_refill();
        }
        again
    }

    /// IsTimeToProbeBW: by the clock, or as soon as Reno would have grown to the same window.
    fn is_time_to_probe(&self, now: Instant) -> bool {
        let (reno, _) = div_rem(self.target_inflight(), self.window.mss);
        now > later(self.cycle.began, self.cycle.wait)
            || self.rounds.since_probe >= reno.min(RENO_ROUNDS)
    }

    /// IsTimeToCruise.
    fn is_time_to_cruise(&self, in_flight: u64) -> bool {
        in_flight <= self.inflight_with_headroom()
            && in_flight <= self.inflight_at(self.max_rate.get())
    }

    /// IsTimeToGoDown.
    fn is_time_to_go_down(&mut self, s: &Sample) -> bool {
        if self.cycle.was_too_high && s.in_flight >= self.bounds.inflight_long {
            self.cycle.was_precautionary = true;
            return true;
        }
        if s.is_cwnd_limited && self.window.cwnd >= self.bounds.inflight_long {
            self.full.reset(s.rate);
            return false;
        }
        self.full.is_reached
    }

    /// CheckProbeRTT.
    pub(super) fn check_probe_rtt(&mut self, s: &Sample) {
        let is_due = self.min_rtt.is_expired && !self.is_restarting;
        if self.state != State::ProbeRtt && is_due {
            self.state = State::ProbeRtt;
            self.save_cwnd();
            self.probe_rtt = ProbeRtt::default();
            self.cycle.ack_phase = AckPhase::ProbeStopping;
            self.rounds.begin(self.delivered);
        }
        if self.state == State::ProbeRtt {
            self.handle_probe_rtt(s);
        }
        if s.delivered > 0 {
            self.is_restarting = false;
        }
    }

    fn handle_probe_rtt(&mut self, s: &Sample) {
        if self.probe_rtt.done_at.is_none() {
            if s.in_flight <= self.probe_rtt_cwnd() {
                self.probe_rtt.done_at = Some(later(s.now, PROBE_RTT_DURATION));
                self.probe_rtt.is_round_done = false;
                self.rounds.begin(self.delivered);
            }
            return;
        }
        self.probe_rtt.is_round_done |= self.rounds.is_start;
        if self.probe_rtt.is_round_done {
            self.check_probe_rtt_done(s.now);
        }
    }

    /// CheckProbeRTTDone and ExitProbeRTT.
    pub(super) fn check_probe_rtt_done(&mut self, now: Instant) {
        if self.probe_rtt.done_at.is_none_or(|at| now <= at) {
            return;
        }
        self.min_rtt.recent_at = now;
        self.restore_cwnd();
        self.bounds.reset_short();
        if self.full.was_reached {
            self.start_down(now);
            self.state = State::Cruise;
        } else {
            self.state = State::Startup;
        }
    }

    /// ProbeRTTCwnd.
    pub(super) fn probe_rtt_cwnd(&self) -> u64 {
        self.bdp_multiple(self.rate, State::ProbeRtt.cwnd_gain()).max(self.min_pipe_cwnd())
    }

    /// BDPMultiple, for a gain in percent.
    pub(super) fn bdp_multiple(&self, rate: u64, gain: u64) -> u64 {
        if self.min_rtt.ns == INFINITE {
            return self.window.initial();
        }
        percent(volume(rate, self.min_rtt.ns), gain)
    }

    /// BBR.bdp.
    pub(super) fn bdp(&self) -> u64 {
        self.bdp_multiple(self.rate, 100)
    }

    /// Inflight(gain).
    pub(super) fn inflight(&self, gain: u64) -> u64 {
        self.quantized(self.bdp_multiple(self.rate, gain))
    }

    fn inflight_at(&self, rate: u64) -> u64 {
        self.quantized(self.bdp_multiple(rate, 100))
    }

    /// TargetInflight.
    fn target_inflight(&self) -> u64 {
        self.bdp().min(self.window.cwnd)
    }
}
