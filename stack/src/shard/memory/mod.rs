//! The reaction of a shard to a shortage of memory, space in the device or descriptors: sockets that cannot go on wait
//! ([`SendWaiters`], [`RetryQueue`]), and connections whose peers take nothing or whose users read nothing may be given
//! up ([`Reclaim`], [`ReceiveReclaim`]).

pub(in crate::shard) mod receive_reclaim;
pub(in crate::shard) mod reclaim;
pub(in crate::shard) mod retries;
pub(in crate::shard) mod send_wait;
pub(in crate::shard) mod tcp_reclaim;

use crate::base::{Instant, SlotId};
use crate::mbuf::{Pool, Purpose};

use crate::shard::link::net::Net;
use crate::shard::memory::receive_reclaim::ReceiveReclaim;
use crate::shard::memory::reclaim::Reclaim;
use crate::shard::memory::retries::RetryQueue;
use crate::shard::memory::send_wait::{SendWaiters, available_to, is_stalled, lacks_minimum};
use crate::shard::slab::Slab;
use crate::shard::sockets::{SendBlocked, Socket};

/// Sockets that wait for memory or for the device, and connections that may be given up for them.
#[derive(Default)]
pub(crate) struct Memory {
    pub retries: RetryQueue,
    pub send_waiters: SendWaiters,
    pub reclaim: Reclaim,
    pub receive_reclaim: ReceiveReclaim,
}

impl Memory {
    /// A writer found no memory although its send buffer has space: the socket is not writable until
    /// it may have some.
    pub(crate) fn wait(
        &mut self,
        now: Instant,
        id: SlotId,
        sockets: &mut Slab<Socket>,
        net: &mut Net,
    ) {
        net.pool.drain_remote();
        let share = net.pool.share_of(Purpose::Send);
        if available_to(sockets, id, share) > 0 {
            // The rule allows it, but there was no block or descriptor; or some was freed just now.
            if let Some(blocked) = sockets.get_mut(id).and_then(Socket::blocked) {
                self.retry_later(now, id, blocked, net);
            }
            return;
        }
        if lacks_minimum(sockets, id) {
            self.reclaim.ask_urgently(now);
        } else if !is_stalled(sockets, id) {
            self.reclaim.ask(now);
        }
        let Net { pool, counters, .. } = net;
        self.send_waiters.enter(id, share.used, sockets, pool, counters);
    }

    /// A socket cannot go on for want of a descriptor or of space in the device: it is not writable until
    /// it is tried again.
    pub(crate) fn retry_later(
        &mut self,
        now: Instant,
        id: SlotId,
        blocked: &mut SendBlocked,
        net: &mut Net,
    ) {
        net.pool.drain_remote();
        if net.link.has_unsent_frames() {
            self.retries.wait_for_device();
        }
        self.retries.enter(now, id, blocked);
    }

    /// An ACK has freed send buffer of a connection, so that it may hold more: its writer need not wait for others.
    pub(crate) fn on_own_progress(&mut self, id: SlotId, sockets: &mut Slab<Socket>, pool: &Pool) {
        if self.send_waiters.is_empty() {
            return;
        }
        let share = pool.share_of(Purpose::Send);
        if available_to(sockets, id, share) > 0
            && let Some(blocked) = sockets.get_mut(id).and_then(Socket::blocked)
        {
            blocked.is_blocked = false;
        }
    }
}
