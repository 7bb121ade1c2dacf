//! Storage that only the kernel may read: pages of a file, which may change or vanish at any time.
//!
//! Everybody else sees zeroes in its place, so that no code here can fault on a page that is gone. The
//! zeroes are no bytes of anybody and must not be sent: whatever has to read the bytes of a frame
//! refuses such storage. What the kernel did not find is noted in the storage, where whoever holds
//! another reference to it sees it.

#![forbid(unsafe_code)]

use alloc::sync::Arc;
use core::ptr;
use core::sync::atomic::Ordering;

use super::raw::{FOUND, Owner};
use crate::Mbuf;
use crate::storage::{SharedBytes, ZEROES};

impl Mbuf {
    /// Tells the owner of shared bytes that these were not delivered.
    pub(crate) fn note_undelivered(&self, why: u8) {
        let Some(record) = self.record() else { return };
        if let Owner::Shared(owner) = &record.owner {
            owner.on_undelivered(why);
        }
    }

    /// Where the bytes are and how many, for a system call that reads them; not to be read here. The
    /// address is good as long as the mbuf is borrowed; where the kernel alone may read, it may find
    /// nothing there and answer EFAULT (then [`crate::Pool::note_vanished`]).
    #[inline]
    pub fn kernel_part(&self) -> (*const u8, usize) {
        if !self.is_opaque() {
            let bytes = self.as_slice();
            return (bytes.as_ptr(), bytes.len());
        }
        let start = self.record().map_or(ptr::null(), |r| r.address);
        (start.wrapping_add(self.headroom()), self.len())
    }

    /// The first byte of this storage, relative to the range (0 if it lies before), that was in a frame
    /// which the kernel could not send, since it did not find all of it; `None` if there was none.
    #[inline]
    pub fn vanished_at(&self) -> Option<usize> {
        let record = self.record().filter(|_| self.is_kernel_only())?;
        let at = record.vanished.load(Ordering::Relaxed);
        (at != FOUND).then(|| (at as usize).saturating_sub(self.headroom()))
    }

    /// The kernel could not send this range.
    pub(crate) fn mark_vanished(&self) {
        if let Some(record) = self.record().filter(|_| self.is_kernel_only()) {
            record.vanished.fetch_min(self.desc().off, Ordering::Relaxed);
        }
    }
}

/// What an owner has from `at` on: what is seen of it, and where the kernel finds it if that is
/// something else.
pub(super) fn shared_piece(owner: &Arc<dyn SharedBytes>, at: usize) -> (&[u8], Option<*const u8>) {
    match owner.kernel_part(at) {
        Some((address, len)) => (ZEROES.get(..len).unwrap_or(&ZEROES), Some(address)),
        None => (owner.piece(at), None),
    }
}

/// Bytes that [`Home::share`] would take at most.
pub(crate) fn shared_bytes(owner: &Arc<dyn SharedBytes>, at: usize) -> usize {
    shared_piece(owner, at).0.len()
}

#[cfg(test)]
mod tests;
