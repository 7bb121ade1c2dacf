//! Packetisation-layer path MTU discovery (RFC 4821): the segment size is found by probes and their
//! acknowledgements, without ICMP.
//!
//! ```text
//!            smaller, after time-outs                     larger, by probes
//!   floor <── base <── size in use         low ──────── probe ──────────── high
//!                                           | known to pass                 | path and peer allow it,
//!                                           | (segments have this size)     | and no probe of it was lost
//! ```
//!
//! **Black holes** (section 7.7). A path that loses large packets silently lets small ones pass: the handshake
//! succeeds and the first full segment is lost whenever it is sent. After the original and two retransmissions
//! (MAX_PROBES of RFC 8899 section 5.1.2) segments get the base size, after one more the floor. An outage looks
//! the same. So the size that was in use is probed for first: once the path is back, that size is restored
//! after a round trip.
//!
//! **Probes** (section 7.3). A probe is a segment larger than the others, filled with new data that would be sent now
//! anyway. A few more segments follow it, so that their ACKs reveal its loss. If the probe is acknowledged, its size is
//! the new low. If the probe alone is lost, the loss is not a sign of congestion: its bytes are retransmitted in
//! smaller segments, and the window stays (section 7.6.2). A size that is lost [`MAX_PROBES`] times is the new high.
//! The largest size that path and peer allow is tried first, since most paths pass it; after that the search halves the
//! interval. Ten minutes after its end it is repeated.
//!
//! Sizes are of segments, TCP options included: MTU less IP and TCP header. What limits them is evaluated in
//! [`Tcb::update_segment_sizes`]; what an ICMP message may do is decided in [`icmp`](crate::tcp::input::icmp).
//!
//! Differences from Linux, which has the same three modes:
//! - Linux waits for about 3 s and then halves the size with each time-out, down to 48 bytes; here it is
//!   1.4 s, and no less than each host must accept (576 and 1280 bytes of packet).
//! - Linux gives up a size after one lost probe, here after three: otherwise random loss would
//!   leave a connection with small segments for ten minutes.
//! - Linux begins in the middle of the interval; here it is the upper end.

use crate::base::{Counter, Counters, Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::timers::later;

/// When a connection probes for its segment size (`net.ipv4.tcp_mtu_probing` of Linux).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum MtuProbing {
    /// Never: only ICMP messages lower it (0 on Linux, and its default).
    Off,
    /// After a black hole was found: segments become smaller, and larger ones are probed for from then on (1).
    #[default]
    BlackHole,
    /// Always: a connection begins with segments of 1024 bytes and probes for larger ones (2).
    Always,
}

/// Segments at the start of a search (RFC 4821 section 7.2, `tcp_base_mss` of Linux).
const BASE_SEGMENT_BYTES: usize = 1024;

/// Losses of a size, or time-outs of a segment, before it counts as too large (RFC 8899 section 5.1.2).
const MAX_PROBES: u8 = 3;

/// The search ends when fewer bytes are open (`tcp_probe_threshold` of Linux).
const THRESHOLD_BYTES: usize = 8;

/// Until a larger size is tried again (RFC 4821 section 7.3, `tcp_probe_interval` of Linux).
const REPEAT_AFTER: Duration = Duration::from_secs(600);

/// Segments behind a probe: with three duplicate ACKs its loss is found without a time-out, and one may be lost.
const TRAILING_SEGMENTS: u64 = 4;

/// A probe in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MtuProbe {
    pub start: u64,
    pub end: u64,
    segment_bytes: usize,
}

impl MtuProbe {
    /// Whether it contains all of a range.
    pub(crate) fn covers(&self, start: u64, bytes: u64) -> bool {
        self.start <= start && start.saturating_add(bytes) <= self.end
    }
}

/// The state of the search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MtuSearch {
    /// search_low: the largest size known to pass. `None`: there was no reason to search.
    low: Option<usize>,
    /// search_high: this size may pass, larger ones were lost. The path's or the peer's limit may be less.
    high: usize,
    /// The size to be tried first.
    first: usize,
    probe: Option<MtuProbe>,
    /// Losses of the size that is being tried.
    losses: u8,
    /// No probe before: the search is complete.
    next_at: Instant,
    /// At the last output, the time for a probe had come.
    is_due: bool,
}

impl MtuSearch {
    pub(crate) const fn new() -> MtuSearch {
        MtuSearch {
            low: None,
            high: usize::MAX,
            first: usize::MAX,
            probe: None,
            losses: 0,
            next_at: Instant::ZERO,
            is_due: false,
        }
    }

    /// The largest size that is sent without being a probe.
    #[inline]
    pub(crate) fn limit(&self) -> usize {
        self.low.unwrap_or(usize::MAX)
    }

    /// The probe in flight.
    #[inline]
    pub(crate) fn probe(&self) -> Option<MtuProbe> {
        self.probe
    }

    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Path or peer allow another size: the search is open again.
    pub(crate) fn reopen(&mut self) {
        (self.high, self.first, self.losses) = (usize::MAX, usize::MAX, 0);
        self.next_at = Instant::ZERO;
    }

    /// The size to try, of those up to `limit`; `None` if the search is complete.
    fn next_size(&self, limit: usize) -> Option<usize> {
        let (low, high) = (self.low?, self.high.min(limit));
        let first = self.first.min(limit);
        if first > low && first <= high {
            return Some(first);
        }
        let open = high.checked_sub(low)?;
        (open >= THRESHOLD_BYTES).then(|| low.saturating_add(open / 2))
    }

    /// A size was lost.
    fn on_lost(&mut self, size: usize) {
        self.losses = self.losses.saturating_add(1);
        if self.losses >= MAX_PROBES {
            (self.high, self.losses) = (size.saturating_sub(1), 0);
        }
    }
}

impl Tcb {
    /// Sets the mode. `Off` restores the size that path and peer allow; `Always` starts a search at
    /// the base size, unless one is under way.
    pub fn set_mtu_probing(&mut self, mode: MtuProbing) {
        self.cfg.mtu_probing = mode;
        if matches!(mode, MtuProbing::Off) {
            self.mtu_search = MtuSearch::new();
            self.update_segment_sizes();
        } else if self.is_synchronized() {
            self.begin_mtu_search();
        }
    }

    /// The mode in effect.
    pub fn mtu_probing(&self) -> MtuProbing {
        self.cfg.mtu_probing
    }

    /// The connection is established.
    pub(crate) fn begin_mtu_search(&mut self) {
        if matches!(self.cfg.mtu_probing, MtuProbing::Always) && self.mtu_search.low.is_none() {
            self.mtu_search.low = Some(self.base_segment_bytes());
            self.update_segment_sizes();
        }
    }

    /// Before output: whether it is time for a probe.
    #[inline]
    pub(crate) fn update_mtu_probe_due(&mut self, now: Instant) {
        if self.mtu_search.low.is_some() {
            self.mtu_search.is_due =
                self.mtu_search.probe.is_none() && now >= self.mtu_search.next_at;
        }
    }

    /// Section 7.4: the next new data as a probe, of those `unsent` bytes that may be in one segment. `Wait` if it
    /// is worth waiting until the windows admit it: more than three segments are in flight then, whose
    /// ACKs are sure to come.
    pub(crate) fn plan_mtu_probe(&self, unsent: u64, usable: u64) -> ProbeStep {
        let segments = |n: u64| self.smss().saturating_mul(n);
        let window = self.congestion.cwnd().min(self.snd.wnd);
        // The peer's window must admit the trailing segments, too.
        let reach = self.snd.max_wnd.saturating_sub(segments(TRAILING_SEGMENTS));
        let limit = self.segment_ceiling().min(usize::try_from(reach).unwrap_or(usize::MAX));
        let Some(size) = self.mtu_search.next_size(limit) else { return ProbeStep::No };
        let bytes = size.saturating_sub(self.usual_option_bytes());
        let needed = (bytes as u64).saturating_add(segments(TRAILING_SEGMENTS));
        let is_quiet = self.recovery.is_quiet() && self.sacked.is_clean() && !self.due.probe;
        let is_plain = self.full_segment_bytes() == self.mss as usize;
        if !is_quiet || !is_plain || unsent < needed || window < needed {
            return ProbeStep::No;
        }
        if usable < (bytes as u64).saturating_add(self.smss()) {
            return ProbeStep::Wait;
        }
        ProbeStep::Send(bytes)
    }

    /// The probe that starts at `start` was sent, with `bytes` of payload.
    pub(crate) fn on_mtu_probe_sent(&mut self, start: u64, bytes: usize, counters: &mut Counters) {
        let segment_bytes = bytes.saturating_add(self.usual_option_bytes());
        let end = start.saturating_add(bytes as u64);
        let probe = MtuProbe { start, end, segment_bytes };
        (self.mtu_search.probe, self.mtu_search.is_due) = (Some(probe), false);
        counters.count(Counter::TcpMtuProbes);
    }

    /// `snd.una` has advanced. Section 7.6.1: an acknowledged probe is the size of segments from now on.
    #[inline]
    pub(crate) fn check_mtu_probe(&mut self, now: Instant, counters: &mut Counters) {
        if let Some(probe) = self.mtu_search.probe.filter(|p| p.end <= self.snd.una) {
            self.on_mtu_probe_acked(&probe, now, counters);
        }
    }

    #[inline(never)]
    fn on_mtu_probe_acked(&mut self, probe: &MtuProbe, now: Instant, counters: &mut Counters) {
        self.mtu_search.probe = None;
        self.mtu_search.losses = 0;
        self.mtu_search.low = self.mtu_search.low.max(Some(probe.segment_bytes));
        counters.count(Counter::TcpMtuProbesAcked);
        self.update_segment_sizes();
        self.end_mtu_search_if_complete(now);
    }

    /// Section 7.6.2: the loss that was just found is that of the probe, and of nothing else.
    pub(crate) fn is_mtu_probe_lost(&self) -> bool {
        let Some(probe) = self.mtu_search.probe else { return false };
        let lost = self.sacked.first_lost(0);
        probe.start == self.snd.una
            && lost.is_some_and(|(start, end)| probe.covers(start, end.saturating_sub(start)))
            && probe.covers(probe.start, self.sacked.lost_bytes())
    }

    /// The probe was lost: its bytes are retransmitted in smaller segments. The congestion window stays. A loss
    /// behind the probe begins an episode of its own.
    pub(crate) fn on_mtu_probe_lost(&mut self, now: Instant, counters: &mut Counters) {
        let Some(probe) = self.mtu_search.probe.take() else { return };
        self.mtu_search.on_lost(probe.segment_bytes);
        self.end_mtu_search_if_complete(now);
        self.sacked.mark_lost_to(probe.end, |_| {});
        self.repair_to(probe.end);
        counters.count(Counter::TcpMtuProbesLost);
    }

    /// `start..end` is sent again: whether the probe passed can no longer be known.
    pub(crate) fn forget_mtu_probe(&mut self, start: u64, end: u64) {
        if self.mtu_search.probe.is_some_and(|p| start < p.end && p.start < end) {
            self.mtu_search.probe = None;
        }
    }

    fn end_mtu_search_if_complete(&mut self, now: Instant) {
        if self.mtu_search.next_size(self.segment_ceiling()).is_none() {
            self.mtu_search.reopen();
            self.mtu_search.next_at = later(now, REPEAT_AFTER);
        }
    }

    /// A retransmission time-out (section 7.7). With the third in a row, segments that are larger than
    /// those tried next count as lost in a black hole.
    pub(crate) fn check_black_hole(&mut self, counters: &mut Counters) {
        if let Some(probe) = self.mtu_search.probe.take() {
            self.mtu_search.on_lost(probe.segment_bytes);
        }
        let is_off = matches!(self.cfg.mtu_probing, MtuProbing::Off);
        let lost = u64::from(self.rtt.backoff()).saturating_add(1);
        let (base, least) = (self.base_segment_bytes(), self.least_segment_bytes());
        // Bytes in flight, as one segment: a size that would hold them changes nothing.
        let flight = self.flight().saturating_add(self.usual_option_bytes() as u64);
        let is_larger = |size: usize| self.segment_bytes > size && flight > size as u64;
        let smaller = if is_larger(base) { base } else { least };
        if is_off || lost < u64::from(MAX_PROBES) || !is_larger(smaller) {
            return;
        }
        let first = match self.mtu_search.first {
            usize::MAX => self.segment_bytes,
            known => known.max(self.segment_bytes),
        };
        self.mtu_search.reopen();
        (self.mtu_search.low, self.mtu_search.first) = (Some(smaller), first);
        counters.count(Counter::TcpBlackHoles);
        self.update_segment_sizes();
    }

    fn base_segment_bytes(&self) -> usize {
        BASE_SEGMENT_BYTES.max(self.least_segment_bytes()).min(self.segment_ceiling())
    }
}

/// The answer of [`Tcb::plan_mtu_probe`].
pub(crate) enum ProbeStep {
    /// No probe now.
    No,
    /// Send nothing new before the windows admit the probe.
    Wait,
    /// A probe with this payload in bytes.
    Send(usize),
}
