//! The part of a file that a call sends: its position and end, and whether it is in the page cache.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;

use crate::runtime::file::{self, End, Patience};
use fulmar_stack::mbuf::Chain;

use crate::api::error::invalid;

/// Bytes per read of a file whose size is not known.
const UNSIZED_STEP_BYTES: u64 = 64 << 10;

/// The kinds of reads that the file supports, as far as is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reads {
    /// Also reads that do not wait.
    Both,
    /// Only reads that may wait.
    Waiting,
}

/// A file, and the part of it that is still to be sent.
pub(super) struct Source<'a> {
    file: &'a File,
    /// The next byte.
    at: u64,
    /// The byte after the last; `None`: the end of the file.
    end: Option<u64>,
    /// The file has a size; false for files of procfs and devices.
    is_sized: bool,
    /// The end of the file was reached.
    is_over: bool,
    reads: Reads,
    /// The last read found bytes that are not in the page cache.
    pub is_cold: bool,
}

impl<'a> Source<'a> {
    /// A range of a file.
    ///
    /// # Errors
    /// It is a directory or not seekable, or its metadata cannot be read.
    pub(super) fn open(file: &'a File, at: u64, end: Option<u64>) -> io::Result<Source<'a>> {
        if end.is_some_and(|e| e < at) {
            return Err(invalid(format!("the range ends before its start at byte {at}")));
        }
        let about = file.metadata()?;
        let kind = about.file_type();
        if kind.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if kind.is_fifo() || kind.is_socket() {
            return Err(io::Error::new(
                io::ErrorKind::NotSeekable,
                "a pipe or a socket has no file offset; copy it with std::io::copy",
            ));
        }
        let is_sized = kind.is_file() && about.len() > 0;
        // A range with an end does not follow a file that grows.
        let end = end.map(|e| if is_sized { e.min(about.len()) } else { e });
        let reads = Reads::Both;
        Ok(Source { file, at, end, is_sized, is_over: false, reads, is_cold: false })
    }

    /// The next byte.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Bytes that are left, as far as is known. Reads the size of the file again.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub(super) fn left(&self) -> io::Result<u64> {
        if self.is_over || self.end.is_some_and(|end| end <= self.at) {
            return Ok(0);
        }
        let asked = self.end.map_or(u64::MAX, |end| end - self.at);
        if !self.is_sized {
            return Ok(asked.min(UNSIZED_STEP_BYTES));
        }
        Ok(self.file.metadata()?.len().saturating_sub(self.at).min(asked))
    }

    /// Whether [`Source::left`] is exact, unless the file changes.
    pub(super) fn knows_its_end(&self) -> bool {
        self.is_sized || self.is_over
    }

    /// Reads into bytes [skip, skip + len) of a chain and advances; returns how many. `Wait` waits for the disk only if
    /// no byte is in the page cache: cached bytes are returned first.
    pub(super) fn fill(
        &mut self,
        chain: &mut Chain,
        skip: usize,
        len: usize,
        patience: Patience,
    ) -> (usize, End) {
        let (n, end) = match self.read(chain, skip, len, Patience::InMemory) {
            (0, End::NotInMemory) if patience == Patience::Wait => {
                self.read(chain, skip, len, Patience::Wait)
            }
            (n, End::MustWait) => {
                let (more, end) = self.read(chain, skip + n, len - n, Patience::Wait);
                (n + more, end)
            }
            other => other,
        };
        self.at += n as u64;
        self.is_over |= n == 0 && matches!(end, End::OfFile);
        (n, end)
    }

    fn read(
        &mut self,
        chain: &mut Chain,
        skip: usize,
        len: usize,
        patience: Patience,
    ) -> (usize, End) {
        if patience == Patience::InMemory && self.reads == Reads::Waiting {
            return (0, End::MustWait);
        }
        let (n, end) = file::read_into(self.file.as_fd(), self.at, chain, skip, len, patience);
        match (patience, &end) {
            (Patience::InMemory, End::MustWait) => self.reads = Reads::Waiting,
            (Patience::InMemory, _) => self.is_cold = matches!(end, End::NotInMemory),
            (Patience::Wait, _) => {}
        }
        (n, end)
    }

    /// A duplicate descriptor of the file, for the reader thread.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(super) fn duplicate(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Skips `n` bytes that another thread reads.
    pub(super) fn skip(&mut self, n: usize) {
        self.at += n as u64;
    }

    /// Starts read-ahead of the next bytes.
    pub(super) fn read_ahead(&self, bytes: u64) {
        let asked = self.end.map_or(u64::MAX, |end| end.saturating_sub(self.at));
        file::read_ahead(self.file.as_fd(), self.at, bytes.min(asked));
    }
}
