//! Reserved space in the send buffer, for a program that writes into it directly.

use std::fmt;
use std::io;

use fulmar_stack::socket::Reservation;

use super::lock::SendLock;

/// Memory of the stack, reserved in the send buffer of a connection
/// ([`ZeroCopy::send_reserve`](crate::zero_copy::ZeroCopy::send_reserve)). Fill it through
/// [`SendReservation::slices_mut`], or from the front as an [`io::Write`], then [`SendReservation::commit`].
///
/// Dropping it releases the space and sends nothing. Until then other writers of the socket wait, and a write by the
/// same thread fails with `WouldBlock`; so keep it no longer than a copy takes.
///
/// ```
/// # use std::io::Write;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// use fulmar::zero_copy::ZeroCopy;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// # let stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// # let (peer, _) = listener.accept()?;
/// let mut space = stream.send_reserve(4096)?;
/// writeln!(space, "HTTP/1.0 200 OK\r")?;
/// space.commit_written();
/// # assert_eq!(peer.recv_owned(100)?.len(), 17);
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it releases the space and sends nothing"]
pub struct SendReservation<'a> {
    lock: SendLock<'a>,
    /// Present until it is committed or abandoned.
    reservation: Option<Reservation>,
    written: usize,
}

impl<'a> SendReservation<'a> {
    pub(super) fn new(lock: SendLock<'a>, reservation: Reservation) -> SendReservation<'a> {
        SendReservation { lock, reservation: Some(reservation), written: 0 }
    }

    /// Reserved bytes: at least one, at most the requested number.
    pub fn capacity(&self) -> usize {
        self.reservation.as_ref().map_or(0, Reservation::len)
    }

    /// The memory, in order, in a few slices. It contains zeroes or bytes of earlier packets: bytes that are committed
    /// without having been written disclose those to the peer.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.reservation.iter_mut().flat_map(|r| r.chain.slices_mut())
    }

    /// How many bytes were written through [`io::Write`].
    pub fn written(&self) -> usize {
        self.written
    }

    /// Sends the first `n` bytes with one run of the output, and releases the rest of the space.
    ///
    /// # Panics
    /// If `n` is more than the capacity.
    pub fn commit(mut self, n: usize) {
        assert!(n <= self.capacity(), "committing more bytes than were reserved");
        if let Some(mut r) = self.reservation.take() {
            r.keep(n);
            if n == 0 { self.lock.abandon(r) } else { self.lock.commit(r) }
        }
    }

    /// Sends the bytes written through [`io::Write`].
    pub fn commit_written(self) {
        let n = self.written;
        self.commit(n);
    }
}

impl io::Write for SendReservation<'_> {
    /// Writes bytes up to the free space and returns their number; 0: the space is used up.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (mut skip, mut done) = (self.written, 0);
        for slice in self.slices_mut() {
            let from = skip.min(slice.len());
            skip -= from;
            let n = (slice.len() - from).min(bytes.len() - done);
            slice[from..from + n].copy_from_slice(&bytes[done..done + n]);
            done += n;
            if done == bytes.len() {
                break;
            }
        }
        self.written += done;
        Ok(done)
    }

    /// Does nothing: [`SendReservation::commit`] sends.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for SendReservation<'_> {
    fn drop(&mut self) {
        if let Some(r) = self.reservation.take() {
            self.lock.abandon(r);
        }
    }
}

impl fmt::Debug for SendReservation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendReservation")
            .field("capacity", &self.capacity())
            .field("written", &self.written)
            .finish()
    }
}
