//! Send calls of TCP sockets: `sosend` in steps, and whole chains.

use alloc::sync::Arc;
use core::ops::Range;
use core::task::Poll;

use crate::base::{Instant, SlotId, Stage};
use crate::mbuf::{Chain, SharedBytes};
use crate::socket::{Attempt, Reservation, SocketError, sosend};

use crate::shard::layers::Core;
use crate::shard::sockets::Socket;
use crate::shard::world::Shard;

/// The send calls of one connection: `sosend` in steps, and whole chains.
pub struct SendCalls<'a> {
    shard: &'a mut Shard,
    id: SlotId,
}

impl Shard {
    /// Sends on a connection.
    #[inline(always)]
    pub fn sosend(&mut self, id: SlotId) -> SendCalls<'_> {
        SendCalls { shard: self, id }
    }
}

impl SendCalls<'_> {
    /// Unlocks the send side (BSD: `sbunlock`): the next writer may begin.
    pub fn unlock(self) {
        if let Some(Socket::Tcp(entry)) = self.shard.core.sockets.get_mut(self.id) {
            entry.writer = 0;
            self.shard.notify(self.id);
        }
    }

    /// First step of a write of `total` bytes. A small one whose bytes are all in `first` is complete with this step; a
    /// larger one gets space and storage to copy into.
    ///
    /// # Errors
    /// The error of the connection; [`SocketError::BadHandle`].
    pub fn reserve(
        self,
        now: Instant,
        first: &[u8],
        total: usize,
        attempt: Attempt,
    ) -> Result<Poll<Reserved>, SocketError> {
        let SendCalls { shard, id } = self;
        shard.core.sockets.check_error(id)?;
        shard.core.net.pass(Stage::SendChecked);
        if total == first.len()
            && let Some(bytes) = append_small(&mut shard.core, id, first)?
        {
            shard.core.net.pass(Stage::SendCommitted);
            shard.send_written(now, id);
            return Ok(Poll::Ready(Reserved::Sent(bytes)));
        }
        let step = reserve_space(&mut shard.core, id, total, attempt)?;
        if step.is_pending() && sosend::has_space(&shard.core.sockets.tcp(id)?.tcb, total, attempt)
        {
            shard.core.wait_to_send(now, id, SocketError::NoBuffer);
        }
        Ok(step.map(Reserved::Space))
    }

    /// As [`SendCalls::reserve`], for the first attempt of a write that is not small, and without the time: if the
    /// write has to wait, the next attempt is [`SendCalls::reserve`].
    ///
    /// # Errors
    /// As [`SendCalls::reserve`].
    pub fn try_reserve(self, total: usize) -> Result<Poll<Reservation>, SocketError> {
        let SendCalls { shard, id } = self;
        shard.core.sockets.check_error(id)?;
        shard.pass(Stage::SendChecked);
        reserve_space(&mut shard.core, id, total, Attempt::First)
    }

    /// Last step of a write: commits the filled reservation, and runs the output once for all of its bytes.
    pub fn commit(self, now: Instant, r: Reservation) {
        let SendCalls { shard, id } = self;
        let (bytes, mbufs) = (r.len(), r.chain.segs());
        let Some(Socket::Tcp(entry)) = shard.core.sockets.get_mut(id) else {
            return shard.core.net.pool.free(r.into_chain());
        };
        sosend::commit(&mut entry.tcb, &mut shard.core.net.pool, r);
        shard.core.net.count_write(bytes, mbufs);
        shard.core.net.count_copied(bytes);
        shard.core.net.pass(Stage::SendCommitted);
        shard.send_part(now, id, bytes);
    }

    /// Gives a reservation back that was not filled, or only in part. A FIN that has waited behind it is sent.
    pub fn abandon(self, now: Instant, r: Reservation) {
        let SendCalls { shard, id } = self;
        SendCalls { shard: &mut *shard, id }.give_back(r);
        if let Some(Socket::Tcp(entry)) = shard.core.sockets.get_mut(id)
            && entry.tcb.wants_output()
        {
            shard.output_and_finish(now, id);
        }
    }

    /// As [`SendCalls::abandon`], for a connection that is to send nothing more.
    pub(crate) fn give_back(self, r: Reservation) {
        let net = &mut self.shard.core.net;
        match self.shard.core.sockets.get_mut(self.id) {
            Some(Socket::Tcp(entry)) => sosend::abandon(&mut entry.tcb, &mut net.pool, r),
            _ => net.pool.free(r.into_chain()),
        }
    }

    /// Appends as many of the shared bytes of `part` as fit, without a copy, and runs the output once. Returns how many
    /// were appended.
    ///
    /// # Errors
    /// As [`SendCalls::reserve`].
    pub fn share(
        self,
        now: Instant,
        owner: &Arc<dyn SharedBytes>,
        part: Range<usize>,
        attempt: Attempt,
    ) -> Result<Poll<usize>, SocketError> {
        let SendCalls { shard, id } = self;
        shard.core.sockets.check_error(id)?;
        shard.pass(Stage::SendChecked);
        let Some(Socket::Tcp(entry)) = shard.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        let want = part.len();
        match sosend::share(&mut entry.tcb, &mut shard.core.net.pool, owner, part, attempt)? {
            Poll::Ready(shared) => {
                entry.blocked.is_blocked = false;
                entry.tcb.set_msg_more(false);
                shard.core.net.count_write(shared.bytes, shared.mbufs);
                shard.pass(Stage::SendCommitted);
                shard.send_part(now, id, shared.bytes);
                Ok(Poll::Ready(shared.bytes))
            }
            Poll::Pending => {
                if sosend::has_space(&entry.tcb, want, attempt) {
                    shard.core.wait_to_send(now, id, SocketError::NoBuffer);
                }
                Ok(Poll::Pending)
            }
        }
    }

    /// Free space of the send buffer in bytes (BSD: `sbspace`), after the checks of a write in their order. 0 while the
    /// handshake is not complete.
    ///
    /// # Errors
    /// As [`SendCalls::reserve`].
    pub fn space(self) -> Result<usize, SocketError> {
        self.shard.core.sockets.check_error(self.id)?;
        sosend::space(&mut self.shard.core.sockets.tcp(self.id)?.tcb)
    }

    /// Appends a finished chain, whole or not at all, and runs the output once (BSD: `pru_send`). Chains of at most
    /// `SMALL_WRITE_BYTES` are copied into the space behind the tail of the send buffer. The chain is taken only if the
    /// result is `Done`. It may have storage of another stack, which is copied when it is sent.
    ///
    /// # Errors
    /// As [`SendCalls::reserve`].
    pub fn append(
        self,
        now: Instant,
        chain: &mut Chain,
        more: MoreData,
    ) -> Result<Poll<()>, SocketError> {
        let SendCalls { shard, id } = self;
        shard.core.sockets.check_error(id)?;
        let (bytes, mbufs) = (chain.len(), chain.segs());
        let Some(Socket::Tcp(entry)) = shard.core.sockets.get_mut(id) else {
            return Err(SocketError::BadHandle);
        };
        if sosend::append(&mut entry.tcb, &mut shard.core.net.pool, chain)?.is_pending() {
            return Ok(Poll::Pending);
        }
        entry.tcb.set_msg_more(more == MoreData::Follows);
        shard.core.net.count_write(bytes, mbufs);
        if more == MoreData::Follows || bytes >= LARGE_WRITE_BYTES {
            shard.send_streamed(now, id);
        } else {
            shard.send_written(now, id);
        }
        Ok(Poll::Ready(()))
    }
}

/// Whether another write follows at once (MSG_MORE).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoreData {
    /// The next write follows: a partial segment waits for it.
    Follows,
    /// No further write is known.
    None,
}

impl MoreData {
    /// [`MoreData::Follows`] if `bytes` of the whole are left to be written.
    pub fn of_rest(bytes: u64) -> MoreData {
        if bytes > 0 { MoreData::Follows } else { MoreData::None }
    }
}

impl Shard {
    /// The output of a write of `bytes`, which may be a part of a stream.
    fn send_part(&mut self, now: Instant, id: SlotId, bytes: usize) {
        // A writer whom TCP_NOTSENT_LOWAT holds back does not follow with the rest of a segment at once.
        let is_limited = self.core.sockets.tcp(id).is_ok_and(|e| e.tcb.is_unsent_limited());
        if bytes < LARGE_WRITE_BYTES || is_limited {
            return self.send_written(now, id);
        }
        if let Ok(entry) = self.core.sockets.tcp(id) {
            entry.tcb.set_more_announced(true);
        }
        self.send_streamed(now, id);
        self.tcp.defer_tail(now, id, &mut self.core);
    }

    /// As [`Shard::send_written`] for a part of a stream.
    fn send_streamed(&mut self, now: Instant, id: SlotId) {
        self.tcp.output_written(now, id, &mut self.core);
        if !self.core.defers_transmit(now) && leaves_acks(&self.core, id) {
            self.core.net.flush();
            self.tcp.check_link(&mut self.core);
        }
        // Receives ACKs unless they were left, and retries the frames that the device has refused.
        self.finish_call(now);
    }

    /// One output for the bytes that a write has added, and the end of its call.
    pub(crate) fn send_written(&mut self, now: Instant, id: SlotId) {
        self.tcp.output_written(now, id, &mut self.core);
        self.finish_call(now);
    }
}

/// Smallest write that is treated as a part of a stream, bytes: its partial segment is deferred. A smaller write is a
/// message, which the peer waits for.
const LARGE_WRITE_BYTES: usize = 32 << 10;

/// Space and storage for a write.
fn reserve_space(
    core: &mut Core,
    id: SlotId,
    total: usize,
    attempt: Attempt,
) -> Result<Poll<Reservation>, SocketError> {
    let Some(Socket::Tcp(entry)) = core.sockets.get_mut(id) else {
        return Err(SocketError::BadHandle);
    };
    let step = sosend::reserve(&mut entry.tcb, &mut core.net.pool, total, attempt)?;
    if step.is_ready() {
        entry.blocked.is_blocked = false;
        core.net.pass(Stage::SendReserved);
    }
    Ok(step)
}

/// Appends the bytes of a small write; `None` if the write has to take the slow path.
fn append_small(core: &mut Core, id: SlotId, bytes: &[u8]) -> Result<Option<usize>, SocketError> {
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

/// Whether a write does not poll for ACKs: while at least three quarters of the send buffer are free, the next write
/// receives several ACKs with one poll. A writer that waits for space polls while it waits, and the service thread
/// polls when no call follows.
fn leaves_acks(core: &Core, id: SlotId) -> bool {
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
    /// The write was small and is complete: bytes accepted.
    Sent(usize),
    /// Space and storage: to be filled outside the lock, then committed.
    Space(Reservation),
}
