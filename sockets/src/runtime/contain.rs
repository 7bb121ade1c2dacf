//! Containing panics of code that is not the stack's: destructors and wakers of the program.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code whose panic ends here; `None`: it panicked, and the panic hook has run.
pub(crate) fn contain<R>(f: impl FnOnce() -> R) -> Option<R> {
    // The state that the code leaves is dropped or never used again.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(r) => Some(r),
        // loom reports a deadlock by a panic.
        #[cfg(fulmar_loom)]
        Err(payload) => std::panic::resume_unwind(payload),
        #[cfg(not(fulmar_loom))]
        Err(payload) => {
            // Dropping the payload would run code of the program again.
            std::mem::forget(payload);
            None
        }
    }
}
