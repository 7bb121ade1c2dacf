//! Watching sockets: registration of sleeping threads and of poll sets with a shard.

use std::sync::Arc;

use fulmar_base::{Counter, Probe, SlotId};
use fulmar_socket::{Ready, SocketError};

use crate::poll_set::PollSetCore;
use crate::shard::Shard;
use crate::sockets::Socket;
use crate::waiter::Waiter;
use crate::watch::Wakes;

impl<P: Probe> Shard<P> {
    /// A thread is about to sleep until the socket is ready.
    pub(crate) fn watch_thread(&mut self, id: SlotId, w: &Arc<Waiter>, interest: Ready) {
        if let Some(s) = self.sockets.get_mut(id) {
            s.watch().add_thread(w, interest);
        }
    }

    /// The thread has woken.
    pub(crate) fn unwatch_thread(&mut self, id: SlotId, w: &Arc<Waiter>) {
        if let Some(s) = self.sockets.get_mut(id) {
            s.watch().remove_thread(w);
        }
    }

    /// Wakes whoever waits for what the socket is ready for now.
    pub(crate) fn notify(&mut self, id: SlotId) {
        let is_watched = self.sockets.get_mut(id).is_some_and(|s| !s.watch().is_empty());
        if !is_watched {
            return;
        }
        let ready = self.ready_of(id).unwrap_or_default();
        if let Some(s) = self.sockets.get_mut(id) {
            s.watch().notify(id, ready, &mut self.wakes);
        }
    }

    /// Whether somebody is to be told something once the lock is released.
    #[inline]
    pub(crate) fn has_people_to_tell(&self) -> bool {
        !self.wakes.is_empty()
            || self.net.pool.has_returned()
            || self.posted.has_received()
            || self.handoff.as_ref().is_some_and(|h| h.has_told())
    }

    /// The wake-ups to fire now that the lock is (about to be) released.
    pub fn take_wakes(&mut self) -> Option<Wakes> {
        if self.wakes.is_empty() {
            return None;
        }
        self.net.counters.add(Counter::Wakeups, self.wakes.len() as u64);
        Some(std::mem::take(&mut self.wakes))
    }

    /// Adds a socket to a poll set, or changes its token and interest. What it is ready for
    /// already is reported by the next wait.
    ///
    /// # Errors
    /// [`SocketError::BadHandle`].
    pub fn join_set(
        &mut self,
        id: SlotId,
        set: &Arc<PollSetCore>,
        token: usize,
        interest: Ready,
    ) -> Result<(), SocketError> {
        let shard = self.id;
        let s = self.sockets.get_mut(id).ok_or(SocketError::BadHandle)?;
        s.watch().join(shard, set, token, interest);
        self.notify(id);
        Ok(())
    }

    /// Takes a socket out of a poll set.
    ///
    /// # Errors
    /// [`SocketError::Invalid`]: it was not in it.
    pub fn leave_set(&mut self, id: SlotId, set: &Arc<PollSetCore>) -> Result<(), SocketError> {
        let s = self.sockets.get_mut(id).ok_or(SocketError::BadHandle)?;
        if s.watch().leave(id, set) { Ok(()) } else { Err(SocketError::Invalid) }
    }

    /// Which members of a poll set, of those that are sockets of this shard, are ready for what they were
    /// added for, `limit` at most: token and readiness. Level-triggered: what is ready stays a candidate
    /// for the next call.
    pub fn collect_set(
        &mut self,
        set: &Arc<PollSetCore>,
        limit: usize,
        mut ready: impl FnMut(usize, Ready),
    ) -> usize {
        let mut reported = Vec::new();
        while reported.len() < limit {
            let candidates = set.drain(self.id, limit - reported.len());
            if candidates.is_empty() {
                break;
            }
            for id in candidates {
                let Some(ready_for) = self.ready_of(id) else { continue };
                let Some(s) = self.sockets.get_mut(id) else { continue };
                let Some((token, interest)) = s.watch().unlisted(set) else { continue };
                let seen = ready_for.seen_by(interest);
                if !seen.is_empty() {
                    ready(token, seen);
                    reported.push(id);
                }
            }
        }
        // Behind those that found no place this time, so that everybody has a turn.
        for id in &reported {
            if let Some(s) = self.sockets.get_mut(*id) {
                s.watch().relist(*id, set);
            }
        }
        reported.len()
    }

    /// Counts something that a room above has seen.
    pub fn count(&mut self, c: Counter, n: u64) {
        self.net.counters.add(c, n);
    }

    /// How many sockets of each kind there are: connections, listeners, datagram sockets.
    pub fn socket_counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for (_, s) in self.sockets.iter() {
            match s {
                Socket::Tcp(_) => counts[0] += 1,
                Socket::Listener(_) => counts[1] += 1,
                Socket::Udp(_) | Socket::Ping(_) => counts[2] += 1,
            }
        }
        counts
    }
}
