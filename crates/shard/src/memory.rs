//! What a shard does where send memory, room in the device or descriptors are scarce: who cannot go on waits
//! ([`SendWaiters`](crate::send_wait::SendWaiters), [`Shortage`](crate::shortage::Shortage)), and connections
//! whose peers take nothing are given up ([`Reclaim`](crate::reclaim::Reclaim)).

use fulmar_base::{Instant, Probe, SlotId};
use fulmar_mbuf::Purpose;
use fulmar_tcp::{ConnError, Events};

use crate::net::Net;
use crate::reclaim::{Candidate, Reclaim};
use crate::send_wait::{SendWaiters, Waking, is_stalled, may_take};
use crate::shard::Shard;
use crate::shortage::Shortage;
use crate::sockets::Socket;

/// Sockets that wait for memory or for the device, and connections that may be given up for them.
#[derive(Default)]
pub struct Memory {
    pub shortage: Shortage,
    pub send_waiters: SendWaiters,
    pub reclaim: Reclaim,
}

impl<P: Probe> Shard<P> {
    /// A writer found no memory although its buffer has space: it is not writable until it may have
    /// some.
    pub(crate) fn wait_for_memory(&mut self, now: Instant, id: SlotId) {
        self.core.net.pool.drain_remote();
        let share = self.core.net.pool.share_of(Purpose::Send);
        if may_take(&self.core.sockets, id, share) > 0 {
            // The rule allows it, but there was no block or descriptor; or some came home just now.
            return self.note_shortage(now, id);
        }
        let is_stalled = is_stalled(&self.core.sockets, id);
        if !is_stalled {
            let lacks_minimum = match self.core.sockets.get(id) {
                Some(Socket::Tcp(s)) => s.tcb.send_queue_ref().truesize() == 0,
                _ => true,
            };
            self.core.memory.reclaim.ask(now, lacks_minimum);
        }
        let Net { pool, counters, .. } = &mut self.core.net;
        let (sockets, events) = (&mut self.core.sockets, &mut self.core.events);
        let mut with = Waking { sockets, pool, counters, events };
        self.core.memory.send_waiters.enter(id, is_stalled, share.used, &mut with);
    }

    /// A socket cannot go on for now: it is not writable until it is tried again.
    pub(crate) fn note_shortage(&mut self, now: Instant, id: SlotId) {
        self.core.net.pool.drain_remote();
        let for_device = self.has_backlog();
        if let Some(short) = self.core.sockets.get_mut(id).and_then(Socket::short) {
            self.core.memory.shortage.enter(now, id, for_device, short);
        }
    }

    /// A connection has sent something, so that it may hold more: its writer need not wait for others.
    pub(crate) fn on_own_progress(&mut self, id: SlotId) {
        let share = self.core.net.pool.share_of(Purpose::Send);
        if may_take(&self.core.sockets, id, share) > 0
            && let Some(short) = self.core.sockets.get_mut(id).and_then(Socket::short)
        {
            short.is_short = false;
        }
    }

    /// Gives up what the rules say, lets those try again that have reason to, and wakes the writers that may
    /// have what came home.
    #[inline]
    pub(crate) fn relieve(&mut self, now: Instant) {
        if self.core.memory.reclaim.is_due(now) {
            let (share, has_active) = (
                self.core.net.pool.share_of(Purpose::Send),
                self.core.memory.send_waiters.has_active(),
            );
            let chosen =
                self.core.memory.reclaim.choose(now, share, &self.core.sockets, has_active);
            chosen.into_iter().for_each(|c| self.give_up(now, c));
        }
        if let Some(waiting) =
            self.core.memory.shortage.relieved(now, self.core.net.link.has_backlog())
        {
            for id in waiting.iter().copied() {
                if let Some(short) = self.core.sockets.get_mut(id).and_then(Socket::short) {
                    (short.is_short, short.for_retry) = (false, false);
                }
                self.core.queue_output(id);
                self.notify(id);
            }
            self.core.memory.shortage.keep(waiting);
        }
        let Net { pool, counters, .. } = &mut self.core.net;
        let (sockets, events) = (&mut self.core.sockets, &mut self.core.events);
        self.core.memory.send_waiters.wake(now, &mut Waking { sockets, pool, counters, events });
    }

    /// A connection lost its user. Too many of these are reset.
    pub(crate) fn note_orphan(&mut self, now: Instant, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else { return };
        entry.is_orphan = true;
        let surplus =
            self.core.memory.reclaim.orphan_came(self.core.config.max_orphans, &self.core.sockets);
        if !surplus.is_empty() {
            surplus.into_iter().for_each(|c| self.give_up(now, c));
            self.run_output(now);
            self.flush();
        }
    }

    /// Resets a connection; its memory is free at once, or when the device is done with it.
    fn give_up(&mut self, now: Instant, c: Candidate) {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(c.id) else { return };
        entry.tcb.abort_with(ConnError::TimedOut);
        self.tcp.posted.list(c.id, &mut entry.posted);
        self.core.net.counters.count(c.counter());
        self.core.queue_output(c.id);
        self.follow(now, c.id, Events::ERROR | Events::CLOSED);
    }
}
