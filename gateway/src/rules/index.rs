//! The rules by what they name, so that a decision costs the same however many there are.
//!
//! ```text
//!   www.example.org  ──►  names["www.example.org"], below["example.org"], below["org"]
//!   10.1.2.3         ──►  prefixes[32, 10.1.2.3], prefixes[8, 10.0.0.0]     for each length that a rule has
//! ```
//!
//! A name of n labels takes n look-ups, an address one for each length of a prefix in the rules.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use smallvec::SmallVec;

use super::rule::{Host, Rule};

/// Numbers of rules.
type Numbers = SmallVec<[u32; 2]>;

/// The first bits of an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Prefix {
    is_v4: bool,
    length: u8,
    /// Those after `length` are zero.
    bits: u128,
}

impl Prefix {
    fn of(address: IpAddr, length: u8) -> Prefix {
        let (is_v4, bits, all) = match address {
            IpAddr::V4(v4) => (true, u128::from(v4.to_bits()), 32),
            IpAddr::V6(v6) => (false, v6.to_bits(), 128),
        };
        let beyond = u32::from(all - length.min(all));
        // A shift by 128 is of all bits.
        let bits = bits.checked_shr(beyond).and_then(|b| b.checked_shl(beyond)).unwrap_or(0);
        Prefix { is_v4, length, bits }
    }
}

/// The rules of a list.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    names: HashMap<Box<str>, Numbers>,
    /// By the name that the rule's names are below.
    below: HashMap<Box<str>, Numbers>,
    prefixes: HashMap<Prefix, Numbers>,
    /// The lengths that prefixes of IPv6 and of IPv4 have.
    lengths: [BTreeSet<u8>; 2],
    any: Numbers,
}

impl Index {
    /// Of rules with their numbers.
    pub(super) fn new<'a>(rules: impl IntoIterator<Item = (u32, &'a Rule)>) -> Index {
        let mut index = Index::default();
        for (number, rule) in rules {
            let numbers = match &rule.host {
                Host::Any => &mut index.any,
                Host::Name(name) => index.names.entry(name.as_str().into()).or_default(),
                Host::Below(end) => {
                    index.below.entry(end.trim_start_matches('.').into()).or_default()
                }
                Host::Prefix(address, length) => {
                    index.lengths[usize::from(address.is_ipv4())].insert(*length);
                    index.prefixes.entry(Prefix::of(*address, *length)).or_default()
                }
            };
            numbers.push(number);
        }
        index
    }

    /// The rules that name an address.
    pub(super) fn of_address(&self, address: IpAddr) -> impl Iterator<Item = u32> {
        let lengths = self.lengths[usize::from(address.is_ipv4())].iter();
        let found =
            lengths.filter_map(move |length| self.prefixes.get(&Prefix::of(address, *length)));
        found.flatten().copied()
    }

    /// The rules that name a name in lower case.
    pub(super) fn of_name(&self, name: &str) -> impl Iterator<Item = u32> {
        let dots = name.match_indices('.').map(|(at, _)| &name[at + 1..]);
        let above = dots.filter_map(|end| self.below.get(end));
        self.names.get(name).into_iter().chain(above).flatten().copied()
    }

    /// The rules with `*`.
    pub(super) fn of_any(&self) -> impl Iterator<Item = u32> {
        self.any.iter().copied()
    }

    /// The rules that may name all that a rule names.
    pub(super) fn around(&self, host: &Host) -> SmallVec<[u32; 8]> {
        let mut all: SmallVec<[u32; 8]> = self.of_any().collect();
        match host {
            Host::Any => {}
            Host::Prefix(address, _) => all.extend(self.of_address(*address)),
            Host::Name(name) => all.extend(self.of_name(name)),
            Host::Below(end) => all.extend(self.of_name(end.trim_start_matches('.'))),
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Few labels and bits, so that rules meet names and addresses.
    fn host() -> impl Strategy<Value = String> {
        let name = prop::collection::vec("[ab]", 1..4).prop_map(|labels| labels.join("."));
        prop_oneof![
            Just("*".to_owned()),
            (name.clone(), any::<bool>()).prop_map(|(name, is_below)| if is_below {
                format!("*.{name}")
            } else {
                name
            }),
            (0..4u8, 0..4u8, 0..=32u8).prop_map(|(a, b, length)| format!("{a}.0.0.{b}/{length}")),
            (0..4u8, 0..4u8, 0..=128u8).prop_map(|(a, b, length)| format!("{a}::{b}/{length}")),
            (0..4u8, 90..=128u8).prop_map(|(b, length)| format!("::ffff:1.0.0.{b}/{length}")),
        ]
    }

    proptest! {
        #[test]
        fn rules_are_found_as_by_a_walk_over_all(
            hosts in prop::collection::vec(host(), 0..24),
            name in "([ab]\\.){0,3}[ab]",
            (a, b) in (0..4u8, 0..4u8),
        ) {
            let rules: Vec<Rule> = hosts.iter().map(|host| host.parse().unwrap()).collect();
            let index = Index::new((0..).zip(&rules));
            let sorted = |found: &mut dyn Iterator<Item = u32>| found.collect::<BTreeSet<u32>>();
            let walk = |is_named: &dyn Fn(&Rule) -> bool| {
                sorted(&mut (0..).zip(&rules).filter(|(_, r)| is_named(r)).map(|(n, _)| n))
            };
            let found = sorted(&mut index.of_name(&name));
            prop_assert_eq!(found, walk(&|r| r.characters_of(&name).is_some()));
            for address in [format!("{a}.0.0.{b}"), format!("{a}::{b}"), format!("::{b}")] {
                let address: IpAddr = address.parse().unwrap();
                let found = sorted(&mut index.of_address(address));
                prop_assert_eq!(found, walk(&|r| r.bits_of(address).is_some()), "{}", address);
            }
            prop_assert_eq!(sorted(&mut index.of_any()), walk(&|r| r.host == Host::Any));
            for (number, rule) in (0..).zip(&rules) {
                let around = index.around(&rule.host);
                let wanted = walk(&|r| r.has_exception(rule));
                prop_assert!(wanted.iter().all(|n| around.contains(n)), "{} {:?}", number, around);
            }
        }
    }
}
