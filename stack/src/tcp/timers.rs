//! The timers of a connection. They are plain fields: the stack's timer wheel is lazy and reads
//! [`Tcb::next_deadline`](crate::tcp::Tcb::next_deadline) when an entry expires, so that moving a deadline costs one
//! store.

use crate::base::{Duration, Instant};

/// `after` from `now`; an [`Instant`] saturates.
#[allow(clippy::arithmetic_side_effects)]
#[inline]
pub(crate) fn later(now: Instant, after: Duration) -> Instant {
    now + after
}

/// The timers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Timer {
    /// The retransmission timer (RFC 6298), or the persist timer while a closed window holds data
    /// back and nothing is in flight.
    Retransmit,
    /// The delayed ACK timer (RFC 9293 section 3.8.6.3).
    DelayedAck,
    /// Sends a corked partial segment.
    Cork,
    /// The earliest departure time of the next segment (pacing).
    Pacing,
    /// Keepalive; for an orphaned connection the end of FIN-WAIT-2; the end of TIME-WAIT.
    Idle,
}

/// What [`Timer::Retransmit`] is set for while data is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pending {
    /// The retransmission time-out.
    Timeout,
    /// A tail loss probe.
    Probe,
    /// The end of the reordering window.
    Reordering,
}

/// One deadline per [`Timer`]; [`Instant::FAR_FUTURE`] means off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timers {
    retransmit: Instant,
    delayed_ack: Instant,
    cork: Instant,
    pacing: Instant,
    idle: Instant,
}

impl Timers {
    pub(crate) const fn new() -> Timers {
        let off = Instant::FAR_FUTURE;
        Timers { retransmit: off, delayed_ack: off, cork: off, pacing: off, idle: off }
    }

    fn slot(&mut self, t: Timer) -> &mut Instant {
        match t {
            Timer::Retransmit => &mut self.retransmit,
            Timer::DelayedAck => &mut self.delayed_ack,
            Timer::Cork => &mut self.cork,
            Timer::Pacing => &mut self.pacing,
            Timer::Idle => &mut self.idle,
        }
    }

    #[inline]
    pub(crate) fn set(&mut self, t: Timer, at: Instant) {
        *self.slot(t) = at;
    }

    /// Sets a timer to `after` from `now`.
    #[inline]
    pub(crate) fn set_in(&mut self, t: Timer, now: Instant, after: Duration) {
        self.set(t, later(now, after));
    }

    /// As `set_in`, unless the timer is running.
    #[inline]
    pub(crate) fn start_in(&mut self, t: Timer, now: Instant, after: Duration) {
        if *self.slot(t) == Instant::FAR_FUTURE {
            self.set_in(t, now, after);
        }
    }

    /// As `set_in`, unless the timer expires earlier.
    #[inline]
    pub(crate) fn hasten_in(&mut self, t: Timer, now: Instant, after: Duration) {
        let at = later(now, after).min(*self.slot(t));
        self.set(t, at);
    }

    #[inline]
    pub(crate) fn stop(&mut self, t: Timer) {
        *self.slot(t) = Instant::FAR_FUTURE;
    }

    #[inline]
    pub(crate) fn is_running(&mut self, t: Timer) -> bool {
        *self.slot(t) != Instant::FAR_FUTURE
    }

    /// Stops a timer that is due. Returns whether it was.
    pub(crate) fn take_due(&mut self, t: Timer, now: Instant) -> bool {
        let slot = self.slot(t);
        let due = *slot != Instant::FAR_FUTURE && *slot <= now;
        if due {
            *slot = Instant::FAR_FUTURE;
        }
        due
    }

    /// The earliest deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        let first = self.retransmit.min(self.delayed_ack).min(self.cork).min(self.idle);
        let first = first.min(self.pacing);
        (first != Instant::FAR_FUTURE).then_some(first)
    }
}
