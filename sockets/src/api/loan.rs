//! Loans: received bytes by reference, in the stack's own buffers.

use std::collections::{VecDeque, vec_deque};
use std::fmt;
use std::io::{self, IoSlice, Read};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};

use crate::runtime::{Host, Limit, Request, fork_generation};
use fulmar_stack::base::SlotId;
use fulmar_stack::mbuf::{Chain, Mbuf};
use fulmar_stack::socket::Ready;
use fulmar_stack::tcp::LoanCharge;

use crate::api::socket::Socket;
use crate::api::tcp::TcpStream;
use crate::api::udp::UdpSocket;

/// Received bytes as slices of the stack's own buffers, without a copy. Empty at the end of a stream.
///
/// Over shared memory (`devices::shm`) another process can write to the bytes, which a Rust slice must exclude. There
/// the first [`Loan::slices`] copies all bytes of a receive call to the heap of this process, and every later access
/// uses the copy. Before that, [`Loan::copy_to`], [`Loan::to_vec`] and [`Read`] copy directly to their destination: use
/// those if the bytes are read once.
///
/// The buffers return to their stack when the loan is dropped, on any thread, also after the socket or the stack is
/// gone. Until then their storage is charged to the receive buffer of the socket and to the memory of the stack, as
/// unread bytes are. So a program that keeps loans closes the window of that connection (a datagram socket drops
/// datagrams), but of no other. Copy the bytes, or drop the loan, before you wait for more bytes of the same socket
/// than its buffer has space for.
///
/// In a forked child a loan of the parent has no bytes.
///
/// ```
/// # use std::io::Write;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::ZeroCopy;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// # (&peer).write_all(b"GET / HTTP/1.0\r\n")?;
/// # drop(peer);
/// let mut bytes = stream.recv_owned(64 << 10)?;
/// while bytes.len() < 5 {
///     bytes.append(stream.recv_owned(64 << 10)?);
/// }
/// let method = bytes.split_to(3);
/// assert_eq!(method.to_vec(), b"GET");
/// for slice in bytes.slices() {
///     println!("{} bytes more", slice.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Loan {
    /// A range of one chain each, in order. Most loans have the first one only.
    first: Option<Part>,
    more: VecDeque<Part>,
    /// Bytes of all of them.
    len: usize,
}

/// A range of a chain, of which other loans may have ranges.
struct Part {
    held: Holder,
    from: usize,
    len: usize,
}

/// Split loans share the buffers, which return to the stack with the last of them.
enum Holder {
    Sole(Held),
    Shared(Arc<Held>),
}

/// Buffers, and the stack to which they return.
struct Held {
    chain: Chain,
    host: Weak<Host>,
    id: SlotId,
    lent: LoanCharge,
    /// The fork generation of the process that has the memory.
    forks: u32,
    /// Another process may write the bytes.
    is_volatile: bool,
    /// A copy of volatile bytes, made at the first use of a slice.
    private: OnceLock<Box<[u8]>>,
}

impl Held {
    /// The private copy of all bytes; `None` if no other process can write to the chain.
    fn private(&self) -> Option<&[u8]> {
        self.is_volatile.then(|| &**self.private.get_or_init(|| self.chain.to_vec().into()))
    }

    /// Copies bytes from `at` on, from the private copy if there is one.
    fn copy_to(&self, at: usize, out: &mut [u8]) -> usize {
        match self.private.get().and_then(|bytes| bytes.get(at..)) {
            Some(bytes) => copy(bytes, out),
            None => self.chain.copy_to(at, out),
        }
    }
}

/// Copies the bytes that fit and returns their number.
fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let n = from.len().min(to.len());
    if let (Some(from), Some(to)) = (from.get(..n), to.get_mut(..n)) {
        to.copy_from_slice(from);
    }
    n
}

impl Drop for Held {
    fn drop(&mut self) {
        let chain = std::mem::take(&mut self.chain);
        if self.forks != fork_generation() {
            // The memory does not exist in this process.
            return std::mem::forget(chain);
        }
        match self.host.upgrade() {
            Some(host) => host.post(Request::LoanDone(self.id, chain, self.lent)),
            // The stack is gone; its memory is freed with the last of its buffers.
            None => drop(chain),
        }
    }
}

impl Part {
    fn held(&self) -> &Held {
        match &self.held {
            Holder::Sole(held) => held,
            Holder::Shared(held) => held,
        }
    }

    /// Splits after the first `at` bytes.
    fn split_off(self, at: usize) -> (Part, Part) {
        let shared = match self.held {
            Holder::Sole(held) => Arc::new(held),
            Holder::Shared(held) => held,
        };
        let part = |held, from, len| Part { held: Holder::Shared(held), from, len };
        let front = part(Arc::clone(&shared), self.from, at);
        (front, part(shared, self.from + at, self.len - at))
    }
}

impl Loan {
    pub(crate) fn new(socket: &Socket, chain: Chain, lent: LoanCharge) -> Loan {
        let len = chain.len();
        if chain.segs() == 0 {
            return Loan::default();
        }
        let host = Arc::downgrade(socket.host());
        let (is_volatile, private) = (chain.is_volatile(), OnceLock::new());
        let forks = fork_generation();
        let held = Held { chain, host, id: socket.id, lent, forks, is_volatile, private };
        let first = Some(Part { held: Holder::Sole(held), from: 0, len });
        Loan { first, more: VecDeque::new(), len }
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.first.iter().chain(&self.more)
    }

    /// Whether the memory exists in this process: false in a forked child.
    fn is_ours(&self) -> bool {
        self.first.as_ref().is_none_or(|p| p.held().forks == fork_generation())
    }

    /// Bytes of the loan.
    pub fn len(&self) -> usize {
        if self.is_ours() { self.len } else { 0 }
    }

    /// Whether there are none: the end of a stream, or an empty datagram.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, in order; no slice is empty.
    pub fn slices(&self) -> Slices<'_> {
        let first = self.first.as_ref().filter(|_| self.is_ours());
        let count = if first.is_some() { self.more.len() } else { 0 };
        Slices { part: first.map(PartSlices::new), more: self.more.range(..count) }
    }

    /// The bytes as arguments of vectored writes, in order.
    pub fn io_slices(&self) -> impl Iterator<Item = IoSlice<'_>> {
        self.slices().map(IoSlice::new)
    }

    /// Copies bytes from `offset` on into `out`; returns how many there were.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        let (mut skip, mut done) = (offset, 0);
        for part in self.parts().filter(|_| self.is_ours()) {
            let from = skip.min(part.len);
            skip -= from;
            let Some(free) = out.get_mut(done..).filter(|free| !free.is_empty()) else { break };
            let most = free.len().min(part.len - from);
            if let Some(to) = free.get_mut(..most) {
                done += part.held().copy_to(part.from + from, to);
            }
        }
        done
    }

    /// A copy in memory of the program.
    pub fn to_vec(&self) -> Vec<u8> {
        if self.parts().any(|p| p.held().is_volatile) {
            let mut all = vec![0; self.len()];
            self.copy_to(0, &mut all);
            return all;
        }
        let mut all = Vec::with_capacity(self.len());
        self.slices().for_each(|s| all.extend_from_slice(s));
        all
    }

    /// Removes the first `n` bytes, or all if there are fewer. Buffers without remaining bytes return to the stack.
    pub fn advance(&mut self, n: usize) {
        let mut left = n.min(self.len);
        self.len -= left;
        while let Some(first) = &mut self.first {
            let here = left.min(first.len);
            first.from += here;
            first.len -= here;
            left -= here;
            if first.len > 0 {
                break;
            }
            self.first = self.more.pop_front();
        }
    }

    /// Appends the bytes of another loan.
    pub fn append(&mut self, other: Loan) {
        self.len += other.len;
        for part in other.first.into_iter().chain(other.more) {
            match &self.first {
                None => self.first = Some(part),
                Some(_) => self.more.push_back(part),
            }
        }
    }

    /// Keeps the first `at` bytes and returns the others. If the split is within the bytes of one receive call, both
    /// loans refer to its buffers, which return to the stack when both are dropped.
    ///
    /// # Panics
    /// If there are fewer bytes.
    #[must_use = "it has the bytes after `at`"]
    pub fn split_off(&mut self, at: usize) -> Loan {
        assert!(at <= self.len, "a split at byte {at} of {}", self.len);
        let all = std::mem::take(self);
        let mut rest = Loan::default();
        for part in all.first.into_iter().chain(all.more) {
            let left = at - self.len;
            if part.len <= left {
                self.push(part);
            } else if left == 0 {
                rest.push(part);
            } else {
                let (front, back) = part.split_off(left);
                self.push(front);
                rest.push(back);
            }
        }
        rest
    }

    fn push(&mut self, part: Part) {
        let len = part.len;
        self.append(Loan { first: Some(part), more: VecDeque::new(), len });
    }

    /// Returns the first `at` bytes and keeps the others; as [`Loan::split_off`].
    ///
    /// # Panics
    /// If there are fewer bytes.
    #[must_use = "it has the bytes before `at`"]
    pub fn split_to(&mut self, at: usize) -> Loan {
        let rest = self.split_off(at);
        std::mem::replace(self, rest)
    }
}

impl Read for Loan {
    /// Copies bytes from the front and removes them. Never fails.
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

/// The slices of a [`Loan`]: [`Loan::slices`].
///
/// ```
/// # use std::io::Write;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::ZeroCopy;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// # (&peer).write_all(b"hello")?;
/// let bytes = stream.recv_owned(64 << 10)?;
/// let sum: u64 = bytes.slices().flatten().map(|byte| u64::from(*byte)).sum();
/// # assert!(sum > 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Slices<'a> {
    part: Option<PartSlices<'a>>,
    more: vec_deque::Iter<'a, Part>,
}

#[derive(Clone)]
struct PartSlices<'a> {
    /// The private copy of volatile bytes.
    private: Option<&'a [u8]>,
    mbufs: fulmar_stack::mbuf::Iter<'a>,
    skip: usize,
    left: usize,
}

impl<'a> PartSlices<'a> {
    fn new(part: &'a Part) -> PartSlices<'a> {
        let held = part.held();
        let (skip, left) = (part.from, part.len);
        PartSlices { private: held.private(), mbufs: held.chain.iter(), skip, left }
    }

    fn next(&mut self) -> Option<&'a [u8]> {
        if let Some(bytes) = self.private {
            let bytes = bytes.get(self.skip..)?.get(..self.left)?;
            self.left = 0;
            return (!bytes.is_empty()).then_some(bytes);
        }
        while self.left > 0 {
            let bytes = self.mbufs.next().map(Mbuf::as_slice)?;
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

impl<'a> Iterator for Slices<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            if let Some(slice) = self.part.as_mut()?.next() {
                return Some(slice);
            }
            self.part = self.more.next().map(PartSlices::new);
        }
    }
}

impl fmt::Debug for Slices<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone().map(<[u8]>::len)).finish()
    }
}

impl TcpStream {
    pub(crate) fn lend(&self, max: usize, limit: Limit) -> io::Result<Loan> {
        if max == 0 {
            return Ok(Loan::default());
        }
        let s = &*self.socket;
        let (chain, lent) =
            s.wait_for_data(limit, |shard, now, least| shard.tcp_lend(now, s.id, max, least))?;
        Ok(Loan::new(s, chain, lent))
    }
}

impl UdpSocket {
    /// Receives one datagram without a copy, and its source address. Waits as `recv_from` does.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn recv_owned(&self) -> io::Result<(Loan, SocketAddr)> {
        self.lend(self.socket.read_limit())
    }

    /// As [`UdpSocket::recv_owned`], but never waits.
    ///
    /// # Errors
    /// `WouldBlock`, and the errors of [`UdpSocket::recv_from`].
    pub fn try_recv_owned(&self) -> io::Result<(Loan, SocketAddr)> {
        self.lend(Limit::DoNotWait)
    }

    fn lend(&self, limit: Limit) -> io::Result<(Loan, SocketAddr)> {
        let s = &*self.socket;
        let (d, lent) = s.wait(Ready::READABLE, limit, |shard, _| shard.udp().lend(s.id))?;
        Ok((Loan::new(s, d.payload, lent), d.src))
    }
}
