//! Round-trip time estimation and retransmission time-out (RFC 6298).
//!
//! Samples come from one timed segment at a time, with nanosecond resolution. A retransmitted
//! segment is never timed (Karn's algorithm). During recovery samples come from bytes sent once
//! that an ACK is the first to report (SACK), or from timestamps (RFC 7323 section 4), but for ACKs that show that
//! they answer another copy than the one that TSecr echoes.

use crate::base::Duration;
use crate::tcp::Config;
use crate::tcp::arith::div_rem;

/// The estimator, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rtt {
    /// Smoothed round-trip time; 0 before the first sample.
    srtt_ns: u64,
    rttvar_ns: u64,
    /// Smallest sample, `u64::MAX` before the first.
    min_ns: u64,
    /// The time-out before backoff.
    rto_ns: u64,
    /// Exponential backoffs since the last progress.
    backoff: u32,
    min_rto_ns: u64,
    max_rto_ns: u64,
}

/// Duration to nanoseconds, saturating.
pub(crate) fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

impl Rtt {
    pub(crate) fn new(cfg: &Config) -> Rtt {
        Rtt {
            srtt_ns: 0,
            rttvar_ns: 0,
            min_ns: u64::MAX,
            rto_ns: nanos(cfg.initial_rto),
            backoff: 0,
            min_rto_ns: nanos(cfg.min_rto),
            max_rto_ns: nanos(cfg.max_rto),
        }
    }

    /// Updates the estimate (RFC 6298 sections 2.2 and 2.3: alpha 1/8, beta 1/4, K 4).
    pub(crate) fn sample(&mut self, rtt: Duration) {
        let r = nanos(rtt).max(1);
        self.min_ns = self.min_ns.min(r);
        if self.srtt_ns == 0 {
            self.srtt_ns = r;
            self.rttvar_ns = r / 2;
        } else {
            let error = self.srtt_ns.abs_diff(r);
            self.rttvar_ns = ewma(self.rttvar_ns, error, 4);
            self.srtt_ns = ewma(self.srtt_ns, r, 8).max(1);
        }
        // The lower bound applies to the variance term, as in Linux: on a steady path the variance
        // decays to zero, and the first delayed ACK would cause a spurious time-out.
        let slack = self.rttvar_ns.saturating_mul(4).max(self.min_rto_ns);
        self.rto_ns = self.srtt_ns.saturating_add(slack).min(self.max_rto_ns.max(self.min_rto_ns));
    }

    /// The time-out with its backoff (RFC 6298 section 5.5).
    pub(crate) fn rto(&self) -> Duration {
        let shift = self.backoff.min(16);
        let backed_off = self.rto_ns.saturating_mul(1 << shift);
        Duration::from_nanos(backed_off.min(self.max_rto_ns.max(self.rto_ns)))
    }

    /// Doubles the time-out.
    pub(crate) fn back_off(&mut self) {
        self.backoff = self.backoff.saturating_add(1);
    }

    /// Ends the backoff after progress.
    pub(crate) fn reset_backoff(&mut self) {
        self.backoff = 0;
    }

    pub(crate) fn backoff(&self) -> u32 {
        self.backoff
    }

    /// The smoothed round-trip time; zero before the first sample.
    pub(crate) fn srtt(&self) -> Duration {
        Duration::from_nanos(self.srtt_ns)
    }

    pub(crate) fn rttvar(&self) -> Duration {
        Duration::from_nanos(self.rttvar_ns)
    }

    /// The smallest sample, if there was one.
    pub(crate) fn min(&self) -> Option<Duration> {
        (self.min_ns != u64::MAX).then(|| Duration::from_nanos(self.min_ns))
    }

    /// A quarter of the smallest sample; zero before the first.
    pub(crate) fn min_quarter(&self) -> Duration {
        if self.min_ns == u64::MAX { Duration::ZERO } else { Duration::from_nanos(self.min_ns / 4) }
    }

    /// The smoothed round-trip time, microseconds.
    pub(crate) fn srtt_us(&self) -> u64 {
        self.srtt_ns / 1000
    }

    /// A 128th of the smoothed round-trip time.
    #[inline]
    pub(crate) fn srtt_128th(&self) -> Duration {
        Duration::from_nanos(self.srtt_ns / 128)
    }

    /// RFC 6298 section 5.7: after a retransmitted SYN, the time-out for data starts at 3 s.
    pub(crate) fn on_syn_retransmitted(&mut self) {
        if self.srtt_ns == 0 {
            self.rto_ns = self.rto_ns.max(3_000_000_000);
        }
    }
}

/// `(1 - 1/n) * old + 1/n * new`.
fn ewma(old: u64, new: u64, n: u64) -> u64 {
    old.saturating_sub(div_rem(old, n).0).saturating_add(div_rem(new, n).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn the_first_sample_sets_srtt_and_half_of_it_as_variance() {
        let mut r = Rtt::new(&Config::default());
        assert_eq!(r.rto(), ms(1000));
        r.sample(ms(100));
        assert_eq!((r.srtt(), r.rttvar(), r.rto()), (ms(100), ms(50), ms(300)));
    }

    #[test]
    fn later_samples_move_srtt_by_an_eighth_and_the_variance_by_a_quarter() {
        let mut r = Rtt::new(&Config::default());
        r.sample(ms(800));
        r.sample(ms(1600));
        assert_eq!(r.srtt(), ms(900));
        assert_eq!(r.rttvar(), ms(500)); // 3/4 * 400 + 1/4 * 800
        assert_eq!(r.rto(), ms(2900));
        assert_eq!(r.min(), Some(ms(800)));
    }

    #[test]
    fn the_time_out_stays_between_its_bounds_and_doubles() {
        let mut r = Rtt::new(&Config::default());
        r.sample(ms(1));
        assert_eq!(r.rto(), ms(201));
        r.back_off();
        r.back_off();
        assert_eq!(r.rto(), ms(804));
        for _ in 0..40 {
            r.back_off();
        }
        assert_eq!(r.rto(), ms(60_000));
        r.reset_backoff();
        assert_eq!(r.rto(), ms(201));
    }
}
