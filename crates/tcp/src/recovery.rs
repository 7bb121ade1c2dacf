//! Loss recovery: what must go again, and how much may be in flight meanwhile.
//!
//! One picture serves SACK (RFC 6675), NewReno for peers without it (RFC 6582), and the time after
//! a retransmission time-out: bytes below `lost_edge` that the scoreboard does not hold are lost;
//! those of them below `high_rxt` have been sent again. They differ only in where `lost_edge` is.
//!
//! | mode | lost_edge |
//! |---|---|
//! | open | where IsLost ends; nothing below `snd_una` |
//! | fast, SACK | where IsLost ends (the first segment always counts as lost) |
//! | fast, NewReno | one segment beyond `snd_una` |
//! | loss (time-out) | `recover`, all that had been sent |
//!
//! A retransmission that is lost again is found by the time-out.

use crate::Tcb;
use crate::arith::div_rem;
use crate::output::{Kind, Plan};
use crate::scoreboard::DUP_THRESH;
use crate::timers::Timer;
use fulmar_base::{Counter, Counters};

/// In which phase recovery is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// No loss known.
    Open,
    /// Fast recovery.
    Fast,
    /// After a time-out.
    Loss,
}

/// The state of recovery.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recovery {
    pub mode: Mode,
    /// RecoveryPoint: recovery ends when it is acknowledged.
    pub recover: u64,
    /// HighRxt: lost bytes below it have been sent again.
    pub high_rxt: u64,
    /// A rescue retransmission was sent in this recovery.
    pub rescued: bool,
    /// Duplicate acknowledgements since `snd_una` moved.
    pub dupacks: u32,
    /// One retransmission may go whatever the pipe says (RFC 6675 section 5 (4.3)).
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

    /// No loss and no sign of one.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        matches!(self.mode, Mode::Open) && self.dupacks == 0
    }
}

impl Tcb {
    fn smss(&self) -> u64 {
        u64::from(self.mss)
    }

    /// Where the bytes known to be lost end.
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
        // Without SACK each duplicate ACK says that one segment has left the network.
        let left = if self.sack_on || matches!(self.recovery.mode, Mode::Loss) {
            0
        } else {
            u64::from(self.recovery.dupacks).saturating_mul(self.smss())
        };
        not_lost.saturating_add(again).saturating_sub(left)
    }

    /// NextSeg rule 1 (RFC 6675 section 4): the first lost segment that was not sent again.
    pub(crate) fn plan_lost(&self) -> Option<Plan> {
        if matches!(self.recovery.mode, Mode::Open) {
            return None;
        }
        let from = self.recovery.high_rxt.max(self.snd_una);
        let (start, end) = self.sacked.first_hole(from, self.lost_edge())?;
        self.may_resend().then(|| self.plan_again(start, end))
    }

    /// NextSeg rules 3 and 4, when no new data could go: a hole that is not known to be lost, then
    /// once the last segment, in case the tail was lost.
    pub(crate) fn plan_rescue(&self) -> Option<Plan> {
        if !matches!(self.recovery.mode, Mode::Fast) || !self.sack_on || !self.may_resend() {
            return None;
        }
        let from = self.recovery.high_rxt.max(self.snd_una);
        if let Some((start, end)) = self.sacked.first_hole(from, self.sacked.highest()) {
            return Some(self.plan_again(start, end));
        }
        if self.recovery.rescued {
            return None;
        }
        let (start, end) = self.sacked.last_hole(from, self.snd_nxt)?;
        let start = start.max(end.saturating_sub(self.smss()));
        Some(Plan { kind: Kind::Rescue, ..self.plan_again(start, end) })
    }

    fn may_resend(&self) -> bool {
        let room = self.cubic.cwnd().saturating_sub(self.pipe());
        self.recovery.first_due || room >= self.smss()
    }

    /// One segment of `start..end`, the FIN with it if it lies there.
    fn plan_again(&self, start: u64, end: u64) -> Plan {
        let data_end = self.send_end();
        let room = self.payload_room() as u64;
        let bytes = end.min(data_end).saturating_sub(start).min(room);
        let behind = start.saturating_add(bytes);
        let fin = self.fin_sent && behind == data_end && end > data_end;
        Plan { pos: start, bytes: bytes as usize, fin, kind: Kind::Again }
    }

    /// A retransmission of `from..to` has gone.
    pub(crate) fn on_resent(&mut self, kind: Kind, to: u64, bytes: usize) {
        self.recovery.first_due = false;
        match kind {
            Kind::Rescue => self.recovery.rescued = true,
            _ => self.recovery.high_rxt = self.recovery.high_rxt.max(to),
        }
        // Karn: what is being timed may now be acknowledged by either copy.
        self.marks.timed = None;
        self.again.segments = self.again.segments.saturating_add(1);
        self.again.bytes = self.again.bytes.saturating_add(bytes as u64);
    }

    /// A duplicate acknowledgement, or news in the scoreboard (RFC 5681 section 3.2, RFC 6675
    /// section 5).
    pub(crate) fn on_duplicate(&mut self, counters: &mut Counters) {
        self.recovery.dupacks = self.recovery.dupacks.saturating_add(1);
        self.detect_loss(counters);
    }

    /// Enters fast recovery if there is evidence enough.
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
        self.cubic.on_congestion();
        self.marks.timed = None;
        counters.count(Counter::TcpFastRetransmits);
    }

    /// `acked` positions were newly acknowledged; `snd_una` has moved.
    #[inline]
    pub(crate) fn recover_on_ack(&mut self, acked: u64) {
        if self.recovery.is_quiet() {
            return;
        }
        match self.recovery.mode {
            Mode::Open => self.recovery.dupacks = 0,
            _ if self.snd_una >= self.recovery.recover => self.end_recovery(),
            Mode::Fast => self.on_partial_ack(acked),
            Mode::Loss => self.recovery.dupacks = 0,
        }
    }

    /// RFC 6582 section 3.2 step 3: without SACK the next hole starts here, and as many of the
    /// segments known to have left the network are now acknowledged.
    fn on_partial_ack(&mut self, acked: u64) {
        if self.sack_on {
            return;
        }
        let segments = u32::try_from(div_rem(acked, self.smss()).0).unwrap_or(u32::MAX);
        let counted = segments.saturating_sub(1);
        self.recovery.dupacks = self.recovery.dupacks.saturating_sub(counted);
        self.recovery.first_due = true;
    }

    fn end_recovery(&mut self) {
        self.recovery = Recovery { high_rxt: self.snd_una, ..Recovery::new() };
    }

    /// The retransmission timer ran out (RFC 6298 section 5.4 to 5.6, RFC 6675 section 5.1): all
    /// that is not in the scoreboard counts as lost.
    pub(crate) fn enter_loss(&mut self, counters: &mut Counters) {
        let again = self.rtt.backoff() > 0;
        self.cubic.on_timeout(again);
        // A peer may take back what it reported (RFC 2018 section 8). It has, if it reported the
        // very byte that it does not acknowledge; after a second time-out it is assumed.
        if again || self.sacked.lowest() == Some(self.snd_una) {
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
        self.marks.timed = None;
        self.rtt.back_off();
        self.timers.stop(Timer::Retransmit);
        counters.count(Counter::TcpTimeouts);
    }

    /// Everything in flight was too big for the path: send it again in smaller segments, which is
    /// no sign of congestion (RFC 1191 section 6.4).
    pub(crate) fn resend_all(&mut self) {
        self.recovery = Recovery {
            mode: Mode::Loss,
            recover: self.snd_nxt,
            high_rxt: self.snd_una,
            rescued: false,
            dupacks: 0,
            first_due: true,
        };
        self.marks.timed = None;
    }
}
