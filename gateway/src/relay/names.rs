//! Names of addresses, as DNS answers that passed have told them to the guest; for the policy.
//!
//! An address has the names that were asked for when it was the answer ([`dns`](super::dns)). Bounds:
//! [`MOST_ADDRESSES`] and [`MOST_NAMES`] of each, of which the oldest is forgotten. A name that a rule refuses is not
//! among the latter: other names at its address do not displace it, nor do other addresses its address.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

/// Most addresses.
const MOST_ADDRESSES: usize = 4096;
/// Names of one address at most, beside those that are kept.
const MOST_NAMES: usize = 8;

/// The names of one address, the latest first.
#[derive(Default)]
struct Entry {
    names: Vec<String>,
    /// Which of them are kept, in the same order.
    is_kept: Vec<bool>,
}

/// The names of addresses.
#[derive(Default)]
pub(crate) struct Names {
    by_address: HashMap<IpAddr, Entry>,
    /// In the order in which they became known.
    order: VecDeque<IpAddr>,
}

impl Names {
    /// The names of an address, the latest first.
    pub(crate) fn of(&self, address: IpAddr) -> &[String] {
        self.by_address.get(&address).map_or(&[], |entry| &entry.names)
    }

    /// Adds a name of an address. `keeps` says whether the name has to be kept beside those that are kept already.
    pub(crate) fn add(
        &mut self,
        address: IpAddr,
        name: &str,
        keeps: impl FnOnce(&[String]) -> bool,
    ) {
        if !self.by_address.contains_key(&address) {
            if self.order.len() >= MOST_ADDRESSES {
                self.forget_one();
            }
            self.order.push_back(address);
        }
        self.by_address.entry(address).or_default().add(name, keeps);
    }

    /// Forgets the oldest address without a name that is kept; if there is none, the oldest.
    fn forget_one(&mut self) {
        let has_kept =
            |a: &IpAddr| self.by_address.get(a).is_some_and(|e| e.is_kept.contains(&true));
        let at = self.order.iter().position(|address| !has_kept(address)).unwrap_or(0);
        if let Some(oldest) = self.order.remove(at) {
            self.by_address.remove(&oldest);
        }
    }
}

impl Entry {
    fn add(&mut self, name: &str, keeps: impl FnOnce(&[String]) -> bool) {
        let known = self.names.iter().position(|n| n == name);
        let is_kept = match known {
            Some(at) => {
                self.names.remove(at);
                self.is_kept.remove(at)
            }
            None => keeps(&self.names),
        };
        self.names.insert(0, name.to_owned());
        self.is_kept.insert(0, is_kept);
        let others = self.is_kept.iter().filter(|kept| !**kept).count();
        if others > MOST_NAMES
            && let Some(last) = self.is_kept.iter().rposition(|kept| !*kept)
        {
            self.names.remove(last);
            self.is_kept.remove(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never(_: &[String]) -> bool {
        false
    }

    #[test]
    fn an_address_has_the_names_that_were_asked_for_the_latest_first() {
        let mut names = Names::default();
        let (a, b) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        names.add(a, "example.org", never);
        names.add(b, "example.org", never);
        names.add(a, "www.example.net", never);
        assert_eq!(names.of(a), ["www.example.net", "example.org"]);
        assert_eq!(names.of(b), ["example.org"]);
        names.add(a, "example.org", never);
        assert_eq!(names.of(a), ["example.org", "www.example.net"]);
        assert!(names.of([192, 0, 2, 3].into()).is_empty());
    }

    #[test]
    fn known_names_are_bounded() {
        let mut names = Names::default();
        for n in 0..=MOST_ADDRESSES as u16 {
            let [a, b] = n.to_be_bytes();
            names.add([10, 0, a, b].into(), "example.org", never);
        }
        assert_eq!((names.by_address.len(), names.order.len()), (MOST_ADDRESSES, MOST_ADDRESSES));
        assert!(names.of([10, 0, 0, 0].into()).is_empty());
        for n in 0..20 {
            names.add([10, 0, 0, 9].into(), &format!("n{n}.example"), never);
        }
        assert_eq!(names.of([10, 0, 0, 9].into()).len(), MOST_NAMES);
    }

    #[test]
    fn a_name_that_is_kept_is_displaced_neither_by_names_nor_by_addresses() {
        let mut names = Names::default();
        let address = [192, 0, 2, 1].into();
        names.add(address, "refused.example", |_| true);
        for n in 0..20 {
            names.add(address, &format!("n{n}.example"), never);
        }
        assert_eq!(names.of(address).len(), MOST_NAMES + 1);
        for n in 0..2 * MOST_ADDRESSES as u16 {
            let [a, b] = n.to_be_bytes();
            names.add([10, 0, a, b].into(), "example.org", never);
        }
        assert!(names.of(address).iter().any(|n| n == "refused.example"));
        assert_eq!(names.by_address.len(), MOST_ADDRESSES);
        // The bound holds even if every entry is in use.
        for n in 0..2 * MOST_ADDRESSES as u16 {
            let [a, b] = n.to_be_bytes();
            names.add([10, 1, a, b].into(), "refused.example", |_| true);
        }
        assert_eq!(names.by_address.len(), MOST_ADDRESSES);
    }
}
