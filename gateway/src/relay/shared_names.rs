//! The names of a gateway whose addresses are its own: one table for the threads of all queues.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use fulmar_stack::base::{Duration, Instant};

use super::udp::initials::Initials;
use crate::names::pins::{Known, Pins};
use crate::names::{Addresses, Given, Ranges};

struct Tables {
    given: Given,
    pins: Pins,
}

/// The tables behind a lock; without ranges every address stands for itself.
#[derive(Clone, Default)]
pub(crate) struct SharedNames {
    ranges: Option<Ranges>,
    tables: Option<Arc<Mutex<Tables>>>,
    pub initials: Initials,
}

/// What an address means to the guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Meaning {
    /// Itself.
    Address,
    /// A name.
    Name(Arc<str>),
    /// Nothing: it is in a range of names, and was not given.
    Nothing,
}

impl SharedNames {
    pub(crate) fn new(ranges: Option<Ranges>) -> SharedNames {
        let tables = |ranges| Tables { given: Given::new(ranges), pins: Pins::default() };
        let tables = ranges.map(|ranges| Arc::new(Mutex::new(tables(ranges))));
        SharedNames { ranges, tables, initials: Initials::default() }
    }

    /// Whether names get addresses.
    pub(crate) fn are_given(&self) -> bool {
        self.ranges.is_some()
    }

    /// `None`: names get no addresses, or a thread panicked with the tables.
    fn with<T>(&self, call: impl FnOnce(&mut Tables) -> T) -> Option<T> {
        Some(call(&mut *self.tables.as_ref()?.lock().ok()?))
    }

    /// Whether an address is in a range of names.
    pub(crate) fn cover(&self, address: IpAddr) -> bool {
        self.ranges.is_some_and(|ranges| ranges.cover(address))
    }

    pub(crate) fn meaning(&self, address: IpAddr) -> Meaning {
        if !self.cover(address) {
            return Meaning::Address;
        }
        let name = self.with(|tables| tables.given.name_of(address).cloned());
        name.flatten().map_or(Meaning::Nothing, Meaning::Name)
    }

    /// The addresses of a name. `None`: the table is full.
    pub(crate) fn give(&self, name: &str) -> Option<Addresses> {
        self.with(|tables| tables.given.give(name)).flatten()
    }

    /// What is known about a name, and for how long. `None`: it has to be looked up.
    pub(crate) fn known(&self, name: &str, now: Instant) -> Option<(Known, Duration)> {
        let known = self
            .with(|tables| tables.pins.fresh(name, now).map(|(known, left)| (known.clone(), left)));
        known.flatten()
    }

    /// Pins what a lookup has found.
    pub(crate) fn pin(&self, name: &Arc<str>, known: Known, lifetime: Duration, now: Instant) {
        self.with(|tables| tables.pins.pin(name, known, lifetime, now));
    }
}
