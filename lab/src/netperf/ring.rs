//! The buffers that a test sends from and receives into, one after the other, so that the data are
//! not always those that are hot in the cache.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Bytes of one message at most.
pub const MAX_MESSAGE: usize = 4 << 20;
/// Bytes of a ring at most; it is made narrower rather than larger, but for its one buffer.
const MAX_RING: usize = 8 << 20;
/// Limit of the default size of a message. Messages are by default as large as the socket buffer, as netperf's are. The
/// limit applies if the socket buffer has its default size, too.
pub const LARGEST_DEFAULT: usize = 128 << 10;

/// Bytes per send or receive by default: the socket buffer, as for netperf, but at most [`LARGEST_DEFAULT`] if the
/// buffer has its default size.
pub fn default_bytes(buffer: usize, is_asked_for: bool) -> usize {
    let most = if is_asked_for { MAX_MESSAGE } else { LARGEST_DEFAULT };
    if buffer == 0 { 4096 } else { buffer.min(most) }
}

/// Buffers, used in turn.
#[derive(Debug)]
pub struct Ring {
    buffers: Vec<Vec<u8>>,
    at: usize,
}

impl Ring {
    /// `width` buffers of `bytes` bytes; a width of 0: one more than the socket buffer holds, at
    /// least two.
    ///
    /// # Errors
    /// `InvalidInput`: a message is larger than [`MAX_MESSAGE`].
    pub fn new(width: usize, bytes: usize, socket_buffer: usize) -> io::Result<Ring> {
        if bytes > MAX_MESSAGE {
            let what = format!("a message of {bytes} bytes exceeds the maximum of {MAX_MESSAGE}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let wanted = if width == 0 {
            (socket_buffer / bytes.max(1)).saturating_add(1).max(2)
        } else {
            width
        };
        let width = wanted.clamp(1, (MAX_RING / bytes.max(1)).clamp(1, 4096));
        Ok(Ring { buffers: vec![vec![0; bytes]; width], at: 0 })
    }

    /// Fills the ring for sending: from a file, again and again, or with a pattern that is never
    /// the same in two buffers.
    ///
    /// # Errors
    /// The file cannot be read or is empty.
    pub fn filled(mut self, file: Option<&Path>) -> io::Result<Ring> {
        let source = match file {
            Some(path) => first_bytes(path, MAX_RING)?,
            None => {
                (0..64u32 << 10).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_be_bytes()).collect()
            }
        };
        let mut bytes = source.iter().cycle();
        for to in self.buffers.iter_mut().flatten() {
            *to = bytes.next().copied().unwrap_or_default();
        }
        Ok(self)
    }

    /// The next buffer.
    pub fn advance(&mut self) -> &mut [u8] {
        self.at = (self.at + 1) % self.buffers.len();
        &mut self.buffers[self.at]
    }

    /// How many buffers there are.
    pub fn width(&self) -> usize {
        self.buffers.len()
    }

    /// Bytes of each.
    pub fn bytes(&self) -> usize {
        self.buffers.first().map_or(0, Vec::len)
    }
}

/// Opens a plain file: whatever else has the name could block the reader for ever.
fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || about.len() == 0 {
        let what = format!("{} is empty or not a file", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(file)
}

fn first_bytes(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let file = open_file(path)?;
    let mut bytes = Vec::new();
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_holds_one_message_more_than_the_socket_buffer_and_at_least_two() {
        assert_eq!(Ring::new(0, 1000, 10_000).expect("small").width(), 11);
        assert_eq!(Ring::new(0, 10_000, 1000).expect("small").width(), 2);
        assert_eq!(Ring::new(5, 10, 1000).expect("small").width(), 5);
    }

    #[test]
    fn a_ring_is_bounded_whatever_the_other_side_requests() {
        assert_eq!(Ring::new(usize::MAX, 1, 0).expect("narrowed").width(), 4096);
        assert_eq!(Ring::new(0, 0, usize::MAX).expect("empty").width(), 4096);
        let ring = Ring::new(1000, MAX_MESSAGE, 0).expect("narrowed");
        assert_eq!(ring.width(), MAX_RING / MAX_MESSAGE);
        assert!(Ring::new(1, MAX_MESSAGE + 1, 0).is_err());
    }

    #[test]
    fn buffers_come_in_turn_and_differ() {
        let mut ring = Ring::new(2, 1000, 0).and_then(|r| r.filled(None)).expect("a pattern");
        let (a, b) = (ring.advance().to_vec(), ring.advance().to_vec());
        assert_ne!(a, b);
        assert_eq!(ring.advance(), a);
    }

    #[test]
    fn a_file_fills_the_ring_again_and_again() {
        let path = std::env::temp_dir().join(format!("fulmar-ring-{}", std::process::id()));
        std::fs::write(&path, b"abc").expect("a file");
        let ring = Ring::new(2, 4, 0).and_then(|r| r.filled(Some(&path)));
        std::fs::remove_file(&path).expect("it was there");
        assert_eq!(ring.expect("filled").buffers, [b"abca", b"bcab"]);
    }

    #[test]
    fn directories_and_empty_files_are_refused() {
        assert!(open_file(Path::new("/")).is_err());
        assert!(open_file(Path::new("/dev/null")).is_err());
        assert!(open_file(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn a_message_is_as_large_as_the_buffer_that_was_asked_for() {
        assert_eq!(default_bytes(16 << 10, false), 16 << 10);
        assert_eq!(default_bytes(1 << 20, false), LARGEST_DEFAULT);
        assert_eq!(default_bytes(1 << 20, true), 1 << 20);
        assert_eq!(default_bytes(1 << 30, true), MAX_MESSAGE);
        assert_eq!(default_bytes(0, true), 4096);
    }
}
