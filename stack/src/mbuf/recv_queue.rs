//! The receive buffer of a stream: in-order bytes for the reader, and the out-of-order queue.
//!
//! ```text
//!               next()          sack ranges
//!      in order   │            ┌─────┐   ┌───────┐
//!   ───┬──────────┼───(gap)────┤ run ├───┤  run  ├────►  stream offset (u64)
//!      └──────────┘            └─────┘   └───────┘
//!       readable()
//! ```
//!
//! Invariants: the runs are sorted, not empty, not adjacent, and begin behind `next`; there are at most
//! [`MAX_RANGES`]. Of two copies of a byte the queue keeps the first, except that a run that new bytes cover
//! entirely is replaced.
//!
//! Cost: without out-of-order bytes an in-order insert is one append (three additions, two stores).
//! Sources: RFC 9293 section 3.10.7.4 (trimming), RFC 2018 section 4 (order of SACK blocks).

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use alloc::collections::VecDeque;

use crate::mbuf::{BufId, Chain, MAX_MBUF_BYTES, Mbuf, Pool, Purpose, SegMut};

/// Maximum runs of out-of-order bytes in a queue. A window with more holes is an attack, or is recovered
/// as well by retransmission from the first hole.
pub const MAX_RANGES: usize = 512;

/// Maximum ranges of [`RecvQueue::sack_ranges`]: more than fit in a TCP header.
const MAX_REPORTED: usize = 8;

/// The result of an insert.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Inserted {
    /// New bytes that are now in the queue.
    pub accepted_bytes: usize,
    /// Bytes that were received before.
    pub duplicate_bytes: usize,
    /// The advance of [`RecvQueue::next`].
    pub in_order_advance: usize,
    /// The bytes were dropped because there are [`MAX_RANGES`] runs, or because their offsets exceed a
    /// `u64`.
    pub refused: bool,
}

#[derive(Debug)]
struct Run {
    start: u64,
    chain: Chain,
    /// Increases with each change of a run: the largest is the most recent.
    generation: u64,
}

impl Run {
    fn end(&self) -> u64 {
        self.start + self.chain.len() as u64
    }
}

/// The receive buffer of a stream.
#[derive(Debug, Default)]
pub struct RecvQueue {
    in_order: Chain,
    next: u64,
    runs: VecDeque<Run>,
    out_of_order: usize,
    generation: u64,
}

impl RecvQueue {
    /// Creates an empty queue at offset 0.
    pub fn new() -> RecvQueue {
        RecvQueue::default()
    }

    /// The stream offset of the next byte expected in order (RCV.NXT).
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// In-order bytes that are not read yet.
    #[inline]
    pub fn readable(&self) -> usize {
        self.in_order.len()
    }

    /// Bytes behind a gap.
    #[inline]
    pub fn out_of_order_bytes(&self) -> usize {
        self.out_of_order
    }

    /// The memory charged to the receiver ([`Chain::truesize`]), at least the bytes in the queue.
    pub fn storage_bytes(&self) -> usize {
        let runs: usize = self.runs.iter().map(|r| r.chain.truesize()).sum();
        (self.in_order.truesize() + runs).max(self.readable() + self.out_of_order)
    }

    /// The part of [`RecvQueue::storage_bytes`] for in-order bytes that are not read yet.
    #[inline]
    pub fn readable_storage_bytes(&self) -> usize {
        self.in_order.truesize().max(self.readable())
    }

    /// The part of [`RecvQueue::storage_bytes`] for out-of-order bytes.
    pub fn out_of_order_storage_bytes(&self) -> usize {
        self.runs.iter().map(|r| r.chain.truesize().max(r.chain.len())).sum()
    }

    /// The storage of in-order bytes that is charged to this side ([`Chain::truesize`]).
    pub fn in_order_truesize(&self) -> usize {
        self.in_order.truesize()
    }

    /// The same of bytes behind gaps. Cost: a walk over the runs.
    pub fn out_of_order_truesize(&self) -> usize {
        self.runs.iter().map(|r| r.chain.truesize()).sum()
    }

    /// Inserts bytes at stream offset `off`. Bytes received before are freed.
    #[inline]
    pub fn insert(&mut self, off: u64, chain: Chain, pool: &mut Pool) -> Inserted {
        if off == self.next && self.runs.is_empty() {
            let n = chain.len();
            self.next += n as u64;
            self.in_order.append(chain);
            return Inserted { accepted_bytes: n, in_order_advance: n, ..Inserted::default() };
        }
        self.insert_slow(off, chain, pool)
    }

    /// Copies bytes at [`RecvQueue::next`] into the tailroom of the last in-order mbuf and frees their
    /// chain, so that a peer that sends single bytes does not use a buffer per byte (`tcp_try_coalesce` of
    /// Linux). Returns the chain, to be inserted, if it overlaps a run or the tailroom is too short.
    pub fn absorb(&mut self, chain: Chain, pool: &mut Pool) -> Result<(), Chain> {
        let n = chain.len();
        let Some(mut back) = self.in_order.back_mut().filter(|b| b.tailroom() >= n) else {
            return Err(chain);
        };
        if self.runs.front().is_some_and(|r| self.next + n as u64 > r.start) || chain.is_volatile()
        {
            return Err(chain);
        }
        let mut copied = 0;
        for piece in chain.slices() {
            copied += back.append_tail(piece, pool);
        }
        // The tailroom was checked, so the pool accepted all pieces or refused the first.
        if copied < n {
            debug_assert_eq!(copied, 0);
            return Err(chain);
        }
        self.next += n as u64;
        pool.free(chain);
        self.advance();
        Ok(())
    }

    /// As [`RecvQueue::absorb`], but copies only the bytes that fit and trims them off the front of the chain.
    pub fn fill_tail(&mut self, chain: &mut Chain, pool: &mut Pool) {
        let Some(mut back) = self.in_order.back_mut() else { return };
        let gap = self.runs.front().map_or(u64::MAX, |r| r.start - self.next);
        let copied = append_slices(&mut back, chain, to_usize(gap), pool);
        self.next += copied as u64;
        chain.trim_front(copied, pool);
        self.advance();
    }

    /// Compacts the last `bytes` in-order bytes: mbufs for which `wastes` is true are copied into the tailroom
    /// before them, then into blocks of `block_bytes`. Bytes of posted buffers and volatile ones stay where they
    /// are, as do the others when the pool is exhausted. Returns the bytes copied. Cost: a walk over all
    /// in-order mbufs.
    pub fn compact_last(
        &mut self,
        bytes: usize,
        block_bytes: usize,
        wastes: impl Fn(&Mbuf) -> bool,
        pool: &mut Pool,
    ) -> usize {
        let mut bytes_copied = 0;
        let before = self.readable().saturating_sub(bytes);
        // Whole mbufs, since an mbuf that is split has no tailroom.
        let at = self.in_order.iter().fold(0, |at, m| if at < before { at + m.len() } else { at });
        let Ok(mut last) = self.in_order.split_off(at, pool) else { return 0 };
        while let Some(mut m) = last.pop_front() {
            if m.is_volatile() || m.placed().is_some() || !wastes(&m) {
                self.in_order.push_back(m);
                continue;
            }
            let fitted =
                self.in_order.back_mut().map_or(0, |mut back| back.append_tail(m.as_slice(), pool));
            m.trim_front(fitted);
            bytes_copied += fitted;
            if m.is_empty() {
                pool.free_mbuf(m);
                continue;
            }
            match copy_to_block(&m, block_bytes, pool) {
                Some(block) => {
                    bytes_copied += m.len();
                    pool.free_mbuf(m);
                    self.in_order.push_back(block);
                }
                None => self.in_order.push_back(m),
            }
        }
        bytes_copied
    }

    /// As [`RecvQueue::fill_tail`], for bytes behind a gap: into the tailroom of the run that ends at `off`.
    /// Returns the number of bytes copied, 0 if there is no such run or the bytes would touch the next one.
    pub fn fill_run(&mut self, off: u64, chain: &mut Chain, pool: &mut Pool) -> usize {
        let at = self.runs.partition_point(|r| r.end() < off);
        let end = off.saturating_add(chain.len() as u64);
        if self.runs.get(at + 1).is_some_and(|r| r.start <= end) || chain.is_volatile() {
            return 0;
        }
        let run = self.runs.get_mut(at).filter(|r| r.end() == off);
        let Some(mut back) = run.and_then(|r| r.chain.back_mut()) else { return 0 };
        let copied = append_slices(&mut back, chain, usize::MAX, pool);
        if copied > 0 {
            self.out_of_order += copied;
            self.generation += 1;
            if let Some(run) = self.runs.get_mut(at) {
                run.generation = self.generation;
            }
            chain.trim_front(copied, pool);
        }
        copied
    }

    fn insert_slow(&mut self, off: u64, mut chain: Chain, pool: &mut Pool) -> Inserted {
        let (total, stored_bytes, next) = (chain.len(), self.stored_bytes(), self.next);
        if off.checked_add(total as u64).is_none() {
            pool.free(chain);
            return Inserted { refused: true, ..Inserted::default() };
        }
        let old = self.next.saturating_sub(off);
        chain.trim_front(usize::try_from(old).unwrap_or(usize::MAX), pool);
        if chain.is_empty() {
            pool.free(chain);
            return Inserted { duplicate_bytes: total, ..Inserted::default() };
        }
        let merged = self.merge(off.max(self.next), chain, pool);
        self.advance();
        let accepted_bytes = self.stored_bytes() - stored_bytes;
        Inserted {
            accepted_bytes,
            duplicate_bytes: if merged { total - accepted_bytes } else { 0 },
            in_order_advance: (self.next - next) as usize,
            refused: !merged,
        }
    }

    fn stored_bytes(&self) -> usize {
        self.in_order.len() + self.out_of_order
    }

    /// Merges new bytes with the runs that they overlap or touch. False if there are too many runs.
    fn merge(&mut self, start: u64, mut chain: Chain, pool: &mut Pool) -> bool {
        self.generation += 1;
        let generation = self.generation;
        let end = start + chain.len() as u64;
        // The first run that the new bytes overlap or touch, and the first run after the new bytes.
        let first = self.runs.partition_point(|r| r.end() < start);
        let behind = self.runs.partition_point(|r| r.start <= end);
        if first >= behind {
            if self.runs.len() >= MAX_RANGES {
                pool.free(chain);
                return false;
            }
            self.out_of_order += chain.len();
            self.runs.insert(first, Run { start, chain, generation });
            return true;
        }
        let mut run = Run { start, chain: Chain::new(), generation };
        for old in self.runs.drain(first..behind) {
            self.out_of_order -= old.chain.len();
            let (old_start, old_end) = (old.start, old.end());
            if old_start <= start {
                // Overlaps from the left: the new bytes are trimmed.
                chain.trim_front(to_usize(old_end - start), pool);
                run.start = old_start;
                run.chain = old.chain;
            } else if old_end > end {
                // Extends to the right, so it is the last run.
                chain.trim_back(to_usize(end - old_start), pool);
                chain.append(old.chain);
            } else {
                pool.free(old.chain);
            }
        }
        run.chain.append(chain);
        self.out_of_order += run.chain.len();
        self.runs.insert(first, run);
        true
    }

    /// Moves the first run to the in-order bytes if the gap before it is closed.
    fn advance(&mut self) {
        if self.runs.front().is_none_or(|r| r.start > self.next) {
            return;
        }
        if let Some(run) = self.runs.pop_front() {
            self.next = run.end();
            self.out_of_order -= run.chain.len();
            self.in_order.append(run.chain);
        }
        if self.runs.is_empty() && self.runs.capacity() > 64 {
            self.runs = VecDeque::new();
        }
    }

    /// Removes up to `max` bytes from the front. Whole mbufs are moved, and the last one is split by
    /// reference. If the pool has no descriptor for the split, a few bytes are copied; if that fails too,
    /// fewer bytes are returned, or none.
    pub fn take(&mut self, max: usize, pool: &mut Pool) -> Chain {
        if max >= self.in_order.len() {
            return core::mem::take(&mut self.in_order);
        }
        let mut out = Chain::new();
        while out.len() < max {
            let left = max - out.len();
            let Some(mut front) = self.in_order.front_mut() else { break };
            if front.len() > left {
                // Reads free memory, so they proceed with a copy of a few bytes without a descriptor.
                let part = pool.clone_ref(&front, 0, left).ok();
                let part = part.or_else(|| copy_few(&front, 0, left, pool));
                let Some(part) = part else { break };
                front.trim_front(part.len());
                out.push_back(part);
                break;
            }
            if let Some(m) = self.in_order.pop_front() {
                out.push_back(m);
            }
        }
        out
    }

    /// The mbuf with the next byte for the reader.
    #[inline]
    pub fn front(&self) -> Option<&Mbuf> {
        self.in_order.front()
    }

    /// Frees up to `n` bytes from the front, which the reader has copied.
    #[inline]
    pub fn consume(&mut self, n: usize, pool: &mut Pool) {
        self.in_order.trim_front(n, pool);
        while self.in_order.front().is_some_and(Mbuf::is_empty) {
            if let Some(m) = self.in_order.pop_front() {
                pool.free_mbuf(m);
            }
        }
    }

    /// Copies all bytes in a posted buffer to memory of the pool. False if there is not enough for the
    /// in-order bytes, some of which stay in the buffer. Out-of-order bytes without memory are discarded:
    /// the peer retransmits them, since SACK is advisory (RFC 2018 section 8).
    pub fn evict(&mut self, buffer: BufId, pool: &mut Pool) -> bool {
        let (ready, is_whole) = copy_out(core::mem::take(&mut self.in_order), buffer, pool);
        self.in_order = ready;
        for run in &mut self.runs {
            let before = run.chain.len();
            let (mut chain, is_whole) = copy_out(core::mem::take(&mut run.chain), buffer, pool);
            if !is_whole {
                let kept: usize =
                    chain.iter().take_while(|m| !is_in(m, buffer)).map(Mbuf::len).sum();
                chain.trim_back(chain.len() - kept, pool);
            }
            self.out_of_order -= before - chain.len();
            run.chain = chain;
        }
        self.runs.retain(|r| !r.chain.is_empty());
        is_whole
    }

    /// Prepends bytes that were taken last and not used.
    pub fn unread(&mut self, mut chain: Chain) {
        chain.append(core::mem::take(&mut self.in_order));
        self.in_order = chain;
    }

    /// Copies readable bytes at `off` from the front into `out` and returns their number.
    #[cfg(test)]
    pub(crate) fn peek(&self, off: usize, out: &mut [u8]) -> usize {
        self.in_order.copy_to(off, out)
    }

    /// References to up to `max` readable bytes at `off` from the front, which stay in the queue. Shorter, or
    /// a copy of a few bytes, if the pool has no descriptor left.
    pub fn share(&self, off: usize, max: usize, pool: &mut Pool) -> Chain {
        let (mut out, mut skip) = (Chain::new(), off);
        for m in self.in_order.iter() {
            if out.len() == max {
                break;
            }
            let at = skip.min(m.len());
            skip -= at;
            let n = (m.len() - at).min(max - out.len());
            if n == 0 {
                continue;
            }
            let part = pool.clone_ref(m, at, n.min(MAX_MBUF_BYTES)).ok();
            let is_first = out.is_empty();
            let part = part.or_else(|| if is_first { copy_few(m, at, n, pool) } else { None });
            let Some(part) = part else { break };
            let is_part = part.len() < n;
            out.push_back(part);
            if is_part {
                break;
            }
        }
        out
    }

    /// The first part of `[from, to)` that is in an out-of-order run.
    pub fn first_out_of_order(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        let runs = self.runs.iter().map(|run| (run.start.max(from), run.end().min(to)));
        runs.into_iter().find(|(start, end)| start < end)
    }

    /// Writes the ranges of out-of-order bytes, most recently changed first (RFC 2018 section 4), and
    /// returns their number, at most eight.
    pub fn sack_ranges(&self, out: &mut [(u64, u64)]) -> usize {
        let mut newest: [Option<&Run>; MAX_REPORTED] = [None; MAX_REPORTED];
        for run in &self.runs {
            let mut run = Some(run);
            for slot in newest.iter_mut().take(out.len()) {
                if generation_of(run) > generation_of(*slot) {
                    core::mem::swap(&mut run, slot);
                }
            }
        }
        let mut n = 0;
        for (slot, run) in out.iter_mut().zip(newest.into_iter().flatten()) {
            *slot = (run.start, run.end());
            n += 1;
        }
        n
    }

    /// Frees all bytes; `next` does not change.
    pub fn clear(&mut self, pool: &mut Pool) {
        pool.free(core::mem::take(&mut self.in_order));
        self.discard_out_of_order(pool);
    }

    /// Frees the bytes behind gaps: the peer sends them again, since SACK is advisory (RFC 2018 section 8).
    pub fn discard_out_of_order(&mut self, pool: &mut Pool) {
        for run in core::mem::take(&mut self.runs) {
            pool.free(run.chain);
        }
        self.out_of_order = 0;
    }
}

fn generation_of(run: Option<&Run>) -> u64 {
    run.map_or(0, |r| r.generation)
}

/// Copies up to `most` bytes from the front of a chain to the tailroom of an mbuf. Returns their
/// number.
fn append_slices(to: &mut SegMut<'_>, from: &Chain, most: usize, pool: &mut Pool) -> usize {
    let mut left = from.len().min(most).min(to.tailroom());
    let mut copied = 0;
    for piece in from.slices() {
        let n = to.append_tail(piece.get(..left).unwrap_or(piece), pool);
        copied += n;
        left -= n;
        if left == 0 || n == 0 {
            break;
        }
    }
    copied
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn is_in(m: &Mbuf, buffer: BufId) -> bool {
    m.placed().is_some_and(|p| p.buffer == buffer)
}

/// The chain with copies of the mbufs in `buffer`, and whether there was memory for all copies.
fn copy_out(mut chain: Chain, buffer: BufId, pool: &mut Pool) -> (Chain, bool) {
    if !chain.iter().any(|m| is_in(m, buffer)) {
        return (chain, true);
    }
    let (mut out, mut is_whole) = (Chain::new(), true);
    while let Some(m) = chain.pop_front() {
        let copy = if is_in(&m, buffer) { copy_into_pool(m.as_slice(), pool) } else { None };
        is_whole &= copy.is_some() || !is_in(&m, buffer);
        match copy {
            Some(copy) => {
                pool.free_mbuf(m);
                out.append(copy);
            }
            None => out.push_back(m),
        }
    }
    (out, is_whole)
}

/// Copies bytes into memory of the pool, in the last resort of the control reserve.
fn copy_into_pool(bytes: &[u8], pool: &mut Pool) -> Option<Chain> {
    let (n, receive) = (bytes.len(), Purpose::Receive);
    let copy =
        pool.alloc_chain(n, 0, receive).or_else(|_| pool.alloc_chain(n, 0, Purpose::Control));
    let mut copy = copy.ok()?;
    copy.copy_from(0, bytes);
    Some(copy)
}

/// A copy in a block of at least `block_bytes`. `None`: the pool is exhausted.
fn copy_to_block(m: &Mbuf, block_bytes: usize, pool: &mut Pool) -> Option<Mbuf> {
    let mut block = pool.alloc(block_bytes.max(m.len()), 0, Purpose::Receive).ok()?;
    match block.append(m.len()) {
        Some(space) => {
            m.copy_to(0, space);
            Some(block)
        }
        None => {
            pool.free_mbuf(block);
            None
        }
    }
}

/// Bytes per read when only the control reserve has memory.
const LAST_RESORT_BYTES: usize = 256;

/// A copy of up to `LAST_RESORT_BYTES` at `off`, in memory of the control reserve.
fn copy_few(m: &Mbuf, off: usize, len: usize, pool: &mut Pool) -> Option<Mbuf> {
    let len = len.min(LAST_RESORT_BYTES);
    let mut copy = pool.alloc(len, 0, Purpose::Control).ok()?;
    m.copy_to(off, copy.append(len)?);
    Some(copy)
}

#[cfg(test)]
mod tests;
