//! Timer expiry.

use crate::base::{Counter, Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::contract::{ConnError, Env, Events, State};
use crate::tcp::timers::{Timer, later};

impl Tcb {
    /// The earliest deadline: retransmission, persist, user time-out, delayed ACK, cork, pacing,
    /// keepalive, TIME-WAIT, FIN-WAIT-2.
    #[inline]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Handles all timers due at `env.now`. Call output afterwards.
    pub fn on_timer(&mut self, env: &mut Env) -> Events {
        let now = env.now;
        let mut events = Events::NONE;
        if self.timers.take_due(Timer::DelayedAck, now) {
            self.due.ack = true;
            self.dialogue.on_delayed_ack();
            env.counters.count(Counter::TimersFired);
        }
        if self.timers.take_due(Timer::Cork, now) {
            self.user.cork_expired = true;
            env.counters.count(Counter::TimersFired);
        }
        if self.timers.take_due(Timer::Pacing, now) {
            self.pacing.update_hold(now);
            env.counters.count(Counter::TimersFired);
        }
        if self.timers.take_due(Timer::Retransmit, now) {
            self.check_app_limited(now);
            events |= self.on_retransmit_timer(env);
            env.counters.count(Counter::TimersFired);
        }
        if self.timers.take_due(Timer::Idle, now) {
            events |= self.on_idle_timer(env);
            env.counters.count(Counter::TimersFired);
        }
        if !matches!(self.state, State::Closed) {
            self.rearm(now);
        }
        events
    }

    fn on_retransmit_timer(&mut self, env: &mut Env) -> Events {
        match self.state {
            State::SynSent | State::SynReceived => return self.on_syn_timeout(env),
            _ => {}
        }
        // Not before one retransmission or probe: after a stop of the process ACKs may be waiting unread.
        let has_retried = self.times.retries > 0 || (self.flight() == 0 && !self.persisting);
        if has_retried && env.now.since(self.user_timeout_start()) >= self.effective_user_timeout()
        {
            env.counters.count(Counter::TcpUserTimeouts);
            return self.abort_timed_out();
        }
        if self.persisting {
            self.due.probe = true;
            self.rtt.back_off();
            self.times.retries = self.times.retries.saturating_add(1);
        } else if self.flight() > 0 {
            self.on_recovery_timer(env);
        }
        Events::NONE
    }

    fn on_idle_timer(&mut self, env: &mut Env) -> Events {
        let orphaned = self.user.closed && matches!(self.state, State::FinWait2);
        if orphaned || matches!(self.state, State::TimeWait) {
            self.finish(None);
            return Events::CLOSED;
        }
        self.on_keepalive_timer(env)
    }

    fn on_syn_timeout(&mut self, env: &mut Env) -> Events {
        let open_for = env.now.since(self.times.last_progress);
        if self.user.timeout.is_some_and(|t| open_for >= t) {
            env.counters.count(Counter::TcpUserTimeouts);
            return self.fail_handshake();
        }
        if self.rtt.backoff() >= self.cfg.syn_retries {
            return self.fail_handshake();
        }
        self.adopt_pending_mtu();
        self.rtt.back_off();
        // One loss keeps the initial window, as in Linux. RFC 5681 section 3.1 reduces it, but assumes a first
        // time-out of 3 s; one of 1 s (RFC 6298) may be spurious.
        if self.rtt.backoff() > 1 {
            self.congestion.on_syn_lost();
        }
        self.due.syn = true;
        Events::NONE
    }

    /// The user time-out in effect (R2).
    pub(crate) fn effective_user_timeout(&self) -> Duration {
        self.user.timeout.unwrap_or(self.cfg.user_timeout)
    }

    /// `at`, but not after the user time-out expires; and at least `Config::min_rto` from now.
    pub(crate) fn capped_by_user_timeout(&self, now: Instant, at: Instant) -> Instant {
        let give_up = later(self.user_timeout_start(), self.effective_user_timeout());
        at.min(give_up.max(later(now, self.cfg.min_rto)))
    }

    /// Start of the user time-out: the last progress, or the last segment received while the window
    /// is closed. A peer that answers window probes may keep its window closed indefinitely (RFC
    /// 9293 section 3.8.6.1), unless the user has set a user time-out. An orphaned connection must
    /// make progress in any case.
    fn user_timeout_start(&self) -> Instant {
        let is_closed = self.persisting || self.snd.wnd == 0;
        if is_closed && !self.user.closed && self.user.timeout.is_none() {
            self.times.last_progress.max(self.times.last_received_at)
        } else {
            self.times.last_progress.max(self.times.last_opened_at)
        }
    }

    /// R2 of RFC 9293 section 3.8.3 has passed: resets the connection, so that a reachable peer
    /// does not keep it half-open.
    pub(crate) fn abort_timed_out(&mut self) -> Events {
        self.abort_with(self.timeout_error());
        Events::ERROR | Events::CLOSED
    }

    /// The handshake failed: closes without a reset.
    fn fail_handshake(&mut self) -> Events {
        self.report_syn_lost();
        self.finish(Some(self.timeout_error()));
        Events::ERROR | Events::CLOSED
    }

    /// A soft error explains the time-out.
    fn timeout_error(&self) -> ConnError {
        self.errors.soft.unwrap_or(ConnError::TimedOut)
    }

    /// Bounds FIN-WAIT-2 of an orphaned connection.
    pub(crate) fn start_orphan_timer(&mut self, now: Instant) {
        if self.user.closed && matches!(self.state, State::FinWait2) {
            self.timers.set_in(Timer::Idle, now, self.cfg.fin_wait2_timeout);
        }
    }
}
