//! The ways over which async programs talk: fulmar's sockets for tokio, and the kernel's.

use std::future::Future;
use std::io;
use std::net::SocketAddr;

use fulmar::{Stack, devices};
use fulmar_tokio::Net;
use tokio::io::{AsyncRead, AsyncWrite};

/// A stream of either.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for T {}

/// The end that accepts.
pub(super) trait Listen: Send + 'static {
    /// The next connection, without Nagle's algorithm.
    fn accept(&self) -> impl Future<Output = io::Result<impl Stream>> + Send;
}

/// Both ends of a way in one process.
pub(super) trait Way {
    /// The name in scenarios.
    const NAME: &'static str;
    /// For a person.
    const TITLE: &'static str;

    type Listener: Listen;

    /// Opens it in the present runtime.
    fn open() -> impl Future<Output = io::Result<(Self, Self::Listener)>>
    where
        Self: Sized;

    /// A connection, without Nagle's algorithm.
    fn connect(&self) -> impl Future<Output = io::Result<impl Stream>>;
}

/// Two stacks joined by a link: 10.0.0.1 and 10.0.0.2.
pub(super) fn nets() -> io::Result<[Net; 2]> {
    let (a, b) = devices::link_pair()?;
    let net = |device, address: &str| {
        let address = address.parse().map_err(io::Error::other)?;
        let stack = Stack::builder().device(device).address(address).unlisted().build();
        Net::new(stack.map_err(io::Error::other)?)
    };
    Ok([net(a, "10.0.0.1/24")?, net(b, "10.0.0.2/24")?])
}

/// Two stacks joined by a link.
pub(super) struct Linked {
    client: Net,
    to: SocketAddr,
    _server: Net,
}

impl Listen for fulmar_tokio::TcpListener {
    async fn accept(&self) -> io::Result<impl Stream> {
        let (stream, _) = fulmar_tokio::TcpListener::accept(self).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Way for Linked {
    const NAME: &'static str = "fulmar";
    const TITLE: &'static str = "fulmar, link";
    type Listener = fulmar_tokio::TcpListener;

    async fn open() -> io::Result<(Linked, fulmar_tokio::TcpListener)> {
        let [server, client] = nets()?;
        let listener = fulmar_tokio::TcpListener::bind(&server, "10.0.0.1:0").await?;
        let to = listener.local_addr()?;
        Ok((Linked { client, to, _server: server }, listener))
    }

    async fn connect(&self) -> io::Result<impl Stream> {
        let stream = fulmar_tokio::TcpStream::connect(&self.client, self.to).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// The kernel's loopback.
pub(super) struct Loopback(SocketAddr);

impl Listen for tokio::net::TcpListener {
    async fn accept(&self) -> io::Result<impl Stream> {
        let (stream, _) = tokio::net::TcpListener::accept(self).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Way for Loopback {
    const NAME: &'static str = "kernel";
    const TITLE: &'static str = "kernel, loopback";
    type Listener = tokio::net::TcpListener;

    async fn open() -> io::Result<(Loopback, tokio::net::TcpListener)> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        Ok((Loopback(listener.local_addr()?), listener))
    }

    async fn connect(&self) -> io::Result<impl Stream> {
        let stream = tokio::net::TcpStream::connect(self.0).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}
