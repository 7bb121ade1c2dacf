//! UDP sockets, shaped like `std::net`'s.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::{Request, WatchedShard};
use fulmar_stack::base::{DropReason, MtuDiscovery, Stage};
use fulmar_stack::ip::{InvokingPacket, SentError};
use fulmar_stack::shard::TakenDatagram;
use fulmar_stack::socket::{Ready, SocketError};
use fulmar_stack::udp::BindOptions;

use crate::api::socket::{Socket, each_address, to_io};
use crate::api::stack::Stack;
use crate::api::tcp::valid_ttl;

/// A UDP socket. Threads may share it.
///
/// ```
/// # use fulmar::{Stack, UdpSocket, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// let socket = UdpSocket::bind(&server, "0.0.0.0:53")?;
/// # let client = UdpSocket::connected(&stack, "10.0.0.1:53")?;
/// # client.send(b"question")?;
/// let mut question = [0; 1500];
/// let (bytes, from) = socket.recv_from(&mut question)?;
/// socket.send_to(&question[..bytes], from)?;
/// # assert_eq!(client.recv(&mut [0; 100])?, 8);
/// # Ok(())
/// # }
/// ```
pub struct UdpSocket {
    pub(crate) socket: Arc<Socket>,
}

impl UdpSocket {
    /// Binds to the first address that can be bound.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`; `NetworkDown` if the device is gone for good, as one of
    /// [`devices::link_pair`](crate::devices::link_pair) is after the stack on the other.
    pub fn bind(stack: &Stack, addr: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        UdpSocket::bind_with(stack, addr, BindOptions::default())
    }

    /// Binds with options: reuse-address, IPv6 only, every port.
    ///
    /// With several shards the socket receives the datagrams of all device queues. Sockets bound to one port by
    /// handles of different shards ([`Stack::on_shard`]) share the port: all datagrams of one peer go to one of
    /// them, so that each thread can have a socket of its own.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`].
    pub fn bind_with(
        stack: &Stack,
        addr: impl ToSocketAddrs,
        options: BindOptions,
    ) -> io::Result<UdpSocket> {
        each_address(addr, |a| {
            let shares = stack.home.is_some();
            let socket = stack.new_socket_on(stack.shard_of_port(a.port()), |shard| {
                if a.port() != 0 && !shares && shard.siblings().has_port_elsewhere(a.port()) {
                    return Err(SocketError::AddressInUse);
                }
                shard.udp().bind(a, options)
            })?;
            Ok(UdpSocket { socket })
        })
    }

    /// A connected socket on a port of the stack's choice. With several shards, and a device that spreads
    /// flows by their hash, the port is chosen so that answers arrive on the queue of this thread's shard.
    ///
    /// # Errors
    /// As [`UdpSocket::bind`] and [`UdpSocket::connect`].
    pub fn connected(stack: &Stack, peer: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        each_address(peer, |a| {
            let socket = stack.new_socket(|shard| shard.udp().open(a))?;
            Ok(UdpSocket { socket })
        })
    }

    /// Sets the peer: `send` sends to it, `recv` receives from it alone, and its ICMP errors are reported (port
    /// unreachable as `ConnectionRefused`).
    ///
    /// # Errors
    /// `NetworkUnreachable`; `AddrInUse` if another socket has the same pair.
    pub fn connect(&self, addr: impl ToSocketAddrs) -> io::Result<()> {
        let id = self.socket.id;
        each_address(addr, |a| self.socket.call(|shard, _| shard.udp().connect(id, a)))
    }

    /// Sends one datagram to `addr`. A payload larger than the path MTU is sent in fragments; the
    /// loss of one fragment loses the datagram.
    ///
    /// # Errors
    /// `EMSGSIZE` above 65,507 bytes (IPv6: 65,527), or above what fits a packet after
    /// [`UdpSocket::set_mtu_discovery`]; `NetworkUnreachable`; the pending ICMP error of an
    /// earlier datagram.
    pub fn send_to(&self, buf: &[u8], addr: impl ToSocketAddrs) -> io::Result<usize> {
        let to = addr.to_socket_addrs()?.next().ok_or(io::ErrorKind::InvalidInput)?;
        let s = &*self.socket;
        s.wait_coarse(
            Ready::WRITABLE,
            || s.write_limit(),
            |shard, now| shard.udp().send_step(now, s.id, &[buf], Some(to)),
        )
    }

    /// Sends one datagram to the connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`]; `EDESTADDRREQ` if not connected.
    pub fn send(&self, buf: &[u8]) -> io::Result<usize> {
        let s = &*self.socket;
        s.wait_coarse(
            Ready::WRITABLE,
            || s.write_limit(),
            |shard, now| shard.udp().send_connected(now, s.id, buf),
        )
    }

    /// Receives one datagram. Bytes that do not fit `buf` are lost.
    ///
    /// # Errors
    /// `WouldBlock` after the read time-out; the pending ICMP error of an earlier datagram.
    pub fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let s = &*self.socket;
        let take = |shard: &mut WatchedShard, _| shard.udp().receive_into(s.id, buf);
        let taken = s.wait_coarse(Ready::READABLE, || s.read_limit(), take)?;
        Ok(self.copied(taken, buf))
    }

    /// Copies a datagram that was taken whole, and frees it.
    #[inline]
    pub(crate) fn copied(&self, taken: TakenDatagram, buf: &mut [u8]) -> (usize, SocketAddr) {
        let d = match taken {
            TakenDatagram::Copied(n, from) => return (n, from),
            TakenDatagram::Whole(d) => d,
        };
        let (n, host) = (d.payload.copy_to(0, buf), self.socket.host());
        host.pass(Stage::ReceiveCopied);
        host.post(Request::Free(d.payload));
        (n, d.src)
    }

    /// Receives one datagram from the connected peer.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv_from(buf).map(|(n, _)| n)
    }

    /// Receives one datagram and leaves it in the queue (MSG_PEEK).
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn peek_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let s = &*self.socket;
        s.wait(Ready::READABLE, s.read_limit(), |shard, _| shard.udp().peek(s.id, buf))
    }

    /// Receives one datagram of the connected peer and leaves it in the queue (MSG_PEEK).
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.peek_from(buf).map(|(n, _)| n)
    }

    /// The local address.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.addresses()?.0.ok_or_else(|| to_io(SocketError::Invalid))
    }

    /// The connected peer.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.addresses()?.1.ok_or_else(|| to_io(SocketError::NotConnected))
    }

    /// Another handle to the same socket.
    ///
    /// # Errors
    /// Never.
    pub fn try_clone(&self) -> io::Result<UdpSocket> {
        Ok(UdpSocket { socket: Arc::clone(&self.socket) })
    }

    /// Calls return `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// Never.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        self.socket.set_nonblocking(on);
        Ok(())
    }

    /// Sets the read time-out: a receive that waits longer fails with `WouldBlock`. `None`: no limit.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_read_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(t)
    }

    /// The read time-out.
    ///
    /// # Errors
    /// Never.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.socket.read_timeout())
    }

    /// Sets the write time-out: a send that waits longer fails with `WouldBlock`. `None`: no limit. A send waits
    /// for buffers and for a full device, never for the peer.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_write_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        self.socket.set_write_timeout(t)
    }

    /// The write time-out.
    ///
    /// # Errors
    /// Never.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.socket.write_timeout())
    }

    /// Allows sending to broadcast addresses.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_broadcast(&self, on: bool) -> io::Result<()> {
        self.with_udp(|u| u.broadcast = on)
    }

    /// Whether it may send to broadcast addresses.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn broadcast(&self) -> io::Result<bool> {
        self.with_udp(|u| u.broadcast)
    }

    /// TOS (traffic class) of the datagrams, IP_TOS and IPV6_TCLASS: the DSCP in the upper six bits (RFC 2474), the ECN
    /// field (RFC 3168) in the lower two.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_tos(&self, tos: u8) -> io::Result<()> {
        self.with_udp(|u| u.dscp_ecn = tos)
    }

    /// TOS (traffic class) of the datagrams.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn tos(&self) -> io::Result<u8> {
        self.with_udp(|u| u.dscp_ecn)
    }

    /// Time to live (hop limit) of the packets.
    ///
    /// # Errors
    /// The socket is gone; `InvalidInput` outside 1 to 255.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        let ttl = valid_ttl(ttl)?;
        self.with_udp(|u| u.ttl = Some(ttl))
    }

    /// Time to live of the packets.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn ttl(&self) -> io::Result<u32> {
        self.with_udp(|u| u32::from(u.ttl.unwrap_or(64)))
    }

    /// IP_MTU_DISCOVER: the treatment of datagrams that exceed the path MTU. Default: they are fragmented; else sending
    /// one fails with `EMSGSIZE`.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_mtu_discovery(&self, discovery: MtuDiscovery) -> io::Result<()> {
        self.with_udp(|u| u.mtu_discovery = discovery)
    }

    /// Path MTU discovery of the socket.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn mtu_discovery(&self) -> io::Result<MtuDiscovery> {
        self.with_udp(|u| u.mtu_discovery)
    }

    /// UDP_GRO: receives the datagrams of a super-frame as one message; [`RecvMessage::segment_bytes`](crate::udp::RecvMessage::segment_bytes) is the
    /// size of each. The receive queue needs several times 64 KiB ([`UdpSocket::set_recv_buffer`]), and so do the
    /// buffers of [`UdpSocket::recv_many`]. Default off.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_gro(&self, on: bool) -> io::Result<()> {
        self.with_udp(|u| u.gro = on)
    }

    /// Sends an ICMP error about a received datagram from `source` to `destination`. Its source address is
    /// `router`; `None`: `destination`. It quotes `payload`, of which the start suffices. The stack's rate limit
    /// of ICMP errors applies.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn send_icmp_error(
        &self,
        source: SocketAddr,
        destination: SocketAddr,
        payload: &[u8],
        error: SentError,
        router: Option<IpAddr>,
    ) -> io::Result<()> {
        let about = InvokingPacket::datagram(source, destination, payload, payload.len());
        self.socket.call(|shard, now| {
            shard.icmp().send_error(now, &about, error, router);
            Ok(())
        })
    }

    /// Counts a datagram that the program has received and drops among the drops of the stack ([`Stack::stat`]).
    ///
    /// # Errors
    /// The socket is gone.
    pub fn count_drop(&self, reason: DropReason) -> io::Result<()> {
        self.socket.call(|shard, _| {
            shard.count_drop(reason);
            Ok(())
        })
    }

    /// Sets the size of the receive queue, bytes of storage.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_recv_buffer(&self, bytes: usize) -> io::Result<()> {
        self.with_udp(|u| u.set_recv_limit(bytes))
    }

    /// Takes the pending error (SO_ERROR).
    ///
    /// # Errors
    /// The socket is gone.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.socket.take_error()
    }

    fn with_udp<R>(&self, f: impl FnOnce(&mut fulmar_stack::udp::UdpSocket) -> R) -> io::Result<R> {
        let id = self.socket.id;
        self.socket.call(|shard, _| shard.udp().with_socket(id, f))
    }
}

impl fmt::Debug for UdpSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpSocket").field("local", &self.local_addr().ok()).finish()
    }
}
