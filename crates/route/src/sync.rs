//! The count that readers and a writer share: an atomic of the machine, or one of loom, which tries every
//! order in which threads may see it (`make loom`).

#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicU64, fence};
#[cfg(fulmar_loom)]
pub(crate) use fulmar_models::sync::atomic::{AtomicU64, fence};
