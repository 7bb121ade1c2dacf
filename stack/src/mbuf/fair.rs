//! Fair division of a pool's share among flows.
//!
//! ```text
//!  0                      1/2               3/4        7/8        limit
//!  ├──────────────────────┼─────────────────┼──────────┼──────────┤  bytes of the share in use
//!   socket limits only      an eighth of the    minima;   minima
//!                           rest of 3/4;        datagrams
//!                           stalled: minima
//! ```
//!
//! While less than half of the share is in use, only the socket limits apply. Beyond that a flow may hold
//! an eighth of the free part of the first three quarters. This is the dynamic threshold of Choudhury and
//! Hahne (1998, for shared-memory switches). It needs no list of flows, since the threshold is the same
//! for all. It converges to `common / (n + 8)` for each of `n` greedy flows. A flow whose peer acknowledges
//! nothing gets its minimum only. The last quarter is reserved for minima ([`FairShare::MIN_BYTES`] per
//! flow), and half of it for datagrams too.
//!
//! Memory is never revoked here: a flow keeps what it holds when the threshold falls below it. Cost: a few
//! additions per allocation for a write.

#![forbid(unsafe_code)]

/// The present state of a share of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FairShare {
    /// Bytes of storage that the share allows.
    pub limit: usize,
    /// Bytes of storage in use.
    pub used: usize,
}

impl FairShare {
    /// Storage that each flow may hold whatever others hold, while the last quarter of the share lasts:
    /// a page, as in `tcp_wmem[0]` of Linux.
    pub const MIN_BYTES: usize = 4096;

    /// The divisor of the dynamic threshold: a flow may hold an eighth of the free common part.
    const DIVISOR: usize = 8;

    /// Whether at least half of the share is in use, so that the threshold applies.
    #[inline]
    pub fn is_contended(&self) -> bool {
        self.used >= self.limit / 2
    }

    /// Free bytes of the first three quarters, which are not reserved for minima.
    #[inline]
    pub fn common(&self) -> usize {
        (self.limit - self.limit / 4).saturating_sub(self.used)
    }

    /// Bytes that a flow with `held` bytes may allocate. `is_stalled`: its peer acknowledges nothing, so
    /// more memory would not be sent.
    pub fn allowance(&self, held: usize, is_stalled: bool) -> usize {
        let above = match (self.is_contended(), is_stalled) {
            (false, _) => self.common(),
            (true, true) => 0,
            (true, false) => (self.common() / Self::DIVISOR).saturating_sub(held),
        };
        let to_min = Self::MIN_BYTES.saturating_sub(held);
        above.max(to_min).min(self.limit.saturating_sub(self.used))
    }

    /// Bytes that may be allocated for datagrams.
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

    /// The specification, over a list of the bytes of all flows.
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
        fn the_allowance_agrees_with_the_specification_over_all_flows(
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
        fn every_flow_gets_its_minimum_in_any_order_of_allocations(
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

    /// Greedy flows that allocate a block each in turn until all allocations are refused.
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
    fn greedy_flows_converge_to_equal_parts() {
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
