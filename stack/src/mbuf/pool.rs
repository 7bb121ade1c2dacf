//! The buffer pool of a shard: budget, shares, and fallbacks when memory runs out.
//!
//! ```text
//!  budget ├───────── send share ─────────┼──────── receive share ────────┼─ control reserve ─┤
//!         limit of Send ─────────────────► limit of Receive ─────────────► limit of Control ──►
//! ```
//!
//! A block is charged, by the bytes of its storage, to the purpose it was allocated for until its last
//! reference is freed. Slabs of 2 MiB are mapped on demand, each divided into blocks of one size class.
//! When the budget is mapped, an entirely free slab is reassigned to another class; if there is none, a
//! block of another class is used. Since each class may have a partly used slab, the mapped memory can
//! exceed the budget by one slab per class. Block records take 32 bytes per block, and descriptors at most
//! a sixteenth of the budget.
//!
//! Cost: an allocation or a free is a pop or a push on a magazine (`arena/magazine.rs`) and a few
//! additions.

#![forbid(unsafe_code)]

mod config;
mod stats;

use alloc::boxed::Box;
use alloc::sync::Arc;

use crate::mbuf::arena::{Arena, CHUNK_DESCS, Freed, MAX_SLABS};
use crate::mbuf::raw::List;
use crate::mbuf::storage::{
    CLASS_BYTES, CLASSES, SLAB_BYTES, class_for, class_for_part, is_wasteful,
};
use crate::mbuf::sys::PageSize;
use crate::mbuf::{
    Backing, Chain, External, FairShare, Kick, Lender, MAX_MBUF_BYTES, Mbuf, NoBuffer, Purpose,
    SharedBytes,
};
pub use config::{PoolConfig, PoolError};
pub use stats::PoolStats;

/// The buffer pool of a shard, used under the shard lock. It may move to another thread. If it is dropped
/// while mbufs are in use, its memory is freed with the last of them.
pub struct Pool {
    arena: Arena,
    used: [usize; 3],
    /// Maximum storage of each purpose.
    limits: [usize; 3],
    used_total: usize,
    budget: usize,
    /// Descriptors in use up to which each purpose may allocate one.
    desc_limits: [usize; 3],
    /// Bytes reserved for [`Purpose::Control`].
    reserve: usize,
    max_slabs: usize,
    keeps_sums: bool,
    /// An allocation for [`Purpose::Receive`] was refused.
    has_refused: bool,
    stats: PoolStats,
}

/// Bytes of budget per descriptor.
pub(crate) const BYTES_PER_DESC: usize = 1024;
/// Minimum descriptors of a pool.
const MIN_DESCS: usize = if cfg!(miri) { 256 } else { 4096 };

impl Pool {
    /// Creates a pool. Memory is mapped on demand.
    pub fn new(config: PoolConfig) -> Result<Pool, PoolError> {
        Pool::with_backing(config, None)
    }

    /// Creates a pool whose slabs are taken from `backing` until it is used up, so that a process that
    /// shares this memory can read the bytes in place.
    pub fn with_backing(config: PoolConfig, backing: Option<Backing>) -> Result<Pool, PoolError> {
        let budget = config.budget_bytes;
        let shares = config
            .send_share_bytes
            .checked_add(config.receive_share_bytes)
            .and_then(|s| s.checked_add(config.control_reserve_bytes))
            .ok_or(PoolError::SharesExceedBudget)?;
        if shares > budget {
            return Err(PoolError::SharesExceedBudget);
        }
        // One slab per class beyond the budget: see the module documentation.
        let max_slabs = budget.div_ceil(SLAB_BYTES).saturating_add(CLASSES);
        if max_slabs > MAX_SLABS {
            return Err(PoolError::BudgetTooLarge);
        }
        let max_descs = (budget / BYTES_PER_DESC).max(MIN_DESCS).next_multiple_of(CHUNK_DESCS);
        let others = max_descs - max_descs / 16;
        let pages = if config.huge_pages { PageSize::Huge } else { PageSize::Base };
        Ok(Pool {
            arena: Arena::new(backing, pages),
            used: [0; 3],
            limits: [config.send_share_bytes, config.receive_share_bytes, budget],
            used_total: 0,
            budget,
            desc_limits: [others, others, max_descs],
            reserve: config.control_reserve_bytes,
            max_slabs,
            keeps_sums: false,
            has_refused: false,
            stats: PoolStats { budget_bytes: budget, ..PoolStats::default() },
        })
    }

    /// Whether blocks allocated for [`Purpose::Send`] from now on keep the sums of the bytes that
    /// [`Chain::copy_from`] writes, for [`Chain::sum`]. For devices without checksum offload. Costs two bytes
    /// of memory per unit of a slab.
    pub fn keep_sums(&mut self, keep: bool) {
        self.keeps_sums = keep;
    }

    /// Allocates an empty mbuf with `headroom` and tailroom for at least `bytes`, from the smallest class
    /// that holds both. Errors: the share or the pool is exhausted, or the sum exceeds 64 KiB.
    #[inline(always)]
    pub fn alloc(&mut self, bytes: usize, headroom: usize, p: Purpose) -> Result<Mbuf, NoBuffer> {
        let class = class_for(bytes.saturating_add(headroom)).ok_or(NoBuffer)?;
        let mut m = match self.alloc_cached(class, p) {
            Some(m) => m,
            None => self.alloc_slow(class, p)?,
        };
        self.arena.set_headroom(&mut m, headroom);
        Ok(m)
    }

    /// Allocates a chain of `bytes`, all or nothing, its first mbuf with `headroom`: the largest blocks
    /// first, the last one as small as fits. The contents are unspecified (zeroes or bytes of earlier
    /// packets), for the caller to overwrite.
    #[inline]
    pub fn alloc_chain(
        &mut self,
        bytes: usize,
        headroom: usize,
        p: Purpose,
    ) -> Result<Chain, NoBuffer> {
        let total = bytes.saturating_add(headroom);
        if (1..=MAX_MBUF_BYTES).contains(&total)
            && !is_wasteful(total)
            && let Some(class) = class_for(total)
            && let Some(mut m) = self.alloc_cached(class, p)
        {
            self.arena.set_headroom(&mut m, headroom);
            m.set_len(bytes);
            return Ok(Chain::from(m));
        }
        self.alloc_parts(bytes, headroom, p)
    }

    /// A chain of several mbufs, or one for which the magazine is empty.
    fn alloc_parts(
        &mut self,
        bytes: usize,
        headroom: usize,
        p: Purpose,
    ) -> Result<Chain, NoBuffer> {
        let mut chain = Chain::new();
        if self.available(p) < bytes {
            self.drain_remote();
        }
        let (mut left, mut headroom) = (bytes, headroom);
        while left > 0 || headroom > 0 {
            match self.alloc_part(left, headroom, p) {
                Ok(m) => {
                    left -= m.len();
                    headroom = 0;
                    chain.push_back(m);
                }
                Err(e) => {
                    self.free(chain);
                    return Err(e);
                }
            }
        }
        Ok(chain)
    }

    /// The next mbuf of a chain that needs `bytes` more, its length set to its part of them. If the best
    /// class is exhausted, a block of another class is used.
    fn alloc_part(&mut self, bytes: usize, headroom: usize, p: Purpose) -> Result<Mbuf, NoBuffer> {
        let class = class_for_part(bytes.saturating_add(headroom));
        let mut m = match self.alloc_cached(class, p) {
            Some(m) => m,
            None => self.alloc_any_class(class, headroom, p)?,
        };
        if headroom > m.storage_bytes() {
            self.free_mbuf(m);
            return Err(NoBuffer);
        }
        self.arena.set_headroom(&mut m, headroom);
        m.set_len(bytes.min(m.tailroom()));
        Ok(m)
    }

    /// A new reference to bytes [off, off + len) of `m`. If `m` belongs to another pool, the bytes are
    /// copied instead. Errors: no descriptor is left, or no storage for the copy.
    ///
    /// # Panics
    /// If the part is not inside `m`.
    #[inline]
    pub fn clone_ref(&mut self, m: &Mbuf, off: usize, len: usize) -> Result<Mbuf, NoBuffer> {
        if !self.arena.owns(m) {
            return self.copy_foreign(m, off, len);
        }
        if (self.arena.in_use() >= self.desc_limits[m.purpose() as usize] || !self.arena.has_desc())
            && !self.refill_descs(m.purpose())
        {
            self.stats.failed_descriptor += 1;
            return Err(NoBuffer);
        }
        self.stats.clones += 1;
        self.arena.clone_part(m, off, len).ok_or(NoBuffer)
    }

    #[cold]
    fn copy_foreign(&mut self, m: &Mbuf, off: usize, len: usize) -> Result<Mbuf, NoBuffer> {
        assert!(off <= m.len() && len <= m.len() - off, "a clone beyond the end of the mbuf");
        let mut copy = self.alloc(len, 0, m.purpose())?;
        if let Some(space) = copy.append(len) {
            m.copy_to(off, space);
        }
        Ok(copy)
    }

    /// References to bytes [off, off + len) of a chain, all or nothing.
    ///
    /// # Panics
    /// If the range is not inside the chain.
    pub fn clone_range(&mut self, c: &Chain, off: usize, len: usize) -> Result<Chain, NoBuffer> {
        assert!(off <= c.len() && len <= c.len() - off, "a clone beyond the end of the chain");
        let mut out = Chain::new();
        let (mut skip, mut left) = (off, len);
        for m in c.iter() {
            if left == 0 {
                break;
            }
            let mut at = skip.min(m.len());
            skip -= at;
            // An mbuf of another pool is copied, to one block at most.
            let max = if self.arena.owns(m) { usize::MAX } else { MAX_MBUF_BYTES };
            while at < m.len() && left > 0 {
                let n = left.min(m.len() - at).min(max);
                match self.clone_ref(m, at, n) {
                    Ok(part) => out.push_back(part),
                    Err(e) => {
                        self.free(out);
                        return Err(e);
                    }
                }
                (at, left) = (at + n, left - n);
            }
        }
        Ok(out)
    }

    /// Appends bytes to `m` in its tailroom and returns how many fitted.
    ///
    /// The storage may be shared, unless another reference ends behind the end of `m`: then the result is
    /// 0, as for external storage and mbufs of other pools.
    #[inline]
    pub fn append_tail(&mut self, m: &mut Mbuf, bytes: &[u8]) -> usize {
        self.arena.append_tail(m, bytes)
    }

    /// An mbuf over the memory of `owner`, charged to `p` by its length and never written. The owner is
    /// dropped when the last reference is freed, or immediately on an error: the share is exhausted, or the
    /// memory is larger than 4 GiB.
    pub fn external(&mut self, owner: Box<dyn External>, p: Purpose) -> Result<Mbuf, NoBuffer> {
        let bytes = owner.bytes().len();
        if !self.admits(bytes, p) || !self.arena.has_desc() {
            self.prepare(bytes, p)?;
        }
        let m = self.arena.external(owner, p).ok_or(NoBuffer)?;
        self.charge(m.storage_bytes(), p);
        Ok(m)
    }

    /// An mbuf over a range of a lender's memory; [`Lender::give_back`] is called when the last reference is freed. It
    /// is never written and not charged: the lender bounds its loans. Errors, without a loan: no descriptor is left,
    /// the range is longer than [`MAX_MBUF_BYTES`](crate::mbuf::MAX_MBUF_BYTES), or it is outside the memory.
    ///
    /// Another process may change the bytes until the loan ends. They are copied out ([`Mbuf::copy_to`]) and
    /// never borrowed; a second copy may differ from the first.
    pub fn lent(
        &mut self,
        lender: &Arc<dyn Lender>,
        offset: usize,
        len: u32,
        tag: u32,
    ) -> Result<Mbuf, NoBuffer> {
        let arena = self.arena_with_desc(Purpose::Send)?;
        arena.lent(lender, offset, len, tag).ok_or(NoBuffer)
    }

    /// The arena, with a free descriptor that `p` may use.
    #[inline]
    pub(crate) fn arena_with_desc(&mut self, p: Purpose) -> Result<&mut Arena, NoBuffer> {
        let short = self.arena.in_use() >= self.desc_limits[p as usize];
        if (short || !self.arena.has_desc()) && !self.refill_descs(p) {
            self.stats.failed_descriptor += 1;
            self.note_refused(p);
            return Err(NoBuffer);
        }
        Ok(&mut self.arena)
    }

    /// An mbuf over at most `max` of the contiguous shared bytes at `at`, charged to `p` by its length and
    /// never written. When its last reference is freed, [`Pool::pop_returned`] returns the owner. Errors: the
    /// share or the descriptors are exhausted.
    pub fn share(
        &mut self,
        owner: &Arc<dyn SharedBytes>,
        at: usize,
        max: usize,
        p: Purpose,
    ) -> Result<Mbuf, NoBuffer> {
        let bytes = owner.piece(at).len().min(max);
        if !self.admits(bytes, p) || !self.arena.has_desc() {
            self.prepare(bytes, p)?;
        }
        let m = self.arena.share(owner, at, max, p).ok_or(NoBuffer)?;
        self.charge(m.storage_bytes(), p);
        Ok(m)
    }

    /// Storages over shared bytes in use.
    #[inline]
    pub fn shared_storages(&self) -> usize {
        self.arena.shared_storages()
    }

    /// Whether [`Pool::pop_returned`] has an owner to return.
    #[inline]
    pub fn has_returned(&self) -> bool {
        self.arena.has_returned()
    }

    /// The owner of shared bytes whose storage was freed, once per storage. The caller drops it outside the
    /// shard lock, since the drop runs code of the application.
    #[inline]
    pub fn pop_returned(&mut self) -> Option<Arc<dyn SharedBytes>> {
        self.arena.pop_returned()
    }

    /// Frees a chain. Mbufs of other pools are freed to their pools.
    #[inline]
    pub fn free(&mut self, chain: Chain) {
        let mut segments = chain.into_list().drain();
        while let Some(m) = segments.next() {
            if !self.arena.owns(&m) {
                return self.free_mixed(m, segments.rest());
            }
            self.release(m);
        }
    }

    /// Frees a list with mbufs of other pools, which are freed together.
    #[cold]
    fn free_mixed(&mut self, first: Mbuf, rest: List) {
        let mut foreign = List::single(first);
        for m in rest.drain() {
            if self.arena.owns(&m) { self.release(m) } else { foreign.push_back(m) }
        }
    }

    /// Frees one mbuf.
    #[inline]
    pub fn free_mbuf(&mut self, m: Mbuf) {
        if self.arena.owns(&m) {
            self.release(m);
        }
    }

    #[inline]
    fn release(&mut self, m: Mbuf) {
        if let Some(Freed { purpose, bytes }) = self.arena.release(m) {
            self.used[purpose as usize] -= bytes;
            self.used_total -= bytes;
        }
    }

    /// Frees the mbufs on the remote-free list and returns their number. A pool that runs short calls it by
    /// itself.
    pub fn drain_remote(&mut self) -> usize {
        let mut count = 0;
        for m in self.arena.take_remote().drain() {
            self.release(m);
            count += 1;
        }
        self.stats.remote_frees += count as u64;
        self.stats.refills += u64::from(count > 0);
        count
    }

    /// Sets the kick that [`Pool::await_remote`] requests. Only the first call has an effect.
    pub fn set_kick(&mut self, kick: Arc<dyn Kick>) {
        self.arena.set_kick(kick);
    }

    /// Requests a kick on the next remote free, for a caller about to wait for memory. False if the
    /// remote-free list is not empty: then drain it and try again.
    pub fn await_remote(&mut self) -> bool {
        self.arena.await_remote()
    }

    /// Whether the remote-free list is not empty.
    #[inline]
    pub fn has_remote(&self) -> bool {
        self.arena.has_remote()
    }

    /// The statistics of the pool.
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            slab_bytes: self.arena.slabs() * SLAB_BYTES,
            used_bytes: self.used,
            mbufs_in_use: self.arena.in_use(),
            descriptors: self.arena.descs(),
            ..self.stats
        }
    }

    /// Descriptors in use: of mbufs and chains, or on the remote-free list.
    pub fn outstanding(&self) -> usize {
        self.arena.in_use()
    }

    /// Bytes of storage that `p` may still allocate.
    #[inline]
    pub fn available(&self, p: Purpose) -> usize {
        let share = self.limits[p as usize] - self.used[p as usize];
        share.min(self.budget - self.used_total)
    }

    /// The present state of the share of `p`. The use of the receive share is that of its bytes or of the
    /// pool's descriptors, whichever is higher: tiny packets exhaust descriptors first.
    #[inline]
    pub fn share_of(&self, p: Purpose) -> FairShare {
        let (limit, used) = (self.limits[p as usize], self.used[p as usize]);
        let by_descs = match p {
            Purpose::Receive => self.arena.in_use() * limit / self.desc_limits[p as usize],
            Purpose::Send | Purpose::Control => 0,
        };
        FairShare { limit, used: used.max(by_descs).min(limit) }
    }

    /// Whether at least half of the share of `p` is in use; see [`FairShare::is_contended`].
    #[inline]
    pub fn is_contended(&self, p: Purpose) -> bool {
        self.share_of(p).is_contended()
    }

    /// For [`Pool::take_refused`]: a device drops a frame without an attempt to allocate.
    #[inline]
    pub fn note_refused(&mut self, p: Purpose) {
        self.has_refused |= p == Purpose::Receive;
    }

    /// Whether an allocation for [`Purpose::Receive`] was refused since the last call.
    #[inline]
    pub fn take_refused(&mut self) -> bool {
        core::mem::take(&mut self.has_refused)
    }

    /// Whether more than half of the bytes and of the descriptors reserved for [`Purpose::Control`] are
    /// free. Only then may received packets stay in memory of the reserve.
    pub fn has_reserve(&self) -> bool {
        let [_, others, all] = self.desc_limits;
        self.budget - self.used_total > self.reserve / 2
            && self.arena.in_use() < others.midpoint(all)
    }

    /// Whether an mbuf belongs to this pool.
    #[inline]
    pub fn owns(&self, m: &Mbuf) -> bool {
        self.arena.owns(m)
    }
}

// Allocation of blocks.
impl Pool {
    /// Whether the limits allow `p` a block of `bytes` and a descriptor.
    #[inline]
    fn admits(&self, bytes: usize, p: Purpose) -> bool {
        bytes <= self.available(p) && self.arena.in_use() < self.desc_limits[p as usize]
    }

    #[inline]
    fn charge(&mut self, bytes: usize, p: Purpose) {
        self.used[p as usize] += bytes;
        self.used_total += bytes;
        self.stats.allocs += 1;
    }

    /// Allocates from the magazine.
    #[inline(always)]
    fn alloc_cached(&mut self, class: usize, p: Purpose) -> Option<Mbuf> {
        let bytes = CLASS_BYTES[class];
        if !self.admits(bytes, p) {
            return None;
        }
        let mut m = self.arena.get(class, p)?;
        if self.keeps_sums && p == Purpose::Send {
            self.arena.keep_sums(&mut m);
        }
        self.charge(bytes, p);
        self.stats.fast_allocs += 1;
        Some(m)
    }

    /// Allocates a block of this class or a larger one: drains remote frees, maps or reassigns a slab.
    #[cold]
    fn alloc_slow(&mut self, class: usize, p: Purpose) -> Result<Mbuf, NoBuffer> {
        self.prepare(CLASS_BYTES[class], p)?;
        if let Some(m) = self.alloc_or_grow(class, p) {
            return Ok(m);
        }
        self.alloc_other_class(class + 1..CLASSES, p)
    }

    /// As `alloc_slow`, but a smaller block (larger than `headroom`) is accepted too.
    #[cold]
    fn alloc_any_class(
        &mut self,
        class: usize,
        headroom: usize,
        p: Purpose,
    ) -> Result<Mbuf, NoBuffer> {
        let smallest = class_for(headroom + 1).unwrap_or(CLASSES - 1).min(class);
        self.prepare(CLASS_BYTES[class], p)?;
        if let Some(m) = self.alloc_or_grow(class, p) {
            return Ok(m);
        }
        self.alloc_other_class((smallest..class).rev().chain(class + 1..CLASSES), p)
    }

    /// Allocates a block of this class from the magazine, the free lists, or a new slab.
    fn alloc_or_grow(&mut self, class: usize, p: Purpose) -> Option<Mbuf> {
        if let Some(m) = self.alloc_cached(class, p).or_else(|| self.alloc_refilled(class, p)) {
            return Some(m);
        }
        if !self.grow(class) {
            return None;
        }
        self.alloc_refilled(class, p)
    }

    /// Refills the magazine from the free lists and allocates a block.
    fn alloc_refilled(&mut self, class: usize, p: Purpose) -> Option<Mbuf> {
        if self.arena.refill(class) == 0 {
            return None;
        }
        self.stats.refills += 1;
        let m = self.alloc_cached(class, p)?;
        self.stats.slow_allocs += 1;
        self.stats.fast_allocs -= 1;
        Some(m)
    }

    fn alloc_other_class(
        &mut self,
        mut classes: impl Iterator<Item = usize>,
        p: Purpose,
    ) -> Result<Mbuf, NoBuffer> {
        let found = classes.find_map(|class| {
            self.alloc_cached(class, p).or_else(|| self.alloc_refilled(class, p))
        });
        match found {
            Some(_) => self.stats.class_fallbacks += 1,
            None => {
                self.stats.failed_block += 1;
                self.stats.empty_allocs += 1;
                self.note_refused(p);
            }
        }
        found.ok_or(NoBuffer)
    }

    /// Maps a slab for a class, or reassigns one.
    fn grow(&mut self, class: usize) -> bool {
        if self.arena.slabs() < self.max_slabs && self.arena.add_slab(class) {
            return true;
        }
        let reassigned = self.arena.reassign_slab(class);
        self.stats.slabs_reassigned += u64::from(reassigned);
        reassigned
    }

    /// Drains remote frees and checks the limits, with a descriptor on the free list afterwards.
    #[cold]
    fn prepare(&mut self, bytes: usize, p: Purpose) -> Result<(), NoBuffer> {
        self.drain_remote();
        if bytes > self.available(p) {
            self.stats.failed_budget += 1;
            self.stats.empty_allocs += 1;
            self.note_refused(p);
            return Err(NoBuffer);
        }
        if !self.refill_descs(p) {
            self.stats.failed_descriptor += 1;
            self.stats.empty_allocs += 1;
            self.note_refused(p);
            return Err(NoBuffer);
        }
        Ok(())
    }

    /// Provides a free descriptor. False if `p` may not use one.
    #[cold]
    fn refill_descs(&mut self, p: Purpose) -> bool {
        if !self.arena.has_desc() {
            self.drain_remote();
        }
        if self.arena.in_use() >= self.desc_limits[p as usize] {
            self.drain_remote();
        }
        if self.arena.in_use() >= self.desc_limits[p as usize] {
            return false;
        }
        if !self.arena.has_desc() {
            let most = self.desc_limits[Purpose::Control as usize];
            if self.arena.descs() < most || !self.arena.flush_magazines() {
                self.arena.add_descs();
            }
        }
        true
    }
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Pool").field(&self.stats()).finish()
    }
}

#[cfg(test)]
mod tests;
