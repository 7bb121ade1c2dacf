//! Packets of the program's own loop.

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::task::{Context, Poll, ready};

use fulmar::devices::{self, OpenError, PacketDevice};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A device whose packets the program passes: see [`devices::channel`].
///
/// ```
/// use fulmar::Stack;
/// use fulmar_tokio::{Net, UdpSocket};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (device, mut sender, mut receiver) = fulmar_tokio::channel(1420)?;
/// let net = Net::new(Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?)?;
/// let socket = UdpSocket::bind(&net, "10.0.0.2:7000").await?;
/// socket.send_to(b"hello", "10.0.0.1:53").await?;
/// let packet = receiver.recv().await?;
/// assert!(packet.ends_with(b"hello"));
/// // To the tunnel with it; the packets of the tunnel go to `sender.send(packet).await?`.
/// # let _ = &mut sender;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`devices::channel`].
///
/// # Panics
/// Outside of a tokio runtime whose I/O is enabled.
pub fn channel(mtu: usize) -> Result<(PacketDevice, PacketSender, PacketReceiver), OpenError> {
    let (device, sender, receiver) = devices::channel(mtu)?;
    let no_reactor = |e| {
        OpenError::new("cannot watch a channel", e, "raise the limit on open files (ulimit -n)")
    };
    let sender = PacketSender(watched(sender).map_err(no_reactor)?);
    let receiver = PacketReceiver(watched(receiver).map_err(no_reactor)?);
    Ok((device, sender, receiver))
}

/// The function that takes its place is unsafe, for types that change their descriptor; these have one for life.
#[allow(deprecated)]
fn watched<T: std::os::fd::AsFd>(end: T) -> io::Result<AsyncFd<Fd<T>>> {
    AsyncFd::with_interest(Fd(end), Interest::READABLE)
}

/// With the descriptor as `AsyncFd` wants it.
#[derive(Debug)]
struct Fd<T>(T);

impl<T: std::os::fd::AsFd> std::os::fd::AsRawFd for Fd<T> {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Waits for the descriptor if the end has prepared a sleep on it.
fn poll_woken<T: std::os::fd::AsFd>(
    end: &AsyncFd<Fd<T>>,
    cx: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    ready!(end.poll_read_ready(cx))?.clear_ready();
    Poll::Ready(Ok(()))
}

/// Passes IP packets to the stack of a [`channel`]. Its futures are cancellation safe.
///
/// ```
/// # use fulmar::Stack;
/// # use fulmar_tokio::Net;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (device, mut sender, mut receiver) = fulmar_tokio::channel(1420)?;
/// # let net = Net::new(Stack::builder().device(device).address("10.0.0.2/24".parse()?).unlisted().build()?)?;
/// # let packets = [[0; 40]; 3];
/// // Packets that came together cross together.
/// for packet in &packets {
///     sender.push(packet).await?;
/// }
/// sender.flush().await?;
/// # let _ = (&net, &mut receiver);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PacketSender(AsyncFd<Fd<devices::PacketSender>>);

impl PacketSender {
    /// Passes one packet, and those that were pushed. Waits while the channel is full.
    ///
    /// # Errors
    /// As [`devices::PacketSender::push`], without `WouldBlock`.
    pub async fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        self.push(packet).await?;
        self.flush().await
    }

    /// Copies a packet into the batch, which [`PacketSender::flush`] passes. A full batch is passed first.
    ///
    /// # Errors
    /// As [`PacketSender::send`].
    pub async fn push(&mut self, packet: &[u8]) -> io::Result<()> {
        poll_fn(|cx| self.poll(cx, |sender| sender.push(packet))).await
    }

    /// Passes the batch.
    ///
    /// # Errors
    /// As [`PacketSender::send`].
    pub async fn flush(&mut self) -> io::Result<()> {
        poll_fn(|cx| self.poll(cx, devices::PacketSender::flush)).await
    }

    /// Calls that do not wait.
    pub fn get_mut(&mut self) -> &mut devices::PacketSender {
        &mut self.0.get_mut().0
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        mut call: impl FnMut(&mut devices::PacketSender) -> io::Result<()>,
    ) -> Poll<io::Result<()>> {
        loop {
            match call(self.get_mut()) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
            if self.get_mut().rest() {
                ready!(poll_woken(&self.0, cx))?;
            }
        }
    }
}

/// Returns the IP packets that the stack of a [`channel`] sends. Its futures are cancellation safe.
///
/// ```
/// # use fulmar::Stack;
/// # use fulmar_tokio::{Net, UdpSocket};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (device, mut sender, mut receiver) = fulmar_tokio::channel(1420)?;
/// # let net = Net::new(Stack::builder().device(device).address("10.0.0.2/24".parse()?).unlisted().build()?)?;
/// # let socket = UdpSocket::bind(&net, "10.0.0.2:7000").await?;
/// # socket.send_to(b"hello", "10.0.0.1:53").await?;
/// loop {
///     let packet = receiver.recv().await?;
///     println!("{} bytes for the tunnel", packet.len());
/// #   break;
/// }
/// # let _ = &mut sender;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PacketReceiver(AsyncFd<Fd<devices::PacketReceiver>>);

impl PacketReceiver {
    /// The next packet.
    ///
    /// # Errors
    /// As [`devices::PacketReceiver::recv`].
    pub async fn recv(&mut self) -> io::Result<&[u8]> {
        self.readable().await?;
        self.get_mut().try_recv()
    }

    /// Waits until [`devices::PacketReceiver::try_recv`] returns a packet.
    ///
    /// # Errors
    /// As there.
    pub async fn readable(&mut self) -> io::Result<()> {
        poll_fn(|cx| {
            // Without a packet it prepares a sleep; an end shows in `try_recv`.
            while self.get_mut().rest() {
                ready!(poll_woken(&self.0, cx))?;
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Calls that do not wait.
    pub fn get_mut(&mut self) -> &mut devices::PacketReceiver {
        &mut self.0.get_mut().0
    }
}
