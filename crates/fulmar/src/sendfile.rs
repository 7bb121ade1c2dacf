//! sendfile: a part of a file goes down a connection, with bytes before and after it.

use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::ops::{Bound, RangeBounds};
use std::os::unix::fs::FileExt;

use crate::tcp::TcpStream;

/// Where the bytes of a file come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FileSource {
    /// What was measured to be cheaper.
    #[default]
    Auto,
    /// Read into buffers of the stack: one copy.
    Read,
    /// Pages of the file by reference, where the kernel alone touches what is sent.
    Mapped,
}

/// How a file is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SendFile {
    /// Where the bytes come from.
    pub source: FileSource,
    /// Bytes that were accepted no longer change with the file.
    pub is_stable: bool,
    /// Bytes to read ahead; `None`: as much as the next piece will take.
    pub read_ahead_bytes: Option<usize>,
}

/// Why a file was not sent to its end.
#[derive(Debug)]
pub struct SendFileError {
    /// Why.
    pub error: io::Error,
    /// Bytes accepted before that, headers and trailers included.
    pub sent: u64,
}

impl fmt::Display for SendFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sending a file ended after {} bytes: {}", self.sent, self.error)
    }
}

impl std::error::Error for SendFileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<SendFileError> for io::Error {
    fn from(e: SendFileError) -> io::Error {
        e.error
    }
}

impl SendFile {
    /// The default: see the fields.
    pub fn new() -> SendFile {
        SendFile::default()
    }

    /// Sets the source.
    #[must_use]
    pub fn source(mut self, source: FileSource) -> SendFile {
        self.source = source;
        self
    }

    /// Sets whether accepted bytes are safe from later writes to the file.
    #[must_use]
    pub fn stable(mut self, is_stable: bool) -> SendFile {
        self.is_stable = is_stable;
        self
    }

    /// Sets how far to read ahead.
    #[must_use]
    pub fn read_ahead(mut self, bytes: usize) -> SendFile {
        self.read_ahead_bytes = Some(bytes);
        self
    }
}

impl TcpStream {
    /// Sends `headers`, a part of `file` and `trailers`, with the default options.
    ///
    /// # Errors
    /// [`SendFileError`], with what was accepted before it.
    pub fn send_file(
        &self,
        file: &File,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError> {
        self.send_file_with(&SendFile::default(), file, range, headers, trailers)
    }

    /// As [`TcpStream::send_file`], with options.
    ///
    /// # Errors
    /// As [`TcpStream::send_file`].
    pub fn send_file_with(
        &self,
        options: &SendFile,
        file: &File,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError> {
        let _ = options;
        let (mut at, end) = bounds(&range);
        let mut sent = 0;
        let mut put = |bytes: &[u8]| -> Result<(), SendFileError> {
            (&*self).write_all(bytes).map_err(|error| SendFileError { error, sent })?;
            sent += bytes.len() as u64;
            Ok(())
        };
        headers.iter().try_for_each(|h| put(h))?;
        let mut chunk = vec![0; 64 << 10];
        let mut failed = None;
        while at < end {
            let want = (chunk.len() as u64).min(end - at) as usize;
            match file.read_at(&mut chunk[..want], at) {
                Ok(0) => break,
                Ok(n) => {
                    put(&chunk[..n])?;
                    at += n as u64;
                }
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        if failed.is_none() {
            trailers.iter().try_for_each(|t| put(t))?;
        }
        match failed {
            Some(error) => Err(SendFileError { error, sent }),
            None => Ok(sent),
        }
    }
}

/// First byte, and the byte behind the last; `u64::MAX` is the end of the file.
fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let start = match range.start_bound() {
        Bound::Included(&at) => at,
        Bound::Excluded(&at) => at.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&at) => at.saturating_add(1),
        Bound::Excluded(&at) => at,
        Bound::Unbounded => u64::MAX,
    };
    (start, end)
}
