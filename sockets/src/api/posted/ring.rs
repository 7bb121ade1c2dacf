//! Posted buffers used in turn: one call posts the last one again and waits for the next.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::runtime::{Limit, Post, RecvTicket, Request, SoleTicket};
use fulmar_stack::mbuf::RecvBuf;

use super::{RecvError, RecvRule, to_result};
use crate::api::socket::{Socket, to_io};
use crate::api::tcp::TcpStream;

/// Buffers that a stream fills in turn.
///
/// Each call of [`RecvRing::recv`] posts the buffer that it returned last, after the others, and returns the next
/// filled one: [`ZeroCopy::recv_posted`](crate::zero_copy::ZeroCopy::recv_posted) and [`RecvCompletion::wait`] in one step of the stack, which costs less than
/// two. The rules are the same. The drop of the ring revokes its buffers: bytes of an incomplete buffer return to the
/// stream, **bytes of a complete buffer are lost**. So a ring is for the rest of a stream. To stop in the middle, use
/// [`ZeroCopy::recv_posted`](crate::zero_copy::ZeroCopy::recv_posted), whose completions can be cancelled and waited for.
///
/// ```
/// # use std::io::Write;
/// use fulmar::zero_copy::{RecvBuf, ZeroCopy};
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
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
/// [`RecvCompletion::wait`]: crate::zero_copy::RecvCompletion::wait
pub struct RecvRing {
    socket: Arc<Socket>,
    rule: RecvRule,
    /// Tickets of the posted buffers, in order.
    posted: VecDeque<Arc<RecvTicket>>,
    /// Buffers that are not posted: the one returned last, and those whose post failed.
    idle: VecDeque<RecvBuf>,
    /// Tickets for the next posts.
    spare: Vec<Arc<RecvTicket>>,
}

impl RecvRing {
    /// See [`ZeroCopy::recv_ring`](crate::zero_copy::ZeroCopy::recv_ring).
    pub(crate) fn new(
        stream: &TcpStream,
        idle: VecDeque<RecvBuf>,
        rule: RecvRule,
    ) -> io::Result<RecvRing> {
        if idle.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let socket = Arc::clone(&stream.socket);
        let (posted, spare) = (VecDeque::new(), Vec::new());
        let mut ring = RecvRing { socket, rule, posted, idle, spare };
        while !ring.idle.is_empty() {
            ring.post_one()?;
        }
        Ok(ring)
    }

    /// Posts the buffer that was returned last, and returns the bytes of the next one; none: the end of the stream.
    /// Waits as a `read` of the stream does.
    ///
    /// # Errors
    /// Those of `read`. The ring may be used again after `WouldBlock`.
    pub fn recv(&mut self) -> io::Result<&[u8]> {
        if self.posted.is_empty() {
            self.post_one()?;
        }
        let Some(mut first) = self.posted.pop_front() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        match self.exchange(&mut first, self.socket.read_limit()) {
            Some(Ok(buf)) => {
                self.keep(first);
                self.idle.push_back(buf);
                Ok(self.idle.back().map_or(&[], |b| b))
            }
            Some(Err(RecvError { error, buf })) => {
                self.keep(first);
                self.idle.extend(buf);
                Err(error)
            }
            None => {
                self.posted.push_front(first);
                Err(io::ErrorKind::WouldBlock.into())
            }
        }
    }

    /// One step of the stack: posts an idle buffer, and waits for `first`.
    fn exchange(
        &mut self,
        first: &mut Arc<RecvTicket>,
        limit: Limit,
    ) -> Option<Result<RecvBuf, RecvError>> {
        let (id, rule, host) = (self.socket.id, self.rule, self.socket.host());
        let ticket = self.spare.pop().unwrap_or_default();
        let given = self.idle.pop_front();
        let is_given = given.is_some();
        let mut post = given.map(|buf| Post { id, buf, rule, ticket: &ticket });
        let outcome = host.wait_outcome(&mut SoleTicket::of(first), limit, &mut post);
        match post {
            None if is_given => self.posted.push_back(ticket),
            refused => {
                self.idle.extend(refused.map(|p| p.buf));
                self.spare.push(ticket);
            }
        }
        match outcome {
            Ok(outcome) => outcome.map(to_result),
            Err(e) => Some(Err(to_io(e).into())),
        }
    }

    fn post_one(&mut self) -> io::Result<()> {
        let Some(buf) = self.idle.pop_front() else { return Ok(()) };
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
        self.idle.extend(buf);
        posted.map_err(to_io)?;
        self.posted.push_back(ticket);
        Ok(())
    }

    /// Keeps the ticket of a completed buffer, if there is no other reference to it.
    fn keep(&mut self, mut ticket: Arc<RecvTicket>) {
        if let Some(own) = Arc::get_mut(&mut ticket) {
            own.renew();
            self.spare.push(ticket);
        }
    }
}

impl Drop for RecvRing {
    fn drop(&mut self) {
        // The last buffer first: each puts its bytes back in front of the bytes of the later buffers.
        while let Some(ticket) = self.posted.pop_back() {
            if !ticket.is_over() {
                self.socket.host().post(Request::AbandonPost(self.socket.id, ticket));
            }
        }
    }
}

impl std::fmt::Debug for RecvRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvRing").field("posted", &self.posted.len()).finish_non_exhaustive()
    }
}
