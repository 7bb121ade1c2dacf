//! How one share of a pool is divided among those who take from it.
//!
//! ```text
//!  0                      1/2               3/4        7/8        limit
//!  ├──────────────────────┼─────────────────┼──────────┼──────────┤  bytes of the share in use
//!   no rule but the limits  an eighth of what  minima;    minima
//!   of the sockets          is left to 3/4;    datagrams
//!                           stalled: minima
//! ```
//!
//! Up to half of the share there is no rule: memory that nobody else wants is of no use to anybody.
//! Beyond it a flow may hold an eighth of what is left of the first three quarters: a dynamic threshold
//! (Choudhury and Hahne 1998, for the shared memory of a switch), which needs no list of the flows,
//! since all of them see the same number. It falls while they take and settles where `n` greedy flows
//! hold `common / (n + 8)` each. A flow whose peer takes nothing gets its minimum and no more there. The
//! last quarter is for minima ([`FairShare::MIN_BYTES`] of each flow), and half of it for datagrams too.
//!
//! Nothing is taken back here: what a flow holds when the threshold falls below it stays. Cost: a few
//! additions where storage is taken for a write, and none while less than half is in use.

#![forbid(unsafe_code)]

/// A share of a pool as it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FairShare {
    /// Bytes of storage that the share allows.
    pub limit: usize,
    /// Bytes of storage in use.
    pub used: usize,
}

impl FairShare {
    /// Storage that every flow may hold whatever others hold, as long as the last quarter of the
    /// share lasts: a page, as `tcp_wmem[0]` of Linux.
    pub const MIN_BYTES: usize = 4096;

    /// A flow may hold this part of what is left for all, once half of the share is in use.
    const PART: usize = 8;

    /// Whether so much is in use that flows have to share.
    #[inline]
    pub fn is_contended(&self) -> bool {
        self.used >= self.limit / 2
    }

    /// Bytes left of what is not kept for minima.
    #[inline]
    pub fn common(&self) -> usize {
        (self.limit - self.limit / 4).saturating_sub(self.used)
    }

    /// Bytes that a flow which holds `held` may take. `is_stalled`: its peer takes nothing, so that
    /// more would only lie here.
    pub fn allowance(&self, held: usize, is_stalled: bool) -> usize {
        let above = match (self.is_contended(), is_stalled) {
            (false, _) => self.common(),
            (true, true) => 0,
            (true, false) => (self.common() / Self::PART).saturating_sub(held),
        };
        let to_min = Self::MIN_BYTES.saturating_sub(held);
        above.max(to_min).min(self.limit.saturating_sub(self.used))
    }

    /// Bytes that datagrams may take.
    #[inline]
    pub fn for_datagrams(&self) -> usize {
        (self.limit - self.limit / 8).saturating_sub(self.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    const LIMIT: usize = 1 << 20;
    const MIN: usize = FairShare::MIN_BYTES;

    /// The rule over a list of what everybody holds.
    fn allowance_by_list(held: &[usize], i: usize, is_stalled: bool) -> usize {
        let used: usize = held.iter().sum();
        let mine = held[i];
        let three_quarters = LIMIT / 4 * 3;
        let mut may_hold = mine;
        if used < LIMIT / 2 {
            may_hold += three_quarters - used;
        } else if !is_stalled && used < three_quarters {
            may_hold = may_hold.max((three_quarters - used) / 8);
        }
        may_hold.max(MIN).min(mine + (LIMIT - used)) - mine
    }

    fn share(held: &[usize]) -> FairShare {
        FairShare { limit: LIMIT, used: held.iter().sum() }
    }

    proptest! {
        #[test]
        fn the_rule_without_a_list_says_what_the_rule_over_all_holdings_says(
            takes in proptest::collection::vec((0usize..40, 0usize..100_000, any::<bool>(), any::<bool>()), 1..300),
        ) {
            let mut held = vec![0usize; 40];
            for (i, bytes, is_stalled, gives_back) in takes {
                if gives_back {
                    held[i] -= bytes.min(held[i]);
                    continue;
                }
                let allowed = share(&held).allowance(held[i], is_stalled);
                prop_assert_eq!(allowed, allowance_by_list(&held, i, is_stalled));
                held[i] += bytes.min(allowed);
                prop_assert!(held.iter().sum::<usize>() <= LIMIT);
            }
        }

        #[test]
        fn every_flow_gets_its_minimum_in_whatever_order_others_take(
            order in proptest::collection::vec((0usize..(LIMIT / 4 / MIN), 1usize..400_000, any::<bool>()), 0..400),
        ) {
            let mut held = vec![0usize; LIMIT / 4 / MIN];
            for (i, bytes, is_stalled) in order {
                held[i] += bytes.min(share(&held).allowance(held[i], is_stalled));
            }
            for i in 0..held.len() {
                let missing = MIN.saturating_sub(held[i]);
                prop_assert!(share(&held).allowance(held[i], true) >= missing);
                held[i] += missing;
            }
        }
    }

    /// Greedy flows that take in turn, a block at a time, until nobody may take any more.
    fn greedy(flows: usize, is_stalled: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut held = vec![0usize; flows];
        loop {
            let before = share(&held).used;
            for i in 0..flows {
                held[i] += share(&held).allowance(held[i], is_stalled(i)).min(2048);
            }
            if share(&held).used == before {
                return held;
            }
        }
    }

    #[test]
    fn greedy_flows_end_with_comparable_parts() {
        for flows in [2, 5, 20, 60] {
            let held = greedy(flows, |_| false);
            let (least, most) = (held.iter().min().unwrap(), held.iter().max().unwrap());
            assert!(most - least <= 4096, "{flows} flows: {least} to {most}");
            assert!(*least * (flows + 8) >= LIMIT / 2, "{flows} flows: {least}");
        }
    }

    #[test]
    fn a_single_flow_gets_half_of_the_share() {
        assert!(greedy(1, |_| false)[0] >= LIMIT / 2);
    }

    #[test]
    fn stalled_flows_leave_the_others_a_quarter_of_the_share() {
        let held = greedy(40, |i| i < 30);
        let stalled: usize = held[..30].iter().sum();
        assert!(stalled <= LIMIT / 2 + 30 * MIN);
        assert!(held[30..].iter().all(|h| *h >= LIMIT / 8 / 18), "{held:?}");
    }

    #[test]
    fn datagrams_leave_an_eighth_for_minima() {
        let mut s = FairShare { limit: LIMIT, used: 0 };
        s.used += s.for_datagrams();
        assert_eq!(s.for_datagrams(), 0);
        assert_eq!(s.allowance(0, false), MIN);
        assert_eq!(LIMIT - s.used, LIMIT / 8);
    }
}
