//! The transmission control block: everything one connection knows.
//!
//! Sequence numbers are kept unwrapped: a *position* is a `u64` that counts from the initial
//! sequence number, so that comparing, sorting and subtracting are plain arithmetic. Position 0 is
//! the SYN, byte `n` of the stream has position `n + 1`, the FIN follows the last byte. They wrap
//! to 32 bits only at the wire ([`Tcb::seq_of`], `input::offset_of`).
//!
//! ```text
//! send       0        snd_una      high_rxt        snd_nxt     snd_una+snd_wnd   ready   claimed
//!            |SYN| acked |  in flight (sent again below high_rxt)  | may be sent |  waits  | being filled |
//!                        |<---- references into the send queue --->|
//!
//! receive    0          readable         rcv_nxt         rcv_adv
//!            |SYN| read  | in the queue   |  out of order   | not offered |
//!                        |<-- recv queue (in order) -->|<- window ->|
//! ```
//!
//! Invariants: `snd_una <= snd_nxt` (the engine never moves `snd_nxt` back: what must go again is
//! found from the scoreboard and `high_rxt`, so it is the `SND.MAX` of other stacks too);
//! `snd_nxt <= send_end + 1` (the FIN); `rcv_nxt <= rcv_adv`, which never moves left;
//! `last_ack_sent <= rcv_nxt`.

use crate::arith::div_rem;
use crate::contract::{ConnError, PathInfo, State};
use crate::cubic::Cubic;
use crate::input::icmp::MtuReports;
use crate::keepalive::Keepalive;
use crate::recovery::Recovery;
use crate::rtt::Rtt;
use crate::scoreboard::Scoreboard;
use crate::segment::pseudo_sum;
use crate::timers::{Timer, Timers, later};
use crate::tuning::{RecvTuning, Tuning};
use crate::window::Lent;
use crate::{Config, TimeWait};
use fulmar_base::{Duration, FlowKey, Instant, SeqNum};
use fulmar_mbuf::{RecvQueue, SendQueue};
use fulmar_wire::checksum::Sum;
use fulmar_wire::tcp::{Flags, Header, Options};

/// Segments acknowledged at once when a connection is young (as Linux), so that the peer's slow
/// start is not held back by delayed acknowledgements.
const QUICK_ACKS: u8 = 16;

/// The least segment that an MSS option or a path MTU can force on us, TCP options included: with
/// 40 bytes of options it still carries payload. Lower values are an attack (many tiny segments).
const MIN_SEGMENT_BYTES: usize = 88;

/// What a peer takes that sent no MSS option (RFC 9293 section 3.7.1).
const DEFAULT_MSS: u16 = 536;
const DEFAULT_MSS_V6: u16 = 1220;

/// Bytes of the timestamps option with its padding.
pub(crate) const TIMESTAMP_BYTES: usize = 12;

impl PathInfo {
    /// What the path leaves for a segment.
    pub(crate) fn mss(&self) -> usize {
        self.without_headers(self.mtu)
    }

    /// The MSS option we send (RFC 9293 section 3.7.1). A path MTU that was learned is that of the
    /// other direction, and does not count.
    pub(crate) fn own_mss(&self) -> usize {
        self.without_headers(self.route_mtu)
    }

    fn without_headers(&self, mtu: usize) -> usize {
        let headers = self.ip_header_bytes.saturating_add(fulmar_wire::tcp::HEADER_BYTES);
        mtu.saturating_sub(headers).clamp(MIN_SEGMENT_BYTES, usize::from(u16::MAX))
    }
}

/// The timestamps option of a connection (RFC 7323).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamps {
    /// Both sides sent the option (or, before the answer, we offer it).
    pub on: bool,
    /// Added to the clock, so that it says nothing about other connections.
    pub offset: u32,
    /// TS.Recent.
    pub recent: u32,
    /// When it was taken: after 24 days it is void (section 5.5).
    pub recent_at: Instant,
}

/// A reset waiting to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ResetDue {
    pub seq: SeqNum,
    pub with_ack: bool,
}

/// What the next output has to say beside data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Due {
    /// The peer must hear from us.
    pub ack: bool,
    /// The SYN, or SYN,ACK.
    pub syn: bool,
    /// A window or keepalive probe, or a segment that only a small window held back.
    pub probe: bool,
    /// An ACK as soon as the reader has taken everything: the peer pushed, and perhaps waits.
    pub pushed: bool,
    pub reset: Option<ResetDue>,
}

/// What the user has asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct User {
    /// The connection was closed: nobody will read.
    pub gone: bool,
    pub recv_shut: bool,
    pub opened_actively: bool,
    pub cork: bool,
    /// The last write said that another one follows (MSG_MORE).
    pub more: bool,
    /// The cork timer ran out: let the partial segment go. Holds for MSG_MORE too.
    pub cork_expired: bool,
    /// More bytes are likely to follow at once; `snd_nxt` when that was said.
    pub more_from: Option<u64>,
    /// Bytes of free send buffer that are worth waking a writer for; `None`: a third of it.
    pub send_low_water: Option<usize>,
    /// Bytes that are worth waking a reader for; 0 as 1.
    pub recv_low_water: usize,
    /// The user time-out that was asked for; `None`: `Config::user_timeout`.
    pub timeout: Option<Duration>,
    pub keepalive: Option<Keepalive>,
}

/// How the connection fares.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fate {
    /// Not yet taken by the user.
    pub error: Option<ConnError>,
    /// Why the connection ended, for later writes.
    pub ended_by: Option<ConnError>,
    /// What routers said since the last progress.
    pub soft_error: Option<ConnError>,
}

/// What was sent again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Again {
    pub segments: u64,
    pub bytes: u64,
}

/// Shifts of the window fields (RFC 7323 section 2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// Of the peer's windows.
    pub snd: u8,
    /// Of ours.
    pub rcv: u8,
    /// Both SYNs carried the option.
    pub both: bool,
}

/// Positions in the send space that decide about the next segment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Edges {
    /// End of the last segment smaller than `mss` (Minshall's variant of Nagle).
    pub small: u64,
    /// `snd_nxt` when the last pass of output began.
    pub burst_from: u64,
    /// Positions below it were sent while the congestion window was what held the rest back.
    pub cwnd_limited_to: u64,
}

/// Moments that matter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    /// End of the segment being timed, and when it was sent.
    pub timed: Option<(u64, Instant)>,
    /// When the peer last acknowledged something new, or data began to wait for it.
    pub progress_at: Instant,
    /// When the last acceptable segment came.
    pub heard_at: Instant,
    pub last_sent_at: Instant,
}

/// One connection. See the module for its sequence spaces.
///
/// It owns references to pool memory: call [`Tcb::release`] before dropping it (a drop without
/// it is safe, but its buffers come home late and its share of the window budget never).
pub struct Tcb {
    pub(crate) key: FlowKey,
    pub(crate) state: State,
    pub(crate) cfg: Config,
    pub(crate) path: PathInfo,

    /// Initial send sequence number.
    pub(crate) iss: SeqNum,
    /// Oldest position not acknowledged.
    pub(crate) snd_una: u64,
    /// Next position to send for the first time.
    pub(crate) snd_nxt: u64,
    /// The peer's window from `snd_una`, bytes.
    pub(crate) snd_wnd: u64,
    /// Position (receive space) and acknowledgement of the segment that last set `snd_wnd`.
    pub(crate) snd_wl1: u64,
    /// The largest window the peer ever offered, bytes.
    pub(crate) max_snd_wnd: u64,
    /// What the peer takes per segment, options included.
    pub(crate) peer_mss: u16,
    /// Bytes per segment, TCP options included: the least of peer's MSS and path.
    pub(crate) segment_bytes: usize,
    /// Payload of a full segment with its usual options, bytes: SMSS of RFC 5681.
    pub(crate) mss: u32,
    /// Payload of the largest super-segment: a multiple of `mss`, or `mss`.
    pub(crate) super_bytes: usize,
    pub(crate) edges: Edges,
    /// Send FIN behind the last claimed byte.
    pub(crate) fin_queued: bool,
    /// The FIN has position `snd_nxt - 1`.
    pub(crate) fin_sent: bool,
    pub(crate) send: SendQueue,

    pub(crate) irs: SeqNum,
    /// Next position expected.
    pub(crate) rcv_nxt: u64,
    /// Right edge of the window that was advertised.
    pub(crate) rcv_adv: u64,
    /// `rcv_nxt` as the peer last heard it (Last.ACK.sent).
    pub(crate) last_ack_sent: u64,
    /// Estimate of the peer's full segment, bytes: RMSS of RFC 9293 section 3.8.6.3.
    pub(crate) rcv_mss: u32,
    /// Position behind the last byte that the peer pushed.
    pub(crate) pushed_to: u64,
    /// The same of bytes that came behind a gap; the last of them.
    pub(crate) pushed_behind: u64,
    /// Position behind the last segment that brought urgent data.
    pub(crate) urgent_to: u64,
    /// Where the peer's FIN stands, once seen.
    pub(crate) peer_fin: Option<u64>,
    /// `rcv_nxt` is behind the peer's FIN.
    pub(crate) fin_received: bool,
    /// Receive buffer, bytes.
    pub(crate) recv_limit: usize,
    /// This connection's part of `WindowBudget::granted_bytes`.
    pub(crate) charged: usize,
    /// What the user holds by reference.
    pub(crate) lent: Lent,
    pub(crate) recv: RecvQueue,

    /// The pseudo header's sum, but for the length.
    pub(crate) pseudo: Sum,
    pub(crate) stamps: Stamps,
    pub(crate) scale: Scale,
    pub(crate) sack_on: bool,
    pub(crate) rtt: Rtt,
    pub(crate) marks: Marks,
    pub(crate) cubic: Cubic,
    pub(crate) sacked: Scoreboard,
    pub(crate) recovery: Recovery,
    pub(crate) tuning: Tuning,
    pub(crate) recv_tuning: RecvTuning,
    pub(crate) timers: Timers,
    /// The retransmit timer is the persist timer.
    pub(crate) persisting: bool,
    pub(crate) challenge: crate::challenge::Limit,
    /// Keepalive probes since the peer was last heard.
    pub(crate) unanswered_probes: u32,

    /// How many of the peer's segments are still acknowledged at once.
    pub(crate) quick_acks: u8,
    /// Our data has been carrying the acknowledgements lately, so it is worth waiting for.
    pub(crate) interactive: bool,
    pub(crate) due: Due,
    pub(crate) user: User,
    pub(crate) fate: Fate,
    pub(crate) again: Again,
    pub(crate) mtu_reports: MtuReports,
}

/// What a connection has from the start.
struct Birth {
    key: FlowKey,
    iss: SeqNum,
    ts_offset: u32,
    path: PathInfo,
    now: Instant,
}

impl Tcb {
    /// Opens actively: SYN-SENT. The next output sends the SYN.
    ///
    /// `iss` is the initial sequence number (RFC 6528 is the caller's), `ts_offset` is added to the
    /// timestamp clock.
    pub fn connect(
        cfg: &Config,
        key: FlowKey,
        iss: SeqNum,
        ts_offset: u32,
        path: PathInfo,
        now: Instant,
    ) -> Tcb {
        let mut tcb = Tcb::new(cfg, Birth { key, iss, ts_offset, path, now });
        tcb.user.opened_actively = true;
        tcb
    }

    /// Opens passively on a peer's SYN: SYN-RECEIVED. The next output sends the SYN,ACK. Data that
    /// came with the SYN is not taken: the peer sends it again.
    pub fn passive(
        cfg: &Config,
        key: FlowKey,
        iss: SeqNum,
        ts_offset: u32,
        path: PathInfo,
        now: Instant,
        syn: &Header,
    ) -> Tcb {
        let mut tcb = Tcb::new(cfg, Birth { key, iss, ts_offset, path, now });
        tcb.state = State::SynReceived;
        tcb.accept_syn(syn, now);
        tcb
    }

    fn new(cfg: &Config, birth: Birth) -> Tcb {
        let Birth { key, iss, ts_offset, path, now } = birth;
        let v6 = key.remote_ip().is_ipv6();
        let mut tcb = Tcb {
            key,
            state: State::SynSent,
            cfg: *cfg,
            path,
            iss,
            snd_una: 0,
            snd_nxt: 0,
            snd_wnd: 0,
            snd_wl1: 0,
            max_snd_wnd: 0,
            peer_mss: if v6 { DEFAULT_MSS_V6 } else { DEFAULT_MSS },
            segment_bytes: 0,
            mss: 0,
            super_bytes: 0,
            edges: Edges::default(),
            fin_queued: false,
            fin_sent: false,
            send: SendQueue::new(cfg.send_buffer_bytes),
            irs: SeqNum(0),
            rcv_nxt: 0,
            rcv_adv: 0,
            last_ack_sent: 0,
            rcv_mss: u32::from(DEFAULT_MSS),
            pushed_to: 0,
            pushed_behind: 0,
            urgent_to: 0,
            peer_fin: None,
            fin_received: false,
            recv_limit: cfg.recv_buffer_bytes.min(cfg.max_buffer_bytes),
            charged: 0,
            lent: Lent::default(),
            recv: RecvQueue::new(),
            pseudo: pseudo_sum(&key),
            scale: Scale { snd: 0, rcv: cfg.window_scale(), both: false },
            stamps: Stamps { on: cfg.timestamps, offset: ts_offset, recent: 0, recent_at: now },
            sack_on: cfg.sack,
            rtt: Rtt::new(cfg),
            marks: Marks { timed: None, progress_at: now, heard_at: now, last_sent_at: now },
            cubic: Cubic::new(u32::from(DEFAULT_MSS), cfg.initial_window_segments),
            sacked: Scoreboard::new(),
            recovery: Recovery::new(),
            tuning: Tuning::default(),
            recv_tuning: RecvTuning::default(),
            timers: Timers::new(),
            persisting: false,
            challenge: crate::challenge::Limit::new(),
            unanswered_probes: 0,
            quick_acks: QUICK_ACKS,
            interactive: false,
            due: Due { syn: true, ..Due::default() },
            user: User::default(),
            fate: Fate::default(),
            again: Again::default(),
            mtu_reports: MtuReports::default(),
        };
        tcb.fit_segments();
        tcb
    }

    /// Takes up the peer's SYN: its number and its options (RFC 9293 section 3.10.7.2 and .3).
    pub(crate) fn accept_syn(&mut self, syn: &Header, now: Instant) {
        self.irs = syn.seq;
        self.rcv_nxt = 1;
        // What our own SYN offered, if we sent one, counts from here.
        self.rcv_adv = self.rcv_adv.saturating_add(1);
        self.last_ack_sent = 0;
        self.snd_wl1 = 0;
        // The window of a SYN is never scaled (RFC 7323 section 2.2).
        self.snd_wnd = u64::from(syn.window);
        self.max_snd_wnd = self.snd_wnd;
        self.accept_options(&syn.options, now);
        self.fit_segments();
    }

    fn accept_options(&mut self, o: &Options, now: Instant) {
        if let Some(mss) = o.mss {
            self.peer_mss = mss;
        }
        match o.window_scale {
            Some(shift) => self.scale.snd = shift.min(14),
            None => (self.scale.snd, self.scale.rcv) = (0, 0),
        }
        self.scale.both = o.window_scale.is_some();
        self.sack_on = self.sack_on && o.sack_permitted;
        match o.timestamps {
            Some(t) if self.stamps.on => {
                self.stamps.recent = t.value;
                self.stamps.recent_at = now;
            }
            _ => self.stamps.on = false,
        }
    }

    /// Takes over what is known about the way, if it changed.
    #[inline]
    pub(crate) fn follow_path(&mut self, path: &PathInfo) {
        if self.path != *path {
            let old = core::mem::replace(&mut self.path, *path);
            if old.mtu != path.mtu {
                self.on_path_mtu_changed();
            }
            self.fit_segments();
        }
    }

    /// Computes segment sizes from peer, path and options (RFC 6691, RFC 9293 section 3.7.1).
    pub(crate) fn fit_segments(&mut self) {
        let segment = usize::from(self.peer_mss).min(self.path_mss()).max(MIN_SEGMENT_BYTES);
        self.segment_bytes = segment;
        let mss = segment.saturating_sub(self.usual_option_bytes());
        self.mss = u32::try_from(mss).unwrap_or(u32::from(u16::MAX));
        self.super_bytes = self.fit_super_segment(mss);
        self.cubic.set_mss(self.mss, self.cfg.initial_window_segments);
    }

    /// Whole segments that one super-segment may hold, in bytes; its IP packet is at most 65535.
    fn fit_super_segment(&self, mss: usize) -> usize {
        let headers = self.path.ip_header_bytes.saturating_add(fulmar_wire::tcp::HEADER_BYTES);
        let headers = headers.saturating_add(self.usual_option_bytes());
        let largest = self.path.tso_bytes.unwrap_or(0).min(65_535).saturating_sub(headers);
        let (segments, _) = div_rem(largest as u64, mss as u64);
        (segments as usize).saturating_mul(mss).max(mss)
    }

    /// What the path to the peer leaves for a segment.
    pub(crate) fn path_mss(&self) -> usize {
        self.path.mss()
    }

    /// See [`PathInfo::own_mss`].
    pub(crate) fn own_mss(&self) -> usize {
        self.path.own_mss()
    }

    fn usual_option_bytes(&self) -> usize {
        if self.stamps.on { TIMESTAMP_BYTES } else { 0 }
    }

    /// The sequence number of a position of ours.
    #[inline]
    pub(crate) fn seq_of(&self, pos: u64) -> SeqNum {
        SeqNum(self.iss.0.wrapping_add(pos as u32))
    }

    /// The sequence number of a position of the peer's.
    #[inline]
    pub(crate) fn peer_seq_of(&self, pos: u64) -> SeqNum {
        SeqNum(self.irs.0.wrapping_add(pos as u32))
    }

    /// Our timestamp clock: milliseconds (RFC 7323 section 5.4).
    #[inline]
    pub(crate) fn stamp(&self, now: Instant) -> u32 {
        now.as_millis_u32().wrapping_add(self.stamps.offset)
    }

    /// The position behind the last byte that may be sent.
    #[inline]
    pub(crate) fn send_end(&self) -> u64 {
        self.send.ready_end().saturating_add(1)
    }

    /// Positions sent and not acknowledged.
    #[inline]
    pub(crate) fn flight(&self) -> u64 {
        self.snd_nxt.saturating_sub(self.snd_una)
    }

    /// The FIN may go: it is wanted and every claimed byte is ready.
    #[inline]
    pub(crate) fn fin_ready(&self) -> bool {
        self.fin_queued && !self.fin_sent && self.send.ready_end() == self.send.claimed_end()
    }

    /// Bytes or a FIN wait to be sent for the first time.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        !self.fin_sent && (self.send_end() > self.snd_nxt || self.fin_ready())
    }

    /// Whether the peer's SYN and ours are through.
    #[inline]
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(self.state, State::SynSent | State::SynReceived | State::Closed)
    }

    /// The connection is over. What is left is to tell the user, and to send `due.reset`.
    pub(crate) fn finish(&mut self, why: Option<ConnError>) {
        self.state = State::Closed;
        self.timers = Timers::new();
        self.due.ack = false;
        self.due.syn = false;
        self.due.probe = false;
        self.fate.ended_by = self.fate.ended_by.or(why);
        if !self.user.gone {
            self.fate.error = self.fate.error.or(why);
        }
    }

    /// Enters TIME-WAIT, or starts it again (RFC 9293 section 3.10.7.4, eighth).
    pub(crate) fn enter_time_wait(&mut self, now: Instant) {
        self.state = State::TimeWait;
        self.timers = Timers::new();
        self.timers.set_in(Timer::Idle, now, self.cfg.time_wait);
    }

    /// What remains of the connection in TIME-WAIT, for the stack's table.
    pub fn time_wait_entry(&self, now: Instant) -> TimeWait {
        let window = self.rcv_adv.saturating_sub(self.rcv_nxt) >> self.scale.rcv;
        TimeWait {
            snd_nxt: self.seq_of(self.snd_nxt),
            rcv_nxt: self.peer_seq_of(self.rcv_nxt),
            window: u16::try_from(window).unwrap_or(u16::MAX),
            stamps: self.stamps.on.then_some((self.stamps.offset, self.stamps.recent)),
            ports: (self.key.local_port, self.key.remote_port),
            lasts: self.cfg.time_wait,
            expires: later(now, self.cfg.time_wait),
            limit: crate::challenge::Limit::new(),
        }
    }

    /// A header of ours with acknowledgement and usual options, at position `pos`.
    pub(crate) fn header_at(&self, pos: u64, flags: Flags, now: Instant) -> Header {
        let timestamps = self.stamps.on.then(|| fulmar_wire::tcp::Timestamps {
            value: self.stamp(now),
            echo: self.stamps.recent,
        });
        Header {
            src_port: self.key.local_port,
            dst_port: self.key.remote_port,
            seq: self.seq_of(pos),
            ack: if flags.contains(Flags::ACK) {
                self.peer_seq_of(self.rcv_nxt)
            } else {
                SeqNum(0)
            },
            flags,
            window: 0,
            urgent: 0,
            options: Options { timestamps, ..Options::default() },
        }
    }
}
