//! Drains all stacks at the end of the process: accepted bytes are delivered first.

use std::sync::{Arc, Mutex, Once, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::Duration;

use crate::api::inner::Inner;

/// Attempts to lock the list at exit, which is held for microseconds, and the pause between two.
const LOCK_ATTEMPTS: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(1);

static STACKS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Registers a stack to be drained at exit.
pub(crate) fn register(inner: &Arc<Inner>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| crate::runtime::at_exit(drain_all));
    let mut stacks = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
    stacks.retain(|s| s.strong_count() > 0);
    stacks.push(Arc::downgrade(inner));
}

/// Whether `is_so` holds for a stack of this process.
pub(crate) fn is_any(is_so: impl Fn(&Inner) -> bool) -> bool {
    let stacks: Vec<_> = {
        let all = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    };
    // Without the lock: the last reference to a stack may be dropped here, which drains it.
    stacks.iter().any(|inner| is_so(inner))
}

extern "C" fn drain_all() {
    // Bounded: in a forked child the lock may be held by a thread that does not exist there.
    let attempts = (0..LOCK_ATTEMPTS).map(|_| match STACKS.try_lock() {
        Ok(stacks) => Some(stacks),
        Err(TryLockError::Poisoned(stacks)) => Some(stacks.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    let found = attempts
        .inspect(|s| {
            if s.is_none() {
                thread::sleep(LOCK_PAUSE)
            }
        })
        .find_map(|s| s);
    let Some(mut stacks) = found else { return };
    let stacks = std::mem::take(&mut *stacks);
    for inner in stacks.iter().filter_map(Weak::upgrade) {
        if inner.is_ours() {
            inner.drain();
        }
        // Leaked: other threads may still use it, and the process ends.
        std::mem::forget(inner);
    }
}
