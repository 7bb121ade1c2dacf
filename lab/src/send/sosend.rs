//! sosend as it was done before, and as it was published in 2006: `sosend_generic` of a stream with
//! the builders `sosend_copyin` (one mbuf per protocol send) and `m_getm` + `m_uiotombuf` (the whole
//! chain, then one copy loop, one protocol send).
//!
//! ```text
//!  old:        [alloc 2 KiB, copy, pru_send -> tcp_output] x 32        for a write of 64 KiB
//!  published:  alloc 16 x 4 KiB, copy x 16, pru_send -> tcp_output
//! ```
//!
//! What the originals did with and without a lock is kept: the writer's turn (`sblock`) for the whole
//! call; the checks and the free space under the socket buffer's lock; allocation and copy without
//! it (here allocation takes the shard's lock for itself, as the pool is the shard's; the original's
//! allocator had its own); each protocol send under the lock. `pru_send` is
//! [`SendCalls::append`](fulmar_stack::shard::SendCalls::append). A writer waits while there is less space
//! than it needs *and* less than the low-water mark of 2048 bytes, as `sosend_generic` does.
//!
//! Nothing here is slower than it has to be: no clock is read and no lock is taken that the original
//! had no counterpart of. Everything below `pru_send` is fulmar's own, so a comparison with
//! `TcpStream::write` tells the builder's part alone.
//!
//! Source: FreeBSD 6, uipc_socket.c (`sosend`), uipc_mbuf.c (`m_getm`, `m_uiotombuf`).

use super::{Caller, Target};
use fulmar::Ready;
use fulmar::device::{Chain, NoBuffer, Pool, Purpose};
use fulmar::internals::runtime::{Host, Limit};
use fulmar_stack::base::SlotId;
use fulmar_stack::shard::MoreData;
use fulmar_stack::socket::SocketError;
use std::io;
use std::task::Poll;

/// Below this much free space a writer waits, unless its whole write fits (`sb_lowat`).
const LOW_WATER_BYTES: usize = 2048;

/// How a write is made into mbufs, and how often they are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Builder {
    /// Bytes of storage of one mbuf.
    pub cluster_bytes: usize,
    /// Everything that has space goes as one chain with one send; else each mbuf with one of its own.
    pub is_whole: bool,
}

/// `sosend_copyin`.
pub const OLD: Builder = Builder { cluster_bytes: 2 << 10, is_whole: false };
/// `m_getm` and `m_uiotombuf`.
pub const PUBLISHED: Builder = Builder { cluster_bytes: 4 << 10, is_whole: true };
/// One change at a time: larger mbufs, fewer sends, both.
pub const VARIANTS: [Builder; 4] = [
    Builder { cluster_bytes: 4 << 10, is_whole: false },
    Builder { cluster_bytes: 64 << 10, is_whole: false },
    Builder { cluster_bytes: 2 << 10, is_whole: true },
    Builder { cluster_bytes: 64 << 10, is_whole: true },
];

impl Builder {
    /// The name in scenarios and JSON.
    pub fn name(self) -> &'static str {
        match (self.cluster_bytes >> 10, self.is_whole) {
            (2, false) => "each_2k",
            (4, false) => "each_4k",
            (_, false) => "each_64k",
            (2, true) => "whole_2k",
            (4, true) => "whole_4k",
            (_, true) => "whole_64k",
        }
    }

    /// The name in tables.
    pub fn title(self) -> String {
        let sends = if self.is_whole { "one send" } else { "one send each" };
        format!("{} KiB mbufs, {sends}", self.cluster_bytes >> 10)
    }

    /// Takes the mbufs for the next send, their lengths set: all that `bytes` need, or one.
    pub(super) fn obtain(self, pool: &mut Pool, bytes: usize) -> Result<Chain, NoBuffer> {
        let mut chain = Chain::new();
        while chain.len() < bytes {
            let left = bytes - chain.len();
            match pool.alloc(left.min(self.cluster_bytes), 0, Purpose::Send) {
                Ok(mut mbuf) => {
                    mbuf.set_len(left.min(self.cluster_bytes));
                    chain.push_back(mbuf);
                }
                Err(e) => {
                    pool.free(chain);
                    return Err(e);
                }
            }
            if !self.is_whole {
                break;
            }
        }
        Ok(chain)
    }
}

/// A program that writes the same bytes again and again.
pub struct Writer {
    builder: Builder,
    bytes: Vec<u8>,
}

impl Writer {
    /// A writer of `bytes`.
    pub fn new(builder: Builder, bytes: Vec<u8>) -> Writer {
        Writer { builder, bytes }
    }
}

impl Caller for Writer {
    fn call(&mut self, to: &Target<'_>) -> io::Result<u64> {
        let writing = Writing { host: to.stack.host(), id: to.stream.slot_id() };
        writing.write(self.builder, &self.bytes).map_err(to_io)?;
        Ok(self.bytes.len() as u64)
    }

    fn copies_per_byte(&self) -> u64 {
        1
    }
}

/// A socket's error as an I/O error.
pub(super) fn to_io(e: SocketError) -> io::Error {
    io::Error::from_raw_os_error(e.errno())
}

/// One writer's turn (`sblock`), which ends with this value.
pub(super) struct Writing<'a> {
    pub host: &'a Host,
    pub id: SlotId,
}

impl Writing<'_> {
    /// `sosend_generic`, blocking, for a stream.
    fn write(&self, builder: Builder, bytes: &[u8]) -> Result<(), SocketError> {
        let _turn = self.begin()?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut space = self.wait_space(rest.len())?;
            while !rest.is_empty() && space > 0 {
                let chain = self.build(builder, &rest[..rest.len().min(space)])?;
                space -= chain.len();
                rest = &rest[chain.len()..];
                let more =
                    if rest.is_empty() || space == 0 { MoreData::None } else { MoreData::Follows };
                self.send(chain, more)?;
            }
        }
        Ok(())
    }

    /// `sblock`: one writer at a time.
    pub fn begin(&self) -> Result<Turn<'_>, SocketError> {
        let writer = fulmar::internals::runtime::thread_number();
        self.host.wait(self.id, Ready::WRITABLE, Limit::Forever, |shard, _| {
            shard.tcp_entry(self.id).and_then(|e| e.lock_send(writer))
        })?;
        Ok(Turn(self))
    }

    /// The outer loop's checks, and free space; waits while that is less than `want` and less than the
    /// low-water mark.
    pub fn wait_space(&self, want: usize) -> Result<usize, SocketError> {
        self.wait_room(want.min(LOW_WATER_BYTES))
    }

    /// The checks, and free space; waits while that is less than `enough`.
    pub fn wait_room(&self, enough: usize) -> Result<usize, SocketError> {
        self.host.wait(self.id, Ready::WRITABLE, Limit::Forever, |shard, _| {
            let space = shard.sosend(self.id).space()?;
            Ok(if space < enough { Poll::Pending } else { Poll::Ready(space) })
        })
    }

    /// The mbufs of the next send, filled outside the lock.
    fn build(&self, builder: Builder, bytes: &[u8]) -> Result<Chain, SocketError> {
        let obtained = builder.obtain(self.host.lock()?.pool(), bytes.len());
        let mut chain = obtained.map_err(|_| SocketError::NoBuffer)?;
        let n = chain.len();
        let copied = chain.copy_from(0, &bytes[..n]);
        debug_assert_eq!(copied, Some(n), "fresh mbufs have no other reference");
        Ok(chain)
    }

    /// `pru_send`: the chain goes into the send buffer, and TCP runs once.
    pub fn send(&self, mut chain: Chain, more: MoreData) -> Result<(), SocketError> {
        let mut shard = self.host.lock()?;
        match shard.sosend(self.id).append(fulmar::internals::runtime::now(), &mut chain, more)? {
            Poll::Ready(()) => Ok(()),
            // There was space, and no other thread may write.
            Poll::Pending => Err(SocketError::NoBuffer),
        }
    }
}

/// Ends a writer's turn.
pub(super) struct Turn<'a>(&'a Writing<'a>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.host.post(fulmar::internals::runtime::Request::EndWrite(self.0.id));
    }
}
