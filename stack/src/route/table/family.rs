//! The routes of one IP version: sorted ranges while they are flat, else a [`Fib`].

use alloc::vec::Vec;

use crate::route::fib::{Fib, Key};
use crate::route::ranges;

/// Number of routes from which on a [`Fib`] is used. Below it, the ranges are rebuilt with every
/// change; a [`Fib`] takes 9 MB (IPv4) or 7 MB (IPv6).
pub(crate) const FIB_THRESHOLD: usize = 256;
/// Number of routes below which the ranges are used again.
const FLAT_THRESHOLD: usize = 128;

/// Prefixes with the numbers of their next hop groups.
pub(crate) enum Family<K: Key> {
    Flat(Flat<K>),
    Fib(Fib<K>),
}

/// Prefixes, and their flattened ranges.
pub(crate) struct Flat<K> {
    /// Longest prefix first; equal lengths ordered by address.
    routes: Vec<(K, u8, u32)>,
    /// Starts of ranges and their numbers, ordered, from the first address on; empty without
    /// routes.
    ranges: Vec<(K, u32)>,
}

impl<K: Key> Flat<K> {
    fn new(routes: Vec<(K, u8, u32)>) -> Flat<K> {
        let mut flat = Flat { routes, ranges: Vec::new() };
        flat.rebuild();
        flat
    }

    #[inline]
    fn lookup(&self, address: K) -> u32 {
        let behind = self.ranges.partition_point(|(start, _)| *start <= address);
        self.ranges.get(behind.wrapping_sub(1)).map_or(0, |range| range.1)
    }

    /// Index of a prefix, or where it would be inserted.
    fn position(&self, start: K, len: u8) -> Result<usize, usize> {
        self.routes.binary_search_by(|r| cmp_route(r.0, r.1, start, len))
    }

    fn change<R>(&mut self, change: impl FnOnce(&mut Vec<(K, u8, u32)>) -> R) -> R {
        let result = change(&mut self.routes);
        self.rebuild();
        result
    }

    fn rebuild(&mut self) {
        self.ranges.clear();
        let Some(any) = self.routes.first() else { return };
        let mut nested = self.routes.clone();
        nested.sort_unstable_by_key(|(start, len, _)| (*start, *len));
        let (first, last) = any.0.block(0);
        ranges::flatten(&mut self.ranges, first, last, 0, nested.into_iter());
    }
}

impl<K: Key> Default for Family<K> {
    fn default() -> Self {
        Family::Flat(Flat::new(Vec::new()))
    }
}

/// Longest first, so that the first match is the longest one.
fn cmp_route<K: Key>(a: K, a_len: u8, b: K, b_len: u8) -> core::cmp::Ordering {
    b_len.cmp(&a_len).then(a.cmp(&b))
}

impl<K: Key> Family<K> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Family::Flat(flat) => flat.routes.len(),
            Family::Fib(fib) => fib.len(),
        }
    }

    /// The number of the longest matching prefix; 0 if none matches.
    #[inline]
    pub(crate) fn lookup(&self, address: K) -> u32 {
        match self {
            Family::Flat(flat) => flat.lookup(address),
            Family::Fib(fib) => fib.lookup(address),
        }
    }

    /// The number of exactly this prefix.
    pub(crate) fn get(&self, address: K, len: u8) -> Option<u32> {
        let start = address.block(len).0;
        match self {
            Family::Flat(flat) => flat.routes.get(flat.position(start, len).ok()?).map(|r| r.2),
            Family::Fib(fib) => fib.get(start, len),
        }
    }

    /// Adds a prefix, whose host bits are zero, or changes its number. Returns the previous number.
    pub(crate) fn insert(&mut self, start: K, len: u8, number: u32) -> Option<u32> {
        match self {
            Family::Flat(flat) => match flat.position(start, len) {
                Ok(at) => flat.change(|routes| {
                    routes.get_mut(at).map(|r| core::mem::replace(&mut r.2, number))
                }),
                Err(at) if flat.routes.len() < FIB_THRESHOLD => {
                    flat.change(|routes| routes.insert(at, (start, len, number)));
                    None
                }
                Err(_) => {
                    let mut fib = Fib::new();
                    for (start, len, number) in &flat.routes {
                        fib.insert(*start, *len, *number);
                    }
                    fib.insert(start, len, number);
                    *self = Family::Fib(fib);
                    None
                }
            },
            Family::Fib(fib) => fib.insert(start, len, number),
        }
    }

    /// Removes a prefix. Returns its number.
    pub(crate) fn remove(&mut self, start: K, len: u8) -> Option<u32> {
        match self {
            Family::Flat(flat) => {
                let at = flat.position(start, len).ok()?;
                Some(flat.change(|routes| routes.remove(at).2))
            }
            Family::Fib(fib) => {
                let old = fib.remove(start, len)?;
                if fib.len() < FLAT_THRESHOLD {
                    *self = Family::Flat(Flat::new(self.sorted()));
                }
                Some(old)
            }
        }
    }

    /// All prefixes with their numbers, longest first, then by address.
    pub(crate) fn sorted(&self) -> Vec<(K, u8, u32)> {
        match self {
            Family::Flat(flat) => flat.routes.clone(),
            Family::Fib(fib) => {
                let mut all: Vec<_> = fib.iter().collect();
                all.sort_unstable_by(|a, b| cmp_route(a.0, a.1, b.0, b.1));
                all
            }
        }
    }
}
