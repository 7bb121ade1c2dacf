//! sendfile: sends a part of a file, with headers and trailers.
//!
//! ```text
//!   one turn   size of the file ─► wait until half the buffer is free ─► reserve ─► fill ─► one output
//!                                                    headers │ one read into the whole chain │ trailers
//! ```
//!
//! Each turn commits whole pages with one run of `tcp::output`, so that frames of 64 KiB are sent. The file is read
//! without the shard lock, directly into the buffers that are sent: one copy, no page faults, and no SIGBUS when the
//! file shrinks. Bytes that are not in the page cache are read ahead while the previous turn is sent; on a non-blocking
//! socket a thread reads them ([`reader`]).
//!
//! Between two turns the call holds the send lock and the raised low-water mark of the socket; it releases both however
//! it ends. Source: `kern_sendfile` of FreeBSD (2006 and 2016).

use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::{Bound, RangeBounds};

use crate::api::tcp::TcpStream;

mod call;
pub(crate) mod reader;
mod source;

/// How a file is sent; the default is right for most.
///
/// ```no_run
/// # use fulmar::TcpStream;
/// use fulmar::zero_copy::{SendFile, ZeroCopy};
/// # fn send(stream: &TcpStream) -> std::io::Result<()> {
/// let file = std::fs::File::open("big")?;
/// let sent = stream.send_file_with(&SendFile::new().read_ahead(1 << 20), &file, .., &[], &[])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SendFile {
    /// Bytes to read ahead when the file is not in the page cache; `None`: twice the bytes of the last turn. 0: none.
    pub read_ahead_bytes: Option<u64>,
}

/// Why a file was not sent to its end.
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
/// # drop((peer, listener));
/// let directory = std::fs::File::open("/")?;
/// let refused = stream.send_file(&directory, .., &[], &[]).unwrap_err();
/// println!("{} bytes were accepted; {}", refused.sent, refused.error);
/// assert_eq!(refused.error.kind(), std::io::ErrorKind::IsADirectory);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct SendFileError {
    /// The error.
    pub error: io::Error,
    /// Bytes accepted before, headers and trailers included. They are sent if the connection lasts; another call can
    /// send the rest.
    pub sent: u64,
}

impl fmt::Display for SendFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot send the file after {} bytes: {}", self.sent, self.error)
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

    /// Sets how far to read ahead, in bytes.
    #[must_use]
    pub fn read_ahead(mut self, bytes: u64) -> SendFile {
        self.read_ahead_bytes = Some(bytes);
        self
    }
}

impl TcpStream {
    /// See [`ZeroCopy::send_file`](crate::zero_copy::ZeroCopy::send_file).
    pub(crate) fn send_range(
        &self,
        options: &SendFile,
        file: &File,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError> {
        let (start, end) = bounds(&range);
        let refused = |error| SendFileError { error, sent: 0 };
        let source = source::Source::open(file, start, end).map_err(refused)?;
        call::Call::new(&self.socket, options, source, headers, trailers).run()
    }
}

/// The first byte, and the byte after the last; `None`: the end of the file.
fn bounds(range: &impl RangeBounds<u64>) -> (u64, Option<u64>) {
    let start = match range.start_bound() {
        Bound::Included(&at) => at,
        Bound::Excluded(&at) => at.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&at) => Some(at.saturating_add(1)),
        Bound::Excluded(&at) => Some(at),
        Bound::Unbounded => None,
    };
    (start, end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_every_shape_are_understood() {
        assert_eq!(bounds(&(..)), (0, None));
        assert_eq!(bounds(&(5..)), (5, None));
        assert_eq!(bounds(&(5..9)), (5, Some(9)));
        assert_eq!(bounds(&(5..=9)), (5, Some(10)));
        assert_eq!(bounds(&(..=u64::MAX)), (0, Some(u64::MAX)));
        assert_eq!(bounds(&(Bound::Excluded(4), Bound::Excluded(9))), (5, Some(9)));
    }

    #[test]
    fn the_error_has_the_count_and_the_cause() {
        let error = io::Error::from_raw_os_error(5);
        let text = SendFileError { error, sent: 17 }.to_string();
        assert!(text.starts_with("cannot send the file after 17 bytes: "), "{text}");
        assert!(text.contains("os error 5"), "{text}");
    }
}
