//! Files whose pages go by reference.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_mbuf::SharedBytes;
use fulmar_runtime::file::{FileMap, MAX_MAP_BYTES, Patience};

/// What one turn takes at most: enough for the largest frames, and little enough that the first of a
/// file from the disk goes soon.
const STEP_BYTES: u64 = 1 << 20;

/// A file that is kept mapped, to be sent often: its pages go to the kernel by reference, without the
/// copy into the stack's buffers that [`TcpStream::send_file`](crate::TcpStream::send_file) makes.
///
/// Make it once and share it: any number of connections, threads and stacks may send from it. Mapping
/// and unmapping a file for one send costs as much as copying it. It keeps the file open and, read-only
/// and shared, the first 64 GiB of it in the address space (what lies behind is read); a file that
/// outgrows its mapping is mapped anew, and an old mapping goes when nothing of it is in flight.
///
/// No code of this process reads through the mapping, so a file that shrinks never raises SIGBUS. What
/// it costs instead is said at [`TcpStream::send_mapped`](crate::TcpStream::send_mapped).
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

    /// The next bytes from `at` on, at most `left`, that can go by reference: their owner, and how
    /// many they are.
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

    /// A mapping that reaches to `end`, or as far as one does.
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
