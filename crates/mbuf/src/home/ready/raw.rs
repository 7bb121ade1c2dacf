//! Joining descriptors to blocks, and parting them. The words are explained in `raw.rs` of the room.

#![allow(unsafe_code)]

use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering;

use super::batch;
use crate::Mbuf;
use crate::home::Home;
use crate::raw::Desc;
use crate::storage::{CLASSES, Purpose};

impl Home {
    /// An empty mbuf at the start of a block of this class that is ready; `None` if none is.
    #[inline(always)]
    pub(crate) fn take(&mut self, class: usize, purpose: Purpose) -> Option<Mbuf> {
        let d = self.ready.pop(class)?;
        // SAFETY: what is ready is this home's alone, the block that it points to included.
        unsafe {
            let desc = d.as_ptr();
            (*desc).off = 0;
            (*desc).len = 0;
            (*desc).sums = ptr::null_mut();
            let s = (*desc).storage;
            (*s).purpose = purpose;
            (*s).refs.store(1, Ordering::Release);
        }
        self.out += 1;
        // SAFETY: out from now on, and the caller's.
        Some(unsafe { Mbuf::from_raw(d) })
    }

    /// Joins descriptors to blocks of the general lists, a batch or as many as there are; returns how
    /// many.
    #[cold]
    pub(crate) fn fill(&mut self, class: usize) -> usize {
        for count in 0..batch(class) {
            let Some(d) = self.free_descs else { return count };
            let Some(s) = self.pop_block(class) else { return count };
            // SAFETY: a descriptor on the free list and a block on the list of its slab are this
            // home's alone; from now on the two hang together.
            unsafe {
                let desc = d.as_ptr();
                self.free_descs = (*desc).next;
                (*desc).storage = s;
                (*desc).data = (*s).data;
                (*desc).room = (*s).room;
                self.park(d, class);
            }
        }
        batch(class)
    }

    /// Keeps a descriptor with the block of this class that it points to, for the next who takes one.
    ///
    /// # Safety
    /// Both are this home's alone: the block has no reference, the descriptor is none.
    #[inline]
    pub(in crate::home) unsafe fn park(&mut self, d: NonNull<Desc>, class: usize) {
        if let Err(d) = self.ready.push(class, d) {
            // SAFETY: as the caller says.
            unsafe { self.park_slow(d, class) }
        }
    }

    /// The first of a class, or one too many: the half that has waited longest goes.
    ///
    /// # Safety
    /// As for `park`.
    #[cold]
    unsafe fn park_slow(&mut self, d: NonNull<Desc>, class: usize) {
        let mut stack = self.ready.lift(class);
        let half = stack.len().div_ceil(2);
        for old in stack.drain(..half) {
            // SAFETY: what is ready is this home's alone, and it was just taken off.
            unsafe { self.part(old) }
        }
        stack.push(d);
        self.ready.put_back(class, stack);
    }

    /// Puts a descriptor and its block on the general lists.
    ///
    /// # Safety
    /// As for `park`.
    unsafe fn part(&mut self, d: NonNull<Desc>) {
        // SAFETY: as the caller says.
        unsafe {
            self.push_block((*d.as_ptr()).storage);
            (*d.as_ptr()).next = self.free_descs;
        }
        self.free_descs = Some(d);
    }

    /// Gives everything that is ready to the general lists; answers whether there was anything.
    #[cold]
    pub(crate) fn spill(&mut self) -> bool {
        let mut had_any = false;
        for class in 0..CLASSES {
            while let Some(d) = self.ready.pop(class) {
                // SAFETY: what is ready is this home's alone, and it was just taken off.
                unsafe { self.part(d) }
                had_any = true;
            }
        }
        had_any
    }
}
