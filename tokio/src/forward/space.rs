//! Memory for the datagrams that wait in a forwarder: a bound, fair shares and a reserve.
//!
//! ```text
//!  0                                       3/4              limit
//!  ├────────────────────────────────────────┼─────────────────┤  bytes in use
//!   a peer holds at most the bytes that      the first 4 KiB
//!   are free of the first three quarters     of each peer
//! ```
//!
//! The threshold of a peer is the dynamic threshold of Choudhury and Hahne (1998), as in the stack's pool. It is the same
//! for all peers, and falls when the memory fills: one peer that takes everything gets half of the three quarters, and
//! `n` such peers get `1 / (n + 1)` each. So a further peer always finds free memory. Bytes are never taken back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use fulmar::stat::DropReason;

/// Bytes of the reserve that each peer may hold.
const MIN_BYTES: usize = 4096;
/// A datagram's charge besides its payload: its place in a queue and its allocation.
const OVERHEAD_BYTES: usize = 64;

/// The memory of all peers.
#[derive(Debug)]
pub(super) struct Space {
    limit: usize,
    used: Arc<AtomicUsize>,
}

/// The bytes that the datagrams of one peer hold.
#[derive(Debug)]
pub(super) struct Share {
    held: AtomicUsize,
    /// Those of all peers.
    used: Arc<AtomicUsize>,
}

/// A datagram, which holds its charge until it is dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) datagram: Vec<u8>,
    bytes: usize,
    share: Arc<Share>,
}

impl Space {
    pub(super) fn new(limit: usize) -> Space {
        Space { limit, used: Arc::default() }
    }

    /// The share of a peer without datagrams.
    pub(super) fn share(&self) -> Arc<Share> {
        Arc::new(Share { held: AtomicUsize::new(0), used: Arc::clone(&self.used) })
    }

    /// Copies a datagram of a peer, if the memory has room for it.
    pub(super) fn copy(
        &mut self,
        share: &Arc<Share>,
        datagram: &[u8],
    ) -> Result<Waiting, DropReason> {
        let bytes = OVERHEAD_BYTES + datagram.len();
        // Only this method adds to the sums. Other threads may subtract meanwhile.
        let (held, used) = (share.held.load(Relaxed) + bytes, self.used.load(Relaxed) + bytes);
        let is_fair = held <= (self.limit - self.limit / 4).saturating_sub(used);
        if used > self.limit {
            return Err(DropReason::ForwardMemoryFull);
        }
        if !is_fair && held > MIN_BYTES {
            return Err(DropReason::ForwardPeerShare);
        }
        share.held.fetch_add(bytes, Relaxed);
        self.used.fetch_add(bytes, Relaxed);
        Ok(Waiting { datagram: datagram.to_vec(), bytes, share: Arc::clone(share) })
    }
}

impl Waiting {
    /// The datagram, whose charge ends.
    pub(super) fn into_datagram(mut self) -> Vec<u8> {
        std::mem::take(&mut self.datagram)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.share.held.fetch_sub(self.bytes, Relaxed);
        self.share.used.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 1 << 20;

    /// Peers that take nothing get datagrams of this length in turn until each is refused.
    fn fill(peers: usize, len: usize) -> (Space, Vec<Vec<Waiting>>) {
        let mut space = Space::new(LIMIT);
        let shares: Vec<_> = (0..peers).map(|_| space.share()).collect();
        let mut waiting: Vec<Vec<Waiting>> = shares.iter().map(|_| Vec::new()).collect();
        let mut is_refused = false;
        while !is_refused {
            is_refused = true;
            for (share, waiting) in shares.iter().zip(&mut waiting) {
                if let Ok(one) = space.copy(share, &vec![0; len]) {
                    waiting.push(one);
                    is_refused = false;
                }
            }
        }
        (space, waiting)
    }

    fn bytes(waiting: &[Waiting]) -> usize {
        waiting.iter().map(|w| w.bytes).sum()
    }

    #[test]
    fn peers_that_take_nothing_get_equal_parts_and_leave_one_more() {
        for peers in [1, 2, 5, 16] {
            let (mut space, waiting) = fill(peers, 1000);
            let fair = LIMIT / 4 * 3 / (peers + 1);
            for held in waiting.iter().map(|w| bytes(w)) {
                assert!(held.abs_diff(fair) <= 2 * 1064, "{peers} peers: {held} instead of {fair}");
            }
            let other = space.share();
            let mut got = Vec::new();
            while let Ok(one) = space.copy(&other, &[0; 1000]) {
                got.push(one);
            }
            assert!(bytes(&got) >= fair / 2 - 2 * 1064, "{peers} peers: {}", bytes(&got));
        }
    }

    #[test]
    fn the_reserve_has_the_first_bytes_of_many_peers() {
        let (mut space, waiting) = fill(200, 60_000);
        assert!(waiting.iter().all(|w| w.len() <= 1));
        let peers: Vec<_> = (0..LIMIT / 4 / MIN_BYTES).map(|_| space.share()).collect();
        let first = [0; MIN_BYTES - OVERHEAD_BYTES];
        let got: Result<Vec<_>, _> = peers.iter().map(|p| space.copy(p, &first)).collect();
        let mut got = got.unwrap();
        assert_eq!(got.len(), peers.len());
        assert_eq!(space.copy(&peers[0], &[]).unwrap_err(), DropReason::ForwardPeerShare);
        let refused = loop {
            match space.copy(&space.share(), &first) {
                Ok(one) => got.push(one),
                Err(reason) => break reason,
            }
        };
        assert_eq!(refused, DropReason::ForwardMemoryFull);
        assert!(space.used.load(Relaxed) <= LIMIT);
    }

    proptest! {
        /// Against the rule over a list of all datagrams.
        #[test]
        fn every_decision_is_that_of_the_rule(
            steps in prop::collection::vec((0usize..12, 0usize..66_000, any::<bool>()), 1..300),
        ) {
            let mut space = Space::new(LIMIT);
            let shares: Vec<_> = (0..12).map(|_| space.share()).collect();
            let mut live: Vec<(usize, Waiting)> = Vec::new();
            for (peer, len, is_taken) in steps {
                if is_taken && !live.is_empty() {
                    live.swap_remove(len % live.len());
                    continue;
                }
                let sum = |of: &dyn Fn(usize) -> bool| -> usize {
                    live.iter().filter(|(p, _)| of(*p)).map(|(_, w)| w.datagram.len() + 64).sum()
                };
                let (used, held) = (sum(&|_| true) + len + 64, sum(&|p| p == peer) + len + 64);
                let expected = if used > LIMIT {
                    Err(DropReason::ForwardMemoryFull)
                } else if held <= 4096 || held + used <= LIMIT / 4 * 3 {
                    Ok(len)
                } else {
                    Err(DropReason::ForwardPeerShare)
                };
                let got = space.copy(&shares[peer], &vec![0; len]);
                prop_assert_eq!(got.as_ref().map(|w| w.datagram.len()).map_err(|r| *r), expected);
                live.extend(got.ok().map(|w| (peer, w)));
            }
            live.clear();
            prop_assert_eq!(space.used.load(Relaxed), 0);
            prop_assert!(shares.iter().all(|s| s.held.load(Relaxed) == 0));
        }
    }
}
