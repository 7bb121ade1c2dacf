//! A file in the address space, for the kernel alone: nobody here ever reads through the mapping.
//!
//! ```text
//!   FileMap   │ block │ block │ block │ ...        BLOCK_BYTES each
//!   present   │   1   │   1   │   0   │            met in memory, page tables set up
//!             └ base + at ──► system calls
//! ```
//!
//! A page of it may vanish (the file was cut, or cannot be read) or change at any time. Code that
//! read it would get SIGBUS; a system call that is to read it answers EFAULT instead, and that is
//! the only use: the addresses leave through [`SharedBytes::kernel_part`]. Owns the mapping until it is
//! dropped, which the last mbuf that refers to it delays. Cost: page tables, once per page; releasing it
//! interrupts the other CPUs on which the process runs, so it is to be kept.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_mbuf::SharedBytes;

use super::Patience;
use super::sys::Mapping;

/// Of how much is remembered together whether it was brought into memory.
const BLOCK_BYTES: u64 = 64 << 10;

/// A mapping is at least so long, and a power of two, so that a file that grows rarely needs a new one:
/// what lies behind its end costs addresses only.
const MIN_MAP_BYTES: u64 = 1 << 20;

/// Longest mapping: a small part of the address space of a process (64 TiB and more). What lies behind
/// it is for others to read.
pub const MAX_MAP_BYTES: u64 = 64 << 30;

/// A read-only shared mapping of the front of a file.
pub struct FileMap {
    mapping: Mapping,
    /// One bit per block.
    present: Box<[AtomicU64]>,
}

impl FileMap {
    /// Maps the first `bytes` of a file, and room behind, at most [`MAX_MAP_BYTES`].
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

    /// How many of the bytes [at, at + len) are mapped and were met in memory, from the front.
    /// [`Patience::Wait`] brings them there first, which may take as long as the disk does; fewer then are
    /// those that cannot be brought: others will tell why when they read them. `size` is where the
    /// file ends. (The kernel may take pages away again; the call that sends them then waits.)
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
