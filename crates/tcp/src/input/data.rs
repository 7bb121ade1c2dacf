//! Seventh and eighth: payload and FIN.

use super::Segment;
use crate::Tcb;
use crate::contract::{Env, Events, State};
use crate::tcb::ResetDue;
use crate::timers::Timer;
use fulmar_base::{Counter, DropReason};
use fulmar_mbuf::{Chain, Purpose};
use fulmar_wire::tcp::Flags;

/// How far bytes in order that could not be copied may exceed the bound on storage: without it, a
/// store full of out-of-order bytes could never take the ones that would empty it.
const IN_ORDER_GRACE_BYTES: usize = 2 * 65_536;

/// Payloads up to this many bytes are merged: what a driver copies out of its buffers.
const MERGE_BYTES: usize = 256;

/// A payload that wastes at most one part in so many of its storage is not worth copying.
pub(crate) const WASTE_PART: usize = 16;

/// A block that many small payloads share: the pool's class for an MTU of 1500.
pub(crate) const SHARED_BLOCK_BYTES: usize = 2048;

impl Tcb {
    pub(super) fn take_data(&mut self, env: &mut Env, seg: &mut Segment) -> Result<(), DropReason> {
        if seg.payload.is_empty() {
            return Ok(());
        }
        match self.state {
            State::Established | State::FinWait1 | State::FinWait2 => {}
            // After the peer's FIN there is nothing to come.
            State::TimeWait => return self.refuse_in_time_wait(env),
            _ => return Err(DropReason::TcpAfterClose),
        }
        if self.user.gone {
            return self.refuse_data(seg);
        }
        let start = self.rcv_nxt.saturating_add(seg.offset.unsigned_abs());
        self.cut_at_fin(env, seg, start)?;
        let payload = core::mem::take(&mut seg.payload);
        if seg.hdr.flags.contains(Flags::PSH) {
            self.note_push(start, payload.len());
        }
        if seg.offset == 0 && self.recv.out_of_order_bytes() == 0 {
            seg.events |= self.store_in_order(env, payload);
            self.tune_recv_buffer(env, seg.hdr);
            return Ok(());
        }
        self.store_any(env, seg, start, payload)
    }

    /// In TIME-WAIT whatever occupies sequence space is answered: the peer has not heard our last ACK.
    fn refuse_in_time_wait(&mut self, env: &mut Env) -> Result<(), DropReason> {
        self.challenge(env);
        Err(DropReason::TcpAfterClose)
    }

    /// Nobody will read: RFC 9293 section 3.6.1 says to reset the connection.
    fn refuse_data(&mut self, seg: &mut Segment) -> Result<(), DropReason> {
        self.due.reset = Some(ResetDue { seq: self.seq_of(self.snd_nxt), with_ack: true });
        self.end(seg, None);
        Err(DropReason::TcpAfterClose)
    }

    /// Bytes behind the place of a FIN that was seen are not the peer's to send.
    fn cut_at_fin(&self, env: &mut Env, seg: &mut Segment, start: u64) -> Result<(), DropReason> {
        let Some(fin) = self.peer_fin else { return Ok(()) };
        let end = start.saturating_add(seg.payload.len() as u64);
        let beyond = usize::try_from(end.saturating_sub(fin)).unwrap_or(usize::MAX);
        if beyond >= seg.payload.len() {
            return Err(DropReason::TcpAfterClose);
        }
        seg.payload.trim_back(beyond, env.pool);
        Ok(())
    }

    /// The next bytes, nothing out of order: the common case.
    #[inline]
    pub(super) fn store_in_order(&mut self, env: &mut Env, payload: Chain) -> Events {
        let len = payload.len();
        if self.user.recv_shut {
            return self.discard(env, payload);
        }
        let Some(payload) = self.fit_in_order(env, payload) else {
            env.counters.drop_packet(DropReason::TcpReassemblyFull);
            self.due.ack = true;
            return self.take_part();
        };
        if !payload.is_empty() {
            self.recv.insert(self.recv.next(), payload, env.pool);
        }
        self.rcv_nxt = self.rcv_nxt.saturating_add(len as u64);
        self.pace_ack(env, len);
        Events::READABLE
    }

    /// Only the front of a payload may have found room: what the queue has is acknowledged.
    fn take_part(&mut self) -> Events {
        let end = self.recv.next().saturating_add(1);
        let has_grown = end > self.rcv_nxt;
        self.rcv_nxt = end;
        if has_grown { Events::READABLE } else { Events::NONE }
    }

    /// Merges the payload into the bytes that wait, as far as that is worth it or necessary; returns
    /// what is to be queued behind them. `None`: the rest does not fit, and was freed.
    #[inline]
    fn fit_in_order(&mut self, env: &mut Env, payload: Chain) -> Option<Chain> {
        let waste = payload.held_bytes().saturating_sub(payload.len());
        if env.window.has_room_for(waste) && self.leaves_window_backed(&payload) {
            return Some(self.merge_small(env, payload));
        }
        self.compact(env, payload)
    }

    /// Small payloads behind others that wait are copied to them, so that many tiny segments do not
    /// pin a buffer each.
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
            Err(payload) => take_home(env, payload, SHARED_BLOCK_BYTES),
        }
    }

    /// The storage of this payload would be missing for the rest of the offered window, or what it wastes
    /// for the windows of all: its bytes are copied, first to the free room behind those that wait, then to
    /// blocks that they fill or that the next payload will. The window was offered, and charged to the
    /// budget, by what its bytes take then (`Tcb::by_storage`).
    #[inline(never)]
    fn compact(&mut self, env: &mut Env, mut payload: Chain) -> Option<Chain> {
        let wastes = |c: &Chain| {
            c.held_bytes() > c.len().saturating_add(c.len() / WASTE_PART) || is_of_reserve(c)
        };
        if !wastes(&payload) {
            return Some(payload);
        }
        self.recv.fill_tail(&mut payload, env.pool);
        if payload.is_empty() || !wastes(&payload) {
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
            env.pool.free(payload);
            return Some(copy);
        }
        let has_place = !is_of_reserve(&payload) || env.pool.has_reserve();
        if has_place && self.has_storage_for(&payload) {
            return Some(payload);
        }
        env.pool.free(payload);
        None
    }

    /// The reader has shut down: the bytes are acknowledged and forgotten.
    fn discard(&mut self, env: &mut Env, payload: Chain) -> Events {
        let len = payload.len();
        self.recv.insert(self.rcv_nxt.saturating_sub(1), payload, env.pool);
        let gone = self.recv.take(len, env.pool);
        env.pool.free(gone);
        self.rcv_nxt = self.rcv_nxt.saturating_add(len as u64);
        self.pace_ack(env, len);
        Events::NONE
    }

    /// Payload that is out of order, or fills a hole. Both are acknowledged at once (RFC 5681
    /// section 4.2).
    fn store_any(
        &mut self,
        env: &mut Env,
        seg: &mut Segment,
        start: u64,
        payload: Chain,
    ) -> Result<(), DropReason> {
        self.due.ack = true;
        let end = start.saturating_add(payload.len() as u64);
        let payload = if seg.offset == 0 {
            self.fit_in_order(env, payload)
        } else {
            self.fit_out_of_order(env, payload)
        };
        let Some(payload) = payload else {
            seg.events |= self.take_part();
            return Err(DropReason::TcpReassemblyFull);
        };
        if payload.is_empty() {
            self.rcv_nxt = self.recv.next().saturating_add(1);
            seg.events |= Events::READABLE;
            return Ok(());
        }
        let start = end.saturating_sub(payload.len() as u64);
        let put = self.recv.insert(start.saturating_sub(1), payload, env.pool);
        if put.refused {
            return Err(DropReason::TcpReassemblyFull);
        }
        self.rcv_nxt = self.recv.next().saturating_add(1);
        if put.in_order_advance > 0 {
            seg.events |= Events::READABLE;
            if self.user.recv_shut {
                let gone = self.recv.take(usize::MAX, env.pool);
                env.pool.free(gone);
            }
        } else if put.accepted_bytes > 0 {
            let bytes = put.accepted_bytes as u64;
            env.counters.add(Counter::TcpOutOfOrderBytes, bytes);
        } else {
            seg.verdict = Err(DropReason::TcpDuplicate);
        }
        Ok(())
    }

    /// The sender pushed bytes that begin at `start` (RFC 9293 section 3.9.1.2). A push behind a gap must
    /// not hide that of the bytes before the gap.
    #[inline]
    pub(super) fn note_push(&mut self, start: u64, bytes: usize) {
        self.due.pushed = true;
        let end = start.saturating_add(bytes as u64);
        let last =
            if start <= self.rcv_nxt { &mut self.pushed_to } else { &mut self.pushed_behind };
        *last = end.max(*last);
    }

    /// Bytes behind a gap, as they are to be kept; `None` if they are not, and were freed.
    fn fit_out_of_order(&self, env: &mut Env, payload: Chain) -> Option<Chain> {
        let times = if env.window.has_room_for(payload.held_bytes()) { 2 } else { 1 };
        if self.leaves_window_backed(&payload) && self.may_wait_out_of_order(&payload, times) {
            let bytes = payload.len();
            return Some(take_home(env, payload, bytes));
        }
        env.pool.free(payload);
        None
    }

    /// Whether bytes behind a gap are kept. They are the peer's to choose, and only the bytes before
    /// them free them: so all connections together may never fill the receive share, nor touch the
    /// reserve that lets the missing bytes and our ACKs through. What is offered is charged to the
    /// shard's budget; up to twice that is kept in storage, since few blocks are full, as long as the
    /// budget has room.
    fn may_wait_out_of_order(&self, payload: &Chain, times: usize) -> bool {
        let most = usize::try_from(self.rcv_wnd()).unwrap_or(usize::MAX).saturating_mul(times);
        let kept = self.recv.out_of_order_storage_bytes();
        let adds = payload.held_bytes().max(payload.len());
        kept.saturating_add(adds) <= most.min(self.storage_limit()) && !is_of_reserve(payload)
    }

    /// The hard bound on storage, for bytes in order that could not be copied.
    fn has_storage_for(&self, payload: &Chain) -> bool {
        let limit = self.storage_limit().saturating_add(IN_ORDER_GRACE_BYTES);
        let adds = payload.held_bytes().max(payload.len());
        self.kept_storage().saturating_add(adds) <= limit
    }

    /// Delayed acknowledgements (RFC 9293 section 3.8.6.3, RFC 5681 section 4.2): at once while
    /// the connection is young, after two full segments (see `ack_due`), else within
    /// `Config::delayed_ack`. A super-segment, or a batch of segments before one output, gets one
    /// ACK: the peer's ACK clock ticks per burst then, as with every stack that joins segments on
    /// receive.
    #[inline]
    fn pace_ack(&mut self, env: &Env, len: usize) {
        if len > self.rcv_mss as usize {
            self.learn_segment_size(len);
        }
        if self.quick_acks > 0 {
            self.due.ack = true;
        } else if !self.ack_due() {
            self.timers.start_in(Timer::DelayedAck, env.now, self.cfg.delayed_ack);
        }
    }

    /// The peer's segments are at least this large, if they are not joined ones.
    fn learn_segment_size(&mut self, len: usize) {
        let ours = self.own_mss();
        self.rcv_mss = u32::try_from(len.min(ours)).unwrap_or(u32::MAX);
    }

    /// Eighth: the FIN.
    pub(super) fn take_fin(&mut self, env: &mut Env, seg: &mut Segment) {
        if matches!(self.state, State::Closed) {
            return;
        }
        if matches!(self.state, State::TimeWait) && seg.repeats_fin {
            self.enter_time_wait(env.now);
        }
        if seg.fin {
            // Behind a gap it is acknowledged at once (RFC 5681 section 4.2), and a second one always.
            self.due.ack = true;
            self.peer_fin = self.peer_fin.or(Some(seg.end));
        }
        let Some(fin) = self.peer_fin.filter(|_| !self.fin_received) else { return };
        if self.rcv_nxt >= fin {
            self.on_fin(env, seg);
        }
    }

    fn on_fin(&mut self, env: &mut Env, seg: &mut Segment) {
        self.fin_received = true;
        self.rcv_nxt = self.rcv_nxt.saturating_add(1);
        self.rcv_adv = self.rcv_adv.max(self.rcv_nxt);
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

/// Whether a payload lies in the reserve for control, into which drivers receive small frames when the
/// receive share is used up. There it would be kept from ACKs for as long as nobody reads.
fn is_of_reserve(payload: &Chain) -> bool {
    payload.iter().any(|m| m.purpose() == Purpose::Control)
}

/// A small payload in buffers of another stack (device `link`) is copied into one of our own with
/// room for `block_bytes`: held there, each would keep a descriptor from its sender, who may have
/// sent thousands. Without memory it stays as it is.
fn take_home(env: &mut Env, payload: Chain, block_bytes: usize) -> Chain {
    let len = payload.len();
    let is_foreign = payload.front().is_some_and(|m| !env.pool.owns(m));
    if !is_foreign || len > MERGE_BYTES {
        return payload;
    }
    let Ok(mut block) = env.pool.alloc(block_bytes.max(len), 0, Purpose::Receive) else {
        return payload;
    };
    let Some(room) = block.append(len) else { return payload };
    payload.copy_to(0, room);
    env.pool.free(payload);
    Chain::from(block)
}
