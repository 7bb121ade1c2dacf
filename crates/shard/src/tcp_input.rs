//! TCP on its way up: from a packet that ip delivered to the connection that owns it, and what
//! follows for the connection's user and for the tables.

use alloc::boxed::Box;

use fulmar_base::{Counter, DropReason, FlowKey, Instant, Probe, SeqNum, SlotId, Stage, with_zone};
use fulmar_ip::{Delivered, ErrorKind, QuotedError};
use fulmar_mbuf::Chain;
use fulmar_netdev::Packet;
use fulmar_socket::SocketError;
use fulmar_tcp::{Events, IcmpError, State, TimeWaitVerdict, control_segment, reset_for};
use fulmar_wire::{protocol, tcp};

use crate::listen::is_ack;
use crate::net::{Net, TcpEmit};
use crate::shard::Shard;
use crate::siblings::Handed;
use crate::sockets::{Socket, TcpEntry};
use crate::wheel::TimerKey;

/// A segment whose header is parsed and checked.
pub(crate) struct Segment {
    pub key: FlowKey,
    pub header: tcp::Header,
    pub payload: Chain,
    /// It was sent to more than one station.
    pub is_group: bool,
}

impl<P: Probe> Shard<P> {
    /// A packet for TCP.
    pub(crate) fn tcp_input(&mut self, now: Instant, d: Delivered) {
        let Some(key) = flow_of(&d) else {
            return self.drop_chain(d.chain, DropReason::TcpHeader);
        };
        if let Some(owner) = self.core.siblings.owner_elsewhere(&key) {
            return self.hand(owner, Handed::Packet(d));
        }
        let Some(seg) = self.parse(key, d) else { return };
        if self.ends_at(Stage::Demultiplexed) {
            return self.core.net.pool.free(seg.payload);
        }
        match self.rx.foresight.connection(&self.tcp.flows, &self.core.sockets, &key) {
            Some(id) if self.is_embryo(id) => self.give_to_embryo(now, id, seg),
            Some(id) => {
                let changes = self.table_changes();
                self.tcp.last_stream.note(id, changes);
                self.give_to_connection(now, id, &seg.header, seg.payload);
            }
            None if self.tcp.time_wait.contains(&key) => self.give_to_time_wait(now, seg),
            None => self.give_to_listener(now, seg),
        }
    }

    /// What the tables of connections and `ip` say of their changes.
    fn table_changes(&self) -> (u64, u64) {
        (self.tcp.flows.generation(), self.core.net.ip.generation())
    }

    /// Takes a segment of the stream that came last; gives anything else back.
    #[inline]
    pub(crate) fn take_familiar(&mut self, now: Instant, p: Packet) -> Option<Packet> {
        let changes = self.table_changes();
        let Some(segment) = self.tcp.last_stream.recognise(&p, changes) else { return Some(p) };
        let mut payload = p.chain;
        let stages = [Stage::EtherInput, Stage::IpInput, Stage::Demultiplexed];
        if stages.into_iter().any(|stage| self.ends_at(stage)) {
            self.core.net.pool.free(payload);
            return None;
        }
        payload.trim_front(segment.payload_at, &mut self.core.net.pool);
        self.give_to_connection(now, segment.id, &segment.header, payload);
        None
    }

    /// Header and checksum; `None` if the segment was dropped.
    fn parse(&mut self, key: FlowKey, mut d: Delivered) -> Option<Segment> {
        let first = d.chain.front().map_or(&[][..], |m| m.as_slice());
        let Ok((header, bytes)) = tcp::Header::parse(first) else {
            self.drop_chain(d.chain, DropReason::TcpHeader);
            return None;
        };
        let trusted = d.offload.csum_valid || d.offload.needs_csum;
        if !trusted && !fulmar_tcp::verify_checksum(d.src, d.dst, &d.chain) {
            self.drop_chain(d.chain, DropReason::TcpChecksum);
            return None;
        }
        let mut payload = core::mem::take(&mut d.chain);
        payload.trim_front(bytes, &mut self.core.net.pool);
        Some(Segment { key, header, payload, is_group: d.is_group })
    }

    pub(crate) fn drop_chain(&mut self, chain: Chain, reason: DropReason) {
        self.core.net.counters.drop_packet(reason);
        self.core.net.pool.free(chain);
    }

    /// A segment, its checksum right, for the connection that owns it.
    pub(crate) fn give_to_connection(
        &mut self,
        now: Instant,
        id: SlotId,
        header: &tcp::Header,
        payload: Chain,
    ) {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return self.core.net.pool.free(payload);
        };
        let mut env = self.core.net.env(now);
        let events = entry.tcb.input(&mut env, header, payload);
        if self.core.net.probe.stage(Stage::TransportInput).is_break() {
            return;
        }
        if entry.tcb.wants_output() && !entry.is_queued {
            entry.is_queued = true;
            self.core.output_queue.push_back(id);
        } else if let Some(at) = entry.tcb.next_deadline() {
            // No output follows that would do it: above all an ACK that is held back.
            entry.timer = Some(self.core.wheel.schedule(entry.timer, TimerKey::Tcp(id), at));
        }
        self.tcp.posted.list(id, &mut entry.posted);
        self.follow(now, id, events);
        self.pass(Stage::ReaderWoken);
    }

    /// A segment of a connection in TIME-WAIT (RFC 9293 section 3.10.7.4, RFC 6191).
    fn give_to_time_wait(&mut self, now: Instant, seg: Segment) {
        let len = seg.payload.len();
        let Some(entry) = self.tcp.time_wait.get_mut(&seg.key) else { return };
        let mut verdict = entry.on_segment(now, &seg.header, len);
        if let TimeWaitVerdict::Reopen { min_iss } = verdict {
            if let Some(listener) = self.find_listener(&seg.key) {
                return self.reopen(now, listener, seg, min_iss);
            }
            let Some(entry) = self.tcp.time_wait.get_mut(&seg.key) else { return };
            verdict = entry.on_refused_syn(now);
        }
        match verdict {
            TimeWaitVerdict::Drop(reason) => self.drop_chain(seg.payload, reason),
            TimeWaitVerdict::Ack(header) => {
                self.core.net.pool.free(seg.payload);
                self.send_control(now, &seg.key, None, &header);
            }
            TimeWaitVerdict::Closed | TimeWaitVerdict::Reopen { .. } => {
                self.tcp.time_wait.remove(&seg.key);
                self.give_to_listener(now, seg);
            }
        }
    }

    /// A SYN that may follow a connection in TIME-WAIT, whose entry goes once the listener has taken it.
    fn reopen(&mut self, now: Instant, listener: SlotId, seg: Segment, min_iss: SeqNum) {
        let key = seg.key;
        if self.open_passive(now, listener, seg, Some(min_iss)) {
            self.tcp.time_wait.remove(&key);
        }
    }

    /// A segment without a connection: a SYN may open one, most else is answered by a reset
    /// (RFC 9293 section 3.10.7.1 and 3.10.7.2). SYN and FIN together open nothing.
    fn give_to_listener(&mut self, now: Instant, seg: Segment) {
        let flags = seg.header.flags;
        let others = tcp::Flags::ACK | tcp::Flags::RST | tcp::Flags::FIN;
        let is_syn = flags.contains(tcp::Flags::SYN) && !flags.intersects(others);
        let listener = self.find_listener(&seg.key);
        match listener {
            Some(id) if is_syn => _ = self.open_passive(now, id, seg, None),
            // LISTEN resets what acknowledges and drops the rest.
            Some(_) if !flags.contains(tcp::Flags::ACK) => {
                self.drop_chain(seg.payload, DropReason::TcpBadFlags);
            }
            Some(id) if is_ack(flags) && self.expects_cookies(now, id) => {
                self.give_to_cookie(now, id, seg);
            }
            Some(_) => self.refuse(now, seg, DropReason::TcpBadFlags),
            None => self.refuse(now, seg, DropReason::TcpNoSocket),
        }
    }

    pub(crate) fn refuse(&mut self, now: Instant, seg: Segment, reason: DropReason) {
        let reply = reset_for(&seg.header, seg.payload.len());
        self.drop_chain(seg.payload, reason);
        if seg.is_group {
            return;
        }
        if let Some(header) = reply {
            if !self.tcp.resets.take(now, &mut self.core.secret.limits) {
                return self.core.net.counters.count(Counter::TcpResetsLimited);
            }
            self.core.net.counters.count(Counter::TcpResetsOut);
            self.send_control(now, &seg.key, None, &header);
        }
    }

    fn find_listener(&self, key: &FlowKey) -> Option<SlotId> {
        let mut wildcard = None;
        for id in self.tcp.listeners.get(&key.local_port)? {
            let Some(Socket::Listener(l)) = self.core.sockets.get(*id) else { continue };
            if !l.matches(key.local_ip()) {
                continue;
            }
            if l.is_specific() {
                return Some(*id);
            }
            wildcard = Some(*id);
        }
        wildcard
    }

    /// Enters a connection into the tables.
    pub(crate) fn add_connection(&mut self, entry: TcpEntry) -> SlotId {
        let key = *entry.tcb.key();
        let id = self.core.sockets.insert(Socket::Tcp(Box::new(entry)));
        self.tcp.flows.insert(&self.core.sockets, &key, id);
        id
    }

    /// What the events of a connection mean for its listener, its watchers and the tables.
    pub(crate) fn follow(&mut self, now: Instant, id: SlotId, events: Events) {
        if events.is_empty() {
            return;
        }
        if events.contains(Events::CONNECTED) {
            self.established(id);
        }
        if events.contains(Events::URGENT) {
            self.flush_posted(id);
        }
        if events.contains(Events::WRITABLE) {
            self.on_acknowledged(now, id);
        }
        let is_over = events.intersects(Events::CLOSED | Events::ERROR);
        if is_over {
            self.discard_if_closed(id);
        }
        self.notify(id);
        if is_over {
            self.reap_if_done(now, id);
        }
    }

    /// The peer acknowledged something new: writers that wait go on, and the neighbour is confirmed.
    fn on_acknowledged(&mut self, now: Instant, id: SlotId) {
        if !self.core.memory.send_waiters.is_empty() {
            self.on_own_progress(id);
        }
        if self.core.net.ip.awaits_confirmation()
            && let Some(Socket::Tcp(entry)) = self.core.sockets.get(id)
        {
            self.core.net.ip.confirm(now, entry.tcb.key());
        }
    }

    /// What a dead connection would have sent is let go at once, whether its user looks or not.
    fn discard_if_closed(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id)
            && entry.tcb.state() == State::Closed
        {
            entry.tcb.discard_send_buffer(&mut self.core.net.pool);
        }
    }

    /// Removes a connection that neither the network nor the user needs any more.
    pub(crate) fn reap_if_done(&mut self, now: Instant, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else { return };
        let state = entry.tcb.state();
        let over = matches!(state, State::Closed | State::TimeWait);
        let queued = entry.parent.is_some() && !entry.embryonic;
        // A reset, or the last acknowledgement, may still have to go.
        if !over || entry.is_open || queued || entry.tcb.wants_output() {
            return;
        }
        let (key, timer) = (*entry.tcb.key(), entry.timer.take());
        let counted = entry.counts_as;
        let orphan_of = if entry.embryonic { entry.parent } else { None };
        let tomb = (state == State::TimeWait).then(|| entry.tcb.time_wait_entry(now));
        if entry.is_orphan {
            self.core.memory.reclaim.orphan_gone();
        }
        entry.tcb.release(&mut self.core.net.env(now));
        if let Some(t) = timer {
            self.core.wheel.cancel(t);
        }
        if let Some(listener) = orphan_of {
            self.embryo_gone(listener);
        }
        if let (Some(sources), Some(was)) = (&mut self.tcp.sources, counted) {
            sources.remove(&key, was);
        }
        self.tcp.flows.remove(&key, id);
        self.core.sockets.remove(id);
        if let Some(tomb) = tomb {
            self.tcp.time_wait.insert(key, tomb);
            self.arm_time_wait();
        }
    }

    /// An ICMP error, or the failure of a neighbour, about something this stack sent.
    pub(crate) fn icmp_error_here(&mut self, now: Instant, e: QuotedError) {
        match e.protocol {
            protocol::TCP => self.tcp_icmp_error(now, e),
            protocol::UDP => self.udp_icmp_error(now, e),
            _ => self.ping_error(now, e),
        }
    }

    fn tcp_icmp_error(&mut self, now: Instant, e: QuotedError) {
        let Some(id) = self.tcp.flows.find(&self.core.sockets, &e.flow()) else {
            return self.core.net.counters.drop_packet(DropReason::IcmpNoFlow);
        };
        let what = match e.kind {
            ErrorKind::TooBig { mtu } => IcmpError::TooBig { mtu },
            ErrorKind::ResolutionFailed => IcmpError::ResolutionFailed,
            ErrorKind::PortUnreachable => IcmpError::Unreachable { hard: true },
            ErrorKind::Unreachable { hard, .. } => IcmpError::Unreachable { hard },
            ErrorKind::TimeExceeded | ErrorKind::ParameterProblem => {
                IcmpError::Unreachable { hard: false }
            }
        };
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else { return };
        let quoted = fulmar_base::SeqNum(e.seq);
        let mut env = self.core.net.env(now);
        let events = entry.tcb.on_icmp(&mut env, what, quoted);
        note_path_mtu(&mut self.core.net.ip, now, entry);
        self.tcp.posted.list(id, &mut entry.posted);
        self.core.queue_output(id);
        self.follow(now, id, events);
    }

    /// A bare segment that belongs to no connection.
    pub(crate) fn send_control(
        &mut self,
        now: Instant,
        key: &FlowKey,
        ttl: Option<u8>,
        header: &tcp::Header,
    ) {
        let Net { pool, counters, ip, link, probe, .. } = &mut self.core.net;
        let Ok(seg) = control_segment(pool, key, header) else {
            return counters.drop_packet(DropReason::NoBuffer);
        };
        let mut out = TcpEmit {
            now,
            ip,
            link,
            probe,
            src: key.local_ip(),
            dst: key.remote_ip(),
            zone: key.zone,
            ttl,
            traffic: fulmar_ip::Traffic::Reply,
            template: None,
        };
        let _ = fulmar_tcp::Emit::emit(&mut out, pool, counters, seg);
    }

    /// The user's error for a connection that the stack itself failed.
    pub(crate) fn stack_error(&self, id: SlotId) -> Option<SocketError> {
        match self.core.sockets.get(id) {
            Some(Socket::Tcp(s)) => s.error,
            _ => None,
        }
    }
}

/// Lowers the path MTU for all traffic if a connection has come to believe a report of a router.
pub(crate) fn note_path_mtu(ip: &mut fulmar_ip::Ip, now: Instant, entry: &mut TcpEntry) {
    if let Some(mtu) = entry.tcb.take_path_mtu() {
        ip.lower_path_mtu(now, entry.tcb.key().remote_ip(), mtu);
    }
}

/// The flow of a delivered TCP packet; `None` if it is too short to have ports.
fn flow_of(d: &Delivered) -> Option<FlowKey> {
    let ports = d.chain.front()?.as_slice().first_chunk::<4>()?;
    let [s0, s1, d0, d1] = *ports;
    let local = with_zone(d.dst, u16::from_be_bytes([d0, d1]), d.zone);
    let remote = with_zone(d.src, u16::from_be_bytes([s0, s1]), d.zone);
    Some(FlowKey::new(local, remote))
}
