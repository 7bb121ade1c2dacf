//! The send lock of a socket (BSD: `sblock`): one writer at a time, for its whole call.

use std::io::{self, IoSlice};
use std::task::Poll;

use crate::runtime::{Limit, Request, WatchedShard};
use fulmar_stack::base::{Instant, Stage};
use fulmar_stack::mbuf::Chain;
use fulmar_stack::shard::{Reserved, TcpEntry};
use fulmar_stack::socket::sosend::SMALL_WRITE_BYTES;
use fulmar_stack::socket::{Attempt, Ready, Reservation, SocketError};

use super::{OwnedBytes, SendFlags};
use crate::api::socket::{Socket, to_io};

/// A write call; it acquires the send lock with its first step. Other writers of the socket wait until it is dropped.
pub(super) struct SendLock<'a> {
    socket: &'a Socket,
    /// When the call ends.
    limit: Limit,
    /// The lock is held.
    is_locked: bool,
    /// The call has accepted bytes: the next call returns the error.
    has_accepted: bool,
}

impl<'a> SendLock<'a> {
    pub(super) fn new(socket: &'a Socket, limit: Limit) -> SendLock<'a> {
        SendLock { socket, limit: limit.started(), is_locked: false, has_accepted: false }
    }

    /// Whether the call may wait.
    pub(super) fn waits(&self) -> bool {
        self.limit != Limit::DoNotWait
    }

    /// Writes bytes of the buffers up to the free space: reserves, copies without the shard lock, commits.
    pub(super) fn write_some(
        &mut self,
        bufs: &[IoSlice<'_>],
        done: usize,
        total: usize,
        flags: SendFlags,
    ) -> io::Result<usize> {
        let mut small = [0; SMALL_WRITE_BYTES];
        let (more, ends_record) =
            (flags.contains(SendFlags::MORE), flags.contains(SendFlags::END_OF_RECORD));
        let whole = if done == 0 && !more && !ends_record {
            join_small(bufs, total, &mut small)
        } else {
            &[]
        };
        self.has_accepted = done > 0;
        let mut r = match self.obtain(whole, total - done)? {
            Reserved::Sent(n) => return Ok(n),
            Reserved::Space(r) => r,
        };
        let n = r.len();
        gather(bufs, done, &mut r.chain);
        self.socket.host().pass(Stage::SendCopied);
        let is_last = done + n == total;
        // A write that has to wait for space pushes the bytes that it has.
        r.more = more && is_last;
        r.ends_record = ends_record && is_last;
        if is_last || !self.waits() {
            self.commit(r);
        } else {
            self.socket.host().post(Request::Commit(self.socket.id, r));
        }
        Ok(n)
    }

    /// Reserves space and storage for up to `bytes`.
    pub(super) fn reserve(&mut self, bytes: usize) -> io::Result<Reservation> {
        match self.obtain(&[], bytes)? {
            Reserved::Space(r) => Ok(r),
            // Not reached: there were no bytes to send.
            Reserved::Sent(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Sends the reserved bytes and releases the lock.
    pub(super) fn commit(&mut self, r: Reservation) {
        self.is_locked = false;
        self.socket.host().post(Request::CommitLast(self.socket.id, r));
    }

    /// Releases the reserved space and the lock.
    pub(super) fn abandon(&mut self, r: Reservation) {
        self.is_locked = false;
        self.socket.host().post(Request::Abandon(self.socket.id, r));
    }

    fn obtain(&mut self, whole: &[u8], want: usize) -> io::Result<Reserved> {
        let (s, limit) = (self.socket, self.limit);
        if (whole.len() != want || want > SMALL_WRITE_BYTES)
            && let Some(r) = self.try_obtain(want).map_err(to_io)?
        {
            return Ok(r);
        }
        let mut attempt = Attempt::First;
        s.wait(Ready::WRITABLE, limit, |shard, now| {
            if self.acquire(shard)?.is_pending() {
                return Ok(Poll::Pending);
            }
            let step = shard.sosend(s.id).reserve(now, whole, want, attempt);
            attempt = Attempt::Retry;
            if matches!(&step, Ok(Poll::Ready(Reserved::Sent(n))) if *n == want) {
                self.release(shard);
            }
            step
        })
    }

    /// First attempt, without reading the clock.
    fn try_obtain(&mut self, want: usize) -> Result<Option<Reserved>, SocketError> {
        let socket = self.socket;
        let mut shard = socket.host().lock()?;
        if self.acquire(&mut shard)?.is_pending() {
            return Ok(None);
        }
        Ok(match shard.sosend(socket.id).try_reserve(want)? {
            Poll::Ready(r) => Some(Reserved::Space(r)),
            Poll::Pending => None,
        })
    }

    /// Sends shared bytes by reference, up to the free space.
    pub(super) fn share_some(&mut self, bytes: &mut OwnedBytes) -> io::Result<usize> {
        let (s, limit) = (self.socket, self.limit);
        let mut attempt = Attempt::First;
        s.wait(Ready::WRITABLE, limit, |shard, now| {
            if self.acquire(shard)?.is_pending() {
                return Ok(Poll::Pending);
            }
            let step = self.share(shard, now, bytes, attempt);
            attempt = Attempt::Retry;
            step
        })
    }

    fn share(
        &mut self,
        shard: &mut WatchedShard,
        now: Instant,
        bytes: &mut OwnedBytes,
        attempt: Attempt,
    ) -> Result<Poll<usize>, SocketError> {
        let part = bytes.at()..bytes.at() + bytes.len();
        let step = shard.sosend(self.socket.id).share(now, bytes.memory(), part, attempt)?;
        if let Poll::Ready(n) = &step {
            self.has_accepted = true;
            bytes.advance(*n);
            if bytes.is_empty() || !self.waits() {
                self.release(shard);
            }
        }
        Ok(step)
    }

    /// Acquires the send lock. Pending: another thread has it.
    fn acquire(&mut self, shard: &mut WatchedShard) -> Result<Poll<()>, SocketError> {
        let entry = shard.tcp_entry(self.socket.id)?;
        if lock_send(entry, &mut self.is_locked)?.is_pending() {
            return Ok(Poll::Pending);
        }
        // The next call returns the error, because it has accepted nothing.
        if self.has_accepted && entry.write_fails() {
            return Err(SocketError::WouldBlock);
        }
        Ok(Poll::Ready(()))
    }

    fn release(&mut self, shard: &mut WatchedShard) {
        self.is_locked = false;
        shard.sosend(self.socket.id).unlock();
    }
}

/// Acquires the send lock, unless `is_locked`. Pending: another thread has it. Under the shard lock.
pub(crate) fn lock_send(
    entry: &mut TcpEntry,
    is_locked: &mut bool,
) -> Result<Poll<()>, SocketError> {
    if !*is_locked {
        if entry.lock_send(crate::runtime::thread_number())?.is_pending() {
            return Ok(Poll::Pending);
        }
        *is_locked = true;
    }
    Ok(Poll::Ready(()))
}

impl Drop for SendLock<'_> {
    fn drop(&mut self) {
        if self.is_locked {
            self.socket.host().post(Request::EndWrite(self.socket.id));
        }
    }
}

/// The bytes of a write as one slice, if they are in one buffer or few enough to be copied.
fn join_small<'b>(
    bufs: &'b [IoSlice<'_>],
    total: usize,
    small: &'b mut [u8; SMALL_WRITE_BYTES],
) -> &'b [u8] {
    if let [one] = bufs {
        return one;
    }
    if total > SMALL_WRITE_BYTES {
        return &[];
    }
    let mut at = 0;
    for b in bufs {
        small[at..at + b.len()].copy_from_slice(b);
        at += b.len();
    }
    &small[..total]
}

/// Fills a chain from the writer's buffers, without their first `skip` bytes.
fn gather(bufs: &[IoSlice<'_>], mut skip: usize, chain: &mut Chain) {
    let pieces = bufs.iter().map(|b| {
        let passed = skip.min(b.len());
        skip -= passed;
        &b[passed..]
    });
    let filled = chain.fill(pieces);
    debug_assert!(filled.is_some(), "the storage of a reservation is not shared");
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};

    #[test]
    fn any_pieces_fill_any_chain_from_any_byte_on() {
        let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
        let bytes: Vec<u8> = (0..9_000u32).map(|i| (i * 7 % 251) as u8).collect();
        for (piece, skip) in [(1, 0), (3, 2), (700, 699), (4096, 5000), (9_000, 8_999)] {
            let bufs: Vec<_> = bytes.chunks(piece).flat_map(|c| [&[][..], c]).collect();
            let bufs: Vec<_> = bufs.into_iter().map(IoSlice::new).collect();
            let mut chain = pool.alloc_chain(bytes.len() - skip, 0, Purpose::Send).unwrap();
            gather(&bufs, skip, &mut chain);
            assert_eq!(chain.to_vec(), bytes[skip..], "pieces of {piece} from {skip}");
            pool.free(chain);
        }
    }

    #[test]
    fn few_bytes_in_many_pieces_are_joined_and_many_are_not() {
        let mut small = [0; SMALL_WRITE_BYTES];
        let bufs = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"c")];
        assert_eq!(join_small(&bufs, 3, &mut small), b"abc");
        let large = [7; SMALL_WRITE_BYTES];
        let bufs = [IoSlice::new(&large), IoSlice::new(b"c")];
        assert_eq!(join_small(&bufs, SMALL_WRITE_BYTES + 1, &mut small), b"");
    }
}
