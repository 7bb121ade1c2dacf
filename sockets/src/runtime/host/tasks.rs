//! Tasks of an async program: a step of a socket is tried once, and its task is woken when it may succeed.
//!
//! ```text
//!   poll ─► lock ─► the step ──done──► Ready
//!                     │ would wait
//!                     ▼
//!            the waker stays with the socket ─► Pending      (a step of any thread) ─► wake, without the lock
//! ```
//!
//! The step and the registration are one visit of the lock, so that no wake-up is lost. A driver runs the stack
//! (`drive.rs`); without one the service thread does.

use std::task::{Context, Poll};

use fulmar_stack::base::{Instant, SlotId};
use fulmar_stack::socket::{Ready, SocketError};

use super::Host;
use crate::runtime::sync::Ordering;
use crate::runtime::watch::Side;
use crate::runtime::watched::WatchedShard;

impl Host {
    /// Tries a step for a task. Pending: the task is woken when the side of the socket is ready; of the tasks that wait
    /// for one side, the last.
    ///
    /// # Errors
    /// Errors of the step, and errors of [`Host::lock`].
    #[inline]
    pub(crate) fn poll_step<R>(
        &self,
        cx: &mut Context<'_>,
        socket: SlotId,
        side: Side,
        step: impl FnOnce(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> Poll<Result<R, SocketError>> {
        let done = self.call(|shard, now| {
            let done = step(shard, now)?;
            if done.is_pending() {
                shard.watch_task(socket, side, cx.waker());
            }
            Ok(done)
        });
        match done {
            Ok(Poll::Ready(r)) => Poll::Ready(Ok(r)),
            Ok(Poll::Pending) => {
                self.poll_for_tasks();
                Poll::Pending
            }
            Err(e) => Poll::Ready(Err(e)),
        }
    }

    /// As [`Host::poll_step`], until a socket is ready for one of `interest`, or has failed.
    pub(crate) fn poll_ready(
        &self,
        cx: &mut Context<'_>,
        socket: SlotId,
        side: Side,
        interest: Ready,
    ) -> Poll<Result<Ready, SocketError>> {
        self.poll_step(cx, socket, side, |shard, _| {
            let ready = shard.ready(socket)?.seen_by(interest);
            Ok(if ready.is_empty() { Poll::Pending } else { Poll::Ready(ready) })
        })
    }

    /// The service thread polls from now on whenever neither a caller nor a driver does.
    fn poll_for_tasks(&self) {
        if !self.has_tasks.load(Ordering::Relaxed) && !self.has_tasks.swap(true, Ordering::SeqCst) {
            self.poll_for_sets();
        }
    }
}
