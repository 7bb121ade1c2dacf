//! Framed streams: bodies go into the buffers of their tags.
//!
//! A protocol whose replies come in any order (NFS, iSCSI, NVMe over TCP) cannot post its buffers in
//! advance: only a reply's header tells whose body follows. Here a consumer gives a [`FrameParser`],
//! which finds length and tag in a header, and [`BodyBuffers`], which finds the buffer of a tag.
//!
//! ```text
//!   stream  │header│ body │header│   body    │header│ …
//!              │      │
//!              │      ├─ a buffer waits for the tag: copied there, once ──► Body::Placed
//!              │      ├─ none does: the mbufs that arrived, nothing copied ─► Body::Loan
//!              ▼      └─ nor may so many be kept: memory of its own ────────► Body::Copied
//!          FrameParser
//! ```
//!
//! The device knows nothing of frames: it would have to know where a body begins before it has seen the
//! header in front of it.
//!
//! The peer chooses the lengths. One that is too large is an error before anything is obtained for
//! it, and after an error of framing the stream gives no more frames.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::io::{self, IoSliceMut};

use fulmar_mbuf::RecvBuf;
use fulmar_socket::SocketError;

use crate::loan::Loan;
use crate::receive::RecvFlags;
use crate::tcp::TcpStream;

/// Most bytes of a header.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Default of [`Framed::set_max_body`], in bytes.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Bytes read at a time while headers are parsed: small frames share one read.
const LOOK_BYTES: usize = 64 << 10;

/// A body keeps at most this part of the receive buffer as loans; a larger one is copied, since it
/// would close the window that the rest of it has to come through.
const LENT_PART: usize = 4;

/// Initial allocation for a copied body: never the length that a peer announces.
const COPIED_AT_ONCE: usize = 64 << 10;

/// Understands the framing of a stream just enough to find bodies.
pub trait FrameParser: Send {
    /// How many bytes of a frame [`FrameParser::body`] needs to see.
    fn header_bytes(&self) -> usize;

    /// Length of the body behind this header in bytes, and the tag of its buffer. `None`: the frame has no
    /// body.
    fn body(&self, header: &[u8]) -> Option<(usize, u64)>;
}

/// Where bodies go.
pub trait BodyBuffers {
    /// Takes the buffer that waits for the body of this tag, of `bytes` bytes (at least 1). `None`: the
    /// body comes as a loan. Asked once per frame.
    fn take(&mut self, tag: u64, bytes: usize) -> Option<RecvBuf>;

    /// Takes a buffer back that cannot be used: it is too small, or the stream has ended in the middle
    /// of the body.
    fn give_back(&mut self, tag: u64, buffer: RecvBuf) {
        let _ = (tag, buffer);
    }
}

/// One buffer per tag; one that is too small stays where it is.
impl<S: BuildHasher> BodyBuffers for HashMap<u64, RecvBuf, S> {
    fn take(&mut self, tag: u64, bytes: usize) -> Option<RecvBuf> {
        if self.get(&tag)?.capacity() < bytes {
            return None;
        }
        self.remove(&tag)
    }

    fn give_back(&mut self, tag: u64, buffer: RecvBuf) {
        self.insert(tag, buffer);
    }
}

/// A frame of a [`Framed`] stream.
#[derive(Debug)]
pub struct Frame<'a> {
    /// The header, as many bytes as the parser asked for.
    pub header: &'a [u8],
    /// The tag that the parser found in it.
    pub tag: u64,
    /// What followed.
    pub body: Body,
}

/// The body of a frame.
#[derive(Debug)]
pub enum Body {
    /// In the buffer that waited for it, which holds the body and nothing else.
    Placed(RecvBuf),
    /// Where it arrived, since no buffer waited; it keeps the window smaller while it is held. The
    /// empty body of a frame is an empty loan.
    Loan(Loan),
    /// In memory of its own: no buffer waited, and it was larger than what a connection lends.
    Copied(Vec<u8>),
}

impl Body {
    /// Bytes of the body.
    pub fn len(&self) -> usize {
        match self {
            Body::Placed(buffer) => buffer.len(),
            Body::Loan(loan) => loan.len(),
            Body::Copied(bytes) => bytes.len(),
        }
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of the bytes, or the bytes themselves where that is possible.
    pub fn into_vec(self) -> Vec<u8> {
        match self {
            Body::Placed(buffer) => buffer.into_vec(),
            Body::Loan(loan) => loan.to_vec(),
            Body::Copied(bytes) => bytes,
        }
    }
}

/// A stream that is read frame by frame; see [`TcpStream::framed`].
pub struct Framed<P, B> {
    stream: TcpStream,
    parser: P,
    buffers: B,
    max_body: usize,
    /// Taken from the stream, and not yet looked at.
    pending: Loan,
    header: Vec<u8>,
    /// Bytes of the header that have come.
    got: usize,
    at: At,
}

/// Where in a frame the stream is.
enum At {
    Header,
    Body { tag: u64, bytes: usize, into: Into },
    Lost(&'static str),
}

/// Where the body goes, with what has come of it.
enum Into {
    Buffer(RecvBuf, usize),
    Loan(Loan),
    Memory(Vec<u8>),
}

impl TcpStream {
    /// Reads the stream as frames from here on, each a header of fixed length that says how long its
    /// body is and which buffer it belongs to. Other readers of the same socket would take bytes out
    /// of the middle of frames.
    ///
    /// # Errors
    /// `InvalidInput` if the parser's header has no bytes, or more than 64 KiB.
    pub fn framed<P: FrameParser, B: BodyBuffers>(
        &self,
        parser: P,
        buffers: B,
    ) -> io::Result<Framed<P, B>> {
        let header_bytes = parser.header_bytes();
        if header_bytes == 0 || header_bytes > MAX_HEADER_BYTES {
            let what = format!(
                "a frame's header has 1 to {MAX_HEADER_BYTES} bytes; the parser says {header_bytes}"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(Framed {
            stream: self.try_clone()?,
            parser,
            buffers,
            max_body: MAX_BODY_BYTES,
            pending: Loan::default(),
            header: vec![0; header_bytes],
            got: 0,
            at: At::Header,
        })
    }
}

impl<P: FrameParser, B: BodyBuffers> Framed<P, B> {
    /// The longest body that the peer may announce, bytes; 16 MiB unless it is set.
    pub fn set_max_body(&mut self, bytes: usize) {
        self.max_body = bytes;
    }

    /// The stream, to write requests to.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The buffers, to add those of requests that are about to be sent.
    pub fn buffers(&mut self) -> &mut B {
        &mut self.buffers
    }

    /// The next frame, whole; `None` at the end of the stream. Waits as `read` does. What has come of
    /// a frame when a call does not wait, or fails, is kept for the next call.
    ///
    /// # Errors
    /// As `read`. `UnexpectedEof`: the stream ended inside of a frame. `InvalidData`: the parser does
    /// not understand a header, or a body is longer than [`Framed::set_max_body`] allows; nobody knows
    /// where the next frame begins, and every later call says so too.
    #[allow(clippy::should_implement_trait, reason = "a frame borrows the header from here")]
    pub fn next(&mut self) -> io::Result<Option<Frame<'_>>> {
        if let At::Lost(why) = self.at {
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        if matches!(self.at, At::Header) {
            if !self.fill_header()? {
                return Ok(None);
            }
            self.understand()?;
        }
        self.fill_body()?;
        match std::mem::replace(&mut self.at, At::Header) {
            At::Body { tag, into, .. } => {
                self.got = 0;
                Ok(Some(Frame { header: &self.header, tag, body: into.body() }))
            }
            other => {
                self.at = other;
                Ok(None)
            }
        }
    }

    /// False: the stream ended before the frame.
    fn fill_header(&mut self) -> io::Result<bool> {
        while self.got < self.header.len() {
            let room = self.header.get_mut(self.got..).unwrap_or_default();
            let mut n = self.pending.copy_to(0, room);
            self.pending.advance(n);
            if n == 0 {
                match lent(self.stream.recv_owned(LOOK_BYTES))? {
                    Some(loan) if !loan.is_empty() => {
                        self.pending = loan;
                        continue;
                    }
                    Some(_) => {}
                    None => n = read_into(&self.stream, room)?,
                }
                if n == 0 {
                    return if self.got == 0 { Ok(false) } else { Err(eof()) };
                }
            }
            self.got += n;
        }
        Ok(true)
    }

    /// The header is there: decides where the body goes.
    fn understand(&mut self) -> io::Result<()> {
        let Some((bytes, tag)) = self.parser.body(&self.header) else {
            return Err(self.lose("the parser does not understand the header of a frame"));
        };
        if bytes > self.max_body {
            return Err(self.lose("a frame announces a body that is longer than allowed"));
        }
        let buffer = if bytes > 0 { self.buffers.take(tag, bytes) } else { None };
        let into = match buffer {
            Some(buffer) if buffer.capacity() >= bytes => Into::Buffer(buffer, 0),
            Some(small) => {
                self.buffers.give_back(tag, small);
                Into::Loan(Loan::default())
            }
            None => Into::Loan(Loan::default()),
        };
        self.at = At::Body { tag, bytes, into };
        Ok(())
    }

    fn lose(&mut self, why: &'static str) -> io::Error {
        self.pending = Loan::default();
        self.at = At::Lost(why);
        io::Error::new(io::ErrorKind::InvalidData, why)
    }

    fn fill_body(&mut self) -> io::Result<()> {
        let At::Body { bytes, into, .. } = &mut self.at else { return Ok(()) };
        let bytes = *bytes;
        while into.len() < bytes {
            let n = self.pending.len().min(bytes - into.len());
            if n > 0 {
                into.take(&mut self.pending, n)?;
                continue;
            }
            let most = self.stream.recv_buffer()? / LENT_PART;
            if into.read(&self.stream, bytes, most)? == 0 {
                return Err(self.end_inside());
            }
        }
        Ok(())
    }

    /// The stream ended inside of a body, whose buffer goes back.
    fn end_inside(&mut self) -> io::Error {
        let lost = At::Lost("the stream ended inside of a frame");
        if let At::Body { tag, into: Into::Buffer(buffer, _), .. } =
            std::mem::replace(&mut self.at, lost)
        {
            self.buffers.give_back(tag, buffer);
        }
        eof()
    }
}

fn eof() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the stream ended inside of a frame")
}

impl Into {
    fn len(&self) -> usize {
        match self {
            Into::Buffer(_, filled) => *filled,
            Into::Loan(loan) => loan.len(),
            Into::Memory(bytes) => bytes.len(),
        }
    }

    /// Takes `n` bytes from the front of what was read already.
    fn take(&mut self, pending: &mut Loan, n: usize) -> io::Result<()> {
        match self {
            Into::Buffer(buffer, filled) => {
                let room = buffer.memory_mut().get_mut(*filled..*filled + n);
                *filled += pending.copy_to(0, room.unwrap_or_default());
                pending.advance(n);
            }
            Into::Loan(loan) => loan.append(pending.split_to(n)),
            Into::Memory(bytes) => extend(bytes, &pending.split_to(n))?,
        }
        Ok(())
    }

    /// Reads more of the body, of `total` bytes, from the stream: straight to where it goes. Keeps at
    /// most `most` bytes of storage as loans. 0 is the end of the stream.
    fn read(&mut self, stream: &TcpStream, total: usize, most: usize) -> io::Result<usize> {
        let left = total - self.len();
        match self {
            Into::Buffer(buffer, filled) => {
                let room = buffer.memory_mut().get_mut(*filled..total).unwrap_or_default();
                let n = read_into(stream, room)?;
                *filled += n;
                Ok(n)
            }
            Into::Loan(loan) if loan.storage_bytes() + left <= most => {
                let Some(more) = lent(stream.recv_owned(left))? else {
                    return self.read_copied(stream, left);
                };
                let n = more.len();
                loan.append(more);
                Ok(n)
            }
            Into::Loan(_) | Into::Memory(_) => self.read_copied(stream, left),
        }
    }

    /// Reads more of a body into memory of its own, into which what it had on loan is copied first: then
    /// nothing of the pool is kept.
    fn read_copied(&mut self, stream: &TcpStream, left: usize) -> io::Result<usize> {
        if let Into::Loan(loan) = self {
            let mut bytes = Vec::new();
            extend(&mut bytes, loan)?;
            *self = Into::Memory(bytes);
        }
        let Into::Memory(bytes) = self else { return Ok(0) };
        if let Some(part) = lent(stream.recv_owned(left))? {
            extend(bytes, &part)?;
            return Ok(part.len());
        }
        let (had, more) = (bytes.len(), left.min(COPIED_AT_ONCE));
        bytes.try_reserve(more).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        bytes.resize(had + more, 0);
        let read = read_into(stream, bytes.get_mut(had..).unwrap_or_default());
        bytes.truncate(had + *read.as_ref().unwrap_or(&0));
        read
    }

    fn body(self) -> Body {
        match self {
            Into::Buffer(buffer, filled) => match buffer.post().release(filled) {
                Ok(buffer) => Body::Placed(buffer),
                // Nobody else has ever had it.
                Err(_) => Body::Copied(Vec::new()),
            },
            Into::Loan(loan) => Body::Loan(loan),
            Into::Memory(bytes) => Body::Copied(bytes),
        }
    }
}

/// `None`: the stack has no buffer left that could be lent (`ENOBUFS`), so what came has to be copied.
fn lent(loan: io::Result<Loan>) -> io::Result<Option<Loan>> {
    match loan {
        Err(e) if e.raw_os_error() == Some(SocketError::NoBuffer.errno()) => Ok(None),
        loan => loan.map(Some),
    }
}

fn read_into(stream: &TcpStream, room: &mut [u8]) -> io::Result<usize> {
    stream.recv_with(&mut [IoSliceMut::new(room)], RecvFlags::NONE)
}

/// Memory is obtained as the bytes come, not as the peer announces them.
fn extend(bytes: &mut Vec<u8>, part: &Loan) -> io::Result<()> {
    bytes.try_reserve(part.len()).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    part.append_to(bytes);
    Ok(())
}

impl<P, B> fmt::Debug for Framed<P, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = match &self.at {
            At::Header => "header",
            At::Body { .. } => "body",
            At::Lost(why) => why,
        };
        f.debug_struct("Framed").field("stream", &self.stream).field("at", &at).finish()
    }
}
