//! Header prediction: the fast path for the next in-order segment of an established connection,
//! without unusual flags or options. Nearly every segment of a bulk transfer takes it.

use crate::mbuf::Chain;
use crate::tcp::Tcb;
use crate::tcp::contract::{EcnField, Env, Events, State};
use crate::wire::tcp::{Flags, Header};

impl Tcb {
    /// Whether the general steps would do no more than [`Tcb::input_predicted`].
    #[inline]
    pub(super) fn is_predicted(&self, hdr: &Header, len: usize) -> bool {
        let state = match self.state {
            State::Established => true,
            // Half closed: one side only sends data, the other only ACKs.
            State::FinWait2 => len > 0,
            State::CloseWait => len == 0,
            _ => false,
        };
        let usual = state
            && hdr.flags.without(Flags::PSH) == self.ecn.predicted
            && hdr.seq == self.peer_seq_of(self.rcv.nxt)
            && self.predicts_timestamp(hdr);
        let quiet = hdr.options.sack.is_empty()
            && hdr.options.ecn.is_none()
            && self.recovery.is_quiet()
            && self.sacked.is_clean()
            && self.recv.out_of_order_bytes() == 0
            && (len == 0 || (self.fin.peer_at.is_none() && !self.user.recv_shutdown));
        let ahead = i64::from(hdr.ack.distance(self.seq_of(self.snd.una)));
        let acks = ahead >= 0 && ahead.unsigned_abs() <= self.flight();
        // An ACK that does not advance `snd.una` may be a duplicate or a window update: slow path.
        usual && quiet && acks && (ahead > 0 || len > 0) && len as u64 <= self.rcv_wnd()
    }

    /// Whether the ECN field is the usual one.
    #[inline]
    pub(super) fn is_predicted_field(&self, field: EcnField, len: usize) -> bool {
        let is_usual = len == 0 || field == self.ecn.received.last || !self.ecn.is_accurate();
        is_usual && field != EcnField::Ce
    }

    #[inline]
    fn predicts_timestamp(&self, hdr: &Header) -> bool {
        match hdr.options.timestamps {
            Some(t) => self.ts.on && t.value.wrapping_sub(self.ts.recent) as i32 >= 0,
            None => !self.ts.on,
        }
    }

    /// Processes a predicted segment: timestamp, acknowledgement, window, data.
    #[inline]
    pub(super) fn input_predicted(
        &mut self,
        env: &mut Env,
        hdr: &Header,
        payload: Chain,
    ) -> Events {
        if let Some(t) = hdr.options.timestamps
            && self.rcv.last_ack_sent == self.rcv.nxt
        {
            self.ts.recent = t.value;
            self.ts.recent_at = env.now;
        }
        self.times.last_received_at = env.now;
        let ahead = hdr.ack.since(self.seq_of(self.snd.una));
        let mut events = Events::NONE;
        if ahead > 0 {
            events |= self.on_new_ack(env, hdr, u64::from(ahead));
        }
        let window_before = self.snd.wnd;
        self.update_window_at(hdr, self.rcv.nxt, ahead.into());
        if self.persisting || window_before == 0 {
            self.leave_persist(window_before, env.now);
        }
        if payload.is_empty() {
            env.pool.free(payload);
            return events;
        }
        if hdr.flags.contains(Flags::PSH) {
            self.record_push(self.rcv.nxt, payload.len());
        }
        if self.ecn.is_accurate() {
            let field = self.ecn.received.last;
            self.ecn.received.note_bytes(field, payload.len());
        }
        let events = events | self.store_in_order(env, payload);
        self.tune_recv_buffer(env, hdr);
        events
    }
}

#[cfg(test)]
mod tests;
