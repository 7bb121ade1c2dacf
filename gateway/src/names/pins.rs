//! The addresses at which the host reaches names: looked up, and pinned for the lifetime of the answer.
//!
//! ```text
//!   a question or a connection ──► fresh pin? ──► its addresses
//!                                      └─ no ──► A and AAAA to the host's resolvers ──► both halves ──► pin
//! ```
//!
//! A connection of the guest goes to a pinned address or nowhere: what the name leads to later, or another resolver says,
//! does not count until the pin has expired and the host's resolvers were asked again.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use fulmar_stack::base::{Duration, Instant};
use smallvec::SmallVec;

/// Names with a pin; the oldest pin gives way, and its name is looked up again.
const MOST_PINS: usize = 16_384;
/// Addresses of one name and IP version that are kept.
const MOST_ADDRESSES: usize = 32;
/// The least lifetime: a program connects a moment after it has asked, also where the answer has none.
const LEAST: Duration = Duration::from_secs(5);
/// The longest lifetime (RFC 8767 section 4 caps at a week; an address that a name lost is to be forgotten sooner).
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Addresses in the order of trial.
pub(crate) type Candidates = SmallVec<[IpAddr; 4]>;

/// What the host's resolvers say about the records of one type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Half {
    /// Addresses, and the least lifetime of the records that lead to them, in seconds.
    Addresses(Candidates, u32),
    /// The name has no record of the type.
    NoAddress,
    /// The name does not exist (RFC 8020).
    NoName,
    /// No resolver gave an answer.
    Failed,
}

/// What is known about a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// Its addresses, in the order of trial.
    Addresses(Candidates),
    /// It has no address.
    NoAddress,
    /// It does not exist.
    NoName,
    /// No resolver gave an answer.
    Failed,
}

/// The two questions about one name.
#[derive(Default)]
pub(crate) struct Lookup {
    v4: Option<Half>,
    v6: Option<Half>,
}

impl Lookup {
    /// Enters the answer of one type. The first answer counts.
    pub(crate) fn enter(&mut self, is_v4: bool, half: Half) {
        let of_type = if is_v4 { &mut self.v4 } else { &mut self.v6 };
        of_type.get_or_insert(half);
    }

    /// Both answers together and their lifetime; `None`: one is missing.
    pub(crate) fn outcome(&self) -> Option<(Known, Duration)> {
        let halves = [self.v6.as_ref()?, self.v4.as_ref()?];
        let lists = halves.map(|half| match half {
            Half::Addresses(list, _) => list.as_slice(),
            _ => &[],
        });
        let lifetimes = halves.iter().filter_map(|half| match half {
            Half::Addresses(_, seconds) => Some(*seconds),
            _ => None,
        });
        let lifetime = Duration::from_secs(lifetimes.min().unwrap_or(0).into());
        let candidates = alternating(lists);
        let known = match halves {
            _ if !candidates.is_empty() => Known::Addresses(candidates),
            // A name that exists for one type exists.
            [Half::NoName, Half::NoName] => Known::NoName,
            [Half::Failed, _] | [_, Half::Failed] => Known::Failed,
            _ => Known::NoAddress,
        };
        Some((known, lifetime.clamp(LEAST, LONGEST)))
    }
}

/// The lists by turns, an address of the first one first (RFC 8305 section 4), without repeated ones.
fn alternating(lists: [&[IpAddr]; 2]) -> Candidates {
    let mut all = Candidates::new();
    for at in 0..MOST_ADDRESSES {
        for address in lists.iter().filter_map(|list| list.get(at)) {
            if !all.contains(address) {
                all.push(*address);
            }
        }
    }
    all
}

struct Pin {
    known: Known,
    until: Instant,
    /// The entry of `order` that counts.
    entered: u64,
}

/// The pins of a guest.
#[derive(Default)]
pub(crate) struct Pins {
    by_name: HashMap<Arc<str>, Pin>,
    /// Names by the time of their pins, with entries of earlier pins between them.
    order: VecDeque<(u64, Arc<str>)>,
    count: u64,
}

impl Pins {
    /// What is known about a name now. `None`: it has to be looked up.
    pub(crate) fn fresh(&self, name: &str, now: Instant) -> Option<(&Known, Duration)> {
        let pin = self.by_name.get(name).filter(|pin| pin.until > now)?;
        Some((&pin.known, pin.until.since(now)))
    }

    /// Pins what a lookup has found. Failures are not kept: the next question is asked.
    pub(crate) fn pin(&mut self, name: &Arc<str>, known: Known, lifetime: Duration, now: Instant) {
        if known == Known::Failed {
            return;
        }
        self.count += 1;
        let pin = Pin { known, until: now + lifetime, entered: self.count };
        self.by_name.insert(Arc::clone(name), pin);
        self.order.push_back((self.count, Arc::clone(name)));
        while self.by_name.len() > MOST_PINS {
            let Some((entered, oldest)) = self.order.pop_front() else { break };
            if self.is_current(entered, &oldest) {
                self.by_name.remove(&oldest);
            }
        }
        if self.order.len() > 2 * self.by_name.len() + 64 {
            let mut order = std::mem::take(&mut self.order);
            order.retain(|(entered, name)| self.is_current(*entered, name));
            self.order = order;
        }
    }

    fn is_current(&self, entered: u64, name: &str) -> bool {
        self.by_name.get(name).is_some_and(|pin| pin.entered == entered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(all: &[&str]) -> Candidates {
        all.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn outcome(v4: Half, v6: Half) -> (Known, Duration) {
        let mut lookup = Lookup::default();
        lookup.enter(true, v4);
        assert_eq!(lookup.outcome(), None, "one half");
        lookup.enter(false, v6);
        lookup.outcome().unwrap()
    }

    #[test]
    fn addresses_of_both_versions_are_tried_by_turns_ipv6_first() {
        let v4 = Half::Addresses(list(&["192.0.2.1", "192.0.2.2", "192.0.2.1"]), 60);
        let v6 = Half::Addresses(list(&["2001:db8::1"]), 300);
        let (known, lifetime) = outcome(v4, v6);
        assert_eq!(known, Known::Addresses(list(&["2001:db8::1", "192.0.2.1", "192.0.2.2"])));
        assert_eq!(lifetime, Duration::from_secs(60));
    }

    #[test]
    fn one_version_is_enough_and_a_missing_one_is_no_failure() {
        let v4 = || Half::Addresses(list(&["192.0.2.1"]), 60);
        for other in [Half::NoAddress, Half::Failed, Half::NoName] {
            assert_eq!(outcome(v4(), other).0, Known::Addresses(list(&["192.0.2.1"])));
        }
        assert_eq!(outcome(Half::NoAddress, Half::NoAddress).0, Known::NoAddress);
        assert_eq!(outcome(Half::NoName, Half::NoName).0, Known::NoName);
        assert_eq!(outcome(Half::NoName, Half::NoAddress).0, Known::NoAddress);
        assert_eq!(outcome(Half::Failed, Half::NoAddress).0, Known::Failed);
    }

    #[test]
    fn the_first_answer_of_a_type_counts() {
        let mut lookup = Lookup::default();
        lookup.enter(true, Half::Addresses(list(&["192.0.2.1"]), 60));
        lookup.enter(true, Half::Addresses(list(&["203.0.113.9"]), 60));
        lookup.enter(false, Half::NoAddress);
        assert_eq!(lookup.outcome().unwrap().0, Known::Addresses(list(&["192.0.2.1"])));
    }

    #[test]
    fn a_pin_holds_for_its_lifetime_between_bounds() {
        let name = Arc::<str>::from("example.org");
        let of = |seconds| {
            let half = Half::Addresses(list(&["192.0.2.1"]), seconds);
            outcome(half, Half::NoAddress)
        };
        assert_eq!(of(0).1, LEAST);
        assert_eq!(of(u32::MAX).1, LONGEST);
        let (mut pins, now) = (Pins::default(), Instant::ZERO);
        let (known, lifetime) = of(60);
        pins.pin(&name, known.clone(), lifetime, now);
        let later = now + Duration::from_secs(59);
        assert_eq!(pins.fresh("example.org", later), Some((&known, Duration::from_secs(1))));
        assert_eq!(pins.fresh("example.org", now + Duration::from_secs(60)), None);
        assert_eq!(pins.fresh("example.net", now), None);
    }

    #[test]
    fn a_failure_is_not_pinned_and_leaves_the_earlier_pin() {
        let name = Arc::<str>::from("example.org");
        let (mut pins, now) = (Pins::default(), Instant::ZERO);
        pins.pin(&name, Known::NoAddress, LEAST, now);
        pins.pin(&name, Known::Failed, LEAST, now);
        assert_eq!(pins.fresh("example.org", now), Some((&Known::NoAddress, LEAST)));
    }

    #[test]
    fn pins_are_bounded_and_the_oldest_gives_way() {
        let (mut pins, now) = (Pins::default(), Instant::ZERO);
        let name = |n: usize| Arc::<str>::from(format!("n{n}.example"));
        pins.pin(&name(0), Known::NoName, LONGEST, now);
        for n in 0..MOST_PINS {
            pins.pin(&name(n), Known::NoName, LONGEST, now);
        }
        assert_eq!(pins.by_name.len(), MOST_PINS);
        assert!(pins.fresh("n0.example", now).is_some(), "pinned again");
        pins.pin(&name(MOST_PINS), Known::NoName, LONGEST, now);
        assert_eq!((pins.by_name.len(), pins.fresh("n0.example", now)), (MOST_PINS, None));
        for _ in 0..4 * MOST_PINS {
            pins.pin(&name(7), Known::NoName, LONGEST, now);
        }
        assert!(pins.order.len() <= 2 * MOST_PINS + 64);
    }
}
