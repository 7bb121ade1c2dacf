//! Regions of memory for slabs: anonymous mappings with feature `std`, the global allocator
//! otherwise and under the interpreter.
//!
//! A region is initialised (zeroes) from the first byte to the last, aligned to its own size, and
//! belongs to whoever holds the [`Region`].

#![allow(unsafe_code)]

use core::ptr::NonNull;

/// Memory aligned to its length. Freed on drop.
pub(crate) struct Region {
    base: NonNull<u8>,
    bytes: usize,
}

impl Region {
    /// The first byte. Valid for reads and writes of the region's length until it is dropped.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

#[cfg(all(feature = "std", not(miri)))]
impl Region {
    /// Maps `bytes` (a power of two, at least a page) of zeroes at a multiple of `bytes`.
    ///
    /// `MADV_HUGEPAGE` (if `huge`) and `MADV_DONTFORK` are best effort: a kernel without them
    /// costs speed, or a copy in a child that must not use the stack anyway.
    pub(crate) fn map(bytes: usize, huge: bool) -> Option<Region> {
        let padded = bytes.checked_mul(2)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory
        // that exists.
        let raw = unsafe { libc::mmap(core::ptr::null_mut(), padded, access, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return None;
        }
        let front = raw.align_offset(bytes);
        let base = raw.wrapping_byte_add(front);
        let back = padded.checked_sub(front)?.checked_sub(bytes)?;
        // SAFETY: both cuts and the advice lie inside the mapping made above, which nobody else
        // knows; what remains is [base, base + bytes).
        unsafe {
            if front > 0 {
                libc::munmap(raw, front);
            }
            if back > 0 {
                libc::munmap(base.wrapping_byte_add(bytes), back);
            }
            libc::madvise(base, bytes, libc::MADV_DONTFORK);
            if huge {
                libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
            }
        }
        Some(Region { base: NonNull::new(base.cast())?, bytes })
    }
}

#[cfg(all(feature = "std", not(miri)))]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region is one whole mapping, made in `map`; the last holder of anything
        // inside it is gone (`raw.rs`: `Memory` is dropped when no descriptor is out).
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Region {
    /// Allocates `bytes` (a power of two) of zeroes at a multiple of `bytes`.
    pub(crate) fn map(bytes: usize, _huge: bool) -> Option<Region> {
        let layout = core::alloc::Layout::from_size_align(bytes, bytes).ok()?;
        if bytes == 0 {
            return None;
        }
        // SAFETY: the layout has a size other than zero.
        let base = unsafe { alloc::alloc::alloc_zeroed(layout) };
        Some(Region { base: NonNull::new(base)?, bytes })
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `map` with this very layout, which was valid there; the last holder
        // of anything inside it is gone (`raw.rs`: `Memory`).
        unsafe {
            let layout = core::alloc::Layout::from_size_align_unchecked(self.bytes, self.bytes);
            alloc::alloc::dealloc(self.base.as_ptr(), layout);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::SLAB_BYTES;

    #[test]
    fn a_region_is_aligned_zeroed_and_writable() {
        let region = Region::map(SLAB_BYTES, true).expect("memory");
        assert_eq!(region.base().align_offset(SLAB_BYTES), 0);
        // SAFETY: the region is alive and this is its only user.
        let bytes = unsafe { core::slice::from_raw_parts_mut(region.base(), SLAB_BYTES) };
        assert!(bytes.iter().step_by(4096).all(|&b| b == 0));
        bytes[SLAB_BYTES - 1] = 7;
    }
}
