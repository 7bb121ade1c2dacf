//! Routes to destinations, and the destination cache (RFC 4861 section 5.1).

use alloc::vec;
use alloc::vec::Vec;
use core::net::IpAddr;

use crate::base::{EtherAddr, Instant};
use crate::route::Traffic;

use crate::ip::Egress;
use crate::ip::pmtu::Limits;

/// Entries of the cache. A collision costs a look-up in the tables, so the cache need only cover
/// the concurrently active destinations. 64 entries of about 100 bytes fit a first-level cache.
const CACHE_ENTRIES: usize = 64;

/// How a packet is delivered to its next hop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Delivery {
    /// To this host (loopback).
    Local,
    /// To a multicast or broadcast Ethernet address.
    Group(EtherAddr),
    /// To a neighbour, whose Ethernet address may have to be resolved.
    Neighbour(IpAddr),
}

/// The result of a routing look-up for a destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Path {
    pub(crate) delivery: Delivery,
    /// Preferred source address of the route.
    pub(crate) src: Option<IpAddr>,
    /// Path MTUs, with path MTU discovery (see `pmtu`).
    pub(crate) limits: Limits,
    /// MTU of the route, without path MTU discovery.
    pub(crate) route_mtu: usize,
    pub(crate) is_broadcast: bool,
    /// Multipath: other flows to the same destination may use another next hop.
    pub(crate) is_multipath: bool,
}

/// Key of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) dst: IpAddr,
    /// Routing table.
    pub(crate) table: u32,
    /// Flow hash with multipath routes, else 0.
    pub(crate) flow: u64,
}

/// A resolved destination: its packets can be sent immediately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Destination {
    pub(crate) key: Key,
    pub(crate) ether: EtherAddr,
    pub(crate) is_local: bool,
    pub(crate) limits: Limits,
    /// Created by a reply, so the neighbour entry is not marked as used by own traffic.
    pub(crate) created_by_reply: bool,
    /// The neighbour awaits a reachability confirmation.
    pub(crate) awaits_confirmation: bool,
    /// Valid while the interface's generation equals this one.
    pub(crate) generation: u64,
    /// Valid before this time, when the neighbour's state changes.
    pub(crate) fresh_until: Instant,
}

impl Destination {
    pub(crate) fn egress(&self) -> Egress {
        if self.is_local { Egress::Loopback } else { Egress::Device }
    }
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

    /// Returns a valid entry. An entry created by a reply serves replies only: own traffic must
    /// reach the neighbour table, which protects entries used by own traffic from eviction.
    #[inline]
    pub(crate) fn find(
        &self,
        key: Key,
        traffic: Traffic,
        generation: u64,
        now: Instant,
    ) -> Option<&Destination> {
        let found = self.entries.get(index_of(key))?.as_ref()?;
        let holds = found.key == key && found.generation == generation && now < found.fresh_until;
        let serves = !found.created_by_reply || traffic == Traffic::Reply;
        (holds && serves).then_some(found)
    }

    /// Removes an entry, so that the next packet consults the tables.
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
fn index_of(key: Key) -> usize {
    let folded = match key.dst {
        IpAddr::V4(a) => u64::from(a.to_bits()),
        IpAddr::V6(a) => {
            let bits = a.to_bits();
            (bits as u64) ^ ((bits >> 64) as u64)
        }
    };
    let folded = folded ^ key.flow ^ u64::from(key.table) << 32;
    let mixed = folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    mixed as usize & (CACHE_ENTRIES - 1)
}
