//! TCP sockets with the shape of `tokio::net`'s.

mod listener;
mod split;

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use fulmar::ConnectOptions;
use fulmar::tcp::SendFlags;
use fulmar::zero_copy::{Loan, ZeroCopy};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::ToSocketAddrs;

use crate::Net;
pub use listener::TcpListener;
pub use split::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, WriteHalf};

/// A TCP connection.
///
/// One task may read while another writes ([`TcpStream::split`], [`TcpStream::into_split`]). Of several tasks that wait to
/// read, the last is woken, and so of those that wait to write. All methods are cancellation safe.
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
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80").await?;
/// let mut stream = TcpStream::connect(&net, "10.0.0.1:80").await?;
/// stream.set_nodelay(true)?;
/// stream.write_all(b"hello").await?;
/// # let (mut peer, _) = listener.accept().await?;
/// # peer.write_all(b"world").await?;
/// let mut answer = [0; 5];
/// stream.read_exact(&mut answer).await?;
/// println!("round-trip time {:?}", stream.get_ref().info()?.rtt);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TcpStream {
    io: Arc<Io>,
}

/// The connection, and its stack's task.
#[derive(Debug)]
struct Io {
    stream: fulmar::TcpStream,
    net: Net,
}

/// Tries each address that a name has, as `tokio::net` does.
pub(crate) async fn each_address<R, F: Future<Output = io::Result<R>>>(
    addresses: impl ToSocketAddrs,
    mut attempt: impl FnMut(SocketAddr) -> F,
) -> io::Result<R> {
    let mut last = None;
    for address in tokio::net::lookup_host(addresses).await? {
        match attempt(address).await {
            Ok(done) => return Ok(done),
            Err(e) => last = Some(e),
        }
    }
    let none = || io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any address");
    Err(last.unwrap_or_else(none))
}

impl TcpStream {
    /// Connects to the first address that answers. Names are resolved by the host's resolver.
    ///
    /// # Errors
    /// Those of `connect(2)`.
    pub async fn connect(net: &Net, addr: impl ToSocketAddrs) -> io::Result<TcpStream> {
        let options = ConnectOptions::default();
        each_address(addr, |addr| TcpStream::connect_with(net, addr, &options)).await
    }

    /// Connects with options that are set before the SYN.
    ///
    /// # Errors
    /// As [`fulmar::TcpStream::connect_with`].
    pub async fn connect_with(
        net: &Net,
        addr: SocketAddr,
        options: &ConnectOptions,
    ) -> io::Result<TcpStream> {
        let stream = fulmar::TcpStream::connect_nonblocking(net.stack(), &addr, options)?;
        poll_fn(|cx| stream.poll_connected(cx)).await?;
        Ok(TcpStream::of(stream, net))
    }

    /// A connection of the stack of `net`.
    pub(crate) fn of(stream: fulmar::TcpStream, net: &Net) -> TcpStream {
        TcpStream { io: Arc::new(Io { stream, net: net.clone() }) }
    }

    /// The connection of the stack: options, statistics, and calls that wait in their thread.
    pub fn get_ref(&self) -> &fulmar::TcpStream {
        &self.io.stream
    }

    /// The stack's handle.
    pub fn net(&self) -> &Net {
        &self.io.net
    }

    /// This end's address.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.stream.local_addr()
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.io.stream.peer_addr()
    }

    /// Disables Nagle's algorithm (TCP_NODELAY).
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        self.io.stream.set_nodelay(on)
    }

    /// Whether Nagle's algorithm is disabled.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn nodelay(&self) -> io::Result<bool> {
        self.io.stream.nodelay()
    }

    /// Waits until a read does not block.
    ///
    /// # Errors
    /// The socket is gone.
    pub async fn readable(&self) -> io::Result<()> {
        poll_fn(|cx| self.io.stream.poll_read_ready(cx)).await
    }

    /// Waits until a write does not block.
    ///
    /// # Errors
    /// The socket is gone.
    pub async fn writable(&self) -> io::Result<()> {
        poll_fn(|cx| self.io.stream.poll_write_ready(cx)).await
    }

    /// Reads without waiting.
    ///
    /// # Errors
    /// `WouldBlock`, and the errors of `recv(2)`.
    pub fn try_read(&self, buf: &mut [u8]) -> io::Result<usize> {
        let mut bufs = [io::IoSliceMut::new(buf)];
        self.io.stream.recv_with(&mut bufs, fulmar::tcp::RecvFlags::DONT_WAIT)
    }

    /// Writes without waiting.
    ///
    /// # Errors
    /// `WouldBlock`, and the errors of `send(2)`.
    pub fn try_write(&self, buf: &[u8]) -> io::Result<usize> {
        self.io.stream.send_with(&[IoSlice::new(buf)], SendFlags::DONT_WAIT)
    }

    /// Reads bytes that stay to be read again. Returns their number; 0: the end of the stream.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    pub async fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            self.readable().await?;
            let flags = fulmar::tcp::RecvFlags::DONT_WAIT | fulmar::tcp::RecvFlags::PEEK;
            match self.io.stream.recv_with(&mut [io::IoSliceMut::new(buf)], flags) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }

    /// Receives at most `max` bytes without a copy: see [`fulmar::TcpStream::recv_owned`]. Empty: the end of the stream.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    pub async fn recv_owned(&self, max: usize) -> io::Result<Loan> {
        poll_fn(|cx| self.io.stream.poll_recv_owned(cx, max)).await
    }

    /// Ends the direction towards the peer, which reads the end of the stream after what was written.
    ///
    /// # Errors
    /// The socket is gone.
    pub(crate) fn shutdown_write(&self) -> io::Result<()> {
        match self.io.poll_shutdown() {
            Poll::Ready(done) => done,
            Poll::Pending => Ok(()),
        }
    }

    /// Borrowed halves, for one task that reads and writes.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        split::borrowed(&self.io)
    }

    /// Owned halves, for two tasks. The write half shuts its direction down when it is dropped.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        split::owned(self.io)
    }
}

impl Io {
    fn poll_read(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = self.stream.poll_read_to(cx, buf.remaining(), |bytes| buf.put_slice(bytes));
        read.map_ok(drop)
    }

    fn poll_shutdown(&self) -> Poll<io::Result<()>> {
        match self.stream.shutdown(Shutdown::Write) {
            // The peer has ended the connection: nothing is left to say.
            Err(e) if e.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}

macro_rules! reads {
    ($t:ty) => {
        impl AsyncRead for $t {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buf: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                self.io.poll_read(cx, buf)
            }
        }
    };
}

macro_rules! writes {
    ($t:ty) => {
        impl AsyncWrite for $t {
            fn poll_write(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buf: &[u8],
            ) -> Poll<io::Result<usize>> {
                self.io.stream.poll_write(cx, buf)
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                bufs: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                self.io.stream.poll_write_vectored(cx, bufs)
            }

            fn is_write_vectored(&self) -> bool {
                true
            }

            fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }

            fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.io.poll_shutdown()
            }
        }
    };
}

reads!(TcpStream);
reads!(ReadHalf<'_>);
reads!(OwnedReadHalf);
writes!(TcpStream);
writes!(WriteHalf<'_>);
writes!(OwnedWriteHalf);
