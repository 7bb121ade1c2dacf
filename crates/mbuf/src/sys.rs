//! Regions of memory for slabs: anonymous mappings with feature `std`, the global allocator
//! otherwise and under the interpreter.
//!
//! A region is initialised (zeroes) from the first byte to the last, aligned to its own size, and
//! belongs to whoever holds the [`Region`].

#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::any::Any;
use core::ptr::NonNull;

use crate::storage::SLAB_BYTES;

/// Memory that somebody else has mapped, for a pool to cut its slabs from: a region that another
/// process reads. A pool takes slabs of its own when this is used up.
pub struct Backing {
    next: NonNull<u8>,
    /// Bytes from `next` on, a multiple of [`SLAB_BYTES`].
    left: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory may be used from any thread, by one at a time, as `new` was promised.
unsafe impl Send for Backing {}

impl Backing {
    /// Offers [base, base + bytes), rounded down to whole slabs.
    ///
    /// # Safety
    /// The memory is initialised, readable and writable from any thread, and stays so until `keep`
    /// is dropped; nothing else in this process touches it, and nobody else writes it.
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
            "slabs lie at multiples of their size"
        );
        Backing { next: base, left: bytes - bytes % SLAB_BYTES, keep }
    }

    /// Bytes that no pool has taken yet.
    pub fn left_bytes(&self) -> usize {
        self.left
    }

    /// The next slab, zeroed, in huge pages if they are wanted and can be had.
    pub(crate) fn slab(&mut self, huge: bool) -> Option<Region> {
        if self.left == 0 {
            return None;
        }
        let base = self.next;
        self.left -= SLAB_BYTES;
        // SAFETY: inside the memory, or one past its end, as `left` says.
        self.next = unsafe { base.add(SLAB_BYTES) };
        if huge {
            collapse(base);
        }
        Some(Region { base, bytes: SLAB_BYTES, keep: Some(Arc::clone(&self.keep)) })
    }
}

/// Touches a slab and asks for one huge page in place of its small ones: memory files get them in
/// no other way where `shmem_enabled` is `never`. Best effort: without it the slab is slower.
#[cfg(all(feature = "std", not(miri)))]
fn collapse(slab: NonNull<u8>) {
    // Linux 6.1; not in libc for every target.
    const MADV_COLLAPSE: libc::c_int = 25;
    let base = slab.as_ptr().cast();
    // SAFETY: the slab is mapped and ours (see `Backing::new`); neither advice changes its bytes.
    unsafe {
        if libc::madvise(base, SLAB_BYTES, libc::MADV_POPULATE_WRITE) == 0 {
            libc::madvise(base, SLAB_BYTES, MADV_COLLAPSE);
        }
    }
}

#[cfg(any(not(feature = "std"), miri))]
fn collapse(_slab: NonNull<u8>) {}

/// Memory aligned to its length. Freed on drop, unless it is part of a [`Backing`].
pub(crate) struct Region {
    base: NonNull<u8>,
    bytes: usize,
    /// What keeps the memory, if it is not the region itself.
    keep: Option<Arc<dyn Any + Send + Sync>>,
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
        Some(Region { base: NonNull::new(base.cast())?, bytes, keep: None })
    }
}

#[cfg(all(feature = "std", not(miri)))]
impl Drop for Region {
    fn drop(&mut self) {
        if self.keep.is_some() {
            return;
        }
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
        Some(Region { base: NonNull::new(base)?, bytes, keep: None })
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Drop for Region {
    fn drop(&mut self) {
        if self.keep.is_some() {
            return;
        }
        // SAFETY: allocated in `map` with this very layout, which was valid there; the last holder
        // of anything inside it is gone (`raw.rs`: `Memory`).
        unsafe {
            let layout = core::alloc::Layout::from_size_align_unchecked(self.bytes, self.bytes);
            alloc::alloc::dealloc(self.base.as_ptr(), layout);
        }
    }
}

/// Zeroed memory at a multiple of a page, of any length. Freed on drop.
pub(crate) struct Pages {
    base: NonNull<u8>,
    bytes: usize,
}

/// The alignment of [`Pages`]; the system's own pages may be larger.
const PAGE_BYTES: usize = 4096;

/// From here on huge pages are worth asking for.
#[cfg(all(feature = "std", not(miri)))]
const HUGE_BYTES: usize = 2 << 20;

impl Pages {
    /// The first byte. Valid for reads and writes of the length until the pages are dropped.
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
    /// Maps them; they take memory when they are first touched.
    pub(crate) fn map(bytes: usize) -> Option<Pages> {
        if bytes == 0 {
            return Some(Pages::none());
        }
        if bytes > isize::MAX as usize {
            return None;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory
        // that exists; the advice does not change its bytes.
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
            // SAFETY: one whole mapping, made in `map`; its holder is going.
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        }
    }
}

#[cfg(any(not(feature = "std"), miri))]
impl Pages {
    /// Allocates them.
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
            // SAFETY: allocated in `map` with this very layout, which was valid there.
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
        let region = Region::map(SLAB_BYTES, true).expect("memory");
        assert_eq!(region.base().align_offset(SLAB_BYTES), 0);
        // SAFETY: the region is alive and this is its only user.
        let bytes = unsafe { core::slice::from_raw_parts_mut(region.base(), SLAB_BYTES) };
        assert!(bytes.iter().step_by(4096).all(|&b| b == 0));
        bytes[SLAB_BYTES - 1] = 7;
    }

    #[test]
    fn a_backing_gives_whole_slabs_until_it_is_used_up_and_its_memory_outlives_it() {
        let region = Region::map(4 * SLAB_BYTES, false).expect("memory");
        let base = NonNull::new(region.base()).expect("mapped");
        struct Keep(#[allow(dead_code)] Region);
        // SAFETY: the test's threads hand the region on and never share it.
        unsafe impl Send for Keep {}
        // SAFETY: as above.
        unsafe impl Sync for Keep {}
        let keep: Arc<Keep> = Arc::new(Keep(region));
        // SAFETY: the region is kept by `keep` and used through the backing only.
        let mut backing =
            unsafe { Backing::new(base, 3 * SLAB_BYTES + 5, Arc::clone(&keep) as Arc<_>) };
        let slabs: alloc::vec::Vec<Region> = core::iter::from_fn(|| backing.slab(true)).collect();
        assert_eq!((slabs.len(), backing.left_bytes()), (3, 0));
        drop(backing);
        // SAFETY: the slab is alive and this is its only user.
        unsafe { slabs[2].base().add(SLAB_BYTES - 1).write(9) };
        assert_eq!(Arc::strong_count(&keep), 4);
        drop(slabs);
        assert_eq!(Arc::strong_count(&keep), 1);
    }
}
