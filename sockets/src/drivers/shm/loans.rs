//! References to the other process's memory, and the return of its slots.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fulmar_stack::device::Peek;
use fulmar_stack::mbuf::{Lender, VolatileSlice};

use super::bell::{Bell, News};
use super::layout::{self, FRAMES, RETURNED, SENT};
use super::sys::{OwnMap, PeerMap};

/// Most frames kept by reference. Further frames are copied and their slots returned: so half of the
/// sender's slots are always available, and a socket that is not read does not stall the others.
const MAX_FRAMES: usize = FRAMES / 2;

/// The state that outlives the device: mbufs refer to the peer's memory until programs drop them.
pub(super) struct Loans {
    pub peer: PeerMap,
    pub own: Arc<OwnMap>,
    pub bell: Bell,
    /// Referenced pieces of each slot.
    pieces: Box<[AtomicU32]>,
    /// Frames with referenced pieces.
    frames: AtomicUsize,
    /// Slots returned. Under the lock, since any thread may drop the last reference.
    returned: Mutex<u64>,
    /// Frames taken from the peer's ring; written by the device only.
    pub taken: AtomicU64,
    /// Returns taken from the peer's ring; written by the device only.
    pub reaped: AtomicU64,
    /// A blocked device waits for returned slots.
    pub wants_space: std::sync::atomic::AtomicBool,
}

impl Loans {
    pub(super) fn new(peer: PeerMap, own: Arc<OwnMap>, bell: Bell) -> Loans {
        Loans {
            peer,
            own,
            bell,
            pieces: (0..FRAMES).map(|_| AtomicU32::new(0)).collect(),
            frames: AtomicUsize::new(0),
            returned: Mutex::new(0),
            taken: AtomicU64::new(0),
            reaped: AtomicU64::new(0),
            wants_space: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// Whether a slot is unreferenced and not being read: an honest peer names no other.
    pub(super) fn is_free(&self, slot: u32) -> bool {
        self.pieces.get(slot as usize).is_some_and(|p| p.load(Ordering::Acquire) == 0)
    }

    /// Whether one more frame may be kept by reference.
    pub(super) fn has_space(&self) -> bool {
        self.frames.load(Ordering::Relaxed) < MAX_FRAMES
    }

    /// Counts the pieces of a frame that are about to be lent, plus one for the caller.
    pub(super) fn begin(&self, slot: u32) {
        if let Some(p) = self.pieces.get(slot as usize) {
            self.frames.fetch_add(1, Ordering::Relaxed);
            p.store(1, Ordering::Relaxed);
        }
    }

    /// Counts one more reference to a frame.
    pub(super) fn add(&self, slot: u32) {
        if let Some(p) = self.pieces.get(slot as usize) {
            p.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns a slot to its owner, which may then write the memory again.
    pub(super) fn send_back(&self, slot: u32) {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        layout::write_return(&self.own, *returned, slot);
        *returned += 1;
        self.own.store(RETURNED, *returned, Ordering::Release);
    }

    /// Wakes a sender that waits for slots, once half of them are returned.
    pub(super) fn notify_space(&self) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        let unread = self.peer.load(SENT, Ordering::Relaxed).wrapping_sub(taken);
        let kept = (self.frames.load(Ordering::Relaxed) as u64).saturating_add(unread);
        kept <= MAX_FRAMES as u64 && self.bell.ring(&self.peer, News::Space)
    }
}

impl Lender for Loans {
    fn bytes(&self, offset: usize, len: usize) -> Option<VolatileSlice<'_>> {
        self.peer.bytes(offset, len)
    }

    fn give_back(&self, slot: u32) {
        let Some(p) = self.pieces.get(slot as usize) else { return };
        if p.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.frames.fetch_sub(1, Ordering::Relaxed);
            self.send_back(slot);
            self.notify_space();
        }
    }
}

impl Peek for Loans {
    fn is_pending(&self) -> bool {
        let sent = self.peer.load(SENT, Ordering::Relaxed);
        if sent != self.taken.load(Ordering::Relaxed) {
            return true;
        }
        self.wants_space.load(Ordering::Relaxed)
            && self.peer.load(RETURNED, Ordering::Relaxed) != self.reaped.load(Ordering::Relaxed)
    }
}
