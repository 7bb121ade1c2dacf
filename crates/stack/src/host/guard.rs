//! The lock around a shard while a thread holds it, and all that is due when it lets go.

use std::sync::MutexGuard;

use fulmar_base::{NoProbe, Outside, Probe};

use super::Host;
use crate::recv_calls::Received;
use crate::reentry::Inside;
use crate::returns::Returned;
use crate::shard::Shard;
use crate::watch::Wake;

/// The shard lock. Releasing it drains the inbox and fires the wake-ups that were collected.
pub struct Guard<'a, P: Probe = NoProbe> {
    host: &'a Host<P>,
    shard: Option<MutexGuard<'a, Shard<P>>>,
    mark: Option<Inside>,
}

impl<'a, P: Probe> Guard<'a, P> {
    #[inline(always)]
    pub(super) fn new(
        host: &'a Host<P>,
        shard: Option<MutexGuard<'a, Shard<P>>>,
        mark: Inside,
    ) -> Self {
        Guard { host, shard, mark: Some(mark) }
    }

    /// Releases the lock; `None`: it is released and nothing is left to do.
    #[inline(always)]
    fn release(&mut self) -> Option<MutexGuard<'a, Shard<P>>> {
        let mut shard = self.shard.take()?;
        self.host.drain_inbox(&mut shard);
        if shard.has_people_to_tell() {
            return Some(shard);
        }
        self.host.release(shard);
        // Left between the last look and the release: whoever gets the lock drains it.
        if self.host.inbox.is_empty() { None } else { self.host.try_shard() }
    }

    /// Releases the lock, and tells everybody who is to be told.
    #[inline(never)]
    fn release_and_tell(&mut self, shard: MutexGuard<'a, Shard<P>>) {
        let (mut returned, mut received) = (Returned::new(), Received::default());
        let mut held = Some(shard);
        while let Some(mut shard) = held {
            self.host.drain_inbox(&mut shard);
            let (wakes, told) = (shard.take_wakes(), shard.take_told());
            shard.take_returned(&mut returned);
            received.append(shard.take_received());
            self.host.release(shard);
            wakes.into_iter().flatten().for_each(Wake::fire);
            self.host.tell(told);
            held = if self.host.inbox.is_empty() { None } else { self.host.try_shard() };
        }
        self.host.outside.leave();
        // Whoever is let go now, or told, may call the stack.
        self.mark = None;
    }
}

impl<P: Probe> std::ops::Deref for Guard<'_, P> {
    type Target = Shard<P>;
    fn deref(&self) -> &Shard<P> {
        self.shard.as_ref().expect("invariant: present until the guard is dropped")
    }
}

impl<P: Probe> std::ops::DerefMut for Guard<'_, P> {
    fn deref_mut(&mut self) -> &mut Shard<P> {
        self.shard.as_mut().expect("invariant: present until the guard is dropped")
    }
}

impl<P: Probe> Drop for Guard<'_, P> {
    #[inline]
    fn drop(&mut self) {
        match self.release() {
            None => self.host.outside.leave(),
            Some(shard) => self.release_and_tell(shard),
        }
    }
}
