//! Sockets of the host.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use fulmar_stack::ip::SentError;
use fulmar_stack::wire::{icmpv4, icmpv6};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, SockFlag, SockProtocol, SockType, SockaddrStorage, bind,
    connect, setsockopt, socket, sockopt,
};

use super::sys;
use super::way::{Candidate, Candidates};
use crate::config::Outbound;
use crate::stat::{HostTcp, Refusal};

/// A connection that was begun, and whether it is established already.
pub(crate) struct Begun {
    pub stream: TcpStream,
    pub is_connected: bool,
}

/// Makes a socket that does not block.
pub(crate) fn open(
    is_v4: bool,
    kind: SockType,
    protocol: impl Into<Option<SockProtocol>>,
) -> nix::Result<OwnedFd> {
    let family = if is_v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    socket(family, kind, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, protocol)
}

/// Binds a socket to the interface and the address of `--outbound`.
pub(crate) fn bind_outbound(fd: &OwnedFd, to: SocketAddr, outbound: &Outbound) -> nix::Result<()> {
    if let Some(interface) = outbound.interface_for(to) {
        setsockopt(fd, sockopt::BindToDevice, &interface.into())?;
    }
    match outbound.address_for(to) {
        Some(own) => bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(own, 0))),
        None => Ok(()),
    }
}

/// Connects a socket that does not block.
pub(crate) fn connect_to(fd: &impl AsFd, to: SocketAddr) -> nix::Result<()> {
    connect(fd.as_fd().as_raw_fd(), &SockaddrStorage::from(to))
}

/// The first of several addresses to which the host has a route. One alone is not tried.
pub(crate) fn first_with_route(all: Candidates, outbound: &Outbound) -> Option<Candidate> {
    let has_route = |Candidate { to, .. }: &Candidate| {
        let probe = || {
            let fd = open(to.is_ipv4(), SockType::Datagram, None)?;
            bind_outbound(&fd, *to, outbound)?;
            connect_to(&fd, *to)
        };
        probe().is_ok()
    };
    let is_alone = all.len() == 1;
    all.into_iter().find(|candidate| is_alone || has_route(candidate))
}

/// Begins a TCP connection.
///
/// # Errors
/// The immediate error of the host's kernel.
pub(crate) fn begin_connection(to: SocketAddr, outbound: &Outbound) -> nix::Result<Begun> {
    let fd = open(to.is_ipv4(), SockType::Stream, None)?;
    bind_outbound(&fd, to, outbound)?;
    let is_connected = match connect_to(&fd, to) {
        Ok(()) => true,
        Err(Errno::EINPROGRESS | Errno::EINTR) => false,
        Err(e) => return Err(e),
    };
    let stream = TcpStream::from(fd);
    set_stream_options(&stream);
    Ok(Begun { stream, is_connected })
}

/// Sets the options of every connection that is relayed: TCP_NODELAY, SO_KEEPALIVE, SO_OOBINLINE (urgent data stays in
/// the stream, RFC 6093 section 6), and SO_LINGER of zero, so that the kernel resets the connections of a process that
/// was killed, unless [`close`] closes them. A connection works without them. What a listener accepts inherits its
/// options.
pub(crate) fn set_stream_options(socket: &impl AsFd) {
    let _ = setsockopt(socket, sockopt::TcpNoDelay, &true);
    let _ = setsockopt(socket, sockopt::KeepAlive, &true);
    let _ = setsockopt(socket, sockopt::OobInline, &true);
    set_linger(socket, Linger::Reset);
}

/// Closes a connection both of whose streams have ended. The kernel delivers the bytes that it still holds.
pub(crate) fn close(stream: TcpStream) {
    set_linger(&stream, Linger::Deliver);
}

/// The kernel's treatment of a connection whose socket is closed (SO_LINGER).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Linger {
    /// It sends a reset, and discards the unsent bytes.
    Reset,
    /// It sends the remaining bytes and a FIN.
    Deliver,
}

/// Sets SO_LINGER.
pub(crate) fn set_linger(socket: &impl AsFd, linger: Linger) {
    let l_onoff = libc::c_int::from(linger == Linger::Reset);
    // The option is one of every TCP socket.
    let _ = setsockopt(socket, sockopt::Linger, &libc::linger { l_onoff, l_linger: 0 });
}

/// The result of a connect that did not block (SO_ERROR).
pub(crate) fn outcome(stream: &TcpStream) -> Result<(), Errno> {
    match stream.take_error() {
        Ok(None) => Ok(()),
        Ok(Some(e)) | Err(e) => Err(errno_of(&e)),
    }
}

/// The errno of an error of std.
pub(crate) fn errno_of(e: &io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}

/// Whether the process or the system lacks descriptors or memory: a call that fails so is tried again later.
pub(crate) fn is_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
}

/// Why a flow of the guest failed, which decides the answer to the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failure {
    /// No program has the port. A connection is reset.
    Refused,
    /// No route leads to the destination.
    NoRoute,
    /// The destination does not answer on its link.
    NoHost,
    /// The destination does not have the protocol.
    NoProtocol,
    /// A filter or the policy denies it.
    Prohibited,
    /// The guest gets no answer: it sends again, or gives up at its own time-out.
    Silence,
}

impl Failure {
    /// The ICMP error that the guest gets.
    pub(crate) fn error(self, is_v4: bool) -> Option<SentError> {
        /// Communication administratively prohibited (RFC 1812 section 5.2.7.1).
        const PROHIBITED_V4: u8 = 13;
        /// Protocol unreachable (RFC 792).
        const PROTOCOL_V4: u8 = 2;
        let (v4, v6) = match self {
            Failure::Refused => return Some(SentError::PortUnreachable),
            Failure::NoRoute => (icmpv4::unreachable::NET, icmpv6::unreachable::NO_ROUTE),
            Failure::NoHost => (icmpv4::unreachable::HOST, icmpv6::unreachable::ADDRESS),
            Failure::NoProtocol => (PROTOCOL_V4, icmpv6::unreachable::PORT),
            Failure::Prohibited => (PROHIBITED_V4, icmpv6::unreachable::ADMIN_PROHIBITED),
            Failure::Silence => return None,
        };
        Some(SentError::Unreachable { code: if is_v4 { v4 } else { v6 } })
    }
}

/// What an errno of `socket`, `bind` or `connect`, or of `send` on a socket of datagrams, means for the guest, and what
/// it is counted as (connect(2), ip(7), icmp(7)).
pub(crate) fn failure_of(errno: Errno) -> (Failure, Refusal) {
    match errno {
        Errno::ECONNREFUSED | Errno::ECONNRESET => (Failure::Refused, Refusal::Refused),
        // The host has no route, no address of the IP version or of the options, or not the IP version at all.
        Errno::ENETUNREACH
        | Errno::ENETDOWN
        | Errno::ENODEV
        | Errno::EADDRNOTAVAIL
        | Errno::EAFNOSUPPORT => (Failure::NoRoute, Refusal::Unreachable),
        // EINVAL: an address of a link, which leads nowhere without the link's name.
        Errno::EHOSTUNREACH | Errno::EHOSTDOWN | Errno::EINVAL => {
            (Failure::NoHost, Refusal::Unreachable)
        }
        // The host's own filter.
        Errno::EACCES | Errno::EPERM => (Failure::Prohibited, Refusal::Unreachable),
        Errno::EPROTO | Errno::ENOPROTOOPT => (Failure::NoProtocol, Refusal::Unreachable),
        Errno::ETIMEDOUT => (Failure::Silence, Refusal::TimedOut),
        Errno::EMFILE | Errno::ENFILE => (Failure::Silence, Refusal::Descriptors),
        // A shortage of the host's kernel (ENOBUFS, ENOMEM, EAGAIN): the guest tries again.
        _ => (Failure::Silence, Refusal::HostSocket),
    }
}

/// The meaning of a failed `send` or `recv` for a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamError {
    /// The socket will be ready later, and epoll reports it.
    NotReady,
    /// A signal ended the call.
    Interrupted,
    /// The kernel has no memory now, and does not say when it has.
    Shortage,
    /// The connection is over: ECONNRESET, EPIPE, ETIMEDOUT, or an error from the network.
    Over,
}

/// The meaning of an errno of `send` or `recv` for a connection (send(2), recv(2), tcp(7)).
pub(crate) fn stream_error_of(errno: Errno) -> StreamError {
    match errno {
        Errno::EAGAIN => StreamError::NotReady,
        Errno::EINTR => StreamError::Interrupted,
        Errno::ENOBUFS | Errno::ENOMEM => StreamError::Shortage,
        _ => StreamError::Over,
    }
}

/// The meaning of a failed `recv` for a socket of datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DatagramError {
    /// Nothing is there now.
    NotReady,
    /// A signal ended the call.
    Interrupted,
    /// The pending error of the socket, which is about a datagram that was sent before. The call has cleared it; the
    /// error queue has it, too.
    Pending,
    /// Nothing can be received: the remaining state would make the socket ready for ever.
    Broken,
}

/// The meaning of an errno of `recv` for a socket of datagrams (recv(2), udp(7), ip(7)). A kernel without memory for a
/// datagram loses it without an errno.
pub(crate) fn datagram_error_of(errno: Errno) -> DatagramError {
    match errno {
        Errno::EAGAIN => DatagramError::NotReady,
        Errno::EINTR => DatagramError::Interrupted,
        e if may_be_pending(e) => DatagramError::Pending,
        _ => DatagramError::Broken,
    }
}

/// Whether an errno of `send` or `recv` on a socket of datagrams may be its pending error, which the call
/// clears: that of an ICMP error about a datagram sent before (ip(7), IP_RECVERR). The error queue has it, too.
pub(crate) fn may_be_pending(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ECONNREFUSED
            | Errno::ENETUNREACH
            | Errno::EHOSTUNREACH
            | Errno::EHOSTDOWN
            | Errno::EACCES
            | Errno::EMSGSIZE
            | Errno::ENOPROTOOPT
            | Errno::EPROTO
            | Errno::EOPNOTSUPP
            | Errno::ENONET
    )
}

/// Whether an errno of `send` on a socket of datagrams that is not connected is a pending error in any case: the call
/// itself has none of them.
pub(crate) fn is_always_pending(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ECONNREFUSED
            | Errno::EHOSTDOWN
            | Errno::ENOPROTOOPT
            | Errno::EPROTO
            | Errno::EOPNOTSUPP
            | Errno::ENONET
    )
}

/// The control message that gives a datagram its TTL or hop limit, 1 to 255 (ip(7), IP_TTL; ipv6(7), IPV6_HOPLIMIT).
pub(crate) fn hop_limit(is_v4: bool, hops: &i32) -> ControlMessage<'_> {
    if is_v4 { ControlMessage::Ipv4Ttl(hops) } else { ControlMessage::Ipv6HopLimit(hops) }
}

/// Whether an errno of `send` on a connected socket of datagrams may mean that the host has lost the address that the
/// socket was connected from: another socket starts at the new one. Linux had EINVAL for it before it had ENETUNREACH.
pub(crate) fn may_be_of_lost_address(errno: Errno) -> bool {
    matches!(errno, Errno::ENETUNREACH | Errno::EINVAL | Errno::EADDRNOTAVAIL)
}

/// TCP_INFO of a connection; `None` before it is established.
pub(crate) fn tcp_info(stream: &TcpStream) -> Option<HostTcp> {
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
    use std::io::Read;
    use std::net::TcpListener;

    use nix::sys::socket::getsockopt;

    #[test]
    fn accepted_connections_inherit_options_and_are_reset_unless_closed_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        set_stream_options(&listener);
        for ends_in_order in [true, false] {
            let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().unwrap();
            assert!(stream.nodelay().unwrap());
            assert!(getsockopt(&stream, sockopt::KeepAlive).unwrap());
            if ends_in_order {
                close(stream)
            } else {
                drop(stream)
            }
            let end = far.read(&mut [0]).map_err(|e| e.kind());
            let wanted = if ends_in_order { Ok(0) } else { Err(io::ErrorKind::ConnectionReset) };
            assert_eq!(end, wanted);
        }
    }

    #[test]
    fn the_guest_gets_the_error_of_a_failed_host_connection() {
        let no_route = (Failure::NoRoute, Refusal::Unreachable);
        let no_host = (Failure::NoHost, Refusal::Unreachable);
        let prohibited = (Failure::Prohibited, Refusal::Unreachable);
        let no_protocol = (Failure::NoProtocol, Refusal::Unreachable);
        let is_short = (Failure::Silence, Refusal::HostSocket);
        for (errno, told) in [
            (Errno::ECONNREFUSED, (Failure::Refused, Refusal::Refused)),
            (Errno::ECONNRESET, (Failure::Refused, Refusal::Refused)),
            (Errno::ENETUNREACH, no_route),
            (Errno::ENETDOWN, no_route),
            (Errno::ENODEV, no_route),
            (Errno::EADDRNOTAVAIL, no_route),
            (Errno::EAFNOSUPPORT, no_route),
            (Errno::EHOSTUNREACH, no_host),
            (Errno::EHOSTDOWN, no_host),
            (Errno::EINVAL, no_host),
            (Errno::EACCES, prohibited),
            (Errno::EPERM, prohibited),
            (Errno::EPROTO, no_protocol),
            (Errno::ENOPROTOOPT, no_protocol),
            (Errno::ETIMEDOUT, (Failure::Silence, Refusal::TimedOut)),
            (Errno::EMFILE, (Failure::Silence, Refusal::Descriptors)),
            (Errno::ENFILE, (Failure::Silence, Refusal::Descriptors)),
            (Errno::ENOBUFS, is_short),
            (Errno::ENOMEM, is_short),
            (Errno::EAGAIN, is_short),
            (Errno::EADDRINUSE, is_short),
        ] {
            assert_eq!(failure_of(errno), told, "{errno}");
        }
    }

    #[test]
    fn a_failure_has_one_error_in_each_ip_version() {
        let code = |code| Some(SentError::Unreachable { code });
        for (failure, v4, v6) in [
            (Failure::NoRoute, code(0), code(0)),
            (Failure::NoHost, code(1), code(3)),
            (Failure::NoProtocol, code(2), code(4)),
            (Failure::Prohibited, code(13), code(1)),
            (Failure::Refused, Some(SentError::PortUnreachable), Some(SentError::PortUnreachable)),
            (Failure::Silence, None, None),
        ] {
            assert_eq!([failure.error(true), failure.error(false)], [v4, v6], "{failure:?}");
        }
    }

    #[test]
    fn a_connection_outlives_what_passes_and_ends_by_the_rest() {
        for (errno, meaning) in [
            (Errno::EAGAIN, StreamError::NotReady),
            (Errno::EINTR, StreamError::Interrupted),
            (Errno::ENOBUFS, StreamError::Shortage),
            (Errno::ENOMEM, StreamError::Shortage),
            (Errno::EPIPE, StreamError::Over),
            (Errno::ECONNRESET, StreamError::Over),
            (Errno::ECONNREFUSED, StreamError::Over),
            (Errno::ETIMEDOUT, StreamError::Over),
            (Errno::EHOSTUNREACH, StreamError::Over),
            (Errno::ENETUNREACH, StreamError::Over),
            (Errno::ENETDOWN, StreamError::Over),
            (Errno::EMSGSIZE, StreamError::Over),
            (Errno::ENOTCONN, StreamError::Over),
            (Errno::EPERM, StreamError::Over),
            // An error from the network, which `recv` reports once (ip(7), icmp_err_convert).
            (Errno::EHOSTDOWN, StreamError::Over),
            (Errno::ENONET, StreamError::Over),
            (Errno::ENOPROTOOPT, StreamError::Over),
            (Errno::EOPNOTSUPP, StreamError::Over),
            (Errno::EPROTO, StreamError::Over),
            (Errno::EACCES, StreamError::Over),
            // A module of the host's security, or a socket that is none any more.
            (Errno::EIO, StreamError::Over),
            (Errno::EINVAL, StreamError::Over),
            (Errno::EBADF, StreamError::Over),
        ] {
            assert_eq!(stream_error_of(errno), meaning, "{errno}");
        }
    }

    #[test]
    fn a_socket_of_datagrams_outlives_the_errors_of_what_it_has_sent() {
        use DatagramError::{Broken, Interrupted, NotReady, Pending};
        for (errno, meaning) in [
            (Errno::EAGAIN, NotReady),
            (Errno::EINTR, Interrupted),
            (Errno::ECONNREFUSED, Pending),
            (Errno::ENETUNREACH, Pending),
            (Errno::EHOSTUNREACH, Pending),
            (Errno::EHOSTDOWN, Pending),
            (Errno::ENONET, Pending),
            (Errno::ENOPROTOOPT, Pending),
            (Errno::EOPNOTSUPP, Pending),
            (Errno::EPROTO, Pending),
            (Errno::EMSGSIZE, Pending),
            (Errno::EACCES, Pending),
            (Errno::ENOMEM, Broken),
            (Errno::ENOBUFS, Broken),
            (Errno::EPERM, Broken),
            (Errno::ENETDOWN, Broken),
            (Errno::ENOTCONN, Broken),
            (Errno::EIO, Broken),
            (Errno::EINVAL, Broken),
            (Errno::EBADF, Broken),
        ] {
            assert_eq!(datagram_error_of(errno), meaning, "{errno}");
        }
    }
}
