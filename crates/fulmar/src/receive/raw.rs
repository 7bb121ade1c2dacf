//! A read that posts the memory that it was called with, and takes it back before it returns.
//!
//! ```text
//!   read(&mut [u8]) ─► post ─► the stack, the device ─► the outcome ─► return
//!                        └── error, time-out, unwinding ─► take back ──┘
//! ```
//!
//! Invariant *lent*: the memory belongs to the caller, who borrowed it exclusively for the call. It is lent
//! only while an [`Away`] exists, whose borrow it keeps. An `Away` goes, on whatever way out, only when its
//! [`LoanedMemory`] says that the memory is back: then nothing refers to it any more, neither a room of a device nor
//! an mbuf in a queue nor a buffer of the stack (`back`, in `fulmar_mbuf`). That holds whatever the device
//! does; one that kept what it has placed would only keep the reader waiting. In a forked child the memory is
//! a copy of the parent's, which nobody there writes to.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use fulmar_base::Duration;
use fulmar_mbuf::{Chain, LoanedMemory, RecvBuf};
use fulmar_runtime::{Limit, Post, PostedRead, RecvTicket, SoleTicket};
use fulmar_shard::RecvOutcome;
use fulmar_socket::SocketError;
use fulmar_socket::posted::CompletionPolicy;

use crate::socket::Socket;

/// How a read went.
pub(super) enum Read {
    /// So many bytes lie in the memory; 0: the end of the stream, or of the time if there were some before.
    Placed(usize),
    /// These are to be copied there.
    Taken(Chain),
    /// It is to be done another way.
    Refused,
}

/// How often to look for memory that a device keeps, if there ever is such a device.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What one read needs beside its memory; kept by its thread for the next.
#[derive(Default)]
struct Means {
    lease: LoanedMemory,
    ticket: Arc<RecvTicket>,
}

thread_local! {
    static SPARE: Cell<Option<Means>> = const { Cell::new(None) };
}

impl Means {
    fn obtain() -> Means {
        // In the destructors of a thread that ends there is none.
        SPARE.try_with(Cell::take).ok().flatten().unwrap_or_default()
    }

    fn keep(mut self) {
        if let Some(ticket) = Arc::get_mut(&mut self.ticket) {
            ticket.renew();
            let _ = SPARE.try_with(|spare| spare.set(Some(self)));
        }
    }
}

/// Memory of a caller on its way through the stack.
struct Away<'a> {
    socket: &'a Socket,
    /// There until it is dropped.
    means: Option<Means>,
    memory: PhantomData<&'a mut [u8]>,
}

/// Reads into `memory` behind its first `done` bytes, by this rule; waits within `limit`.
///
/// # Errors
/// As a read; [`SocketError::WouldBlock`] when the time is over.
pub(super) fn read(
    socket: &Socket,
    memory: &mut [u8],
    done: usize,
    rule: CompletionPolicy,
    limit: Limit,
) -> Result<Read, SocketError> {
    let bytes = memory.len();
    let base = NonNull::from(memory).cast();
    let mut means = Means::obtain();
    // SAFETY: initialised, and the caller's alone, whose borrow lasts until this function ends, which
    // it does not, not even by unwinding, before `away` has seen that the memory is back.
    let buf = unsafe { means.lease.lend(base, bytes) };
    let mut away = Away { socket, means: Some(means), memory: PhantomData };
    away.read(buf, done, rule, limit)
}

impl Away<'_> {
    fn read(
        &mut self,
        buf: RecvBuf,
        done: usize,
        rule: CompletionPolicy,
        limit: Limit,
    ) -> Result<Read, SocketError> {
        let Some(Means { ticket, .. }) = &mut self.means else { return Ok(Read::Refused) };
        let (id, host) = (self.socket.id, self.socket.host());
        let posted = Arc::clone(ticket);
        let mut post = Some(Post { id, buf, read: Some(done), rule, ticket: &posted });
        let read = host.read_or_post(&mut SoleTicket::of(ticket), limit, &mut post);
        drop(post);
        drop(posted);
        let why = match read {
            Ok(PostedRead::Taken(chain)) => return Ok(Read::Taken(chain)),
            Ok(PostedRead::Refused) => return Ok(Read::Refused),
            Ok(PostedRead::Over(outcome)) => return told(outcome, done).map(Read::Placed),
            Ok(PostedRead::Posted) => SocketError::WouldBlock,
            Err(e) => e,
        };
        match self.take_back(done) {
            Some(Err(SocketError::Cancelled)) | None => Err(why),
            Some(told) => told.map(Read::Placed),
        }
    }

    /// Asks for the memory, and waits until nothing refers to it. What became of it; `None`: it was never
    /// posted, or this is a forked child.
    fn take_back(&mut self, done: usize) -> Option<Result<usize, SocketError>> {
        let (id, host) = (self.socket.id, self.socket.host());
        let Means { lease, ticket } = self.means.as_mut()?;
        // If it fails the memory does not come back in the loop before it is over by itself.
        let _ = host.call(|shard, now| {
            shard.tcp_cancel_post(now, id, ticket);
            Ok(())
        });
        let mut outcome = None;
        loop {
            outcome = outcome.or_else(|| ticket.take().map(|o| told(o, done)));
            if !lease.is_away() || !host.is_ours() {
                return outcome;
            }
            // The pool had no memory to move bytes to, or the device keeps what it has placed.
            if ticket.is_over() || host.wait_ticket(ticket, Limit::For(LOOK_AGAIN)).is_err() {
                std::thread::sleep(LOOK_AGAIN);
                let _ = host.poll();
            }
        }
    }
}

/// What is told of a buffer, which is dropped; bytes behind the first `done`.
fn told(outcome: RecvOutcome, done: usize) -> Result<usize, SocketError> {
    match outcome {
        RecvOutcome { buf: Some(buf), error: None } => Ok(buf.len().saturating_sub(done)),
        RecvOutcome { error, .. } => Err(error.unwrap_or(SocketError::NetworkDown)),
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        let is_away = |means: &Option<Means>| means.as_ref().is_some_and(|m| m.lease.is_away());
        if is_away(&self.means) && self.socket.host().is_ours() {
            // Only where the call unwinds: the bytes that it had received go with it.
            self.take_back(0);
        }
        if !is_away(&self.means)
            && let Some(means) = self.means.take()
        {
            means.keep();
        }
    }
}
