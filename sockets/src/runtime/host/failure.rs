//! A panic inside the stack: the stack is down for good, the process lives.
//!
//! ```text
//!   panic under the lock ─► OnUnwind, Guard ─► fail: every shard's inbox is closed ─► the lock is released
//!                                                │                 │
//!                           sleeping threads are woken    calls fail with ENETDOWN
//!                                                │
//!                      service thread: dismantle ─► device, sockets, packets, each dropped by itself
//! ```
//!
//! The state that a panic leaves is not used again, by the sibling shards neither: they share the interface, and a
//! program that loses some of its connections has lost the stack. A closed inbox is never empty, so that a call
//! detects the failure with the test of the inbox that it makes anyway. The panic continues in the thread that
//! panicked; one of the service thread ends there.
//!
//! Memory: after the failure the shard is only dropped, which is sound in any state, because a pool checks before
//! it changes anything. The device is dropped first, so that nothing writes to lent memory; then the sockets,
//! which completes tickets and completions; then the remote-free list is drained, by which lent and given memory
//! returns to its owner. Mbufs that the program still holds keep their slabs.

use std::sync::{PoisonError, Weak};

use super::{Host, Returned};
use crate::runtime::contain::contain;
use crate::runtime::sync::{MutexGuard, lock};
use crate::runtime::watched::WatchedShard;

/// Marks the stack as failed when it is dropped, which happens when the thread unwinds under the lock. Created
/// after the lock is taken, so that it is dropped before the lock is released.
pub(super) struct OnUnwind<'a>(&'a Host);

impl<'a> OnUnwind<'a> {
    #[inline(always)]
    pub(super) fn of(host: &'a Host) -> Self {
        OnUnwind(host)
    }

    #[inline(always)]
    pub(super) fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for OnUnwind<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.fail();
    }
}

impl Host {
    /// Why the stack is down for good, if a thread panicked inside of it.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Runs the work of a destructor. If the thread unwinds already, a second panic is contained here: it would
    /// abort the process.
    pub(crate) fn in_destructor<R: Default>(&self, f: impl FnOnce() -> R) -> R {
        if !std::thread::panicking() {
            return f();
        }
        contain(f).unwrap_or_else(|| {
            self.fail();
            R::default()
        })
    }

    /// Whether a thread panicked inside of the stack.
    pub(crate) fn has_failed(&self) -> bool {
        self.inbox.is_closed()
    }

    /// This thread panicked inside of the stack: closes it. May be called under the shard lock, and again.
    #[cold]
    #[inline(never)]
    pub(crate) fn fail(&self) {
        let thread = std::thread::current();
        let why = format!("thread `{}` panicked inside the stack", thread.name().unwrap_or("?"));
        self.close(&why);
        let all = self.siblings.get().into_iter().flatten();
        all.filter_map(Weak::upgrade).for_each(|host| host.close(&why));
    }

    fn close(&self, why: &str) {
        let _ = self.failure.set(why.to_owned());
        self.inbox.close();
        self.wake_all();
    }

    /// Wakes every thread that waits in this shard, its service thread too.
    fn wake_all(&self) {
        self.spin.end();
        self.leader.wake_all();
        let sets: Vec<_> = lock(&self.exposed_sets).iter().filter_map(Weak::upgrade).collect();
        sets.iter().for_each(|set| set.signal());
        self.service.wake();
    }

    /// The service thread's last work for a stack that has failed.
    pub(crate) fn dismantle(&self) {
        let wreck = self.shard_to_drop().abandon();
        for part in wreck.remains {
            contain(|| drop(part));
        }
        contain(|| drop(wreck.tickets));
        contain(|| drop(wreck.handoff));
        wreck.tasks.wake();
        self.take_returns();
        // The thread that had the lock when the stack failed may have gone to sleep since.
        self.wake_all();
    }

    /// Drains the remote-free list, and drops owners of memory without references. Returns the number of parts of owned
    /// memory that are still referenced.
    pub(crate) fn take_returns(&self) -> usize {
        let mut returned = Returned::new();
        let out = {
            let mut shard = self.shard_to_drop();
            self.reclaim(&mut shard);
            returned.extend(std::iter::from_fn(|| shard.pool().pop_returned()));
            shard.pool().shared_storages()
        };
        returned.into_iter().for_each(|owner| _ = contain(|| drop(owner)));
        out
    }

    /// The shard of a stack that has failed.
    fn shard_to_drop(&self) -> MutexGuard<'_, WatchedShard> {
        self.shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the requests in the inbox of a stack that has failed, and drains the remote-free list.
    pub(super) fn reclaim(&self, shard: &mut WatchedShard) {
        contain(|| self.inbox.drain(drop));
        contain(|| shard.pool().drain_remote());
    }
}
