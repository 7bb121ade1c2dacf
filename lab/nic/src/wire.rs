//! The wire between two simulated NICs: one bounded channel in each direction.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_stack::base::Instant;

use super::cut::Spare;
use super::frame::WireFrame;
use super::meter::Board;
use super::rx::LANE_PKTS;

/// Frames with the times at which they arrive.
pub type Frames = VecDeque<(Instant, WireFrame)>;

/// Frames towards one side.
#[derive(Default)]
struct Channel {
    queue: Mutex<(Frames, Spare)>,
    /// Frames in the queue; changes under the lock.
    len: AtomicUsize,
    /// The sender waits for space.
    is_blocked: AtomicBool,
}

impl Channel {
    fn queue(&self) -> MutexGuard<'_, (Frames, Spare)> {
        // A panic elsewhere cannot leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Shared {
    /// Towards side 0, towards side 1.
    channels: [Channel; 2],
    boards: [Arc<Board>; 2],
    is_alive: [AtomicBool; 2],
}

/// One end of the wire.
pub struct WireEnd {
    shared: Arc<Shared>,
    side: usize,
}

/// Both ends of a wire between the NICs of these boards.
pub fn wire(boards: [Arc<Board>; 2]) -> (WireEnd, WireEnd) {
    let shared = Arc::new(Shared {
        channels: Default::default(),
        boards,
        is_alive: [AtomicBool::new(true), AtomicBool::new(true)],
    });
    (WireEnd { shared: Arc::clone(&shared), side: 0 }, WireEnd { shared, side: 1 })
}

impl WireEnd {
    fn inward(&self) -> &Channel {
        &self.shared.channels[self.side]
    }

    fn outward(&self) -> &Channel {
        &self.shared.channels[1 - self.side]
    }

    /// Whether the other NIC is still there.
    pub fn has_peer(&self) -> bool {
        self.shared.is_alive[1 - self.side].load(SeqCst)
    }

    /// Frames that can be sent now. If it is 0, the sender is notified when there is space again.
    pub fn space(&self) -> usize {
        let channel = self.outward();
        let space = || LANE_PKTS.saturating_sub(channel.len.load(SeqCst));
        if space() > 0 {
            return space();
        }
        channel.is_blocked.store(true, SeqCst);
        // The receiver may have made space before it could see the mark.
        space()
    }

    /// Puts frames on the wire and gets memory back; the other side is woken if it sleeps.
    pub fn send(&self, frames: &mut Frames, spare: &mut Spare) {
        if frames.is_empty() {
            return;
        }
        let channel = self.outward();
        let mut queue = channel.queue();
        queue.0.append(frames);
        spare.take_all(&mut queue.1);
        channel.len.store(queue.0.len(), SeqCst);
        drop(queue);
        self.shared.boards[1 - self.side].attend();
    }

    /// Takes frames off the wire up to the space of `to`, and gives memory back.
    pub fn receive(&self, to: &mut Frames, spare: &mut Spare) {
        let channel = self.inward();
        if channel.len.load(SeqCst) == 0 {
            return;
        }
        let mut queue = channel.queue();
        let n = LANE_PKTS.saturating_sub(to.len()).min(queue.0.len());
        if to.is_empty() && n == queue.0.len() {
            // Exchanging the queues keeps the memory of both.
            std::mem::swap(to, &mut queue.0);
        } else {
            to.extend(queue.0.drain(..n));
        }
        queue.1.take_all(spare);
        let left = queue.0.len();
        channel.len.store(left, SeqCst);
        drop(queue);
        if left <= LANE_PKTS / 2 && channel.is_blocked.swap(false, SeqCst) {
            self.shared.boards[1 - self.side].attend();
        }
    }

    /// Whether frames lie on the wire that were not taken off it.
    pub fn has_frames(&self) -> bool {
        self.inward().len.load(SeqCst) > 0
    }
}

impl Drop for WireEnd {
    fn drop(&mut self) {
        self.shared.is_alive[self.side].store(false, SeqCst);
        // A sleeping peer learns of it.
        self.shared.boards[1 - self.side].attend();
    }
}
