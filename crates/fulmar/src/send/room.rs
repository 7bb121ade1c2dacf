//! Room in the send buffer, lent to be written into directly.

use std::fmt;
use std::io;

use fulmar_socket::Reservation;

use super::turn::WriteTurn;

/// Memory of the stack that is claimed in a connection's send buffer
/// ([`TcpStream::send_reserve`](crate::TcpStream::send_reserve)). Fill it through
/// [`SendRoom::slices_mut`], or from the front as an [`io::Write`], then [`SendRoom::commit`].
///
/// Dropping it gives the room back and sends nothing. Until then other writers of the socket wait,
/// and a write by the same thread answers `WouldBlock`; so hold it for as long as a copy takes.
#[must_use = "dropping it gives the room back and sends nothing"]
pub struct SendRoom<'a> {
    turn: WriteTurn<'a>,
    /// Present until it is committed or given back.
    reservation: Option<Reservation>,
    written: usize,
}

impl<'a> SendRoom<'a> {
    pub(super) fn new(turn: WriteTurn<'a>, reservation: Reservation) -> SendRoom<'a> {
        SendRoom { turn, reservation: Some(reservation), written: 0 }
    }

    /// How many bytes it takes: at least one, at most what was asked for.
    pub fn capacity(&self) -> usize {
        self.reservation.as_ref().map_or(0, Reservation::len)
    }

    /// The memory, in order, in a few pieces. It holds zeroes or bytes of earlier packets: what is
    /// committed without having been written tells the peer about those.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.reservation.iter_mut().flat_map(|r| r.chain.slices_mut())
    }

    /// How many bytes were written through [`io::Write`].
    pub fn written(&self) -> usize {
        self.written
    }

    /// Sends the first `n` bytes, by one pass of the protocol, and gives the rest of the room back.
    ///
    /// # Panics
    /// If `n` is more than the capacity.
    pub fn commit(mut self, n: usize) {
        assert!(n <= self.capacity(), "committing more bytes than there is room for");
        if let Some(mut r) = self.reservation.take() {
            r.keep(n);
            if n == 0 { self.turn.abandon(r) } else { self.turn.commit(r) }
        }
    }

    /// Sends what was written through [`io::Write`].
    pub fn commit_written(self) {
        let n = self.written;
        self.commit(n);
    }
}

impl io::Write for SendRoom<'_> {
    /// Writes as much as there is room for; 0 when it is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (mut skip, mut done) = (self.written, 0);
        for room in self.slices_mut() {
            let from = skip.min(room.len());
            skip -= from;
            let n = (room.len() - from).min(bytes.len() - done);
            room[from..from + n].copy_from_slice(&bytes[done..done + n]);
            done += n;
            if done == bytes.len() {
                break;
            }
        }
        self.written += done;
        Ok(done)
    }

    /// Does nothing: [`SendRoom::commit`] sends.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for SendRoom<'_> {
    fn drop(&mut self) {
        if let Some(r) = self.reservation.take() {
            self.turn.abandon(r);
        }
    }
}

impl fmt::Debug for SendRoom<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendRoom")
            .field("capacity", &self.capacity())
            .field("written", &self.written)
            .finish()
    }
}
