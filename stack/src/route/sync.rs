//! The atomics of the sequence count: of the machine, or of loom, which explores all memory
//! orderings (`make loom`).

#[cfg(fulmar_loom)]
pub(crate) use crate::models::sync::atomic::{AtomicU64, fence};
#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicU64, fence};
