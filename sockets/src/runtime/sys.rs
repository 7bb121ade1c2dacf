//! The system calls of waiting: clocks, descriptors, futex, and counters of the thread. All unsafe code of this room
//! but that of `file/sys.rs`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fulmar_stack::base::Instant;
use fulmar_stack::device::{Interest, WakeFd};

/// The monotonic clock.
#[inline]
pub fn now() -> Instant {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec that lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    Instant::from_nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// The monotonic clock at the kernel's last tick, a few milliseconds ago at most (CLOCK_MONOTONIC_COARSE): a memory
/// read, without the cycle counter.
#[inline]
pub(crate) fn coarse_now() -> Instant {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec that lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut t) };
    Instant::from_nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// A counter that runs at a constant rate, the cheapest that the machine has: the cycle counter, or
/// the clock in nanoseconds where there is none.
#[inline]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads a register; every processor of this architecture has it.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    now().as_nanos()
}

/// CPU time of this thread by the kernel, nanoseconds; 0 if it is not available.
pub(crate) fn thread_cpu_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec that lives through the call; it stays zero if that fails.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    (t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64)
}

/// Context switches of this thread, voluntary and involuntary.
pub(crate) fn switches() -> u64 {
    let usage = usage();
    (usage.ru_nivcsw as u64).wrapping_add(usage.ru_nvcsw as u64)
}

/// Resource usage of this thread; zeroes if it is not available.
fn usage() -> libc::rusage {
    // SAFETY: plain numbers, for which zeroes are values.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid rusage that lives through the call; it stays zero if that fails.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage
}

/// Fills `bytes` from the system's generator of random numbers (getrandom(2)), waiting at the start of
/// the machine until it is ready; returns how many it has filled.
///
/// # Errors
/// The errno of the call.
pub(crate) fn random_bytes(bytes: &mut [u8; 32]) -> io::Result<usize> {
    loop {
        // SAFETY: writable bytes are passed with their length.
        let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(filled) {
            Ok(filled) => return Ok(filled),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// A non-blocking eventfd.
///
/// # Errors
/// The errno of the call.
pub(crate) fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes an eventfd readable. A full counter is readable already, so failure does not matter.
pub(crate) fn signal_event(fd: RawFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight readable bytes are passed with their length.
    unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
}

/// Makes an eventfd unreadable.
pub(crate) fn clear_event(fd: RawFd) {
    let mut count = [0u8; 8];
    // SAFETY: eight writable bytes are passed with their length.
    unsafe { libc::read(fd, count.as_mut_ptr().cast(), count.len()) };
}

/// A descriptor of the stack, which its host keeps open.
pub(crate) fn borrowed<'a>(fd: RawFd) -> std::os::fd::BorrowedFd<'a> {
    // SAFETY: the device and the leader of a host keep their descriptors open as long as the host lives.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}

/// Sleeps for `time`.
pub(crate) fn sleep(time: Duration) {
    std::thread::sleep(time);
}

/// A timerfd of the monotonic clock. Unlike the time-out of a system call it has no timer slack (50 µs by default).
///
/// # Errors
/// The errno of the call.
pub(crate) fn timer_fd() -> io::Result<OwnedFd> {
    let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets a timer: its descriptor becomes readable at `at`.
pub(crate) fn set_timer(fd: RawFd, at: Instant) {
    // Zero would disarm it.
    let ns = at.as_nanos().max(1);
    let value = libc::timespec {
        tv_sec: (ns / 1_000_000_000) as _,
        tv_nsec: (ns % 1_000_000_000) as libc::c_long,
    };
    let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let spec = libc::itimerspec { it_interval: never, it_value: value };
    // SAFETY: `spec` lives through the call; the old value is not asked for.
    unsafe { libc::timerfd_settime(fd, libc::TFD_TIMER_ABSTIME, &spec, std::ptr::null_mut()) };
}

/// Sleeps until the descriptor of the device is ready, `kick` or `timer` is readable, or a signal arrives. Returns
/// whether `kick` is readable.
pub(crate) fn sleep_on(device: Option<WakeFd>, kick: RawFd, timer: RawFd) -> bool {
    let WakeFd { fd, interest } = device.unwrap_or(WakeFd::readable(-1));
    let events = match interest {
        Interest::Readable => libc::POLLIN,
        Interest::ReadableOrWritable => libc::POLLIN | libc::POLLOUT,
    };
    let mut fds = [
        libc::pollfd { fd, events, revents: 0 },
        libc::pollfd { fd: kick, events: libc::POLLIN, revents: 0 },
        libc::pollfd { fd: timer, events: libc::POLLIN, revents: 0 },
    ];
    // SAFETY: `fds` holds three entries that live through the call; no signal mask, no time-out.
    unsafe { libc::ppoll(fds.as_mut_ptr(), 3, std::ptr::null(), std::ptr::null()) };
    fds[1].revents != 0
}

fn timespec(t: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: t.as_secs().min(i64::MAX as u64) as _,
        tv_nsec: libc::c_long::from(t.subsec_nanos()),
    }
}

/// Sleeps while `word` holds `expected`, until woken or until the time is over. May return early.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let spec = timeout.map(timespec);
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word outlives the call by the borrow, `spec` is null or a live timespec.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, expected, spec) };
}

/// Wakes the thread that sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel uses the address only as the key of the sleepers.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, 1) };
}

/// Blocks all signals for the calling thread, so that handlers run on the program's own threads.
pub(crate) fn block_signals() {
    // SAFETY: all-zero is a valid sigset_t, which sigfillset then fills; both live through the calls.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

/// A number that tells threads apart, for one writer at a time. Never 0.
pub fn thread_number() -> u64 {
    thread_local!(static NUMBER: u64 = {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        u64::from(NEXT.fetch_add(1, Ordering::Relaxed))
    });
    NUMBER.with(|n| *n)
}

static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How often this process, or an ancestor, was forked since `watch_forks`. A stack stores the number at its start and
/// refuses to work in a child, which has neither its threads nor its shared memory.
#[inline]
pub(crate) fn fork_generation() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Starts counting forks. Idempotent.
pub(crate) fn watch_forks() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: `count_fork` does nothing but an atomic addition, which is async-signal-safe.
        unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    });
}

/// Calls `f` when the process ends by `exit` or by returning from `main`.
pub(crate) fn at_exit(f: extern "C" fn()) {
    // SAFETY: `f` is a plain function that takes nothing and returns nothing.
    unsafe { libc::atexit(f) };
}
