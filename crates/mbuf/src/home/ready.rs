//! Mbufs that are ready-made: a descriptor that is joined to a block already, one stack per class.
//!
//! ```text
//!             take ◄──┐            ┌──► park (the last reference has come home)
//!                  ┌──┴────────────┴──┐
//!   ready          │ descriptor+block │ at most `capacity` of a class, last in, first out
//!                  └──▲────────────┬──┘
//!               fill  │  a batch   │  half of it, the coldest, when full
//!   general lists     └── slabs ◄──┘
//! ```
//!
//! A buffer that was received and read is the next to be posted, while its bytes and its records are
//! warm, and nobody looks at slabs. What waits here is charged to nobody and counts as free: the pool
//! spills it to the general lists before it refuses anything for want of blocks or descriptors.

mod raw;

use alloc::vec::Vec;
use core::ptr::NonNull;

use crate::raw::Desc;
use crate::storage::{CLASS_BYTES, CLASSES};

/// Bytes of one class that wait at most: a window of the usual size, four times over.
const READY_BYTES: usize = if cfg!(miri) { 64 << 10 } else { 4 << 20 };
/// Blocks of one class that wait at most.
const READY_BLOCKS: usize = if cfg!(miri) { 16 } else { 1024 };
/// The part of the capacity that is brought from the general lists at once.
const BATCHES: usize = 16;

/// How many mbufs of a class wait at most.
pub(super) const fn capacity(class: usize) -> usize {
    let blocks = READY_BYTES / CLASS_BYTES[class];
    if blocks < READY_BLOCKS { blocks } else { READY_BLOCKS }
}

/// How many are brought from the general lists at once.
const fn batch(class: usize) -> usize {
    capacity(class).div_ceil(BATCHES)
}

/// See the module's header. Each descriptor here is at home, and is the one reference to be of the
/// block that it points to.
#[derive(Default)]
pub(super) struct Ready {
    stacks: [Vec<NonNull<Desc>>; CLASSES],
}

impl Ready {
    #[inline]
    fn pop(&mut self, class: usize) -> Option<NonNull<Desc>> {
        self.stacks.get_mut(class)?.pop()
    }

    /// Puts one on top; gives it back if the stack is full, or has no memory yet.
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

    /// The stack of a class, to be put back; with memory for as many as may wait.
    #[cold]
    fn lift(&mut self, class: usize) -> Vec<NonNull<Desc>> {
        let mut stack = core::mem::take(&mut self.stacks[class]);
        stack.reserve_exact(capacity(class) - stack.len());
        stack
    }

    fn put_back(&mut self, class: usize, stack: Vec<NonNull<Desc>>) {
        self.stacks[class] = stack;
    }
}

#[cfg(test)]
mod tests;
