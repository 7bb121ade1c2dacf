//! What packetdrill asks the C library for even if it plays against a shared object, for `LD_PRELOAD` of the same
//! library: TCP_INFO for the assertions of `%{ }%` blocks, sendfile, and three calls that only make it slow or ask
//! for rights (a wait for the clock tick, locked memory, real-time scheduling).
//!
//! In any other process of the script (shells, Python) the calls are the kernel's.

use std::ffi::{c_int, c_long, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::boundary::{current, get_option, guarded};
use crate::calls;
use crate::interface::{Interface, Wait};

/// The interface, if the descriptor is one of its machine.
fn owner_of(fd: c_int) -> Option<Arc<Interface>> {
    current().filter(|i| i.call(Wait::Never, |m| Ok(m.has(fd))) == Ok(true))
}

/// getsockopt(2): of a descriptor of ours, or the kernel's.
///
/// # Safety
/// As of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    buf: *mut c_void,
    length: *mut libc::socklen_t,
) -> c_int {
    match owner_of(fd) {
        Some(interface) => guarded(|| get_option(&interface, fd, (level, name), buf, length)),
        // SAFETY: the arguments are the caller's, unchanged.
        _ => unsafe { libc::syscall(libc::SYS_getsockopt, fd, level, name, buf, length) as c_int },
    }
}

/// Most bytes of a file that one sendfile sends.
const SENDFILE_BYTES: usize = 1 << 20;

/// sendfile(2): to a descriptor of ours, or the kernel's.
///
/// # Safety
/// As of the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut libc::off_t,
    count: usize,
) -> isize {
    let Some(interface) = owner_of(to) else {
        // SAFETY: the arguments are the caller's, unchanged.
        return unsafe { libc::syscall(libc::SYS_sendfile, to, from, offset, count) as isize };
    };
    guarded(|| {
        let mut bytes = vec![0u8; count.min(SENDFILE_BYTES)];
        if offset.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the contract of the system call: `offset` is null or points to an off_t of the caller's.
        let at = unsafe { *offset };
        // SAFETY: `bytes` is writable for its whole length.
        let n = unsafe { libc::pread(from, bytes.as_mut_ptr().cast(), bytes.len(), at) };
        let n = usize::try_from(n).map_err(|_| libc::EBADF)?;
        let sent = calls::send(&interface, to, &bytes[..n], 0)?;
        // SAFETY: as above.
        unsafe { *offset = at + sent as libc::off_t };
        Ok(sent as i64)
    })
}

static TICKS: AtomicI64 = AtomicI64::new(0);

/// times(2): each call is a tick later, since packetdrill waits for ten of them before it plays a script.
///
/// # Safety
/// `at` is null, or points to a `struct tms`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn times(at: *mut libc::tms) -> c_long {
    if at.is_null() && current().is_some() {
        return TICKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the argument is the caller's, unchanged.
    unsafe { libc::syscall(libc::SYS_times, at) }
}

/// mlockall(2): nothing to gain on a virtual clock.
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(_: c_int) -> c_int {
    0
}

/// sched_setscheduler(2): as [`mlockall`].
#[unsafe(no_mangle)]
pub extern "C" fn sched_setscheduler(_: libc::pid_t, _: c_int, _: *const c_void) -> c_int {
    0
}
