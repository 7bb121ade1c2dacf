//! A connection that a listener has not accepted yet, before the end of its handshake: an embryo.

use crate::contract::{Env, PathInfo, State};
use crate::{Config, Tcb};
use fulmar_base::{FlowKey, SeqNum};
use fulmar_wire::tcp::Header;

impl Tcb {
    /// The connection of which a cookie has come back: SYN-RECEIVED, the SYN,ACK sent. `syn` is what
    /// [`crate::check_cookie`] made of `ack`, which goes to [`Tcb::input`] next.
    ///
    /// The round-trip time is not known; nor is the window that the SYN,ACK offered: if less is left of
    /// the budget now, the peer sends again what no longer fits.
    pub fn from_cookie(
        cfg: &Config,
        key: FlowKey,
        ts_offset: u32,
        path: PathInfo,
        env: &mut Env,
        (syn, ack): (&Header, &Header),
    ) -> Tcb {
        let iss = SeqNum(ack.ack.0.wrapping_sub(1));
        let mut tcb = Tcb::passive(cfg, key, iss, ts_offset, path, env.now, syn);
        tcb.due.syn = false;
        tcb.snd_nxt = 1;
        tcb.last_ack_sent = tcb.rcv_nxt;
        tcb.advertise_in_syn(env.window);
        tcb
    }

    /// Whether a segment acknowledges our SYN and nothing else: the end of the handshake.
    pub fn is_acked_by(&self, hdr: &Header) -> bool {
        matches!(self.state, State::SynReceived) && hdr.ack == self.seq_of(1)
    }

    /// Sends the SYN,ACK again at most `retries` times.
    pub fn set_syn_retries(&mut self, retries: u32) {
        self.cfg.syn_retries = retries;
    }

    /// Gives an embryo up without a word to the peer, who may never have sent its SYN.
    pub fn forget_embryo(&mut self) {
        self.finish(None);
        self.due.reset = None;
    }
}
