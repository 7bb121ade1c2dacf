//! What happens when a deadline passes.

use crate::Tcb;
use crate::contract::{ConnError, Env, Events, State};
use crate::timers::{Timer, later};
use fulmar_base::{Counter, Duration, Instant};

impl Tcb {
    /// The earliest deadline: retransmission, persist, user time-out, delayed ACK, cork, keepalive,
    /// TIME-WAIT, FIN-WAIT-2.
    #[inline]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Does whatever is due at `env.now`. Call output afterwards.
    pub fn on_timer(&mut self, env: &mut Env) -> Events {
        let now = env.now;
        let mut events = Events::NONE;
        if self.timers.take_due(Timer::DelayedAck, now) {
            self.due.ack = true;
            self.interactive = false;
            env.counters.count(Counter::TimersFired);
        }
        if self.timers.take_due(Timer::Cork, now) {
            self.user.cork_expired = true;
            env.counters.count(Counter::TimersFired);
        }
        if self.timers.take_due(Timer::Retransmit, now) {
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
        if env.now.since(self.alive_at()) >= self.patience() {
            env.counters.count(Counter::TcpUserTimeouts);
            return self.give_up();
        }
        if self.persisting {
            self.due.probe = true;
            self.rtt.back_off();
        } else if self.flight() > 0 {
            self.believe_doubted_mtu();
            self.enter_loss(env.counters);
        }
        Events::NONE
    }

    fn on_idle_timer(&mut self, env: &mut Env) -> Events {
        let orphaned = self.user.gone && matches!(self.state, State::FinWait2);
        if orphaned || matches!(self.state, State::TimeWait) {
            self.finish(None);
            return Events::CLOSED;
        }
        self.on_keepalive_timer(env)
    }

    fn on_syn_timeout(&mut self, env: &mut Env) -> Events {
        let open_for = env.now.since(self.marks.progress_at);
        if self.user.timeout.is_some_and(|t| open_for >= t) {
            env.counters.count(Counter::TcpUserTimeouts);
            return self.fail();
        }
        if self.rtt.backoff() >= self.cfg.syn_retries {
            return self.fail();
        }
        self.believe_doubted_mtu();
        self.rtt.back_off();
        self.cubic.on_syn_lost();
        self.due.syn = true;
        Events::NONE
    }

    /// How long data may stay unacknowledged.
    pub(crate) fn patience(&self) -> Duration {
        self.user.timeout.unwrap_or(self.cfg.user_timeout)
    }

    /// Never beyond the user time-out: `at`, or when that is over, but not at once.
    pub(crate) fn within_patience(&self, now: Instant, at: Instant) -> Instant {
        let give_up = later(self.marks.progress_at, self.patience());
        at.min(give_up.max(later(now, self.cfg.min_rto)))
    }

    /// When the peer was last known to be alive. A closed window is answered by a live peer, and so
    /// is waited for (RFC 9293 section 3.8.6.1), unless the user has said for how long; an orphan must
    /// make progress, since nobody is left to lose patience.
    fn alive_at(&self) -> Instant {
        let is_closed = self.persisting || self.snd_wnd == 0;
        if is_closed && !self.user.gone && self.user.timeout.is_none() {
            self.marks.progress_at.max(self.marks.heard_at)
        } else {
            self.marks.progress_at
        }
    }

    /// R2 of RFC 9293 section 3.8.3 has passed. The peer is told, if it can still be reached: it may
    /// have a half of the connection that nobody will ever write to.
    pub(crate) fn give_up(&mut self) -> Events {
        self.abort_because(self.timeout_error());
        Events::ERROR | Events::CLOSED
    }

    /// A connection that was never established ends without a word.
    fn fail(&mut self) -> Events {
        self.finish(Some(self.timeout_error()));
        Events::ERROR | Events::CLOSED
    }

    /// What routers said tells why.
    fn timeout_error(&self) -> ConnError {
        self.fate.soft_error.unwrap_or(ConnError::TimedOut)
    }

    /// A connection whose user is gone does not wait for the peer's FIN for ever.
    pub(crate) fn limit_orphan(&mut self, now: Instant) {
        if self.user.gone && matches!(self.state, State::FinWait2) {
            self.timers.set_in(Timer::Idle, now, self.cfg.fin_wait2_timeout);
        }
    }
}
