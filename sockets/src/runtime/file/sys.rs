//! The system calls on files that std lacks. All unsafe code of this module.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};

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
pub(crate) fn will_need(file: BorrowedFd<'_>, at: u64, bytes: u64) {
    let (Ok(at), Ok(bytes)) = (libc::off64_t::try_from(at), libc::off64_t::try_from(bytes)) else {
        return;
    };
    // SAFETY: no memory is passed.
    unsafe { libc::posix_fadvise64(file.as_raw_fd(), at, bytes, libc::POSIX_FADV_WILLNEED) };
}
