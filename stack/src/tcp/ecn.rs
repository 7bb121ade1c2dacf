//! Explicit congestion notification: accurate feedback (AccECN, RFC 9768), and RFC 3168 with peers that have no other.
//!
//! ```text
//!   SYN      AE|CWR|ECE  ──►                       asks for accurate feedback
//!                        ◄──  code    SYN,ACK      agrees, and reflects the ECN field of the SYN
//!   ACK      code        ──►                       reflects that of the SYN,ACK
//!   data     ECT(0)      ──►  a router marks it CE
//!                        ◄──  ACE     every segment: three bits of the count of marked packets
//!                        ◄──  option  some ACKs: bytes received with ECT(0), CE and ECT(1)
//!
//!   A peer of RFC 3168 answers the SYN with ECE alone, and echoes a mark by ECE until CWR arrives.
//! ```
//!
//! [`handshake`] agrees on the mode. [`receiver`] counts received marks and reports them to the peer. [`sender`]
//! decodes the reports of the peer, and [`classic`] is both halves of RFC 3168.
//!
//! New data is ECN-capable. SYNs, pure ACKs, retransmissions and probes are not (RFC 3168 sections 6.1.1 and 6.1.4 to
//! 6.1.6): marks on them would make denial of service easier. The window is reduced once per round trip, by less than
//! for a loss (RFC 8511), and not while an episode of losses has already reduced it. Controllers that respond to the
//! share of marked bytes get it with their samples ([`Sample`](crate::tcp::congestion::Sample)).
//!
//! A path that changes ECN fields or the feedback is detected (section 3.2.2.3, 3.2.2.4, 3.2.3.2): new data is then no
//! longer ECN-capable, and feedback is ignored. This side continues to report received marks.
//!
//! Differences from RFC 9768:
//! - After a SYN or SYN,ACK that arrived changed, feedback is ignored; section 3.2.2.3 advises to respond until it is
//!   continuous, and a path that marks everything would hold the sender at its least window.
//! - A batch of segments that is received before one output gets one ACK, which may report more than seven marks. The
//!   option in it is exact.
//! - Where ACE may have cycled unseen and the peer's options do not arrive, it is taken to have cycled only while
//!   marks arrive: "the safest likely case under the prevailing conditions" (section 3.2.2.5.2).

mod classic;
mod handshake;
mod receiver;
mod sender;

use crate::base::{Counter, Counters};
use crate::tcp::Tcb;
use crate::tcp::contract::Env;
use crate::tcp::input::Segment;
use crate::wire::tcp::Flags;
use classic::Classic;
use receiver::Received;
use sender::Reported;

pub(crate) use handshake::{answer_to_syn, reflected};

/// Whether connections use ECN (Linux: `net.ipv4.tcp_ecn`). Accurate feedback takes precedence over that of
/// RFC 3168.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum EcnPolicy {
    /// Never (0).
    Off,
    /// Accept the feedback that the peer requests (5). The default.
    #[default]
    Accept,
    /// Request accurate feedback, fall back to that of RFC 3168, and accept as above (3).
    Ask,
}

impl EcnPolicy {
    /// Every policy.
    pub const ALL: &'static [EcnPolicy] = &[EcnPolicy::Off, EcnPolicy::Accept, EcnPolicy::Ask];

    /// Its name in options.
    pub const fn name(self) -> &'static str {
        match self {
            EcnPolicy::Off => "off",
            EcnPolicy::Accept => "accept",
            EcnPolicy::Ask => "ask",
        }
    }
}

/// No policy has this name. `Display` lists the known names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownEcnPolicy;

impl core::error::Error for UnknownEcnPolicy {}

impl core::fmt::Display for UnknownEcnPolicy {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("unknown ECN policy; expected off, accept or ask")
    }
}

impl core::str::FromStr for EcnPolicy {
    type Err = UnknownEcnPolicy;

    fn from_str(name: &str) -> Result<EcnPolicy, UnknownEcnPolicy> {
        EcnPolicy::ALL.iter().copied().find(|p| p.name() == name).ok_or(UnknownEcnPolicy)
    }
}

/// The feedback that both ends have agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) enum EcnMode {
    /// None: no ECN.
    #[default]
    Off,
    /// RFC 3168: one bit, whether there was a mark.
    Classic,
    /// RFC 9768: counts of marks.
    Accurate,
}

/// The class of a segment, as ECN treats it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Carrier {
    /// SYN or SYN,ACK.
    Syn,
    /// Data for the first time, in a segment of the usual size.
    NewData,
    /// A pure ACK.
    Ack,
    Other,
}

/// The ECN state of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ecn {
    pub mode: EcnMode,
    /// New data is sent with ECT(0).
    pub is_capable: bool,
    /// Marks that the peer reports are responded to, also by a side that is not capable (RFC 9768 section 3.1.5).
    is_feedback_trusted: bool,
    /// The flags, PSH aside, of a segment that header prediction may take.
    pub predicted: Flags,
    /// `snd.nxt` at the last reduction. Reports of marks up to there are of the same round trip.
    reduced_at: u64,
    classic: Classic,
    pub received: Received,
    pub reported: Reported,
}

/// No segment has all flags.
const UNPREDICTABLE: Flags = Flags(u16::MAX);

impl Ecn {
    pub(crate) const fn new() -> Ecn {
        Ecn {
            mode: EcnMode::Off,
            is_capable: false,
            is_feedback_trusted: true,
            predicted: Flags::ACK,
            reduced_at: 0,
            classic: Classic::new(),
            received: Received::new(),
            reported: Reported::new(),
        }
    }

    #[inline]
    pub(crate) fn is_accurate(&self) -> bool {
        matches!(self.mode, EcnMode::Accurate)
    }

    /// The peer's feedback or the path's treatment of ECN fields is wrong.
    fn distrust(&mut self, counters: &mut Counters) {
        self.is_feedback_trusted = false;
        if core::mem::take(&mut self.is_capable) {
            counters.count(Counter::TcpEcnDistrusted);
        }
    }

    /// Whether a segment with the predicted ACE must be decoded nevertheless.
    fn needs_each_segment(&self, una: u64) -> bool {
        self.reported.is_first || (self.is_feedback_trusted && self.reported.may_cycle(una))
    }

    /// Determines the segments that header prediction may take, after a segment that acknowledges up to `una`.
    pub(crate) fn update_predicted(&mut self, una: u64) {
        self.predicted = match self.mode {
            EcnMode::Accurate if self.needs_each_segment(una) => UNPREDICTABLE,
            EcnMode::Accurate => Flags::ACK | self.reported.ace_flags(),
            _ => Flags::ACK,
        };
    }
}

impl Tcb {
    /// The ECN flags of a segment after the handshake.
    #[inline]
    pub(crate) fn ecn_flags(&self, carrier: Carrier) -> Flags {
        match self.ecn.mode {
            EcnMode::Off => Flags::default(),
            EcnMode::Classic => self.ecn.classic.flags(carrier),
            EcnMode::Accurate => self.ecn.received.flags(carrier),
        }
    }

    /// A segment with these ECN flags was sent; not a SYN.
    #[inline]
    pub(crate) fn on_ecn_sent(&mut self, carrier: Carrier) {
        match self.ecn.mode {
            EcnMode::Off => {}
            EcnMode::Classic => self.ecn.classic.on_sent(carrier),
            EcnMode::Accurate => self.ecn.received.on_sent(),
        }
    }

    /// The congestion window was reduced: with RFC 3168 the next new data carries CWR (section
    /// 6.1.2).
    pub(crate) fn on_window_reduced(&mut self) {
        if !matches!(self.ecn.mode, EcnMode::Off) {
            self.ecn.classic.cwr_due = true;
            self.ecn.reduced_at = self.snd.nxt;
        }
    }

    /// The ECN field, and the flags of RFC 3168, of a segment whose sequence and acknowledgement numbers are valid.
    pub(crate) fn process_ecn(&mut self, env: &mut Env, seg: &Segment) {
        match self.ecn.mode {
            EcnMode::Off => {}
            EcnMode::Classic => self.process_classic_ecn(env, seg),
            EcnMode::Accurate => self.count_ecn(env, seg),
        }
    }

    /// The peer reports marks.
    pub(crate) fn on_ecn_marks(&mut self, env: &mut Env) {
        let is_new = self.snd.una > self.ecn.reduced_at && self.flight() > 0;
        if is_new && self.recovery.is_open() {
            env.counters.count(Counter::TcpEcnReductions);
            self.congestion.on_ecn(env.now);
            self.update_pacing();
            self.on_window_reduced();
        }
    }
}
