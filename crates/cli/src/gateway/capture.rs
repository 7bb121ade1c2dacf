//! The file of `--pcap`. Where it cannot be written any more, as on a full disk, that is said once, the file ends
//! with its last whole block, and the traffic goes on.

use std::fs::File;
use std::io::{self, Write};

use super::log::Log;

/// A file that gets whole blocks by [`Write::write_all`].
pub struct CaptureFile {
    file: File,
    log: Log,
    whole_bytes: u64,
}

impl CaptureFile {
    /// A capture in an empty file.
    pub fn new(file: File, log: &Log) -> CaptureFile {
        CaptureFile { file, log: log.clone(), whole_bytes: 0 }
    }
}

impl Write for CaptureFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn write_all(&mut self, blocks: &[u8]) -> io::Result<()> {
        let written = self.file.write_all(blocks);
        match &written {
            Ok(()) => self.whole_bytes += blocks.len() as u64,
            Err(e) => {
                self.log.fail(&format!("the capture ends: {e}; the traffic goes on"));
                // A pipe keeps what it has.
                let _ = self.file.set_len(self.whole_bytes);
            }
        }
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
