//! The events of a connection outside its engine: it enters the tables, its events reach its listener, its watcher and
//! posted receive, and it is removed.

use alloc::boxed::Box;

use crate::base::{Counter, Instant, SlotId};
use crate::shard::conn::posted::BurstEnd;
use crate::socket::SocketError;
use crate::tcp::{Events, FastOpenVerdict, State};

use crate::shard::conn::layer::Tcp;
use crate::shard::layers::Core;
use crate::shard::slab::Slab;
use crate::shard::sockets::{Socket, TcpEntry};
use crate::shard::wheel::{TimerKey, Wheel};

impl Tcp {
    /// Enters a connection into the tables.
    pub(crate) fn insert(&mut self, entry: TcpEntry, sockets: &mut Slab<Socket>) -> SlotId {
        let key = *entry.tcb.key();
        let id = sockets.insert(Socket::Tcp(Box::new(entry)));
        self.flows.insert(sockets, &key, id);
        id
    }

    /// Brings the events of a connection to its listener, its watcher and the tables.
    pub(crate) fn handle_events(
        &mut self,
        now: Instant,
        id: SlotId,
        events: Events,
        core: &mut Core,
    ) {
        if events.is_empty() {
            return;
        }
        if events.contains(Events::CONNECTED) {
            self.established(id, core);
        }
        let is_over = events.intersects(Events::CLOSED | Events::ERROR);
        if is_over || events.contains(Events::CONNECTED) {
            self.end_early(now, id, core);
            self.end_opening(id, core);
            self.learn_fast_open(now, id, core);
        }
        let Core { sockets, memory, net, .. } = core;
        if events.contains(Events::WRITABLE) {
            memory.on_own_progress(id, sockets, &net.pool);
        }
        if let Ok(entry) = sockets.tcp(id) {
            if events.contains(Events::URGENT)
                && let Some(posted) = &mut entry.posted
            {
                // Once the bytes in front of the urgent one are there buffers are completed.
                posted.machine.flush(entry.tcb.urgent_to());
            }
            if events.contains(Events::WRITABLE) && net.ip.awaits_confirmation() {
                net.ip.confirm(now, entry.tcb.key());
            }
            if is_over && entry.tcb.state() == State::Closed {
                // Segments meet no connection any more, though the application still holds its socket (RFC 9293
                // section 3.10.7.1): they are answered by a reset, a SYN by a listener.
                self.flows.remove(entry.tcb.key(), id);
                // The send buffer of a closed connection is freed, whether the application reads on or not.
                entry.tcb.discard_send_buffer(&mut net.pool);
            }
        }
        core.notify(id);
        if is_over {
            self.reap_if_done(now, id, core);
        }
    }

    /// Caches the Fast Open result of a handshake: the cookie of the server, or its refusal.
    fn learn_fast_open(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Ok(entry) = core.sockets.tcp(id) else { return };
        let is_taken = entry.tcb.info().syn_data;
        let Some(report) = entry.tcb.take_fast_open_report() else { return };
        self.fast_opens.learn(now, entry.tcb.key(), &report);
        match report.verdict {
            FastOpenVerdict::Taken if is_taken => {
                core.net.counters.count(Counter::TcpFastOpensActive);
            }
            FastOpenVerdict::Taken => {}
            _ => core.net.counters.count(Counter::TcpFastOpensFailed),
        }
    }

    /// Removes a connection that is closed on the network and by the application.
    pub(crate) fn reap_if_done(&mut self, now: Instant, id: SlotId, core: &mut Core) {
        let Ok(entry) = core.sockets.tcp(id) else { return };
        let state = entry.tcb.state();
        let is_over = matches!(state, State::Closed | State::TimeWait);
        let is_accepted_later = entry.parent.is_some() && !entry.is_embryo;
        // A reset or the last ACK may still be unsent.
        if !is_over || entry.is_open || is_accepted_later || entry.tcb.wants_output() {
            return;
        }
        self.end_early(now, id, core);
        self.end_opening(id, core);
        let Ok(entry) = core.sockets.tcp(id) else { return };
        let (key, timer) = (*entry.tcb.key(), entry.timer.take());
        let counted = entry.counts_as;
        let listener = if entry.is_embryo { entry.parent } else { None };
        let time_wait = (state == State::TimeWait).then(|| entry.tcb.time_wait_entry(now));
        if entry.is_orphan {
            core.memory.reclaim.remove_orphan();
        }
        entry.tcb.release(&mut core.net.env(now));
        if let Some(t) = timer {
            core.wheel.cancel(t);
        }
        if let Some(Ok(listener)) = listener.map(|id| core.sockets.listener(id)) {
            listener.syn_queue.remove_one();
        }
        if let (Some(sources), Some(was)) = (&mut self.sources, counted) {
            sources.remove(&key, was);
        }
        self.flows.remove(&key, id);
        core.sockets.remove(id);
        if let Some(entry) = time_wait {
            self.time_wait.insert(key, entry);
            self.arm_time_wait(&mut core.wheel);
        }
    }

    /// Fails every socket once the device is gone.
    #[inline]
    pub(crate) fn check_link(&mut self, core: &mut Core) {
        if core.events.down.is_none()
            && let Some(errno) = core.net.link.device_ref().lost()
        {
            self.link_is_lost(errno, core);
        }
    }

    #[cold]
    fn link_is_lost(&mut self, errno: i32, core: &mut Core) {
        let error = match errno {
            e if e == SocketError::Protocol.errno() => SocketError::Protocol,
            _ => SocketError::NetworkDown,
        };
        core.events.set_down(error);
        for id in core.sockets.ids() {
            if let Ok(entry) = core.sockets.tcp(id) {
                entry.error = Some(error);
                self.posted.list(id, &mut entry.posted);
            }
            core.notify(id);
        }
        let now = core.net.link.now();
        self.posted.deliver_all(now, core);
        self.posted.end_bursts(BurstEnd::drained(now), core);
    }

    /// Sets the timer of the TIME-WAIT table.
    pub(crate) fn arm_time_wait(&mut self, wheel: &mut Wheel<TimerKey>) {
        if let Some(at) = self.time_wait.next_deadline() {
            let held = self.time_wait_timer;
            self.time_wait_timer = Some(wheel.schedule(held, TimerKey::TimeWait, at));
        }
    }
}
