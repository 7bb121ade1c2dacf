//! The receive buffer of a stream: bytes in order that wait for the reader, and bytes that arrived
//! before the ones in front of them (reassembly).
//!
//! ```text
//!               next()          sack ranges
//!        ready    │            ┌─────┐   ┌───────┐
//!   ───┬──────────┼───(gap)────┤ run ├───┤  run  ├────►  stream offset (u64)
//!      └──────────┘            └─────┘   └───────┘
//!       readable()
//! ```
//!
//! Invariants: runs are sorted, not empty, do not touch each other, and begin behind `next`; there
//! are at most [`MAX_RANGES`]. What is held stays: of two copies of a byte the queue keeps one, and
//! a run that new bytes cover entirely is replaced.
//!
//! Cost: bytes in order with nothing out of order are one append (three additions, two stores).
//! Sources: RFC 9293 section 3.10.7.4 (trimming), RFC 2018 section 4 (order of SACK blocks).

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use alloc::collections::VecDeque;

use crate::{BufId, Chain, MAX_MBUF_BYTES, Mbuf, Pool, Purpose};

/// The most runs of out-of-order bytes that one queue holds. A sender whose window holds more
/// holes than that is either attacking or better served by going back.
pub const MAX_RANGES: usize = 512;

/// The most ranges that [`RecvQueue::sack_ranges`] reports: more than a TCP header has room for.
const MAX_REPORTED: usize = 8;

/// What became of bytes that were inserted.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Inserted {
    /// Bytes that were not held before and are now.
    pub accepted_bytes: usize,
    /// Bytes that had been received before.
    pub duplicate_bytes: usize,
    /// How far [`RecvQueue::next`] moved.
    pub in_order_advance: usize,
    /// The bytes were dropped because there were too many runs already (or they reach beyond the
    /// offsets of a `u64`, which no stream does).
    pub refused: bool,
}

#[derive(Debug)]
struct Run {
    start: u64,
    chain: Chain,
    /// When it last changed; later is larger.
    stamp: u64,
}

impl Run {
    fn end(&self) -> u64 {
        self.start + self.chain.len() as u64
    }
}

/// The receive buffer of a stream.
#[derive(Debug, Default)]
pub struct RecvQueue {
    ready: Chain,
    next: u64,
    runs: VecDeque<Run>,
    out_of_order: usize,
    stamp: u64,
}

impl RecvQueue {
    /// An empty queue that waits for offset 0.
    pub fn new() -> RecvQueue {
        RecvQueue::default()
    }

    /// Offset of the first byte that has not arrived in order.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Bytes in order that wait for the reader.
    #[inline]
    pub fn readable(&self) -> usize {
        self.ready.len()
    }

    /// Bytes held behind a gap.
    #[inline]
    pub fn out_of_order_bytes(&self) -> usize {
        self.out_of_order
    }

    /// Bytes of storage kept from arriving packets, once per reference; at least the bytes held.
    /// See [`Chain::held_bytes`].
    pub fn storage_bytes(&self) -> usize {
        let runs: usize = self.runs.iter().map(|r| r.chain.held_bytes()).sum();
        (self.ready.held_bytes() + runs).max(self.readable() + self.out_of_order)
    }

    /// The part of [`RecvQueue::storage_bytes`] that bytes behind gaps hold.
    pub fn out_of_order_storage_bytes(&self) -> usize {
        self.runs.iter().map(|r| r.chain.held_bytes().max(r.chain.len())).sum()
    }

    /// Takes bytes that begin at stream offset `off`; those already held or read are freed.
    #[inline]
    pub fn insert(&mut self, off: u64, chain: Chain, pool: &mut Pool) -> Inserted {
        if off == self.next && self.runs.is_empty() {
            let n = chain.len();
            self.next += n as u64;
            self.ready.append(chain);
            return Inserted { accepted_bytes: n, in_order_advance: n, ..Inserted::default() };
        }
        self.insert_slow(off, chain, pool)
    }

    /// Copies bytes that begin at [`RecvQueue::next`] into the room behind the last ready one and
    /// frees their chain: a peer that sends a byte at a time then pins no buffer per byte. Gives the
    /// chain back if it overlaps what is out of order, or there is no such room; then insert it.
    pub fn absorb(&mut self, chain: Chain, pool: &mut Pool) -> Result<(), Chain> {
        let n = chain.len();
        let Some(mut back) = self.ready.back_mut().filter(|b| b.tailroom() >= n) else {
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
        // The room was there, so the pool refused the first piece or none.
        if copied < n {
            debug_assert_eq!(copied, 0);
            return Err(chain);
        }
        self.next += n as u64;
        pool.free(chain);
        self.advance();
        Ok(())
    }

    /// As [`RecvQueue::absorb`], but copies as many bytes as there is room for and trims them off the
    /// front of the chain.
    pub fn fill_tail(&mut self, chain: &mut Chain, pool: &mut Pool) {
        let Some(mut back) = self.ready.back_mut() else { return };
        let gap = self.runs.front().map_or(u64::MAX, |r| r.start - self.next);
        let mut left = chain.len().min(to_usize(gap)).min(back.tailroom());
        let mut copied = 0;
        for piece in chain.slices() {
            let n = back.append_tail(piece.get(..left).unwrap_or(piece), pool);
            copied += n;
            left -= n;
            if left == 0 || n == 0 {
                break;
            }
        }
        self.next += copied as u64;
        chain.trim_front(copied, pool);
        self.advance();
    }

    fn insert_slow(&mut self, off: u64, mut chain: Chain, pool: &mut Pool) -> Inserted {
        let (total, held, next) = (chain.len(), self.held(), self.next);
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
        let accepted_bytes = self.held() - held;
        Inserted {
            accepted_bytes,
            duplicate_bytes: if merged { total - accepted_bytes } else { 0 },
            in_order_advance: (self.next - next) as usize,
            refused: !merged,
        }
    }

    fn held(&self) -> usize {
        self.ready.len() + self.out_of_order
    }

    /// Joins new bytes with the runs that they touch. `false` if there was no room for a new run.
    fn merge(&mut self, start: u64, mut chain: Chain, pool: &mut Pool) -> bool {
        self.stamp += 1;
        let stamp = self.stamp;
        let end = start + chain.len() as u64;
        // The first run that the new bytes overlap or touch, and the first one behind them.
        let first = self.runs.partition_point(|r| r.end() < start);
        let behind = self.runs.partition_point(|r| r.start <= end);
        if first >= behind {
            if self.runs.len() >= MAX_RANGES {
                pool.free(chain);
                return false;
            }
            self.out_of_order += chain.len();
            self.runs.insert(first, Run { start, chain, stamp });
            return true;
        }
        let mut run = Run { start, chain: Chain::new(), stamp };
        for old in self.runs.drain(first..behind) {
            self.out_of_order -= old.chain.len();
            let (old_start, old_end) = (old.start, old.end());
            if old_start <= start {
                // Reaches in from the left: what it has is trimmed off the new bytes.
                chain.trim_front(to_usize(old_end - start), pool);
                run.start = old_start;
                run.chain = old.chain;
            } else if old_end > end {
                // Reaches out to the right, so it is the last one.
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

    /// Moves a first run without gap before it to the ready bytes.
    fn advance(&mut self) {
        if self.runs.front().is_none_or(|r| r.start > self.next) {
            return;
        }
        if let Some(run) = self.runs.pop_front() {
            self.next = run.end();
            self.out_of_order -= run.chain.len();
            self.ready.append(run.chain);
        }
        if self.runs.is_empty() && self.runs.capacity() > 64 {
            self.runs = VecDeque::new();
        }
    }

    /// Takes up to `max` bytes from the front: whole mbufs are moved, the last is cut by reference.
    /// If the pool has no reference for the cut, a copy of a few bytes serves, and failing that fewer
    /// are taken, even none.
    pub fn take(&mut self, max: usize, pool: &mut Pool) -> Chain {
        if max >= self.ready.len() {
            return core::mem::take(&mut self.ready);
        }
        let mut out = Chain::new();
        while out.len() < max {
            let left = max - out.len();
            let Some(mut front) = self.ready.front_mut() else { break };
            if front.len() > left {
                let Some(part) = part_of(&front, left, pool) else { break };
                front.trim_front(part.len());
                out.push_back(part);
                break;
            }
            if let Some(m) = self.ready.pop_front() {
                out.push_back(m);
            }
        }
        out
    }

    /// The mbuf that holds the next byte for the reader.
    #[inline]
    pub fn front(&self) -> Option<&Mbuf> {
        self.ready.front()
    }

    /// Frees up to `n` bytes from the front: somebody has them already.
    #[inline]
    pub fn consume(&mut self, n: usize, pool: &mut Pool) {
        self.ready.trim_front(n, pool);
        while self.ready.front().is_some_and(Mbuf::is_empty) {
            if let Some(m) = self.ready.pop_front() {
                pool.free_mbuf(m);
            }
        }
    }

    /// Moves all bytes that lie in this posted buffer to the pool's own memory. `false`: it has none
    /// left for bytes in order, and some stayed where they are. Bytes behind a gap are forgotten in
    /// that case, since the peer keeps them until they are acknowledged (RFC 2018 section 8).
    pub fn evict(&mut self, buffer: BufId, pool: &mut Pool) -> bool {
        let (ready, is_whole) = evicted(core::mem::take(&mut self.ready), buffer, pool);
        self.ready = ready;
        for run in &mut self.runs {
            let before = run.chain.len();
            let (mut chain, is_whole) = evicted(core::mem::take(&mut run.chain), buffer, pool);
            if !is_whole {
                cut_at(&mut chain, buffer, pool);
            }
            self.out_of_order -= before - chain.len();
            run.chain = chain;
        }
        self.runs.retain(|r| !r.chain.is_empty());
        is_whole
    }

    /// Puts back at the front what was taken last and not used.
    pub fn unread(&mut self, mut chain: Chain) {
        chain.append(core::mem::take(&mut self.ready));
        self.ready = chain;
    }

    /// Copies readable bytes from `off` (counted from the front) on; returns how many.
    pub fn peek(&self, off: usize, out: &mut [u8]) -> usize {
        self.ready.copy_to(off, out)
    }

    /// References to up to `max` readable bytes from `off` (counted from the front) on, without taking
    /// them. Where the pool has no reference left it ends early, or is a copy of a few bytes.
    pub fn share(&self, off: usize, max: usize, pool: &mut Pool) -> Chain {
        let (mut out, mut skip) = (Chain::new(), off);
        for m in self.ready.iter() {
            let at = skip.min(m.len());
            skip -= at;
            let n = (m.len() - at).min(max - out.len());
            if n == 0 {
                continue;
            }
            let part = pool.clone_ref(m, at, n.min(MAX_MBUF_BYTES)).ok();
            let is_first = out.is_empty();
            let part = part.or_else(|| if is_first { few_bytes(m, at, n, pool) } else { None });
            let Some(part) = part else { break };
            let is_part = part.len() < n;
            out.push_back(part);
            if is_part {
                break;
            }
        }
        out
    }

    /// Writes the ranges of out-of-order bytes, most recently changed first (RFC 2018 section 4),
    /// at most eight; returns how many.
    pub fn sack_ranges(&self, out: &mut [(u64, u64)]) -> usize {
        let mut newest: [Option<&Run>; MAX_REPORTED] = [None; MAX_REPORTED];
        for run in &self.runs {
            let mut run = Some(run);
            for slot in newest.iter_mut().take(out.len()) {
                if stamp_of(run) > stamp_of(*slot) {
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

    /// Frees everything that is held; `next` stays.
    pub fn clear(&mut self, pool: &mut Pool) {
        pool.free(core::mem::take(&mut self.ready));
        for run in core::mem::take(&mut self.runs) {
            pool.free(run.chain);
        }
        self.out_of_order = 0;
    }
}

fn stamp_of(run: Option<&Run>) -> u64 {
    run.map_or(0, |r| r.stamp)
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn lies_in(m: &Mbuf, buffer: BufId) -> bool {
    m.placed().is_some_and(|p| p.buffer == buffer)
}

/// The chain with copies in place of the mbufs that lie in `buffer`, and whether there was memory for
/// all of them.
fn evicted(mut chain: Chain, buffer: BufId, pool: &mut Pool) -> (Chain, bool) {
    if !chain.iter().any(|m| lies_in(m, buffer)) {
        return (chain, true);
    }
    let (mut out, mut is_whole) = (Chain::new(), true);
    while let Some(m) = chain.pop_front() {
        let copy = if lies_in(&m, buffer) { copied(m.as_slice(), pool) } else { None };
        is_whole &= copy.is_some() || !lies_in(&m, buffer);
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

/// Bytes of a placed mbuf in memory of the pool; of the reserve for control if there is no other.
fn copied(bytes: &[u8], pool: &mut Pool) -> Option<Chain> {
    let (n, receive) = (bytes.len(), Purpose::Receive);
    let copy =
        pool.alloc_chain(n, 0, receive).or_else(|_| pool.alloc_chain(n, 0, Purpose::Control));
    let mut copy = copy.ok()?;
    copy.copy_from(0, bytes);
    Some(copy)
}

/// Frees everything from the first mbuf on that lies in `buffer`.
fn cut_at(chain: &mut Chain, buffer: BufId, pool: &mut Pool) {
    let before = chain.iter().take_while(|m| !lies_in(m, buffer)).map(Mbuf::len).sum::<usize>();
    chain.trim_back(chain.len() - before, pool);
}

/// Bytes that a reader gets at a time when nothing is left but the reserve for control.
const LAST_RESORT_BYTES: usize = 256;

/// The first `len` bytes of `front`, or a few of them in a copy if the pool has no reference left:
/// reading is what frees memory, so it must not need much.
fn part_of(front: &Mbuf, len: usize, pool: &mut Pool) -> Option<Mbuf> {
    if let Ok(part) = pool.clone_ref(front, 0, len) {
        return Some(part);
    }
    few_bytes(front, 0, len, pool)
}

/// A copy of up to `len` bytes from `off` on, from the reserve for control.
fn few_bytes(m: &Mbuf, off: usize, len: usize, pool: &mut Pool) -> Option<Mbuf> {
    let len = len.min(LAST_RESORT_BYTES);
    let mut copy = pool.alloc(len, 0, Purpose::Control).ok()?;
    m.copy_to(off, copy.append(len)?);
    Some(copy)
}

#[cfg(test)]
mod tests;
