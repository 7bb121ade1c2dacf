//! Spurious recoveries: found by Eifel (RFC 3522), DSACK (RFC 2883, RFC 3708) or F-RTO (RFC 5682),
//! and undone (RFC 4015): nothing counts as lost, and the controller restores its window.

use super::{AckSummary, Mode};
use crate::base::{Counter, Counters};
use crate::tcp::Tcb;
use crate::wire::tcp::Header;

/// A DSACK block: bytes that the peer received twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Dsack {
    pub start: u64,
    pub end: u64,
}

/// The phase of F-RTO (RFC 5682 section 3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Frto {
    /// Not in use.
    Off,
    /// Waits for the first ACK that advances `snd.una` after the time-out.
    First,
    /// New data is sent instead of retransmissions; the next delivery decides.
    Second,
}

/// What is needed to recognize that the current or the last recovery was spurious.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Undo {
    /// `snd.una` at the start of the recovery; `None` if there is nothing to undo.
    from: Option<u64>,
    /// TSval of the first retransmission, until the first ACK that advances `snd.una` (RFC 3522).
    stamp: Option<u32>,
    /// Bytes retransmitted in the recovery that no DSACK has reported.
    bytes: u64,
    /// Something was retransmitted.
    has_retransmitted: bool,
    pub frto: Frto,
}

impl Undo {
    pub(crate) const fn new() -> Undo {
        Undo { from: None, stamp: None, bytes: 0, has_retransmitted: false, frto: Frto::Off }
    }

    /// `bytes` were retransmitted with TSval `stamp`.
    pub(crate) fn on_retransmit(&mut self, bytes: u64, stamp: u32) {
        if self.from.is_none() {
            return;
        }
        if !self.has_retransmitted {
            self.stamp = Some(stamp);
        }
        self.has_retransmitted = true;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

impl Tcb {
    /// A recovery begins.
    pub(crate) fn begin_undo(&mut self) {
        self.recovery.undo = Undo { from: Some(self.snd.una), ..Undo::new() };
    }

    /// Eifel detection (RFC 3522 section 3.2): the first ACK that covers the retransmission echoes a
    /// timestamp from before it, so the original was delivered.
    pub(crate) fn check_eifel(&mut self, hdr: &Header, counters: &mut Counters) {
        if matches!(self.recovery.mode, Mode::Open) {
            return;
        }
        let undo = &mut self.recovery.undo;
        if undo.from.is_some() && !undo.has_retransmitted {
            // Nothing was retransmitted yet: the bytes that counted as lost have arrived.
            return self.undo_recovery(counters);
        }
        let Some(stamp) = undo.stamp.take() else { return };
        let Some(t) = hdr.options.timestamps.filter(|t| self.ts.on && t.echo != 0) else {
            return;
        };
        if (t.echo.wrapping_sub(stamp) as i32) < 0 {
            self.undo_recovery(counters);
        }
    }

    /// A DSACK block. A recovery all of whose retransmissions were duplicates was spurious (RFC 3708
    /// section 3), also after its end. More DSACKs than retransmissions are ignored: the network has
    /// duplicated segments, or the DSACKs are forged.
    pub(crate) fn on_dsack(&mut self, dsack: &Dsack, counters: &mut Counters) {
        counters.count(Counter::TcpDsacksIn);
        let is_of_probe = self.recovery.tlp.end == Some(dsack.end);
        let undo = &mut self.recovery.undo;
        let in_recovery = undo.from.is_some_and(|from| dsack.start >= from);
        if is_of_probe || undo.bytes == 0 || !in_recovery {
            return;
        }
        undo.bytes = undo.bytes.saturating_sub(dsack.end.saturating_sub(dsack.start));
        let is_spurious = undo.bytes == 0 && undo.has_retransmitted;
        self.recovery.rack.on_dsack(self.snd.una, self.snd.nxt);
        if is_spurious {
            self.undo_recovery(counters);
        }
    }

    /// F-RTO with SACK (RFC 5682 section 3.1): bytes sent before the time-out and not retransmitted
    /// arrive after it, so the time-out was spurious.
    pub(crate) fn check_frto(&mut self, ack: &AckSummary, counters: &mut Counters) {
        match self.recovery.undo.frto {
            Frto::Off => {}
            Frto::First if ack.moved > 0 => {
                self.recovery.undo.frto =
                    if self.can_send_new() { Frto::Second } else { Frto::Off };
            }
            Frto::First => {}
            Frto::Second => self.decide_frto(ack, counters),
        }
    }

    fn decide_frto(&mut self, ack: &AckSummary, counters: &mut Counters) {
        if ack.delivered.bytes == 0 {
            return;
        }
        let recover = self.recovery.recover;
        self.recovery.undo.frto = Frto::Off;
        if ack.delivered.lowest_original.is_some_and(|start| start < recover) {
            self.undo_recovery(counters);
        }
    }

    /// F-RTO sends new data before it retransmits (RFC 5682 section 3.1 step 2b).
    pub(crate) fn prefers_new_data(&self) -> bool {
        self.recovery.undo.frto == Frto::Second
    }

    fn undo_recovery(&mut self, counters: &mut Counters) {
        self.recovery.undo = Undo::new();
        self.recovery.rack.on_undo();
        self.congestion.on_undo();
        self.sacked.clear_lost();
        self.recovery.mode = Mode::Open;
        self.recovery.dupacks = 0;
        self.recovery.first_due = false;
        counters.count(Counter::TcpSpuriousRecoveries);
    }
}
