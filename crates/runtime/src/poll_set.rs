//! The inside of a poll set: which of its sockets may be ready, and one eventfd for all of them.
//!
//! Level-triggered like `epoll`: a socket stays in the list of candidates until a wait finds it not
//! ready. The eventfd is written only once per drain, and only if somebody outside may sleep on it,
//! so a busy set costs no system calls. Each member knows whether it is in the list and takes its
//! place out when it leaves, so the list is bounded by the members.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use fulmar_base::{SlotId, SocketHandle};

use crate::sync::{AtomicBool, Mutex, Ordering, lock};
use crate::sys;
use crate::waiter::Waiter;

/// A poll set, shared by its owner and its sockets.
pub struct PollSetCore {
    /// Those of one shard are changed under its lock only.
    candidates: Mutex<VecDeque<SocketHandle>>,
    event: OwnedFd,
    /// Somebody was told already that there are candidates.
    signalled: AtomicBool,
    /// The descriptor was written after it was last cleared. Set behind the write: the drain that
    /// misses a write leaves the descriptor readable once too often rather than for ever.
    is_written: AtomicBool,
    /// Somebody outside may sleep on the descriptor, so that it must be written.
    is_exposed: AtomicBool,
    /// Something beside the sockets may be ready: the owner of the set knows what.
    has_others: AtomicBool,
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
            sleepers: Mutex::new(Vec::new()),
        })
    }

    /// Readable while a member may be ready.
    pub fn raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// A member that is not in the list may be ready. True: [`PollSetCore::signal`] is to be called.
    pub fn mark(&self, socket: SocketHandle) -> bool {
        lock(&self.candidates).push_back(socket);
        !self.signalled.swap(true, Ordering::SeqCst)
    }

    /// A member that is in the list leaves it. Those reported last stand at the end, and are the likeliest
    /// to leave.
    pub fn forget(&self, socket: SocketHandle) {
        let mut list = lock(&self.candidates);
        if let Some(i) = list.iter().rposition(|s| *s == socket) {
            list.remove(i);
        }
    }

    /// Whether members may be ready.
    pub fn has_candidates(&self) -> bool {
        self.has_others() || !lock(&self.candidates).is_empty()
    }

    /// Something beside the sockets may be ready: ends waits until [`PollSetCore::take_others`]. Takes
    /// locks that a signal handler must not meet.
    pub fn signal_others(&self) {
        self.has_others.store(true, Ordering::SeqCst);
        self.signal();
    }

    /// Whether [`PollSetCore::signal_others`] was called since the last [`PollSetCore::take_others`].
    pub fn has_others(&self) -> bool {
        self.has_others.load(Ordering::SeqCst)
    }

    /// The same, once. To be called after [`PollSetCore::drain`], which clears the descriptor.
    pub fn take_others(&self) -> bool {
        self.has_others() && self.has_others.swap(false, Ordering::SeqCst)
    }

    /// Wakes whoever waits for the set: inside the stack, or on the descriptor.
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

    /// From now on somebody may sleep on the descriptor. True the first time.
    pub fn expose(&self) -> bool {
        let first = !self.is_exposed.swap(true, Ordering::SeqCst);
        if first && self.signalled.load(Ordering::SeqCst) {
            self.write();
        }
        first
    }

    /// Whether [`PollSetCore::expose`] was called.
    pub fn is_exposed(&self) -> bool {
        self.is_exposed.load(Ordering::SeqCst)
    }

    /// A thread is about to wait inside the stack.
    pub fn add_sleeper(&self, w: &Arc<Waiter>) {
        lock(&self.sleepers).push(Arc::clone(w));
    }

    /// It no longer waits.
    pub fn remove_sleeper(&self, w: &Arc<Waiter>) {
        lock(&self.sleepers).retain(|s| !Arc::ptr_eq(s, w));
    }

    /// Takes the first candidates of a shard, so many at most: what a wait costs depends on what it
    /// reports, not on how many are ready. Without others the descriptor is no longer readable.
    pub fn drain(&self, shard: u16, most: usize) -> Vec<SlotId> {
        // In this order: a write that is cleared here is of somebody who came before the flag says that
        // nobody was told, so that what came with it is seen below.
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
        // They may have come after the descriptor was cleared and before the flag was, so that nobody was
        // told.
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
        sys::set_timer(over.as_raw_fd(), fulmar_base::Instant::ZERO);
        sys::sleep_on(None, set.raw_fd(), over.as_raw_fd())
    }

    #[test]
    fn the_descriptor_is_readable_from_a_mark_to_the_drain() {
        let set = PollSetCore::new().unwrap();
        let id = at(0, 1);
        assert!(set.mark(id));
        set.signal();
        assert!(!is_readable(&set), "nobody asked for the descriptor");
        assert!(set.expose());
        assert!(is_readable(&set), "it tells of what came before");
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
    fn what_is_no_socket_is_a_candidate_until_the_owner_takes_it() {
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
