//! The pool of a shard: who may take how much, and what happens when there is nothing left.
//!
//! ```text
//!  budget ├───────── send share ─────────┼──────── receive share ────────┼─ control reserve ─┤
//!         Send never takes more ─────────► Receive never takes more ─────► Control takes any ─►
//! ```
//!
//! A block is charged by the bytes of its storage, to the purpose it was taken for, until its last
//! reference is home. Slabs of 2 MiB are mapped when first needed, each cut to one size class;
//! when the budget in slabs is used up, a slab that is entirely free is cut anew, and failing that
//! a block of another class serves. Because each class may hold one slab that is partly used, the
//! mapped memory can exceed the budget by one slab per class; block records take another 32 bytes
//! per block and descriptors at most a sixteenth of the budget.
//!
//! Cost: taking or freeing a block is a pop or a push on the stack of ready-made mbufs (`home/ready.rs`)
//! and a few additions.

#![forbid(unsafe_code)]

mod stats;

use alloc::boxed::Box;
use alloc::sync::Arc;

use crate::home::{CHUNK_DESCS, Freed, Home, MAX_SLABS, shared_bytes};
use crate::raw::List;
use crate::storage::{CLASS_BYTES, CLASSES, SLAB_BYTES, class_for, class_for_part, is_wasteful};
use crate::{
    Backing, Chain, External, FairShare, Kick, Lender, MAX_MBUF_BYTES, Mbuf, NoBuffer, Purpose,
    SharedBytes,
};
pub use stats::PoolStats;

/// How much memory a pool may use, and for what. The two shares and the reserve together are at
/// most the budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// Bytes of storage in use at once, for everything together.
    pub budget_bytes: usize,
    /// The most that [`Purpose::Send`] may use of it.
    pub send_share_bytes: usize,
    /// The most that [`Purpose::Receive`] may use of it.
    pub receive_share_bytes: usize,
    /// What only [`Purpose::Control`] may use. (It may use what the others leave as well.)
    pub control_reserve_bytes: usize,
    /// Ask the kernel for huge pages.
    pub huge_pages: bool,
}

impl PoolConfig {
    /// Shares derived from a budget: a sixteenth is kept for control, the rest is halved between
    /// sending and receiving.
    pub fn with_budget(bytes: usize) -> PoolConfig {
        let control_reserve_bytes = bytes / 16;
        let share = (bytes - control_reserve_bytes) / 2;
        PoolConfig {
            budget_bytes: bytes,
            send_share_bytes: share,
            receive_share_bytes: share,
            control_reserve_bytes,
            huge_pages: true,
        }
    }
}

impl Default for PoolConfig {
    /// 256 MiB: 120 MiB to send, 120 MiB to receive, 16 MiB in reserve.
    fn default() -> Self {
        PoolConfig::with_budget(256 << 20)
    }
}

/// Why a pool cannot be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolError {
    /// The shares and the reserve together exceed the budget.
    SharesExceedBudget,
    /// The budget is larger than 128 GiB.
    BudgetTooLarge,
    /// The system has no memory for the first slab.
    NoMemory,
}

impl core::fmt::Display for PoolError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            PoolError::SharesExceedBudget => {
                "the send share, the receive share and the control reserve exceed the pool budget"
            }
            PoolError::BudgetTooLarge => "the pool budget is larger than 128 GiB",
            PoolError::NoMemory => "the system has no memory for the buffer pool",
        })
    }
}

impl core::error::Error for PoolError {}

/// The buffers of one shard. Used under the shard's lock, through `&mut`; it may move to another
/// thread. It may be dropped while mbufs are out: its memory then goes with the last of them.
pub struct Pool {
    home: Home,
    used: [usize; 3],
    /// The most that each purpose may use.
    limits: [usize; 3],
    used_total: usize,
    budget: usize,
    /// The most descriptors that may be out when each purpose asks for one.
    desc_limits: [usize; 3],
    /// Bytes that only [`Purpose::Control`] may use.
    reserve: usize,
    max_slabs: usize,
    huge_pages: bool,
    keeps_sums: bool,
    has_vanished: bool,
    stats: PoolStats,
}

/// Bytes of budget per descriptor, and the fewest descriptors of a pool.
pub(crate) const BYTES_PER_DESC: usize = 1024;
const MIN_DESCS: usize = if cfg!(miri) { 256 } else { 4096 };

impl Pool {
    /// Makes a pool. Nothing is mapped until it is needed.
    pub fn new(config: PoolConfig) -> Result<Pool, PoolError> {
        Pool::with_backing(config, None)
    }

    /// Makes a pool whose slabs come from `backing` as long as it lasts, so that whoever shares that
    /// memory can read the bytes where they are.
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
        // One slab per class beside the budget: see the head of the file.
        let max_slabs = budget.div_ceil(SLAB_BYTES).saturating_add(CLASSES);
        if max_slabs > MAX_SLABS {
            return Err(PoolError::BudgetTooLarge);
        }
        let max_descs = (budget / BYTES_PER_DESC).max(MIN_DESCS).next_multiple_of(CHUNK_DESCS);
        let others = max_descs - max_descs / 16;
        Ok(Pool {
            home: Home::new(backing),
            used: [0; 3],
            limits: [config.send_share_bytes, config.receive_share_bytes, budget],
            used_total: 0,
            budget,
            desc_limits: [others, others, max_descs],
            reserve: config.control_reserve_bytes,
            max_slabs,
            huge_pages: config.huge_pages,
            keeps_sums: false,
            has_vanished: false,
            stats: PoolStats { budget_bytes: budget, ..PoolStats::default() },
        })
    }

    /// Whether blocks for [`Purpose::Send`] that are taken from now on keep the sums of what
    /// [`Chain::copy_from`] writes into them, for [`Chain::sum`]. For a device that computes no
    /// checksums; costs two bytes of memory per unit of a slab, and nothing while it is off.
    pub fn keep_sums(&mut self, keep: bool) {
        self.keeps_sums = keep;
    }

    /// Takes an empty mbuf with `headroom` and, behind it, room for at least `bytes`, from the
    /// smallest class that holds both. Errors: the share or the pool is exhausted, or more than
    /// 64 KiB was asked for.
    #[inline(always)]
    pub fn alloc(&mut self, bytes: usize, headroom: usize, p: Purpose) -> Result<Mbuf, NoBuffer> {
        let class = class_for(bytes.saturating_add(headroom)).ok_or(NoBuffer)?;
        let mut m = match self.take(class, p) {
            Some(m) => m,
            None => self.take_slow(class, p)?,
        };
        self.home.set_headroom(&mut m, headroom);
        Ok(m)
    }

    /// Takes a chain of `bytes`, all or nothing, the first mbuf with `headroom`: the largest blocks
    /// first, the last one as small as fits. Its contents are to be written by the caller: they
    /// are zeroes or bytes of earlier packets.
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
            && let Some(mut m) = self.take(class, p)
        {
            self.home.set_headroom(&mut m, headroom);
            m.set_len(bytes);
            return Ok(Chain::from(m));
        }
        self.alloc_parts(bytes, headroom, p)
    }

    /// A chain of several mbufs, or one that the free lists cannot serve at once.
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

    /// One mbuf of a chain, its length set to what it holds of `bytes`. A block of another class
    /// serves if the right one is used up.
    fn alloc_part(&mut self, bytes: usize, headroom: usize, p: Purpose) -> Result<Mbuf, NoBuffer> {
        let class = class_for_part(bytes.saturating_add(headroom));
        let mut m = match self.take(class, p) {
            Some(m) => m,
            None => self.take_any(class, headroom, p)?,
        };
        if headroom > m.storage_bytes() {
            self.free_mbuf(m);
            return Err(NoBuffer);
        }
        self.home.set_headroom(&mut m, headroom);
        m.set_len(bytes.min(m.tailroom()));
        Ok(m)
    }

    /// A new reference to bytes [off, off + len) of `m`. If `m` belongs to another pool, its bytes
    /// are copied instead. Errors: no descriptor, or (copying) no storage, is left.
    ///
    /// # Panics
    /// If the part is not inside `m`.
    #[inline]
    pub fn clone_ref(&mut self, m: &Mbuf, off: usize, len: usize) -> Result<Mbuf, NoBuffer> {
        if !self.home.owns(m) {
            return self.copy_foreign(m, off, len);
        }
        if (self.home.out() >= self.desc_limits[m.purpose() as usize] || !self.home.has_desc())
            && !self.refill_descs(m.purpose())
        {
            self.stats.failed_descriptor += 1;
            return Err(NoBuffer);
        }
        self.stats.clones += 1;
        self.home.clone_part(m, off, len).ok_or(NoBuffer)
    }

    #[cold]
    fn copy_foreign(&mut self, m: &Mbuf, off: usize, len: usize) -> Result<Mbuf, NoBuffer> {
        if m.is_kernel_only() {
            return Err(NoBuffer);
        }
        assert!(off <= m.len() && len <= m.len() - off, "a clone of bytes that are not there");
        let mut copy = self.alloc(len, 0, m.purpose())?;
        if let Some(room) = copy.append(len) {
            m.copy_to(off, room);
        }
        Ok(copy)
    }

    /// References to bytes [off, off + len) of a chain, all or nothing.
    ///
    /// # Panics
    /// If the range is not inside the chain.
    pub fn clone_range(&mut self, c: &Chain, off: usize, len: usize) -> Result<Chain, NoBuffer> {
        assert!(off <= c.len() && len <= c.len() - off, "a clone of bytes that are not there");
        let mut out = Chain::new();
        let (mut skip, mut left) = (off, len);
        for m in c.iter() {
            if left == 0 {
                break;
            }
            let mut at = skip.min(m.len());
            skip -= at;
            while at < m.len() && left > 0 {
                // Copies of foreign bytes are bounded by the largest block.
                let n = left.min(m.len() - at).min(self.largest_part(m));
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

    #[inline]
    fn largest_part(&self, m: &Mbuf) -> usize {
        if self.home.owns(m) { usize::MAX } else { MAX_MBUF_BYTES }
    }

    /// Copies bytes into the room behind the end of `m` and lengthens it; returns how many fitted.
    ///
    /// This is allowed on shared storage as well, if no reference reaches behind the end of `m`.
    /// 0 if one does, if `m` is external or belongs to another pool.
    #[inline]
    pub fn append_tail(&mut self, m: &mut Mbuf, bytes: &[u8]) -> usize {
        self.home.append_tail(m, bytes)
    }

    /// A mbuf over memory that `owner` keeps; it is charged to `p` by its length and never written.
    /// The owner is dropped when the last reference has come home, or at once on an error: the
    /// share is exhausted, or the memory is larger than 4 GiB.
    pub fn external(&mut self, owner: Box<dyn External>, p: Purpose) -> Result<Mbuf, NoBuffer> {
        let bytes = owner.bytes().len();
        if !self.admits(bytes, p) || !self.home.has_desc() {
            self.prepare(bytes, p)?;
        }
        let m = self.home.external(owner, p).ok_or(NoBuffer)?;
        self.charge(m.storage_bytes(), p);
        Ok(m)
    }

    /// A mbuf over a range that `lender` has back when the last reference has come home. It is never
    /// written, and charged to nobody here: who lends bounds what is lent. Errors: no descriptor is
    /// left, the range is longer than [`crate::MAX_MBUF_BYTES`], or the lender does not have it; there is no
    /// loan then.
    ///
    /// The bytes may be another process's, which may change them until the loan has ended. So they are
    /// copied out ([`Mbuf::copy_to`]) and never borrowed; a second copy may differ from the first.
    pub fn lent(
        &mut self,
        lender: &Arc<dyn Lender>,
        offset: usize,
        len: u32,
        tag: u32,
    ) -> Result<Mbuf, NoBuffer> {
        let home = self.home_with_desc(Purpose::Send)?;
        home.lent(lender, offset, len, tag).ok_or(NoBuffer)
    }

    /// The home, with a descriptor at hand that `p` may have.
    #[inline]
    pub(crate) fn home_with_desc(&mut self, p: Purpose) -> Result<&mut Home, NoBuffer> {
        let short = self.home.out() >= self.desc_limits[p as usize];
        if (short || !self.home.has_desc()) && !self.refill_descs(p) {
            self.stats.failed_descriptor += 1;
            return Err(NoBuffer);
        }
        Ok(&mut self.home)
    }

    /// A mbuf over at most `max` shared bytes, those that lie together from `at` on; charged to `p`
    /// by its length and never written. When its last reference has come home the owner is handed
    /// out by [`Pool::pop_returned`]. Errors: the share or the descriptors are exhausted.
    pub fn share(
        &mut self,
        owner: &Arc<dyn SharedBytes>,
        at: usize,
        max: usize,
        p: Purpose,
    ) -> Result<Mbuf, NoBuffer> {
        let bytes = shared_bytes(owner, at).min(max);
        if !self.admits(bytes, p) || !self.home.has_desc() {
            self.prepare(bytes, p)?;
        }
        let m = self.home.share(owner, at, max, p).ok_or(NoBuffer)?;
        self.charge(m.storage_bytes(), p);
        Ok(m)
    }

    /// Parts of shared bytes that are not home.
    #[inline]
    pub fn shared_parts(&self) -> usize {
        self.home.shared_parts()
    }

    /// Mbufs' storages out of which the kernel alone may read ([`Mbuf::is_kernel_only`]).
    #[inline]
    pub fn kernel_parts(&self) -> usize {
        self.home.kernel_parts()
    }

    /// The kernel did not find bytes of this frame that it alone may read: a file was cut. Whoever
    /// holds references to the same storage can tell ([`Mbuf::vanished_at`]).
    #[cold]
    pub fn note_vanished(&mut self, chain: &Chain) {
        chain.iter().for_each(Mbuf::mark_vanished);
        self.has_vanished = true;
    }

    /// Whether bytes have vanished and nobody has looked yet who held them.
    #[inline]
    pub fn has_vanished(&self) -> bool {
        self.has_vanished
    }

    /// As [`Pool::has_vanished`]; from now on somebody has looked.
    pub fn take_vanished(&mut self) -> bool {
        core::mem::take(&mut self.has_vanished)
    }

    /// Whether [`Pool::pop_returned`] has an owner to hand out.
    #[inline]
    pub fn has_returned(&self) -> bool {
        self.home.has_returned()
    }

    /// The owner of shared bytes of which a part has come home, to be dropped: elsewhere than under
    /// the shard's lock, since what then happens is the owner's business. Once for each part.
    #[inline]
    pub fn pop_returned(&mut self) -> Option<Arc<dyn SharedBytes>> {
        self.home.pop_returned()
    }

    /// Frees a chain. Mbufs of other pools in it go to their own pools.
    #[inline]
    pub fn free(&mut self, chain: Chain) {
        let mut segments = chain.into_list().drain();
        while let Some(m) = segments.next() {
            if !self.home.owns(&m) {
                return self.free_mixed(m, segments.rest());
            }
            self.release(m);
        }
    }

    /// Frees a list in which a foreign mbuf was met; the foreign ones leave together.
    #[cold]
    fn free_mixed(&mut self, first: Mbuf, rest: List) {
        let mut foreign = List::single(first);
        for m in rest.drain() {
            if self.home.owns(&m) { self.release(m) } else { foreign.push_back(m) }
        }
    }

    /// Frees one mbuf.
    #[inline]
    pub fn free_mbuf(&mut self, m: Mbuf) {
        if self.home.owns(&m) {
            self.release(m);
        }
    }

    #[inline]
    fn release(&mut self, m: Mbuf) {
        if let Some(Freed { purpose, bytes }) = self.home.release(m) {
            self.used[purpose as usize] -= bytes;
            self.used_total -= bytes;
        }
    }

    /// Takes back what was dropped elsewhere; returns how many mbufs that were. Call it now and
    /// then when mbufs leave the shard; a pool that runs short does it by itself.
    pub fn drain_remote(&mut self) -> usize {
        let mut count = 0;
        for m in self.home.take_remote().drain() {
            self.release(m);
            count += 1;
        }
        self.stats.remote_frees += count as u64;
        self.stats.refills += u64::from(count > 0);
        count
    }

    /// Names who is told when mbufs are freed away from home, if [`Pool::await_remote`] asks for it.
    /// Only the first call counts.
    pub fn set_kick(&mut self, kick: Arc<dyn Kick>) {
        self.home.set_kick(kick);
    }

    /// Asks for one kick with the next remote free: for whoever is about to wait for memory. False:
    /// some lies there already, so [`Pool::drain_remote`] and look again.
    pub fn await_remote(&mut self) -> bool {
        self.home.await_remote()
    }

    /// Whether mbufs that were freed away from home wait to be drained.
    #[inline]
    pub fn has_remote(&self) -> bool {
        self.home.has_remote()
    }

    /// What the pool has done and holds.
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            slab_bytes: self.home.slabs() * SLAB_BYTES,
            used_bytes: self.used,
            mbufs_out: self.home.out(),
            descriptors: self.home.descs(),
            ..self.stats
        }
    }

    /// Mbufs that are not home: held somewhere, or dropped elsewhere and not yet drained.
    pub fn outstanding(&self) -> usize {
        self.home.out()
    }

    /// Bytes of storage that `p` could still take.
    #[inline]
    pub fn available(&self, p: Purpose) -> usize {
        let share = self.limits[p as usize] - self.used[p as usize];
        share.min(self.budget - self.used_total)
    }

    /// The share of `p` as it stands. To receive, a share is as full as the fuller of its bytes and the
    /// pool's descriptors, which tiny packets use up first.
    #[inline]
    pub fn share_of(&self, p: Purpose) -> FairShare {
        let (limit, used) = (self.limits[p as usize], self.used[p as usize]);
        let by_descs = match p {
            Purpose::Receive => self.home.out() * (limit / self.desc_limits[p as usize]),
            Purpose::Send | Purpose::Control => 0,
        };
        FairShare { limit, used: used.max(by_descs).min(limit) }
    }

    /// Whether so much of the share of `p` is in use that those who take from it have to share.
    #[inline]
    pub fn is_contended(&self, p: Purpose) -> bool {
        self.share_of(p).is_contended()
    }

    /// Whether more than half is left of the bytes and of the descriptors that only
    /// [`Purpose::Control`] may use. Packets that arrived there may stay only then.
    pub fn has_reserve(&self) -> bool {
        let [_, others, all] = self.desc_limits;
        self.budget - self.used_total > self.reserve / 2 && self.home.out() < others.midpoint(all)
    }

    /// Whether a mbuf belongs to this pool.
    #[inline]
    pub fn owns(&self, m: &Mbuf) -> bool {
        self.home.owns(m)
    }
}

// Taking blocks.
impl Pool {
    /// Whether the accounts allow `p` one more descriptor and block.
    #[inline]
    fn admits(&self, bytes: usize, p: Purpose) -> bool {
        bytes <= self.available(p) && self.home.out() < self.desc_limits[p as usize]
    }

    #[inline]
    fn charge(&mut self, bytes: usize, p: Purpose) {
        self.used[p as usize] += bytes;
        self.used_total += bytes;
        self.stats.allocs += 1;
    }

    /// A mbuf that is ready-made.
    #[inline(always)]
    fn take(&mut self, class: usize, p: Purpose) -> Option<Mbuf> {
        let bytes = CLASS_BYTES[class];
        if !self.admits(bytes, p) {
            return None;
        }
        let mut m = self.home.take(class, p)?;
        if self.keeps_sums && p == Purpose::Send {
            self.home.keep_sums(&mut m);
        }
        self.charge(bytes, p);
        self.stats.fast_allocs += 1;
        Some(m)
    }

    /// Drains, grows or cuts anew for a block of this class, or takes a larger one.
    #[cold]
    fn take_slow(&mut self, class: usize, p: Purpose) -> Result<Mbuf, NoBuffer> {
        self.prepare(CLASS_BYTES[class], p)?;
        if let Some(m) = self.take_grown(class, p) {
            return Ok(m);
        }
        self.take_other(class + 1..CLASSES, p)
    }

    /// As `take_slow`, but smaller blocks (larger than `headroom`) will do as well.
    #[cold]
    fn take_any(&mut self, class: usize, headroom: usize, p: Purpose) -> Result<Mbuf, NoBuffer> {
        let smallest = class_for(headroom + 1).unwrap_or(CLASSES - 1).min(class);
        self.prepare(CLASS_BYTES[class], p)?;
        if let Some(m) = self.take_grown(class, p) {
            return Ok(m);
        }
        self.take_other((smallest..class).rev().chain(class + 1..CLASSES), p)
    }

    /// A block that came home late, of the general lists, or of a new slab.
    fn take_grown(&mut self, class: usize, p: Purpose) -> Option<Mbuf> {
        if let Some(m) = self.take(class, p).or_else(|| self.take_listed(class, p)) {
            return Some(m);
        }
        if !self.grow(class) {
            return None;
        }
        self.take_listed(class, p)
    }

    /// A block of the general lists, which bring a batch.
    fn take_listed(&mut self, class: usize, p: Purpose) -> Option<Mbuf> {
        if self.home.fill(class) == 0 {
            return None;
        }
        self.stats.refills += 1;
        let m = self.take(class, p)?;
        self.stats.slow_allocs += 1;
        self.stats.fast_allocs -= 1;
        Some(m)
    }

    fn take_other(
        &mut self,
        mut classes: impl Iterator<Item = usize>,
        p: Purpose,
    ) -> Result<Mbuf, NoBuffer> {
        let found =
            classes.find_map(|class| self.take(class, p).or_else(|| self.take_listed(class, p)));
        match found {
            Some(_) => self.stats.class_fallbacks += 1,
            None => {
                self.stats.failed_block += 1;
                self.stats.empty_allocs += 1;
            }
        }
        found.ok_or(NoBuffer)
    }

    /// One more slab for a class, or one cut anew.
    fn grow(&mut self, class: usize) -> bool {
        if self.home.slabs() < self.max_slabs && self.home.add_slab(class, self.huge_pages) {
            return true;
        }
        let recut = self.home.recut_slab(class);
        self.stats.slabs_recut += u64::from(recut);
        recut
    }

    /// Makes sure that the accounts allow the block and that a descriptor is at hand.
    #[cold]
    fn prepare(&mut self, bytes: usize, p: Purpose) -> Result<(), NoBuffer> {
        self.drain_remote();
        if bytes > self.available(p) {
            self.stats.failed_budget += 1;
            self.stats.empty_allocs += 1;
            return Err(NoBuffer);
        }
        if !self.refill_descs(p) {
            self.stats.failed_descriptor += 1;
            self.stats.empty_allocs += 1;
            return Err(NoBuffer);
        }
        Ok(())
    }

    /// Makes sure that `p` may have a descriptor and that one is at hand.
    #[cold]
    fn refill_descs(&mut self, p: Purpose) -> bool {
        if !self.home.has_desc() {
            self.drain_remote();
        }
        if self.home.out() >= self.desc_limits[p as usize] {
            self.drain_remote();
        }
        if self.home.out() >= self.desc_limits[p as usize] {
            return false;
        }
        if !self.home.has_desc() {
            self.more_descs();
        }
        true
    }

    /// Descriptors of mbufs that wait, if there may be no further ones; else new ones.
    fn more_descs(&mut self) {
        let most = self.desc_limits[Purpose::Control as usize];
        if self.home.descs() < most || !self.home.spill() {
            self.home.add_descs();
        }
    }
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Pool").field(&self.stats()).finish()
    }
}

#[cfg(test)]
mod tests;
