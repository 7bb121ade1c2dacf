//! Receive calls with flags, peek, and the low-water mark.

use std::io::{self, IoSliceMut};
use std::ops::BitOr;

use crate::runtime::{Limit, Request};
use fulmar_stack::base::Stage;
use fulmar_stack::mbuf::Chain;
use fulmar_stack::socket::{Least, fmt_flags};

use crate::api::tcp::TcpStream;

/// Flags of one read: [`TcpStream::recv_with`].
///
/// ```
/// # use std::io::{IoSliceMut, Write};
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::tcp::RecvFlags;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// # (&peer).write_all(b"hello")?;
/// let mut start = [0; 5];
/// let flags = RecvFlags::PEEK | RecvFlags::WAIT_ALL;
/// let bytes = stream.recv_with(&mut [IoSliceMut::new(&mut start)], flags)?;
/// assert_eq!(&start[..bytes], b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RecvFlags(u8);

impl RecvFlags {
    /// As `read`.
    pub const NONE: RecvFlags = RecvFlags(0);
    /// The bytes stay to be read again (`MSG_PEEK`).
    pub const PEEK: RecvFlags = RecvFlags(1);
    /// Waits until the buffers are full, the stream ends, or the time is over (`MSG_WAITALL`). With
    /// [`RecvFlags::PEEK`] at most until the receive buffer is full.
    pub const WAIT_ALL: RecvFlags = RecvFlags(2);
    /// `MSG_DONTWAIT`: this read is non-blocking.
    pub const DONT_WAIT: RecvFlags = RecvFlags(4);

    /// Whether all of `other` is in `self`.
    pub const fn contains(self, other: RecvFlags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// `PEEK | WAIT_ALL`.
impl std::fmt::Debug for RecvFlags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [
            (RecvFlags::PEEK, "PEEK"),
            (RecvFlags::WAIT_ALL, "WAIT_ALL"),
            (RecvFlags::DONT_WAIT, "DONT_WAIT"),
        ];
        fmt_flags(f, all.into_iter().filter(|(flag, _)| self.contains(*flag)).map(|(_, n)| n))
    }
}

impl BitOr for RecvFlags {
    type Output = RecvFlags;
    fn bitor(self, other: RecvFlags) -> RecvFlags {
        RecvFlags(self.0 | other.0)
    }
}

impl TcpStream {
    /// Reads into the buffers as `read_vectored` does, with flags. Received bytes are detached under the shard lock,
    /// once for all buffers, and copied without it. Returns how many bytes were read; 0: the end of the stream, or
    /// buffers of no bytes.
    ///
    /// Bytes are copied. Posted buffers ([`ZeroCopy::recv_posted`](crate::zero_copy::ZeroCopy::recv_posted)) can be filled in place from the first byte to the
    /// last.
    ///
    /// With [`RecvFlags::WAIT_ALL`] fewer bytes are read if the stream ends or the time-out passes first; the next call
    /// returns which.
    ///
    /// # Errors
    /// `WouldBlock`, and the errors of `recv(2)`, if no byte was read.
    pub fn recv_with(&self, bufs: &mut [IoSliceMut<'_>], flags: RecvFlags) -> io::Result<usize> {
        let capacity: usize = bufs.iter().map(|b| b.len()).sum();
        let limit = self.recv_limit(flags);
        let all = flags.contains(RecvFlags::WAIT_ALL);
        if flags.contains(RecvFlags::PEEK) {
            return self.peek_into(0, bufs, if all { capacity } else { 1 }, limit);
        }
        // All waits of the call share one time-out.
        let limit = if all { limit.started() } else { limit };
        let mut done = 0;
        while done < capacity {
            let n = match self.take_into(bufs, done, capacity, limit) {
                Ok(n) => n,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            };
            done += n;
            if n == 0 || !all || limit == Limit::DoNotWait {
                break;
            }
        }
        Ok(done)
    }

    fn recv_limit(&self, flags: RecvFlags) -> Limit {
        if flags.contains(RecvFlags::DONT_WAIT) {
            return Limit::DoNotWait;
        }
        self.socket.read_limit()
    }

    /// Reads into the buffers after their first `done` bytes. Waits for data.
    fn take_into(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        done: usize,
        capacity: usize,
        limit: Limit,
    ) -> io::Result<usize> {
        let s = &*self.socket;
        let chain = s.wait_for_data(limit, |shard, _, least| {
            let least = if done > 0 { Least::OneByte } else { least };
            shard.tcp_take_more(s.id, capacity - done, done, least)
        })?;
        Ok(self.copy_out(chain, bufs, done))
    }

    /// Copies detached bytes into the buffers after their first `done` bytes, and frees them.
    #[inline]
    fn copy_out(&self, chain: Chain, bufs: &mut [IoSliceMut<'_>], done: usize) -> usize {
        let (s, n) = (&*self.socket, chain.len());
        if n > 0 {
            scatter(&chain, bufs, done);
            s.host().pass(Stage::ReceiveCopied);
            s.host().post(Request::ReadDone(s.id, chain));
        }
        n
    }

    /// Reads bytes that stay in the receive queue (`MSG_PEEK`).
    ///
    /// # Errors
    /// As `read`.
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.peek_at(0, &mut [IoSliceMut::new(buf)])
    }

    /// As [`TcpStream::peek`], from `offset` bytes after the next one on (as `SO_PEEK_OFF`). Waits for at least one
    /// such byte. 0: the stream ends before it, or the receive buffer is full.
    ///
    /// # Errors
    /// As `read`.
    pub fn peek_at(&self, offset: usize, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.peek_into(offset, bufs, 1, self.socket.read_limit())
    }

    fn peek_into(
        &self,
        offset: usize,
        bufs: &mut [IoSliceMut<'_>],
        least: usize,
        limit: Limit,
    ) -> io::Result<usize> {
        let capacity: usize = bufs.iter().map(|b| b.len()).sum();
        if capacity == 0 {
            return Ok(0);
        }
        let s = &*self.socket;
        let chain = s.wait_for_data(limit, |shard, _, wait| {
            let least = if wait == Least::LowWater { least } else { 1 };
            shard.tcp_peek_at(s.id, offset, capacity, least)
        })?;
        let n = chain.len();
        scatter(&chain, bufs, 0);
        if n > 0 {
            s.host().post(Request::Free(chain));
        }
        Ok(n)
    }
}

/// Copies a chain into the reader's buffers, after their first `skip` bytes.
fn scatter(chain: &Chain, bufs: &mut [IoSliceMut<'_>], mut skip: usize) {
    let mut from = chain.reader();
    for buf in bufs {
        let filled = skip.min(buf.len());
        skip -= filled;
        let free = buf.get_mut(filled..).unwrap_or_default();
        if from.read(free) < free.len() {
            return;
        }
    }
}
