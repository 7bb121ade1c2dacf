//! The lock around a shard while a thread holds it, and all that is due when it lets go.

use fulmar_base::{Outside, Probe};

use super::{Host, Returned};
use crate::account::Account;
use crate::reentry::Inside;
use crate::sync::MutexGuard;
use crate::ticket::Received;
use crate::watch::Wake;
use crate::watched::WatchedShard;

/// The shard lock. Releasing it drains the inbox and fires the wake-ups that were collected.
pub struct Guard<'a, P: Probe = Account> {
    host: &'a Host<P>,
    shard: Option<MutexGuard<'a, WatchedShard<P>>>,
    mark: Option<Inside>,
    /// The thread was unwinding when it took the lock: a destructor called the stack.
    was_panicking: bool,
}

impl<'a, P: Probe> Guard<'a, P> {
    #[inline(always)]
    pub(super) fn new(
        host: &'a Host<P>,
        shard: Option<MutexGuard<'a, WatchedShard<P>>>,
        mark: Inside,
    ) -> Self {
        Guard { host, shard, mark: Some(mark), was_panicking: std::thread::panicking() }
    }
}

impl<P: Probe> Host<P> {
    /// Gives the shard back; whoever is to be told is.
    #[inline(always)]
    pub(super) fn let_go(&self, shard: MutexGuard<'_, WatchedShard<P>>, mark: Inside) {
        match self.release_drained(shard) {
            None => self.outside.leave(),
            Some(shard) => self.release_and_tell(shard, mark),
        }
    }

    /// Releases the lock; `None`: it is released and nothing is left to do.
    #[inline(always)]
    fn release_drained<'a>(
        &'a self,
        mut shard: MutexGuard<'a, WatchedShard<P>>,
    ) -> Option<MutexGuard<'a, WatchedShard<P>>> {
        if !self.drain_inbox(&mut shard) {
            drop(shard);
            return None;
        }
        if shard.has_people_to_tell() {
            return Some(shard);
        }
        self.release(shard);
        // Left between the last look and the release: whoever gets the lock drains it.
        if self.inbox.is_empty() { None } else { self.try_shard() }
    }

    /// Releases the lock, and tells everybody who is to be told.
    #[inline(never)]
    fn release_and_tell(&self, shard: MutexGuard<'_, WatchedShard<P>>, mark: Inside) {
        let (mut returned, mut received) = (Returned::new(), Received::default());
        let mut held = Some(shard);
        while let Some(mut shard) = held {
            if !self.drain_inbox(&mut shard) {
                break;
            }
            let (wakes, told) = (shard.take_wakes(), shard.take_told());
            returned.extend(std::iter::from_fn(|| shard.pool().pop_returned()));
            received.append(shard.take_received());
            self.release(shard);
            wakes.into_iter().for_each(Wake::fire);
            self.tell(told);
            held = if self.inbox.is_empty() { None } else { self.try_shard() };
        }
        self.outside.leave();
        // Whoever is let go now, or told, may call the stack.
        drop(mark);
    }
}

impl<P: Probe> std::ops::Deref for Guard<'_, P> {
    type Target = WatchedShard<P>;
    fn deref(&self) -> &WatchedShard<P> {
        self.shard.as_ref().expect("invariant: present until the guard is dropped")
    }
}

impl<P: Probe> std::ops::DerefMut for Guard<'_, P> {
    fn deref_mut(&mut self) -> &mut WatchedShard<P> {
        self.shard.as_mut().expect("invariant: present until the guard is dropped")
    }
}

impl<P: Probe> Drop for Guard<'_, P> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_panicking {
            // Before the release, so that nobody uses the shard.
            self.host.fail();
            return;
        }
        match (self.shard.take(), self.mark.take()) {
            (Some(shard), Some(mark)) => self.host.let_go(shard, mark),
            // The lock was another's.
            _ => self.host.outside.leave(),
        }
    }
}
