//! The poll functions of sockets, for async programs: each tries its operation once and, if it would wait, wakes the task
//! when it may succeed. They do not depend on `set_nonblocking` and time-outs. Dropping a future that called them loses
//! nothing: what was not returned stays in the socket.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use fulmar_stack::base::{Instant, Stage};
use fulmar_stack::shard::{PendingError, RecvMessage, SendMessage};
use fulmar_stack::socket::{Least, Ready, SocketError};

use crate::api::echo::{EchoRequest, EchoSocket};
use crate::api::error::to_io;
use crate::api::listener::TcpListener;
use crate::api::loan::Loan;
use crate::api::pending::PendingConnection;
use crate::api::send::SendFlags;
use crate::api::socket::{Socket, explain_unreachable};
use crate::api::tcp::TcpStream;
use crate::api::udp::UdpSocket;
use crate::runtime::{Request, Side, WatchedShard};

/// Writes that found space, and then none, before the task yields: another writer may hold the socket.
const MOST_TRIES: usize = 2;

impl Socket {
    /// Tries a step for a task.
    #[inline]
    pub(crate) fn poll_step<R>(
        &self,
        cx: &mut Context<'_>,
        side: Side,
        step: impl FnOnce(&mut WatchedShard, Instant) -> Result<Poll<R>, SocketError>,
    ) -> Poll<io::Result<R>> {
        self.host().poll_step(cx, self.id, side, step).map_err(to_io)
    }

    fn poll_ready(&self, cx: &mut Context<'_>, side: Side, ready: Ready) -> Poll<io::Result<()>> {
        self.host().poll_ready(cx, self.id, side, ready).map_ok(drop).map_err(to_io)
    }

    /// Repeats a call that does not wait until it is done or its task waits.
    fn poll_writing<R>(
        &self,
        cx: &mut Context<'_>,
        mut call: impl FnMut() -> io::Result<R>,
    ) -> Poll<io::Result<R>> {
        for _ in 0..MOST_TRIES {
            match call() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
            ready!(self.poll_ready(cx, Side::Write, Ready::WRITABLE))?;
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// For async programs. Of the tasks that wait to read, the last is woken, and so of those that wait to write.
impl TcpStream {
    /// Waits until the handshake of [`TcpStream::connect_nonblocking`] is over.
    ///
    /// # Errors
    /// Those of `connect(2)`.
    pub fn poll_connected(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let s = &*self.socket;
        s.poll_step(cx, Side::Write, |shard, _| shard.tcp_connected(s.id))
            .map_err(explain_unreachable)
    }

    /// Reads bytes into `buf`. 0: the end of the stream, or a buffer of no bytes.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    pub fn poll_read(&self, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut filled = 0;
        self.poll_read_to(cx, buf.len(), |bytes| {
            let end = filled + bytes.len();
            if let Some(space) = buf.get_mut(filled..end) {
                space.copy_from_slice(bytes);
            }
            filled = end;
        })
    }

    /// Passes received bytes, at most `max`, to `put` in slices. Returns their number; 0: the end of the stream, or
    /// `max` is 0. The bytes are copied once, by `put`, also to memory that is not initialized.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    pub fn poll_read_to(
        &self,
        cx: &mut Context<'_>,
        max: usize,
        put: impl FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        if max == 0 {
            return Poll::Ready(Ok(0));
        }
        let s = &*self.socket;
        let chain = ready!(s.poll_step(cx, Side::Read, |shard, _| {
            shard.tcp_take_more(s.id, max, 0, Least::LowWater)
        }))?;
        let n = chain.len();
        if n > 0 {
            chain.slices().for_each(put);
            s.host().pass(Stage::ReceiveCopied);
            s.host().post(Request::ReadDone(s.id, chain));
        }
        Poll::Ready(Ok(n))
    }

    /// See [`ZeroCopy::poll_recv_owned`](crate::zero_copy::ZeroCopy::poll_recv_owned).
    pub(crate) fn poll_lend(&self, cx: &mut Context<'_>, max: usize) -> Poll<io::Result<Loan>> {
        if max == 0 {
            return Poll::Ready(Ok(Loan::default()));
        }
        let s = &*self.socket;
        let (chain, lent) = ready!(s.poll_step(cx, Side::Read, |shard, now| {
            shard.tcp_lend(now, s.id, max, Least::LowWater)
        }))?;
        Poll::Ready(Ok(Loan::new(s, chain, lent)))
    }

    /// Waits until a read does not block. Level-triggered: ready again until a read finds nothing.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_ready(cx, Side::Read, Ready::READABLE)
    }

    /// Writes bytes; returns how many were accepted.
    ///
    /// # Errors
    /// Those of `send(2)`.
    pub fn poll_write(&self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    /// Writes bytes of several buffers; returns how many were accepted.
    ///
    /// # Errors
    /// Those of `send(2)`.
    pub fn poll_write_vectored(
        &self,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_writing(cx, || self.send_with(bufs, SendFlags::DONT_WAIT))
    }

    /// Waits until a write does not block.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_ready(cx, Side::Write, Ready::WRITABLE)
    }
}

/// For async programs. Of the tasks that wait, the last is woken.
impl TcpListener {
    /// Accepts a connection.
    ///
    /// # Errors
    /// As [`TcpListener::accept`].
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        self.poll_sockets(cx, |s, shard| shard.tcp_accept(s.id)).map_ok(|(s, (id, peer))| {
            (TcpStream { socket: Socket::new(Arc::clone(&s.stack), s.shard, id) }, peer)
        })
    }

    /// Takes a SYN that the program is to answer or reject: see [`TcpListener::pending`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_pending(&self, cx: &mut Context<'_>) -> Poll<io::Result<PendingConnection>> {
        self.poll_sockets(cx, |s, shard| shard.tcp_pending(s.id))
            .map_ok(|(s, pending)| PendingConnection::new(s, pending))
    }

    /// Tries a step on the socket of each shard.
    fn poll_sockets<T>(
        &self,
        cx: &mut Context<'_>,
        step: impl Fn(&Socket, &mut WatchedShard) -> Result<Poll<T>, SocketError>,
    ) -> Poll<io::Result<(&Arc<Socket>, T)>> {
        for s in self.sockets() {
            if let Poll::Ready(done) = s.poll_step(cx, Side::Read, |shard, _| step(s, shard)) {
                return Poll::Ready(done.map(|taken| (s, taken)));
            }
        }
        Poll::Pending
    }
}

/// For async programs. Of the tasks that wait, the last is woken.
impl EchoSocket {
    /// Takes an echo request: see [`EchoSocket::recv`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<io::Result<EchoRequest>> {
        let s = &*self.socket;
        let taken = s.poll_step(cx, Side::Read, |shard, _| shard.icmp().receive_request(s.id));
        taken.map_ok(|request| self.copied(request))
    }
}

/// For async programs. Of the tasks that wait to receive, the last is woken, and so of those that wait to send.
impl UdpSocket {
    /// Receives one datagram: see [`UdpSocket::recv_from`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_recv_from(
        &self,
        cx: &mut Context<'_>,
        buf: &mut [u8],
    ) -> Poll<io::Result<(usize, SocketAddr)>> {
        let s = &*self.socket;
        let taken = s.poll_step(cx, Side::Read, |shard, _| shard.udp().receive_into(s.id, buf));
        taken.map_ok(|taken| self.copied(taken, buf))
    }

    /// Receives datagrams: see [`UdpSocket::recv_many`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_recv_many(
        &self,
        cx: &mut Context<'_>,
        messages: &mut [RecvMessage<'_>],
    ) -> Poll<io::Result<usize>> {
        if messages.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let s = &*self.socket;
        s.poll_step(cx, Side::Read, |shard, _| shard.udp().receive_many(s.id, messages))
    }

    /// Waits until a datagram can be received.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn poll_recv_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_ready(cx, Side::Read, Ready::READABLE)
    }

    /// Sends one datagram; `None`: to the connected peer. See [`UdpSocket::send_to`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_send_to(
        &self,
        cx: &mut Context<'_>,
        buf: &[u8],
        to: Option<SocketAddr>,
    ) -> Poll<io::Result<usize>> {
        let s = &*self.socket;
        s.poll_step(cx, Side::Write, |shard, now| shard.udp().send_step(now, s.id, &[buf], to))
    }

    /// Sends datagrams, at most 64; returns how many were sent: see [`UdpSocket::send_many`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_send_many(
        &self,
        cx: &mut Context<'_>,
        messages: &[SendMessage<'_>],
    ) -> Poll<io::Result<usize>> {
        if messages.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let s = &*self.socket;
        s.poll_step(cx, Side::Write, |shard, now| {
            shard.udp().send_many(now, s.id, messages, PendingError::Return)
        })
        .map_ok(|sent| sent.messages)
    }

    /// Waits until a datagram can be sent.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn poll_send_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_ready(cx, Side::Write, Ready::WRITABLE)
    }
}
