//! Storage that only the kernel may read: mapped pages of a file, which may change or vanish at any time.
//!
//! [`Mbuf::as_slice`] returns zeroes for it, so that no code of this process can fault on a page that is
//! gone. The zeroes must not be sent: code that has to read the bytes of a frame refuses such storage. If
//! the kernel fails with EFAULT, the offset is recorded in the storage, where all its references see it.

#![forbid(unsafe_code)]

use alloc::sync::Arc;
use core::ptr;
use core::sync::atomic::Ordering;

use super::raw::{NO_FAULT, Owner};
use crate::mbuf::Mbuf;
use crate::mbuf::storage::{SharedBytes, ZEROES};

impl Mbuf {
    /// Notifies the owner of shared bytes that this range was not delivered.
    pub(crate) fn note_undelivered(&self, why: u8) {
        let Some(record) = self.record() else { return };
        if let Owner::Shared(owner) = &record.owner {
            owner.on_undelivered(why);
        }
    }

    /// The address and the length of the range, for a system call that reads it; it must not be
    /// dereferenced. It is valid while the mbuf is borrowed. If only the kernel may read the bytes, the call
    /// may fail with EFAULT, to be reported by [`crate::mbuf::Pool::note_fault`].
    #[inline]
    pub fn kernel_part(&self) -> (*const u8, usize) {
        if !self.is_opaque() {
            let bytes = self.as_slice();
            return (bytes.as_ptr(), bytes.len());
        }
        let start = self.record().map_or(ptr::null(), |r| r.address);
        (start.wrapping_add(self.headroom()), self.len())
    }

    /// The smallest offset in this range of a frame that failed with EFAULT (0 if that frame began before
    /// the range). `None` if there was none.
    #[inline]
    pub fn faulted_at(&self) -> Option<usize> {
        let record = self.record().filter(|_| self.is_kernel_only())?;
        let at = record.fault_offset.load(Ordering::Relaxed);
        (at != NO_FAULT).then(|| (at as usize).saturating_sub(self.headroom()))
    }

    /// Records that sending this range failed with EFAULT.
    pub(crate) fn mark_fault(&self) {
        if let Some(record) = self.record().filter(|_| self.is_kernel_only()) {
            record.fault_offset.fetch_min(self.desc().off, Ordering::Relaxed);
        }
    }
}

/// The contiguous bytes of an owner at `at`: those returned by [`Mbuf::as_slice`], and the address of the
/// bytes if only the kernel may read them.
pub(super) fn shared_piece(owner: &Arc<dyn SharedBytes>, at: usize) -> (&[u8], Option<*const u8>) {
    match owner.kernel_part(at) {
        Some((address, len)) => (ZEROES.get(..len).unwrap_or(&ZEROES), Some(address)),
        None => (owner.piece(at), None),
    }
}

/// Bytes that [`Arena::share`] would take at most.
pub(crate) fn shared_bytes(owner: &Arc<dyn SharedBytes>, at: usize) -> usize {
    shared_piece(owner, at).0.len()
}

#[cfg(test)]
mod tests;
