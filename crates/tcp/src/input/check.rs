//! Whether a segment may be looked at: timestamps, sequence number, RST, SYN.

use super::Segment;
use crate::Tcb;
use crate::contract::{ConnError, Env, Events, State};
use crate::timers::Timer;
use fulmar_base::{Counter, DropReason, Duration};
use fulmar_wire::tcp::Flags;

/// RFC 7323 section 5.5: a TS.Recent this old is void, the peer's clock may have wrapped.
const STAMP_LIFE: Duration = Duration::from_secs(24 * 24 * 3600);

impl Tcb {
    /// PAWS (RFC 7323 section 5.3, R1). A reset is not subject to it (section 5.2).
    pub(super) fn check_timestamps(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
    ) -> Result<(), DropReason> {
        if !self.stamps.on || seg.hdr.flags.contains(Flags::RST) {
            return Ok(());
        }
        // Section 3.2: once negotiated, a segment without the option is dropped silently.
        let Some(t) = seg.hdr.options.timestamps else { return Err(DropReason::TcpPaws) };
        let older = (t.value.wrapping_sub(self.stamps.recent) as i32) < 0;
        if !older {
            return Ok(());
        }
        if env.now.since(self.stamps.recent_at) > STAMP_LIFE {
            return Ok(());
        }
        self.challenge(env);
        Err(DropReason::TcpPaws)
    }

    /// TS.Recent follows a segment that covers what was last acknowledged (RFC 7323 section 4.3).
    pub(super) fn note_timestamp(&mut self, env: &Env, seg: &Segment) {
        let Some(t) = seg.hdr.options.timestamps.filter(|_| self.stamps.on) else { return };
        // The segment as sent, before it was trimmed.
        let ahead = seg.hdr.seq.distance(self.peer_seq_of(self.last_ack_sent));
        let newer = t.value.wrapping_sub(self.stamps.recent) as i32 >= 0;
        let void = env.now.since(self.stamps.recent_at) > STAMP_LIFE;
        if ahead <= 0 && (newer || void) {
            self.stamps.recent = t.value;
            self.stamps.recent_at = env.now;
        }
    }

    /// First: the sequence number (section 3.4). What lies outside of the window is trimmed off.
    ///
    /// A segment that is old altogether, or probes a closed window, still counts for its
    /// acknowledgement: two sides that both retransmit would otherwise not hear each other.
    pub(super) fn check_sequence(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
    ) -> Result<(), DropReason> {
        let window = self.rcv_wnd();
        if seg.span() == 0 {
            return self.check_empty(env, seg, window);
        }
        if seg.offset < 0 {
            self.trim_old(env, seg);
        }
        self.trim_beyond(env, seg, window)?;
        let start = self.rcv_nxt.saturating_add(seg.offset.unsigned_abs());
        seg.end = start.saturating_add(seg.payload.len() as u64);
        Ok(())
    }

    /// Cuts off what lies behind the window.
    fn trim_beyond(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
        window: u64,
    ) -> Result<(), DropReason> {
        let start = seg.offset.unsigned_abs();
        let beyond = start.saturating_add(seg.span()).saturating_sub(window);
        if beyond == 0 {
            return Ok(());
        }
        self.due.ack = true;
        if start >= window {
            if (start, window) != (0, 0) {
                return Err(DropReason::TcpOutOfWindow);
            }
            seg.verdict = Err(DropReason::TcpOutOfWindow);
        }
        // A FIN is the last to fit and the first to go.
        let fin = u64::from(seg.fin);
        seg.fin = false;
        let cut = usize::try_from(beyond.saturating_sub(fin)).unwrap_or(usize::MAX);
        seg.payload.trim_back(cut, env.pool);
        Ok(())
    }

    /// A segment without data: it must lie in the window, its right edge included (a peer that
    /// filled the window acknowledges from there).
    fn check_empty(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
        window: u64,
    ) -> Result<(), DropReason> {
        if seg.offset >= 0 && seg.offset.unsigned_abs() <= window {
            return Ok(());
        }
        // Keep-alives and window probes come here; so would an endless exchange of two confused
        // peers, hence the limit.
        self.challenge(env);
        Err(DropReason::TcpOutOfWindow)
    }

    /// Cuts off what was received before.
    fn trim_old(&mut self, env: &mut Env, seg: &mut Segment) {
        self.due.ack = true;
        let old = seg.offset.unsigned_abs();
        let bytes = seg.payload.len() as u64;
        if old > bytes && seg.fin {
            seg.fin = false;
            seg.repeats_fin = self.fin_received && old == bytes.saturating_add(1);
        }
        let cut = usize::try_from(old.min(bytes)).unwrap_or(usize::MAX);
        seg.payload.trim_front(cut, env.pool);
        seg.offset = 0;
        if seg.span() == 0 {
            seg.verdict = Err(DropReason::TcpDuplicate);
        }
    }

    /// Second: RST, only exactly in place (RFC 5961 section 3.2).
    pub(super) fn take_reset(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
    ) -> Result<(), DropReason> {
        let exact = seg.offset == 0;
        let inside = seg.offset > 0 && seg.offset.unsigned_abs() < self.rcv_wnd();
        if !exact && !inside {
            return Err(DropReason::TcpOutOfWindow);
        }
        if matches!(self.state, State::TimeWait) {
            // RFC 1337: nothing ends it early. An answer would bring the next reset.
            return Err(DropReason::TcpBlindReset);
        }
        if !exact {
            self.challenge(env);
            return Err(DropReason::TcpBlindReset);
        }
        env.counters.count(Counter::TcpResetsIn);
        let why = match self.state {
            State::SynReceived => Some(ConnError::Refused),
            // Both sides had finished with sending: the reset tells nothing.
            State::Closing | State::LastAck => None,
            _ => Some(ConnError::Reset),
        };
        self.end(seg, why);
        Ok(())
    }

    /// The connection ends by what the segment says.
    pub(super) fn end(&mut self, seg: &mut Segment, why: Option<ConnError>) {
        self.finish(why);
        seg.events |= Events::CLOSED;
        if why.is_some() {
            seg.events |= Events::ERROR;
        }
    }

    /// Fourth: SYN. In a synchronized state it is answered with a challenge ACK wherever it lies
    /// (RFC 5961 section 4.2).
    pub(super) fn check_syn(&mut self, env: &mut Env, seg: &mut Segment) -> Result<(), DropReason> {
        let again = matches!(self.state, State::SynReceived) && seg.hdr.seq == self.irs;
        if again && seg.hdr.flags.contains(Flags::ACK) {
            // Simultaneous open: the peer's SYN,ACK (section 3.5, figure 8). Its SYN is old, its
            // acknowledgement is what we wait for.
            seg.offset = seg.offset.saturating_add(1);
            return Ok(());
        }
        if again && self.challenge(env) {
            // Our SYN,ACK was lost, or came late: the answer to the next one is awaited in full.
            self.timers.stop(Timer::Retransmit);
            self.due.ack = false;
            self.due.syn = true;
            return Err(DropReason::TcpDuplicate);
        }
        self.challenge(env);
        Err(DropReason::TcpBlindSyn)
    }
}
