//! The decision what to send next: pure functions of the control block.

use crate::base::Instant;
use crate::tcp::Tcb;
use crate::tcp::arith::div_rem;
use crate::tcp::contract::State;
use crate::tcp::ecn::Carrier;
use crate::tcp::plpmtud::ProbeStep;
use crate::tcp::timers::{Timer, later};

/// The purpose of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SegmentKind {
    /// SYN or SYN,ACK.
    Syn,
    /// Data or FIN for the first time.
    New,
    /// New data in a segment larger than those known to pass (RFC 4821 section 7.3).
    MtuProbe,
    /// A retransmission.
    Retransmit,
    /// A tail loss probe that retransmits (RFC 8985 section 7.3).
    TailProbe,
    /// A window or keepalive probe: no payload, an out-of-window sequence number that elicits an
    /// ACK.
    Probe,
    /// A pure ACK.
    Ack,
}

impl SegmentKind {
    /// Data or FIN for the first time.
    #[inline]
    pub(crate) fn is_new(self) -> bool {
        matches!(self, SegmentKind::New | SegmentKind::MtuProbe)
    }

    /// The same data in an ordinary segment.
    pub(crate) fn without_probe(self) -> SegmentKind {
        if self.is_new() { SegmentKind::New } else { self }
    }
}

/// The next segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    pub pos: u64,
    /// Payload; more than a full segment makes a super-segment.
    pub bytes: usize,
    pub fin: bool,
    pub kind: SegmentKind,
}

impl Plan {
    pub(crate) const fn ack(pos: u64) -> Plan {
        Plan { pos, bytes: 0, fin: false, kind: SegmentKind::Ack }
    }

    /// Data that is sent for the first time.
    #[inline]
    pub(crate) fn is_new_data(&self) -> bool {
        self.bytes > 0 && self.kind.is_new()
    }

    /// Its class, as ECN treats it.
    pub(crate) fn carrier(&self) -> Carrier {
        match self.kind {
            SegmentKind::Syn => Carrier::Syn,
            SegmentKind::Ack => Carrier::Ack,
            SegmentKind::New if self.bytes > 0 => Carrier::NewData,
            _ => Carrier::Other,
        }
    }

    /// The position after the segment, its FIN included.
    pub(crate) fn end(&self) -> u64 {
        self.pos.saturating_add(self.bytes as u64).saturating_add(u64::from(self.fin))
    }
}

/// Space for new data.
struct SendSpace {
    /// The usable window: unused bytes of the peer's window.
    window: u64,
    /// Unused bytes of the congestion window.
    congestion: u64,
}

impl Tcb {
    /// The next segment to send, pure ACKs excepted.
    pub(crate) fn plan(&self) -> Option<Plan> {
        match self.state {
            State::SynSent => self.plan_syn(),
            State::SynReceived => self.plan_syn().or_else(|| self.plan_early()),
            State::Closed | State::TimeWait => None,
            _ => {
                let probe = self.plan_tail_probe();
                if probe.is_some() {
                    return probe;
                }
                let data = if self.pacing.is_held { None } else { self.plan_data() };
                if data.is_some() { data } else { self.plan_probe() }
            }
        }
    }

    /// The next data, regardless of pacing.
    #[inline(always)]
    fn plan_data(&self) -> Option<Plan> {
        let lost = self.plan_lost();
        if lost.is_some() { lost } else { self.plan_new() }
    }

    /// Whether there is data to send, regardless of pacing.
    #[inline(never)]
    pub(crate) fn has_data_to_send(&self) -> bool {
        self.plan_data().is_some()
    }

    fn plan_syn(&self) -> Option<Plan> {
        let end = self.syn_payload_bytes().saturating_add(1) as u64;
        let bytes = self.records.end_within(1, end).saturating_sub(1) as usize;
        self.due.syn.then_some(Plan { pos: 0, bytes, fin: false, kind: SegmentKind::Syn })
    }

    /// New data of a Fast Open server before the handshake completes (RFC 7413 section 4.2.2): at most an initial
    /// window, since nothing is acknowledged yet.
    fn plan_early(&self) -> Option<Plan> {
        let may_send = self.is_open_early() && self.snd.nxt > 0 && !self.pacing.is_held;
        if may_send { self.plan_new() } else { None }
    }

    /// Whether there are SACK blocks to report.
    #[inline]
    pub(crate) fn has_blocks(&self) -> bool {
        self.sack_on && (self.recv.out_of_order_bytes() > 0 || self.dsack_due.is_some())
    }

    /// Whether the next data segment reports SACK blocks: it carries an ACK that is due, as one is after each change of
    /// the blocks. In every segment they would forbid super-segments for as long as a peer leaves a gap open.
    #[inline]
    pub(crate) fn data_reports_blocks(&self) -> bool {
        self.has_blocks() && self.ack_due()
    }

    /// Payload of a full segment: less than `mss` while SACK blocks or counters of ECN are to be reported.
    #[inline]
    pub(crate) fn full_segment_bytes(&self) -> usize {
        if self.data_reports_blocks() || self.is_ecn_option_due() {
            return self.segment_bytes.saturating_sub(40).max(1);
        }
        self.mss as usize
    }

    /// Payload of the largest segment to emit: a whole number of full segments. A single one while
    /// options are to be reported, since segmentation would repeat them in every packet. A paced
    /// connection has smaller ones.
    #[inline]
    fn largest_payload_bytes(&self, full: usize) -> usize {
        if full < self.mss as usize || self.ecn_forbids_offload() {
            full
        } else {
            self.super_bytes.min(self.pacing.quantum_bytes).max(full)
        }
    }

    fn send_space(&self) -> SendSpace {
        // A SYN in flight is one position, but uses neither window.
        let syn = u64::from(self.snd.una == 0);
        let edge = self.snd.una.saturating_add(self.snd.wnd).saturating_add(syn);
        SendSpace {
            window: edge.saturating_sub(self.snd.nxt),
            congestion: self.congestion.cwnd().saturating_add(syn).saturating_sub(self.pipe()),
        }
    }

    fn plan_new(&self) -> Option<Plan> {
        if !self.has_unsent() {
            return None;
        }
        let unsent = self.send_end().saturating_sub(self.snd.nxt);
        let space = self.send_space();
        if unsent == 0 {
            return (space.window > 0).then(|| self.plan_bytes(0, unsent, &space));
        }
        let in_record = self.unsent_in_record();
        if self.mtu_search.is_due() {
            match self.plan_mtu_probe(in_record, space.window.min(space.congestion)) {
                ProbeStep::No => {}
                ProbeStep::Wait => return None,
                ProbeStep::Send(bytes) => {
                    let kind = SegmentKind::MtuProbe;
                    return Some(Plan { pos: self.snd.nxt, bytes, fin: false, kind });
                }
            }
        }
        let full = self.full_segment_bytes();
        let want = in_record.min(self.largest_payload_bytes(full) as u64);
        if in_record == unsent && self.awaits_announced_data(want, full) {
            return None;
        }
        let bytes = if space.window.min(space.congestion) >= want {
            self.without_held_partial(want, full as u64)
        } else {
            self.whole_segments(want, &space, full as u64)
        };
        (bytes > 0).then(|| self.plan_bytes(bytes, unsent, &space))
    }

    /// Unsent bytes up to the end of a record, which one segment may have.
    #[inline]
    fn unsent_in_record(&self) -> u64 {
        self.records.end_within(self.snd.nxt, self.send_end()).saturating_sub(self.snd.nxt)
    }

    /// New data as a tail loss probe: one segment, regardless of the congestion window.
    pub(crate) fn plan_new_probe(&self) -> Option<Plan> {
        if !self.can_send_new() {
            return None;
        }
        let unsent = self.send_end().saturating_sub(self.snd.nxt);
        let bytes = self.unsent_in_record().min(self.full_segment_bytes() as u64);
        (bytes > 0).then(|| self.plan_bytes(bytes, unsent, &self.send_space()))
    }

    /// Whether there is a new segment to send that the peer's window admits.
    pub(crate) fn can_send_new(&self) -> bool {
        let want = self.unsent_in_record().min(self.full_segment_bytes() as u64);
        self.has_unsent() && !self.is_corked() && self.send_space().window >= want
    }

    /// Whether to wait for announced data: [`Tcb::set_more_announced`] was called, something was sent since,
    /// and the rest does not fill a segment of the largest size.
    fn awaits_announced_data(&self, want: u64, full: usize) -> bool {
        self.user.more_from.is_some_and(|from| self.snd.nxt > from)
            && !self.cfg.nodelay
            && !self.fin_ready()
            && want < self.largest_payload_bytes(full) as u64
    }

    /// The FIN goes with the last segment, but never with a super-segment.
    fn plan_bytes(&self, bytes: u64, unsent: u64, space: &SendSpace) -> Plan {
        let last = bytes == unsent && bytes <= self.full_segment_bytes() as u64;
        let fin = last && space.window > bytes && self.fin_ready();
        Plan { pos: self.snd.nxt, bytes: bytes as usize, fin, kind: SegmentKind::New }
    }

    /// Both windows admit `want` bytes. A partial segment at the end is sent only if it ends a record, or
    /// empties the queue and is not held back.
    fn without_held_partial(&self, want: u64, full: u64) -> u64 {
        let (_, fraction) = div_rem(want, full);
        let end = self.snd.nxt.saturating_add(want);
        let is_last = end == self.send_end();
        let hold_back = fraction > 0
            && if is_last { self.holds_back_partial() } else { !self.records.ends_at(end) };
        if hold_back { want.saturating_sub(fraction) } else { want }
    }

    /// Whether to hold back a partial segment: Nagle (RFC 9293 section 3.7.4), cork, and claimed
    /// bytes about to be committed.
    ///
    /// Nagle's algorithm waits while anything is unacknowledged. Here a partial segment waits only
    /// for an ACK that is sure to come: while two full segments were in flight before this call of
    /// output (the peer must acknowledge every second one), or while a small segment is
    /// unacknowledged (Minshall's variant, as Linux). So a stream of large writes is sent in full
    /// segments, and the tail of a single message never waits for a delayed ACK.
    pub(crate) fn holds_back_partial(&self) -> bool {
        if self.fin_ready() {
            return false;
        }
        if self.user.cork || self.user.msg_more {
            return !self.user.cork_expired;
        }
        if self.flight() > 0 && self.send.claimed_end() > self.send.ready_end() {
            return true;
        }
        if self.cfg.nodelay {
            return false;
        }
        let before = self.send_marks.burst_start.saturating_sub(self.snd.una);
        before >= u64::from(self.mss).saturating_mul(2) || self.send_marks.small_end > self.snd.una
    }

    /// Whether cork or MSG_MORE is in effect and the cork timer has not expired.
    #[inline]
    pub(crate) fn is_corked(&self) -> bool {
        (self.user.cork || self.user.msg_more) && !self.user.cork_expired
    }

    /// The windows do not admit `want`: whole segments, subject to silly window avoidance.
    fn whole_segments(&self, want: u64, space: &SendSpace, full: u64) -> u64 {
        let usable = space.window.min(space.congestion).min(want);
        let whole = usable.saturating_sub(div_rem(usable, full).1);
        if whole > 0 {
            return if self.defers_small_part(whole, want) { 0 } else { whole };
        }
        // A window smaller than a segment: silly window avoidance (RFC 9293 section 3.8.6.2.1).
        // Send at least half of the largest window ever offered, or anything once the override
        // (persist) timer has expired.
        let worth = usable.saturating_mul(2) >= self.snd.max_wnd || self.due.probe;
        if worth && space.window < full && space.congestion >= usable { usable } else { 0 }
    }

    /// Whether to wait for more window rather than send a small part of a large super-segment
    /// (Linux: TSO deferral). Only while at least three quarters of the window are in flight, so
    /// that ACKs are sure to come, and not in recovery, where each ACK admits a segment or two.
    fn defers_small_part(&self, whole: u64, want: u64) -> bool {
        if !self.sacked.is_clean() {
            return false;
        }
        let window = self.congestion.cwnd().min(self.snd.wnd);
        // A segment of a millisecond of the rate is sent, as on Linux. Otherwise, on a long path, a
        // quarter of the window would stay unused and leave in bursts.
        let srtt_us = self.rtt.srtt_us();
        if whole.saturating_mul(srtt_us) >= window.saturating_mul(1000) {
            return false;
        }
        let threshold = (self.super_bytes as u64 / 2).min(window / 4).min(want);
        whole < threshold && self.flight() > 0 && !self.due.probe
    }

    /// A probe with sequence number `snd.una - 1`, as Linux sends: it is out of window, so the peer
    /// answers with an ACK and its window. RFC 9293 section 3.8.6.1 asks for a byte of new data,
    /// which would have to be tracked if accepted; the answer is the same. With nothing in flight
    /// it is also the keepalive probe of section 3.8.4.
    fn plan_probe(&self) -> Option<Plan> {
        let pos = self.snd.una.saturating_sub(1);
        self.due.probe.then_some(Plan { pos, bytes: 0, fin: false, kind: SegmentKind::Probe })
    }

    /// After output: records whether the connection is cwnd-limited (RFC 9438 section 5.8: cwnd
    /// grows only then).
    pub(crate) fn record_cwnd_limited(&mut self) {
        let cwnd = self.congestion.cwnd();
        let starting = self.congestion.in_slow_start() && self.flight().saturating_mul(2) >= cwnd;
        if starting || self.is_cwnd_limited() {
            self.send_marks.cwnd_limited_end = self.snd.nxt;
        }
        if self.delivery.is_on() && self.is_cwnd_limited() {
            self.send_marks.full_end = self.snd.nxt;
        }
    }

    fn is_cwnd_limited(&self) -> bool {
        let unsent = self.send_end().saturating_sub(self.snd.nxt);
        if unsent == 0 {
            return false;
        }
        let space = self.send_space();
        let want = unsent.min(self.super_bytes as u64);
        space.congestion < want && space.congestion <= space.window
    }

    /// Starts or stops the retransmit, persist, cork and pacing timers according to the data in flight and
    /// unsent.
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
        if self.pacing.is_held {
            self.arm_pacing();
        }
    }

    /// Nothing is in flight: persist if the peer's window holds data back.
    fn rearm_idle(&mut self, now: Instant) {
        let waits = self.is_synchronized() && self.has_unsent();
        let nothing = || !self.due.probe && !self.has_data_to_send();
        if waits && !self.is_corked() && nothing() {
            if !self.persisting {
                self.persisting = true;
                self.note_progress(now);
                self.timers.stop(Timer::Retransmit);
            }
            if !self.timers.is_running(Timer::Retransmit) {
                let mut at = later(now, self.rtt.rto());
                if self.user.timeout.is_some() {
                    at = self.capped_by_user_timeout(now, at);
                }
                self.timers.set(Timer::Retransmit, at);
            }
        } else if !self.due.probe {
            self.persisting = false;
            self.timers.stop(Timer::Retransmit);
        }
    }
}
