//! A mapped file whose pages are read by system calls only, never by the process.
//!
//! ```text
//!   FileMap   │ block │ block │ block │ ...        BLOCK_BYTES each
//!   present   │   1   │   1   │   0   │            in memory when last checked, page tables set up
//!             └ base + at ──► system calls
//! ```
//!
//! A page may change or vanish at any time: the file is truncated, or the disk fails. A load from such a page gets
//! SIGBUS; a system call that reads it returns EFAULT. So the addresses are only passed to the kernel, by
//! [`SharedBytes::kernel_part`]. Every mbuf that refers to the file keeps the mapping. Cost: page tables, once per
//! page. An unmap interrupts the other CPUs on which the process runs (TLB shootdown), so a mapping is kept and reused.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_stack::mbuf::SharedBytes;

use super::Patience;
use super::sys::Mapping;

/// Bytes of one bit of `present`.
const BLOCK_BYTES: u64 = 64 << 10;

/// Shortest mapping. The length is a power of two, so that a growing file rarely needs a new mapping: the part after
/// its end costs addresses only.
const MIN_MAP_BYTES: u64 = 1 << 20;

/// Longest mapping: a small part of the address space of a process (64 TiB and more). Bytes after it are not mapped;
/// they are read and copied.
pub const MAX_MAP_BYTES: u64 = 64 << 30;

/// A read-only shared mapping of the front of a file.
pub struct FileMap {
    mapping: Mapping,
    /// One bit per block.
    present: Box<[AtomicU64]>,
}

impl FileMap {
    /// Maps a file from its start: at least `bytes`, up to [`MAX_MAP_BYTES`].
    ///
    /// # Errors
    /// Those of mmap(2): the file is not open for reading, or cannot be mapped.
    pub fn new(file: BorrowedFd<'_>, bytes: u64) -> io::Result<FileMap> {
        let rounded = bytes.checked_next_power_of_two().unwrap_or(MAX_MAP_BYTES);
        let len = rounded.clamp(MIN_MAP_BYTES, MAX_MAP_BYTES);
        let mapping = Mapping::new(file, usize::try_from(len).unwrap_or(usize::MAX))?;
        let words = len.div_ceil(BLOCK_BYTES).div_ceil(64);
        Ok(FileMap { mapping, present: (0..words).map(|_| AtomicU64::new(0)).collect() })
    }

    /// Bytes of the mapping; the file may end before.
    pub fn bytes(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// How many of the bytes [at, at + len), from the first, are mapped and were in memory when they were last checked.
    /// [`Patience::Wait`] reads them from the disk first; the result is then shorter only if that failed, and a read of
    /// the next byte returns the error. `size`: length of the file, bytes. The kernel may evict pages again; the system
    /// call that sends them then waits.
    pub fn ready(&self, at: u64, len: u64, size: u64, patience: Patience) -> u64 {
        let end = at.saturating_add(len).min(size).min(self.bytes());
        let mut from = at / BLOCK_BYTES * BLOCK_BYTES;
        while from < end && self.is_present(from) {
            from += BLOCK_BYTES;
        }
        if from >= end {
            return end.saturating_sub(at);
        }
        let may_read = patience == Patience::Wait;
        if !may_read || self.mapping.populate(from as usize, (end - from) as usize).is_err() {
            return from.saturating_sub(at);
        }
        while from + BLOCK_BYTES <= end {
            self.note_present(from);
            from += BLOCK_BYTES;
        }
        end - at
    }

    fn is_present(&self, at: u64) -> bool {
        let block = at / BLOCK_BYTES;
        let word = self.present.get((block / 64) as usize);
        word.is_some_and(|w| w.load(Ordering::Relaxed) & (1 << (block % 64)) != 0)
    }

    fn note_present(&self, at: u64) {
        let block = at / BLOCK_BYTES;
        if let Some(word) = self.present.get((block / 64) as usize) {
            word.fetch_or(1 << (block % 64), Ordering::Relaxed);
        }
    }
}

impl SharedBytes for FileMap {
    fn piece(&self, _at: usize) -> &[u8] {
        &[]
    }

    fn kernel_part(&self, at: usize) -> Option<(*const u8, usize)> {
        Some(self.mapping.part(at))
    }

    fn on_undelivered(&self, _why: u8) {}
}
