//! The end of the process: what was accepted before it is delivered.

use std::sync::{Arc, Mutex, Once, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::Duration;

use crate::inner::Inner;

/// How often the list is looked for at the end, and how long apart: it is held for microseconds.
const MOMENTS: u32 = 100;
const MOMENT: Duration = Duration::from_millis(1);

static STACKS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Remembers a stack until the process ends.
pub(crate) fn register(inner: &Arc<Inner>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| fulmar_runtime::at_exit(drain_all));
    let mut stacks = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
    stacks.retain(|s| s.strong_count() > 0);
    stacks.push(Arc::downgrade(inner));
}

/// Whether something is so of a running stack of this process.
pub(crate) fn is_any(is_so: impl Fn(&Inner) -> bool) -> bool {
    let stacks: Vec<_> = {
        let all = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    };
    // Outside of the lock: the last reference to a stack may go here, and drains it.
    stacks.iter().any(|inner| is_so(inner))
}

extern "C" fn drain_all() {
    // Not for ever: in a forked child a thread that does not exist there may hold the lock.
    let attempts = (0..MOMENTS).map(|_| match STACKS.try_lock() {
        Ok(stacks) => Some(stacks),
        Err(TryLockError::Poisoned(stacks)) => Some(stacks.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    let found = attempts
        .inspect(|s| {
            if s.is_none() {
                thread::sleep(MOMENT)
            }
        })
        .find_map(|s| s);
    let Some(mut stacks) = found else { return };
    let stacks = std::mem::take(&mut *stacks);
    for inner in stacks.iter().filter_map(Weak::upgrade) {
        if inner.is_ours() {
            inner.drain();
        }
        // Other threads may still use it: the end of the process frees it.
        std::mem::forget(inner);
    }
}
