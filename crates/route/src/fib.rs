//! A forwarding table for a full Internet table: many prefixes, many look-ups, changes meanwhile.
//!
//! Enters: prefixes with an answer each (the number of a next hop, chosen by the caller; 0 is *no
//! route*). Leaves: the answer of the longest prefix that holds an address.
//!
//! The address space is cut into chunks by the leading bits. A chunk with one answer says it in its
//! slot, another has a block in a form of its IP version (`v4.rs`, `v6.rs`). A
//! change makes anew only the chunks it touches, so it costs about a microsecond for a long prefix and
//! grows with the chunks that a short one covers.
//!
//! [`Fib`] is the writer's, [`FibReader`] everybody's: readers take no lock and write nothing. The
//! writer keeps the prefixes themselves, for changes; look-ups do not touch them.
//!
//! Invariant: `cover` of a chunk is the longest installed prefix that holds all of it; `inner` are
//! the installed prefixes strictly inside, by address and then length; the slot says what the two say.

#![forbid(unsafe_code)]
// The writer's sums are of bytes and entries that exist in memory; look-ups have none here.
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
use space::Space;

use crate::ranges;

/// The largest answer that can be stored.
pub const MAX_ANSWER: u32 = 0x7fff;

/// Why a change was refused; the table is as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FibError {
    /// The prefix is longer than its address has bits.
    PrefixLength,
    /// The answer is 0 or larger than [`MAX_ANSWER`].
    Answer,
    /// The chunk has more ranges, or the table more memory, than it can.
    Full,
}

impl core::fmt::Display for FibError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            FibError::PrefixLength => "the prefix is longer than its address has bits",
            FibError::Answer => "the number of the next hop is 0 or too large for this table",
            FibError::Full => "the forwarding table has no room for this prefix",
        })
    }
}

impl core::error::Error for FibError {}

/// The longest prefix that holds a whole chunk; answer 0 if there is none.
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

/// What the writer knows of a chunk.
struct Chunk<K> {
    cover: Cover,
    /// Length of its block, if it has one.
    units: u32,
    inner: Vec<Inner<K>>,
}

/// How many bytes a table takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FibBytes {
    /// What look-ups read: slots and blocks, free blocks included; the most that it has been.
    pub lookup: usize,
    /// Of these, blocks that are free for later changes.
    pub free: usize,
    /// The prefixes themselves, which only changes read.
    pub control: usize,
}

/// The writer's side of a forwarding table for IPv4 (`u32`) or IPv6 (`u128`).
pub struct Fib<K: Key> {
    shared: Arc<K::Shared>,
    control: K::Control,
    chunks: Vec<Chunk<K>>,
    /// Prefixes that hold whole chunks, by length and address.
    short: BTreeMap<(u8, K), u16>,
    prefixes: usize,
    /// Room for the ranges of the chunk that is being written.
    ranges: Vec<(K, u32)>,
}

/// A reader's side: as many as there are readers, on any thread.
pub struct FibReader<K: Key> {
    shared: Arc<K::Shared>,
}

impl<K: Key> Clone for FibReader<K> {
    fn clone(&self) -> Self {
        FibReader { shared: Arc::clone(&self.shared) }
    }
}

impl<K: Key> FibReader<K> {
    /// The answer of the longest prefix that holds the address; 0 if none does.
    #[inline]
    pub fn lookup(&self, address: K) -> u32 {
        self.shared.lookup(address)
    }

    /// Answers for a burst of addresses, as many as both slices have. Each step is taken for many of
    /// them before the next, so that the cache misses of a burst are under way together.
    #[inline]
    pub fn lookup_burst(&self, addresses: &[K], answers: &mut [u32]) {
        self.shared.lookup_burst(addresses, answers);
    }

    /// How often chunks of the table have changed: what was looked up holds while this stays the same.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.shared.changes()
    }
}

impl<K: Key> Default for Fib<K> {
    fn default() -> Self {
        Fib::new()
    }
}

impl<K: Key> Fib<K> {
    /// An empty table: about 1 MiB of slots, and 8 MiB for the writer.
    pub fn new() -> Fib<K> {
        Fib::with_advice(|_, _| ())
    }

    /// The same. `advise` is told where the memory that look-ups read is, and of how many bytes, before
    /// anything is in it: to ask an operating system for large pages. It begins with one; most of it is
    /// never touched.
    pub fn with_advice(advise: impl FnOnce(*const u8, usize)) -> Fib<K> {
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

    /// A reader of this table; it sees every change at once.
    pub fn reader(&self) -> FibReader<K> {
        FibReader { shared: Arc::clone(&self.shared) }
    }

    /// How many prefixes are installed.
    pub fn len(&self) -> usize {
        self.prefixes
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.prefixes == 0
    }

    /// What it takes.
    pub fn bytes(&self) -> FibBytes {
        let (lookup, free) = self.shared.bytes(&self.control);
        let inner = self.chunks.iter().map(|c| c.inner.capacity() * size_of::<Inner<K>>());
        let inner: usize = inner.sum();
        // A map of such entries takes about twice their size.
        let short = self.short.len() * size_of::<(u8, K, u16)>() * 2;
        let fixed = K::CHUNKS * size_of::<Chunk<K>>();
        FibBytes { lookup, free, control: inner + short + fixed }
    }

    /// Installs a prefix (bits behind `len` are ignored), or changes its answer; the answer it had.
    ///
    /// # Errors
    /// [`FibError`]; the table is as it was, but that a prefix that holds whole chunks is installed
    /// also when [`FibError::Full`] says that some of them do not answer with it yet.
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
        self.recover(start, end, |cover| (cover.len <= len).then_some(next))?;
        Ok(old.map(u32::from))
    }

    /// The answer of exactly this prefix, `None` if it is not installed.
    pub fn get(&self, address: K, len: u8) -> Option<u32> {
        let start = address.block(len.min(K::BITS)).0;
        if len > K::BITS || !is_inner::<K>(start, len) {
            return self.short.get(&(len, start)).map(|answer| u32::from(*answer));
        }
        let inner = &self.chunks.get(start.chunk())?.inner;
        let at = inner.binary_search_by_key(&(start, len), |i| (i.start, i.len)).ok()?;
        inner.get(at).map(|i| i.answer.into())
    }

    /// Every prefix with its answer: those that hold whole chunks by length, then the others by
    /// address.
    pub fn iter(&self) -> impl Iterator<Item = (K, u8, u32)> {
        let short = self.short.iter().map(|((len, start), answer)| (*start, *len, *answer));
        let inner = self.chunks.iter().flat_map(|c| &c.inner);
        let all = short.chain(inner.map(|i| (i.start, i.len, i.answer)));
        all.map(|(start, len, answer)| (start, len, answer.into()))
    }

    /// Takes a prefix out; the answer it had, or `None` if it is not installed.
    ///
    /// # Errors
    /// [`FibError::Full`]: no room to write down the ranges that take its place; as for
    /// [`Fib::insert`].
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
                self.publish_or(chunk, |inner| inner.splice(at..=at, [old]).for_each(drop))?;
                Ok(Some(old.answer.into()))
            }
            Err(at) => {
                inner.insert(at, new);
                self.publish_or(chunk, |inner| {
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
        self.publish_or(chunk, |inner| inner.insert(at, old))?;
        self.prefixes -= 1;
        Ok(Some(old.answer.into()))
    }

    fn remove_short(&mut self, start: K, end: K, len: u8) -> Result<Option<u32>, FibError> {
        let Some(old) = self.short.remove(&(len, start)) else { return Ok(None) };
        self.prefixes -= 1;
        // What was covered by it falls to the next longer block around it.
        let outer = (0..len).rev().find_map(|len| {
            let answer = *self.short.get(&(len, start.block(len).0))?;
            Some(Cover { answer, len })
        });
        let outer = outer.unwrap_or_default();
        self.recover(start, end, |c| (c.len == len && c.answer != 0).then_some(outer))?;
        Ok(Some(old.into()))
    }

    /// Publishes a chunk whose inner prefixes changed; `undo` puts them back if there is no room.
    fn publish_or(
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

    /// Changes the cover of the chunks from `start` to `end` where `change` says so.
    ///
    /// # Errors
    /// [`FibError::Full`]: some chunks still give the old answer, until they change again.
    fn recover(
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

    /// Makes the slot of a chunk say what its prefixes say.
    fn publish(&mut self, chunk: usize) -> Result<(), FibError> {
        let Some(known) = self.chunks.get_mut(chunk) else { return Err(FibError::Full) };
        self.ranges.clear();
        let (first, len) = K::chunk_prefix(chunk);
        let inner = known.inner.iter().map(|i| (i.start, i.len, i.answer.into()));
        ranges::fill(&mut self.ranges, first.block(len), known.cover.answer.into(), inner);
        known.units = self.shared.publish(&mut self.control, chunk, &self.ranges, known.units)?;
        Ok(())
    }
}

/// Whether a prefix lies strictly inside one chunk.
fn is_inner<K: Key>(start: K, len: u8) -> bool {
    len > K::chunk_prefix(start.chunk()).1
}

#[cfg(test)]
mod tests;
