//! Keepalive (RFC 9293 section 3.8.4): periodic probes of an idle peer.
//!
//! A received segment does not move the deadline. When the timer expires, the time of the last
//! received segment tells how long the peer has been idle, and the timer is set to the remainder.

use crate::base::{Counter, Duration};
use crate::tcp::Tcb;
use crate::tcp::contract::{Env, Events, State};
use crate::tcp::timers::{Timer, later};

/// Keepalive parameters. The defaults are Linux's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keepalive {
    /// Idle time before the first probe (TCP_KEEPIDLE). Default 2 h, the least default that RFC
    /// 9293 section 3.8.4 allows.
    pub idle: Duration,
    /// Interval between unanswered probes (TCP_KEEPINTVL). Default 75 s.
    pub interval: Duration,
    /// Unanswered probes before the connection fails (TCP_KEEPCNT). Default 9. A user time-out
    /// overrides it (`SocketOptions::user_timeout`).
    pub count: u32,
}

impl Default for Keepalive {
    fn default() -> Keepalive {
        Keepalive { idle: Duration::from_secs(7200), interval: Duration::from_secs(75), count: 9 }
    }
}

impl Tcb {
    /// Enables keepalive, or disables it (`None`, the initial setting). Times are raised to
    /// `Config::min_rto`, `count` to 1. Call output afterwards.
    pub fn set_keepalive(&mut self, keepalive: Option<Keepalive>) {
        let least = self.cfg.min_rto;
        self.user.keepalive = keepalive.map(|k| Keepalive {
            idle: k.idle.max(least),
            interval: k.interval.max(least),
            count: k.count.max(1),
        });
        self.unanswered_probes = 0;
        if self.uses_keepalive_timer() {
            self.timers.stop(Timer::Idle);
            self.start_keepalive();
        }
    }

    /// The keepalive parameters in effect.
    pub fn keepalive(&self) -> Option<Keepalive> {
        self.user.keepalive
    }

    /// Whether [`Timer::Idle`] serves keepalive: synchronized, not orphaned, not in TIME-WAIT.
    fn uses_keepalive_timer(&self) -> bool {
        self.is_synchronized() && !self.user.closed && !matches!(self.state, State::TimeWait)
    }

    /// Starts the timer: on establishment, and when keepalive is enabled.
    pub(crate) fn start_keepalive(&mut self) {
        if let Some(k) = self.user.keepalive
            && self.uses_keepalive_timer()
        {
            self.timers.set(Timer::Idle, later(self.times.last_received_at, k.idle));
        }
    }

    /// While data is in flight or unsent, the retransmission and persist timers supervise the peer
    /// instead.
    pub(crate) fn on_keepalive_timer(&mut self, env: &mut Env) -> Events {
        let Some(k) = self.user.keepalive.filter(|_| self.uses_keepalive_timer()) else {
            return Events::NONE;
        };
        if self.times.last_received_at >= self.times.last_sent_at {
            // Also true while the last probe is still unsent: then it is not unanswered.
            self.unanswered_probes = 0;
        }
        let silent_for = env.now.since(self.times.last_received_at);
        if self.flight() > 0 || self.has_unsent() {
            self.unanswered_probes = 0;
            self.timers.set_in(Timer::Idle, env.now, k.idle);
        } else if silent_for < k.idle {
            self.timers.set(Timer::Idle, later(self.times.last_received_at, k.idle));
        } else if self.is_peer_dead(&k, silent_for) {
            env.counters.count(Counter::TcpKeepaliveTimeouts);
            return self.abort_timed_out();
        } else {
            self.due.probe = true;
            self.unanswered_probes = self.unanswered_probes.saturating_add(1);
            self.timers.set_in(Timer::Idle, env.now, k.interval);
        }
        Events::NONE
    }

    /// As Linux: a user time-out replaces the count, but takes effect only after the first probe.
    fn is_peer_dead(&self, k: &Keepalive, silent_for: Duration) -> bool {
        match self.user.timeout {
            Some(timeout) => self.unanswered_probes > 0 && silent_for >= timeout,
            None => self.unanswered_probes >= k.count,
        }
    }
}
