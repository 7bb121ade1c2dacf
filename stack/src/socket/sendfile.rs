//! sendfile: the size of the next part of a file, and the space and storage for it.
//!
//! A call sends a file in several parts. For each part it waits until half of the send buffer is free (or the rest
//! fits), allocates a chain for the part that fits, and fills it outside the lock:
//!
//! ```text
//!   headers │ file: whole pages, as many as fit          │ trailers
//!   ────────┼──────────────┬──────────────┬──────────────┼─────────
//!   part 0 ─────────────►  │ part 1 ────► │ last part ───────────►
//!                          └ a page boundary of the file
//! ```
//!
//! The caller owns the [`Reservation`] and fills it: no file is read here. Source: `kern_sendfile` of FreeBSD
//! as rewritten in 2006 (order of the checks, rule for waiting); unlike there, [`restore`] resets the
//! low-water mark.

use core::task::Poll;

use crate::mbuf::Pool;
use crate::tcp::Tcb;

use crate::socket::SocketError;
use crate::socket::sosend::{self, Reservation, SEND_LOW_WATER_BYTES};

/// The alignment of the parts of a file.
pub const PAGE_BYTES: u64 = 4096;

/// The rest of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rest {
    /// Bytes of headers.
    pub head: usize,
    /// Offset of the next byte of the file.
    pub file_at: u64,
    /// Bytes of the file.
    pub file: u64,
    /// Bytes of trailers.
    pub tail: usize,
}

/// The next part of a call: a prefix of [`Rest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// Bytes of headers.
    pub head: usize,
    /// Bytes of the file.
    pub file: usize,
    /// Bytes of trailers; 0 unless the rest of the file is included.
    pub tail: usize,
}

impl Piece {
    /// Bytes of headers, file and trailers.
    pub fn len(&self) -> usize {
        self.head + self.file + self.tail
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Rest {
    /// Bytes of headers, file and trailers.
    pub fn bytes(&self) -> u64 {
        let ends = self.head as u64 + self.tail as u64;
        self.file.saturating_add(ends)
    }

    /// The next part for `space` bytes: everything, or a prefix that ends on a page boundary of the file, or
    /// `space` bytes if that is less than a page.
    pub fn cut(&self, space: usize) -> Piece {
        let head = self.head.min(space);
        let file_space = space - head;
        if self.file <= file_space as u64 {
            let file = self.file as usize;
            return Piece { head, file, tail: self.tail.min(file_space - file) };
        }
        let over = (self.file_at.wrapping_add(file_space as u64) % PAGE_BYTES) as usize;
        let file = if file_space > PAGE_BYTES as usize { file_space - over } else { file_space };
        Piece { head, file, tail: 0 }
    }
}

/// How much free space a call waits for if the rest does not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LowWater {
    /// Half of the send buffer, for a blocking call.
    HalfBuffer,
    /// The low-water mark of a write, for a non-blocking call, whose caller waits for `WRITABLE`.
    Writable,
}

impl LowWater {
    /// Free space below which a call waits.
    fn bytes(self, limit: usize) -> usize {
        match self {
            LowWater::HalfBuffer => limit / 2,
            LowWater::Writable => SEND_LOW_WATER_BYTES.min(limit / 2),
        }
        .max(1)
    }
}

fn must_wait(space: usize, limit: usize, rest: &Rest, low_water: LowWater) -> bool {
    (space as u64) < rest.bytes() && space < low_water.bytes(limit)
}

/// Whether the send buffer has space for the next part. If the call waits nevertheless, it waits for storage.
pub fn has_space(tcb: &Tcb, rest: &Rest, low_water: LowWater) -> bool {
    let queue = tcb.send_queue_ref();
    let is_full = must_wait(tcb.write_space(), queue.limit(), rest, low_water);
    tcb.can_send() && queue.may_claim() && !is_full
}

/// Free space of the send buffer. Where the call has to wait, the low-water mark of the socket is raised to what it
/// waits for.
fn space_for(tcb: &mut Tcb, rest: &Rest, low_water: LowWater) -> Result<Poll<usize>, SocketError> {
    match sosend::check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(Poll::Pending),
        other => other?,
    }
    let (space, limit) = (tcb.write_space(), tcb.send_queue_ref().limit());
    if !must_wait(space, limit, rest, low_water) {
        return Ok(Poll::Ready(space));
    }
    let enough = usize::try_from(rest.bytes()).unwrap_or(limit).min(low_water.bytes(limit));
    tcb.set_send_low_water(Some(enough));
    Ok(Poll::Pending)
}

/// Claims space and allocates storage for the next part, and returns its size. If the call has to wait, the
/// low-water mark of the socket is raised to what it waits for; [`restore`] resets it.
///
/// # Errors
/// The state of the connection, as for a write.
pub fn reserve(
    tcb: &mut Tcb,
    pool: &mut Pool,
    rest: &Rest,
    low_water: LowWater,
) -> Result<Poll<(Reservation, Piece)>, SocketError> {
    let Poll::Ready(space) = space_for(tcb, rest, low_water)? else { return Ok(Poll::Pending) };
    let want = rest.cut(space).len();
    let want = rest.cut(sosend::allowed(tcb, pool, want)).len();
    let Some(chain) = sosend::alloc_up_to(pool, want) else { return Ok(Poll::Pending) };
    let piece = rest.cut(chain.len());
    match tcb.send_queue().claim(chain.len()) {
        Some(claim) => Ok(Poll::Ready((Reservation::new(claim, chain), piece))),
        None => {
            pool.free(chain);
            Ok(Poll::Pending)
        }
    }
}

/// Resets the low-water mark that [`reserve`] has raised.
pub fn restore(tcb: &mut Tcb) {
    tcb.set_send_low_water(None);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: usize = PAGE_BYTES as usize;

    fn rest(head: usize, file_at: u64, file: u64, tail: usize) -> Rest {
        Rest { head, file_at, file, tail }
    }

    #[test]
    fn a_rest_that_fits_is_one_part_with_its_trailers() {
        let piece = rest(10, 77, 5000, 20).cut(1 << 20);
        assert_eq!(piece, Piece { head: 10, file: 5000, tail: 20 });
        assert_eq!(rest(10, 0, 0, 20).cut(25), Piece { head: 10, file: 0, tail: 15 });
    }

    #[test]
    fn a_part_ends_on_a_page_boundary_of_the_file() {
        assert_eq!(rest(0, 0, 1 << 20, 0).cut(100_000).file, 24 * PAGE);
        assert_eq!(rest(0, 1, 1 << 20, 0).cut(100_000).file, 24 * PAGE - 1);
        // The headers come first.
        assert_eq!(rest(300, 0, 1 << 20, 9).cut(2 * PAGE + 299).file, PAGE);
    }

    #[test]
    fn a_part_of_less_than_a_page_uses_all_space() {
        assert_eq!(rest(0, 0, 1 << 20, 0).cut(PAGE).file, PAGE);
        assert_eq!(rest(0, 100, 1 << 20, 0).cut(PAGE).file, PAGE);
        assert_eq!(rest(0, 0, 1 << 20, 0).cut(7).file, 7);
        assert_eq!(rest(50, 0, 1 << 20, 0).cut(50), Piece { head: 50, file: 0, tail: 0 });
    }

    #[test]
    fn a_call_waits_for_half_of_the_buffer_or_for_the_whole_rest() {
        let waits =
            |space, file, low_water| must_wait(space, 1000, &rest(0, 0, file, 0), low_water);
        assert!(waits(499, 5000, LowWater::HalfBuffer));
        assert!(!waits(500, 5000, LowWater::HalfBuffer));
        assert!(!waits(20, 20, LowWater::HalfBuffer));
        assert!(waits(19, 20, LowWater::HalfBuffer));
        assert!(waits(0, 1, LowWater::HalfBuffer));
        assert!(must_wait(2047, 1 << 20, &rest(0, 0, 5000, 0), LowWater::Writable));
        assert!(!must_wait(2048, 1 << 20, &rest(0, 0, 5000, 0), LowWater::Writable));
    }

    proptest! {
        #[test]
        fn parts_of_any_size_cover_every_byte_once_and_in_order(
            head in 0usize..10_000,
            file_at in 0u64..20_000,
            file in 0u64..200_000,
            tail in 0usize..10_000,
            spaces in proptest::collection::vec(1usize..70_000, 1..20),
        ) {
            let whole = rest(head, file_at, file, tail);
            let mut left = whole;
            let mut spaces = spaces.iter().cycle();
            while left.bytes() > 0 {
                let space = *spaces.next().expect("a cycle");
                let piece = left.cut(space);
                prop_assert!(!piece.is_empty() && piece.len() <= space);
                prop_assert!(piece.file == 0 || piece.head == left.head);
                prop_assert!(piece.tail == 0 || piece.file as u64 == left.file);
                left.head -= piece.head;
                left.file -= piece.file as u64;
                left.file_at += piece.file as u64;
                left.tail -= piece.tail;
                let is_cut = piece.file > PAGE && left.file > 0;
                prop_assert!(!is_cut || left.file_at.is_multiple_of(PAGE_BYTES));
            }
            prop_assert_eq!(left, rest(0, file_at + file, 0, 0));
        }
    }
}
