//! Negotiation in the three-way handshake (RFC 9768 section 3.1, RFC 3168 section 6.1.1), and the tests of the path
//! that the handshake allows (sections 3.2.2.3 and 3.2.2.4).
//!
//! | ACE of the SYN | answered | ACE of the SYN,ACK | the client takes it for |
//! |---|---|---|---|
//! | 0 | 0 | 0 | no ECN |
//! | 3: CWR, ECE | 1: ECE | 1 | RFC 3168 |
//! | 7, any other | the code of the SYN's ECN field | 2, 3, 4, 6 | accurate feedback |
//! | | | 5 | accurate feedback; reserved (section 3.1.3) |
//! | | | 7 | no ECN: a host that reflects what it does not know |

use super::{EcnMode, EcnPolicy};
use crate::base::{Counter, Counters};
use crate::tcp::Tcb;
use crate::tcp::contract::{EcnField, State};
use crate::wire::tcp::{Flags, Header};

/// ACE of a SYN that asks for RFC 3168.
const CLASSIC: Flags = Flags::CWR.with(Flags::ECE);

/// Time-outs after which a SYN or SYN,ACK no longer carries ECN flags: a middlebox may drop it (sections 3.1.4.1 and
/// 3.2.3.2.2).
const NO_ECN_AFTER: u32 = 2;

/// The mode that answers a SYN. Combinations that are reserved ask for accurate feedback (section 3.1.3).
pub(crate) fn answer_to_syn(policy: EcnPolicy, flags: Flags) -> EcnMode {
    match flags.ace() {
        _ if policy == EcnPolicy::Off => EcnMode::Off,
        0 => EcnMode::Off,
        n if n == CLASSIC.ace() => EcnMode::Classic,
        _ => EcnMode::Accurate,
    }
}

/// The code of a received ECN field in the handshake (tables 3 and 4).
pub(crate) fn reflected(field: EcnField) -> Flags {
    Flags::of_ace(match field {
        EcnField::NotEct => 2,
        EcnField::Ect1 => 3,
        EcnField::Ect0 => 4,
        EcnField::Ce => 6,
    })
}

impl Tcb {
    /// Flags of our SYN or SYN,ACK.
    pub(crate) fn ecn_syn_flags(&self) -> Flags {
        let is_without_ecn = self.rtt.backoff() >= NO_ECN_AFTER;
        match (self.state, self.ecn.mode) {
            (State::SynSent, _) if self.cfg.ecn == EcnPolicy::Ask && !is_without_ecn => Flags::ECN,
            (State::SynReceived, EcnMode::Classic) => Flags::ECE,
            (State::SynReceived, EcnMode::Accurate) if !is_without_ecn && self.ecn.is_capable => {
                reflected(self.ecn.received.reflects.unwrap_or_default())
            }
            _ => Flags::default(),
        }
    }

    /// Determines the mode from the peer's SYN or SYN,ACK.
    pub(crate) fn negotiate_ecn(&mut self, flags: Flags) {
        if !flags.contains(Flags::ACK) {
            self.enter_ecn_mode(answer_to_syn(self.cfg.ecn, flags));
        } else if self.cfg.ecn == EcnPolicy::Ask {
            self.enter_ecn_mode(match flags.ace() {
                0 | 7 => EcnMode::Off,
                1 => EcnMode::Classic,
                _ => EcnMode::Accurate,
            });
            // A SYN without flags was sent too (section 3.1.5).
            self.ecn.is_capable &= self.rtt.backoff() < NO_ECN_AFTER;
        }
    }

    fn enter_ecn_mode(&mut self, mode: EcnMode) {
        self.ecn.mode = mode;
        self.ecn.is_capable = !matches!(mode, EcnMode::Off);
    }

    /// Sets the ECN field of the peer's SYN, which the SYN,ACK reflects. Call it before the first
    /// output.
    pub fn set_syn_ecn(&mut self, field: EcnField) {
        self.ecn.received.reflects = Some(field);
    }

    /// The SYN was repeated without flags: it may be that the path drops those with them (section 3.1.5).
    pub(crate) fn on_repeated_syn_ecn(&mut self, flags: Flags) {
        if self.ecn.is_accurate() && flags.ace() == 0 {
            self.ecn.is_capable = false;
        }
    }

    /// The peer's SYN,ACK has arrived with this ECN field. Our SYN was not ECN-capable, so that any other answer
    /// indicates a path that changes ECN fields (section 3.2.2.3).
    pub(crate) fn on_syn_ack_ecn(
        &mut self,
        hdr: &Header,
        field: EcnField,
        counters: &mut Counters,
    ) {
        if !self.ecn.is_accurate() {
            return;
        }
        counters.count(Counter::TcpAccurateEcnOpens);
        self.ecn.received.on_syn_ack(field);
        self.ecn.reported.on_handshake_option(hdr, 1);
        if !matches!(hdr.flags.ace(), 2 | 5) {
            self.ecn.distrust(counters);
        }
        self.ecn.update_predicted(self.snd.una);
    }

    /// The ACK of our SYN,ACK (table 4). ACE 0: the path has cleared the flags, or the peer received a SYN,ACK without
    /// them.
    pub(crate) fn on_handshake_ack_ecn(&mut self, hdr: &Header, counters: &mut Counters) {
        if !self.ecn.is_accurate() || hdr.flags.contains(Flags::SYN) {
            return;
        }
        counters.count(Counter::TcpAccurateEcnOpens);
        self.ecn.received.on_handshake_ack();
        self.ecn.reported.on_handshake_option(hdr, 1);
        // A SYN,ACK without flags was sent too (section 3.1.5).
        self.ecn.is_capable &= self.rtt.backoff() < NO_ECN_AFTER;
        match hdr.flags.ace() {
            0 | 3 | 4 => self.ecn.distrust(counters),
            6 => {
                self.ecn.reported.on_marked_syn_ack();
                self.ecn.distrust(counters);
            }
            _ => {}
        }
        self.ecn.update_predicted(self.snd.una);
    }
}
