//! When a posted buffer is over, and how it goes back: full, by a rule, at the end of the stream; with
//! nothing left that refers to its memory.

use std::collections::VecDeque;

use fulmar_base::Instant;
use fulmar_mbuf::BufId;

use super::{Entry, Finished, Io, Posted, Stream};
use crate::SocketError;

/// Bytes that one mbuf refers to at most when they are put back.
const PUT_BACK_BYTES: usize = 1 << 30;

impl<T> Posted<T> {
    pub(super) fn end(&mut self, at: usize, nothing: Option<SocketError>) {
        if let Some(e) = self.queue.get_mut(at).filter(|e| e.end.is_none()) {
            e.end = Some(nothing.filter(|_| e.filled == 0));
            self.ended += 1;
        }
    }

    /// Ends the active buffer if it is full, and those of no bytes behind it; whether there were any.
    #[inline]
    pub(super) fn end_full(&mut self, now: Instant) -> bool {
        let mut has_ended = false;
        while let Some(at) = self.active()
            && self.queue.get(at).is_some_and(Entry::is_full)
        {
            self.end_one_full(at, now);
            has_ended = true;
        }
        has_ended
    }

    #[inline(never)]
    fn end_one_full(&mut self, at: usize, now: Instant) {
        let Some(entry) = self.queue.get_mut(at) else { return };
        entry.end = Some(None);
        self.ended += 1;
        if entry.filled > 0 {
            self.score.note(now, entry.was_worth_it(self.calls_for_each));
        }
        if let Some(d) = &mut self.device
            && d.first == entry.hold.id()
        {
            // The device drops a room that is full, and goes on with the second.
            match d.second.take() {
                Some(second) => d.first = second,
                None => self.device = None,
            }
        }
    }

    /// Low-water mark, urgent data, push, pause.
    pub(super) fn end_by_rule(&mut self, stream: &Stream, is_flushed: bool) {
        let Some(at) = self.active() else { return };
        let Some(entry) = self.queue.get(at).filter(|e| e.filled > 0) else { return };
        let rule = entry.rule;
        let is_pause = rule.idle.is_some_and(|idle| stream.now >= self.last_arrival + idle);
        let is_pushed = rule.on_push
            && stream.is_pushed
            && self.pushes.are_messages(self.last_arrival, stream.sent);
        if is_pause {
            self.pushes.pause();
        }
        if entry.filled >= rule.low_water_bytes.max(1) || is_flushed || is_pushed || is_pause {
            self.score.note(stream.now, entry.was_worth_it(self.calls_for_each));
            self.end(at, None);
        }
    }

    /// Whether one of them had nothing.
    pub(super) fn end_all(&mut self, error: Option<SocketError>) -> bool {
        let has_empty = self.queue.iter().any(|e| e.end.is_none() && e.filled == 0);
        for at in 0..self.queue.len() {
            if self.queue.get(at).is_some_and(|e| e.token.is_some()) {
                self.end(at, error);
            }
        }
        has_empty
    }

    /// Hands out what is over, in order; what has nothing and was cancelled need not wait for those
    /// before it.
    pub(super) fn release_ended(&mut self, io: &mut Io<'_>) {
        // Nearly always it is the first, and there is no other.
        while self.ended > 0 && self.queue.front().is_some_and(|e| e.end.is_some()) {
            if !self.release(0, io) {
                break;
            }
        }
        if self.ended > 0 {
            self.release_scattered(io);
        }
        if self.queue.is_empty() && std::mem::take(&mut self.is_looked_for) {
            // Also where the last room was full: looking for a flow costs every frame.
            self.device = None;
            io.placer.unplace();
        }
    }

    /// As [`Posted::release_ended`], where the first is not over or not free.
    #[cold]
    fn release_scattered(&mut self, io: &mut Io<'_>) {
        let (mut at, mut is_first) = (0, true);
        while self.ended > 0 && at < self.queue.len() {
            let may_go = self.queue.get(at).is_some_and(|e| {
                e.end.is_some() && (is_first || e.end == Some(Some(SocketError::Cancelled)))
            });
            if may_go && self.release(at, io) {
                continue;
            }
            is_first = false;
            at += 1;
        }
    }

    /// Hands one out; false if something refers to its memory.
    fn release(&mut self, at: usize, io: &mut Io<'_>) -> bool {
        let Some(entry) = self.queue.get(at) else { return false };
        let id = entry.hold.id();
        let is_shared = entry.hold.is_shared();
        let is_placed = self.device.is_some_and(|d| d.first == id || d.second == Some(id));
        if (is_shared || is_placed) && !self.clear(at, id, is_placed, io) {
            return false;
        }
        // Nearly always the first, which is cheaper to take off the front than out of the middle.
        let entry = if at == 0 { self.queue.pop_front() } else { self.queue.remove(at) };
        let Some(Entry { hold, filled, token, end, .. }) = entry else { return false };
        self.ended -= 1;
        if let (Ok(buf), Some(token)) = (hold.release(filled), token) {
            self.finished.push_back(Finished { token, buf, error: end.flatten() });
        }
        true
    }

    /// Gets back what the device or a queue has of a buffer; whether nobody refers to it any more.
    #[cold]
    fn clear(&mut self, at: usize, id: BufId, is_placed: bool, io: &mut Io<'_>) -> bool {
        if is_placed {
            self.withdraw(io);
        }
        let is_shared = |q: &VecDeque<Entry<T>>| q.get(at).is_none_or(|e| e.hold.is_shared());
        if is_shared(&self.queue) {
            io.recv.evict(id, io.pool);
            io.pool.drain_remote();
        }
        !is_shared(&self.queue)
    }

    /// Puts bytes of a buffer that nobody wants back into the stream.
    #[cold]
    pub(super) fn put_back_abandoned(&mut self, io: &mut Io<'_>) {
        while let Some(at) = self.queue.iter().position(|e| e.end.is_none() && e.token.is_none()) {
            let Some(entry) = self.queue.get_mut(at) else { return };
            while entry.filled > 0 {
                // From the end, so that what is left is still what comes first.
                let n = entry.filled.min(PUT_BACK_BYTES);
                let Ok(m) = entry.hold.written(entry.filled - n..entry.filled, io.pool) else {
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
