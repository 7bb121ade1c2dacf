//! Locks and atomics that threads share: the machine's, or loom's, which tries every order in which threads may see
//! them (`make loom`).

#[cfg(fulmar_loom)]
pub(crate) use fulmar_stack::models::{
    Mutex, MutexGuard,
    atomic::{
        AtomicBool, AtomicI32, AtomicIsize, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        fence,
    },
    channel::{Receiver, SyncSender, TrySendError, sync_channel},
};
#[cfg(not(fulmar_loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{
        AtomicBool, AtomicI32, AtomicIsize, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        fence,
    },
    mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
};

/// A lock whose holder cannot leave it in a bad state, so that poison does not matter.
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// `thread_local!` of either, for values that need no code to be made.
macro_rules! per_thread {
    ($(static $name:ident: $value:ty = const $init:block;)*) => {
        #[cfg(not(fulmar_loom))]
        std::thread_local! { $(static $name: $value = const $init;)* }
        #[cfg(fulmar_loom)]
        fulmar_stack::models::thread_local! { $(static $name: $value = $init;)* }
    };
}
pub(crate) use per_thread;
