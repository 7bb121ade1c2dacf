//! The completion of an owned send.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::runtime::{Completion, Limit};
use fulmar_stack::tcp::ConnError;

use super::ShardRef;
use crate::api::socket::to_io;

/// The completion of an owned send: its memory is released. Then the peer has acknowledged its bytes and no device
/// reads them any more, or the connection has ended. A program may wait for it, poll it, or await it as a future; to
/// drop it has no effect.
///
/// A thread that waits runs the stack; while a program polls or awaits, the service thread does.
///
/// ```
/// # use std::{io::Read, time::Duration};
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::ZeroCopy;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// let sent = stream.send_owned(vec![7; 10_000])?;
/// # (&peer).read_exact(&mut [0; 10_000])?;
/// sent.wait(Some(Duration::from_secs(10)))?;
/// assert!(sent.is_done());
/// # Ok(())
/// # }
/// ```
pub struct SendCompletion {
    completion: Arc<Completion>,
    shard: ShardRef,
}

impl SendCompletion {
    pub(super) fn new(completion: Arc<Completion>, shard: ShardRef) -> SendCompletion {
        SendCompletion { completion, shard }
    }

    /// Whether the memory is released.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// The result, once the memory is released: `Ok` if the peer has acknowledged all accepted bytes, else the error of
    /// the connection.
    pub fn result(&self) -> Option<io::Result<()>> {
        self.is_done().then(|| match self.completion.failure() {
            None => Ok(()),
            Some(why) => Err(to_io(ConnError::from_code(why).into())),
        })
    }

    /// Waits until the memory is released, at most for `timeout`.
    ///
    /// # Errors
    /// `WouldBlock`: the time is over, or a signal handler that interrupted the stack would have to wait.
    /// `NetworkDown`: the device is gone; the memory is released when the connection is closed. With any other error,
    /// that of the connection, the memory is released.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let limit = timeout.map_or(Limit::Forever, Limit::For);
        match self.shard.with(|host| host.wait_completion(&self.completion, limit)) {
            Some(waited) => waited.map_err(to_io)?,
            // The stack is gone: the last reference to the memory is held elsewhere.
            None => self.completion.wait(limit),
        };
        self.result().unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }
}

impl Future for SendCompletion {
    type Output = io::Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.completion.watch(cx.waker()) {
            return Poll::Pending;
        }
        self.result().map_or(Poll::Pending, Poll::Ready)
    }
}

impl fmt::Debug for SendCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendCompletion").field("result", &self.result()).finish()
    }
}
