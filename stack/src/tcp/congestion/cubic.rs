//! CUBIC congestion control (RFC 9438), in integer arithmetic: windows in bytes, times in
//! milliseconds.
//!
//! ```text
//! cwnd                            W_cubic(t) = C (t - K)^3 + W_max
//!   |  W_max ......____----....        C = 0.4 segments/s^3
//!   |        \   /-                    K = cbrt((W_max - cwnd_epoch) / C)
//!   |         \ /   <- 0.7 W_max
//!   +----------|------|--------- t
//!              0      K
//! ```

use super::window::MAX_CWND;
use super::{Ack, Controller, Window};
use crate::base::{Duration, Instant};
use crate::tcp::arith::div_rem;

/// beta_cubic = 0.7 (section 4.6), in hundredths.
const BETA_HUNDREDTHS: u64 = 70;
/// beta_ecn = 0.85 (RFC 8511 section 3.1), in hundredths.
const BETA_ECN_HUNDREDTHS: u64 = 85;
/// (1 + beta) / 2 for fast convergence (section 4.7), in hundredths.
const FAST_CONVERGENCE_HUNDREDTHS: u64 = 85;
/// alpha_cubic = 3 (1 - beta) / (1 + beta) = 9/17 (section 4.3).
const ALPHA_NUM: u64 = 9;
const ALPHA_DEN: u64 = 17;
/// Upper bound of |t - K|, ms; its cube fits 63 bits.
const MAX_T_MS: u64 = 1_000_000;

/// The state of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cubic {
    window: Window,
    curve: Curve,
    /// The state before the last reduction (section 4.9.2).
    saved: Option<(Window, Curve)>,
}

/// The curve of congestion avoidance.
#[derive(Clone, Copy, Debug, Default)]
struct Curve {
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
    pub(super) fn new(window: Window) -> Cubic {
        Cubic { window, curve: Curve::default(), saved: None }
    }

    /// Congestion avoidance (section 4.2 to 4.5).
    fn avoid_congestion(&mut self, acked: u64, now: Instant, srtt: Duration) {
        let epoch = match self.curve.epoch {
            Some(e) => e,
            None => self.begin_epoch(now),
        };
        let t_ms = u64::try_from(now.since(epoch).as_millis()).unwrap_or(MAX_T_MS);
        let rtt_ms = u64::try_from(srtt.as_millis()).unwrap_or(MAX_T_MS);
        self.grow_w_est(acked);
        if self.w_cubic(t_ms) < self.curve.w_est {
            self.window.cwnd = self.window.cwnd.max(self.curve.w_est).min(MAX_CWND);
            return;
        }
        let high = self.window.cwnd.saturating_add(self.window.cwnd / 2);
        let target = self.w_cubic(t_ms.saturating_add(rtt_ms)).clamp(self.window.cwnd, high);
        let gain = target.saturating_sub(self.window.cwnd).saturating_mul(acked);
        let sum = self.curve.carry.saturating_add(gain);
        let (step, carry) = div_rem(sum, self.window.cwnd);
        self.curve.carry = carry;
        self.window.cwnd = self.window.cwnd.saturating_add(step).min(MAX_CWND);
    }

    fn begin_epoch(&mut self, now: Instant) -> Instant {
        if self.window.cwnd < self.curve.w_max {
            self.curve.origin = self.curve.w_max;
            let diff = self.curve.w_max.saturating_sub(self.window.cwnd).min(MAX_CWND);
            // K^3 = diff / (0.4 mss) s^3 = diff * 2.5e9 / mss ms^3.
            self.curve.k_ms =
                cube_root(div_rem(diff.saturating_mul(2_500_000_000), self.window.mss).0);
        } else {
            self.curve.origin = self.window.cwnd;
            self.curve.k_ms = 0;
        }
        self.curve.w_est = self.window.cwnd;
        self.curve.carry = 0;
        self.curve.est_carry = 0;
        self.curve.epoch = Some(now);
        now
    }

    /// The curve at `t_ms` after the epoch, bytes (section 4.2).
    fn w_cubic(&self, t_ms: u64) -> u64 {
        let d = t_ms.abs_diff(self.curve.k_ms).min(MAX_T_MS);
        // 0.4 mss d^3 / 1e9, the division split so that no product overflows 64 bits.
        let cube = d.saturating_mul(d).saturating_mul(d);
        let delta = (cube / 1_000_000).saturating_mul(self.window.mss.saturating_mul(4)) / 10_000;
        if t_ms < self.curve.k_ms {
            self.curve.origin.saturating_sub(delta)
        } else {
            self.curve.origin.saturating_add(delta).min(MAX_CWND)
        }
    }

    /// W_est += alpha * acked / cwnd segments (section 4.3).
    fn grow_w_est(&mut self, acked: u64) {
        let (num, den) =
            if self.curve.w_est >= self.curve.cwnd_prior { (1, 1) } else { (ALPHA_NUM, ALPHA_DEN) };
        let gain = acked.saturating_mul(self.window.mss).saturating_mul(num);
        let sum = self.curve.est_carry.saturating_add(gain);
        let (step, carry) = div_rem(sum, self.window.cwnd.saturating_mul(den));
        self.curve.est_carry = carry;
        self.curve.w_est = self.curve.w_est.saturating_add(step).min(MAX_CWND);
    }

    /// Multiplicative decrease and fast convergence (sections 4.6 and 4.7).
    fn reduce(&mut self, beta_hundredths: u64) {
        let (cwnd, curve) = (self.window.cwnd, &mut self.curve);
        curve.cwnd_prior = cwnd;
        curve.w_max = if cwnd < curve.w_max {
            cwnd.saturating_mul(FAST_CONVERGENCE_HUNDREDTHS) / 100
        } else {
            cwnd
        };
        curve.epoch = None;
        self.window.reduce_to(cwnd.saturating_mul(beta_hundredths) / 100);
    }
}

impl Controller for Cubic {
    #[inline]
    fn window(&self) -> &Window {
        &self.window
    }

    fn window_mut(&mut self) -> &mut Window {
        &mut self.window
    }

    #[inline]
    fn on_ack(&mut self, ack: &Ack) {
        let rest = self.window.slow_start(ack);
        if rest > 0 && self.window.cwnd < MAX_CWND {
            self.avoid_congestion(rest, ack.now, ack.srtt);
        }
    }

    /// Multiplicative decrease and fast convergence (sections 4.6 and 4.7).
    fn on_loss(&mut self) {
        self.saved = Some((self.window, self.curve));
        self.reduce(BETA_HUNDREDTHS);
    }

    /// RFC 8511 section 3.1. Never spurious.
    fn on_ecn(&mut self, _now: Instant) {
        self.saved = None;
        self.reduce(BETA_ECN_HUNDREDTHS);
    }

    /// Section 4.8: as after a loss, then slow start from one segment (RFC 5681 section 3.1).
    fn on_timeout(&mut self) {
        self.on_loss();
        self.window.collapse();
    }

    fn on_repeated_timeout(&mut self) {
        self.window.collapse();
        self.curve.epoch = None;
    }

    fn on_idle(&mut self) {
        self.window.restart();
        self.curve.epoch = None;
    }

    /// Section 4.9.2.
    fn on_undo(&mut self) {
        if let Some((window, curve)) = self.saved.take() {
            self.window.undo(&window);
            self.curve = curve;
        }
    }
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
        let mut c = Cubic::new(Window::new(MSS, 10));
        c.window.cwnd = cwnd_segments * u64::from(MSS);
        c.on_loss();
        c
    }

    fn ack(c: &mut Cubic, acked: u64, now: Instant, srtt: Duration) {
        c.on_ack(&Ack { now, srtt, ..Ack::of(acked) });
    }

    #[test]
    fn loss_reduces_to_seven_tenths_and_a_time_out_to_one_segment() {
        let mut c = lossy(100);
        assert_eq!(c.window.cwnd, 100 * 1448 * 7 / 10);
        assert_eq!(c.window.ssthresh, c.window.cwnd);
        c.on_timeout();
        assert_eq!(c.window.cwnd, 1448);
        assert_eq!(c.window.ssthresh, 100 * 1448 * 49 / 100);
        let kept = c.window.ssthresh;
        c.on_repeated_timeout();
        assert_eq!(c.window.ssthresh, kept);
    }

    #[test]
    fn a_second_loss_below_the_plateau_converges_fast() {
        let mut c = lossy(100);
        c.on_loss();
        assert_eq!(c.curve.w_max, 70 * 1448 * 85 / 100);
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
            let cwnd = c.window.cwnd;
            ack(&mut c, cwnd, now, RTT); // one window per round trip
            if ms == 9100 {
                at_k = c.window.cwnd / 1448;
            }
        }
        assert!(now > Instant::from_millis(20_000));
        assert!((8_900..9_200).contains(&c.curve.k_ms), "K = {} ms", c.curve.k_ms);
        assert!((980..=1010).contains(&at_k), "{at_k} segments at K");
        assert!(c.window.cwnd / 1448 > 1300, "{} segments after 20 s", c.window.cwnd / 1448);
    }

    #[test]
    fn on_a_short_path_it_is_never_slower_than_reno() {
        let mut c = lossy(20);
        let rtt = Duration::from_millis(1);
        let before = c.window.cwnd;
        for i in 0..100u64 {
            let cwnd = c.window.cwnd;
            ack(&mut c, cwnd, Instant::from_millis(i), rtt);
        }
        // 100 round trips of Reno with alpha 9/17 add at least 52 segments.
        assert!(c.window.cwnd - before >= 52 * 1448, "grew {}", (c.window.cwnd - before) / 1448);
    }

    #[test]
    fn small_acks_add_up_to_the_same_growth_as_large_ones() {
        let (mut a, mut b) = (lossy(100), lossy(100));
        for c in [&mut a, &mut b] {
            ack(c, 1, Instant::from_millis(5_000), RTT);
        }
        let (later, before) = (Instant::from_millis(6_000), a.window.cwnd);
        for _ in 0..70 {
            ack(&mut a, u64::from(MSS), later, RTT);
            (0..MSS).for_each(|_| ack(&mut b, 1, later, RTT));
        }
        let (ga, gb) = ((a.window.cwnd - before) as f64, (b.window.cwnd - before) as f64);
        assert!(ga > 10_000.0 && (ga / gb - 1.0).abs() < 0.05, "{ga} against {gb}");
    }

    /// A fixed history of acknowledgements, losses, time-outs and idle periods gives the windows that
    /// CUBIC gave before controllers were chosen at run time.
    #[test]
    fn a_fixed_history_gives_the_same_windows() {
        let mut c = Cubic::new(Window::new(MSS, 10));
        let (mut state, mut now, mut seen) = (1u64, 1000u64, Vec::new());
        for step in 0..4000u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let draw = state >> 33;
            now += draw % 7;
            match draw % 997 {
                0..=3 => c.on_loss(),
                4 => c.on_timeout(),
                5 => c.on_repeated_timeout(),
                6 => c.on_idle(),
                _ => ack(&mut c, 1 + draw % 20_000, Instant::from_millis(now), RTT),
            }
            if step % 250 == 249 {
                seen.push((c.window.cwnd, c.window.ssthresh));
            }
        }
        let expected = [
            (1_442_897, 2_147_483_648),
            (1_016_170, 986_577),
            (748_708, 714_107),
            (544_030, 536_930),
            (537_144, 536_930),
            (542_773, 536_930),
            (398_132, 389_040),
            (251_833, 389_040),
            (295_234, 275_804),
            (111_487, 111_163),
            (54_550, 48_181),
            (92_304, 48_181),
            (73_439, 37_927),
            (44_543, 37_189),
            (90_629, 37_189),
            (82_466, 80_244),
        ];
        assert_eq!(seen, expected);
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
