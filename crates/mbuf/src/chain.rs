//! Chains: packets and runs of stream bytes made of mbufs.
//!
//! A chain owns its mbufs, which are linked through their descriptors; moving one costs no
//! allocation and appending one chain to another a store. Dropping a chain sends it home over the
//! remote-free list; on the data path give it to [`crate::Pool::free`].
//!
//! `len` is the sum of the lengths of the segments, `storage` the sum of their storages. Segments
//! without bytes are allowed.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use core::ops::Deref;

use crate::raw::{List, MbufMut, RawIter};
use crate::sums;
use crate::{Mbuf, NoBuffer, Pool, Purpose};

/// Headroom of a mbuf that `prepend` puts in front, for the headers of the layers below.
const HEADROOM: usize = 128;

/// A packet or a run of stream bytes.
#[derive(Default)]
pub struct Chain {
    list: List,
    len: usize,
    storage: usize,
    held: usize,
    segs: usize,
}

impl Chain {
    /// A chain without segments.
    pub fn new() -> Chain {
        Chain::default()
    }

    /// Bytes of all segments.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the chain has no bytes. (It may have segments.)
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many segments there are.
    #[inline]
    pub fn segs(&self) -> usize {
        self.segs
    }

    /// Bytes of storage of all segments; storage that is shared counts once per segment.
    #[inline]
    pub fn storage_bytes(&self) -> usize {
        self.storage
    }

    /// Bytes that the chain keeps from arriving packets: [`Mbuf::held_bytes`] of its segments. A segment
    /// that somebody sends by reference (device `link`, a stack to itself) is charged to its sender
    /// already, so it counts nothing here.
    #[inline]
    pub fn held_bytes(&self) -> usize {
        self.held
    }

    /// Adds a segment at the end.
    #[inline]
    pub fn push_back(&mut self, m: Mbuf) {
        self.count_in(&m);
        self.list.push_back(m);
    }

    /// Adds a segment at the front.
    #[inline]
    pub fn push_front(&mut self, m: Mbuf) {
        self.count_in(&m);
        self.list.push_front(m);
    }

    #[inline]
    fn count_in(&mut self, m: &Mbuf) {
        self.len += m.len();
        self.storage += m.storage_bytes();
        self.held += m.held_bytes();
        self.segs += 1;
    }

    /// Adds another chain at the end.
    #[inline]
    pub fn append(&mut self, other: Chain) {
        self.len += other.len;
        self.storage += other.storage;
        self.held += other.held;
        self.segs += other.segs;
        self.list.append(other.list);
    }

    /// Takes the first segment off.
    #[inline]
    pub fn pop_front(&mut self) -> Option<Mbuf> {
        let m = self.list.pop_front()?;
        self.len -= m.len();
        self.storage -= m.storage_bytes();
        self.held -= m.held_bytes();
        self.segs -= 1;
        Some(m)
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

    /// The first segment, to be changed in place.
    #[inline]
    pub fn front_mut(&mut self) -> Option<SegMut<'_>> {
        let seg = self.list.front_mut()?;
        Some(SegMut { seg, chain_len: &mut self.len })
    }

    /// The last segment, to be changed in place.
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

    /// The bytes of the segments that have any, in order; not for a chain that is volatile
    /// ([`Chain::is_volatile`]).
    #[inline]
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.iter().map(Mbuf::as_slice).filter(|s| !s.is_empty())
    }

    /// The bytes of each segment for writing, in order. It ends at a segment that is shared or
    /// external.
    #[inline]
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.list.iter_mut().map_while(MbufMut::into_slice)
    }

    /// Removes up to `n` bytes from the front and frees the segments that held nothing else.
    pub fn trim_front(&mut self, n: usize, pool: &mut Pool) {
        // Most often the headers, or what somebody has placed: a segment of their own.
        if n > 0 && self.front().is_some_and(|m| m.len() == n) {
            if let Some(m) = self.pop_front() {
                pool.free_mbuf(m);
            }
        } else {
            self.trim_front_by_parts(n, pool);
        }
    }

    #[inline(never)]
    fn trim_front_by_parts(&mut self, n: usize, pool: &mut Pool) {
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

    /// Removes up to `n` bytes from the back and frees the segments that held nothing else.
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

    /// How many whole segments lie before byte `at`, and how many bytes of the next one do.
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
            tail.held += m.held_bytes();
            tail.segs += 1;
        }
        self.len -= tail.len;
        self.storage -= tail.storage;
        self.held -= tail.held;
        self.segs -= tail.segs;
        tail
    }

    /// Keeps the first `at` bytes and returns the others. A segment that is cut becomes two
    /// references to its storage. Error: the pool has no descriptor for that; nothing changes.
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

    /// Whether the kernel alone may read some of the bytes ([`Mbuf::is_kernel_only`]).
    #[inline]
    pub fn is_kernel_only(&self) -> bool {
        self.iter().any(Mbuf::is_kernel_only)
    }

    /// Whether another process may write some of the bytes ([`Mbuf::is_volatile`]).
    #[inline]
    pub fn is_volatile(&self) -> bool {
        self.iter().any(Mbuf::is_volatile)
    }

    /// Makes the first `n` bytes contiguous in the first segment. Errors: the pool has no block
    /// for them (at most 64 KiB), the chain is shorter, or the kernel alone may read it; nothing
    /// changes.
    pub fn pullup(&mut self, n: usize, pool: &mut Pool) -> Result<(), NoBuffer> {
        let Some(front) = self.front() else {
            return if n == 0 { Ok(()) } else { Err(NoBuffer) };
        };
        if front.len() >= n {
            return Ok(());
        }
        if n > self.len || self.is_kernel_only() {
            return Err(NoBuffer);
        }
        let mut m = pool.alloc(n, 0, front.purpose())?;
        if let Some(room) = m.append(n) {
            self.copy_to(0, room);
        }
        self.trim_front(n, pool);
        self.push_front(m);
        Ok(())
    }

    /// Copies bytes from `off` on into `out`; returns how many there were.
    pub fn copy_to(&self, off: usize, out: &mut [u8]) -> usize {
        let mut reader = self.reader();
        reader.skip(off);
        reader.read(out)
    }

    /// Copies `bytes` over those from `off` on; returns how many there was room for. `None`, and
    /// nothing is written, if a segment that would be written is shared or external. Where the
    /// pool keeps sums, the bytes are summed in the same pass.
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

    /// Writes the bytes of `pieces` over those of the chain from its front, in one pass over both
    /// however many they are; returns how many there was room for. `None` at a segment that is shared
    /// or external; what lies before it is written. Sums as [`Chain::copy_from`] does.
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

    /// Puts `n` bytes in front and returns them to be written: in the headroom of the first
    /// segment if nobody shares it, else in a new mbuf charged to `p`. Error: no mbuf was left.
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

    /// The bytes, copied into a vector: for tests and tools.
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

/// Copies as many bytes as both have.
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
        let (len, storage, held) = (m.len(), m.storage_bytes(), m.held_bytes());
        Chain { list: List::single(m), len, storage, held, segs: 1 }
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

/// A segment inside a chain, to be read (it derefs to [`Mbuf`]) and changed in place. The methods
/// are those of [`Mbuf`]; the length of the chain follows.
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
