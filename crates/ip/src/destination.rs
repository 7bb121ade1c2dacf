//! Where the packets to one address go, and the small cache that remembers it.

use alloc::vec;
use alloc::vec::Vec;
use core::net::IpAddr;

use fulmar_base::{EtherAddr, Instant};

use crate::pmtu::Limits;

/// Destinations remembered. A collision costs a look-up in the tables, so that this only needs to
/// cover what is active at the same time; 64 entries of about 100 bytes stay in the first-level cache.
const CACHE_ENTRIES: usize = 64;

/// The way of a packet out of this stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// It is for ourselves.
    Own,
    /// To a group of stations.
    Group(EtherAddr),
    /// To a neighbour, which may have to be asked for its Ethernet address.
    Neighbour(IpAddr),
}

/// What the tables say about a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Path {
    pub(crate) way: Way,
    /// Source address that the route prefers.
    pub(crate) src: Option<IpAddr>,
    /// Largest IP packets, path MTU discovery considered (see `pmtu`).
    pub(crate) limits: Limits,
    /// Largest IP packet by the route alone.
    pub(crate) route_mtu: usize,
    pub(crate) is_broadcast: bool,
    /// Other flows to the same destination may go another way.
    pub(crate) is_spread: bool,
}

/// What packets have in common that go the same way: destination, table, and where flows are spread
/// the hash of the flow; else 0.
pub(crate) type Key = (IpAddr, u32, u64);

/// A destination whose packets can go at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Destination {
    pub(crate) key: Key,
    pub(crate) ether: EtherAddr,
    pub(crate) is_own: bool,
    pub(crate) limits: Limits,
    /// The neighbour that takes the packets waits for a confirmation.
    pub(crate) in_doubt: bool,
    /// Holds while the interface's generation is this.
    pub(crate) generation: u64,
    /// Holds before this: then the neighbour's state must be looked at again.
    pub(crate) fresh_until: Instant,
}

/// A direct-mapped cache of destinations.
#[derive(Clone, Debug)]
pub(crate) struct DestinationCache {
    entries: Vec<Option<Destination>>,
}

impl DestinationCache {
    pub(crate) fn new() -> DestinationCache {
        DestinationCache { entries: vec![None; CACHE_ENTRIES] }
    }

    /// What is remembered, if it still holds.
    #[inline]
    pub(crate) fn find(&self, key: Key, generation: u64, now: Instant) -> Option<&Destination> {
        let found = self.entries.get(index_of(key))?.as_ref()?;
        let holds = found.key == key && found.generation == generation && now < found.fresh_until;
        holds.then_some(found)
    }

    /// Forgets one destination, so that its next packet looks at the tables.
    pub(crate) fn forget(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(index_of(key)) {
            *entry = None;
        }
    }

    pub(crate) fn store(&mut self, destination: Destination) {
        if let Some(entry) = self.entries.get_mut(index_of(destination.key)) {
            *entry = Some(destination);
        }
    }
}

#[inline]
fn index_of((dst, table, flow): Key) -> usize {
    let folded = match dst {
        IpAddr::V4(a) => u64::from(a.to_bits()),
        IpAddr::V6(a) => {
            let bits = a.to_bits();
            (bits as u64) ^ ((bits >> 64) as u64)
        }
    };
    let folded = folded ^ flow ^ u64::from(table) << 32;
    let mixed = folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    mixed as usize & (CACHE_ENTRIES - 1)
}
