//! Posted receive: a buffer is posted before its bytes arrive, and completes when it is filled.

mod ring;

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::runtime::{Limit, RecvTicket, Request, SoleTicket};
use fulmar_stack::base::SlotId;
use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::shard::RecvOutcome;

use crate::api::send::ShardRef;
use crate::api::socket::to_io;
use crate::api::tcp::TcpStream;
pub use ring::RecvRing;

/// When a posted buffer completes although it is not full. The default: at a segment with PSH, or after a millisecond
/// without data.
///
/// ```
/// # use std::io::Write;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::{RecvBuf, RecvRule, ZeroCopy};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// # (&peer).write_all(&[7; 4096])?;
/// // Records of 4 KiB: a buffer completes when it is full, and not earlier.
/// let rule = RecvRule { on_push: false, idle: None, ..RecvRule::default() };
/// let filling = stream.recv_posted_with(RecvBuf::with_capacity(4096), rule)?;
/// assert_eq!(filling.wait()?.len(), 4096);
/// # drop(peer);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::socket::posted::CompletionPolicy as RecvRule;

impl TcpStream {
    /// See [`ZeroCopy::recv_posted`](crate::zero_copy::ZeroCopy::recv_posted).
    pub(crate) fn post(&self, buf: RecvBuf, rule: RecvRule) -> Result<RecvCompletion, RecvError> {
        let (id, ticket) = (self.socket.id, spare::take());
        let mut buf = Some(buf);
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

/// The completion of a posted buffer. A program may wait for it, poll it, await it as a future, or cancel it.
///
/// A thread that waits or polls runs the stack; while a program awaits, the service thread does. To drop it before it
/// is complete revokes the buffer and puts the bytes that it has received back at the front of the receive queue.
/// **Bytes are lost if it is dropped when it is complete**, or when the next buffer has received bytes already. It may
/// complete at any moment, whether it is polled or not, so a `select` must not drop it: give the `select` a `&mut` of
/// it, and keep it. To stop without loss, [`RecvCompletion::cancel`] every posted buffer, then wait for each in order.
///
/// A close of the socket completes all posted buffers: those with bytes return them, the others fail with `ECANCELED`.
///
/// ```
/// # use std::io::Write;
/// use fulmar::zero_copy::{RecvBuf, ZeroCopy};
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let one = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let other = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&other, "10.0.0.2:80")?;
/// # let mut peer = TcpStream::connect(&one, "10.0.0.2:80")?;
/// # let (stream, _) = listener.accept()?;
/// let mut filling = stream.recv_posted(RecvBuf::with_capacity(64 << 10))?;
/// let mut next = stream.recv_posted(RecvBuf::with_capacity(64 << 10))?;
/// # peer.write_all(b"hello")?;
/// # drop(peer);
/// let mut all = Vec::new();
/// loop {
///     let buffer = filling.wait()?;
///     if buffer.is_empty() {
///         break; // the end of the stream
///     }
///     all.extend_from_slice(&buffer);
///     // The stream is received into the other one; this one is posted after it.
///     filling = std::mem::replace(&mut next, stream.recv_posted(buffer)?);
/// }
/// # assert_eq!(all, b"hello");
/// # Ok(())
/// # }
/// ```
pub struct RecvCompletion {
    /// Present until the drop.
    ticket: Option<Arc<RecvTicket>>,
    shard: ShardRef,
    id: SlotId,
}

impl RecvCompletion {
    /// Whether the buffer is complete, so that it can be taken without waiting.
    pub fn is_done(&self) -> bool {
        self.ticket().is_over()
    }

    /// Waits until the buffer is complete, and returns it. It dereferences to the bytes that it has received; none: the
    /// end of the stream (or a buffer of no bytes).
    ///
    /// # Errors
    /// Those of `read`, if the buffer has received nothing; `ECANCELED` after [`RecvCompletion::cancel`] or the close
    /// of the socket. The error has the buffer, unless it was lost with its stack. `WouldBlock` in a signal handler
    /// that interrupted the stack.
    pub fn wait(mut self) -> Result<RecvBuf, RecvError> {
        let taken = self.take_by(Limit::Forever);
        taken.unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::WouldBlock).into()))
    }

    /// As [`RecvCompletion::wait`], at most for `timeout`. `None`: not complete.
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<RecvBuf, RecvError>> {
        self.take_by(Limit::For(timeout))
    }

    /// Runs the stack once, without waiting, and returns the buffer if it is complete. `None`: it is not, or it was
    /// taken before.
    pub fn try_take(&mut self) -> Option<Result<RecvBuf, RecvError>> {
        self.take_by(Limit::DoNotWait)
    }

    /// Cancels the buffer: it completes with the bytes that it has received, or with `ECANCELED` if there are none.
    /// Wait for it afterwards: it is complete once no device writes to it any more.
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

    /// `None`: not complete, or taken before. An error without a buffer may be one of the call, not of the connection.
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
        outcome.map(to_result)
    }

    fn take(&self) -> Option<Result<RecvBuf, RecvError>> {
        self.ticket().take().map(to_result)
    }

    fn ticket(&self) -> &Arc<RecvTicket> {
        self.ticket.as_ref().expect("invariant: present until the drop")
    }
}

/// The outcome as the result of a call.
fn to_result(outcome: RecvOutcome) -> Result<RecvBuf, RecvError> {
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
        let taken = || Err(io::Error::other("the buffer was already taken").into());
        Poll::Ready(self.take().unwrap_or_else(taken))
    }
}

impl Drop for RecvCompletion {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        if ticket.is_over() {
            // The drop of the outcome also counts the completion as claimed.
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

/// A cache of tickets per thread, so that posting allocates nothing.
mod spare {
    use std::cell::RefCell;
    use std::sync::Arc;

    use crate::runtime::RecvTicket;

    /// Most cached tickets: few programs post more buffers.
    const MOST: usize = 4;

    thread_local! {
        static SPARE: RefCell<Vec<Arc<RecvTicket>>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn take() -> Arc<RecvTicket> {
        // The thread-local is gone in destructors of an ending thread.
        let spare = SPARE.try_with(|s| s.try_borrow_mut().ok()?.pop()).ok().flatten();
        spare.unwrap_or_default()
    }

    /// Resets and caches a ticket, if there is no other reference to it.
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
        // As above: then the ticket is dropped.
        let _ = SPARE.try_with(keep);
    }
}

/// A buffer that was not posted, or has completed with an error.
///
/// ```
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::{RecvBuf, ZeroCopy};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// let filling = stream.recv_posted(RecvBuf::with_capacity(64 << 10))?;
/// filling.cancel()?;
/// match filling.wait() {
///     Ok(buffer) => println!("{} bytes", buffer.len()),
///     // Nothing was received: the buffer may be used again.
///     Err(e) => assert!(e.buf.is_some(), "{e}"),
/// }
/// # drop(peer);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct RecvError {
    /// The error.
    pub error: io::Error,
    /// The buffer, to be used again. `None`: it was lost with its stack, or is still posted.
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
