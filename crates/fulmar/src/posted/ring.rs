//! Posted buffers that are used in turn: one call gives the last one back and waits for the next.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use fulmar_mbuf::RecvBuf;
use fulmar_runtime::{Limit, Post, RecvTicket, Request, SoleTicket};

use super::{RecvError, RecvRule, told};
use crate::socket::{Socket, to_io};
use crate::tcp::TcpStream;

/// Buffers that a stream fills in turn.
///
/// Each call of [`RecvRing::recv`] posts the buffer that it returned last, behind the others, and returns
/// the one that is filled next: [`TcpStream::recv_posted`] and [`RecvCompletion::wait`] in one step of the
/// stack, which costs less than both. The rules are the same. Dropping the ring takes its buffers back: bytes
/// of one that is being filled go back into the stream, those of one that is over go with it.
///
/// ```
/// # use std::io::Write;
/// # use fulmar::{RecvBuf, Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let one = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let other = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&other, "10.0.0.2:80")?;
/// # let mut peer = TcpStream::connect(&one, "10.0.0.2:80")?;
/// # let (stream, _) = listener.accept()?;
/// let mut ring = stream.recv_ring([(); 2].map(|()| RecvBuf::with_capacity(64 << 10)))?;
/// # peer.write_all(b"hello")?;
/// # drop(peer);
/// let mut all = Vec::new();
/// loop {
///     let bytes = ring.recv()?;
///     if bytes.is_empty() {
///         break; // the end of the stream
///     }
///     all.extend_from_slice(bytes);
/// }
/// # assert_eq!(all, b"hello");
/// # Ok(())
/// # }
/// ```
///
/// [`RecvCompletion::wait`]: crate::RecvCompletion::wait
pub struct RecvRing {
    socket: Arc<Socket>,
    rule: RecvRule,
    /// Those that are posted, in order.
    away: VecDeque<Arc<RecvTicket>>,
    /// Those that are not: what was returned last, and what could not be posted.
    here: VecDeque<RecvBuf>,
    /// Tickets to be used again.
    spare: Vec<Arc<RecvTicket>>,
}

impl TcpStream {
    /// Gives away buffers that are filled in turn: see [`RecvRing`]. It keeps the connection open, as any
    /// handle does. Two of at least 64 KiB each keep a stream going.
    ///
    /// # Errors
    /// As [`TcpStream::recv_posted`]; the buffers are gone then.
    pub fn recv_ring(
        &self,
        buffers: impl IntoIterator<Item = impl Into<RecvBuf>>,
    ) -> io::Result<RecvRing> {
        self.recv_ring_with(buffers, RecvRule::default())
    }

    /// As [`TcpStream::recv_ring`], with a rule of its own for when a buffer comes back.
    ///
    /// # Errors
    /// As [`TcpStream::recv_posted`]; `InvalidInput` without a buffer.
    pub fn recv_ring_with(
        &self,
        buffers: impl IntoIterator<Item = impl Into<RecvBuf>>,
        rule: RecvRule,
    ) -> io::Result<RecvRing> {
        let here: VecDeque<RecvBuf> = buffers.into_iter().map(Into::into).collect();
        if here.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let socket = Arc::clone(&self.socket);
        let (away, spare) = (VecDeque::new(), Vec::new());
        let mut ring = RecvRing { socket, rule, away, here, spare };
        while !ring.here.is_empty() {
            ring.post_one()?;
        }
        Ok(ring)
    }
}

impl RecvRing {
    /// Posts the buffer that was returned last and returns what the next one has received; none is the end
    /// of the stream. Waits as a `read` of the stream does: not if it is non-blocking, and at most for its
    /// read timeout.
    ///
    /// # Errors
    /// Those of `read`. The ring may be used again after `WouldBlock`.
    pub fn recv(&mut self) -> io::Result<&[u8]> {
        if self.away.is_empty() {
            self.post_one()?;
        }
        let Some(mut first) = self.away.pop_front() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        match self.exchange(&mut first, self.socket.read_limit()) {
            Some(Ok(buf)) => {
                self.keep(first);
                self.here.push_back(buf);
                Ok(self.here.back().map_or(&[], |b| b))
            }
            Some(Err(RecvError { error, buf })) => {
                self.keep(first);
                self.here.extend(buf);
                Err(error)
            }
            None => {
                self.away.push_front(first);
                Err(io::ErrorKind::WouldBlock.into())
            }
        }
    }

    /// One step of the stack: posts what is here, and waits for `first`.
    fn exchange(
        &mut self,
        first: &mut Arc<RecvTicket>,
        limit: Limit,
    ) -> Option<Result<RecvBuf, RecvError>> {
        let (id, rule, host) = (self.socket.id, self.rule, self.socket.host());
        let ticket = self.spare.pop().unwrap_or_default();
        let given = self.here.pop_front();
        let is_given = given.is_some();
        let mut post = given.map(|buf| Post { id, buf, read: None, rule, ticket: &ticket });
        let outcome = host.wait_outcome(&mut SoleTicket::of(first), limit, &mut post);
        match post {
            None if is_given => self.away.push_back(ticket),
            refused => {
                self.here.extend(refused.map(|p| p.buf));
                self.spare.push(ticket);
            }
        }
        match outcome {
            Ok(outcome) => outcome.map(told),
            Err(e) => Some(Err(to_io(e).into())),
        }
    }

    fn post_one(&mut self) -> io::Result<()> {
        let Some(buf) = self.here.pop_front() else { return Ok(()) };
        let ticket = self.spare.pop().unwrap_or_default();
        let (id, rule) = (self.socket.id, self.rule);
        let mut buf = Some(buf);
        let posted = self.socket.host().call(|shard, now| {
            let Some(given) = buf.take() else { return Ok(()) };
            shard.tcp_post(now, id, given, rule, &ticket).map_err(|(e, given)| {
                buf = Some(given);
                e
            })
        });
        self.here.extend(buf);
        posted.map_err(to_io)?;
        self.away.push_back(ticket);
        Ok(())
    }

    /// Keeps a ticket that is over, if nobody else has it.
    fn keep(&mut self, mut ticket: Arc<RecvTicket>) {
        if let Some(own) = Arc::get_mut(&mut ticket) {
            own.renew();
            self.spare.push(ticket);
        }
    }
}

impl Drop for RecvRing {
    fn drop(&mut self) {
        // The last first, so that what each puts back is still in front of what was put back before.
        while let Some(ticket) = self.away.pop_back() {
            if !ticket.is_over() {
                self.socket.host().post(Request::AbandonPost(self.socket.id, ticket));
            }
        }
    }
}

impl std::fmt::Debug for RecvRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvRing").field("posted", &self.away.len()).finish_non_exhaustive()
    }
}
