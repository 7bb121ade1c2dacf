//! Bytes from one stream to another, both ways.

use std::any::Any;
use std::cell::Cell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fulmar::zero_copy::{Loan, ZeroCopy};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::TcpStream;

/// Bytes that cross at a time in one direction.
const PIECE_BYTES: usize = 64 << 10;
/// Pieces after which other tasks run.
const MOST_PIECES: usize = 16;
/// Slices of one vectored write.
const MOST_SLICES: usize = 16;

/// Passes bytes between a connection of a stack and another stream until both directions have ended. Returns how many
/// came from `stream`, and how many from `other`.
///
/// Received bytes are not copied on their way to `other` ([`TcpStream::recv_owned`]), and an idle relay has no buffer. The
/// end of one direction is passed on as such. If either stream fails, or the future is dropped, both are reset, so that
/// neither peer takes a part for the whole. `other` is reset if it is a [`tokio::net::TcpStream`] or a [`TcpStream`]; other
/// types are dropped.
///
/// ```no_run
/// # use fulmar_tokio::{TcpListener, relay};
/// # async fn serve(listener: TcpListener) -> std::io::Result<()> {
/// let (stream, _) = listener.accept().await?;
/// let server = tokio::net::TcpStream::connect("192.0.2.1:80").await?;
/// let (sent, received) = relay(stream, server).await?;
/// println!("{sent} bytes to the server, {received} from it");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The first of either stream.
pub async fn relay<S>(stream: TcpStream, other: S) -> io::Result<(u64, u64)>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let mut ends = Ends { stream, other, are_over: false };
    let (mut out, mut back) = (Out::default(), Back::default());
    let done = poll_fn(|cx| {
        let out = out.poll(cx, &ends.stream, Pin::new(&mut ends.other))?;
        let back = back.poll(cx, &ends.stream, Pin::new(&mut ends.other))?;
        match (out, back) {
            (Poll::Ready(out), Poll::Ready(back)) => Poll::Ready(Ok((out, back))),
            _ => Poll::Pending,
        }
    })
    .await;
    ends.are_over = done.is_ok();
    done
}

/// Both streams of a relay, which reset their connections unless both directions are over.
struct Ends<S: 'static> {
    stream: TcpStream,
    other: S,
    are_over: bool,
}

impl<S: 'static> Drop for Ends<S> {
    fn drop(&mut self) {
        if !self.are_over {
            close_by_reset(&self.stream);
            close_by_reset(&self.other);
        }
    }
}

/// Makes the close of a TCP connection a reset: SO_LINGER with a time of 0. No effect on streams of other types.
fn close_by_reset(stream: &dyn Any) {
    // An error: the socket is gone.
    if let Some(own) = stream.downcast_ref::<TcpStream>() {
        let _ = own.get_ref().set_linger(Some(Duration::ZERO));
    } else if let Some(host) = stream.downcast_ref::<tokio::net::TcpStream>() {
        // Deprecated for the times that block. The method for 0 is newer than the oldest tokio that this crate takes.
        #[allow(deprecated)]
        let _ = host.set_linger(Some(Duration::ZERO));
    }
}

/// From the stack to the other stream.
#[derive(Default)]
struct Out {
    /// What the other stream had no space for.
    loan: Option<Box<Loan>>,
    bytes: u64,
    is_over: bool,
    is_done: bool,
}

impl Out {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &TcpStream,
        mut other: Pin<&mut (impl AsyncRead + AsyncWrite)>,
    ) -> Poll<io::Result<u64>> {
        for _ in 0..MOST_PIECES {
            if self.is_done {
                return Poll::Ready(Ok(self.bytes));
            }
            if self.is_over {
                ready!(other.as_mut().poll_shutdown(cx))?;
                self.is_done = true;
                continue;
            }
            let loan = match self.loan.take() {
                Some(loan) => *loan,
                None => {
                    let received = stream.get_ref().poll_recv_owned(cx, PIECE_BYTES);
                    if received.is_pending() {
                        // The other stream may keep what it has.
                        ready!(other.as_mut().poll_flush(cx))?;
                    }
                    ready!(received)?
                }
            };
            if loan.is_empty() {
                self.is_over = true;
                continue;
            }
            self.loan = self.write(cx, loan, other.as_mut())?.map(Box::new);
            if self.loan.is_some() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Writes as much of a loan as is taken; returns the rest.
    fn write(
        &mut self,
        cx: &mut Context<'_>,
        mut loan: Loan,
        mut other: Pin<&mut impl AsyncWrite>,
    ) -> io::Result<Option<Loan>> {
        while !loan.is_empty() {
            let mut slices = [IoSlice::new(&[]); MOST_SLICES];
            let mut count = 0;
            for (to, slice) in slices.iter_mut().zip(loan.io_slices()) {
                *to = slice;
                count += 1;
            }
            match other.as_mut().poll_write_vectored(cx, &slices[..count]) {
                Poll::Pending => return Ok(Some(loan)),
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(written) => {
                    let n = written?;
                    loan.advance(n);
                    self.bytes += n as u64;
                }
            }
        }
        Ok(None)
    }
}

/// From the other stream to the stack.
#[derive(Default)]
struct Back {
    /// What the stack had no space for, from `sent` on.
    rest: Vec<u8>,
    sent: usize,
    bytes: u64,
    is_done: bool,
}

impl Back {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &TcpStream,
        mut other: Pin<&mut impl AsyncRead>,
    ) -> Poll<io::Result<u64>> {
        for _ in 0..MOST_PIECES {
            if self.is_done {
                return Poll::Ready(Ok(self.bytes));
            }
            while self.sent < self.rest.len() {
                let rest = &self.rest[self.sent..];
                let n = ready!(stream.get_ref().poll_write(cx, rest))?;
                self.sent += n;
                self.bytes += n as u64;
            }
            (self.rest, self.sent) = (Vec::new(), 0);
            // A third of the send buffer is free then, so that a piece fits and a peer that does not read keeps none here.
            ready!(stream.get_ref().poll_write_ready(cx))?;
            let n = with_scratch(|scratch| {
                let mut buf = ReadBuf::new(scratch);
                ready!(other.as_mut().poll_read(cx, &mut buf))?;
                self.pass(cx, stream, buf.filled())?;
                Poll::Ready(io::Result::Ok(buf.filled().len()))
            });
            if ready!(n)? == 0 {
                stream.shutdown_write()?;
                self.is_done = true;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Writes bytes, and keeps those for which there is no space.
    fn pass(&mut self, cx: &mut Context<'_>, stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        let mut sent = 0;
        while sent < bytes.len() {
            match stream.get_ref().poll_write(cx, &bytes[sent..]) {
                Poll::Pending => break,
                Poll::Ready(n) => sent += n?,
            }
        }
        self.bytes += sent as u64;
        self.rest.extend_from_slice(&bytes[sent..]);
        Ok(())
    }
}

/// Lends the thread's buffer, of 64 KiB, so that what is idle needs none.
pub(crate) fn with_scratch<R>(f: impl FnOnce(&mut [u8]) -> R) -> R {
    thread_local! {
        static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    }
    // A call within a call finds none, and makes its own.
    let mut scratch = SCRATCH.take();
    scratch.resize(PIECE_BYTES, 0);
    let r = f(&mut scratch);
    SCRATCH.set(scratch);
    r
}
