//! What threads share: the atomics of the machine, or those of loom, which tries every order in which threads may
//! see them (`make loom`).

#[cfg(not(fulmar_loom))]
pub(crate) use core::sync::atomic::{AtomicIsize, AtomicPtr, AtomicU32, fence};
#[cfg(fulmar_loom)]
pub(crate) use fulmar_models::atomic::{AtomicIsize, AtomicPtr, AtomicU32, fence};
#[cfg(fulmar_loom)]
pub(crate) use fulmar_models::cell::UnsafeCell;

/// As loom has it, which finds those who look while others change.
#[cfg(not(fulmar_loom))]
#[derive(Default)]
pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

#[cfg(not(fulmar_loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        UnsafeCell(core::cell::UnsafeCell::new(value))
    }

    /// Shows the value, which nobody may change meanwhile.
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Shows the value, at which nobody else may look meanwhile.
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
