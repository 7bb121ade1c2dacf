//! What a writer asks of a shard: `sosend` in steps, and chains that are handed over whole.

use alloc::sync::Arc;

use fulmar_base::{Counter, Counters, Instant, Probe, SlotId, Stage};
use fulmar_mbuf::{Chain, SharedBytes};
use fulmar_socket::{Reservation, SocketError, Step, sosend};

use crate::shard::Shard;
use crate::slab::Slab;
use crate::sockets::{Socket, TcpEntry};

impl<P: Probe> Shard<P> {
    /// Begins a write: one writer at a time, for its whole call. `writer` tells threads apart and is
    /// not 0. Wait for `WRITABLE` and repeat.
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`]: this very thread has begun a write, and a signal handler
    /// interrupted it. [`SocketError::BadHandle`], [`SocketError::NotSupported`].
    pub fn tcp_begin_write(&mut self, id: SlotId, writer: u64) -> Result<Step<()>, SocketError> {
        let entry = self.tcp(id)?;
        if entry.writer == writer {
            return Err(SocketError::WouldBlock);
        }
        if entry.writer != 0 {
            return Ok(Step::WaitSpace(1));
        }
        entry.writer = writer;
        Ok(Step::Done(()))
    }

    /// A write is over: the next writer may begin.
    pub fn tcp_end_write(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) {
            entry.writer = 0;
            self.notify(id);
        }
    }

    /// Whether a write would fail now, without taking the error: for one that has accepted bytes,
    /// and so leaves the error to the next.
    pub fn tcp_write_fails(&self, id: SlotId) -> bool {
        match self.core.sockets.get(id) {
            Some(Socket::Tcp(s)) => s.error.is_some() || s.tcb.send_error().is_some(),
            _ => true,
        }
    }

    /// First step of a write of `total` bytes: a small one whose bytes are all in `first` is done at
    /// once, a larger one gets space and storage to copy into. `waited`: it has found no space
    /// before, and so waits until a new start is worth it.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn tcp_reserve(
        &mut self,
        now: Instant,
        id: SlotId,
        first: &[u8],
        total: usize,
        waited: bool,
    ) -> Result<Step<Reserved>, SocketError> {
        if self.check_write(id)? {
            return Ok(Step::Done(Reserved::Sent(total)));
        }
        if total == first.len()
            && let Some(bytes) = self.send_small(now, id, first)?
        {
            return Ok(Step::Done(Reserved::Sent(bytes)));
        }
        let step = self.reserve_space(id, total, waited)?;
        if let Step::WaitSpace(_) | Step::WaitData(_) = &step
            && sosend::has_space(&self.tcp(id)?.tcb, total, waited)
        {
            self.wait_for_memory(now, id);
        }
        Ok(match step {
            Step::Done(r) => Step::Done(Reserved::Space(r)),
            Step::WaitSpace(n) | Step::WaitData(n) => Step::WaitSpace(n),
        })
    }

    /// As [`Shard::tcp_reserve`], for the first attempt of a write that is not small, and without
    /// the time: if it has to wait, call that one next.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn tcp_reserve_at_once(
        &mut self,
        id: SlotId,
        total: usize,
    ) -> Result<Step<Reservation>, SocketError> {
        self.check_down(id)?;
        self.pass(Stage::SendChecked);
        self.reserve_space(id, total, false)
    }

    /// The checks of a write; whether a probe ends it here.
    fn check_write(&mut self, id: SlotId) -> Result<bool, SocketError> {
        if self.stops_at(Stage::Locked) {
            return Ok(true);
        }
        self.check_down(id)?;
        Ok(self.ends_at(Stage::SendChecked))
    }

    fn reserve_space(
        &mut self,
        id: SlotId,
        total: usize,
        waited: bool,
    ) -> Result<Step<Reservation>, SocketError> {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        let step = sosend::reserve(&mut entry.tcb, &mut self.core.net.pool, total, waited)?;
        if let Step::Done(_) = &step {
            entry.short.is_short = false;
            self.pass(Stage::SendReserved);
        }
        Ok(step)
    }

    /// A write whose bytes are few: done whole, or `None` if it has to take the long way.
    fn send_small(
        &mut self,
        now: Instant,
        id: SlotId,
        bytes: &[u8],
    ) -> Result<Option<usize>, SocketError> {
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        let small = sosend::append_small(&mut entry.tcb, &mut self.core.net.pool, bytes)?;
        let Some(taken) = small else { return Ok(None) };
        entry.short.is_short = false;
        entry.tcb.set_msg_more(false);
        self.count_write(taken.bytes, taken.mbufs);
        self.count_copied(taken.bytes);
        if !self.ends_at(Stage::SendCommitted) {
            self.send_written(now, id);
        }
        Ok(Some(taken.bytes))
    }

    /// A chain of `bytes` was accepted, in `mbufs` taken for it.
    pub(crate) fn count_write(&mut self, bytes: usize, mbufs: usize) {
        let counters = &mut self.core.net.counters;
        counters.count(Counter::Sends);
        counters.add(Counter::SendBytes, bytes as u64);
        counters.add(Counter::SendMbufs, mbufs as u64);
    }

    pub(crate) fn count_copied(&mut self, bytes: usize) {
        self.core.net.counters.add(Counter::CopiedBytes, bytes as u64);
    }

    /// Last step of a write: the bytes are ready; one output for all of them.
    pub fn tcp_commit(&mut self, now: Instant, id: SlotId, r: Reservation) {
        let (bytes, mbufs) = (r.len(), r.chain.segs());
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return self.core.net.pool.free(r.into_chain());
        };
        sosend::commit(&mut entry.tcb, &mut self.core.net.pool, r);
        self.count_write(bytes, mbufs);
        self.count_copied(bytes);
        if !self.ends_at(Stage::SendCommitted) {
            self.send_part(now, id, bytes);
        }
    }

    /// The output of a write of `bytes`, which may be a part of a stream.
    fn send_part(&mut self, now: Instant, id: SlotId, bytes: usize) {
        if bytes < LARGE_WRITE_BYTES {
            return self.send_written(now, id);
        }
        entry_more(&mut self.core.sockets, id, true);
        self.send_streamed(now, id);
        self.hold_tail(now, id);
    }

    /// As [`Shard::send_written`] for a part of a stream.
    fn send_streamed(&mut self, now: Instant, id: SlotId) {
        self.output_written(now, id);
        if self.leaves_answers(id) {
            self.flush();
            self.check_link();
        }
        // What the device has refused, and answers, if they are wanted.
        self.finish_call(now);
    }

    /// Whether a writer goes on without a look at what the peer has answered: as long as much of its
    /// buffer is free, the next one finds several acknowledgements at once, for little more than
    /// one costs. Who waits for them looks by itself, and who is gone has the service thread, as with
    /// a peer whose answers take longer than a call.
    fn leaves_answers(&self, id: SlotId) -> bool {
        match self.core.sockets.get(id) {
            Some(Socket::Tcp(entry)) => {
                let queue = entry.tcb.send_queue_ref();
                self.core.net.link.loopback.is_empty() && queue.space() >= queue.limit() / 4 * 3
            }
            _ => false,
        }
    }

    /// After a large write: the fraction of a segment at its end waits for the next write, which
    /// is likely to follow at once. It goes with whatever the caller does next, or two milliseconds
    /// later.
    pub(crate) fn hold_tail(&mut self, now: Instant, id: SlotId) {
        let Some(entry) = entry_more(&mut self.core.sockets, id, false) else { return };
        if entry.tcb.wants_output() && !entry.is_queued {
            entry.is_queued = true;
            self.core.output_queue.push_back(id);
            self.tcp.held_since.get_or_insert(now);
        }
    }

    /// A write failed while it was copied.
    pub fn tcp_abandon(&mut self, id: SlotId, r: Reservation) {
        match self.core.sockets.get_mut(id) {
            Some(Socket::Tcp(entry)) => sosend::abandon(&mut entry.tcb, &mut self.core.net.pool, r),
            _ => self.core.net.pool.free(r.into_chain()),
        }
    }

    /// One output for what a write has added, and the end of its call.
    pub(crate) fn send_written(&mut self, now: Instant, id: SlotId) {
        self.output_written(now, id);
        self.finish_call(now);
    }

    fn output_written(&mut self, now: Instant, id: SlotId) {
        self.core.net.link.set_now(now);
        let gone =
            |c: &Counters| (c.value(Counter::TcpSegmentsOut), c.value(Counter::TcpPacketsOut));
        let before = gone(&self.core.net.counters);
        self.output_now(now, id);
        let counters = &mut self.core.net.counters;
        let after = gone(counters);
        counters.count(Counter::SendOutputs);
        counters.add(Counter::SendFrames, after.0 - before.0);
        counters.add(Counter::SendPackets, after.1 - before.1);
    }

    /// Appends as much of the shared bytes [at, at + want) as fits, without a copy, and runs the
    /// output once; the answer is how many those were. `waited`: it has found no space before.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn tcp_share(
        &mut self,
        now: Instant,
        id: SlotId,
        owner: &Arc<dyn SharedBytes>,
        part: (usize, usize),
        waited: bool,
    ) -> Result<Step<usize>, SocketError> {
        self.check_down(id)?;
        self.pass(Stage::SendChecked);
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        match sosend::share(&mut entry.tcb, &mut self.core.net.pool, owner, part, waited)? {
            Step::Done(shared) => {
                entry.short.is_short = false;
                entry.tcb.set_msg_more(false);
                self.count_write(shared.bytes, shared.mbufs);
                self.pass(Stage::SendCommitted);
                self.send_part(now, id, shared.bytes);
                Ok(Step::Done(shared.bytes))
            }
            Step::WaitSpace(n) | Step::WaitData(n) => {
                if sosend::has_space(&entry.tcb, part.1, waited) {
                    self.wait_for_memory(now, id);
                }
                Ok(Step::WaitSpace(n))
            }
        }
    }

    /// Free space of a send buffer, after the checks of a write in their order; 0 while the
    /// connection is being made.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn tcp_send_space(&mut self, id: SlotId) -> Result<usize, SocketError> {
        self.check_down(id)?;
        sosend::space(&mut self.tcp(id)?.tcb)
    }

    /// Hands a finished chain to a connection, whole or not at all, and runs its output once: what
    /// the published stacks call `pru_send`. Pieces of at most `SMALL_WRITE_BYTES` are copied into
    /// the room behind the tail of the send buffer. `more`: another chain follows, so that a
    /// partial segment waits for it. The chain is taken only if the answer is `Done`; storage of
    /// another stack in it is allowed and copied when it is sent.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn tcp_append(
        &mut self,
        now: Instant,
        id: SlotId,
        chain: &mut Chain,
        more: bool,
    ) -> Result<Step<()>, SocketError> {
        self.check_down(id)?;
        let (bytes, mbufs) = (chain.len(), chain.segs());
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        if let Step::WaitSpace(n) = sosend::append(&mut entry.tcb, &mut self.core.net.pool, chain)?
        {
            return Ok(Step::WaitSpace(n));
        }
        entry.tcb.set_msg_more(more);
        self.count_write(bytes, mbufs);
        if more || bytes >= LARGE_WRITE_BYTES {
            self.send_streamed(now, id);
        } else {
            self.send_written(now, id);
        }
        Ok(Step::Done(()))
    }
}

/// Writes from this size on are taken for a part of a stream. Smaller ones are messages, whose tail
/// somebody waits for.
const LARGE_WRITE_BYTES: usize = 32 << 10;

fn entry_more(sockets: &mut Slab<Socket>, id: SlotId, more: bool) -> Option<&mut TcpEntry> {
    let Some(Socket::Tcp(entry)) = sockets.get_mut(id) else { return None };
    entry.tcb.set_more(more);
    Some(entry)
}

/// What the first step of a write achieved.
pub enum Reserved {
    /// The write was small and is done.
    Sent(usize),
    /// Fill the chain outside the lock, then commit.
    Space(Reservation),
}
