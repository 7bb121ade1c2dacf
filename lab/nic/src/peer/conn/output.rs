//! Outgoing segments: SYN, data, ACK, FIN, and retransmissions.

use fulmar_stack::base::{Gso, Instant, SeqNum};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::tcp::{CHECKSUM_OFFSET, Flags, Header, Options, SackBlocks, Timestamps};
use fulmar_stack::wire::{eth, protocol};

use super::{
    Conn, FarEnd, MAX_DOUBLINGS, MAX_TRIES, Out, RESEND, Service, State, TRAIN_BYTES, shift_for,
};
use crate::frame::{Addresses, HeaderBuf, Headers, Rest, WireFrame, tcp_kind};
use crate::meter::bump;

/// One segment, or train of segments, to be made.
#[derive(Clone, Copy)]
struct Segment {
    flags: Flags,
    seq: SeqNum,
    /// Stream offset and length of the payload.
    off: u64,
    bytes: usize,
}

impl Segment {
    fn bare(flags: Flags, seq: SeqNum) -> Segment {
        Segment { flags, seq, off: 0, bytes: 0 }
    }
}

// The beginning, and the timer.
impl Conn {
    /// Sends the first segment.
    pub fn start(&mut self, at: Instant, config: &FarEnd, out: &mut Out<'_>) {
        self.at = at;
        self.send_syn(config, out);
    }

    pub(super) fn send_syn(&mut self, config: &FarEnd, out: &mut Out<'_>) {
        let ack = if self.state == State::SynReceived { Flags::ACK } else { Flags::default() };
        self.put(Segment::bare(Flags::SYN | ack, self.snd_nxt - 1), config, out);
        self.arm();
    }

    /// Whatever is out is due again after a while.
    pub(super) fn arm(&mut self) {
        self.resend_at = Some(self.at + RESEND * (1 << self.tries.min(MAX_DOUBLINGS)));
    }

    /// When [`Conn::on_timer`] has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        let due = [self.resend_at, self.ack_at].into_iter().flatten().min();
        due.filter(|_| self.state != State::Gone)
    }

    /// Retransmits overdue segments, or probes a window that stays closed.
    pub fn on_timer(&mut self, now: Instant, config: &FarEnd, out: &mut Out<'_>) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        self.at = self.at.max(now);
        if self.ack_at.take_if(|at| *at <= now).is_some() {
            self.send_ack(config, out);
        }
        if self.resend_at.is_none_or(|at| at > now) {
            return;
        }
        if !out.rx.lane.is_empty() {
            // The host has not taken what was sent: nothing is lost yet.
            return self.arm();
        }
        self.tries += 1;
        if self.tries > MAX_TRIES {
            self.state = State::Gone;
            return;
        }
        self.arm();
        match self.state {
            State::Gone => {}
            State::SynSent | State::SynReceived => self.send_syn(config, out),
            State::Open if self.snd_una == self.snd_nxt => {
                // A number below the window makes the other side tell its window.
                self.put(Segment::bare(Flags::ACK, self.snd_una - 1), config, out);
            }
            State::Open => {
                self.recover = Some(self.snd_nxt);
                self.resend(config, out);
            }
        }
    }
}

// Data, and what closes it.
impl Conn {
    /// The end of a burst: sends the data that the window allows, and the pending ACK unless a segment carried it.
    pub fn answer(&mut self, config: &FarEnd, out: &mut Out<'_>) {
        if self.state != State::Open {
            return;
        }
        self.pump(config, out);
        if self.owes_ack || (self.unacked_bytes > 0 && config.ack.wait.is_zero()) {
            self.send_ack(config, out);
        } else if self.unacked_bytes > 0 {
            self.ack_at.get_or_insert(self.at + config.ack.wait);
        }
    }

    /// Sends as much of the stream as window and lane have space for, then the FIN.
    pub fn pump(&mut self, config: &FarEnd, out: &mut Out<'_>) {
        self.is_hungry = false;
        if self.state != State::Open || self.fin_sent {
            return;
        }
        loop {
            let n = self.sendable();
            if n == 0 {
                break;
            }
            if !out.has_space() {
                self.is_hungry = true;
                return;
            }
            self.send_data(n, config, out);
        }
        if self.nxt_off == self.end_off && self.may_close() {
            self.fin_sent = true;
            self.snd_nxt += 1;
            self.put(Segment::bare(Flags::FIN | Flags::ACK, self.snd_nxt - 1), config, out);
            self.arm();
        } else if self.nxt_off < self.end_off && self.snd_una == self.snd_nxt {
            // The window is closed, and its opening may be lost.
            self.resend_at = self.resend_at.or(Some(self.at + RESEND));
        }
    }

    fn may_close(&self) -> bool {
        match self.service {
            Service::Generate { .. } => true,
            Service::Discard | Service::Respond { .. } => self.fin_received,
        }
    }

    /// Bytes of the next train: whole segments, unless they are the last of the stream or nothing
    /// else is on its way (the sender's side of silly window avoidance, RFC 9293 section 3.8.6.2.1).
    fn sendable(&self) -> usize {
        let in_flight = self.snd_nxt.since(self.snd_una);
        let window = self.snd_wnd.saturating_sub(in_flight) as usize;
        let left = usize::try_from(self.end_off - self.nxt_off).unwrap_or(usize::MAX);
        let n = left.min(window).min(TRAIN_BYTES);
        if n == left || n < self.mss {
            let is_last = n == left;
            return if is_last || in_flight == 0 { n } else { 0 };
        }
        n / self.mss * self.mss
    }

    fn send_data(&mut self, bytes: usize, config: &FarEnd, out: &mut Out<'_>) {
        let seg = Segment { flags: Flags::ACK, seq: self.snd_nxt, off: self.nxt_off, bytes };
        bump(&out.board.counts.peer_bytes_out, bytes as u64);
        self.snd_nxt += bytes as u32;
        self.nxt_off += bytes as u64;
        if self.resend_at.is_none() {
            self.arm();
        }
        self.put_train(seg, config, out);
    }

    /// Sends the first unacknowledged segment again.
    pub(super) fn resend(&mut self, config: &FarEnd, out: &mut Out<'_>) {
        let left = (self.nxt_off - self.una_off).min(self.mss as u64) as usize;
        if left == 0 {
            let fin = Segment::bare(Flags::FIN | Flags::ACK, self.snd_una);
            return self.put(fin, config, out);
        }
        bump(&out.board.counts.peer_resent_bytes, left as u64);
        let seg = Segment { flags: Flags::ACK, seq: self.snd_una, off: self.una_off, bytes: left };
        self.put_train(seg, config, out);
    }

    /// Sends payload as one train where the NIC takes trains, else packet by packet.
    fn put_train(&mut self, mut seg: Segment, config: &FarEnd, out: &mut Out<'_>) {
        let headers = if self.ends.src.is_ipv4() { 20 } else { 40 } + 32;
        let whole = out.rx.takes_trains().map_or(0, |l| l.saturating_sub(headers));
        let unit = (whole / self.mss).max(1) * self.mss;
        while seg.bytes > 0 {
            let n = seg.bytes.min(unit);
            let is_last = n == seg.bytes && seg.off + n as u64 == self.end_off;
            let flags = if is_last { seg.flags | Flags::PSH } else { seg.flags };
            self.put(Segment { flags, bytes: n, ..seg }, config, out);
            seg = Segment { seq: seg.seq + n as u32, off: seg.off + n as u64, ..seg };
            seg.bytes -= n;
        }
    }

    pub(super) fn send_ack(&mut self, config: &FarEnd, out: &mut Out<'_>) {
        bump(&out.board.counts.peer_acks_out, 1);
        if self.unacked_bytes == 0 || !self.gaps.is_empty() {
            bump(&out.board.counts.peer_duplicate_acks_out, 1);
        }
        self.put(Segment::bare(Flags::ACK, self.snd_nxt), config, out);
    }

    /// Tells the other side that the connection is gone.
    pub fn send_reset(&mut self, at: Instant, config: &FarEnd, out: &mut Out<'_>) {
        self.at = self.at.max(at);
        self.put(Segment::bare(Flags::RST | Flags::ACK, self.snd_nxt), config, out);
        bump(&out.board.counts.peer_resets_out, 1);
        self.state = State::Gone;
    }
}

// Headers.
impl Conn {
    fn put(&mut self, seg: Segment, config: &FarEnd, out: &mut Out<'_>) {
        let h = self.header(&seg, config);
        let l4_bytes = h.header_bytes();
        let Some(mut buf) = HeaderBuf::ip(&self.ends, protocol::TCP, l4_bytes + seg.bytes) else {
            return;
        };
        if h.emit(buf.l4_mut()).is_err() {
            return;
        }
        seal(&mut buf, &self.ends, l4_bytes, seg.bytes);
        let rest = match (seg.bytes, config.verify) {
            (0, _) => Rest::None,
            (n, true) => Rest::Pattern(seg.off, n),
            (n, false) => Rest::Untouched(n),
        };
        let mut frame = WireFrame::new(buf.with_l4(l4_bytes), rest);
        if seg.bytes > 0 {
            frame.partial_csum = Some((buf.l4() as u16, CHECKSUM_OFFSET as u16));
        }
        if seg.bytes > self.mss {
            frame.gso = Some(Gso {
                kind: tcp_kind(self.ends.src),
                segment_bytes: self.mss as u16,
                header_bytes: (buf.l4() + l4_bytes) as u16,
                ecn: false,
            });
        }
        if h.flags.contains(Flags::ACK) {
            (self.unacked_bytes, self.unacked_packets, self.owes_ack) = (0, 0, false);
            self.ack_at = None;
            self.last_ack_sent = self.rcv_nxt;
        }
        out.send(self.at, frame);
    }

    fn header(&self, seg: &Segment, config: &FarEnd) -> Header {
        let is_syn = seg.flags.contains(Flags::SYN);
        let shift = if is_syn || self.is_unscaled { 0 } else { shift_for(config.window_bytes) };
        let window = (config.window_bytes >> shift).min(0xffff) as u16;
        let has_ack = seg.flags.contains(Flags::ACK);
        Header {
            src_port: self.key.local.1,
            dst_port: self.key.remote.1,
            seq: seg.seq,
            ack: if has_ack { self.rcv_nxt } else { SeqNum(0) },
            flags: seg.flags,
            window,
            urgent: 0,
            options: if is_syn { self.syn_options(config) } else { self.options() },
        }
    }

    fn timestamps(&self) -> Option<Timestamps> {
        let value = self.at.as_millis_u32();
        self.has_timestamps.then_some(Timestamps { value, echo: self.ts_recent })
    }

    fn syn_options(&self, config: &FarEnd) -> Options {
        let full =
            self.mss + if self.has_timestamps && self.state == State::SynReceived { 12 } else { 0 };
        Options {
            mss: Some(u16::try_from(full).unwrap_or(u16::MAX)),
            window_scale: (!self.is_unscaled).then(|| shift_for(config.window_bytes)),
            sack_permitted: self.has_sack,
            timestamps: self.timestamps(),
            ..Options::default()
        }
    }

    /// RFC 2018 section 4: the block that contains the latest arrival comes first.
    fn options(&self) -> Options {
        let mut sack = SackBlocks::default();
        if self.has_sack {
            let others = self.gaps.iter().copied().filter(|r| Some(*r) != self.newest);
            let all = self.newest.into_iter().chain(others);
            all.take(SackBlocks::MAX).for_each(|(left, right)| {
                sack.push(left, right);
            });
        }
        Options { timestamps: self.timestamps(), sack, ..Options::default() }
    }
}

/// The checksum: whole where there is no payload, else that of the pseudo header only.
fn seal(buf: &mut HeaderBuf, ends: &Addresses, l4_bytes: usize, payload: usize) {
    let mut sum = Sum::new();
    sum.add_pseudo(ends.src, ends.dst, protocol::TCP, (l4_bytes + payload) as u32);
    let Some(l4) = buf.l4_mut().get_mut(..l4_bytes) else { return };
    let value = if payload == 0 {
        sum.add_bytes(l4);
        sum.finish()
    } else {
        sum.fold()
    };
    if let Some(field) = l4.get_mut(CHECKSUM_OFFSET..CHECKSUM_OFFSET + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

/// Answers a segment for no connection with a reset (RFC 9293 section 3.10.7.1).
pub fn refuse(ends: &Addresses, at: Instant, h: &Header, seen: &Headers, out: &mut Out<'_>) {
    if h.flags.contains(Flags::RST) || !out.has_space() {
        return;
    }
    let length = seen.payload_bytes as u32
        + u32::from(h.flags.contains(Flags::SYN))
        + u32::from(h.flags.contains(Flags::FIN));
    let (flags, seq, ack) = if h.flags.contains(Flags::ACK) {
        (Flags::RST, h.ack, SeqNum(0))
    } else {
        (Flags::RST | Flags::ACK, SeqNum(0), h.seq + length)
    };
    let reply =
        Header { src_port: h.dst_port, dst_port: h.src_port, seq, ack, flags, ..Header::default() };
    let l4_bytes = reply.header_bytes();
    let Some(mut buf) = HeaderBuf::ip(ends, protocol::TCP, l4_bytes) else { return };
    if reply.emit(buf.l4_mut()).is_ok() && buf.l4() > eth::HEADER_BYTES {
        seal(&mut buf, ends, l4_bytes, 0);
        bump(&out.board.counts.peer_resets_out, 1);
        out.send(at, WireFrame::new(buf.with_l4(l4_bytes), Rest::None));
    }
}
