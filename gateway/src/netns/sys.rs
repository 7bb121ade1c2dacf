//! The only unsafe code of this room: three ioctls and four system calls that no kept library offers.
//!
//! Sources: linux/ethtool.h, ioctl_nsfs(2), pidfd_open(2), fcntl(2), open_tree(2), move_mount(2), linux/mount.h.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

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
pub(crate) fn ethtool_set(
    fd: BorrowedFd<'_>,
    name: &CStr,
    command: u32,
    value: u32,
) -> io::Result<()> {
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
pub(crate) fn namespace_type(fd: BorrowedFd<'_>) -> io::Result<CloneFlags> {
    const NS_GET_NSTYPE: u64 = 0xb703;
    // SAFETY: the request takes no argument and writes to no memory.
    match unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE as _) } {
        -1 => Err(io::Error::last_os_error()),
        flags => Ok(CloneFlags::from_bits_truncate(flags)),
    }
}

/// NS_GET_OWNER_UID: the user who made a user namespace, as the caller's own one numbers it.
pub(crate) fn namespace_owner(fd: BorrowedFd<'_>) -> io::Result<u32> {
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

/// A copy of a descriptor of this process by its number, which the caller of the command gives in an option. It is closed
/// when a program is executed.
///
/// # Errors
/// The number is not that of an open descriptor (EBADF), or there are too many (EMFILE).
pub fn copy_descriptor(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call takes three integers and touches no memory.
    match unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO + 1) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just made the descriptor, and nothing else has its number.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// A copy of the mount at a path, of the file or folder that the path leads to, which is not mounted yet. It is gone with
/// the descriptor unless [`move_mount`] mounts it.
///
/// # Errors
/// No CAP_SYS_ADMIN over the mount namespace of the calling thread (EPERM), no such file, a kernel before 5.2 (ENOSYS).
pub(crate) fn clone_mount(path: &Path) -> io::Result<OwnedFd> {
    /// OPEN_TREE_CLONE; OPEN_TREE_CLOEXEC has the value of O_CLOEXEC.
    const FLAGS: libc::c_uint = 1 | libc::O_CLOEXEC as libc::c_uint;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the kernel reads the string, which lives until the call returns, and writes to no memory.
    match unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), FLAGS) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just made the descriptor, and nothing else has its number.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) }),
    }
}

/// Mounts a mount of [`clone_mount`] at a path, in the mount namespace of the calling thread.
///
/// # Errors
/// As [`clone_mount`].
pub(crate) fn move_mount(mount: BorrowedFd<'_>, to: &Path) -> io::Result<()> {
    /// MOVE_MOUNT_F_EMPTY_PATH: the descriptor itself; MOVE_MOUNT_T_SYMLINKS: links of the path are followed.
    const FLAGS: libc::c_uint = 0x4 | 0x10;
    let to = CString::new(to.as_os_str().as_bytes())?;
    let from = mount.as_raw_fd();
    // SAFETY: the kernel reads the two strings, which live until the call returns, and writes to no memory.
    let moved = unsafe {
        libc::syscall(libc::SYS_move_mount, from, c"".as_ptr(), libc::AT_FDCWD, to.as_ptr(), FLAGS)
    };
    if moved == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
