//! The file of `--pcap`. Where it cannot be written any more, as on a full disk, that is said once, the file ends
//! with its last whole block, and the traffic goes on.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::log::Log;
use super::output;
use crate::failure::{Failure, Outcome};

/// A file that gets whole blocks by [`Write::write_all`]. Its copies, one for each queue of the interface, share it:
/// the file has a section for each. A section header describes only the encoding of the following blocks, which is the
/// same for all (pcapng section 4.1).
#[derive(Clone)]
pub struct CaptureFile(Arc<Mutex<Shared>>);

struct Shared {
    file: File,
    log: Log,
    whole_bytes: u64,
    has_failed: bool,
}

impl CaptureFile {
    /// A capture in a file with mode 0600. A file of another user is refused before it is emptied.
    ///
    /// # Errors
    /// A sentence.
    pub fn create(path: &Path, log: &Log) -> Outcome<CaptureFile> {
        let private = output::open(path, 0o600, false).and_then(|file| {
            if file.metadata()?.is_file() {
                file.set_permissions(Permissions::from_mode(0o600))?;
                file.set_len(0)?;
            }
            Ok(file)
        });
        let file = private.map_err(|e| Failure::file("cannot write", path, &e))?;
        Ok(CaptureFile::new(file, log))
    }

    /// A capture in an empty file.
    fn new(file: File, log: &Log) -> CaptureFile {
        let log = log.clone();
        let shared = Shared { file, log, whole_bytes: 0, has_failed: false };
        CaptureFile(Arc::new(Mutex::new(shared)))
    }

    fn with<T>(&self, f: impl FnOnce(&mut Shared) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Shared {
    fn write_blocks(&mut self, blocks: &[u8]) -> io::Result<()> {
        if self.has_failed {
            return Err(io::Error::other("the capture file is closed"));
        }
        let written = self.file.write_all(blocks);
        match &written {
            Ok(()) => self.whole_bytes += blocks.len() as u64,
            Err(e) => {
                self.has_failed = true;
                self.log.fail(&format!("the capture ended: {e}; the traffic is not affected"));
                // A pipe keeps what it has.
                let _ = self.file.set_len(self.whole_bytes);
            }
        }
        written
    }
}

impl Write for CaptureFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.with(|shared| shared.file.write(bytes))
    }

    fn write_all(&mut self, blocks: &[u8]) -> io::Result<()> {
        self.with(|shared| shared.write_blocks(blocks))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.with(|shared| shared.file.flush())
    }
}
