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
    let offset = i64::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    // The kernel takes the offset as two longs, the second of which counts on 32 bits only.
    let (low, high) = (offset as libc::c_long, (offset >> 32) as libc::c_long);
    let (count, parts) = (parts.len(), parts.as_mut_ptr());
    // SAFETY: std promises that an IoSliceMut is an iovec; each is exclusive and lives through the
    // call, and `count` is their number, in a long as the kernel takes it. musl has no function for this call.
    let n = unsafe {
        libc::syscall(libc::SYS_preadv2, file.as_raw_fd(), parts, count, low, high, flags)
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
