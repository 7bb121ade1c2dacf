//! The end of the process: what was accepted before it is delivered.

use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

use crate::stack::Inner;

static STACKS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Remembers a stack until the process ends.
pub(crate) fn register(inner: &Arc<Inner>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| fulmar_stack::at_exit(drain_all));
    let mut stacks = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
    stacks.retain(|s| s.strong_count() > 0);
    stacks.push(Arc::downgrade(inner));
}

extern "C" fn drain_all() {
    // In a forked child a thread that does not exist there may hold the lock for ever.
    let Ok(mut stacks) = STACKS.try_lock() else { return };
    let stacks = std::mem::take(&mut *stacks);
    for inner in stacks.iter().filter_map(Weak::upgrade) {
        if inner.host.is_ours() {
            inner.drain();
        }
        // Other threads may still use it: the end of the process frees it.
        std::mem::forget(inner);
    }
}
