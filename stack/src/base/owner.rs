//! Assignment of flows to shards.

use crate::base::FlowKey;

/// The key of the hash that assigns flows to shards. The hash is symmetric in the two endpoints, so two
/// stacks with the same key, connected queue by queue, assign a flow to the same shard.
///
/// ```text
///   hash = upper half of   k0 + k1 (l1 + r1) + ... + k4 (l4 + r4) + k5 (local port + remote port)
///                          modulo 2^64
/// ```
///
/// `l1` to `l4` and `r1` to `r4` are the 32-bit words of the local and the remote address; an IPv4 address
/// has only the last. A BPF program computes the same hash (`drivers::steering`).
///
/// **Strength.** Multilinear hashing with 64-bit keys is strongly universal (Lemire and Kaser, *Strongly
/// universal string hashing is fast*, 2014): two flows to one address and port, chosen without the key,
/// collide no more often than random ones. Flows to different local ports can be chosen with equal sums.
/// The hash is not a pseudo-random function: its outputs reveal the key. No output is sent, and only the
/// load balance of the shards depends on it.
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

    /// Creates a key from its words, `k0` to `k5`.
    pub const fn new(words: [u64; OwnerKey::WORDS]) -> OwnerKey {
        OwnerKey(words)
    }

    /// The words of the key, `k0` to `k5`.
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

    /// The owner of a flow among `shards` shards.
    pub fn owner(&self, flow: &FlowKey, shards: u16) -> u16 {
        self.hash(flow).checked_rem(shards.into()).unwrap_or(0) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Secrets;
    use std::net::SocketAddr;

    /// Flows whose addresses and ports cancel out in an unkeyed XOR hash, so that all have one owner.
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
    fn the_assignment_depends_on_the_key() {
        let keys = [1, 2].map(|seed| Secrets::for_simulation(seed).owner());
        let same = chosen_flows().filter(|f| keys[0].owner(f, 4) == keys[1].owner(f, 4)).count();
        assert!((300..700).contains(&same), "{same} of 1999");
    }

    #[test]
    fn both_directions_of_a_flow_have_the_same_owner() {
        let key = Secrets::for_simulation(1).owner();
        for flow in chosen_flows() {
            let back = FlowKey::new(flow.remote(), flow.local());
            assert_eq!(key.hash(&flow), key.hash(&back));
        }
    }

    #[test]
    fn a_single_shard_owns_every_flow() {
        let key = Secrets::for_simulation(1).owner();
        assert!(chosen_flows().all(|flow| key.owner(&flow, 1) == 0 && key.owner(&flow, 0) == 0));
    }
}
