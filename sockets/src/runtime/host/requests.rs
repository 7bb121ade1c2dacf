//! Requests that need no answer: performed inline, or queued in the inbox for the holder of the lock.

use fulmar_stack::base::{Counter, Instant, Stage};

use super::guard::Guard;
use super::{Host, OnUnwind, POLL_BUDGET, sys};
use crate::runtime::inbox::{INBOX_LIMIT, Request, after_release};
use crate::runtime::watched::WatchedShard;

impl Host {
    /// Performs a request if the lock is free, else queues it for the holder. Never waits long.
    #[inline]
    pub fn post(&self, request: Request) {
        self.in_destructor(|| self.perform_or_queue(request));
    }

    fn perform_or_queue(&self, request: Request) {
        if !self.is_ours() {
            return std::mem::forget(request);
        }
        let Some(mark) = self.bit.enter() else { return self.post_from_handler(request) };
        self.ledger.enter();
        if let Some(mut shard) = self.try_shard() {
            let unwinding = OnUnwind::of(self);
            self.note_caller(&mut shard);
            self.end_turn_of_other(&mut shard);
            if self.drain_inbox(&mut shard) {
                perform_inline(&mut shard, request);
            }
            unwinding.disarm();
            return self.unlock(shard, mark);
        }
        let waiting = self.inbox.push(request);
        // The holder may have drained the inbox just before the push.
        let shard = if waiting < INBOX_LIMIT {
            after_release();
            self.try_shard()
        } else {
            // The inbox fills faster than holders drain it: wait for the lock.
            Some(self.shard())
        };
        drop(Guard::new(self, shard, mark));
    }

    /// A signal handler interrupted the thread inside the stack. Calls of the handler answer `WouldBlock`, but it
    /// may drop a socket, a loan or a ticket.
    fn post_from_handler(&self, request: Request) {
        match request {
            Request::Close(id) => self.inbox.push_close(id),
            // Its buffers are freed without the lock; the charge stays with the socket.
            Request::LoanDone(_, chain, _) => drop(chain),
            // A handler must not free the ticket. The buffer is freed when it is returned.
            Request::AbandonPost(id, ticket) => {
                ticket.mark_unwanted();
                std::mem::forget(ticket);
                self.inbox.push_unwanted(id);
            }
            other => std::mem::forget(other),
        }
    }

    /// Performs the requests of the inbox. False: the stack has failed, and the shard may not be used.
    #[inline(always)]
    pub(super) fn drain_inbox(&self, shard: &mut WatchedShard) -> bool {
        self.inbox.is_empty() || self.drain_full_inbox(shard)
    }

    #[cold]
    fn drain_full_inbox(&self, shard: &mut WatchedShard) -> bool {
        let unwinding = OnUnwind::of(self);
        while !self.inbox.is_empty() && !self.inbox.is_closed() {
            let now = sys::now();
            let done = self.inbox.drain(|r| perform(shard, now, r));
            shard.count(Counter::InboxPosts, done as u64);
            // They are of other threads, which do not wait for a turn.
            shard.end_turn(now);
        }
        unwinding.disarm();
        if self.inbox.is_closed() {
            self.reclaim(shard);
        }
        !self.inbox.is_closed()
    }
}

/// A request that found the lock free.
#[inline(always)]
fn perform_inline(shard: &mut WatchedShard, request: Request) {
    if let Request::Free(chain) = request {
        shard.pass(Stage::Locked);
        return shard.free(chain);
    }
    let now = sys::now();
    shard.pass(Stage::Locked);
    perform(shard, now, request);
}

fn perform(shard: &mut WatchedShard, now: Instant, request: Request) {
    match request {
        Request::Commit(id, r) => shard.sosend(id).commit(now, r),
        Request::CommitLast(id, r) => shard.sosend(id).commit_last(now, r),
        Request::EndWrite(id) => shard.sosend(id).unlock(),
        Request::Abandon(id, r) => {
            shard.sosend(id).abandon(now, r);
            shard.sosend(id).unlock();
        }
        Request::EndSendFile(id) => shard.sendfile(id).end(),
        Request::GiveBack(id, r) => shard.sosend(id).abandon(now, r),
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
