//! The user's program that is asked: it listens at a Unix socket. This copies lines between the pipes of the gateway and
//! its socket, and knows nothing of them.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::MOST_LINE_BYTES;
use crate::failure::{Failure, Outcome};

/// One direction: what was read, and not written yet.
#[derive(Default)]
struct Copying(Vec<u8>);

impl Copying {
    fn wants(&self) -> (PollFlags, PollFlags) {
        match self.0.is_empty() {
            true => (PollFlags::POLLIN, PollFlags::empty()),
            false => (PollFlags::empty(), PollFlags::POLLOUT),
        }
    }

    fn step(&mut self, from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
        if self.0.is_empty() {
            let mut piece = [0; MOST_LINE_BYTES];
            match from.read(&mut piece) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                read => self.0.extend_from_slice(&piece[..read?]),
            }
        }
        match to.write(&self.0) {
            Ok(written) => drop(self.0.drain(..written)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }
}

/// The socket, and the pipes of the gateway.
pub(in crate::gateway) struct Socket {
    socket: UnixStream,
    questions: File,
    answers: File,
    out: Copying,
    back: Copying,
}

/// Connects to the program that is asked.
pub(super) fn connect(path: &Path) -> Outcome<UnixStream> {
    let connected = UnixStream::connect(path).and_then(|socket| {
        socket.set_nonblocking(true)?;
        Ok(socket)
    });
    connected.map_err(|e| Failure::file("cannot connect to the socket of --ask-socket", path, &e))
}

impl Socket {
    /// Connects, before the program runs, which could put another socket there.
    ///
    /// # Errors
    /// A sentence: no program listens there.
    pub(in crate::gateway) fn open(path: &Path, questions: File, answers: File) -> Outcome<Socket> {
        let (out, back) = (Copying::default(), Copying::default());
        Ok(Socket { socket: connect(path)?, questions, answers, out, back })
    }

    /// Disconnects. Returns the pipe of the answers.
    pub(in crate::gateway) fn finish(self) -> File {
        self.answers
    }

    /// Copies until another descriptor is readable.
    ///
    /// # Errors
    /// One of the ends has gone.
    pub(in crate::gateway) fn serve_until(&mut self, other: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            let (from_gateway, to_user) = self.out.wants();
            let (from_user, to_gateway) = self.back.wants();
            let mut ready = [
                PollFd::new(other, PollFlags::POLLIN),
                PollFd::new(self.questions.as_fd(), from_gateway),
                PollFd::new(self.answers.as_fd(), to_gateway),
                PollFd::new(self.socket.as_fd(), from_user | to_user),
            ];
            match poll(&mut ready, PollTimeout::NONE) {
                Err(nix::Error::EINTR) => continue,
                polled => polled?,
            };
            let [is_other, is_asked, is_gone, is_user] =
                ready.map(|one| one.revents().unwrap_or(PollFlags::empty()));
            if !is_other.is_empty() {
                return Ok(());
            }
            // The gateway has gone, or the user's program has.
            if is_gone.contains(PollFlags::POLLERR) {
                return Err(ErrorKind::BrokenPipe.into());
            }
            if !is_asked.is_empty() || is_user.contains(PollFlags::POLLOUT) {
                self.out.step(&mut self.questions, &mut &self.socket)?;
            }
            if is_user.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR)
                || !is_gone.is_empty()
            {
                self.back.step(&mut &self.socket, &mut self.answers)?;
            }
        }
    }
}
