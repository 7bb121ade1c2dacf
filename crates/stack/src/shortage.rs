//! Sockets that could not go on for want of buffers or of room in the device: whoever frees some
//! does not know them, so they are kept here and tried again.
//!
//! Tried again when the send share has grown by a few blocks since the shortage was noted, or when
//! the device has taken what it refused, and in any case every [`RETRY`]: buffers also come home
//! from other stacks, unseen. Bounded by the number of sockets, each of which knows whether it is
//! here.

use fulmar_base::{Duration, Instant, Probe, SlotId};
use fulmar_mbuf::Purpose;

use crate::shard::Shard;
use crate::sockets::Socket;

/// The longest wait between two attempts: well below what a person notices, and no load.
const RETRY: Duration = Duration::from_millis(5);

/// So much more of the send share is worth an attempt.
const RELIEF_BYTES: usize = 16 << 10;

/// Who waits, and since when.
#[derive(Default)]
pub struct Shortage {
    waiting: Vec<SlotId>,
    retry_at: Option<Instant>,
    /// What was left of the send share when the last one came.
    left_bytes: usize,
    /// One of them met a full device.
    for_device: bool,
}

impl Shortage {
    /// When to try again at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }
}

impl<P: Probe> Shard<P> {
    /// A socket cannot go on for now: it is not writable until it is tried again.
    pub(crate) fn note_shortage(&mut self, now: Instant, id: SlotId) {
        self.net.pool.drain_remote();
        self.shortage.left_bytes = self.net.pool.available(Purpose::Send);
        self.shortage.for_device |= self.has_backlog();
        self.shortage.retry_at.get_or_insert(now + RETRY);
        let Some(is_short) = self.sockets.get_mut(id).and_then(Socket::is_short) else { return };
        if !std::mem::replace(is_short, true) {
            self.shortage.waiting.push(id);
        }
    }

    /// Lets the waiting sockets try again, if there is reason to.
    pub(crate) fn relieve(&mut self, now: Instant) {
        if let Some(at) = self.shortage.retry_at {
            self.relieve_by(now, at);
        }
    }

    #[cold]
    fn relieve_by(&mut self, now: Instant, at: Instant) {
        let enough = self.shortage.left_bytes.saturating_add(RELIEF_BYTES);
        let has_buffers = self.net.pool.available(Purpose::Send) >= enough;
        let is_relieved = !self.has_backlog() && (has_buffers || self.shortage.for_device);
        if now < at && !is_relieved {
            return;
        }
        self.shortage.retry_at = None;
        self.shortage.for_device = false;
        let mut waiting = std::mem::take(&mut self.shortage.waiting);
        for id in waiting.drain(..) {
            if let Some(is_short) = self.sockets.get_mut(id).and_then(Socket::is_short) {
                *is_short = false;
            }
            self.queue_output(id);
            self.notify(id);
        }
        if self.shortage.waiting.is_empty() {
            self.shortage.waiting = waiting;
        }
    }
}
