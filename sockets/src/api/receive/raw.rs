//! A read that posts the buffer of its caller, and revokes it before it returns.
//!
//! ```text
//!   read(&mut [u8]) ─► post ─► the stack, the device ─► the outcome ─► return
//!                        └── error, time-out, unwinding ─► revoke ─────┘
//! ```
//!
//! Invariant *lent*: the caller has borrowed the memory exclusively for the call. It is lent only while a
//! [`LentBuffer`] exists, which keeps the borrow. A `LentBuffer` is dropped, on any path out of the call, only when its
//! [`LoanedMemory`] reports that nothing refers to the memory: no writable range of a device, no mbuf in a queue, no
//! buffer of the stack (`back`, in `fulmar_stack::mbuf`). So a device that kept a reference would delay the read for ever, but
//! never write to memory after it. In a forked child the memory is a copy of the parent's, and no device writes to it.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::runtime::{Limit, Post, PostedRead, RecvTicket, SoleTicket};
use fulmar_stack::base::Duration;
use fulmar_stack::mbuf::{Chain, LoanedMemory, RecvBuf};
use fulmar_stack::shard::RecvOutcome;
use fulmar_stack::socket::SocketError;
use fulmar_stack::socket::posted::CompletionPolicy;

use crate::api::socket::Socket;

/// The result of a read.
pub(super) enum Read {
    /// So many bytes were received into the buffer; 0: the end of the stream, or, after earlier bytes, of the time.
    Placed(usize),
    /// Received bytes, still to be copied into the buffer.
    Taken(Chain),
    /// Not possible: the copying read is used.
    Refused,
}

/// Interval at which memory is polled that a device still refers to.
const POLL_PERIOD: Duration = Duration::from_millis(1);

/// State of a read, cached by its thread for the next one.
#[derive(Default)]
struct Scratch {
    loan: LoanedMemory,
    ticket: Arc<RecvTicket>,
}

thread_local! {
    static SPARE: Cell<Option<Scratch>> = const { Cell::new(None) };
}

impl Scratch {
    fn obtain() -> Scratch {
        // The thread-local is gone in destructors of an ending thread.
        SPARE.try_with(Cell::take).ok().flatten().unwrap_or_default()
    }

    fn keep(mut self) {
        if let Some(ticket) = Arc::get_mut(&mut self.ticket) {
            ticket.renew();
            let _ = SPARE.try_with(|spare| spare.set(Some(self)));
        }
    }
}

/// The buffer of a caller while it is lent to the stack.
struct LentBuffer<'a> {
    socket: &'a Socket,
    /// Present until the drop.
    scratch: Option<Scratch>,
    memory: PhantomData<&'a mut [u8]>,
}

/// Reads into `memory` after its first `done` bytes, by this rule; waits within `limit`.
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
    let mut scratch = Scratch::obtain();
    // SAFETY: initialised, and borrowed exclusively until this function ends. It ends, by unwinding too, only after the
    // drop of `lent` has seen that nothing refers to the memory.
    let buf = unsafe { scratch.loan.lend(base, bytes) };
    let mut lent = LentBuffer { socket, scratch: Some(scratch), memory: PhantomData };
    lent.read(buf, done, rule, limit)
}

impl LentBuffer<'_> {
    fn read(
        &mut self,
        buf: RecvBuf,
        done: usize,
        rule: CompletionPolicy,
        limit: Limit,
    ) -> Result<Read, SocketError> {
        let Some(Scratch { ticket, .. }) = &mut self.scratch else { return Ok(Read::Refused) };
        let (id, host) = (self.socket.id, self.socket.host());
        let posted = Arc::clone(ticket);
        let mut post = Some(Post { id, buf, read: Some(done), rule, ticket: &posted });
        let read = host.read_or_post(&mut SoleTicket::of(ticket), limit, &mut post);
        drop(post);
        drop(posted);
        let why = match read {
            Ok(PostedRead::Taken(chain)) => return Ok(Read::Taken(chain)),
            Ok(PostedRead::Refused) => return Ok(Read::Refused),
            Ok(PostedRead::Over(outcome)) => return received(outcome, done).map(Read::Placed),
            Ok(PostedRead::Posted) => SocketError::WouldBlock,
            Err(e) => e,
        };
        match self.revoke(done) {
            Some(Err(SocketError::Cancelled)) | None => Err(why),
            Some(received) => received.map(Read::Placed),
        }
    }

    /// Cancels the posted buffer, and waits until nothing refers to its memory. Returns the result of the read; `None`:
    /// the buffer was never posted, or this is a forked child.
    fn revoke(&mut self, done: usize) -> Option<Result<usize, SocketError>> {
        let (id, host) = (self.socket.id, self.socket.host());
        let Scratch { loan, ticket } = self.scratch.as_mut()?;
        // If it fails, the loop waits until the buffer completes.
        let _ = host.call(|shard, now| {
            shard.tcp_cancel_post(now, id, ticket);
            Ok(())
        });
        let mut outcome = None;
        loop {
            outcome = outcome.or_else(|| ticket.take().map(|o| received(o, done)));
            if !loan.is_lent() || !host.is_ours() {
                return outcome;
            }
            // The pool had no memory to move bytes to, or the device still refers to placed bytes.
            if ticket.is_over() || host.wait_ticket(ticket, Limit::For(POLL_PERIOD)).is_err() {
                std::thread::sleep(POLL_PERIOD);
                let _ = host.poll();
            }
        }
    }
}

/// The number of bytes received after the first `done`. Drops the buffer.
fn received(outcome: RecvOutcome, done: usize) -> Result<usize, SocketError> {
    match outcome {
        RecvOutcome { buf: Some(buf), error: None } => Ok(buf.len().saturating_sub(done)),
        RecvOutcome { error, .. } => Err(error.unwrap_or(SocketError::NetworkDown)),
    }
}

impl Drop for LentBuffer<'_> {
    fn drop(&mut self) {
        let is_lent =
            |scratch: &Option<Scratch>| scratch.as_ref().is_some_and(|s| s.loan.is_lent());
        if is_lent(&self.scratch) && self.socket.host().is_ours() {
            // Only if the call unwinds: the bytes that it has received are lost.
            self.revoke(0);
        }
        if !is_lent(&self.scratch)
            && let Some(scratch) = self.scratch.take()
        {
            scratch.keep();
        }
    }
}
