//! The turn of an event loop: from a wait of its poll set that returned ready sockets to its next wait.
//!
//! ```text
//!   wait ─► flush ─► receive ─► ready sockets ─► read, write, write, ... ─► wait ─► flush ─► ...
//!                                └──────────── the turn ─────────────┘
//! ```
//!
//! Calls of the turn leave their frames in the transmit burst, and ACKs wait for the answers that carry them. The turn
//! ends early, and its frames leave, when a call of another thread takes the lock, when the thread waits for
//! something else, and at the next tick of the service thread. After [`TURN_LIMIT`] each call sends for itself.

use std::num::NonZeroUsize;

use fulmar_stack::base::{Duration, Instant};

use super::WatchedShard;
use crate::runtime::reentry::this_thread;

/// How long the frames of a turn may wait for its end: as long as an ACK may wait for the next call. A longer turn is
/// mostly computation of the program, and gains little from fewer crossings.
const TURN_LIMIT: Duration = Duration::from_millis(2);

impl WatchedShard {
    /// Ends the previous turn and starts the next one of the calling thread: sends deferred frames, then receives at
    /// most `budget` frames.
    pub(crate) fn next_turn(&mut self, now: Instant, budget: usize) -> usize {
        self.flush_turn(now);
        self.turn_of = NonZeroUsize::new(this_thread());
        self.shard.set_transmit_deferred(Some(now + TURN_LIMIT));
        self.take_hand_offs();
        let came = self.shard.step(now, budget);
        self.dispatch();
        came
    }

    /// Sends deferred frames, without ending the turn.
    #[inline]
    pub(crate) fn flush_turn(&mut self, now: Instant) {
        if self.turn_of.is_some() && self.shard.has_deferred() {
            self.shard.step(now, 0);
            self.dispatch();
        }
    }

    /// Ends the turn, if there is one: sends deferred frames; from now on calls send their own frames.
    #[inline]
    pub(crate) fn end_turn(&mut self, now: Instant) {
        if self.turn_of.is_some() {
            self.end_turn_now(now);
        }
    }

    #[inline(never)]
    fn end_turn_now(&mut self, now: Instant) {
        self.flush_turn(now);
        self.turn_of = None;
        self.shard.set_transmit_deferred(None);
    }

    /// Whether a turn of another thread is under way.
    #[inline(always)]
    pub(crate) fn is_in_turn_of_other(&self) -> bool {
        self.turn_of.is_some_and(|thread| thread.get() != this_thread())
    }

    /// Whether a turn, of any thread, is under way and calls at `now` are deferred: the next wait of its loop runs the
    /// stack.
    #[inline]
    pub(crate) fn is_in_turn(&self, now: Instant) -> bool {
        self.turn_of.is_some() && self.shard.is_transmit_deferred(now)
    }
}
