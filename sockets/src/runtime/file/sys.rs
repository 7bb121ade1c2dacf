//! The system calls on files that std lacks. All unsafe code of this module.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use super::Patience;

/// Reads at a position into several buffers.
///
/// # Errors
/// The errno of the call: EAGAIN if the first byte is not in the page cache.
pub(crate) fn preadv2(
    file: BorrowedFd<'_>,
    parts: &mut [IoSliceMut<'_>],
    at: u64,
    patience: Patience,
) -> io::Result<usize> {
    let offset = libc::off64_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = libc::c_int::try_from(parts.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (fd, parts) = (file.as_raw_fd(), parts.as_mut_ptr());
    // SAFETY: std promises that an IoSliceMut is an iovec; each is exclusive and lives through the
    // call, and `count` is how many there are.
    let n = unsafe {
        match patience {
            // A call that every kernel has.
            Patience::Wait => libc::preadv64(fd, parts.cast(), count, offset) as libc::c_long,
            Patience::InMemory => preadv2_now(fd, parts.cast(), count, offset),
        }
    };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// preadv2(2) with RWF_NOWAIT, by its number: musl has no function for it.
///
/// # Safety
/// `parts` are `count` buffers that can be written.
unsafe fn preadv2_now(
    fd: RawFd,
    parts: *const libc::iovec,
    count: libc::c_int,
    offset: libc::off64_t,
) -> libc::c_long {
    // The kernel takes longs, and the offset as two of them, the second of which counts on 32 bits only.
    let count = libc::c_long::from(count);
    let (low, high) = (offset as libc::c_long, (offset >> 32) as libc::c_long);
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_preadv2, fd, parts, count, low, high, libc::RWF_NOWAIT) }
}

/// Advises the kernel to read a part of a file into the page cache.
pub(crate) fn will_need(file: BorrowedFd<'_>, at: u64, bytes: u64) {
    let (Ok(at), Ok(bytes)) = (libc::off64_t::try_from(at), libc::off64_t::try_from(bytes)) else {
        return;
    };
    // SAFETY: no memory is passed.
    unsafe { libc::posix_fadvise64(file.as_raw_fd(), at, bytes, libc::POSIX_FADV_WILLNEED) };
}
