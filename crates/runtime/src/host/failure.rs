//! A panic inside the stack: the stack is down for good, the process lives.
//!
//! ```text
//!   panic under the lock ─► OnUnwind, Guard ─► fail: every shard's inbox is closed ─► the lock is released
//!                                                │                 │
//!                           whoever sleeps is woken     whoever takes a lock gets ENETDOWN
//!                                                │
//!                      service thread: dismantle ─► device, sockets, packets, each dropped by itself
//! ```
//!
//! What a panic has left half done is not looked at again, by the other shards of the stack neither: they
//! share its interface, and a program that has lost a part of its connections has lost the stack. An inbox
//! that is closed is never empty, so that those who take a lock pay for no question but the one that they
//! ask anyway. The panic goes on to the caller whose thread it is; that of the service thread ends there.
//!
//! Memory: nothing is used after the failure but drops, which are sound in any state, since a pool checks
//! before it changes anything. The device goes first, so that nothing writes to memory that was lent; then
//! the sockets, which ends tickets and completions; then what came home is taken in, by which memory that
//! was lent or given away goes back to its owner. Mbufs in the hands of others keep their slabs.

use std::sync::{PoisonError, Weak};

use fulmar_base::Probe;

use super::{Host, Returned};
use crate::contain::contain;
use crate::sync::{MutexGuard, lock};
use crate::watched::WatchedShard;

/// Marks the stack as failed if it is dropped: the thread unwinds, with the lock. To be made after the
/// lock was taken, so that it goes before the lock does.
pub(super) struct OnUnwind<'a, P: Probe>(&'a Host<P>);

impl<'a, P: Probe> OnUnwind<'a, P> {
    #[inline(always)]
    pub fn of(host: &'a Host<P>) -> Self {
        OnUnwind(host)
    }

    #[inline(always)]
    pub fn disarm(self) {
        std::mem::forget(self);
    }
}

impl<P: Probe> Drop for OnUnwind<'_, P> {
    #[inline]
    fn drop(&mut self) {
        self.0.fail();
    }
}

impl<P: Probe> Host<P> {
    /// Why the stack is down for good, if a thread panicked inside of it.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Runs what a destructor asks for. If its thread unwinds already, another panic ends here: it would end
    /// the process.
    pub fn in_destructor<R: Default>(&self, f: impl FnOnce() -> R) -> R {
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

    /// This thread panicked inside of the stack, which nobody may use any more. May be called under the
    /// shard's lock, and again.
    #[cold]
    #[inline(never)]
    pub(crate) fn fail(&self) {
        let thread = std::thread::current();
        let why = format!("thread `{}` panicked inside the stack", thread.name().unwrap_or("?"));
        self.close(&why);
        let all = self.all.get().into_iter().flatten();
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
        self.baton.wake_all();
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
        self.take_returns();
        // Whoever had the lock when the stack failed may have gone to sleep since.
        self.wake_all();
    }

    /// Takes in what others have dropped, and lets go of what the program gave away to be sent. How many
    /// parts of that are still out.
    pub(crate) fn take_returns(&self) -> usize {
        let mut returned = Returned::new();
        let out = {
            let mut shard = self.shard_to_drop();
            self.take_home(&mut shard);
            returned.extend(std::iter::from_fn(|| shard.pool().pop_returned()));
            shard.pool().shared_parts()
        };
        returned.into_iter().for_each(|owner| _ = contain(|| drop(owner)));
        out
    }

    /// The shard of a stack that has failed.
    fn shard_to_drop(&self) -> MutexGuard<'_, WatchedShard<P>> {
        self.shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees what was left in the inbox of a stack that has failed, and what others have dropped.
    pub(super) fn take_home(&self, shard: &mut WatchedShard<P>) {
        contain(|| self.inbox.drain(drop));
        contain(|| shard.pool().drain_remote());
    }
}
