//! sendfile: a part of a file goes down a connection, with bytes before and after it.
//!
//! ```text
//!   outer loop   size of the file ─► wait until half the buffer is free ─► one chain ─► one output
//!   inner loop                       headers │ one read into the whole chain │ trailers
//! ```
//!
//! Enters: a file and where to begin and end in it. Leaves: one commit per turn, each a run of whole
//! pages and one pass of `tcp::output`, so that frames of 64 KiB go out. The file is read outside
//! the stack's lock, straight into the buffers that are sent: one copy, no page faults, and no signal
//! when the file shrinks. What is not in memory yet is read ahead while the connection is busy with
//! the piece before; on a non-blocking socket it is claimed and read by a thread ([`reader`]).
//!
//! Owns between two turns: the writer's turn of the socket and its raised low-water mark, which are
//! given back however the call ends. Source: `kern_sendfile` of FreeBSD (2006 and 2016).

use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::{Bound, RangeBounds};

use crate::tcp::TcpStream;

mod call;
mod mapped;
pub(crate) mod reader;
mod source;

pub use mapped::MappedFile;

/// Where the bytes of a file come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum FileSource {
    /// What was measured to be cheaper: the pages of a [`MappedFile`] by reference where they can go
    /// so, else [`FileSource::Read`].
    #[default]
    Auto,
    /// Read into buffers of the stack: one copy.
    Read,
}

/// How a file is sent; the default is right for most.
///
/// ```no_run
/// # use fulmar::{FileSource, SendFile, TcpStream};
/// # fn send(stream: &TcpStream) -> std::io::Result<()> {
/// let file = std::fs::File::open("big")?;
/// let sent = stream.send_file_with(&SendFile::new().stable(true), &file, .., &[], &[])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SendFile {
    /// Where the bytes come from.
    pub source: FileSource,
    /// Bytes that were accepted no longer change with the file. The cost: on a non-blocking socket
    /// the call itself waits for the disk.
    pub is_stable: bool,
    /// Bytes of the file to read ahead of what is being sent, when it is not in memory; `None`:
    /// twice what went last. 0: none.
    pub read_ahead_bytes: Option<u64>,
}

/// Why a file was not sent to its end.
pub struct SendFileError {
    /// Why.
    pub error: io::Error,
    /// Bytes accepted before that, headers and trailers included: they will be sent if the
    /// connection lasts, and the rest may be tried again from there.
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

    /// Sets how far to read ahead, in bytes.
    #[must_use]
    pub fn read_ahead(mut self, bytes: u64) -> SendFile {
        self.read_ahead_bytes = Some(bytes);
        self
    }
}

impl TcpStream {
    /// Sends `headers`, the bytes of `file` in `range`, and `trailers`, as one write: nothing of
    /// another writer comes between. Returns how many bytes were accepted, headers and trailers
    /// included; as with a write, acceptance is not delivery.
    ///
    /// The position of the file is neither used nor moved. A range without an end goes to where the
    /// file ends when its last byte is taken, so a file that grows meanwhile is followed; a range
    /// with an end stops at the latest where the file ended when the call began. A file that ends
    /// earlier, or shrinks meanwhile, is a short success. Holes are sent as zeroes. Headers and
    /// trailers go also with an empty file.
    ///
    /// What the file holds is read once, when its bytes are accepted; writes to the file after the
    /// call are not seen, not even when bytes are sent again. The exception, which
    /// [`SendFile::stable`] turns off: on a non-blocking socket what is not in memory is accepted
    /// first and read a little later.
    ///
    /// A call waits until half of the send buffer is free, or until the rest fits, before it goes
    /// on; the write time-out applies to each wait.
    ///
    /// # Errors
    /// [`SendFileError`], with what was accepted before it. `WouldBlock`: the socket is non-blocking
    /// (then a call goes on where a write would: it does not wait for half the buffer), or the
    /// time-out passed; try again with the rest. `InvalidInput`: the range ends before it begins. `IsADirectory`; `NotSeekable`: the file is a
    /// pipe or a socket. Those of reading the file: what was read before is accepted. If a piece
    /// that was accepted before it was read cannot be read, the connection is reset and later calls
    /// say EIO. Otherwise as `write`.
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
        let (start, end) = bounds(&range);
        let refused = |error| SendFileError { error, sent: 0 };
        let source = source::Source::open(file, start, end).map_err(refused)?;
        call::Call::new(&self.socket, options, source, headers, trailers).run()
    }

    /// As [`TcpStream::send_file_with`], from a file that is kept mapped: its pages go to the kernel by
    /// reference where the kernel alone touches what the device sends, that is on a TAP and on
    /// AF_PACKET with all offloads, unless a wrapper (capture, faults) stands before it. Where they
    /// cannot go so they are read, and nothing else is different; `sendfile_mapped_bytes` counts those
    /// that went by reference. Read are also: pieces of less than 16 KiB, a connection to the stack
    /// itself, with [`SendFile::stable`] or [`FileSource::Read`] everything, and on a non-blocking
    /// socket what no blocking call has sent before, since nobody knows whether it is in memory.
    ///
    /// What goes by reference is the file's until the peer has it: later writes to the file change what
    /// was accepted but not yet sent, and what is sent again. If the file is cut below bytes that were
    /// accepted and not yet sent (or they cannot be read from the disk), the connection is reset and its
    /// user told EIO; what lies behind the new end on its last page is zeroes, if that page was accepted
    /// before. The kernel's own sendfile has the same races. Pages that the kernel has taken out of
    /// memory meanwhile are waited for while they are sent, which holds up the stack.
    ///
    /// # Errors
    /// As [`TcpStream::send_file`]; EIO as above.
    pub fn send_mapped(
        &self,
        options: &SendFile,
        file: &MappedFile,
        range: impl RangeBounds<u64>,
        headers: &[IoSlice<'_>],
        trailers: &[IoSlice<'_>],
    ) -> Result<u64, SendFileError> {
        let (start, end) = bounds(&range);
        let refused = |error| SendFileError { error, sent: 0 };
        let source = source::Source::open(file.file(), start, end).map_err(refused)?;
        let reads = options.is_stable || options.source == FileSource::Read;
        let call = call::Call::new(&self.socket, options, source, headers, trailers);
        if reads { call.run() } else { call.by_pages_of(file).run() }
    }
}

/// First byte, and the byte behind the last; `None` is the end of the file.
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
    fn the_error_tells_the_count_and_the_cause() {
        let error = io::Error::from_raw_os_error(5);
        let text = SendFileError { error, sent: 17 }.to_string();
        assert!(text.starts_with("sending a file ended after 17 bytes: "), "{text}");
        assert!(text.contains("os error 5"), "{text}");
    }
}
