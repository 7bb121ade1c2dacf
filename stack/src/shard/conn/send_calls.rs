//! Send calls of TCP sockets: `sosend` in steps, and whole chains.

use alloc::sync::Arc;
use core::ops::Range;
use core::task::Poll;

use crate::base::{Instant, SlotId, Stage};
use crate::mbuf::{Chain, SharedBytes};
use crate::socket::{Attempt, Reservation, SocketError, sosend};

use crate::shard::conn::{Conn, Policy};
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
        if let Ok(mut conn) = self.shard.core.conn(self.id) {
            conn.unlock_send();
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
        let mut conn = shard.core.conn(id)?;
        conn.check()?;
        conn.net.pass(Stage::SendChecked);
        if total == first.len()
            && let Some(bytes) = conn.append_small(first)?
        {
            conn.net.pass(Stage::SendCommitted);
            let end = conn.output(&mut shard.tcp, now, Policy::MESSAGE);
            shard.end_call(now, id, end);
            return Ok(Poll::Ready(Reserved::Sent(bytes)));
        }
        let step = conn.reserve(total, attempt)?;
        if step.is_pending() && sosend::has_space(&conn.entry.tcb, total, attempt) {
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
        let mut conn = self.shard.core.conn(self.id)?;
        conn.check()?;
        conn.net.pass(Stage::SendChecked);
        conn.reserve(total, Attempt::First)
    }

    /// A step of a write: commits the filled reservation, and runs the output once for all of its bytes.
    pub fn commit(self, now: Instant, r: Reservation) {
        self.commit_then(now, r, |_| {});
    }

    /// As [`SendCalls::commit`], with the last step of a write: unlocks the send side, too.
    pub fn commit_last(self, now: Instant, r: Reservation) {
        self.commit_then(now, r, |conn| conn.unlock_send());
    }

    #[inline]
    fn commit_then(self, now: Instant, r: Reservation, then: impl FnOnce(&mut Conn<'_>)) {
        let SendCalls { shard, id } = self;
        let (bytes, mbufs) = (r.len(), r.chain.segs());
        let Ok(mut conn) = shard.core.conn(id) else {
            return shard.core.net.pool.free(r.into_chain());
        };
        sosend::commit(&mut conn.entry.tcb, &mut conn.net.pool, r);
        conn.net.count_write(bytes, mbufs);
        conn.net.count_copied(bytes);
        conn.net.pass(Stage::SendCommitted);
        let policy = conn.policy_of(bytes);
        let end = conn.output(&mut shard.tcp, now, policy);
        then(&mut conn);
        shard.end_call(now, id, end);
    }

    /// Gives back a reservation that was not filled, or only in part. A FIN that waited for the reservation is sent.
    pub fn abandon(self, now: Instant, r: Reservation) {
        let SendCalls { shard, id } = self;
        SendCalls { shard: &mut *shard, id }.give_back(r);
        if shard.core.conn(id).is_ok_and(|conn| conn.entry.tcb.wants_output()) {
            shard.output_and_finish(now, id);
        }
    }

    /// As [`SendCalls::abandon`], for a connection that is to send nothing more.
    pub(crate) fn give_back(self, r: Reservation) {
        match self.shard.core.conn(self.id) {
            Ok(conn) => sosend::abandon(&mut conn.entry.tcb, &mut conn.net.pool, r),
            Err(_) => self.shard.core.net.pool.free(r.into_chain()),
        }
    }

    /// Appends the shared bytes of `part` that fit, without a copy, and runs the output once. Returns the number of
    /// appended bytes.
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
        let mut conn = shard.core.conn(id)?;
        conn.check()?;
        conn.net.pass(Stage::SendChecked);
        let (Conn { entry, net, .. }, want) = (&mut conn, part.len());
        let step = sosend::share(&mut entry.tcb, &mut net.pool, owner, part, attempt)?;
        let Poll::Ready(shared) = step else {
            if sosend::has_space(&entry.tcb, want, attempt) {
                shard.core.wait_to_send(now, id, SocketError::NoBuffer);
            }
            return Ok(Poll::Pending);
        };
        entry.blocked.is_blocked = false;
        entry.tcb.set_msg_more(false);
        net.count_write(shared.bytes, shared.mbufs);
        net.pass(Stage::SendCommitted);
        let policy = conn.policy_of(shared.bytes);
        let end = conn.output(&mut shard.tcp, now, policy);
        shard.end_call(now, id, end);
        Ok(Poll::Ready(shared.bytes))
    }

    /// Free space of the send buffer in bytes (BSD: `sbspace`), after the checks of a write in their order. 0 while the
    /// handshake is not complete.
    ///
    /// # Errors
    /// As [`SendCalls::reserve`].
    pub fn space(self) -> Result<usize, SocketError> {
        let conn = self.shard.core.conn(self.id)?;
        conn.check()?;
        sosend::space(&mut conn.entry.tcb)
    }

    /// Appends a finished chain, whole or not at all, and runs the output once (BSD: `pru_send`). Chains of at most
    /// `SMALL_WRITE_BYTES` are copied into the space behind the tail of the send buffer. The chain is taken only if the
    /// result is `Ready`. It may have storage of another stack, which is copied when it is sent.
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
        let mut conn = shard.core.conn(id)?;
        conn.check()?;
        let (bytes, mbufs) = (chain.len(), chain.segs());
        if sosend::append(&mut conn.entry.tcb, &mut conn.net.pool, chain)?.is_pending() {
            return Ok(Poll::Pending);
        }
        conn.entry.tcb.set_msg_more(more == MoreData::Follows);
        conn.net.count_write(bytes, mbufs);
        let leaves_acks = more == MoreData::Follows || bytes >= LARGE_WRITE_BYTES;
        let end = conn.output(&mut shard.tcp, now, Policy { tail_waits: false, leaves_acks });
        shard.end_call(now, id, end);
        Ok(Poll::Ready(()))
    }
}

impl Conn<'_> {
    /// Space and storage for a write.
    fn reserve(
        &mut self,
        total: usize,
        attempt: Attempt,
    ) -> Result<Poll<Reservation>, SocketError> {
        let step = sosend::reserve(&mut self.entry.tcb, &mut self.net.pool, total, attempt)?;
        if step.is_ready() {
            self.entry.blocked.is_blocked = false;
            self.net.pass(Stage::SendReserved);
        }
        Ok(step)
    }

    /// Appends the bytes of a small write; `None` if the write has to take the slow path.
    fn append_small(&mut self, bytes: &[u8]) -> Result<Option<usize>, SocketError> {
        let small = sosend::append_small(&mut self.entry.tcb, &mut self.net.pool, bytes)?;
        let Some(taken) = small else { return Ok(None) };
        self.entry.blocked.is_blocked = false;
        self.entry.tcb.set_msg_more(false);
        self.net.count_write(taken.bytes, taken.mbufs);
        self.net.count_copied(taken.bytes);
        Ok(Some(taken.bytes))
    }

    /// The policy of a write of `bytes`. A writer whom TCP_NOTSENT_LOWAT holds back does not follow with the rest of a
    /// segment at once.
    fn policy_of(&self, bytes: usize) -> Policy {
        let is_part = bytes >= LARGE_WRITE_BYTES && !self.entry.tcb.is_unsent_limited();
        if is_part { Policy::PART } else { Policy::MESSAGE }
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
    /// [`MoreData::Follows`] if `bytes` of the whole remain to be written.
    pub fn of_rest(bytes: u64) -> MoreData {
        if bytes > 0 { MoreData::Follows } else { MoreData::None }
    }
}

/// Smallest write that is treated as a part of a stream, bytes: its partial segment is deferred. A smaller write is a
/// message, which the peer waits for.
const LARGE_WRITE_BYTES: usize = 32 << 10;

/// Result of the first step of a write.
pub enum Reserved {
    /// The write was small and is complete: bytes accepted.
    Sent(usize),
    /// Space and storage: to be filled outside the lock, then committed.
    Space(Reservation),
}
