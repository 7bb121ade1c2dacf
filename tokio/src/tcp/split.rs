//! The halves of a connection.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;

use fulmar::zero_copy::{Loan, ZeroCopy};

use super::{Io, TcpStream};

/// The half of a borrowed connection that reads: [`TcpStream::split`].
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
/// # let mut stream = TcpStream::connect(&net, "10.0.0.1:80").await?;
/// # let (mut peer, _) = listener.accept().await?;
/// # peer.write_all(b"hello").await?;
/// let (mut from, _to) = stream.split();
/// let mut bytes = [0; 5];
/// from.read_exact(&mut bytes).await?;
/// # assert_eq!(&bytes, b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ReadHalf<'a> {
    pub(super) io: &'a Io,
}

/// The half of a borrowed connection that writes: [`TcpStream::split`].
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
/// # let mut stream = TcpStream::connect(&net, "10.0.0.1:80").await?;
/// # let (mut peer, _) = listener.accept().await?;
/// # peer.write_all(b"hello").await?;
/// let (mut from, mut to) = stream.split();
/// let mut bytes = [0; 5];
/// let (_, read) = tokio::try_join!(to.write_all(b"question"), from.read_exact(&mut bytes))?;
/// # assert_eq!(read, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct WriteHalf<'a> {
    pub(super) io: &'a Io,
}

/// The half of a connection that reads: [`TcpStream::into_split`].
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
/// # let mut stream = TcpStream::connect(&net, "10.0.0.1:80").await?;
/// # let (mut peer, _) = listener.accept().await?;
/// # peer.write_all(b"hello").await?;
/// # drop(peer);
/// let (mut from, to) = stream.into_split();
/// let received = tokio::spawn(async move {
///     let mut bytes = Vec::new();
///     from.read_to_end(&mut bytes).await.map(|_| bytes)
/// });
/// assert_eq!(received.await??, b"hello");
/// # drop(to);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct OwnedReadHalf {
    pub(super) io: Arc<Io>,
}

/// The half of a connection that writes. It shuts the direction down when it is dropped, unless it is forgotten
/// ([`OwnedWriteHalf::forget`]).
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
/// # let mut stream = TcpStream::connect(&net, "10.0.0.1:80").await?;
/// # let (mut peer, _) = listener.accept().await?;
/// let (from, mut to) = stream.into_split();
/// tokio::spawn(async move {
///     to.write_all(b"hello").await
///     // The drop of the half is the end of the stream for the peer.
/// });
/// let mut bytes = Vec::new();
/// peer.read_to_end(&mut bytes).await?;
/// assert_eq!(bytes, b"hello");
/// # drop(from);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct OwnedWriteHalf {
    pub(super) io: Arc<Io>,
    shuts_down: bool,
}

pub(super) fn borrowed(io: &Io) -> (ReadHalf<'_>, WriteHalf<'_>) {
    (ReadHalf { io }, WriteHalf { io })
}

pub(super) fn owned(io: Arc<Io>) -> (OwnedReadHalf, OwnedWriteHalf) {
    (OwnedReadHalf { io: Arc::clone(&io) }, OwnedWriteHalf { io, shuts_down: true })
}

impl OwnedReadHalf {
    /// Joins the halves of one connection.
    ///
    /// # Errors
    /// `InvalidInput`: they are of different connections.
    pub fn reunite(self, write: OwnedWriteHalf) -> io::Result<TcpStream> {
        if !Arc::ptr_eq(&self.io, &write.io) {
            let what = "the halves are of different connections";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        write.forget();
        Ok(TcpStream { io: self.io })
    }

    /// Receives at most `max` bytes without a copy: see [`TcpStream::recv_owned`].
    ///
    /// # Errors
    /// As there.
    pub async fn recv_owned(&self, max: usize) -> io::Result<Loan> {
        poll_fn(|cx| self.io.stream.poll_recv_owned(cx, max)).await
    }

    /// The connection of the stack.
    pub fn get_ref(&self) -> &fulmar::TcpStream {
        &self.io.stream
    }
}

impl OwnedWriteHalf {
    /// Drops the half, and leaves its direction open.
    pub fn forget(mut self) {
        self.shuts_down = false;
    }

    /// The connection of the stack.
    pub fn get_ref(&self) -> &fulmar::TcpStream {
        &self.io.stream
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        if self.shuts_down {
            // The connection may have ended.
            let _ = self.io.stream.shutdown(Shutdown::Write);
        }
    }
}
