//! What std does not offer of the kernel's sockets.

use std::io;
use std::mem::size_of_val;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

fn check(r: isize) -> io::Result<usize> {
    usize::try_from(r).map_err(|_| io::Error::last_os_error())
}

/// Makes the kernel reset the connection when the stream is dropped.
pub fn reset_on_close(s: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of_val(&linger) as libc::socklen_t;
    // SAFETY: pointer and length describe a local.
    let r = unsafe {
        let value = (&raw const linger).cast();
        libc::setsockopt(s.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, len)
    };
    assert_eq!(r, 0);
}

/// Sets an option whose value is a number.
pub fn set_int(s: RawFd, level: i32, name: i32, value: i32) {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: pointer and length describe a local.
    let r = unsafe { libc::setsockopt(s, level, name, (&raw const value).cast(), len) };
    assert_eq!(r, 0, "{}", io::Error::last_os_error());
}

/// A stream of the kernel whose SYN carries the first write, if the kernel knows a cookie (TCP_FASTOPEN_CONNECT).
pub fn connect_fast_open(to: std::net::SocketAddrV4) -> io::Result<TcpStream> {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(to.ip().octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: pointer and length describe a local; the descriptor has no other owner.
    unsafe {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        let fd = check(libc::socket(libc::AF_INET, kind, 0) as isize)?;
        let stream = TcpStream::from_raw_fd(fd as i32);
        set_int(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1);
        let len = size_of_val(&address) as libc::socklen_t;
        check(libc::connect(stream.as_raw_fd(), (&raw const address).cast(), len) as isize)?;
        Ok(stream)
    }
}

/// Makes the kernel segment each payload into datagrams of `bytes` bytes, as late as it can (UDP_SEGMENT).
pub fn set_udp_segment(s: &std::net::UdpSocket, bytes: usize) -> io::Result<()> {
    let bytes = bytes as libc::c_int;
    let len = size_of_val(&bytes) as libc::socklen_t;
    // SAFETY: pointer and length describe a local.
    let r = unsafe {
        let value = (&raw const bytes).cast();
        libc::setsockopt(s.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, value, len)
    };
    check(r as isize).map(drop)
}

/// Sends bytes of which the last is urgent.
pub fn send_urgent(s: &TcpStream, bytes: &[u8]) {
    // SAFETY: pointer and length come from one slice.
    let n = unsafe { libc::send(s.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_OOB) };
    assert_eq!(n, bytes.len() as isize);
}

/// The kernel asks for an echo with `payload` and returns what came back (ICMP datagram socket).
pub fn kernel_ping(to: std::net::Ipv4Addr, payload: &[u8]) -> io::Result<Vec<u8>> {
    std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0")?;
    let mut message = vec![8, 0, 0, 0, 0, 0, 0, 1];
    message.extend_from_slice(payload);
    let mut answer = vec![0; message.len() + 64];
    // SAFETY: every pointer points to a local or a slice, with its length; the descriptor has no other owner.
    unsafe {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
        let fd = check(libc::socket(libc::AF_INET, kind, libc::IPPROTO_ICMP) as isize)?;
        let fd = OwnedFd::from_raw_fd(fd as i32);
        let patience = libc::timeval { tv_sec: 60, tv_usec: 0 };
        let len = size_of_val(&patience) as libc::socklen_t;
        let value = (&raw const patience).cast();
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, value, len);
        let address = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: 0,
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(to.octets()) },
            sin_zero: [0; 8],
        };
        let len = size_of_val(&address) as libc::socklen_t;
        let to = (&raw const address).cast();
        let bytes = message.as_ptr().cast();
        check(libc::sendto(fd.as_raw_fd(), bytes, message.len(), 0, to, len))?;
        let mut receive =
            || check(libc::recv(fd.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), 0));
        let n = loop {
            match receive() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                n => break n?,
            }
        };
        answer.truncate(n);
    }
    Ok(answer.split_off(8))
}
