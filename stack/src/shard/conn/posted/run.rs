//! Runs posted receive: delivers bytes to posted buffers, posts them to the device, and completes them.
//!
//! The steps themselves are `crate::socket::posted`. Connections with posted buffers and new events are in a
//! list; after each burst their bytes are delivered, and when the device is drained partial buffers are
//! completed.

use crate::base::{Counter, Counters, Duration, Instant, SlotId};
use crate::mbuf::RecvQueue;
use crate::socket::SocketError;
use crate::socket::posted::{Delivered, IoContext, Posted, StreamState};
use crate::socket::soreceive::has_ended;
use crate::tcp::{State, Tcb};

use super::placer::{FlowPlacer, NoDevice};
use super::{CompletionQueue, PostedTable};
use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::outcome::PostToken;
use crate::shard::sockets::{Socket, TcpEntry};
use crate::shard::wheel::TimerKey;
use crate::shard::world::MAX_OUTPUT_DEFERRAL;

/// Interval of polls for buffers whose memory is still referred to, or for which there was no memory to move
/// bytes away: no event reports either. Well below what a person notices.
const RETRY: Duration = Duration::from_millis(5);

/// A burst of the device has been delivered.
#[derive(Clone, Copy)]
pub(crate) struct BurstEnd {
    pub now: Instant,
    /// The poll has emptied the device's queue: partial buffers are completed.
    pub is_drained: bool,
}

impl BurstEnd {
    pub(crate) fn drained(now: Instant) -> BurstEnd {
        BurstEnd { now, is_drained: true }
    }
}

/// How the stream ended for a reader that has everything: `Ok` at its end, else the error.
fn ended(entry: &TcpEntry) -> Option<Result<(), SocketError>> {
    if let Some(e) = entry.error {
        return Some(Err(e));
    }
    if has_ended(&entry.tcb) {
        return Some(Ok(()));
    }
    if let Some(e) = entry.tcb.pending_error() {
        return Some(Err(e.into()));
    }
    (entry.tcb.at_eof() || !entry.tcb.can_recv()).then_some(Ok(()))
}

fn is_receiving(tcb: &Tcb) -> bool {
    matches!(tcb.state(), State::Established | State::FinWait1 | State::FinWait2)
}

/// Runs a step of the machine of a connection.
pub(crate) fn with_machine<R>(
    net: &mut Net,
    entry: &mut TcpEntry,
    f: impl FnOnce(&mut Posted<PostToken>, &mut IoContext<'_>) -> R,
) -> Option<R> {
    let flow = *entry.tcb.key();
    let first = entry.tcb.recv_seq(0);
    let posted = entry.posted.as_mut()?;
    let may_place = is_receiving(&entry.tcb) && !posted.is_local(&net.ip, &flow);
    let Net { pool, counters, link, .. } = net;
    let mut placer = FlowPlacer { device: link.device(), counters, flow, first };
    let recv = entry.tcb.recv_queue();
    let mut io = IoContext { recv, pool, placer: &mut placer, may_place };
    Some(f(&mut posted.machine, &mut io))
}

/// Takes the completions of a connection; whether readiness may have changed.
#[inline]
fn take_completions(
    entry: &mut TcpEntry,
    to: &mut CompletionQueue,
    counters: &mut Counters,
) -> bool {
    let Some(posted) = &mut entry.posted else { return false };
    let count = posted.take_completions(to);
    counters.add(Counter::Receives, count as u64);
    // Readers wait behind the last of them, however that ended.
    count > 0 || !posted.machine.is_waiting()
}

impl PostedTable {
    /// Before a receive poll: posts new buffers to the device.
    #[inline]
    pub(crate) fn notify_device(&mut self, now: Instant, core: &mut Core) {
        if core::mem::take(&mut self.has_new_posts) {
            self.notify_device_of_all(now, core);
        }
    }

    fn notify_device_of_all(&mut self, now: Instant, core: &mut Core) {
        for at in 0..self.listed.len() {
            if let Some(id) = self.listed.get(at)
                && let Some(Socket::Tcp(entry)) = core.sockets.get_mut(*id)
            {
                with_machine(&mut core.net, entry, |m, io| m.notify_device(now, io));
            }
        }
    }

    /// Delivers the bytes of the last burst.
    #[inline]
    pub(crate) fn deliver_all(&mut self, now: Instant, core: &mut Core) {
        for at in 0..self.listed.len() {
            if let Some(id) = self.listed.get(at).copied() {
                self.deliver(now, id, core);
            }
        }
    }

    pub(crate) fn deliver(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else { return };
        let Some(taken) = with_machine(&mut core.net, entry, |m, io| m.deliver(now, io)) else {
            return;
        };
        let may_be_ready = take_completions(entry, &mut self.out, &mut core.net.counters);
        if taken.bytes > 0 && entry.tcb.after_read(&mut core.net.env(now)) && !entry.is_queued {
            entry.is_queued = true;
            core.output_queue.push_back(id);
        }
        let is_watched = may_be_ready && entry.watch.interest.is_some();
        self.note_taken(now, &taken, &mut core.net.counters);
        if is_watched {
            core.notify(id);
        }
    }

    /// Counts the bytes delivered to the buffers of a connection.
    #[inline]
    fn note_taken(&mut self, now: Instant, taken: &Delivered, counters: &mut Counters) {
        let Delivered { bytes, copied, is_unfinished, has_filled } = *taken;
        self.has_filled |= has_filled;
        if is_unfinished {
            self.poll_by(if bytes > 0 { now } else { now + RETRY });
        }
        if bytes > 0 {
            self.is_placed = copied <= bytes / 8;
            counters.add(Counter::ReceiveBytes, bytes as u64);
            counters.add(Counter::CopiedBytes, copied as u64);
        }
    }

    /// Whether partial completions can be deferred to the next poll: the only reader has a full buffer, and
    /// polls again at once.
    #[inline]
    pub(crate) fn may_defer(&mut self, now: Instant) -> bool {
        let is_due = self.poll_at.is_some_and(|at| now >= at);
        let may_defer = self.out.outcome.is_some() && self.listed.len() == 1 && !is_due;
        if may_defer {
            self.poll_by(now + MAX_OUTPUT_DEFERRAL);
        }
        may_defer
    }

    /// Completes the buffers of every connection in the list.
    #[inline]
    pub(crate) fn end_bursts(&mut self, end: BurstEnd, core: &mut Core) {
        if self.poll_at.is_some_and(|at| end.now >= at) {
            self.poll_at = None;
            self.drain_orphans(core);
        }
        if !self.listed.is_empty() {
            self.complete_listed(end, core);
        }
    }

    #[inline(never)]
    fn complete_listed(&mut self, end: BurstEnd, core: &mut Core) {
        let spare = core::mem::take(&mut self.spare);
        let mut listed = core::mem::replace(&mut self.listed, spare);
        for id in listed.drain(..) {
            if let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id)
                && let Some(posted) = &mut entry.posted
            {
                posted.is_listed = false;
                self.end_burst(end, id, core);
            }
        }
        self.spare = listed;
    }

    pub(crate) fn end_burst(&mut self, end: BurstEnd, id: SlotId, core: &mut Core) {
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else { return };
        let stream = StreamState {
            now: end.now,
            is_pushed: end.is_drained && entry.tcb.is_pushed(),
            sent: entry.tcb.send_queue_ref().claimed_end(),
            ended: ended(entry),
        };
        let is_reported = with_machine(&mut core.net, entry, |m, io| m.end_burst(&stream, io));
        if is_reported == Some(true) && entry.error.is_none() {
            entry.tcb.take_error();
        }
        self.take_completions(id, core);
        self.plan(end, id, core);
    }

    /// Schedules the next poll.
    fn plan(&mut self, end: BurstEnd, id: SlotId, core: &mut Core) {
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else { return };
        let readable = entry.tcb.recv_queue_ref().readable() > 0;
        let Some(posted) = &mut entry.posted else { return };
        if !posted.machine.is_waiting() {
            return;
        }
        // No buffer ends by its rule while bytes wait that have no place to go: those are tried again below.
        if !readable && let Some(at) = posted.machine.next_deadline() {
            posted.timer = Some(core.wheel.schedule(posted.timer, TimerKey::Posted(id), at));
        }
        let is_stuck = posted.machine.is_draining() || readable;
        if is_stuck || !end.is_drained {
            self.poll_by(if end.is_drained { end.now + RETRY } else { end.now });
            self.list(id, &mut entry.posted);
        }
    }

    /// The timer of a connection with posted buffers.
    pub(crate) fn timer_fired(&mut self, id: SlotId, core: &mut Core) {
        if let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id)
            && let Some(posted) = &mut entry.posted
        {
            posted.timer = None;
            self.list(id, &mut entry.posted);
        }
    }

    fn take_completions(&mut self, id: SlotId, core: &mut Core) {
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else { return };
        if take_completions(entry, &mut self.out, &mut core.net.counters) {
            core.notify(id);
        }
    }

    /// The application closes the connection. First half: its buffers are cancelled.
    pub(crate) fn cancel_all(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        self.deliver(now, id, core);
        if let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) {
            with_machine(&mut core.net, entry, |m, io| m.cancel_all(io));
        }
    }

    /// Second half, once the receive queue is empty: buffers that a device still refers to are kept without
    /// the connection.
    pub(crate) fn orphan(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else { return };
        with_machine(&mut core.net, entry, |m, io| m.drain(io));
        let Some(mut posted) = entry.posted.take() else { return };
        if let Some(timer) = posted.timer.take() {
            core.wheel.cancel(timer);
        }
        posted.take_completions(&mut self.out);
        if posted.machine.is_draining() {
            self.orphans.push(*posted);
            self.poll_by(now + RETRY);
        }
    }

    fn drain_orphans(&mut self, core: &mut Core) {
        let PostedTable { orphans, out, .. } = self;
        let pool = &mut core.net.pool;
        pool.drain_remote();
        orphans.retain_mut(|posted| {
            let mut io = IoContext {
                recv: &mut RecvQueue::new(),
                pool,
                placer: &mut NoDevice,
                may_place: false,
            };
            posted.machine.drain(&mut io);
            posted.take_completions(out);
            posted.machine.is_draining()
        });
        if !self.orphans.is_empty() {
            self.poll_by(core.net.link.now() + RETRY);
        }
    }
}
