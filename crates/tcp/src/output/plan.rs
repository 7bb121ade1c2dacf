//! What the next segment is: pure decisions over the control block.

use crate::Tcb;
use crate::arith::div_rem;
use crate::contract::State;
use crate::timers::{Timer, later};
use fulmar_base::Instant;

/// What a segment is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// SYN or SYN,ACK.
    Syn,
    /// Data or FIN for the first time.
    New,
    /// A retransmission.
    Again,
    /// A rescue retransmission (RFC 6675 section 4, rule 4).
    Rescue,
    /// A window or keepalive probe: no payload, a number that asks for an answer.
    Probe,
    /// A bare ACK.
    Ack,
}

/// The next segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    pub pos: u64,
    /// Payload; more than a full segment makes a super-segment.
    pub bytes: usize,
    pub fin: bool,
    pub kind: Kind,
}

impl Plan {
    pub(crate) const fn ack(pos: u64) -> Plan {
        Plan { pos, bytes: 0, fin: false, kind: Kind::Ack }
    }

    /// The position behind it, its FIN included.
    pub(crate) fn end(&self) -> u64 {
        self.pos.saturating_add(self.bytes as u64).saturating_add(u64::from(self.fin))
    }
}

/// What stands in the way of new data.
struct Room {
    /// Left of the peer's window.
    window: u64,
    /// Left of the congestion window.
    congestion: u64,
}

impl Tcb {
    /// The next segment that may go now, apart from a bare ACK.
    pub(crate) fn plan(&self) -> Option<Plan> {
        match self.state {
            State::SynSent | State::SynReceived => self.plan_syn(),
            State::Closed | State::TimeWait => None,
            _ => self
                .plan_lost()
                .or_else(|| self.plan_new())
                .or_else(|| self.plan_probe())
                .or_else(|| self.plan_rescue()),
        }
    }

    fn plan_syn(&self) -> Option<Plan> {
        self.due.syn.then_some(Plan { pos: 0, bytes: 0, fin: false, kind: Kind::Syn })
    }

    /// Payload of a full segment: less while there are SACK blocks to report.
    #[inline]
    pub(crate) fn payload_room(&self) -> usize {
        if self.sack_on && self.recv.out_of_order_bytes() > 0 {
            return self.segment_bytes.saturating_sub(40).max(1);
        }
        self.mss as usize
    }

    /// Payload of the largest segment that may be emitted: a whole number of full segments. While
    /// there are SACK blocks to report one (mechanisms: they would be repeated in every piece).
    #[inline]
    fn largest_payload(&self, full: usize) -> usize {
        if full < self.mss as usize { full } else { self.super_bytes.max(full) }
    }

    fn room(&self) -> Room {
        let edge = self.snd_una.saturating_add(self.snd_wnd);
        Room {
            window: edge.saturating_sub(self.snd_nxt),
            congestion: self.cubic.cwnd().saturating_sub(self.pipe()),
        }
    }

    fn plan_new(&self) -> Option<Plan> {
        if !self.has_unsent() {
            return None;
        }
        let waiting = self.send_end().saturating_sub(self.snd_nxt);
        let room = self.room();
        if waiting == 0 {
            return (room.window > 0).then(|| self.plan_bytes(0, waiting, &room));
        }
        let full = self.payload_room();
        let want = waiting.min(self.largest_payload(full) as u64);
        if self.awaits_more(want, full) {
            return None;
        }
        let bytes = if room.window.min(room.congestion) >= want {
            self.unless_held(want, waiting, full as u64)
        } else {
            self.what_fits(want, &room, full as u64)
        };
        (bytes > 0).then(|| self.plan_bytes(bytes, waiting, &room))
    }

    /// More bytes are about to follow, and some have gone since that was said: what is left waits
    /// for them until it fills a segment of the largest size.
    fn awaits_more(&self, want: u64, full: usize) -> bool {
        self.user.more_from.is_some_and(|from| self.snd_nxt > from)
            && !self.cfg.nodelay
            && !self.fin_ready()
            && want < self.largest_payload(full) as u64
    }

    /// The FIN rides on the last segment, but never on a super-segment.
    fn plan_bytes(&self, bytes: u64, waiting: u64, room: &Room) -> Plan {
        let last = bytes == waiting && bytes <= self.payload_room() as u64;
        let fin = last && room.window > bytes && self.fin_ready();
        Plan { pos: self.snd_nxt, bytes: bytes as usize, fin, kind: Kind::New }
    }

    /// The windows take `want` bytes. A fraction of a segment at the end goes only if it empties
    /// the queue and is not held back.
    fn unless_held(&self, want: u64, waiting: u64, full: u64) -> u64 {
        let (_, fraction) = div_rem(want, full);
        let held = fraction > 0 && (want < waiting || self.holds_fraction());
        if held { want.saturating_sub(fraction) } else { want }
    }

    /// Whether to wait with a segment that is not full: Nagle (RFC 9293 section 3.7.4), cork, and
    /// bytes about to be committed.
    ///
    /// Nagle's rule says to wait while anything is unacknowledged. Here it waits only for an ACK
    /// that is certain to come without delay: while two full segments were in flight before this
    /// pass (the peer must acknowledge every second one), or while a smaller segment is (Minshall's
    /// variant, as Linux). So a stream of large writes goes in full segments, and the tail of a
    /// lone message never waits for a delayed ACK.
    pub(crate) fn holds_fraction(&self) -> bool {
        if self.fin_ready() {
            return false;
        }
        if self.user.cork || self.user.more {
            return !self.user.cork_expired;
        }
        if self.flight() > 0 && self.send.claimed_end() > self.send.ready_end() {
            return true;
        }
        if self.cfg.nodelay {
            return false;
        }
        let before = self.edges.burst_from.saturating_sub(self.snd_una);
        before >= u64::from(self.mss).saturating_mul(2) || self.edges.small > self.snd_una
    }

    /// The user has said that more follows, and not too long ago.
    #[inline]
    pub(crate) fn is_corked(&self) -> bool {
        (self.user.cork || self.user.more) && !self.user.cork_expired
    }

    /// The windows do not take all: whole segments, if they are worth it.
    fn what_fits(&self, want: u64, room: &Room, full: u64) -> u64 {
        let usable = room.window.min(room.congestion).min(want);
        let whole = usable.saturating_sub(div_rem(usable, full).1);
        if whole > 0 {
            return if self.defers(whole, want) { 0 } else { whole };
        }
        // A window smaller than a segment: silly window avoidance (RFC 9293 section 3.8.6.2.1). A
        // half of the largest window ever offered is worth it, and so is anything when the
        // override (persist) timer has run out.
        let worth = usable.saturating_mul(2) >= self.max_snd_wnd || self.due.probe;
        if worth && room.window < full && room.congestion >= usable { usable } else { 0 }
    }

    /// Whether to wait for more window rather than cut a small piece off a large queue. Only while
    /// at least three quarters of the window are in flight, so that ACKs are sure to come.
    fn defers(&self, whole: u64, want: u64) -> bool {
        let window = self.cubic.cwnd().min(self.snd_wnd);
        let threshold = (self.super_bytes as u64 / 2).min(window / 4).min(want);
        whole < threshold && self.flight() > 0 && !self.due.probe
    }

    /// A number just below `snd_una`, as Linux sends: it is out of window, so the peer answers
    /// with its window (RFC 9293 section 3.8.6.1 wants a byte of new data, which would have to be
    /// tracked if taken; the answer is the same). With nothing in flight it is the keepalive probe of
    /// section 3.8.4.
    fn plan_probe(&self) -> Option<Plan> {
        let pos = self.snd_una.saturating_sub(1);
        self.due.probe.then_some(Plan { pos, bytes: 0, fin: false, kind: Kind::Probe })
    }

    /// After a pass of output: remembers whether the congestion window was what stopped it
    /// (RFC 9438 section 5.8: a window that is not used does not grow).
    pub(crate) fn note_limits(&mut self) {
        let cwnd = self.cubic.cwnd();
        let starting = self.cubic.in_slow_start() && self.flight().saturating_mul(2) >= cwnd;
        if starting || self.is_cwnd_limited() {
            self.edges.cwnd_limited_to = self.snd_nxt;
        }
    }

    fn is_cwnd_limited(&self) -> bool {
        let waiting = self.send_end().saturating_sub(self.snd_nxt);
        if waiting == 0 {
            return false;
        }
        let room = self.room();
        let want = waiting.min(self.super_bytes as u64);
        room.congestion < want && room.congestion <= room.window
    }

    /// Starts or stops the retransmit, persist and cork timers to match what is in flight and what
    /// waits.
    #[inline]
    pub(crate) fn rearm(&mut self, now: Instant) {
        if self.flight() > 0 {
            if self.persisting || !self.timers.is_running(Timer::Retransmit) {
                self.persisting = false;
                self.arm_retransmit(now);
            }
        } else if self.persisting || self.timers.is_running(Timer::Retransmit) || self.has_unsent()
        {
            self.rearm_idle(now);
        }
        if self.is_corked() && self.has_unsent() {
            self.timers.start_in(Timer::Cork, now, self.cfg.cork_timeout);
        }
    }

    /// Nothing is in flight: if data waits for the peer's window, persist.
    fn rearm_idle(&mut self, now: Instant) {
        let waits = self.is_synchronized() && self.has_unsent();
        if waits && !self.is_corked() && self.plan().is_none() {
            if !self.persisting {
                self.persisting = true;
                self.marks.progress_at = now;
                self.timers.stop(Timer::Retransmit);
            }
            if !self.timers.is_running(Timer::Retransmit) {
                let mut at = later(now, self.rtt.rto());
                if self.user.timeout.is_some() {
                    at = self.within_patience(now, at);
                }
                self.timers.set(Timer::Retransmit, at);
            }
        } else if !self.due.probe {
            self.persisting = false;
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// The retransmission time-out from now, but never beyond the user time-out.
    fn arm_retransmit(&mut self, now: Instant) {
        let at = self.within_patience(now, later(now, self.rtt.rto()));
        self.timers.set(Timer::Retransmit, at);
    }
}
