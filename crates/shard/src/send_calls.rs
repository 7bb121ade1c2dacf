//! Send calls of TCP sockets: `sosend` in steps, and whole chains.

use alloc::sync::Arc;
use core::ops::Range;

use fulmar_base::{Instant, Probe, SlotId, Stage};
use fulmar_mbuf::{Chain, SharedBytes};
use fulmar_socket::{Attempt, Reservation, SocketError, Step, sosend};

use crate::layers::Core;
use crate::shard::Shard;
use crate::sockets::Socket;

impl<P: Probe> Shard<P> {
    /// Unlocks the send side: the next writer may begin.
    pub fn tcp_unlock_send(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) {
            entry.writer = 0;
            self.notify(id);
        }
    }

    /// First step of a write of `total` bytes: a small one whose bytes are all in `first` is done at
    /// once, a larger one gets space and storage to copy into.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn tcp_reserve(
        &mut self,
        now: Instant,
        id: SlotId,
        first: &[u8],
        total: usize,
        attempt: Attempt,
    ) -> Result<Step<Reserved>, SocketError> {
        if self.core.net.probe.stops_at(Stage::Locked) {
            return Ok(Step::Done(Reserved::Sent(total)));
        }
        self.core.sockets.check_down(id)?;
        if self.core.net.ends_at(Stage::SendChecked) {
            return Ok(Step::Done(Reserved::Sent(total)));
        }
        if total == first.len()
            && let Some(bytes) = append_small(&mut self.core, id, first)?
        {
            if !self.core.net.ends_at(Stage::SendCommitted) {
                self.send_written(now, id);
            }
            return Ok(Step::Done(Reserved::Sent(bytes)));
        }
        let step = reserve_space(&mut self.core, id, total, attempt)?;
        if let Step::WaitSpace(_) | Step::WaitData(_) = &step
            && sosend::has_space(&self.core.sockets.tcp(id)?.tcb, total, attempt)
        {
            self.core.wait_to_send(now, id, SocketError::NoBuffer);
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
    pub fn tcp_try_reserve(
        &mut self,
        id: SlotId,
        total: usize,
    ) -> Result<Step<Reservation>, SocketError> {
        self.core.sockets.check_down(id)?;
        self.pass(Stage::SendChecked);
        reserve_space(&mut self.core, id, total, Attempt::First)
    }

    /// Last step of a write: the bytes are ready; one output for all of them.
    pub fn tcp_commit(&mut self, now: Instant, id: SlotId, r: Reservation) {
        let (bytes, mbufs) = (r.len(), r.chain.segs());
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return self.core.net.pool.free(r.into_chain());
        };
        sosend::commit(&mut entry.tcb, &mut self.core.net.pool, r);
        self.core.net.count_write(bytes, mbufs);
        self.core.net.count_copied(bytes);
        if !self.core.net.ends_at(Stage::SendCommitted) {
            self.send_part(now, id, bytes);
        }
    }

    /// The output of a write of `bytes`, which may be a part of a stream.
    fn send_part(&mut self, now: Instant, id: SlotId, bytes: usize) {
        // A writer whom TCP_NOTSENT_LOWAT holds back does not follow with the rest of a segment at once.
        let is_limited = self.core.sockets.tcp(id).is_ok_and(|e| e.tcb.is_unsent_limited());
        if bytes < LARGE_WRITE_BYTES || is_limited {
            return self.send_written(now, id);
        }
        if let Ok(entry) = self.core.sockets.tcp(id) {
            entry.tcb.set_more(true);
        }
        self.send_streamed(now, id);
        self.tcp.defer_tail(now, id, &mut self.core);
    }

    /// As [`Shard::send_written`] for a part of a stream.
    fn send_streamed(&mut self, now: Instant, id: SlotId) {
        self.tcp.output_written(now, id, &mut self.core);
        if !self.core.defers_transmit(now) && leaves_answers(&self.core, id) {
            self.core.net.flush();
            self.tcp.check_link(&mut self.core);
        }
        // Retries what the device has refused, and receives ACKs, if they are wanted.
        self.finish_call(now);
    }

    /// One output for the bytes that a write has added, and the end of its call.
    pub(crate) fn send_written(&mut self, now: Instant, id: SlotId) {
        self.tcp.output_written(now, id, &mut self.core);
        self.finish_call(now);
    }

    /// A write failed while it was copied.
    pub fn tcp_abandon(&mut self, id: SlotId, r: Reservation) {
        match self.core.sockets.get_mut(id) {
            Some(Socket::Tcp(entry)) => sosend::abandon(&mut entry.tcb, &mut self.core.net.pool, r),
            _ => self.core.net.pool.free(r.into_chain()),
        }
    }

    /// Appends as much of the shared bytes of `part` as fits, without a copy, and runs the
    /// output once; returns how many.
    ///
    /// # Errors
    /// Why the connection takes no more.
    pub fn tcp_share(
        &mut self,
        now: Instant,
        id: SlotId,
        owner: &Arc<dyn SharedBytes>,
        part: Range<usize>,
        attempt: Attempt,
    ) -> Result<Step<usize>, SocketError> {
        self.core.sockets.check_down(id)?;
        self.pass(Stage::SendChecked);
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        let want = part.len();
        match sosend::share(&mut entry.tcb, &mut self.core.net.pool, owner, part, attempt)? {
            Step::Done(shared) => {
                entry.blocked.is_blocked = false;
                entry.tcb.set_msg_more(false);
                self.core.net.count_write(shared.bytes, shared.mbufs);
                self.pass(Stage::SendCommitted);
                self.send_part(now, id, shared.bytes);
                Ok(Step::Done(shared.bytes))
            }
            Step::WaitSpace(n) | Step::WaitData(n) => {
                if sosend::has_space(&entry.tcb, want, attempt) {
                    self.core.wait_to_send(now, id, SocketError::NoBuffer);
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
        self.core.sockets.check_down(id)?;
        sosend::space(&mut self.core.sockets.tcp(id)?.tcb)
    }

    /// Hands a finished chain to a connection, whole or not at all, and runs its output once: what
    /// the published stacks call `pru_send`. Pieces of at most `SMALL_WRITE_BYTES` are copied into
    /// the space behind the tail of the send buffer. `more`: another chain follows, so that a
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
        self.core.sockets.check_down(id)?;
        let (bytes, mbufs) = (chain.len(), chain.segs());
        let Some(Socket::Tcp(entry)) = self.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        if let Step::WaitSpace(n) = sosend::append(&mut entry.tcb, &mut self.core.net.pool, chain)?
        {
            return Ok(Step::WaitSpace(n));
        }
        entry.tcb.set_msg_more(more);
        self.core.net.count_write(bytes, mbufs);
        if more || bytes >= LARGE_WRITE_BYTES {
            self.send_streamed(now, id);
        } else {
            self.send_written(now, id);
        }
        Ok(Step::Done(()))
    }
}

/// Writes from this size on are treated as a part of a stream. Smaller ones are messages, whose tail the
/// peer waits for.
const LARGE_WRITE_BYTES: usize = 32 << 10;

/// Space and storage for a write.
fn reserve_space<P: Probe>(
    core: &mut Core<P>,
    id: SlotId,
    total: usize,
    attempt: Attempt,
) -> Result<Step<Reservation>, SocketError> {
    let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else {
        return Err(SocketError::BadHandle);
    };
    let step = sosend::reserve(&mut entry.tcb, &mut core.net.pool, total, attempt)?;
    if let Step::Done(_) = &step {
        entry.blocked.is_blocked = false;
        core.net.pass(Stage::SendReserved);
    }
    Ok(step)
}

/// Appends the bytes of a small write; `None` if the write has to take the slow path.
fn append_small<P: Probe>(
    core: &mut Core<P>,
    id: SlotId,
    bytes: &[u8],
) -> Result<Option<usize>, SocketError> {
    let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else {
        return Err(SocketError::BadHandle);
    };
    let small = sosend::append_small(&mut entry.tcb, &mut core.net.pool, bytes)?;
    let Some(taken) = small else { return Ok(None) };
    entry.blocked.is_blocked = false;
    entry.tcb.set_msg_more(false);
    core.net.count_write(taken.bytes, taken.mbufs);
    core.net.count_copied(taken.bytes);
    Ok(Some(taken.bytes))
}

/// Whether a write leaves the ACKs of the peer in the device: while much of the send buffer is free the
/// next write finds several ACKs together, for little more than one costs. A writer that waits for ACKs
/// polls by itself, and the service thread polls where no call follows.
fn leaves_answers<P: Probe>(core: &Core<P>, id: SlotId) -> bool {
    match core.sockets.get(id) {
        Some(Socket::Tcp(entry)) => {
            let queue = entry.tcb.send_queue_ref();
            core.net.link.loopback.is_empty() && queue.space() >= queue.limit() / 4 * 3
        }
        _ => false,
    }
}

/// Result of the first step of a write.
pub enum Reserved {
    /// The write was small and is complete.
    Sent(usize),
    /// Fill the chain outside the lock, then commit.
    Space(Reservation),
}
