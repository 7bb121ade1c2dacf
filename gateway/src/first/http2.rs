//! HTTP/2 in the clear (RFC 9113): every header list of the guest.
//!
//! ```text
//!   guest ──► preface ──► SETTINGS ──► HEADERS [CONTINUATION]... ──► list checked ──► ...
//!                                      └─ held until the list is whole
//!                                 ──► DATA and other frames pass by their length
//! ```
//!
//! A list with a pseudo-header field is a request: it names the expected host by `:authority`, by `host`, or by both. A
//! list without one is a trailer section. Fields that a gateway to HTTP/1 could take for the framing of a request, or that
//! end a line there, are refused (RFC 9113 section 8.2).

use super::hpack::Decoder;
use super::lines::is_token;
use super::reason::{Reason, Refusal};
use super::{Expected, Then};

/// What a client sends first (section 3.4).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER_BYTES: usize = 9;
/// Most bytes of a frame that is not DATA. The host bounds DATA.
const MOST_FRAME_BYTES: usize = 1 << 14;
/// Most bytes of a header block with its padding.
const MOST_BLOCK_BYTES: usize = 65_536;
/// Most frames of a header block.
const MOST_BLOCK_FRAMES: usize = 64;
/// Most fields of a list.
const MOST_FIELDS: usize = 256;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const CONTINUATION: u8 = 9;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Where in the frames.
#[derive(Clone, Copy)]
enum At {
    /// In the preface, with the number of bytes that have come.
    Preface(usize),
    /// In a frame's header, with the number of bytes that have come.
    Header([u8; FRAME_HEADER_BYTES], usize),
    /// In a frame that passes, with the number of missing bytes.
    Passing(usize),
    /// In a frame of a header block, with the number of missing bytes.
    Block { flags: u8, missing: usize },
}

const BEFORE_FRAME: At = At::Header([0; FRAME_HEADER_BYTES], 0);

/// A header block that is not whole.
#[derive(Default)]
struct Block {
    stream: u32,
    bytes: Vec<u8>,
    frames: usize,
    /// Where the frame begins that is being read.
    frame_at: usize,
}

/// Reads the guest's frames.
pub(super) struct Reader {
    at: At,
    has_settings: bool,
    block: Option<Block>,
    hpack: Decoder,
}

impl Reader {
    pub(super) fn new() -> Self {
        Reader { at: At::Preface(0), has_settings: false, block: None, hpack: Decoder::new() }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.hpack.table_bytes() + self.block.as_ref().map_or(0, |block| block.bytes.capacity())
    }

    pub(super) fn read(
        &mut self,
        expected: &Expected,
        bytes: &[u8],
    ) -> Result<(usize, Then), Refusal> {
        match self.at {
            At::Preface(there) => self.read_preface(there, bytes),
            At::Header(header, there) => self.read_header(expected, header, there, bytes),
            At::Passing(missing) => {
                let n = missing.min(bytes.len());
                self.at = if n == missing { BEFORE_FRAME } else { At::Passing(missing - n) };
                Ok((n, Then::Pass))
            }
            At::Block { flags, missing } => {
                let n = missing.min(bytes.len());
                if let Some(block) = &mut self.block {
                    block.bytes.extend_from_slice(bytes.get(..n).unwrap_or_default());
                }
                if n < missing {
                    self.at = At::Block { flags, missing: missing - n };
                    return Ok((n, Then::Hold));
                }
                self.at = BEFORE_FRAME;
                self.end_block_frame(expected, flags).map(|then| (n, then))
            }
        }
    }

    fn read_preface(&mut self, there: usize, bytes: &[u8]) -> Result<(usize, Then), Refusal> {
        let rest = PREFACE.get(there..).unwrap_or_default();
        let n = rest.len().min(bytes.len());
        if rest.get(..n) != bytes.get(..n) {
            return Err(Reason::Http2Unreadable.into());
        }
        self.at = At::Preface(there + n);
        if n < rest.len() {
            return Ok((n, Then::Hold));
        }
        self.at = BEFORE_FRAME;
        Ok((n, Then::Pass))
    }

    fn read_header(
        &mut self,
        expected: &Expected,
        mut header: [u8; FRAME_HEADER_BYTES],
        mut there: usize,
        bytes: &[u8],
    ) -> Result<(usize, Then), Refusal> {
        let mut n = 0;
        for (to, from) in header.iter_mut().skip(there).zip(bytes) {
            *to = *from;
            n += 1;
        }
        there += n;
        if there < FRAME_HEADER_BYTES {
            self.at = At::Header(header, there);
            return Ok((n, Then::Hold));
        }
        let [a, b, c, kind, flags, stream @ ..] = header;
        let frame = Frame {
            kind,
            flags,
            stream: u32::from_be_bytes(stream) & 0x7fff_ffff,
            length: u32::from_be_bytes([0, a, b, c]) as usize,
        };
        self.begin_frame(expected, &frame).map(|then| (n, then))
    }

    fn begin_frame(&mut self, expected: &Expected, frame: &Frame) -> Result<Then, Refusal> {
        self.check_frame(frame)?;
        if !matches!(frame.kind, HEADERS | CONTINUATION) {
            self.has_settings = true;
            self.at = if frame.length == 0 { BEFORE_FRAME } else { At::Passing(frame.length) };
            return Ok(Then::Pass);
        }
        let block = self.block.get_or_insert_default();
        block.stream = frame.stream;
        block.frames += 1;
        block.frame_at = block.bytes.len();
        if block.frames > MOST_BLOCK_FRAMES || frame.length > MOST_BLOCK_BYTES - block.bytes.len() {
            return Err(Reason::Http2TooLong.into());
        }
        let is_headers = frame.kind == HEADERS;
        let flags = if is_headers { frame.flags } else { frame.flags & END_HEADERS };
        if frame.length == 0 {
            self.at = BEFORE_FRAME;
            return self.end_block_frame(expected, flags);
        }
        self.at = At::Block { flags, missing: frame.length };
        Ok(Then::Hold)
    }

    /// Whether the frame may come here.
    fn check_frame(&self, frame: &Frame) -> Result<(), Refusal> {
        let is_in_order = match (&self.block, frame.kind) {
            (Some(block), CONTINUATION) => block.stream == frame.stream,
            (Some(_), _) | (None, CONTINUATION | PUSH_PROMISE) => false,
            (None, SETTINGS) => self.has_settings || frame.flags & ACK == 0,
            // The first frame is SETTINGS (section 3.4).
            (None, _) if !self.has_settings => false,
            // Streams of a client are odd (section 5.1.1).
            (None, HEADERS) => frame.stream % 2 == 1,
            (None, _) => true,
        };
        let is_bounded =
            matches!(frame.kind, DATA | HEADERS | CONTINUATION) || frame.length <= MOST_FRAME_BYTES;
        if !is_in_order || !is_bounded {
            return Err(Reason::Http2Unreadable.into());
        }
        Ok(())
    }

    fn end_block_frame(&mut self, expected: &Expected, flags: u8) -> Result<Then, Refusal> {
        let Some(block) = &mut self.block else { return Ok(Then::Hold) };
        strip(&mut block.bytes, block.frame_at, flags).ok_or(Reason::Http2Unreadable)?;
        if flags & END_HEADERS == 0 {
            return Ok(Then::Hold);
        }
        let block = self.block.take().unwrap_or_default();
        let mut list = List::default();
        self.hpack.decode(&block.bytes, |name, value| list.add(expected, name, value))?;
        list.check()?;
        Ok(Then::Pass)
    }
}

struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    length: usize,
}

/// Removes padding and priority of the frame that begins at `at` (section 6.2).
fn strip(bytes: &mut Vec<u8>, at: usize, flags: u8) -> Option<()> {
    let mut front = 0;
    if flags & PADDED != 0 {
        let padding = usize::from(*bytes.get(at)?);
        front += 1;
        let end = bytes.len().checked_sub(padding).filter(|end| *end > at)?;
        bytes.truncate(end);
    }
    if flags & PRIORITY != 0 {
        front += 5;
    }
    let end = at.checked_add(front).filter(|end| *end <= bytes.len())?;
    bytes.drain(at..end);
    Some(())
}

/// What a header list says.
#[derive(Default)]
struct List {
    fields: usize,
    has_regular: bool,
    /// Pseudo-header fields, in the order of [`PSEUDO`].
    pseudo: [bool; PSEUDO.len()],
    has_host: bool,
    is_connect: bool,
    is_path: bool,
}

const PSEUDO: [&[u8]; 5] = [b":method", b":scheme", b":authority", b":path", b":protocol"];
/// Fields of HTTP/1 that frame a message (section 8.2.2).
const OF_CONNECTION: [&[u8]; 5] =
    [b"connection", b"transfer-encoding", b"upgrade", b"keep-alive", b"proxy-connection"];

impl List {
    fn add(&mut self, expected: &Expected, name: &[u8], value: &[u8]) -> Result<(), Refusal> {
        self.fields += 1;
        if self.fields > MOST_FIELDS {
            return Err(Reason::Http2TooLong.into());
        }
        let is_pseudo = name.first() == Some(&b':');
        let token = if is_pseudo { name.get(1..).unwrap_or_default() } else { name };
        let is_name = |b: &u8| is_token(*b) && !b.is_ascii_uppercase();
        let is_unreadable = token.is_empty()
            || !token.iter().all(is_name)
            || value.iter().any(|b| matches!(b, 0 | b'\r' | b'\n'))
            || OF_CONNECTION.contains(&name)
            || is_pseudo && self.has_regular;
        if is_unreadable {
            return Err(Reason::Http2Unreadable.into());
        }
        if is_pseudo {
            self.add_pseudo(name, value)?;
        } else {
            self.has_regular = true;
        }
        if name != b":authority" && name != b"host" {
            return Ok(());
        }
        if name == b"host" && std::mem::replace(&mut self.has_host, true) {
            return Err(Reason::HttpManyHosts.into());
        }
        match expected.is_authority(value) {
            true => Ok(()),
            false => Err(Refusal::with_name(Reason::Http2OtherHost, value)),
        }
    }

    fn add_pseudo(&mut self, name: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let at = PSEUDO.iter().position(|pseudo| *pseudo == name);
        let seen = at.and_then(|at| self.pseudo.get_mut(at)).ok_or(Reason::Http2Unreadable)?;
        if std::mem::replace(seen, true) {
            return Err(Reason::Http2Unreadable.into());
        }
        match name {
            // A proxy to HTTP/1 writes both into a request line.
            b":method" if !value.iter().copied().all(is_token) => {
                return Err(Reason::Http2Unreadable.into());
            }
            b":method" => self.is_connect = value.eq_ignore_ascii_case(b"CONNECT"),
            b":path" => {
                let is_path = value.first() == Some(&b'/') || value == b"*";
                self.is_path = is_path && value.iter().all(|b| *b > b' ' && *b != 0x7f);
            }
            _ => {}
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Refusal> {
        let [method, _, authority, path, protocol] = self.pseudo;
        if self.pseudo == [false; PSEUDO.len()] {
            return Ok(());
        }
        // RFC 8441: with `:protocol` it is a WebSocket to this host.
        if self.is_connect && !protocol {
            return Err(Reason::Http2Connect.into());
        }
        if !method || !path || !self.is_path {
            return Err(Reason::Http2Unreadable.into());
        }
        if !authority && !self.has_host {
            return Err(Reason::Http2NoHost.into());
        }
        Ok(())
    }
}
