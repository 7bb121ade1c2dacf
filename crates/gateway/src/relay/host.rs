//! Sockets of the host.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, setsockopt,
    socket, sockopt,
};

use super::sys;
use crate::config::Outbound;
use crate::stat::{HostTcp, Refusal};

/// A connection that was begun, and whether it exists already.
pub struct Begun {
    pub stream: TcpStream,
    pub is_connected: bool,
}

/// Makes a socket that does not block.
pub fn open(
    is_v4: bool,
    kind: SockType,
    protocol: impl Into<Option<SockProtocol>>,
) -> nix::Result<OwnedFd> {
    let family = if is_v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    socket(family, kind, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, protocol)
}

/// Lets a socket start where the options say.
pub fn bind_outbound(fd: &OwnedFd, to: SocketAddr, outbound: &Outbound) -> nix::Result<()> {
    if let Some(interface) = outbound.interface_for(to) {
        setsockopt(fd, sockopt::BindToDevice, &interface.into())?;
    }
    match outbound.address_for(to) {
        Some(own) => bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(own, 0))),
        None => Ok(()),
    }
}

/// Fixes the peer of a socket.
pub fn connect_to(fd: &impl AsFd, to: SocketAddr) -> nix::Result<()> {
    connect(fd.as_fd().as_raw_fd(), &SockaddrStorage::from(to))
}

/// Begins a TCP connection.
///
/// # Errors
/// What the host's kernel says at once.
pub fn begin_connection(to: SocketAddr, outbound: &Outbound) -> nix::Result<Begun> {
    let fd = open(to.is_ipv4(), SockType::Stream, None)?;
    bind_outbound(&fd, to, outbound)?;
    let is_connected = match connect_to(&fd, to) {
        Ok(()) => true,
        Err(Errno::EINPROGRESS | Errno::EINTR) => false,
        Err(e) => return Err(e),
    };
    let stream = TcpStream::from(fd);
    prepare(&stream);
    Ok(Begun { stream, is_connected })
}

/// Options of every connection that is relayed: what the guest sent at once leaves at once, and a peer that
/// vanished is noticed one day. A connection works without them.
pub fn prepare(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = setsockopt(stream, sockopt::KeepAlive, &true);
}

/// Closes a connection by a reset.
pub fn reset(stream: TcpStream) {
    end_by_reset(&stream);
}

/// Lets a connection end by a reset when it is closed.
pub fn end_by_reset(stream: &TcpStream) {
    // Without the option its end is orderly.
    let _ = setsockopt(stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
}

/// What became of a connection that was begun.
pub fn outcome(stream: &TcpStream) -> Result<(), Errno> {
    match stream.take_error() {
        Ok(None) => Ok(()),
        Ok(Some(e)) | Err(e) => Err(errno_of(&e)),
    }
}

/// The errno of an error of std.
pub fn errno_of(e: &io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}

/// What a guest is told of a connection that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// A reset.
    Refused,
    /// Destination unreachable, with the codes of ICMP (type 3) and ICMPv6 (type 1).
    Unreachable(u8, u8),
    /// Nothing: it tries again, or gives up by its own clock.
    Silence,
}

/// What an errno of `connect` means for the guest, and what it is counted as.
pub fn failure_of(errno: Errno) -> (Failure, Refusal) {
    match errno {
        Errno::ECONNREFUSED | Errno::ECONNRESET => (Failure::Refused, Refusal::Refused),
        Errno::ENETUNREACH | Errno::ENETDOWN | Errno::ENODEV => {
            (Failure::Unreachable(0, 0), Refusal::Unreachable)
        }
        Errno::EHOSTUNREACH | Errno::EHOSTDOWN => {
            (Failure::Unreachable(1, 3), Refusal::Unreachable)
        }
        // The host's own filter.
        Errno::EACCES | Errno::EPERM => (Failure::Unreachable(13, 1), Refusal::Unreachable),
        Errno::EPROTO | Errno::ENOPROTOOPT => (Failure::Unreachable(2, 4), Refusal::Unreachable),
        Errno::ETIMEDOUT => (Failure::Silence, Refusal::TimedOut),
        Errno::EMFILE | Errno::ENFILE => (Failure::Silence, Refusal::Descriptors),
        _ => (Failure::Silence, Refusal::HostSocket),
    }
}

/// How a connection is doing; `None` before it exists.
pub fn connection(stream: &TcpStream) -> Option<HostTcp> {
    /// `tcpi_state` of a connection whose SYN is not answered (include/net/tcp_states.h TCP_SYN_SENT).
    const SYN_SENT: u8 = 2;
    let mut info = [0; TCP_INFO_BYTES];
    let info = sys::tcp_info(stream.as_fd(), &mut info).ok()?;
    let word = |at: usize| Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?));
    if info.first() == Some(&SYN_SENT) {
        return None;
    }
    Some(HostTcp {
        rtt: Duration::from_micros(word(68)?.into()),
        retransmits: word(100)?,
        in_flight_pkts: word(24)?,
        // Since Linux 4.6.
        unsent_bytes: word(144).unwrap_or_default(),
    })
}

/// Bytes of `struct tcp_info` up to the last field that is read (include/uapi/linux/tcp.h): tcpi_unacked at 24,
/// tcpi_rtt at 68, tcpi_total_retrans at 100, tcpi_notsent_bytes at 144.
const TCP_INFO_BYTES: usize = 148;
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(libc::tcp_info, tcpi_unacked) == 24);
    assert!(offset_of!(libc::tcp_info, tcpi_rtt) == 68);
    assert!(offset_of!(libc::tcp_info, tcpi_total_retrans) == 100);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_hears_of_a_failed_connection_what_the_host_heard() {
        assert_eq!(failure_of(Errno::ECONNREFUSED).0, Failure::Refused);
        assert_eq!(failure_of(Errno::ENETUNREACH).0, Failure::Unreachable(0, 0));
        assert_eq!(failure_of(Errno::EHOSTUNREACH).0, Failure::Unreachable(1, 3));
        assert_eq!(failure_of(Errno::ETIMEDOUT).0, Failure::Silence);
        assert_eq!(failure_of(Errno::EMFILE), (Failure::Silence, Refusal::Descriptors));
    }
}
