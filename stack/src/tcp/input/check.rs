//! Acceptability of a segment: PAWS, sequence number, RST, SYN.

use super::Segment;
use crate::base::{Counter, DropReason, Duration};
use crate::tcp::Tcb;
use crate::tcp::contract::{ConnError, Env, Events, State};
use crate::tcp::timers::Timer;
use crate::wire::tcp::Flags;

/// How long a peer's repeated SYNs are taken for a slow path: TCP's SYNs are repeated for about two minutes (RFC 6298,
/// six times).
const SYN_REPETITION: Duration = Duration::from_secs(120);

/// RFC 7323 section 5.5: an older TS.Recent is invalid, because the peer's clock may have wrapped.
const TS_RECENT_LIFETIME: Duration = Duration::from_secs(24 * 24 * 3600);

impl Tcb {
    /// PAWS (RFC 7323 section 5.3, R1). A reset is not subject to it (section 5.2).
    pub(super) fn check_timestamps(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
    ) -> Result<(), DropReason> {
        if !self.ts.on || seg.hdr.flags.contains(Flags::RST) {
            return Ok(());
        }
        // Section 3.2 would drop a segment without the option. As on Linux it is taken: some peers omit the option in the
        // last ACK of the handshake or later, and some middleboxes remove it. What PAWS is for, an old duplicate of this
        // connection, has it.
        let Some(t) = seg.hdr.options.timestamps else { return Ok(()) };
        let older = (t.value.wrapping_sub(self.ts.recent) as i32) < 0;
        if !older {
            return Ok(());
        }
        if env.now.since(self.ts.recent_at) > TS_RECENT_LIFETIME {
            return Ok(());
        }
        self.challenge(env);
        Err(DropReason::TcpPaws)
    }

    /// Updates TS.Recent from a segment with SEG.SEQ <= Last.ACK.sent (RFC 7323 section 4.3) that reaches at least
    /// Last.ACK.sent: an older one, whose sequence number proves little, may not forbid what follows.
    pub(super) fn update_ts_recent(&mut self, env: &Env, seg: &Segment) {
        let Some(t) = seg.hdr.options.timestamps.filter(|_| self.ts.on) else { return };
        // SEG.SEQ as sent, before trimming.
        let ahead = seg.hdr.seq.distance(self.peer_seq_of(self.rcv.last_ack_sent));
        let newer = t.value.wrapping_sub(self.ts.recent) as i32 >= 0;
        let is_expired = env.now.since(self.ts.recent_at) > TS_RECENT_LIFETIME;
        let reaches = i64::from(ahead).saturating_add_unsigned(seg.sent_span) >= 0;
        if ahead <= 0 && reaches && (newer || is_expired) {
            self.ts.recent = t.value;
            self.ts.recent_at = env.now;
        }
    }

    /// First: the sequence number (section 3.4). Trims the segment to the window.
    ///
    /// The acknowledgement of an entirely old segment, or of a window probe, is still processed:
    /// otherwise two sides that both retransmit would deadlock. They retransmit no more than a window: what is
    /// older proves nothing (RFC 5961 section 1.2).
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
            if seg.offset.unsigned_abs() > self.largest_rcv_wnd() {
                self.challenge(env);
                return Err(DropReason::TcpOutOfWindow);
            }
            self.trim_old(env, seg);
        }
        self.trim_beyond(env, seg, window)?;
        let start = self.rcv.nxt.saturating_add(seg.offset.unsigned_abs());
        seg.end = start.saturating_add(seg.payload.len() as u64);
        Ok(())
    }

    /// Trims what is beyond the window.
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
        // The FIN comes last, so it is trimmed first.
        let fin = u64::from(seg.fin);
        seg.fin = false;
        let cut = usize::try_from(beyond.saturating_sub(fin)).unwrap_or(usize::MAX);
        seg.payload.trim_back(cut, env.pool);
        Ok(())
    }

    /// A segment without data must be in the window, its right edge included: a peer that has
    /// filled the window sends pure ACKs from there.
    fn check_empty(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
        window: u64,
    ) -> Result<(), DropReason> {
        if seg.offset >= 0 && seg.offset.unsigned_abs() <= window {
            return Ok(());
        }
        // Keepalive and window probes are one before RCV.NXT (RFC 9293 section 3.8.4), which a blind sender does not
        // know. The rate limits end ACK loops between desynchronized peers.
        match seg.offset {
            -1 if self.probe_answers.allow(env.now) => self.due.ack = true,
            -1 => {}
            _ => _ = self.challenge(env),
        }
        Err(DropReason::TcpOutOfWindow)
    }

    /// Trims the bytes that were already received.
    fn trim_old(&mut self, env: &mut Env, seg: &mut Segment) {
        self.due.ack = true;
        let old = seg.offset.unsigned_abs();
        let bytes = seg.payload.len() as u64;
        if old > bytes && seg.fin {
            seg.fin = false;
            seg.repeats_fin = self.fin.received && old == bytes.saturating_add(1);
        }
        let repeated = old.min(bytes);
        seg.repeated = self.rcv.nxt.checked_sub(old).map(|start| (start, repeated));
        let cut = usize::try_from(repeated).unwrap_or(usize::MAX);
        seg.payload.trim_front(cut, env.pool);
        seg.offset = 0;
        if seg.span() == 0 {
            seg.verdict = Err(DropReason::TcpDuplicate);
        }
    }

    /// `bytes` at position `start` were received before: the next ACK reports them (RFC 2883
    /// section 4).
    pub(super) fn record_duplicate(&mut self, start: u64, bytes: u64) {
        if self.sack_on && bytes > 0 {
            self.dsack_due = Some((start, start.saturating_add(bytes)));
        }
    }

    /// Second: RST. Only one whose sequence number is RCV.NXT resets (RFC 5961 section 3.2).
    pub(super) fn process_reset(
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
            // RFC 1337: no reset ends TIME-WAIT early. An ACK would only elicit the next reset.
            return Err(DropReason::TcpBlindReset);
        }
        if !exact {
            self.challenge(env);
            return Err(DropReason::TcpBlindReset);
        }
        env.counters.count(Counter::TcpResetsIn);
        let why = match self.state {
            State::SynReceived if !self.is_open_early() => Some(ConnError::Refused),
            // Both sides have sent their FIN: the reset is not an error.
            State::Closing | State::LastAck => None,
            // The peer no longer reads, and had nothing more to send (as Linux).
            State::CloseWait => Some(ConnError::BrokenPipe),
            _ => Some(ConnError::Reset),
        };
        self.close_on_segment(seg, why);
        Ok(())
    }

    /// Closes the connection because of this segment.
    pub(super) fn close_on_segment(&mut self, seg: &mut Segment, why: Option<ConnError>) {
        self.finish(why);
        seg.events |= Events::CLOSED;
        if why.is_some() {
            seg.events |= Events::ERROR;
        }
    }

    /// Fourth: SYN. In a synchronized state it gets a challenge ACK whatever its sequence number
    /// (RFC 5961 section 4.2).
    pub(super) fn check_syn(&mut self, env: &mut Env, seg: &mut Segment) -> Result<(), DropReason> {
        let again = matches!(self.state, State::SynReceived) && seg.hdr.seq == self.irs;
        if again && self.user.opened_actively && seg.hdr.flags.contains(Flags::ACK) {
            // Simultaneous open: the peer's SYN,ACK (section 3.5, figure 8). Its SYN is a
            // duplicate, its ACK is new.
            seg.offset = seg.offset.saturating_add(1);
            return Ok(());
        }
        if again {
            self.on_repeated_syn_ecn(seg.hdr.flags);
        }
        if again && self.challenge(env) {
            // Our SYN,ACK was lost or delayed: send it again, with a full retransmission time-out unless the peer
            // repeats its SYN long enough to keep the state for ever.
            if env.now.since(self.times.last_progress) < SYN_REPETITION {
                self.timers.stop(Timer::Retransmit);
            }
            self.due.ack = false;
            self.due.syn = true;
            return Err(DropReason::TcpDuplicate);
        }
        if seg.hdr.seq == self.irs && seg.hdr.flags.contains(Flags::ACK) {
            // The peer's SYN,ACK again: our ACK was lost, perhaps for its option.
            self.stop_ecn_option();
        }
        self.challenge(env);
        Err(DropReason::TcpBlindSyn)
    }
}
