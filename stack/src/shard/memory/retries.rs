//! Back-pressure: sockets that could not go on for want of space in the device, of a descriptor or of a header. No
//! event names the socket that can go on, so they are kept here and retried. Writers that wait for send memory are in
//! `send_wait.rs`.
//!
//! Retried when the device accepts frames again, else after [`RETRY`], and after each failed retry after
//! twice the time, up to [`MAX_RETRY`]. Bounded by the number of sockets, each of which is marked while it is
//! here.

use alloc::vec::Vec;

use crate::base::{Duration, Instant, SlotId};
use crate::shard::link::net::Link;

use crate::shard::sockets::SendBlocked;

/// The wait before the first retry, which a person does not notice.
const RETRY: Duration = Duration::from_millis(5);

/// The longest wait. Failed retries double it: peers that fill the pool and are never read must not
/// cost a retry every few milliseconds.
const MAX_RETRY: Duration = Duration::from_millis(80);

/// The sockets that wait, and the time of the next retry.
pub(crate) struct RetryQueue {
    waiting: Vec<SlotId>,
    retry_at: Option<Instant>,
    /// Time to the next retry.
    pause: Duration,
    /// When the last retry was.
    retried_at: Instant,
    /// One of the sockets waits for a full device.
    for_device: bool,
}

impl Default for RetryQueue {
    fn default() -> RetryQueue {
        RetryQueue {
            waiting: Vec::new(),
            retry_at: None,
            pause: RETRY,
            retried_at: Instant::ZERO,
            for_device: false,
        }
    }
}

impl RetryQueue {
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
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }

    /// A socket waits for a full device: the retry is due when the device has space.
    pub(crate) fn wait_for_device(&mut self) {
        self.for_device = true;
    }

    /// Enqueues a socket that cannot send now.
    pub(crate) fn enter(&mut self, now: Instant, id: SlotId, blocked: &mut SendBlocked) {
        self.schedule(now);
        blocked.is_blocked = true;
        if !core::mem::replace(&mut blocked.for_retry, true) {
            self.waiting.push(id);
        }
    }

    /// The sockets to retry now, if a retry is due. Give the list
    /// back with [`RetryQueue::keep`].
    #[inline]
    pub(crate) fn due(&mut self, now: Instant, link: &Link) -> Option<Vec<SlotId>> {
        let at = self.retry_at?;
        self.due_by(now, at, link)
    }

    #[cold]
    fn due_by(&mut self, now: Instant, at: Instant, link: &Link) -> Option<Vec<SlotId>> {
        let has_space = self.for_device && !link.has_unsent_frames();
        if now < at && !has_space {
            return None;
        }
        self.retry_at = None;
        self.retried_at = now;
        self.pause = (self.pause * 2).min(MAX_RETRY);
        self.for_device = false;
        Some(core::mem::take(&mut self.waiting))
    }

    /// Keeps the storage of a list that is done with.
    pub(crate) fn keep(&mut self, mut storage: Vec<SlotId>) {
        if self.waiting.is_empty() {
            storage.clear();
            self.waiting = storage;
        }
    }
}
