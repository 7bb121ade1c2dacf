//! Connections, flows and packets that the stack hands out. "Local" is the guest, and "peer" the server that it wants.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fulmar_tokio::{TcpStream, UdpFlow};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc::Sender;

use crate::IpNumber;
use crate::idle::Idle;
use crate::packet;

/// Traffic of a guest.
#[allow(clippy::large_enum_variant)]
pub enum IpStackStream {
    /// A TCP connection.
    Tcp(IpStackTcpStream),
    /// The datagrams from one address and port to another.
    Udp(IpStackUdpStream),
    /// A packet of another protocol.
    UnknownTransport(IpStackUnknownTransport),
    /// Bytes that are not a complete IP packet.
    UnknownNetwork(Vec<u8>),
}

impl IpStackStream {
    /// The guest's address; port 0 without TCP and UDP; unspecified for bytes that are not a packet.
    pub fn local_addr(&self) -> SocketAddr {
        self.ends().0
    }

    /// The destination, likewise.
    pub fn peer_addr(&self) -> SocketAddr {
        self.ends().1
    }

    fn ends(&self) -> (SocketAddr, SocketAddr) {
        let (src, dst): (IpAddr, IpAddr) = match self {
            IpStackStream::Tcp(tcp) => return (tcp.local_addr(), tcp.peer_addr()),
            IpStackStream::Udp(udp) => return (udp.local_addr(), udp.peer_addr()),
            IpStackStream::UnknownTransport(unknown) => (unknown.src, unknown.dst),
            IpStackStream::UnknownNetwork(_) => {
                (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into())
            }
        };
        (SocketAddr::new(src, 0), SocketAddr::new(dst, 0))
    }
}

/// A TCP connection. Its SYN is answered when [`IpStack::accept`](crate::IpStack::accept) returns it.
#[derive(Debug)]
pub struct IpStackTcpStream {
    /// `None`: the time-out has reset it.
    pub(crate) stream: Option<TcpStream>,
    pub(crate) guest: SocketAddr,
    pub(crate) server: SocketAddr,
    pub(crate) idle: Idle,
}

impl IpStackTcpStream {
    /// The guest's address.
    pub fn local_addr(&self) -> SocketAddr {
        self.guest
    }

    /// The address that the guest connects to.
    pub fn peer_addr(&self) -> SocketAddr {
        self.server
    }
}

impl AsyncRead for IpStackTcpStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(())) };
        if let Poll::Ready(read) = Pin::new(stream).poll_read(cx, buf) {
            self.idle.touch();
            return Poll::Ready(read);
        }
        ready!(self.idle.poll_over(cx));
        if let Some(stream) = self.stream.take() {
            // Its drop resets it.
            let _ = stream.get_ref().set_linger(Some(Duration::ZERO));
        }
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for IpStackTcpStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let stream = self.stream.as_mut().ok_or(ErrorKind::BrokenPipe)?;
        let written = ready!(Pin::new(stream).poll_write(cx, buf));
        self.idle.touch();
        Poll::Ready(written)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(())) };
        Pin::new(stream).poll_shutdown(cx)
    }
}

/// The datagrams from one address and port to another. One read is one datagram, whose tail is lost if the buffer is
/// too short, and one write is one.
#[derive(Debug)]
pub struct IpStackUdpStream {
    pub(crate) flow: UdpFlow,
    pub(crate) idle: Idle,
}

impl IpStackUdpStream {
    /// The guest's address.
    pub fn local_addr(&self) -> SocketAddr {
        self.flow.peer_addr()
    }

    /// The destination of its datagrams.
    pub fn peer_addr(&self) -> SocketAddr {
        self.flow.local_addr()
    }
}

impl AsyncRead for IpStackUdpStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(datagram) = self.flow.poll_recv(cx) {
            self.idle.touch();
            // None: the stack has ended.
            let datagram = datagram.unwrap_or_default();
            buf.put_slice(&datagram[..datagram.len().min(buf.remaining())]);
            return Poll::Ready(Ok(()));
        }
        ready!(self.idle.poll_over(cx));
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for IpStackUdpStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(pin!(self.flow.send(buf)).poll(cx))?;
        self.idle.touch();
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A packet of a protocol other than TCP and UDP, such as ICMP.
pub struct IpStackUnknownTransport {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: IpNumber,
    pub(crate) payload: Vec<u8>,
    pub(crate) mtu: usize,
    pub(crate) answers: Sender<Vec<u8>>,
}

impl IpStackUnknownTransport {
    /// The source.
    pub fn src_addr(&self) -> IpAddr {
        self.src
    }

    /// The destination.
    pub fn dst_addr(&self) -> IpAddr {
        self.dst
    }

    /// The bytes after the IP headers.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The protocol.
    pub fn ip_protocol(&self) -> IpNumber {
        self.protocol
    }

    /// Sends a payload from the packet's destination to its source, in several packets if it is longer than the MTU.
    /// Packets for which the device has no space are lost.
    ///
    /// # Errors
    /// The stack has ended.
    pub fn send(&self, payload: Vec<u8>) -> io::Result<()> {
        if self.answers.is_closed() {
            return Err(io::Error::new(ErrorKind::BrokenPipe, "the stack has ended"));
        }
        let ends = (self.dst, self.src);
        packet::build(ends, self.protocol, self.mtu, &payload, |packet| {
            let _ = self.answers.try_send(packet);
        })
    }
}
