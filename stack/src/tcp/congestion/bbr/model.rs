//! The parts of the path model: rounds, the filters of bandwidth, round-trip time and aggregation,
//! and the estimator of a full pipe. Each is a value with one way to update it.

use crate::base::{Duration, Instant};
use crate::tcp::arith::div_rem;
use crate::tcp::congestion::Sample;
use crate::tcp::rtt::nanos;

/// Not bounded.
pub(super) const INFINITE: u64 = u64::MAX;

/// BBR.MinRTTFilterLen and BBR.ProbeRTTInterval.
const MIN_RTT_WINDOW: Duration = Duration::from_secs(10);
const PROBE_RTT_INTERVAL: Duration = Duration::from_secs(5);

/// Rounds after which half of the aggregation filter is forgotten: BBR.ExtraAckedFilterLen is 10.
const EXTRA_ACKED_ROUNDS: u64 = 5;

/// Rounds without growth after which the pipe is full, and the growth in percent.
const FULL_ROUNDS: u8 = 3;
const FULL_GROWTH_PERCENT: u64 = 125;

/// `percent` hundredths of `value`.
pub(super) fn percent(value: u64, percent: u64) -> u64 {
    match value.checked_mul(percent) {
        Some(product) => product / 100,
        None => (value / 100).saturating_mul(percent),
    }
}

/// Bytes that `rate`, bytes per second, sends in `ns`.
pub(super) fn volume(rate: u64, ns: u64) -> u64 {
    match rate.checked_mul(ns) {
        Some(product) => product / 1_000_000_000,
        None => (rate / 1000).saturating_mul(ns / 1_000_000),
    }
}

/// Packet-timed round trips ("BBR.round_count").
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rounds {
    pub count: u64,
    /// The round ends with the first ACK of bytes that were sent when C.delivered was at least
    /// this.
    end: u64,
    /// This ACK began a round.
    pub is_start: bool,
    /// Rounds since bandwidth was probed.
    pub since_probe: u64,
}

impl Rounds {
    pub(super) fn update(&mut self, prior_delivered: Option<u64>, total_delivered: u64) {
        self.is_start = prior_delivered.is_some_and(|prior| prior >= self.end);
        if self.is_start {
            self.begin(total_delivered);
            self.count = self.count.saturating_add(1);
            self.since_probe = self.since_probe.saturating_add(1);
        }
    }

    pub(super) fn begin(&mut self, total_delivered: u64) {
        self.end = total_delivered;
    }
}

/// BBR.max_bw: the largest rate of this and the last cycle of probing, bytes per second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MaxBandwidth {
    last: u64,
    this: u64,
}

impl MaxBandwidth {
    pub(super) fn get(&self) -> u64 {
        self.last.max(self.this)
    }

    pub(super) fn update(&mut self, s: &Sample) {
        if s.rate > 0 && (s.rate >= self.get() || !s.is_app_limited) {
            self.this = self.this.max(s.rate);
        }
    }

    /// A cycle ends. One without a sample keeps the last.
    pub(super) fn advance(&mut self) {
        if self.this > 0 {
            (self.last, self.this) = (self.this, 0);
        }
    }
}

/// BBR.min_rtt and the schedule of ProbeRTT; nanoseconds, [`INFINITE`] before the first sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct MinRtt {
    pub ns: u64,
    at: Instant,
    /// The least of the last five seconds, and when it was seen.
    recent_ns: u64,
    pub recent_at: Instant,
    /// A refresh is due (BBR.probe_rtt_expired).
    pub is_expired: bool,
}

impl MinRtt {
    /// The least, once there was a sample.
    pub(super) fn known(&self) -> Option<Duration> {
        (self.ns != INFINITE).then(|| Duration::from_nanos(self.ns))
    }

    pub(super) fn new() -> MinRtt {
        let at = Instant::ZERO;
        MinRtt { ns: INFINITE, at, recent_ns: INFINITE, recent_at: at, is_expired: false }
    }

    pub(super) fn update(&mut self, rtt: Option<Duration>, now: Instant) {
        if self.recent_ns == INFINITE {
            (self.at, self.recent_at) = (now, now);
        }
        self.is_expired = now.since(self.recent_at) > PROBE_RTT_INTERVAL;
        if let Some(ns) = rtt.map(|r| nanos(r).max(1))
            && (ns < self.recent_ns || self.is_expired)
        {
            (self.recent_ns, self.recent_at) = (ns, now);
        }
        if self.recent_ns < self.ns || now.since(self.at) > MIN_RTT_WINDOW {
            (self.ns, self.at) = (self.recent_ns, self.recent_at);
        }
    }
}

/// BBR.extra_acked: how much more than the bandwidth's share is acknowledged at once, bytes. A maximum
/// of five to ten rounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aggregation {
    pub since: Instant,
    delivered: u64,
    slots: [u64; 2],
    rounds: u64,
}

/// One ACK, as [`Aggregation::update`] sees it.
pub(super) struct Acked {
    pub now: Instant,
    pub bytes: u64,
    /// BBR.bw.
    pub rate: u64,
    pub cwnd: u64,
    pub is_round_start: bool,
    /// The pipe has been full once.
    pub is_full: bool,
}

impl Aggregation {
    pub(super) fn new() -> Aggregation {
        Aggregation { since: Instant::ZERO, delivered: 0, slots: [0; 2], rounds: 0 }
    }

    pub(super) fn get(&self) -> u64 {
        let [a, b] = self.slots;
        a.max(b)
    }

    pub(super) fn update(&mut self, ack: &Acked) {
        if ack.is_round_start {
            self.rounds = self.rounds.saturating_add(1);
            let longest = if ack.is_full { EXTRA_ACKED_ROUNDS } else { 1 };
            if self.rounds >= longest {
                let [this, _] = self.slots;
                self.slots = [0, if ack.is_full { this } else { 0 }];
                self.rounds = 0;
            }
        }
        let mut expected = volume(ack.rate, nanos(ack.now.since(self.since)));
        if self.delivered <= expected {
            (self.delivered, self.since, expected) = (0, ack.now, 0);
        }
        self.delivered = self.delivered.saturating_add(ack.bytes);
        let extra = self.delivered.saturating_sub(expected).min(ack.cwnd);
        let [this, last] = self.slots;
        self.slots = [this.max(extra), last];
    }
}

/// The estimator of a full pipe ("Exiting Acceleration Based on Bandwidth Plateau").
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FullPipe {
    /// BBR.full_bw_reached: ever.
    pub was_reached: bool,
    /// BBR.full_bw_now: since the last reset.
    pub is_reached: bool,
    /// BBR.full_bw, bytes per second.
    rate: u64,
    rounds: u8,
}

impl FullPipe {
    /// ResetFullBW: growth is measured against `rate` from now on.
    pub(super) fn reset(&mut self, rate: u64) {
        *self = FullPipe { was_reached: self.was_reached, rate, ..FullPipe::default() };
    }

    /// Growth on any ACK of a round counts, as in Linux; the draft looks at the first ACK only, which
    /// on a noisy path can miss it.
    pub(super) fn update(&mut self, s: &Sample, rounds: &Rounds) {
        if self.is_reached || s.is_app_limited || s.rate == 0 {
            return;
        }
        if s.rate >= percent(self.rate, FULL_GROWTH_PERCENT) {
            return self.reset(s.rate);
        }
        if !rounds.is_start {
            return;
        }
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds >= FULL_ROUNDS {
            (self.is_reached, self.was_reached) = (true, true);
        }
    }
}

/// Numbers for the random parts of waiting times: a hash of a counter (splitmix64).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Jitter(u64);

impl Jitter {
    /// A number below `n`; `salt` differs between connections.
    pub(super) fn below(&mut self, n: u64, salt: u64) -> u64 {
        self.0 = self.0.wrapping_add(salt).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        div_rem(z ^ (z >> 31), n).1
    }
}
