//! System calls that neither std nor nix has in safe form.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use fulmar_stack::device::WakeFd;

/// The descriptor of a device, for the length of one call.
pub(crate) fn with_descriptor<T>(wake: WakeFd, f: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
    // SAFETY: the device says that its descriptor is open as long as the device exists, and the shard, which
    // the caller holds, owns the device.
    f(unsafe { BorrowedFd::borrow_raw(wake.fd) })
}

/// The kernel's TCP_INFO of a socket, as far as it fills `info`.
///
/// # Errors
/// Those of getsockopt.
pub(super) fn tcp_info<'a>(fd: BorrowedFd<'_>, info: &'a mut [u8]) -> io::Result<&'a [u8]> {
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the length of `info`, and the length that it wrote.
    let status = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut length,
        )
    };
    match status {
        0 => Ok(&info[..info.len().min(length as usize)]),
        _ => Err(io::Error::last_os_error()),
    }
}
