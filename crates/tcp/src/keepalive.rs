//! Keepalive (RFC 9293 section 3.8.4): an idle peer is asked now and then whether it is still there.
//!
//! The deadline does not follow the segments that come: when it passes, the time of the last one says
//! how long the peer has been silent, and the timer starts again for the rest.

use crate::Tcb;
use crate::contract::{Env, Events, State};
use crate::timers::{Timer, later};
use fulmar_base::{Counter, Duration};

/// When to probe an idle peer, and when to give it up. The defaults are those of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keepalive {
    /// How long the peer is silent before the first probe (TCP_KEEPIDLE). Default 2 h, the least
    /// default that RFC 9293 section 3.8.4 allows.
    pub idle: Duration,
    /// From a probe that is not answered to the next (TCP_KEEPINTVL). Default 75 s.
    pub interval: Duration,
    /// Probes not answered before the connection fails (TCP_KEEPCNT). Default 9. A user time-out
    /// takes its place ([`Tcb::set_user_timeout`]).
    pub count: u32,
}

impl Default for Keepalive {
    fn default() -> Keepalive {
        Keepalive { idle: Duration::from_secs(7200), interval: Duration::from_secs(75), count: 9 }
    }
}

impl Tcb {
    /// Probes the peer while it is idle; `None`, as from the start: does not. Times count as at least
    /// `Config::min_rto`, `count` as at least 1. Call output afterwards.
    pub fn set_keepalive(&mut self, keepalive: Option<Keepalive>) {
        let least = self.cfg.min_rto;
        self.user.keepalive = keepalive.map(|k| Keepalive {
            idle: k.idle.max(least),
            interval: k.interval.max(least),
            count: k.count.max(1),
        });
        self.unanswered_probes = 0;
        if self.may_keep_alive() {
            self.timers.stop(Timer::Idle);
            self.start_keepalive();
        }
    }

    /// What [`Tcb::set_keepalive`] set, as far as it counts.
    pub fn keepalive(&self) -> Option<Keepalive> {
        self.user.keepalive
    }

    /// Whether the idle timer is keepalive's: synchronized, and with a user.
    fn may_keep_alive(&self) -> bool {
        self.is_synchronized() && !self.user.gone && !matches!(self.state, State::TimeWait)
    }

    /// The connection is established, or the user has asked for keepalive.
    pub(crate) fn start_keepalive(&mut self) {
        if let Some(k) = self.user.keepalive
            && self.may_keep_alive()
        {
            self.timers.set(Timer::Idle, later(self.marks.heard_at, k.idle));
        }
    }

    /// While anything is in flight or waits, the retransmission and persist timers judge the peer.
    pub(crate) fn on_keepalive_timer(&mut self, env: &mut Env) -> Events {
        let Some(k) = self.user.keepalive.filter(|_| self.may_keep_alive()) else {
            return Events::NONE;
        };
        if self.marks.heard_at >= self.marks.last_sent_at {
            // Also if the last probe is still held up by the way down: not sent is not unanswered.
            self.unanswered_probes = 0;
        }
        let silent_for = env.now.since(self.marks.heard_at);
        if self.flight() > 0 || self.has_unsent() {
            self.unanswered_probes = 0;
            self.timers.set_in(Timer::Idle, env.now, k.idle);
        } else if silent_for < k.idle {
            self.timers.set(Timer::Idle, later(self.marks.heard_at, k.idle));
        } else if self.gives_up(&k, silent_for) {
            env.counters.count(Counter::TcpKeepaliveTimeouts);
            return self.give_up();
        } else {
            self.due.probe = true;
            self.unanswered_probes = self.unanswered_probes.saturating_add(1);
            self.timers.set_in(Timer::Idle, env.now, k.interval);
        }
        Events::NONE
    }

    /// As Linux: a user time-out decides instead of the count, but not before the first probe.
    fn gives_up(&self, k: &Keepalive, silent_for: Duration) -> bool {
        match self.user.timeout {
            Some(timeout) => self.unanswered_probes > 0 && silent_for >= timeout,
            None => self.unanswered_probes >= k.count,
        }
    }
}
