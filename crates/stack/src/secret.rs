//! Everything random that a shard needs, derived from one seed: initial sequence numbers, timestamp
//! offsets, ephemeral ports, the keys of its hash tables.

use core::hash::{BuildHasher, Hash, Hasher};

use fulmar_base::{FlowHasher, FlowKey, Instant, SeqNum};
use fulmar_tcp::CookieInput;
use siphasher::sip::{SipHasher13, SipHasher24};

/// First ephemeral port, as Linux has it.
pub const EPHEMERAL_FIRST: u16 = 32_768;
/// How many ephemeral ports there are (32768 to 60999, as Linux has it).
pub const EPHEMERAL_COUNT: u16 = 28_232;

/// A keyed hash: a stranger cannot choose flows that collide.
#[derive(Clone, Copy)]
pub struct Keyed {
    k0: u64,
    k1: u64,
}

impl BuildHasher for Keyed {
    type Hasher = SipHasher13;
    fn build_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_keys(self.k0, self.k1)
    }
}

/// The secrets of a shard.
pub struct Secret {
    table: Keyed,
    isn: Keyed,
    timestamp: Keyed,
    port: Keyed,
    cookie: Keyed,
    port_counter: u16,
}

/// SplitMix64: spreads one seed over several keys.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Secret {
    /// The secrets that follow from a seed.
    pub fn new(seed: u64) -> Secret {
        let mut s = seed;
        let mut key = || Keyed { k0: split_mix(&mut s), k1: split_mix(&mut s) };
        let (table, isn, timestamp, port) = (key(), key(), key(), key());
        let cookie = key();
        Secret { table, isn, timestamp, port, cookie, port_counter: split_mix(&mut s) as u16 }
    }

    /// The hasher of the shard's tables.
    pub fn table_hasher(&self) -> Keyed {
        self.table
    }

    /// The hash of the index of connections.
    pub fn flow_hasher(&self) -> FlowHasher {
        FlowHasher::new(self.table.k1, self.table.k0)
    }

    /// The initial sequence number of a connection: a clock of 4 microseconds plus a keyed hash
    /// of the flow (RFC 6528 section 3).
    pub fn initial_sequence(&self, key: &FlowKey, now: Instant) -> SeqNum {
        let clock = (now.as_nanos() / 4_000) as u32;
        SeqNum(clock.wrapping_add(self.isn.hash_one(key) as u32))
    }

    /// The offset of a connection's timestamps, so that they do not tell the machine's uptime
    /// (RFC 7323 section 7.1).
    pub fn timestamp_offset(&self, key: &FlowKey) -> u32 {
        self.timestamp.hash_one(key) as u32
    }

    /// Where the initial sequence numbers of a flow begin: what [`Secret::initial_sequence`] adds to the
    /// clock.
    pub fn cookie_base(&self, key: &FlowKey) -> u32 {
        self.isn.hash_one(key) as u32
    }

    /// The MAC of a SYN cookie.
    pub fn cookie_mac(&self, key: &FlowKey, input: &CookieInput) -> u32 {
        let mut hasher = SipHasher24::new_with_keys(self.cookie.k0, self.cookie.k1);
        (key, input).hash(&mut hasher);
        hasher.finish() as u32
    }

    /// Ephemeral ports for a destination, each once, starting at a place that a stranger cannot
    /// guess (RFC 6056 section 3.3.3).
    pub fn ports_for<D: Hash>(&mut self, destination: D) -> impl Iterator<Item = u16> + use<D> {
        self.port_counter = self.port_counter.wrapping_add(1);
        let hash = self.port.hash_one(destination) as u32;
        let start = hash.wrapping_add(u32::from(self.port_counter));
        (0..u32::from(EPHEMERAL_COUNT)).map(move |i| {
            EPHEMERAL_FIRST + (start.wrapping_add(i) % u32::from(EPHEMERAL_COUNT)) as u16
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_ephemeral_port_is_offered_once() {
        let mut s = Secret::new(1);
        let ports: BTreeSet<u16> = s.ports_for(7u32).collect();
        assert_eq!(ports.len(), usize::from(EPHEMERAL_COUNT));
        assert_eq!(ports.first(), Some(&32_768));
        assert_eq!(ports.last(), Some(&60_999));
    }

    #[test]
    fn sequence_numbers_advance_with_the_clock_and_differ_between_flows() {
        let s = Secret::new(1);
        let a = FlowKey::new("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap());
        let b = FlowKey::new("10.0.0.1:1".parse().unwrap(), "10.0.0.2:3".parse().unwrap());
        let at = |ms| Instant::from_millis(ms);
        assert_eq!(s.initial_sequence(&a, at(1)).since(s.initial_sequence(&a, at(0))), 250);
        assert_ne!(s.initial_sequence(&a, at(0)), s.initial_sequence(&b, at(0)));
        let other = Secret::new(2);
        assert_ne!(s.initial_sequence(&a, at(0)), other.initial_sequence(&a, at(0)));
    }
}
