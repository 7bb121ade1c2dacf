//! The addresses that stand for names: each name has one of either IP version, which leads to nothing else.
//!
//! ```text
//!   example.org ──► number 0 ──► 198.18.0.2, fd…::2
//!   registry.npmjs.org ──► 1 ──► 198.18.0.3, fd…::3
//! ```
//!
//! A name keeps its addresses for the life of the guest, and an address its name: a program that keeps an address for
//! hours reaches the same name or nothing. So the table only grows, to [`MOST_NAMES`] or the size of the smaller range.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// Names that get addresses. A guest that asks for more is refused, and the refusal counted.
pub const MOST_NAMES: usize = 65_536;

/// The first address of a range names the range, and the second is left to a router.
const FIRST: u32 = 2;

/// The ranges of which names get their addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ranges {
    /// The IPv4 range and the length of its prefix, at most 30 bits.
    v4: (Ipv4Addr, u8),
    /// The IPv6 range and the length of its prefix, at most 96 bits.
    v6: (Ipv6Addr, u8),
}

impl Ranges {
    /// 198.18.0.0/15, which no host of the Internet has (RFC 2544 section C.2.2), and a unique local prefix of these
    /// 40 bits (RFC 4193 section 3.2.1).
    pub fn of_global_id(id: [u8; 5]) -> Ranges {
        let mut v6 = [0; 16];
        v6[0] = 0xfd;
        v6[1..6].copy_from_slice(&id);
        Ranges { v4: (Ipv4Addr::new(198, 18, 0, 0), 15), v6: (v6.into(), 64) }
    }

    /// Names that the IPv4 range has addresses for: its last address is the broadcast address.
    fn capacity(&self) -> usize {
        let of_v4 = (1usize << (32 - u32::from(self.v4.1))) - FIRST as usize - 1;
        of_v4.min(MOST_NAMES)
    }

    /// The number of an address in its range; `None`: it is in neither.
    fn number_of(&self, address: IpAddr) -> Option<u128> {
        let (own, from, bits) = match address {
            IpAddr::V4(v4) => {
                let bits = 32 - u32::from(self.v4.1);
                (u128::from(v4.to_bits()), u128::from(self.v4.0.to_bits()), bits)
            }
            IpAddr::V6(v6) => (v6.to_bits(), self.v6.0.to_bits(), 128 - u32::from(self.v6.1)),
        };
        let number = own.checked_sub(from)?;
        (number.checked_shr(bits).unwrap_or(0) == 0).then_some(number)
    }

    /// Whether an address is in one of the ranges, whether it stands for a name or not.
    pub fn cover(&self, address: IpAddr) -> bool {
        self.number_of(address).is_some()
    }
}

/// The addresses of one name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Addresses {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

/// The table of names and their addresses.
pub(crate) struct Given {
    ranges: Ranges,
    names: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u32>,
}

impl Given {
    /// An empty table.
    pub(crate) fn new(ranges: Ranges) -> Given {
        Given { ranges, names: Vec::new(), numbers: HashMap::new() }
    }

    /// The addresses of a name, which get it now if it has none. `None`: the table is full.
    pub(crate) fn give(&mut self, name: &str) -> Option<Addresses> {
        if let Some(number) = self.numbers.get(name) {
            return Some(self.addresses_of(*number));
        }
        if self.names.len() >= self.ranges.capacity() {
            return None;
        }
        let (number, name) = (self.names.len() as u32, Arc::<str>::from(name));
        self.names.push(Arc::clone(&name));
        self.numbers.insert(name, number);
        Some(self.addresses_of(number))
    }

    fn addresses_of(&self, number: u32) -> Addresses {
        let at = number + FIRST;
        let v4 = self.ranges.v4.0.to_bits() + at;
        let v6 = self.ranges.v6.0.to_bits() + u128::from(at);
        Addresses { v4: v4.into(), v6: v6.into() }
    }

    /// The name that an address stands for.
    pub(crate) fn name_of(&self, address: IpAddr) -> Option<&Arc<str>> {
        let number = self.ranges.number_of(address)?.checked_sub(u128::from(FIRST))?;
        self.names.get(usize::try_from(number).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn given(v4_bits: u8) -> Given {
        let ranges = Ranges::of_global_id([1, 2, 3, 4, 5]);
        Given::new(Ranges { v4: (ranges.v4.0, v4_bits), ..ranges })
    }

    #[test]
    fn a_name_has_one_address_of_each_version_and_each_leads_back_to_it() {
        let mut given = given(15);
        let first = given.give("example.org").unwrap();
        assert_eq!(first.v4, Ipv4Addr::new(198, 18, 0, 2));
        assert_eq!(first.v6, "fd01:203:405::2".parse::<Ipv6Addr>().unwrap());
        let second = given.give("www.example.org").unwrap();
        assert_ne!(first, second);
        assert_eq!(given.give("example.org"), Some(first));
        for address in [IpAddr::from(first.v4), first.v6.into()] {
            assert_eq!(&**given.name_of(address).unwrap(), "example.org");
        }
    }

    #[test]
    fn an_address_of_the_range_that_was_not_given_has_no_name() {
        let mut given = given(15);
        given.give("example.org");
        for address in [
            "198.18.0.0",
            "198.18.0.1",
            "198.18.0.3",
            "198.19.255.255",
            "fd01:203:405::",
            "fd01:203:405::3",
        ] {
            let address = address.parse().unwrap();
            assert!(given.ranges.cover(address), "{address}");
            assert_eq!(given.name_of(address), None, "{address}");
        }
        for address in ["198.17.255.255", "198.20.0.2", "fd01:203:406::2", "::2", "0.0.0.2"] {
            let address = address.parse().unwrap();
            assert!(!given.ranges.cover(address), "{address}");
            assert_eq!(given.name_of(address), None, "{address}");
        }
    }

    #[test]
    fn a_full_table_refuses_new_names_and_keeps_the_others() {
        let mut given = given(28);
        let all: Vec<_> = (0..20).map(|n| given.give(&format!("n{n}.example"))).collect();
        assert_eq!(all.iter().flatten().count(), 13, "16 without two at the front and the last");
        assert_eq!(given.give("n0.example"), all[0]);
        assert_eq!(given.give("n19.example"), None);
        assert!(all[12].unwrap().v4 < Ipv4Addr::new(198, 18, 0, 15));
    }

    proptest! {
        #[test]
        fn the_table_is_a_bijection(names in proptest::collection::vec("[a-z]{1,3}", 0..200)) {
            let mut given = given(22);
            let mut seen: HashMap<String, Addresses> = HashMap::new();
            for name in &names {
                let addresses = given.give(name).unwrap();
                prop_assert_eq!(*seen.entry(name.clone()).or_insert(addresses), addresses);
            }
            for (name, addresses) in &seen {
                for address in [IpAddr::from(addresses.v4), addresses.v6.into()] {
                    prop_assert_eq!(given.name_of(address).map(|n| &**n), Some(name.as_str()));
                }
            }
        }
    }
}
