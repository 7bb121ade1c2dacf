//! ICMP errors about segments of this connection (RFC 5927, RFC 9293 section 3.9.2.2).
//!
//! Two rules keep a forger out. The quoted sequence number must be in flight (RFC 5927 section 4.1).
//! And a smaller path MTU is believed at once only while no segment of the current size has been
//! acknowledged, and once per flight; otherwise the report waits until the retransmission timer proves
//! that the quoted segment does not arrive (RFC 5927 section 7.2).

use crate::Tcb;
use crate::contract::{ConnError, Env, Events, IcmpError, State};
use fulmar_base::{DropReason, SeqNum};

/// Least path MTU that segments shrink to: what every IPv4 host takes (RFC 1122 section 3.3.2), and
/// the least MTU of an IPv6 link (RFC 8200 section 5).
const LEAST_MTU: [usize; 2] = [576, 1280];

/// What ICMP has said about the path MTU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MtuReports {
    /// `snd_nxt` when the path MTU last changed: once a segment beyond it is acknowledged, the size
    /// is proven.
    changed_at: u64,
    /// A report that contradicts what was acknowledged: the position that it quotes, and the MTU.
    doubted: Option<(u64, u16)>,
    /// The MTU of a report that was believed, until the caller takes it.
    believed: Option<u16>,
    /// Routers fragment: a report below the least MTU was believed.
    fragments: bool,
}

impl Tcb {
    /// Takes an ICMP error. `quoted_seq` is the sequence number in the TCP header that it quotes:
    /// it must be in flight (RFC 5927 section 4.1), or the message is a counted drop.
    ///
    /// After [`IcmpError::TooBig`] the caller asks [`Tcb::take_path_mtu`].
    pub fn on_icmp(&mut self, env: &mut Env, what: IcmpError, quoted_seq: SeqNum) -> Events {
        let ahead = i64::from(quoted_seq.distance(self.seq_of(self.snd_una)));
        if ahead < 0 || ahead.unsigned_abs() >= self.flight() {
            env.counters.drop_packet(DropReason::IcmpNoFlow);
            return Events::NONE;
        }
        match what {
            IcmpError::TooBig { mtu } => {
                let quoted = self.snd_una.saturating_add(ahead.unsigned_abs());
                self.on_too_big(env, mtu, quoted);
            }
            IcmpError::Unreachable { hard } => {
                return self.on_unreachable(hard.then_some(ConnError::Refused));
            }
            IcmpError::NoNeighbour => {
                return self.on_unreachable(Some(ConnError::HostUnreachable));
            }
        }
        Events::NONE
    }

    /// The path MTU of a report that this connection has come to believe, for the table of paths. To
    /// be asked for after [`Tcb::on_icmp`] and [`Tcb::on_timer`].
    pub fn take_path_mtu(&mut self) -> Option<usize> {
        self.mtu_reports.believed.take().map(usize::from)
    }

    /// Path MTU discovery (RFC 1191 section 6.4, RFC 8201, RFC 5927 section 7.2).
    fn on_too_big(&mut self, env: &mut Env, mtu: usize, quoted: u64) {
        if !self.lowers_path(mtu) {
            return env.counters.drop_packet(DropReason::IcmpMtuKnown);
        }
        let since_change = self.snd_una.checked_sub(self.mtu_reports.changed_at);
        let is_unproven = since_change.is_some_and(|bytes| bytes < self.segment_bytes as u64);
        if is_unproven {
            self.believe_mtu(mtu);
            if self.is_synchronized() {
                self.resend_all();
            }
        } else {
            self.doubt_mtu(mtu, quoted);
        }
    }

    /// Keeps a report until the retransmission timer decides; of two the smaller MTU.
    fn doubt_mtu(&mut self, mtu: usize, quoted: u64) {
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        let is_kept = |(at, known): &(u64, u16)| *at >= self.snd_una && *known <= mtu;
        if !self.mtu_reports.doubted.as_ref().is_some_and(is_kept) {
            self.mtu_reports.doubted = Some((quoted, mtu));
        }
    }

    /// The retransmission timer ran out: a report about a segment that is still not acknowledged was
    /// right. Called before the data is sent again.
    pub(crate) fn believe_doubted_mtu(&mut self) {
        if let Some((quoted, mtu)) = self.mtu_reports.doubted.take()
            && quoted >= self.snd_una
            && self.lowers_path(mtu.into())
        {
            self.believe_mtu(mtu.into());
        }
    }

    /// Smaller segments from here on. The caller's next `PathInfo` decides; this bridges the time
    /// until then.
    fn believe_mtu(&mut self, mtu: usize) {
        let least = self.least_mtu();
        self.mtu_reports.believed = Some(u16::try_from(mtu).unwrap_or(u16::MAX));
        self.mtu_reports.fragments |= mtu < least;
        self.path.mtu = mtu.max(least).min(self.path.mtu);
        self.mtu_reports.changed_at = self.snd_nxt;
        self.fit_segments();
    }

    /// Whether a report says anything new: smaller segments, or for the first time that routers have
    /// to fragment the smallest ones.
    fn lowers_path(&self, mtu: usize) -> bool {
        let least = self.least_mtu();
        mtu.max(least) < self.path.mtu || (mtu < least && !self.mtu_reports.fragments)
    }

    fn least_mtu(&self) -> usize {
        let [v4, v6] = LEAST_MTU;
        if self.path.ip_header_bytes < 40 { v4 } else { v6 }
    }

    /// The routes gave another path MTU.
    pub(crate) fn on_path_mtu_changed(&mut self) {
        self.mtu_reports.changed_at = self.snd_nxt;
        self.mtu_reports.fragments &= self.path.mtu <= self.least_mtu();
    }

    /// What is `fatal` ends a connection that is being opened; any other is only remembered, since a
    /// router's opinion may be forged or pass (RFC 5927 section 5.2, RFC 9293 MUST-56).
    fn on_unreachable(&mut self, fatal: Option<ConnError>) -> Events {
        if fatal.is_some() && matches!(self.state, State::SynSent) {
            self.finish(fatal);
            return Events::ERROR | Events::CLOSED;
        }
        self.fate.soft_error = Some(ConnError::HostUnreachable);
        Events::NONE
    }
}
