//! TCP on its way down: connections that have something to send take their turn, and their timers.

use fulmar_base::{Instant, Probe, SlotId};
use fulmar_ip::{Template, Traffic};
use fulmar_tcp::Sent;

use crate::layers::Core;
use crate::net::{Net, TcpEmit};
use crate::shard::Shard;
use crate::sockets::{Socket, TcpEntry};
use crate::tcp_input::note_path_mtu;
use crate::wheel::TimerKey;

/// Turns of connections in one pass, so that one pass is bounded whatever they cause.
const TURNS_PER_PASS: usize = 4096;

impl<P: Probe> Shard<P> {
    /// Gives every queued connection its turn. Stops when the device takes no more.
    pub(crate) fn run_output(&mut self, now: Instant) {
        for _ in 0..self.core.output_queue.len().min(TURNS_PER_PASS) {
            let Some(id) = self.core.output_queue.pop_front() else { return };
            // A call of its own has given it its turn since.
            let is_queued =
                matches!(self.core.sockets.get(id), Some(Socket::Tcp(s)) if s.is_queued);
            if is_queued && !self.output_turn(now, id) {
                self.core.output_queue.push_front(id);
                return;
            }
        }
    }

    /// Runs one connection's output now. For the call that has just written to it.
    pub(crate) fn output_now(&mut self, now: Instant, id: SlotId) {
        let was_queued = matches!(self.core.sockets.get(id), Some(Socket::Tcp(s)) if s.is_queued);
        let is_done = self.output_turn(now, id);
        if !is_done && !was_queued {
            self.core.output_queue.push_back(id);
        } else if is_done && was_queued && self.core.output_queue.back() == Some(&id) {
            // Its tail was held, and has gone with this.
            self.core.output_queue.pop_back();
        }
    }

    /// One connection's output; false if the device refused: then it is marked as queued, and the
    /// caller sees to it that it is.
    fn output_turn(&mut self, now: Instant, id: SlotId) -> bool {
        self.refresh_path(id);
        let Core { sockets, net, .. } = &mut self.core;
        let Some(Socket::Tcp(entry)) = sockets.get_mut(id) else { return true };
        entry.is_queued = false;
        let template = self.tcp.templates.of((id, entry.tcb.key()), entry.ttl, &net.ip, now);
        let sent = run_engine(net, now, entry, template);
        self.arm_timer(id);
        match sent {
            Sent::Done => {
                self.reap_if_done(now, id);
                true
            }
            Sent::Starved => {
                self.note_shortage(now, id);
                true
            }
            Sent::More => {
                if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) {
                    entry.is_queued = true;
                }
                false
            }
        }
    }

    /// Looks the way up again if a route, neighbour or address has changed.
    fn refresh_path(&mut self, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get(id) else { return };
        if entry.path.generation == self.core.net.ip.generation() {
            return;
        }
        let key = *entry.tcb.key();
        if let Ok((_, path)) = self.path_to(Some(key.local_ip()), key.remote_ip(), key.zone)
            && let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id)
        {
            entry.path = path;
        }
    }

    /// Makes sure that the wheel fires for the connection in time.
    pub(crate) fn arm_timer(&mut self, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else { return };
        if let Some(at) = entry.tcb.next_deadline() {
            entry.timer = Some(self.core.wheel.schedule(entry.timer, TimerKey::Tcp(id), at));
        }
    }

    /// A connection's timer fired; it may be early, since timers are lazy.
    pub(crate) fn tcp_timer(&mut self, now: Instant, id: SlotId) {
        self.press_embryo(id);
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else { return };
        entry.timer = None;
        let events = entry.tcb.on_timer(&mut self.core.net.env(now));
        note_path_mtu(&mut self.core.net.ip, now, entry);
        self.tcp.posted.list(id, &mut entry.posted);
        if entry.tcb.wants_output() {
            self.core.queue_output(id);
        } else {
            self.arm_timer(id);
        }
        self.follow(now, id, events);
    }
}

fn run_engine<P: Probe>(
    net: &mut Net<P>,
    now: Instant,
    entry: &mut TcpEntry,
    template: Option<&Template>,
) -> Sent {
    let Net { pool, counters, window, ip, link, probe, .. } = net;
    let key = *entry.tcb.key();
    let mut out = TcpEmit {
        now,
        ip,
        link,
        probe,
        src: key.local_ip(),
        dst: key.remote_ip(),
        zone: key.zone,
        ttl: entry.ttl,
        // The source of a SYN may be forged.
        traffic: if entry.embryonic { Traffic::Reply } else { Traffic::Own },
        template,
    };
    let mut env = fulmar_tcp::Env { now, pool, counters, window };
    entry.tcb.output(&mut env, &entry.path.info, &mut out)
}
