//! Connections with something to send take their turn; timers of connections.

use crate::base::{Counter, Instant, SlotId};
use crate::tcp::State;

use crate::shard::conn::Turn;
use crate::shard::conn::input::note_path_mtu;
use crate::shard::conn::layer::Tcp;
use crate::shard::layers::Core;
use crate::shard::wheel::TimerKey;

/// Most outputs of connections in one pass, which bounds the pass.
const OUTPUTS_PER_PASS: usize = 4096;
/// Limit of one turn of a connection: four super-segments, or 64 small ones. Then the other connections have their
/// turns.
const TURN_BYTES: usize = 256 << 10;

impl Tcp {
    /// Gives every queued connection its turn. Stops when the device refuses frames; a connection that has sent none
    /// keeps its place.
    pub(crate) fn run_output(&mut self, now: Instant, core: &mut Core) {
        for _ in 0..OUTPUTS_PER_PASS {
            let Some(id) = core.output_queue.pop_front() else { return };
            let Ok(mut conn) = core.conn(id) else { continue };
            // A call on this connection has sent meanwhile.
            if !conn.entry.is_queued {
                continue;
            }
            match conn.turn(self, now, TURN_BYTES) {
                Turn::Done if conn.is_over() => self.reap_if_done(now, id, core),
                Turn::Done => {}
                Turn::Over => conn.output_queue.push_back(id),
                // A refusal beside a burst with space is about this connection's packet alone.
                Turn::Refused { has_sent: false } if conn.net.link.space() == 0 => {
                    return conn.output_queue.push_front(id);
                }
                Turn::Refused { .. } => return conn.output_queue.push_back(id),
            }
        }
    }

    /// As [`Tcp::run_output`], after frames were received: ACKs are among what is sent.
    pub(crate) fn acknowledge(&mut self, now: Instant, core: &mut Core) {
        self.unacked_frames = 0;
        self.output_deferred_since = None;
        self.run_output(now, core);
    }

    /// A connection's timer fired; it may be early, since timers are lazy.
    pub(crate) fn timer_fired(&mut self, now: Instant, id: SlotId, core: &mut Core) {
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
