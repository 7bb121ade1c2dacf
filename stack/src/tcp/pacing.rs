//! Pacing: when the next segment may leave, and how large it may be.
//!
//! A connection is paced if its controller sets a rate, or the user limits it (SO_MAX_PACING_RATE).
//! Each segment moves the earliest departure time of the next one by its length over the rate. Until
//! then [`Tcb::plan`](crate::tcp::Tcb) has no data to send, and [`Timer::Pacing`] runs if there is any. A
//! super-segment holds about a millisecond of the rate, so there is at most one timer for each.
//!
//! The timer wheel has ticks of a millisecond, and an ACK or a write may come long before. A segment that leaves late
//! by up to [`CREDIT`] therefore does not delay later segments: the mean rate is the requested one, with bursts of at
//! most two milliseconds.

use crate::base::{Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::tcp::timers::{Timer, later};

/// Super-segments hold at most this time of the rate (draft-ietf-ccwg-bbr, "Send Quantum"; Linux:
/// sk_pacing_shift).
const QUANTA_PER_SECOND: u64 = 1000;

/// The least super-segment: receivers acknowledge every second segment.
const QUANTUM_SEGMENTS: u64 = 2;

/// How late a segment may leave without delaying the next one: two ticks of the timer wheel.
const CREDIT: Duration = Duration::from_nanos(2 << 20);

/// The state of pacing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacing {
    /// The user's limit, bytes per second.
    limit: Option<u64>,
    /// Bytes per second; 0: the connection is not paced.
    rate: u64,
    /// Payload of the largest segment; `usize::MAX` if the connection is not paced.
    pub quantum_bytes: usize,
    /// The earliest departure time of the next segment.
    next_at: Instant,
    /// Output waits: `next_at` was in the future when it was last compared with the time, by input,
    /// output or a timer.
    pub is_held: bool,
}

impl Pacing {
    pub(crate) const fn new(limit: Option<u64>) -> Pacing {
        Pacing { limit, rate: 0, quantum_bytes: usize::MAX, next_at: Instant::ZERO, is_held: false }
    }

    /// Whether the next segment may not leave yet.
    pub(crate) fn is_ahead(&self, now: Instant) -> bool {
        self.rate > 0 && self.next_at > now
    }

    /// The next segment may leave now.
    pub(crate) fn release(&mut self) {
        (self.next_at, self.is_held) = (Instant::ZERO, false);
    }

    /// Clears `is_held` once `next_at` has passed.
    #[inline]
    pub(crate) fn update_hold(&mut self, now: Instant) {
        if self.is_held {
            self.is_held = self.is_ahead(now);
        }
    }
}

impl Tcb {
    /// Limits the rate of sending, bytes per second, at least 1 (SO_MAX_PACING_RATE). Call output
    /// afterwards.
    pub fn set_max_pacing_rate(&mut self, limit: Option<u64>) {
        self.pacing.limit = limit;
        self.update_pacing();
    }

    /// The limit as set.
    pub fn max_pacing_rate(&self) -> Option<u64> {
        self.pacing.limit
    }

    /// The rate in effect, bytes per second. `None`: the connection is not paced.
    pub fn pacing_rate(&self) -> Option<u64> {
        Some(self.pacing.rate).filter(|r| *r > 0)
    }

    /// Computes the rate and the quantum, after the controller, the limit or the segment size has
    /// changed.
    pub(crate) fn update_pacing(&mut self) {
        let rates = [self.congestion.pacing_rate(self.rtt.srtt()), self.pacing.limit];
        let rate = rates.into_iter().flatten().min().map(|r| r.max(1));
        self.pacing.rate = rate.unwrap_or(0);
        self.pacing.quantum_bytes = rate.map_or(usize::MAX, |r| {
            let (segments, _) = div_rem(r / QUANTA_PER_SECOND, self.smss());
            let bytes = segments.max(QUANTUM_SEGMENTS).saturating_mul(self.smss());
            usize::try_from(bytes).unwrap_or(usize::MAX)
        });
        if rate.is_none() {
            self.pacing.is_held = false;
            self.timers.stop(Timer::Pacing);
        }
    }

    /// `bytes` were sent.
    #[inline]
    pub(crate) fn pace_sent(&mut self, bytes: u64, now: Instant) {
        if self.pacing.rate > 0 {
            self.delay_next(bytes, now);
        }
    }

    #[inline(never)]
    fn delay_next(&mut self, bytes: u64, now: Instant) {
        // After a pause pacing starts from now; otherwise a late segment has its credit.
        let is_first = self.flight() <= bytes;
        let credit = if is_first { Duration::ZERO } else { CREDIT };
        let least = now.as_nanos().saturating_sub(crate::tcp::rtt::nanos(credit));
        let since = self.pacing.next_at.max(Instant::from_nanos(least));
        let (ns, _) = div_rem(bytes.saturating_mul(1_000_000_000), self.pacing.rate);
        self.pacing.next_at = later(since, Duration::from_nanos(ns));
        self.pacing.is_held = self.pacing.next_at > now;
    }

    /// Output is held: sets the timer if it would send something.
    #[inline(never)]
    pub(crate) fn arm_pacing(&mut self) {
        if self.has_data_to_send() {
            self.timers.set(Timer::Pacing, self.pacing.next_at);
        } else {
            self.timers.stop(Timer::Pacing);
        }
    }
}
