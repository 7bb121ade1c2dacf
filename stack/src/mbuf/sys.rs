//! Memory regions for slabs and receive buffers: anonymous mappings with feature `std`, the global
//! allocator otherwise and under Miri.
//!
//! A region is zeroed, aligned to its size, and owned by its [`Region`].

#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::any::Any;
use core::ptr::NonNull;

use crate::mbuf::storage::SLAB_BYTES;

/// The pages of a slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageSize {
    /// The base page size of the system.
    Base,
    /// Huge pages, as far as they are available.
    Huge,
}

/// Memory mapped by the caller from which a pool takes its slabs: a region shared with another process. When
/// it is used up, the pool maps slabs of its own.
pub struct Backing {
    next: NonNull<u8>,
    /// Bytes from `next` on, a multiple of [`SLAB_BYTES`].
    left: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

impl core::fmt::Debug for Backing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Backing").field("left", &self.left).finish_non_exhaustive()
    }
}

// SAFETY: the memory may be used from any thread, by one at a time, by the contract of `new`.
unsafe impl Send for Backing {}

impl Backing {
    /// Provides [base, base + bytes), rounded down to whole slabs.
    ///
    /// # Safety
    /// The memory is initialised, readable and writable from any thread until `keep` is dropped. No other
    /// code of this process accesses it, and no other process writes it.
    ///
    /// # Panics
    /// If `base` is not a multiple of [`SLAB_BYTES`].
    pub unsafe fn new(
        base: NonNull<u8>,
        bytes: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Backing {
        assert!(
            base.as_ptr().addr().is_multiple_of(SLAB_BYTES),
            "a backing must be aligned to slabs"
        );
        Backing { next: base, left: bytes - bytes % SLAB_BYTES, keep }
    }

    /// The next slab, zeroed.
    pub(crate) fn slab(&mut self, pages: PageSize) -> Option<Region> {
        if self.left == 0 {
            return None;
        }
        let base = self.next;
        self.left -= SLAB_BYTES;
        // SAFETY: inside the memory, or one past its end, as `left` says.
        self.next = unsafe { base.add(SLAB_BYTES) };
        if pages == PageSize::Huge {
            collapse(base);
        }
        Some(Region { base, bytes: SLAB_BYTES, keep: Some(Arc::clone(&self.keep)) })
    }
}

/// Populates a slab and collapses it into a huge page: the only way for memory files if `shmem_enabled` is
/// `never`. Best effort.
#[cfg(all(feature = "std", not(miri)))]
fn collapse(slab: NonNull<u8>) {
    // Since Linux 6.1; not defined by libc for every target.
    const MADV_COLLAPSE: libc::c_int = 25;
    let base = slab.as_ptr().cast();
    // SAFETY: the slab is mapped and used by this pool only (see `Backing::new`); neither advice changes
    // its bytes.
    unsafe {
        if libc::madvise(base, SLAB_BYTES, libc::MADV_POPULATE_WRITE) == 0 {
            libc::madvise(base, SLAB_BYTES, MADV_COLLAPSE);
        }
    }
}

#[cfg(any(not(feature = "std"), miri))]
fn collapse(_slab: NonNull<u8>) {}

/// Memory aligned to its size. Freed on drop, unless it is part of a [`Backing`].
pub(crate) struct Region {
    base: NonNull<u8>,
    bytes: usize,
    /// The owner of the memory, if it is part of a [`Backing`].
    keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl Region {
    /// The first byte. The region is readable and writable until it is dropped.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

#[cfg(all(feature = "std", not(miri)))]
impl Region {
    /// Maps `bytes` (a power of two, at least a page) of zeroes, aligned to `bytes`.
    ///
    /// `MADV_HUGEPAGE` and `MADV_DONTFORK` are best effort: without them the memory is slower, or a child
    /// process, which must not use the stack, has a copy.
    pub(crate) fn map(bytes: usize, pages: PageSize) -> Option<Region> {
        let padded = bytes.checked_mul(2)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address chosen by the kernel.
        let raw = unsafe { libc::mmap(core::ptr::null_mut(), padded, access, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return None;
        }
        let front = raw.align_offset(bytes);
        let base = raw.wrapping_byte_add(front);
        let back = padded.checked_sub(front)?.checked_sub(bytes)?;
        // SAFETY: the unmapped ends and the advice are inside the new mapping, to which there is no other
        // pointer; [base, base + bytes) remains.
        unsafe {
            if front > 0 {
                libc::munmap(raw, front);
            }
            if back > 0 {
                libc::munmap(base.wrapping_byte_add(bytes), back);
            }
            libc::madvise(base, bytes, libc::MADV_DONTFORK);
            if pages == PageSize::Huge {
                libc::madvise(base, bytes, libc::MADV_HUGEPAGE);
            }
        }
        Some(Region { base: NonNull::new(base.cast())?, bytes, keep: None })
    }
}

#[cfg(all(feature = "std", not(miri)))]
impl Drop for Region {
    fn drop(&mut self) {
        if self.keep.is_some() {
            return;
        }
        // SAFETY: the region is one mapping, made in `map`; no reference into it is left (`raw.rs`: `Memory`
        // is dropped when no descriptor is in use).
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Region {
    /// Allocates `bytes` (a power of two) of zeroes, aligned to `bytes`.
    pub(crate) fn map(bytes: usize, _pages: PageSize) -> Option<Region> {
        let layout = core::alloc::Layout::from_size_align(bytes, bytes).ok()?;
        if bytes == 0 {
            return None;
        }
        // SAFETY: the layout has a size other than zero.
        let base = unsafe { alloc::alloc::alloc_zeroed(layout) };
        Some(Region { base: NonNull::new(base)?, bytes, keep: None })
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Drop for Region {
    fn drop(&mut self) {
        if self.keep.is_some() {
            return;
        }
        // SAFETY: allocated in `map` with the same layout; no reference into it is left (`raw.rs`:
        // `Memory`).
        unsafe {
            let layout = core::alloc::Layout::from_size_align_unchecked(self.bytes, self.bytes);
            alloc::alloc::dealloc(self.base.as_ptr(), layout);
        }
    }
}

/// Zeroed, page-aligned memory of any length. Freed on drop.
pub(crate) struct Pages {
    base: NonNull<u8>,
    bytes: usize,
}

/// The alignment of [`Pages`]; the pages of the system may be larger.
const PAGE_BYTES: usize = 4096;

/// The smallest mapping for which huge pages are requested.
#[cfg(all(feature = "std", not(miri)))]
const HUGE_BYTES: usize = 2 << 20;

impl Pages {
    /// The first byte. The pages are readable and writable until they are dropped.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn none() -> Pages {
        let base = core::ptr::without_provenance_mut(PAGE_BYTES);
        Pages { base: NonNull::new(base).unwrap_or(NonNull::dangling()), bytes: 0 }
    }
}

#[cfg(all(feature = "std", not(miri)))]
impl Pages {
    /// Maps pages, which use memory when they are first touched.
    pub(crate) fn map(bytes: usize) -> Option<Pages> {
        if bytes == 0 {
            return Some(Pages::none());
        }
        if bytes > isize::MAX as usize {
            return None;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address chosen by the kernel; the advice does not change
        // its bytes.
        let raw = unsafe {
            let raw = libc::mmap(core::ptr::null_mut(), bytes, access, flags, -1, 0);
            if raw == libc::MAP_FAILED {
                return None;
            }
            if bytes >= HUGE_BYTES {
                libc::madvise(raw, bytes, libc::MADV_HUGEPAGE);
            }
            raw
        };
        Some(Pages { base: NonNull::new(raw.cast())?, bytes })
    }
}

#[cfg(all(feature = "std", not(miri)))]
impl Drop for Pages {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: one mapping, made in `map`; its owner is being dropped.
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        }
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Pages {
    /// Allocates pages.
    pub(crate) fn map(bytes: usize) -> Option<Pages> {
        let layout = core::alloc::Layout::from_size_align(bytes, PAGE_BYTES).ok()?;
        if bytes == 0 {
            return Some(Pages::none());
        }
        // SAFETY: the layout has a size other than zero.
        let base = unsafe { alloc::alloc::alloc_zeroed(layout) };
        Some(Pages { base: NonNull::new(base)?, bytes })
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Drop for Pages {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated in `map` with the same layout.
            unsafe {
                let layout = core::alloc::Layout::from_size_align_unchecked(self.bytes, PAGE_BYTES);
                alloc::alloc::dealloc(self.base.as_ptr(), layout);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_aligned_zeroed_and_writable() {
        let region = Region::map(SLAB_BYTES, PageSize::Huge).expect("memory");
        assert_eq!(region.base().align_offset(SLAB_BYTES), 0);
        // SAFETY: the region is alive and this is its only user.
        let bytes = unsafe { core::slice::from_raw_parts_mut(region.base(), SLAB_BYTES) };
        assert!(bytes.iter().step_by(4096).all(|&b| b == 0));
        bytes[SLAB_BYTES - 1] = 7;
    }

    #[test]
    fn a_backing_provides_whole_slabs_and_its_memory_outlives_it() {
        let region = Region::map(4 * SLAB_BYTES, PageSize::Base).expect("memory");
        let base = NonNull::new(region.base()).expect("mapped");
        struct Keep(#[allow(dead_code)] Region);
        // SAFETY: the region is used by one thread at a time.
        unsafe impl Send for Keep {}
        // SAFETY: as above.
        unsafe impl Sync for Keep {}
        let keep: Arc<Keep> = Arc::new(Keep(region));
        // SAFETY: the region is kept by `keep` and used through the backing only.
        let mut backing =
            unsafe { Backing::new(base, 3 * SLAB_BYTES + 5, Arc::clone(&keep) as Arc<_>) };
        let slabs: alloc::vec::Vec<Region> =
            core::iter::from_fn(|| backing.slab(PageSize::Huge)).collect();
        assert_eq!((slabs.len(), backing.left), (3, 0));
        drop(backing);
        // SAFETY: the slab is alive and this is its only user.
        unsafe { slabs[2].base().add(SLAB_BYTES - 1).write(9) };
        assert_eq!(Arc::strong_count(&keep), 4);
        drop(slabs);
        assert_eq!(Arc::strong_count(&keep), 1);
    }
}
