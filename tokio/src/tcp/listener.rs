//! The listener.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use fulmar::ListenOptions;
use tokio::net::ToSocketAddrs;

use super::{TcpStream, each_address};
use crate::{Net, PendingConnection};

/// A TCP listener.
///
/// ```
/// # use fulmar::{Stack, devices};
/// # use fulmar_tokio::{Net, TcpListener, TcpStream};
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?)?;
/// # let net = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?)?;
/// let listener = TcpListener::bind(&server, "0.0.0.0:7").await?;
/// # let mut client = TcpStream::connect(&net, "10.0.0.1:7").await?;
/// # client.write_all(b"hello").await?;
/// loop {
///     let (stream, _) = listener.accept().await?;
///     tokio::spawn(async move {
///         let (mut from, mut to) = stream.into_split();
///         tokio::io::copy(&mut from, &mut to).await
///     });
/// #   break;
/// }
/// # client.read_exact(&mut [0; 5]).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TcpListener {
    listener: fulmar::TcpListener,
    net: Net,
}

impl TcpListener {
    /// Listens on the first address that can be bound.
    ///
    /// # Errors
    /// As [`fulmar::TcpListener::bind`].
    pub async fn bind(net: &Net, addr: impl ToSocketAddrs) -> io::Result<TcpListener> {
        TcpListener::bind_with(net, addr, ListenOptions::default()).await
    }

    /// Listens with options.
    ///
    /// # Errors
    /// As [`fulmar::TcpListener::bind_with`].
    pub async fn bind_with(
        net: &Net,
        addr: impl ToSocketAddrs,
        options: ListenOptions,
    ) -> io::Result<TcpListener> {
        each_address(addr, |addr| std::future::ready(TcpListener::bind_to(net, addr, options)))
            .await
    }

    /// As [`TcpListener::bind_with`], at once: an address needs no resolver.
    ///
    /// # Errors
    /// As there.
    pub fn bind_to(net: &Net, addr: SocketAddr, options: ListenOptions) -> io::Result<TcpListener> {
        let listener = fulmar::TcpListener::bind_with(net.stack(), addr, options)?;
        Ok(TcpListener { listener, net: net.clone() })
    }

    /// Accepts a connection. Cancellation safe.
    ///
    /// # Errors
    /// As [`fulmar::TcpListener::accept`].
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// As [`TcpListener::accept`]. Of the tasks that wait, the last is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        let accepted = self.listener.poll_accept(cx);
        accepted.map_ok(|(stream, peer)| (TcpStream::of(stream, &self.net), peer))
    }

    /// Takes a SYN that the program answers or rejects: see [`fulmar::TcpListener::pending`]. Cancellation safe.
    ///
    /// # Errors
    /// As there.
    pub async fn pending(&self) -> io::Result<PendingConnection> {
        poll_fn(|cx| self.poll_pending(cx)).await
    }

    /// As [`TcpListener::pending`]. Of the tasks that wait, the last is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_pending(&self, cx: &mut Context<'_>) -> Poll<io::Result<PendingConnection>> {
        let pending = self.listener.poll_pending(cx);
        pending.map_ok(|pending| PendingConnection { pending, net: self.net.clone() })
    }

    /// The local address.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The listener of the stack.
    pub fn get_ref(&self) -> &fulmar::TcpListener {
        &self.listener
    }
}
