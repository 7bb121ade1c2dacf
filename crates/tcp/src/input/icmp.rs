//! ICMP errors about segments of this connection (RFC 5927, RFC 9293 section 3.9.2.2).

use crate::Tcb;
use crate::contract::{ConnError, Env, Events, IcmpError, State};
use fulmar_base::{DropReason, SeqNum};

impl Tcb {
    /// Takes an ICMP error. `quoted_seq` is the sequence number in the TCP header that it quotes:
    /// it must be in flight (RFC 5927 section 4.1), or the message is a counted drop.
    pub fn on_icmp(&mut self, env: &mut Env, what: IcmpError, quoted_seq: SeqNum) -> Events {
        let ahead = i64::from(quoted_seq.distance(self.seq_of(self.snd_una)));
        if ahead < 0 || ahead.unsigned_abs() >= self.flight() {
            env.counters.drop_packet(DropReason::IcmpNoFlow);
            return Events::NONE;
        }
        match what {
            IcmpError::TooBig { mtu } => self.on_too_big(mtu),
            IcmpError::Unreachable { hard } => {
                return self.on_unreachable(hard.then_some(ConnError::Refused));
            }
            IcmpError::NoNeighbour => {
                return self.on_unreachable(Some(ConnError::HostUnreachable));
            }
        }
        Events::NONE
    }

    /// Path MTU discovery (RFC 1191 section 6.4, RFC 8201): smaller segments, and everything in
    /// flight again. The caller's next `PathInfo` decides; this one bridges the time until then.
    fn on_too_big(&mut self, mtu: usize) {
        if mtu >= self.path.mtu && self.segment_bytes <= self.path_mss() {
            // Already known; what was too big has been sent again since.
            return;
        }
        self.path.mtu = mtu.min(self.path.mtu);
        self.fit_segments();
        if self.is_synchronized() {
            self.resend_all();
        }
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
