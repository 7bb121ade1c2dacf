//! Slabs: memory cut into blocks of one class. The words are explained in `raw.rs` of the room.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use core::ptr::{self, NonNull};

use fulmar_wire::checksum::UnitSum;

use crate::home::raw::NO_SLAB;
use crate::raw::Storage;
use crate::storage::{CLASS_BYTES, Purpose, SLAB_BYTES};
use crate::sync::AtomicU32;
use crate::sys::Region;

/// 2 MiB cut into blocks of one class.
pub(in crate::home) struct Slab {
    pub(in crate::home) region: Region,
    pub(in crate::home) blocks: *mut [Storage],
    pub(in crate::home) free_list: *mut Storage,
    pub(in crate::home) free: u32,
    pub(in crate::home) total: u32,
    pub(in crate::home) class: u8,
    /// The next slab of this class that has a free block.
    pub(in crate::home) next: u16,
    /// One entry per unit of the slab, made when sums are first kept in it; empty before.
    pub(in crate::home) sums: *mut [Option<UnitSum>],
}

impl Slab {
    pub(in crate::home) fn cut(region: Region, class: usize, index: u16) -> Slab {
        let none = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let (free_list, next) = (ptr::null_mut(), NO_SLAB);
        let (free, total) = (0, 0);
        let sums = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let mut slab = Slab { region, blocks: none, free_list, free, total, class: 0, next, sums };
        slab.recut(class, index);
        slab
    }

    /// Replaces the block records by those of another class. All blocks are free.
    pub(in crate::home) fn recut(&mut self, class: usize, index: u16) {
        let (bytes, base) = (CLASS_BYTES[class], self.region.base());
        let total = SLAB_BYTES / bytes;
        let record = |i: usize| Storage {
            next_free: ptr::null_mut(),
            data: base.wrapping_add(i * bytes),
            refs: AtomicU32::new(0),
            high_water: 0,
            room: bytes as u32,
            slab: index,
            class: class as u8,
            purpose: Purpose::Control,
        };
        self.free_blocks();
        self.blocks = Box::into_raw((0..total).map(record).collect::<Box<[Storage]>>());
        self.free_list = ptr::null_mut();
        for i in (0..total).rev() {
            let s = self.blocks.cast::<Storage>().wrapping_add(i);
            // SAFETY: inside the records just made, which nobody else knows.
            unsafe { (*s).next_free = self.free_list };
            self.free_list = s;
        }
        (self.free, self.total, self.class) = (total as u32, total as u32, class as u8);
    }

    fn free_blocks(&mut self) {
        let none = ptr::slice_from_raw_parts_mut(NonNull::dangling().as_ptr(), 0);
        let blocks = core::mem::replace(&mut self.blocks, none);
        // SAFETY: made by `Box::into_raw` in `recut`, or the empty slice that needs no memory; no
        // descriptor points to a record (recut: all free; drop: see `Memory`).
        drop(unsafe { Box::from_raw(blocks) });
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.free_blocks();
        // SAFETY: made by `Box::into_raw` in `keep_sums`, or the empty slice that needs no memory;
        // no descriptor points to an entry (see `Memory`).
        drop(unsafe { Box::from_raw(self.sums) });
    }
}
