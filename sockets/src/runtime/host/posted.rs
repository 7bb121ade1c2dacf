//! Waiting for posted buffers.

use fulmar_stack::base::Stage;
use fulmar_stack::socket::{Ready, SocketError};
use std::task::Poll;

use super::Host;
use super::wait_guard::WaitTarget;
use crate::runtime::limit::Limit;
use crate::runtime::sys;
use crate::runtime::ticket::{Post, RecvTicket, SoleTicket};
use crate::runtime::watched::WatchedShard;
use fulmar_stack::shard::RecvOutcome;

impl Host {
    /// Waits until a posted buffer is complete, and runs the stack meanwhile as a reader does. The sole owner of the
    /// ticket receives the outcome: handed off directly if the first poll brings it. `None`: the time is over, or the
    /// outcome was taken before. Posts the buffer of `post` first, if that is possible; else it stays there.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub(crate) fn wait_outcome(
        &self,
        ticket: &mut SoleTicket<'_>,
        limit: Limit,
        post: &mut Option<Post<'_>>,
    ) -> Result<Option<RecvOutcome>, SocketError> {
        let ticket = ticket.0;
        if ticket.is_over() && post.is_none() {
            return Ok(ticket.take());
        }
        match self.wait_for_ticket(ticket, limit, post) {
            Ok(None) | Err(SocketError::WouldBlock) => Ok(ticket.take()),
            outcome => outcome,
        }
    }

    /// `None`: the ticket may hold the outcome.
    fn wait_for_ticket(
        &self,
        ticket: &RecvTicket,
        limit: Limit,
        post: &mut Option<Post<'_>>,
    ) -> Result<Option<RecvOutcome>, SocketError> {
        let mut guard = self.lock()?;
        let now = sys::now();
        guard.pass(Stage::Locked);
        guard.post_if_possible(now, post);
        if ticket.is_over() {
            return Ok(None);
        }
        let end = limit.end(now);
        let outcome = guard.step_for_ticket(now, ticket).1;
        if outcome.is_some() || ticket.is_over() {
            return Ok(outcome);
        }
        let Some(give_up) = end else { return Ok(None) };
        let over = |_: &mut WatchedShard, _| {
            Ok(if ticket.is_over() { Poll::Ready(None) } else { Poll::Pending })
        };
        let target = WaitTarget::Completion(&ticket.completion, Ready::READABLE);
        Ok(self.wait_until(guard, now, target, give_up, over)?.flatten())
    }
}
