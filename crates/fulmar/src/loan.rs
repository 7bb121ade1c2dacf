//! Received bytes by reference: the stack's own buffers, lent to the program.

use std::fmt;
use std::io::{self, IoSlice, Read};
use std::net::SocketAddr;
use std::sync::Arc;

use fulmar_base::SlotId;
use fulmar_mbuf::{Chain, Mbuf};
use fulmar_socket::Ready;
use fulmar_stack::{Limit, Request, WeakHost, fork_generation};
use fulmar_tcp::Lent;

use crate::socket::Socket;
use crate::tcp::TcpStream;
use crate::udp::UdpSocket;

/// Bytes that were received, where they landed: a list of slices of the stack's own buffers. Nothing
/// was copied. Empty at the end of a stream.
///
/// The buffers go back to their stack when the loan is dropped, from any thread, also after the socket
/// or the stack is gone. Until then their storage counts against the socket's receive buffer and the
/// stack's memory, as if the bytes had not been read: who keeps loans closes the window of that very
/// connection (a datagram socket drops what arrives), and of no other. So take what you need out of a
/// loan, or let go of it, before you wait for more on the same socket than its buffer holds.
///
/// In a forked child a loan of the parent has no bytes.
pub struct Loan {
    held: Holder,
    /// The part of the chain that this loan is.
    from: usize,
    len: usize,
}

/// Split loans share the buffers, which go back with the last of them.
enum Holder {
    Nothing,
    Alone(Held),
    Shared(Arc<Held>),
}

/// Buffers, and where they go back to.
struct Held {
    chain: Chain,
    host: WeakHost,
    id: SlotId,
    lent: Lent,
    /// The process in which the memory exists.
    forks: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        let chain = std::mem::take(&mut self.chain);
        if self.forks != fork_generation() {
            // The memory does not exist here.
            return std::mem::forget(chain);
        }
        match self.host.upgrade() {
            Some(host) => host.post(Request::LoanDone(self.id, chain, self.lent)),
            // The stack is gone; its memory goes with the last of its buffers.
            None => drop(chain),
        }
    }
}

impl Loan {
    fn new(socket: &Socket, chain: Chain, lent: Lent) -> Loan {
        let len = chain.len();
        if chain.segs() == 0 {
            return Loan::default();
        }
        let host = socket.stack.host.downgrade();
        let held = Held { chain, host, id: socket.id, lent, forks: fork_generation() };
        Loan { held: Holder::Alone(held), from: 0, len }
    }

    fn held(&self) -> Option<&Held> {
        let held = match &self.held {
            Holder::Nothing => return None,
            Holder::Alone(held) => held,
            Holder::Shared(held) => &**held,
        };
        (held.forks == fork_generation()).then_some(held)
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.held().map_or(0, |_| self.len)
    }

    /// Whether it has none: the end of a stream, or an empty datagram.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, in order; no slice is empty.
    pub fn slices(&self) -> Slices<'_> {
        let mbufs = self.held().map(|h| h.chain.iter());
        Slices { mbufs, skip: self.from, left: self.len() }
    }

    /// The bytes in the shape that vectored writes take, in order.
    pub fn io_slices(&self) -> impl Iterator<Item = IoSlice<'_>> {
        self.slices().map(IoSlice::new)
    }

    /// Copies bytes from `offset` on into `out`; returns how many there were.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        let n = out.len().min(self.len().saturating_sub(offset));
        match (self.held(), out.get_mut(..n)) {
            (Some(held), Some(out)) => held.chain.copy_to(self.from.saturating_add(offset), out),
            _ => 0,
        }
    }

    /// A copy in memory of the program.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.len());
        self.slices().for_each(|s| all.extend_from_slice(s));
        all
    }

    /// Forgets the first `n` bytes, or all if there are fewer. Their buffers stay until the loan is
    /// dropped.
    pub fn advance(&mut self, n: usize) {
        let n = n.min(self.len);
        self.from += n;
        self.len -= n;
    }

    /// Keeps the first `at` bytes and returns the others. Both refer to the same buffers, which go
    /// back when both are dropped.
    ///
    /// # Panics
    /// If there are fewer bytes.
    #[must_use = "the bytes behind `at` are in it"]
    pub fn split_off(&mut self, at: usize) -> Loan {
        assert!(at <= self.len, "split at {at} of {} bytes", self.len);
        let rest = Loan { held: self.share(), from: self.from + at, len: self.len - at };
        self.len = at;
        rest
    }

    /// Returns the first `at` bytes and keeps the others; as [`Loan::split_off`].
    ///
    /// # Panics
    /// If there are fewer bytes.
    #[must_use = "the bytes before `at` are in it"]
    pub fn split_to(&mut self, at: usize) -> Loan {
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }

    fn share(&mut self) -> Holder {
        self.held = match std::mem::replace(&mut self.held, Holder::Nothing) {
            Holder::Alone(held) => Holder::Shared(Arc::new(held)),
            other => other,
        };
        match &self.held {
            Holder::Shared(held) => Holder::Shared(Arc::clone(held)),
            _ => Holder::Nothing,
        }
    }
}

impl Default for Loan {
    /// No bytes.
    fn default() -> Loan {
        Loan { held: Holder::Nothing, from: 0, len: 0 }
    }
}

impl Read for Loan {
    /// Copies from the front and forgets what was copied. Never fails.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.copy_to(0, buf);
        self.advance(n);
        Ok(n)
    }
}

impl<'a> IntoIterator for &'a Loan {
    type Item = &'a [u8];
    type IntoIter = Slices<'a>;
    fn into_iter(self) -> Slices<'a> {
        self.slices()
    }
}

impl PartialEq<[u8]> for Loan {
    fn eq(&self, other: &[u8]) -> bool {
        let mut rest = Some(other);
        self.len() == other.len()
            && self.slices().all(|s| {
                rest = rest.and_then(|r| r.strip_prefix(s));
                rest.is_some()
            })
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// The slices of a [`Loan`].
#[derive(Clone)]
pub struct Slices<'a> {
    mbufs: Option<fulmar_mbuf::Iter<'a>>,
    skip: usize,
    left: usize,
}

impl<'a> Iterator for Slices<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        while self.left > 0 {
            let bytes = self.mbufs.as_mut()?.next().map(Mbuf::as_slice)?;
            let from = self.skip.min(bytes.len());
            self.skip -= from;
            let rest = bytes.get(from..).unwrap_or_default();
            let part = rest.get(..self.left).unwrap_or(rest);
            self.left -= part.len();
            if !part.is_empty() {
                return Some(part);
            }
        }
        None
    }
}

impl fmt::Debug for Slices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone().map(<[u8]>::len)).finish()
    }
}

impl TcpStream {
    /// Reads without copying: up to `max` bytes in the buffers in which they arrived. Waits as `read`
    /// does; an empty loan is the end of the stream.
    ///
    /// Worth it from a few KiB on, and the more the less often a loan is cut from a buffer: give a
    /// large `max`. A few bytes out of a large buffer are copied all the same, so that they do not
    /// keep it.
    ///
    /// # Errors
    /// As `read`. `ENOBUFS` if the stack is so short of memory that what arrived lies in its last
    /// reserve, which it does not lend; `read` works then.
    pub fn recv_owned(&self, max: usize) -> io::Result<Loan> {
        self.lend(max, self.socket.read_limit())
    }

    /// As [`TcpStream::recv_owned`], but never waits.
    ///
    /// # Errors
    /// `WouldBlock`, and those of [`TcpStream::recv_owned`].
    pub fn try_recv_owned(&self, max: usize) -> io::Result<Loan> {
        self.lend(max, Limit::DoNotWait)
    }

    pub(crate) fn lend(&self, max: usize, limit: Limit) -> io::Result<Loan> {
        if max == 0 {
            return Ok(Loan::default());
        }
        let s = &*self.socket;
        let (chain, lent) =
            s.wait_for_data(limit, |shard, now, patient| shard.tcp_lend(now, s.id, max, patient))?;
        Ok(Loan::new(s, chain, lent))
    }
}

impl UdpSocket {
    /// Receives one datagram without copying, and who sent it. Waits as `recv_from` does.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_owned(&self) -> io::Result<(Loan, SocketAddr)> {
        self.lend(self.socket.read_limit())
    }

    /// As [`UdpSocket::recv_owned`], but never waits.
    ///
    /// # Errors
    /// `WouldBlock`, and those of [`UdpSocket::recv_from`].
    pub fn try_recv_owned(&self) -> io::Result<(Loan, SocketAddr)> {
        self.lend(Limit::DoNotWait)
    }

    fn lend(&self, limit: Limit) -> io::Result<(Loan, SocketAddr)> {
        let s = &*self.socket;
        let (d, lent) = s.wait(Ready::READABLE, limit, |shard, _| shard.udp_lend(s.id))?;
        Ok((Loan::new(s, d.payload, lent), d.src))
    }
}
