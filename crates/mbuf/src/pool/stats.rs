//! What a pool counts.

/// What a pool has done and holds. Counts are since the pool was made.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct PoolStats {
    /// The budget.
    pub budget_bytes: usize,
    /// Bytes of slabs mapped.
    pub slab_bytes: usize,
    /// Storage in use, by purpose, in the order of [`crate::Purpose::ALL`].
    pub used_bytes: [usize; 3],
    /// Descriptors out: held by mbufs and chains, or dropped elsewhere and not yet drained.
    pub mbufs_out: usize,
    /// Descriptors that exist.
    pub descriptors: usize,
    /// Blocks taken.
    pub allocs: u64,
    /// References made to storage in use.
    pub clones: u64,
    /// Blocks that came ready-made out of the shard's cache.
    pub fast_allocs: u64,
    /// Blocks for which the cache had nothing: from the general free lists or a new slab.
    pub slow_allocs: u64,
    /// Requests that nothing could serve.
    pub empty_allocs: u64,
    /// Batches of blocks brought into the cache, from the remote-free list or the general lists.
    pub refills: u64,
    /// Slabs cut anew for another class.
    pub slabs_recut: u64,
    /// Blocks taken from a class other than the right one.
    pub class_fallbacks: u64,
    /// Mbufs that were dropped away from home.
    pub remote_frees: u64,
    /// Requests refused because the share or the budget is used up.
    pub failed_budget: u64,
    /// Requests refused because no block was free although the budget allowed one.
    pub failed_block: u64,
    /// Requests refused because no descriptor was left.
    pub failed_descriptor: u64,
}

impl PoolStats {
    /// Adds what another pool of the same stack has done and holds.
    pub fn add(&mut self, other: &PoolStats) {
        let PoolStats { used_bytes, .. } = self;
        used_bytes.iter_mut().zip(other.used_bytes).for_each(|(a, b)| *a += b);
        self.budget_bytes += other.budget_bytes;
        self.slab_bytes += other.slab_bytes;
        self.mbufs_out += other.mbufs_out;
        self.descriptors += other.descriptors;
        self.allocs += other.allocs;
        self.clones += other.clones;
        self.fast_allocs += other.fast_allocs;
        self.slow_allocs += other.slow_allocs;
        self.empty_allocs += other.empty_allocs;
        self.refills += other.refills;
        self.slabs_recut += other.slabs_recut;
        self.class_fallbacks += other.class_fallbacks;
        self.remote_frees += other.remote_frees;
        self.failed_budget += other.failed_budget;
        self.failed_block += other.failed_block;
        self.failed_descriptor += other.failed_descriptor;
    }
}
