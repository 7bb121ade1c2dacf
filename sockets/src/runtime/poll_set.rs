//! The state of a poll set: which of its sockets may be ready, and one eventfd for all of them.
//!
//! Level-triggered like `epoll`: a socket stays a candidate until a wait finds it not ready. The eventfd is written
//! once per drain, and only after the program has asked for the descriptor, so that a busy set costs no system calls.
//! A member is listed at most once and is removed when it leaves, so the list is bounded by the members.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use fulmar_stack::base::{SlotId, SocketHandle};

use crate::runtime::sync::{AtomicBool, Mutex, Ordering, lock};
use crate::runtime::sys;
use crate::runtime::waiter::Waiter;

/// A poll set, shared by its owner and its sockets.
pub struct PollSetCore {
    /// Members that may be ready. Those of one shard are changed under its lock only.
    candidates: Mutex<VecDeque<SocketHandle>>,
    event: OwnedFd,
    /// Waiters were woken since the last drain.
    signalled: AtomicBool,
    /// The descriptor was written after it was last cleared. Set after the write: a drain that misses a write leaves
    /// the descriptor readable once too often, not for ever.
    is_written: AtomicBool,
    /// The program may sleep on the descriptor, so that it must be written.
    is_exposed: AtomicBool,
    /// Wakers or descriptors of the host may be ready, which only the owner of the set knows.
    has_others: AtomicBool,
    /// The program runs an event loop over the set.
    is_event_loop: bool,
    /// The threads that wait inside the stack.
    sleepers: Mutex<Vec<Arc<Waiter>>>,
}

impl PollSetCore {
    /// An empty set.
    ///
    /// # Errors
    /// The errno of `eventfd` (too many descriptors).
    pub fn new() -> std::io::Result<PollSetCore> {
        Ok(PollSetCore {
            candidates: Mutex::new(VecDeque::new()),
            event: sys::event_fd()?,
            signalled: AtomicBool::new(false),
            is_written: AtomicBool::new(false),
            is_exposed: AtomicBool::new(false),
            has_others: AtomicBool::new(false),
            is_event_loop: false,
            sleepers: Mutex::new(Vec::new()),
        })
    }

    /// An empty set of an event loop.
    ///
    /// # Errors
    /// As [`PollSetCore::new`].
    pub(crate) fn of_event_loop() -> std::io::Result<PollSetCore> {
        Ok(PollSetCore { is_event_loop: true, ..PollSetCore::new()? })
    }

    /// Whether a wait that returns ready sockets begins a turn of an event loop, whose next wait follows. Not if the
    /// loop may sleep on the descriptor instead.
    pub(crate) fn begins_turns(&self) -> bool {
        self.is_event_loop && !self.is_exposed()
    }

    /// Readable while a member may be ready.
    pub fn raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Lists a member that may be ready. True: [`PollSetCore::signal`] is to be called.
    pub fn mark(&self, socket: SocketHandle) -> bool {
        lock(&self.candidates).push_back(socket);
        !self.signalled.swap(true, Ordering::SeqCst)
    }

    /// Removes a listed member. Searched from the end, where the members reported last are, which leave most often.
    pub fn forget(&self, socket: SocketHandle) {
        let mut list = lock(&self.candidates);
        if let Some(i) = list.iter().rposition(|s| *s == socket) {
            list.remove(i);
        }
    }

    /// Whether members may be ready.
    pub(crate) fn has_candidates(&self) -> bool {
        self.has_others() || !lock(&self.candidates).is_empty()
    }

    /// Wakers or descriptors may be ready: ends waits until [`PollSetCore::take_others`]. Takes locks that a signal
    /// handler must not meet.
    pub(crate) fn signal_others(&self) {
        self.has_others.store(true, Ordering::SeqCst);
        self.signal();
    }

    /// Whether [`PollSetCore::signal_others`] was called since the last [`PollSetCore::take_others`].
    pub(crate) fn has_others(&self) -> bool {
        self.has_others.load(Ordering::SeqCst)
    }

    /// The same, and clears it. Called after [`PollSetCore::drain`], which clears the descriptor.
    pub(crate) fn take_others(&self) -> bool {
        self.has_others() && self.has_others.swap(false, Ordering::SeqCst)
    }

    /// Wakes the threads that wait for the set, in the stack or on the descriptor.
    pub fn signal(&self) {
        if self.is_exposed() {
            self.write();
        }
        lock(&self.sleepers).iter().for_each(|w| w.wake());
    }

    fn write(&self) {
        sys::signal_event(self.raw_fd());
        self.is_written.store(true, Ordering::Release);
    }

    /// From now on the program may sleep on the descriptor. True the first time.
    pub fn expose(&self) -> bool {
        let first = !self.is_exposed.swap(true, Ordering::SeqCst);
        if first && (self.signalled.load(Ordering::SeqCst) || self.has_others()) {
            self.write();
        }
        first
    }

    /// Whether [`PollSetCore::expose`] was called.
    pub(crate) fn is_exposed(&self) -> bool {
        self.is_exposed.load(Ordering::SeqCst)
    }

    /// A thread is about to wait in the stack.
    pub(crate) fn add_sleeper(&self, w: &Arc<Waiter>) {
        lock(&self.sleepers).push(Arc::clone(w));
    }

    /// It no longer waits.
    pub(crate) fn remove_sleeper(&self, w: &Arc<Waiter>) {
        lock(&self.sleepers).retain(|s| !Arc::ptr_eq(s, w));
    }

    /// Takes the first candidates of a shard, `most` at most: the cost of a wait depends on the sockets that it
    /// reports, not on the number that is ready. If no candidate remains, the descriptor stops being readable.
    pub fn drain(&self, shard: u16, most: usize) -> Vec<SlotId> {
        // In this order: the candidate of a write that is cleared here was listed before `signalled` is reset, so
        // that it is seen below.
        if self.is_written.swap(false, Ordering::AcqRel) {
            sys::clear_event(self.raw_fd());
        }
        self.signalled.store(false, Ordering::Release);
        let (own, others) = {
            let mut list = lock(&self.candidates);
            let mut own = Vec::new();
            for _ in 0..list.len() {
                if own.len() >= most {
                    break;
                }
                match list.pop_front() {
                    Some(s) if s.shard == shard => own.push(s.slot),
                    Some(s) => list.push_back(s),
                    None => break,
                }
            }
            (own, !list.is_empty())
        };
        // They may have been listed between the two resets, without a wake-up.
        if others {
            self.signalled.swap(true, Ordering::SeqCst);
            self.signal();
        }
        own
    }
}

impl AsFd for PollSetCore {
    /// As [`PollSetCore::raw_fd`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(shard: u16, index: u32) -> SocketHandle {
        SocketHandle { shard, slot: SlotId { index, generation: 0 } }
    }

    fn is_readable(set: &PollSetCore) -> bool {
        use std::os::fd::AsRawFd;
        let over = sys::timer_fd().unwrap();
        sys::set_timer(over.as_raw_fd(), fulmar_stack::base::Instant::ZERO);
        sys::sleep_on(None, set.raw_fd(), over.as_raw_fd())
    }

    #[test]
    fn a_waker_from_before_the_descriptor_was_exposed_makes_it_readable() {
        let set = PollSetCore::new().unwrap();
        set.signal_others();
        assert!(set.expose());
        assert!(is_readable(&set));
    }

    #[test]
    fn the_descriptor_is_readable_from_a_mark_to_the_drain() {
        let set = PollSetCore::new().unwrap();
        let id = at(0, 1);
        assert!(set.mark(id));
        set.signal();
        assert!(!is_readable(&set), "the descriptor is not exposed");
        assert!(set.expose());
        assert!(is_readable(&set), "candidates from before");
        assert_eq!(set.drain(0, 9), [id.slot]);
        assert!(!is_readable(&set));
        assert!(set.mark(id));
        set.signal();
        assert!(is_readable(&set));
    }

    #[test]
    fn a_signal_that_arrives_after_the_drain_does_not_stay_for_ever() {
        let set = PollSetCore::new().unwrap();
        set.expose();
        assert!(set.mark(at(0, 1)));
        assert_eq!(set.drain(0, 9).len(), 1);
        set.signal();
        assert!(is_readable(&set), "once too often");
        assert!(set.drain(0, 9).is_empty());
        assert!(!is_readable(&set));
    }

    #[test]
    fn a_drain_takes_so_many_and_the_others_keep_their_turn_and_the_descriptor_readable() {
        let set = PollSetCore::new().unwrap();
        set.expose();
        for (shard, index) in [(0, 1), (1, 2), (0, 3), (0, 4)] {
            if set.mark(at(shard, index)) {
                set.signal();
            }
        }
        let index = |own: Vec<SlotId>| own.iter().map(|s| s.index).collect::<Vec<_>>();
        assert_eq!(index(set.drain(0, 2)), [1, 3]);
        assert!(is_readable(&set));
        set.forget(at(0, 9));
        set.mark(at(0, 5));
        set.forget(at(0, 5));
        assert_eq!(index(set.drain(0, 2)), [4]);
        assert_eq!(index(set.drain(1, 2)), [2]);
        assert!(!is_readable(&set) && !set.has_candidates());
    }

    #[test]
    fn wakers_and_descriptors_are_candidates_until_the_owner_takes_them() {
        let set = PollSetCore::new().unwrap();
        set.expose();
        assert!(!set.take_others());
        set.signal_others();
        assert!(set.has_candidates() && is_readable(&set));
        assert!(set.drain(0, 9).is_empty());
        assert!(set.has_candidates(), "a drain takes sockets");
        assert!(set.take_others() && !set.take_others());
        assert!(!set.has_candidates() && !is_readable(&set));
    }

    #[test]
    fn candidates_of_other_shards_stay_and_keep_the_descriptor_readable() {
        let set = PollSetCore::new().unwrap();
        set.expose();
        for shard in [0, 1, 0] {
            if set.mark(at(shard, u32::from(shard) + 5)) {
                set.signal();
            }
        }
        assert_eq!(set.drain(0, 9).len(), 2);
        assert!(is_readable(&set) && set.has_candidates());
        assert_eq!(set.drain(1, 9), [at(1, 6).slot]);
        assert!(!is_readable(&set) && !set.has_candidates());
    }
}
