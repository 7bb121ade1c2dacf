//! A forwarding information base (FIB) for a full Internet table: many prefixes, fast look-ups,
//! concurrent updates.
//!
//! Input: prefixes with an answer each (the index of a next hop, chosen by the caller; 0 means *no
//! route*). Output: the answer of the longest matching prefix.
//!
//! The address space is divided into chunks by the leading bits. The slot of a chunk with a single
//! answer holds that answer. Other chunks have a block, whose format depends on the IP version
//! (`v4.rs`, `v6.rs`). An update rebuilds only the affected chunks: about a microsecond for a long
//! prefix, more for a short prefix that covers many chunks.
//!
//! There is one writer ([`Fib`]) and any number of readers ([`FibReader`]). Readers take no lock
//! and write nothing. The prefixes themselves are kept by the writer for updates; look-ups do not
//! access them.
//!
//! Invariant: `cover` of a chunk is the longest installed prefix that contains the whole chunk;
//! `inner` are the installed prefixes strictly inside, by address, then length; slot and block are
//! computed from both.

#![forbid(unsafe_code)]
// The writer adds sizes and counts of existing memory, which cannot overflow; look-ups do no
// arithmetic here.
#![allow(clippy::arithmetic_side_effects)]

mod changes;
#[cfg(fulmar_loom)]
pub use changes::models::MODELS;
mod key;
mod space;
mod v4;
mod v6;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use key::Key;
use key::Shared;
use space::BlockAllocator;

use crate::route::ranges;

/// The largest answer that can be stored.
pub(crate) const MAX_ANSWER: u32 = 0x7fff;

/// Why an update was refused; the table is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FibError {
    /// The prefix length exceeds the address length.
    PrefixLength,
    /// The answer is 0 or above `MAX_ANSWER`.
    Answer,
    /// The chunk exceeds its limit of ranges, or the table its limit of memory.
    Full,
}

impl core::fmt::Display for FibError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            FibError::PrefixLength => "the prefix length exceeds the address length",
            FibError::Answer => "the number of the next hop group is 0 or too large for this table",
            FibError::Full => "the forwarding table has no space for this prefix",
        })
    }
}

impl core::error::Error for FibError {}

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

/// The writer's state of a chunk.
struct Chunk<K> {
    cover: Cover,
    /// Length of its block, 0 if it has none.
    units: u32,
    inner: Vec<Inner<K>>,
}

/// Memory use of a table, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FibBytes {
    /// Memory that look-ups read: slots and blocks, free blocks included; the maximum so far.
    pub lookup: usize,
    /// Part of `lookup` that is free for later updates.
    pub free: usize,
    /// The prefixes themselves, which only updates read.
    pub control: usize,
}

/// The writer of a forwarding table for IPv4 (`u32`) or IPv6 (`u128`).
pub struct Fib<K: Key> {
    shared: Arc<K::Shared>,
    control: K::Control,
    chunks: Vec<Chunk<K>>,
    /// Prefixes that contain whole chunks, by length and address.
    short: BTreeMap<(u8, K), u16>,
    prefixes: usize,
    /// Scratch for the ranges of the chunk being published.
    ranges: Vec<(K, u32)>,
}

/// A reader of a forwarding table. Cloneable, usable on any thread.
pub struct FibReader<K: Key> {
    shared: Arc<K::Shared>,
}

impl<K: Key> Clone for FibReader<K> {
    fn clone(&self) -> Self {
        FibReader { shared: Arc::clone(&self.shared) }
    }
}

impl<K: Key> FibReader<K> {
    /// The answer of the longest matching prefix; 0 if none matches.
    #[inline]
    pub fn lookup(&self, address: K) -> u32 {
        self.shared.lookup(address)
    }

    /// Looks up a burst of addresses, up to the shorter length of both slices. Each step is done
    /// for many addresses before the next, so that their cache misses overlap.
    #[inline]
    pub fn lookup_burst(&self, addresses: &[K], answers: &mut [u32]) {
        self.shared.lookup_burst(addresses, answers);
    }

    /// Generation of the table: a cached answer is valid while it is unchanged.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.shared.generation()
    }
}

impl<K: Key> Default for Fib<K> {
    fn default() -> Self {
        Fib::new()
    }
}

impl<K: Key> Fib<K> {
    /// An empty table: about 1 MiB of slots, and 8 MiB of writer state.
    pub fn new() -> Fib<K> {
        Fib::with_memory_hook(|_, _| ())
    }

    /// As [`Fib::new`]. `advise` is called with the address and length of the memory that look-ups
    /// read, before its first use, to request huge pages from the operating system. The memory is
    /// aligned to a huge page; most of it is never touched.
    pub fn with_memory_hook(advise: impl FnOnce(*const u8, usize)) -> Fib<K> {
        let (shared, control) = K::Shared::new(advise);
        let none = || Chunk { cover: Cover::default(), units: 0, inner: Vec::new() };
        let chunks = core::iter::repeat_with(none).take(K::CHUNKS);
        Fib {
            shared: Arc::new(shared),
            control,
            chunks: chunks.collect(),
            short: BTreeMap::new(),
            prefixes: 0,
            ranges: Vec::new(),
        }
    }

    /// A reader of this table. It sees every update immediately.
    pub fn reader(&self) -> FibReader<K> {
        FibReader { shared: Arc::clone(&self.shared) }
    }

    /// Number of installed prefixes.
    pub fn len(&self) -> usize {
        self.prefixes
    }

    /// Whether no prefix is installed.
    pub fn is_empty(&self) -> bool {
        self.prefixes == 0
    }

    /// Memory use.
    pub fn bytes(&self) -> FibBytes {
        let (lookup, free) = self.shared.bytes(&self.control);
        let inner = self.chunks.iter().map(|c| c.inner.capacity() * size_of::<Inner<K>>());
        let inner: usize = inner.sum();
        // A BTreeMap takes about twice the size of its entries.
        let short = self.short.len() * size_of::<(u8, K, u16)>() * 2;
        let fixed = K::CHUNKS * size_of::<Chunk<K>>();
        FibBytes { lookup, free, control: inner + short + fixed }
    }

    /// Installs a prefix (bits beyond `len` are ignored), or changes its answer. Returns the
    /// previous answer.
    ///
    /// # Errors
    /// [`FibError`]; the table is unchanged. Exception: after [`FibError::Full`] a prefix that
    /// contains whole chunks is installed, but some of its chunks still give the old answer.
    pub fn insert(&mut self, address: K, len: u8, answer: u32) -> Result<Option<u32>, FibError> {
        if len > K::BITS {
            return Err(FibError::PrefixLength);
        }
        if answer == 0 || answer > MAX_ANSWER {
            return Err(FibError::Answer);
        }
        let answer = answer as u16;
        let (start, end) = address.block(len);
        if is_inner::<K>(start, len) {
            return self.insert_inner(Inner { start, len, answer });
        }
        let old = self.short.insert((len, start), answer);
        self.prefixes += usize::from(old.is_none());
        let next = Cover { answer, len };
        self.update_covers(start, end, |cover| (cover.len <= len).then_some(next))?;
        Ok(old.map(u32::from))
    }

    /// The answer of exactly this prefix; `None` if it is not installed.
    pub fn get(&self, address: K, len: u8) -> Option<u32> {
        let start = address.block(len.min(K::BITS)).0;
        if len > K::BITS || !is_inner::<K>(start, len) {
            return self.short.get(&(len, start)).map(|answer| u32::from(*answer));
        }
        let inner = &self.chunks.get(start.chunk())?.inner;
        let at = inner.binary_search_by_key(&(start, len), |i| (i.start, i.len)).ok()?;
        inner.get(at).map(|i| i.answer.into())
    }

    /// All prefixes with their answers: those that contain whole chunks by length, then the others
    /// by address.
    pub fn iter(&self) -> impl Iterator<Item = (K, u8, u32)> {
        let short = self.short.iter().map(|((len, start), answer)| (*start, *len, *answer));
        let inner = self.chunks.iter().flat_map(|c| &c.inner);
        let all = short.chain(inner.map(|i| (i.start, i.len, i.answer)));
        all.map(|(start, len, answer)| (start, len, answer.into()))
    }

    /// Removes a prefix. Returns its answer, or `None` if it is not installed.
    ///
    /// # Errors
    /// [`FibError::Full`]: no space for the ranges that replace it; see [`Fib::insert`].
    pub fn remove(&mut self, address: K, len: u8) -> Result<Option<u32>, FibError> {
        if len > K::BITS {
            return Err(FibError::PrefixLength);
        }
        let (start, end) = address.block(len);
        match is_inner::<K>(start, len) {
            true => self.remove_inner(start, len),
            false => self.remove_short(start, end, len),
        }
    }

    fn insert_inner(&mut self, new: Inner<K>) -> Result<Option<u32>, FibError> {
        let chunk = new.start.chunk();
        let Some(Chunk { inner, .. }) = self.chunks.get_mut(chunk) else {
            return Err(FibError::Full);
        };
        match inner.binary_search_by_key(&(new.start, new.len), |i| (i.start, i.len)) {
            Ok(at) => {
                let Some(slot) = inner.get_mut(at) else { return Err(FibError::Full) };
                let old = core::mem::replace(slot, new);
                self.publish_or_undo(chunk, |inner| inner.splice(at..=at, [old]).for_each(drop))?;
                Ok(Some(old.answer.into()))
            }
            Err(at) => {
                inner.insert(at, new);
                self.publish_or_undo(chunk, |inner| {
                    inner.remove(at);
                })?;
                self.prefixes += 1;
                Ok(None)
            }
        }
    }

    fn remove_inner(&mut self, start: K, len: u8) -> Result<Option<u32>, FibError> {
        let chunk = start.chunk();
        let Some(Chunk { inner, .. }) = self.chunks.get_mut(chunk) else { return Ok(None) };
        let Ok(at) = inner.binary_search_by_key(&(start, len), |i| (i.start, i.len)) else {
            return Ok(None);
        };
        let old = inner.remove(at);
        self.publish_or_undo(chunk, |inner| inner.insert(at, old))?;
        self.prefixes -= 1;
        Ok(Some(old.answer.into()))
    }

    fn remove_short(&mut self, start: K, end: K, len: u8) -> Result<Option<u32>, FibError> {
        let Some(old) = self.short.remove(&(len, start)) else { return Ok(None) };
        self.prefixes -= 1;
        // The next shorter prefix takes over the chunks that it covered.
        let outer = (0..len).rev().find_map(|len| {
            let answer = *self.short.get(&(len, start.block(len).0))?;
            Some(Cover { answer, len })
        });
        let outer = outer.unwrap_or_default();
        self.update_covers(start, end, |c| (c.len == len && c.answer != 0).then_some(outer))?;
        Ok(Some(old.into()))
    }

    /// Publishes a chunk whose inner prefixes changed; on failure `undo` restores them.
    fn publish_or_undo(
        &mut self,
        chunk: usize,
        undo: impl FnOnce(&mut Vec<Inner<K>>),
    ) -> Result<(), FibError> {
        self.publish(chunk).inspect_err(|_| {
            if let Some(chunk) = self.chunks.get_mut(chunk) {
                undo(&mut chunk.inner);
            }
        })
    }

    /// Replaces the cover of the chunks from `start` to `end` for which `change` returns one.
    ///
    /// # Errors
    /// [`FibError::Full`]: some chunks still give the old answer, until their next update.
    fn update_covers(
        &mut self,
        start: K,
        end: K,
        change: impl Fn(Cover) -> Option<Cover>,
    ) -> Result<(), FibError> {
        let mut result = Ok(());
        for chunk in start.chunk()..=end.chunk() {
            let Some(known) = self.chunks.get_mut(chunk) else { break };
            if let Some(next) = change(known.cover) {
                known.cover = next;
                result = result.and(self.publish(chunk));
            }
        }
        result
    }

    /// Rebuilds slot and block of a chunk from its prefixes.
    fn publish(&mut self, chunk: usize) -> Result<(), FibError> {
        let Some(known) = self.chunks.get_mut(chunk) else { return Err(FibError::Full) };
        self.ranges.clear();
        let (first, len) = K::chunk_prefix(chunk);
        let inner = known.inner.iter().map(|i| (i.start, i.len, i.answer.into()));
        let (first, last) = first.block(len);
        ranges::flatten(&mut self.ranges, first, last, known.cover.answer.into(), inner);
        known.units = self.shared.publish(&mut self.control, chunk, &self.ranges, known.units)?;
        Ok(())
    }
}

/// Whether a prefix is strictly inside one chunk.
fn is_inner<K: Key>(start: K, len: u8) -> bool {
    len > K::chunk_prefix(start.chunk()).1
}

#[cfg(test)]
mod tests;
