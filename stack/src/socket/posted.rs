//! Posted receive: buffers posted by the application in advance, which are filled and completed in order.
//!
//! ```text
//!   queue:  [ ended, memory in use ]* [ active ][ next ][ … ]
//!                                        │        └ second range          ┐ posted to the device,
//!                                        └ first range, from `filled` on  ┘ if it can place
//!   bytes:  stream ──► receive queue ──► active.filled      (copied, unless the device placed them)
//! ```
//!
//! **Input**: the receive queue after each burst ([`Posted::deliver`]), and once more when the device has no
//! more frames ([`Posted::end_burst`]). Only then a push, the low-water mark or the idle time-out completes a
//! buffer, so that a frame of the same message is not missed. **Output**: [`Completed`] buffers in the order
//! of posting, each with its exact length, and hints to the device ([`Placer`]).
//!
//! **Invariants.** Bytes are delivered to the active buffer only, at `filled`; the later buffers are empty. The ranges
//! posted to the device are contiguous in the stream: `PostedRanges::next` is the stream offset of the first byte of
//! the first range. If that no longer holds (a buffer was completed early, bytes arrived without placement) the ranges
//! are revoked before anything is written, and bytes that were placed at a wrong position are copied elsewhere. A
//! buffer is returned only when no writable range and no mbuf of it is left.
//!
//! At most two buffers are registered with the device (`registrations.rs`). The caller selects the device and
//! the flow, and waits. Source: the state machine of NICs with direct data placement (FreeBSD's t4_ddp.c);
//! `docs/published.md` names the counterparts.

mod completion;
mod heuristics;
mod registrations;

use alloc::collections::VecDeque;

use crate::base::{Duration, Instant};
use crate::mbuf::{BufId, Pool, PostedBuf, RecvBuf, RecvQueue, WritableRange};

use crate::socket::SocketError;
use heuristics::{PlacementCredit, Pushes};
use registrations::Registrations;

/// Maximum posted buffers of a socket.
pub const MAX_POSTED: usize = 256;

/// Maximum bytes copied for a socket before others are served: about an L2 cache.
const COPY_BATCH: usize = 256 << 10;

/// Placed bytes of a buffer from which a hint pays off: a hint costs about as much as a copy of a few KiB.
const MIN_PLACED_BYTES: usize = 16 << 10;

/// Placed bytes per frame from which placement pays off on a device that makes a system call for each placed
/// frame, and one for several frames otherwise.
const MIN_FRAME_BYTES: usize = 8 << 10;

/// When a buffer is completed before it is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompletionPolicy {
    /// It has at least this many bytes, and at least 1. A value above its length means when it is full.
    pub low_water_bytes: usize,
    /// The last segment received has PSH, unless pushes follow each other so closely that they do not mark
    /// ends of messages.
    pub on_push: bool,
    /// It has bytes, and nothing was received for this time. `None`: no time-out.
    pub idle: Option<Duration>,
}

impl Default for CompletionPolicy {
    /// When full, on a push, or after an idle time of a millisecond.
    fn default() -> CompletionPolicy {
        CompletionPolicy {
            low_water_bytes: usize::MAX,
            on_push: true,
            idle: Some(Duration::from_millis(1)),
        }
    }
}

/// The placement interface of the device for one flow.
pub trait Placer {
    /// Posts ranges for the bytes from stream offset `next` on, instead of those posted before. False if the
    /// device cannot place.
    fn place(&mut self, next: u64, first: WritableRange, second: Option<WritableRange>) -> bool;

    /// Posts another range behind the last one. False if all ranges have to be posted again.
    fn place_next(&mut self, second: WritableRange) -> bool;

    /// Revokes all ranges; the device writes to none of them from now on.
    fn revoke(&mut self);

    /// Registers a buffer.
    fn register(&mut self, buffer: BufId);

    /// Deregisters a buffer.
    fn release(&mut self, buffer: BufId);

    /// Whether the device makes a system call per placed frame.
    fn has_syscall_per_frame(&self) -> bool;
}

/// The context of an operation.
pub struct IoContext<'a> {
    /// The receive queue of the connection.
    pub recv: &'a mut RecvQueue,
    /// The pool of the shard.
    pub pool: &'a mut Pool,
    /// The placement interface of the device.
    pub placer: &'a mut dyn Placer,
    /// Whether placement hints are allowed for this connection.
    pub may_place: bool,
}

/// The state of the stream when the device has no more frames.
#[derive(Clone, Copy, Debug)]
pub struct StreamState {
    /// The present time.
    pub now: Instant,
    /// Whether the last byte received was pushed (PSH).
    pub is_pushed: bool,
    /// Bytes sent on the connection: pushes with a reply between them are messages.
    pub sent: u64,
    /// Set when no more bytes will arrive: `Ok` at the end of the stream, or the error.
    pub ended: Option<Result<(), SocketError>>,
}

/// The result of [`Posted::deliver`].
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Delivered {
    /// Bytes delivered to buffers.
    pub bytes: usize,
    /// Bytes copied, out of `bytes`.
    pub copied: usize,
    /// Bytes are left although a buffer has space: call again soon.
    pub is_unfinished: bool,
    /// A buffer was filled.
    pub has_filled: bool,
}

/// A completed buffer.
#[derive(Debug)]
pub struct Completed<T> {
    /// The token passed to [`Posted::post`].
    pub token: T,
    /// The buffer, with the bytes received.
    pub buf: RecvBuf,
    /// Why it is empty, unless the stream ended.
    pub error: Option<SocketError>,
}

/// A posted buffer.
struct Entry<T> {
    buf: PostedBuf,
    /// Bytes delivered.
    filled: usize,
    /// Bytes placed by the device, out of `filled`.
    placed: usize,
    /// Mbufs that the placed bytes arrived in.
    placed_mbufs: usize,
    policy: CompletionPolicy,
    /// `None` if it is abandoned: its bytes return to the receive queue.
    token: Option<T>,
    /// Set when it has ended, with the error if it is empty.
    end: Option<Option<SocketError>>,
}

impl<T> Entry<T> {
    fn is_full(&self) -> bool {
        self.filled == self.buf.capacity()
    }

    /// Whether it ended with the error of the stream, which is reported once.
    fn reports_error(&self) -> bool {
        self.end.flatten().is_some_and(|e| e != SocketError::Cancelled)
    }

    /// Whether placement has cost less than copies.
    fn placement_paid(&self, has_syscall_per_frame: bool) -> bool {
        let has_long_frames = self.placed >= self.placed_mbufs.max(1) * MIN_FRAME_BYTES;
        let is_enough =
            self.is_full() || self.placed >= MIN_PLACED_BYTES.min(self.buf.capacity() / 2);
        is_enough && (has_long_frames || self.placed_mbufs == 0 || !has_syscall_per_frame)
    }
}

/// The ranges posted to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PostedRanges {
    /// Stream offset of the first byte of the first range.
    next: u64,
    first: BufId,
    second: Option<BufId>,
}

/// The posted buffers of one connection.
pub struct Posted<T> {
    queue: VecDeque<Entry<T>>,
    /// Entries that have ended.
    ended: usize,
    /// Whether an entry is abandoned.
    has_abandoned: bool,
    finished: VecDeque<Completed<T>>,
    device: Option<PostedRanges>,
    /// The device may still match frames against this flow, although it has no range left.
    is_flow_known: bool,
    registered: Registrations,
    credit: PlacementCredit,
    /// [`Placer::has_syscall_per_frame`] at the last hint.
    has_syscall_per_frame: bool,
    pushes: Pushes,
    /// The socket is closed: no more hints are given.
    is_closed: bool,
    /// Stream offset of urgent data: when it is received, the active buffer is completed.
    flush_to: Option<u64>,
    last_arrival: Instant,
}

impl<T> Default for Posted<T> {
    fn default() -> Posted<T> {
        Posted {
            queue: VecDeque::new(),
            ended: 0,
            has_abandoned: false,
            finished: VecDeque::new(),
            device: None,
            is_flow_known: false,
            registered: Registrations::default(),
            credit: PlacementCredit::default(),
            has_syscall_per_frame: false,
            pushes: Pushes::default(),
            is_closed: false,
            flush_to: None,
            last_arrival: Instant::ZERO,
        }
    }
}

impl<T> Posted<T> {
    /// Posts a buffer behind the others. Returns it if there are [`MAX_POSTED`].
    pub fn post(
        &mut self,
        buf: RecvBuf,
        policy: CompletionPolicy,
        token: T,
    ) -> Result<(), (RecvBuf, T)> {
        if self.queue.len() >= MAX_POSTED {
            return Err((buf, token));
        }
        self.queue.push_back(Entry {
            buf: buf.post(),
            filled: 0,
            placed: 0,
            placed_mbufs: 0,
            policy,
            token: Some(token),
            end: None,
        });
        Ok(())
    }

    /// Whether there are posted buffers, which reads have to wait for.
    pub fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The tokens of the posted buffers, in order.
    pub fn tokens(&self) -> impl Iterator<Item = &T> {
        self.queue.iter().filter_map(|e| e.token.as_ref())
    }

    /// The next completed buffer.
    pub fn pop_finished(&mut self) -> Option<Completed<T>> {
        self.finished.pop_front()
    }

    /// Urgent data was received up to this stream offset: the active buffer is completed as soon as all
    /// bytes before it have arrived.
    pub fn flush(&mut self, to: u64) {
        self.flush_to = self.flush_to.max(Some(to));
    }

    /// Delivers the bytes in the receive queue to the buffers, and updates the hints of the device.
    pub fn deliver(&mut self, now: Instant, io: &mut IoContext<'_>) -> Delivered {
        if self.has_abandoned {
            self.unread_abandoned(io);
        }
        let mut taken = Delivered::default();
        self.end_full(now);
        while io.recv.readable() > 0 && taken.copied < COPY_BATCH {
            let Some(at) = self.active() else { break };
            let placed = self.accept_placed(at, io);
            let copied = if placed > 0 { 0 } else { self.copy_in(at, io, COPY_BATCH) };
            if placed + copied == 0 {
                break;
            }
            taken.bytes += placed + copied;
            taken.copied += copied;
            taken.has_filled |= self.end_full(now);
        }
        if taken.bytes > 0 {
            self.last_arrival = now;
        }
        taken.is_unfinished = io.recv.readable() > 0 && self.active().is_some();
        self.complete_ended(io);
        self.update_device(now, io);
        taken
    }

    /// Whether a new buffer is only queued behind the one that the device is filling, so that
    /// [`Posted::notify_device`] can be deferred to the next poll of the device.
    pub fn may_wait(&self, recv: &RecvQueue) -> bool {
        let is_usual = self.ended == 0 && !self.has_abandoned && !self.is_closed;
        is_usual && self.device.is_some() && recv.readable() == 0
    }

    /// Updates the hints of the device for newly posted buffers.
    pub fn notify_device(&mut self, now: Instant, io: &mut IoContext<'_>) {
        if self.device.is_some() {
            self.update_device(now, io);
        }
    }

    /// Completes buffers that are not full by their policy. Called after [`Posted::deliver`] when the device
    /// has no more frames. True if a buffer reports the error of the stream.
    pub fn end_burst(&mut self, stream: &StreamState, io: &mut IoContext<'_>) -> bool {
        let mut reports_error = false;
        if io.recv.readable() == 0 {
            match stream.ended {
                // Abandoned bytes that could not be returned yet come before the end.
                Some(_) if self.has_abandoned => {}
                Some(why) => reports_error = self.end_all(why.err()) && why.is_err(),
                None => self.end_by_policy(stream, io.recv.next()),
            }
            self.flush_to = self.flush_to.filter(|to| io.recv.next() < *to);
        }
        if self.ended > 0 {
            // A buffer of length 0 behind an ended one is full: it must not be posted to the device.
            self.end_full(stream.now);
            self.complete_ended(io);
            self.update_device(stream.now, io);
        }
        reports_error
    }

    /// The idle time-out of the active buffer, when [`Posted::end_burst`] has to be called.
    pub fn next_deadline(&self) -> Option<Instant> {
        let active = self.active().and_then(|i| self.queue.get(i))?;
        let idle = active.policy.idle.filter(|_| active.filled > 0)?;
        Some(self.last_arrival + idle)
    }

    /// Completes the buffer for which `matches` is true, with its bytes or as cancelled. Call
    /// [`Posted::deliver`] before, so that received bytes are counted, and [`Posted::pop_finished`] after it.
    /// False if there is none.
    pub fn cancel(&mut self, io: &mut IoContext<'_>, matches: impl Fn(&T) -> bool) -> bool {
        let found = self.find(matches);
        if let Some(at) = found {
            self.end(at, Some(SocketError::Cancelled));
            self.complete_ended(io);
        }
        found.is_some()
    }

    /// Abandons the buffer for which `matches` is true: its bytes return to the front of the receive queue. False if
    /// the buffer has ended and later bytes have been delivered already, or if it ended with an error, which no later
    /// call would report: it will be completed.
    pub fn abandon(&mut self, io: &mut IoContext<'_>, matches: impl Fn(&T) -> bool) -> bool {
        let found = self.queue.iter().position(|e| e.token.as_ref().is_some_and(&matches));
        let Some(at) = found else { return true };
        let is_last = self.queue.iter().skip(at + 1).all(|e| e.filled == 0);
        let Some(e) = self.queue.get_mut(at) else { return true };
        if e.reports_error() {
            return false;
        }
        if e.filled > 0 && e.end.is_some() {
            if !is_last {
                return false;
            }
            e.end = None;
            self.ended -= 1;
        }
        e.token = None;
        self.has_abandoned |= e.end.is_none();
        self.revoke(io);
        if self.has_abandoned {
            self.unread_abandoned(io);
        }
        true
    }

    /// Completes all buffers, since the socket is closed.
    pub fn cancel_all(&mut self, io: &mut IoContext<'_>) {
        // Bytes that could not be returned to the receive queue are discarded with it.
        self.queue.retain(|e| e.end.is_some() || e.token.is_some());
        self.has_abandoned = false;
        self.end_all(Some(SocketError::Cancelled));
        self.is_closed = true;
        self.revoke(io);
        self.complete_ended(io);
        self.registered.clear(io.placer);
    }

    /// Whether a buffer has ended while its memory is still referenced, or its bytes could not be returned to
    /// the receive queue.
    pub fn is_draining(&self) -> bool {
        self.ended > 0 || self.has_abandoned
    }

    /// Completes ended buffers whose memory has no other references.
    pub fn drain(&mut self, io: &mut IoContext<'_>) {
        self.complete_ended(io);
    }
}

// Delivery and placement.
impl<T> Posted<T> {
    /// The buffer for the next byte. `None` if there is none or it is abandoned.
    #[inline]
    fn active(&self) -> Option<usize> {
        let at = if self.ended == 0 { 0 } else { self.first_open()? };
        self.queue.get(at).filter(|e| e.token.is_some()).map(|_| at)
    }

    /// The first entry that has not ended: one of the first `ended + 1`.
    #[inline]
    fn first_open(&self) -> Option<usize> {
        (0..=self.ended).find(|at| self.queue.get(*at).is_some_and(|e| e.end.is_none()))
    }

    fn find(&self, matches: impl Fn(&T) -> bool) -> Option<usize> {
        self.queue.iter().position(|e| e.end.is_none() && e.token.as_ref().is_some_and(&matches))
    }

    /// Accepts the first mbuf if the device placed it at its position in the buffer. Returns its bytes.
    fn accept_placed(&mut self, at: usize, io: &mut IoContext<'_>) -> usize {
        let (Some(entry), Some(front)) = (self.queue.get_mut(at), io.recv.front()) else {
            return 0;
        };
        let is_in_place =
            front.placed().is_some_and(|p| p.offset == entry.filled && p.buffer == entry.buf.id());
        if !is_in_place {
            return 0;
        }
        let n = front.len().min(entry.buf.capacity() - entry.filled);
        entry.filled += n;
        entry.placed += n;
        entry.placed_mbufs += 1;
        io.recv.consume(n, io.pool);
        if let Some(device) = &mut self.device {
            device.next += n as u64;
        }
        n
    }

    /// Copies bytes into the buffer, about `max` at most, up to the next mbuf that is placed in it. 0 if mbufs
    /// of this buffer are still in use elsewhere.
    #[inline(never)]
    fn copy_in(&mut self, at: usize, io: &mut IoContext<'_>, max: usize) -> usize {
        self.revoke(io);
        let Some(entry) = self.queue.get_mut(at) else { return 0 };
        let id = entry.buf.id();
        let range = entry.buf.writable_range(entry.filled).or_else(|| {
            // Bytes placed behind `filled` are not at their final position.
            io.recv.evict(id, io.pool);
            entry.buf.writable_range(entry.filled)
        });
        let Some(mut range) = range else { return 0 };
        let mut copied = 0;
        while let Some(front) = io.recv.front() {
            if copied >= max || front.placed().is_some_and(|p| p.buffer == id) {
                break;
            }
            let n = range.write_mbuf(front);
            if n == 0 && !front.is_empty() {
                break;
            }
            io.recv.consume(n, io.pool);
            copied += n;
        }
        entry.filled += copied;
        copied
    }

    /// Revokes the ranges of the device.
    #[inline(never)]
    fn revoke(&mut self, io: &mut IoContext<'_>) {
        if self.device.take().is_some() {
            io.placer.revoke();
            self.is_flow_known = false;
        }
    }

    /// Posts the next ranges to the device, unless it has them.
    fn update_device(&mut self, now: Instant, io: &mut IoContext<'_>) {
        if !io.may_place || self.is_closed {
            return self.revoke(io);
        }
        let is_quiet = io.recv.readable() == 0 && io.recv.out_of_order_bytes() == 0;
        if !is_quiet {
            return;
        }
        let Some(at) = self.active().filter(|_| self.credit.allows(now)) else {
            return self.revoke(io);
        };
        let id_of = |i: usize| self.queue.get(i).map(|e| e.buf.id());
        let Some(first) = id_of(at) else { return };
        let is_useful = |e: &&Entry<T>| e.end.is_none() && e.token.is_some() && !e.is_full();
        let second = self.queue.get(at + 1).filter(is_useful).map(|e| e.buf.id());
        let next = io.recv.next();
        let known = self.device.filter(|d| d.next == next && d.first == first);
        let is_posted = match (known.map(|d| d.second), second) {
            (Some(known), second) if known == second => true,
            (Some(None), Some(second)) => self.place_next(at + 1, [first, second], io),
            _ => false,
        };
        if !is_posted {
            self.revoke(io);
            self.place(now, at, PostedRanges { next, first, second }, io);
        }
    }

    /// Posts only the second range: the usual case of a reader that posts one buffer again while the other is
    /// being filled.
    fn place_next(
        &mut self,
        at: usize,
        [first, second]: [BufId; 2],
        io: &mut IoContext<'_>,
    ) -> bool {
        let Some(range) = self.queue.get_mut(at).and_then(|e| e.buf.writable_range(0)) else {
            return false;
        };
        self.registered.use_buffers([Some(first), Some(second)], io.placer);
        let is_added = io.placer.place_next(range);
        if let Some(device) = self.device.as_mut().filter(|_| is_added) {
            device.second = Some(second);
        }
        is_added
    }

    #[inline(never)]
    fn place(&mut self, now: Instant, at: usize, ranges: PostedRanges, io: &mut IoContext<'_>) {
        let mut entries = self.queue.iter_mut().skip(at);
        let Some(first) = entries.next().and_then(|e| e.buf.writable_range(e.filled)) else {
            return;
        };
        let second = ranges.second.and_then(|_| entries.next()?.buf.writable_range(0));
        let ranges = PostedRanges { second: second.as_ref().map(WritableRange::buffer), ..ranges };
        self.registered.use_buffers([Some(ranges.first), ranges.second], io.placer);
        if io.placer.place(ranges.next, first, second) {
            self.device = Some(ranges);
            self.is_flow_known = true;
            self.has_syscall_per_frame = io.placer.has_syscall_per_frame();
        } else {
            self.credit.refused(now);
            self.registered.clear(io.placer);
        }
    }
}

#[cfg(test)]
mod tests;
