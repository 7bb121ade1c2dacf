//! UDP sockets with the shape of `tokio::net`'s.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use fulmar::UdpBindOptions;
use fulmar::udp::{RecvMessage, SendMessage};
use tokio::net::ToSocketAddrs;

use crate::Net;
use crate::tcp::each_address;

/// A UDP socket. Of several tasks that wait to receive, the last is woken, and so of those that wait to send. All methods
/// are cancellation safe.
///
/// ```
/// # use fulmar::{Stack, devices};
/// # use fulmar_tokio::{Net, UdpSocket};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?)?;
/// # let net = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?)?;
/// let socket = UdpSocket::bind(&server, "0.0.0.0:53").await?;
/// # let client = UdpSocket::bind(&net, "10.0.0.2:0").await?;
/// # client.send_to(b"question", "10.0.0.1:53").await?;
/// let mut question = [0; 1500];
/// let (bytes, from) = socket.recv_from(&mut question).await?;
/// socket.send_to(&question[..bytes], from).await?;
/// # assert_eq!(client.recv(&mut [0; 100]).await?, 8);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct UdpSocket {
    socket: fulmar::UdpSocket,
    net: Net,
}

impl UdpSocket {
    /// Binds to the first address that can be bound.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::bind`].
    pub async fn bind(net: &Net, addr: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        UdpSocket::bind_with(net, addr, UdpBindOptions::default()).await
    }

    /// Binds with options.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::bind_with`].
    pub async fn bind_with(
        net: &Net,
        addr: impl ToSocketAddrs,
        options: UdpBindOptions,
    ) -> io::Result<UdpSocket> {
        each_address(addr, |addr| std::future::ready(UdpSocket::bind_to(net, addr, options))).await
    }

    /// As [`UdpSocket::bind_with`], at once: an address needs no resolver.
    ///
    /// # Errors
    /// As there.
    pub fn bind_to(net: &Net, addr: SocketAddr, options: UdpBindOptions) -> io::Result<UdpSocket> {
        let socket = fulmar::UdpSocket::bind_with(net.stack(), addr, options)?;
        Ok(UdpSocket { socket, net: net.clone() })
    }

    /// Sets the peer.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::connect`].
    pub async fn connect(&self, addr: impl ToSocketAddrs) -> io::Result<()> {
        each_address(addr, |addr| std::future::ready(self.socket.connect(addr))).await
    }

    /// Sends a datagram to the connected peer.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::send`].
    pub async fn send(&self, buf: &[u8]) -> io::Result<usize> {
        poll_fn(|cx| self.socket.poll_send_to(cx, buf, None)).await
    }

    /// Sends a datagram.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::send_to`].
    pub async fn send_to(&self, buf: &[u8], addr: impl ToSocketAddrs) -> io::Result<usize> {
        let none =
            || io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any address");
        let to = tokio::net::lookup_host(addr).await?.next().ok_or_else(none)?;
        poll_fn(|cx| self.socket.poll_send_to(cx, buf, Some(to))).await
    }

    /// Receives a datagram of the connected peer.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::recv`].
    pub async fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(self.recv_from(buf).await?.0)
    }

    /// Receives a datagram.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::recv_from`].
    pub async fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        poll_fn(|cx| self.socket.poll_recv_from(cx, buf)).await
    }

    /// Sends datagrams, at most 64; returns how many were sent.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::send_many`].
    pub async fn send_many(&self, messages: &[SendMessage<'_>]) -> io::Result<usize> {
        poll_fn(|cx| self.socket.poll_send_many(cx, messages)).await
    }

    /// Receives the datagrams that are queued, at least one; returns how many.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::recv_many`].
    pub async fn recv_many(&self, messages: &mut [RecvMessage<'_>]) -> io::Result<usize> {
        poll_fn(|cx| self.socket.poll_recv_many(cx, messages)).await
    }

    /// Waits until a datagram can be received.
    ///
    /// # Errors
    /// The socket is gone.
    pub async fn readable(&self) -> io::Result<()> {
        poll_fn(|cx| self.socket.poll_recv_ready(cx)).await
    }

    /// Waits until a datagram can be sent.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_send_ready(cx)
    }

    /// The local address.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// The socket of the stack: options, and calls that wait in their thread.
    pub fn get_ref(&self) -> &fulmar::UdpSocket {
        &self.socket
    }

    /// The stack's handle.
    pub fn net(&self) -> &Net {
        &self.net
    }
}
