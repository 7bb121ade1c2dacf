//! The memory of a pool: slabs, descriptors, free lists and magazines, accessed by the owning shard only.
//! Nearly all of it handles raw memory and is in `raw.rs`; the policy (budget, shares, fallbacks) is in
//! `pool.rs`.

mod magazine;
mod placed;
mod raw;
mod remote {
    mod raw;
}
mod shared;
mod slab {
    pub(super) mod raw;
}
mod volatile;

pub(crate) use raw::{Arena, CHUNK_DESCS, Freed, MAX_SLABS, Memory, Owner};
