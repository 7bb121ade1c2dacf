//! Two judgements about a flow: whether its pushes end messages, and whether placement pays.

use fulmar_base::{Duration, Instant};

/// A push that is followed by more within this time, without an answer in between, was no end of a
/// message: half the time that a reader needs to learn of it and come back on a busy machine.
const CLOSE: Duration = Duration::from_micros(100);

/// So many of them one after the other, and the flow streams.
const STREAMS: u8 = 4;

/// Linux pushes at the end of each write and where half the window ends: in a bulk transfer that is every
/// 64 KiB or less, and giving a buffer back each time would leave large ones nearly empty.
#[derive(Default, Debug)]
pub(super) struct Pushes {
    /// When the last pushed byte came, and how many bytes had been sent by then.
    last: Option<(Instant, u64)>,
    /// Pushes in a row that were followed closely.
    close: u8,
}

impl Pushes {
    /// Bytes came up to a push, the last of them at `arrival`: whether that ends a message.
    pub(super) fn are_messages(&mut self, arrival: Instant, sent: u64) -> bool {
        match self.last {
            // The same push, looked at once more.
            Some((at, _)) if at == arrival => {}
            Some((at, before)) => {
                let is_close = arrival.since(at) < CLOSE && sent == before;
                self.close = if is_close { (self.close + 1).min(STREAMS) } else { 0 };
                self.last = Some((arrival, sent));
            }
            None => self.last = Some((arrival, sent)),
        }
        self.close < STREAMS
    }

    /// Nothing came for a while.
    pub(super) fn pause(&mut self) {
        self.close = 0;
    }
}

/// How many buffers for which it was not worth it are forgiven, at first and after a rest.
const FULL_SCORE: u8 = 8;
const SECOND_CHANCE: u8 = 2;

/// How long placement rests for a flow for which it does not pay.
const REST: Duration = Duration::from_millis(250);

/// Whether placement pays for a flow.
#[derive(Debug)]
pub(super) struct Score {
    left: u8,
    rests_until: Option<Instant>,
}

impl Default for Score {
    fn default() -> Score {
        Score { left: FULL_SCORE, rests_until: None }
    }
}

impl Score {
    /// A buffer is given back with something in it: whether it was worth it to tell the device.
    pub(super) fn note(&mut self, now: Instant, was_worth_it: bool) {
        if self.rests_until.is_some() {
            return;
        }
        if was_worth_it {
            self.left = FULL_SCORE;
        } else if self.left > 1 {
            self.left -= 1;
        } else {
            self.rests_until = Some(now + REST);
        }
    }

    /// The device does not place, or has no place left for this flow.
    pub(super) fn refused(&mut self, now: Instant) {
        self.rests_until = Some(now + REST);
    }

    /// Whether the device may be told.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if self.rests_until.is_some_and(|at| now >= at) {
            *self = Score { left: SECOND_CHANCE, rests_until: None };
        }
        self.rests_until.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Instant {
        Instant::ZERO + Duration::from_micros(us)
    }

    #[test]
    fn pushes_of_a_stream_end_nothing_and_those_of_messages_do() {
        let mut p = Pushes::default();
        let ends: Vec<bool> = (1..9).map(|i| p.are_messages(at(i * 20), 7)).collect();
        assert_eq!(ends, [true, true, true, true, false, false, false, false]);
        assert!(!p.are_messages(at(160), 7), "looked at once more");
        assert!(p.are_messages(at(5000), 7), "after a gap");
        let mut p = Pushes::default();
        assert!((1..99).all(|i| p.are_messages(at(i * 20), i)), "answered in between");
    }

    #[test]
    fn placement_rests_for_a_flow_that_never_fills_buffers_and_is_tried_again() {
        let mut s = Score::default();
        for _ in 0..7 {
            s.note(at(0), false);
        }
        assert!(s.allows(at(0)));
        s.note(at(0), true);
        for _ in 0..8 {
            assert!(s.allows(at(0)));
            s.note(at(0), false);
        }
        assert!(!s.allows(at(249_999)));
        assert!(s.allows(at(250_000)));
        s.note(at(250_000), false);
        s.note(at(250_000), false);
        assert!(!s.allows(at(250_001)));
        assert!(s.allows(at(600_000)));
        s.note(at(600_000), true);
        assert_eq!(s.left, FULL_SCORE);
    }
}
