//! Atomics and cells from `core`, or from loom, which explores all interleavings (`make loom`).

#[cfg(fulmar_loom)]
pub(crate) use crate::models::atomic::{AtomicIsize, AtomicPtr, AtomicU32, fence};
#[cfg(fulmar_loom)]
pub(crate) use crate::models::cell::UnsafeCell;
#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, fence};

/// The interface of loom's `UnsafeCell`, which detects concurrent access.
#[cfg(not(fulmar_loom))]
#[derive(Default)]
pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

#[cfg(not(fulmar_loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        UnsafeCell(core::cell::UnsafeCell::new(value))
    }

    /// Passes a pointer for reading.
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Passes a pointer for writing.
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
