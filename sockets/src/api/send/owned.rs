//! Memory that is sent in place.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::runtime::Completion;
use fulmar_stack::mbuf::{Chain, Mbuf, SharedBytes};
use fulmar_stack::tcp::ConnError;

use super::{SendCompletion, ShardRef};
use crate::api::socket::Socket;

/// Bytes that a program gives to [`ZeroCopy::send_owned`](crate::zero_copy::ZeroCopy::send_owned): a `Vec<u8>`,
/// a boxed slice, `bytes::Bytes`, a static slice, a [`Chain`] of mbufs, or any other owner of bytes
/// ([`OwnedBytes::from_owner`]).
///
/// Its length is that of the bytes that are not accepted yet. The connection keeps accepted bytes until they are
/// acknowledged and no device reads them. After that, and after the drop of this handle, the memory is dropped and the
/// [`SendCompletion`] is done.
///
/// ```
/// # use std::io::ErrorKind;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::{OwnedBytes, ZeroCopy};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// let mut bytes = OwnedBytes::from(vec![7; 1 << 20]);
/// while !bytes.is_empty() {
///     match stream.try_send_owned(&mut bytes) {
///         Ok(accepted) => println!("{accepted} bytes accepted, {} left", bytes.len()),
///         Err(e) if e.kind() == ErrorKind::WouldBlock => drop(peer.recv_owned(64 << 10)?), // later
///         Err(e) => return Err(e.into()),
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct OwnedBytes {
    memory: Arc<dyn SharedBytes>,
    completion: Arc<Completion>,
    shard: ShardRef,
    at: usize,
    end: usize,
}

impl OwnedBytes {
    /// The bytes of any owner, which is dropped when the memory may be used again: for example a buffer of the
    /// program's own pool, which its drop returns there.
    ///
    /// `as_ref` must return the same bytes each time.
    pub fn from_owner(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> OwnedBytes {
        let end = owner.as_ref().len();
        OwnedBytes::new(Flat(owner), end)
    }

    fn new<M: Memory>(memory: M, end: usize) -> OwnedBytes {
        let completion = Arc::new(Completion::default());
        let memory = Held { memory: Some(memory), completion: Arc::clone(&completion) };
        OwnedBytes { memory: Arc::new(memory), completion, shard: ShardRef::default(), at: 0, end }
    }

    /// Bytes that are not accepted yet.
    pub fn len(&self) -> usize {
        self.end - self.at
    }

    /// Whether all bytes are accepted.
    pub fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// The completion of the whole memory, bytes that are not accepted yet and this handle included.
    pub fn completion(&self) -> SendCompletion {
        SendCompletion::new(Arc::clone(&self.completion), self.shard.clone())
    }

    pub(super) fn completion_on(&mut self, socket: &Socket) -> SendCompletion {
        self.shard = ShardRef::of(socket);
        self.completion()
    }

    pub(super) fn memory(&self) -> &Arc<dyn SharedBytes> {
        &self.memory
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn advance(&mut self, n: usize) {
        self.at = self.end.min(self.at + n);
    }
}

impl fmt::Debug for OwnedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedBytes").field("accepted", &self.at).field("of", &self.end).finish()
    }
}

/// Memory in one or more slices.
trait Memory: Send + Sync + 'static {
    /// As [`SharedBytes::piece`].
    fn piece(&self, at: usize) -> &[u8];
}

/// Memory with its completion.
struct Held<M> {
    /// Present until the drop.
    memory: Option<M>,
    completion: Arc<Completion>,
}

impl<M: Memory> SharedBytes for Held<M> {
    fn piece(&self, at: usize) -> &[u8] {
        self.memory.as_ref().map_or(&[], |m| m.piece(at))
    }

    fn on_undelivered(&self, why: u8) {
        self.completion.fail(ConnError::from_code(why).code());
    }
}

impl<M> Drop for Held<M> {
    fn drop(&mut self) {
        // The memory first: its owner may reuse it after the completion. Its drop is code of the program, which may
        // panic, and runs on any thread, the service thread too.
        let memory = self.memory.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(memory))).map_err(std::mem::forget);
        self.completion.finish();
    }
}

struct Flat<T>(T);

impl<T: AsRef<[u8]> + Send + Sync + 'static> Memory for Flat<T> {
    fn piece(&self, at: usize) -> &[u8] {
        self.0.as_ref().get(at..).unwrap_or_default()
    }
}

/// The mbufs of a chain, each with the offset of its end.
struct Pieces(Vec<(usize, Mbuf)>);

impl Memory for Pieces {
    fn piece(&self, at: usize) -> &[u8] {
        let i = self.0.partition_point(|(end, _)| *end <= at);
        let Some((end, mbuf)) = self.0.get(i) else { return &[] };
        let bytes = mbuf.as_slice();
        bytes.get(bytes.len() - (end - at)..).unwrap_or_default()
    }
}

impl From<Vec<u8>> for OwnedBytes {
    fn from(bytes: Vec<u8>) -> OwnedBytes {
        OwnedBytes::from_owner(bytes)
    }
}

impl From<Box<[u8]>> for OwnedBytes {
    fn from(bytes: Box<[u8]>) -> OwnedBytes {
        OwnedBytes::from_owner(bytes)
    }
}

impl From<String> for OwnedBytes {
    fn from(text: String) -> OwnedBytes {
        OwnedBytes::from_owner(text)
    }
}

impl From<bytes::Bytes> for OwnedBytes {
    fn from(bytes: bytes::Bytes) -> OwnedBytes {
        OwnedBytes::from_owner(bytes)
    }
}

impl From<&'static [u8]> for OwnedBytes {
    fn from(bytes: &'static [u8]) -> OwnedBytes {
        OwnedBytes::from_owner(bytes)
    }
}

impl<const N: usize> From<&'static [u8; N]> for OwnedBytes {
    fn from(bytes: &'static [u8; N]) -> OwnedBytes {
        OwnedBytes::from_owner(bytes)
    }
}

impl From<&'static str> for OwnedBytes {
    fn from(text: &'static str) -> OwnedBytes {
        OwnedBytes::from_owner(text)
    }
}

impl From<Chain> for OwnedBytes {
    /// Mbufs of any stack, which stay charged to their own pool, too. Memory that another process may write
    /// ([`Chain::is_volatile`]) is copied.
    fn from(mut chain: Chain) -> OwnedBytes {
        if chain.is_volatile() {
            return OwnedBytes::from(chain.to_vec());
        }
        let (mut pieces, mut end) = (Vec::with_capacity(chain.segs()), 0);
        while let Some(mbuf) = chain.pop_front() {
            if !mbuf.is_empty() {
                end += mbuf.len();
                pieces.push((end, mbuf));
            }
        }
        OwnedBytes::new(Pieces(pieces), end)
    }
}

/// An owned send that was not accepted whole.
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::ZeroCopy;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// stream.set_write_timeout(Some(Duration::from_millis(1)))?;
/// // More than the buffers of both ends take.
/// let refused = stream.send_owned(vec![7; 64 << 20]).unwrap_err();
/// println!("{} of {} bytes: {}", refused.sent, refused.sent + refused.rest.len(), refused.error);
/// // Later: `stream.send_owned(refused.rest)`.
/// # drop(peer);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct SendOwnedError {
    /// Why.
    pub error: io::Error,
    /// Bytes that were accepted, from the front.
    pub sent: usize,
    /// The others.
    pub rest: OwnedBytes,
}

impl fmt::Display for SendOwnedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.sent + self.rest.len();
        write!(f, "{} (after {} of {all} bytes)", self.error, self.sent)
    }
}

impl std::error::Error for SendOwnedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<SendOwnedError> for io::Error {
    fn from(e: SendOwnedError) -> io::Error {
        e.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_stack::mbuf::{Pool, PoolConfig, Purpose};

    #[test]
    fn the_pieces_of_a_chain_are_its_bytes_from_anywhere() {
        let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
        let mut chain = Chain::new();
        for part in [&b"abc"[..], b"", b"d", b"efgh"] {
            let mut m = pool.alloc(part.len().max(1), 0, Purpose::Send).unwrap();
            m.append(part.len()).unwrap().copy_from_slice(part);
            chain.push_back(m);
        }
        let all = chain.to_vec();
        let bytes = OwnedBytes::from(chain);
        for from in 0..all.len() {
            let (mut at, mut seen) = (from, Vec::new());
            while at < bytes.len() {
                let piece = bytes.memory().piece(at);
                assert!(!piece.is_empty());
                seen.extend_from_slice(piece);
                at += piece.len();
            }
            assert_eq!(seen, all[from..]);
        }
        assert!(bytes.memory().piece(all.len()).is_empty());
    }

    #[test]
    fn the_memory_is_released_before_the_completion_is_signalled() {
        struct Loud(Arc<std::sync::atomic::AtomicBool>);
        impl AsRef<[u8]> for Loud {
            fn as_ref(&self) -> &[u8] {
                b"loud"
            }
        }
        impl Drop for Loud {
            fn drop(&mut self) {
                self.0.store(true, std::sync::atomic::Ordering::SeqCst);
            }
        }
        let gone = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let bytes = OwnedBytes::from_owner(Loud(Arc::clone(&gone)));
        let completion = bytes.completion();
        assert!(!completion.is_done());
        drop(bytes);
        assert!(completion.is_done() && gone.load(std::sync::atomic::Ordering::SeqCst));
    }
}
