//! Posted receive: buffers that the user gave away before their bytes came, filled in the order in which
//! they were posted.
//!
//! ```text
//!   queue:  [ over, waits for its memory ]* [ active ][ next ][ … ]
//!                                              │        └ second room  ┐ with the device,
//!                                              └ first room, from `filled` on ┘ if it can place
//!   bytes:  stream ──► receive queue ──► active.filled            (copied, unless they lie there already)
//! ```
//!
//! **In**: the receive queue after each burst ([`Posted::take_in`]), and once more when the device has run
//! dry ([`Posted::settle`]): only then is it decided whether a push, the low-water mark or a pause ends a
//! buffer, so that a frame which came right behind is not left out. **Out**: [`Finished`] buffers in the
//! order of posting, each with its exact count; and what the device is told, through [`Placer`].
//!
//! **Invariants.** Bytes are given to the active buffer only, at `filled`; buffers behind it are empty. What
//! a device expects is one straight line from the stream to the rooms: `Expectation::next` is the offset of
//! the first byte of its first room. Where that is no longer so (a buffer ended short, a byte came another
//! way) the rooms are taken back before anything is written, and bytes that lie in a buffer where they do
//! not belong are moved out of it. A buffer goes back only when no room and no mbuf of it is left.
//!
//! At most two buffers are known to the device, in use or remembered ([`Registrations`]). Not here: which
//! device, which flow, who waits. Source: the state machine of the offloads with direct data placement
//! (FreeBSD's t4_ddp.c); `docs/published.md` names the counterparts.

mod ends;
mod pace;
mod registrations;

use std::collections::VecDeque;

use fulmar_base::{Duration, Instant};
use fulmar_mbuf::{BufId, Hold, Pool, RecvBuf, RecvQueue, Room};

use crate::SocketError;
use pace::{Pushes, Score};
pub use registrations::Registrations;

/// Buffers that may wait in one socket.
pub const MAX_POSTED: usize = 256;

/// Bytes copied for one socket before others have a turn: what stays in a second-level cache, twice.
const COPY_BATCH: usize = 256 << 10;

/// So many bytes placed are worth a hint, however large the buffer: telling a device costs about as much
/// as copying a few KiB.
const WORTH_BYTES: usize = 16 << 10;

/// Where each frame that is placed costs a call, which takes several frames otherwise, placing saves the copy
/// of a frame and pays for its call: worth it from about so many bytes of a frame on.
const LONG_BYTES: usize = 8 << 10;

/// When a buffer is given back although it is not full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Once it has so many bytes; at least 1. More than it holds means when full.
    pub low_water_bytes: usize,
    /// When the peer pushed the last byte received, unless pushes follow each other so closely that they
    /// say nothing.
    pub on_push: bool,
    /// When it has bytes and nothing came for so long; `None`: never for that.
    pub idle: Option<Duration>,
}

impl Default for Rule {
    /// Full, pushed, or a pause of a millisecond.
    fn default() -> Rule {
        Rule { low_water_bytes: usize::MAX, on_push: true, idle: Some(Duration::from_millis(1)) }
    }
}

/// What the machine needs of the device.
pub trait Placer {
    /// From now on the bytes from stream offset `next` on are expected, for these rooms, in place of
    /// anything that was expected before. False: the device cannot.
    fn place(&mut self, next: u64, first: Room, second: Option<Room>) -> bool;

    /// Behind the one room that the device has left comes this one, as if both had been placed at once.
    /// False: it has to be told anew.
    fn place_behind(&mut self, second: Room) -> bool;

    /// Nothing is expected any more; the device writes to no room from now on.
    fn unplace(&mut self);

    /// A buffer is used that is not known yet.
    fn register(&mut self, buffer: BufId);

    /// A known buffer is forgotten.
    fn release(&mut self, buffer: BufId);

    /// Whether the device makes a call for each piece that it places.
    fn calls_for_each(&self) -> bool;
}

/// What a step works on.
pub struct Io<'a> {
    /// Where the bytes come from.
    pub recv: &'a mut RecvQueue,
    /// The shard's buffers.
    pub pool: &'a mut Pool,
    /// The device.
    pub placer: &'a mut dyn Placer,
    /// The stream is one of which the device can be told what comes next.
    pub may_place: bool,
}

/// How the stream stands when the device has run dry.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// The time.
    pub now: Instant,
    /// The last byte received is a pushed one.
    pub is_pushed: bool,
    /// How many bytes this side has sent: an answer between two pushes makes them messages.
    pub sent: u64,
    /// Nothing more will come: `Ok` at the end of the stream, else why.
    pub ended: Option<Result<(), SocketError>>,
}

/// What a step did.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Bytes that the buffers got.
    pub bytes: usize,
    /// Those of them that were copied.
    pub copied: usize,
    /// Bytes wait although a buffer has room: call again soon.
    pub is_unfinished: bool,
    /// A buffer became full.
    pub has_filled: bool,
}

/// A buffer on its way back.
#[derive(Debug)]
pub struct Finished<T> {
    /// Who posted it.
    pub token: T,
    /// The buffer, with what came.
    pub buf: RecvBuf,
    /// Why it has nothing, if that is not the end of the stream.
    pub error: Option<SocketError>,
}

/// One posted buffer.
struct Entry<T> {
    hold: Hold,
    /// Bytes it has, from the front.
    filled: usize,
    /// Those of them that the device put there.
    placed: usize,
    /// In so many pieces.
    pieces: usize,
    rule: Rule,
    /// It is that of a read that waits.
    is_read: bool,
    /// `None`: nobody waits for it any more; its bytes go back into the stream.
    token: Option<T>,
    /// It is over; why it has nothing, if it has nothing.
    end: Option<Option<SocketError>>,
}

impl<T> Entry<T> {
    fn is_full(&self) -> bool {
        self.filled == self.hold.capacity()
    }

    /// Whether it was worth it to tell the device of it, which makes a call for each piece or does not.
    fn was_worth_it(&self, calls_for_each: bool) -> bool {
        let is_in_long_pieces = self.placed >= self.pieces.max(1) * LONG_BYTES;
        if self.is_read {
            return is_in_long_pieces;
        }
        let is_much = self.is_full() || self.placed >= WORTH_BYTES.min(self.hold.capacity() / 2);
        is_much && (is_in_long_pieces || self.pieces == 0 || !calls_for_each)
    }
}

/// What the device expects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Expectation {
    /// Stream offset of the next byte.
    next: u64,
    first: BufId,
    second: Option<BufId>,
}

/// The posted buffers of one connection.
pub struct Posted<T> {
    queue: VecDeque<Entry<T>>,
    /// Entries that are over.
    ended: usize,
    /// Some have no token.
    has_abandoned: bool,
    finished: VecDeque<Finished<T>>,
    device: Option<Expectation>,
    /// The device was told of the flow, and may still look out for it though it has no room any more.
    is_looked_for: bool,
    registered: Registrations,
    score: Score,
    /// What the device said when it was told last ([`Placer::calls_for_each`]).
    calls_for_each: bool,
    pushes: Pushes,
    /// The socket is closed: the device is told nothing any more.
    is_closed: bool,
    /// Once the stream has come so far, what has come is to be given back whatever the rules say.
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
            is_looked_for: false,
            registered: Registrations::default(),
            score: Score::default(),
            calls_for_each: false,
            pushes: Pushes::default(),
            is_closed: false,
            flush_to: None,
            last_arrival: Instant::ZERO,
        }
    }
}

impl<T> Posted<T> {
    /// Adds a buffer behind the others. Gives it back if [`MAX_POSTED`] wait.
    pub fn post(&mut self, buf: RecvBuf, rule: Rule, token: T) -> Result<(), (RecvBuf, T)> {
        self.push(buf, None, rule, token)
    }

    /// As [`Posted::post`], for the buffer of a read that waits. Its first `filled` bytes (at most all) have
    /// come another way: they count as received, and stay.
    pub fn post_read(
        &mut self,
        buf: RecvBuf,
        filled: usize,
        rule: Rule,
        token: T,
    ) -> Result<(), (RecvBuf, T)> {
        self.push(buf, Some(filled), rule, token)
    }

    fn push(
        &mut self,
        buf: RecvBuf,
        read: Option<usize>,
        rule: Rule,
        token: T,
    ) -> Result<(), (RecvBuf, T)> {
        if self.queue.len() >= MAX_POSTED {
            return Err((buf, token));
        }
        let (hold, token) = (buf.post(), Some(token));
        let filled = read.unwrap_or(0).min(hold.capacity());
        let (is_read, placed, pieces, end) = (read.is_some(), 0, 0, None);
        self.queue.push_back(Entry { hold, filled, placed, pieces, rule, token, is_read, end });
        Ok(())
    }

    /// Whether the device may be told of this flow: not for a while if that did not pay.
    pub fn may_place(&mut self, now: Instant) -> bool {
        self.score.allows(now)
    }

    /// Whether buffers wait: reads come behind them.
    pub fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whose buffers wait, in order.
    pub fn tokens(&self) -> impl Iterator<Item = &T> {
        self.queue.iter().filter_map(|e| e.token.as_ref())
    }

    /// The next buffer that is over.
    pub fn pop_finished(&mut self) -> Option<Finished<T>> {
        self.finished.pop_front()
    }

    /// Urgent data came, up to this offset of the stream: what has arrived is given back once it is that
    /// far, which is later if urgent data overtook what belongs in front of it.
    pub fn flush(&mut self, to: u64) {
        self.flush_to = self.flush_to.max(Some(to));
    }

    /// Gives what the receive queue has to the buffers, and tells the device what comes next.
    pub fn take_in(&mut self, now: Instant, io: &mut Io<'_>) -> Taken {
        if self.has_abandoned {
            self.put_back_abandoned(io);
        }
        let mut taken = Taken::default();
        self.end_full(now);
        while io.recv.readable() > 0 && taken.copied < COPY_BATCH {
            let Some(at) = self.active() else { break };
            let placed = self.accept_in_place(at, io);
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
        self.release_ended(io);
        self.tell_device(now, io);
        taken
    }

    /// Whether a buffer that was posted just now has nothing to do but to wait behind the one that the
    /// device is filling: [`Posted::announce`] before the device is looked at again is soon enough.
    pub fn may_wait(&self, recv: &RecvQueue) -> bool {
        let is_usual = self.ended == 0 && !self.has_abandoned && !self.is_closed;
        is_usual && self.device.is_some() && recv.readable() == 0
    }

    /// Tells the device of buffers that were posted since it was told last.
    pub fn announce(&mut self, now: Instant, io: &mut Io<'_>) {
        if self.device.is_some() {
            self.tell_device(now, io);
        }
    }

    /// Decides what is over although it is not full. To be called after [`Posted::take_in`], when the
    /// device has nothing more.
    /// True: somebody has been told the error with which the stream ended.
    pub fn settle(&mut self, stream: &Stream, io: &mut Io<'_>) -> bool {
        let mut is_told = false;
        if io.recv.readable() == 0 {
            match stream.ended {
                Some(why) => is_told = self.end_all(why.err()) && why.is_err(),
                None => {
                    self.end_by_rule(stream, self.flush_to.is_some_and(|to| io.recv.next() >= to))
                }
            }
            self.flush_to = self.flush_to.filter(|to| io.recv.next() < *to);
        }
        if self.ended > 0 {
            // Behind one that ended may stand one of no bytes, for which a device would wait in vain.
            self.end_full(stream.now);
            self.release_ended(io);
            self.tell_device(stream.now, io);
        }
        is_told
    }

    /// When [`Posted::settle`] is to be called at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let active = self.active().and_then(|i| self.queue.get(i))?;
        let idle = active.rule.idle.filter(|_| active.filled > 0)?;
        Some(self.last_arrival + idle)
    }

    /// Ends a buffer of which `is_it`: with what it has, or as cancelled. Call [`Posted::take_in`] first,
    /// so that what has come counts, and collect what is finished. False: there is none.
    pub fn cancel(&mut self, io: &mut Io<'_>, is_it: impl Fn(&T) -> bool) -> bool {
        let found = self.find(is_it);
        if let Some(at) = found {
            self.end(at, Some(SocketError::Cancelled));
            self.release_ended(io);
        }
        found.is_some()
    }

    /// Nobody waits any more for a buffer of which `is_it`: what it has goes back into the stream, to be
    /// received by whoever is next. False: it is over but for somebody who still refers to its memory, and
    /// what follows its bytes has been received already; it comes back as it would have.
    pub fn abandon(&mut self, io: &mut Io<'_>, is_it: impl Fn(&T) -> bool) -> bool {
        let found = self.queue.iter().position(|e| e.token.as_ref().is_some_and(&is_it));
        let Some(at) = found else { return true };
        let is_last = self.queue.iter().skip(at + 1).all(|e| e.filled == 0);
        let Some(e) = self.queue.get_mut(at) else { return true };
        if e.filled > 0 && e.end.is_some() {
            if !is_last {
                return false;
            }
            e.end = None;
            self.ended -= 1;
        }
        e.token = None;
        self.has_abandoned |= e.end.is_none();
        self.withdraw(io);
        if self.has_abandoned {
            self.put_back_abandoned(io);
        }
        true
    }

    /// Ends every buffer: the socket is closed.
    pub fn cancel_all(&mut self, io: &mut Io<'_>) {
        // What could not go back into the stream goes with it.
        self.queue.retain(|e| e.end.is_some() || e.token.is_some());
        self.has_abandoned = false;
        self.end_all(Some(SocketError::Cancelled));
        self.is_closed = true;
        self.withdraw(io);
        self.release_ended(io);
        self.registered.clear(io.placer);
    }

    /// Whether a buffer is over and still waits for its memory, which a device or a queue refers to, or
    /// its bytes could not go back into the stream.
    pub fn is_draining(&self) -> bool {
        self.ended > 0 || self.has_abandoned
    }

    /// Looks again whether memory that was referred to is free. For buffers that are over.
    pub fn drain(&mut self, io: &mut Io<'_>) {
        self.release_ended(io);
    }
}

// Bytes into buffers.
impl<T> Posted<T> {
    /// The buffer that gets the next byte. `None` also while one that nobody wants stands there.
    #[inline]
    fn active(&self) -> Option<usize> {
        let at = if self.ended == 0 { 0 } else { self.first_open()? };
        self.queue.get(at).filter(|e| e.token.is_some()).map(|_| at)
    }

    /// The first that is not over, behind some that are: one of the first `ended + 1`, most often the last
    /// of them.
    #[inline]
    fn first_open(&self) -> Option<usize> {
        (0..=self.ended).find(|at| self.queue.get(*at).is_some_and(|e| e.end.is_none()))
    }

    fn find(&self, is_it: impl Fn(&T) -> bool) -> Option<usize> {
        self.queue.iter().position(|e| e.end.is_none() && e.token.as_ref().is_some_and(&is_it))
    }

    /// The first mbuf, if it lies where it belongs already; returns its bytes.
    fn accept_in_place(&mut self, at: usize, io: &mut Io<'_>) -> usize {
        let (Some(entry), Some(front)) = (self.queue.get_mut(at), io.recv.front()) else {
            return 0;
        };
        let is_there =
            front.placed().is_some_and(|p| p.offset == entry.filled && p.buffer == entry.hold.id());
        if !is_there {
            return 0;
        }
        let n = front.len().min(entry.hold.capacity() - entry.filled);
        entry.filled += n;
        entry.placed += n;
        entry.pieces += 1;
        io.recv.consume(n, io.pool);
        if let Some(device) = &mut self.device {
            device.next += n as u64;
        }
        n
    }

    /// Copies bytes to where they belong, at most about `max`, until some lie there already. 0: bytes of
    /// this buffer are still under way from the device.
    #[inline(never)]
    fn copy_in(&mut self, at: usize, io: &mut Io<'_>, max: usize) -> usize {
        self.withdraw(io);
        let Some(entry) = self.queue.get_mut(at) else { return 0 };
        let id = entry.hold.id();
        let room = entry.hold.room(entry.filled).or_else(|| {
            // What lies behind `filled` is not there for good.
            io.recv.evict(id, io.pool);
            entry.hold.room(entry.filled)
        });
        let Some(mut room) = room else { return 0 };
        let mut copied = 0;
        while let Some(front) = io.recv.front() {
            if copied >= max || front.placed().is_some_and(|p| p.buffer == id) {
                break;
            }
            let n = room.write_mbuf(front);
            if n == 0 && !front.is_empty() {
                break;
            }
            io.recv.consume(n, io.pool);
            copied += n;
        }
        entry.filled += copied;
        copied
    }

    /// Takes the rooms back from the device.
    #[inline(never)]
    fn withdraw(&mut self, io: &mut Io<'_>) {
        if self.device.take().is_some() {
            io.placer.unplace();
            self.is_looked_for = false;
        }
    }

    /// Tells the device what comes next, unless it knows.
    fn tell_device(&mut self, now: Instant, io: &mut Io<'_>) {
        if !io.may_place || self.is_closed {
            return self.withdraw(io);
        }
        let is_quiet = io.recv.readable() == 0 && io.recv.out_of_order_bytes() == 0;
        if !is_quiet {
            return;
        }
        let Some(at) = self.active().filter(|_| self.score.allows(now)) else {
            return self.withdraw(io);
        };
        let id_of = |i: usize| self.queue.get(i).map(|e| e.hold.id());
        let Some(first) = id_of(at) else { return };
        let is_useful = |e: &&Entry<T>| e.end.is_none() && e.token.is_some() && !e.is_full();
        let second = self.queue.get(at + 1).filter(is_useful).map(|e| e.hold.id());
        let next = io.recv.next();
        let known = self.device.filter(|d| d.next == next && d.first == first);
        let is_told = match (known.map(|d| d.second), second) {
            (Some(known), second) if known == second => true,
            (Some(None), Some(second)) => self.place_behind(at + 1, [first, second], io),
            _ => false,
        };
        if !is_told {
            self.withdraw(io);
            self.place(now, at, Expectation { next, first, second }, io);
        }
    }

    /// Where all that is new is a second buffer, it is added: the usual case of a reader who gives the
    /// one back that it had while the other is being filled.
    fn place_behind(&mut self, at: usize, [first, second]: [BufId; 2], io: &mut Io<'_>) -> bool {
        let Some(room) = self.queue.get_mut(at).and_then(|e| e.hold.room(0)) else { return false };
        self.registered.need([Some(first), Some(second)], io.placer);
        let is_added = io.placer.place_behind(room);
        if let Some(device) = self.device.as_mut().filter(|_| is_added) {
            device.second = Some(second);
        }
        is_added
    }

    #[inline(never)]
    fn place(&mut self, now: Instant, at: usize, wanted: Expectation, io: &mut Io<'_>) {
        let mut entries = self.queue.iter_mut().skip(at);
        let Some(first) = entries.next().and_then(|e| e.hold.room(e.filled)) else { return };
        let second = wanted.second.and_then(|_| entries.next()?.hold.room(0));
        let wanted = Expectation { second: second.as_ref().map(Room::buffer), ..wanted };
        self.registered.need([Some(wanted.first), wanted.second], io.placer);
        if io.placer.place(wanted.next, first, second) {
            self.device = Some(wanted);
            self.is_looked_for = true;
            self.calls_for_each = io.placer.calls_for_each();
        } else {
            self.score.refused(now);
            self.registered.clear(io.placer);
        }
    }
}

#[cfg(test)]
mod tests;
