//! Segment output: sends everything that may be sent now, one segment at a time.
//!
//! [`Tcb::plan`] chooses the next segment, without side effects; `transmit` builds and emits it; `on_sent` updates the
//! control block. The order of precedence:
//!
//! 1. a reset, which is the last segment;
//! 2. the SYN, with data if Fast Open has a cookie, or SYN,ACK;
//! 3. a tail loss probe;
//! 4. retransmission of lost data;
//! 5. new data and the FIN, in super-segments if the path has segmentation offload;
//! 6. a window or keepalive probe;
//! 7. a pure ACK, if one is due and no segment above carried it.

mod plan;

use crate::base::{Counter, DropReason, Duration, GsoKind, IpVersion};
use crate::mbuf::{Chain, NoBuffer, Pool, Purpose};
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::tcp::contract::ConnError;
use crate::tcp::contract::{Emit, EmitError, Env, PathInfo, SegmentOut, Sent, State};
use crate::tcp::segment::{checksum_offload, header_mbuf, offload};
use crate::tcp::tcb::DEFAULT_MSS;
use crate::tcp::timers::{Pending, Timer};
use crate::wire::tcp::{Flags, Header, SackBlocks};
pub(crate) use plan::{Plan, SegmentKind};

/// Most mbufs in one segment. A payload in more mbufs is linearized: devices limit the number of
/// scatter-gather entries, and an entry costs more than copying a few bytes.
const MAX_SEGMENT_MBUFS: usize = 64;

impl Tcb {
    /// Whether output would send something.
    pub fn wants_output(&self) -> bool {
        if matches!(self.state, State::Closed) {
            return self.due.reset.is_some();
        }
        self.due.reset.is_some() || self.ack_due() || self.plan().is_some()
    }

    /// Sends everything that may be sent now.
    pub fn output(&mut self, env: &mut Env, path: &PathInfo, out: &mut impl Emit) -> Sent {
        env.counters.count(Counter::TcpOutputs);
        self.set_path(path);
        self.pacing.update_hold(env.now);
        self.update_mtu_probe_due(env.now);
        self.check_ecn_option(env.now);
        self.send_marks.burst_start = self.snd.nxt;
        let sent = match self.send_all(env, out) {
            Ok(()) => Sent::Done,
            Err(why) => why,
        };
        // A closed connection has no timers, even with data in flight.
        if matches!(self.state, State::Closed) {
            return sent;
        }
        self.record_cwnd_limited();
        self.record_buffer_limited();
        self.record_dry();
        self.rearm(env.now);
        self.record_send_limit(env.now);
        sent
    }

    /// The position of a segment without data: SND.NXT, unless the peer has shrunk its window below that and would
    /// not accept it (RFC 9293 section 3.8.6). A peer that rounds its window down to the unit of its scale seems to
    /// shrink it by less than a unit, and has received everything: an older position would look like a duplicate to
    /// it (RFC 7323 section 2.4).
    pub(crate) fn acceptable_position(&self) -> u64 {
        let is_opening = self.snd.una == 0;
        let edge = self.snd.una.saturating_add(self.snd.wnd);
        let unit = 1 << self.scale.snd;
        if is_opening || self.snd.nxt < edge.saturating_add(unit) {
            return self.snd.nxt;
        }
        edge
    }

    fn send_all(&mut self, env: &mut Env, out: &mut impl Emit) -> Result<(), Sent> {
        if let Some(reset) = self.due.reset {
            self.send_reset(env, out, reset)?;
        }
        if matches!(self.state, State::Closed) {
            return Ok(());
        }
        self.check_app_limited(env.now);
        self.restart_if_idle(env);
        while let Some(plan) = self.plan() {
            self.transmit(env, out, &plan)?;
        }
        if self.ack_due() {
            self.transmit(env, out, &Plan::ack(self.acceptable_position()))?;
        }
        Ok(())
    }

    /// RFC 5681 section 4.1: an idle time of one RTO invalidates cwnd.
    fn restart_if_idle(&mut self, env: &Env) {
        if self.flight() == 0 && self.has_unsent() {
            if self.delivery.is_on() {
                if self.delivery.is_app_limited() {
                    self.congestion.on_restart(env.now);
                }
                self.update_pacing();
            }
            let idle = env.now.since(self.times.last_sent_at);
            if idle > self.rtt.rto() && self.is_synchronized() {
                self.congestion.on_idle();
                // Restarts the idle period, so that the next output does not restart the window again.
                self.times.last_sent_at = env.now;
            }
        }
    }

    /// Whether an ACK is due: one was requested, or two full segments are unacknowledged (RFC 9293
    /// section 3.8.6.3).
    #[inline]
    pub(crate) fn ack_due(&self) -> bool {
        let unacknowledged = self.rcv.nxt.saturating_sub(self.rcv.last_ack_sent);
        let due = self.due.ack || unacknowledged >= u64::from(self.rcv_mss).saturating_mul(2);
        due && !matches!(self.state, State::SynSent | State::Closed) && self.snd.nxt > 0
    }

    fn transmit(&mut self, env: &mut Env, out: &mut impl Emit, plan: &Plan) -> Result<(), Sent> {
        if out.space() == 0 {
            return Err(Sent::More);
        }
        let hdr = self.header_for(env, plan);
        let is_first_ack = self.is_first_ecn_ack();
        let seg = match self.build(env.pool, &hdr, plan) {
            Ok(seg) => seg,
            Err(NoBuffer) if plan.bytes > self.full_segment_bytes() => {
                let kind = plan.kind.without_probe();
                let less = Plan { bytes: self.full_segment_bytes(), fin: false, kind, ..*plan };
                return self.transmit(env, out, &less);
            }
            Err(NoBuffer) => return Err(Sent::Starved),
        };
        match out.emit(env.pool, env.counters, seg) {
            Ok(()) => {
                env.counters.count(Counter::TcpSegmentsOut);
                if matches!(plan.kind, SegmentKind::Ack) {
                    env.counters.count(Counter::TcpAcksOut);
                }
                let packets = self.packet_count(plan);
                env.counters.add(Counter::TcpPacketsOut, packets);
                self.count_packets(plan, packets);
            }
            Err(EmitError::Full) => return Err(Sent::More),
            // Counts as lost in the network: the retransmission timer recovers it.
            Err(EmitError::NoRoute) => self.errors.soft = Some(ConnError::NetUnreachable),
            Err(EmitError::Lost) => {}
        }
        self.on_sent(env, plan);
        if !hdr.options.sack.is_empty() && self.dsack_due.take().is_some() {
            env.counters.count(Counter::TcpDsacksOut);
        }
        if hdr.options.sends_ecn() {
            self.on_ecn_option_sent(plan.carrier(), is_first_ack, env.now);
        }
        Ok(())
    }

    #[inline]
    fn count_packets(&mut self, plan: &Plan, packets: u64) {
        let s = &mut self.statistics;
        s.packets_out = s.packets_out.wrapping_add(packets as u32);
        if plan.bytes > 0 {
            s.data_packets_out = s.data_packets_out.wrapping_add(packets as u32);
        }
    }

    /// MTU-sized packets in a segment.
    #[inline]
    fn packet_count(&self, plan: &Plan) -> u64 {
        let (whole, rest) = div_rem(plan.bytes as u64, self.packet_bytes(plan) as u64);
        whole.saturating_add(u64::from(rest > 0)).max(1)
    }

    /// Payload of each packet of a segment.
    #[inline]
    fn packet_bytes(&self, plan: &Plan) -> usize {
        match plan.kind {
            // The data of a SYN, and an MTU probe, is one packet, whatever the segment size is now.
            SegmentKind::Syn | SegmentKind::MtuProbe => plan.bytes,
            _ => self.full_segment_bytes(),
        }
    }

    /// The header of a planned segment.
    fn header_for(&mut self, env: &mut Env, plan: &Plan) -> Header {
        let mut hdr = self.header_at(plan.pos, self.flags_for(plan), env.now);
        if matches!(plan.kind, SegmentKind::Syn) {
            hdr.window = self.advertise_in_syn(env.window);
            self.put_syn_options(&mut hdr);
        } else {
            hdr.window = self.advertise(env.window);
            if plan.bytes == 0 || self.data_reports_blocks() {
                hdr.options.sack = self.sack_blocks();
            }
        }
        hdr.options.ecn = self.ecn_option(plan.carrier());
        hdr
    }

    fn flags_for(&self, plan: &Plan) -> Flags {
        match plan.kind {
            SegmentKind::Syn if matches!(self.state, State::SynSent) => {
                return Flags::SYN | self.ecn_syn_flags();
            }
            SegmentKind::Syn => return Flags::SYN | Flags::ACK | self.ecn_syn_flags(),
            _ => {}
        }
        let mut flags = Flags::ACK | self.ecn_flags(plan.carrier());
        if plan.fin {
            flags |= Flags::FIN;
        }
        // PSH on the segment that empties the queue (RFC 9293 section 3.9.1.2), or ends a record.
        let end = plan.pos.saturating_add(plan.bytes as u64);
        if plan.bytes > 0 && (end == self.send_end() || self.records.ends_at(end)) {
            flags |= Flags::PSH;
        }
        flags
    }

    /// The options of a SYN: what this side supports. Of a SYN,ACK: what both sides support.
    fn put_syn_options(&self, hdr: &mut Header) {
        let answering = matches!(self.state, State::SynReceived);
        hdr.options.mss = u16::try_from(self.own_mss()).ok();
        // A SYN without window scale disables it in both directions; the SYN,ACK omits the option.
        let scaling = !answering || self.scale.both;
        hdr.options.window_scale = scaling.then_some(self.scale.rcv);
        hdr.options.sack_permitted = self.sack_on;
        // A retransmitted SYN omits it: a middlebox may drop unknown options (RFC 7413 section 4.1.3).
        if self.snd.nxt == 0 {
            hdr.options.fast_open = self.fast_open.option();
        }
    }

    /// The out-of-order ranges received, most recent first (RFC 2018 section 4). Bytes received twice
    /// come before them, and the range that contains those follows (RFC 2883 section 4).
    #[inline]
    fn sack_blocks(&self) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        if !self.has_blocks() {
            return blocks;
        }
        let mut ranges = [(0u64, 0u64); SackBlocks::MAX];
        let n = self.recv.sack_ranges(&mut ranges);
        let ranges = ranges.get_mut(..n).unwrap_or_default();
        // Positions are offsets of the stream plus one.
        let seq = |offset: u64| self.peer_seq_of(offset.saturating_add(1));
        if let Some((start, end)) = self.dsack_due {
            blocks.push(self.peer_seq_of(start), self.peer_seq_of(end));
            ranges.sort_by_key(|(from, to)| !(*from < start && end <= to.saturating_add(1)));
        }
        for (from, to) in ranges.iter() {
            blocks.push(seq(*from), seq(*to));
        }
        blocks
    }

    /// Builds a segment: the header mbuf, then references into the send queue.
    fn build(&self, pool: &mut Pool, hdr: &Header, plan: &Plan) -> Result<SegmentOut, NoBuffer> {
        let tcp_bytes = hdr.header_bytes().saturating_add(plan.bytes);
        let header = header_mbuf(pool, self.pseudo, hdr, tcp_bytes)?;
        let mut chain = Chain::from(header);
        if plan.bytes > 0 {
            match self.payload(pool, plan) {
                Ok(payload) => chain.append(payload),
                Err(e) => {
                    pool.free(chain);
                    return Err(e);
                }
            }
        }
        let kind = match self.path.ip_version() {
            IpVersion::V4 => GsoKind::TcpV4,
            IpVersion::V6 => GsoKind::TcpV6,
        };
        let offload = offload(hdr, plan.bytes, self.packet_bytes(plan), kind);
        Ok(SegmentOut { chain, offload, ecn_capable: self.ecn.is_capable && plan.is_new_data() })
    }

    fn payload(&self, pool: &mut Pool, plan: &Plan) -> Result<Chain, NoBuffer> {
        let offset = plan.pos.saturating_sub(1);
        let refs = match self.send.range(offset, plan.bytes, pool) {
            Ok(refs) => refs,
            Err(NoBuffer) if plan.bytes <= self.full_segment_bytes() => {
                return self.send.copy_range(offset, plan.bytes, pool);
            }
            Err(e) => return Err(e),
        };
        if refs.segs() <= MAX_SEGMENT_MBUFS {
            return Ok(refs);
        }
        linearize(pool, refs)
    }

    /// Updates the control block after a segment was sent.
    fn on_sent(&mut self, env: &mut Env, plan: &Plan) {
        let now = env.now;
        if !matches!(plan.kind, SegmentKind::Probe) {
            if plan.kind.is_new() {
                self.dialogue.on_data_sent(self.rcv.last_ack_sent != self.rcv.nxt);
            }
            self.on_ack_sent();
        }
        if !matches!(plan.kind, SegmentKind::Syn) {
            self.on_ecn_sent(plan.carrier());
        }
        match plan.kind {
            SegmentKind::Ack => return,
            SegmentKind::Probe => {
                self.due.probe = false;
                env.counters.count(if self.persisting {
                    Counter::TcpWindowProbes
                } else {
                    Counter::TcpKeepaliveProbes
                });
            }
            SegmentKind::Syn => self.on_syn_sent(env, plan),
            SegmentKind::New => self.on_new_sent(env, plan),
            SegmentKind::MtuProbe => {
                self.on_new_sent(env, plan);
                self.on_mtu_probe_sent(plan.pos, plan.bytes, env.counters);
            }
            SegmentKind::Retransmit | SegmentKind::TailProbe => {
                self.on_retransmit_sent(plan, now);
                env.counters.add(Counter::TcpRetransmitBytes, plan.bytes as u64);
            }
        }
        self.times.last_sent_at = now;
    }

    /// The segment sent carried `rcv.nxt`.
    #[inline]
    fn on_ack_sent(&mut self) {
        self.due.ack = false;
        self.due.pushed = false;
        if self.rcv.last_ack_sent != self.rcv.nxt {
            // Counted in segments of the default MSS, whatever the size of those received.
            let bytes = self.rcv.nxt.wrapping_sub(self.rcv.last_ack_sent);
            let (segments, _) = div_rem(bytes, u64::from(DEFAULT_MSS));
            self.quick_acks = self.quick_acks.saturating_sub(segments.clamp(1, 16) as u8);
        }
        self.rcv.last_ack_sent = self.rcv.nxt;
        self.timers.stop(Timer::DelayedAck);
    }

    fn on_syn_sent(&mut self, env: &mut Env, plan: &Plan) {
        self.due.syn = false;
        self.times.syn_sent_at = env.now;
        if self.snd.nxt == 0 {
            self.snd.nxt = (plan.bytes as u64).saturating_add(1);
            self.fast_open.syn_bytes = plan.bytes as u16;
            self.sacked.begin(1);
            self.note_progress(env.now);
            self.times.timed = Some((1, env.now));
        } else {
            // Karn.
            self.times.timed = None;
            self.retransmits.segments = self.retransmits.segments.saturating_add(1);
        }
    }

    fn on_new_sent(&mut self, env: &Env, plan: &Plan) {
        let end = plan.end();
        if self.flight() == 0 {
            self.note_progress(env.now);
        }
        self.snd.nxt = self.snd.nxt.max(end);
        let within = self.shared_run_time();
        self.sacked.sent(end, env.now, within);
        self.sample_sent(end, plan.bytes as u64, env.now, within);
        self.pace_sent(plan.bytes as u64, env.now);
        self.fin.sent |= plan.fin;
        self.due.probe = false;
        if !plan.bytes.is_multiple_of(self.packet_bytes(plan).max(1)) {
            self.send_marks.small_end = end;
            self.user.cork_expired = false;
            self.timers.stop(Timer::Cork);
        }
        if self.times.timed.is_none() && self.recovery.is_quiet() {
            self.times.timed = Some((end, env.now));
        }
        // Data flows in this direction too: it can carry ACKs.
        self.quick_acks = 0;
        self.count_prr_out(plan.bytes as u64);
        if self.recovery.tlp.due {
            self.on_probe_sent(plan.kind);
        } else if matches!(self.recovery.pending, Pending::Probe) && !self.persisting {
            // The tail has moved: `rearm` schedules the probe again.
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// Segments sent within this time share a run of the scoreboard: too short to matter for RACK,
    /// whose window is a quarter of the round-trip time. During recovery each has its own.
    #[inline]
    fn shared_run_time(&self) -> Duration {
        if self.recovery.is_quiet() { self.rtt.srtt_128th() } else { Duration::ZERO }
    }

    /// RST, with ACK in the synchronized states (RFC 9293 section 3.5.2).
    fn send_reset(
        &mut self,
        env: &mut Env,
        out: &mut impl Emit,
        reset: crate::tcp::tcb::ResetDue,
    ) -> Result<(), Sent> {
        if out.space() == 0 {
            return Err(Sent::More);
        }
        let flags = if reset.with_ack { Flags::RST | Flags::ACK } else { Flags::RST };
        let mut hdr = self.header_at(0, flags, env.now);
        hdr.seq = reset.seq;
        if matches!(self.state, State::SynSent) {
            // Offered, not negotiated (RFC 7323 section 3.2).
            hdr.options.timestamps = None;
        }
        let Ok(mbuf) = header_mbuf(env.pool, self.pseudo, &hdr, hdr.header_bytes()) else {
            // Without a buffer the reset is dropped, not deferred.
            env.counters.drop_packet(DropReason::NoBuffer);
            self.due.reset = None;
            return Ok(());
        };
        let seg = SegmentOut {
            chain: Chain::from(mbuf),
            offload: checksum_offload(),
            ecn_capable: false,
        };
        if out.emit(env.pool, env.counters, seg) == Err(EmitError::Full) {
            return Err(Sent::More);
        }
        self.due.reset = None;
        env.counters.count(Counter::TcpSegmentsOut);
        env.counters.count(Counter::TcpPacketsOut);
        env.counters.count(Counter::TcpResetsOut);
        Ok(())
    }
}

/// Copies `refs` into as few new mbufs as possible, and frees them.
fn linearize(pool: &mut Pool, refs: Chain) -> Result<Chain, NoBuffer> {
    let copy = pool.alloc_chain(refs.len(), 0, Purpose::Control);
    let copy = copy.map(|mut copy| {
        let mut at = 0usize;
        for piece in refs.slices() {
            copy.copy_from(at, piece);
            at = at.saturating_add(piece.len());
        }
        copy
    });
    pool.free(refs);
    copy
}
