//! Code of others that may panic: its panic is not one of the stack.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code whose panic is to end here; `None`: it panicked, and the panic hook has said so.
pub(crate) fn contain<R>(f: impl FnOnce() -> R) -> Option<R> {
    // What the code has left behind is dropped, or not looked at again.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(r) => Some(r),
        // A deadlock, of which loom tells by a panic.
        #[cfg(fulmar_loom)]
        Err(payload) => std::panic::resume_unwind(payload),
        #[cfg(not(fulmar_loom))]
        Err(payload) => {
            // Its drop is code of whoever panicked, too.
            std::mem::forget(payload);
            None
        }
    }
}
