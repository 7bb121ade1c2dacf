//! sendfile, under the lock: how much goes next, and the space and storage for it.
//!
//! A call is a run of turns. Each waits until half of the send buffer is free (or until the rest
//! fits), takes one chain for everything that has room, and is filled outside the lock:
//!
//! ```text
//!   headers │ file: whole pages, as many as fit          │ trailers
//!   ────────┼──────────────┬──────────────┬──────────────┼─────────
//!   turn 0 ─────────────►  │ turn 1 ────► │ last turn ───────────►
//!                          └ a page boundary of the file
//! ```
//!
//! Owns nothing between the steps: the [`Reservation`] is the caller's. Reads no file: what a file
//! holds is the business of whoever fills the chain. Source: `kern_sendfile` of FreeBSD as rewritten
//! in 2006, the order of its checks and its rule for waiting; the low-water mark is put back here.

use std::sync::Arc;

use fulmar_mbuf::{Pool, QueueFull, SharedBytes};
use fulmar_tcp::Tcb;

use crate::sosend::{self, Reservation, SEND_LOW_WATER_BYTES, Taken};
use crate::{SocketError, Step};

/// What a turn of a file ends on, in bytes of the file.
pub const PAGE_BYTES: u64 = 4096;

/// Pieces of a file below this size do not go by reference: copying them costs little, and a frame
/// can take a limited number of pieces only.
pub const MIN_SHARED_BYTES: usize = 16 << 10;

/// What is left of a call, in the order in which it goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rest {
    /// Bytes in front of the file.
    pub head: usize,
    /// Where in the file the next byte stands.
    pub file_at: u64,
    /// Bytes of the file.
    pub file: u64,
    /// Bytes behind the file.
    pub tail: usize,
}

/// What goes in one turn: a prefix of [`Rest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// Bytes in front of the file.
    pub head: usize,
    /// Bytes of the file.
    pub file: usize,
    /// Bytes behind the file; none unless the file goes to its end.
    pub tail: usize,
}

impl Piece {
    /// Bytes of all three parts.
    pub fn len(&self) -> usize {
        self.head + self.file + self.tail
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Rest {
    /// Bytes of all three parts.
    pub fn bytes(&self) -> u64 {
        let ends = self.head as u64 + self.tail as u64;
        self.file.saturating_add(ends)
    }

    /// What goes in one turn that has room for `space` bytes: everything, or a run that ends on a
    /// page boundary of the file, or for less than a page what there is room for.
    pub fn cut(&self, space: usize) -> Piece {
        let head = self.head.min(space);
        let room = space - head;
        if self.file <= room as u64 {
            let file = self.file as usize;
            return Piece { head, file, tail: self.tail.min(room - file) };
        }
        let over = (self.file_at.wrapping_add(room as u64) % PAGE_BYTES) as usize;
        let file = if room > PAGE_BYTES as usize { room - over } else { room };
        Piece { head, file, tail: 0 }
    }
}

/// When a turn goes on although not everything fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Worth {
    /// Half of the send buffer is free: for a call that waits by itself.
    HalfTheBuffer,
    /// As for a write: for a call that returns to somebody who waits for "writable".
    AnyWrite,
}

impl Worth {
    /// Bytes of free send buffer below which a turn waits.
    fn low_water(self, limit: usize) -> usize {
        match self {
            Worth::HalfTheBuffer => limit / 2,
            Worth::AnyWrite => SEND_LOW_WATER_BYTES.min(limit / 2),
        }
        .max(1)
    }
}

fn must_wait(space: usize, limit: usize, rest: &Rest, worth: Worth) -> bool {
    (space as u64) < rest.bytes() && space < worth.low_water(limit)
}

/// Whether the send buffer has room for a turn, so that one which waits all the same waits for
/// storage.
pub fn has_space(tcb: &Tcb, rest: &Rest, worth: Worth) -> bool {
    let queue = tcb.send_queue_ref();
    let is_full = must_wait(queue.space(), queue.limit(), rest, worth);
    tcb.can_send() && queue.may_claim() && !is_full
}

/// Takes space and storage for the next turn, and says what goes into it. While it has to wait, the
/// low-water mark of the socket is what the turn waits for; [`restore`] puts it back.
///
/// # Errors
/// The state of the connection, as for a write.
pub fn reserve(
    tcb: &mut Tcb,
    pool: &mut Pool,
    rest: &Rest,
    worth: Worth,
) -> Result<Step<(Reservation, Piece)>, SocketError> {
    match sosend::check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(Step::WaitSpace(1)),
        other => other?,
    }
    let queue = tcb.send_queue();
    let (space, limit) = (queue.space(), queue.limit());
    if must_wait(space, limit, rest, worth) {
        let enough = usize::try_from(rest.bytes()).unwrap_or(limit).min(worth.low_water(limit));
        tcb.set_send_low_water(Some(enough));
        return Ok(Step::WaitSpace(enough));
    }
    let want = rest.cut(space).len();
    let want = rest.cut(sosend::affordable(tcb, pool, want)).len();
    let Some(chain) = sosend::obtain(pool, want) else { return Ok(Step::WaitSpace(1)) };
    let piece = rest.cut(chain.len());
    match tcb.send_queue().claim(chain.len()) {
        Some(claim) => Ok(Step::Done((Reservation::new(claim, chain), piece))),
        None => {
            pool.free(chain);
            Ok(Step::WaitSpace(1))
        }
    }
}

/// As [`reserve`] for a file whose pages go by reference, and done: queues as many of the next `most`
/// bytes as have room. None (`Done` with 0 bytes): fewer than [`MIN_SHARED_BYTES`] have, so they are
/// better copied.
///
/// # Errors
/// As [`reserve`].
pub fn share(
    tcb: &mut Tcb,
    pool: &mut Pool,
    pages: &Arc<dyn SharedBytes>,
    (rest, most): (&Rest, usize),
    worth: Worth,
) -> Result<Step<Taken>, SocketError> {
    match sosend::check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(Step::WaitSpace(1)),
        other => other?,
    }
    let queue = tcb.send_queue();
    let (space, limit) = (queue.space(), queue.limit());
    if must_wait(space, limit, rest, worth) {
        let enough = usize::try_from(rest.bytes()).unwrap_or(limit).min(worth.low_water(limit));
        tcb.set_send_low_water(Some(enough));
        return Ok(Step::WaitSpace(enough));
    }
    let want = rest.cut(space).file.min(most);
    if want < MIN_SHARED_BYTES {
        return Ok(Step::Done(Taken { bytes: 0, mbufs: 0 }));
    }
    let want = sosend::affordable(tcb, pool, want);
    let chain = sosend::parts(pool, pages, rest.file_at as usize, want);
    let taken = Taken { bytes: chain.len(), mbufs: chain.segs() };
    if taken.bytes == 0 {
        return Ok(Step::WaitSpace(1));
    }
    match tcb.send_queue().append(chain, pool) {
        Ok(()) => Ok(Step::Done(taken)),
        Err(QueueFull(chain)) => {
            pool.free(chain);
            Ok(Step::WaitSpace(1))
        }
    }
}

/// The low-water mark is again what it was before the call.
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
    fn what_fits_goes_whole_with_its_trailers() {
        let piece = rest(10, 77, 5000, 20).cut(1 << 20);
        assert_eq!(piece, Piece { head: 10, file: 5000, tail: 20 });
        assert_eq!(rest(10, 0, 0, 20).cut(25), Piece { head: 10, file: 0, tail: 15 });
    }

    #[test]
    fn a_turn_ends_on_a_page_boundary_of_the_file() {
        assert_eq!(rest(0, 0, 1 << 20, 0).cut(100_000).file, 24 * PAGE);
        assert_eq!(rest(0, 1, 1 << 20, 0).cut(100_000).file, 24 * PAGE - 1);
        // The headers take their room first.
        assert_eq!(rest(300, 0, 1 << 20, 9).cut(2 * PAGE + 299).file, PAGE);
    }

    #[test]
    fn less_than_a_page_goes_as_it_is() {
        assert_eq!(rest(0, 0, 1 << 20, 0).cut(PAGE).file, PAGE);
        assert_eq!(rest(0, 100, 1 << 20, 0).cut(PAGE).file, PAGE);
        assert_eq!(rest(0, 0, 1 << 20, 0).cut(7).file, 7);
        assert_eq!(rest(50, 0, 1 << 20, 0).cut(50), Piece { head: 50, file: 0, tail: 0 });
    }

    #[test]
    fn a_turn_waits_for_half_the_buffer_or_for_all_of_the_rest() {
        let waits = |space, file, worth| must_wait(space, 1000, &rest(0, 0, file, 0), worth);
        assert!(waits(499, 5000, Worth::HalfTheBuffer));
        assert!(!waits(500, 5000, Worth::HalfTheBuffer));
        assert!(!waits(20, 20, Worth::HalfTheBuffer));
        assert!(waits(19, 20, Worth::HalfTheBuffer));
        assert!(waits(0, 1, Worth::HalfTheBuffer));
        assert!(must_wait(2047, 1 << 20, &rest(0, 0, 5000, 0), Worth::AnyWrite));
        assert!(!must_wait(2048, 1 << 20, &rest(0, 0, 5000, 0), Worth::AnyWrite));
    }

    proptest! {
        #[test]
        fn turns_of_any_size_carry_everything_once_and_in_order(
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
