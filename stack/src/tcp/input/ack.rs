//! Fifth step of RFC 9293 section 3.10.7.4: the ACK field, the send window, SACK blocks.

use super::Segment;
use crate::base::{Counter, DropReason, Duration, Instant, SeqNum};
use crate::tcp::Tcb;
use crate::tcp::congestion::Ack;
use crate::tcp::contract::{Env, Events, State};
use crate::tcp::ecn::EcnMode;
use crate::tcp::recovery::{AckSummary, Dsack, Mode};
use crate::tcp::scoreboard::Delivered;
use crate::tcp::tcb::ResetDue;
use crate::tcp::timers::Pending;
use crate::tcp::timers::Timer;
use crate::wire::tcp::{Flags, Header, SackBlocks};

impl Tcb {
    /// Validates the acknowledgement number. Returns its distance from `snd.una`.
    pub(super) fn check_ack(&mut self, env: &mut Env, seg: &Segment) -> Result<i64, DropReason> {
        if !seg.hdr.flags.contains(Flags::ACK) {
            return Err(DropReason::TcpBadFlags);
        }
        let ahead = i64::from(seg.hdr.ack.distance(self.seq_of(self.snd.una)));
        let future = ahead > 0 && ahead.unsigned_abs() > self.flight();
        if matches!(self.state, State::SynReceived) {
            // It must acknowledge our SYN (RFC 9293 section 3.10.7.4, fifth).
            if ahead < 1 || future {
                self.due.reset = Some(ResetDue { seq: seg.hdr.ack, with_ack: false });
                return Err(DropReason::TcpBadAck);
            }
            return Ok(ahead);
        }
        // RFC 5961 section 5.2: `snd.una - max_snd_wnd <= ack <= snd_nxt`.
        let ancient = ahead < 0 && ahead.unsigned_abs() > self.snd.max_wnd;
        if future || ancient {
            self.challenge(env);
            return Err(DropReason::TcpBadAck);
        }
        Ok(ahead)
    }

    /// Processes an acknowledgement that [`Tcb::check_ack`] accepted.
    pub(super) fn process_ack(&mut self, env: &mut Env, seg: &mut Segment, ahead: i64) {
        self.times.last_received_at = env.now;
        let was_opening = matches!(self.state, State::SynReceived);
        if was_opening {
            self.on_handshake_ack_ecn(seg.hdr, env.counters);
            self.become_established(env, seg);
        }
        if ahead > 0 || !seg.hdr.options.sack.is_empty() {
            self.check_app_limited(env.now);
        }
        let (mode, cwnd_limited) = (self.recovery.mode, self.was_cwnd_limited());
        let window_before = self.snd.wnd;
        let mut ack = AckSummary { moved: ahead.max(0).unsigned_abs(), ..AckSummary::default() };
        if ack.moved > 0 {
            self.advance(env, seg.hdr, ack.moved, &mut ack.delivered);
        }
        if was_opening {
            self.requeue_syn_data();
        }
        ack.dsack = self.process_sack(seg.hdr, &mut ack.delivered);
        self.count_reported(seg.hdr, &ack);
        ack.has_sack = !seg.hdr.options.sack.is_empty();
        if !was_opening {
            ack.marked = self.decode_marks(seg.hdr, ack.delivered.bytes, env);
        }
        self.update_window(seg, ack.moved);
        ack.duplicate = ahead == 0 && self.is_duplicate(seg, window_before);
        self.recover_on_ack(seg.hdr, &ack, env);
        if ack.marked > 0 {
            self.on_ecn_marks(env);
        }
        if ack.moved > 0 {
            if cwnd_limited || matches!(mode, Mode::Loss) {
                self.grow_window(env, mode, ack.moved, &ack.delivered);
            }
            seg.events |= self.writable_event();
            self.on_fin_acked(env, seg);
        }
        if !matches!(self.state, State::Closed) {
            self.leave_persist(window_before, env.now);
        }
    }

    /// Counts what an ACK reports beside its progress.
    fn count_reported(&mut self, hdr: &Header, ack: &AckSummary) {
        let s = &mut self.statistics;
        s.dsacks_in = s.dsacks_in.saturating_add(u32::from(ack.dsack.is_some()));
        if matches!(self.ecn.mode, EcnMode::Classic) && hdr.flags.contains(Flags::ECE) {
            s.delivered_ce_bytes = s.delivered_ce_bytes.saturating_add(ack.delivered.bytes);
        }
    }

    /// Enters ESTABLISHED, or FIN-WAIT-1 if the user has closed meanwhile.
    pub(super) fn become_established(&mut self, env: &mut Env, seg: &mut Segment) {
        self.state = if self.fin.queued { State::FinWait1 } else { State::Established };
        self.due.syn = false;
        self.statistics.last_data_at = env.now;
        self.update_charge(env.window);
        self.times.last_received_at = env.now;
        self.start_keepalive();
        self.begin_mtu_search();
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

    /// Records the blocks of a SACK option, in ascending order. Returns its DSACK block. Other
    /// blocks below `snd.una` or beyond `snd.nxt` are invalid and ignored.
    fn process_sack(&mut self, hdr: &Header, delivered: &mut Delivered) -> Option<Dsack> {
        if !self.sack_on || hdr.options.sack.is_empty() {
            return None;
        }
        let dsack = self.dsack_of(hdr);
        let una_seq = self.seq_of(self.snd.una);
        let mut blocks = [(0u64, 0u64); SackBlocks::MAX];
        let unused = hdr.options.sack.iter().skip(usize::from(dsack.is_some()));
        for ((left, right), slot) in unused.zip(&mut blocks) {
            let from = i64::from(left.distance(una_seq)).max(0).unsigned_abs();
            let to = i64::from(right.distance(una_seq)).max(0).unsigned_abs();
            if from < to && to <= self.flight() && left.before(right) {
                *slot = (self.snd.una.saturating_add(from), self.snd.una.saturating_add(to));
            }
        }
        blocks.sort_unstable();
        for (start, end) in blocks {
            self.sacked.sack(start, end, delivered);
        }
        dsack
    }

    /// The first block if it is a DSACK (RFC 2883 section 4): below the acknowledgement number, or
    /// part of the second block. A DSACK of data never sent, or older than a window, is ignored.
    fn dsack_of(&self, hdr: &Header) -> Option<Dsack> {
        let mut blocks = hdr.options.sack.iter();
        let (left, right) = blocks.next()?;
        let is_old = right.distance(hdr.ack) <= 0;
        let is_inside = blocks
            .next()
            .is_some_and(|(l, r)| l.distance(left) <= 0 && right.distance(r) <= 0 && l.before(r));
        if !left.before(right) || !(is_old || is_inside) {
            return None;
        }
        let una_seq = self.seq_of(self.snd.una);
        let pos = |seq: SeqNum| self.snd.una.checked_add_signed(seq.distance(una_seq).into());
        let (start, end) = (pos(left)?, pos(right)?);
        let is_recent = self.snd.una.saturating_sub(start) <= self.snd.max_wnd;
        (is_recent && end <= self.snd.nxt).then_some(Dsack { start, end })
    }

    /// As [`Tcb::process_ack`], for a predicted segment that acknowledges `moved` positions while no
    /// recovery is under way.
    #[inline]
    pub(super) fn on_new_ack(&mut self, env: &mut Env, hdr: &Header, moved: u64) -> Events {
        self.check_app_limited(env.now);
        let cwnd_limited = self.was_cwnd_limited();
        let mut delivered = Delivered::default();
        self.advance(env, hdr, moved, &mut delivered);
        if delivered.retransmitted.is_some() || delivered.reordered {
            self.update_rack(hdr, &delivered, env.now);
        } else if let Some(sent) = delivered.original {
            self.recovery.rack.update(sent, env.now);
        }
        if cwnd_limited {
            self.grow_window(env, Mode::Open, moved, &delivered);
        }
        if self.delivery.is_on() {
            self.count_delivered(delivered.bytes, 0, env.now);
            self.sample_delivered(&delivered, env.now);
        }
        self.writable_event()
    }

    /// Whether the window was in full use when the first unacknowledged byte was sent.
    #[inline]
    fn was_cwnd_limited(&self) -> bool {
        self.snd.una < self.send_marks.cwnd_limited_end
    }

    /// `snd.una` advances by `moved` positions.
    #[inline]
    fn advance(&mut self, env: &mut Env, hdr: &Header, moved: u64, delivered: &mut Delivered) {
        let una = self.snd.una.saturating_add(moved);
        self.snd.una = una;
        self.sacked.acked_to(una, delivered);
        self.sample_rtt(env, hdr, moved, delivered);
        self.check_mtu_probe(env.now, env.counters);
        // The SYN is position 0 and the FIN follows the ready bytes: neither is in the queue.
        self.send.ack_to(una.saturating_sub(1), env.pool);
        self.records.acked_to(una);
        self.tune_send_buffer(env);
        self.rtt.reset_backoff();
        self.note_progress(env.now);
        self.errors.soft = None;
        // RFC 6298 sections 5.2 and 5.3: `rearm` restarts it if anything is in flight.
        self.timers.stop(Timer::Retransmit);
        self.recovery.pending = Pending::Timeout;
    }

    /// Reports `moved` acknowledged positions to the controller. `mode` is that before the ACK.
    #[inline]
    fn grow_window(&mut self, env: &Env, mode: Mode, moved: u64, delivered: &Delivered) {
        let acked = match mode {
            Mode::Open => moved,
            Mode::Fast => return,
            // Most of what an ACK covers after a time-out left the network long ago. RFC 3465
            // section 2.3 counts at most one segment per ACK. Here it is two, because receivers
            // that coalesce segments send fewer ACKs.
            Mode::Loss => moved.min(self.smss().saturating_mul(2)),
        };
        self.congestion.on_ack(&Ack {
            now: env.now,
            acked,
            srtt: self.rtt.srtt(),
            rtt: delivered.original.map(|sent| env.now.since(sent.sent_at)),
            una: self.snd.una,
            snd_nxt: self.snd.nxt,
        });
    }

    /// WRITABLE once a third of the send buffer, or the low-water mark, is free, and less than TCP_NOTSENT_LOWAT is
    /// unsent. If output, not an ACK, makes the space, the caller wakes the writer.
    #[inline]
    fn writable_event(&self) -> Events {
        let worth = match self.send_low_water() {
            _ if self.holds_writers_back() => false,
            None => self.send.space().saturating_mul(3) >= self.send.limit(),
            Some(bytes) => self.send.space() >= bytes,
        };
        if worth { Events::WRITABLE } else { Events::NONE }
    }

    /// Takes a round-trip sample from the timed segment. Without one (after a retransmission) it
    /// uses bytes sent once, or TSecr, to which Karn's algorithm does not apply.
    #[inline]
    fn sample_rtt(&mut self, env: &Env, hdr: &Header, moved: u64, delivered: &Delivered) {
        if let Some((end, at)) = self.times.timed {
            if self.snd.una >= end {
                self.rtt.sample(env.now.since(at));
                self.times.timed = None;
            }
            return;
        }
        if self.recovery.is_quiet() && self.rtt.backoff() == 0 {
            return;
        }
        let acks_syn = self.snd.una == moved;
        if acks_syn && !self.answers_last_syn(hdr) {
            return;
        }
        // With SACK, bytes sent once that this ACK is the first to report were just delivered. Not if the ACK
        // reports a retransmission as well: earlier ACKs may be lost, and the sample would include the time-out (as
        // Linux).
        let is_prompt = self.sack_on && delivered.retransmitted.is_none();
        if let Some(sent) = delivered.original.filter(|_| is_prompt) {
            return self.rtt.sample(env.now.since(sent.sent_at));
        }
        let Some(t) = hdr.options.timestamps.filter(|t| self.ts.on && t.echo != 0) else {
            return;
        };
        if self.answers_duplicate(hdr) {
            return;
        }
        let age_ms = self.ts_clock(env.now).wrapping_sub(t.echo);
        if age_ms < 1 << 20 {
            self.rtt.sample(Duration::from_millis(u64::from(age_ms)));
        }
    }

    /// Whether TSecr says that a handshake segment answers the last of our SYNs. A peer that repeats its answer because
    /// the first was lost, or refused for want of space in the accept queue, still echoes the SYN that arrived first: a
    /// sample would include all time-outs since. Which it was is ambiguous (RFC 6298 section 3), so the time-out for
    /// data stays at 3 s (section 5.7). Linux takes the sample.
    fn answers_last_syn(&self, hdr: &Header) -> bool {
        let stamp = self.ts_clock(self.times.syn_sent_at);
        let echo = hdr.options.timestamps.filter(|_| self.ts.on).map(|t| t.echo);
        echo.is_some_and(|echo| echo.wrapping_sub(stamp) as i32 >= 0)
    }

    /// Whether an ACK answers a duplicate, as its DSACK block says: the ACKs before it were lost. A duplicate need not
    /// move the peer's TS.Recent (RFC 7323 section 5.3, R2 and R3), so a sample would include the time-outs since.
    fn answers_duplicate(&self, hdr: &Header) -> bool {
        self.sack_on && self.dsack_of(hdr).is_some()
    }

    /// The window field of a segment, scaled. That of a SYN or SYN,ACK is never scaled (RFC 7323
    /// section 2.2).
    #[inline]
    fn window_of(&self, hdr: &Header) -> u64 {
        let shift = if hdr.flags.contains(Flags::SYN) { 0 } else { self.scale.snd };
        u64::from(hdr.window) << shift
    }

    /// Section 3.10.7.4, fifth: the latest segment updates the window. SND.WL2 is not kept: an ACK
    /// that advances `snd.una` is always newer, and of two segments with equal numbers the one with
    /// the larger window is (the right edge does not move left).
    fn update_window(&mut self, seg: &Segment, moved: u64) {
        // The position of the segment before it was trimmed.
        let ahead = seg.hdr.seq.distance(self.peer_seq_of(self.rcv.nxt));
        let pos = self.rcv.nxt.saturating_add_signed(i64::from(ahead));
        if moved > 0 || seg.hdr.ack == self.seq_of(self.snd.una) {
            self.update_window_at(seg.hdr, pos, moved);
        }
    }

    /// Updates the window from a segment at position `pos` that acknowledges `snd.una`, which it has advanced by
    /// `moved`.
    #[inline]
    pub(super) fn update_window_at(&mut self, hdr: &Header, pos: u64, moved: u64) {
        let window = self.window_of(hdr);
        if moved > 0 || pos > self.snd.wl1 || (pos == self.snd.wl1 && window > self.snd.wnd) {
            self.snd.wnd = window;
            self.snd.max_wnd = self.snd.max_wnd.max(window);
            self.snd.wl1 = pos;
        }
    }

    /// A duplicate acknowledgement of a peer without SACK (RFC 5681 section 2): one that advances
    /// nothing, and came without data, FIN or window change.
    fn is_duplicate(&self, seg: &Segment, window_before: u64) -> bool {
        // A segment all of which was trimmed carried data or a FIN; its verdict says so.
        let is_pure_ack = seg.span() == 0 && seg.verdict.is_ok();
        is_pure_ack && self.flight() > 0 && !self.sack_on && self.snd.wnd == window_before
    }

    /// Leaves the persist state when the window opens, also one that was shrunk below what is in flight (RFC 9293
    /// section 3.8.6: the connection does not time out for that). An opened window does not count as progress.
    pub(super) fn leave_persist(&mut self, window_before: u64, now: Instant) {
        let is_reopened = window_before == 0 && self.flight() > 0;
        if (self.persisting || is_reopened) && self.snd.wnd > 0 && self.rtt.backoff() > 0 {
            // Data held back by a small window waits for the override time-out (RFC 9293 section
            // 3.8.6.2.1: up to a second), not for the backed-off probe.
            self.rtt.reset_backoff();
            self.timers.stop(Timer::Retransmit);
            if !self.user.closed && self.user.timeout.is_none() {
                self.times.last_opened_at = now;
            }
        }
    }

    /// State transitions on the acknowledgement of our FIN.
    fn on_fin_acked(&mut self, env: &mut Env, seg: &mut Segment) {
        if !self.fin.sent || self.snd.una != self.snd.nxt {
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
            State::LastAck => self.close_on_segment(seg, None),
            _ => {}
        }
    }
}
