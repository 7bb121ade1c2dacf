//! The send buffer of a stream.
//!
//! ```text
//!      head()           ready_end()               claimed_end()
//!        │  ready: may be sent │ claimed: order fixed   │   space
//!   ─────┼──────┬──────┬───────┼─────────┬──────────────┼──────────►  stream offset (u64)
//!   freed│ mbuf │ mbuf │ mbuf  │ claim 0 │ claim 1 ...  │
//!        └──────┴──────┴───────┴─────────┴──────────────┘
//! ```
//!
//! A writer claims space, fills a chain of its own outside any lock, and commits it; claims may be
//! committed in any order, and `ready` extends over the committed prefix only. Ready bytes are sent
//! by reference ([`SendQueue::range`]) and freed when they are acknowledged
//! ([`SendQueue::consume_to`]); retransmission copies nothing.
//!
//! Invariants: `head <= ready_end <= claimed_end <= head + limit` (the last unless the limit was
//! lowered); the mbufs cover [head, ready_end) without gap; the claims cover the rest in order, and
//! the first of them is not committed.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use alloc::collections::VecDeque;

use crate::{Chain, Mbuf, NoBuffer, Pool, Purpose};

/// The most claims of one queue that may be outstanding.
pub const MAX_CLAIMS: usize = 64;

/// Pieces up to this size are copied behind the last one where there is room: a descriptor, and its
/// part of every segment, cost more (`sbcompress` of the published stacks has the same bound).
pub const MERGED_BYTES: usize = 512;

/// Entries that an empty queue may keep room for.
const KEPT_CAPACITY: usize = 64;

/// Space in a send queue that its holder will fill. To be given to [`SendQueue::commit`] or
/// [`SendQueue::abandon`]: until then nothing behind it can be sent.
#[must_use = "a claim holds up everything behind it until it is committed or abandoned"]
#[derive(Debug)]
pub struct Claim {
    number: u64,
    len: usize,
}

impl Claim {
    /// Bytes of the claim.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// The chain does not fit in the space of the send queue; here it is back.
#[derive(Debug)]
pub struct QueueFull(pub Chain);

/// One mbuf of the ready bytes; it starts at `end - mbuf.len()`.
#[derive(Debug)]
struct Segment {
    end: u64,
    mbuf: Mbuf,
}

impl Segment {
    /// A reference to the bytes [at, end) of the stream, which lie in this segment.
    #[inline]
    fn reference(&self, at: u64, end: u64, pool: &mut Pool) -> Result<Mbuf, NoBuffer> {
        let from = self.mbuf.len() - (self.end - at) as usize;
        pool.clone_ref(&self.mbuf, from, (end - at) as usize)
    }
}

#[derive(Debug)]
enum Slot {
    Outstanding,
    Committed(Chain),
}

/// The send buffer of a stream: claimed, ready and not yet acknowledged bytes.
#[derive(Debug, Default)]
pub struct SendQueue {
    segments: VecDeque<Segment>,
    slots: VecDeque<Slot>,
    /// Number of the first claim in `slots`.
    first_claim: u64,
    head: u64,
    ready_end: u64,
    claimed_end: u64,
    limit: usize,
    storage: usize,
}

impl SendQueue {
    /// An empty queue that takes up to `limit_bytes`; the first byte has offset 0.
    pub fn new(limit_bytes: usize) -> SendQueue {
        let mut queue = SendQueue::default();
        queue.limit = limit_bytes;
        queue
    }

    /// The most bytes that may be claimed at once.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Sets the limit. What is claimed beyond a lower one stays.
    pub fn set_limit(&mut self, limit_bytes: usize) {
        self.limit = limit_bytes;
    }

    /// Bytes that may still be claimed.
    #[inline]
    pub fn space(&self) -> usize {
        self.limit.saturating_sub(self.claimed_bytes())
    }

    /// Offset of the first byte that is not acknowledged.
    #[inline]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Offset behind the last byte that may be sent.
    #[inline]
    pub fn ready_end(&self) -> u64 {
        self.ready_end
    }

    /// Offset behind the last claimed byte. It moves down when a claim gives bytes back.
    #[inline]
    pub fn claimed_end(&self) -> u64 {
        self.claimed_end
    }

    /// Bytes that may be sent or wait for their acknowledgement.
    #[inline]
    pub fn ready_bytes(&self) -> usize {
        (self.ready_end - self.head) as usize
    }

    /// Bytes of the buffer in use: ready ones and claims.
    #[inline]
    pub fn claimed_bytes(&self) -> usize {
        (self.claimed_end - self.head) as usize
    }

    /// Bytes of storage held, ready or committed; storage that is shared counts once per reference.
    pub fn storage_bytes(&self) -> usize {
        self.storage
    }

    /// Bytes of memory that the stream holds: storage, and what was claimed and is not ready.
    #[inline]
    pub fn held_bytes(&self) -> usize {
        self.storage + (self.claimed_end - self.ready_end) as usize
    }

    /// Whether one more claim may be outstanding.
    #[inline]
    pub fn may_claim(&self) -> bool {
        self.slots.len() < MAX_CLAIMS
    }

    /// Takes `n` bytes of space. `None` if there is less, or too many claims are outstanding.
    pub fn claim(&mut self, n: usize) -> Option<Claim> {
        if n > self.space() || !self.may_claim() {
            return None;
        }
        let number = self.first_claim + self.slots.len() as u64;
        self.slots.push_back(Slot::Outstanding);
        self.claimed_end += n as u64;
        Some(Claim { number, len: n })
    }

    /// Fills a claim. If the chain is shorter, the rest of the space is given back and later claims
    /// move down. After [`SendQueue::clear`] the chain is freed.
    ///
    /// # Panics
    /// If the chain is longer than the claim, or the claim is another queue's.
    pub fn commit(&mut self, claim: Claim, chain: Chain, pool: &mut Pool) {
        let Some(index) = claim.number.checked_sub(self.first_claim) else {
            chain.iter().for_each(|m| m.note_undelivered(0));
            return pool.free(chain);
        };
        assert!(chain.len() <= claim.len, "more bytes than were claimed");
        let slot = self.slots.get_mut(index as usize);
        let Some(slot @ Slot::Outstanding) = slot else {
            panic!("a claim of another queue");
        };
        self.claimed_end -= (claim.len - chain.len()) as u64;
        self.storage += chain.storage_bytes();
        *slot = Slot::Committed(chain);
        if index == 0 {
            self.extend_ready(pool);
        }
    }

    /// Gives a claim back.
    ///
    /// # Panics
    /// If the claim is another queue's.
    pub fn abandon(&mut self, claim: Claim, pool: &mut Pool) {
        self.commit(claim, Chain::new(), pool);
    }

    /// Moves the committed claims at the front to the ready bytes.
    fn extend_ready(&mut self, pool: &mut Pool) {
        while let Some(Slot::Committed(chain)) = self.slots.front_mut() {
            let chain = core::mem::take(chain);
            self.slots.pop_front();
            self.first_claim += 1;
            self.push_ready(chain, pool);
        }
    }

    /// Adds bytes, already counted as claimed and in `storage`, to the ready ones.
    #[inline]
    fn push_ready(&mut self, mut chain: Chain, pool: &mut Pool) {
        while let Some(mbuf) = chain.pop_front() {
            if mbuf.is_empty() || self.merges(&mbuf, pool) {
                self.storage -= mbuf.storage_bytes();
                pool.free_mbuf(mbuf);
                continue;
            }
            self.ready_end += mbuf.len() as u64;
            self.segments.push_back(Segment { end: self.ready_end, mbuf });
        }
    }

    /// Copies a small piece into the room behind the last ready mbuf, whole or not at all.
    fn merges(&mut self, piece: &Mbuf, pool: &mut Pool) -> bool {
        let n = piece.len();
        let Some(last) = self.segments.back_mut().filter(|_| n <= MERGED_BYTES) else {
            return false;
        };
        if piece.is_external() || last.mbuf.tailroom() < n {
            return false;
        }
        if pool.append_tail(&mut last.mbuf, piece.as_slice()) < n {
            return false;
        }
        last.end += n as u64;
        self.ready_end = last.end;
        true
    }

    /// Copies bytes into the room behind the last ready mbuf; returns how many were taken. 0 if a
    /// claim is outstanding, the queue is empty or full, or the room is used up or another's.
    pub fn append_small(&mut self, bytes: &[u8], pool: &mut Pool) -> usize {
        let space = self.space();
        let Some(last) = self.segments.back_mut().filter(|_| self.slots.is_empty()) else {
            return 0;
        };
        let bytes = bytes.get(..space).unwrap_or(bytes);
        let n = pool.append_tail(&mut last.mbuf, bytes);
        last.end += n as u64;
        self.ready_end += n as u64;
        self.claimed_end += n as u64;
        n
    }

    /// Claims and commits a whole chain. Error: it is longer than the space, or a claim is needed
    /// and too many are outstanding; the chain comes back.
    pub fn append(&mut self, chain: Chain, pool: &mut Pool) -> Result<(), QueueFull> {
        if !self.slots.is_empty() {
            let Some(claim) = self.claim(chain.len()) else { return Err(QueueFull(chain)) };
            self.commit(claim, chain, pool);
            return Ok(());
        }
        if chain.len() > self.space() {
            return Err(QueueFull(chain));
        }
        self.claimed_end += chain.len() as u64;
        self.storage += chain.storage_bytes();
        self.push_ready(chain, pool);
        Ok(())
    }

    /// References to the ready bytes [off, off + len), or to the part of them that is ready. Error:
    /// the pool has no descriptor left; nothing is kept.
    #[inline]
    pub fn range(&self, off: u64, len: usize, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        let at = off.max(self.head);
        let end = off.saturating_add(len as u64).min(self.ready_end);
        if at >= end {
            return Ok(Chain::new());
        }
        let first = self.segments.partition_point(|s| s.end <= at);
        match self.segments.get(first) {
            Some(s) if s.end >= end => Ok(Chain::from(s.reference(at, end, pool)?)),
            _ => self.range_across(first, at, end, pool),
        }
    }

    /// References to [at, end), which begins in segment `first` and ends in a later one.
    fn range_across(
        &self,
        first: usize,
        mut at: u64,
        end: u64,
        pool: &mut Pool,
    ) -> Result<Chain, NoBuffer> {
        let mut chain = Chain::new();
        for s in self.segments.range(first..) {
            match s.reference(at, s.end.min(end), pool) {
                Ok(m) => chain.push_back(m),
                Err(e) => {
                    pool.free(chain);
                    return Err(e);
                }
            }
            at = s.end;
            if at >= end {
                break;
            }
        }
        Ok(chain)
    }

    /// The same bytes as [`SendQueue::range`] in storage of their own, which the reserve for control
    /// gives: sending is what frees a send buffer, so it must go on when no reference is left.
    /// Errors: the reserve is empty too, or the kernel alone may read the bytes.
    pub fn copy_range(&self, off: u64, len: usize, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        let (mut at, end) =
            (off.max(self.head), off.saturating_add(len as u64).min(self.ready_end));
        let start = at.min(end);
        let mut copy = pool.alloc_chain((end - start) as usize, 0, Purpose::Control)?;
        let first = self.segments.partition_point(|s| s.end <= at);
        for s in self.segments.range(first..) {
            if at >= end {
                break;
            }
            let bytes = s.mbuf.as_slice();
            let from = bytes.len() - (s.end - at) as usize;
            let to = bytes.len() - (s.end - s.end.min(end)) as usize;
            let Some(part) = bytes.get(from..to).filter(|_| !s.mbuf.is_kernel_only()) else {
                pool.free(copy);
                return Err(NoBuffer);
            };
            copy.copy_from((at - start) as usize, part);
            at = s.end;
        }
        Ok(copy)
    }

    /// Frees what lies before `off`: it is acknowledged. Offsets beyond the ready bytes count as
    /// their end.
    pub fn consume_to(&mut self, off: u64, pool: &mut Pool) {
        let off = off.min(self.ready_end);
        if off <= self.head {
            return;
        }
        self.head = off;
        while let Some(s) = self.segments.front_mut() {
            if s.end > off {
                let surplus = s.mbuf.len() - (s.end - off) as usize;
                s.mbuf.trim_front(surplus);
                return;
            }
            self.pop_segment(pool);
        }
        self.shrink();
    }

    #[inline]
    fn pop_segment(&mut self, pool: &mut Pool) {
        if let Some(s) = self.segments.pop_front() {
            self.storage -= s.mbuf.storage_bytes();
            pool.free_mbuf(s.mbuf);
        }
    }

    /// An empty queue keeps little memory: there may be very many idle connections.
    fn shrink(&mut self) {
        if self.segments.capacity() > KEPT_CAPACITY {
            self.segments.shrink_to(KEPT_CAPACITY);
        }
    }

    /// Frees everything, as [`SendQueue::void`] without a reason (0).
    pub fn clear(&mut self, pool: &mut Pool) {
        self.void(0, pool);
    }

    /// Frees everything; the owners of shared bytes in it are told why. Outstanding claims become void:
    /// committing one frees its chain. The head moves to the end of what was ready.
    pub fn void(&mut self, why: u8, pool: &mut Pool) {
        self.note_undelivered(why);
        while !self.segments.is_empty() {
            self.pop_segment(pool);
        }
        for slot in core::mem::take(&mut self.slots) {
            self.first_claim += 1;
            if let Slot::Committed(chain) = slot {
                self.storage -= chain.storage_bytes();
                pool.free(chain);
            }
        }
        self.head = self.ready_end;
        self.claimed_end = self.ready_end;
        self.shrink();
    }
}

impl SendQueue {
    /// Where the first frame began that the kernel could not send, since it did not find all of it
    /// ([`Pool::note_vanished`]); ordinary bytes at its front are not counted. `None`: there was none.
    pub fn vanished_at(&self) -> Option<u64> {
        self.segments.iter().find_map(|s| {
            let at = s.mbuf.vanished_at().filter(|at| *at < s.mbuf.len())?;
            Some(s.end - (s.mbuf.len() - at) as u64)
        })
    }

    fn note_undelivered(&self, why: u8) {
        self.segments.iter().for_each(|s| s.mbuf.note_undelivered(why));
        for slot in &self.slots {
            if let Slot::Committed(chain) = slot {
                chain.iter().for_each(|m| m.note_undelivered(why));
            }
        }
    }
}

impl Drop for SendQueue {
    /// The stack has gone without closing its connections.
    fn drop(&mut self) {
        self.note_undelivered(0);
    }
}

#[cfg(test)]
mod tests;
