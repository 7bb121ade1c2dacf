//! Completion of posted buffers: when a buffer ends (full, by its policy, at the end of the stream), and its return
//! once its memory has no other references.

use alloc::collections::VecDeque;

use crate::base::Instant;
use crate::mbuf::BufId;

use super::{Completed, Entry, IoContext, Posted, StreamState};
use crate::socket::SocketError;

/// Maximum bytes of an mbuf that is returned to the receive queue.
const MAX_UNREAD_BYTES: usize = 1 << 30;

impl<T> Posted<T> {
    /// Ends a buffer, with an error if it is empty.
    pub(super) fn end(&mut self, at: usize, error_if_empty: Option<SocketError>) {
        if let Some(e) = self.queue.get_mut(at).filter(|e| e.end.is_none()) {
            e.end = Some(error_if_empty.filter(|_| e.filled == 0));
            self.ended += 1;
        }
    }

    /// Ends the active buffer if it is full, and empty-length buffers after it. False if it is not full.
    #[inline]
    pub(super) fn end_full(&mut self, now: Instant) -> bool {
        let mut has_full = false;
        while let Some(at) = self.active()
            && self.queue.get(at).is_some_and(Entry::is_full)
        {
            self.end_one_full(at, now);
            has_full = true;
        }
        has_full
    }

    #[inline(never)]
    fn end_one_full(&mut self, at: usize, now: Instant) {
        let Some(entry) = self.queue.get_mut(at) else { return };
        entry.end = Some(None);
        self.ended += 1;
        if entry.filled > 0 {
            self.credit.record(now, entry.placement_paid(self.has_syscall_per_frame));
        }
        if let Some(d) = &mut self.device
            && d.first == entry.buf.id()
        {
            // The device drops a full range and continues with the second.
            match d.second.take() {
                Some(second) => d.first = second,
                None => self.device = None,
            }
        }
    }

    /// Ends the active buffer by its low-water mark, urgent data, a push, or the idle time-out.
    pub(super) fn end_by_policy(&mut self, stream: &StreamState, next: u64) {
        let Some(at) = self.active() else { return };
        let Some(entry) = self.queue.get(at).filter(|e| e.filled > 0) else { return };
        let policy = entry.policy;
        let is_pause = policy.idle.is_some_and(|idle| stream.now >= self.last_arrival + idle);
        let is_pushed = policy.on_push
            && stream.is_pushed
            && self.pushes.ends_message(self.last_arrival, stream.sent);
        if is_pause {
            self.pushes.pause();
        }
        let is_flushed = self.flush_to.is_some_and(|to| next >= to);
        if entry.filled >= policy.low_water_bytes.max(1) || is_flushed || is_pushed || is_pause {
            self.credit.record(stream.now, entry.placement_paid(self.has_syscall_per_frame));
            self.end(at, None);
        }
    }

    /// Ends all buffers. True if one of them was empty, and so reports `error`.
    pub(super) fn end_all(&mut self, error: Option<SocketError>) -> bool {
        let has_empty = self.queue.iter().any(|e| e.end.is_none() && e.filled == 0);
        for at in 0..self.queue.len() {
            if self.queue.get(at).is_some_and(|e| e.token.is_some()) {
                self.end(at, error);
            }
        }
        has_empty
    }

    /// Completes ended buffers in order. Empty cancelled buffers do not wait for those before them.
    pub(super) fn complete_ended(&mut self, io: &mut IoContext<'_>) {
        // The usual case: the first buffer has ended, and no other.
        while self.ended > 0 && self.queue.front().is_some_and(|e| e.end.is_some()) {
            if !self.complete(0, io) {
                break;
            }
        }
        if self.ended > 0 {
            self.complete_out_of_order(io);
        }
        if self.queue.is_empty() && core::mem::take(&mut self.is_flow_known) {
            // Also if the last range was filled: matching a flow costs time on every frame.
            self.device = None;
            io.placer.revoke();
        }
    }

    /// As [`Posted::complete_ended`], if the first buffer has not ended or its memory is in use.
    #[cold]
    fn complete_out_of_order(&mut self, io: &mut IoContext<'_>) {
        let (mut at, mut is_first) = (0, true);
        while self.ended > 0 && at < self.queue.len() {
            let may_complete = self.queue.get(at).is_some_and(|e| {
                e.end.is_some() && (is_first || e.end == Some(Some(SocketError::Cancelled)))
            });
            if may_complete && self.complete(at, io) {
                continue;
            }
            is_first = false;
            at += 1;
        }
    }

    /// Completes a buffer. False if its memory is still referenced.
    fn complete(&mut self, at: usize, io: &mut IoContext<'_>) -> bool {
        let Some(entry) = self.queue.get(at) else { return false };
        let id = entry.buf.id();
        if (entry.buf.is_shared() || self.device_has(id)) && !self.reclaim(at, id, io) {
            return false;
        }
        // The usual case is the first, for which `pop_front` is cheaper.
        let entry = if at == 0 { self.queue.pop_front() } else { self.queue.remove(at) };
        let Some(Entry { buf, filled, token, end, .. }) = entry else { return false };
        self.ended -= 1;
        if let (Ok(buf), Some(token)) = (buf.release(filled), token) {
            self.finished.push_back(Completed { token, buf, error: end.flatten() });
        }
        true
    }

    /// Whether the device has a writable range of this buffer.
    #[inline]
    fn device_has(&self, id: BufId) -> bool {
        self.device.is_some_and(|d| d.first == id || d.second == Some(id))
    }

    /// Revokes the buffer's range from the device and copies its bytes in the receive queue elsewhere. False
    /// if its memory is still referenced.
    #[cold]
    fn reclaim(&mut self, at: usize, id: BufId, io: &mut IoContext<'_>) -> bool {
        if self.device_has(id) {
            self.revoke(io);
        }
        let is_shared = |q: &VecDeque<Entry<T>>| q.get(at).is_none_or(|e| e.buf.is_shared());
        if is_shared(&self.queue) {
            io.recv.evict(id, io.pool);
            io.pool.drain_remote();
        }
        !is_shared(&self.queue)
    }

    /// Returns the bytes of abandoned buffers to the receive queue.
    #[cold]
    pub(super) fn unread_abandoned(&mut self, io: &mut IoContext<'_>) {
        // An empty one has nothing to return, and must not count until there is memory for the others.
        self.queue.retain(|e| e.token.is_some() || e.end.is_some() || e.filled > 0);
        while let Some(at) = self.queue.iter().position(|e| e.end.is_none() && e.token.is_none()) {
            let Some(entry) = self.queue.get_mut(at) else { return };
            while entry.filled > 0 {
                // From the end, so that the bytes left are the first ones.
                let n = entry.filled.min(MAX_UNREAD_BYTES);
                let Ok(m) = entry.buf.written(entry.filled - n..entry.filled, io.pool) else {
                    return;
                };
                io.recv.unread(m);
                entry.filled -= n;
            }
            self.queue.remove(at);
        }
        self.has_abandoned = false;
    }
}
