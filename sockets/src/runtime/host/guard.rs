//! The shard lock while a thread holds it, and the work of unlocking.

use fulmar_stack::base::Stage;

use super::{Host, Returned};
use crate::runtime::reentry::Inside;
use crate::runtime::sync::MutexGuard;
use crate::runtime::ticket::Received;
use crate::runtime::watch::{Tasks, Wake};
use crate::runtime::watched::WatchedShard;

/// The shard lock. Releasing it drains the inbox and fires the wake-ups that were collected.
pub struct Guard<'a> {
    host: &'a Host,
    shard: Option<MutexGuard<'a, WatchedShard>>,
    mark: Option<Inside>,
    /// The thread was unwinding when it took the lock: a destructor called the stack.
    was_panicking: bool,
}

impl<'a> Guard<'a> {
    #[inline(always)]
    pub(super) fn new(
        host: &'a Host,
        shard: Option<MutexGuard<'a, WatchedShard>>,
        mark: Inside,
    ) -> Self {
        Guard { host, shard, mark: Some(mark), was_panicking: std::thread::panicking() }
    }
}

impl Host {
    /// Unlocks, and delivers pending wake-ups.
    #[inline(always)]
    pub(super) fn unlock(&self, shard: MutexGuard<'_, WatchedShard>, mark: Inside) {
        match self.release_drained(shard) {
            None => self.ledger.pass(Stage::Released),
            Some(shard) => self.release_and_kick(shard, mark),
        }
    }

    /// Fast path: unlocks. Returns the lock if wake-ups are pending or the inbox has filled; `None`: done.
    #[inline(always)]
    fn release_drained<'a>(
        &'a self,
        mut shard: MutexGuard<'a, WatchedShard>,
    ) -> Option<MutexGuard<'a, WatchedShard>> {
        if !self.drain_inbox(&mut shard) {
            drop(shard);
            return None;
        }
        if shard.has_pending_kicks() {
            return Some(shard);
        }
        self.release(shard);
        // Requests queued between the last check and the release: the next holder drains them.
        if self.inbox.is_empty() { None } else { self.try_shard() }
    }

    /// Unlocks, and delivers wake-ups, completions and kicks to siblings.
    #[inline(never)]
    fn release_and_kick(&self, shard: MutexGuard<'_, WatchedShard>, mark: Inside) {
        let (mut returned, mut received) = (Returned::new(), Received::default());
        let mut tasks = Tasks::default();
        let mut held = Some(shard);
        while let Some(mut shard) = held {
            if !self.drain_inbox(&mut shard) {
                break;
            }
            let (wakes, kicks) = (shard.take_wakes(), shard.take_kicks());
            let is_lost = shard.take_loss();
            shard.move_tasks(&mut tasks);
            returned.extend(std::iter::from_fn(|| shard.pool().pop_returned()));
            received.append(shard.take_received());
            self.release(shard);
            wakes.into_iter().for_each(Wake::fire);
            self.kick_siblings(kicks);
            if is_lost {
                self.leader.wake_all();
            }
            held = if self.inbox.is_empty() { None } else { self.try_shard() };
        }
        self.ledger.pass(Stage::Released);
        // The destructors of `returned` and `received` may call the stack, and so may the code of wakers.
        drop(mark);
        tasks.wake();
    }
}

impl std::ops::Deref for Guard<'_> {
    type Target = WatchedShard;
    fn deref(&self) -> &WatchedShard {
        self.shard.as_ref().expect("invariant: present until the guard is dropped")
    }
}

impl std::ops::DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut WatchedShard {
        self.shard.as_mut().expect("invariant: present until the guard is dropped")
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_panicking {
            // Before the release, so that no thread uses the shard.
            self.host.fail();
            return;
        }
        match (self.shard.take(), self.mark.take()) {
            (Some(shard), Some(mark)) => self.host.unlock(shard, mark),
            // `perform_or_queue` queued its request; it has no lock.
            _ => self.host.ledger.pass(Stage::Released),
        }
    }
}
