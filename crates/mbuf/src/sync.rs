//! The atomics that threads share: those of the machine, or those of loom, which tries every order in which
//! threads may see them (`make loom`).

#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, fence};
#[cfg(fulmar_loom)]
pub(crate) use loom::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, fence};
