//! A routing table as the Internet has one, made from a seed.
//!
//! Lengths are distributed as in public views of the default-free zone (CIDR Report and Potaroo,
//! 2023 and 2024, rounded): three fifths of IPv4 are /24, nearly half of IPv6 is /48. Half of the
//! longer prefixes lie inside a shorter one. Answers are drawn independently, which is harder for a
//! table than the truth: in reality neighbours often share their next hop, and merge.

use std::collections::BTreeSet;

/// A prefix (host bits zero) and the number of its next hop.
pub type Prefix<A> = (A, u8, u32);

/// Next hops that answers are drawn from, numbered from 1.
pub const NEXT_HOPS: u32 = 250;

/// Length and share in a thousandth, of IPv4.
const LENGTHS_V4: [(u8, u32); 18] = [
    (24, 600),
    (23, 97),
    (22, 108),
    (21, 52),
    (20, 44),
    (19, 26),
    (18, 15),
    (17, 9),
    (16, 14),
    (15, 2),
    (14, 2),
    (13, 1),
    (12, 1),
    (11, 1),
    (25, 8),
    (26, 6),
    (28, 6),
    (32, 8),
];

/// The same of IPv6.
const LENGTHS_V6: [(u8, u32); 14] = [
    (48, 460),
    (32, 130),
    (44, 90),
    (40, 85),
    (36, 60),
    (29, 35),
    (33, 25),
    (34, 20),
    (42, 25),
    (46, 25),
    (47, 20),
    (56, 10),
    (64, 10),
    (128, 5),
];

/// A sequence of numbers that looks random (splitmix64, Steele, Lea, Flood 2014).
#[derive(Clone, Copy, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.draw() % n.max(1) as u64) as usize
    }

    fn length(&mut self, lengths: &[(u8, u32)]) -> u8 {
        let mut left = self.below(lengths.iter().map(|l| l.1 as usize).sum());
        for (len, share) in lengths {
            match left.checked_sub(*share as usize) {
                Some(rest) => left = rest,
                None => return *len,
            }
        }
        lengths[0].0
    }

    fn wide(&mut self) -> u128 {
        u128::from(self.draw()) << 64 | u128::from(self.draw())
    }
}

/// `count` prefixes of IPv4, in no order.
pub fn ipv4(count: usize, seed: u64) -> Vec<Prefix<u32>> {
    let prefixes = table(count, seed, &LENGTHS_V4, |r| {
        // 1.0.0.0 to 223.255.255.255: what is unicast.
        ((1 << 24) + r.below(223 << 24)) as u128
    });
    prefixes.into_iter().map(|(a, len, answer)| (a as u32, len, answer)).collect()
}

/// `count` prefixes of IPv6, in no order.
pub fn ipv6(count: usize, seed: u64) -> Vec<Prefix<u128>> {
    // The blocks that the registries were given (IANA, IPv6 global unicast assignments).
    const BLOCKS: [u128; 6] = [0x2001, 0x2400, 0x2600, 0x2800, 0x2a00, 0x2c00];
    table(count, seed, &LENGTHS_V6, |r| {
        let block = BLOCKS[r.below(BLOCKS.len())] << 112;
        block | (r.wide() >> if block >> 112 == 0x2001 { 16 } else { 12 })
    })
}

fn table(
    count: usize,
    seed: u64,
    lengths: &[(u8, u32)],
    unicast: impl Fn(&mut Random) -> u128,
) -> Vec<Prefix<u128>> {
    let bits = if lengths == LENGTHS_V4 { 32 } else { 128 };
    let mut r = Random(seed);
    let (mut seen, mut all) = (BTreeSet::new(), Vec::<Prefix<u128>>::with_capacity(count));
    while all.len() < count {
        let len = r.length(lengths);
        let around = (!all.is_empty() && r.draw() & 1 == 0).then(|| all[r.below(all.len())]);
        let fresh = unicast(&mut r);
        let address = match around {
            Some((outer, shorter, _)) if shorter < len => {
                let keep = host_bits(bits, shorter);
                outer & !keep | fresh & keep
            }
            _ => fresh,
        };
        let start = address & !host_bits(bits, len);
        if seen.insert((start, len)) {
            all.push((start, len, 1 + r.below(NEXT_HOPS as usize) as u32));
        }
    }
    all
}

/// The bits behind the first `len` of an address of `bits`.
fn host_bits(bits: u8, len: u8) -> u128 {
    let host = u32::from(bits - len);
    1u128.checked_shl(host).map_or(u128::MAX, |bit| bit - 1)
}

/// `count` addresses, each within a prefix drawn from the table.
pub fn probes<A: Copy>(
    prefixes: &[Prefix<A>],
    count: usize,
    seed: u64,
    within: impl Fn(A, u8, u128) -> A,
) -> Vec<A> {
    let mut r = Random(seed);
    (0..count)
        .map(|_| {
            let (start, len, _) = prefixes[r.below(prefixes.len())];
            within(start, len, r.wide())
        })
        .collect()
}

/// An IPv4 address of a prefix.
pub fn within_v4(start: u32, len: u8, random: u128) -> u32 {
    start | random as u32 & host_bits(32, len) as u32
}

/// An IPv6 address of a prefix.
pub fn within_v6(start: u128, len: u8, random: u128) -> u128 {
    start | random & host_bits(128, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_size_and_the_lengths_that_were_asked_for() {
        let table = ipv4(20_000, 1);
        assert_eq!(table.len(), 20_000);
        let slash24 = table.iter().filter(|p| p.1 == 24).count();
        assert!((11_000..13_000).contains(&slash24), "{slash24}");
        assert_eq!(table, ipv4(20_000, 1));
        assert_ne!(table, ipv4(20_000, 2));
        let slash48 = ipv6(20_000, 1).iter().filter(|p| p.1 == 48).count();
        assert!((8_000..10_500).contains(&slash48), "{slash48}");
    }

    #[test]
    fn addresses_lie_within_installed_prefixes() {
        let table = ipv4(1000, 3);
        for address in probes(&table, 1000, 4, within_v4) {
            assert!(
                table.iter().any(|(start, len, _)| within_v4(*start, *len, u128::MAX) >= address
                    && *start <= address)
            );
        }
    }
}
