//! Proportional rate reduction (RFC 9937): in fast recovery cwnd follows deliveries, so that the
//! flight shrinks to ssthresh over one round trip, neither at once nor in a burst.

use super::{AckSummary, Mode};
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::tcp::scoreboard::Delivered;

/// The variables of RFC 9937 section 6, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prr {
    /// prr_delivered: delivered in this recovery.
    delivered: u64,
    /// prr_out: sent in this recovery.
    out: u64,
    /// RecoverFS: the flight at its start.
    flight: u64,
}

impl Prr {
    pub(crate) const fn new() -> Prr {
        Prr { delivered: 0, out: 0, flight: 0 }
    }
}

impl Tcb {
    /// Section 6.1. The bytes delivered by the ACK that revealed the loss count as in flight before.
    pub(crate) fn begin_prr(&mut self, delivered: &Delivered) {
        let in_flight = self.flight().saturating_sub(self.sacked.sacked_bytes());
        let flight = in_flight.saturating_add(delivered.bytes);
        self.recovery.prr = Prr { delivered: 0, out: 0, flight };
    }

    /// Section 6.2, for each ACK in fast recovery that delivers something, and for losses that the reordering timer
    /// finds: these bytes left the network as well and must not cause a burst. The pipe of a peer without SACK is an
    /// estimate that duplicate ACKs reduce already: there cwnd is ssthresh from the start (RFC 6582).
    pub(crate) fn reduce_proportionally(&mut self, ack: &AckSummary) {
        let is_fast = matches!(self.recovery.mode, Mode::Fast) && self.sack_on;
        if !is_fast || !self.congestion.uses_prr() {
            return;
        }
        let prr = &mut self.recovery.prr;
        prr.delivered = prr.delivered.saturating_add(ack.delivered.bytes);
        let prr = *prr;
        let (pipe, ssthresh, smss) = (self.pipe(), self.congestion.ssthresh(), self.smss());
        let budget = if pipe > ssthresh {
            let (share, rest) = div_rem(prr.delivered.saturating_mul(ssthresh), prr.flight);
            share.saturating_add(u64::from(rest > 0)).saturating_sub(prr.out)
        } else {
            // SafeACK: progress, and no further loss.
            let is_safe = ack.moved > 0 && !self.recovery.rack.lost_retransmission;
            let bound = prr.delivered.saturating_sub(prr.out).max(ack.delivered.bytes);
            let bound = bound.saturating_add(if is_safe { smss } else { 0 });
            bound.min(ssthresh.saturating_sub(pipe))
        };
        // The fast retransmission itself is always sent.
        let least = if prr.out == 0 { smss } else { 0 };
        self.congestion.set_cwnd(pipe.saturating_add(budget.max(least)));
    }

    /// Section 6.3: `bytes` were sent.
    pub(crate) fn count_prr_out(&mut self, bytes: u64) {
        if matches!(self.recovery.mode, Mode::Fast) {
            self.recovery.prr.out = self.recovery.prr.out.saturating_add(bytes);
        }
    }

    /// Section 6.4.
    pub(crate) fn end_prr(&mut self) {
        if !self.congestion.uses_prr() {
            return;
        }
        self.congestion.set_cwnd(self.congestion.ssthresh());
    }
}
