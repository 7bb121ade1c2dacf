//! Tickets: the program's handles of posted buffers.

use std::sync::Arc;

use fulmar_stack::base::SlotId;
use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::socket::SocketError;
use fulmar_stack::socket::posted::CompletionPolicy;

use crate::runtime::completion::Completion;
use crate::runtime::sync::{AtomicBool, AtomicU8, AtomicU64, Mutex, Ordering, lock};
use fulmar_stack::shard::{PostCompletion, PostToken, RecvOutcome, Slab, Unclaimed};

/// The handle of a posted buffer, which receives its outcome.
#[derive(Default)]
pub struct RecvTicket {
    /// Wakes the waiters.
    pub completion: Completion,
    /// [`OPEN`], [`OVER`] or [`TAKEN`]. Becomes `OVER` after the outcome is stored and its lock released, so that a
    /// signal handler that sees it finds the lock free.
    state: AtomicU8,
    /// A signal handler dropped it.
    is_unwanted: AtomicBool,
    /// Its name in the shard while the buffer is posted. Under the shard lock.
    token: AtomicU64,
    outcome: Mutex<Option<Outcome>>,
}

/// The buffer is posted.
const OPEN: u8 = 0;
/// The outcome can be taken.
const OVER: u8 = 1;
/// The outcome was taken, or the ticket was dropped.
const TAKEN: u8 = 2;

struct Outcome {
    outcome: RecvOutcome,
    /// Keeps the socket readable until the outcome is taken; `None` if the connection is gone.
    _unclaimed: Option<Unclaimed>,
}

impl RecvTicket {
    /// Whether the buffer has completed, its outcome taken or not.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.state.load(Ordering::Acquire) != OPEN
    }

    /// Resets the ticket, to be posted with another buffer.
    pub fn renew(&mut self) {
        self.completion.renew();
        self.state = AtomicU8::new(OPEN);
    }

    /// The outcome, once.
    pub fn take(&self) -> Option<RecvOutcome> {
        if self.state.load(Ordering::Acquire) != OVER {
            return None;
        }
        let taken = lock(&self.outcome).take()?;
        self.state.store(TAKEN, Ordering::Release);
        Some(taken.outcome)
    }

    /// Stores the outcome of an open ticket. Under the shard lock.
    pub(crate) fn put(&self, outcome: RecvOutcome, unclaimed: Option<Unclaimed>) {
        if self.is_over() {
            return;
        }
        *lock(&self.outcome) = Some(Outcome { outcome, _unclaimed: unclaimed });
        self.state.store(OVER, Ordering::Release);
    }

    /// Completes the ticket for a waiter that has the shard lock and gets the outcome as a return value.
    pub(crate) fn complete_directly(&self) {
        self.state.store(TAKEN, Ordering::Release);
        self.completion.end_unwatched();
    }

    /// Its holder was dropped in a signal handler, without the shard lock; the shard checks by
    /// [`RecvTicket::take_unwanted`].
    pub(crate) fn mark_unwanted(&self) {
        self.is_unwanted.store(true, Ordering::Release);
    }

    /// Whether its holder was dropped so; true once.
    pub(crate) fn take_unwanted(&self) -> bool {
        self.is_unwanted.swap(false, Ordering::AcqRel)
    }

    /// Its name in the shard while the buffer is posted. Under the shard lock.
    pub(crate) fn token(&self) -> PostToken {
        PostToken(self.token.load(Ordering::Relaxed))
    }
}

/// The tickets of the buffers that are posted in a shard. Dropped with the shard, it completes those that are left.
#[derive(Default)]
pub(crate) struct Tickets(Slab<Arc<RecvTicket>>);

fn slot_of(token: PostToken) -> SlotId {
    SlotId { index: token.0 as u32, generation: (token.0 >> 32) as u32 }
}

impl Tickets {
    /// Adds the ticket of a buffer that is about to be posted.
    pub(crate) fn add(&mut self, ticket: &Arc<RecvTicket>) -> PostToken {
        let slot = self.0.insert(Arc::clone(ticket));
        let token = u64::from(slot.generation) << 32 | u64::from(slot.index);
        ticket.token.store(token, Ordering::Relaxed);
        PostToken(token)
    }

    /// Removes the ticket of a buffer that was not posted, or has completed.
    pub(crate) fn remove(&mut self, token: PostToken) -> Option<Arc<RecvTicket>> {
        self.0.remove(slot_of(token))
    }

    /// The ticket of a buffer that is posted.
    pub(crate) fn get(&self, token: PostToken) -> Option<&Arc<RecvTicket>> {
        self.0.get(slot_of(token))
    }

    /// Completes a buffer: its ticket gets the outcome. The waiters are woken when the returned ticket is dropped.
    pub(crate) fn end(&mut self, over: PostCompletion) -> Option<Arc<RecvTicket>> {
        let ticket = self.remove(over.token)?;
        ticket.put(over.outcome, Some(over.unclaimed));
        Some(ticket)
    }
}

impl Drop for Tickets {
    fn drop(&mut self) {
        for id in self.0.ids() {
            let Some(ticket) = self.0.remove(id) else { continue };
            ticket.put(RecvOutcome { buf: None, error: Some(SocketError::NetworkDown) }, None);
            ticket.completion.finish();
        }
    }
}

/// Completed tickets. Dropping it wakes their waiters, so it is dropped without the lock.
#[derive(Default)]
pub struct Received(smallvec::SmallVec<[Arc<RecvTicket>; 4]>);

impl Received {
    /// Adds a completed ticket.
    pub(crate) fn push(&mut self, ticket: Arc<RecvTicket>) {
        self.0.push(ticket);
    }

    /// Appends the completed tickets of another poll.
    pub(crate) fn append(&mut self, mut other: Received) {
        self.0.append(&mut other.0);
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|t| t.completion.finish());
    }
}

/// A ticket with one owner: no other handle can take its outcome.
pub(crate) struct SoleTicket<'a>(pub(crate) &'a RecvTicket);

impl<'a> SoleTicket<'a> {
    /// `&mut` of the ticket's holder proves that it is the only owner.
    pub(crate) fn of(holder: &'a mut Arc<RecvTicket>) -> SoleTicket<'a> {
        SoleTicket(holder)
    }
}

/// A buffer to be posted in the same step.
pub struct Post<'a> {
    /// The connection.
    pub id: SlotId,
    /// The buffer.
    pub buf: RecvBuf,
    /// When it completes although it is not full.
    pub rule: CompletionPolicy,
    /// The ticket.
    pub ticket: &'a Arc<RecvTicket>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::sync::AtomicUsize;

    fn over(token: PostToken, count: &Arc<AtomicUsize>) -> PostCompletion {
        let outcome = RecvOutcome { buf: Some(RecvBuf::with_capacity(16)), error: None };
        PostCompletion { token, outcome, unclaimed: Unclaimed::of(count) }
    }

    #[test]
    fn a_buffer_whose_ticket_is_gone_makes_no_socket_readable() {
        let unclaimed = Arc::new(AtomicUsize::new(0));
        let has_unclaimed = || unclaimed.load(Ordering::Relaxed) > 0;
        let (mut tickets, ticket) = (Tickets::default(), Arc::new(RecvTicket::default()));
        let token = tickets.add(&ticket);
        let last = tickets.end(over(token, &unclaimed));
        assert!(has_unclaimed() && last.is_some());
        drop(ticket);
        assert!(has_unclaimed());
        drop(last);
        assert!(!has_unclaimed());
        let late = tickets.end(over(token, &unclaimed));
        assert!(late.is_none() && !has_unclaimed(), "its ticket is gone");
    }

    #[test]
    fn tickets_that_are_left_when_their_shard_goes_are_over() {
        let (mut tickets, ticket) = (Tickets::default(), Arc::new(RecvTicket::default()));
        tickets.add(&ticket);
        assert!(!ticket.is_over());
        drop(tickets);
        assert!(ticket.completion.is_done());
        let outcome = ticket.take().unwrap();
        assert_eq!((outcome.buf.is_some(), outcome.error), (false, Some(SocketError::NetworkDown)));
    }
}
