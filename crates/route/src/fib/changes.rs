//! How readers notice that what they read has changed meanwhile, without a lock.

#![forbid(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Counts changes. On a line of its own: it is the one word that every look-up reads and every change
/// writes.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Changes(AtomicU64);

impl Changes {
    /// The count before a look-up. With it comes everything that was stored before it.
    #[inline(always)]
    pub(super) fn before(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Whether nothing has changed since. To be asked after the last load of a look-up: if one of them
    /// saw what was written into memory that a change had freed, the count of that change is seen
    /// here, since it was stored before, with a fence in between.
    #[inline(always)]
    pub(super) fn is_still(&self, before: u64) -> bool {
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == before
    }

    /// To be called before anything is written into memory that was freed: readers may still look at
    /// it.
    pub(super) fn fence(&self) {
        fence(Ordering::Release);
    }

    /// Counts a change: to be called after the one store that readers take its result from, and before
    /// what it frees is used again. A reader looks again only because of this, so that a writer who
    /// stops half way stops nobody.
    pub(super) fn count(&self) {
        let count = self.0.load(Ordering::Relaxed);
        self.0.store(count.wrapping_add(1), Ordering::Release);
    }
}
