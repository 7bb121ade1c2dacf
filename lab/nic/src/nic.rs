//! The host's side: the driver. What it does here is what a driver of a real NIC does per burst and
//! per frame, and what a figure from this device measures.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use nix::errno::Errno;

use fulmar_stack::base::{Counters, DropReason, FlowKey, Instant, Offload, SeqNum};
use fulmar_stack::device::moderation::{Coalesce, Profile};
use fulmar_stack::device::{
    Burst, Caps, Device, DeviceStats, DirectPlacement, Packet, Tally, Unsupported, WakeFd,
    WritableRanges, offload,
};
use fulmar_stack::mbuf::{BufId, Chain, Mbuf, Pool, Purpose, WritableRange};

use super::engine::Engine;
use super::hardware::TxSlot;
use super::meter::{Board, bump};
use super::ring::Ring;
use super::rx::{Buffer, Kind, RxRing};
use super::table::{FlowTable, Pods};
use super::{ETHER_BYTES, SimConfig};
use fulmar::internals::drivers::placing::Outcome;
use fulmar::internals::drivers::placing::flows::Filling;

/// Received frames up to this length are copied out of any buffer, which is posted again: an
/// acknowledgement never keeps the memory of a packet.
const COPY_SMALL_BYTES: usize = 256;
/// Up to this length they are copied out of larger buffers.
const COPY_BYTES: usize = 16_384;

/// One transmit descriptor: the address and length of a piece of a frame.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Descriptor {
    address: u64,
    bytes: u32,
    flags: u32,
}

/// The last piece of its frame.
const END_OF_FRAME: u32 = 1;

/// Transmit descriptors, in the order of the pieces; the hardware of this model reads the frames
/// themselves, so that these are what a driver writes and no more.
struct Descriptors {
    ring: Box<[Descriptor]>,
    tail: usize,
    used: usize,
}

impl Descriptors {
    fn new(count: usize) -> Descriptors {
        let count = count.next_power_of_two();
        Descriptors { ring: vec![Descriptor::default(); count].into(), tail: 0, used: 0 }
    }

    fn space(&self) -> usize {
        self.ring.len() - self.used
    }

    /// Writes one per piece of the frame.
    #[inline]
    fn write(&mut self, chain: &Chain) -> usize {
        let (mask, first) = (self.ring.len() - 1, self.tail);
        for m in chain {
            let address = m.as_slice().as_ptr().addr() as u64;
            let d = Descriptor { address, bytes: m.len() as u32, flags: 0 };
            // The mask keeps the index inside.
            self.ring[self.tail & mask] = d;
            self.tail = self.tail.wrapping_add(1);
        }
        let count = self.tail.wrapping_sub(first);
        if count > 0 {
            self.ring[self.tail.wrapping_sub(1) & mask].flags = END_OF_FRAME;
        }
        self.used += count;
        count
    }

    /// Writes the one of a frame in one piece.
    #[inline(always)]
    fn write_single(&mut self, frame: &Mbuf) {
        let address = frame.as_slice().as_ptr().addr() as u64;
        let at = self.tail & (self.ring.len() - 1);
        // The mask keeps the index inside.
        self.ring[at] = Descriptor { address, bytes: frame.len() as u32, flags: END_OF_FRAME };
        self.tail = self.tail.wrapping_add(1);
        self.used += 1;
    }
}

/// The driver's own state, beside the rings that it shares with the hardware.
struct Driver {
    caps: Caps,
    config: SimConfig,
    descriptors: Descriptors,
    board: Arc<Board>,
    /// When completions are taken back.
    tx_coalesce: Coalesce,
    /// Bytes of frames in the transmit ring.
    tx_bytes: usize,
    /// The last burst did not go out whole.
    is_blocked: bool,
    /// The bytes placed since the last count.
    placed: Outcome,
}

// Sending.
impl Driver {
    /// Posts frames while there are descriptors.
    #[inline(always)]
    fn post(
        &mut self,
        tx: &mut Ring<TxSlot>,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> Posted {
        let mut posted = Posted::default();
        while !burst.is_empty() {
            let goes = self.post_linear(tx, burst, &mut posted)
                || self.post_next(tx, pool, burst, counters, &mut posted);
            if !goes {
                break;
            }
        }
        posted
    }

    /// Posts the next frame if it is in one mbuf. False: nothing happened.
    #[inline(always)]
    fn post_linear(
        &mut self,
        tx: &mut Ring<TxSlot>,
        burst: &mut Burst,
        posted: &mut Posted,
    ) -> bool {
        if self.descriptors.space() > 0
            && let Some(slot) = tx.place()
            && let Some((frame, offload)) = burst.pop_linear(&self.caps)
        {
            posted.taken += 1;
            posted.tally += Tally { frames: 1, packets: 1, bytes: frame.len() as u64 };
            self.tx_bytes += frame.len();
            self.descriptors.write_single(&frame);
            let packet = Packet { chain: Chain::from(frame), offload };
            slot.post(TxSlot { packet, descriptors: 1, done_at: Instant::ZERO });
            return true;
        }
        false
    }

    /// Posts or drops the next frame, whatever it is. False: there is none, or no space for it.
    #[inline(never)]
    fn post_next(
        &mut self,
        tx: &mut Ring<TxSlot>,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
        posted: &mut Posted,
    ) -> bool {
        let Some(p) = burst.front() else { return false };
        let verdict = offload::check(p, &self.caps);
        if verdict.is_ok() && (p.chain.segs() > self.descriptors.space() || tx.space() == 0) {
            return false;
        }
        let Some(packet) = burst.pop_front() else { return false };
        posted.taken += 1;
        if let Err(reason) = verdict {
            counters.drop_packet(reason);
            pool.free(packet.chain);
            return true;
        }
        posted.tally.add(&packet);
        self.tx_bytes += packet.chain.len();
        let descriptors = self.descriptors.write(&packet.chain);
        // There is space, as checked above.
        let _ = tx.post(TxSlot { packet, descriptors, done_at: Instant::ZERO });
        true
    }

    fn count_posted(&self, tally: &Tally) {
        let c = &self.board.counts;
        bump(&c.doorbells, 1);
        bump(&c.tx_frames, tally.frames);
        bump(&c.tx_bytes, tally.bytes);
    }

    /// Takes back every frame that the hardware has finished with.
    fn reap(&mut self, tx: &mut Ring<TxSlot>, now: Instant, pool: &mut Pool) -> usize {
        let (mut count, mut descriptors) = (0, 0);
        while let Some(slot) = tx.reap_if(|s| s.done_at <= now) {
            self.tx_bytes -= slot.packet.chain.len();
            descriptors += slot.descriptors;
            count += 1;
            pool.free(slot.packet.chain);
        }
        self.descriptors.used -= descriptors;
        if count > 0 {
            let c = &self.board.counts;
            bump(&c.completions, count as u64);
            bump(&c.descriptors, descriptors as u64);
            bump(&c.reaps, 1);
        }
        count
    }

    /// Whether taking completions back is worth it now.
    fn is_reap_due(&self, tx: &Ring<TxSlot>, now: Instant) -> bool {
        let Some(oldest) = tx.oldest_done() else { return false };
        tx.done() >= self.tx_coalesce.packets
            || self.tx_bytes >= self.config.tx_reap_bytes
            || self.reap_at(oldest.done_at) <= now
    }

    /// When a completion is taken back at the latest.
    fn reap_at(&self, done_at: Instant) -> Instant {
        if self.is_blocked { done_at } else { done_at + self.tx_coalesce.delay }
    }
}

// Receiving.
impl Driver {
    /// The next received frame, if it is one that is copied out of its only buffer: it is read where it lies
    /// in the ring, and nothing larger than a word is handed on.
    #[inline(always)]
    fn harvest_small(&self, rx: &mut RxRing, pool: &mut Pool) -> Option<Packet> {
        let (kind, first) = rx.next_done()?;
        let offload = first.end?;
        if first.placed.is_some() || !is_wasteful(&first.m) {
            return None;
        }
        let chain = copy_out(&first.m, pool)?;
        if let Some((_, first)) = rx.reap() {
            repost(rx, kind, first.m);
        }
        Some(Packet { chain, offload })
    }

    /// The next received frame; `Err` if there is no memory to keep it.
    fn harvest(&mut self, rx: &mut RxRing, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let (kind, mut first) = rx.reap()?;
        if let Some(placed) = first.placed.take() {
            self.placed.hit(placed.bytes());
            return Some(harvest_placed(rx, kind, first, placed, pool));
        }
        let Some(offload) = first.end else {
            return Some(self.harvest_long(rx, kind, first, pool));
        };
        Some(self.give_away(rx, kind, Chain::from(first.m), offload, pool))
    }

    /// A frame in several buffers.
    fn harvest_long(
        &self,
        rx: &mut RxRing,
        kind: Kind,
        first: Buffer,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let mut chain = Chain::from(first.m);
        // The hardware completes frames whole, so the last buffer is there.
        while let Some((_, b)) = rx.reap() {
            chain.push_back(b.m);
            if let Some(offload) = b.end {
                return self.give_away(rx, kind, chain, offload, pool);
            }
        }
        pool.free(chain);
        Err(DropReason::Truncated)
    }

    /// Hands a frame over in the buffers that it lies in, if these can be replaced; else the buffers
    /// stay, so that the ring never runs dry for good.
    fn give_away(
        &self,
        rx: &mut RxRing,
        kind: Kind,
        mut chain: Chain,
        offload: Offload,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let is_dry = pool.available(Purpose::Receive) < rx.buffer_bytes(kind);
        if is_dry && rx.ring(kind).waiting() < self.needed(rx, kind) {
            while let Some(m) = chain.pop_front() {
                repost(rx, kind, m);
            }
            pool.note_refused(Purpose::Receive);
            return Err(DropReason::NoBuffer);
        }
        Ok(Packet { chain, offload })
    }

    /// Buffers of a kind that one frame of the largest size needs.
    fn needed(&self, rx: &RxRing, kind: Kind) -> usize {
        let largest = self.config.lro.unwrap_or(self.config.mtu) + ETHER_BYTES;
        largest.div_ceil(rx.buffer_bytes(kind))
    }

    /// Posted buffers take at most a quarter of the receive share, but enough of each kind for one
    /// frame of the largest size in any case.
    fn can_post(&self, rx: &RxRing, kind: Kind, pool: &Pool) -> bool {
        let free = pool.available(Purpose::Receive);
        let is_needed = rx.posted(kind) <= self.needed(rx, kind);
        free >= rx.buffer_bytes(kind) && (is_needed || free >= 3 * rx.posted_bytes())
    }

    /// Posts buffers in the place of those that were taken, many at a time; answers whether it did.
    fn refill(&self, rx: &mut RxRing, pool: &mut Pool) -> bool {
        // Both, whatever the first says.
        self.refill_one(rx, Kind::Large, pool) | self.refill_one(rx, Kind::Small, pool)
    }

    fn refill_one(&self, rx: &mut RxRing, kind: Kind, pool: &mut Pool) -> bool {
        let ring = rx.ring(kind);
        let space = ring.space();
        if space == 0 || (space < ring.capacity() / 8 && ring.waiting() > 0) {
            return false;
        }
        for _ in 0..space {
            if !self.can_post(rx, kind, pool) {
                break;
            }
            let m = pool.alloc(rx.buffer_bytes(kind), 0, Purpose::Receive);
            let Ok(m) = m else { break };
            repost(rx, kind, m);
        }
        rx.ring(kind).space() < space
    }
}

#[inline(always)]
fn repost(rx: &mut RxRing, kind: Kind, mut m: Mbuf) {
    m.set_len(0);
    // Its place was reaped before.
    rx.ring(kind).post_with(|| Buffer::empty(m));
}

/// A frame whose payload was placed: its headers leave in a buffer of their size, so that theirs goes
/// back to the ring at once; what did not fit into the reader's memory leaves as it lies.
fn harvest_placed(
    rx: &mut RxRing,
    kind: Kind,
    first: Buffer,
    placed: Filling,
    pool: &mut Pool,
) -> Result<Packet, DropReason> {
    let (mut rest, mut end) = (Chain::new(), first.end);
    // The hardware completes frames whole, so the last buffer is there.
    while end.is_none()
        && let Some((_, b)) = rx.reap()
    {
        rest.push_back(b.m);
        end = b.end;
    }
    let head = copy_out(&first.m, pool);
    repost(rx, kind, first.m);
    let placed = placed.into_chain(pool);
    if let (Some(mut chain), Ok(placed), Some(offload)) = (head, placed, end) {
        chain.append(placed);
        chain.append(rest);
        return Ok(Packet { chain, offload });
    }
    while let Some(m) = rest.pop_front() {
        repost(rx, Kind::Large, m);
    }
    Err(DropReason::NoBuffer)
}

/// A frame that would keep several times its own memory, and is short enough that a copy is cheaper
/// than the memory.
fn is_wasteful(m: &Mbuf) -> bool {
    let (bytes, storage) = (m.len(), m.storage_bytes());
    bytes <= COPY_SMALL_BYTES && storage > COPY_SMALL_BYTES
        || bytes <= COPY_BYTES && storage > COPY_BYTES
}

/// The frame in a buffer of its own size.
fn copy_out(m: &Mbuf, pool: &mut Pool) -> Option<Chain> {
    let bytes = m.as_slice();
    let copy = pool.alloc(bytes.len(), 0, Purpose::Receive);
    let mut copy = copy.or_else(|_| pool.alloc(bytes.len(), 0, Purpose::Control)).ok()?;
    copy.append(bytes.len())?.copy_from_slice(bytes);
    Some(Chain::from(copy))
}

#[derive(Default)]
struct Posted {
    taken: usize,
    tally: Tally,
}

/// A simulated NIC: see [`super`].
pub struct SimNic {
    driver: Driver,
    engine: Engine,
    table: Arc<FlowTable>,
    pods: Pods,
    /// A flow was placed at some time.
    has_placed: bool,
    stats: DeviceStats,
}

impl SimNic {
    pub(super) fn new(
        config: &SimConfig,
        engine: Engine,
        board: Arc<Board>,
        table: Arc<FlowTable>,
    ) -> SimNic {
        let driver = Driver {
            caps: config.caps(),
            config: config.clone(),
            descriptors: Descriptors::new(config.tx_descriptors),
            board,
            tx_coalesce: config.tx_coalesce,
            tx_bytes: 0,
            is_blocked: false,
            placed: Outcome::default(),
        };
        let stats = DeviceStats { name: "sim".into(), ..DeviceStats::default() };
        SimNic { driver, engine, table, pods: Pods::new(), has_placed: false, stats }
    }

    fn count_placed(&mut self, counters: &mut Counters) {
        if !self.has_placed {
            return;
        }
        let placed = std::mem::take(&mut self.driver.placed);
        let outcome = Outcome { misses: self.table.take_misses(), ..placed };
        outcome.count(counters, &mut self.stats);
    }

    /// Posts buffers up to the free space and rings the doorbell once.
    #[inline(always)]
    fn send(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let posted = match self.engine.own_rings() {
            Some(rings) => self.driver.post(&mut rings.tx, pool, burst, counters),
            None => self.driver.post(&mut self.engine.rings().tx, pool, burst, counters),
        };
        if posted.tally.frames > 0 {
            self.posted(now, &posted.tally, counters);
        }
        posted.taken
    }

    /// The ring was full: sends what it takes once completions are taken back.
    #[cold]
    fn send_after_refusal(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        self.stats.tx_refusals += 1;
        // Before the second attempt: the hardware then wakes the sender when it frees descriptors.
        self.engine.set_blocked(true);
        let latest = self.engine.latest(now);
        self.driver.reap(&mut self.engine.rings().tx, latest, pool);
        self.send(latest, pool, burst, counters)
    }

    /// Counts the posted frames, and rings the doorbell for them.
    #[inline(always)]
    fn posted(&mut self, now: Instant, tally: &Tally, counters: &mut Counters) {
        self.driver.count_posted(tally);
        self.stats.tx_crossings += 1;
        tally.sent(counters, &mut self.stats);
        self.engine.doorbell(now, tally.frames, tally.bytes);
    }
}

impl Device for SimNic {
    fn caps(&self) -> &Caps {
        &self.driver.caps
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let mut taken = self.send(now, pool, burst, counters);
        if !burst.is_empty() {
            taken += self.send_after_refusal(now, pool, burst, counters);
        }
        if self.driver.is_blocked == burst.is_empty() {
            self.driver.is_blocked = !burst.is_empty();
            self.engine.set_blocked(self.driver.is_blocked);
        }
        taken
    }

    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        let now = self.engine.latest(now);
        let tx = &mut self.engine.rings().tx;
        if self.driver.is_reap_due(tx, now) { self.driver.reap(tx, now, pool) } else { 0 }
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let mut rings = self.engine.rings();
        // Also what the last call posted again, having copied small frames out.
        let has_posted = self.driver.refill(&mut rings.rx, pool) || rings.rx.has_buffers();
        drop(rings);
        self.engine.poll(now, has_posted);
        self.tx_reap(now, pool);
        let mut tally = Tally::default();
        let mut rings = self.engine.rings();
        let pending = rings.rx.pending;
        let mut left = pending;
        // There is space for each: the number of rounds is bounded by it.
        while (tally.frames as usize) < budget.min(out.space()) {
            if let Some(p) = self.driver.harvest_small(&mut rings.rx, pool) {
                tally.add(&p);
                let _ = out.push(p);
            } else {
                match self.driver.harvest(&mut rings.rx, pool) {
                    Some(Ok(p)) => {
                        tally.add(&p);
                        let _ = out.push(p);
                    }
                    Some(Err(reason)) => counters.drop_packet(reason),
                    None => break,
                }
            }
            left = left.saturating_sub(1);
        }
        rings.rx.taken(left);
        drop(rings);
        self.table.taken((pending - left) as u64);
        self.stats.rx_crossings += 1;
        tally.received(counters, &mut self.stats);
        self.count_placed(counters);
        tally.frames as usize
    }

    fn arm(&mut self) -> bool {
        self.engine.arm()
    }

    fn disarm(&mut self) {
        self.engine.disarm();
        self.driver.board.bell.disarm();
    }

    fn next_deadline(&self) -> Option<Instant> {
        let reap_at = self.engine.oldest_done().map(|at| self.driver.reap_at(at));
        [self.engine.next_event(), reap_at].into_iter().flatten().min()
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        Some(WakeFd::readable(self.driver.board.bell.fd()))
    }

    fn lost(&self) -> Option<i32> {
        if self.engine.has_carrier() { None } else { Some(Errno::EPIPE as i32) }
    }

    fn coalesce(&mut self, to: Option<Profile>) {
        let SimConfig { rx_coalesce, tx_coalesce, .. } = self.driver.config;
        let as_set_up = Profile { receive: rx_coalesce, transmit: tx_coalesce };
        let Profile { receive, transmit } = to.unwrap_or(as_set_up);
        self.driver.board.rx_coalesce.set(receive);
        self.driver.tx_coalesce = transmit;
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        let places = self.driver.config.placement && self.driver.config.csum;
        places.then_some(self as &mut dyn DirectPlacement)
    }

    fn stats(&self) -> DeviceStats {
        let rx_missed = self.driver.board.counts.rx_missed.load(Relaxed);
        DeviceStats { rx_missed, ..self.stats.clone() }
    }
}

/// The host writes a tag and an offset for each space.
impl DirectPlacement for SimNic {
    fn place(
        &mut self,
        flow: FlowKey,
        next_seq: SeqNum,
        ranges: WritableRanges,
    ) -> Result<(), Unsupported> {
        bump(&self.driver.board.counts.posted_tags, ranges.len() as u64);
        self.has_placed = true;
        self.table.set(|flows| flows.set(flow, next_seq, ranges))
    }

    fn place_next(&mut self, flow: &FlowKey, range: WritableRange) -> Result<(), Unsupported> {
        bump(&self.driver.board.counts.posted_tags, 1);
        self.table.set(|flows| flows.add(flow, range))
    }

    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
        self.table.lock().clear(flow)
    }

    /// The host writes page pods for its pages, four at a time.
    fn register(&mut self, buffer: BufId) {
        let counts = &self.driver.board.counts;
        bump(&counts.registrations, 1);
        bump(&counts.pods, self.pods.write(buffer) as u64);
    }
}
