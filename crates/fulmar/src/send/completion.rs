//! When memory that was given away is let go.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fulmar_runtime::{Completion, Limit};
use fulmar_tcp::ConnError;

use super::ShardRef;
use crate::socket::to_io;

/// Tells when the memory of an owned send is let go: its bytes are acknowledged by the peer, and no
/// device reads them any more; or the connection has ended, and they will not be sent again. A
/// program may wait for it, ask, or await it as a future; or drop it, which changes nothing.
///
/// Whoever waits runs the stack meanwhile. For those who ask or await, the stack's own thread does.
pub struct SendCompletion {
    completion: Arc<Completion>,
    shard: ShardRef,
}

impl SendCompletion {
    pub(super) fn new(completion: Arc<Completion>, shard: ShardRef) -> SendCompletion {
        SendCompletion { completion, shard }
    }

    /// Whether the memory is let go.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// How it ended, once the memory is let go: `Ok` if the peer acknowledged all bytes that were
    /// accepted, else why the connection ended.
    pub fn result(&self) -> Option<io::Result<()>> {
        self.is_done().then(|| match self.completion.failure() {
            None => Ok(()),
            Some(why) => Err(to_io(ConnError::from_code(why).into())),
        })
    }

    /// Waits until the memory is let go, at most for `timeout`.
    ///
    /// # Errors
    /// `WouldBlock` if the time is over first, or at once in a signal handler that interrupted the
    /// stack. Otherwise the memory is let go, and the error is why the connection ended before all
    /// was acknowledged; but for `NetworkDown`: the device is gone, and the memory is let go when the
    /// connection is closed.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let limit = timeout.map_or(Limit::Forever, Limit::For);
        match self.shard.with(|host| host.wait_completion(&self.completion, limit)) {
            Some(waited) => waited.map_err(to_io)?,
            // What is left is in the hands of others, and they need no help.
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
