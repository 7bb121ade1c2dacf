//! Atomics that threads share: the machine's, or loom's, which tries every order in which threads may see them (`make
//! loom`).

#[cfg(fulmar_loom)]
pub(crate) use crate::models::atomic::{AtomicUsize, Ordering};
#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicUsize, Ordering};
