//! Which entry of a table a flow is: a hash table of numbers, for up to millions of flows.
//!
//! Enters: hashes of flows, numbers of entries. Leaves: the number of the entry that the caller says is
//! the flow's own. The keys are in the entries, not here: what a packet's flow is found for is read
//! next, so that comparing there costs no line of memory of its own, and the index stays small.
//!
//! ```text
//!   bucket   │ hash : 32 │ × 7 │ number : 32 │ × 7 │ used : 32 │ passed : 32 │     one cache line
//! ```
//!
//! An entry lies in the bucket that the low bits of its hash name, or in a later one if that is full;
//! `passed` counts those that went by, so that a search knows when to stop (as in F14: Bronson and
//! Shi, *Open-sourcing F14 for faster, more memory-efficient hash tables*, 2019). The whole hash is
//! kept: it tells nearly every other flow apart, and the table grows without the keys.
//!
//! Invariants: at most [`FILL`] entries per bucket on average; between 1/8 and all of that fill once
//! the table is larger than its least; a bucket's `passed` is the number of entries whose search goes
//! beyond it.
//!
//! Cost: a look-up reads one line of the index in nearly all cases; [`FlowIndex::touch`] fetches it ahead.
//! 13 to 26 bytes per entry while it grows.
//!
//! The hash must be keyed ([`FlowHasher`]): a stranger who could choose what collides could make a
//! search long.

// Sums of counts that fit the memory they count.
#![allow(clippy::arithmetic_side_effects)]

use alloc::vec;
use alloc::vec::Vec;

use crate::siphash::sip;
use crate::{FlowKey, Key};

/// Places of a bucket.
const PLACES: usize = 7;
/// Entries per bucket at most, on average: with more, searches go on to the next bucket too often.
const FILL: usize = 5;
/// Buckets of the smallest table.
const LEAST_BUCKETS: usize = 4;

#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    hashes: [u32; PLACES],
    numbers: [u32; PLACES],
    /// One bit per place.
    used: u32,
    /// Entries of this bucket or an earlier one that lie in a later one.
    passed: u32,
}

impl Bucket {
    /// One bit per place that holds this hash.
    #[inline(always)]
    fn matches(&self, hash: u32) -> u32 {
        let equal = self.hashes.iter().rev().fold(0, |all, h| all << 1 | u32::from(*h == hash));
        equal & self.used
    }

    fn free_place(&self) -> Option<usize> {
        let place = (!self.used).trailing_zeros() as usize;
        (place < PLACES).then_some(place)
    }

    fn number(&self, place: usize) -> u32 {
        self.numbers.get(place).copied().unwrap_or(0)
    }
}

/// The places of a set of bits, lowest first.
fn places_of(mut bits: u32) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let place = bits.trailing_zeros() as usize;
        bits &= bits.wrapping_sub(1);
        (place < 32).then_some(place)
    })
}

/// From the hash of a flow to the number of its entry.
#[derive(Clone, Debug)]
pub struct FlowIndex {
    /// A power of two of them.
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
    /// No entries.
    pub fn new() -> FlowIndex {
        FlowIndex { buckets: vec![Bucket::default(); LEAST_BUCKETS], len: 0, changes: 0 }
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory of the index.
    pub fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    /// Counts changes: what was found holds while this stays the same.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The number with this hash that `is_it` knows for its own; of several the one that is met first.
    #[inline]
    pub fn find(&self, hash: u32, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        for bucket in self.path(hash) {
            let found = places_of(bucket.matches(hash)).map(|place| bucket.number(place));
            if let Some(number) = found.into_iter().find(|number| is_it(*number)) {
                return Some(number);
            }
            if bucket.passed == 0 {
                return None;
            }
        }
        None
    }

    /// Reads what a search for this hash reads first. The result says nothing; using it keeps the
    /// load from being left out. Called for all hashes of a burst, their misses are under way together.
    #[inline]
    pub fn touch(&self, hash: u32) -> u32 {
        self.path(hash).next().map_or(0, |b| b.used)
    }

    /// The first number with this hash: nearly always the flow's, but nobody has asked its entry. For
    /// fetching that ahead.
    #[inline]
    pub fn candidate(&self, hash: u32) -> Option<u32> {
        self.find(hash, |_| true)
    }

    /// Adds an entry; the same hash and number twice are two entries.
    pub fn insert(&mut self, hash: u32, number: u32) {
        if self.len >= self.buckets.len() * FILL {
            self.resize(self.buckets.len() * 2);
        }
        self.place(hash, number);
        self.len += 1;
        self.changes += 1;
    }

    /// Takes an entry out. False if it is not here.
    pub fn remove(&mut self, hash: u32, number: u32) -> bool {
        let Some((at, place)) = self.position(hash, number) else { return false };
        let home = hash as usize;
        for passed in 0..(at.wrapping_sub(home)) & self.mask() {
            if let Some(bucket) = self.bucket_mut(home.wrapping_add(passed)) {
                bucket.passed -= 1;
            }
        }
        if let Some(bucket) = self.bucket_mut(at) {
            bucket.used &= !(1 << place);
        }
        self.len -= 1;
        self.changes += 1;
        if self.buckets.len() > LEAST_BUCKETS && self.len * 8 < self.buckets.len() * FILL {
            self.resize(self.buckets.len() / 2);
        }
        true
    }

    /// Puts another number in the place of one. False if that is not here.
    pub fn replace(&mut self, hash: u32, old: u32, new: u32) -> bool {
        let Some((at, place)) = self.position(hash, old) else { return false };
        if let Some(number) = self.bucket_mut(at).and_then(|b| b.numbers.get_mut(place)) {
            *number = new;
        }
        self.changes += 1;
        true
    }

    /// The buckets that a hash may be in, in order; each once.
    #[inline(always)]
    fn path(&self, hash: u32) -> impl Iterator<Item = &Bucket> {
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

    /// In which bucket and place an entry is.
    fn position(&self, hash: u32, number: u32) -> Option<(usize, usize)> {
        for (n, bucket) in self.path(hash).enumerate() {
            let mut places = places_of(bucket.matches(hash));
            if let Some(place) = places.find(|place| bucket.number(*place) == number) {
                return Some(((hash as usize).wrapping_add(n), place));
            }
            if bucket.passed == 0 {
                return None;
            }
        }
        None
    }

    /// Puts an entry into the first bucket with a free place; there is one, since buckets are not full
    /// on average.
    fn place(&mut self, hash: u32, number: u32) {
        for n in 0..self.buckets.len() {
            let Some(bucket) = self.bucket_mut((hash as usize).wrapping_add(n)) else { return };
            let Some(place) = bucket.free_place() else {
                bucket.passed += 1;
                continue;
            };
            if let (Some(h), Some(v)) =
                (bucket.hashes.get_mut(place), bucket.numbers.get_mut(place))
            {
                (*h, *v) = (hash, number);
            }
            bucket.used |= 1 << place;
            return;
        }
    }

    fn resize(&mut self, buckets: usize) {
        let old = core::mem::replace(&mut self.buckets, vec![Bucket::default(); buckets]);
        for bucket in old {
            for place in places_of(bucket.used) {
                self.place(bucket.hashes.get(place).copied().unwrap_or(0), bucket.number(place));
            }
        }
    }
}

/// The keyed hash of the tables of flows, SipHash-1-3: a stranger cannot choose flows that collide.
#[derive(Clone, Copy, Debug)]
pub struct FlowHasher(Key);

impl FlowHasher {
    /// The hash with a key, which nobody else may know.
    pub const fn new(key: Key) -> FlowHasher {
        FlowHasher(key)
    }

    /// The hash of a flow, for [`FlowIndex`].
    #[inline]
    pub fn hash(&self, key: &FlowKey) -> u32 {
        let hash = match key.ipv4_words() {
            Some(words) => sip::<1, 3>(&self.0, &words),
            None => sip::<1, 3>(&self.0, &key.words()),
        };
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

    /// Random inserts, removals and replacements against a map; `bits` of the hashes differ, so that
    /// with few of them buckets overflow.
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
        assert_eq!(index.bytes(), FlowIndex::new().bytes(), "memory is given back");
        assert!(index.buckets.iter().all(|b| b.used == 0 && b.passed == 0));
    }

    #[test]
    fn it_agrees_with_a_map() {
        agrees_with_a_map(30, 20_000, 1);
    }

    #[test]
    fn full_buckets_and_equal_hashes_lose_nothing() {
        agrees_with_a_map(4, 5_000, 2);
        agrees_with_a_map(1, 1_000, 3);
    }

    #[test]
    fn a_million_entries_take_less_than_27_bytes_each_and_give_them_back() {
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
    fn every_part_of_a_flow_changes_its_hash() {
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
