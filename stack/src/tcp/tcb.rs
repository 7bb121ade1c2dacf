//! The transmission control block: the state of one connection.
//!
//! Sequence numbers are stored unwrapped: a *position* is a `u64` relative to the initial sequence
//! number, so that comparison, sorting and subtraction are plain arithmetic. Position 0 is the SYN,
//! byte `n` of the stream has position `n + 1`, and the FIN follows the last byte. Positions are
//! converted to 32 bits only in headers ([`Tcb::seq_of`], [`Tcb::peer_seq_of`]).
//!
//! ```text
//! send       0        snd_una                      snd_nxt     snd_una+snd_wnd   ready   claimed
//!            |SYN| acked |  in flight, SACKed or lost (scoreboard) | may be sent | blocked | being filled |
//!                        |<---- references into the send queue --->|
//!
//! receive    0          readable         rcv_nxt         rcv_adv
//!            |SYN| read  | in the queue   |  out of order   | not advertised |
//!                        |<-- recv queue (in order) -->|<- window ->|
//! ```
//!
//! Invariants: `snd.una <= snd.nxt` (`snd.nxt` never moves back, so it is also BSD's `snd_max`;
//! retransmissions are found from the scoreboard); `snd.nxt <= send_end + 1` (the
//! FIN); `rcv.nxt <= rcv.adv`, which never moves left; `rcv.last_ack_sent <= rcv.nxt`.

use crate::base::{Duration, FlowKey, Instant, IpVersion, SeqNum};
use crate::mbuf::{RecvQueue, SendQueue};
use crate::tcp::arith::div_rem;
use crate::tcp::congestion::Congestion;
use crate::tcp::contract::{ConnError, PathInfo, State};
use crate::tcp::delivery::Delivery;
use crate::tcp::dialogue::Dialogue;
use crate::tcp::ecn::Ecn;
use crate::tcp::fast_open::FastOpenState;
use crate::tcp::input::icmp::PathMtuDiscovery;
use crate::tcp::keepalive::Keepalive;
use crate::tcp::pacing::Pacing;
use crate::tcp::plpmtud::MtuSearch;
use crate::tcp::records::Records;
use crate::tcp::recovery::Recovery;
use crate::tcp::rtt::Rtt;
use crate::tcp::scoreboard::Scoreboard;
use crate::tcp::segment::pseudo_sum;
use crate::tcp::statistics::Statistics;
use crate::tcp::timers::{Timer, Timers, later};
use crate::tcp::tuning::{RecvTuning, Tuning};
use crate::tcp::window::ReceiveBuffer;
use crate::tcp::{Config, TimeWait, TimeWaitVerdict};
use crate::wire::checksum::Sum;
use crate::wire::tcp::{Flags, Header, Options};

/// Segments acknowledged immediately at the start of a connection (quick ACKs, as Linux), so that
/// delayed ACKs do not slow down the peer's slow start.
pub(crate) const QUICK_ACKS: u8 = 16;

/// Lower bound of the segment size, TCP options included, whatever the MSS option or path MTU: with
/// 40 bytes of options it still carries payload. Smaller values are an attack (many tiny segments).
const MIN_SEGMENT_BYTES: usize = 88;

/// MSS of a peer that sent no MSS option (RFC 9293 section 3.7.1).
pub(crate) const DEFAULT_MSS: u16 = 536;
const DEFAULT_MSS_V6: u16 = 1220;

/// Bytes of the timestamps option with its padding.
pub(crate) const TIMESTAMP_BYTES: usize = 12;

impl PathInfo {
    pub(crate) fn ip_version(&self) -> IpVersion {
        if self.ip_header_bytes < 40 { IpVersion::V4 } else { IpVersion::V6 }
    }

    /// MSS of the path MTU.
    pub(crate) fn mss(&self) -> usize {
        self.without_headers(self.mtu)
    }

    /// Value of the MSS option sent (RFC 9293 section 3.7.1). A learned path MTU holds for the
    /// forward direction only and is not used.
    pub(crate) fn own_mss(&self) -> usize {
        self.without_headers(self.route_mtu)
    }

    /// Segment of a packet of `mtu` bytes.
    pub(crate) fn without_headers(&self, mtu: usize) -> usize {
        let headers = self.ip_header_bytes.saturating_add(crate::wire::tcp::HEADER_BYTES);
        mtu.saturating_sub(headers).clamp(MIN_SEGMENT_BYTES, usize::from(u16::MAX))
    }
}

/// State of the timestamps option (RFC 7323).
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimestampState {
    /// Negotiated; before the peer's SYN: offered.
    pub on: bool,
    /// Random offset added to the clock, so that the value reveals nothing about other connections.
    pub offset: u32,
    /// TS.Recent.
    pub recent: u32,
    /// When TS.Recent was set: after 24 days it is invalid (section 5.5).
    pub recent_at: Instant,
}

/// A reset to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ResetDue {
    pub seq: SeqNum,
    pub with_ack: bool,
}

/// The control segments that the next output must send besides data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Due {
    /// An ACK.
    pub ack: bool,
    /// The SYN or SYN,ACK.
    pub syn: bool,
    /// A window or keepalive probe, or a partial segment whose override timer has expired.
    pub probe: bool,
    /// An ACK as soon as the receive queue is empty: the peer pushed, and may be waiting for it.
    pub pushed: bool,
    pub reset: Option<ResetDue>,
}

/// Settings and requests of the user.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct User {
    /// The user has closed the connection: it is orphaned.
    pub closed: bool,
    pub recv_shutdown: bool,
    pub opened_actively: bool,
    pub cork: bool,
    /// The last write had MSG_MORE.
    pub msg_more: bool,
    /// The cork timer expired: send the partial segment. Also for MSG_MORE.
    pub cork_expired: bool,
    /// `snd.nxt` when [`Tcb::set_more_announced`] announced more data.
    pub more_from: Option<u64>,
    /// Low-water mark of free send buffer space for WRITABLE, bytes. `None`: a third of the buffer.
    pub send_low_water: Option<usize>,
    /// TCP_NOTSENT_LOWAT, bytes.
    pub notsent_low_water: Option<u32>,
    /// TCP_MAXSEG, bytes.
    pub max_segment: Option<u16>,
    /// SO_RCVLOWAT, bytes. 0 means 1.
    pub recv_low_water: usize,
    /// TCP_USER_TIMEOUT. `None`: `Config::user_timeout`.
    pub timeout: Option<Duration>,
    pub keepalive: Option<Keepalive>,
}

/// Errors of the connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Errors {
    /// SO_ERROR: not yet taken by the user.
    pub pending: Option<ConnError>,
    /// Why the connection ended, for later writes.
    pub ended_by: Option<ConnError>,
    /// ICMP or routing error since the last progress.
    pub soft: Option<ConnError>,
    /// Bytes were discarded before the user has read them: `pending` stays, since the stream has no end.
    pub is_sticky: bool,
}

/// Retransmission counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Retransmits {
    pub segments: u64,
    pub bytes: u64,
}

/// Window scale (RFC 7323 section 2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowScale {
    /// Shift of the peer's windows (Snd.Wind.Shift).
    pub snd: u8,
    /// Shift of our windows (Rcv.Wind.Shift).
    pub rcv: u8,
    /// Both SYNs carried the option.
    pub both: bool,
}

/// Positions in the send sequence space that segmentation and congestion control depend on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendMarks {
    /// End of the last segment smaller than `mss` (Minshall's variant of Nagle; Linux: `snd_sml`).
    pub small_end: u64,
    /// `snd.nxt` at the start of the current output.
    pub burst_start: u64,
    /// End of the bytes sent while cwnd-limited. In slow start half of the window suffices.
    pub cwnd_limited_end: u64,
    /// End of the bytes sent when the window was full, for controllers that take samples.
    pub full_end: u64,
}

/// The send sequence space (RFC 9293 section 3.3.1).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendSpace {
    /// Oldest position not acknowledged (SND.UNA).
    pub una: u64,
    /// Next position to send for the first time (SND.NXT).
    pub nxt: u64,
    /// The peer's window from `una`, bytes (SND.WND).
    pub wnd: u64,
    /// Position (receive space) of the segment that last set `wnd` (SND.WL1).
    pub wl1: u64,
    /// The largest window the peer ever offered (Max.SND.WND), bytes.
    pub max_wnd: u64,
}

/// The receive sequence space (RFC 9293 section 3.3.1).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReceiveSpace {
    /// Next position expected (RCV.NXT).
    pub nxt: u64,
    /// Right edge of the advertised window.
    pub adv: u64,
    /// Last.ACK.sent: `nxt` as last sent to the peer (RFC 7323 section 4.3).
    pub last_ack_sent: u64,
}

/// Positions in the receive sequence space that segments were marked at.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReceiveMarks {
    /// Position after the last pushed byte.
    pub pushed_to: u64,
    /// The same for bytes behind a gap.
    pub pushed_behind: u64,
    /// Position after the last segment with urgent data.
    pub urgent_to: u64,
}

/// In-order bytes that came from behind a gap while storage was short, and are not compacted yet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Uncompacted {
    /// Stream offset of the first of them.
    pub from: u64,
    /// Their storage, bytes. 0: there are none.
    pub storage_bytes: usize,
}

/// The FINs of both directions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fin {
    /// A FIN follows the last claimed byte.
    pub queued: bool,
    /// The FIN has position `snd.nxt - 1`.
    pub sent: bool,
    /// The peer's FIN is in order and counted in `rcv.nxt`.
    pub received: bool,
    /// Position of the peer's FIN, once received, also behind a gap.
    pub peer_at: Option<u64>,
}

/// Times of the last events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventTimes {
    /// The segment timed for a round-trip sample: its end and when it was sent.
    pub timed: Option<(u64, Instant)>,
    /// When our SYN or SYN,ACK was last sent.
    pub syn_sent_at: Instant,
    /// When the peer last acknowledged new data, or data was sent with none in flight.
    pub last_progress: Instant,
    /// When the peer last opened its window, unless a user time-out holds for closed windows, too.
    pub last_opened_at: Instant,
    /// Time-outs and window probes since the last progress.
    pub retries: u8,
    /// When the last acceptable segment arrived.
    pub last_received_at: Instant,
    /// When the user last read, or the first of the in-order bytes in the receive queue was there to be read.
    pub unread_since: Instant,
    pub last_sent_at: Instant,
}

impl EventTimes {
    /// Of a connection that begins.
    fn starting(now: Instant) -> EventTimes {
        let (last_progress, last_received_at, last_sent_at) = (now, now, now);
        let (timed, last_opened_at, retries, unread_since) = (None, now, 0, now);
        EventTimes {
            timed,
            syn_sent_at: now,
            last_progress,
            last_opened_at,
            retries,
            last_received_at,
            unread_since,
            last_sent_at,
        }
    }
}

/// One connection. See the module for its sequence spaces.
///
/// It owns references to pool memory: call [`Tcb::release`] before dropping it. Dropping it without
/// is memory-safe, but its buffers are freed late and its charge to the window budget is lost.
pub struct Tcb {
    pub(crate) key: FlowKey,
    pub(crate) state: State,
    pub(crate) cfg: Config,
    pub(crate) path: PathInfo,

    /// Initial send sequence number.
    pub(crate) iss: SeqNum,
    pub(crate) snd: SendSpace,
    /// The peer's MSS option.
    pub(crate) peer_mss: u16,
    /// Bytes per segment, TCP options included: the minimum of the peer's MSS and the path's.
    pub(crate) segment_bytes: usize,
    /// Payload of a full segment with its usual options, bytes: SMSS of RFC 5681.
    pub(crate) mss: u32,
    /// Payload of the largest super-segment: a multiple of `mss`, or `mss`.
    pub(crate) super_bytes: usize,
    pub(crate) send_marks: SendMarks,
    pub(crate) fin: Fin,
    pub(crate) send: SendQueue,
    pub(crate) records: Records,

    pub(crate) irs: SeqNum,
    pub(crate) rcv: ReceiveSpace,
    /// Estimate of the peer's full segment, bytes: RMSS of RFC 9293 section 3.8.6.3.
    pub(crate) rcv_mss: u32,
    pub(crate) recv_marks: ReceiveMarks,
    pub(crate) uncompacted: Uncompacted,
    /// Bytes received twice, for the DSACK block of the next ACK (RFC 2883).
    pub(crate) dsack_due: Option<(u64, u64)>,
    pub(crate) space: ReceiveBuffer,
    pub(crate) recv: RecvQueue,

    /// Pseudo-header sum without the length.
    pub(crate) pseudo: Sum,
    pub(crate) ts: TimestampState,
    pub(crate) scale: WindowScale,
    pub(crate) sack_on: bool,
    pub(crate) ecn: Ecn,
    pub(crate) rtt: Rtt,
    pub(crate) times: EventTimes,
    pub(crate) congestion: Congestion,
    pub(crate) sacked: Scoreboard,
    pub(crate) recovery: Recovery,
    pub(crate) delivery: Delivery,
    pub(crate) pacing: Pacing,
    pub(crate) tuning: Tuning,
    pub(crate) recv_tuning: RecvTuning,
    pub(crate) timers: Timers,
    /// [`Timer::Retransmit`] serves as the persist timer.
    pub(crate) persisting: bool,
    pub(crate) challenge: crate::tcp::challenge::ChallengeLimit,
    /// The limit on answers to keepalive and window probes, apart so that forged segments do not silence them.
    pub(crate) probe_answers: crate::tcp::challenge::ChallengeLimit,
    /// Keepalive probes since the last segment received.
    pub(crate) unanswered_probes: u32,

    /// Remaining quick ACKs.
    pub(crate) quick_acks: u8,
    /// Detection of interactive use.
    pub(crate) dialogue: Dialogue,
    pub(crate) due: Due,
    pub(crate) user: User,
    pub(crate) errors: Errors,
    pub(crate) retransmits: Retransmits,
    pub(crate) statistics: Statistics,
    pub(crate) pmtud: PathMtuDiscovery,
    pub(crate) fast_open: FastOpenState,
    pub(crate) mtu_search: MtuSearch,
}

/// The controller of a connection that knows no MSS yet.
fn congestion_of(cfg: &Config) -> Congestion {
    Congestion::new(cfg.congestion, u32::from(DEFAULT_MSS), cfg.initial_window_segments)
}

/// Initial parameters of a connection.
struct InitialParams {
    key: FlowKey,
    iss: SeqNum,
    ts_offset: u32,
    path: PathInfo,
    now: Instant,
}

impl Tcb {
    /// Active open: SYN-SENT. The next output sends the SYN.
    ///
    /// `iss` is the initial sequence number, chosen by the caller (RFC 6528). `ts_offset` is added
    /// to the timestamp clock.
    pub fn connect(
        cfg: &Config,
        key: FlowKey,
        iss: SeqNum,
        ts_offset: u32,
        path: PathInfo,
        now: Instant,
    ) -> Tcb {
        let mut tcb = Tcb::new(cfg, InitialParams { key, iss, ts_offset, path, now });
        tcb.user.opened_actively = true;
        tcb
    }

    /// Passive open on a received SYN: SYN-RECEIVED. The next output sends the SYN,ACK. Data on the
    /// SYN is discarded, and the peer retransmits it, unless [`Tcb::accept_syn_data`] takes it.
    pub fn passive(
        cfg: &Config,
        key: FlowKey,
        iss: SeqNum,
        ts_offset: u32,
        path: PathInfo,
        now: Instant,
        syn: &Header,
    ) -> Tcb {
        let mut tcb = Tcb::new(cfg, InitialParams { key, iss, ts_offset, path, now });
        tcb.state = State::SynReceived;
        tcb.accept_syn(syn, now);
        tcb
    }

    fn new(cfg: &Config, params: InitialParams) -> Tcb {
        let InitialParams { key, iss, ts_offset, path, now } = params;
        let v6 = key.remote_ip().is_ipv6();
        let mut tcb = Tcb {
            key,
            state: State::SynSent,
            cfg: *cfg,
            path,
            iss,
            snd: SendSpace::default(),
            peer_mss: if v6 { DEFAULT_MSS_V6 } else { DEFAULT_MSS },
            segment_bytes: 0,
            mss: 0,
            super_bytes: 0,
            send_marks: SendMarks::default(),
            fin: Fin::default(),
            send: SendQueue::new(cfg.send_buffer_bytes),
            records: Records::default(),
            irs: SeqNum(0),
            rcv: ReceiveSpace::default(),
            rcv_mss: u32::from(DEFAULT_MSS),
            recv_marks: ReceiveMarks::default(),
            uncompacted: Uncompacted::default(),
            dsack_due: None,
            space: ReceiveBuffer::new(cfg.recv_buffer_bytes.min(cfg.max_buffer_bytes)),
            recv: RecvQueue::new(),
            pseudo: pseudo_sum(&key),
            scale: WindowScale { snd: 0, rcv: cfg.window_scale(), both: false },
            ts: TimestampState { on: cfg.timestamps, offset: ts_offset, recent: 0, recent_at: now },
            sack_on: cfg.sack,
            ecn: Ecn::new(),
            rtt: Rtt::new(cfg),
            times: EventTimes::starting(now),
            congestion: congestion_of(cfg),
            sacked: Scoreboard::new(),
            recovery: Recovery::new(),
            delivery: Delivery::for_controller(cfg.congestion),
            pacing: Pacing::new(cfg.max_pacing_rate),
            tuning: Tuning::default(),
            recv_tuning: RecvTuning::default(),
            timers: Timers::new(),
            persisting: false,
            challenge: crate::tcp::challenge::ChallengeLimit::new(),
            probe_answers: crate::tcp::challenge::ChallengeLimit::new(),
            unanswered_probes: 0,
            quick_acks: cfg.quick_acks,
            dialogue: Dialogue::default(),
            due: Due { syn: true, ..Due::default() },
            user: User::default(),
            errors: Errors::default(),
            retransmits: Retransmits::default(),
            statistics: Statistics::default(),
            pmtud: PathMtuDiscovery::default(),
            fast_open: FastOpenState::default(),
            mtu_search: MtuSearch::new(),
        };
        tcb.update_segment_sizes();
        tcb
    }

    /// Initializes the receive space and the options from the peer's SYN (RFC 9293 sections
    /// 3.10.7.2 and 3.10.7.3).
    pub(crate) fn accept_syn(&mut self, syn: &Header, now: Instant) {
        self.irs = syn.seq;
        self.rcv.nxt = 1;
        // The window that our own SYN offered, if any, starts after the peer's SYN.
        self.rcv.adv = self.rcv.adv.saturating_add(1);
        self.rcv.last_ack_sent = 0;
        self.snd.wl1 = 0;
        // The window of a SYN is never scaled (RFC 7323 section 2.2).
        self.snd.wnd = u64::from(syn.window);
        self.snd.max_wnd = self.snd.wnd;
        self.accept_options(&syn.options, now);
        self.negotiate_ecn(syn.flags);
        self.update_segment_sizes();
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
            Some(t) if self.ts.on => {
                self.ts.recent = t.value;
                self.ts.recent_at = now;
            }
            _ => self.ts.on = false,
        }
    }

    /// Adopts a changed `PathInfo`.
    #[inline]
    pub(crate) fn set_path(&mut self, path: &PathInfo) {
        if self.path != *path {
            let old = core::mem::replace(&mut self.path, *path);
            if old.mtu != path.mtu {
                self.on_path_mtu_changed();
            }
            self.update_segment_sizes();
        }
    }

    /// Computes segment sizes from peer, path and options (RFC 6691, RFC 9293 section 3.7.1).
    pub(crate) fn update_segment_sizes(&mut self) {
        let segment = self.segment_ceiling().min(self.mtu_search.limit());
        let segment = segment.max(MIN_SEGMENT_BYTES);
        self.segment_bytes = segment;
        let mss = segment.saturating_sub(self.usual_option_bytes());
        self.mss = u32::try_from(mss).unwrap_or(u32::from(u16::MAX));
        self.super_bytes = self.super_segment_bytes(mss);
        self.congestion.set_mss(self.mss, self.cfg.initial_window_segments);
        self.update_pacing();
    }

    /// What path, peer and user allow, bytes: a search for the path MTU may allow less.
    pub(crate) fn segment_ceiling(&self) -> usize {
        usize::from(self.peer_mss).min(self.path.mss()).min(self.segment_limit())
    }

    /// Payload of the largest super-segment, bytes: whole segments, the IP packet at most 65535.
    fn super_segment_bytes(&self, mss: usize) -> usize {
        let headers = self.path.ip_header_bytes.saturating_add(crate::wire::tcp::HEADER_BYTES);
        let headers = headers.saturating_add(self.usual_option_bytes());
        let largest = self.path.tso_bytes.unwrap_or(0).min(65_535).saturating_sub(headers);
        let (segments, _) = div_rem(largest as u64, mss as u64);
        (segments as usize).saturating_mul(mss).max(mss)
    }

    /// The MSS option of our SYN: that of the path ([`PathInfo::own_mss`]), or less by TCP_MAXSEG.
    pub(crate) fn own_mss(&self) -> usize {
        self.path.own_mss().min(self.segment_limit())
    }

    fn segment_limit(&self) -> usize {
        self.user.max_segment.map_or(usize::MAX, usize::from)
    }

    pub(crate) fn usual_option_bytes(&self) -> usize {
        if self.ts.on { TIMESTAMP_BYTES } else { 0 }
    }

    /// The sequence number of a position in the send space.
    #[inline]
    pub(crate) fn seq_of(&self, pos: u64) -> SeqNum {
        SeqNum(self.iss.0.wrapping_add(pos as u32))
    }

    /// The sequence number of a position in the receive space.
    #[inline]
    pub(crate) fn peer_seq_of(&self, pos: u64) -> SeqNum {
        SeqNum(self.irs.0.wrapping_add(pos as u32))
    }

    /// TSval: the timestamp clock, milliseconds (RFC 7323 section 5.4).
    #[inline]
    pub(crate) fn ts_clock(&self, now: Instant) -> u32 {
        now.as_millis_u32().wrapping_add(self.ts.offset)
    }

    /// The position after the last committed byte.
    #[inline]
    pub(crate) fn send_end(&self) -> u64 {
        self.send.ready_end().saturating_add(1)
    }

    /// FlightSize: positions sent and not acknowledged.
    #[inline]
    pub(crate) fn flight(&self) -> u64 {
        self.snd.nxt.saturating_sub(self.snd.una)
    }

    /// Whether the FIN may be sent: requested, and every claimed byte is committed.
    #[inline]
    pub(crate) fn fin_ready(&self) -> bool {
        self.fin.queued && !self.fin.sent && self.send.ready_end() == self.send.claimed_end()
    }

    /// Whether unsent bytes or an unsent FIN are pending.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        !self.fin.sent && (self.send_end() > self.snd.nxt || self.fin_ready())
    }

    /// The peer has acknowledged new data, or data leaves with none in flight.
    pub(crate) fn note_progress(&mut self, now: Instant) {
        self.times.last_progress = now;
        self.times.retries = 0;
    }

    /// Whether the state is a synchronized one.
    #[inline]
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(self.state, State::SynSent | State::SynReceived | State::Closed)
    }

    /// Enters CLOSED. The error for the user and `due.reset` remain.
    pub(crate) fn finish(&mut self, why: Option<ConnError>) {
        self.state = State::Closed;
        self.timers = Timers::new();
        self.due.ack = false;
        self.due.syn = false;
        self.due.probe = false;
        self.errors.ended_by = self.errors.ended_by.or(why);
        if !self.user.closed {
            self.errors.pending = self.errors.pending.or(why);
        }
    }

    /// Enters or restarts TIME-WAIT (RFC 9293 section 3.10.7.4, eighth).
    pub(crate) fn enter_time_wait(&mut self, now: Instant) {
        self.state = State::TimeWait;
        self.timers = Timers::new();
        self.timers.set_in(Timer::Idle, now, self.cfg.time_wait);
    }

    /// A connection in TIME-WAIT is closed because of a SYN that may open a new one; the stack's table keeps what is
    /// left of TIME-WAIT. `None`: in another state, or the SYN may not.
    pub fn leave_time_wait(&mut self, now: Instant, hdr: &Header) -> Option<TimeWait> {
        if !matches!(self.state, State::TimeWait) {
            return None;
        }
        let expires = self.timers.next().unwrap_or(now);
        let mut entry = TimeWait { expires, ..self.time_wait_entry(now) };
        if !matches!(entry.on_segment(now, hdr, 0), TimeWaitVerdict::Reopen { .. }) {
            return None;
        }
        self.finish(None);
        Some(entry)
    }

    /// The TIME-WAIT entry of this connection, for the stack's table.
    pub fn time_wait_entry(&self, now: Instant) -> TimeWait {
        let window = self.rcv.adv.saturating_sub(self.rcv.nxt) >> self.scale.rcv;
        TimeWait {
            snd_nxt: self.seq_of(self.snd.nxt),
            rcv_nxt: self.peer_seq_of(self.rcv.nxt),
            window: u16::try_from(window).unwrap_or(u16::MAX),
            timestamps: self.ts.on.then_some((self.ts.offset, self.ts.recent)),
            offers_timestamps: self.cfg.timestamps,
            ports: (self.key.local_port, self.key.remote_port),
            duration: self.cfg.time_wait,
            expires: later(now, self.cfg.time_wait),
            challenge_limit: crate::tcp::challenge::ChallengeLimit::new(),
        }
    }

    /// An outgoing header at position `pos`, with acknowledgement and timestamps.
    pub(crate) fn header_at(&self, pos: u64, flags: Flags, now: Instant) -> Header {
        let timestamps = self.ts.on.then(|| crate::wire::tcp::Timestamps {
            value: self.ts_clock(now),
            echo: self.ts.recent,
        });
        Header {
            src_port: self.key.local_port,
            dst_port: self.key.remote_port,
            seq: self.seq_of(pos),
            ack: if flags.contains(Flags::ACK) {
                self.peer_seq_of(self.rcv.nxt)
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
