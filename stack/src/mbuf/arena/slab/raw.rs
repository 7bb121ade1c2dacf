//! Slabs: memory divided into blocks of one class. `raw.rs` of the crate describes the invariants.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use core::ptr::{self, NonNull};

use crate::wire::checksum::UnitSum;

use crate::mbuf::arena::raw::NO_SLAB;
use crate::mbuf::raw::Storage;
use crate::mbuf::storage::{CLASS_BYTES, Purpose, SLAB_BYTES};
use crate::mbuf::sync::AtomicU32;
use crate::mbuf::sys::Region;

/// A region of `SLAB_BYTES` and the records of its blocks.
pub(in crate::mbuf::arena) struct Slab {
    pub(in crate::mbuf::arena) region: Region,
    pub(in crate::mbuf::arena) blocks: *mut [Storage],
    pub(in crate::mbuf::arena) free_list: *mut Storage,
    pub(in crate::mbuf::arena) free: u32,
    pub(in crate::mbuf::arena) total: u32,
    pub(in crate::mbuf::arena) class: u8,
    /// The next slab of this class that has a free block.
    pub(in crate::mbuf::arena) next: u16,
    /// The sums of the slab, one entry per unit, allocated when sums are first kept in it; empty before.
    pub(in crate::mbuf::arena) sums: *mut [Option<UnitSum>],
}

impl Slab {
    pub(in crate::mbuf::arena) fn new(region: Region, class: usize, index: u16) -> Slab {
        let none = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let (free_list, next) = (ptr::null_mut(), NO_SLAB);
        let (free, total) = (0, 0);
        let sums = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let mut slab = Slab { region, blocks: none, free_list, free, total, class: 0, next, sums };
        slab.set_class(class, index);
        slab
    }

    /// Divides the slab into blocks of another class. All its blocks must be free.
    pub(in crate::mbuf::arena) fn set_class(&mut self, class: usize, index: u16) {
        let (bytes, base) = (CLASS_BYTES[class], self.region.base());
        let total = SLAB_BYTES / bytes;
        let record = |i: usize| Storage {
            next_free: ptr::null_mut(),
            data: base.wrapping_add(i * bytes),
            refs: AtomicU32::new(0),
            high_water: 0,
            capacity: bytes as u32,
            slab: index,
            class: class as u8,
            purpose: Purpose::Control,
        };
        self.free_blocks();
        self.blocks = Box::into_raw((0..total).map(record).collect::<Box<[Storage]>>());
        self.free_list = ptr::null_mut();
        for i in (0..total).rev() {
            let s = self.blocks.cast::<Storage>().wrapping_add(i);
            // SAFETY: inside the new records, to which there is no other pointer.
            unsafe { (*s).next_free = self.free_list };
            self.free_list = s;
        }
        (self.free, self.total, self.class) = (total as u32, total as u32, class as u8);
    }

    fn free_blocks(&mut self) {
        let none = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let blocks = core::mem::replace(&mut self.blocks, none);
        // SAFETY: made by `Box::into_raw` in `set_class`, or the empty slice, which needs no memory; no
        // descriptor points to a record (`set_class`: all blocks are free; drop: see `Memory`).
        drop(unsafe { Box::from_raw(blocks) });
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.free_blocks();
        // SAFETY: made by `Box::into_raw` in `keep_sums`, or the empty slice, which needs no memory;
        // no descriptor points to an entry (see `Memory`).
        drop(unsafe { Box::from_raw(self.sums) });
    }
}
