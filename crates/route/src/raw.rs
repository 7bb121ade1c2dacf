//! Memory that a writer writes while readers read: room for the largest table, of which an operating
//! system gives only what is touched.
//!
//! Invariant: *same shape*: an atomic has the size, alignment and every bit pattern of its integer
//! (documented for all of them; alignment is checked below), and the box is the only owner.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::vec;
use core::sync::atomic::AtomicU64;

const _: () = assert!(align_of::<AtomicU64>() == align_of::<u64>());

/// `count` words, all zero and most of them not there yet.
pub(crate) fn words(count: usize) -> Box<[AtomicU64]> {
    let zeroes = Box::into_raw(vec![0u64; count].into_boxed_slice());
    // SAFETY: *same shape*; the box was taken apart in the line above.
    unsafe { Box::from_raw(zeroes as *mut [AtomicU64]) }
}
