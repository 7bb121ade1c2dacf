//! Transfers of a stream that save a copy: memory that is lent, given away, reserved or posted, and files.
//!
//! `read` and `write` copy each byte once, and are the fastest for small transfers. The methods of [`ZeroCopy`] pay from
//! a few KiB per call on; [`guide::calls`](crate::guide::calls) compares them.
//!
//! | you have | use | copies |
//! |---|---|---|
//! | bytes to parse, forward or hash | [`recv_owned`](ZeroCopy::recv_owned), a [`Loan`] | none |
//! | buffers of your own to be filled | [`recv_posted`](ZeroCopy::recv_posted), [`recv_ring`](ZeroCopy::recv_ring) | none if the device places bytes, else one |
//! | bytes that you generate | [`send_reserve`](ZeroCopy::send_reserve), a [`SendReservation`] | none |
//! | a `Vec`, `Bytes` or other memory to give away | [`send_owned`](ZeroCopy::send_owned), [`OwnedBytes`] | none |
//! | a file | [`send_file`](ZeroCopy::send_file) | one |
//!
//! Datagrams are lent by [`UdpSocket::recv_owned`](crate::UdpSocket::recv_owned).
//!
//! ```
//! # use std::io::Read;
//! # use fulmar::{Stack, TcpListener, TcpStream, devices};
//! use fulmar::zero_copy::ZeroCopy;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (a, b) = devices::link_pair()?;
//! # let one = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
//! # let other = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
//! # let listener = TcpListener::bind(&other, "10.0.0.2:80")?;
//! # let stream = TcpStream::connect(&one, "10.0.0.2:80")?;
//! # let (peer, _) = listener.accept()?;
//! let sent = stream.send_owned(vec![7; 100_000])?;
//! let mut left = 100_000;
//! while left > 0 {
//!     let bytes = peer.recv_owned(left)?;
//!     assert!(bytes.slices().all(|slice| slice.iter().all(|byte| *byte == 7)));
//!     left -= bytes.len();
//! }
//! sent.wait(None)?; // the memory was released
//! # Ok(())
//! # }
//! ```

use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::RangeBounds;
use std::task::{Context, Poll};

use crate::TcpStream;
use crate::runtime::Limit;

pub use crate::api::loan::{Loan, Slices};
pub use crate::api::posted::{RecvCompletion, RecvError, RecvRing, RecvRule};
pub use crate::api::send::{OwnedBytes, SendCompletion, SendOwnedError, SendReservation};
pub use crate::api::sendfile::{SendFile, SendFileError};
/// A buffer for [`ZeroCopy::recv_posted`].
///
/// ```
/// # use std::io::Write;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::{RecvBuf, ZeroCopy};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// # (&peer).write_all(b"hello")?;
/// let buffer = RecvBuf::with_capacity(64 << 10); // or `RecvBuf::from(vec)`
/// let buffer = stream.recv_posted(buffer)?.wait()?;
/// assert_eq!(&*buffer, b"hello");
/// # drop(peer);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::mbuf::RecvBuf;

/// Transfers of a [`TcpStream`] that save a copy: see [the module](crate::zero_copy).
///
/// ```
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::ZeroCopy;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// let sent = peer.send_owned(b"hello")?;
/// let bytes = stream.recv_owned(64 << 10)?;
/// assert_eq!(bytes.to_vec(), b"hello");
/// # drop(sent);
/// # Ok(())
/// # }
/// ```
pub trait ZeroCopy: sealed::Sealed {
    /// Reads without a copy: lends up to `max` bytes in the buffers in which they were received. Waits as `read` does;
    /// an empty loan is the end of the stream.
    ///
    /// Below a few KiB a copy is cheaper. Give a large `max`: each split of a buffer costs a reference. A few bytes of
    /// a large buffer are copied, so that they do not keep it.
    ///
    /// # Errors
    /// As `read`. `ENOBUFS` if the bytes are in the memory reserve of the stack, which it does not lend; `read` works
    /// then.
    fn recv_owned(&self, max: usize) -> io::Result<Loan>;

    /// As [`ZeroCopy::recv_owned`], but never waits.
    ///
    /// # Errors
    /// `WouldBlock`, and the errors of [`ZeroCopy::recv_owned`].
    fn try_recv_owned(&self, max: usize) -> io::Result<Loan>;

    /// Receives at most `max` bytes without a copy: see [`ZeroCopy::recv_owned`].
    ///
    /// # Errors
    /// As there.
    fn poll_recv_owned(&self, cx: &mut Context<'_>, max: usize) -> Poll<io::Result<Loan>>;

    /// Posts a buffer. It receives the next bytes of the stream, after the bytes of the buffers posted before. It
    /// completes when it is full, at a segment with PSH, after a short pause, or at the end of the stream, then
    /// possibly empty. If the device supports it, payload is placed there without a copy by this process; otherwise it
    /// is copied once.
    ///
    /// Never waits. Up to 256 buffers may be posted; two of at least 64 KiB each, used in turn, keep a stream going.
    /// Use the same buffers again: a device caches the registration of the last two.
    ///
    /// Reads are served after posted buffers: while some are posted, `read` and `peek` wait or fail with `WouldBlock`.
    /// Bytes received before the post are copied into the buffer first. In a poll set the socket is readable when a
    /// buffer has completed.
    ///
    /// # Errors
    /// `WouldBlock` if 256 buffers are posted, `NetworkDown`. The error has the buffer. Later errors of the connection
    /// are reported by the completion.
    fn recv_posted(&self, buf: impl Into<RecvBuf>) -> Result<RecvCompletion, RecvError>;

    /// As [`ZeroCopy::recv_posted`], with another rule for when the buffer completes.
    ///
    /// # Errors
    /// As [`ZeroCopy::recv_posted`].
    fn recv_posted_with(
        &self,
        buf: impl Into<RecvBuf>,
        rule: RecvRule,
    ) -> Result<RecvCompletion, RecvError>;

    /// Posts buffers that are filled in turn: see [`RecvRing`]. Like any handle it keeps the connection open. Two
    /// buffers of at least 64 KiB each keep a stream going.
    ///
    /// # Errors
    /// As [`ZeroCopy::recv_posted`]; the buffers are dropped then.
    fn recv_ring(
        &self,
        buffers: impl IntoIterator<Item = impl Into<RecvBuf>>,
    ) -> io::Result<RecvRing>;

    /// As [`ZeroCopy::recv_ring`], with another rule for when a buffer completes.
    ///
    /// # Errors
    /// As [`ZeroCopy::recv_posted`]; `InvalidInput` without a buffer.
    fn recv_ring_with(
        &self,
        buffers: impl IntoIterator<Item = impl Into<RecvBuf>>,
        rule: RecvRule,
    ) -> io::Result<RecvRing>;

    /// Sends memory in place, without a copy: the connection owns it until the completion. Waits for space in the send
    /// buffer as `write` does. The memory is released when the peer has acknowledged all of it and no device reads it
    /// any more.
    ///
    /// Queued bytes are charged to the send buffer and to the stack's memory for sending, like copied bytes. Below a
    /// few KiB a copy is cheaper.
    ///
    /// # Errors
    /// As `write`. The error has the count of accepted bytes, and the others.
    fn send_owned(&self, bytes: impl Into<OwnedBytes>) -> Result<SendCompletion, SendOwnedError>;

    /// As [`ZeroCopy::send_owned`], without waiting: accepts the first bytes, up to the free space. Returns their
    /// number; the others stay in `bytes`. [`OwnedBytes::completion`] is the completion of all of them.
    ///
    /// # Errors
    /// `WouldBlock`, and the errors of `write`; nothing is accepted then.
    fn try_send_owned(&self, bytes: &mut OwnedBytes) -> io::Result<usize>;

    /// Reserves up to `bytes` of the send buffer with memory to write into; [`SendReservation::commit`] sends it. Waits
    /// for space as `write` does; [`SendReservation::capacity`] is how much was reserved. Other writers of this socket
    /// wait until it is committed or dropped.
    ///
    /// # Errors
    /// As `write`. `InvalidInput` for no bytes.
    fn send_reserve(&self, bytes: usize) -> io::Result<SendReservation<'_>>;

    /// Sends `headers`, the bytes of `file` in `range`, and `trailers` as one write: bytes of other writers are not
    /// interleaved. Returns how many bytes were accepted, headers and trailers included; acceptance is not delivery, as
    /// for a write.
    ///
    /// The position of the file is neither used nor moved. A range without an end extends to the end of the file, also
    /// if it grows during the call; a range with an end stops at the latest at the end of the file when the call began.
    /// If the file ends earlier, or shrinks during the call, fewer bytes are sent, without an error. Holes are sent as
    /// zeroes. Headers and trailers are sent also with an empty file.
    ///
    /// The file is read once, when its bytes are accepted: later writes to the file do not affect them, retransmissions
    /// included. The exception: on a non-blocking socket bytes that are not in the
    /// page cache are accepted first and read soon after.
    ///
    /// A blocking call waits until half of the send buffer is free, or the rest fits, before it continues. The write
    /// time-out applies to each wait.
    ///
    /// # Errors
    /// [`SendFileError`], with the bytes accepted before. `WouldBlock`: the time-out passed, or the socket is
    /// non-blocking and not writable (such a call does not wait for half of the buffer); try again with the rest.
    /// `InvalidInput`: the range ends before it begins. `IsADirectory`; `NotSeekable`: the file is a pipe or a socket.
    /// Errors of reading the file; bytes read before are accepted. If bytes that were accepted before they were read
    /// cannot be read, the connection is reset and later calls fail with EIO. Otherwise as `write`.
    fn send_file(
        &self,
        file: &File,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError>;

    /// As [`ZeroCopy::send_file`], with options.
    ///
    /// # Errors
    /// As [`ZeroCopy::send_file`].
    fn send_file_with(
        &self,
        options: &SendFile,
        file: &File,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError>;
}

impl ZeroCopy for TcpStream {
    fn recv_owned(&self, max: usize) -> io::Result<Loan> {
        self.lend(max, self.socket.read_limit())
    }

    fn try_recv_owned(&self, max: usize) -> io::Result<Loan> {
        self.lend(max, Limit::DoNotWait)
    }

    fn poll_recv_owned(&self, cx: &mut Context<'_>, max: usize) -> Poll<io::Result<Loan>> {
        self.poll_lend(cx, max)
    }

    fn recv_posted(&self, buf: impl Into<RecvBuf>) -> Result<RecvCompletion, RecvError> {
        self.post(buf.into(), RecvRule::default())
    }

    fn recv_posted_with(
        &self,
        buf: impl Into<RecvBuf>,
        rule: RecvRule,
    ) -> Result<RecvCompletion, RecvError> {
        self.post(buf.into(), rule)
    }

    fn recv_ring(
        &self,
        buffers: impl IntoIterator<Item = impl Into<RecvBuf>>,
    ) -> io::Result<RecvRing> {
        self.recv_ring_with(buffers, RecvRule::default())
    }

    fn recv_ring_with(
        &self,
        buffers: impl IntoIterator<Item = impl Into<RecvBuf>>,
        rule: RecvRule,
    ) -> io::Result<RecvRing> {
        RecvRing::new(self, buffers.into_iter().map(Into::into).collect(), rule)
    }

    fn send_owned(&self, bytes: impl Into<OwnedBytes>) -> Result<SendCompletion, SendOwnedError> {
        self.queue_owned(bytes.into())
    }

    fn try_send_owned(&self, bytes: &mut OwnedBytes) -> io::Result<usize> {
        self.try_queue_owned(bytes)
    }

    fn send_reserve(&self, bytes: usize) -> io::Result<SendReservation<'_>> {
        self.reserve(bytes)
    }

    fn send_file(
        &self,
        file: &File,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError> {
        self.send_range(&SendFile::default(), file, range, headers, trailers)
    }

    fn send_file_with(
        &self,
        options: &SendFile,
        file: &File,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError> {
        self.send_range(options, file, range, headers, trailers)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::TcpStream {}
}
