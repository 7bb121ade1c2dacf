//! Loss recovery: what to retransmit, and how much may be in flight meanwhile.
//!
//! One model covers SACK recovery (RFC 6675), NewReno for peers without SACK (RFC 6582), and
//! recovery after a retransmission time-out. Bytes below `lost_edge` that are not SACKed are lost.
//! Lost bytes below `high_rxt` have been retransmitted. The modes differ only in `lost_edge`:
//!
//! | mode | lost_edge |
//! |---|---|
//! | open | where IsLost ends; nothing below `snd_una` |
//! | fast, SACK | where IsLost ends (the first segment always counts as lost) |
//! | fast, NewReno | one segment beyond `snd_una` |
//! | loss (time-out) | `recover`, all that had been sent |
//!
//! A lost retransmission is detected by the time-out.

use crate::Tcb;
use crate::arith::div_rem;
use crate::output::{Plan, SegmentKind};
use crate::scoreboard::DUP_THRESH;
use crate::timers::Timer;
use fulmar_base::{Counter, Counters};

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
    /// HighRxt: lost bytes below it have been retransmitted.
    pub high_rxt: u64,
    /// The rescue retransmission of this recovery was sent.
    pub rescued: bool,
    /// Duplicate acknowledgements since `snd_una` advanced.
    pub dupacks: u32,
    /// One retransmission is exempt from the pipe limit (RFC 6675 section 5 (4.3)).
    pub first_due: bool,
}

impl Recovery {
    pub(crate) const fn new() -> Recovery {
        Recovery {
            mode: Mode::Open,
            recover: 0,
            high_rxt: 0,
            rescued: false,
            dupacks: 0,
            first_due: false,
        }
    }

    /// Open, and no duplicate acknowledgement counted.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        matches!(self.mode, Mode::Open) && self.dupacks == 0
    }
}

impl Tcb {
    fn smss(&self) -> u64 {
        u64::from(self.mss)
    }

    /// The end of the bytes considered lost.
    fn lost_edge(&self) -> u64 {
        let one_segment = self.snd_una.saturating_add(self.smss());
        let edge = match (self.recovery.mode, self.sack_on) {
            (Mode::Loss, _) => self.recovery.recover,
            (Mode::Fast, false) => one_segment,
            (Mode::Fast, true) => {
                let first = if self.recovery.first_due { one_segment } else { 0 };
                self.sacked.lost_edge(self.smss()).max(first)
            }
            (Mode::Open, _) => self.sacked.lost_edge(self.smss()),
        };
        edge.clamp(self.snd_una, self.snd_nxt)
    }

    /// SetPipe (RFC 6675 section 4): an estimate of the bytes in the network.
    #[inline]
    pub(crate) fn pipe(&self) -> u64 {
        if self.recovery.is_quiet() && self.sacked.is_empty() {
            return self.flight();
        }
        self.pipe_in_recovery()
    }

    pub(crate) fn pipe_in_recovery(&self) -> u64 {
        let unsacked = |from: u64, to: u64| {
            to.saturating_sub(from).saturating_sub(self.sacked.bytes_within(from, to))
        };
        let not_lost = unsacked(self.lost_edge(), self.snd_nxt);
        let again = unsacked(self.snd_una, self.recovery.high_rxt.min(self.snd_nxt));
        // Without SACK, each duplicate ACK means that one segment has left the network.
        let left = if self.sack_on || matches!(self.recovery.mode, Mode::Loss) {
            0
        } else {
            u64::from(self.recovery.dupacks).saturating_mul(self.smss())
        };
        not_lost.saturating_add(again).saturating_sub(left)
    }

    /// NextSeg rule 1 (RFC 6675 section 4): the first lost segment that was not retransmitted.
    pub(crate) fn plan_lost(&self) -> Option<Plan> {
        if matches!(self.recovery.mode, Mode::Open) {
            return None;
        }
        let from = self.recovery.high_rxt.max(self.snd_una);
        let (start, end) = self.sacked.first_hole(from, self.lost_edge())?;
        self.may_retransmit().then(|| self.plan_retransmit(start, end))
    }

    /// NextSeg rules 3 and 4, when no new data can be sent: a hole that does not count as lost,
    /// then once per recovery the last segment (rescue), in case the tail was lost.
    pub(crate) fn plan_rescue(&self) -> Option<Plan> {
        if !matches!(self.recovery.mode, Mode::Fast) || !self.sack_on || !self.may_retransmit() {
            return None;
        }
        let from = self.recovery.high_rxt.max(self.snd_una);
        if let Some((start, end)) = self.sacked.first_hole(from, self.sacked.highest()) {
            return Some(self.plan_retransmit(start, end));
        }
        if self.recovery.rescued {
            return None;
        }
        let (start, end) = self.sacked.last_hole(from, self.snd_nxt)?;
        let start = start.max(end.saturating_sub(self.smss()));
        Some(Plan { kind: SegmentKind::Rescue, ..self.plan_retransmit(start, end) })
    }

    fn may_retransmit(&self) -> bool {
        let space = self.congestion.cwnd().saturating_sub(self.pipe());
        self.recovery.first_due || space >= self.smss()
    }

    /// A retransmission of the first segment of `start..end`, with the FIN if it is in the range.
    fn plan_retransmit(&self, start: u64, end: u64) -> Plan {
        let data_end = self.send_end();
        let space = self.full_segment_bytes() as u64;
        let bytes = end.min(data_end).saturating_sub(start).min(space);
        let behind = start.saturating_add(bytes);
        let fin = self.fin_sent && behind == data_end && end > data_end;
        Plan { pos: start, bytes: bytes as usize, fin, kind: SegmentKind::Retransmit }
    }

    /// A retransmission of `bytes` bytes up to `to` was sent.
    pub(crate) fn on_retransmit_sent(&mut self, kind: SegmentKind, to: u64, bytes: usize) {
        self.recovery.first_due = false;
        match kind {
            SegmentKind::Rescue => self.recovery.rescued = true,
            _ => self.recovery.high_rxt = self.recovery.high_rxt.max(to),
        }
        // Karn's algorithm: either copy of the timed segment may be acknowledged.
        self.times.timed = None;
        self.retransmits.segments = self.retransmits.segments.saturating_add(1);
        self.retransmits.bytes = self.retransmits.bytes.saturating_add(bytes as u64);
    }

    /// A duplicate acknowledgement (RFC 5681 section 3.2, RFC 6675 section 5).
    pub(crate) fn on_duplicate(&mut self, counters: &mut Counters) {
        self.recovery.dupacks = self.recovery.dupacks.saturating_add(1);
        self.detect_loss(counters);
    }

    /// Enters fast recovery on DupThresh duplicates or a lost segment on the scoreboard.
    pub(crate) fn detect_loss(&mut self, counters: &mut Counters) {
        if !matches!(self.recovery.mode, Mode::Open) || self.flight() == 0 {
            return;
        }
        let counted = self.recovery.dupacks as usize >= DUP_THRESH;
        if !counted && self.sacked.lost_edge(self.smss()) <= self.snd_una {
            return;
        }
        self.recovery = Recovery {
            mode: Mode::Fast,
            recover: self.snd_nxt,
            high_rxt: self.snd_una,
            rescued: false,
            dupacks: self.recovery.dupacks,
            first_due: true,
        };
        self.congestion.on_loss();
        self.times.timed = None;
        counters.count(Counter::TcpFastRetransmits);
    }

    /// `acked` positions were newly acknowledged; `snd_una` has advanced.
    #[inline]
    pub(crate) fn recover_on_ack(&mut self, acked: u64) {
        if self.recovery.is_quiet() {
            return;
        }
        match self.recovery.mode {
            Mode::Open => self.recovery.dupacks = 0,
            _ if self.snd_una >= self.recovery.recover => {
                self.recovery = Recovery { high_rxt: self.snd_una, ..Recovery::new() };
            }
            Mode::Fast => self.on_partial_ack(acked),
            Mode::Loss => self.recovery.dupacks = 0,
        }
    }

    /// RFC 6582 section 3.2 step 3: without SACK the next hole starts at `snd_una`. The
    /// acknowledged segments no longer count as duplicates.
    fn on_partial_ack(&mut self, acked: u64) {
        if self.sack_on {
            return;
        }
        let segments = u32::try_from(div_rem(acked, self.smss()).0).unwrap_or(u32::MAX);
        let counted = segments.saturating_sub(1);
        self.recovery.dupacks = self.recovery.dupacks.saturating_sub(counted);
        self.recovery.first_due = true;
    }

    /// The retransmission timer expired (RFC 6298 sections 5.4 to 5.6, RFC 6675 section 5.1):
    /// everything not on the scoreboard counts as lost.
    pub(crate) fn enter_loss(&mut self, counters: &mut Counters) {
        let is_repeated = self.rtt.backoff() > 0;
        self.congestion.on_timeout(is_repeated);
        // The peer may renege on SACKed data (RFC 2018 section 8). It has reneged if it SACKed the
        // byte at `snd_una`. After a second time-out reneging is assumed.
        if is_repeated || self.sacked.lowest() == Some(self.snd_una) {
            self.sacked.clear();
        }
        self.recovery = Recovery {
            mode: Mode::Loss,
            recover: self.snd_nxt,
            high_rxt: self.snd_una,
            rescued: false,
            dupacks: 0,
            first_due: true,
        };
        self.times.timed = None;
        self.rtt.back_off();
        self.timers.stop(Timer::Retransmit);
        counters.count(Counter::TcpTimeouts);
    }

    /// Everything in flight exceeded the path MTU: retransmit it in smaller segments. This is no
    /// sign of congestion (RFC 1191 section 6.4).
    pub(crate) fn retransmit_all(&mut self) {
        self.recovery = Recovery {
            mode: Mode::Loss,
            recover: self.snd_nxt,
            high_rxt: self.snd_una,
            rescued: false,
            dupacks: 0,
            first_due: true,
        };
        self.times.timed = None;
    }
}
