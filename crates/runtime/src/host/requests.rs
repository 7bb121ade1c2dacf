//! Requests that need no answer: done at once, or left in the inbox for the holder of the lock.

use std::sync::PoisonError;

use fulmar_base::{Counter, Instant, Outside, Probe, Stage};

use super::guard::Guard;
use super::{Host, OnUnwind, POLL_BUDGET, sys};
use crate::inbox::{INBOX_LIMIT, Request, after_release};
use crate::watched::WatchedShard;

impl<P: Probe> Host<P> {
    /// Does a request now if the lock is free, else leaves it for the holder. Never waits long.
    #[inline]
    pub fn post(&self, request: Request) {
        self.in_destructor(|| self.do_or_leave(request));
    }

    fn do_or_leave(&self, request: Request) {
        if !self.is_ours() {
            return std::mem::forget(request);
        }
        let Some(mark) = self.bit.enter() else { return self.post_from_handler(request) };
        self.outside.enter();
        if let Some(mut shard) = self.try_shard() {
            let unwinding = OnUnwind::of(self);
            self.note_caller(&mut shard);
            if self.drain_inbox(&mut shard) {
                do_now(&mut shard, request);
            }
            unwinding.disarm();
            return self.let_go(shard, mark);
        }
        let waiting = self.inbox.push(request);
        // The holder may have drained the inbox just before the request came in.
        let shard = if waiting < INBOX_LIMIT {
            after_release();
            self.try_shard()
        } else {
            // Somebody floods it faster than holders drain it: wait for the lock after all.
            Some(self.shard.lock().unwrap_or_else(PoisonError::into_inner))
        };
        drop(Guard::new(self, shard, mark));
    }

    /// The thread was interrupted inside the stack. It can have begun nothing in the handler, since
    /// every call there answers `WouldBlock`, but it can let go of a socket.
    fn post_from_handler(&self, request: Request) {
        match request {
            Request::Close(id) => self.inbox.push_close(id),
            // Its buffers go home without a lock; the charge stays with the socket.
            Request::LoanDone(_, chain, _) => drop(chain),
            // The memory of the ticket may not be freed here; that of the buffer is, when it is back.
            Request::AbandonPost(id, ticket) => {
                ticket.mark_unwanted();
                std::mem::forget(ticket);
                self.inbox.push_unwanted(id);
            }
            other => std::mem::forget(other),
        }
    }

    /// Does what the inbox asks for. False: the stack has failed, and nothing of the shard may be used.
    #[inline(always)]
    pub(super) fn drain_inbox(&self, shard: &mut WatchedShard<P>) -> bool {
        self.inbox.is_empty() || self.drain_full_inbox(shard)
    }

    #[cold]
    fn drain_full_inbox(&self, shard: &mut WatchedShard<P>) -> bool {
        let unwinding = OnUnwind::of(self);
        while !self.inbox.is_empty() && !self.inbox.is_closed() {
            let now = sys::now();
            let done = self.inbox.drain(|r| perform(shard, now, r));
            shard.count(Counter::InboxPosts, done as u64);
        }
        unwinding.disarm();
        if self.inbox.is_closed() {
            self.take_home(shard);
        }
        !self.inbox.is_closed()
    }
}

/// What is posted while the lock is free.
#[inline(always)]
fn do_now<P: Probe>(shard: &mut WatchedShard<P>, request: Request) {
    if let Request::Free(chain) = request {
        shard.pass(Stage::Locked);
        return shard.free(chain);
    }
    let now = sys::now();
    shard.pass(Stage::Locked);
    perform(shard, now, request);
}

fn perform<P: Probe>(shard: &mut WatchedShard<P>, now: Instant, request: Request) {
    match request {
        Request::Commit(id, r) => shard.tcp_commit(now, id, r),
        Request::CommitLast(id, r) => {
            shard.tcp_commit(now, id, r);
            shard.tcp_unlock_send(id);
        }
        Request::EndWrite(id) => shard.tcp_unlock_send(id),
        Request::Abandon(id, r) => {
            shard.tcp_abandon(id, r);
            shard.tcp_unlock_send(id);
        }
        Request::EndSendFile(id) => shard.sendfile_end(id),
        Request::GiveBack(id, r) => shard.tcp_abandon(id, r),
        Request::ReadDone(id, chain) => shard.tcp_read_done(now, id, chain),
        Request::LoanDone(id, chain, lent) => shard.take_back(now, id, chain, lent),
        Request::AbandonPost(id, ticket) => {
            shard.tcp_abandon_post(now, id, &ticket);
        }
        Request::AbandonUnwanted(id) => shard.tcp_abandon_unwanted(now, id),
        Request::Free(chain) => shard.free(chain),
        Request::Close(id) => shard.close(now, id),
        Request::Poll => drop(shard.step(now, POLL_BUDGET)),
    }
}
