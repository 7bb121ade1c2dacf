//! Sending beyond `write`: flags, owned memory, reserved buffers.

mod completion;
mod owned;
mod room;
mod turn;
pub(crate) use turn::lock_send;

use std::io::{self, IoSlice};
use std::ops::BitOr;
use std::sync::Arc;

use fulmar_runtime::Limit;
use fulmar_socket::fmt_flags;

pub use completion::SendCompletion;
pub use owned::{OwnedBytes, SendOwnedError};
pub use room::SendRoom;

use crate::socket::Socket;
use crate::tcp::TcpStream;
use turn::WriteTurn;

/// Flags of one write.
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

    /// A record ends with this write (`MSG_EOR`): no segment has bytes of both sides of its end. The peer sees a
    /// stream as ever. A socket has 1024 ends of records that are not acknowledged at the most; beyond, a write waits.
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
    /// Writes the pieces as one, as `write_vectored` does, with flags. All pieces that fit go into one
    /// chain and out by one pass of the protocol, however many they are. Returns how many bytes were
    /// accepted: all of them unless the socket does not wait, or the connection ends on the way;
    /// then the next call tells why.
    ///
    /// # Errors
    /// `WouldBlock`, and those of `send(2)`, if nothing was accepted. No bytes are no error, and
    /// nothing is looked at.
    pub fn send_with(&self, bufs: &[IoSlice<'_>], flags: SendFlags) -> io::Result<usize> {
        let total: usize = bufs.iter().map(|b| b.len()).sum();
        if total == 0 {
            return Ok(0);
        }
        let mut turn = WriteTurn::new(&self.socket, self.send_limit(flags));
        let mut done = 0;
        while done < total {
            match turn.write_some(bufs, done, total, flags) {
                Ok(n) => done += n,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
            if !turn.waits() {
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

    /// Gives memory to the connection, which sends it in place, without a copy. Waits
    /// for room in the send buffer as `write` does, part by part. The completion tells when the
    /// memory is let go: the peer has acknowledged all of it and no device reads it any more.
    ///
    /// What is queued counts against the send buffer and against the stack's budget for sending, like
    /// copied bytes. Worth it from a few KiB on: below that a copy is cheaper.
    ///
    /// # Errors
    /// As `write`. What was not accepted comes back, with the count of what was.
    pub fn send_owned(
        &self,
        bytes: impl Into<OwnedBytes>,
    ) -> Result<SendCompletion, SendOwnedError> {
        let mut bytes = bytes.into();
        let completion = bytes.completion_on(&self.socket);
        let mut turn = WriteTurn::new(&self.socket, self.socket.write_limit());
        let mut sent = 0;
        while !bytes.is_empty() {
            match turn.share_some(&mut bytes) {
                Ok(n) => sent += n,
                Err(error) => return Err(SendOwnedError { error, sent, rest: bytes }),
            }
        }
        Ok(completion)
    }

    /// As [`TcpStream::send_owned`], but takes only what fits now, from the front. Returns how many
    /// bytes those were; the rest stays in `bytes`, and [`OwnedBytes::completion`] tells of all of
    /// them together.
    ///
    /// # Errors
    /// `WouldBlock`, and those of `write`; nothing is taken then.
    pub fn try_send_owned(&self, bytes: &mut OwnedBytes) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        bytes.completion_on(&self.socket);
        WriteTurn::new(&self.socket, Limit::DoNotWait).share_some(bytes)
    }

    /// Lends up to `bytes` of the stack's own memory, with its place in the send buffer, to be
    /// written into directly; [`SendRoom::commit`] sends it. Waits until there is room worth having,
    /// as `write` does; [`SendRoom::capacity`] tells how much it is. Until it is committed or dropped
    /// other writers of this socket wait.
    ///
    /// # Errors
    /// As `write`. `InvalidInput` for no bytes.
    pub fn send_reserve(&self, bytes: usize) -> io::Result<SendRoom<'_>> {
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "cannot reserve 0 bytes"));
        }
        let mut turn = WriteTurn::new(&self.socket, self.socket.write_limit());
        let reservation = turn.reserve(bytes)?;
        Ok(SendRoom::new(turn, reservation))
    }
}

/// The shard of a socket, for a completion, which must not keep the stack alive.
#[derive(Clone, Default)]
pub(crate) struct ShardRef {
    stack: std::sync::Weak<crate::inner::Inner>,
    shard: u16,
}

impl ShardRef {
    pub(crate) fn of(socket: &Socket) -> ShardRef {
        ShardRef { stack: Arc::downgrade(&socket.stack), shard: socket.shard }
    }

    /// What `f` makes of the host, if the stack is still there.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Arc<fulmar_runtime::Host>) -> R) -> Option<R> {
        self.stack.upgrade().map(|stack| f(stack.host(self.shard)))
    }
}
