//! TCP output: connections with something to send take their turn; timers of connections.

use crate::base::{Counter, Counters, Instant, SlotId};
use crate::ip::{Template, Traffic};
use crate::tcp::{Sent, State};

use crate::shard::layers::Core;
use crate::shard::net::{Net, TcpEmit};
use crate::shard::sockets::TcpEntry;
use crate::shard::tcp::Tcp;
use crate::shard::tcp_input::note_path_mtu;
use crate::shard::wheel::TimerKey;

/// Turns of connections in one pass, so that one pass is bounded.
const OUTPUTS_PER_PASS: usize = 4096;
/// What a connection sends in one turn: four super-segments, or 64 small ones. Then the others have theirs.
const TURN_BYTES: usize = 256 << 10;

/// How a turn of output ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    /// Everything that could be sent was sent.
    Done,
    /// There is more; the connection is marked as queued.
    Over,
    /// The device refused; the connection is marked as queued.
    Refused { has_sent: bool },
}

impl Tcp {
    /// Gives every queued connection its turn. Stops when the device refuses frames; a connection that has sent none
    /// keeps its place.
    pub fn run_output(&mut self, now: Instant, core: &mut Core) {
        for _ in 0..OUTPUTS_PER_PASS {
            let Some(id) = core.output_queue.pop_front() else { return };
            // A call on this connection has sent meanwhile.
            if !core.sockets.is_queued(id) {
                continue;
            }
            match self.output_one(now, id, TURN_BYTES, core) {
                Turn::Done => {}
                Turn::Over => core.output_queue.push_back(id),
                // A refusal beside a burst with space is about this connection's packet alone.
                Turn::Refused { has_sent: false } if core.net.link.space() == 0 => {
                    return core.output_queue.push_front(id);
                }
                Turn::Refused { .. } => return core.output_queue.push_back(id),
            }
        }
    }

    /// As [`Tcp::run_output`], after frames were received: ACKs are among what is sent.
    pub fn acknowledge(&mut self, now: Instant, core: &mut Core) {
        self.unacked_frames = 0;
        self.output_deferred_since = None;
        self.run_output(now, core);
    }

    /// Runs the output of one connection now, for the call that has just written to it. While connections wait for a
    /// full device it queues after them.
    pub fn output_now(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        if !core.output_queue.is_empty() && core.net.link.has_unsent_frames() {
            return core.queue_output(id);
        }
        let was_queued = core.sockets.is_queued(id);
        let is_done = self.output_one(now, id, usize::MAX, core) == Turn::Done;
        if !is_done && !was_queued {
            core.output_queue.push_back(id);
        } else if is_done && was_queued && core.output_queue.back() == Some(&id) {
            // The tail that was held has been sent with this.
            core.output_queue.pop_back();
        }
    }

    /// The output of a write, counted.
    pub fn output_written(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        core.net.link.set_now(now);
        let gone =
            |c: &Counters| (c.value(Counter::TcpSegmentsOut), c.value(Counter::TcpPacketsOut));
        let before = gone(&core.net.counters);
        self.output_now(now, id, core);
        let counters = &mut core.net.counters;
        let after = gone(counters);
        counters.count(Counter::SendOutputs);
        counters.add(Counter::SendFrames, after.0 - before.0);
        counters.add(Counter::SendPackets, after.1 - before.1);
    }

    /// After a large write: the partial segment at its end waits for the next write, which is likely to
    /// follow at once. It is sent with the next output of any kind, or two milliseconds later.
    pub fn defer_tail(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Ok(entry) = core.sockets.tcp(id) else { return };
        entry.tcb.set_more_announced(false);
        if entry.tcb.wants_output() && !entry.is_queued {
            entry.is_queued = true;
            core.output_queue.push_back(id);
            self.output_deferred_since.get_or_insert(now);
        }
    }

    /// A read has left something to be sent, at most an ACK with a larger window.
    pub fn output_after_read(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        if self.unacked_frames > 0 {
            return core.queue_output(id);
        }
        // No receive poll: frames that the update releases are for the next read, while they are cached.
        core.net.link.set_now(now);
        self.output_now(now, id, core);
        core.net.flush();
    }

    /// One connection's output, of `quota` bytes at most. The caller puts what is not done into the queue.
    fn output_one(&mut self, now: Instant, id: SlotId, quota: usize, core: &mut Core) -> Turn {
        let Core { sockets, net, wheel, memory, .. } = core;
        let Ok(entry) = sockets.tcp(id) else { return Turn::Done };
        refresh_path(entry, net);
        entry.is_queued = false;
        let was_limited = entry.tcb.is_unsent_limited();
        let template = self.templates.of(id, entry.tcb.key(), entry.header_options(), &net.ip, now);
        let (sent, left) = run_engine(net, now, entry, quota, template);
        let is_freed = was_limited && !entry.tcb.is_unsent_limited();
        if let Some(at) = entry.tcb.next_deadline() {
            entry.timer = Some(wheel.schedule(entry.timer, TimerKey::Tcp(id), at));
        }
        match sent {
            Sent::Done => self.reap_if_done(now, id, core),
            Sent::Starved => memory.retry_later(now, id, sockets, net),
            Sent::More => entry.is_queued = true,
        }
        if is_freed {
            core.notify(id);
        }
        match sent {
            Sent::Done | Sent::Starved => Turn::Done,
            Sent::More if left == 0 => Turn::Over,
            Sent::More => Turn::Refused { has_sent: left < quota },
        }
    }

    /// A connection's timer fired; it may be early, since timers are lazy.
    pub fn timer_fired(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        self.shorten_syn_retries(id, core);
        let Core { sockets, net, wheel, output_queue, .. } = core;
        let Ok(entry) = sockets.tcp(id) else { return };
        entry.timer = None;
        let events = entry.tcb.on_timer(&mut net.env(now));
        let is_expired_embryo = entry.is_embryo && entry.tcb.state() == State::Closed;
        let listener = entry.parent.or(entry.decided_by).filter(|_| is_expired_embryo);
        note_path_mtu(&mut net.ip, now, entry);
        self.posted.list(id, &mut entry.posted);
        if entry.tcb.wants_output() {
            if !core::mem::replace(&mut entry.is_queued, true) {
                output_queue.push_back(id);
            }
        } else if let Some(at) = entry.tcb.next_deadline() {
            entry.timer = Some(wheel.schedule(entry.timer, TimerKey::Tcp(id), at));
        }
        if let Some(listener) = listener {
            count_expired_embryo(listener, core);
        }
        self.handle_events(now, id, events, core);
    }
}

fn count_expired_embryo(listener: SlotId, core: &mut Core) {
    core.net.counters.count(Counter::TcpEmbryosExpired);
    if let Ok(l) = core.sockets.listener(listener) {
        l.syn_queue.counts.embryos_expired += 1;
    }
}

/// Looks up the route again if a route, neighbour or address has changed.
#[inline]
fn refresh_path(entry: &mut TcpEntry, net: &mut Net) {
    if entry.path.generation == net.ip.generation() {
        return;
    }
    let key = entry.tcb.key();
    if let Ok((_, path)) = net.path_to(Some(key.local_ip()), key.remote_ip(), key.zone) {
        entry.path = path;
    }
}

/// Runs the engine; returns what is left of the quota, too.
fn run_engine(
    net: &mut Net,
    now: Instant,
    entry: &mut TcpEntry,
    quota: usize,
    template: Option<&Template>,
) -> (Sent, usize) {
    let Net { pool, counters, window, ip, link, stages, .. } = net;
    let key = *entry.tcb.key();
    // The source of a SYN may be forged.
    let is_unproven = entry.is_embryo || entry.early.is_some();
    let traffic = if is_unproven { Traffic::Reply } else { Traffic::Own };
    let options = entry.header_options();
    let mut out = TcpEmit { now, ip, link, stages, key, options, traffic, template, quota };
    let mut env = crate::tcp::Env { now, pool, counters, window };
    let sent = entry.tcb.output(&mut env, &entry.path.info, &mut out);
    (sent, out.quota)
}
