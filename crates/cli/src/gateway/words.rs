//! What a gateway says on its standard error, on the way to that of its watcher.
//!
//! A write never waits for the reader of standard error: while it is full the watcher notices the end of the gateway and
//! that of the program all the same. What has no room when the gateway ends is dropped.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Bytes that are passed on at a time: as long as a pipe takes whole.
const PIECE_BYTES: usize = 4096;

/// What one wait has brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Came {
    /// Words have been read or passed on.
    Words,
    /// The other descriptor can be read, and there is nothing to do for the words.
    Other,
    /// The gateway has no standard error any more: it has ended.
    End,
}

/// The words of a gateway.
pub struct Words {
    from: File,
    to: File,
    /// Read, and not yet passed on.
    piece: Vec<u8>,
}

impl Words {
    /// Those that come from a pipe, to standard error.
    ///
    /// # Errors
    /// No descriptor.
    pub fn to_stderr(from: impl Into<OwnedFd>) -> io::Result<Words> {
        Ok(Words::between(from, without_waiting(io::stderr().as_fd())?))
    }

    /// Those that come from a pipe, to a descriptor whose writes do not wait.
    pub fn between(from: impl Into<OwnedFd>, to: File) -> Words {
        Words { from: File::from(from.into()), to, piece: Vec::new() }
    }

    /// Waits for words, for room for those that were read, or until another descriptor can be read.
    ///
    /// # Errors
    /// Those of poll(2) and of the pipe.
    pub fn turn(&mut self, other: Option<BorrowedFd<'_>>) -> io::Result<Came> {
        let is_waiting = !self.piece.is_empty();
        let wanted = if is_waiting { PollFlags::empty() } else { PollFlags::POLLIN };
        let mut ready = vec![PollFd::new(self.from.as_fd(), wanted)];
        ready.extend(is_waiting.then(|| PollFd::new(self.to.as_fd(), PollFlags::POLLOUT)));
        ready.extend(other.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        match poll(&mut ready, PollTimeout::NONE) {
            Err(nix::Error::EINTR) => return Ok(Came::Words),
            polled => polled?,
        };
        let is_ready = |at: usize| ready.get(at).is_some_and(|one| one.any().unwrap_or(false));
        match (is_ready(0), is_waiting) {
            (_, true) if is_ready(1) => {
                self.write();
                Ok(Came::Words)
            }
            (true, true) => Ok(Came::End),
            (true, false) => self.read(),
            (false, _) => Ok(Came::Other),
        }
    }

    fn read(&mut self) -> io::Result<Came> {
        let mut piece = [0; PIECE_BYTES];
        match self.from.read(&mut piece) {
            Ok(0) => return Ok(Came::End),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            came => self.piece.extend_from_slice(&piece[..came?]),
        }
        Ok(Came::Words)
    }

    fn write(&mut self) {
        match self.to.write(&self.piece) {
            Ok(bytes) => drop(self.piece.drain(..bytes)),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // Standard error of the program may be closed.
            Err(_) => self.piece.clear(),
        }
    }

    /// Writes a last sentence after the gateway's end, which waits for room until the end of the program.
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn end_with(&mut self, sentence: &str, program: &OwnedFd) -> io::Result<()> {
        self.piece.extend_from_slice(sentence.as_bytes());
        while !self.piece.is_empty() {
            let mut ready = [
                PollFd::new(self.to.as_fd(), PollFlags::POLLOUT),
                PollFd::new(program.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut ready, PollTimeout::NONE) {
                Err(nix::Error::EINTR) => continue,
                polled => polled?,
            };
            if !ready[0].any().unwrap_or(false) {
                return Ok(());
            }
            self.write();
        }
        Ok(())
    }

    /// Passes on what is left until the gateway ends.
    ///
    /// # Errors
    /// As [`Words::turn`].
    pub fn finish(&mut self) -> io::Result<()> {
        while self.turn(None)? != Came::End {}
        Ok(())
    }

    /// Closes standard error, and reads on until the gateway ends.
    ///
    /// # Errors
    /// Those of the pipe, or /dev/null cannot be opened.
    pub fn discard(&mut self) -> io::Result<()> {
        let null = OpenOptions::new().write(true).open("/dev/null")?;
        nix::unistd::dup2_stderr(&null)?;
        self.to = null;
        io::copy(&mut self.from, &mut io::sink()).map(drop)
    }
}

/// A descriptor for the same pipe or terminal whose writes do not wait. The one that is given is shared with the program,
/// for which it stays as it is. A file never waits; a socket is shared, too, and written to when it has room.
fn without_waiting(fd: BorrowedFd<'_>) -> io::Result<File> {
    let shared = File::from(fd.try_clone_to_owned()?);
    let kind = shared.metadata()?.file_type();
    if !kind.is_fifo() && !kind.is_char_device() {
        return Ok(shared);
    }
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let path = format!("/proc/self/fd/{}", shared.as_raw_fd());
    let own = OpenOptions::new().write(true).custom_flags(flags.bits()).open(path);
    // One of another user cannot be opened again.
    Ok(own.unwrap_or(shared))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom};

    fn pipe() -> (File, File) {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        (File::from(reader), File::from(writer))
    }

    /// A pipe with no room, and its writing end whose writes do not wait.
    fn full() -> (File, File) {
        let (reader, shared) = pipe();
        let mut writer = without_waiting(shared.as_fd()).unwrap();
        let error = loop {
            if let Err(e) = writer.write(&[b'.'; PIECE_BYTES]) {
                break e;
            }
        };
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        (reader, writer)
    }

    #[test]
    fn the_ends_of_the_gateway_and_of_the_program_are_heard_while_standard_error_is_full() {
        let (_unread, to) = full();
        let (from, mut gateway) = pipe();
        let (program, alive) = pipe();
        let mut words = Words::between(from, to);
        gateway.write_all(b"one\n").unwrap();
        assert_eq!(words.turn(Some(program.as_fd())).unwrap(), Came::Words);
        drop(alive);
        assert_eq!(words.turn(Some(program.as_fd())).unwrap(), Came::Other);
        words.end_with("last\n", &program.into()).unwrap();
        gateway.write_all(b"two\n").unwrap();
        drop(gateway);
        assert_eq!(words.turn(None).unwrap(), Came::End);
    }

    #[test]
    fn what_has_no_room_is_passed_on_when_there_is_room() {
        let (mut reader, to) = full();
        let (from, mut gateway) = pipe();
        let (program, _alive) = pipe();
        let mut words = Words::between(from, to);
        gateway.write_all(b"one\n").unwrap();
        assert_eq!(words.turn(None).unwrap(), Came::Words);
        reader.read_exact(&mut vec![0; 2 * PIECE_BYTES]).unwrap();
        assert_eq!(words.turn(None).unwrap(), Came::Words);
        drop(gateway);
        assert_eq!(words.turn(None).unwrap(), Came::End);
        words.end_with("last\n", &program.into()).unwrap();
        drop(words);
        let mut came = Vec::new();
        reader.read_to_end(&mut came).unwrap();
        assert!(came.ends_with(b".one\nlast\n"));
    }

    #[test]
    fn words_for_a_standard_error_that_is_closed_are_dropped() {
        let (reader, to) = full();
        drop(reader);
        let (from, mut gateway) = pipe();
        let mut words = Words::between(from, to);
        gateway.write_all(b"one\n").unwrap();
        assert_eq!(words.turn(None).unwrap(), Came::Words);
        assert_eq!(words.turn(None).unwrap(), Came::Words);
        drop(gateway);
        assert_eq!(words.turn(None).unwrap(), Came::End);
    }

    #[test]
    fn a_file_goes_on_where_the_program_writes() {
        let path = std::env::temp_dir().join(format!("fulmar-words-{}", std::process::id()));
        let mut shared =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        shared.write_all(b"program\n").unwrap();
        without_waiting(shared.as_fd()).unwrap().write_all(b"gateway\n").unwrap();
        shared.write_all(b"program\n").unwrap();
        shared.seek(SeekFrom::Start(0)).unwrap();
        let mut all = String::new();
        shared.read_to_string(&mut all).unwrap();
        assert_eq!(all, "program\ngateway\nprogram\n");
    }
}
