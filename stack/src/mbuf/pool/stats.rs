//! Statistics of a pool.

/// The present use and the event counts of a pool.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct PoolStats {
    /// The budget.
    pub budget_bytes: usize,
    /// Bytes of mapped slabs.
    pub slab_bytes: usize,
    /// Storage in use by purpose, in the order of [`Purpose::ALL`](crate::mbuf::Purpose::ALL).
    pub used_bytes: [usize; 3],
    /// Descriptors in use: of mbufs and chains, or on the remote-free list.
    pub mbufs_in_use: usize,
    /// Descriptors allocated.
    pub descriptors: usize,
    /// Allocations of storage.
    pub allocs: u64,
    /// References made to storage in use.
    pub clones: u64,
    /// Allocations from the magazines.
    pub fast_allocs: u64,
    /// Allocations from the free lists or a new slab, because the magazine was empty.
    pub slow_allocs: u64,
    /// Allocations that failed.
    pub empty_allocs: u64,
    /// Batches loaded into the magazines from the remote-free list or the free lists.
    pub refills: u64,
    /// Slabs reassigned to another class.
    pub slabs_reassigned: u64,
    /// Allocations served by another class than the best fit.
    pub class_fallbacks: u64,
    /// Mbufs freed through the remote-free list.
    pub remote_frees: u64,
    /// Allocations refused because the share or the budget was exhausted.
    pub failed_budget: u64,
    /// Allocations refused because no block was free although the budget allowed one.
    pub failed_block: u64,
    /// Allocations refused because no descriptor was left.
    pub failed_descriptor: u64,
}

impl PoolStats {
    /// Adds the statistics of another pool.
    pub fn add(&mut self, other: &PoolStats) {
        let PoolStats { used_bytes, .. } = self;
        used_bytes.iter_mut().zip(other.used_bytes).for_each(|(a, b)| *a += b);
        self.budget_bytes += other.budget_bytes;
        self.slab_bytes += other.slab_bytes;
        self.mbufs_in_use += other.mbufs_in_use;
        self.descriptors += other.descriptors;
        self.allocs += other.allocs;
        self.clones += other.clones;
        self.fast_allocs += other.fast_allocs;
        self.slow_allocs += other.slow_allocs;
        self.empty_allocs += other.empty_allocs;
        self.refills += other.refills;
        self.slabs_reassigned += other.slabs_reassigned;
        self.class_fallbacks += other.class_fallbacks;
        self.remote_frees += other.remote_frees;
        self.failed_budget += other.failed_budget;
        self.failed_block += other.failed_block;
        self.failed_descriptor += other.failed_descriptor;
    }
}
