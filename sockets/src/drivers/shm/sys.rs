//! Memory files, mappings and the socket that joins two processes. The only unsafe code of this
//! device.
//!
//! Two kinds of memory, named in the SAFETY sentences:
//! - *own*: written by this process only (the other one has a file that is sealed against writing).
//!   The words of the rings are accessed as atomics; the slabs belong to pools.
//! - *the peer's*: mapped without the right to write. It may change at any moment, so there is no reference
//!   to its bytes: they are copied by volatile loads ([`VolatileSlice`]). The words of the rings are loaded
//!   as atomics, a reference to which promises nothing about their value.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_stack::mbuf::{Backing, Mbuf, SLAB_BYTES, VolatileSlice};
use libc::{c_int, c_void};

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(fd: c_int) -> io::Result<OwnedFd> {
    let fd = check(fd)?;
    // SAFETY: the kernel has just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The seals that a memory file must have: only its owner can write it, and it cannot shrink.
const SEALS: c_int =
    libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A mapping of a whole file. Unmapped on drop.
struct Map {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping can be used and unmapped from any thread.
unsafe impl Send for Map {}
// SAFETY: as above; what may be done with the bytes is said by the types around it.
unsafe impl Sync for Map {}

impl Map {
    /// Maps a file at a multiple of [`SLAB_BYTES`]; a forked child does not have it.
    fn new(file: BorrowedFd<'_>, bytes: usize, access: c_int) -> io::Result<Map> {
        let padded = bytes.checked_add(SLAB_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let raw = unsafe { libc::mmap(ptr::null_mut(), padded, libc::PROT_NONE, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let front = raw.align_offset(SLAB_BYTES);
        let base = raw.wrapping_byte_add(front);
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: [base, base + bytes) lies inside the mapping made above, which nothing else refers to,
        // and so do the two cuts around it.
        let mapped = unsafe {
            let mapped = libc::mmap(base, bytes, access, flags, file.as_raw_fd(), 0);
            if front > 0 {
                libc::munmap(raw, front);
            }
            let end = base.wrapping_byte_add(bytes.next_multiple_of(PAGE_BYTES));
            let back = padded.saturating_sub(front + bytes.next_multiple_of(PAGE_BYTES));
            if back > 0 {
                libc::munmap(end, back);
            }
            if mapped != libc::MAP_FAILED {
                libc::madvise(base, bytes, libc::MADV_DONTFORK);
            }
            mapped
        };
        if mapped == libc::MAP_FAILED {
            let e = io::Error::last_os_error();
            // SAFETY: the part that is left of the mapping made above.
            unsafe { libc::munmap(base, bytes) };
            return Err(e);
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Map { base, bytes })
    }

    /// The word at byte `at`.
    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < self.bytes && self.bytes - at >= 8, "a word outside");
        // SAFETY: inside the mapping and aligned, which was just checked; every access to the words
        // of the rings, here and in the other process, is atomic.
        unsafe { &*self.base.as_ptr().add(at).cast::<AtomicU64>() }
    }
}

/// Mappings end at pages of this size (or larger ones, of which it is a part).
const PAGE_BYTES: usize = 4096;

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: made in `new`; every user of the memory holds this mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The memory that this process writes.
pub(super) struct OwnMap(Map);

impl OwnMap {
    /// Makes a memory file, maps it and seals it, in this order: the seal against future writes
    /// leaves the mapping that exists alone.
    pub(super) fn create(bytes: usize) -> io::Result<(OwnMap, OwnedFd)> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a string that ends with a zero.
        let file = owned(unsafe { libc::memfd_create(c"fulmar-shm".as_ptr(), flags) })?;
        let length = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: takes no pointer.
        check(unsafe { libc::ftruncate(file.as_raw_fd(), length) })?;
        let map = Map::new(as_fd(&file), bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        // SAFETY: takes its argument by value.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
        Ok((OwnMap(map), file))
    }

    /// Writes a word of the rings.
    #[inline]
    pub(super) fn store(&self, at: usize, value: u64, order: Ordering) {
        self.0.word(at).store(value, order);
    }

    /// Where the bytes of an mbuf are in the memory, if they are there.
    #[inline]
    pub(super) fn offset_of(&self, m: &Mbuf) -> Option<usize> {
        let (address, len) = m.kernel_part();
        let at = address.addr().checked_sub(self.0.base.as_ptr().addr())?;
        (at < self.0.bytes && len <= self.0.bytes - at).then_some(at)
    }

    /// Bytes `[at, at + bytes)` as slabs of a pool, which owns them from now on.
    ///
    /// # Panics
    /// If they reach behind the memory, or `at` is not a multiple of a slab.
    pub(super) fn backing(self: &Arc<OwnMap>, at: usize, bytes: usize) -> Backing {
        assert!(at <= self.0.bytes && bytes <= self.0.bytes - at, "slabs outside the memory");
        // SAFETY: inside the mapping, which `self` keeps; zero pages of a file are initialised. The
        // rings lie before `at`, and each range is given away once (`shm/meet.rs`). The file is
        // sealed, so no other process writes it.
        unsafe {
            let base = self.0.base.add(at);
            Backing::new(base, bytes, Arc::clone(self) as Arc<_>)
        }
    }
}

/// The memory that the other process writes and this one reads.
pub(super) struct PeerMap(Map);

impl PeerMap {
    /// Maps a file that another process has sent, after it has checked its type, length and seals.
    ///
    /// # Errors
    /// `PermissionDenied`: the file is not a memory file, is shorter than `bytes`, or others could write or truncate
    /// it.
    pub(super) fn open(file: BorrowedFd<'_>, bytes: usize) -> io::Result<PeerMap> {
        // SAFETY: takes no argument.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        // SAFETY: both are plain numbers, for which zero is a value.
        let (mut stat, mut fs): (libc::stat, libc::statfs) = unsafe { mem::zeroed() };
        // SAFETY: the pointers are to one of each.
        unsafe {
            check(libc::fstat(file.as_raw_fd(), &raw mut stat))?;
            check(libc::fstatfs(file.as_raw_fd(), &raw mut fs))?;
        }
        // A file on hugetlbfs can be sealed too, but reading a page that was never reserved kills.
        let is_memory = fs.f_type as libc::c_long == libc::TMPFS_MAGIC;
        let is_long = u64::try_from(stat.st_size).is_ok_and(|n| n >= bytes as u64);
        if seals < 0 || seals & SEALS != SEALS || !is_memory || !is_long {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(PeerMap(Map::new(file, bytes, libc::PROT_READ)?))
    }

    /// Reads a word of the rings, once.
    #[inline]
    pub(super) fn load(&self, at: usize, order: Ordering) -> u64 {
        self.0.word(at).load(order)
    }

    /// Whether bytes `[at, at + len)` exist.
    pub(super) fn has(&self, at: usize, len: usize) -> bool {
        at <= self.0.bytes && len <= self.0.bytes - at
    }

    /// The bytes `[at, at + len)`; `None` if they do not exist.
    #[inline]
    pub(super) fn bytes(&self, at: usize, len: usize) -> Option<VolatileSlice<'_>> {
        if !self.has(at, len) {
            return None;
        }
        // SAFETY: inside the mapping, which lives as long as `self` and cannot get shorter; this process
        // has no right to write it, and makes no reference to it but to the words of the rings.
        Some(unsafe { VolatileSlice::new(self.0.base.as_ptr().add(at), len) })
    }
}

/// Whether two descriptors are of one file.
pub(super) fn is_same_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> io::Result<bool> {
    let identity = |fd: BorrowedFd<'_>| {
        // SAFETY: plain numbers, for which zero is a value; the pointer is to one of them.
        unsafe {
            let mut stat: libc::stat = mem::zeroed();
            check(libc::fstat(fd.as_raw_fd(), &raw mut stat))?;
            Ok::<_, io::Error>((stat.st_dev, stat.st_ino))
        }
    };
    Ok(identity(a)? == identity(b)?)
}

fn as_fd(fd: &OwnedFd) -> BorrowedFd<'_> {
    use std::os::fd::AsFd;
    fd.as_fd()
}

/// A non-blocking Unix socket of type SOCK_SEQPACKET.
pub(super) fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes no pointer.
    owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

/// Two sockets that are connected to each other.
pub(super) fn socket_pair() -> io::Result<[OwnedFd; 2]> {
    let mut fds = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the pointer is to two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    Ok([owned(fds[0])?, owned(fds[1])?])
}

/// A Unix address: a path, or an abstract name.
pub(super) struct Address {
    raw: libc::sockaddr_un,
    bytes: libc::socklen_t,
}

impl Address {
    /// A name in the abstract namespace (unix(7)).
    ///
    /// # Errors
    /// `InvalidInput`: empty, longer than an address (107 bytes), or with a zero inside.
    pub(super) fn in_namespace(name: &str) -> io::Result<Address> {
        Address::at(1, name)
    }

    /// The path of a socket.
    ///
    /// # Errors
    /// As [`Address::in_namespace`].
    pub(super) fn of_path(name: &str) -> io::Result<Address> {
        Address::at(0, name)
    }

    /// The name from byte `at` of the path on.
    fn at(at: usize, name: &str) -> io::Result<Address> {
        // SAFETY: all of sockaddr_un is plain numbers, for which zero is a value.
        let mut raw: libc::sockaddr_un = unsafe { mem::zeroed() };
        raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let name = std::ffi::OsStr::new(name).as_bytes();
        if name.is_empty() || name.len() + 1 > raw.sun_path.len() || name.contains(&0) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in raw.sun_path[at..].iter_mut().zip(name) {
            *to = *from as libc::c_char;
        }
        let bytes = mem::size_of::<libc::sa_family_t>() + name.len() + 1;
        Ok(Address { raw, bytes: bytes as libc::socklen_t })
    }
}

/// Connects a socket.
pub(super) fn connect(socket: BorrowedFd<'_>, to: &Address) -> io::Result<()> {
    // SAFETY: the address is as long as it says.
    check(unsafe { libc::connect(socket.as_raw_fd(), ptr::from_ref(&to.raw).cast(), to.bytes) })
        .map(drop)
}

/// Binds a socket and listens on it.
pub(super) fn listen(socket: BorrowedFd<'_>, at: &Address) -> io::Result<()> {
    // SAFETY: the address is as long as it says.
    check(unsafe { libc::bind(socket.as_raw_fd(), ptr::from_ref(&at.raw).cast(), at.bytes) })?;
    // SAFETY: takes no pointer.
    check(unsafe { libc::listen(socket.as_raw_fd(), 8) }).map(drop)
}

/// Accepts one connection.
pub(super) fn accept(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let none = ptr::null_mut();
    // SAFETY: no address is wanted.
    owned(unsafe { libc::accept4(socket.as_raw_fd(), none, ptr::null_mut(), libc::SOCK_CLOEXEC) })
}

/// Takes an exclusive lock on an open file or directory, which ends with it.
pub(super) fn try_lock(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no pointer.
    check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }).map(drop)
}

/// The user at the other end of a socket, and this process's own.
pub(super) fn users(socket: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let peer: libc::ucred = option(socket, libc::SO_PEERCRED)?;
    // SAFETY: takes nothing.
    Ok((peer.uid, unsafe { libc::geteuid() }))
}

/// A descriptor that becomes readable when the process at the other end of a socket ends. Linux 6.5.
pub(super) fn peer_process(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: c_int = 77;
    owned(option::<c_int>(socket, SO_PEERPIDFD)?)
}

/// An option of a socket whose value is plain numbers.
fn option<T: Copy>(socket: BorrowedFd<'_>, name: c_int) -> io::Result<T> {
    // SAFETY: the callers' types are plain numbers, for which zero is a value.
    let mut value: T = unsafe { mem::zeroed() };
    let mut bytes = mem::size_of::<T>() as libc::socklen_t;
    let to = (&raw mut value).cast::<c_void>();
    // SAFETY: `to` points to `bytes` writable bytes; the kernel writes at most `bytes`.
    check(unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, to, &raw mut bytes)
    })?;
    Ok(value)
}

/// Waits until one of some descriptors is readable (or its peer is gone), for a limited number of milliseconds, or for
/// ever with -1. Returns which are readable.
pub(super) fn wait_any_readable(
    fds: &[BorrowedFd<'_>],
    timeout_ms: c_int,
) -> io::Result<Vec<bool>> {
    let poll =
        |fd: &BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut polls: Vec<_> = fds.iter().map(poll).collect();
    // SAFETY: pointer and count describe the vector `polls`.
    check(unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout_ms) })?;
    Ok(polls.iter().map(|p| p.revents != 0).collect())
}

/// An epoll descriptor that is readable when one of `fds` is.
pub(super) fn watch(fds: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer.
    let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    for fd in fds {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        let (op, fd) = (libc::EPOLL_CTL_ADD, fd.as_raw_fd());
        // SAFETY: the pointer is to one event, which the kernel copies.
        check(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), op, fd, &raw mut event) })?;
    }
    Ok(epoll)
}

/// Whether the connection or the process at its other end has ended; reads nothing.
pub(super) fn has_ended(socket: BorrowedFd<'_>, process: Option<BorrowedFd<'_>>) -> bool {
    let process = process.map_or(-1, |p| p.as_raw_fd());
    // With POLLRDHUP alone the socket is ready only when the other end has shut down. A negative descriptor is skipped.
    let mut fds = [
        libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 },
        libc::pollfd { fd: process, events: libc::POLLIN, revents: 0 },
    ];
    // SAFETY: the pointer is to two of them, as the count says.
    let n = unsafe { libc::poll(fds.as_mut_ptr(), 2, 0) };
    n > 0 && fds.iter().any(|p| p.revents != 0)
}

/// Reads one message without waiting; returns whether there was one.
pub(super) fn take_message(socket: BorrowedFd<'_>) -> bool {
    let mut byte = 0u8;
    let to = (&raw mut byte).cast::<c_void>();
    // SAFETY: `to` points to one writable byte.
    unsafe { libc::recv(socket.as_raw_fd(), to, 1, libc::MSG_DONTWAIT) > 0 }
}

/// Sends one byte without waiting, which wakes the other end. With a full queue the other end is readable already.
pub(super) fn send_message(socket: BorrowedFd<'_>) {
    let byte = 1u8;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the pointer is to one readable byte.
    let _ = unsafe { libc::send(socket.as_raw_fd(), (&raw const byte).cast(), 1, flags) };
}

/// Shuts down the sending direction. Messages of the other end are still received.
pub(super) fn shut(socket: BorrowedFd<'_>) {
    // SAFETY: takes no pointer. It fails only if the connection has ended already.
    let _ = unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_WR) };
}

/// Control data with space for one descriptor (`CMSG_SPACE(4)`), aligned as its header.
#[repr(C, align(8))]
struct Control([u8; 24]);
// SAFETY: the macro computes with its argument only.
const _: () = assert!(unsafe { libc::CMSG_SPACE(4) } as usize == size_of::<Control>());

/// Sends a message with one descriptor. Never waits: a new socket has space for it.
pub(super) fn send_with(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut control = Control([0; 24]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all of msghdr is plain numbers and pointers, for which zero (null) is a value.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = size_of::<Control>() as _;
    // SAFETY: the control data has space for one header with one descriptor (checked above), and the
    // kernel only reads `bytes`.
    let sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(fd.as_raw_fd());
        libc::sendmsg(
            socket.as_raw_fd(),
            &raw const message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reads one message and its descriptor (SCM_RIGHTS) without waiting. Returns its bytes, at most the length of `into`;
/// 0: the other end has closed. The kernel closes further descriptors, since the control buffer has space for one.
pub(super) fn receive_with(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut control = Control([0; 24]);
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all of msghdr is plain numbers and pointers, for which zero (null) is a value.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: the macro computes with its argument only. Space for one descriptor and no second.
    message.msg_controllen = unsafe { libc::CMSG_LEN(4) } as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header points to as much writable memory as it says.
    let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
    Ok((n, descriptor_in(&message)))
}

/// The first descriptor of a message that was received.
fn descriptor_in(message: &libc::msghdr) -> Option<OwnedFd> {
    // SAFETY: the kernel has filled in the control data and its length; a header that says that it
    // holds a descriptor does, and the descriptor is ours alone.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(ptr::from_ref(message));
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
            || ((*header).cmsg_len as usize) < libc::CMSG_LEN(4) as usize
        {
            return None;
        }
        let fd: RawFd = libc::CMSG_DATA(header).cast::<c_int>().read_unaligned();
        owned(fd).ok()
    }
}

#[cfg(test)]
pub(super) use attacks::{
    as_another_user, attack, can_be_made_writable, in_child, scribble, send_with_many,
    try_send_message, unsealed,
};

/// Operations that another process could try with a file that it received.
#[cfg(test)]
mod attacks {
    use super::*;

    /// Tries every operation that must fail on a sealed file; returns the operations that succeeded.
    pub(crate) fn attack(file: BorrowedFd<'_>, bytes: usize) -> Vec<&'static str> {
        let (fd, length) = (file.as_raw_fd(), bytes as libc::off_t);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no pointer but to one readable byte; a mapping that came to be touches nothing.
        let tries = unsafe {
            [
                ("cut it", libc::ftruncate(fd, length / 2) == 0),
                ("lengthen it", libc::ftruncate(fd, length * 2) == 0),
                ("write it", libc::pwrite(fd, c"x".as_ptr().cast(), 1, 0) == 1),
                ("punch a hole", libc::fallocate(fd, punch, 0, 4096) == 0),
                ("seal it", libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE) == 0),
                (
                    "map it for writing",
                    libc::mmap(ptr::null_mut(), bytes, both, libc::MAP_SHARED, fd, 0)
                        != libc::MAP_FAILED,
                ),
            ]
        };
        tries.into_iter().filter(|(_, worked)| *worked).map(|(what, _)| what).collect()
    }

    /// Writes bytes of frames, as a process does that keeps no rule.
    pub(crate) fn scribble(own: &OwnMap, at: usize, bytes: &[u8]) {
        assert!(at <= own.0.bytes && bytes.len() <= own.0.bytes - at);
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: inside the mapping, and no pool of the test uses this memory.
            unsafe { own.0.base.as_ptr().add(at + i).write_volatile(*b) }
        }
    }

    /// Whether a mapping of the peer's memory can be given the right to write.
    pub(crate) fn can_be_made_writable(peer: &PeerMap) -> bool {
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the mapping exists; if its protection changed, nothing would write there.
        unsafe { libc::mprotect(peer.0.base.as_ptr().cast(), peer.0.bytes, both) == 0 }
    }

    /// Sends a wake-up; false: the socket is full.
    pub(crate) fn try_send_message(socket: BorrowedFd<'_>) -> bool {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the pointer is to one readable byte.
        unsafe { libc::send(socket.as_raw_fd(), c"x".as_ptr().cast(), 1, flags) == 1 }
    }

    /// Sends a message with many descriptors.
    pub(crate) fn send_with_many(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut control = [0u64; 64];
        let mut part =
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let len = size_of_val(fds) as u32;
        // SAFETY: plain numbers and pointers, for which zero is a value; the control data has space for one header with
        // the descriptors, whose number is checked.
        let sent = unsafe {
            assert!(libc::CMSG_SPACE(len) as usize <= size_of_val(&control));
            let mut message: libc::msghdr = mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(len) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(len) as _;
            for (i, fd) in fds.iter().enumerate() {
                libc::CMSG_DATA(header).cast::<c_int>().add(i).write_unaligned(fd.as_raw_fd());
            }
            libc::sendmsg(socket.as_raw_fd(), &raw const message, 0)
        };
        assert_eq!(usize::try_from(sent).ok(), Some(bytes.len()));
    }

    /// A memory file without seals.
    pub(crate) fn unsealed(bytes: usize) -> OwnedFd {
        // SAFETY: the name is a string that ends with a zero.
        let fd = unsafe { libc::memfd_create(c"unsealed".as_ptr(), libc::MFD_ALLOW_SEALING) };
        let file = owned(fd).unwrap();
        std::fs::File::from(file.try_clone().unwrap()).set_len(bytes as u64).unwrap();
        file
    }

    /// Runs `f` on a thread that is another user. `None`: only root can become one.
    pub(crate) fn as_another_user<T: Send>(f: impl FnOnce() -> T + Send) -> Option<T> {
        const NOBODY: libc::uid_t = 65_534;
        let become_nobody = || {
            // SAFETY: takes no pointer. The call of the kernel itself is for this thread alone.
            unsafe { libc::syscall(libc::SYS_setresuid, -1, NOBODY, -1) == 0 }
        };
        std::thread::scope(|s| s.spawn(|| become_nobody().then(f)).join().unwrap())
    }

    /// Runs `f` in a forked child; its wait status.
    pub(crate) fn in_child(f: impl FnOnce()) -> c_int {
        // SAFETY: the child runs `f`, which frees memory at most, and ends without unwinding.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                f();
                libc::_exit(0);
            }
            let mut status = -1;
            libc::waitpid(pid, &raw mut status, 0);
            status
        }
    }
}
