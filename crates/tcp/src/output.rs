//! Output: everything that may go now, one segment at a time.
//!
//! [`Tcb::plan`] decides, without side effects, what the next segment is; `transmit` builds and
//! emits it; `on_sent` notes it. The order of decisions:
//!
//! 1. a reset; nothing goes after it;
//! 2. the SYN, or SYN,ACK;
//! 3. what is known to be lost (NextSeg rule 1);
//! 4. new data and the FIN, in super-segments where the way down takes them;
//! 5. a window or keepalive probe;
//! 6. what may be lost (NextSeg rules 3 and 4);
//! 7. a bare ACK, if one is due and nothing above carried it.

mod plan;

use crate::Tcb;
use crate::arith::div_rem;
use crate::contract::ConnError;
use crate::contract::{Emit, EmitError, Env, PathInfo, SegmentOut, Sent, State};
use crate::segment::{header_mbuf, offload};
use crate::timers::Timer;
use fulmar_base::{Counter, DropReason};
use fulmar_mbuf::{Chain, NoBuffer, Pool, Purpose};
use fulmar_wire::tcp::{Flags, Header, SackBlocks};
pub(crate) use plan::{Kind, Plan};

/// Most mbufs in one segment. A payload in more pieces than this is copied together: devices
/// gather a bounded number, and a piece costs more than copying its few bytes.
const MAX_PIECES: usize = 64;

impl Tcb {
    /// Whether output would send something.
    pub fn wants_output(&self) -> bool {
        if matches!(self.state, State::Closed) {
            return self.due.reset.is_some();
        }
        self.due.reset.is_some() || self.ack_due() || self.plan().is_some()
    }

    /// Sends everything that may go now.
    pub fn output(&mut self, env: &mut Env, path: &PathInfo, out: &mut impl Emit) -> Sent {
        env.counters.count(Counter::TcpOutputs);
        self.follow_path(path);
        self.edges.burst_from = self.snd_nxt;
        let sent = match self.send_all(env, out) {
            Ok(()) => Sent::Done,
            Err(why) => why,
        };
        // A closed connection has no timers, whatever was in flight.
        if matches!(self.state, State::Closed) {
            return sent;
        }
        self.note_limits();
        self.note_short_buffer();
        self.rearm(env.now);
        sent
    }

    fn send_all(&mut self, env: &mut Env, out: &mut impl Emit) -> Result<(), Sent> {
        if let Some(reset) = self.due.reset {
            self.send_reset(env, out, reset)?;
        }
        if matches!(self.state, State::Closed) {
            return Ok(());
        }
        self.restart_if_idle(env);
        while let Some(plan) = self.plan() {
            self.transmit(env, out, &plan)?;
        }
        if self.ack_due() {
            self.transmit(env, out, &Plan::ack(self.snd_nxt))?;
        }
        Ok(())
    }

    /// RFC 5681 section 4.1: after a time-out's worth of silence the old window says nothing.
    fn restart_if_idle(&mut self, env: &Env) {
        if self.flight() == 0 && self.has_unsent() {
            let idle = env.now.since(self.marks.last_sent_at);
            if idle > self.rtt.rto() && self.is_synchronized() {
                self.cubic.on_idle();
                self.marks.last_sent_at = env.now;
            }
        }
    }

    /// An ACK must go: somebody asked, or two full segments wait (RFC 9293 section 3.8.6.3).
    #[inline]
    pub(crate) fn ack_due(&self) -> bool {
        let waiting = self.rcv_nxt.saturating_sub(self.last_ack_sent);
        let due = self.due.ack || waiting >= u64::from(self.rcv_mss).saturating_mul(2);
        due && !matches!(self.state, State::SynSent | State::Closed) && self.snd_nxt > 0
    }

    fn transmit(&mut self, env: &mut Env, out: &mut impl Emit, plan: &Plan) -> Result<(), Sent> {
        if out.room() == 0 {
            return Err(Sent::More);
        }
        let hdr = self.header_for(env, plan);
        let seg = match self.build(env.pool, &hdr, plan) {
            Ok(seg) => seg,
            Err(NoBuffer) if plan.bytes > self.payload_room() => {
                let less = Plan { bytes: self.payload_room(), fin: false, ..*plan };
                return self.transmit(env, out, &less);
            }
            Err(NoBuffer) => return Err(Sent::Starved),
        };
        match out.emit(env.pool, env.counters, seg) {
            Ok(()) => {
                env.counters.count(Counter::TcpSegmentsOut);
                env.counters.add(Counter::TcpPacketsOut, self.packets_of(plan));
            }
            Err(EmitError::Full) => return Err(Sent::More),
            // Lost on the way: the retransmission timer takes care of it.
            Err(EmitError::NoRoute) => self.fate.soft_error = Some(ConnError::NetUnreachable),
            Err(EmitError::Lost) => {}
        }
        self.on_sent(env, plan);
        Ok(())
    }

    /// Packets of MTU size that a segment stands for.
    #[inline]
    fn packets_of(&self, plan: &Plan) -> u64 {
        let (whole, rest) = div_rem(plan.bytes as u64, self.payload_room() as u64);
        whole.saturating_add(u64::from(rest > 0)).max(1)
    }

    /// The header of a planned segment.
    fn header_for(&mut self, env: &mut Env, plan: &Plan) -> Header {
        let mut hdr = self.header_at(plan.pos, self.flags_for(plan), env.now);
        if matches!(plan.kind, Kind::Syn) {
            hdr.window = self.advertise_in_syn(env.window);
            self.put_syn_options(&mut hdr);
        } else {
            hdr.window = self.advertise(env.window);
            hdr.options.sack = self.sack_blocks();
        }
        hdr
    }

    fn flags_for(&self, plan: &Plan) -> Flags {
        match plan.kind {
            Kind::Syn if matches!(self.state, State::SynSent) => return Flags::SYN,
            Kind::Syn => return Flags::SYN | Flags::ACK,
            _ => {}
        }
        let mut flags = Flags::ACK;
        if plan.fin {
            flags |= Flags::FIN;
        }
        // PSH on the segment that empties the queue (RFC 9293 section 3.9.1.2).
        let behind = plan.pos.saturating_add(plan.bytes as u64);
        if plan.bytes > 0 && behind == self.send_end() {
            flags |= Flags::PSH;
        }
        flags
    }

    /// Offers what we can do, or in a SYN,ACK confirms what both can.
    fn put_syn_options(&self, hdr: &mut Header) {
        let answering = matches!(self.state, State::SynReceived);
        hdr.options.mss = u16::try_from(self.own_mss()).ok();
        // After the peer's SYN without the option the scale is 0 on both sides and goes unsaid.
        let scaling = !answering || self.scale.both;
        hdr.options.window_scale = scaling.then_some(self.scale.rcv);
        hdr.options.sack_permitted = self.sack_on;
    }

    /// What arrived out of order, latest first (RFC 2018 section 4).
    #[inline]
    fn sack_blocks(&self) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        if self.sack_on && self.recv.out_of_order_bytes() > 0 {
            let mut ranges = [(0u64, 0u64); SackBlocks::MAX];
            let n = self.recv.sack_ranges(&mut ranges);
            for (from, to) in ranges.into_iter().take(n) {
                let seq = |offset: u64| self.peer_seq_of(offset.saturating_add(1));
                blocks.push((seq(from), seq(to)));
            }
        }
        blocks
    }

    /// Header mbuf, then references into the send queue.
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
        let v4 = self.path.ip_header_bytes == 20;
        let offload = offload(hdr, plan.bytes, self.payload_room(), v4);
        Ok(SegmentOut { chain, offload })
    }

    fn payload(&self, pool: &mut Pool, plan: &Plan) -> Result<Chain, NoBuffer> {
        let offset = plan.pos.saturating_sub(1);
        let refs = match self.send.range(offset, plan.bytes, pool) {
            Ok(refs) => refs,
            Err(NoBuffer) if plan.bytes <= self.payload_room() => {
                return self.send.copy_range(offset, plan.bytes, pool);
            }
            Err(e) => return Err(e),
        };
        let fits =
            refs.segs() <= MAX_PIECES / 2 || (refs.segs() <= MAX_PIECES && !refs.is_kernel_only());
        if fits {
            return Ok(refs);
        }
        copy_together(pool, refs)
    }

    /// A segment has gone: notes what it said and carried.
    fn on_sent(&mut self, env: &mut Env, plan: &Plan) {
        let now = env.now;
        if !matches!(plan.kind, Kind::Probe) {
            let carries = matches!(plan.kind, Kind::New) && self.last_ack_sent != self.rcv_nxt;
            self.interactive |= carries;
            self.note_ack_sent();
        }
        match plan.kind {
            Kind::Ack => return,
            Kind::Probe => {
                self.due.probe = false;
                env.counters.count(if self.persisting {
                    Counter::TcpWindowProbes
                } else {
                    Counter::TcpKeepaliveProbes
                });
            }
            Kind::Syn => self.on_syn_sent(env),
            Kind::New => self.on_new_sent(env, plan),
            Kind::Again | Kind::Rescue => {
                let to = plan.end();
                self.on_resent(plan.kind, to, plan.bytes);
                env.counters.add(Counter::TcpRetransmitBytes, plan.bytes as u64);
            }
        }
        self.marks.last_sent_at = now;
    }

    /// The peer hears `rcv_nxt`.
    #[inline]
    fn note_ack_sent(&mut self) {
        self.due.ack = false;
        self.due.pushed = false;
        if self.last_ack_sent != self.rcv_nxt {
            let segments = (self.rcv_nxt.wrapping_sub(self.last_ack_sent)) / 536;
            self.quick_acks = self.quick_acks.saturating_sub(segments.clamp(1, 16) as u8);
        }
        self.last_ack_sent = self.rcv_nxt;
        self.timers.stop(Timer::DelayedAck);
    }

    fn on_syn_sent(&mut self, env: &mut Env) {
        self.due.syn = false;
        if self.snd_nxt == 0 {
            self.snd_nxt = 1;
            self.marks.progress_at = env.now;
            self.marks.timed = Some((1, env.now));
        } else {
            // Karn.
            self.marks.timed = None;
            self.again.segments = self.again.segments.saturating_add(1);
        }
    }

    fn on_new_sent(&mut self, env: &Env, plan: &Plan) {
        let behind = plan.end();
        if self.flight() == 0 {
            self.marks.progress_at = env.now;
        }
        self.snd_nxt = self.snd_nxt.max(behind);
        self.fin_sent |= plan.fin;
        self.due.probe = false;
        if !plan.bytes.is_multiple_of(self.payload_room().max(1)) {
            self.edges.small = behind;
            self.user.cork_expired = false;
            self.timers.stop(Timer::Cork);
        }
        if self.marks.timed.is_none() && self.recovery.is_quiet() {
            self.marks.timed = Some((behind, env.now));
        }
        // Data goes this way too: ACKs may ride along.
        self.quick_acks = 0;
    }

    /// RST, with ACK in the synchronized states (RFC 9293 section 3.5.2).
    fn send_reset(
        &mut self,
        env: &mut Env,
        out: &mut impl Emit,
        reset: crate::tcb::ResetDue,
    ) -> Result<(), Sent> {
        if out.room() == 0 {
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
            // A reset is a courtesy; one that finds no buffer is not worth waiting for.
            env.counters.drop_packet(DropReason::NoBuffer);
            self.due.reset = None;
            return Ok(());
        };
        let seg =
            SegmentOut { chain: Chain::from(mbuf), offload: offload(&hdr, 0, usize::MAX, true) };
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

/// The bytes of `refs` in as few buffers as possible; those that the kernel alone may read stay where
/// they are.
fn copy_together(pool: &mut Pool, mut refs: Chain) -> Result<Chain, NoBuffer> {
    let (mut out, mut run) = (Chain::new(), Chain::new());
    loop {
        let stays = match refs.pop_front() {
            Some(m) if !m.is_kernel_only() => {
                run.push_back(m);
                continue;
            }
            other => other,
        };
        let copy = if run.is_empty() { Ok(Chain::new()) } else { copied(pool, &run) };
        pool.free(core::mem::take(&mut run));
        match copy {
            Ok(copy) => out.append(copy),
            Err(e) => {
                refs.append(out);
                stays.into_iter().for_each(|m| refs.push_back(m));
                pool.free(refs);
                return Err(e);
            }
        }
        match stays {
            Some(m) => out.push_back(m),
            None => return Ok(out),
        }
    }
}

/// The bytes of `refs` in buffers of their own.
fn copied(pool: &mut Pool, refs: &Chain) -> Result<Chain, NoBuffer> {
    let mut copy = pool.alloc_chain(refs.len(), 0, Purpose::Control)?;
    let mut at = 0usize;
    for piece in refs.slices() {
        copy.copy_from(at, piece);
        at = at.saturating_add(piece.len());
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::sync::Arc;
    use fulmar_mbuf::{PoolConfig, SharedBytes};

    /// Bytes that only the kernel may read.
    struct Pages;

    impl SharedBytes for Pages {
        fn piece(&self, _at: usize) -> &[u8] {
            &[]
        }
        fn kernel_part(&self, _at: usize) -> Option<(*const u8, usize)> {
            Some((core::ptr::null(), 1000))
        }
        fn on_undelivered(&self, _why: u8) {}
    }

    #[test]
    fn runs_are_copied_together_and_what_only_the_kernel_may_read_stays_between_them() {
        let mut pool = Pool::new(PoolConfig::default()).unwrap();
        let owner: Arc<dyn SharedBytes> = Arc::new(Pages);
        let mut refs = Chain::new();
        for i in 0..40u8 {
            let mut m = pool.alloc(3, 0, Purpose::Send).unwrap();
            m.append(3).unwrap().fill(i);
            refs.push_back(m);
            if i % 20 == 9 {
                refs.push_back(pool.share(&owner, 0, 1000, Purpose::Send).unwrap());
            }
        }
        let out = copy_together(&mut pool, refs).unwrap();
        let seen: alloc::vec::Vec<_> = out.iter().map(|m| (m.is_kernel_only(), m.len())).collect();
        assert_eq!(seen, [(false, 30), (true, 1000), (false, 60), (true, 1000), (false, 30)]);
        assert_eq!(out.iter().nth(2).unwrap().as_slice()[..4], [10, 10, 10, 11]);
        pool.free(out);
        assert_eq!(pool.outstanding(), 0);
    }
}
