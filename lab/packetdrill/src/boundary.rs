//! The functions of `struct packetdrill_interface` (gtests/net/packetdrill/packetdrill.h).
//!
//! packetdrill is the only caller, and its contract is that of the system calls of the same names: a pointer is null or
//! points to memory of the length that comes with it, valid until the call returns and not written by another thread
//! meanwhile. Each function turns pointers into slices first and has no unsafe code after that. A panic ends as an
//! error of the call (EIO) at this boundary.

use std::ffi::{c_char, c_int, c_long, c_longlong, c_ulong, c_void};
use std::fs::File;
use std::os::fd::IntoRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_stack::base::Duration;

use crate::calls;
use crate::interface::{Interface, Wait};
use crate::poll::Epoll;
use crate::settings::Settings;
use crate::sockets::{self, Machine};
use crate::world::World;

type Data = *mut c_void;

/// The interface of this process, for what packetdrill asks of the C library: see `preload.rs`.
static CURRENT: Mutex<Option<Arc<Interface>>> = Mutex::new(None);

/// The interface of this process.
pub fn current() -> Option<Arc<Interface>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Runs a call: -1 and errno if it fails or panics.
pub fn guarded<T: TryFrom<i64> + From<i8>>(call: impl FnOnce() -> Result<i64, i32>) -> T {
    let answer = catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(libc::EIO));
    let errno = match answer.map(T::try_from) {
        Ok(Ok(value)) => return value,
        Ok(Err(_)) => libc::EOVERFLOW,
        Err(errno) => errno,
    };
    // SAFETY: __errno_location returns the address of this thread's errno, valid while the thread lives.
    unsafe { *libc::__errno_location() = errno };
    T::from(-1)
}

/// `userdata` is what [`packetdrill_interface_init`] left there.
fn with<T: TryFrom<i64> + From<i8>>(
    userdata: Data,
    call: impl FnOnce(&Interface) -> Result<i64, i32>,
) -> T {
    // SAFETY: packetdrill passes the pointer that init gave it, to an Arc that `free` drops after all calls.
    let interface = unsafe { &*userdata.cast::<Interface>() };
    guarded(|| call(interface))
}

/// Bytes that the caller lends.
fn input<'a>(data: *const c_void, length: usize) -> Result<&'a [u8], i32> {
    if data.is_null() {
        return if length == 0 { Ok(&[]) } else { Err(libc::EFAULT) };
    }
    // SAFETY: the module's contract: `length` bytes that no thread writes until the call returns.
    Ok(unsafe { std::slice::from_raw_parts(data.cast(), length) })
}

/// Memory of the caller to be written, at most `length` bytes of `bytes`; how many they were.
fn output(data: *mut c_void, length: usize, bytes: &[u8]) -> Result<usize, i32> {
    let n = bytes.len().min(length);
    if data.is_null() && n > 0 {
        return Err(libc::EFAULT);
    }
    if n > 0 {
        // SAFETY: the module's contract: `length` bytes that may be written, apart from `bytes`, which is ours.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), data.cast(), n) };
    }
    Ok(n)
}

/// One value of the caller that a pointer names.
fn value<T: Copy>(at: *const T) -> Result<T, i32> {
    if at.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: the module's contract: a readable T, which may be unaligned (`struct epoll_event` is packed).
    Ok(unsafe { at.read_unaligned() })
}

/// Writes one value to the caller.
fn set_value<T: Copy>(at: *mut T, value: T) -> Result<(), i32> {
    if at.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: as in `value`, and writable.
    unsafe { at.write_unaligned(value) };
    Ok(())
}

/// Values that the caller lends.
fn values<T: Copy>(at: *const T, count: usize) -> Result<Vec<T>, i32> {
    (0..count).map(|i| value(at.wrapping_add(i))).collect()
}

/// The most entries of an I/O vector (IOV_MAX of Linux).
const MAX_VECTORS: usize = 1024;

fn vectors(iov: *const libc::iovec, count: usize) -> Result<Vec<libc::iovec>, i32> {
    if count > MAX_VECTORS { Err(libc::EINVAL) } else { values(iov, count) }
}

fn gather(vectors: &[libc::iovec]) -> Result<Vec<u8>, i32> {
    let mut all = Vec::new();
    for v in vectors {
        all.extend_from_slice(input(v.iov_base, v.iov_len)?);
    }
    Ok(all)
}

fn scatter(vectors: &[libc::iovec], bytes: &[u8]) -> Result<(), i32> {
    let mut rest = bytes;
    for v in vectors {
        let n = output(v.iov_base, v.iov_len, rest)?;
        rest = &rest[n..];
    }
    Ok(())
}

fn capacity(vectors: &[libc::iovec]) -> usize {
    vectors.iter().map(|v| v.iov_len).sum()
}

fn count(n: usize) -> Result<i64, i32> {
    i64::try_from(n).map_err(|_| libc::EOVERFLOW)
}

/// Writes an address and its whole length, as accept(2) does.
fn set_address(
    at: std::net::SocketAddr,
    addr: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> Result<(), i32> {
    if addr.is_null() || length.is_null() {
        return Ok(());
    }
    let bytes = calls::emit_address(at);
    output(addr.cast(), value(length)? as usize, &bytes)?;
    set_value(length, bytes.len() as libc::socklen_t)
}

extern "C" fn free(userdata: Data) {
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = None;
    // SAFETY: the pointer of `packetdrill_interface_init`, which is passed here once and not used afterwards.
    drop(unsafe { Arc::from_raw(userdata.cast::<Interface>()) });
}

/// A number for a descriptor, which no file of the process has: packetdrill closes all of them by close(2).
fn reserved_number() -> Option<i32> {
    File::open("/dev/null").ok().map(IntoRawFd::into_raw_fd)
}

extern "C" fn socket(data: Data, domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    with(data, |i| {
        i.call(Wait::Never, |m| {
            // Sysctls may have been set since.
            m.world.set_settings(Settings::of_environment());
            m.socket(domain, kind, protocol)
        })
        .map(i64::from)
    })
}

extern "C" fn bind(
    data: Data,
    fd: c_int,
    addr: *const libc::sockaddr,
    length: libc::socklen_t,
) -> c_int {
    with(data, |i| {
        let at = calls::parse_address(input(addr.cast(), length as usize)?)?;
        i.call(Wait::Never, |m| m.bind(fd, at)).map(|()| 0)
    })
}

extern "C" fn listen(data: Data, fd: c_int, backlog: c_int) -> c_int {
    with(data, |i| {
        i.call(Wait::Never, |m| {
            // Sysctls may have been set since.
            m.world.set_settings(Settings::of_environment());
            m.listen(fd, backlog)
        })
        .map(|()| 0)
    })
}

extern "C" fn accept(
    data: Data,
    fd: c_int,
    addr: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    with(data, |i| {
        let (child, peer) = calls::accept(i, fd)?;
        set_address(peer, addr, length)?;
        Ok(i64::from(child))
    })
}

extern "C" fn connect(
    data: Data,
    fd: c_int,
    addr: *const libc::sockaddr,
    length: libc::socklen_t,
) -> c_int {
    with(data, |i| calls::connect(i, fd, input(addr.cast(), length as usize)?).map(|()| 0))
}

extern "C" fn read(data: Data, fd: c_int, buf: *mut c_void, length: usize) -> isize {
    recv(data, fd, buf, length, 0)
}

extern "C" fn readv(data: Data, fd: c_int, iov: *const libc::iovec, n: c_int) -> isize {
    with(data, |i| {
        let vectors = vectors(iov, n as usize)?;
        let bytes = calls::recv(i, fd, capacity(&vectors), 0)?;
        scatter(&vectors, &bytes)?;
        count(bytes.len())
    })
}

extern "C" fn recv(data: Data, fd: c_int, buf: *mut c_void, length: usize, flags: c_int) -> isize {
    with(data, |i| {
        let discards = flags & libc::MSG_TRUNC != 0;
        if buf.is_null() && length > 0 && !discards {
            return Err(libc::EFAULT);
        }
        let bytes = calls::recv(i, fd, length, flags)?;
        if !discards {
            output(buf, length, &bytes)?;
        }
        count(bytes.len())
    })
}

extern "C" fn recvfrom(
    data: Data,
    fd: c_int,
    buf: *mut c_void,
    length: usize,
    flags: c_int,
    _: *mut libc::sockaddr,
    _: *mut libc::socklen_t,
) -> isize {
    recv(data, fd, buf, length, flags)
}

extern "C" fn recvmsg(data: Data, fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize {
    with(data, |i| {
        let mut header = value(message)?;
        let vectors = vectors(header.msg_iov, header.msg_iovlen)?;
        let bytes = calls::recv(i, fd, capacity(&vectors), flags)?;
        scatter(&vectors, &bytes)?;
        header.msg_controllen = 0;
        header.msg_flags = 0;
        set_value(message, header)?;
        count(bytes.len())
    })
}

extern "C" fn write(data: Data, fd: c_int, buf: *const c_void, length: usize) -> isize {
    send(data, fd, buf, length, 0)
}

extern "C" fn writev(data: Data, fd: c_int, iov: *const libc::iovec, n: c_int) -> isize {
    with(data, |i| {
        let bytes = gather(&vectors(iov, n as usize)?)?;
        count(calls::send(i, fd, &bytes, 0)?)
    })
}

extern "C" fn send(
    data: Data,
    fd: c_int,
    buf: *const c_void,
    length: usize,
    flags: c_int,
) -> isize {
    with(data, |i| count(calls::send(i, fd, input(buf, length)?, flags)?))
}

extern "C" fn sendto(
    data: Data,
    fd: c_int,
    buf: *const c_void,
    length: usize,
    flags: c_int,
    addr: *const libc::sockaddr,
    addr_length: libc::socklen_t,
) -> isize {
    with(data, |i| {
        refresh_sysctls(i)?;
        let address = input(addr.cast(), addr_length as usize)?;
        count(calls::send_to(i, fd, input(buf, length)?, flags, address)?)
    })
}

/// Sysctls may have been set since.
fn refresh_sysctls(interface: &Interface) -> Result<(), i32> {
    interface.call(Wait::Never, |m| {
        m.world.set_settings(Settings::of_environment());
        Ok(())
    })
}

extern "C" fn sendmsg(data: Data, fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    with(data, |i| {
        let header = value(message)?;
        let bytes = gather(&vectors(header.msg_iov, header.msg_iovlen)?)?;
        let address = input(header.msg_name.cast(), header.msg_namelen as usize)?;
        count(calls::send_to(i, fd, &bytes, flags, address)?)
    })
}

/// In C the argument is variadic. An integer there is passed in the register of a named argument on x86-64 and,
/// under Linux, on aarch64.
extern "C" fn fcntl(data: Data, fd: c_int, command: c_int, argument: c_long) -> c_int {
    with(data, |i| calls::fcntl(i, fd, command, argument as i32).map(i64::from))
}

/// As [`fcntl`].
extern "C" fn ioctl(data: Data, fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int {
    with(data, |i| {
        let n = calls::ioctl(i, fd, request)?;
        set_value(argument, n)?;
        Ok(0)
    })
}

extern "C" fn close(data: Data, fd: c_int) -> c_int {
    with(data, |i| {
        i.call(Wait::Never, |m| m.close(fd))?;
        // SAFETY: the machine had this number from `reserved_number` and has it no more.
        unsafe { libc::close(fd) };
        Ok(0)
    })
}

extern "C" fn shutdown(data: Data, fd: c_int, how: c_int) -> c_int {
    with(data, |i| i.call(Wait::Never, |m| m.shutdown(fd, how)).map(|()| 0))
}

extern "C" fn getsockopt(
    data: Data,
    fd: c_int,
    level: c_int,
    name: c_int,
    buf: *mut c_void,
    length: *mut libc::socklen_t,
) -> c_int {
    with(data, |i| get_option(i, fd, (level, name), buf, length))
}

/// getsockopt(2).
///
/// # Errors
/// An errno.
pub fn get_option(
    interface: &Interface,
    fd: c_int,
    (level, name): (c_int, c_int),
    buf: *mut c_void,
    length: *mut libc::socklen_t,
) -> Result<i64, i32> {
    let space = value(length)? as usize;
    let bytes = interface.call(Wait::Never, |m| m.option(fd, level, name))?;
    set_value(length, output(buf, space, &bytes)? as libc::socklen_t)?;
    Ok(0)
}

extern "C" fn setsockopt(
    data: Data,
    fd: c_int,
    level: c_int,
    name: c_int,
    buf: *const c_void,
    length: libc::socklen_t,
) -> c_int {
    with(data, |i| {
        refresh_sysctls(i)?;
        let bytes = input(buf, length as usize)?;
        i.call(Wait::Never, |m| m.set_option(fd, level, name, bytes)).map(|()| 0)
    })
}

extern "C" fn poll(data: Data, fds: *mut libc::pollfd, n: libc::nfds_t, timeout: c_int) -> c_int {
    with(data, |i| {
        let mut list = values(fds, n as usize)?;
        let asked: Vec<_> = list.iter().map(|p| (p.fd, p.events)).collect();
        let found = calls::poll(i, &asked, timeout)?;
        for (at, (entry, events)) in list.iter_mut().zip(&found).enumerate() {
            entry.revents = *events;
            set_value(fds.wrapping_add(at), *entry)?;
        }
        count(found.iter().filter(|events| **events != 0).count())
    })
}

extern "C" fn netdev_send(data: Data, buf: *const c_void, length: usize) -> c_int {
    with(data, |i| {
        i.inject(input(buf, length)?);
        Ok(0)
    })
}

extern "C" fn netdev_receive(
    data: Data,
    buf: *mut c_void,
    length: *mut usize,
    time_us: *mut c_longlong,
) -> c_int {
    with(data, |i| {
        // Without a packet the length is 0, which packetdrill reports as a packet that is too short. An error would
        // make it ask again for ever.
        let (at, packet) = i.next_sent().unwrap_or_else(|| (i.clock_us(), Vec::new()));
        let space = value(length)?;
        set_value(length, output(buf, space, &packet)?)?;
        set_value(time_us, at as c_longlong)?;
        Ok(0)
    })
}

extern "C" fn usleep(data: Data, us: libc::useconds_t) -> c_int {
    with(data, |i| {
        i.sleep(Duration::from_micros(u64::from(us)));
        Ok(0)
    })
}

extern "C" fn gettimeofday(data: Data, at: *mut libc::timeval, _: *mut c_void) -> c_int {
    with(data, |i| {
        let us = i.clock_us();
        let (seconds, rest) = (us / 1_000_000, us % 1_000_000);
        set_value(at, libc::timeval { tv_sec: seconds as i64, tv_usec: rest as i64 })?;
        Ok(0)
    })
}

extern "C" fn epoll_create(data: Data, _: c_int) -> c_int {
    with(data, |i| {
        let add = |m: &mut Machine| m.add(sockets::File::Epoll(Epoll::default()));
        i.call(Wait::Never, add).map(i64::from)
    })
}

extern "C" fn epoll_ctl(
    data: Data,
    epoll_fd: c_int,
    op: c_int,
    fd: c_int,
    event: *const libc::epoll_event,
) -> c_int {
    with(data, |i| {
        let (interest, user) = match value(event) {
            Ok(event) => (event.events, event.u64),
            Err(_) if op == libc::EPOLL_CTL_DEL => (0, 0),
            Err(errno) => return Err(errno),
        };
        i.call(Wait::Never, |m| {
            let now = m.readiness(fd)?;
            m.with_epoll(epoll_fd, |epoll, _| epoll.control(op, fd, interest, user, now))
        })??;
        Ok(0)
    })
}

extern "C" fn epoll_wait(
    data: Data,
    fd: c_int,
    events: *mut libc::epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    with(data, |i| {
        let max = usize::try_from(max).map_err(|_| libc::EINVAL)?;
        let told = calls::epoll_wait(i, fd, max, timeout)?;
        for (at, (ready, user)) in told.iter().enumerate() {
            let event = libc::epoll_event { events: *ready, u64: *user };
            set_value(events.wrapping_add(at), event)?;
        }
        count(told.len())
    })
}

/// fulmar has no pipes.
extern "C" fn pipe(_: Data, _: *mut c_int) -> c_int {
    guarded(|| Err(libc::ENOSYS))
}

/// As [`pipe`].
extern "C" fn splice(
    _: Data,
    _: c_int,
    _: *mut i64,
    _: c_int,
    _: *mut i64,
    _: usize,
    _: libc::c_uint,
) -> isize {
    guarded(|| Err(libc::ENOSYS))
}

macro_rules! interface {
    ($($name:ident: $type:ty;)*) => {
        /// `struct packetdrill_interface`.
        #[repr(C)]
        pub struct PacketdrillInterface {
            userdata: Data,
            $($name: $type,)*
        }

        impl PacketdrillInterface {
            fn new(userdata: Data) -> PacketdrillInterface {
                PacketdrillInterface { userdata, $($name,)* }
            }
        }
    };
}

type Addr = *const libc::sockaddr;
type AddrMut = *mut libc::sockaddr;
type Len = libc::socklen_t;

// In the order of the structure.
interface! {
    free: extern "C" fn(Data);
    socket: extern "C" fn(Data, c_int, c_int, c_int) -> c_int;
    bind: extern "C" fn(Data, c_int, Addr, Len) -> c_int;
    listen: extern "C" fn(Data, c_int, c_int) -> c_int;
    accept: extern "C" fn(Data, c_int, AddrMut, *mut Len) -> c_int;
    connect: extern "C" fn(Data, c_int, Addr, Len) -> c_int;
    read: extern "C" fn(Data, c_int, *mut c_void, usize) -> isize;
    readv: extern "C" fn(Data, c_int, *const libc::iovec, c_int) -> isize;
    recv: extern "C" fn(Data, c_int, *mut c_void, usize, c_int) -> isize;
    recvfrom: extern "C" fn(Data, c_int, *mut c_void, usize, c_int, AddrMut, *mut Len) -> isize;
    recvmsg: extern "C" fn(Data, c_int, *mut libc::msghdr, c_int) -> isize;
    write: extern "C" fn(Data, c_int, *const c_void, usize) -> isize;
    writev: extern "C" fn(Data, c_int, *const libc::iovec, c_int) -> isize;
    send: extern "C" fn(Data, c_int, *const c_void, usize, c_int) -> isize;
    sendto: extern "C" fn(Data, c_int, *const c_void, usize, c_int, Addr, Len) -> isize;
    sendmsg: extern "C" fn(Data, c_int, *const libc::msghdr, c_int) -> isize;
    fcntl: extern "C" fn(Data, c_int, c_int, c_long) -> c_int;
    ioctl: extern "C" fn(Data, c_int, c_ulong, *mut c_int) -> c_int;
    close: extern "C" fn(Data, c_int) -> c_int;
    shutdown: extern "C" fn(Data, c_int, c_int) -> c_int;
    getsockopt: extern "C" fn(Data, c_int, c_int, c_int, *mut c_void, *mut Len) -> c_int;
    setsockopt: extern "C" fn(Data, c_int, c_int, c_int, *const c_void, Len) -> c_int;
    poll: extern "C" fn(Data, *mut libc::pollfd, libc::nfds_t, c_int) -> c_int;
    netdev_send: extern "C" fn(Data, *const c_void, usize) -> c_int;
    netdev_receive: extern "C" fn(Data, *mut c_void, *mut usize, *mut c_longlong) -> c_int;
    usleep: extern "C" fn(Data, libc::useconds_t) -> c_int;
    gettimeofday: extern "C" fn(Data, *mut libc::timeval, *mut c_void) -> c_int;
    epoll_create: extern "C" fn(Data, c_int) -> c_int;
    epoll_ctl: extern "C" fn(Data, c_int, c_int, c_int, *const libc::epoll_event) -> c_int;
    epoll_wait: extern "C" fn(Data, c_int, *mut libc::epoll_event, c_int, c_int) -> c_int;
    pipe: extern "C" fn(Data, *mut c_int) -> c_int;
    splice: extern "C" fn(Data, c_int, *mut i64, c_int, *mut i64, usize, libc::c_uint) -> isize;
}

/// Fills the interface for one script. packetdrill finds this function by its name.
///
/// # Safety
/// `interface` points to a `struct packetdrill_interface` that the caller owns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn packetdrill_interface_init(
    _: *const c_char,
    interface: *mut PacketdrillInterface,
) {
    let world = World::new(Settings::of_environment());
    let machine = Machine::new(world).with_numbers(reserved_number);
    let own = Arc::new(Interface::new(machine));
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&own));
    let filled = PacketdrillInterface::new(Arc::into_raw(own).cast_mut().cast());
    // SAFETY: this function's contract.
    unsafe { interface.write(filled) };
}
