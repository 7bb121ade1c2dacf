//! Explicit congestion notification (RFC 3168).
//!
//! ```text
//!   SYN      ECE|CWR  ──►                    asks
//!                     ◄──  ECE   SYN,ACK     agrees
//!   data     ECT(0)   ──►  a router marks it CE
//!                     ◄──  ECE   every ACK, until CWR arrives
//!   data     CWR      ──►                    the window is reduced
//! ```
//!
//! New data is ECN-capable. Retransmissions, pure ACKs, SYNs and probes are not (section 6.1.5): a mark on one of
//! them could be forged by a host that cannot see the connection. A mark counts only on data that is new to this
//! side, and its echo asks for an ACK without delay. The window is reduced once per round trip, by less than for a
//! loss (RFC 8511), and not while an episode of losses has already reduced it.
//!
//! A repeated SYN no longer asks (section 6.1.1.1): a middlebox may drop the flags. Not here: AccECN (RFC 9768), and
//! the response of DCTCP to the share of marked bytes (RFC 8257).

use crate::Tcb;
use crate::contract::{EcnField, Env, State};
use crate::input::Segment;
use fulmar_base::Counter;
use fulmar_wire::tcp::Flags;

/// Whether connections use ECN (Linux: `net.ipv4.tcp_ecn`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EcnPolicy {
    /// Never (0).
    Off,
    /// If the peer asks (2). The default.
    #[default]
    Accept,
    /// Ask for it, and agree if the peer asks (1).
    Ask,
}

/// The ECN state of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ecn {
    /// Both ends have agreed.
    pub is_on: bool,
    /// A mark has arrived, and no CWR since: ACKs carry ECE.
    echoes: bool,
    /// The window was reduced: the next new data carries CWR.
    cwr_due: bool,
    /// `snd_nxt` at the last reduction. Echoes up to there report the same round trip.
    reduced_at: u64,
}

/// The flags of a SYN that asks for ECN.
const ASKS: Flags = Flags::ECE.with(Flags::CWR);

/// Whether a SYN asks for ECN.
pub(crate) fn asks(flags: Flags) -> bool {
    flags.contains(ASKS)
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

    /// The policy of a name.
    pub fn from_name(name: &str) -> Option<EcnPolicy> {
        EcnPolicy::ALL.iter().copied().find(|p| p.name() == name)
    }
}

impl Tcb {
    /// Flags of our SYN or SYN,ACK.
    pub(crate) fn ecn_syn_flags(&self) -> Flags {
        match self.state {
            State::SynSent if self.cfg.ecn == EcnPolicy::Ask && self.rtt.backoff() == 0 => ASKS,
            State::SynReceived if self.ecn.is_on => Flags::ECE,
            _ => Flags::default(),
        }
    }

    /// The peer's SYN or SYN,ACK.
    pub(crate) fn negotiate_ecn(&mut self, flags: Flags) {
        self.ecn.is_on = if flags.contains(Flags::ACK) {
            self.cfg.ecn == EcnPolicy::Ask
                && flags.contains(Flags::ECE)
                && !flags.contains(Flags::CWR)
        } else {
            self.cfg.ecn != EcnPolicy::Off && asks(flags)
        };
    }

    /// ECE of a segment after the handshake.
    #[inline]
    pub(crate) fn ece_flag(&self) -> Flags {
        if self.ecn.echoes { Flags::ECE } else { Flags::default() }
    }

    /// CWR of new data.
    #[inline]
    pub(crate) fn cwr_flag(&self) -> Flags {
        if self.ecn.cwr_due { Flags::CWR } else { Flags::default() }
    }

    /// New data was sent.
    #[inline]
    pub(crate) fn on_cwr_sent(&mut self) {
        self.ecn.cwr_due = false;
    }

    /// The window was reduced, for whatever reason: the peer learns of it (section 6.1.2).
    pub(crate) fn on_window_reduced(&mut self) {
        if self.ecn.is_on {
            self.ecn.cwr_due = true;
            self.ecn.reduced_at = self.snd_nxt;
        }
    }

    /// Marks and echoes of a segment whose sequence and acknowledgement numbers are valid.
    pub(crate) fn process_ecn(&mut self, env: &mut Env, seg: &Segment) {
        if !self.ecn.is_on {
            return;
        }
        if !seg.payload.is_empty() {
            if seg.hdr.flags.contains(Flags::CWR) {
                self.ecn.echoes = false;
            }
            if seg.ecn == EcnField::Ce {
                env.counters.count(Counter::TcpEcnMarksIn);
                self.due.ack |= !self.ecn.echoes;
                self.ecn.echoes = true;
            }
        }
        if seg.hdr.flags.contains(Flags::ECE) {
            env.counters.count(Counter::TcpEcnEchoesIn);
            self.on_ecn_echo(env);
        }
    }

    fn on_ecn_echo(&mut self, env: &mut Env) {
        let is_new = self.snd_una > self.ecn.reduced_at && self.flight() > 0;
        if is_new && self.recovery.is_open() {
            env.counters.count(Counter::TcpEcnReductions);
            self.congestion.on_ecn(env.now);
            self.update_pacing();
            self.on_window_reduced();
        }
    }
}
