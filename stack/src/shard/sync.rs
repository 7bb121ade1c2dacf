//! Atomics that threads share: the machine's, or loom's, which tries every order in which threads may see them (`make
//! loom`).

#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicUsize, Ordering};
#[cfg(fulmar_loom)]
pub(crate) use fulmar_models::atomic::{AtomicUsize, Ordering};
