//! The file that file benches send: unnamed, so that nothing stays behind, in the page cache.
//!
//! *Hot*: the same part again and again, which stays in the CPU's caches. *Cold*: one part after the
//! other through a file much larger than the caches, so that every page comes from memory; the page
//! cache holds all of it in either case, and no disk is involved.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// Which bytes of a file are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheState {
    /// The same ones again and again.
    Hot,
    /// One after the other through the whole file, and again from its start.
    Cold,
}

impl CacheState {
    /// The name in cells and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            CacheState::Hot => "hot",
            CacheState::Cold => "cold",
        }
    }
}

/// Bytes of the file: several times the caches of today's servers.
pub const FILE_BYTES: u64 = 512 << 20;

/// A file to send, and where in it the next call starts.
#[derive(Debug)]
pub struct BenchFile {
    file: File,
    bytes: u64,
}

impl BenchFile {
    /// Makes a file of [`FILE_BYTES`] with a pattern in it.
    ///
    /// # Errors
    /// The directory for temporary files has no room; the error says where that is.
    pub fn new() -> io::Result<BenchFile> {
        BenchFile::with_bytes(FILE_BYTES)
    }

    /// Makes a file of `bytes`.
    ///
    /// # Errors
    /// As [`BenchFile::new`].
    pub fn with_bytes(bytes: u64) -> io::Result<BenchFile> {
        let dir = std::env::temp_dir();
        let said = |e: io::Error| {
            let what = format!(
                "cannot create a file of {} MiB in {}: {e}; set TMPDIR to another directory",
                bytes >> 20,
                dir.display()
            );
            io::Error::new(e.kind(), what)
        };
        let mut file = unnamed(&dir).map_err(said)?;
        let chunk: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
        let mut left = bytes;
        while left > 0 {
            let n = left.min(chunk.len() as u64);
            file.write_all(&chunk[..n as usize]).map_err(said)?;
            left -= n;
        }
        Ok(BenchFile { file, bytes })
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a child of this process finds it.
    pub fn path_for_children(&self) -> PathBuf {
        path_for_others(&self.file)
    }
}

/// By which other processes open a file of this one, which need not have a name.
pub(crate) fn path_for_others(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// A file without a name, in `dir`: gone when it is closed.
pub(crate) fn unnamed(dir: &std::path::Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.clone().custom_flags(libc::O_TMPFILE).open(dir) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = dir.join(format!("fulmar-bench-{}", std::process::id()));
            let file = options.create_new(true).open(&path)?;
            std::fs::remove_file(&path)?;
            Ok(file)
        }
        other => other,
    }
}

/// Where in a file the next call starts.
#[derive(Clone, Copy, Debug)]
pub struct FileCursor {
    heat: CacheState,
    file_bytes: u64,
    at: u64,
}

impl FileCursor {
    /// A cursor at the start of a file of `file_bytes`.
    pub fn new(heat: CacheState, file_bytes: u64) -> FileCursor {
        FileCursor { heat, file_bytes, at: 0 }
    }

    /// The start of the next `bytes`.
    pub fn next(&mut self, bytes: u64) -> u64 {
        if self.heat == CacheState::Hot || self.at + bytes > self.file_bytes {
            self.at = 0;
        }
        let start = self.at;
        self.at += bytes;
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_cold_walk_goes_through_the_file_and_starts_again() {
        let mut cold = FileCursor::new(CacheState::Cold, 10);
        assert_eq!([cold.next(4), cold.next(4), cold.next(4), cold.next(4)], [0, 4, 0, 4]);
        let mut hot = FileCursor::new(CacheState::Hot, 10);
        assert_eq!([hot.next(4), hot.next(4)], [0, 0]);
    }

    #[test]
    fn the_file_has_its_bytes_and_children_can_open_it() {
        let made = BenchFile::with_bytes(5000).expect("a temporary file");
        let again = File::open(made.path_for_children()).expect("by its descriptor");
        let mut bytes = [0; 2];
        again.read_exact_at(&mut bytes, 4998).expect("two bytes");
        assert_eq!((bytes, made.bytes()), ([(4998 % 251) as u8, (4999 % 251) as u8], 5000));
        assert!(again.read_exact_at(&mut bytes, 4999).is_err());
    }
}
