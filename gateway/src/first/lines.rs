//! The lines of a head of HTTP/1 (RFC 9112 section 2.1), without what servers read differently.

use super::reason::{Reason, Refusal};

/// Most header fields of a head.
pub(super) const MOST_FIELDS: usize = 128;
/// Most empty lines before a request.
const MOST_EMPTY_LINES: usize = 4;
/// The ends of a request line.
const VERSIONS: [&[u8]; 2] = [b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"];

/// Lines that end with an empty one, of strict text.
#[derive(Default)]
pub(super) struct Lines {
    pub held: Vec<u8>,
    /// Bytes of the line so far.
    line_bytes: usize,
    empty_lines: usize,
    /// The next line has to end with a version of HTTP/1.
    needs_version: bool,
}

impl Lines {
    pub(super) fn of_request() -> Self {
        Lines { needs_version: true, ..Lines::default() }
    }

    /// Takes bytes up to the end of the empty line. True: the empty line has ended.
    ///
    /// # Errors
    /// A byte may not be there, or there are too many.
    pub(super) fn read(&mut self, bytes: &[u8], most: usize) -> Result<(usize, bool), Refusal> {
        for (at, byte) in bytes.iter().enumerate() {
            let is_after_cr = self.held.last() == Some(&b'\r');
            let fits = match byte {
                b'\n' => is_after_cr,
                b'\r' => !is_after_cr,
                // A line begins with a method or a name. One that begins with a blank would continue the line before it
                // (obs-fold).
                _ if self.line_bytes == 0 => is_token(*byte) && !is_after_cr,
                b'\t' | b' '..=0x7e | 0x80..=0xff => !is_after_cr,
                _ => false,
            };
            if !fits {
                return Err(Reason::HttpUnreadable.into());
            }
            if self.held.len() >= most {
                return Err(Reason::HttpTooLong.into());
            }
            self.held.push(*byte);
            match byte {
                b'\n' if self.line_bytes == 0 => return Ok((at + 1, true)),
                b'\n' => self.end_line()?,
                b'\r' => {}
                _ => self.line_bytes += 1,
            }
        }
        Ok((bytes.len(), false))
    }

    /// A request line without a version is refused before the fields that some servers read after it.
    fn end_line(&mut self) -> Result<(), Refusal> {
        self.line_bytes = 0;
        let has_version = VERSIONS.iter().any(|version| self.held.ends_with(version));
        if std::mem::take(&mut self.needs_version) && !has_version {
            return Err(Reason::HttpUnreadable.into());
        }
        Ok(())
    }

    pub(super) fn is_empty_line(&self) -> bool {
        self.held == b"\r\n"
    }

    pub(super) fn drop_empty_line(&mut self) -> Result<(), Refusal> {
        self.held.clear();
        self.empty_lines += 1;
        if self.empty_lines > MOST_EMPTY_LINES {
            return Err(Reason::HttpUnreadable.into());
        }
        Ok(())
    }
}

/// A character of a token (RFC 9110 section 5.6.2).
pub(super) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
