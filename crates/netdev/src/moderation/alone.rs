//! Frames that come alone: where to save the look that finds nothing.
//!
//! A reader that empties a descriptor reads once in vain for each burst. Where questions and
//! answers come one at a time that is a second system call for every frame, before it is answered.
//! So once short frames have come alone for a while the device is asked for one, and not
//! whether there is another: the next poll, or the descriptor on which the thread sleeps, will tell.
//! Now and then it is asked for all the same; a second frame ends it.

/// Bytes of a frame up to which it may be a question or an answer; longer ones are parts of a stream.
const SHORT_BYTES: usize = 256;
/// Frames in a row that came alone, before the next one is expected to.
const ENOUGH: u8 = 8;
/// Frames asked for alone between two looks for more.
const BETWEEN: u8 = 15;

/// Whether the next frame is expected alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone {
    /// Frames in a row that were found to be alone, up to [`ENOUGH`].
    seen: u8,
    /// Frames left to be asked for alone.
    left: u8,
    /// The last poll asked for one.
    asked_one: bool,
}

impl Alone {
    /// How many frames the next poll asks for, of `room`.
    pub fn ask(&mut self, room: usize) -> usize {
        self.asked_one = self.seen >= ENOUGH && self.left > 0 && room > 1;
        if self.asked_one { 1 } else { room }
    }

    /// What that poll brought.
    pub fn came(&mut self, frames: usize, bytes: usize) {
        let is_alone = frames == 1 && bytes <= SHORT_BYTES;
        match (frames, self.asked_one) {
            (0, _) => {}
            (_, true) if is_alone => self.left -= 1,
            (_, false) if is_alone => {
                self.seen = (self.seen + 1).min(ENOUGH);
                self.left = BETWEEN;
            }
            _ => self.seen = 0,
        }
        self.asked_one = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls with these outcomes; how many frames each asked for.
    fn asked(alone: &mut Alone, polls: impl IntoIterator<Item = (usize, usize)>) -> Vec<usize> {
        let ask = |(frames, bytes): (usize, usize)| {
            let asked = alone.ask(64);
            alone.came(frames.min(asked), bytes);
            asked
        };
        polls.into_iter().map(ask).collect()
    }

    fn settled() -> Alone {
        let mut alone = Alone::default();
        assert_eq!(asked(&mut alone, [(1, 60); ENOUGH as usize]), [64; ENOUGH as usize]);
        alone
    }

    #[test]
    fn frames_that_come_alone_are_asked_for_alone_but_not_for_ever() {
        let asked = asked(&mut settled(), [(1, 60); 3 * (BETWEEN as usize + 1)]);
        let looks_for_more = asked.iter().filter(|n| **n > 1).count();
        assert_eq!((asked[0], looks_for_more), (1, 3));
    }

    #[test]
    fn an_empty_poll_says_nothing() {
        let asked = asked(&mut settled(), [(0, 0), (0, 0), (1, 60), (0, 0)]);
        assert_eq!(asked, [1; 4]);
    }

    #[test]
    fn a_second_frame_or_a_long_one_ends_it() {
        let mut alone = settled();
        let burst = asked(&mut alone, [(1, 60); BETWEEN as usize]);
        assert_eq!(burst, [1; BETWEEN as usize]);
        assert_eq!(asked(&mut alone, [(2, 120), (2, 120), (1, 60)]), [64; 3]);
        assert_eq!(asked(&mut settled(), [(1, 1500), (1, 60)]), [1, 64]);
    }

    #[test]
    fn a_poll_that_may_take_but_one_frame_teaches_nothing_new() {
        let mut alone = Alone::default();
        for _ in 0..100 {
            assert_eq!(alone.ask(1), 1);
            alone.came(1, 60);
        }
        assert_eq!(alone.ask(64), 1, "as if it had been alone");
    }
}
