//! Heuristics of a flow: whether pushes mark ends of messages, and whether placement pays off.

use crate::base::{Duration, Instant};

/// Two pushes within this time, without a reply between them, do not mark ends of messages: half of the time
/// that a reader takes to be woken and to post again on a busy machine.
const MAX_GAP: Duration = Duration::from_micros(100);

/// Close pushes in a row from which the flow is a bulk transfer.
const BULK_PUSHES: u8 = 4;

/// Detects whether pushes mark ends of messages. Linux sets PSH at the end of each write and of half a
/// window, in a bulk transfer every 64 KiB or less; completing on each would leave large buffers nearly
/// empty.
#[derive(Default, Debug)]
pub(super) struct Pushes {
    /// The arrival of the last pushed byte, and the bytes sent by then.
    last: Option<(Instant, u64)>,
    /// Consecutive close pushes.
    streak: u8,
}

impl Pushes {
    /// Whether a push that arrived at `arrival` marks the end of a message. `sent`: bytes sent so far.
    pub(super) fn ends_message(&mut self, arrival: Instant, sent: u64) -> bool {
        match self.last {
            // The same push again.
            Some((at, _)) if at == arrival => {}
            Some((at, before)) => {
                let is_close = arrival.since(at) < MAX_GAP && sent == before;
                self.streak = if is_close { (self.streak + 1).min(BULK_PUSHES) } else { 0 };
                self.last = Some((arrival, sent));
            }
            None => self.last = Some((arrival, sent)),
        }
        self.streak < BULK_PUSHES
    }

    /// Resets the detection after an idle time.
    pub(super) fn pause(&mut self) {
        self.streak = 0;
    }
}

/// Buffers for which placement may fail to pay off: at first, and after a suspension.
const MAX_CREDIT: u8 = 8;
const RETRY_CREDIT: u8 = 2;

/// How long placement is suspended for a flow.
const BACK_OFF: Duration = Duration::from_millis(250);

/// Whether placement pays off for a flow.
#[derive(Debug)]
pub(super) struct PlacementCredit {
    left: u8,
    suspended_until: Option<Instant>,
}

impl Default for PlacementCredit {
    fn default() -> PlacementCredit {
        PlacementCredit { left: MAX_CREDIT, suspended_until: None }
    }
}

impl PlacementCredit {
    /// Records whether placement has paid off for a completed buffer.
    pub(super) fn record(&mut self, now: Instant, has_paid: bool) {
        if self.suspended_until.is_some() {
            return;
        }
        if has_paid {
            self.left = MAX_CREDIT;
        } else if self.left > 1 {
            self.left -= 1;
        } else {
            self.suspended_until = Some(now + BACK_OFF);
        }
    }

    /// Suspends placement: the device refused the hint.
    pub(super) fn refused(&mut self, now: Instant) {
        self.suspended_until = Some(now + BACK_OFF);
    }

    /// Whether placement is not suspended.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if self.suspended_until.is_some_and(|at| now >= at) {
            *self = PlacementCredit { left: RETRY_CREDIT, suspended_until: None };
        }
        self.suspended_until.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Instant {
        Instant::ZERO + Duration::from_micros(us)
    }

    #[test]
    fn pushes_of_messages_end_buffers_and_pushes_of_a_bulk_transfer_do_not() {
        let mut p = Pushes::default();
        let ends: Vec<bool> = (1..9).map(|i| p.ends_message(at(i * 20), 7)).collect();
        assert_eq!(ends, [true, true, true, true, false, false, false, false]);
        assert!(!p.ends_message(at(160), 7), "the same push again");
        assert!(p.ends_message(at(5000), 7), "after a gap");
        let mut p = Pushes::default();
        assert!((1..99).all(|i| p.ends_message(at(i * 20), i)), "with replies between them");
    }

    #[test]
    fn placement_is_suspended_for_a_flow_that_never_fills_buffers_and_retried() {
        let mut s = PlacementCredit::default();
        for _ in 0..7 {
            s.record(at(0), false);
        }
        assert!(s.allows(at(0)));
        s.record(at(0), true);
        for _ in 0..8 {
            assert!(s.allows(at(0)));
            s.record(at(0), false);
        }
        assert!(!s.allows(at(249_999)));
        assert!(s.allows(at(250_000)));
        s.record(at(250_000), false);
        s.record(at(250_000), false);
        assert!(!s.allows(at(250_001)));
        assert!(s.allows(at(600_000)));
        s.record(at(600_000), true);
        assert_eq!(s.left, MAX_CREDIT);
    }
}
