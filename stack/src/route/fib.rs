//! A forwarding information base (FIB) for a full Internet table: many prefixes, fast look-ups, fast
//! updates.
//!
//! Input: prefixes with an answer each (the number of a group of next hops, chosen by the caller; 0
//! means *no route*). Output: the answer of the longest matching prefix.
//!
//! The address space is divided into chunks by the leading bits. The slot of a chunk with a single
//! answer holds that answer. Other chunks have a block, whose format depends on the IP version
//! (`v4.rs`, `v6.rs`). An update rebuilds only the affected chunks: about a microsecond for a long
//! prefix, more for a short prefix that covers many chunks. The prefixes themselves are kept for
//! updates; look-ups do not access them.
//!
//! Invariant: `cover` of a chunk is the longest installed prefix that contains the whole chunk;
//! `inner` are the installed prefixes strictly inside, by address, then length; slot and block are
//! computed from both.

// Sizes and counts of existing memory, which cannot overflow; look-ups do no arithmetic here.
#![allow(clippy::arithmetic_side_effects)]

mod key;
mod space;
mod v4;
mod v6;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

pub(crate) use key::Key;
use key::Lookup;

use crate::route::ranges;

/// The largest answer that can be stored.
pub(crate) const MAX_ANSWER: u32 = 0x7fff;

/// The longest prefix that contains a whole chunk; answer 0 if there is none.
#[derive(Clone, Copy, Default)]
struct Cover {
    answer: u16,
    len: u8,
}

/// A prefix strictly inside a chunk.
#[derive(Clone, Copy)]
struct Inner<K> {
    start: K,
    len: u8,
    answer: u16,
}

struct Chunk<K> {
    cover: Cover,
    /// Length of its block, 0 if it has none.
    units: u32,
    inner: Vec<Inner<K>>,
}

impl<K: Key> Chunk<K> {
    /// Index of an inner prefix, or where it would be inserted.
    fn position(&self, start: K, len: u8) -> Result<usize, usize> {
        self.inner.binary_search_by_key(&(start, len), |i| (i.start, i.len))
    }
}

/// A forwarding table for IPv4 (`u32`) or IPv6 (`u128`).
pub(crate) struct Fib<K: Key> {
    tables: K::Tables,
    chunks: Vec<Chunk<K>>,
    /// Prefixes that contain whole chunks, by length and address.
    short: BTreeMap<(u8, K), u16>,
    prefixes: usize,
    /// Scratch for the ranges of the chunk being rebuilt.
    ranges: Vec<(K, u32)>,
}

impl<K: Key> Fib<K> {
    /// An empty table: 9 MB (IPv4), 7 MB (IPv6).
    pub(crate) fn new() -> Fib<K> {
        let none = || Chunk { cover: Cover::default(), units: 0, inner: Vec::new() };
        Fib {
            tables: K::Tables::default(),
            chunks: core::iter::repeat_with(none).take(K::CHUNKS).collect(),
            short: BTreeMap::new(),
            prefixes: 0,
            ranges: Vec::new(),
        }
    }

    /// Number of installed prefixes.
    pub(crate) fn len(&self) -> usize {
        self.prefixes
    }

    /// The answer of the longest matching prefix; 0 if none matches.
    #[inline]
    pub(crate) fn lookup(&self, address: K) -> u32 {
        self.tables.lookup(address)
    }

    /// The answer of exactly this prefix, whose host bits are zero.
    pub(crate) fn get(&self, start: K, len: u8) -> Option<u32> {
        let answer = if is_inner::<K>(start, len) {
            let chunk = self.chunks.get(start.chunk())?;
            chunk.inner.get(chunk.position(start, len).ok()?)?.answer
        } else {
            *self.short.get(&(len, start))?
        };
        Some(answer.into())
    }

    /// All prefixes with their answers: those that contain whole chunks by length, then the others
    /// by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (K, u8, u32)> {
        let short = self.short.iter().map(|((len, start), answer)| (*start, *len, *answer));
        let inner = self.chunks.iter().flat_map(|c| &c.inner);
        let all = short.chain(inner.map(|i| (i.start, i.len, i.answer)));
        all.map(|(start, len, answer)| (start, len, answer.into()))
    }

    /// Installs a prefix, whose host bits are zero, or changes its answer: from 1 to [`MAX_ANSWER`].
    /// Returns the previous answer.
    pub(crate) fn insert(&mut self, start: K, len: u8, answer: u32) -> Option<u32> {
        let answer = answer as u16;
        let old = if is_inner::<K>(start, len) {
            self.insert_inner(Inner { start, len, answer })
        } else {
            let next = Cover { answer, len };
            self.update_covers(start, len, |cover| (cover.len <= len).then_some(next));
            self.short.insert((len, start), answer)
        };
        self.prefixes += usize::from(old.is_none());
        old.map(u32::from)
    }

    /// Removes a prefix, whose host bits are zero. Returns its answer, or `None` if it is not
    /// installed.
    pub(crate) fn remove(&mut self, start: K, len: u8) -> Option<u32> {
        let old = match is_inner::<K>(start, len) {
            true => self.remove_inner(start, len),
            false => self.remove_short(start, len),
        }?;
        self.prefixes -= 1;
        Some(old.into())
    }

    fn insert_inner(&mut self, new: Inner<K>) -> Option<u16> {
        let chunk = self.chunks.get_mut(new.start.chunk())?;
        let old = match chunk.position(new.start, new.len) {
            Ok(at) => chunk.inner.get_mut(at).map(|old| core::mem::replace(old, new).answer),
            Err(at) => {
                chunk.inner.insert(at, new);
                None
            }
        };
        self.rebuild(new.start.chunk());
        old
    }

    fn remove_inner(&mut self, start: K, len: u8) -> Option<u16> {
        let chunk = self.chunks.get_mut(start.chunk())?;
        let at = chunk.position(start, len).ok()?;
        let old = chunk.inner.remove(at);
        self.rebuild(start.chunk());
        Some(old.answer)
    }

    fn remove_short(&mut self, start: K, len: u8) -> Option<u16> {
        let old = self.short.remove(&(len, start))?;
        // The next shorter prefix takes over the chunks that it covered.
        let outer = (0..len).rev().find_map(|len| {
            let answer = *self.short.get(&(len, start.block(len).0))?;
            Some(Cover { answer, len })
        });
        let outer = outer.unwrap_or_default();
        self.update_covers(start, len, |c| (c.len == len && c.answer != 0).then_some(outer));
        Some(old)
    }

    /// Replaces the cover of those chunks of a prefix for which `change` returns one.
    fn update_covers(&mut self, start: K, len: u8, change: impl Fn(Cover) -> Option<Cover>) {
        for chunk in start.chunk()..=start.block(len).1.chunk() {
            let Some(known) = self.chunks.get_mut(chunk) else { return };
            if let Some(next) = change(known.cover) {
                known.cover = next;
                self.rebuild(chunk);
            }
        }
    }

    /// Computes slot and block of a chunk from its prefixes.
    fn rebuild(&mut self, chunk: usize) {
        let Some(known) = self.chunks.get_mut(chunk) else { return };
        let (start, len) = K::chunk_prefix(chunk);
        let (first, last) = start.block(len);
        let inner = known.inner.iter().map(|i| (i.start, i.len, i.answer.into()));
        self.ranges.clear();
        ranges::flatten(&mut self.ranges, first, last, known.cover.answer.into(), inner);
        known.units = self.tables.set(chunk, &self.ranges, known.units);
    }
}

/// Whether a prefix is strictly inside one chunk.
fn is_inner<K: Key>(start: K, len: u8) -> bool {
    len > K::chunk_prefix(start.chunk()).1
}

#[cfg(test)]
mod tests;
