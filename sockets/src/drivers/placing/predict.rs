//! Predicts the flow of the next frame, and whether acting on predictions pays.
//!
//! The prediction is the flow that last followed the two most recent flows. So in a run of one flow only
//! the first frame is mispredicted, and alternating flows are predicted after one round.
//!
//! A hit saves one copy. A miss costs wiping the bytes, and one more copy if the frame's flow has no posted
//! buffer. The score weighs both by bytes. It is updated whether or not predictions are acted on, so that
//! prediction is disabled and enabled by the traffic.

/// The flow that followed two flows, and its saturating counter (up to [`SURE`]).
#[derive(Clone, Copy, Default)]
struct Habit {
    slot: Option<u8>,
    strength: u8,
}

const SURE: u8 = 3;
const HABITS: usize = 64;

/// The slot that represents every flow without a posted buffer.
const OTHER: u8 = u8::MAX;

/// Cost of copying a byte, and of wiping one, in tenths.
const COPY_TENTHS: i64 = 10;
const WIPE_TENTHS: i64 = 4;
const WIPE_AND_COPY_TENTHS: i64 = WIPE_TENTHS + COPY_TENTHS;

/// Weight of the history against the last frame in the moving average.
const MEMORY: i64 = 16;

/// See the module's header.
pub(super) struct Predictor {
    habits: [Habit; HABITS],
    last: u8,
    before: u8,
    /// Moving average of bytes of copying saved per frame, in tenths.
    score: i64,
}

impl Predictor {
    pub(super) fn new() -> Predictor {
        Predictor { habits: [Habit::default(); HABITS], last: OTHER, before: OTHER, score: 0 }
    }

    fn index(&self) -> usize {
        let mixed = usize::from(self.last).wrapping_mul(37) ^ usize::from(self.before);
        mixed % HABITS
    }

    /// The slot of the predicted flow. `None`: no history.
    pub(super) fn predict(&self) -> Option<usize> {
        let habit = self.habits.get(self.index()).and_then(|h| h.slot);
        let slot = habit.unwrap_or(self.last);
        (slot != OTHER).then_some(usize::from(slot))
    }

    /// Whether acting on predictions pays.
    pub(super) fn is_worth_it(&self) -> bool {
        self.score >= 0
    }

    /// A flow has posted ranges: without history it is predicted next.
    pub(super) fn placed(&mut self, slot: usize) {
        if self.last == OTHER {
            self.last = short(slot);
        }
    }

    /// Removes a slot from the history: it may be given to another flow.
    pub(super) fn forget(&mut self, slot: usize) {
        let gone = short(slot);
        for h in self.habits.iter_mut().filter(|h| h.slot == Some(gone)) {
            *h = Habit::default();
        }
        for s in [&mut self.last, &mut self.before] {
            if *s == gone {
                *s = OTHER;
            }
        }
    }

    /// Updates history and score with a received frame. `slot`: its flow, if that is placed. `is_expected`:
    /// the frame is that flow's next segment.
    pub(super) fn record(&mut self, slot: Option<usize>, is_expected: bool, payload_bytes: usize) {
        let guess = self.predict();
        let tenths = match (guess, slot) {
            (None, _) => 0,
            (Some(g), Some(s)) if g == s && is_expected => COPY_TENTHS,
            (Some(_), Some(_)) if is_expected => -WIPE_TENTHS,
            (Some(_), _) => -WIPE_AND_COPY_TENTHS,
        };
        let gain = i64::try_from(payload_bytes).unwrap_or(0).saturating_mul(tenths);
        let change = gain.saturating_sub(self.score).checked_div(MEMORY).unwrap_or(0);
        self.score = self.score.saturating_add(change);
        let actual = slot.map_or(OTHER, short);
        let index = self.index();
        if let Some(h) = self.habits.get_mut(index) {
            match h.slot {
                Some(s) if s == actual => h.strength = h.strength.saturating_add(1).min(SURE),
                Some(_) if h.strength > 0 => h.strength = h.strength.saturating_sub(1),
                _ => *h = Habit { slot: Some(actual), strength: 0 },
            }
        }
        (self.before, self.last) = (self.last, actual);
    }
}

fn short(slot: usize) -> u8 {
    u8::try_from(slot).unwrap_or(OTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the last frames are guessed right.
    fn right(p: &mut Predictor, frames: &[Option<usize>]) -> usize {
        let mut count = 0;
        for f in frames {
            count += usize::from(p.predict() == *f);
            p.record(*f, f.is_some(), 60_000);
        }
        count
    }

    #[test]
    fn a_flow_alone_is_guessed_right_from_the_first_frame() {
        let mut p = Predictor::new();
        p.placed(5);
        assert_eq!(right(&mut p, &[Some(5); 100]), 100);
        assert!(p.is_worth_it());
    }

    #[test]
    fn flows_that_alternate_are_guessed_right_after_a_round() {
        let mut p = Predictor::new();
        p.placed(0);
        let frames: Vec<_> = (0..200).map(|i| Some(i % 2)).collect();
        assert!(right(&mut p, &frames) >= 194);
        assert!(p.is_worth_it());
    }

    #[test]
    fn flows_that_come_in_runs_cost_a_miss_or_two_per_run() {
        let mut p = Predictor::new();
        let frames: Vec<_> = (0..400).map(|i| Some(i / 20 % 2)).collect();
        assert!(right(&mut p, &frames) >= 400 - 2 * 20);
        assert!(p.is_worth_it());
    }

    #[test]
    fn guessing_ends_where_most_frames_are_of_others_and_begins_again_when_they_are_gone() {
        let mut p = Predictor::new();
        p.placed(0);
        // No pattern: xorshift.
        let mut x = 0x2545_f491u32;
        let mut any = || {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            x.is_multiple_of(4)
        };
        let mixed: Vec<_> = (0..400).map(|_| any().then_some(0)).collect();
        // Whatever is guessed is guessed for the posted flow, or the score would not tell.
        for f in mixed {
            p.habits = [Habit::default(); HABITS];
            p.last = 0;
            p.record(f, f.is_some(), 60_000);
        }
        assert!(!p.is_worth_it());
        right(&mut p, &[Some(0); 60]);
        assert!(p.is_worth_it());
    }

    #[test]
    fn a_flow_that_is_gone_is_not_guessed() {
        let mut p = Predictor::new();
        p.placed(3);
        right(&mut p, &[Some(3); 10]);
        p.forget(3);
        assert_eq!(p.predict(), None);
        p.placed(4);
        assert_eq!(p.predict(), Some(4));
    }
}
