//! A routing table as the Internet has one, made from a seed.
//!
//! Lengths are distributed as in public views of the default-free zone (CIDR Report and Potaroo,
//! 2023 and 2024, rounded): three fifths are /24. Half of the longer prefixes lie inside a shorter one. Answers are drawn independently, which is harder for a
//! table than the truth: in reality neighbours often share their next hop, and merge.

use std::collections::BTreeSet;

/// A prefix (host bits zero) and the number of its next hop.
pub type Prefix = (u32, u8, u32);

/// Next hops that answers are drawn from, numbered from 1.
const NEXT_HOPS: usize = 250;

/// Length and share in a thousandth.
const LENGTHS: [(u8, u32); 18] = [
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
}

/// `count` prefixes, in no order.
pub fn ipv4(count: usize, seed: u64) -> Vec<Prefix> {
    let mut r = Random(seed);
    let (mut seen, mut all) = (BTreeSet::new(), Vec::<Prefix>::with_capacity(count));
    while all.len() < count {
        let len = r.length(&LENGTHS);
        let around = (!all.is_empty() && r.draw() & 1 == 0).then(|| all[r.below(all.len())]);
        // 1.0.0.0 to 223.255.255.255: what is unicast.
        let fresh = ((1 << 24) + r.below(223 << 24)) as u32;
        let address = match around {
            Some((outer, shorter, _)) if shorter < len => {
                let keep = host_bits(shorter);
                outer & !keep | fresh & keep
            }
            _ => fresh,
        };
        let start = address & !host_bits(len);
        if seen.insert((start, len)) {
            all.push((start, len, 1 + r.below(NEXT_HOPS) as u32));
        }
    }
    all
}

/// The bits behind the first `len` of an address.
fn host_bits(len: u8) -> u32 {
    u32::MAX.checked_shr(len.into()).unwrap_or(0)
}

/// `count` addresses, each within a prefix drawn from the table.
pub fn probes(prefixes: &[Prefix], count: usize, seed: u64) -> Vec<u32> {
    let mut r = Random(seed);
    let probe = |_| {
        let (start, len, _) = prefixes[r.below(prefixes.len())];
        start | r.draw() as u32 & host_bits(len)
    };
    (0..count).map(probe).collect()
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
    }

    #[test]
    fn addresses_lie_within_installed_prefixes() {
        let table = ipv4(1000, 3);
        for address in probes(&table, 1000, 4) {
            assert!(table.iter().any(|(start, len, _)| address & !host_bits(*len) == *start));
        }
    }
}
