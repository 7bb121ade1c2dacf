//! TCP input: from a packet that ip delivered to the connection, TIME-WAIT entry or listener that owns it.

use crate::base::{Counter, DropReason, FlowKey, Instant, SeqNum, SlotId, Stage, with_zone};
use crate::device::Packet;
use crate::ip::{Delivered, ErrorKind, Ip, Origin, QuotedError};
use crate::mbuf::Chain;
use crate::tcp::{EcnField, Events, IcmpError, TimeWaitVerdict, reset_for};
use crate::wire::tcp;

use crate::shard::conn::flow_cache::Generations;
use crate::shard::conn::layer::Tcp;
use crate::shard::conn::socket_options::HeaderOptions;
use crate::shard::demux::BatchLookup;
use crate::shard::layers::Core;
use crate::shard::link::net::Net;
use crate::shard::link::siblings::HandOff;
use crate::shard::listen::{expects_cookies, is_ack};
use crate::shard::slab::Slab;
use crate::shard::sockets::{Socket, TcpEntry};
use crate::shard::wheel::TimerKey;

/// A segment whose header is parsed and checked.
pub(crate) struct Segment {
    pub key: FlowKey,
    pub header: tcp::Header,
    pub ecn: EcnField,
    pub payload: Chain,
    /// It was sent to more than one station.
    pub is_group: bool,
}

impl Tcp {
    /// A packet for TCP.
    pub(crate) fn input(
        &mut self,
        now: Instant,
        d: Delivered,
        lookup: &BatchLookup,
        core: &mut Core,
    ) {
        let Some(key) = flow_of(&d) else {
            return core.net.drop_chain(d.chain, DropReason::TcpHeader);
        };
        if let Some(owner) = core.siblings.owner_elsewhere(&key) {
            return core.hand_over(owner, HandOff::Packet(d));
        }
        let Some(seg) = core.net.parse_segment(key, d) else { return };
        core.net.pass(Stage::Demultiplexed);
        match lookup.connection(&self.flows, &core.sockets, &key) {
            Some(id) if core.sockets.is_embryo(id) => self.embryo_input(now, id, seg, core),
            Some(id)
                if seg.header.flags.contains(tcp::Flags::SYN)
                    && self.leave_time_wait(now, id, &seg.header, core) =>
            {
                self.time_wait_input(now, seg, core);
            }
            Some(id) => {
                let generations = self.generations(&core.net.ip);
                self.flow_cache.note(id, generations);
                self.connection_input(now, id, &seg.header, seg.ecn, seg.payload, core);
            }
            None if self.time_wait.contains(&key) => self.time_wait_input(now, seg, core),
            None => self.listener_input(now, seg, core),
        }
    }

    fn generations(&self, ip: &Ip) -> Generations {
        Generations { flows: self.flows.generation(), ip: ip.generation() }
    }

    /// Fast path: a segment of the flow of the last one. Gives any other packet back without side effects.
    #[inline]
    pub(crate) fn input_predicted(
        &mut self,
        now: Instant,
        origin: Origin,
        p: Packet,
        core: &mut Core,
    ) -> Option<Packet> {
        let generations = self.generations(&core.net.ip);
        let Some(segment) = self.flow_cache.predict(origin, &p, generations) else {
            return Some(p);
        };
        let mut payload = p.chain;
        core.net.stages.pass_all([Stage::EtherInput, Stage::IpInput, Stage::Demultiplexed]);
        payload.trim_front(segment.payload_at, &mut core.net.pool);
        self.connection_input(now, segment.id, &segment.header, segment.ecn, payload, core);
        None
    }

    /// A segment with a valid checksum, for the connection that owns it.
    pub(crate) fn connection_input(
        &mut self,
        now: Instant,
        id: SlotId,
        header: &tcp::Header,
        ecn: EcnField,
        payload: Chain,
        core: &mut Core,
    ) {
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else {
            return core.net.pool.free(payload);
        };
        let mut env = core.net.env(now);
        let events = entry.tcb.input(&mut env, header, ecn, payload);
        core.net.stages.pass(Stage::TransportInput);
        if entry.tcb.wants_output() && !entry.is_queued {
            entry.is_queued = true;
            core.output_queue.push_back(id);
        } else if let Some(at) = entry.tcb.next_deadline() {
            // No output follows that would arm the timer: above all that of a delayed ACK.
            entry.timer = Some(core.wheel.schedule(entry.timer, TimerKey::Tcp(id), at));
        }
        self.posted.list(id, &mut entry.posted);
        self.handle_events(now, id, events, core);
        core.net.pass(Stage::ReaderWoken);
    }

    /// A connection in TIME-WAIT whose socket the application still holds leaves its addresses to a SYN that may reopen
    /// it (RFC 6191): what is left of TIME-WAIT goes on in the table of entries, and the socket is closed. False: it
    /// stays.
    fn leave_time_wait(
        &mut self,
        now: Instant,
        id: SlotId,
        syn: &tcp::Header,
        core: &mut Core,
    ) -> bool {
        let Ok(entry) = core.sockets.tcp(id) else { return false };
        let Some(time_wait) = entry.tcb.leave_time_wait(now, syn) else { return false };
        let key = *entry.tcb.key();
        if let Some(timer) = entry.timer.take() {
            core.wheel.cancel(timer);
        }
        self.time_wait.insert(key, time_wait);
        self.arm_time_wait(&mut core.wheel);
        self.handle_events(now, id, Events::CLOSED, core);
        true
    }

    /// A segment of a connection in TIME-WAIT (RFC 9293 section 3.10.7.4, RFC 6191).
    fn time_wait_input(&mut self, now: Instant, seg: Segment, core: &mut Core) {
        let len = seg.payload.len();
        let Some(entry) = self.time_wait.get_mut(&seg.key) else { return };
        let mut verdict = entry.on_segment(now, &seg.header, len);
        if let TimeWaitVerdict::Reopen { min_iss } = verdict {
            if let Some(listener) = self.find_listener(&seg.key, &core.sockets) {
                // The entry is removed once the listener has accepted the SYN.
                let key = seg.key;
                if self.passive_open(now, listener, seg, Some(min_iss), core) {
                    self.time_wait.remove(&key);
                }
                return;
            }
            let Some(entry) = self.time_wait.get_mut(&seg.key) else { return };
            verdict = entry.on_refused_syn(now);
        }
        match verdict {
            TimeWaitVerdict::Drop(reason) => core.net.drop_chain(seg.payload, reason),
            TimeWaitVerdict::Ack(header) => {
                core.net.pool.free(seg.payload);
                core.net.send_control(now, &seg.key, HeaderOptions::SEGMENT, &header);
            }
            TimeWaitVerdict::Closed | TimeWaitVerdict::Reopen { .. } => {
                self.time_wait.remove(&seg.key);
                self.listener_input(now, seg, core);
            }
        }
    }

    /// A segment without a connection: a SYN may open one, most else is answered by a reset
    /// (RFC 9293 section 3.10.7.1 and 3.10.7.2). SYN and FIN together open nothing.
    fn listener_input(&mut self, now: Instant, seg: Segment, core: &mut Core) {
        let flags = seg.header.flags;
        let others = tcp::Flags::ACK | tcp::Flags::RST | tcp::Flags::FIN;
        let is_syn = flags.contains(tcp::Flags::SYN) && !flags.intersects(others);
        let listener = self.find_listener(&seg.key, &core.sockets);
        if listener.is_some()
            && flags.contains(tcp::Flags::RST)
            && let Some(pending) = self.pending.find(&seg.key)
        {
            return match self.reset_pending(pending, seg.header.seq, core) {
                Ok(()) => core.net.pool.free(seg.payload),
                Err(reason) => core.net.drop_chain(seg.payload, reason),
            };
        }
        match listener {
            Some(id) if is_syn => _ = self.passive_open(now, id, seg, None, core),
            // LISTEN answers an ACK by a reset and drops the rest.
            Some(_) if !flags.contains(tcp::Flags::ACK) => {
                core.net.drop_chain(seg.payload, DropReason::TcpBadFlags);
            }
            Some(id) if is_ack(flags) && expects_cookies(now, id, &core.sockets) => {
                self.cookie_input(now, id, seg, core);
            }
            Some(_) => self.refuse(now, seg, DropReason::TcpBadFlags, core),
            None => self.refuse(now, seg, DropReason::TcpNoSocket, core),
        }
    }

    pub(crate) fn refuse(
        &mut self,
        now: Instant,
        seg: Segment,
        reason: DropReason,
        core: &mut Core,
    ) {
        let reply = reset_for(&seg.header, seg.payload.len());
        core.net.drop_chain(seg.payload, reason);
        if seg.is_group {
            return;
        }
        if let Some(header) = reply {
            if !self.resets.take(now, &mut core.secret.reset_limit) {
                return core.net.counters.count(Counter::TcpResetsLimited);
            }
            core.net.counters.count(Counter::TcpResetsOut);
            core.net.send_control(now, &seg.key, HeaderOptions::SEGMENT, &header);
        }
    }

    /// The most specific listener: one for the port before one for all ports, then one for the address
    /// before one for all addresses.
    fn find_listener(&self, key: &FlowKey, sockets: &Slab<Socket>) -> Option<SlotId> {
        if key.local_port == 0 {
            return None;
        }
        let of_port = |port| self.find_listener_of(port, key, sockets);
        of_port(key.local_port).or_else(|| of_port(0))
    }

    fn find_listener_of(&self, port: u16, key: &FlowKey, sockets: &Slab<Socket>) -> Option<SlotId> {
        let mut wildcard = None;
        for id in self.listeners.get(&port)? {
            let Some(Socket::Listener(l)) = sockets.get(*id) else { continue };
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

    /// An ICMP error, or the failure of a neighbour, about a segment of ours.
    pub(crate) fn icmp_error(&mut self, now: Instant, e: QuotedError, core: &mut Core) {
        let Some(id) = self.flows.find(&core.sockets, &e.flow()) else {
            return core.net.counters.drop_packet(DropReason::IcmpNoFlow);
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
        let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else { return };
        let quoted = SeqNum(e.seq);
        let mut env = core.net.env(now);
        let events = entry.tcb.on_icmp(&mut env, what, quoted);
        note_path_mtu(&mut core.net.ip, now, entry);
        self.posted.list(id, &mut entry.posted);
        core.queue_output(id);
        self.handle_events(now, id, events, core);
    }
}

impl Net {
    /// Header and checksum; `None` if the segment was dropped.
    fn parse_segment(&mut self, key: FlowKey, mut d: Delivered) -> Option<Segment> {
        let first = d.chain.front().map_or(&[][..], |m| m.as_slice());
        let Ok((header, bytes)) = tcp::Header::parse(first) else {
            self.drop_chain(d.chain, DropReason::TcpHeader);
            return None;
        };
        let trusted = d.offload.csum_valid || d.offload.needs_csum;
        if !trusted && !crate::tcp::verify_checksum(d.src, d.dst, &d.chain) {
            self.drop_chain(d.chain, DropReason::TcpChecksum);
            return None;
        }
        let mut payload = core::mem::take(&mut d.chain);
        payload.trim_front(bytes, &mut self.pool);
        let ecn = EcnField::of_bits(d.dscp_ecn);
        Some(Segment { key, header, ecn, payload, is_group: d.is_group })
    }
}

/// Lowers the path MTU for all traffic if a connection has accepted a report of a router.
pub(crate) fn note_path_mtu(ip: &mut crate::ip::Ip, now: Instant, entry: &mut TcpEntry) {
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
