//! Seventh and eighth step of RFC 9293 section 3.10.7.4: segment text and FIN.

use super::Segment;
use crate::base::{Counter, DropReason, Duration};
use crate::mbuf::{Chain, Mbuf, Purpose};
use crate::tcp::Tcb;
use crate::tcp::contract::{Env, Events, State};
use crate::tcp::tcb::{ResetDue, Uncompacted};
use crate::tcp::timers::Timer;
use crate::wire::tcp::Flags;

/// How far in-order bytes that could not be copied may exceed the storage limit. Without it,
/// storage full of out-of-order bytes could never accept the bytes that fill the gap.
const IN_ORDER_OVERCOMMIT_BYTES: usize = 2 * 65_536;

/// Payloads up to this size are merged into the receive queue's last buffer. Drivers copy payloads
/// up to the same size out of their own buffers.
const MERGE_BYTES: usize = 256;

/// A payload whose unused storage is at most this fraction (1/16) of its bytes is not copied.
pub(crate) const MAX_WASTE_FRACTION: usize = 16;

/// Bytes that filled a gap are compacted once they have this fraction (1/8) of the storage of unread bytes.
const COMPACT_FRACTION: usize = 8;

/// Block size for merged small payloads: the pool's class for an MTU of 1500.
pub(crate) const SHARED_BLOCK_BYTES: usize = 2048;

/// The longest delay of an ACK of more than one full segment. Its sender does not expect a delay and probes after two
/// round trips (RFC 8985 section 7.2), Linux a few milliseconds later.
const PROBED_ACK_DELAY: Duration = Duration::from_millis(1);

impl Tcb {
    pub(super) fn process_data(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
    ) -> Result<(), DropReason> {
        if seg.payload.is_empty() {
            return Ok(());
        }
        match self.state {
            State::Established | State::FinWait1 | State::FinWait2 => {}
            // The segment occupies sequence space, so it is acknowledged: the peer may have missed our
            // last ACK.
            State::TimeWait => {
                self.challenge(env);
                return Err(DropReason::TcpAfterClose);
            }
            // No data can follow the peer's FIN.
            _ => return Err(DropReason::TcpAfterClose),
        }
        if self.user.closed {
            return self.refuse_data(seg);
        }
        let start = self.rcv.nxt.saturating_add(seg.offset.unsigned_abs());
        self.trim_at_fin(env, seg, start)?;
        let payload = core::mem::take(&mut seg.payload);
        if seg.hdr.flags.contains(Flags::PSH) {
            self.record_push(start, payload.len());
        }
        if seg.offset == 0 && self.recv.out_of_order_bytes() == 0 {
            seg.events |= self.store_in_order(env, payload);
            self.tune_recv_buffer(env, seg.hdr);
            return Ok(());
        }
        let (before, storage) = (self.recv.readable(), self.recv.readable_storage_bytes());
        let stored = self.store_out_of_order(env, seg, start, payload);
        if before == 0 && self.recv.readable() > 0 {
            self.times.unread_since = env.now;
        }
        self.compact_advanced(env, before, storage);
        stored
    }

    /// The user has closed: new data resets the connection (RFC 9293 section 3.6.1).
    fn refuse_data(&mut self, seg: &mut Segment) -> Result<(), DropReason> {
        self.due.reset = Some(ResetDue { seq: self.seq_of(self.snd.nxt), with_ack: true });
        self.close_on_segment(seg, None);
        Err(DropReason::TcpAfterClose)
    }

    /// Trims bytes beyond the position of an earlier FIN.
    fn trim_at_fin(&self, env: &mut Env, seg: &mut Segment, start: u64) -> Result<(), DropReason> {
        let Some(fin) = self.fin.peer_at else { return Ok(()) };
        let end = start.saturating_add(seg.payload.len() as u64);
        let beyond = usize::try_from(end.saturating_sub(fin)).unwrap_or(usize::MAX);
        if beyond >= seg.payload.len() {
            return Err(DropReason::TcpAfterClose);
        }
        seg.payload.trim_back(beyond, env.pool);
        Ok(())
    }

    /// Queues in-order payload with no gap outstanding: the common case.
    #[inline]
    pub(crate) fn store_in_order(&mut self, env: &mut Env, payload: Chain) -> Events {
        let len = payload.len();
        if self.user.recv_shutdown {
            return self.discard(env, payload);
        }
        if self.recv.readable() == 0 {
            self.times.unread_since = env.now;
        }
        let Some(payload) = self.prepare_in_order(env, payload) else {
            env.counters.drop_packet(DropReason::TcpReassemblyFull);
            self.due.ack = true;
            return self.ack_queued();
        };
        if !payload.is_empty() {
            self.recv.insert(self.recv.next(), payload, env.pool);
        }
        self.rcv.nxt = self.rcv.nxt.saturating_add(len as u64);
        self.schedule_ack(env, len);
        Events::READABLE
    }

    /// Advances `rcv.nxt` by the queued bytes, which may be only the front of the payload.
    fn ack_queued(&mut self) -> Events {
        let end = self.recv.next().saturating_add(1);
        let has_grown = end > self.rcv.nxt;
        self.rcv.nxt = end;
        if has_grown { Events::READABLE } else { Events::NONE }
    }

    /// Copies the payload into the receive queue's last buffer if that saves storage. Returns what
    /// remains to be queued. `None`: the rest did not fit and was freed.
    #[inline]
    fn prepare_in_order(&mut self, env: &mut Env, payload: Chain) -> Option<Chain> {
        let waste = payload.truesize().saturating_sub(payload.len());
        if self.budget_has_space_for(env.window, waste) && self.leaves_window_backed(&payload) {
            return Some(self.merge_small(env, payload));
        }
        self.compact(env, payload)
    }

    /// Copies a small payload behind unread ones, so that tiny segments do not pin a buffer each.
    #[inline]
    fn merge_small(&mut self, env: &mut Env, payload: Chain) -> Chain {
        if payload.len() > MERGE_BYTES || self.recv.readable() == 0 {
            return payload;
        }
        self.absorb(env, payload)
    }

    #[inline(never)]
    fn absorb(&mut self, env: &mut Env, payload: Chain) -> Chain {
        match self.recv.absorb(payload, env.pool) {
            Ok(()) => Chain::new(),
            Err(payload) => copy_to_local_pool(env, payload, SHARED_BLOCK_BYTES),
        }
    }

    /// Copies a payload whose unused storage would be missing for the advertised window or the
    /// shared budget: first into the tail space of the receive queue, then into new blocks. The
    /// advertised window, and its charge, assume compacted storage (`Tcb::window_by_storage`). Without a
    /// free block the segments of the payload are copied into each other's.
    #[inline(never)]
    fn compact(&mut self, env: &mut Env, mut payload: Chain) -> Option<Chain> {
        let is_full = |c: &Chain| !wastes(c.truesize(), c.len()) && !uses_control_reserve(c);
        if is_full(&payload) || payload.is_volatile() {
            // Storage of a sender counts as none, but its descriptors are few.
            return Some(self.merge_small(env, payload));
        }
        let before = payload.len();
        self.recv.fill_tail(&mut payload, env.pool);
        count_collapsed(env, before.saturating_sub(payload.len()));
        if payload.is_empty() || is_full(&payload) {
            return Some(payload);
        }
        let copy = match payload.len() {
            n if n <= SHARED_BLOCK_BYTES => {
                env.pool.alloc(SHARED_BLOCK_BYTES, 0, Purpose::Receive).map(|mut block| {
                    block.append(n);
                    Chain::from(block)
                })
            }
            n => env.pool.alloc_chain(n, 0, Purpose::Receive),
        };
        if let Ok(mut copy) = copy {
            copy.fill(payload.slices());
            count_collapsed(env, payload.len());
            env.pool.free(payload);
            return Some(copy);
        }
        collapse(env, &mut payload);
        let may_keep = !uses_control_reserve(&payload) || env.pool.has_reserve();
        if may_keep && self.has_storage_for(&payload) {
            return Some(payload);
        }
        env.pool.free(payload);
        None
    }

    /// As [`Tcb::compact`], for bytes that were queued behind a gap and are in order now. The storage of
    /// bytes behind a gap is bounded apart from that of the bytes before it
    /// ([`Tcb::may_queue_out_of_order`]), so it would add up with every gap that is filled.
    ///
    /// Compaction walks all unread mbufs. It waits until an eighth of the storage was added since the last
    /// time, so that a peer that fills a gap with every second byte does not cause a walk each time.
    fn compact_advanced(&mut self, env: &mut Env, before: usize, storage_before: usize) {
        let advanced = self.recv.readable().saturating_sub(before);
        if advanced == 0 {
            return;
        }
        if self.is_storage_ample(env.window) {
            self.uncompacted = Uncompacted::default();
            return;
        }
        let end = self.recv.next();
        if self.uncompacted.storage_bytes == 0 {
            self.uncompacted.from = end.saturating_sub(advanced as u64);
        }
        let storage = self.recv.readable_storage_bytes();
        let added = storage.saturating_sub(storage_before);
        self.uncompacted.storage_bytes = self.uncompacted.storage_bytes.saturating_add(added);
        if self.uncompacted.storage_bytes < storage / COMPACT_FRACTION {
            return;
        }
        let uncompacted = core::mem::take(&mut self.uncompacted);
        let bytes = usize::try_from(end.saturating_sub(uncompacted.from)).unwrap_or(usize::MAX);
        let wastes = |m: &Mbuf| wastes(m.truesize(), m.len());
        let copied = self.recv.compact_last(bytes, SHARED_BLOCK_BYTES, wastes, env.pool);
        count_collapsed(env, copied);
    }

    /// Receiving was shut down: the bytes are acknowledged and discarded.
    fn discard(&mut self, env: &mut Env, payload: Chain) -> Events {
        let len = payload.len();
        self.recv.insert(self.rcv.nxt.saturating_sub(1), payload, env.pool);
        let discarded = self.recv.take(len, env.pool);
        env.pool.free(discarded);
        self.rcv.nxt = self.rcv.nxt.saturating_add(len as u64);
        self.schedule_ack(env, len);
        Events::NONE
    }

    /// Queues payload that is out of order or fills a gap. Both are acknowledged immediately (RFC
    /// 5681 section 4.2).
    fn store_out_of_order(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
        start: u64,
        payload: Chain,
    ) -> Result<(), DropReason> {
        self.due.ack = true;
        let end = start.saturating_add(payload.len() as u64);
        self.record_partial_duplicate(start, end);
        let payload = if seg.offset == 0 {
            self.prepare_in_order(env, payload)
        } else {
            self.prepare_out_of_order(env, start, payload)
        };
        let Some(payload) = payload else {
            seg.events |= self.ack_queued();
            return Err(DropReason::TcpReassemblyFull);
        };
        if payload.is_empty() {
            seg.events |= self.ack_queued();
            return Ok(());
        }
        let start = end.saturating_sub(payload.len() as u64);
        let put = self.recv.insert(start.saturating_sub(1), payload, env.pool);
        if put.refused {
            return Err(DropReason::TcpReassemblyFull);
        }
        self.rcv.nxt = self.recv.next().saturating_add(1);
        if put.in_order_advance > 0 {
            seg.events |= Events::READABLE;
            if self.user.recv_shutdown {
                let discarded = self.recv.take(usize::MAX, env.pool);
                env.pool.free(discarded);
            }
        } else if put.accepted_bytes > 0 {
            let bytes = put.accepted_bytes as u64;
            env.counters.add(Counter::TcpOutOfOrderBytes, bytes);
        } else {
            seg.verdict = Err(DropReason::TcpDuplicate);
        }
        Ok(())
    }

    /// The first part of a segment that was received before (RFC 2883 section 4.2), unless it is in
    /// front of `start` and trimmed already.
    fn record_partial_duplicate(&mut self, start: u64, end: u64) {
        if !self.sack_on || self.dsack_due.is_some_and(|(_, trimmed)| trimmed == start) {
            return;
        }
        let offsets = (start.saturating_sub(1), end.saturating_sub(1));
        if let Some((from, to)) = self.recv.first_out_of_order(offsets.0, offsets.1) {
            self.record_duplicate(from.saturating_add(1), to.saturating_sub(from));
        }
    }

    /// Records the PSH flag of a segment at `start` (RFC 9293 section 3.9.1.2). Pushes behind a gap
    /// are recorded apart from those before it.
    #[inline]
    pub(crate) fn record_push(&mut self, start: u64, bytes: usize) {
        self.due.pushed = true;
        let end = start.saturating_add(bytes as u64);
        let last = if start <= self.rcv.nxt {
            &mut self.recv_marks.pushed_to
        } else {
            &mut self.recv_marks.pushed_behind
        };
        *last = end.max(*last);
    }

    /// Returns the part of an out-of-order payload that is still to be queued. `None`: it was refused and freed.
    /// If storage is short, the payload is first copied into the last buffer of the run that it extends, and its
    /// segments into each other's buffers.
    fn prepare_out_of_order(
        &mut self,
        env: &mut Env,
        start: u64,
        mut payload: Chain,
    ) -> Option<Chain> {
        let bytes = payload.len();
        if self.budget_has_space_for(env.window, payload.truesize())
            && self.may_queue_out_of_order(&payload, 2)
        {
            return Some(copy_to_local_pool(env, payload, bytes));
        }
        if self.user.recv_shutdown {
            env.pool.free(payload);
            return None;
        }
        let filled = self.recv.fill_run(start.saturating_sub(1), &mut payload, env.pool);
        env.counters.add(Counter::TcpOutOfOrderBytes, filled as u64);
        count_collapsed(env, filled);
        collapse(env, &mut payload);
        if payload.is_empty() || self.may_queue_out_of_order(&payload, 1) {
            return Some(copy_to_local_pool(env, payload, bytes));
        }
        env.pool.free(payload);
        None
    }

    /// Whether out-of-order payload may be queued. After a shutdown of reading none is, since that window
    /// is not charged to the budget. The peer chooses what is out of order, and only the missing bytes
    /// free it. So all connections together must not exhaust the receive share, nor use the control
    /// reserve, through which the missing bytes and our ACKs pass. The advertised window is charged to the
    /// budget. Up to twice that may be used as storage, since few blocks are full, as long as the budget
    /// has space.
    fn may_queue_out_of_order(&self, payload: &Chain, times: usize) -> bool {
        let limit = usize::try_from(self.rcv_wnd()).unwrap_or(usize::MAX).saturating_mul(times);
        let in_use = self.recv.out_of_order_storage_bytes();
        let adds = payload.truesize().max(payload.len());
        !self.user.recv_shutdown
            && self.leaves_window_backed(payload)
            && in_use.saturating_add(adds) <= limit.min(self.storage_limit())
            && !uses_control_reserve(payload)
    }

    /// Hard storage limit, for in-order bytes that could not be copied.
    fn has_storage_for(&self, payload: &Chain) -> bool {
        let limit = self.storage_limit().saturating_add(IN_ORDER_OVERCOMMIT_BYTES);
        let adds = payload.truesize().max(payload.len());
        self.storage_in_use().saturating_add(adds) <= limit
    }

    /// Delayed acknowledgements (RFC 9293 section 3.8.6.3, RFC 5681 section 4.2): immediate in quick-ACK mode, after
    /// two full segments (see `ack_due`), soon after more than one, else within `Config::delayed_ack`. A super-segment,
    /// or a batch of segments before one output, gets one ACK, as Linux does with GRO.
    #[inline]
    fn schedule_ack(&mut self, env: &Env, len: usize) {
        if len > self.rcv_mss as usize {
            // Estimate of the peer's segment size. `len` may be coalesced, so it is at most our MSS.
            self.rcv_mss = u32::try_from(len.min(self.own_mss())).unwrap_or(u32::MAX);
        }
        if self.quick_acks > 0 {
            self.due.ack = true;
        } else if !self.ack_due() {
            let unacknowledged = self.rcv.nxt.saturating_sub(self.rcv.last_ack_sent);
            let is_probed = unacknowledged > u64::from(self.rcv_mss);
            let most = if is_probed { PROBED_ACK_DELAY } else { Duration::MAX };
            self.timers.hasten_in(Timer::DelayedAck, env.now, self.cfg.delayed_ack.min(most));
        }
    }

    /// Eighth: the FIN.
    pub(super) fn process_fin(&mut self, env: &mut Env, seg: &mut Segment) {
        if matches!(self.state, State::Closed) {
            return;
        }
        if matches!(self.state, State::TimeWait) && seg.repeats_fin {
            self.enter_time_wait(env.now);
        }
        if seg.fin {
            // Acknowledged immediately, also behind a gap (RFC 5681 section 4.2).
            self.due.ack = true;
            self.fin.peer_at = self.fin.peer_at.or(Some(seg.end));
        }
        let Some(fin) = self.fin.peer_at.filter(|_| !self.fin.received) else { return };
        if self.rcv.nxt >= fin {
            self.on_fin(env, seg);
        }
    }

    fn on_fin(&mut self, env: &mut Env, seg: &mut Segment) {
        self.fin.received = true;
        self.rcv.nxt = self.rcv.nxt.saturating_add(1);
        self.rcv.adv = self.rcv.adv.max(self.rcv.nxt);
        self.due.ack = true;
        seg.events |= Events::PEER_CLOSED | Events::READABLE;
        match self.state {
            State::Established => self.state = State::CloseWait,
            State::FinWait1 => self.state = State::Closing,
            State::FinWait2 => {
                self.enter_time_wait(env.now);
                seg.events |= Events::CLOSED;
            }
            _ => {}
        }
    }
}

/// Whether `bytes` use so little of their storage that a copy is worthwhile.
fn wastes(storage_bytes: usize, bytes: usize) -> bool {
    storage_bytes > bytes.saturating_add(bytes / MAX_WASTE_FRACTION)
}

/// Copies mbufs of a payload into the tailroom of those before them, if that frees their storage.
fn collapse(env: &mut Env, payload: &mut Chain) {
    let copied = payload.collapse(|m| wastes(m.truesize(), m.len()), env.pool);
    count_collapsed(env, copied);
}

fn count_collapsed(env: &mut Env, bytes: usize) {
    env.counters.add(Counter::TcpCollapsedBytes, bytes as u64);
}

/// Whether a payload uses the control reserve, into which drivers receive small frames when the
/// receive share is exhausted. Unread data there would deprive ACKs of buffers.
fn uses_control_reserve(payload: &Chain) -> bool {
    payload.iter().any(|m| m.purpose() == Purpose::Control)
}

/// Copies a small payload in buffers of its sender, another stack (device `link`) or this one (loopback), into a local
/// block of at least `block_bytes`. Each queued one would withhold a descriptor from the sender. If the pool is
/// exhausted, the payload is returned unchanged.
fn copy_to_local_pool(env: &mut Env, payload: Chain, block_bytes: usize) -> Chain {
    let len = payload.len();
    let is_of_sender = |m: &Mbuf| !env.pool.owns(m) || m.purpose() == Purpose::Send;
    if len > MERGE_BYTES || payload.is_volatile() || !payload.front().is_some_and(is_of_sender) {
        return payload;
    }
    let Ok(mut block) = env.pool.alloc(block_bytes.max(len), 0, Purpose::Receive) else {
        return payload;
    };
    let Some(space) = block.append(len) else { return payload };
    payload.copy_to(0, space);
    env.pool.free(payload);
    Chain::from(block)
}
