//! Embryonic connections: passively opened, handshake not complete.

use crate::base::{FlowKey, SeqNum};
use crate::tcp::contract::{Env, PathInfo, State};
use crate::tcp::{Config, Tcb};
use crate::wire::tcp::Header;

impl Tcb {
    /// The connection of a valid SYN cookie, in SYN-RECEIVED with the SYN,ACK sent. `syn` is what
    /// [`check_cookie`](crate::tcp::check_cookie) reconstructed from `ack`. Pass `ack` to [`Tcb::input`] next.
    ///
    /// The round-trip time and the window of the SYN,ACK are unknown. If the budget has shrunk
    /// meanwhile, the peer retransmits what no longer fits.
    pub(crate) fn from_cookie(
        cfg: &Config,
        key: FlowKey,
        ts_offset: u32,
        path: PathInfo,
        env: &mut Env,
        syn: &Header,
        ack: &Header,
    ) -> Tcb {
        let iss = SeqNum(ack.ack.0.wrapping_sub(1));
        let mut tcb = Tcb::passive(cfg, key, iss, ts_offset, path, env.now, syn);
        tcb.due.syn = false;
        tcb.snd.nxt = 1;
        tcb.rcv.last_ack_sent = tcb.rcv.nxt;
        tcb.advertise_in_syn(env.window);
        tcb
    }

    /// Whether a segment acknowledges exactly our SYN, which completes the handshake.
    pub(crate) fn completes_handshake(&self, hdr: &Header) -> bool {
        matches!(self.state, State::SynReceived) && hdr.ack == self.seq_of(1)
    }

    /// Whether a SYN,ACK was not acknowledged within the time-out.
    pub(crate) fn has_repeated_syn_ack(&self) -> bool {
        self.rtt.backoff() > 0
    }

    /// Limits retransmissions of the SYN,ACK.
    pub fn set_syn_retries(&mut self, retries: u32) {
        self.cfg.syn_retries = retries;
    }

    /// Drops an embryonic connection without a reset: the SYN may have been spoofed.
    pub(crate) fn drop_embryo(&mut self) {
        self.finish(None);
        self.due.reset = None;
    }
}
