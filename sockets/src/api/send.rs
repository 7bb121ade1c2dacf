//! Send calls with flags, of owned memory, and into reserved space.

mod completion;
mod lock;
mod owned;
mod reservation;
pub(crate) use lock::lock_send;

use std::io::{self, IoSlice};
use std::ops::BitOr;
use std::sync::Arc;

use crate::runtime::Limit;
use fulmar_stack::socket::fmt_flags;

pub use completion::SendCompletion;
pub use owned::{OwnedBytes, SendOwnedError};
pub use reservation::SendReservation;

use crate::api::socket::Socket;
use crate::api::tcp::TcpStream;
use lock::SendLock;

/// Flags of one write: [`TcpStream::send_with`].
///
/// ```
/// # use std::io::IoSlice;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::tcp::SendFlags;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// // The header waits for the body, for one segment of both.
/// stream.send_with(&[IoSlice::new(b"header")], SendFlags::MORE)?;
/// stream.send_with(&[IoSlice::new(b"body")], SendFlags::NONE)?;
/// # drop(peer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SendFlags(u8);

impl SendFlags {
    /// As `write`.
    pub const NONE: SendFlags = SendFlags(0);
    /// `MSG_MORE`: another write follows. A partial segment waits for it, for 200 ms at most. The next write
    /// without the flag sends it.
    pub const MORE: SendFlags = SendFlags(1);
    /// `MSG_DONTWAIT`: this write is non-blocking.
    pub const DONT_WAIT: SendFlags = SendFlags(2);

    /// A record ends with this write (`MSG_EOR`): no segment has bytes before and after its end. The peer still
    /// receives a stream. A socket has at most 1024 unacknowledged ends of records; a further write waits.
    pub const END_OF_RECORD: SendFlags = SendFlags(4);

    /// Whether all of `other` is in `self`.
    pub const fn contains(self, other: SendFlags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// `MORE | DONT_WAIT`.
impl std::fmt::Debug for SendFlags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [
            (SendFlags::MORE, "MORE"),
            (SendFlags::DONT_WAIT, "DONT_WAIT"),
            (SendFlags::END_OF_RECORD, "END_OF_RECORD"),
        ];
        fmt_flags(f, all.into_iter().filter(|(flag, _)| self.contains(*flag)).map(|(_, n)| n))
    }
}

impl BitOr for SendFlags {
    type Output = SendFlags;
    fn bitor(self, other: SendFlags) -> SendFlags {
        SendFlags(self.0 | other.0)
    }
}

impl TcpStream {
    /// Writes the buffers as `write_vectored` does, with flags. All that fit are copied into one chain and sent with
    /// one run of the output. Returns how many bytes were accepted: fewer than all if the socket is non-blocking, the
    /// time-out passed, or the connection ended; then the next call returns its error.
    ///
    /// # Errors
    /// `WouldBlock`, and the errors of `send(2)`, if nothing was accepted. A write of no bytes returns 0 without any
    /// check.
    pub fn send_with(&self, bufs: &[IoSlice<'_>], flags: SendFlags) -> io::Result<usize> {
        let total: usize = bufs.iter().map(|b| b.len()).sum();
        if total == 0 {
            return Ok(0);
        }
        let mut lock = SendLock::new(&self.socket, self.send_limit(flags));
        let mut done = 0;
        while done < total {
            match lock.write_some(bufs, done, total, flags) {
                Ok(n) => done += n,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
            if !lock.waits() {
                break;
            }
        }
        Ok(done)
    }

    fn send_limit(&self, flags: SendFlags) -> Limit {
        if flags.contains(SendFlags::DONT_WAIT) {
            return Limit::DoNotWait;
        }
        self.socket.write_limit()
    }

    /// See [`ZeroCopy::send_owned`](crate::zero_copy::ZeroCopy::send_owned).
    pub(crate) fn queue_owned(
        &self,
        mut bytes: OwnedBytes,
    ) -> Result<SendCompletion, SendOwnedError> {
        let completion = bytes.completion_on(&self.socket);
        let mut lock = SendLock::new(&self.socket, self.socket.write_limit());
        let mut sent = 0;
        while !bytes.is_empty() {
            match lock.share_some(&mut bytes) {
                Ok(n) => sent += n,
                Err(error) => return Err(SendOwnedError { error, sent, rest: bytes }),
            }
        }
        Ok(completion)
    }

    /// See [`ZeroCopy::try_send_owned`](crate::zero_copy::ZeroCopy::try_send_owned).
    pub(crate) fn try_queue_owned(&self, bytes: &mut OwnedBytes) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        bytes.completion_on(&self.socket);
        SendLock::new(&self.socket, Limit::DoNotWait).share_some(bytes)
    }

    /// See [`ZeroCopy::send_reserve`](crate::zero_copy::ZeroCopy::send_reserve).
    pub(crate) fn reserve(&self, bytes: usize) -> io::Result<SendReservation<'_>> {
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "cannot reserve 0 bytes"));
        }
        let mut lock = SendLock::new(&self.socket, self.socket.write_limit());
        let reservation = lock.reserve(bytes)?;
        Ok(SendReservation::new(lock, reservation))
    }
}

/// The shard of a socket, for a completion, which does not keep the stack.
#[derive(Clone, Default)]
pub(crate) struct ShardRef {
    stack: std::sync::Weak<crate::api::inner::Inner>,
    shard: u16,
}

impl ShardRef {
    pub(crate) fn of(socket: &Socket) -> ShardRef {
        ShardRef { stack: Arc::downgrade(&socket.stack), shard: socket.shard }
    }

    /// Calls `f` with the host, if the stack still exists.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Arc<crate::runtime::Host>) -> R) -> Option<R> {
        self.stack.upgrade().map(|stack| f(stack.host(self.shard)))
    }
}
