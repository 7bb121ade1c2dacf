//! Counts the heap's allocations, so that "no allocation per packet" is a figure and not a hope.
//! A program that wants the count makes [`Counting`] its global allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counting.
pub struct Counting;

/// Allocations and growths since the program began; 0 for ever if [`Counting`] is not in use.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Bytes that are allocated now.
pub fn bytes() -> u64 {
    BYTES.load(Ordering::Relaxed)
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract;
// counting touches no memory of the caller's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add((new_size as u64).wrapping_sub(layout.size() as u64), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `realloc`, which is the same.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
