//! The send buffer of a stream.
//!
//! ```text
//!      head()            ready_end()             claimed_end()
//!        │  ready: may be sent │ claimed: being filled  │   space
//!   ─────┼──────┬──────┬───────┼─────────┬──────────────┼──────────►  stream offset (u64)
//!   freed│ mbuf │ mbuf │ mbuf  │ claim 0 │ claim 1 ...  │
//!        └──────┴──────┴───────┴─────────┴──────────────┘
//! ```
//!
//! A writer claims space, fills a chain without any lock, and commits it. Claims may be committed in any
//! order; `ready` extends over the committed prefix. Ready bytes are sent by reference
//! ([`SendQueue::range`]) and freed when they are acknowledged ([`SendQueue::ack_to`]). A retransmission
//! copies nothing.
//!
//! Invariants: `head <= ready_end <= claimed_end <= head + limit` (the last unless the limit was lowered);
//! the mbufs cover [head, ready_end) without gaps; the claims cover [ready_end, claimed_end) in order, and
//! the first one is not committed.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

use alloc::collections::VecDeque;

use crate::mbuf::{Chain, Mbuf, NoBuffer, Pool, Purpose};

/// Maximum outstanding claims of a queue.
pub const MAX_CLAIMS: usize = 64;

/// Mbufs up to this length are copied into the tailroom of the last one: an mbuf, and its fragment in each
/// segment, cost more than the copy (`sbcompress` of BSD merges small mbufs likewise).
pub const MERGED_BYTES: usize = 512;

/// Maximum capacity, in entries, of an idle queue.
const IDLE_CAPACITY: usize = 64;

/// Claimed space of a send queue, for [`SendQueue::commit`] or [`SendQueue::abandon`]. Bytes after the claim are not
/// sent before either call.
#[must_use = "bytes behind a claim are not sent until it is committed or abandoned"]
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

/// The chain, returned because it does not fit in the send queue.
#[derive(Debug)]
pub struct QueueFull(pub Chain);

/// An mbuf of the ready bytes, at stream offsets [end - len, end).
#[derive(Debug)]
struct ReadyMbuf {
    end: u64,
    mbuf: Mbuf,
}

impl ReadyMbuf {
    /// A reference to the bytes [at, end) of the stream, which are in this mbuf.
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

/// The send buffer of a stream: claimed, ready and unacknowledged bytes.
#[derive(Debug, Default)]
pub struct SendQueue {
    ready: VecDeque<ReadyMbuf>,
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
    /// Creates an empty queue for up to `limit_bytes`. The first byte has offset 0.
    pub fn new(limit_bytes: usize) -> SendQueue {
        let mut queue = SendQueue::default();
        queue.limit = limit_bytes;
        queue
    }

    /// Maximum bytes claimed and ready.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Sets the limit. Bytes already claimed beyond it are kept.
    pub fn set_limit(&mut self, limit_bytes: usize) {
        self.limit = limit_bytes;
    }

    /// Bytes that may be claimed.
    #[inline]
    pub fn space(&self) -> usize {
        self.limit.saturating_sub(self.claimed_bytes())
    }

    /// The stream offset of the first unacknowledged byte (SND.UNA).
    #[inline]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The stream offset of the end of the bytes that may be sent.
    #[inline]
    pub fn ready_end(&self) -> u64 {
        self.ready_end
    }

    /// The stream offset of the end of the claims. It decreases if a commit is shorter than its claim.
    #[inline]
    pub fn claimed_end(&self) -> u64 {
        self.claimed_end
    }

    /// Bytes in use: ready and claimed.
    #[inline]
    pub fn claimed_bytes(&self) -> usize {
        (self.claimed_end - self.head) as usize
    }

    /// Bytes of storage, ready or committed. Shared storage is counted once per reference.
    pub fn storage_bytes(&self) -> usize {
        self.storage
    }

    /// The memory charged to the stream: its storage, and the claimed bytes that are not ready.
    #[inline]
    pub fn truesize(&self) -> usize {
        self.storage + (self.claimed_end - self.ready_end) as usize
    }

    /// Whether fewer than [`MAX_CLAIMS`] claims are outstanding.
    #[inline]
    pub fn may_claim(&self) -> bool {
        self.slots.len() < MAX_CLAIMS
    }

    /// Claims `n` bytes. `None` if there is less space or too many claims are outstanding.
    pub fn claim(&mut self, n: usize) -> Option<Claim> {
        if n > self.space() || !self.may_claim() {
            return None;
        }
        let number = self.first_claim + self.slots.len() as u64;
        self.slots.push_back(Slot::Outstanding);
        self.claimed_end += n as u64;
        Some(Claim { number, len: n })
    }

    /// Commits the bytes of a claim. If the chain is shorter, the rest of the space is released and the
    /// offsets of later claims decrease. After [`SendQueue::clear`] the chain is freed.
    ///
    /// # Panics
    /// If the chain is longer than the claim, or the claim belongs to another queue.
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

    /// Releases a claim without bytes.
    ///
    /// # Panics
    /// If the claim belongs to another queue.
    pub fn abandon(&mut self, claim: Claim, pool: &mut Pool) {
        self.commit(claim, Chain::new(), pool);
    }

    /// Moves the committed prefix of the claims to the ready bytes.
    fn extend_ready(&mut self, pool: &mut Pool) {
        while let Some(Slot::Committed(chain)) = self.slots.front_mut() {
            let chain = core::mem::take(chain);
            self.slots.pop_front();
            self.first_claim += 1;
            self.push_ready(chain, pool);
        }
    }

    /// Appends bytes, already counted in `claimed_end` and `storage`, to the ready bytes.
    #[inline]
    fn push_ready(&mut self, mut chain: Chain, pool: &mut Pool) {
        while let Some(mbuf) = chain.pop_front() {
            if mbuf.is_empty() || self.try_merge(&mbuf, pool) {
                self.storage -= mbuf.storage_bytes();
                pool.free_mbuf(mbuf);
                continue;
            }
            self.ready_end += mbuf.len() as u64;
            self.ready.push_back(ReadyMbuf { end: self.ready_end, mbuf });
        }
    }

    /// Copies a small mbuf into the tailroom of the last ready one. False if it does not fit as a whole.
    fn try_merge(&mut self, piece: &Mbuf, pool: &mut Pool) -> bool {
        let n = piece.len();
        let Some(last) = self.ready.back_mut().filter(|_| n <= MERGED_BYTES) else {
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

    /// Copies bytes into the tailroom of the last ready mbuf and returns their number. 0 if a claim is
    /// outstanding, the queue is empty or full, or the tailroom is used up or cannot be written.
    pub fn append_small(&mut self, bytes: &[u8], pool: &mut Pool) -> usize {
        let space = self.space();
        let Some(last) = self.ready.back_mut().filter(|_| self.slots.is_empty()) else {
            return 0;
        };
        let bytes = bytes.get(..space).unwrap_or(bytes);
        let n = pool.append_tail(&mut last.mbuf, bytes);
        last.end += n as u64;
        self.ready_end += n as u64;
        self.claimed_end += n as u64;
        n
    }

    /// Claims and commits a whole chain. Error, with the chain: there is less space, or a claim is needed and
    /// too many are outstanding.
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

    /// References to the bytes [off, off + len), as far as they are ready. Error: the pool has no descriptor
    /// left.
    #[inline]
    pub fn range(&self, off: u64, len: usize, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        let at = off.max(self.head);
        let end = off.saturating_add(len as u64).min(self.ready_end);
        if at >= end {
            return Ok(Chain::new());
        }
        let first = self.ready.partition_point(|s| s.end <= at);
        match self.ready.get(first) {
            Some(s) if s.end >= end => Ok(Chain::from(s.reference(at, end, pool)?)),
            _ => self.range_across(first, at, end, pool),
        }
    }

    /// References to [at, end), which starts in segment `first` and ends in a later one.
    fn range_across(
        &self,
        first: usize,
        mut at: u64,
        end: u64,
        pool: &mut Pool,
    ) -> Result<Chain, NoBuffer> {
        let mut chain = Chain::new();
        for s in self.ready.range(first..) {
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

    /// As [`SendQueue::range`], but a copy in memory of the control reserve: output frees the send buffer,
    /// so it must proceed when no descriptor is left. Errors: the reserve is exhausted too.
    pub fn copy_range(&self, off: u64, len: usize, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        let (mut at, end) =
            (off.max(self.head), off.saturating_add(len as u64).min(self.ready_end));
        let start = at.min(end);
        let mut copy = pool.alloc_chain((end - start) as usize, 0, Purpose::Control)?;
        let first = self.ready.partition_point(|s| s.end <= at);
        for s in self.ready.range(first..) {
            if at >= end {
                break;
            }
            let bytes = s.mbuf.as_slice();
            let from = bytes.len() - (s.end - at) as usize;
            let to = bytes.len() - (s.end - s.end.min(end)) as usize;
            let Some(part) = bytes.get(from..to) else {
                pool.free(copy);
                return Err(NoBuffer);
            };
            copy.copy_from((at - start) as usize, part);
            at = s.end;
        }
        Ok(copy)
    }

    /// Frees the bytes before `off`, which are acknowledged. Offsets beyond `ready_end` are limited to it.
    pub fn ack_to(&mut self, off: u64, pool: &mut Pool) {
        let off = off.min(self.ready_end);
        if off <= self.head {
            return;
        }
        self.head = off;
        while let Some(s) = self.ready.front_mut() {
            if s.end > off {
                let surplus = s.mbuf.len() - (s.end - off) as usize;
                s.mbuf.trim_front(surplus);
                return;
            }
            self.pop_ready(pool);
        }
        self.shrink();
    }

    #[inline]
    fn pop_ready(&mut self, pool: &mut Pool) {
        if let Some(s) = self.ready.pop_front() {
            self.storage -= s.mbuf.storage_bytes();
            pool.free_mbuf(s.mbuf);
        }
    }

    /// Limits the memory of an idle queue, since there may be very many.
    fn shrink(&mut self) {
        if self.ready.capacity() > IDLE_CAPACITY {
            self.ready.shrink_to(IDLE_CAPACITY);
        }
    }

    /// Frees all bytes, as [`SendQueue::discard`] with reason 0.
    pub fn clear(&mut self, pool: &mut Pool) {
        self.discard(0, pool);
    }

    /// Discards all bytes and notifies the owners of shared bytes of the reason. Outstanding claims are
    /// cancelled: a commit of one frees its chain. `head` moves to `ready_end`.
    pub fn discard(&mut self, why: u8, pool: &mut Pool) {
        self.note_undelivered(why);
        while !self.ready.is_empty() {
            self.pop_ready(pool);
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
    fn note_undelivered(&self, why: u8) {
        self.ready.iter().for_each(|s| s.mbuf.note_undelivered(why));
        for slot in &self.slots {
            if let Slot::Committed(chain) = slot {
                chain.iter().for_each(|m| m.note_undelivered(why));
            }
        }
    }
}

impl Drop for SendQueue {
    /// Notifies the owners of shared bytes: the stack was dropped with open connections.
    fn drop(&mut self) {
        self.note_undelivered(0);
    }
}

#[cfg(test)]
mod tests;
