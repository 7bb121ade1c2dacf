//! The only file of this room with unsafe code: thin, safe wrappers over the system calls that std
//! does not offer. Descriptors enter and leave as `OwnedFd`/`BorrowedFd`, so nothing here can leak
//! or close twice; buffers are slices.
//!
//! Facts: packet(7), sched(7), clock_getcpuclockid(3);
//! linux/if_tun.h, linux/if_packet.h.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::time::Duration;

use fulmar_stack::device::{Interest, WakeFd};

fn check(r: libc::c_int) -> io::Result<libc::c_int> {
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r) }
}

/// Opens a socket, close-on-exec.
pub fn socket(domain: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the new descriptor has no other owner until it is wrapped here.
    unsafe {
        let fd = check(libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Sets a socket option to the bytes of `value`.
pub fn setsockopt(fd: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let len = value.len() as libc::socklen_t;
    // SAFETY: pointer and length come from one slice that outlives the call.
    let r = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value.as_ptr().cast(), len) };
    check(r).map(drop)
}

/// Has `close` reset the connection (SO_LINGER of zero), so that neither side keeps it in TIME-WAIT.
pub fn reset_on_close(fd: BorrowedFd<'_>) -> io::Result<()> {
    // struct linger: l_onoff, l_linger.
    let linger = [1_i32, 0].map(i32::to_ne_bytes).concat();
    setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger)
}

/// `send` with MSG_ZEROCOPY: the kernel may read `bytes` until a completion says otherwise.
///
/// Sound whatever the caller does with the bytes meanwhile: the kernel only reads them, and keeps the
/// pages alive by itself.
pub fn send_zerocopy(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_ZEROCOPY | libc::MSG_NOSIGNAL;
    // SAFETY: pointer and length come from one slice; the kernel reads it and pins its pages.
    let n = unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Waits until the socket's error queue has something.
pub fn wait_error_queue(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut p = libc::pollfd { fd: fd.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one pollfd, a local, as the count says.
    check(unsafe { libc::poll(&raw mut p, 1, 1000) }).map(drop)
}

/// The next completion of zerocopy sends: the first and the last send it stands for, and whether the
/// kernel copied their bytes. `None`: there is none now.
pub fn zerocopy_completion(fd: BorrowedFd<'_>) -> io::Result<Option<(u32, u32, bool)>> {
    /// Room for one control message with a sock_extended_err and an address.
    #[repr(align(8))]
    struct Room([u8; 128]);
    let mut room = Room([0; 128]);
    // SAFETY: msghdr is integers and pointers, for which all-zero is a value.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_control = room.0.as_mut_ptr().cast();
    msg.msg_controllen = room.0.len() as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the header points to one local of the length it says, and to nothing else.
    if unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut msg, flags) } < 0 {
        let e = io::Error::last_os_error();
        return if e.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(e) };
    }
    // SAFETY: the kernel has filled `room` and set msg_controllen to what it filled; CMSG_FIRSTHDR
    // answers null unless a whole header lies within it, and the length is checked before the
    // payload, which may be unaligned, is read.
    let err = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const msg);
        let wanted = libc::CMSG_LEN(size_of::<libc::sock_extended_err>() as u32) as usize;
        if header.is_null() || ((*header).cmsg_len as usize) < wanted {
            return Ok(None);
        }
        libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned()
    };
    if err.ee_origin != SO_EE_ORIGIN_ZEROCOPY {
        return Err(io::Error::from_raw_os_error(err.ee_errno as i32));
    }
    let was_copied = u32::from(err.ee_code) & SO_EE_CODE_ZEROCOPY_COPIED != 0;
    Ok(Some((err.ee_info, err.ee_data, was_copied)))
}

/// linux/errqueue.h.
const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
/// linux/errqueue.h.
const SO_EE_CODE_ZEROCOPY_COPIED: u32 = 1;

/// `sendfile` of at most `bytes` from `offset`; returns how many went.
pub fn send_file(
    to: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    offset: u64,
    bytes: usize,
) -> io::Result<usize> {
    let mut offset = offset as libc::off_t;
    // SAFETY: the offset is a local; the descriptors are borrowed for the call.
    let n = unsafe { libc::sendfile(to.as_raw_fd(), file.as_raw_fd(), &raw mut offset, bytes) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Reads a socket option into `value`; returns how many bytes the kernel wrote.
pub fn getsockopt(
    fd: BorrowedFd<'_>,
    level: i32,
    name: i32,
    value: &mut [u8],
) -> io::Result<usize> {
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: pointer and length come from one slice that outlives the call; the kernel writes at
    // most `len` bytes and then puts the number written there.
    let r = unsafe {
        let at = value.as_mut_ptr().cast();
        libc::getsockopt(fd.as_raw_fd(), level, name, at, &raw mut len)
    };
    check(r).map(|_| (len as usize).min(value.len()))
}

/// Sets SO_RCVTIMEO (also what `accept` waits) or SO_SNDTIMEO (also what `connect` waits).
pub fn set_timeout(fd: BorrowedFd<'_>, name: i32, time: Duration) -> io::Result<()> {
    // struct timeval of 64-bit Linux: seconds, microseconds. Zero would mean for ever.
    let us = time.as_micros().clamp(1, i64::MAX as u128) as i64;
    let mut value = [0; 16];
    value[..8].copy_from_slice(&(us / 1_000_000).to_ne_bytes());
    value[8..].copy_from_slice(&(us % 1_000_000).to_ne_bytes());
    setsockopt(fd, libc::SOL_SOCKET, name, &value)
}

/// Has a bound socket listen with another backlog than std's.
pub fn listen(fd: BorrowedFd<'_>, backlog: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::listen(fd.as_raw_fd(), backlog) }).map(drop)
}

/// Binds an AF_PACKET socket to an interface, for frames of this EtherType (ETH_P_ALL: all; 0: it receives
/// none).
pub fn bind_packet(fd: BorrowedFd<'_>, ifindex: u32, ethertype: i32) -> io::Result<()> {
    // SAFETY: sockaddr_ll is plain integers, for which all-zero is a value.
    let mut addr: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as u16;
    addr.sll_protocol = (ethertype as u16).to_be();
    addr.sll_ifindex = ifindex as i32;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is a local of exactly `len` bytes.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) }).map(drop)
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

/// TUNSETIFF: makes or joins the TUN/TAP interface `name` of the calling thread's namespace.
pub fn tun_set_iff(fd: BorrowedFd<'_>, name: &CStr, flags: i16) -> io::Result<()> {
    let mut req = ifreq(name)?;
    req.ifr_ifru.ifru_flags = flags;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which is a local.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &raw mut req) }).map(drop)
}

/// TUNSETVNETHDRSZ: the length in bytes of the virtio-net header before each frame.
pub fn tun_set_vnet_len(fd: BorrowedFd<'_>, bytes: i32) -> io::Result<()> {
    const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
    // SAFETY: this ioctl reads one int through the pointer, which is a local.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ as _, &raw const bytes) }).map(drop)
}

/// TUNSETOFFLOAD: what the kernel may leave to us (TUN_F_* of linux/if_tun.h).
pub fn tun_set_offload(fd: BorrowedFd<'_>, bits: u32) -> io::Result<()> {
    const TUNSETOFFLOAD: u64 = 0x4004_54d0;
    // SAFETY: this ioctl takes its argument by value.
    let r = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD as _, libc::c_ulong::from(bits)) };
    check(r).map(drop)
}

/// Makes the child die with the thread that spawns it, and start in `netns` if one is given.
pub fn die_with_parent(command: &mut Command, netns: Option<RawFd>) {
    let parent = std::process::id() as libc::pid_t;
    let hook = move || {
        // SAFETY: between fork and exec only async-signal-safe calls happen: prctl, getppid and
        // setns are plain system calls; no allocation, no lock. `netns` stays open in the parent
        // until spawn has returned, as the caller of this function promises by borrowing.
        unsafe {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            if libc::getppid() != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            if let Some(fd) = netns {
                check(libc::setns(fd, libc::CLONE_NEWNET))?;
            }
        }
        Ok(())
    };
    // SAFETY: the hook keeps to the rules above.
    unsafe { command.pre_exec(hook) };
}

/// The CPUs on which the calling thread may run, ascending.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    // SAFETY: cpu_set_t is an array of words, for which all-zero is a value; sched_getaffinity
    // writes at most the length it is given.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        check(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set))?;
        set
    };
    let all = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: the index is below CPU_SETSIZE.
    Ok(all.filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

/// Pins the calling thread to one CPU.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: as in `allowed_cpus`; the index is checked above.
    let r = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    check(r).map(drop)
}

/// Puts the calling thread into the class that runs only when nothing else wants the CPU.
pub fn become_idle_class() -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: reads one sched_param, a local.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param) }).map(drop)
}

fn clock(id: libc::clockid_t) -> io::Result<Duration> {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec, a local.
    check(unsafe { libc::clock_gettime(id, &raw mut ts) })?;
    Ok(Duration::new(ts.tv_sec as u64, ts.tv_nsec as u32))
}

/// CPU time of the calling thread, user and system.
pub fn thread_cpu() -> io::Result<Duration> {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU time of a whole process: of this one, or of another by its id.
pub fn process_cpu(pid: Option<u32>) -> io::Result<Duration> {
    let Some(pid) = pid else { return clock(libc::CLOCK_PROCESS_CPUTIME_ID) };
    let mut id: libc::clockid_t = 0;
    // SAFETY: writes one clockid_t, a local. The call returns an error number, not -1.
    match unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut id) } {
        0 => clock(id),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// CPU time of this process in user mode. The kernel divides its exact sum by a sample at each tick,
/// so the division is coarse over less than a second.
pub fn process_user_cpu() -> io::Result<Duration> {
    // SAFETY: rusage is integers, for which all-zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes one rusage, a local.
    check(unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) })?;
    let user = usage.ru_utime;
    Ok(Duration::new(user.tv_sec.max(0) as u64, user.tv_usec.clamp(0, 999_999) as u32 * 1000))
}

/// Times that a thread of this process gave its CPU up of its own will, to wait.
pub fn process_waits() -> io::Result<u64> {
    // SAFETY: rusage is integers, for which all-zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes one rusage, a local.
    check(unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) })?;
    Ok(u64::try_from(usage.ru_nvcsw).unwrap_or(0))
}

/// How often the calling thread has gone to sleep by itself.
pub fn voluntary_switches() -> io::Result<u64> {
    // SAFETY: rusage is integers, for which all-zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes one rusage, a local.
    check(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) })?;
    Ok(usage.ru_nvcsw.max(0) as u64)
}

/// The monotonic clock in nanoseconds, the same in all processes.
pub fn monotonic_ns() -> u64 {
    clock(libc::CLOCK_MONOTONIC).map_or(0, |t| t.as_nanos() as u64)
}

/// Sleeps of the calling thread end when they should, and not up to 50 µs later.
pub fn exact_timers() -> io::Result<()> {
    // SAFETY: no pointers; the option takes a number of nanoseconds.
    check(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong, 0, 0, 0) }).map(drop)
}

/// How many clock ticks /proc/stat counts in a second.
pub fn ticks_per_second() -> u64 {
    // SAFETY: no pointers.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100).max(1)
}

/// Waits until `fd` can be read. False when the time ran out first.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout_ms: i32) -> io::Result<bool> {
    let mut p = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, a local, as the count says.
    Ok(check(unsafe { libc::poll(&raw mut p, 1, timeout_ms) })? > 0)
}

/// Asks a child to end as the interrupt key does, so that it finishes what it writes.
///
/// # Errors
/// The errno of `kill`.
pub fn interrupt(child: &std::process::Child) -> io::Result<()> {
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    // SAFETY: no memory is passed; the child is ours and not yet waited for, so the number is its.
    if unsafe { libc::kill(pid, libc::SIGINT) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Sleeps until one of the devices has frames, for `time` at most.
pub fn sleep_on(devices: &[WakeFd], time: Duration) {
    let mut fds: Vec<libc::pollfd> = devices
        .iter()
        .map(|wake| {
            let events = match wake.interest {
                Interest::Readable => libc::POLLIN,
                Interest::ReadableOrWritable => libc::POLLIN | libc::POLLOUT,
            };
            libc::pollfd { fd: wake.fd, events, revents: 0 }
        })
        .collect();
    let timeout = libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(time.subsec_nanos()),
    };
    // SAFETY: the count is the length of the array, and the time lives until the call returns. An error means that the
    // sleep ended early.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, &timeout, ptr::null()) };
}

/// How much later than asked for the sleeps of this thread may end.
pub fn set_timer_slack(time: Duration) -> io::Result<()> {
    // SAFETY: the call takes a number and refers to no memory.
    match unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, time.as_nanos() as libc::c_ulong) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
