//! Segment arrival. A segment is up to 64 KiB long if the device coalesces on receive (GRO).
//!
//! Input never emits: what must be sent is recorded in `Tcb::due` and goes out with the next
//! output. The slow path, [`steps`], follows RFC 9293 section 3.10.7.4. [`fast`] is header
//! prediction for in-order data and pure ACKs; it calls the same functions. Every drop returns its
//! reason to one place, which counts it once.
//!
//! [`steps`]: Tcb::steps

mod ack;
mod check;
mod data;
mod fast;
pub(crate) mod icmp;
mod synsent;

use crate::base::{Counter, DropReason, Instant};
use crate::mbuf::Chain;
use crate::tcp::Tcb;
use crate::tcp::contract::{EcnField, Env, Events, State};
use crate::wire::tcp::{Flags, Header};
pub(crate) use data::{MAX_WASTE_FRACTION, SHARED_BLOCK_BYTES};

/// A segment passing through the steps.
pub(crate) struct Segment<'a> {
    pub hdr: &'a Header,
    /// The ECN field of its IP packet.
    pub ecn: EcnField,
    /// First byte relative to `rcv.nxt`; not negative once trimmed.
    pub offset: i64,
    /// Sequence space it occupied before trimming.
    pub sent_span: u64,
    /// What of it was received before: the position and the bytes.
    pub repeated: Option<(u64, u64)>,
    /// The payload after trimming.
    pub payload: Chain,
    /// Carries a FIN inside the window.
    pub fin: bool,
    /// Carries a retransmission of the peer's FIN.
    pub repeats_fin: bool,
    /// Position after the payload; valid once trimmed.
    pub end: u64,
    /// Why the payload is dropped while the remaining steps still run.
    pub verdict: Result<(), DropReason>,
    /// Events for the user.
    pub events: Events,
}

impl Segment<'_> {
    /// Sequence space it occupies (SEG.LEN), its SYN not counted.
    fn span(&self) -> u64 {
        (self.payload.len() as u64).saturating_add(u64::from(self.fin))
    }
}

impl Tcb {
    /// Processes one segment of this connection. The caller has verified its checksum. `ecn` is the
    /// ECN field of the IP packet. `payload` follows the header and may be empty; it is consumed.
    #[inline]
    pub fn input(&mut self, env: &mut Env, hdr: &Header, ecn: EcnField, payload: Chain) -> Events {
        env.counters.count(Counter::TcpSegmentsIn);
        self.pacing.update_hold(env.now);
        let len = payload.len();
        self.count_segment(len, env.now);
        let events = if self.is_predicted_field(ecn, len) && self.is_predicted(hdr, len) {
            self.input_predicted(env, hdr, payload)
        } else {
            self.input_general(env, hdr, ecn, payload)
        };
        self.rearm(env.now);
        if self.flight() == 0 {
            self.record_send_limit(env.now);
        }
        events
    }

    #[inline]
    fn count_segment(&mut self, bytes: usize, now: Instant) {
        let s = &mut self.statistics;
        s.segments_in = s.segments_in.wrapping_add(1);
        if bytes > 0 {
            s.data_segments_in = s.data_segments_in.wrapping_add(1);
            s.last_data_at = now;
        }
    }

    #[inline(never)]
    fn input_general(
        &mut self,
        env: &mut Env,
        hdr: &Header,
        ecn: EcnField,
        payload: Chain,
    ) -> Events {
        let mut seg = Segment {
            hdr,
            ecn,
            offset: i64::from(hdr.seq.distance(self.peer_seq_of(self.rcv.nxt))),
            sent_span: (payload.len() as u64)
                .saturating_add(u64::from(hdr.flags.contains(Flags::FIN))),
            repeated: None,
            payload,
            fin: hdr.flags.contains(Flags::FIN),
            repeats_fin: false,
            end: 0,
            verdict: Ok(()),
            events: Events::NONE,
        };
        let verdict = match self.state {
            State::Closed => Err(DropReason::TcpNoSocket),
            State::SynSent => self.input_syn_sent(env, &mut seg),
            _ => self.steps(env, &mut seg),
        };
        if let Err(reason) = verdict {
            env.counters.drop_packet(reason);
        }
        env.pool.free(core::mem::take(&mut seg.payload));
        seg.events
    }

    /// RFC 9293 section 3.10.7.4, amended by RFC 5961 and RFC 7323 section 5.3. A step that drops
    /// the segment returns the reason.
    fn steps(&mut self, env: &mut Env, seg: &mut Segment) -> Result<(), DropReason> {
        self.check_timestamps(env, seg)?;
        if seg.hdr.flags.contains(Flags::RST) {
            return self.process_reset(env, seg);
        }
        if seg.hdr.flags.contains(Flags::SYN) {
            self.check_syn(env, seg)?;
        }
        self.check_sequence(env, seg)?;
        // Until its sequence and acknowledgement numbers are validated, a segment may cause an
        // answer but no other change (RFC 5961 section 5).
        let ahead = self.check_ack(env, seg)?;
        if let Some((start, bytes)) = seg.repeated {
            self.record_duplicate(start, bytes);
        }
        self.update_ts_recent(env, seg);
        self.process_ack(env, seg, ahead);
        self.process_ecn(env, seg);
        self.process_urgent(seg);
        self.process_data(env, seg)?;
        self.process_fin(env, seg);
        seg.verdict
    }

    /// Section 3.8.5: urgent data stays in line (RFC 6093); the user gets an event.
    fn process_urgent(&mut self, seg: &mut Segment) {
        if seg.hdr.flags.contains(Flags::URG) && seg.hdr.urgent > 0 && !self.fin.received {
            seg.events |= Events::URGENT;
            if !seg.payload.is_empty() {
                self.recv_marks.urgent_to = self.recv_marks.urgent_to.max(seg.end);
            }
        }
    }

    /// Requests a challenge ACK within the rate limit of RFC 5961 section 7. False if it is
    /// suppressed.
    fn challenge(&mut self, env: &mut Env) -> bool {
        let allowed = self.challenge.allow(env.now);
        if allowed {
            self.due.ack = true;
            env.counters.count(Counter::TcpChallengeAcks);
        }
        allowed
    }
}
