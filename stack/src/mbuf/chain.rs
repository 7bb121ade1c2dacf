//! Chains: packets and runs of stream bytes, made of mbufs.
//!
//! A chain owns its mbufs, which are linked through their descriptors: moving an mbuf allocates nothing,
//! and appending a chain to another is a store. A dropped chain is pushed on the remote-free list;
//! [`Pool::free`](crate::mbuf::Pool::free) is cheaper and is used on the data path.
//!
//! `len`, `storage` and `truesize` are the sums over the segments. Empty segments are allowed.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use core::ops::Deref;

use crate::mbuf::raw::{List, MbufMut, RawIter};
use crate::mbuf::sums;
use crate::mbuf::{Mbuf, NoBuffer, Pool, Purpose};

/// Headroom of an mbuf that `prepend` allocates, for the headers of lower layers.
const HEADROOM: usize = 128;

/// A packet or a run of stream bytes.
#[derive(Default)]
pub struct Chain {
    list: List,
    len: usize,
    storage: usize,
    truesize: usize,
    segs: usize,
}

impl Chain {
    /// A chain without segments.
    pub fn new() -> Chain {
        Chain::default()
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the chain has no bytes. It may have segments.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of segments.
    #[inline]
    pub fn segs(&self) -> usize {
        self.segs
    }

    /// Bytes of storage of all segments. Shared storage is counted once per segment.
    #[inline]
    pub fn storage_bytes(&self) -> usize {
        self.storage
    }

    /// The memory charged to a receiver for the chain (`truesize` of Linux): [`Mbuf::truesize`] of its
    /// segments. Segments sent by reference (device `link`, loopback) are charged to their sender and count
    /// as zero.
    #[inline]
    pub fn truesize(&self) -> usize {
        self.truesize
    }

    /// Appends a segment.
    #[inline]
    pub fn push_back(&mut self, m: Mbuf) {
        self.account(&m);
        self.list.push_back(m);
    }

    /// Prepends a segment.
    #[inline]
    pub fn push_front(&mut self, m: Mbuf) {
        self.account(&m);
        self.list.push_front(m);
    }

    #[inline]
    fn account(&mut self, m: &Mbuf) {
        self.len += m.len();
        self.storage += m.storage_bytes();
        self.truesize += m.truesize();
        self.segs += 1;
    }

    /// Appends another chain.
    #[inline]
    pub fn append(&mut self, other: Chain) {
        self.len += other.len;
        self.storage += other.storage;
        self.truesize += other.truesize;
        self.segs += other.segs;
        self.list.append(other.list);
    }

    /// Removes the first segment.
    #[inline]
    pub fn pop_front(&mut self) -> Option<Mbuf> {
        let m = self.list.pop_front()?;
        self.len -= m.len();
        self.storage -= m.storage_bytes();
        self.truesize -= m.truesize();
        self.segs -= 1;
        Some(m)
    }

    /// Takes the segment of a chain that has only one, which is empty then.
    #[inline(always)]
    pub fn pop_only(&mut self) -> Option<Mbuf> {
        if self.segs != 1 {
            return None;
        }
        (self.len, self.storage, self.truesize, self.segs) = (0, 0, 0, 0);
        self.list.pop_front()
    }

    /// The first segment.
    #[inline]
    pub fn front(&self) -> Option<&Mbuf> {
        self.list.front()
    }

    /// The last segment.
    #[inline]
    pub fn back(&self) -> Option<&Mbuf> {
        self.list.back()
    }

    /// The first segment, for changes in place.
    #[inline]
    pub fn front_mut(&mut self) -> Option<SegMut<'_>> {
        let seg = self.list.front_mut()?;
        Some(SegMut { seg, chain_len: &mut self.len })
    }

    /// The last segment, for changes in place.
    #[inline]
    pub fn back_mut(&mut self) -> Option<SegMut<'_>> {
        let seg = self.list.back_mut()?;
        Some(SegMut { seg, chain_len: &mut self.len })
    }

    /// The segments, in order.
    #[inline]
    pub fn iter(&self) -> Iter<'_> {
        Iter(self.list.iter())
    }

    /// The bytes of the segments in order, without empty ones. Must not be called for a volatile chain
    /// ([`Chain::is_volatile`]).
    #[inline]
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.iter().map(Mbuf::as_slice).filter(|s| !s.is_empty())
    }

    /// The bytes of the segments for writing, in order, up to the first segment that is shared or external.
    #[inline]
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.list.iter_mut().map_while(MbufMut::into_slice)
    }

    /// Removes up to `n` bytes from the front and frees the segments that become empty.
    pub fn trim_front(&mut self, n: usize, pool: &mut Pool) {
        // Fast path: the headers, or a placed payload, are a segment of their own.
        if n > 0 && self.front().is_some_and(|m| m.len() == n) {
            if let Some(m) = self.pop_front() {
                pool.free_mbuf(m);
            }
        } else {
            self.trim_front_slow(n, pool);
        }
    }

    #[inline(never)]
    fn trim_front_slow(&mut self, n: usize, pool: &mut Pool) {
        let mut left = n.min(self.len);
        while left > 0 {
            let Some(mut front) = self.front_mut() else { break };
            if front.len() > left {
                front.trim_front(left);
                break;
            }
            left -= front.len();
            if let Some(m) = self.pop_front() {
                pool.free_mbuf(m);
            }
        }
    }

    /// Removes up to `n` bytes from the back and frees the segments that become empty.
    pub fn trim_back(&mut self, n: usize, pool: &mut Pool) {
        if n == 0 {
            return;
        }
        if let Some(mut back) = self.back_mut()
            && n < back.len()
        {
            back.trim_back(n);
            return;
        }
        let keep = self.len.saturating_sub(n);
        let (segs, within) = self.seek(keep);
        let tail = self.detach(segs + usize::from(within > 0));
        pool.free(tail);
        if let Some(mut back) = self.back_mut() {
            let surplus = *back.chain_len - keep;
            back.trim_back(surplus);
        }
    }

    /// The number of whole segments before byte `at`, and the offset of `at` in the next one.
    fn seek(&self, at: usize) -> (usize, usize) {
        let (mut segs, mut left) = (0, at);
        for m in self.iter() {
            if m.len() > left || (left == 0 && m.is_empty()) {
                break;
            }
            left -= m.len();
            segs += 1;
        }
        (segs, left)
    }

    /// Keeps the first `segs` segments and returns the others.
    fn detach(&mut self, segs: usize) -> Chain {
        let list = self.list.split_after(segs);
        let mut tail = Chain { list, ..Chain::default() };
        for m in tail.list.iter() {
            tail.len += m.len();
            tail.storage += m.storage_bytes();
            tail.truesize += m.truesize();
            tail.segs += 1;
        }
        self.len -= tail.len;
        self.storage -= tail.storage;
        self.truesize -= tail.truesize;
        self.segs -= tail.segs;
        tail
    }

    /// Keeps the first `at` bytes and returns the others. A segment that contains the cut becomes two
    /// references to its storage. Error, without a change: no descriptor is left for that.
    pub fn split_off(&mut self, at: usize, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        if at >= self.len {
            return Ok(Chain::new());
        }
        let (segs, within) = self.seek(at);
        if within == 0 {
            return Ok(self.detach(segs));
        }
        let cut = self.iter().nth(segs).ok_or(NoBuffer)?;
        let rest = pool.clone_ref(cut, within, cut.len() - within)?;
        let mut tail = self.detach(segs + 1);
        if let Some(mut back) = self.back_mut() {
            back.truncate(within);
        }
        tail.push_front(rest);
        Ok(tail)
    }

    /// Whether another process may write some of the bytes ([`Mbuf::is_volatile`]).
    #[inline]
    pub fn is_volatile(&self) -> bool {
        self.iter().any(Mbuf::is_volatile)
    }

    /// Copies each mbuf for which `wastes` is true into the tailroom of the mbuf before it, if it fits as a
    /// whole, and frees it (as `tcp_collapse` of Linux, but without new memory). Returns the bytes copied, each
    /// at most once. Mbufs of posted buffers and volatile ones stay.
    pub fn collapse(&mut self, wastes: impl Fn(&Mbuf) -> bool, pool: &mut Pool) -> usize {
        let mut rest = core::mem::take(self);
        let mut copied = 0;
        while let Some(m) = rest.pop_front() {
            let may_move = !m.is_volatile() && m.placed().is_none() && wastes(&m);
            let back = self.back_mut().filter(|back| may_move && back.tailroom() >= m.len());
            // Nothing is copied if another reference covers bytes of the tailroom.
            let n = back.map_or(0, |mut back| back.append_tail(m.as_slice(), pool));
            if n < m.len() {
                self.push_back(m);
                continue;
            }
            copied += n;
            pool.free_mbuf(m);
        }
        copied
    }

    /// Makes the first `n` bytes contiguous in the first segment. Errors, without a change: the pool has no
    /// block for them (at most 64 KiB), or the chain is shorter.
    pub fn pullup(&mut self, n: usize, pool: &mut Pool) -> Result<(), NoBuffer> {
        let Some(front) = self.front() else {
            return if n == 0 { Ok(()) } else { Err(NoBuffer) };
        };
        if front.len() >= n {
            return Ok(());
        }
        if n > self.len {
            return Err(NoBuffer);
        }
        let mut m = pool.alloc(n, 0, front.purpose())?;
        if let Some(space) = m.append(n) {
            self.copy_to(0, space);
        }
        self.trim_front(n, pool);
        self.push_front(m);
        Ok(())
    }

    /// Copies bytes at `off` into `out` and returns their number.
    pub fn copy_to(&self, off: usize, out: &mut [u8]) -> usize {
        let mut reader = self.reader();
        reader.skip(off);
        reader.read(out)
    }

    /// Overwrites bytes at `off` with `bytes` and returns how many fitted. `None`, without a write, if a
    /// segment to be written is shared or external. If the pool keeps sums, they are computed in the same
    /// pass.
    pub fn copy_from(&mut self, off: usize, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        let end = off.saturating_add(bytes.len());
        for m in self.list.iter() {
            let touched = at < end && at + m.len() > off && !m.is_empty() && !bytes.is_empty();
            if touched && (!m.is_unique() || m.is_external()) {
                return None;
            }
            at += m.len();
        }
        let (mut skip, mut done) = (off, 0);
        for mut m in self.list.iter_mut() {
            let from = skip.min(m.len());
            skip -= from;
            let from_bytes = bytes.get(done..).unwrap_or_default();
            if from == m.len() || from_bytes.is_empty() {
                continue;
            }
            done += sums::write(&mut m, from, from_bytes)?;
        }
        Some(done)
    }

    /// Overwrites the chain from its front with the bytes of `pieces`, in one pass, and returns how many
    /// fitted. `None` at a segment that is shared or external; the segments before it are written. Sums are
    /// computed as in [`Chain::copy_from`].
    pub fn fill<'a>(&mut self, pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<usize> {
        let mut pieces = pieces.into_iter();
        let (mut piece, mut done): (&[u8], usize) = (&[], 0);
        for mut m in self.list.iter_mut() {
            let mut at = 0;
            while at < m.len() {
                while piece.is_empty() {
                    let Some(next) = pieces.next() else { return Some(done) };
                    piece = next;
                }
                let n = sums::write(&mut m, at, piece)?;
                piece = piece.get(n..)?;
                (at, done) = (at + n, done + n);
            }
        }
        Some(done)
    }

    /// Prepends `n` bytes and returns them for writing: in the headroom of the first segment if it is
    /// unshared, else in a new mbuf charged to `p`. Error: the allocation failed.
    pub fn prepend(
        &mut self,
        n: usize,
        pool: &mut Pool,
        p: Purpose,
    ) -> Result<&mut [u8], NoBuffer> {
        let fits =
            self.front().is_some_and(|m| m.headroom() >= n && m.is_unique() && !m.is_external());
        if !fits {
            let mut m = pool.alloc(0, n.saturating_add(HEADROOM), p)?;
            m.truncate(0);
            self.push_front(m);
        }
        self.len += n;
        self.list.front_mut().and_then(|m| m.into_prepended(n)).ok_or(NoBuffer)
    }

    /// Copies the bytes into a vector, for tests and tools.
    pub fn to_vec(&self) -> alloc::vec::Vec<u8> {
        let mut v = alloc::vec![0; self.len];
        self.copy_to(0, &mut v);
        v
    }

    #[inline]
    pub(crate) fn into_list(self) -> List {
        self.list
    }
}

/// Copies bytes until either slice ends.
#[inline]
pub(crate) fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let n = from.len().min(to.len());
    if let (Some(from), Some(to)) = (from.get(..n), to.get_mut(..n)) {
        to.copy_from_slice(from);
    }
    n
}

impl From<Mbuf> for Chain {
    #[inline]
    fn from(m: Mbuf) -> Chain {
        let (len, storage, truesize) = (m.len(), m.storage_bytes(), m.truesize());
        Chain { list: List::single(m), len, storage, truesize, segs: 1 }
    }
}

impl FromIterator<Mbuf> for Chain {
    fn from_iter<I: IntoIterator<Item = Mbuf>>(mbufs: I) -> Chain {
        let mut chain = Chain::new();
        mbufs.into_iter().for_each(|m| chain.push_back(m));
        chain
    }
}

impl<'a> IntoIterator for &'a Chain {
    type Item = &'a Mbuf;
    type IntoIter = Iter<'a>;
    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl core::fmt::Debug for Chain {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

/// The segments of a chain, in order.
#[derive(Clone)]
pub struct Iter<'a>(RawIter<'a>);

impl<'a> Iterator for Iter<'a> {
    type Item = &'a Mbuf;
    #[inline]
    fn next(&mut self) -> Option<&'a Mbuf> {
        self.0.next()
    }
}

/// Mutable access to a segment of a chain. It dereferences to [`Mbuf`]. Its own methods have the names of [`Mbuf`]'s
/// and also keep the length of the chain up to date.
pub struct SegMut<'a> {
    seg: MbufMut<'a>,
    chain_len: &'a mut usize,
}

impl Deref for SegMut<'_> {
    type Target = Mbuf;
    #[inline]
    fn deref(&self) -> &Mbuf {
        &self.seg
    }
}

impl SegMut<'_> {
    /// See [`Mbuf::as_mut_slice`].
    #[inline]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        self.seg.as_mut_slice()
    }

    /// See [`Mbuf::prepend`].
    #[inline]
    pub fn prepend(&mut self, n: usize) -> Option<&mut [u8]> {
        let front = self.seg.prepend(n)?;
        *self.chain_len += n;
        Some(front)
    }

    /// See [`Mbuf::append`].
    #[inline]
    pub fn append(&mut self, n: usize) -> Option<&mut [u8]> {
        let back = self.seg.append(n)?;
        *self.chain_len += n;
        Some(back)
    }

    /// See [`Mbuf::spare_mut`].
    #[inline]
    pub fn spare_mut(&mut self) -> &mut [u8] {
        self.seg.spare_mut()
    }

    /// See [`Mbuf::set_len`].
    #[inline]
    pub fn set_len(&mut self, n: usize) {
        let before = self.seg.len();
        self.seg.set_len(n);
        *self.chain_len = *self.chain_len - before + n;
    }

    /// See [`Mbuf::trim_front`].
    #[inline]
    pub fn trim_front(&mut self, n: usize) {
        let n = n.min(self.seg.len());
        self.seg.trim_front(n);
        *self.chain_len -= n;
    }

    /// See [`Mbuf::trim_back`].
    #[inline]
    pub fn trim_back(&mut self, n: usize) {
        let n = n.min(self.seg.len());
        self.seg.trim_back(n);
        *self.chain_len -= n;
    }

    /// See [`Mbuf::truncate`].
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        let surplus = self.seg.len().saturating_sub(len);
        self.trim_back(surplus);
    }

    /// See [`Pool::append_tail`].
    #[inline]
    pub fn append_tail(&mut self, bytes: &[u8], pool: &mut Pool) -> usize {
        let n = pool.append_tail(&mut self.seg, bytes);
        *self.chain_len += n;
        n
    }
}

mod reader;
pub use reader::Reader;

#[cfg(test)]
mod tests;
