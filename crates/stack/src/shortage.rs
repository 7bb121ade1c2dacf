//! Sockets that could not go on for want of room in the device, of a descriptor or of a header: whoever
//! frees some does not know them, so they are kept here and tried again. Writers that wait for send memory
//! are in `send_wait.rs`.
//!
//! Tried again when the device has taken what it refused, else after [`RETRY`], and while that is in vain
//! after twice the time, up to [`MAX_RETRY`]. Bounded by the number of sockets, each of which knows whether it
//! is here.

use fulmar_base::{Duration, Instant, Probe, SlotId};

use crate::shard::Shard;
use crate::sockets::Socket;

/// The wait before the first retry: well below what a person notices.
const RETRY: Duration = Duration::from_millis(5);

/// The longest wait. Retries in vain double it: peers that fill the pool and are never read must not
/// cost a retry every few milliseconds.
const MAX_RETRY: Duration = Duration::from_millis(80);

/// Who waits, and since when.
pub struct Shortage {
    waiting: Vec<SlotId>,
    retry_at: Option<Instant>,
    /// The next wait, and when the last one ended.
    pause: Duration,
    retried_at: Instant,
    /// One of them met a full device.
    for_device: bool,
}

impl Default for Shortage {
    fn default() -> Shortage {
        Shortage {
            waiting: Vec::new(),
            retry_at: None,
            pause: RETRY,
            retried_at: Instant::ZERO,
            for_device: false,
        }
    }
}

impl Shortage {
    /// Sets the next retry, unless one is set.
    fn schedule(&mut self, now: Instant) {
        if self.retry_at.is_some() {
            return;
        }
        let is_over = now > self.retried_at + self.pause;
        if is_over || self.for_device {
            self.pause = RETRY;
        }
        self.retry_at = Some(now + self.pause);
    }

    /// When to try again at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }
}

impl<P: Probe> Shard<P> {
    /// A socket cannot go on for now: it is not writable until it is tried again.
    pub(crate) fn note_shortage(&mut self, now: Instant, id: SlotId) {
        self.net.pool.drain_remote();
        self.shortage.for_device |= self.has_backlog();
        self.shortage.schedule(now);
        let Some(short) = self.sockets.get_mut(id).and_then(Socket::short) else { return };
        short.is_short = true;
        if !std::mem::replace(&mut short.for_retry, true) {
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
        let is_relieved = !self.has_backlog() && self.shortage.for_device;
        if now < at && !is_relieved {
            return;
        }
        self.shortage.retry_at = None;
        self.shortage.retried_at = now;
        self.shortage.pause = (self.shortage.pause * 2).min(MAX_RETRY);
        self.shortage.for_device = false;
        let mut waiting = std::mem::take(&mut self.shortage.waiting);
        for id in waiting.drain(..) {
            if let Some(short) = self.sockets.get_mut(id).and_then(Socket::short) {
                (short.is_short, short.for_retry) = (false, false);
            }
            self.queue_output(id);
            self.notify(id);
        }
        if self.shortage.waiting.is_empty() {
            self.shortage.waiting = waiting;
        }
    }
}
