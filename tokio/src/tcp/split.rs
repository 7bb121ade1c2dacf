//! The halves of a connection.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;

use fulmar::zero_copy::{Loan, ZeroCopy};

use super::{Io, TcpStream};

/// The half of a borrowed connection that reads.
#[derive(Debug)]
pub struct ReadHalf<'a> {
    pub(super) io: &'a Io,
}

/// The half of a borrowed connection that writes.
#[derive(Debug)]
pub struct WriteHalf<'a> {
    pub(super) io: &'a Io,
}

/// The half of a connection that reads.
#[derive(Debug)]
pub struct OwnedReadHalf {
    pub(super) io: Arc<Io>,
}

/// The half of a connection that writes. It shuts the direction down when it is dropped, unless it is forgotten
/// ([`OwnedWriteHalf::forget`]).
#[derive(Debug)]
pub struct OwnedWriteHalf {
    pub(super) io: Arc<Io>,
    shuts_down: bool,
}

pub(super) fn borrowed(io: &Io) -> (ReadHalf<'_>, WriteHalf<'_>) {
    (ReadHalf { io }, WriteHalf { io })
}

pub(super) fn owned(io: Arc<Io>) -> (OwnedReadHalf, OwnedWriteHalf) {
    (OwnedReadHalf { io: Arc::clone(&io) }, OwnedWriteHalf { io, shuts_down: true })
}

impl OwnedReadHalf {
    /// Joins the halves of one connection.
    ///
    /// # Errors
    /// `InvalidInput`: they are of different connections.
    pub fn reunite(self, write: OwnedWriteHalf) -> io::Result<TcpStream> {
        if !Arc::ptr_eq(&self.io, &write.io) {
            let what = "the halves are of different connections";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        write.forget();
        Ok(TcpStream { io: self.io })
    }

    /// Receives at most `max` bytes without a copy: see [`TcpStream::recv_owned`].
    ///
    /// # Errors
    /// As there.
    pub async fn recv_owned(&self, max: usize) -> io::Result<Loan> {
        poll_fn(|cx| self.io.stream.poll_recv_owned(cx, max)).await
    }

    /// The connection of the stack.
    pub fn get_ref(&self) -> &fulmar::TcpStream {
        &self.io.stream
    }
}

impl OwnedWriteHalf {
    /// Drops the half, and leaves its direction open.
    pub fn forget(mut self) {
        self.shuts_down = false;
    }

    /// The connection of the stack.
    pub fn get_ref(&self) -> &fulmar::TcpStream {
        &self.io.stream
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        if self.shuts_down {
            // The connection may have ended.
            let _ = self.io.stream.shutdown(Shutdown::Write);
        }
    }
}
