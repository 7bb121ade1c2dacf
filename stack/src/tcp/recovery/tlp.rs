//! Tail loss probes (RFC 8985 section 7): when the ACK of the last segments does not come, one more
//! segment elicits an ACK, from which RACK learns what is lost.

use super::{AckSummary, Mode};
use crate::tcp::Tcb;
use crate::tcp::output::{Plan, SegmentKind};
use crate::tcp::timers::Pending;

/// The state of tail loss probes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tlp {
    /// `snd.nxt` when the probe was sent, until its acknowledgement is processed (TLP.end_seq).
    pub end: Option<u64>,
    /// The probe was a retransmission (TLP.is_retrans).
    is_retransmission: bool,
    /// The next output sends a probe.
    pub due: bool,
}

impl Tlp {
    pub(crate) const fn new() -> Tlp {
        Tlp { end: None, is_retransmission: false, due: false }
    }

    /// No probe is due or outstanding.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.end.is_none() && !self.due
    }
}

impl Tcb {
    /// TLP_send_probe (section 7.3): new data if the peer's window allows, else the last segment
    /// again. The congestion window does not apply.
    pub(crate) fn plan_tail_probe(&self) -> Option<Plan> {
        if !self.recovery.tlp.due || self.flight() == 0 {
            return None;
        }
        if let Some(plan) = self.plan_new_probe() {
            return Some(plan);
        }
        let length = self.full_segment_bytes() as u64;
        let data_end = self.snd.nxt.min(self.send_end());
        let start = data_end.saturating_sub(length).max(self.snd.una);
        let start = self.records.start_within(start, data_end);
        let plan = self.plan_retransmit(start, self.snd.nxt);
        Some(Plan { kind: SegmentKind::TailProbe, ..plan })
    }

    /// A probe was sent: of kind [`SegmentKind::TailProbe`] a retransmission, else new data.
    pub(crate) fn on_probe_sent(&mut self, kind: SegmentKind) {
        let is_retransmission = matches!(kind, SegmentKind::TailProbe);
        self.recovery.tlp = Tlp { end: Some(self.snd.nxt), is_retransmission, due: false };
        self.recovery.pending = Pending::Timeout;
    }

    /// TLP_process_ack (section 7.4.2). A probe whose ACK shows that the original was lost has
    /// repaired a loss that RACK cannot see: the controller reduces its window.
    pub(crate) fn probe_on_ack(&mut self, ack: &AckSummary) {
        if ack.moved > 0 {
            self.recovery.tlp.due = false;
        }
        let Some(end) = self.recovery.tlp.end.filter(|end| self.snd.una >= *end) else { return };
        let repeats = ack.dsack.is_some_and(|d| d.end == end);
        let is_duplicate = ack.moved == 0 && !ack.has_sack;
        let repaired = self.recovery.tlp.is_retransmission && !repeats && self.snd.una > end;
        if self.recovery.tlp.is_retransmission && !repeats && !is_duplicate && !repaired {
            return;
        }
        if repaired && matches!(self.recovery.mode, Mode::Open) {
            self.congestion.on_repaired_loss();
            self.on_window_reduced();
        }
        self.recovery.tlp.end = None;
    }
}
