//! A forwarding table for a full Internet table: many prefixes, many look-ups, changes meanwhile.
//!
//! Enters: prefixes with an answer each (the number of a next hop, chosen by the caller; 0 is *no
//! route*). Leaves: the answer of the longest prefix that holds an address.
//!
//! The address space is cut into chunks by the leading bits. A chunk with one answer says it in its
//! slot; another has the sorted starts of its ranges of addresses, in one block that a binary search
//! goes through: the structure of DXR (Zec, Rizzo, Mikuc, *DXR: towards a billion routing lookups per
//! second in software*, 2012), in which a look-up is one load and a short search in one or two cache
//! lines. A change makes anew only the chunks it touches, so it costs about a microsecond for a long
//! prefix and grows with the chunks that a short one covers.
//!
//! [`Fib`] is the writer's, [`FibReader`] everybody's: readers take no lock and write nothing
//! (`slots.rs` says how). The writer keeps the prefixes themselves, for changes; look-ups do not
//! touch them.
//!
//! Invariant: `cover` of a chunk is the longest installed prefix that holds all of it; `inner` are
//! the installed prefixes strictly inside, by address and then length; the slot says what the two say.

#![forbid(unsafe_code)]
// The writer's sums are of bytes and entries that exist in memory; look-ups have none here.
#![allow(clippy::arithmetic_side_effects)]

mod key;
mod slots;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use key::Key;
use slots::{Slots, Space};

/// Why a change was refused; the table is as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FibError {
    /// The prefix is longer than its address has bits.
    PrefixLength,
    /// The answer is 0 or larger than [`Key::MAX_ANSWER`].
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
    answer: u32,
    len: u8,
}

/// A prefix strictly inside a chunk.
#[derive(Clone, Copy)]
struct Inner<K> {
    start: K,
    len: u8,
    answer: u32,
}

/// How many bytes a table takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FibBytes {
    /// What look-ups read: slots and blocks, free blocks included.
    pub lookup: usize,
    /// Of these, blocks that are free for later changes.
    pub free: usize,
    /// The prefixes themselves, which only changes read.
    pub control: usize,
}

/// The writer's side of a forwarding table for IPv4 (`u32`) or IPv6 (`u128`).
pub struct Fib<K: Key> {
    shared: Arc<Slots>,
    space: Space,
    cover: Vec<Cover>,
    inner: Vec<Vec<Inner<K>>>,
    /// Prefixes that hold whole chunks, by length and address.
    short: BTreeMap<(u8, K), u32>,
    prefixes: usize,
}

/// A reader's side: as many as there are readers, on any thread.
pub struct FibReader<K: Key> {
    shared: Arc<Slots>,
    key: core::marker::PhantomData<fn(K)>,
}

impl<K: Key> Clone for FibReader<K> {
    fn clone(&self) -> Self {
        FibReader { shared: Arc::clone(&self.shared), key: core::marker::PhantomData }
    }
}

impl<K: Key> FibReader<K> {
    /// The answer of the longest prefix that holds the address; 0 if none does.
    #[inline]
    pub fn lookup(&self, address: K) -> u32 {
        self.shared.read(address.chunk(), K::WORDS, |block, ranges| address.find(block, ranges))
    }

    /// Answers for a burst of addresses, as many as both slices have. All slots are loaded first,
    /// then the middles of all blocks: the misses of a burst are under way together, where single
    /// look-ups wait for most of them one after the other.
    #[inline]
    pub fn lookup_burst(&self, addresses: &[K], answers: &mut [u32]) {
        let slots = addresses.iter().fold(0, |all, a| all ^ self.shared.slot(a.chunk()));
        core::hint::black_box(slots);
        let touched =
            addresses.iter().fold(0, |all, a| all ^ self.shared.touch(a.chunk(), K::WORDS));
        core::hint::black_box(touched);
        for (address, answer) in addresses.iter().zip(answers) {
            *answer = self.lookup(*address);
        }
    }
}

impl<K: Key> Default for Fib<K> {
    fn default() -> Self {
        Fib::new()
    }
}

impl<K: Key> Fib<K> {
    /// An empty table: 2 MiB of slots, and 8 MiB for the writer.
    pub fn new() -> Fib<K> {
        let (slots, space) = Slots::new(K::CHUNKS);
        Fib {
            shared: Arc::new(slots),
            space,
            cover: alloc::vec![Cover::default(); K::CHUNKS],
            inner: alloc::vec![Vec::new(); K::CHUNKS],
            short: BTreeMap::new(),
            prefixes: 0,
        }
    }

    /// A reader of this table; it sees every change at once.
    pub fn reader(&self) -> FibReader<K> {
        FibReader { shared: Arc::clone(&self.shared), key: core::marker::PhantomData }
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
        let (blocks, free) = self.space.bytes();
        let inner: usize = self.inner.iter().map(|v| v.capacity() * size_of::<Inner<K>>()).sum();
        // A map of such entries takes about twice their size.
        let short = self.short.len() * size_of::<(u8, K, u32)>() * 2;
        let fixed = K::CHUNKS * (size_of::<Cover>() + size_of::<Vec<Inner<K>>>());
        FibBytes { lookup: self.shared.bytes() + blocks, free, control: inner + short + fixed }
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
        if answer == 0 || answer > K::MAX_ANSWER {
            return Err(FibError::Answer);
        }
        let (start, end) = address.block(len);
        if is_inner::<K>(start, len) {
            return self.insert_inner(Inner { start, len, answer });
        }
        let old = self.short.insert((len, start), answer);
        self.prefixes += usize::from(old.is_none());
        let next = Cover { answer, len };
        self.recover(start, end, |cover| (cover.len <= len).then_some(next))?;
        Ok(old)
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
        let Some(inner) = self.inner.get_mut(chunk) else { return Err(FibError::Full) };
        match inner.binary_search_by_key(&(new.start, new.len), |i| (i.start, i.len)) {
            Ok(at) => {
                let Some(slot) = inner.get_mut(at) else { return Err(FibError::Full) };
                let old = core::mem::replace(slot, new);
                self.publish_or(chunk, |inner| inner.splice(at..=at, [old]).for_each(drop))?;
                Ok(Some(old.answer))
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
        let Some(inner) = self.inner.get_mut(chunk) else { return Ok(None) };
        let Ok(at) = inner.binary_search_by_key(&(start, len), |i| (i.start, i.len)) else {
            return Ok(None);
        };
        let old = inner.remove(at);
        self.publish_or(chunk, |inner| inner.insert(at, old))?;
        self.prefixes -= 1;
        Ok(Some(old.answer))
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
        Ok(Some(old))
    }

    /// Publishes a chunk whose inner prefixes changed; `undo` puts them back if there is no room.
    fn publish_or(
        &mut self,
        chunk: usize,
        undo: impl FnOnce(&mut Vec<Inner<K>>),
    ) -> Result<(), FibError> {
        self.publish(chunk).inspect_err(|_| {
            if let Some(inner) = self.inner.get_mut(chunk) {
                undo(inner);
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
            let Some(cover) = self.cover.get_mut(chunk) else { break };
            if let Some(next) = change(*cover) {
                *cover = next;
                result = result.and(self.publish(chunk));
            }
        }
        result
    }

    /// Makes the slot of a chunk say what its prefixes say.
    fn publish(&mut self, chunk: usize) -> Result<(), FibError> {
        let (Some(cover), Some(inner)) = (self.cover.get(chunk), self.inner.get(chunk)) else {
            return Err(FibError::Full);
        };
        if inner.is_empty() {
            self.shared.set_leaf(&mut self.space, chunk, cover.answer, K::WORDS);
            return Ok(());
        }
        let mut ranges = Ranges::new(self.space.scratch());
        ranges.fill(chunk, cover.answer, inner);
        let result = match ranges.only_answer() {
            Some(answer) => {
                self.shared.set_leaf(&mut self.space, chunk, answer, K::WORDS);
                Ok(())
            }
            None => self.shared.set_ranges(&mut self.space, chunk, &ranges.words, K::WORDS),
        };
        self.space.keep(ranges.words);
        result
    }
}

/// Whether a prefix lies strictly inside one chunk.
fn is_inner<K: Key>(start: K, len: u8) -> bool {
    len > K::chunk_prefix(start.chunk()).1
}

/// The ranges of a chunk while they are written: neighbours differ in their answers.
struct Ranges<K> {
    words: Vec<u32>,
    count: usize,
    last: Option<(K, u32)>,
}

impl<K: Key> Ranges<K> {
    fn new(words: Vec<u32>) -> Ranges<K> {
        Ranges { words, count: 0, last: None }
    }

    /// Goes through nested prefixes in order of address, shorter first, with those around the
    /// present address on a stack.
    fn fill(&mut self, chunk: usize, cover: u32, inner: &[Inner<K>]) {
        let (first, len) = K::chunk_prefix(chunk);
        let mut open: Vec<(K, u32)> = alloc::vec![(first.block(len).1, cover)];
        self.push(first, cover);
        for prefix in inner {
            self.close(&mut open, Some(prefix.start));
            open.push((prefix.start.block(prefix.len).1, prefix.answer));
            self.push(prefix.start, prefix.answer);
        }
        self.close(&mut open, None);
        self.flush();
    }

    /// Ends the prefixes that end before `at`, but never the outermost.
    fn close(&mut self, open: &mut Vec<(K, u32)>, at: Option<K>) {
        while let [.., outer, (end, _)] = open.as_slice() {
            if at.is_some_and(|at| *end >= at) {
                return;
            }
            // Where the outer one ends too, its own end says what follows.
            if *end != outer.0
                && let Some(next) = end.next()
            {
                self.push(next, outer.1);
            }
            open.pop();
        }
    }

    /// From `start` on the answer is another; a second word for the same start replaces the first.
    fn push(&mut self, start: K, answer: u32) {
        match &mut self.last {
            Some((at, last)) if *at == start => *last = answer,
            Some((_, last)) if *last == answer => {}
            _ => {
                self.flush();
                self.last = Some((start, answer));
            }
        }
    }

    fn flush(&mut self) {
        if let Some((start, answer)) = self.last.take() {
            start.encode(answer, &mut self.words);
            self.count += 1;
        }
    }

    /// The answer if there is one range only.
    fn only_answer(&self) -> Option<u32> {
        // The answer is in the last word of a range, for IPv4 in the low bits.
        let [.., word] = self.words.as_slice() else { return None };
        (self.count == 1).then_some(*word & K::MAX_ANSWER)
    }
}

#[cfg(test)]
mod tests;
