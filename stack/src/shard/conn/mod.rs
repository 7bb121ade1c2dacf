//! TCP connections of a shard; here one during a call: found once, with the state that its calls use, and its output.

pub(in crate::shard) mod calls;
pub(in crate::shard) mod flow_cache;
pub(in crate::shard) mod input;
pub(in crate::shard) mod layer;
pub(in crate::shard) mod lifecycle;
pub(in crate::shard) mod loan_calls;
pub(in crate::shard) mod output;
pub(in crate::shard) mod posted;
pub(in crate::shard) mod recv_calls;
pub(in crate::shard) mod send_calls;
pub(in crate::shard) mod sendfile;
pub(in crate::shard) mod socket_options;
pub(in crate::shard) mod time_wait;

use alloc::collections::VecDeque;

use crate::base::{Counter, Counters, Instant, SlotId};
use crate::ip::Traffic;
use crate::socket::SocketError;
use crate::tcp::{Env, Sent, State};

use crate::shard::conn::layer::Tcp;
use crate::shard::events::Events;
use crate::shard::layers::Core;
use crate::shard::link::net::{Net, TcpEmit};
use crate::shard::memory::Memory;
use crate::shard::sockets::TcpEntry;
use crate::shard::wheel::{TimerKey, Wheel};
use crate::shard::world::Shard;

/// A connection, and the parts of the shard that its calls use.
pub(crate) struct Conn<'a> {
    pub id: SlotId,
    pub entry: &'a mut TcpEntry,
    pub net: &'a mut Net,
    pub wheel: &'a mut Wheel<TimerKey>,
    pub memory: &'a mut Memory,
    pub events: &'a mut Events,
    pub output_queue: &'a mut VecDeque<SlotId>,
}

impl Core {
    /// Finds a connection.
    #[inline(always)]
    pub(crate) fn conn(&mut self, id: SlotId) -> Result<Conn<'_>, SocketError> {
        let Core { sockets, net, wheel, memory, events, output_queue, .. } = self;
        Ok(Conn { id, entry: sockets.tcp(id)?, net, wheel, memory, events, output_queue })
    }
}

/// The work that a write defers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Policy {
    /// The partial segment at the end waits for the next write, which is likely to follow at once. It is sent with the
    /// next output of any kind, or after [`MAX_OUTPUT_DEFERRAL`](crate::shard::world::MAX_OUTPUT_DEFERRAL).
    pub tail_waits: bool,
    /// While at least three quarters of the send buffer are free the call does not poll for ACKs: the next write
    /// receives several with one poll. A writer that waits for space polls while it waits, and the service thread polls
    /// when no call follows.
    pub leaves_acks: bool,
}

impl Policy {
    /// A message, which the peer waits for.
    pub(crate) const MESSAGE: Policy = Policy { tail_waits: false, leaves_acks: false };
    /// A part of a stream.
    pub(crate) const PART: Policy = Policy { tail_waits: true, leaves_acks: true };
}

/// How a call that has sent ends: given to [`Shard::end_call`].
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CallEnd {
    /// The connection has ended, and may be removed.
    is_over: bool,
    /// The burst leaves without a poll.
    leaves_acks: bool,
}

/// How a turn of output ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::shard) enum Turn {
    /// Everything that could be sent was sent.
    Done,
    /// There is more; the connection is marked as queued.
    Over,
    /// The device refused; the connection is marked as queued.
    Refused { has_sent: bool },
}

impl Conn<'_> {
    /// The error with which the shard has failed the connection: the device is gone, or bytes of a file cannot be read.
    #[inline(always)]
    pub(crate) fn check(&self) -> Result<(), SocketError> {
        self.entry.error.map_or(Ok(()), Err)
    }

    /// Reports the present readiness of the connection to the watcher.
    #[inline]
    pub(crate) fn notify(&mut self) {
        if self.entry.watch.is_watched() {
            let ready = self.entry.ready();
            self.events.report(self.id, &mut self.entry.watch, ready);
        }
    }

    /// Unlocks the send side (BSD: `sbunlock`): the next writer may begin.
    #[inline]
    pub(crate) fn unlock_send(&mut self) {
        self.entry.writer = 0;
        self.notify();
    }

    /// Whether nothing but its removal is left of it on the network.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.entry.tcb.state(), State::Closed | State::TimeWait)
    }

    /// Puts it into the output queue.
    pub(crate) fn queue_output(&mut self) {
        if !core::mem::replace(&mut self.entry.is_queued, true) {
            self.output_queue.push_back(self.id);
        }
    }

    /// The one output of a write. Pass the result to [`Shard::end_call`].
    pub(crate) fn output(&mut self, tcp: &mut Tcp, now: Instant, policy: Policy) -> CallEnd {
        let gone =
            |c: &Counters| (c.value(Counter::TcpSegmentsOut), c.value(Counter::TcpPacketsOut));
        self.net.link.set_now(now);
        if policy.tail_waits {
            self.entry.tcb.set_more_announced(true);
        }
        let before = gone(&self.net.counters);
        self.output_now(tcp, now);
        let counters = &mut self.net.counters;
        let after = gone(counters);
        counters.count(Counter::SendOutputs);
        counters.add(Counter::SendFrames, after.0 - before.0);
        counters.add(Counter::SendPackets, after.1 - before.1);
        if policy.tail_waits {
            self.entry.tcb.set_more_announced(false);
            if self.entry.tcb.wants_output() && !self.entry.is_queued {
                self.queue_output();
                tcp.output_deferred_since.get_or_insert(now);
            }
        }
        let leaves_acks = policy.leaves_acks && self.has_ample_space();
        CallEnd { is_over: self.is_over(), leaves_acks }
    }

    fn has_ample_space(&self) -> bool {
        let queue = self.entry.tcb.send_queue_ref();
        self.net.link.loopback.is_empty() && queue.space() >= queue.limit() / 4 * 3
    }

    /// Runs the output now, for a call. While connections wait for a full device it queues after them.
    pub(crate) fn output_now(&mut self, tcp: &mut Tcp, now: Instant) {
        if !self.output_queue.is_empty() && self.net.link.has_unsent_frames() {
            return self.queue_output();
        }
        let was_queued = self.entry.is_queued;
        let is_done = self.turn(tcp, now, usize::MAX) == Turn::Done;
        if !is_done && !was_queued {
            self.output_queue.push_back(self.id);
        } else if is_done && was_queued && self.output_queue.back() == Some(&self.id) {
            // The tail that was held has been sent with this.
            self.output_queue.pop_back();
        }
    }

    /// Sends the output of a read, at most an ACK with a larger window. No receive poll: frames that the update
    /// releases are for the next read, while they are cached.
    pub(crate) fn output_after_read(&mut self, tcp: &mut Tcp, now: Instant) {
        if tcp.unacked_frames > 0 {
            return self.queue_output();
        }
        self.net.link.set_now(now);
        self.output_now(tcp, now);
        self.net.flush();
    }

    /// One turn of output, of `quota` bytes at most. The caller puts what is not done into the queue.
    pub(in crate::shard) fn turn(&mut self, tcp: &mut Tcp, now: Instant, quota: usize) -> Turn {
        self.refresh_path();
        let Conn { id, entry, net, wheel, .. } = self;
        entry.is_queued = false;
        let was_limited = entry.tcb.is_unsent_limited();
        let (key, options) = (*entry.tcb.key(), entry.header_options());
        let template = tcp.templates.of(*id, &key, options, &net.ip, now);
        // The source of a SYN may be forged.
        let is_unproven = entry.is_embryo || entry.early.is_some();
        let traffic = if is_unproven { Traffic::Reply } else { Traffic::Own };
        let Net { pool, counters, window, ip, link, stages, .. } = &mut **net;
        let mut out = TcpEmit { now, ip, link, stages, key, options, traffic, template, quota };
        let mut env = Env { now, pool, counters, window };
        let sent = entry.tcb.output(&mut env, &entry.path.info, &mut out);
        let left = out.quota;
        if let Some(at) = entry.tcb.next_deadline() {
            entry.timer = Some(wheel.schedule(entry.timer, TimerKey::Tcp(*id), at));
        }
        if was_limited && !entry.tcb.is_unsent_limited() {
            self.notify();
        }
        match sent {
            Sent::Done => Turn::Done,
            Sent::Starved => {
                self.memory.retry_later(now, self.id, &mut self.entry.blocked, self.net);
                Turn::Done
            }
            Sent::More => {
                self.entry.is_queued = true;
                if left == 0 { Turn::Over } else { Turn::Refused { has_sent: left < quota } }
            }
        }
    }

    /// Looks up the route again if a route, neighbour or address has changed.
    #[inline]
    fn refresh_path(&mut self) {
        if self.entry.path.generation == self.net.ip.generation() {
            return;
        }
        let key = self.entry.tcb.key();
        if let Ok((_, path)) = self.net.path_to(Some(key.local_ip()), key.remote_ip(), key.zone) {
            self.entry.path = path;
        }
    }
}

impl Tcp {
    /// Runs the output of a connection now; the caller ends the call.
    pub(crate) fn output_now(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Ok(mut conn) = core.conn(id) else { return };
        conn.output_now(self, now);
        if conn.is_over() {
            self.reap_if_done(now, id, core);
        }
    }
}

impl Shard {
    /// The end of a write: a short receive poll, unless the next write takes the ACKs, and one `tx_burst`.
    pub(crate) fn end_call(&mut self, now: Instant, id: SlotId, end: CallEnd) {
        if end.is_over {
            self.tcp.reap_if_done(now, id, &mut self.core);
        }
        if end.leaves_acks && !self.core.defers_transmit(now) {
            self.core.net.flush();
            self.tcp.check_link(&mut self.core);
        }
        // Also retries the frames that the device has refused.
        self.finish_call(now);
    }

    /// The output of a connection whose options or state have changed, and the end of the call.
    pub(crate) fn output_and_finish(&mut self, now: Instant, id: SlotId) {
        self.core.net.link.set_now(now);
        self.tcp.output_now(now, id, &mut self.core);
        self.finish_call(now);
    }
}
