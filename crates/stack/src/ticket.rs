//! What stands for a posted buffer in the hands of whoever waits for it.

use std::sync::Arc;

use fulmar_base::SlotId;
use fulmar_mbuf::RecvBuf;
use fulmar_socket::SocketError;
use fulmar_socket::posted::Rule;

use crate::completion::Completion;
use crate::host::lock;
use crate::sync::{AtomicBool, AtomicU8, AtomicUsize, Mutex, Ordering};

/// How a posted buffer ended.
#[derive(Debug)]
pub struct RecvOutcome {
    /// The buffer with what it received; `None` if its stack went away with it.
    pub buf: Option<RecvBuf>,
    /// Why it has nothing, if that is not the end of the stream.
    pub error: Option<SocketError>,
}

/// What stands for a posted buffer until it is over, and then for its outcome.
#[derive(Default)]
pub struct RecvTicket {
    /// Tells whoever waits.
    pub completion: Completion,
    /// One of the three below. Becomes [`OVER`] when the outcome lies there and its lock is released, so
    /// that a signal handler that sees it finds the lock free.
    state: AtomicU8,
    /// A signal handler let go of it.
    is_unwanted: AtomicBool,
    outcome: Mutex<Outcome>,
}

/// The buffer is posted.
const OPEN: u8 = 0;
/// The outcome is there to be taken.
const OVER: u8 = 1;
/// It was taken, or nobody wants it.
const TAKEN: u8 = 2;

#[derive(Default)]
struct Outcome {
    outcome: Option<RecvOutcome>,
    /// Counts those of its connection that nobody has taken; kept for the next buffer, which is likely to
    /// be of the same connection.
    untaken: Arc<AtomicUsize>,
}

impl RecvTicket {
    /// Whether it is over, taken or not.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.state.load(Ordering::Acquire) != OPEN
    }

    /// As new, to be posted with another buffer.
    pub fn renew(&mut self) {
        self.completion.renew();
        self.state = AtomicU8::new(OPEN);
    }

    /// The outcome, once.
    pub fn take(&self) -> Option<RecvOutcome> {
        if self.state.load(Ordering::Acquire) != OVER {
            return None;
        }
        let mut o = lock(&self.outcome);
        let outcome = o.outcome.take()?;
        self.state.store(TAKEN, Ordering::Release);
        o.untaken.fetch_sub(1, Ordering::Relaxed);
        Some(outcome)
    }

    /// Under the shard's lock, as all that ends a ticket.
    pub(crate) fn put(&self, outcome: RecvOutcome, untaken: &Arc<AtomicUsize>) {
        if self.is_over() {
            return;
        }
        untaken.fetch_add(1, Ordering::Relaxed);
        let mut o = lock(&self.outcome);
        if !Arc::ptr_eq(&o.untaken, untaken) {
            o.untaken = Arc::clone(untaken);
        }
        o.outcome = Some(outcome);
        drop(o);
        self.state.store(OVER, Ordering::Release);
    }

    /// Whoever waits for it has the lock and gets the outcome without it.
    pub(crate) fn pass(&self) {
        self.state.store(TAKEN, Ordering::Release);
        self.completion.end_unwatched();
    }

    /// Its holder is gone, and the shard will look.
    pub(crate) fn mark_unwanted(&self) {
        self.is_unwanted.store(true, Ordering::Release);
    }

    /// Whether that was so, asked once.
    pub(crate) fn take_unwanted(&self) -> bool {
        self.is_unwanted.swap(false, Ordering::AcqRel)
    }

    /// Nobody will ask any more.
    pub(crate) fn give_up(&self) {
        let _ = self.turn(OPEN, TAKEN);
    }

    /// It is to come all the same.
    pub(crate) fn go_on(&self) {
        let _ = self.turn(TAKEN, OPEN);
    }

    fn turn(&self, from: u8, to: u8) -> Result<u8, u8> {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
    }
}

/// A ticket of which nobody else asks for the outcome or when it is there.
pub struct SoleTicket<'a>(pub(crate) &'a RecvTicket);

impl<'a> SoleTicket<'a> {
    /// The exclusive borrow of what holds the ticket says that nobody else asks through it.
    pub fn of(holder: &'a mut Arc<RecvTicket>) -> SoleTicket<'a> {
        SoleTicket(holder)
    }
}

/// A buffer to be posted in the same step.
pub struct Post<'a> {
    /// The connection.
    pub id: SlotId,
    /// The buffer.
    pub buf: RecvBuf,
    /// It is that of a read that waits: so many bytes at its front have come another way, and stay.
    pub read: Option<usize>,
    /// When it is given back although it is not full.
    pub rule: Rule,
    /// What stands for it.
    pub ticket: &'a Arc<RecvTicket>,
}

/// Whoever gave it up may have done so at the moment when it was over: nobody takes the buffer then, and the
/// socket must not look readable for it.
impl Drop for RecvTicket {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_nobody_can_take_any_more_makes_no_socket_readable() {
        let untaken = Arc::new(AtomicUsize::new(0));
        let has_untaken = || untaken.load(Ordering::Relaxed) > 0;
        let ticket = Arc::new(RecvTicket::default());
        let buf = Some(RecvBuf::with_capacity(16));
        ticket.put(RecvOutcome { buf, error: None }, &untaken);
        assert!(has_untaken());
        let last = Arc::clone(&ticket);
        drop(ticket);
        assert!(has_untaken());
        drop(last);
        assert!(!has_untaken());
    }
}
