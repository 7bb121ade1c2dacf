//! Operations on magazines. `raw.rs` of the crate describes the invariants.

#![allow(unsafe_code)]

use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering;

use super::{batch, capacity};
use crate::mbuf::Mbuf;
use crate::mbuf::arena::Arena;
use crate::mbuf::raw::Desc;
use crate::mbuf::storage::{CLASSES, Purpose};

impl Arena {
    /// An empty mbuf from the magazine of a class. `None` if the magazine is empty.
    #[inline(always)]
    pub(crate) fn get(&mut self, class: usize, purpose: Purpose) -> Option<Mbuf> {
        let d = self.magazines.pop(class)?;
        // SAFETY: a descriptor in a magazine and its block belong to this arena alone.
        unsafe {
            let desc = d.as_ptr();
            (*desc).off = 0;
            (*desc).len = 0;
            (*desc).sums = ptr::null_mut();
            let s = (*desc).storage;
            (*s).purpose = purpose;
            (*s).refs.store(1, Ordering::Release);
        }
        self.in_use += 1;
        // SAFETY: in use from now on, and owned by the caller.
        Some(unsafe { Mbuf::from_raw(d) })
    }

    /// Loads up to a batch of blocks from the free lists into the magazine of a class and returns their
    /// number.
    #[cold]
    pub(crate) fn refill(&mut self, class: usize) -> usize {
        for count in 0..batch(class) {
            let Some(d) = self.free_descs else { return count };
            let Some(s) = self.pop_block(class) else { return count };
            // SAFETY: a free descriptor and a free block belong to this arena alone; from now on the
            // descriptor is bound to the block.
            unsafe {
                let desc = d.as_ptr();
                self.free_descs = (*desc).next;
                (*desc).storage = s;
                (*desc).data = (*s).data;
                (*desc).capacity = (*s).capacity;
                self.put(d, class);
            }
        }
        batch(class)
    }

    /// Puts a descriptor and the block that it points to into the magazine of a class.
    ///
    /// # Safety
    /// Both belong to this arena alone: the descriptor is not in use, and the block has no references.
    #[inline]
    pub(in crate::mbuf::arena) unsafe fn put(&mut self, d: NonNull<Desc>, class: usize) {
        if let Err(d) = self.magazines.push(class, d) {
            // SAFETY: the caller's contract.
            unsafe { self.put_slow(d, class) }
        }
    }

    /// Allocates the magazine, or unloads the older half of a full one, and puts the block.
    ///
    /// # Safety
    /// As for `put`.
    #[cold]
    unsafe fn put_slow(&mut self, d: NonNull<Desc>, class: usize) {
        let mut stack = core::mem::take(&mut self.magazines.stacks[class]);
        stack.reserve_exact(capacity(class) - stack.len());
        let half = stack.len().div_ceil(2);
        for old in stack.drain(..half) {
            // SAFETY: a descriptor in a magazine belongs to this arena alone, and this one was removed.
            unsafe { self.unload(old) }
        }
        stack.push(d);
        self.magazines.stacks[class] = stack;
    }

    /// Puts a descriptor and its block on the free lists.
    ///
    /// # Safety
    /// As for `put`.
    unsafe fn unload(&mut self, d: NonNull<Desc>) {
        // SAFETY: the caller's contract.
        unsafe {
            self.push_block((*d.as_ptr()).storage);
            (*d.as_ptr()).next = self.free_descs;
        }
        self.free_descs = Some(d);
    }

    /// Unloads all magazines to the free lists. False if they were empty.
    #[cold]
    pub(crate) fn flush_magazines(&mut self) -> bool {
        let mut had_any = false;
        for class in 0..CLASSES {
            while let Some(d) = self.magazines.pop(class) {
                // SAFETY: a descriptor in a magazine belongs to this arena alone, and this one was removed.
                unsafe { self.unload(d) }
                had_any = true;
            }
        }
        had_any
    }
}
