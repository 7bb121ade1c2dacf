//! Fifth: the acknowledgement, and everything that it moves.

use super::Segment;
use crate::Tcb;
use crate::contract::{Env, Events, State};
use crate::recovery::Mode;
use crate::tcb::ResetDue;
use crate::timers::Timer;
use fulmar_base::{Counter, DropReason, Duration};
use fulmar_wire::tcp::{Flags, Header};

impl Tcb {
    /// Whether the peer can have sent this acknowledgement: how far it is ahead of `snd_una`.
    pub(super) fn check_ack(&mut self, env: &mut Env, seg: &Segment) -> Result<i64, DropReason> {
        if !seg.hdr.flags.contains(Flags::ACK) {
            return Err(DropReason::TcpBadFlags);
        }
        let ahead = i64::from(seg.hdr.ack.distance(self.seq_of(self.snd_una)));
        let future = ahead > 0 && ahead.unsigned_abs() > self.flight();
        if matches!(self.state, State::SynReceived) {
            // The third segment of the handshake, or none at all (RFC 9293 section 3.10.7.4, fifth).
            if ahead < 1 || future {
                self.due.reset = Some(ResetDue { seq: seg.hdr.ack, with_ack: false });
                return Err(DropReason::TcpBadAck);
            }
            return Ok(ahead);
        }
        // RFC 5961 section 5.2: `snd_una - max_snd_wnd <= ack <= snd_nxt`.
        let ancient = ahead < 0 && ahead.unsigned_abs() > self.max_snd_wnd;
        if future || ancient {
            self.challenge(env);
            return Err(DropReason::TcpBadAck);
        }
        Ok(ahead)
    }

    /// An acknowledgement that [`Tcb::check_ack`] found good.
    pub(super) fn take_ack(&mut self, env: &mut Env, seg: &mut Segment, ahead: i64) {
        self.marks.heard_at = env.now;
        if matches!(self.state, State::SynReceived) {
            self.become_established(env, seg);
        }
        let news = self.take_sack(seg.hdr);
        let moved = ahead.max(0).unsigned_abs();
        if moved > 0 {
            seg.events |= self.on_new_ack(env, seg.hdr, moved);
        }
        let before = self.snd_wnd;
        self.update_window(seg, moved > 0);
        if moved > 0 {
            self.detect_loss(env.counters);
            self.on_fin_acked(env, seg);
        } else if self.is_duplicate(seg, ahead, news, before) {
            self.on_duplicate(env.counters);
        }
        if !matches!(self.state, State::Closed) {
            self.hear_persisting_peer();
        }
    }

    /// ESTABLISHED, or what follows it if the user has closed meanwhile.
    pub(super) fn become_established(&mut self, env: &mut Env, seg: &mut Segment) {
        self.state = if self.fin_queued { State::FinWait1 } else { State::Established };
        self.due.syn = false;
        self.recharge(env.window);
        self.marks.heard_at = env.now;
        self.start_keepalive();
        if self.rtt.backoff() > 0 {
            self.rtt.syn_was_retransmitted();
        }
        let opened = if self.user.opened_actively {
            Counter::TcpActiveOpens
        } else {
            Counter::TcpPassiveOpens
        };
        env.counters.count(opened);
        seg.events |= Events::CONNECTED | Events::WRITABLE;
    }

    /// Enters the blocks of a SACK option; returns how many bytes were news. Blocks below
    /// `snd_una` (RFC 2883 reports of duplicates) and beyond `snd_nxt` (lies) are ignored.
    fn take_sack(&mut self, hdr: &Header) -> u64 {
        if !self.sack_on || hdr.options.sack.is_empty() {
            return 0;
        }
        let una_seq = self.seq_of(self.snd_una);
        let mut news = 0u64;
        for (left, right) in hdr.options.sack.iter() {
            let from = i64::from(left.distance(una_seq)).max(0).unsigned_abs();
            let to = i64::from(right.distance(una_seq)).max(0).unsigned_abs();
            if from >= to || to > self.flight() || !left.before(right) {
                continue;
            }
            let start = self.snd_una.saturating_add(from);
            let end = self.snd_una.saturating_add(to);
            news = news.saturating_add(self.sacked.insert(start, end));
        }
        news
    }

    /// `moved` positions are newly acknowledged.
    #[inline]
    pub(super) fn on_new_ack(&mut self, env: &mut Env, hdr: &Header, moved: u64) -> Events {
        let before = self.snd_una;
        let una = before.saturating_add(moved);
        self.sample_rtt(env, hdr, una);
        self.snd_una = una;
        self.sacked.acked_to(una);
        // The SYN is position 0 and the FIN lies behind the ready bytes: neither is in the queue.
        self.send.consume_to(una.saturating_sub(1), env.pool);
        self.tune_send_buffer(env);
        self.rtt.reset_backoff();
        self.marks.progress_at = env.now;
        self.fate.soft_error = None;
        // RFC 6298 section 5.2 and 5.3; rearm starts it again if anything is left.
        self.timers.stop(Timer::Retransmit);
        let used = before < self.edges.cwnd_limited_to;
        let mode = self.recovery.mode;
        self.recover_on_ack(moved);
        match mode {
            Mode::Open if used => self.cubic.on_ack(moved, env.now, self.rtt.srtt()),
            // Most of what an ACK covers now left the network long ago: RFC 3465 section 2.3
            // counts one segment, here two, since ACKs for joined segments are fewer.
            Mode::Loss => {
                let most = u64::from(self.mss).saturating_mul(2);
                self.cubic.on_ack(moved.min(most), env.now, self.rtt.srtt());
            }
            _ => {}
        }
        self.writable_event()
    }

    /// A third of the send buffer is free, or what the writer asked for: below that a woken writer
    /// could do too little.
    #[inline]
    fn writable_event(&self) -> Events {
        let worth = match self.user.send_low_water {
            None => self.send.space().saturating_mul(3) >= self.send.limit(),
            Some(bytes) => self.send.space() >= bytes,
        };
        if worth { Events::WRITABLE } else { Events::NONE }
    }

    /// From the timed segment; while there is none (after a retransmission) from the echo of our
    /// timestamp, to which Karn's rule does not apply.
    #[inline]
    fn sample_rtt(&mut self, env: &Env, hdr: &Header, una: u64) {
        if let Some((end, at)) = self.marks.timed {
            if una >= end {
                self.rtt.sample(env.now.since(at));
                self.marks.timed = None;
            }
            return;
        }
        if self.recovery.is_quiet() && self.rtt.backoff() == 0 {
            return;
        }
        let Some(t) = hdr.options.timestamps.filter(|t| self.stamps.on && t.echo != 0) else {
            return;
        };
        let age_ms = self.stamp(env.now).wrapping_sub(t.echo);
        if age_ms < 1 << 20 {
            self.rtt.sample(Duration::from_millis(u64::from(age_ms)));
        }
    }

    /// Takes the window of a segment at position `pos` that is known to be the latest.
    #[inline]
    fn set_window(&mut self, hdr: &Header, pos: u64) {
        self.snd_wnd = self.window_of(hdr);
        self.max_snd_wnd = self.max_snd_wnd.max(self.snd_wnd);
        self.snd_wl1 = pos;
    }

    /// The window that a segment offers. That of a SYN, which may be a SYN,ACK of a simultaneous
    /// open, is never scaled (RFC 7323 section 2.2).
    #[inline]
    fn window_of(&self, hdr: &Header) -> u64 {
        let shift = if hdr.flags.contains(Flags::SYN) { 0 } else { self.scale.snd };
        u64::from(hdr.window) << shift
    }

    /// Section 3.10.7.4, fifth: the window of the latest segment counts. SND.WL2 is not kept: an
    /// acknowledgement that moved is newer whatever its number, and of equal ones the larger window
    /// is (the right edge does not move left).
    fn update_window(&mut self, seg: &Segment, moved: bool) {
        // Where the segment began before it was trimmed.
        let ahead = seg.hdr.seq.distance(self.peer_seq_of(self.rcv_nxt));
        let pos = self.rcv_nxt.saturating_add_signed(i64::from(ahead));
        if moved || seg.hdr.ack == self.seq_of(self.snd_una) {
            self.update_window_at(seg.hdr, pos, moved);
        }
    }

    /// The same for a segment at position `pos` that acknowledges `snd_una`.
    #[inline]
    pub(super) fn update_window_at(&mut self, hdr: &Header, pos: u64, moved: bool) {
        let larger = || self.window_of(hdr) > self.snd_wnd;
        if moved || pos > self.snd_wl1 || (pos == self.snd_wl1 && larger()) {
            self.set_window(hdr, pos);
        }
    }

    /// RFC 5681 section 2 and RFC 6675 section 2: with SACK, news about what the peer holds;
    /// without, an ACK that says nothing else.
    fn is_duplicate(&self, seg: &Segment, ahead: i64, news: u64, window_before: u64) -> bool {
        if self.flight() == 0 {
            return false;
        }
        if self.sack_on {
            return news > 0;
        }
        ahead == 0 && seg.span() == 0 && seg.payload.is_empty() && self.snd_wnd == window_before
    }

    /// A window that opens ends the waiting.
    pub(super) fn hear_persisting_peer(&mut self) {
        if self.persisting && self.snd_wnd > 0 && self.rtt.backoff() > 0 {
            // What a small window holds back does not wait as long as a probe (RFC 9293 section
            // 3.8.6.2.1 says up to a second).
            self.rtt.reset_backoff();
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// The transitions that an acknowledged FIN makes.
    fn on_fin_acked(&mut self, env: &mut Env, seg: &mut Segment) {
        if !self.fin_sent || self.snd_una != self.snd_nxt {
            return;
        }
        match self.state {
            State::FinWait1 => {
                self.state = State::FinWait2;
                self.limit_orphan(env.now);
            }
            State::Closing => {
                self.enter_time_wait(env.now);
                seg.events |= Events::CLOSED;
            }
            State::LastAck => self.end(seg, None),
            _ => {}
        }
    }
}
