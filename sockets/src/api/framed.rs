//! Framed streams: the body of each frame is received into the buffer of its tag.
//!
//! A protocol with replies in any order (NFS, iSCSI, NVMe over TCP) cannot post its buffers in advance: only the header
//! of a reply identifies the request. Here the program provides a [`FrameParser`], which returns length and tag of a
//! header, and [`BodyBuffers`], which return the buffer of a tag.
//!
//! ```text
//!   stream  │header│ body │header│   body    │header│ …
//!              │      │
//!              │      ├─ a buffer for the tag: copied there, once ──────────► Body::Placed
//!              │      ├─ no buffer: a loan of the received mbufs ───────────► Body::Loan
//!              ▼      └─ no buffer, too long for a loan: copied to the heap ► Body::Copied
//!          FrameParser
//! ```
//!
//! Bodies are not placed by the device: it would need the start of a body before the header is received.
//!
//! The peer chooses the lengths. A length above the limit is an error before any memory is allocated, and after an
//! error of framing the stream returns no more frames.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::io::{self, IoSliceMut};

use fulmar_stack::mbuf::RecvBuf;
use fulmar_stack::socket::SocketError;

use crate::api::loan::Loan;
use crate::api::receive::RecvFlags;
use crate::api::tcp::TcpStream;

/// Bytes of a header at most.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Default of [`Framed::set_max_body`], in bytes.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Bytes per read of headers, so that several small frames share one read.
const READ_BYTES: usize = 64 << 10;

/// Loans of a body keep at most 1/LENT_PART of the receive buffer. A longer body is copied, since its loans would close
/// the window for the rest of it.
const LENT_PART: usize = 4;

/// Allocation step of a copied body, which grows with the received bytes and not with the announced length.
const COPY_STEP_BYTES: usize = 64 << 10;

/// Parses frame headers.
pub trait FrameParser: Send {
    /// Length of a header, bytes.
    fn header_bytes(&self) -> usize;

    /// The length in bytes of the body after this header, and the tag of its buffer. `None`: not a valid header.
    fn body(&self, header: &[u8]) -> Option<(usize, u64)>;
}

/// The buffers of bodies.
pub trait BodyBuffers {
    /// Takes the buffer for the body of this tag, of `bytes` bytes (at least 1). `None`: the body is lent. Called once
    /// per frame.
    fn take(&mut self, tag: u64, bytes: usize) -> Option<RecvBuf>;

    /// Returns a buffer that was not filled: it is too small, or the stream ended within the body.
    fn give_back(&mut self, tag: u64, buffer: RecvBuf) {
        let _ = (tag, buffer);
    }
}

/// One buffer per tag. A buffer that is too small stays in the map.
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
    /// The header, of [`FrameParser::header_bytes`] bytes.
    pub header: &'a [u8],
    /// The tag of the header.
    pub tag: u64,
    /// The body.
    pub body: Body,
}

/// The body of a frame.
#[derive(Debug)]
pub enum Body {
    /// In the buffer of its tag.
    Placed(RecvBuf),
    /// In the buffers of the stack, since the tag had no buffer. It reduces the window while it is kept. An empty body
    /// is an empty loan.
    Loan(Loan),
    /// On the heap: the tag had no buffer, and the body was longer than a connection lends.
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

    /// Whether the body is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes; a loan is copied.
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
    /// Bytes read and not parsed.
    pending: Loan,
    header: Vec<u8>,
    /// Received bytes of the header.
    got: usize,
    at: At,
}

/// The position in a frame.
enum At {
    Header,
    Body { tag: u64, bytes: usize, into: Into },
    Lost(&'static str),
}

/// The received part of a body, in its destination.
enum Into {
    Buffer(RecvBuf, usize),
    Loan(Loan),
    Memory(Vec<u8>),
}

impl TcpStream {
    /// Reads the stream as frames: each has a header of fixed length, which has the length and the tag of its body. No
    /// other reader may read from the connection.
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
    /// Sets the longest body that is accepted, bytes. Default 16 MiB.
    pub fn set_max_body(&mut self, bytes: usize) {
        self.max_body = bytes;
    }

    /// The stream, to write requests to.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The buffers, to add those of new requests.
    pub fn buffers(&mut self) -> &mut B {
        &mut self.buffers
    }

    /// The next frame; `None` at the end of the stream. Waits as `read` does. If a call fails, `WouldBlock` included,
    /// the received part of the frame is kept for the next call.
    ///
    /// # Errors
    /// As `read`. `UnexpectedEof`: the stream ended within a frame. `InvalidData`: the parser rejects a header, or a
    /// body is longer than [`Framed::set_max_body`] allows; the framing is lost, and every later call fails, too.
    #[allow(clippy::should_implement_trait, reason = "a frame borrows the header from here")]
    pub fn next(&mut self) -> io::Result<Option<Frame<'_>>> {
        if let At::Lost(why) = self.at {
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        if matches!(self.at, At::Header) {
            if !self.fill_header()? {
                return Ok(None);
            }
            self.begin_body()?;
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
            let rest = self.header.get_mut(self.got..).unwrap_or_default();
            let mut n = self.pending.copy_to(0, rest);
            self.pending.advance(n);
            if n == 0 {
                match lent(self.stream.recv_owned(READ_BYTES))? {
                    Some(loan) if !loan.is_empty() => {
                        self.pending = loan;
                        continue;
                    }
                    Some(_) => {}
                    None => n = read_into(&self.stream, rest)?,
                }
                if n == 0 {
                    return if self.got == 0 { Ok(false) } else { Err(eof()) };
                }
            }
            self.got += n;
        }
        Ok(true)
    }

    /// Parses the complete header, and chooses the destination of the body.
    fn begin_body(&mut self) -> io::Result<()> {
        let Some((bytes, tag)) = self.parser.body(&self.header) else {
            return Err(self.lose("the parser rejects the header of a frame"));
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

    /// The stream ended within a body: returns its buffer.
    fn end_inside(&mut self) -> io::Error {
        let lost = At::Lost("the stream ended within a frame");
        if let At::Body { tag, into: Into::Buffer(buffer, _), .. } =
            std::mem::replace(&mut self.at, lost)
        {
            self.buffers.give_back(tag, buffer);
        }
        eof()
    }
}

fn eof() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the stream ended within a frame")
}

impl Into {
    fn len(&self) -> usize {
        match self {
            Into::Buffer(_, filled) => *filled,
            Into::Loan(loan) => loan.len(),
            Into::Memory(bytes) => bytes.len(),
        }
    }

    /// Takes `n` bytes from the front of `pending`.
    fn take(&mut self, pending: &mut Loan, n: usize) -> io::Result<()> {
        match self {
            Into::Buffer(buffer, filled) => {
                let to = buffer.memory_mut().get_mut(*filled..*filled + n);
                *filled += pending.copy_to(0, to.unwrap_or_default());
                pending.advance(n);
            }
            Into::Loan(loan) => loan.append(pending.split_to(n)),
            Into::Memory(bytes) => extend(bytes, &pending.split_to(n))?,
        }
        Ok(())
    }

    /// Reads more of a body of `total` bytes from the stream into its destination. Loans keep at most `most` bytes of
    /// storage. Returns how many bytes were read; 0: the end of the stream.
    fn read(&mut self, stream: &TcpStream, total: usize, most: usize) -> io::Result<usize> {
        let left = total - self.len();
        match self {
            Into::Buffer(buffer, filled) => {
                let to = buffer.memory_mut().get_mut(*filled..total).unwrap_or_default();
                let n = read_into(stream, to)?;
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

    /// Reads more of a body to the heap. Its loans are copied there first, so that no memory of the stack is kept.
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
        let (had, more) = (bytes.len(), left.min(COPY_STEP_BYTES));
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
                // Not reached: the buffer was never shared.
                Err(_) => Body::Copied(Vec::new()),
            },
            Into::Loan(loan) => Body::Loan(loan),
            Into::Memory(bytes) => Body::Copied(bytes),
        }
    }
}

/// `None`: the bytes cannot be lent (`ENOBUFS`) and are to be copied.
fn lent(loan: io::Result<Loan>) -> io::Result<Option<Loan>> {
    match loan {
        Err(e) if e.raw_os_error() == Some(SocketError::NoBuffer.errno()) => Ok(None),
        loan => loan.map(Some),
    }
}

fn read_into(stream: &TcpStream, to: &mut [u8]) -> io::Result<usize> {
    stream.recv_with(&mut [IoSliceMut::new(to)], RecvFlags::NONE)
}

/// Appends received bytes; memory grows with them and not with the announced length.
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
