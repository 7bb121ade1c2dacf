//! The system calls on files that std lacks. All unsafe code of this module.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use super::Patience;

/// Reads at a position into several buffers.
///
/// # Errors
/// The errno of the call: EAGAIN if the first byte is not in the page cache.
pub fn preadv2(
    file: BorrowedFd<'_>,
    parts: &mut [IoSliceMut<'_>],
    at: u64,
    patience: Patience,
) -> io::Result<usize> {
    let flags = match patience {
        Patience::InMemory => libc::RWF_NOWAIT,
        Patience::Wait => 0,
    };
    let offset = libc::off64_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = libc::c_int::try_from(parts.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: std promises that an IoSliceMut is an iovec; each is exclusive and lives through the
    // call, and `count` is how many there are.
    let n = unsafe {
        libc::preadv64v2(file.as_raw_fd(), parts.as_mut_ptr().cast(), count, offset, flags)
    };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Advises the kernel to read a part of a file into the page cache.
pub fn will_need(file: BorrowedFd<'_>, at: u64, bytes: u64) {
    let (Ok(at), Ok(bytes)) = (libc::off64_t::try_from(at), libc::off64_t::try_from(bytes)) else {
        return;
    };
    // SAFETY: no memory is passed.
    unsafe { libc::posix_fadvise64(file.as_raw_fd(), at, bytes, libc::POSIX_FADV_WILLNEED) };
}

/// A read-only shared mapping of a file. The process does not read through it.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: only the address is used here, and munmap may be called from any thread.
unsafe impl Send for Mapping {}
// SAFETY: nothing of it changes, and the memory is not touched.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps bytes [0, len) of the file, which may end before.
    ///
    /// # Errors
    /// The errno of the call.
    pub fn new(file: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let (null, fd) = (ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let base = unsafe { libc::mmap(null, len, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len })
    }

    /// Bytes of the mapping.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of byte `at`, and how many bytes there are from it to the end of the mapping.
    pub fn part(&self, at: usize) -> (*const u8, usize) {
        let at = at.min(self.len);
        (self.base.as_ptr().wrapping_add(at), self.len - at)
    }

    /// Reads a part into the page cache and sets up its page tables (MADV_POPULATE_READ); waits for the disk.
    ///
    /// # Errors
    /// The file ends before or cannot be read, or the kernel cannot do this (before Linux 5.14).
    pub fn populate(&self, at: usize, len: usize) -> io::Result<()> {
        let (at, left) = self.part(at);
        // SAFETY: a part of the mapping, from a page boundary on, as callers guarantee. The kernel populates the page
        // tables and the process reads nothing: a page that cannot be read is an errno.
        let r =
            unsafe { libc::madvise(at.cast_mut().cast(), len.min(left), libc::MADV_POPULATE_READ) };
        if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping made in `new`. Mbufs that refer to it keep it (`SharedBytes`), so there is none,
        // and its addresses are used by nothing else.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
