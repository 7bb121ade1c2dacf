//! Copies the standard error of a gateway to that of its watcher.
//!
//! A write never blocks: while standard error is full, the watcher still notices the exit of the gateway and that of
//! the program. Output that has no space when the gateway exits is dropped.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Bytes of one write: a pipe writes up to PIPE_BUF bytes atomically (pipe(7)).
const WRITE_BYTES: usize = 4096;

/// The result of one wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// Output was read or written.
    Output,
    /// The other descriptor is readable, and there is no output.
    Other,
    /// The gateway has closed its standard error: it has exited.
    Closed,
}

/// The standard error of a gateway.
pub struct StderrRelay {
    from: File,
    to: File,
    /// Read, and not written yet.
    pending: Vec<u8>,
}

impl StderrRelay {
    /// From a pipe to standard error.
    ///
    /// # Errors
    /// No descriptor.
    pub fn to_stderr(from: impl Into<OwnedFd>) -> io::Result<StderrRelay> {
        Ok(StderrRelay::between(from, non_blocking(io::stderr().as_fd())?))
    }

    /// From a pipe to a descriptor that does not block.
    pub fn between(from: impl Into<OwnedFd>, to: File) -> StderrRelay {
        StderrRelay { from: File::from(from.into()), to, pending: Vec::new() }
    }

    /// Waits for output, for space for that which was read, or until another descriptor is readable.
    ///
    /// # Errors
    /// Those of poll(2) and of the pipe.
    pub fn turn(&mut self, other: Option<BorrowedFd<'_>>) -> io::Result<Woken> {
        let is_waiting = !self.pending.is_empty();
        let wanted = if is_waiting { PollFlags::empty() } else { PollFlags::POLLIN };
        let mut ready = vec![PollFd::new(self.from.as_fd(), wanted)];
        ready.extend(is_waiting.then(|| PollFd::new(self.to.as_fd(), PollFlags::POLLOUT)));
        ready.extend(other.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        match poll(&mut ready, PollTimeout::NONE) {
            Err(nix::Error::EINTR) => return Ok(Woken::Output),
            polled => polled?,
        };
        let is_ready = |at: usize| ready.get(at).is_some_and(|one| one.any().unwrap_or(false));
        match (is_ready(0), is_waiting) {
            (_, true) if is_ready(1) => {
                self.write();
                Ok(Woken::Output)
            }
            (true, true) => Ok(Woken::Closed),
            (true, false) => self.read(),
            (false, _) => Ok(Woken::Other),
        }
    }

    fn read(&mut self) -> io::Result<Woken> {
        let mut piece = [0; WRITE_BYTES];
        match self.from.read(&mut piece) {
            Ok(0) => return Ok(Woken::Closed),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            came => self.pending.extend_from_slice(&piece[..came?]),
        }
        Ok(Woken::Output)
    }

    fn write(&mut self) {
        match self.to.write(&self.pending) {
            Ok(bytes) => drop(self.pending.drain(..bytes)),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // Standard error of the program may be closed.
            Err(_) => self.pending.clear(),
        }
    }

    /// Writes a last sentence after the gateway's exit. It waits for space until the program exits.
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn end_with(&mut self, sentence: &str, program: &OwnedFd) -> io::Result<()> {
        self.pending.extend_from_slice(sentence.as_bytes());
        while !self.pending.is_empty() {
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

    /// Copies what is left until the gateway exits.
    ///
    /// # Errors
    /// As [`StderrRelay::turn`].
    pub fn finish(&mut self) -> io::Result<()> {
        while self.turn(None)? != Woken::Closed {}
        Ok(())
    }

    /// Closes standard error, and discards what the gateway writes until it exits.
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

/// Opens the same pipe or terminal once more with O_NONBLOCK: the given description is shared with the program, which
/// expects it to block. A file never blocks; a socket cannot be opened again, and is written to when it is writable.
fn non_blocking(fd: BorrowedFd<'_>) -> io::Result<File> {
    let shared = File::from(fd.try_clone_to_owned()?);
    let kind = shared.metadata()?.file_type();
    if !kind.is_fifo() && !kind.is_char_device() {
        return Ok(shared);
    }
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let path = format!("/proc/self/fd/{}", shared.as_raw_fd());
    let own = OpenOptions::new().write(true).custom_flags(flags.bits()).open(path);
    // That of another user cannot be opened again.
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
        let mut writer = non_blocking(shared.as_fd()).unwrap();
        let error = loop {
            if let Err(e) = writer.write(&[b'.'; WRITE_BYTES]) {
                break e;
            }
        };
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        (reader, writer)
    }

    #[test]
    fn the_ends_of_the_gateway_and_of_the_program_are_noticed_while_standard_error_is_full() {
        let (_unread, to) = full();
        let (from, mut gateway) = pipe();
        let (program, alive) = pipe();
        let mut relay = StderrRelay::between(from, to);
        gateway.write_all(b"one\n").unwrap();
        assert_eq!(relay.turn(Some(program.as_fd())).unwrap(), Woken::Output);
        drop(alive);
        assert_eq!(relay.turn(Some(program.as_fd())).unwrap(), Woken::Other);
        relay.end_with("last\n", &program.into()).unwrap();
        gateway.write_all(b"two\n").unwrap();
        drop(gateway);
        assert_eq!(relay.turn(None).unwrap(), Woken::Closed);
    }

    #[test]
    fn bytes_that_do_not_fit_are_passed_on_when_there_is_space() {
        let (mut reader, to) = full();
        let (from, mut gateway) = pipe();
        let (program, _alive) = pipe();
        let mut relay = StderrRelay::between(from, to);
        gateway.write_all(b"one\n").unwrap();
        assert_eq!(relay.turn(None).unwrap(), Woken::Output);
        reader.read_exact(&mut vec![0; 2 * WRITE_BYTES]).unwrap();
        assert_eq!(relay.turn(None).unwrap(), Woken::Output);
        drop(gateway);
        assert_eq!(relay.turn(None).unwrap(), Woken::Closed);
        relay.end_with("last\n", &program.into()).unwrap();
        drop(relay);
        let mut came = Vec::new();
        reader.read_to_end(&mut came).unwrap();
        assert!(came.ends_with(b".one\nlast\n"));
    }

    #[test]
    fn output_for_a_standard_error_that_is_closed_is_dropped() {
        let (reader, to) = full();
        drop(reader);
        let (from, mut gateway) = pipe();
        let mut relay = StderrRelay::between(from, to);
        gateway.write_all(b"one\n").unwrap();
        assert_eq!(relay.turn(None).unwrap(), Woken::Output);
        assert_eq!(relay.turn(None).unwrap(), Woken::Output);
        drop(gateway);
        assert_eq!(relay.turn(None).unwrap(), Woken::Closed);
    }

    #[test]
    fn a_file_goes_on_where_the_program_writes() {
        let path = std::env::temp_dir().join(format!("fulmar-relay-{}", std::process::id()));
        let mut shared =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        shared.write_all(b"program\n").unwrap();
        non_blocking(shared.as_fd()).unwrap().write_all(b"gateway\n").unwrap();
        shared.write_all(b"program\n").unwrap();
        shared.seek(SeekFrom::Start(0)).unwrap();
        let mut all = String::new();
        shared.read_to_string(&mut all).unwrap();
        assert_eq!(all, "program\ngateway\nprogram\n");
    }
}
