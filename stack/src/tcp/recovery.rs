//! Loss recovery: what to retransmit, and how much may be in flight meanwhile.
//!
//! The [scoreboard](crate::tcp::scoreboard) holds what was sent: in flight, SACKed, or lost and waiting
//! for its retransmission. Detectors mark bytes as lost; everything else follows from the marks:
//!
//! ```text
//! with SACK          RACK: sent before a delivered segment, by the reordering window  rack.rs
//!                    TLP: a probe for a tail that nothing follows                     tlp.rs
//! without SACK       three duplicate ACKs, then each partial ACK (RFC 5681, 6582)     here
//! both               the retransmission time-out (RFC 6298)                           here
//!                                  |
//!                                  v marks
//!              plan_lost: the first lost bytes, while pipe < cwnd
//!              cwnd: PRR in fast recovery (RFC 9937)                                  prr.rs
//!              undo: Eifel, DSACK and F-RTO find the recovery spurious                undo.rs
//! ```
//!
//! | mode | entered | lost | cwnd | left |
//! |---|---|---|---|---|
//! | open | | nothing | the controller's | |
//! | fast, SACK | RACK marks a loss | what RACK marks, also retransmissions | PRR | `recover` acknowledged, or undone |
//! | fast, no SACK | third duplicate ACK | the first segment, again with each partial ACK | ssthresh | as above |
//! | loss | time-out | what was in flight for a round trip or more | slow start | as above |
//!
//! A recovery lasts until `recover`, `snd.nxt` at its start, is acknowledged. Losses found meanwhile
//! belong to it. One timer serves the time-out, the probe and the reordering window (RFC 8985
//! section 8): [`timer`].
//!
//! Unlike Linux, which otherwise decides the same way:
//! - F-RTO judges by the second ACK (RFC 5682 section 3.1), not by the first.
//! - Eifel judges by the first ACK that advances `snd.una` (RFC 4015 section 3.2), not by each.
//!
//! As on Linux:
//! - A probe that would come with the time-out replaces it (RFC 8985 section 7.2).
//! - A time-out during fast recovery does not lower ssthresh again: it is the same loss episode. RFC
//!   5681 section 3.1 would.

mod prr;
pub(crate) mod rack;
pub(crate) mod timer;
pub(crate) mod tlp;
mod undo;

use crate::base::{Counter, Counters, Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::tcp::output::{Plan, SegmentKind};
use crate::tcp::scoreboard::Delivered;
use crate::tcp::timers::{Pending, Timer};
use crate::wire::tcp::Header;
use prr::Prr;
use rack::Rack;
use tlp::Tlp;
pub(crate) use undo::Dsack;
use undo::{Frto, Undo};

/// DupThresh (RFC 5681 section 3.2), for peers without SACK.
const DUP_THRESH: u32 = 3;

/// The phase of recovery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// No loss detected.
    Open,
    /// Fast recovery.
    Fast,
    /// After a time-out.
    Loss,
}

/// The state of loss recovery.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recovery {
    pub mode: Mode,
    /// RecoveryPoint: its acknowledgement ends recovery.
    pub recover: u64,
    /// Duplicate acknowledgements since `snd.una` advanced, of a peer without SACK.
    pub dupacks: u32,
    /// One retransmission is exempt from the pipe limit (RFC 6675 section 5 (4.3)).
    pub first_due: bool,
    /// What [`Timer::Retransmit`] is set for.
    pub pending: Pending,
    pub rack: Rack,
    pub tlp: Tlp,
    pub prr: Prr,
    pub undo: Undo,
}

impl Recovery {
    pub(crate) const fn new() -> Recovery {
        Recovery {
            mode: Mode::Open,
            recover: 0,
            dupacks: 0,
            first_due: false,
            pending: Pending::Timeout,
            rack: Rack::new(),
            tlp: Tlp::new(),
            prr: Prr::new(),
            undo: Undo::new(),
        }
    }

    /// Whether there is no loss episode.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.mode, Mode::Open)
    }

    /// Open, no duplicate acknowledgement counted, no probe outstanding.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        matches!(self.mode, Mode::Open) && self.dupacks == 0 && self.tlp.is_idle()
    }
}

/// What an ACK reports, for recovery.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckSummary {
    /// Positions by which `snd.una` advanced.
    pub moved: u64,
    /// The bytes that it delivered.
    pub delivered: Delivered,
    /// Bytes of it that were marked with CE, by accurate feedback.
    pub marked: u64,
    /// Its DSACK block.
    pub dsack: Option<Dsack>,
    /// A duplicate acknowledgement of a peer without SACK (RFC 5681 section 2).
    pub duplicate: bool,
    /// It has SACK blocks.
    pub has_sack: bool,
}

impl Tcb {
    pub(crate) fn smss(&self) -> u64 {
        u64::from(self.mss)
    }

    /// SetPipe (RFC 6675 section 4): an estimate of the bytes in the network.
    #[inline]
    pub(crate) fn pipe(&self) -> u64 {
        if self.recovery.dupacks == 0 && self.sacked.is_clean() {
            return self.flight();
        }
        self.pipe_in_recovery()
    }

    pub(crate) fn pipe_in_recovery(&self) -> u64 {
        // Without SACK, each duplicate ACK means that one segment has left the network. Duplicate ACKs count for at
        // most the data outstanding at the start of the recovery (RFC 5681 section 3.2 step 4): else a peer that
        // repeats ACKs would inflate the window.
        let counted = u64::from(self.recovery.dupacks).saturating_mul(self.smss());
        let left = match self.recovery.mode {
            Mode::Open => counted,
            Mode::Fast => counted.min(self.recovery.recover.saturating_sub(self.snd.una)),
            Mode::Loss => 0,
        };
        self.flight()
            .saturating_sub(self.sacked.sacked_bytes())
            .saturating_sub(self.sacked.lost_bytes())
            .saturating_sub(left)
    }

    /// The first lost segment (NextSeg rule 1, RFC 6675 section 4).
    ///
    /// Rules 3 and 4, retransmissions of bytes that may be lost, are not needed: RACK finds the last
    /// segments lost as soon as the retransmission of an earlier one is delivered.
    pub(crate) fn plan_lost(&self) -> Option<Plan> {
        if matches!(self.recovery.mode, Mode::Open) || self.prefers_new_data() {
            return None;
        }
        let (start, end) = self.sacked.first_lost(self.full_segment_bytes() as u64)?;
        let space = || self.congestion.cwnd().saturating_sub(self.pipe());
        let may_send = self.recovery.first_due || space() >= self.smss();
        may_send.then(|| self.plan_retransmit(start, end))
    }

    /// A retransmission of the first segment of `start..end`, with the FIN if it is in the range.
    fn plan_retransmit(&self, start: u64, end: u64) -> Plan {
        let data_end = self.send_end();
        let space = self.full_segment_bytes() as u64;
        let bytes = end.min(data_end).saturating_sub(start).min(space);
        let behind = self.records.end_within(start, start.saturating_add(bytes));
        let bytes = behind.saturating_sub(start);
        let fin = self.fin.sent && behind == data_end && end > data_end;
        Plan { pos: start, bytes: bytes as usize, fin, kind: SegmentKind::Retransmit }
    }

    /// A retransmission was sent.
    pub(crate) fn on_retransmit_sent(&mut self, plan: &Plan, now: Instant) {
        let end = plan.end();
        self.sacked.retransmitted(plan.pos, end, now);
        self.forget_mtu_probe(plan.pos, end);
        self.recovery.first_due = false;
        if plan.pos == self.snd.una && !matches!(self.recovery.pending, Pending::Reordering) {
            // The time-out is that of this copy now.
            self.timers.stop(Timer::Retransmit);
            self.recovery.pending = Pending::Timeout;
        }
        if matches!(plan.kind, SegmentKind::TailProbe) {
            self.on_probe_sent(plan.kind);
        } else {
            let stamp = self.ts_clock(now);
            self.recovery.undo.on_retransmit(end.saturating_sub(plan.pos), stamp);
            self.count_prr_out(end.saturating_sub(plan.pos));
        }
        self.sample_sent(end, plan.bytes as u64, now, Duration::ZERO);
        self.pace_sent(plan.bytes as u64, now);
        // Karn's algorithm: either copy of the timed segment may be acknowledged.
        self.times.timed = None;
        self.retransmits.segments = self.retransmits.segments.saturating_add(1);
        self.retransmits.bytes = self.retransmits.bytes.saturating_add(plan.bytes as u64);
    }

    /// Processes an ACK. `snd.una` and the scoreboard are updated.
    pub(crate) fn recover_on_ack(
        &mut self,
        hdr: &Header,
        ack: &AckSummary,
        env: &mut crate::tcp::Env,
    ) {
        let (now, counters) = (env.now, &mut *env.counters);
        self.count_delivered(ack.delivered.bytes, ack.marked, now);
        self.update_rack(hdr, &ack.delivered, now);
        self.probe_on_ack(ack);
        if let Some(dsack) = ack.dsack {
            self.on_dsack(&dsack, counters);
        }
        if ack.moved > 0 {
            self.on_progress(hdr, ack, now, counters);
        } else if ack.duplicate {
            self.recovery.dupacks = self.recovery.dupacks.saturating_add(1);
        }
        self.check_frto(ack, counters);
        self.detect_losses(ack, now, counters);
        if ack.delivered.bytes > 0 || self.recovery.first_due {
            self.reduce_proportionally(ack);
        }
        if ack.has_sack {
            self.check_probe_timer();
        }
        if self.delivery.is_on() {
            self.sample_delivered(&ack.delivered, now);
        }
    }

    /// `snd.una` has advanced.
    fn on_progress(
        &mut self,
        hdr: &Header,
        ack: &AckSummary,
        now: Instant,
        counters: &mut Counters,
    ) {
        self.check_eifel(hdr, counters);
        match self.recovery.mode {
            Mode::Open => self.recovery.dupacks = 0,
            _ if self.snd.una >= self.recovery.recover => self.leave_recovery(),
            Mode::Fast if !self.sack_on => self.on_partial_ack(ack.moved, now),
            Mode::Fast => {}
            Mode::Loss => self.recovery.dupacks = 0,
        }
    }

    fn leave_recovery(&mut self) {
        if matches!(self.recovery.mode, Mode::Fast) {
            self.end_prr();
        }
        self.congestion.on_recovered();
        self.recovery.rack.on_recovery_end();
        self.recovery.mode = Mode::Open;
        self.recovery.dupacks = 0;
        self.recovery.first_due = false;
        self.recovery.undo.frto = Frto::Off;
    }

    /// RFC 6582 section 3.2 step 3: without SACK the next hole starts at `snd.una`. The
    /// acknowledged segments no longer count as duplicates.
    fn on_partial_ack(&mut self, acked: u64, now: Instant) {
        let segments = u32::try_from(div_rem(acked, self.smss()).0).unwrap_or(u32::MAX);
        let counted = segments.saturating_sub(1);
        self.recovery.dupacks = self.recovery.dupacks.saturating_sub(counted);
        self.mark_first_lost(now);
        self.recovery.first_due = true;
    }

    /// Marks the first segment as lost.
    fn mark_first_lost(&mut self, now: Instant) {
        let end = self.snd.una.saturating_add(self.smss());
        let (scoreboard, on_lost) = self.loss_reporter(now);
        scoreboard.mark_lost_to(end, on_lost);
    }

    /// Looks for losses, and enters fast recovery with the first.
    fn detect_losses(&mut self, ack: &AckSummary, now: Instant, counters: &mut Counters) {
        self.recovery.rack.lost_retransmission = false;
        if self.flight() == 0 {
            return;
        }
        if self.sack_on {
            self.detect_by_rack(now, counters);
        } else if matches!(self.recovery.mode, Mode::Open) && self.recovery.dupacks >= DUP_THRESH {
            self.mark_first_lost(now);
        }
        if !matches!(self.recovery.mode, Mode::Open) || self.sacked.lost_bytes() == 0 {
            return;
        }
        if self.is_mtu_probe_lost() {
            self.on_mtu_probe_lost(now, counters);
        } else {
            self.enter_fast(&ack.delivered, counters);
        }
    }

    fn enter_fast(&mut self, delivered: &Delivered, counters: &mut Counters) {
        self.begin_undo();
        self.begin_prr(delivered);
        self.recovery.mode = Mode::Fast;
        self.recovery.recover = self.snd.nxt;
        self.recovery.first_due = true;
        self.recovery.tlp = Tlp::new();
        self.congestion.on_loss();
        self.on_window_reduced();
        self.times.timed = None;
        counters.count(Counter::TcpFastRetransmits);
    }

    /// The retransmission timer expired (RFC 6298 sections 5.4 to 5.6, RFC 8985 section 6.3).
    pub(crate) fn enter_loss(&mut self, now: Instant, counters: &mut Counters) {
        let is_repeated = self.rtt.backoff() > 0;
        let is_new = matches!(self.recovery.mode, Mode::Open);
        if is_new {
            self.begin_undo();
        }
        if is_repeated {
            self.stop_ecn_option();
        }
        let is_same_episode = matches!(self.recovery.mode, Mode::Fast);
        if is_repeated || is_same_episode {
            self.congestion.on_repeated_timeout();
        } else {
            self.congestion.on_timeout();
        }
        self.on_window_reduced();
        // The peer may renege on SACKed data (RFC 2018 section 8). It has reneged if it SACKed the
        // byte at `snd.una`. After a second time-out reneging is assumed.
        if is_repeated || self.sacked.has_reneged() {
            self.sacked.clear_sacked();
        }
        if is_repeated {
            self.mark_all_lost(now);
        } else {
            self.mark_lost_on_timeout(now);
        }
        self.restart_recovery(self.snd.nxt);
        self.recovery.undo.frto =
            if self.sack_on && is_new && !is_repeated { Frto::First } else { Frto::Off };
        self.rtt.back_off();
        self.times.retries = self.times.retries.saturating_add(1);
        self.timers.stop(Timer::Retransmit);
        counters.count(Counter::TcpTimeouts);
    }

    /// Recovers in slow start what is below `to`.
    fn restart_recovery(&mut self, to: u64) {
        self.recovery.mode = Mode::Loss;
        self.recovery.recover = to;
        self.recovery.dupacks = 0;
        self.recovery.first_due = true;
        self.recovery.tlp = Tlp::new();
        self.recovery.undo.frto = Frto::Off;
        self.times.timed = None;
    }

    /// Everything in flight exceeded the path MTU: retransmit it in smaller segments. This is no
    /// sign of congestion (RFC 1191 section 6.4).
    pub(crate) fn retransmit_all(&mut self) {
        self.sacked.mark_all_lost(|_| {});
        self.repair_to(self.snd.nxt);
    }

    /// Retransmits the bytes below `to` that are marked as lost. This loss is not a sign of congestion.
    pub(crate) fn repair_to(&mut self, to: u64) {
        self.recovery.undo = Undo::new();
        self.restart_recovery(to);
    }
}
