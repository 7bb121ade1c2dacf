//! Ephemeral port selection: the simple port randomization of RFC 6056 section 3.3.1, with random
//! increments as in section 3.3.5.
//!
//! Each selection is independent of all others: the ports used towards one destination reveal nothing
//! about those used towards another. The counters of RFC 6056 sections 3.3.3 and 3.3.4 keep a port from
//! being reused too soon. They are not needed here: the caller skips flows in TIME-WAIT, and the initial
//! sequence numbers of a flow increase with the clock (RFC 6528), so a peer in TIME-WAIT accepts the new
//! SYN (RFC 9293 section 3.10.7.4).

use crate::base::Random;

/// The first ephemeral port: the default of Linux (`ip_local_port_range`).
pub(crate) const EPHEMERAL_FIRST: u16 = 32_768;
/// Number of ephemeral ports (32768 to 60999, the default of Linux).
pub(crate) const EPHEMERAL_COUNT: u16 = 28_232;

/// An odd step below this bound visits every port: the prime factors of the count are 2 and this one.
const STEPS: u32 = 3529;

/// Every ephemeral port once, in an unpredictable order.
pub(crate) fn ephemeral_ports(random: &mut Random) -> impl Iterator<Item = u16> + use<> {
    let count = u32::from(EPHEMERAL_COUNT);
    let start = random.below(count);
    let step = random.below(STEPS) | 1;
    (0..count).map(move |n| {
        let at = start.wrapping_add(n.wrapping_mul(step)).checked_rem(count).unwrap_or(0);
        EPHEMERAL_FIRST.wrapping_add(at as u16)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{KeyUse, Secrets};
    use std::collections::BTreeSet;

    fn random() -> Random {
        Secrets::for_simulation(1).random(KeyUse::TcpPort)
    }

    #[test]
    fn every_ephemeral_port_is_offered_exactly_once() {
        let mut r = random();
        for _ in 0..50 {
            let ports: BTreeSet<u16> = ephemeral_ports(&mut r).collect();
            assert_eq!(ports.len(), usize::from(EPHEMERAL_COUNT));
            assert_eq!((ports.first(), ports.last()), (Some(&32_768), Some(&60_999)));
        }
    }

    #[test]
    fn consecutive_selections_are_independent() {
        let mut r = random();
        let first: Vec<u16> = (0..4000).filter_map(|_| ephemeral_ports(&mut r).next()).collect();
        let near = first.windows(2).filter(|w| w[0].abs_diff(w[1]) < 1000).count();
        // Of two independent ports in 28,232, 7 % are less than 1,000 apart.
        assert!((200..360).contains(&near), "{near}");
        let second: BTreeSet<i32> = (0..1000)
            .map(|_| {
                let two: Vec<u16> = ephemeral_ports(&mut r).take(2).collect();
                i32::from(two[1]) - i32::from(two[0])
            })
            .collect();
        assert!(second.len() > 500, "{} steps", second.len());
    }
}
