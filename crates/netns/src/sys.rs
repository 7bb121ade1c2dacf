//! The only unsafe code of this crate: three ioctls and a system call that no kept library offers.
//!
//! Sources: linux/ethtool.h, ioctl_nsfs(2), pidfd_open(2).

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::sched::CloneFlags;

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
    match unsafe { libc::ioctl(fd.as_raw_fd(), SIOCETHTOOL as _, &raw mut req) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// NS_GET_NSTYPE: what kind of namespace a descriptor refers to. ENOTTY for any other file.
pub fn namespace_type(fd: BorrowedFd<'_>) -> io::Result<CloneFlags> {
    const NS_GET_NSTYPE: u64 = 0xb703;
    // SAFETY: the request takes no argument and writes to no memory.
    match unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE as _) } {
        -1 => Err(io::Error::last_os_error()),
        flags => Ok(CloneFlags::from_bits_truncate(flags)),
    }
}

/// NS_GET_OWNER_UID: the user who made a user namespace, as the caller's own one numbers it.
pub fn namespace_owner(fd: BorrowedFd<'_>) -> io::Result<u32> {
    const NS_GET_OWNER_UID: u64 = 0xb704;
    let mut uid: libc::uid_t = 0;
    // SAFETY: the request writes one uid_t, to a local.
    match unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_OWNER_UID as _, &raw mut uid) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(uid),
    }
}

/// A descriptor of a process that becomes readable when the process ends.
///
/// # Errors
/// There is no such process (ESRCH).
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    // SAFETY: the call takes two integers and touches no memory.
    match unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just made the descriptor, and nothing else has its number.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) }),
    }
}
