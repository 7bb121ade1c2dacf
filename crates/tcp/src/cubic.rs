//! CUBIC congestion control (RFC 9438) with the slow start and time-out rules of RFC 5681, in
//! integer arithmetic.
//!
//! All windows are in bytes, all times in milliseconds. The module has no sequence numbers: the
//! engine reports acknowledged bytes while the connection is cwnd-limited, and detected loss.
//!
//! ```text
//! cwnd                            W_cubic(t) = C (t - K)^3 + W_max
//!   |  W_max ......____----....        C = 0.4 segments/s^3
//!   |        \   /-                    K = cbrt((W_max - cwnd_epoch) / C)
//!   |         \ /   <- 0.7 W_max
//!   +----------|------|--------- t
//!              0      K
//! ```
//!
//! Deviation: slow start counts every acknowledged byte (RFC 3465 without the limit L), as Linux
//! does, because one ACK usually covers a super-segment.

use crate::arith::div_rem;
use fulmar_base::{Duration, Instant};

/// beta_cubic = 0.7 (section 4.6), in tenths.
const BETA_TENTHS: u64 = 7;
/// (1 + beta) / 2 for fast convergence (section 4.7), in hundredths.
const FAST_CONVERGENCE_HUNDREDTHS: u64 = 85;
/// alpha_cubic = 3 (1 - beta) / (1 + beta) = 9/17 (section 4.3).
const ALPHA_NUM: u64 = 9;
const ALPHA_DEN: u64 = 17;
/// Upper bound of |t - K|, ms; its cube fits 63 bits.
const MAX_T_MS: u64 = 1_000_000;
/// Upper bound of cwnd: above the largest scaled window, 2^30.
const MAX_CWND: u64 = 1 << 31;

/// The state of one connection's congestion window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cubic {
    cwnd: u64,
    ssthresh: u64,
    mss: u64,
    initial_window: u64,
    /// Window before the last reduction, bytes.
    w_max: u64,
    /// Start of the current congestion avoidance epoch; `None` before its first ACK.
    epoch: Option<Instant>,
    /// Milliseconds from the epoch to `origin`.
    k_ms: u64,
    /// The plateau of the curve, bytes.
    origin: u64,
    /// The Reno-friendly window (section 4.3), bytes.
    w_est: u64,
    /// cwnd before the last reduction, bytes: above it `w_est` grows with alpha 1.
    cwnd_prior: u64,
    /// Remainders of the divisions by cwnd, for cwnd and `w_est`.
    carry: u64,
    est_carry: u64,
}

impl Cubic {
    pub(crate) fn new(mss: u32, initial_window_segments: u32) -> Cubic {
        let mss = u64::from(mss.max(1));
        let initial_window = initial_window(mss, u64::from(initial_window_segments));
        Cubic {
            cwnd: initial_window,
            ssthresh: MAX_CWND,
            mss,
            initial_window,
            w_max: 0,
            epoch: None,
            k_ms: 0,
            origin: 0,
            w_est: 0,
            cwnd_prior: 0,
            carry: 0,
            est_carry: 0,
        }
    }

    #[inline]
    pub(crate) fn cwnd(&self) -> u64 {
        self.cwnd
    }

    pub(crate) fn ssthresh(&self) -> u64 {
        self.ssthresh
    }

    pub(crate) fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// Sets the segment size. The initial window is recomputed as long as cwnd still equals it.
    pub(crate) fn set_mss(&mut self, mss: u32, initial_window_segments: u32) {
        let untouched = self.cwnd == self.initial_window;
        self.mss = u64::from(mss.max(1));
        self.initial_window = initial_window(self.mss, u64::from(initial_window_segments));
        if untouched {
            self.cwnd = self.initial_window;
        }
        self.cwnd = self.cwnd.max(self.mss);
    }

    /// `acked` bytes were newly acknowledged outside of fast recovery. Called only while the
    /// connection is cwnd-limited (section 5.8).
    #[inline]
    pub(crate) fn on_ack(&mut self, acked: u64, now: Instant, srtt: Duration) {
        let mut acked = acked;
        if self.cwnd < self.ssthresh {
            let step = acked.min(self.ssthresh.saturating_sub(self.cwnd));
            self.cwnd = self.cwnd.saturating_add(step).min(MAX_CWND);
            acked = acked.saturating_sub(step);
        }
        if acked > 0 && self.cwnd < MAX_CWND {
            self.avoid_congestion(acked, now, srtt);
        }
    }

    /// Congestion avoidance (section 4.2 to 4.5).
    fn avoid_congestion(&mut self, acked: u64, now: Instant, srtt: Duration) {
        let epoch = match self.epoch {
            Some(e) => e,
            None => self.begin_epoch(now),
        };
        let t_ms = u64::try_from(now.since(epoch).as_millis()).unwrap_or(MAX_T_MS);
        let rtt_ms = u64::try_from(srtt.as_millis()).unwrap_or(MAX_T_MS);
        self.grow_w_est(acked);
        if self.w_cubic(t_ms) < self.w_est {
            self.cwnd = self.cwnd.max(self.w_est).min(MAX_CWND);
            return;
        }
        let high = self.cwnd.saturating_add(self.cwnd / 2);
        let target = self.w_cubic(t_ms.saturating_add(rtt_ms)).clamp(self.cwnd, high);
        let gain = target.saturating_sub(self.cwnd).saturating_mul(acked);
        let sum = self.carry.saturating_add(gain);
        let (step, carry) = div_rem(sum, self.cwnd);
        self.carry = carry;
        self.cwnd = self.cwnd.saturating_add(step).min(MAX_CWND);
    }

    fn begin_epoch(&mut self, now: Instant) -> Instant {
        if self.cwnd < self.w_max {
            self.origin = self.w_max;
            let diff = self.w_max.saturating_sub(self.cwnd).min(MAX_CWND);
            // K^3 = diff / (0.4 mss) s^3 = diff * 2.5e9 / mss ms^3.
            self.k_ms = cube_root(div_rem(diff.saturating_mul(2_500_000_000), self.mss).0);
        } else {
            self.origin = self.cwnd;
            self.k_ms = 0;
        }
        self.w_est = self.cwnd;
        self.carry = 0;
        self.est_carry = 0;
        self.epoch = Some(now);
        now
    }

    /// The curve at `t_ms` after the epoch, bytes (section 4.2).
    fn w_cubic(&self, t_ms: u64) -> u64 {
        let d = t_ms.abs_diff(self.k_ms).min(MAX_T_MS);
        // 0.4 mss d^3 / 1e9, the division split so that no product overflows 64 bits.
        let cube = d.saturating_mul(d).saturating_mul(d);
        let delta = (cube / 1_000_000).saturating_mul(self.mss.saturating_mul(4)) / 10_000;
        if t_ms < self.k_ms {
            self.origin.saturating_sub(delta)
        } else {
            self.origin.saturating_add(delta).min(MAX_CWND)
        }
    }

    /// W_est += alpha * acked / cwnd segments (section 4.3).
    fn grow_w_est(&mut self, acked: u64) {
        let (num, den) =
            if self.w_est >= self.cwnd_prior { (1, 1) } else { (ALPHA_NUM, ALPHA_DEN) };
        let gain = acked.saturating_mul(self.mss).saturating_mul(num);
        let sum = self.est_carry.saturating_add(gain);
        let (step, carry) = div_rem(sum, self.cwnd.saturating_mul(den));
        self.est_carry = carry;
        self.w_est = self.w_est.saturating_add(step).min(MAX_CWND);
    }

    /// Loss detected by duplicate acknowledgements: multiplicative decrease (sections 4.6 and 4.7).
    pub(crate) fn on_congestion(&mut self) {
        self.cwnd_prior = self.cwnd;
        self.w_max = if self.cwnd < self.w_max {
            self.cwnd.saturating_mul(FAST_CONVERGENCE_HUNDREDTHS) / 100
        } else {
            self.cwnd
        };
        let reduced = self.cwnd.saturating_mul(BETA_TENTHS) / 10;
        self.ssthresh = reduced.max(self.mss.saturating_mul(2));
        self.cwnd = self.ssthresh;
        self.epoch = None;
    }

    /// First retransmission time-out of a segment (section 4.8, RFC 5681 section 3.1): reduces
    /// ssthresh; cwnd becomes one segment.
    pub(crate) fn on_timeout(&mut self) {
        self.on_congestion();
        self.on_repeated_timeout();
    }

    /// Further time-outs of the same segment: ssthresh stays.
    pub(crate) fn on_repeated_timeout(&mut self) {
        self.cwnd = self.mss;
        self.epoch = None;
    }

    /// Idle for longer than the time-out: restart from the initial window (RFC 5681 section 4.1).
    pub(crate) fn on_idle(&mut self) {
        self.cwnd = self.cwnd.min(self.initial_window);
        self.epoch = None;
    }

    /// The SYN was lost: cwnd becomes one segment (RFC 6928 section 2, RFC 5681 section 3.1).
    pub(crate) fn on_syn_lost(&mut self) {
        self.cwnd = self.mss;
    }
}

/// IW of RFC 6928 section 2, bytes: for 10 segments min(10 MSS, max(2 MSS, 14600)).
fn initial_window(mss: u64, segments: u64) -> u64 {
    let whole = mss.saturating_mul(segments.max(1));
    let cap = mss.saturating_mul(2).max(segments.saturating_mul(1460));
    whole.min(cap)
}

/// The largest r with r^3 <= n.
fn cube_root(n: u64) -> u64 {
    let (mut low, mut high) = (0u64, 2_642_245u64); // 2642245^3 < 2^64
    while low < high {
        let mid = low.saturating_add(high).saturating_add(1) / 2;
        if mid.saturating_mul(mid).saturating_mul(mid) <= n {
            low = mid;
        } else {
            high = mid.saturating_sub(1);
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1448;
    const RTT: Duration = Duration::from_millis(100);

    fn lossy(cwnd_segments: u64) -> Cubic {
        let mut c = Cubic::new(MSS, 10);
        c.cwnd = cwnd_segments * u64::from(MSS);
        c.on_congestion();
        c
    }

    #[test]
    fn the_initial_window_is_ten_segments_but_not_much_more_than_14600_bytes() {
        assert_eq!(Cubic::new(1448, 10).cwnd(), 14_480);
        assert_eq!(Cubic::new(1460, 10).cwnd(), 14_600);
        assert_eq!(Cubic::new(9000, 10).cwnd(), 18_000);
    }

    #[test]
    fn slow_start_counts_every_acknowledged_byte() {
        let mut c = Cubic::new(MSS, 10);
        c.on_ack(14_480, Instant::ZERO, RTT);
        assert_eq!(c.cwnd(), 28_960);
    }

    #[test]
    fn loss_reduces_to_seven_tenths_and_a_time_out_to_one_segment() {
        let mut c = lossy(100);
        assert_eq!(c.cwnd(), 100 * 1448 * 7 / 10);
        assert_eq!(c.ssthresh(), c.cwnd());
        c.on_timeout();
        assert_eq!(c.cwnd(), 1448);
        assert_eq!(c.ssthresh(), 100 * 1448 * 49 / 100);
        let kept = c.ssthresh();
        c.on_repeated_timeout();
        assert_eq!(c.ssthresh(), kept);
    }

    #[test]
    fn a_second_loss_below_the_plateau_converges_fast() {
        let mut c = lossy(100);
        c.on_congestion();
        assert_eq!(c.w_max, 70 * 1448 * 85 / 100);
    }

    #[test]
    fn the_window_returns_to_the_plateau_after_k_and_probes_beyond() {
        let segments = 1000u64;
        let mut c = lossy(segments);
        let mut now = Instant::from_millis(1000);
        // K = cbrt(300 / 0.4) = 9.08 s
        let mut at_k = 0;
        for ms in (0..20_000u64).step_by(100) {
            now = Instant::from_millis(1000 + ms);
            c.on_ack(c.cwnd(), now, RTT); // one window per round trip
            if ms == 9100 {
                at_k = c.cwnd() / 1448;
            }
        }
        assert!(now > Instant::from_millis(20_000));
        assert!((8_900..9_200).contains(&c.k_ms), "K = {} ms", c.k_ms);
        assert!((980..=1010).contains(&at_k), "{at_k} segments at K");
        assert!(c.cwnd() / 1448 > 1300, "{} segments after 20 s", c.cwnd() / 1448);
    }

    #[test]
    fn on_a_short_path_it_is_never_slower_than_reno() {
        let mut c = lossy(20);
        let rtt = Duration::from_millis(1);
        let before = c.cwnd();
        for i in 0..100u64 {
            c.on_ack(c.cwnd(), Instant::from_millis(i), rtt);
        }
        // 100 round trips of Reno with alpha 9/17 add at least 52 segments.
        assert!(c.cwnd() - before >= 52 * 1448, "grew {}", (c.cwnd() - before) / 1448);
    }

    #[test]
    fn small_acks_add_up_to_the_same_growth_as_large_ones() {
        let (mut a, mut b) = (lossy(100), lossy(100));
        for c in [&mut a, &mut b] {
            c.on_ack(1, Instant::from_millis(5_000), RTT);
        }
        let (later, before) = (Instant::from_millis(6_000), a.cwnd());
        for _ in 0..70 {
            a.on_ack(u64::from(MSS), later, RTT);
            (0..MSS).for_each(|_| b.on_ack(1, later, RTT));
        }
        let (ga, gb) = ((a.cwnd() - before) as f64, (b.cwnd() - before) as f64);
        assert!(ga > 10_000.0 && (ga / gb - 1.0).abs() < 0.05, "{ga} against {gb}");
    }

    #[test]
    fn cube_roots_are_exact() {
        for r in [0u64, 1, 2, 9, 1000, 123_456, 2_642_245] {
            assert_eq!(cube_root(r * r * r), r);
        }
        assert_eq!(cube_root(26), 2);
        assert_eq!(cube_root(u64::MAX), 2_642_245);
    }
}
