//! The layout of a memory file, and of a frame's record.
//!
//! ```text
//!   0        4 KiB            132 KiB        140 KiB     2 MiB                          the end
//!   ├─ words ─┼─ FRAMES records ┼─ FRAMES words ┼─ nothing ─┼─ slabs of the stack ─┼─ staging ─┤
//!    indices    frames sent       slots returned              where sent bytes lie
//! ```
//!
//! Everything in a file is written by its owner and read by the other process. Indices only grow.
//!
//! A frame that was sent has a *slot*, the sender's name for it, until the receiver has returned the slot. Each ring
//! has one entry for each slot. So neither ring can overrun, whatever the order of the returns: each unread entry
//! belongs to a different slot in flight. That spares the shared consumer index of other rings.

use std::sync::atomic::Ordering;

use fulmar_stack::mbuf::SLAB_BYTES;

use super::sys::{OwnMap, PeerMap};
use crate::drivers::vnet;

/// Most frames in flight: 1024 super-frames are 64 MiB.
pub(super) const FRAMES: usize = 1024;
const _: () = assert!(FRAMES.is_power_of_two());

/// Most pieces of one frame: a record is two cache lines.
pub(super) const PIECES: usize = 13;

// The words, each in a cache line of its own (two, since lines are fetched in pairs).
/// Frames sent.
pub(super) const SENT: usize = 0;
/// Slots returned.
pub(super) const RETURNED: usize = 128;
/// The sleeper's request; see [`bell`](super::bell).
pub(super) const BELL: usize = 256;
/// [`CLOSED`] once the owner has dropped its device.
pub(super) const STATE: usize = 384;

/// The owner has dropped its device; the frames that it sent are still readable.
pub(super) const CLOSED: u64 = 1;

const RECORDS: usize = 4096;
const RECORD_BYTES: usize = 128;
const RETURNS: usize = RECORDS + FRAMES * RECORD_BYTES;

/// Where slabs begin.
pub(super) const SLABS: usize = SLAB_BYTES;
const _: () = assert!(RETURNS + FRAMES * 8 <= SLABS);

/// The longest frame: Ethernet header, the longest IP packet.
pub(super) const MAX_FRAME_BYTES: usize = 14 + 65_535;

/// Bytes `[at, at + len)` of the sender's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Piece {
    pub at: u32,
    pub len: u32,
}

/// One frame's record in the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    /// The sender's name for the frame.
    pub slot: u32,
    /// The offload request, as a virtio-net header.
    pub request: [u8; vnet::HEADER_BYTES],
    pieces: [Piece; PIECES],
    count: usize,
}

/// A violation of the protocol by the other process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Violation {
    /// The index of a ring went back, or names more entries than the ring has places.
    Index,
    /// A slot that does not exist.
    Slot,
    /// A frame in a slot that was not returned to its sender yet.
    SlotInUse,
    /// A returned slot that was not in flight.
    SlotNotOut,
    /// A frame of no pieces, or of more than [`PIECES`].
    PieceCount,
    /// A piece that is empty or outside the memory of frames.
    Piece,
    /// A frame longer than [`MAX_FRAME_BYTES`].
    FrameBytes,
}

impl Violation {
    /// For a person.
    pub(super) fn sentence(self) -> &'static str {
        match self {
            Violation::Index => "a ring index moved backwards or beyond the ring",
            Violation::Slot => "a slot does not exist",
            Violation::SlotInUse => "a frame was received in a slot that was not returned yet",
            Violation::SlotNotOut => "a slot was returned that was not in use",
            Violation::PieceCount => "a frame has no fragment, or too many",
            Violation::Piece => "a fragment of a frame is empty or outside the frame memory",
            Violation::FrameBytes => "a frame exceeds the maximum length",
        }
    }
}

impl Record {
    /// A frame without pieces.
    pub(super) fn new(slot: u32, request: [u8; vnet::HEADER_BYTES]) -> Record {
        Record { slot, request, pieces: [Piece::default(); PIECES], count: 0 }
    }

    /// Adds a piece. False: there are [`PIECES`] already.
    pub(super) fn push(&mut self, piece: Piece) -> bool {
        let Some(place) = self.pieces.get_mut(self.count) else { return false };
        *place = piece;
        self.count += 1;
        true
    }

    /// The pieces in order.
    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }

    /// Bytes of the frame.
    pub(super) fn len(&self) -> usize {
        self.pieces().iter().map(|p| p.len as usize).sum()
    }

    /// Writes the record of frame number `index`.
    pub(super) fn write(&self, own: &OwnMap, index: u64) {
        let at = place(index);
        let [a, b, c, ..] = self.request.as_chunks::<4>().0 else { return };
        let low = |w: &[u8; 4]| u64::from(u32::from_le_bytes(*w));
        let put = |word: usize, v: u64| own.store(at + word * 8, v, Ordering::Relaxed);
        put(0, u64::from(self.slot) | (self.count as u64) << 32);
        put(1, low(a) | low(b) << 32);
        put(2, low(c));
        for (i, p) in self.pieces().iter().enumerate() {
            put(3 + i, u64::from(p.at) | u64::from(p.len) << 32);
        }
    }

    /// Reads the record of frame number `index`, every word once, and validates it as far as
    /// possible without the frame's bytes.
    ///
    /// # Errors
    /// [`Violation`]: a slot that does not exist, no piece or too many, a piece that is empty, longer than
    /// a frame, in front of the slabs or behind the memory; a frame longer than any.
    pub(super) fn read(peer: &PeerMap, index: u64) -> Result<Record, Violation> {
        let at = place(index);
        let take = |word: usize| peer.load(at + word * 8, Ordering::Relaxed);
        let (w0, w1, w2) = (take(0), take(1), take(2));
        let (slot, count) = (w0 as u32, (w0 >> 32) as usize);
        if slot as usize >= FRAMES {
            return Err(Violation::Slot);
        }
        if !(1..=PIECES).contains(&count) {
            return Err(Violation::PieceCount);
        }
        let mut request = [0; vnet::HEADER_BYTES];
        request[..8].copy_from_slice(&w1.to_le_bytes());
        request[8..].copy_from_slice(&(w2 as u32).to_le_bytes());
        let mut record = Record::new(slot, request);
        let mut total = 0usize;
        for i in 0..count {
            let w = take(3 + i);
            let piece = Piece { at: w as u32, len: (w >> 32) as u32 };
            let (start, len) = (piece.at as usize, piece.len as usize);
            if len == 0 || start < SLABS || !peer.has(start, len) {
                return Err(Violation::Piece);
            }
            total = total.saturating_add(len);
            if total > MAX_FRAME_BYTES {
                return Err(Violation::FrameBytes);
            }
            record.push(piece);
        }
        Ok(record)
    }
}

fn place(index: u64) -> usize {
    RECORDS + (index as usize & (FRAMES - 1)) * RECORD_BYTES
}

/// Writes return number `index`.
pub(super) fn write_return(own: &OwnMap, index: u64, slot: u32) {
    own.store(return_place(index), u64::from(slot), Ordering::Relaxed);
}

/// The slot of return number `index`.
///
/// # Errors
/// [`Violation`]: there is no such slot.
pub(super) fn read_return(peer: &PeerMap, index: u64) -> Result<usize, Violation> {
    let slot = peer.load(return_place(index), Ordering::Relaxed);
    usize::try_from(slot).ok().filter(|s| *s < FRAMES).ok_or(Violation::Slot)
}

fn return_place(index: u64) -> usize {
    RETURNS + (index as usize & (FRAMES - 1)) * 8
}

/// The number of unread entries, from the other process's index.
///
/// # Errors
/// [`Violation`]: more entries than the ring has, or an index that went back.
pub(super) fn pending(peer: &PeerMap, word: usize, taken: u64) -> Result<u64, Violation> {
    let put = peer.load(word, Ordering::Relaxed);
    // Acquire: the entries were written before the index.
    std::sync::atomic::fence(Ordering::Acquire);
    let n = put.wrapping_sub(taken);
    if n <= FRAMES as u64 { Ok(n) } else { Err(Violation::Index) }
}
