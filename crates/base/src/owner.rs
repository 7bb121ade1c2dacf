//! Which shard owns a flow.

use crate::FlowKey;

/// The keyed hash that spreads flows over shards. Both ends of a flow count alike: of two stacks with the
/// same key, joined queue by queue, the same shard owns a flow in both.
///
/// ```text
///   hash = the upper half of   k0 + k1 (l1 + r1) + ... + k4 (l4 + r4) + k5 (local port + remote port)
///                              modulo 2^64
/// ```
///
/// The words l and r are those of the local and of the remote address (four, for IPv4 the last alone). A
/// program of the kernel computes the same (`drivers::steering`).
///
/// **Strength.** Multilinear hashing with keys of 64 bits is strongly universal (Lemire and Kaser, *Strongly
/// universal string hashing is fast*, 2014): of flows to one address and port, chosen without knowledge of
/// the key, any two have the same owner as often as two random ones. Flows to several ports of ours can be
/// chosen with equal sums, one for each port. It is not a pseudo-random function: who sees hashes computes
/// the key. No hash leaves the stack, and what is at stake is the balance of the shards.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct OwnerKey([u64; OwnerKey::WORDS]);

impl core::fmt::Debug for OwnerKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("OwnerKey(secret)")
    }
}

impl OwnerKey {
    /// Words of the key: the constant, four for the addresses, one for the ports.
    pub const WORDS: usize = 6;

    /// The key with these words.
    pub const fn new(words: [u64; OwnerKey::WORDS]) -> OwnerKey {
        OwnerKey(words)
    }

    /// The words of the key in the order of the sum.
    pub const fn words(&self) -> &[u64; OwnerKey::WORDS] {
        &self.0
    }

    /// The hash of a flow.
    pub fn hash(&self, flow: &FlowKey) -> u32 {
        let [k0, a, b, c, d, k5] = self.0;
        let [l0, l1, r0, r1, _] = flow.words();
        let high = |x: u64, y: u64| (x >> 32).wrapping_add(y >> 32);
        let low = |x: u64, y: u64| (x & 0xffff_ffff).wrapping_add(y & 0xffff_ffff);
        let ports = u64::from(flow.local_port).wrapping_add(flow.remote_port.into());
        let last = [(d, low(l1, r1)), (k5, ports)];
        let first = [(a, high(l0, r0)), (b, low(l0, r0)), (c, high(l1, r1))];
        let first = if flow.ipv4_words().is_some() { &[][..] } else { &first[..] };
        let sum = first
            .iter()
            .chain(&last)
            .fold(k0, |sum, (k, word)| sum.wrapping_add(k.wrapping_mul(*word)));
        (sum >> 32) as u32
    }

    /// The owner among so many shards.
    pub fn owner(&self, flow: &FlowKey, shards: u16) -> u16 {
        self.hash(flow).checked_rem(shards.into()).unwrap_or(0) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Secrets;
    use std::net::SocketAddr;

    /// Flows whose addresses and ports cancelled each other out in a hash that is the same everywhere:
    /// all of them had one owner.
    fn chosen_flows() -> impl Iterator<Item = FlowKey> {
        let local: SocketAddr = "[2001:db8::1]:80".parse().unwrap();
        (1..2000u16).map(move |port| {
            let low = 0x1234_5678_u64 ^ u64::from(port) << 17;
            let ip = std::net::Ipv6Addr::from_bits(0x2001_0db8 << 96 | u128::from(low));
            FlowKey::new(local, SocketAddr::new(ip.into(), port))
        })
    }

    #[test]
    fn flows_chosen_without_the_key_are_spread() {
        for seed in 0..20 {
            let key = Secrets::for_simulation(seed).owner();
            let mut load = [0u32; 4];
            chosen_flows().for_each(|flow| load[usize::from(key.owner(&flow, 4))] += 1);
            assert!(load.iter().all(|n| (250..=750).contains(n)), "key {seed}: {load:?}");
        }
    }

    #[test]
    fn each_key_spreads_flows_another_way() {
        let keys = [1, 2].map(|seed| Secrets::for_simulation(seed).owner());
        let same = chosen_flows().filter(|f| keys[0].owner(f, 4) == keys[1].owner(f, 4)).count();
        assert!((300..700).contains(&same), "{same} of 1999");
    }

    #[test]
    fn both_ends_of_a_flow_have_the_same_owner() {
        let key = Secrets::for_simulation(1).owner();
        for flow in chosen_flows() {
            let back = FlowKey::new(flow.remote(), flow.local());
            assert_eq!(key.hash(&flow), key.hash(&back));
        }
    }

    #[test]
    fn one_shard_owns_everything() {
        let key = Secrets::for_simulation(1).owner();
        assert!(chosen_flows().all(|flow| key.owner(&flow, 1) == 0 && key.owner(&flow, 0) == 0));
    }
}
