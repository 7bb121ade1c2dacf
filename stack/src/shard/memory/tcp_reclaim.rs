//! Resets connections and discards received bytes when memory is scarce, resets orphans that are too many, and retries
//! the sockets that wait for memory or for the device.

use crate::base::{Counter, Instant, SlotId};
use crate::mbuf::Purpose;
use crate::tcp::{ConnError, Events};

use crate::shard::conn::layer::Tcp;
use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::memory::Memory;
use crate::shard::memory::receive_reclaim::Class;
use crate::shard::memory::reclaim::Candidate;
use crate::shard::memory::send_wait::Waking;
use crate::shard::sockets::Socket;

impl Tcp {
    /// Resets connections by the rules of [`Reclaim`](crate::shard::memory::reclaim::Reclaim), retries sockets that lacked memory or
    /// space in the device, and wakes the writers that freed memory can serve.
    #[inline]
    pub(crate) fn reclaim_and_retry(&mut self, now: Instant, core: &mut Core) {
        if core.memory.reclaim.is_due(now) {
            let share = core.net.pool.share_of(Purpose::Send);
            let Memory { reclaim, send_waiters, .. } = &mut core.memory;
            let chosen = reclaim.choose(now, share, &core.sockets, send_waiters);
            chosen.into_iter().for_each(|c| self.reset_for_memory(now, c, core));
        }
        if core.net.pool.take_refused() {
            core.memory.receive_reclaim.ask(now);
        }
        if core.memory.receive_reclaim.is_due(now) {
            self.prune_received(now, core);
        }
        if let Some(waiting) = core.memory.retries.due(now, &core.net.link) {
            for id in waiting.iter().copied() {
                if let Some(blocked) = core.sockets.get_mut(id).and_then(Socket::blocked) {
                    (blocked.is_blocked, blocked.for_retry) = (false, false);
                }
                core.queue_output(id);
                core.notify(id);
            }
            core.memory.retries.keep(waiting);
        }
        let Core { memory, sockets, events, net: Net { pool, counters, .. }, .. } = core;
        memory.send_waiters.wake(now, &mut Waking { sockets, pool, counters, events });
    }

    /// A connection lost its user. Too many of these are reset.
    pub(crate) fn orphaned(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Core { sockets, memory, config, .. } = core;
        let Ok(entry) = sockets.tcp(id) else { return };
        entry.is_orphan = true;
        let surplus = memory.reclaim.add_orphan(config.max_orphans, sockets);
        if !surplus.is_empty() {
            surplus.into_iter().for_each(|c| self.reset_for_memory(now, c, core));
            self.run_output(now, core);
            core.net.flush();
        }
    }

    /// Discards received bytes by the rules of [`ReceiveReclaim`](crate::shard::memory::receive_reclaim::ReceiveReclaim).
    #[cold]
    fn prune_received(&mut self, now: Instant, core: &mut Core) {
        for c in core.memory.receive_reclaim.choose(now, &core.net.pool, &core.sockets) {
            match c.class {
                Class::OutOfOrder => {
                    let Ok(entry) = core.sockets.tcp(c.id) else { continue };
                    let bytes = entry.tcb.discard_out_of_order(&mut core.net.env(now));
                    core.net.counters.add(Counter::TcpOutOfOrderDiscarded, bytes as u64);
                }
                Class::Unread => self.reset_unread(now, c.id, core),
            }
        }
    }

    /// Resets a connection, whose unread bytes are discarded, unless its posted buffers take some.
    fn reset_unread(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        self.posted.deliver(now, id, core);
        let Ok(entry) = core.sockets.tcp(id) else { return };
        if entry.tcb.unread_since() == now {
            return;
        }
        entry.tcb.abort_unread(&mut core.net.env(now));
        self.posted.list(id, &mut entry.posted);
        self.posted.poll_by(now);
        core.net.counters.count(Counter::TcpUnreadReset);
        core.queue_output(id);
        self.handle_events(now, id, Events::ERROR | Events::CLOSED, core);
    }

    /// Resets a connection; its memory is freed at once, or when the device has completed its frames.
    fn reset_for_memory(&mut self, now: Instant, c: Candidate, core: &mut Core) {
        let Ok(entry) = core.sockets.tcp(c.id) else { return };
        entry.tcb.abort_with(ConnError::TimedOut);
        self.posted.list(c.id, &mut entry.posted);
        self.posted.poll_by(now);
        core.net.counters.count(c.counter());
        core.queue_output(c.id);
        self.handle_events(now, c.id, Events::ERROR | Events::CLOSED, core);
    }
}
