//! The one timer of loss recovery (RFC 8985 section 8): the retransmission time-out, the tail loss
//! probe, or the end of the reordering window, whichever comes first.

use super::Mode;
use crate::base::{Counter, Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::contract::Env;
use crate::tcp::timers::{Pending, Timer, later};

/// TLP.max_ack_delay (RFC 8985 section 7.2): the longest delay of an ACK that common receivers use.
const MAX_ACK_DELAY: Duration = Duration::from_millis(200);

/// Least time between the expected ACK and a probe: a few ticks of a timer wheel, here or at the
/// peer. RFC 8985 has none; Linux adds two jiffies.
const PROBE_SLACK: Duration = Duration::from_millis(5);

/// rrthresh of RFC 7765 section 4: with fewer segments in flight, too few duplicate ACKs can follow
/// for a fast retransmission.
const RESTART_SEGMENTS: u64 = 4;

impl Tcb {
    /// Sets the timer: data is in flight and it is not running.
    pub(crate) fn arm_retransmit(&mut self, now: Instant) {
        let timeout = self.capped_by_user_timeout(now, self.timeout_at(now));
        let at = if self.may_probe() {
            self.recovery.pending = Pending::Probe;
            later(now, self.probe_timeout()).min(timeout)
        } else {
            self.recovery.pending = Pending::Timeout;
            timeout
        };
        self.timers.set(Timer::Retransmit, at);
    }

    /// When the retransmission timer expires: a time-out from now, as after an ACK (RFC 6298 section
    /// 5.3). It counts from the transmission of the oldest segment instead if few segments are in
    /// flight (RFC 7765 section 4), or if the timer has served something else meanwhile.
    fn timeout_at(&self, now: Instant) -> Instant {
        let few = self.flight() < self.smss().saturating_mul(RESTART_SEGMENTS);
        let counts_from_first = (few && !self.has_unsent() && self.rtt.backoff() == 0)
            || !matches!(self.recovery.pending, Pending::Timeout);
        let since = if counts_from_first { self.sacked.first_sent_at() } else { None };
        let at = later(since.unwrap_or(now), self.rtt.rto());
        at.max(later(now, Duration::from_millis(1)))
    }

    /// Whether a tail loss probe may be scheduled (RFC 8985 section 7.2): with SACK, nothing SACKed
    /// or lost, no probe outstanding. The peer's window must cover the flight, and no message about
    /// the path MTU wait for a time-out.
    #[inline]
    fn may_probe(&self) -> bool {
        self.sack_on
            && matches!(self.recovery.mode, Mode::Open)
            && self.sacked.is_clean()
            && self.recovery.tlp.is_idle()
            && self.snd.wnd >= self.flight()
            && !self.pmtud.is_pending(self.snd.una)
            && self.is_synchronized()
    }

    /// After an ACK: replaces the probe timer with the retransmission time-out if a probe is not allowed any more.
    pub(crate) fn check_probe_timer(&mut self) {
        if matches!(self.recovery.pending, Pending::Probe) && !self.may_probe() {
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// TLP_calc_PTO (RFC 8985 section 7.2).
    fn probe_timeout(&self) -> Duration {
        let srtt = self.rtt.srtt();
        if srtt.is_zero() {
            return Duration::from_secs(1);
        }
        let is_one_segment = self.flight() <= self.smss();
        let slack = if is_one_segment { MAX_ACK_DELAY } else { PROBE_SLACK };
        srtt.saturating_mul(2).saturating_add(slack)
    }

    /// The timer has expired with data in flight.
    pub(crate) fn on_recovery_timer(&mut self, env: &mut Env) {
        match self.recovery.pending {
            Pending::Timeout => {
                self.adopt_pending_mtu();
                self.check_black_hole(env.counters);
                self.enter_loss(env.now, env.counters);
                // As in Linux: a rate estimated from a few bytes could hold the retransmission for minutes.
                self.pacing.release();
            }
            // `rearm` sets the time-out instead.
            Pending::Probe if !self.may_probe() => {}
            Pending::Probe => {
                self.recovery.tlp.due = true;
                env.counters.count(Counter::TcpTailLossProbes);
            }
            Pending::Reordering => {
                let ack = super::AckSummary::default();
                self.detect_losses(&ack, env.now, env.counters);
                self.reduce_proportionally(&ack);
            }
        }
    }
}
