//! The flow hash table: maps the hash of a flow to an index into the caller's table, for up to millions
//! of flows.
//!
//! The table stores no keys. A lookup compares the key in the caller's entry, which a packet needs next
//! anyway, so the comparison costs no cache line of its own and the table stays small.
//!
//! ```text
//!   bucket   │ hash : 32 │ × 7 │ number : 32 │ × 7 │ used : 32 │ overflow : 32 │     one cache line
//! ```
//!
//! The low bits of the hash select the home bucket. If a bucket is full the entry goes to the next one,
//! and `overflow` counts the entries that went past, so a lookup knows when to stop (as in F14: Bronson
//! and Shi, *Open-sourcing F14 for faster, more memory-efficient hash tables*, 2019). The full hash is
//! stored: it rules out nearly all other flows without reading their keys, and a resize needs no keys.
//!
//! Invariants: the average load is at most [`MAX_LOAD`] entries per bucket, and at least an eighth of that
//! unless the table has its smallest size; `overflow` of a bucket is the number of entries whose probe
//! sequence goes beyond it.
//!
//! Cost: a lookup reads one cache line of the table in nearly all cases; [`FlowIndex::prefetch`] prefetches
//! it. 13 to 26 bytes per entry while the table grows.
//!
//! The hash must be keyed ([`FlowHasher`]): otherwise an attacker could choose colliding flows and make
//! lookups long.

// Counts are bounded by the memory of the table.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec;
use alloc::vec::Vec;
use core::hash::Hasher;

use crate::base::{FlowKey, Key};

/// Slots of a bucket.
const SLOTS: usize = 7;
/// Maximum average entries per bucket: beyond it lookups reach the next bucket too often.
const MAX_LOAD: usize = 5;
/// Buckets of the smallest table.
const MIN_BUCKETS: usize = 4;

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    hashes: [u32; SLOTS],
    numbers: [u32; SLOTS],
    /// One bit per slot.
    used: u32,
    /// Entries whose home bucket is this or an earlier one and that are stored in a later one.
    overflow: u32,
}

impl Bucket {
    /// The used slots with this hash, as bits.
    #[inline(always)]
    fn matches(&self, hash: u32) -> u32 {
        let equal = self.hashes.iter().rev().fold(0, |all, h| all << 1 | u32::from(*h == hash));
        equal & self.used
    }

    fn number(&self, slot: usize) -> u32 {
        self.numbers.get(slot).copied().unwrap_or(0)
    }
}

/// The slots in a set of bits, lowest first.
fn slots_of(mut bits: u32) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let slot = bits.trailing_zeros() as usize;
        bits &= bits.wrapping_sub(1);
        (slot < 32).then_some(slot)
    })
}

/// Maps the hash of a flow to the number of its entry in the caller's table.
#[derive(Clone, Debug)]
pub(crate) struct FlowIndex {
    /// The length is a power of two.
    buckets: Vec<Bucket>,
    len: usize,
    changes: u64,
}

impl Default for FlowIndex {
    fn default() -> Self {
        FlowIndex::new()
    }
}

impl FlowIndex {
    /// Creates an empty table.
    pub(crate) fn new() -> FlowIndex {
        FlowIndex { buckets: vec![Bucket::default(); MIN_BUCKETS], len: 0, changes: 0 }
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Memory of the table.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    /// A generation number: the result of a lookup is valid until it changes.
    pub(crate) fn generation(&self) -> u64 {
        self.changes
    }

    /// The first number stored under `hash` for which `is_it` is true.
    #[inline]
    pub(crate) fn find(&self, hash: u32, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        for bucket in self.probe(hash) {
            let found = slots_of(bucket.matches(hash)).map(|slot| bucket.number(slot));
            if let Some(number) = found.into_iter().find(|number| is_it(*number)) {
                return Some(number);
            }
            if bucket.overflow == 0 {
                return None;
            }
        }
        None
    }

    /// Prefetches the home bucket of `hash`, so that the cache misses of a burst overlap. The result has
    /// no meaning; the caller uses it to keep the load from being optimized away.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u32) -> u32 {
        self.probe(hash).next().map_or(0, |b| b.used)
    }

    /// The first number stored under `hash`, without comparing the key: nearly always the flow's. For
    /// prefetching its entry.
    #[inline]
    pub(crate) fn candidate(&self, hash: u32) -> Option<u32> {
        self.find(hash, |_| true)
    }

    /// Adds an entry. Equal entries are stored twice.
    pub(crate) fn insert(&mut self, hash: u32, number: u32) {
        if self.len >= self.buckets.len() * MAX_LOAD {
            self.resize(self.buckets.len() * 2);
        }
        self.store(hash, number);
        self.len += 1;
        self.changes += 1;
    }

    /// Removes an entry. False if there is none.
    pub(crate) fn remove(&mut self, hash: u32, number: u32) -> bool {
        let Some((at, slot)) = self.position(hash, number) else { return false };
        let home = hash as usize;
        for n in 0..(at.wrapping_sub(home)) & self.mask() {
            if let Some(bucket) = self.bucket_mut(home.wrapping_add(n)) {
                bucket.overflow -= 1;
            }
        }
        if let Some(bucket) = self.bucket_mut(at) {
            bucket.used &= !(1 << slot);
        }
        self.len -= 1;
        self.changes += 1;
        if self.buckets.len() > MIN_BUCKETS && self.len * 8 < self.buckets.len() * MAX_LOAD {
            self.resize(self.buckets.len() / 2);
        }
        true
    }

    /// Replaces the number of an entry. False if there is none.
    pub(crate) fn replace(&mut self, hash: u32, old: u32, new: u32) -> bool {
        let Some((at, slot)) = self.position(hash, old) else { return false };
        if let Some(number) = self.bucket_mut(at).and_then(|b| b.numbers.get_mut(slot)) {
            *number = new;
        }
        self.changes += 1;
        true
    }

    /// The probe sequence of a hash: every bucket once, starting with the home bucket.
    #[inline(always)]
    fn probe(&self, hash: u32) -> impl Iterator<Item = &Bucket> {
        let (home, mask) = (hash as usize, self.mask());
        (0..=mask).filter_map(move |n| self.buckets.get(home.wrapping_add(n) & mask))
    }

    #[inline(always)]
    fn mask(&self) -> usize {
        self.buckets.len().wrapping_sub(1)
    }

    fn bucket_mut(&mut self, at: usize) -> Option<&mut Bucket> {
        let mask = self.mask();
        self.buckets.get_mut(at & mask)
    }

    /// The bucket and the slot of an entry.
    fn position(&self, hash: u32, number: u32) -> Option<(usize, usize)> {
        for (n, bucket) in self.probe(hash).enumerate() {
            let mut slots = slots_of(bucket.matches(hash));
            if let Some(slot) = slots.find(|slot| bucket.number(*slot) == number) {
                return Some(((hash as usize).wrapping_add(n), slot));
            }
            if bucket.overflow == 0 {
                return None;
            }
        }
        None
    }

    /// Stores an entry in the first bucket with a free slot. There is one: the average load is below
    /// [`SLOTS`].
    fn store(&mut self, hash: u32, number: u32) {
        for n in 0..self.buckets.len() {
            let Some(bucket) = self.bucket_mut((hash as usize).wrapping_add(n)) else { return };
            let slot = (!bucket.used).trailing_zeros() as usize;
            if let (Some(h), Some(v)) = (bucket.hashes.get_mut(slot), bucket.numbers.get_mut(slot))
            {
                (*h, *v) = (hash, number);
                bucket.used |= 1 << slot;
                return;
            }
            bucket.overflow += 1;
        }
    }

    fn resize(&mut self, buckets: usize) {
        let old = core::mem::replace(&mut self.buckets, vec![Bucket::default(); buckets]);
        for bucket in old {
            for slot in slots_of(bucket.used) {
                self.store(bucket.hashes.get(slot).copied().unwrap_or(0), bucket.number(slot));
            }
        }
    }
}

/// The keyed hash of flow tables, SipHash-1-3: colliding flows cannot be chosen without the key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowHasher(Key);

impl FlowHasher {
    /// Creates the hash with a secret key.
    pub(crate) const fn new(key: Key) -> FlowHasher {
        FlowHasher(key)
    }

    /// The hash of a flow, for [`FlowIndex`].
    #[inline]
    pub(crate) fn hash(&self, key: &FlowKey) -> u32 {
        let mut hasher = self.0.table_hasher();
        match key.ipv4_words() {
            Some(words) => words.into_iter().for_each(|word| hasher.write_u64(word)),
            None => key.words().into_iter().for_each(|word| hasher.write_u64(word)),
        }
        let hash = hasher.finish();
        (hash ^ hash >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::net::SocketAddr;

    fn random(n: &mut u64) -> u64 {
        *n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*n ^ (*n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Random inserts, removals and replacements compared with a map. Hashes have `bits` bits; with few
    /// of them buckets overflow.
    fn agrees_with_a_map(bits: u32, steps: usize, seed: u64) {
        let (mut index, mut model) = (FlowIndex::new(), BTreeMap::<u32, u32>::new());
        let mut seed = seed;
        for step in 0..steps {
            let r = random(&mut seed);
            let (hash, number) = ((r as u32) & ((1 << bits) - 1), (r >> 32) as u32 % 2000);
            match (r >> 60, model.get(&number).copied()) {
                (0..10, None) => {
                    index.insert(hash, number);
                    model.insert(number, hash);
                }
                (10..13, Some(hash)) => {
                    let new = 10_000 + step as u32;
                    assert!(index.replace(hash, number, new));
                    model.remove(&number);
                    model.insert(new, hash);
                }
                (_, Some(hash)) => {
                    assert!(index.remove(hash, number) && !index.remove(hash, number));
                    model.remove(&number);
                }
                _ => assert_eq!(index.find(hash, |n| n == number), None),
            }
            assert_eq!(index.len(), model.len());
            if step % 64 == 0 {
                for (number, hash) in &model {
                    assert_eq!(index.find(*hash, |n| n == *number), Some(*number));
                }
            }
        }
        for (number, hash) in model {
            assert!(index.remove(hash, number));
        }
        assert_eq!(index.bytes(), FlowIndex::new().bytes(), "memory is released");
        assert!(index.buckets.iter().all(|b| b.used == 0 && b.overflow == 0));
    }

    #[test]
    fn operations_agree_with_a_map() {
        agrees_with_a_map(30, 20_000, 1);
    }

    #[test]
    fn full_buckets_and_equal_hashes_lose_no_entry() {
        agrees_with_a_map(4, 5_000, 2);
        agrees_with_a_map(1, 1_000, 3);
    }

    #[test]
    fn a_million_entries_take_less_than_27_bytes_each_and_release_them() {
        let mut index = FlowIndex::new();
        let mut seed = 7;
        let hashes: Vec<u32> = (0..1_000_000).map(|_| random(&mut seed) as u32).collect();
        for (hash, number) in hashes.iter().zip(0..) {
            index.insert(*hash, number);
        }
        assert!(index.bytes() < 27_000_000, "{}", index.bytes());
        for (hash, number) in hashes.iter().zip(0u32..) {
            assert_eq!(index.find(*hash, |n| n == number), Some(number));
        }
        for (hash, number) in hashes.iter().zip(0..) {
            assert!(index.remove(*hash, number));
        }
        assert_eq!(index.bytes(), FlowIndex::new().bytes());
    }

    fn hasher(k0: u64, k1: u64) -> FlowHasher {
        FlowHasher::new(Key::new(k0, k1))
    }

    #[test]
    fn every_field_of_a_flow_key_changes_its_hash() {
        let key = |local: &str, remote: &str| {
            let (l, r): (SocketAddr, SocketAddr) =
                (local.parse().unwrap(), remote.parse().unwrap());
            FlowKey::new(l, r)
        };
        let keys = [
            key("10.0.0.1:1", "10.0.0.2:2"),
            key("10.0.0.1:2", "10.0.0.2:1"),
            key("10.0.0.2:1", "10.0.0.1:2"),
            key("10.0.0.1:1", "10.0.0.3:2"),
            key("[2001:db8::1]:1", "[2001:db8::2]:2"),
            key("[2001:db8::1]:2", "[2001:db8::2]:1"),
            key("[2001:db8::2]:1", "[2001:db8::1]:2"),
            key("[fe80::1%1]:1", "[fe80::2%1]:2"),
            key("[fe80::1%2]:1", "[fe80::2%2]:2"),
        ];
        for h in [hasher(1, 2), hasher(3, 4)] {
            let hashes: BTreeMap<u32, &FlowKey> = keys.iter().map(|k| (h.hash(k), k)).collect();
            assert_eq!(hashes.len(), keys.len());
        }
        assert_ne!(hasher(1, 2).hash(&keys[0]), hasher(1, 3).hash(&keys[0]));
    }
}
