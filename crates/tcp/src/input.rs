//! Input: one segment, of up to 64 KiB if the device joined several, against the control block.
//!
//! Nothing is emitted here: what must be answered is noted (`Tcb::due`) and goes
//! with the next output. The general path is the list of RFC 9293 section 3.10.7.4 in [`steps`];
//! [`fast`] is a short cut to the same functions for the two segments that make up a bulk transfer.
//! Every drop ends in one place and is counted once, there.
//!
//! [`steps`]: Tcb::steps

mod ack;
mod check;
mod data;
mod fast;
pub(crate) mod icmp;
mod synsent;

use crate::Tcb;
use crate::contract::{Env, Events, State};
pub(crate) use data::{SHARED_BLOCK_BYTES, WASTE_PART};
use fulmar_base::{Counter, DropReason};
use fulmar_mbuf::Chain;
use fulmar_wire::tcp::{Flags, Header};

/// A segment under way through the steps.
pub(crate) struct Segment<'a> {
    pub hdr: &'a Header,
    /// Distance of its first byte from `rcv_nxt`; 0 or more once it is trimmed.
    pub offset: i64,
    /// What is left of the payload.
    pub payload: Chain,
    /// It ends with a FIN inside the window.
    pub fin: bool,
    /// It ended with the peer's FIN that was received before.
    pub repeats_fin: bool,
    /// Position behind the payload, once it is trimmed.
    pub end: u64,
    /// What became of its payload, if the walk goes on without it.
    pub verdict: Result<(), DropReason>,
    /// What the user should learn.
    pub events: Events,
}

impl Segment<'_> {
    /// Positions it occupies, its SYN not counted.
    fn span(&self) -> u64 {
        (self.payload.len() as u64).saturating_add(u64::from(self.fin))
    }
}

impl Tcb {
    /// Takes one segment that was addressed to this connection and whose checksum is right.
    /// `payload` is what follows the header, possibly empty; it is consumed.
    #[inline]
    pub fn input(&mut self, env: &mut Env, hdr: &Header, payload: Chain) -> Events {
        env.counters.count(Counter::TcpSegmentsIn);
        let events = if self.is_predicted(hdr, payload.len()) {
            self.input_predicted(env, hdr, payload)
        } else {
            self.input_general(env, hdr, payload)
        };
        self.rearm(env.now);
        events
    }

    #[inline(never)]
    fn input_general(&mut self, env: &mut Env, hdr: &Header, payload: Chain) -> Events {
        let mut seg = Segment {
            hdr,
            offset: i64::from(hdr.seq.distance(self.peer_seq_of(self.rcv_nxt))),
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

    /// RFC 9293 section 3.10.7.4 with RFC 5961 and RFC 7323 section 5.3 in their places. Each step
    /// may end the walk with a reason to drop the segment.
    fn steps(&mut self, env: &mut Env, seg: &mut Segment) -> Result<(), DropReason> {
        self.check_timestamps(env, seg)?;
        if seg.hdr.flags.contains(Flags::RST) {
            return self.take_reset(env, seg);
        }
        if seg.hdr.flags.contains(Flags::SYN) {
            self.check_syn(env, seg)?;
        }
        self.check_sequence(env, seg)?;
        // Before its number and its acknowledgement are proven a segment changes nothing but what it is
        // answered with (RFC 5961 section 5).
        let ahead = self.check_ack(env, seg)?;
        self.note_timestamp(env, seg);
        self.take_ack(env, seg, ahead);
        self.note_urgent(seg);
        self.take_data(env, seg)?;
        self.take_fin(env, seg);
        seg.verdict
    }

    /// Section 3.8.5: the urgent byte stays in line; the user is told (RFC 6093).
    fn note_urgent(&mut self, seg: &mut Segment) {
        if seg.hdr.flags.contains(Flags::URG) && seg.hdr.urgent > 0 && !self.fin_received {
            seg.events |= Events::URGENT;
            if !seg.payload.is_empty() {
                self.urgent_to = self.urgent_to.max(seg.end);
            }
        }
    }

    /// Asks for an ACK that answers something that should not have come, within the limit of
    /// RFC 5961 section 7. True if it will go.
    fn challenge(&mut self, env: &mut Env) -> bool {
        let allowed = self.challenge.allow(env.now);
        if allowed {
            self.due.ack = true;
            env.counters.count(Counter::TcpChallengeAcks);
        }
        allowed
    }
}
