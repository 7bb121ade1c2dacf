//! SYN-SENT (RFC 9293 section 3.10.7.3).

use super::Segment;
use crate::base::{Counter, DropReason};
use crate::tcp::Tcb;
use crate::tcp::contract::{ConnError, Env, State};
use crate::tcp::tcb::ResetDue;
use crate::wire::tcp::Flags;

impl Tcb {
    pub(super) fn input_syn_sent(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
    ) -> Result<(), DropReason> {
        let flags = seg.hdr.flags;
        let acks = flags.contains(Flags::ACK);
        // First: only our SYN can be acknowledged.
        let ahead = i64::from(seg.hdr.ack.distance(self.seq_of(self.snd.una)));
        if acks && (ahead < 1 || ahead.unsigned_abs() > self.flight()) {
            if !flags.contains(Flags::RST) {
                self.due.reset = Some(ResetDue { seq: seg.hdr.ack, with_ack: false });
            }
            return Err(DropReason::TcpBadAck);
        }
        // Second: a reset is valid only if it acknowledges our SYN.
        if flags.contains(Flags::RST) {
            if !acks {
                return Err(DropReason::TcpBlindReset);
            }
            env.counters.count(Counter::TcpResetsIn);
            self.close_on_segment(seg, Some(ConnError::Refused));
            return Ok(());
        }
        // Fourth and fifth.
        if !flags.contains(Flags::SYN) {
            return Err(DropReason::TcpBadFlags);
        }
        self.accept_syn(seg.hdr, env.now);
        if acks {
            self.input_syn_ack(env, seg, ahead.unsigned_abs())
        } else {
            // Simultaneous open (section 3.5, figure 8): answer with SYN,ACK.
            self.state = State::SynReceived;
            self.set_syn_ecn(seg.ecn);
            self.due.syn = true;
            Ok(())
        }
    }

    /// Processes the peer's SYN,ACK, and its data or FIN (sixth to eighth).
    fn input_syn_ack(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
        moved: u64,
    ) -> Result<(), DropReason> {
        // Must precede `on_new_ack`, which resets the backoff that shows a retransmitted SYN.
        self.become_established(env, seg);
        self.report_syn_ack(seg.hdr, moved);
        self.on_syn_ack_ecn(seg.hdr, seg.ecn, env.counters);
        seg.events |= self.on_new_ack(env, seg.hdr, moved);
        self.requeue_syn_data();
        self.due.ack = true;
        seg.offset = 0;
        self.check_sequence(env, seg)?;
        self.process_urgent(seg);
        self.process_data(env, seg)?;
        self.process_fin(env, seg);
        seg.verdict
    }
}
