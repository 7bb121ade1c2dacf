//! The owner's side of a pool: what only its shard may touch. The code is in `raw.rs`, because
//! nearly all of it handles raw memory; the policy (budget, shares, fallbacks) is in `pool.rs`.

mod kernel_only;
mod placed;
mod raw;
mod ready;
mod remote {
    mod raw;
}
mod slab {
    pub(super) mod raw;
}
mod volatile;

pub(crate) use kernel_only::shared_bytes;
pub(crate) use raw::{CHUNK_DESCS, Freed, Home, MAX_SLABS, Memory, Owner};
