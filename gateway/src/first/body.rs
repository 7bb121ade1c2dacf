//! The body of a request of HTTP/1: where it ends.

use super::lines::Lines;
use super::reason::{Reason, Refusal};

/// Most digits of a length: less than `u64` holds.
const MOST_DIGITS: usize = 18;
/// Most hexadecimal digits of a chunk's size.
const MOST_CHUNK_DIGITS: usize = 15;
/// Most bytes of the trailer section.
const MOST_TRAILER_BYTES: usize = 8192;
const MOST_TRAILERS: usize = 32;

/// How the end of a body is known (RFC 9112 section 6.3).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Body {
    None,
    Length(u64),
    Chunked,
}

impl Body {
    /// Of a request with these fields, of HTTP/1.`minor`.
    ///
    /// # Errors
    /// Servers may differ.
    pub(super) fn of(fields: &[httparse::Header<'_>], minor: u8) -> Result<Self, Refusal> {
        let all = |name: &'static str| {
            fields.iter().filter(move |f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value)
        };
        let (mut lengths, mut codings) = (all("content-length"), all("transfer-encoding"));
        let of = (lengths.next(), codings.next(), lengths.next(), codings.next());
        match of {
            (None, None, ..) => Ok(Body::None),
            (Some(length), None, None, _) => match parse_length(length) {
                Some(0) => Ok(Body::None),
                Some(length) => Ok(Body::Length(length)),
                None => Err(Reason::HttpFraming.into()),
            },
            // HTTP/1.0 has no transfer codings; servers differ in whether they heed one.
            (None, Some(coding), _, None) if minor == 1 => {
                let is_chunked = coding.eq_ignore_ascii_case(b"chunked");
                is_chunked.then_some(Body::Chunked).ok_or(Reason::HttpFraming.into())
            }
            _ => Err(Reason::HttpFraming.into()),
        }
    }
}

fn parse_length(digits: &[u8]) -> Option<u64> {
    let is_number =
        !digits.is_empty() && digits.len() <= MOST_DIGITS && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// Where in a chunked body (RFC 9112 section 7.1).
#[derive(Clone, Copy)]
enum At {
    /// In a size: its value and its digits.
    Size(u64, usize),
    /// Before the line feed of a size.
    SizeEnd(u64),
    Bytes(u64),
    /// Before the carriage return behind a chunk.
    ChunkEnd,
    /// Before its line feed.
    ChunkEndLf,
    Trailers,
}

/// What the bytes that were taken belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The body.
    Within,
    /// Its trailer section. A server that knows none takes it for a request, so it is held until it is whole.
    Trailers,
    /// They end the body.
    End,
}

/// Follows a chunked body.
pub(super) struct Chunks {
    at: At,
    trailers: Lines,
}

impl Default for Chunks {
    fn default() -> Self {
        Chunks { at: At::Size(0, 0), trailers: Lines::default() }
    }
}

impl Chunks {
    pub(super) fn memory_bytes(&self) -> usize {
        self.trailers.held.capacity()
    }

    /// Takes bytes of the body.
    ///
    /// # Errors
    /// Its end is uncertain.
    pub(super) fn read(&mut self, bytes: &[u8]) -> Result<(usize, Progress), Refusal> {
        let mut n = 0;
        while let Some(byte) = bytes.get(n) {
            match self.at {
                At::Bytes(left) => {
                    let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - n);
                    n += taken;
                    let left = left - taken as u64;
                    self.at = if left == 0 { At::ChunkEnd } else { At::Bytes(left) };
                }
                At::Trailers if n > 0 => break,
                At::Trailers => {
                    let (taken, is_end) = self.trailers.read(bytes, MOST_TRAILER_BYTES)?;
                    if !is_end {
                        return Ok((taken, Progress::Trailers));
                    }
                    check_trailers(&self.trailers.held)?;
                    return Ok((taken, Progress::End));
                }
                _ => {
                    self.at = self.step(*byte).ok_or(Reason::HttpFraming)?;
                    n += 1;
                }
            }
        }
        Ok((n, Progress::Within))
    }

    /// The next place, after a byte between chunks.
    fn step(&self, byte: u8) -> Option<At> {
        match (self.at, byte) {
            (At::Size(size, digits), _)
                if byte.is_ascii_hexdigit() && digits < MOST_CHUNK_DIGITS =>
            {
                let digit = char::from(byte).to_digit(16)?;
                Some(At::Size(size << 4 | u64::from(digit), digits + 1))
            }
            // Servers differ in where a chunk extension ends, so that there may be none.
            (At::Size(size, 1..), b'\r') => Some(At::SizeEnd(size)),
            (At::SizeEnd(0), b'\n') => Some(At::Trailers),
            (At::SizeEnd(size), b'\n') => Some(At::Bytes(size)),
            (At::ChunkEnd, b'\r') => Some(At::ChunkEndLf),
            (At::ChunkEndLf, b'\n') => Some(At::Size(0, 0)),
            _ => None,
        }
    }
}

/// Trailers do not change what the request is (RFC 9110 section 6.5.1).
fn check_trailers(trailers: &[u8]) -> Result<(), Refusal> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_TRAILERS];
    match httparse::parse_headers(trailers, &mut fields) {
        Ok(httparse::Status::Complete((n, fields))) if n == trailers.len() => {
            let forbidden = ["host", "content-length", "transfer-encoding", "upgrade"];
            let is_forbidden = |name: &str| forbidden.iter().any(|f| f.eq_ignore_ascii_case(name));
            match fields.iter().any(|f| is_forbidden(f.name)) {
                true => Err(Reason::HttpFraming.into()),
                false => Ok(()),
            }
        }
        _ => Err(Reason::HttpUnreadable.into()),
    }
}
