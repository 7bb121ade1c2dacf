//! System calls that std does not offer. The only unsafe code of this room beside `shm/sys.rs` and
//! `tap/vector/sys.rs`.

use std::io::{self, IoSliceMut};
use std::marker::PhantomData;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use fulmar_stack::mbuf::Mbuf;
use libc::{c_int, c_ulong, c_void};

/// Most frames of one [`send_many`] or [`receive_many`].
pub(super) const MANY: usize = 16;

// linux/if_packet.h; libc has none of these.
pub(super) const PACKET_ADD_MEMBERSHIP: c_int = 1;
const PACKET_STATISTICS: c_int = 6;
pub(super) const PACKET_VNET_HDR: c_int = 15;
pub(super) const PACKET_FANOUT: c_int = 18;
pub(super) const PACKET_QDISC_BYPASS: c_int = 20;
pub(super) const PACKET_FANOUT_DATA: c_int = 22;
pub(super) const PACKET_IGNORE_OUTGOING: c_int = 23;
pub(super) const PACKET_VNET_HDR_SZ: c_int = 24;
const PACKET_MR_PROMISC: u16 = 1;

/// `struct packet_mreq` of linux/if_packet.h.
#[repr(C)]
struct PacketMreq {
    ifindex: c_int,
    kind: u16,
    address_bytes: u16,
    address: [u8; 8],
}
const _: () = assert!(mem::size_of::<PacketMreq>() == 16);

/// `struct sock_filter` of linux/filter.h: one instruction of a classic packet filter.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Instruction {
    pub code: u16,
    pub jump_true: u8,
    pub jump_false: u8,
    pub k: u32,
}
const _: () = assert!(mem::size_of::<Instruction>() == 8);

/// `struct bpf_insn` of linux/bpf.h: one instruction of an extended packet filter.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ebpf {
    pub code: u8,
    /// The register that is changed, in the lower four bits, and the one that is read.
    pub registers: u8,
    pub jump: i16,
    pub constant: i32,
}
const _: () = assert!(mem::size_of::<Ebpf>() == 8);

/// The start of `union bpf_attr` of linux/bpf.h, as BPF_PROG_LOAD has it.
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    count: u32,
    first: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}
const _: () = assert!(mem::size_of::<ProgramLoad>() == 48);

/// `struct sock_fprog` of linux/filter.h.
#[repr(C)]
struct Program {
    count: u16,
    first: *const Instruction,
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A non-blocking eventfd with count 0.
pub(super) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer.
    let fd = check(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })?;
    // SAFETY: the kernel has just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A request about an interface; ENAMETOOLONG or EINVAL for a name that no interface can have.
fn request(name: &str) -> io::Result<libc::ifreq> {
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    // The kernel would take the part before it for the whole name.
    if name.contains('\0') {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: all of ifreq is plain numbers, for which zero is a value.
    let mut r: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in r.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(r)
}

fn name_of(r: &libc::ifreq) -> String {
    let bytes = r.ifr_name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8(bytes).unwrap_or_default()
}

fn interface_ioctl(fd: BorrowedFd<'_>, op: c_ulong, r: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: every operation that this file passes takes a pointer to one ifreq, which `r` is, and
    // the kernel keeps none of it.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), op as _, ptr::from_mut(r)) }).map(drop)
}

/// The flags of interfaces that the tun driver makes. Another device has no such call, or another answer.
pub(super) fn tun_features(fd: BorrowedFd<'_>) -> io::Result<c_int> {
    let mut features: c_int = 0;
    // SAFETY: TUNGETFEATURES writes one int through the pointer.
    let r = unsafe {
        libc::ioctl(fd.as_raw_fd(), libc::TUNGETFEATURES as _, ptr::from_mut(&mut features))
    };
    check(r).map(|_| features)
}

/// IFF_BACKPRESSURE of linux/if_tun.h: the interface stops its transmit queue where the ring is full, so that the sender
/// waits, instead of dropping the packet.
const BACKPRESSURE: c_int = 0x80;

/// Attaches a tun descriptor to an interface (created if there is none); returns its name. With back-pressure where the
/// kernel has it.
pub(super) fn tun_attach(fd: BorrowedFd<'_>, name: &str, flags: c_int) -> io::Result<String> {
    let mut r = request(name)?;
    let backpressure = tun_features(fd).unwrap_or(0) & BACKPRESSURE;
    r.ifr_ifru.ifru_flags = (flags | backpressure) as libc::c_short;
    interface_ioctl(fd, libc::TUNSETIFF as c_ulong, &mut r)?;
    Ok(name_of(&r))
}

/// The interface that a tun descriptor is attached to, and its flags.
pub(super) fn tun_interface(fd: BorrowedFd<'_>) -> io::Result<(String, c_int)> {
    let mut r = request("")?;
    interface_ioctl(fd, libc::TUNGETIFF as c_ulong, &mut r)?;
    // SAFETY: TUNGETIFF filled in the flags.
    let flags = unsafe { r.ifr_ifru.ifru_flags };
    Ok((name_of(&r), c_int::from(flags as u16)))
}

/// Sets how long the virtio-net header of a tun descriptor is, in bytes.
pub(super) fn tun_set_header(fd: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one int through the pointer.
    let r =
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ as _, ptr::from_ref(&bytes)) };
    check(r).map(drop)
}

/// Sets the offloads that the reader of a tun descriptor supports (TUNSETOFFLOAD).
pub(super) fn tun_set_offload(fd: BorrowedFd<'_>, offload: u32) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    let r =
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD as _, c_ulong::from(offload)) };
    check(r).map(drop)
}

/// Sets the BPF program that selects the queue of each packet of a tun interface; `None`: the kernel's own choice.
pub(super) fn tun_set_steering(
    fd: BorrowedFd<'_>,
    program: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    // linux/if_tun.h: _IOR('T', 224, int).
    const TUNSETSTEERINGEBPF: c_ulong = 0x8004_54e0;
    let program: c_int = program.map_or(-1, |p| p.as_raw_fd());
    // SAFETY: TUNSETSTEERINGEBPF reads one int through the pointer.
    let r =
        unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETSTEERINGEBPF as _, ptr::from_ref(&program)) };
    check(r).map(drop)
}

/// Loads a BPF program of type socket filter, which the kernel verifies.
pub(super) fn load_socket_program(program: &[Ebpf]) -> io::Result<OwnedFd> {
    const BPF_PROG_LOAD: c_int = 5;
    const SOCKET_FILTER: u32 = 1;
    let load = ProgramLoad {
        kind: SOCKET_FILTER,
        count: program.len() as u32,
        first: program.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        log_level: 0,
        log_bytes: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
    };
    let bytes = mem::size_of::<ProgramLoad>();
    // SAFETY: the kernel reads `bytes` bytes of `load`, the `count` instructions of the slice that it points to, and
    // the license, a C string; it keeps none of the pointers.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, ptr::from_ref(&load), bytes) };
    let fd = check(fd as c_int)?;
    // SAFETY: the kernel has just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The send buffer of a tun descriptor, bytes (TUNGETSNDBUF).
pub(super) fn tun_send_buffer(fd: BorrowedFd<'_>) -> io::Result<c_int> {
    let mut bytes: c_int = 0;
    // SAFETY: TUNGETSNDBUF writes one int through the pointer.
    let r =
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETSNDBUF as _, ptr::from_mut(&mut bytes)) };
    check(r).map(|_| bytes)
}

/// The hardware address of an interface. `fd`: any socket, or the tun descriptor itself.
pub(super) fn interface_ether(fd: BorrowedFd<'_>, name: &str) -> io::Result<[u8; 6]> {
    let mut r = request(name)?;
    interface_ioctl(fd, libc::SIOCGIFHWADDR, &mut r)?;
    // SAFETY: SIOCGIFHWADDR filled in the address.
    let address = unsafe { r.ifr_ifru.ifru_hwaddr };
    if address.sa_family != libc::ARPHRD_ETHER {
        return Err(io::Error::from_raw_os_error(libc::EPFNOSUPPORT));
    }
    let mut ether = [0; 6];
    for (to, from) in ether.iter_mut().zip(address.sa_data) {
        *to = from as u8;
    }
    Ok(ether)
}

/// The MTU of an interface in bytes. `fd`: any socket.
pub(super) fn interface_mtu(fd: BorrowedFd<'_>, name: &str) -> io::Result<usize> {
    let mut r = request(name)?;
    interface_ioctl(fd, libc::SIOCGIFMTU, &mut r)?;
    // SAFETY: SIOCGIFMTU filled in the MTU.
    Ok(unsafe { r.ifr_ifru.ifru_mtu } as usize)
}

/// Whether an interface is up and has a carrier. `fd`: any socket.
pub(super) fn interface_is_running(fd: BorrowedFd<'_>, name: &str) -> io::Result<bool> {
    let mut r = request(name)?;
    interface_ioctl(fd, libc::SIOCGIFFLAGS, &mut r)?;
    // SAFETY: SIOCGIFFLAGS filled in the flags.
    let flags = c_int::from(unsafe { r.ifr_ifru.ifru_flags });
    let both = libc::IFF_UP | libc::IFF_RUNNING;
    Ok(flags & both == both)
}

/// The index of an interface. `fd`: any socket.
pub(super) fn interface_index(fd: BorrowedFd<'_>, name: &str) -> io::Result<c_int> {
    let mut r = request(name)?;
    interface_ioctl(fd, libc::SIOCGIFINDEX, &mut r)?;
    // SAFETY: SIOCGIFINDEX filled in the index.
    Ok(unsafe { r.ifr_ifru.ifru_ifindex })
}

/// A non-blocking socket.
pub(super) fn socket(domain: c_int, kind: c_int, protocol: c_int) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes no pointer.
    let fd = check(unsafe { libc::socket(domain, kind, protocol) })?;
    // SAFETY: the kernel has just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set_option<T>(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    let bytes = mem::size_of::<T>() as libc::socklen_t;
    let value = ptr::from_ref(value).cast::<c_void>();
    // SAFETY: `value` points to `bytes` readable bytes, which the kernel copies.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value, bytes) }).map(drop)
}

/// Sets O_NONBLOCK on a descriptor.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: F_GETFL takes no argument.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: F_SETFL takes its argument by value.
    let r = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    check(r).map(drop)
}

/// Sets an option whose value is an int.
pub(super) fn set_int(
    fd: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
    set_option(fd, level, name, &value)
}

/// The value of an option that is an int.
pub(super) fn get_int(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut bytes = mem::size_of_val(&value) as libc::socklen_t;
    let to = ptr::from_mut(&mut value).cast::<c_void>();
    // SAFETY: `to` points to `bytes` bytes, which live through the call.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, to, &mut bytes) }).map(|_| value)
}

/// Frames that a full packet socket has dropped since the last call (PACKET_STATISTICS, which the kernel resets).
pub(super) fn take_missed(fd: BorrowedFd<'_>) -> io::Result<u32> {
    // `struct tpacket_stats` of linux/if_packet.h: frames that came, frames that were lost.
    let mut counts = [0u32; 2];
    let mut bytes = mem::size_of_val(&counts) as libc::socklen_t;
    let to = counts.as_mut_ptr().cast::<c_void>();
    let (level, name) = (libc::SOL_PACKET, PACKET_STATISTICS);
    // SAFETY: `to` points to `bytes` writable bytes; the kernel writes at most `bytes`.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, to, &raw mut bytes) })?;
    Ok(counts[1])
}

/// Makes an interface promiscuous for the life of the socket (PACKET_MR_PROMISC).
pub(super) fn set_promiscuous(fd: BorrowedFd<'_>, ifindex: c_int) -> io::Result<()> {
    let r = PacketMreq { ifindex, kind: PACKET_MR_PROMISC, address_bytes: 0, address: [0; 8] };
    set_option(fd, libc::SOL_PACKET, PACKET_ADD_MEMBERSHIP, &r)
}

/// Attaches a classic BPF program, which selects the frames that the socket receives (SO_ATTACH_FILTER).
pub(super) fn attach_filter(fd: BorrowedFd<'_>, program: &[Instruction]) -> io::Result<()> {
    let p = Program { count: program.len() as u16, first: program.as_ptr() };
    set_option(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &p)
}

/// Binds a packet socket to one interface, for frames of every type.
pub(super) fn bind_packet(fd: BorrowedFd<'_>, ifindex: c_int) -> io::Result<()> {
    // SAFETY: all of sockaddr_ll is plain numbers, for which zero is a value.
    let mut a: libc::sockaddr_ll = unsafe { mem::zeroed() };
    a.sll_family = libc::AF_PACKET as u16;
    a.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    a.sll_ifindex = ifindex;
    let bytes = mem::size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is `bytes` long and the kernel copies it.
    check(unsafe { libc::bind(fd.as_raw_fd(), ptr::from_ref(&a).cast(), bytes) }).map(drop)
}

/// An array of message headers, zeroed: no address, no control data, no parts.
fn no_messages() -> [libc::mmsghdr; MANY] {
    // SAFETY: all of mmsghdr is plain numbers and pointers, for which zero (null) is a value.
    unsafe { mem::zeroed() }
}

/// A part of a frame to be sent, an iovec: borrowed bytes, or the address of volatile ones.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Part<'a>(libc::iovec, PhantomData<&'a [u8]>);

impl<'a> Part<'a> {
    pub(super) const EMPTY: Part<'static> =
        Part(libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }, PhantomData);

    pub(super) fn bytes(b: &'a [u8]) -> Part<'a> {
        Part(libc::iovec { iov_base: b.as_ptr().cast_mut().cast(), iov_len: b.len() }, PhantomData)
    }

    pub(super) fn mbuf(m: &'a Mbuf) -> Part<'a> {
        let (at, len) = m.kernel_part();
        Part(libc::iovec { iov_base: at.cast_mut().cast(), iov_len: len }, PhantomData)
    }

    /// The part after its first `bytes` bytes.
    pub(super) fn behind(mut self, bytes: usize) -> Part<'a> {
        let n = bytes.min(self.0.iov_len);
        self.0.iov_base = self.0.iov_base.wrapping_byte_add(n);
        self.0.iov_len -= n;
        self
    }
}

/// Fills `to` with parts from the front. Returns how many.
pub(super) fn gather<'a>(to: &mut [Part<'a>], parts: impl Iterator<Item = Part<'a>>) -> usize {
    to.iter_mut().zip(parts).map(|(to, part)| *to = part).count()
}

/// Writes the parts as one frame.
///
/// # Errors
/// The errno of the call.
pub(super) fn write_parts(fd: BorrowedFd<'_>, parts: &[Part<'_>]) -> io::Result<usize> {
    // SAFETY: a `Part` is an iovec; its memory is borrowed until this function returns, or it is volatile
    // memory that its mbuf keeps in place, which only the kernel reads here.
    let n = unsafe { libc::writev(fd.as_raw_fd(), parts.as_ptr().cast(), parts.len() as c_int) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Sends each list of parts as one message; at most [`MANY`]. Returns how many were sent, at least
/// one.
///
/// # Errors
/// As [`write_parts`], about the first message.
pub(super) fn send_many(fd: BorrowedFd<'_>, messages: &[&[Part<'_>]]) -> io::Result<usize> {
    let mut headers = no_messages();
    for (h, parts) in headers.iter_mut().zip(messages) {
        h.msg_hdr.msg_iov = parts.as_ptr().cast_mut().cast();
        h.msg_hdr.msg_iovlen = parts.len() as _;
    }
    let count = messages.len().min(MANY) as _;
    // SAFETY: the count in each header is the number of the parts that it points to; for the parts see `write_parts`.
    let n = unsafe { libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count, 0) };
    check(n).map(|n| n as usize)
}

/// The result of one message of [`receive_many`].
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Received {
    /// Bytes received.
    pub bytes: usize,
    /// The message was longer; the rest is lost (MSG_TRUNC).
    pub is_cut: bool,
}

/// Receives one message into each list of parts; at most [`MANY`]. Returns how many came, at least
/// one, and the result of each.
pub(super) fn receive_many<const PARTS: usize>(
    fd: BorrowedFd<'_>,
    messages: &mut [[IoSliceMut<'_>; PARTS]],
) -> io::Result<(usize, [Received; MANY])> {
    let mut headers = no_messages();
    let count = messages.len().min(MANY);
    for (h, parts) in headers.iter_mut().zip(messages) {
        h.msg_hdr.msg_iov = parts.as_mut_ptr().cast();
        h.msg_hdr.msg_iovlen = PARTS as _;
    }
    // SAFETY: each header points to PARTS parts; `IoSliceMut` has the layout of iovec and its memory
    // is borrowed mutably, each part apart, until this function returns.
    let n = unsafe {
        libc::recvmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count as _, 0, ptr::null_mut())
    };
    let n = check(n)? as usize;
    let mut received = [Received::default(); MANY];
    for (r, h) in received.iter_mut().zip(&headers) {
        let is_cut = h.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        *r = Received { bytes: h.msg_len as usize, is_cut };
    }
    Ok((n, received))
}

/// Waits up to `timeout_ms` until a descriptor is readable; returns whether it is.
#[cfg(any(test, fulmar_loom))]
fn poll_readable(fd: std::os::fd::RawFd, timeout_ms: c_int) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one pollfd, as the count says.
    unsafe { libc::poll(&raw mut p, 1, timeout_ms) == 1 }
}

/// Whether a descriptor is readable now.
#[cfg(any(test, fulmar_loom))]
pub(super) fn is_readable(fd: std::os::fd::RawFd) -> bool {
    poll_readable(fd, 0)
}

/// Waits until a descriptor is readable; a wake-up that is lost fails the test.
#[cfg(test)]
pub(super) fn wait_readable(fd: std::os::fd::RawFd) {
    assert!(poll_readable(fd, 10_000), "no wake-up within ten seconds");
}
