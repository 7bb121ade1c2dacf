//! Fifth step of RFC 9293 section 3.10.7.4: the ACK field, the send window, SACK blocks.

use super::Segment;
use crate::Tcb;
use crate::congestion::Ack;
use crate::contract::{Env, Events, State};
use crate::recovery::Mode;
use crate::tcb::ResetDue;
use crate::timers::Timer;
use fulmar_base::{Counter, DropReason, Duration};
use fulmar_wire::tcp::{Flags, Header};

impl Tcb {
    /// Validates the acknowledgement number. Returns its distance from `snd_una`.
    pub(super) fn check_ack(&mut self, env: &mut Env, seg: &Segment) -> Result<i64, DropReason> {
        if !seg.hdr.flags.contains(Flags::ACK) {
            return Err(DropReason::TcpBadFlags);
        }
        let ahead = i64::from(seg.hdr.ack.distance(self.seq_of(self.snd_una)));
        let future = ahead > 0 && ahead.unsigned_abs() > self.flight();
        if matches!(self.state, State::SynReceived) {
            // It must acknowledge our SYN (RFC 9293 section 3.10.7.4, fifth).
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

    /// Processes an acknowledgement that [`Tcb::check_ack`] accepted.
    pub(super) fn process_ack(&mut self, env: &mut Env, seg: &mut Segment, ahead: i64) {
        self.times.last_received_at = env.now;
        if matches!(self.state, State::SynReceived) {
            self.become_established(env, seg);
        }
        let newly_sacked = self.process_sack(seg.hdr);
        let moved = ahead.max(0).unsigned_abs();
        if moved > 0 {
            seg.events |= self.on_new_ack(env, seg.hdr, moved);
        }
        let before = self.snd_wnd;
        self.update_window(seg, moved > 0);
        if moved > 0 {
            self.detect_loss(env.counters);
            self.on_fin_acked(env, seg);
        } else if self.is_duplicate(seg, ahead, newly_sacked, before) {
            self.on_duplicate(env.counters);
        }
        if !matches!(self.state, State::Closed) {
            self.leave_persist();
        }
    }

    /// Enters ESTABLISHED, or FIN-WAIT-1 if the user has closed meanwhile.
    pub(super) fn become_established(&mut self, env: &mut Env, seg: &mut Segment) {
        self.state = if self.fin_queued { State::FinWait1 } else { State::Established };
        self.due.syn = false;
        self.update_charge(env.window);
        self.times.last_received_at = env.now;
        self.start_keepalive();
        if self.rtt.backoff() > 0 {
            self.rtt.on_syn_retransmitted();
        }
        let opened = if self.user.opened_actively {
            Counter::TcpActiveOpens
        } else {
            Counter::TcpPassiveOpens
        };
        env.counters.count(opened);
        seg.events |= Events::CONNECTED | Events::WRITABLE;
    }

    /// Records the blocks of a SACK option. Returns the number of newly reported bytes. Blocks
    /// below `snd_una` (D-SACK, RFC 2883) and beyond `snd_nxt` (invalid) are ignored.
    fn process_sack(&mut self, hdr: &Header) -> u64 {
        if !self.sack_on || hdr.options.sack.is_empty() {
            return 0;
        }
        let una_seq = self.seq_of(self.snd_una);
        let mut newly_sacked = 0u64;
        for (left, right) in hdr.options.sack.iter() {
            let from = i64::from(left.distance(una_seq)).max(0).unsigned_abs();
            let to = i64::from(right.distance(una_seq)).max(0).unsigned_abs();
            if from >= to || to > self.flight() || !left.before(right) {
                continue;
            }
            let start = self.snd_una.saturating_add(from);
            let end = self.snd_una.saturating_add(to);
            newly_sacked = newly_sacked.saturating_add(self.sacked.insert(start, end));
        }
        newly_sacked
    }

    /// `moved` positions are newly acknowledged.
    #[inline]
    pub(super) fn on_new_ack(&mut self, env: &mut Env, hdr: &Header, moved: u64) -> Events {
        let before = self.snd_una;
        let una = before.saturating_add(moved);
        self.sample_rtt(env, hdr, una);
        self.snd_una = una;
        self.sacked.acked_to(una);
        // The SYN is position 0 and the FIN follows the ready bytes: neither is in the queue.
        self.send.ack_to(una.saturating_sub(1), env.pool);
        self.tune_send_buffer(env);
        self.rtt.reset_backoff();
        self.times.last_progress = env.now;
        self.errors.soft = None;
        // RFC 6298 sections 5.2 and 5.3: `rearm` restarts it if anything is in flight.
        self.timers.stop(Timer::Retransmit);
        let used = before < self.send_marks.cwnd_limited_end;
        let mode = self.recovery.mode;
        self.recover_on_ack(moved);
        let srtt = self.rtt.srtt();
        match mode {
            Mode::Open if used => {
                self.congestion.on_ack(&Ack { now: env.now, acked: moved, srtt });
            }
            // Most of what an ACK covers after a time-out left the network long ago. RFC 3465
            // section 2.3 counts at most one segment per ACK. Here it is two, because receivers
            // that coalesce segments send fewer ACKs.
            Mode::Loss => {
                let most = u64::from(self.mss).saturating_mul(2);
                self.congestion.on_ack(&Ack { now: env.now, acked: moved.min(most), srtt });
            }
            _ => {}
        }
        self.writable_event()
    }

    /// WRITABLE once a third of the send buffer, or the low-water mark, is free.
    #[inline]
    fn writable_event(&self) -> Events {
        let worth = match self.user.send_low_water {
            None => self.send.space().saturating_mul(3) >= self.send.limit(),
            Some(bytes) => self.send.space() >= bytes,
        };
        if worth { Events::WRITABLE } else { Events::NONE }
    }

    /// Takes a round-trip sample from the timed segment. Without one (after a retransmission) it
    /// uses TSecr, to which Karn's algorithm does not apply.
    #[inline]
    fn sample_rtt(&mut self, env: &Env, hdr: &Header, una: u64) {
        if let Some((end, at)) = self.times.timed {
            if una >= end {
                self.rtt.sample(env.now.since(at));
                self.times.timed = None;
            }
            return;
        }
        if self.recovery.is_quiet() && self.rtt.backoff() == 0 {
            return;
        }
        let Some(t) = hdr.options.timestamps.filter(|t| self.ts.on && t.echo != 0) else {
            return;
        };
        let age_ms = self.ts_clock(env.now).wrapping_sub(t.echo);
        if age_ms < 1 << 20 {
            self.rtt.sample(Duration::from_millis(u64::from(age_ms)));
        }
    }

    /// The window field of a segment, scaled. That of a SYN or SYN,ACK is never scaled (RFC 7323
    /// section 2.2).
    #[inline]
    fn window_of(&self, hdr: &Header) -> u64 {
        let shift = if hdr.flags.contains(Flags::SYN) { 0 } else { self.scale.snd };
        u64::from(hdr.window) << shift
    }

    /// Section 3.10.7.4, fifth: the latest segment updates the window. SND.WL2 is not kept: an ACK
    /// that advances `snd_una` is always newer, and of two segments with equal numbers the one with
    /// the larger window is (the right edge does not move left).
    fn update_window(&mut self, seg: &Segment, moved: bool) {
        // The position of the segment before it was trimmed.
        let ahead = seg.hdr.seq.distance(self.peer_seq_of(self.rcv_nxt));
        let pos = self.rcv_nxt.saturating_add_signed(i64::from(ahead));
        if moved || seg.hdr.ack == self.seq_of(self.snd_una) {
            self.update_window_at(seg.hdr, pos, moved);
        }
    }

    /// Updates the window from a segment at position `pos` that acknowledges `snd_una`.
    #[inline]
    pub(super) fn update_window_at(&mut self, hdr: &Header, pos: u64, moved: bool) {
        let window = self.window_of(hdr);
        if moved || pos > self.snd_wl1 || (pos == self.snd_wl1 && window > self.snd_wnd) {
            self.snd_wnd = window;
            self.max_snd_wnd = self.max_snd_wnd.max(window);
            self.snd_wl1 = pos;
        }
    }

    /// A duplicate acknowledgement. With SACK (RFC 6675 section 2): an ACK that reports new bytes.
    /// Without (RFC 5681 section 2): one without data, FIN or window change.
    fn is_duplicate(
        &self,
        seg: &Segment,
        ahead: i64,
        newly_sacked: u64,
        window_before: u64,
    ) -> bool {
        if self.flight() == 0 {
            return false;
        }
        if self.sack_on {
            return newly_sacked > 0;
        }
        ahead == 0 && seg.span() == 0 && seg.payload.is_empty() && self.snd_wnd == window_before
    }

    /// Leaves the persist state when the window opens.
    pub(super) fn leave_persist(&mut self) {
        if self.persisting && self.snd_wnd > 0 && self.rtt.backoff() > 0 {
            // Data held back by a small window waits for the override time-out (RFC 9293 section
            // 3.8.6.2.1: up to a second), not for the backed-off probe.
            self.rtt.reset_backoff();
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// State transitions on the acknowledgement of our FIN.
    fn on_fin_acked(&mut self, env: &mut Env, seg: &mut Segment) {
        if !self.fin_sent || self.snd_una != self.snd_nxt {
            return;
        }
        match self.state {
            State::FinWait1 => {
                self.state = State::FinWait2;
                self.start_orphan_timer(env.now);
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
