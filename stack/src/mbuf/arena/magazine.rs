//! Magazines (Bonwick and Adams, *Magazines and Vmem*, 2001): one stack per class of free blocks, each
//! already bound to a descriptor.
//!
//! ```text
//!              get ◄──┐            ┌──◄ put (the last reference was freed)
//!                  ┌──┴────────────▼──┐
//!   magazine       │ descriptor+block │ at most `capacity` per class, last in, first out
//!                  └──▲────────────┬──┘
//!             refill  │  a batch   │  the older half, when full
//!   free lists        └── slabs ◄──┘
//! ```
//!
//! A buffer that was received and read is posted again while its bytes and its records are in the cache,
//! without access to a slab. Blocks in a magazine are free and not charged: the pool flushes the magazines
//! to the free lists before it refuses an allocation for lack of blocks or descriptors.

mod raw;

use alloc::vec::Vec;
use core::ptr::NonNull;

use crate::mbuf::raw::Desc;
use crate::mbuf::storage::{CLASS_BYTES, CLASSES};

/// Maximum bytes of a magazine: four receive windows of the usual size.
const MAGAZINE_BYTES: usize = if cfg!(miri) { 64 << 10 } else { 4 << 20 };
/// Maximum blocks of a magazine.
const MAGAZINE_BLOCKS: usize = if cfg!(miri) { 16 } else { 1024 };
/// Batches that fill a magazine.
const BATCHES_PER_MAGAZINE: usize = 16;

/// Maximum blocks in the magazine of a class.
pub(super) const fn capacity(class: usize) -> usize {
    let blocks = MAGAZINE_BYTES / CLASS_BYTES[class];
    if blocks < MAGAZINE_BLOCKS { blocks } else { MAGAZINE_BLOCKS }
}

/// Blocks loaded from the free lists at once.
const fn batch(class: usize) -> usize {
    capacity(class).div_ceil(BATCHES_PER_MAGAZINE)
}

/// The magazines of all classes. Each descriptor is free and points to a free block.
#[derive(Default)]
pub(super) struct Magazines {
    stacks: [Vec<NonNull<Desc>>; CLASSES],
}

impl Magazines {
    #[inline]
    fn pop(&mut self, class: usize) -> Option<NonNull<Desc>> {
        self.stacks.get_mut(class)?.pop()
    }

    /// Pushes a descriptor. Returns it if the magazine is full or not allocated yet.
    #[inline]
    fn push(&mut self, class: usize, d: NonNull<Desc>) -> Result<(), NonNull<Desc>> {
        match self.stacks.get_mut(class) {
            Some(stack) if stack.len() < stack.capacity() => {
                stack.push(d);
                Ok(())
            }
            _ => Err(d),
        }
    }
}

#[cfg(test)]
mod tests;
