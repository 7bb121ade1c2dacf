//! One TCP connection of the modelled peer, from its end of RFC 9293.

mod output;
mod set;

use std::net::IpAddr;

use fulmar_stack::base::{Duration, Instant, SeqNum};
use fulmar_stack::wire::tcp::{Flags, Header};

use super::{Arrival, FarEnd, Out, Service, verify};
use crate::frame::{Addresses, Headers, packets};
use crate::meter::bump;
pub use output::refuse;
pub use set::Set;

/// Runs of bytes behind gaps that are remembered; what lies in further ones comes again.
const MAX_GAPS: usize = 16;
/// Time without progress after which something is sent again, and its limit when doubled.
const RESEND: Duration = Duration::from_millis(200);
const MAX_DOUBLINGS: u32 = 8;
/// Repetitions without any answer after which the connection is forgotten.
const MAX_TRIES: u32 = 12;
/// Payload of the largest train, whatever its headers are.
const TRAIN_BYTES: usize = 65_160;
/// Largest window shift (RFC 7323 section 2.3).
const MAX_SHIFT: u8 = 14;

/// Both ends, seen from the peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key {
    pub local: (IpAddr, u16),
    pub remote: (IpAddr, u16),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    SynSent,
    SynReceived,
    Open,
    /// Reset, or given up.
    Gone,
}

/// See the module's header.
pub struct Conn {
    ends: Addresses,
    key: Key,
    service: Service,
    state: State,
    // Receiving. `rcv_off` is the offset in the stream of `rcv_nxt`.
    rcv_nxt: SeqNum,
    rcv_off: u64,
    fin_received: bool,
    /// Sorted runs behind gaps, not touching each other.
    gaps: Vec<(SeqNum, SeqNum)>,
    /// The last run that grew.
    newest: Option<(SeqNum, SeqNum)>,
    /// Neither side scales its window: one of them did not offer to.
    is_unscaled: bool,
    unacked_bytes: u32,
    unacked_packets: u32,
    owes_ack: bool,
    /// When an ACK that waits for more goes at the latest.
    ack_at: Option<Instant>,
    ts_recent: u32,
    last_ack_sent: SeqNum,
    // Sending. `una_off` and `nxt_off` are the offsets of `snd_una` and `snd_nxt`, the FIN left out.
    snd_una: SeqNum,
    snd_nxt: SeqNum,
    una_off: u64,
    nxt_off: u64,
    /// Where the stream ends that there is to send.
    end_off: u64,
    fin_sent: bool,
    snd_wnd: u32,
    snd_shift: u8,
    mss: usize,
    dup_acks: u32,
    /// Repairing a loss until here.
    recover: Option<SeqNum>,
    resend_at: Option<Instant>,
    tries: u32,
    has_timestamps: bool,
    has_sack: bool,
    /// When the last packet came: answers leave no earlier.
    at: Instant,
    pub is_touched: bool,
    /// It would send more, but the lane is full.
    pub is_hungry: bool,
    pub is_listed: bool,
}

fn largest_payload(mtu: usize, address: IpAddr) -> usize {
    mtu.saturating_sub(if address.is_ipv4() { 40 } else { 60 }).max(1)
}

/// The least shift with which a window fits 16 bits.
fn shift_for(window_bytes: u32) -> u8 {
    (0..MAX_SHIFT).find(|s| window_bytes >> s <= 0xffff).unwrap_or(MAX_SHIFT)
}

// How a connection begins.
impl Conn {
    fn new(ends: Addresses, key: Key, service: Service, iss: u32, mtu: usize) -> Conn {
        let end_off = if let Service::Generate { bytes } = service { bytes } else { 0 };
        Conn {
            ends,
            key,
            service,
            state: State::SynSent,
            rcv_nxt: SeqNum(0),
            rcv_off: 0,
            fin_received: false,
            gaps: Vec::with_capacity(MAX_GAPS),
            newest: None,
            is_unscaled: false,
            unacked_bytes: 0,
            unacked_packets: 0,
            owes_ack: false,
            ack_at: None,
            ts_recent: 0,
            last_ack_sent: SeqNum(0),
            snd_una: SeqNum(iss),
            snd_nxt: SeqNum(iss) + 1,
            una_off: 0,
            nxt_off: 0,
            end_off,
            fin_sent: false,
            snd_wnd: 0,
            snd_shift: 0,
            mss: largest_payload(mtu, ends.dst),
            dup_acks: 0,
            recover: None,
            resend_at: None,
            tries: 0,
            has_timestamps: false,
            has_sack: false,
            at: Instant::ZERO,
            is_touched: false,
            is_hungry: false,
            is_listed: false,
        }
    }

    /// Answers a SYN.
    pub fn accept(
        ends: Addresses,
        key: Key,
        syn: &Header,
        service: Service,
        iss: u32,
        mtu: usize,
        config: &FarEnd,
    ) -> Conn {
        let mut c = Conn::new(ends, key, service, iss, mtu);
        c.state = State::SynReceived;
        c.learn(syn, config);
        c
    }

    /// Opens a connection.
    pub fn connect(
        ends: Addresses,
        key: Key,
        service: Service,
        iss: u32,
        mtu: usize,
        config: &FarEnd,
    ) -> Conn {
        let mut c = Conn::new(ends, key, service, iss, mtu);
        (c.has_timestamps, c.has_sack) = (config.timestamps, config.sack);
        c
    }

    /// Takes the fields of the other side's SYN.
    fn learn(&mut self, syn: &Header, config: &FarEnd) {
        self.rcv_nxt = syn.seq + 1;
        self.has_timestamps = config.timestamps && syn.options.timestamps.is_some();
        self.has_sack = config.sack && syn.options.sack_permitted;
        self.ts_recent = syn.options.timestamps.map_or(0, |t| t.value);
        self.snd_shift = syn.options.window_scale.map_or(0, |s| s.min(MAX_SHIFT));
        // A SYN's own window is never scaled.
        self.snd_wnd = u32::from(syn.window);
        let offered = usize::from(syn.options.mss.unwrap_or(536)).max(64);
        self.mss = self.mss.min(offered) - if self.has_timestamps { 12 } else { 0 };
        self.is_unscaled = syn.options.window_scale.is_none();
    }

    pub fn key(&self) -> Key {
        self.key
    }

    /// Nothing leaves earlier than now.
    pub fn catch_up(&mut self, now: Instant) {
        self.at = self.at.max(now);
    }

    /// Whether a SYN for the same addresses begins a new connection, which this one gives way to.
    pub fn is_replaced_by(&self, syn: &Header) -> bool {
        self.is_over() || (self.state == State::Open && syn.seq + 1 != self.rcv_nxt)
    }

    /// Both sides have closed and know it, or the connection is lost.
    pub fn is_over(&self) -> bool {
        let both = self.fin_received && self.fin_sent && self.snd_una == self.snd_nxt;
        self.state == State::Gone || both
    }
}

// Segments on their way in.
impl Conn {
    /// Takes a segment, or a train of them.
    pub fn input(
        &mut self,
        a: &Arrival<'_>,
        seen: &Headers,
        h: &Header,
        config: &FarEnd,
        out: &mut Out<'_>,
    ) {
        self.at = self.at.max(a.at);
        if h.flags.contains(Flags::RST) {
            return self.reset(h);
        }
        if h.flags.contains(Flags::SYN) {
            return self.syn(h, config, out);
        }
        if self.state == State::SynSent || !h.flags.contains(Flags::ACK) {
            return;
        }
        self.note_timestamp(h);
        self.acknowledged(h, seen.payload_bytes, config, out);
        if seen.payload_bytes > 0 && self.state == State::Open {
            self.payload(a, seen, h, config, out);
        }
        if h.flags.contains(Flags::FIN) && self.state == State::Open {
            self.fin(h.seq + seen.payload_bytes as u32);
        }
        if self.is_ack_due(config) {
            self.send_ack(config, out);
        }
    }

    /// A reset at the next expected sequence number, or one that answers our SYN.
    fn reset(&mut self, h: &Header) {
        let answers_syn = self.state == State::SynSent && h.ack == self.snd_nxt;
        if answers_syn || h.seq == self.rcv_nxt {
            self.state = State::Gone;
        }
    }

    fn syn(&mut self, h: &Header, config: &FarEnd, out: &mut Out<'_>) {
        match self.state {
            State::SynSent if h.flags.contains(Flags::ACK) && h.ack == self.snd_nxt => {
                self.learn(h, config);
                self.open();
                self.owes_ack = true;
            }
            State::SynReceived => self.send_syn(config, out),
            State::Open => self.owes_ack = true,
            _ => {}
        }
    }

    fn open(&mut self) {
        self.state = State::Open;
        self.snd_una = self.snd_nxt;
        self.last_ack_sent = self.rcv_nxt;
        self.settle();
    }

    /// RFC 7323 section 4.3: the stamp of the segment that the last ACK asked for.
    fn note_timestamp(&mut self, h: &Header) {
        if let Some(t) = h.options.timestamps
            && h.seq.before_eq(self.last_ack_sent)
            && (t.value.wrapping_sub(self.ts_recent) as i32) >= 0
        {
            self.ts_recent = t.value;
        }
    }

    /// The ACK field: RFC 9293 section 3.10.7.4, fifth step.
    fn acknowledged(&mut self, h: &Header, payload: usize, config: &FarEnd, out: &mut Out<'_>) {
        if h.ack.after(self.snd_nxt) || h.ack.before(self.snd_una) {
            self.owes_ack |= h.ack.after(self.snd_nxt);
            return;
        }
        if self.state == State::SynReceived {
            if h.ack != self.snd_nxt {
                return;
            }
            self.open();
        }
        let window = u32::from(h.window) << if self.is_unscaled { 0 } else { self.snd_shift };
        let is_news = window != self.snd_wnd || payload > 0 || h.flags.contains(Flags::FIN);
        self.snd_wnd = window;
        if h.ack != self.snd_una {
            self.advance(h.ack, config, out);
        } else if !is_news && self.snd_una != self.snd_nxt {
            self.duplicate(config, out);
        }
    }

    fn advance(&mut self, ack: SeqNum, config: &FarEnd, out: &mut Out<'_>) {
        let is_fin_acked = self.fin_sent && ack == self.snd_nxt;
        self.una_off += u64::from(ack.since(self.snd_una)) - u64::from(is_fin_acked);
        self.snd_una = ack;
        self.settle();
        self.dup_acks = 0;
        if let Some(recover) = self.recover {
            if ack.after_eq(recover) {
                self.recover = None;
            } else {
                // RFC 6582 section 3.2: a partial ACK shows the next gap.
                self.resend(config, out);
            }
        }
    }

    /// Progress: what is still out gets its time anew.
    fn settle(&mut self) {
        self.tries = 0;
        self.resend_at = None;
        if self.snd_una != self.snd_nxt {
            self.arm();
        }
    }

    fn duplicate(&mut self, config: &FarEnd, out: &mut Out<'_>) {
        self.dup_acks += 1;
        if self.dup_acks == 3 && self.recover.is_none() {
            self.recover = Some(self.snd_nxt);
            self.resend(config, out);
        }
    }

    /// Payload: RFC 9293 section 3.10.7.4, seventh step.
    fn payload(
        &mut self,
        a: &Arrival<'_>,
        seen: &Headers,
        h: &Header,
        config: &FarEnd,
        out: &mut Out<'_>,
    ) {
        let bytes = seen.payload_bytes as u32;
        let end = h.seq + bytes;
        let known = self.rcv_nxt.since(h.seq).min(bytes);
        bump(&out.board.counts.peer_repeated_bytes_in, u64::from(known));
        let limit = self.rcv_nxt + config.window_bytes;
        if known == bytes || end.after(limit) || self.fin_received {
            self.owes_ack = true;
            return;
        }
        if config.verify {
            let ahead = u64::from(h.seq.since(self.rcv_nxt));
            let at = seen.payload_at + known as usize;
            verify(a, at, (bytes - known) as usize, self.rcv_off + ahead, out);
        }
        if h.seq.after(self.rcv_nxt) {
            self.keep(h.seq, end);
            self.owes_ack = true;
            return;
        }
        self.unacked_packets += packets(a.chain.len(), a.gso) as u32;
        self.deliver(end, out);
    }

    /// The stream is complete up to `end`, and further where a run follows.
    fn deliver(&mut self, end: SeqNum, out: &mut Out<'_>) {
        let mut upto = end;
        if !self.gaps.is_empty() {
            // RFC 5681 section 4.2: what fills a gap is acknowledged at once.
            self.owes_ack = true;
            while let Some(&(left, right)) = self.gaps.first()
                && left.before_eq(upto)
            {
                upto = upto.max(right);
                self.gaps.remove(0);
            }
            self.newest = None;
        }
        let fresh = upto.since(self.rcv_nxt);
        self.rcv_nxt = upto;
        self.rcv_off += u64::from(fresh);
        self.unacked_bytes = self.unacked_bytes.saturating_add(fresh);
        bump(&out.board.counts.peer_bytes_in, u64::from(fresh));
        if let Service::Respond { request, response } = self.service {
            self.end_off = (self.rcv_off / u64::from(request.max(1))) * u64::from(response);
        }
    }

    /// Remembers a run behind a gap.
    fn keep(&mut self, left: SeqNum, right: SeqNum) {
        let (mut left, mut right) = (left, right);
        self.gaps.retain(|&(l, r)| {
            let touches = l.before_eq(right) && r.after_eq(left);
            if touches {
                (left, right) = (left.min(l), right.max(r));
            }
            !touches
        });
        self.newest = None;
        if self.gaps.len() < MAX_GAPS {
            let at = self.gaps.iter().take_while(|(l, _)| l.before(left)).count();
            self.gaps.insert(at, (left, right));
            self.newest = Some((left, right));
        }
    }

    fn fin(&mut self, at: SeqNum) {
        if at != self.rcv_nxt || self.fin_received {
            self.owes_ack = true;
            return;
        }
        self.fin_received = true;
        self.rcv_nxt += 1;
        self.owes_ack = true;
    }

    /// Whether the rule requires an ACK before the burst ends. Each gap is acknowledged at once.
    fn is_ack_due(&self, config: &FarEnd) -> bool {
        let rule = config.ack;
        let by_bytes = rule.bytes > 0 && self.unacked_bytes >= rule.bytes;
        let by_packets = rule.packets > 0 && self.unacked_packets >= rule.packets;
        by_bytes || by_packets || (self.owes_ack && !self.gaps.is_empty())
    }
}
