//! What threads share: the atomics of the machine, or those of loom, which tries every order in which threads
//! may see them (`make loom`).

#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicUsize, Ordering};
#[cfg(fulmar_loom)]
pub(crate) use fulmar_models::atomic::{AtomicUsize, Ordering};
