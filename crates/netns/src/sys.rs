//! The only file of this room with unsafe code: thin, safe wrappers over the system calls that std
//! does not offer. Descriptors enter and leave as `OwnedFd`/`BorrowedFd`, so nothing here can leak or
//! close twice.
//!
//! Facts: netlink(7), user_namespaces(7), linux/ethtool.h.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

fn check(r: libc::c_int) -> io::Result<libc::c_int> {
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r) }
}

/// Opens a socket, close-on-exec.
pub fn socket(domain: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the new descriptor is owned by nobody else until it is wrapped here.
    unsafe {
        let fd = check(libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The index of an interface in the calling thread's network namespace.
pub fn if_index(name: &CStr) -> io::Result<u32> {
    // SAFETY: a terminated string that outlives the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        n => Ok(n),
    }
}

/// Copies an interface name into an `ifreq`; the rest is zero.
fn ifreq(name: &CStr) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is integers, arrays of integers and pointers, for which all-zero is a value.
    let mut req: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.to_bytes();
    if bytes.len() >= req.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (to, from) in req.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(req)
}

/// SIOCETHTOOL with one 32-bit value: `command` is an ETHTOOL_S* number of linux/ethtool.h.
pub fn ethtool_set(fd: BorrowedFd<'_>, name: &CStr, command: u32, value: u32) -> io::Result<()> {
    const SIOCETHTOOL: u64 = 0x8946;
    let mut pair = [command, value];
    let mut req = ifreq(name)?;
    req.ifr_ifru.ifru_data = pair.as_mut_ptr().cast();
    // SAFETY: the kernel reads one ifreq and the two words it points to; both are locals.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), SIOCETHTOOL as _, &raw mut req) }).map(drop)
}

/// Leaves namespaces (CLONE_NEW* bits) for fresh ones. CLONE_NEWUSER needs a process of one thread.
pub fn unshare(flags: i32) -> io::Result<()> {
    // SAFETY: no pointers; namespaces are not memory.
    check(unsafe { libc::unshare(flags) }).map(drop)
}

/// Moves the calling thread into the network namespace behind `fd`.
pub fn enter_netns(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::setns(fd.as_raw_fd(), libc::CLONE_NEWNET) }).map(drop)
}

/// Effective user and group id.
pub fn effective_ids() -> (u32, u32) {
    // SAFETY: both calls have no arguments and cannot fail.
    unsafe { (libc::geteuid(), libc::getegid()) }
}
