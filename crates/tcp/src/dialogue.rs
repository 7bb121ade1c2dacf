//! Whether the two ends take turns, message and response: then the response carries the ACK of the message (RFC 9293
//! section 3.8.6.3; Linux: pingpong mode).
//!
//! A connection is interactive when data has carried an ACK that was not sent before, or when several messages in a row
//! were each answered before the next one. It is no longer when the delayed ACK timer expires or a second message comes
//! before the response: the peer may have held that one back for the ACK of the first (Nagle). Linux asks only
//! whether data was sent within the delayed ACK of data received, so that such a peer waits 40 ms for each response.

/// Messages that are answered in turn before their ACKs wait for the response.
const ENOUGH: u8 = 4;

/// What the exchange has been so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Dialogue {
    /// A message was read, and no data was sent since.
    is_unanswered: bool,
    /// Messages in a row that were answered before the next one, up to [`ENOUGH`].
    answered: u8,
}

impl Dialogue {
    /// Whether an ACK waits for the response.
    #[inline]
    pub(crate) fn is_interactive(self) -> bool {
        self.answered >= ENOUGH
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
            self.answered = ENOUGH;
        } else if self.is_unanswered {
            self.answered = self.answered.saturating_add(1).min(ENOUGH);
        }
        self.is_unanswered = false;
    }

    /// The delayed ACK timer has expired: there was no response in time.
    pub(crate) fn on_delayed_ack(&mut self) {
        *self = Dialogue::default();
    }
}
