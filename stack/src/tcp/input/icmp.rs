//! ICMP errors about segments of this connection (RFC 5927, RFC 9293 section 3.9.2.2).
//!
//! Two rules defend against forged messages. The quoted sequence number must be in flight (RFC 5927
//! section 4.1). A smaller path MTU is adopted immediately only while no segment of the current
//! size has been acknowledged, and once per flight. Otherwise the message stays pending until the
//! quoted segment times out (RFC 5927 section 7.2).

use crate::base::{DropReason, IpVersion, SeqNum};
use crate::tcp::Tcb;
use crate::tcp::contract::{ConnError, Env, Events, IcmpError, State};

/// Smallest path MTU that segments shrink to: the datagram size that every IPv4 host accepts (RFC
/// 1122 section 3.3.2), and the minimum MTU of an IPv6 link (RFC 8200 section 5).
const SMALLEST_MTU: [usize; 2] = [576, 1280];

/// State of path MTU discovery by ICMP.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathMtuDiscovery {
    /// `snd.nxt` when the path MTU last changed. An acknowledged segment beyond it confirms the
    /// size.
    changed_at: u64,
    /// A pending message that contradicts a confirmed size: the quoted position, and the MTU.
    pending: Option<(u64, u16)>,
    /// The adopted MTU, until [`Tcb::take_path_mtu`] returns it.
    adopted: Option<u16>,
    /// A message below the smallest MTU was adopted: routers fragment.
    fragments: bool,
}

impl PathMtuDiscovery {
    /// Whether a message about a segment at or after `una` waits for a time-out to confirm it.
    pub(crate) fn is_pending(&self, una: u64) -> bool {
        self.pending.is_some_and(|(quoted, _)| quoted >= una)
    }
}

impl Tcb {
    /// Processes an ICMP error. `quoted_seq` is the sequence number of the quoted TCP header. If it
    /// is not in flight (RFC 5927 section 4.1), the message is dropped and counted.
    ///
    /// Call [`Tcb::take_path_mtu`] after [`IcmpError::TooBig`].
    pub fn on_icmp(&mut self, env: &mut Env, error: IcmpError, quoted_seq: SeqNum) -> Events {
        let ahead = i64::from(quoted_seq.distance(self.seq_of(self.snd.una)));
        if ahead < 0 || ahead.unsigned_abs() >= self.flight() {
            env.counters.drop_packet(DropReason::IcmpNoFlow);
            return Events::NONE;
        }
        match error {
            // A SYN without data is smaller than any path, and its peer has proven nothing.
            IcmpError::TooBig { .. }
                if ahead == 0 && self.snd.una == 0 && self.fast_open.syn_bytes == 0 =>
            {
                env.counters.drop_packet(DropReason::IcmpMtuKnown);
            }
            IcmpError::TooBig { mtu } => {
                let quoted = self.snd.una.saturating_add(ahead.unsigned_abs());
                self.on_too_big(env, mtu, quoted);
            }
            IcmpError::Unreachable { hard } => {
                return self.on_unreachable(hard.then_some(ConnError::Refused));
            }
            IcmpError::ResolutionFailed => {
                return self.on_unreachable(Some(ConnError::HostUnreachable));
            }
        }
        Events::NONE
    }

    /// Takes a newly adopted path MTU, for the path MTU cache. Call after [`Tcb::on_icmp`] and
    /// [`Tcb::on_timer`].
    pub fn take_path_mtu(&mut self) -> Option<usize> {
        self.pmtud.adopted.take().map(usize::from)
    }

    /// Path MTU discovery (RFC 1191 section 6.4, RFC 8201, RFC 5927 section 7.2).
    fn on_too_big(&mut self, env: &mut Env, mtu: usize, quoted: u64) {
        if !self.lowers_path_mtu(mtu) {
            return env.counters.drop_packet(DropReason::IcmpMtuKnown);
        }
        if self.is_of_mtu_probe(mtu, quoted) {
            self.adopt_mtu(mtu);
            return self.on_mtu_probe_lost(env.now, env.counters);
        }
        let since_change = self.snd.una.checked_sub(self.pmtud.changed_at);
        let is_unconfirmed = since_change.is_some_and(|bytes| bytes < self.segment_bytes as u64);
        if is_unconfirmed {
            self.adopt_mtu(mtu);
            if self.is_synchronized() {
                self.retransmit_all();
            } else if self.fast_open.syn_bytes > 0 && self.retransmits.segments == 0 {
                // The SYN was too large because of its data, and is repeated without.
                self.due.syn = true;
            }
        } else {
            self.defer_mtu(mtu, quoted);
        }
    }

    /// Whether a message is about the probe in flight, and contradicts no size that has passed: RFC 4821 section 7.4
    /// takes it for the answer.
    fn is_of_mtu_probe(&self, mtu: usize, quoted: u64) -> bool {
        let is_larger = self.path.without_headers(mtu) >= self.segment_bytes;
        self.mtu_search.probe().is_some_and(|p| p.covers(quoted, 1)) && is_larger
    }

    /// Keeps a message pending until the retransmission timer expires; of two, the smaller MTU.
    fn defer_mtu(&mut self, mtu: usize, quoted: u64) {
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        let is_kept = |(at, known): &(u64, u16)| *at >= self.snd.una && *known <= mtu;
        if !self.pmtud.pending.as_ref().is_some_and(is_kept) {
            self.pmtud.pending = Some((quoted, mtu));
        }
    }

    /// On a retransmission time-out: adopts a pending message whose segment is still
    /// unacknowledged. Called before the data is retransmitted.
    pub(crate) fn adopt_pending_mtu(&mut self) {
        if let Some((quoted, mtu)) = self.pmtud.pending.take()
            && quoted >= self.snd.una
            && self.lowers_path_mtu(mtu.into())
        {
            self.adopt_mtu(mtu.into());
        }
    }

    /// Adopts a path MTU until the caller's next `PathInfo` overrides it.
    fn adopt_mtu(&mut self, mtu: usize) {
        let least = self.smallest_mtu();
        self.pmtud.adopted = Some(u16::try_from(mtu).unwrap_or(u16::MAX));
        self.pmtud.fragments |= mtu < least;
        self.path.mtu = mtu.max(least).min(self.path.mtu);
        self.pmtud.changed_at = self.snd.nxt;
        self.update_segment_sizes();
    }

    /// Whether a message has an effect: smaller segments, or the first one below the smallest MTU.
    fn lowers_path_mtu(&self, mtu: usize) -> bool {
        let least = self.smallest_mtu();
        mtu.max(least) < self.path.mtu || (mtu < least && !self.pmtud.fragments)
    }

    fn smallest_mtu(&self) -> usize {
        let [v4, v6] = SMALLEST_MTU;
        match self.path.ip_version() {
            IpVersion::V4 => v4,
            IpVersion::V6 => v6,
        }
    }

    /// The smallest segment that segments shrink to.
    pub(crate) fn least_segment_bytes(&self) -> usize {
        self.path.without_headers(self.smallest_mtu())
    }

    /// The caller's `PathInfo` has another path MTU.
    pub(crate) fn on_path_mtu_changed(&mut self) {
        self.mtu_search.reopen();
        self.pmtud.changed_at = self.snd.nxt;
        self.pmtud.fragments &= self.path.mtu <= self.smallest_mtu();
    }

    /// A hard error aborts a connection in SYN-SENT. Otherwise it is recorded as a soft error: it
    /// may be forged or transient (RFC 5927 section 5.2, RFC 9293 MUST-56).
    fn on_unreachable(&mut self, fatal: Option<ConnError>) -> Events {
        if fatal.is_some() && matches!(self.state, State::SynSent) {
            self.report_syn_lost();
            self.finish(fatal);
            return Events::ERROR | Events::CLOSED;
        }
        self.errors.soft = Some(ConnError::HostUnreachable);
        Events::NONE
    }
}
