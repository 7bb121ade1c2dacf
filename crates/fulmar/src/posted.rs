//! Posted receive: buffers that are given away before their bytes come, and come back filled.
//!
//! ```
//! # use std::io::Write;
//! # use fulmar::{RecvBuf, Stack, TcpListener, TcpStream, devices};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (a, b) = devices::link_pair()?;
//! # let one = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
//! # let other = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
//! # let listener = TcpListener::bind(&other, "10.0.0.2:80")?;
//! # let mut peer = TcpStream::connect(&one, "10.0.0.2:80")?;
//! # let (stream, _) = listener.accept()?;
//! let mut filling = stream.recv_posted(RecvBuf::with_capacity(64 << 10))?;
//! let mut behind = stream.recv_posted(RecvBuf::with_capacity(64 << 10))?;
//! # peer.write_all(b"hello")?;
//! # drop(peer);
//! let mut all = Vec::new();
//! loop {
//!     let buffer = filling.wait()?;
//!     if buffer.is_empty() {
//!         break; // the end of the stream
//!     }
//!     all.extend_from_slice(&buffer);
//!     // The stream goes on into the other one; this one goes back behind it.
//!     filling = std::mem::replace(&mut behind, stream.recv_posted(buffer)?);
//! }
//! # assert_eq!(all, b"hello");
//! # Ok(())
//! # }
//! ```

pub mod raw;
mod ring;

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fulmar_base::SlotId;
use fulmar_mbuf::RecvBuf;
use fulmar_runtime::{Limit, RecvTicket, Request, SoleTicket};
use fulmar_shard::RecvOutcome;
use fulmar_socket::posted::CompletionPolicy;

use crate::send::ShardRef;
use crate::socket::to_io;
use crate::tcp::TcpStream;
pub use ring::RecvRing;

/// When a posted buffer is given back although it is not full. The default: when the peer pushes, or
/// nothing comes for a millisecond.
pub type RecvRule = CompletionPolicy;

impl TcpStream {
    /// Gives away a buffer before its bytes have come. It is filled with what comes next in the stream,
    /// behind the buffers that were posted before, and comes back when it is full, when the peer pushed,
    /// or after a short pause; at the end of the stream with what it has, which may be nothing. Where the
    /// device can, payload goes straight into it and is never copied by this process; elsewhere it is
    /// copied once.
    ///
    /// Never waits. Up to 256 buffers may wait; two of at least 64 KiB each, used in turn, keep a stream
    /// going. A device remembers the two buffers used last, so use the same ones again.
    ///
    /// Reads come behind posted buffers: `read` and `peek` wait (or answer `WouldBlock`) while buffers
    /// wait, and go on behind the last of them. What had come before a buffer was posted is in it first.
    /// A socket that is polled is readable when a buffer is back.
    ///
    /// # Errors
    /// `WouldBlock` if 256 buffers wait already, `NetworkDown`. The buffer comes back in the error. What
    /// happens to the connection later is told by the completion.
    pub fn recv_posted(&self, buf: impl Into<RecvBuf>) -> Result<RecvCompletion, RecvError> {
        self.recv_posted_with(buf, RecvRule::default())
    }

    /// As [`TcpStream::recv_posted`], with a rule of its own for when the buffer comes back.
    ///
    /// # Errors
    /// As [`TcpStream::recv_posted`].
    pub fn recv_posted_with(
        &self,
        buf: impl Into<RecvBuf>,
        rule: RecvRule,
    ) -> Result<RecvCompletion, RecvError> {
        let (id, ticket) = (self.socket.id, spare::take());
        let mut buf = Some(buf.into());
        let posted = self.socket.host().call(|shard, now| {
            let Some(given) = buf.take() else { return Ok(()) };
            shard.tcp_post(now, id, given, rule, &ticket).map_err(|(e, given)| {
                buf = Some(given);
                e
            })
        });
        match posted {
            Ok(()) => {
                let (ticket, shard) = (Some(ticket), ShardRef::of(&self.socket));
                Ok(RecvCompletion { ticket, shard, id })
            }
            Err(e) => Err(RecvError { error: to_io(e), buf }),
        }
    }
}

/// A posted buffer on its way: a program may wait for it, ask, await it as a future, or cancel it.
///
/// Whoever waits or asks runs the stack meanwhile; for those who await, the stack's own thread does.
/// Dropping it before it is over takes the buffer back, and bytes that it had received go back into the
/// stream, to be received by whoever is next: nothing is lost, so it may be dropped by a `select`. Dropped
/// when it is over, the buffer goes with its bytes; so it does if the buffer behind it has received some
/// already.
///
/// Closing the socket ends what is posted: buffers with bytes come back with them, the others as
/// cancelled (`ECANCELED`).
pub struct RecvCompletion {
    /// There until it is dropped.
    ticket: Option<Arc<RecvTicket>>,
    shard: ShardRef,
    id: SlotId,
}

impl RecvCompletion {
    /// Whether the buffer is back, to be taken without waiting.
    pub fn is_done(&self) -> bool {
        self.ticket().is_over()
    }

    /// Waits until the buffer is back. It dereferences to the bytes that it received; none is the end of
    /// the stream (or a buffer of no bytes).
    ///
    /// # Errors
    /// Why the connection ended, if the buffer had received nothing by then: those of `read`, and
    /// `ECANCELED` after [`RecvCompletion::cancel`] or the close of the socket. The buffer is in the error,
    /// unless its stack has gone with it. `WouldBlock` in a signal handler that interrupted the stack.
    pub fn wait(mut self) -> Result<RecvBuf, RecvError> {
        let taken = self.take_by(Limit::Forever);
        taken.unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::WouldBlock).into()))
    }

    /// As [`RecvCompletion::wait`], at most for `timeout`. `None`: not yet; nothing has changed.
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<RecvBuf, RecvError>> {
        self.take_by(Limit::For(timeout))
    }

    /// Lets the stack take what has come, without waiting, and returns the buffer if it is back. `None`:
    /// not yet, or it was taken before.
    pub fn try_take(&mut self) -> Option<Result<RecvBuf, RecvError>> {
        self.take_by(Limit::DoNotWait)
    }

    /// Asks for the buffer before its time: it comes back with what it has, or as cancelled if that is
    /// nothing. Wait for it then: it is back once no device writes to it any more.
    ///
    /// # Errors
    /// `WouldBlock` in a signal handler that interrupted the stack.
    pub fn cancel(&self) -> io::Result<()> {
        let cancel = self.shard.with(|host| {
            host.call(|shard, now| {
                shard.tcp_cancel_post(now, self.id, self.ticket());
                Ok(())
            })
        });
        cancel.unwrap_or(Ok(())).map_err(to_io)
    }

    /// `None`: not yet, or taken before. An error without a buffer may be one of the call, not of the
    /// connection.
    fn take_by(&mut self, limit: Limit) -> Option<Result<RecvBuf, RecvError>> {
        let ticket = self.ticket.as_mut()?;
        let mut sole = SoleTicket::of(ticket);
        let outcome = match self.shard.with(|host| host.wait_outcome(&mut sole, limit, &mut None)) {
            Some(Ok(outcome)) => outcome,
            Some(Err(e)) => return Some(Err(to_io(e).into())),
            None => {
                ticket.completion.wait(limit);
                ticket.take()
            }
        };
        outcome.map(told)
    }

    /// An error is one of the call, not of the connection.
    fn wait_for(&self, limit: Limit) -> Result<(), RecvError> {
        let waited = match self.shard.with(|host| host.wait_ticket(self.ticket(), limit)) {
            Some(waited) => waited.map(drop).map_err(to_io),
            None => {
                self.ticket().completion.wait(limit);
                Ok(())
            }
        };
        waited.map_err(RecvError::from)
    }

    fn take(&self) -> Option<Result<RecvBuf, RecvError>> {
        self.ticket().take().map(told)
    }

    fn ticket(&self) -> &Arc<RecvTicket> {
        self.ticket.as_ref().expect("invariant: there until it is dropped")
    }
}

/// What its holder is told.
fn told(outcome: RecvOutcome) -> Result<RecvBuf, RecvError> {
    match outcome {
        RecvOutcome { buf: Some(buf), error: None } => Ok(buf),
        RecvOutcome { buf, error } => {
            let error = error.map_or_else(|| io::ErrorKind::NotConnected.into(), to_io);
            Err(RecvError { error, buf })
        }
    }
}

impl Future for RecvCompletion {
    type Output = Result<RecvBuf, RecvError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.ticket().completion.watch(cx.waker()) {
            return Poll::Pending;
        }
        let taken = || Err(io::Error::other("the buffer was taken before").into());
        Poll::Ready(self.take().unwrap_or_else(taken))
    }
}

impl Drop for RecvCompletion {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        if ticket.is_over() {
            // With the buffer goes its place among those that were not taken.
            drop(ticket.take());
            spare::put(ticket);
        } else {
            let abandon = Request::AbandonPost(self.id, ticket);
            self.shard.with(|host| host.post(abandon));
        }
    }
}

impl fmt::Debug for RecvCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvCompletion").field("is_done", &self.is_done()).finish()
    }
}

/// Tickets that are used again by the thread that had them, so that posting allocates nothing.
mod spare {
    use std::cell::RefCell;
    use std::sync::Arc;

    use fulmar_runtime::RecvTicket;

    /// As many buffers as most programs have under way.
    const MOST: usize = 4;

    thread_local! {
        static SPARE: RefCell<Vec<Arc<RecvTicket>>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn take() -> Arc<RecvTicket> {
        // In the destructors of a thread that ends there is none.
        let spare = SPARE.try_with(|s| s.try_borrow_mut().ok()?.pop()).ok().flatten();
        spare.unwrap_or_default()
    }

    /// Keeps a ticket that nobody else has; as new.
    pub(super) fn put(mut ticket: Arc<RecvTicket>) {
        let Some(own) = Arc::get_mut(&mut ticket) else { return };
        own.renew();
        let keep = |s: &RefCell<Vec<_>>| {
            if let Ok(mut s) = s.try_borrow_mut()
                && s.len() < MOST
            {
                s.push(ticket);
            }
        };
        // As above: without it the ticket goes.
        let _ = SPARE.try_with(keep);
    }
}

/// A buffer that was not posted, or came back with nothing.
pub struct RecvError {
    /// Why.
    pub error: io::Error,
    /// The buffer, to be used again. `None`: it went away with its stack, or is still posted.
    pub buf: Option<RecvBuf>,
}

impl fmt::Display for RecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "posted receive: {}", self.error)
    }
}

impl std::error::Error for RecvError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<io::Error> for RecvError {
    fn from(error: io::Error) -> RecvError {
        RecvError { error, buf: None }
    }
}

impl From<RecvError> for io::Error {
    fn from(e: RecvError) -> io::Error {
        e.error
    }
}
