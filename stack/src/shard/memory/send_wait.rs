//! Writers that wait for send memory: the pool, or the writer's fair part of it
//! ([`FairShare`](crate::mbuf::FairShare)), has none now. A writer is woken by the event that ends its wait; none is
//! polled.
//!
//! | a writer waits because | it is woken |
//! |---|---|
//! | others hold the memory | when some is freed, first come first served, while the freed memory lasts |
//! | it holds its own part | also by its own ACKs |
//! | its peer acknowledges nothing and memory is scarce | by its own ACKs, or when memory is sufficient again |
//!
//! Memory is freed by ACKs and completions, which a step handles. Other threads and stacks free to the
//! pool's remote-free list: the shard drains it when it runs, and while a writer waits the pool asks for a
//! kick ([`Pool::await_remote`](crate::mbuf::Pool::await_remote)).
//!
//! Bounded by the number of sockets: each is in a queue at most once, and knows in which.

use alloc::collections::VecDeque;

use crate::base::{Counter, Counters, Duration, Instant, SlotId};
use crate::mbuf::{FairShare, MAX_MBUF_BYTES, Pool, Purpose};
use crate::socket::sosend::{self, SEND_LOW_WATER_BYTES};

use crate::shard::events::Events;
use crate::shard::slab::Slab;
use crate::shard::sockets::Socket;

/// Freed memory from which on the queue is served: the size of the smallest write.
const RELIEF_BYTES: usize = SEND_LOW_WATER_BYTES;

/// Waiting writers examined in one step, so that it stays bounded.
const EXAMINED_PER_STEP: usize = 32;

/// Memory that a woken writer is expected to take.
const EXPECTED_BYTES: usize = 64 << 10;

/// A pause before the rest of a queue is served: by then the writers woken first have taken their memory.
const PAUSE: Duration = Duration::from_millis(5);

/// The waiting writers.
#[derive(Default)]
pub(crate) struct SendWaiters {
    /// Writers that wait for memory, the oldest first.
    queue: VecDeque<SlotId>,
    /// Writers whose peers acknowledge nothing: they wait until memory is sufficient again.
    stalled: VecDeque<SlotId>,
    /// Bytes of the send share in use when the queue was last served.
    seen_used: usize,
    /// Entries of the queue not examined since memory was last freed.
    unexamined: usize,
    /// When a pass that ended early is resumed.
    resume_at: Option<Instant>,
}

impl SendWaiters {
    /// Whether no writer waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.stalled.is_empty()
    }

    /// Whether a writer waits whose peer acknowledges.
    pub(crate) fn has_active(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether one of the writers lacks its minimum.
    pub(crate) fn lack_minimum(&self, sockets: &Slab<Socket>) -> bool {
        self.queue.iter().any(|id| lacks_minimum(sockets, *id))
    }

    /// When the queues are to be served at the latest: at once if memory was freed.
    #[inline]
    pub(crate) fn next_deadline(&self, pool: &Pool) -> Option<Instant> {
        if self.is_empty() { None } else { self.deadline(pool) }
    }

    #[cold]
    fn deadline(&self, pool: &Pool) -> Option<Instant> {
        let is_due = pool.has_remote() || self.can_serve(pool);
        if is_due { Some(Instant::ZERO) } else { self.resume_at }
    }

    /// Sockets closed while they waited leave the queues when they are examined, or all together once a queue
    /// is much longer than the table.
    fn forget_closed(&mut self, sockets: &Slab<Socket>) {
        for queue in [&mut self.queue, &mut self.stalled] {
            if queue.len() > 2 * sockets.len() + EXAMINED_PER_STEP {
                queue.retain(|id| sockets.get(*id).is_some());
            }
        }
    }

    /// Whether freed memory can serve a writer.
    fn can_serve(&self, pool: &Pool) -> bool {
        let share = pool.share_of(Purpose::Send);
        let has_space = !self.queue.is_empty() && share.used + RELIEF_BYTES <= self.seen_used;
        let is_plenty = !self.stalled.is_empty() && !share.is_contended();
        has_space || is_plenty && self.resume_at.is_none()
    }

    /// Enqueues a writer. `used`: bytes of the send share in use.
    pub(crate) fn enter(
        &mut self,
        id: SlotId,
        used: usize,
        sockets: &mut Slab<Socket>,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let is_stalled = is_stalled(sockets, id);
        let Some(blocked) = sockets.get_mut(id).and_then(Socket::blocked) else { return };
        if !core::mem::replace(&mut blocked.is_blocked, true) {
            counters.count(Counter::SendWaits);
        }
        let (listed, queue) = match is_stalled {
            true => (&mut blocked.stalled, &mut self.stalled),
            false => (&mut blocked.for_memory, &mut self.queue),
        };
        if !core::mem::replace(listed, true) {
            queue.push_back(id);
        }
        self.seen_used = self.seen_used.max(used);
        self.forget_closed(sockets);
        pool.await_remote();
    }

    /// Wakes the writers that freed memory can serve.
    #[inline]
    pub(crate) fn wake(&mut self, now: Instant, with: &mut Waking<'_>) {
        if !self.is_empty() {
            self.wake_those_served(now, with);
        }
    }

    #[cold]
    fn wake_those_served(&mut self, now: Instant, with: &mut Waking<'_>) {
        let can_serve = self.can_serve(with.pool);
        if can_serve {
            self.unexamined = self.queue.len();
        }
        if can_serve || self.resume_at.is_some_and(|at| now >= at) {
            self.resume_at = None;
            let mut share = with.pool.share_of(Purpose::Send);
            self.seen_used = share.used;
            self.serve_stalled(&mut share, with);
            self.serve_queue(&mut share, with);
            let is_plenty = !with.pool.is_contended(Purpose::Send);
            let is_left = self.unexamined > 0 || is_plenty && !self.stalled.is_empty();
            self.resume_at = is_left.then_some(now + PAUSE);
        }
        if !self.is_empty() {
            with.pool.await_remote();
        }
    }

    /// Serves the head of the queue. A writer that may have memory is woken and `share` charged as if it had
    /// taken it; a writer that holds its part already moves to the end.
    fn serve_queue(&mut self, share: &mut FairShare, with: &mut Waking<'_>) {
        let before = *share;
        for _ in 0..EXAMINED_PER_STEP.min(self.unexamined) {
            let Some(id) = self.queue.front().copied() else { break };
            let is_stalled = is_stalled(with.sockets, id);
            let bytes = available_to(with.sockets, id, *share);
            if bytes == 0 && available_to(with.sockets, id, before) > 0 {
                // It is next if the woken writers take less than expected.
                break;
            }
            if bytes == 0 && !is_stalled && before.limit.saturating_sub(before.used) < RELIEF_BYTES
            {
                // There is nothing for anybody: all keep their places until memory is freed.
                self.unexamined = 0;
                break;
            }
            self.queue.pop_front();
            self.unexamined -= 1;
            let Some(blocked) = with.sockets.get_mut(id).and_then(Socket::blocked) else {
                continue;
            };
            let is_waiting = blocked.is_blocked;
            if is_waiting && bytes == 0 && !is_stalled {
                self.queue.push_back(id);
                continue;
            }
            blocked.for_memory = false;
            if !is_waiting {
                continue;
            }
            if bytes > 0 {
                with.wake_writer(id, bytes, share);
            } else if !core::mem::replace(&mut blocked.stalled, true) {
                self.stalled.push_back(id);
            }
        }
        self.unexamined = self.unexamined.min(self.queue.len());
    }

    /// Memory is sufficient again: wakes stalled writers while it lasts.
    fn serve_stalled(&mut self, share: &mut FairShare, with: &mut Waking<'_>) {
        for _ in 0..EXAMINED_PER_STEP {
            if share.is_contended() {
                return;
            }
            let Some(id) = self.stalled.pop_front() else { return };
            let bytes = available_to(with.sockets, id, *share);
            let Some(blocked) = with.sockets.get_mut(id).and_then(Socket::blocked) else {
                continue;
            };
            blocked.stalled = false;
            if blocked.is_blocked {
                with.wake_writer(id, bytes, share);
            }
        }
    }
}

/// The state that is needed to wake a writer.
pub(crate) struct Waking<'a> {
    /// The sockets.
    pub sockets: &'a mut Slab<Socket>,
    /// The pool whose memory they wait for.
    pub pool: &'a mut Pool,
    /// Counters of waits and wake-ups.
    pub counters: &'a mut Counters,
    /// Readiness events.
    pub events: &'a mut Events,
}

impl Waking<'_> {
    fn wake_writer(&mut self, id: SlotId, bytes: usize, share: &mut FairShare) {
        share.used += bytes.min(EXPECTED_BYTES);
        if let Some(blocked) = self.sockets.get_mut(id).and_then(Socket::blocked) {
            blocked.is_blocked = false;
        }
        self.counters.count(Counter::SendWakes);
        self.events.notify(self.sockets, id);
    }
}

/// Bytes for which a socket would get memory, at least enough for a start, else 0.
pub(in crate::shard) fn available_to(
    sockets: &Slab<Socket>,
    id: SlotId,
    share: FairShare,
) -> usize {
    match sockets.get(id) {
        Some(Socket::Tcp(s)) => {
            let bytes = sosend::allowance(&s.tcb, share);
            if bytes >= SEND_LOW_WATER_BYTES { bytes } else { 0 }
        }
        // The largest datagram, since the size of the next is unknown.
        Some(Socket::Udp(_)) => {
            let largest = MAX_MBUF_BYTES.min(share.limit / 16);
            if share.for_datagrams() >= largest { largest } else { 0 }
        }
        _ => 0,
    }
}

/// Whether the peer of a connection acknowledges nothing.
pub(in crate::shard) fn is_stalled(sockets: &Slab<Socket>, id: SlotId) -> bool {
    matches!(sockets.get(id), Some(Socket::Tcp(s)) if s.tcb.is_stalled())
}

/// Whether a socket that waits for memory holds none: a connection lacks its minimum, a datagram its buffer. One whose
/// peer acknowledges nothing lacks nothing that it could use.
pub(in crate::shard) fn lacks_minimum(sockets: &Slab<Socket>, id: SlotId) -> bool {
    match sockets.get(id) {
        Some(Socket::Tcp(s)) => s.tcb.send_queue_ref().truesize() == 0 && !s.tcb.is_stalled(),
        Some(_) => true,
        None => false,
    }
}
