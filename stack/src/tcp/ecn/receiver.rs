//! The receiver's half of RFC 9768: counts received marks, and reports them in ACE and in the
//! option.

use super::{Carrier, EcnMode};
use crate::base::{Counter, Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::contract::{EcnField, Env};
use crate::tcp::input::Segment;
use crate::tcp::timers::later;
use crate::wire::tcp::{EcnCounters, EcnOrder, Flags};

/// Marked packets after which an ACK is sent at once (section 3.2.2.5.1): while received data is unacknowledged, and
/// otherwise. The second is larger, so that two hosts whose pure ACKs are marked do not acknowledge each other for
/// ever.
const MARKS_WITH_DATA: u32 = 2;
const MARKS_WITHOUT_DATA: u32 = 3;

/// Options per round trip while the counters change (section 3.2.3.3).
const OPTIONS_PER_RTT: u32 = 3;

/// What has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// r.cep: packets with CE.
    ce_packets: u32,
    /// Bytes of payload with CE, ECT(0), ECT(1): r.ceb, r.e0b, r.e1b.
    ce_bytes: u32,
    ect0_bytes: u32,
    ect1_bytes: u32,
    /// Packets with CE since the start of the connection.
    pub marked_packets: u64,
    /// The field of the last payload.
    pub last: EcnField,
    /// Packets with CE since a segment was sent.
    unreported: u32,
    /// The field of the SYN that our SYN,ACK tells, or of the SYN,ACK that our first ACK tells.
    pub reflects: Option<EcnField>,
    /// The next segment carries the option.
    pub is_option_due: bool,
    /// The option is sent no more: a middlebox may drop what carries it.
    pub is_option_off: bool,
    /// When the option was sent last, and the sum of the counters in it.
    option_sent_at: Instant,
    option_sum: u32,
}

impl Received {
    pub(super) const fn new() -> Received {
        Received {
            // Section 3.2.1: not zero, so that zero indicates a middlebox that clears them.
            ce_packets: 5,
            ce_bytes: 0,
            ect0_bytes: 1,
            ect1_bytes: 1,
            marked_packets: 0,
            last: EcnField::NotEct,
            unreported: 0,
            reflects: None,
            is_option_due: false,
            is_option_off: false,
            option_sent_at: Instant::ZERO,
            option_sum: 2,
        }
    }

    /// The handshake's code in the first ACK, ACE in all others.
    #[inline]
    pub(super) fn flags(&self, carrier: Carrier) -> Flags {
        match self.reflects {
            Some(field) if carrier == Carrier::Ack => super::reflected(field),
            _ => self.ace_flags(),
        }
    }

    fn ace_flags(&self) -> Flags {
        Flags::of_ace((self.ce_packets & 7) as u8)
    }

    /// The SYN,ACK: the first ACK tells its field. That ACK and the next segment carry the option (section 3.2.3.2.1).
    pub(super) fn on_syn_ack(&mut self, field: EcnField) {
        self.reflects = Some(field);
        self.is_option_due = true;
        if field == EcnField::Ce {
            self.note_packets(1);
        }
    }

    /// Our SYN,ACK is acknowledged: ACE counts from now on.
    pub(super) fn on_handshake_ack(&mut self) {
        self.reflects = None;
    }

    pub(super) fn note_packets(&mut self, packets: u32) {
        self.ce_packets = self.ce_packets.wrapping_add(packets);
        self.marked_packets = self.marked_packets.saturating_add(packets.into());
        self.unreported = self.unreported.saturating_add(packets);
    }

    /// Counts `bytes` of payload.
    #[inline]
    pub(crate) fn note_bytes(&mut self, field: EcnField, bytes: usize) {
        let counter = match field {
            EcnField::NotEct => return,
            EcnField::Ce => &mut self.ce_bytes,
            EcnField::Ect0 => &mut self.ect0_bytes,
            EcnField::Ect1 => &mut self.ect1_bytes,
        };
        *counter = counter.wrapping_add(bytes as u32);
    }

    fn sum(&self) -> u32 {
        self.ce_bytes.wrapping_add(self.ect0_bytes).wrapping_add(self.ect1_bytes)
    }

    pub(super) fn on_sent(&mut self) {
        self.reflects = None;
        self.unreported = 0;
    }

    fn option(&self) -> EcnCounters {
        let order = if self.ect1_bytes == 1 { EcnOrder::Ect0First } else { EcnOrder::Ect1First };
        EcnCounters::full(order, self.ect0_bytes, self.ce_bytes, self.ect1_bytes)
    }
}

impl Tcb {
    /// Counts a segment. A change of the ECN field of payload requests an ACK with the option, and so do several
    /// marks (section 3.2.2.5.1). Packets that the device has coalesced have the same field.
    pub(super) fn count_ecn(&mut self, env: &mut Env, seg: &Segment) {
        let bytes = seg.payload.len();
        let received = &mut self.ecn.received;
        if bytes > 0 {
            received.note_bytes(seg.ecn, bytes);
            if received.last != seg.ecn {
                received.last = seg.ecn;
                received.is_option_due = true;
                self.due.ack = true;
            }
        }
        if seg.ecn != EcnField::Ce {
            return;
        }
        let packets = (bytes as u32).div_ceil(self.rcv_mss.max(1)).max(1);
        received.note_packets(packets);
        env.counters.add(Counter::TcpEcnMarksIn, packets.into());
        received.is_option_due |= bytes > 0;
        let has_data = bytes > 0 || self.rcv.nxt != self.rcv.last_ack_sent;
        let limit = if has_data { MARKS_WITH_DATA } else { MARKS_WITHOUT_DATA };
        self.due.ack |= received.unreported >= limit;
    }

    /// Before output: makes the option due if the counters have changed and none was sent for a
    /// third of a round trip.
    #[inline]
    pub(crate) fn check_ecn_option(&mut self, now: Instant) {
        if self.ecn.is_accurate() {
            let interval = self.rtt.srtt().checked_div(OPTIONS_PER_RTT).unwrap_or(Duration::ZERO);
            let received = &mut self.ecn.received;
            received.is_option_due |= received.option_sum != received.sum()
                && now >= later(received.option_sent_at, interval);
        }
    }

    /// Whether the option is to be sent, which takes space from payload.
    #[inline]
    pub(crate) fn is_ecn_option_due(&self) -> bool {
        self.ecn.received.is_option_due && !self.ecn.received.is_option_off
    }

    /// The option of a segment. That of a SYN,ACK goes with its first transmission only (section 3.2.3.2.2).
    pub(crate) fn ecn_option(&self, carrier: Carrier) -> Option<EcnCounters> {
        let is_due = match carrier {
            Carrier::Syn => {
                self.ecn.is_accurate()
                    && self.ecn.is_capable
                    && matches!(self.state, crate::tcp::State::SynReceived)
                    && self.rtt.backoff() == 0
            }
            Carrier::Ack | Carrier::NewData => self.is_ecn_option_due(),
            Carrier::Other => false,
        };
        is_due.then(|| self.ecn.received.option())
    }

    /// The option was sent. With the first ACK it stays due: that ACK may be lost.
    pub(crate) fn on_ecn_option_sent(
        &mut self,
        carrier: Carrier,
        was_first_ack: bool,
        now: Instant,
    ) {
        if carrier != Carrier::Syn {
            let received = &mut self.ecn.received;
            received.is_option_due = was_first_ack;
            (received.option_sent_at, received.option_sum) = (now, received.sum());
        }
    }

    /// The next segment is the ACK of the peer's SYN,ACK.
    pub(crate) fn is_first_ecn_ack(&self) -> bool {
        matches!(self.ecn.mode, EcnMode::Accurate) && self.ecn.received.reflects.is_some()
    }

    /// Segments with the option may have been dropped because of it (section 3.2.3.2.2).
    pub(crate) fn stop_ecn_option(&mut self) {
        self.ecn.received.is_option_off = true;
    }

    /// Segmentation offload clears CWR in all packets but the first (RFC 3168), which would change ACE.
    #[inline]
    pub(crate) fn ecn_forbids_offload(&self) -> bool {
        self.ecn.is_accurate() && self.ecn.received.ace_flags().contains(Flags::CWR)
    }
}
