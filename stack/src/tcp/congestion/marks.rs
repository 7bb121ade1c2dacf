//! The share of delivered bytes that were marked, smoothed over rounds: DCTCP.Alpha (RFC 8257 section 3.3), ecn_alpha of
//! BBR.

use crate::tcp::arith::div_rem;

/// Shares are in 2^-20.
pub(super) const ONE: u64 = 1 << 20;

/// g = 1/16 (RFC 8257 section 4.2; ecn_alpha_gain of BBR), as a shift.
const GAIN_SHIFT: u32 = 4;

/// The estimator.
#[derive(Clone, Copy, Debug)]
pub(super) struct MarkedShare {
    /// The estimate. It begins at one (RFC 8257 section 3.3): the first mark has its full effect.
    pub alpha: u64,
    /// Bytes delivered, and marked ones, at the start of the round.
    delivered: u64,
    marked: u64,
}

impl MarkedShare {
    pub(super) const fn new() -> MarkedShare {
        MarkedShare { alpha: ONE, delivered: 0, marked: 0 }
    }

    /// A round ends, with these totals: Alpha = Alpha * (1 - g) + g * M. Returns M, the share of the round.
    pub(super) fn end_round(&mut self, delivered: u64, marked: u64) -> u64 {
        let acked = delivered.saturating_sub(self.delivered).max(1);
        let ce = marked.saturating_sub(self.marked).min(acked);
        let share = div_rem(ce.saturating_mul(ONE), acked).0;
        let kept = self.alpha.saturating_sub(self.alpha >> GAIN_SHIFT);
        self.alpha = kept.saturating_add(share >> GAIN_SHIFT).min(ONE);
        (self.delivered, self.marked) = (delivered, marked);
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_follows_the_share_of_marked_bytes() {
        let (mut share, mut total, mut marked) = (MarkedShare::new(), 0, 0);
        let mut rounds = |n: u32, of_1000: u64| {
            (0..n).for_each(|_| {
                (total, marked) = (total + 1000, marked + of_1000);
                share.end_round(total, marked);
            });
            share.alpha
        };
        assert!(rounds(200, 250).abs_diff(ONE / 4) < ONE / 1000);
        assert!(rounds(300, 0) < ONE / 10_000);
        let more_marks_than_bytes = rounds(300, 2000);
        assert!(more_marks_than_bytes <= ONE && more_marks_than_bytes > ONE - ONE / 1000);
    }
}
