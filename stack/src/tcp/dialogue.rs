//! Detection of interactive use (Linux: pingpong mode): messages and responses alternate, so that a response carries
//! the ACK of its message (RFC 9293 section 3.8.6.3).
//!
//! A connection is interactive when data has carried an ACK that was not sent before, or when several messages in a row
//! were each answered before the next one. Interactive use ends when the delayed ACK timer expires or a second message
//! arrives before the response: the peer may have held the second message back until the ACK of the first (Nagle).
//! Linux checks only that data was sent within the delayed ACK time of data received; there such a peer waits 40 ms for
//! each response.

/// Messages answered in a row from which on the use is interactive.
const INTERACTIVE_AFTER: u8 = 4;

/// The exchange so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Dialogue {
    /// A message was read, and no data was sent since.
    is_unanswered: bool,
    /// Messages in a row that were answered before the next one, up to [`INTERACTIVE_AFTER`].
    answered: u8,
}

impl Dialogue {
    /// Whether an ACK waits for the response.
    #[inline]
    pub(crate) fn is_interactive(self) -> bool {
        self.answered >= INTERACTIVE_AFTER
    }

    /// The user has read all there was, and the peer had pushed it.
    #[inline]
    pub(crate) fn on_message(&mut self) {
        if self.is_unanswered {
            self.answered = 0;
        }
        self.is_unanswered = true;
    }

    /// New data was sent; with an ACK of data that was not acknowledged before, or without.
    #[inline]
    pub(crate) fn on_data_sent(&mut self, carries_ack: bool) {
        if carries_ack {
            self.answered = INTERACTIVE_AFTER;
        } else if self.is_unanswered {
            self.answered = self.answered.saturating_add(1).min(INTERACTIVE_AFTER);
        }
        self.is_unanswered = false;
    }

    /// The delayed ACK timer has expired: there was no response in time.
    pub(crate) fn on_delayed_ack(&mut self) {
        *self = Dialogue::default();
    }
}
