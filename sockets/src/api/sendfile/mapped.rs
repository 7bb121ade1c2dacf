//! Files whose pages are sent by reference.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::runtime::file::{FileMap, MAX_MAP_BYTES, Patience};
use fulmar_stack::mbuf::SharedBytes;

/// Bytes at most per turn: enough for the largest frames, and few enough that the first bytes of a file on disk are
/// sent soon.
const STEP_BYTES: u64 = 1 << 20;

/// A file that stays mapped, to be sent often: its pages are sent by reference, without the copy of
/// [`TcpStream::send_file`](crate::api::TcpStream::send_file).
///
/// Any number of connections, threads and stacks may send from one. To map and unmap a file for one send costs as much
/// as to copy it. It keeps the file open and its first 64 GiB mapped, read-only and shared; bytes after that are read
/// and copied. A file that outgrows its mapping is mapped again, and the old mapping is unmapped when none of its pages
/// is in flight.
///
/// No code of this process reads the mapping, so a truncated file raises no SIGBUS.
/// [`TcpStream::send_mapped`](crate::api::TcpStream::send_mapped) describes the other effects.
pub struct MappedFile {
    file: File,
    map: Mutex<Arc<FileMap>>,
}

impl MappedFile {
    /// Maps a file that is open for reading.
    ///
    /// # Errors
    /// It cannot be mapped (a directory, a pipe, most of procfs), is not open for reading, or no
    /// descriptor or address space is left.
    pub fn new(file: &File) -> io::Result<MappedFile> {
        let file = file.try_clone()?;
        let map = FileMap::new(file.as_fd(), file.metadata()?.len())?;
        Ok(MappedFile { file, map: Mutex::new(Arc::new(map)) })
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The bytes from `at` on, at most `left`, that can be sent by reference: their owner, and how many they are.
    pub(super) fn pages(
        &self,
        at: u64,
        left: u64,
        patience: Patience,
    ) -> Option<(Arc<dyn SharedBytes>, u64)> {
        let size = self.file.metadata().ok()?.len();
        let end = at.saturating_add(left.min(STEP_BYTES)).min(size);
        let map = self.map_to(end)?;
        let n = map.ready(at, end.saturating_sub(at), size, patience);
        Some((map, n))
    }

    /// The mapping, replaced by a longer one if it does not reach `end`.
    fn map_to(&self, end: u64) -> Option<Arc<FileMap>> {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        if end > map.bytes() && map.bytes() < MAX_MAP_BYTES {
            *map = Arc::new(FileMap::new(self.file.as_fd(), end).ok()?);
        }
        Some(Arc::clone(&map))
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedFile").field("file", &self.file).finish_non_exhaustive()
    }
}
