//! The inbox of a shard: requests that need no answer, queued by threads that found the lock taken.
//!
//! A signal handler may have interrupted a call that holds the inbox's own lock. It can only drop sockets and posted
//! buffers then, for which there are a few lock-free slots.

use std::sync::Arc;

use fulmar_stack::base::SlotId;
use fulmar_stack::mbuf::Chain;
use fulmar_stack::socket::Reservation;
use fulmar_stack::tcp::LoanCharge;

use crate::runtime::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, fence, lock};
use crate::runtime::ticket::RecvTicket;

/// A request that needs no answer, performed by the holder of the lock.
#[allow(clippy::exhaustive_enums, reason = "internal: its users are released with it")]
pub enum Request {
    /// The bytes of a write are ready.
    Commit(SlotId, Reservation),
    /// As `Commit`, for the end of a write: releases the send lock.
    CommitLast(SlotId, Reservation),
    /// A write ended early: releases the send lock.
    EndWrite(SlotId),
    /// A sendfile ended, successfully or not.
    EndSendFile(SlotId),
    /// Releases a reservation for a part of a file that was not filled; the write continues.
    GiveBack(SlotId, Reservation),
    /// A write ended early: releases its reservation and the send lock.
    Abandon(SlotId, Reservation),
    /// A read has copied the bytes that it had taken.
    ReadDone(SlotId, Chain),
    /// A loan is returned.
    LoanDone(SlotId, Chain, LoanCharge),
    /// The ticket of a posted buffer was dropped.
    AbandonPost(SlotId, Arc<RecvTicket>),
    /// The same for all tickets of a socket that signal handlers dropped.
    AbandonUnwanted(SlotId),
    /// A datagram's payload was copied.
    Free(Chain),
    /// A socket was dropped.
    Close(SlotId),
    /// Runs due timers and polls the device.
    Poll,
}

/// Queued requests from which on a thread that posts one waits for the lock. Each thread has at most one request under
/// way, plus closes.
pub(crate) const INBOX_LIMIT: usize = 65_536;

/// Limit of the sockets that signal handlers can close between two drains, and of the sockets whose posted buffers they
/// can drop.
const SLOTS: usize = 8;
const EMPTY: u64 = u64::MAX;

/// A flag in the number of requests: the stack has failed.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// Sockets named by signal handlers; lock-free.
struct Slots([AtomicU64; SLOTS]);

impl Slots {
    fn new() -> Slots {
        Slots(std::array::from_fn(|_| AtomicU64::new(EMPTY)))
    }

    /// False: all slots are taken.
    fn put(&self, id: SlotId) -> bool {
        let word = u64::from(id.generation) << 32 | u64::from(id.index);
        let put = |slot: &AtomicU64| {
            slot.compare_exchange(EMPTY, word, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        self.0.iter().any(put)
    }

    /// Empties the slots; returns how many were taken.
    fn drain(&self, mut f: impl FnMut(SlotId)) -> usize {
        let mut done = 0;
        for slot in &self.0 {
            let word = slot.swap(EMPTY, Ordering::AcqRel);
            if word != EMPTY {
                f(SlotId { index: word as u32, generation: (word >> 32) as u32 });
                done += 1;
            }
        }
        done
    }
}

/// The inbox.
pub(crate) struct Inbox {
    requests: Mutex<Vec<Request>>,
    len: AtomicUsize,
    unwanted: Slots,
    closes: Slots,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox {
            requests: Mutex::new(Vec::new()),
            len: AtomicUsize::new(0),
            unwanted: Slots::new(),
            closes: Slots::new(),
        }
    }
}

impl Inbox {
    /// Queues a request; returns how many are queued. The caller tries the lock once more afterwards: its holder may
    /// have drained the inbox just before.
    pub(crate) fn push(&self, request: Request) -> usize {
        let mut requests = lock(&self.requests);
        requests.push(request);
        self.len.fetch_add(1, Ordering::SeqCst);
        requests.len()
    }

    /// Queues a close without a lock. If all slots are taken, the socket stays until its stack ends.
    pub(crate) fn push_close(&self, id: SlotId) {
        self.push_slot(&self.closes, id);
    }

    /// Queues, without a lock, that tickets of a socket were dropped. If all slots are taken, their buffers complete
    /// with the stream.
    pub(crate) fn push_unwanted(&self, id: SlotId) {
        self.push_slot(&self.unwanted, id);
    }

    fn push_slot(&self, slots: &Slots, id: SlotId) {
        self.len.fetch_add(1, Ordering::SeqCst);
        if !slots.put(id) {
            self.len.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// From now on it is never empty, so that every call that takes the lock sees that it is closed.
    pub(crate) fn close(&self) {
        if !self.is_closed() {
            self.len.fetch_or(CLOSED, Ordering::SeqCst);
        }
    }

    /// Whether [`Inbox::close`] was called.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.len.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Whether it is empty. For the holder of the lock, and, after [`after_release`], for the thread that has just
    /// released it.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Performs all requests in order, closes by signal handlers last. Returns how many there were. For the holder of
    /// the shard lock.
    pub(crate) fn drain(&self, mut perform: impl FnMut(Request)) -> usize {
        let mut requests = std::mem::take(&mut *lock(&self.requests));
        let mut done = requests.len();
        requests.drain(..).for_each(&mut perform);
        self.keep_storage(requests);
        done += self.unwanted.drain(|id| perform(Request::AbandonUnwanted(id)));
        done += self.closes.drain(|id| perform(Request::Close(id)));
        self.len.fetch_sub(done, Ordering::AcqRel);
        done
    }

    /// Keeps the storage for later requests, so that a steady state allocates nothing.
    fn keep_storage(&self, storage: Vec<Request>) {
        let mut requests = lock(&self.requests);
        if requests.is_empty() && requests.capacity() < storage.capacity() {
            *requests = storage;
        }
    }
}

/// Orders the release of the shard lock before the check of the inbox.
#[inline]
pub(crate) fn after_release() {
    // On x86-64 the release is a locked instruction, which orders all that follows.
    if cfg!(any(fulmar_loom, not(target_arch = "x86_64"))) {
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u32) -> SlotId {
        SlotId { index, generation: index + 7 }
    }

    fn closed(inbox: &Inbox) -> Vec<SlotId> {
        let mut ids = Vec::new();
        inbox.drain(|r| match r {
            Request::Close(id) => ids.push(id),
            _ => panic!("only closes were queued"),
        });
        ids
    }

    #[test]
    fn requests_come_out_in_order_and_only_once() {
        let inbox = Inbox::default();
        for i in 0..100 {
            assert_eq!(inbox.push(Request::Close(id(i))), i as usize + 1);
        }
        assert!(!inbox.is_empty());
        assert_eq!(closed(&inbox), (0..100).map(id).collect::<Vec<_>>());
        assert!(inbox.is_empty());
        assert_eq!(closed(&inbox), []);
    }

    #[test]
    fn signal_handlers_queue_a_bounded_number_of_closes() {
        let inbox = Inbox::default();
        (0..20).for_each(|i| inbox.push_close(id(i)));
        assert_eq!(closed(&inbox), (0..SLOTS as u32).map(id).collect::<Vec<_>>());
        assert!(inbox.is_empty());
        inbox.push_close(id(99));
        assert_eq!(closed(&inbox), [id(99)]);
        inbox.push_unwanted(id(3));
        inbox.push_close(id(3));
        let mut done = Vec::new();
        inbox.drain(|r| done.push(matches!(r, Request::AbandonUnwanted(i) if i == id(3))));
        assert_eq!(done, [true, false], "first its buffers");
        assert!(inbox.is_empty());
    }
}
