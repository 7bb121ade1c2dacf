//! Waiting for posted buffers.

use fulmar_stack::base::{Instant, Stage};
use fulmar_stack::mbuf::Chain;
use fulmar_stack::socket::{Ready, SocketError};
use std::task::Poll;

use super::wait_guard::WaitTarget;
use super::{Clock, Guard, Host};
use crate::runtime::limit::Limit;
use crate::runtime::sys;
use crate::runtime::ticket::{Post, RecvTicket, SoleTicket};
use crate::runtime::watched::WatchedShard;
use fulmar_stack::shard::{ReadOrPost, RecvOutcome};

/// The outcome of a read that may post its buffer.
#[derive(Debug)]
pub enum PostedRead {
    /// Nothing was posted: these bytes were queued already; empty at the end of the stream.
    Taken(Chain),
    /// Nothing was posted and nothing taken: the caller uses the copying read.
    Refused,
    /// The buffer was posted and is complete.
    Over(RecvOutcome),
    /// The buffer is posted, and the time is over.
    Posted,
}

impl Host {
    /// Waits until a posted buffer is complete, and runs the stack meanwhile as a reader does. False: the
    /// time is over.
    ///
    /// # Errors
    /// As [`Host::lock`]; [`SocketError::WouldBlock`] if a signal handler would have to wait.
    pub fn wait_ticket(&self, ticket: &RecvTicket, limit: Limit) -> Result<bool, SocketError> {
        if ticket.is_over() {
            return Ok(true);
        }
        let target = WaitTarget::Completion(&ticket.completion, Ready::READABLE);
        let over = |_: &mut WatchedShard, _| {
            Ok(if ticket.is_over() { Poll::Ready(()) } else { Poll::Pending })
        };
        match self.wait_for(target, || limit, Clock::Exact, over) {
            Ok(()) => Ok(true),
            Err(SocketError::WouldBlock) => Ok(ticket.is_over()),
            Err(e) => Err(e),
        }
    }

    /// As [`Host::wait_ticket`], for the sole owner of the ticket, which receives the outcome: handed off directly
    /// if the first poll brings it. `None`: the time is over, or the outcome was taken before. Posts the buffer of
    /// `post` first, if that is possible; else it stays there.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub fn wait_outcome(
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

    /// A read that may wait, whose own buffer is `post`: see `WatchedShard::tcp_take_or_post`. The caller revokes a
    /// buffer that was posted and is not complete, also on an error.
    ///
    /// # Errors
    /// As [`Host::lock`], and those of a read.
    pub fn read_or_post(
        &self,
        ticket: &mut SoleTicket<'_>,
        limit: Limit,
        post: &mut Option<Post<'_>>,
    ) -> Result<PostedRead, SocketError> {
        let ticket = ticket.0;
        let mut guard = self.lock()?;
        let now = sys::now();
        guard.pass(Stage::Locked);
        if let ReadOrPost::Taken(chain) = guard.tcp_take_or_post(now, post)? {
            return Ok(PostedRead::Taken(chain));
        }
        if post.is_some() {
            return Ok(PostedRead::Refused);
        }
        match self.wait_posted(guard, now, ticket, limit, WatchedShard::step_for_read) {
            Ok(Some(outcome)) => Ok(PostedRead::Over(outcome)),
            Ok(None) | Err(SocketError::WouldBlock) => {
                Ok(ticket.take().map_or(PostedRead::Posted, PostedRead::Over))
            }
            Err(e) => Err(e),
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
        self.wait_posted(guard, now, ticket, limit, WatchedShard::step_for_ticket)
    }

    /// As [`Host::wait_for_ticket`], under the lock.
    fn wait_posted<'a>(
        &'a self,
        mut guard: Guard<'a>,
        now: Instant,
        ticket: &RecvTicket,
        limit: Limit,
        poll: impl FnOnce(&mut WatchedShard, Instant, &RecvTicket) -> (usize, Option<RecvOutcome>),
    ) -> Result<Option<RecvOutcome>, SocketError> {
        if ticket.is_over() {
            return Ok(None);
        }
        let end = limit.end(now);
        let outcome = poll(&mut guard, now, ticket).1;
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
