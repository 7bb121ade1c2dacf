//! The host's side: the driver. What it does here is what a driver of a real NIC does per burst and
//! per frame, and what a figure from this device measures.

use std::os::fd::RawFd;
use std::sync::Arc;

use fulmar_base::{Counters, DropReason, Instant};
use fulmar_mbuf::{Chain, Mbuf, Pool, Purpose};
use fulmar_netdev::{Burst, Caps, Device, DeviceStats, LinkState, Packet, Tally, offload};

use super::SimConfig;
use super::hardware::{Hardware, Rings, TxSlot};
use super::meter::{Board, bump};
use super::ring::Ring;
use super::rx::Buffer;

/// Received frames up to this length are copied out of their buffer, which is posted again: a tiny
/// frame never keeps a large buffer.
const COPY_BYTES: usize = 256;

/// One transmit descriptor: where a piece of a frame lies.
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

    fn room(&self) -> usize {
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
}

/// A simulated NIC: see [`super`].
pub struct SimNic {
    caps: Caps,
    rings: Rings,
    descriptors: Descriptors,
    hardware: Hardware,
    board: Arc<Board>,
    config: SimConfig,
    stats: DeviceStats,
    /// The last burst did not go out whole.
    is_blocked: bool,
    /// The host wants an interrupt, or wanted one since the hardware ran last.
    is_armed: bool,
    /// Bytes of frames in the transmit ring.
    tx_bytes: usize,
    last_now: Instant,
}

impl SimNic {
    pub(super) fn new(config: &SimConfig, hardware: Hardware) -> SimNic {
        SimNic {
            caps: config.caps(),
            rings: Rings { tx: Ring::new(config.tx_descriptors), rx: Ring::new(config.rx_buffers) },
            descriptors: Descriptors::new(config.tx_descriptors),
            board: Arc::clone(&hardware.board),
            hardware,
            config: config.clone(),
            stats: DeviceStats { name: "sim".into(), ..DeviceStats::default() },
            is_blocked: false,
            is_armed: false,
            tx_bytes: 0,
            last_now: Instant::ZERO,
        }
    }

    /// Lets the hardware work, on this thread and in its own account.
    fn run_hardware(&mut self, now: Instant) {
        self.last_now = now;
        let SimNic { hardware, rings, board, is_armed, .. } = self;
        if !hardware.is_due(now, rings) && !*is_armed {
            return;
        }
        board.section(|| {
            let bytes = hardware.run(now, rings);
            if *is_armed && hardware.rx().interrupt_at().is_some_and(|at| at <= now) {
                *is_armed = false;
                bump(&board.counts.interrupts, 1);
            }
            (bytes, ())
        });
    }

    /// Posts frames while there are descriptors.
    fn post(&mut self, pool: &mut Pool, burst: &mut Burst, counters: &mut Counters) -> Posted {
        let mut posted = Posted::default();
        while let Some(p) = burst.front() {
            if p.chain.segs() > self.descriptors.room() || self.rings.tx.room() == 0 {
                break;
            }
            let verdict = offload::check(p, &self.caps);
            let Some(packet) = burst.pop_front() else { break };
            posted.taken += 1;
            if let Err(reason) = verdict {
                counters.drop_packet(reason);
                pool.free(packet.chain);
                continue;
            }
            posted.tally.add(&packet);
            self.tx_bytes += packet.chain.len();
            let descriptors = self.descriptors.write(&packet.chain);
            // There is room, as checked above.
            let _ = self.rings.tx.post(TxSlot { packet, descriptors, done_at: Instant::ZERO });
        }
        posted
    }

    /// Rings the doorbell: once for whatever was posted.
    fn doorbell(&mut self, now: Instant, posted: &Posted, counters: &mut Counters) {
        if posted.tally.frames == 0 {
            return;
        }
        let c = &self.board.counts;
        bump(&c.doorbells, 1);
        bump(&c.tx_frames, posted.tally.frames);
        bump(&c.tx_bytes, posted.tally.bytes);
        self.stats.tx_crossings += 1;
        posted.tally.sent(counters, &mut self.stats);
        self.run_hardware(now);
    }

    /// Takes back every frame that the hardware has finished with.
    fn reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        let (mut count, mut descriptors) = (0, 0);
        while self.rings.tx.oldest_done().is_some_and(|s| s.done_at <= now)
            && let Some(slot) = self.rings.tx.reap()
        {
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
    fn is_reap_due(&self, now: Instant) -> bool {
        self.rings.tx.done() >= self.config.tx_coalesce.packets
            || self.tx_bytes >= self.config.tx_reap_bytes
            || self.is_blocked
            || self.reap_at().is_some_and(|at| at <= now)
    }

    /// When completions are taken back at the latest.
    fn reap_at(&self) -> Option<Instant> {
        let done_at = self.rings.tx.oldest_done()?.done_at;
        Some(if self.is_blocked { done_at } else { done_at + self.config.tx_coalesce.delay })
    }

    /// The next received frame; `Err` if there is no memory to keep it.
    fn harvest(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let first = self.rings.rx.reap()?;
        let Some(offload) = first.end else { return Some(self.harvest_long(first, pool)) };
        let bytes = first.m.len();
        if bytes <= COPY_BYTES && first.m.storage_bytes() > COPY_BYTES {
            let copied = copy_out(&first.m, pool);
            return match copied {
                Some(chain) => {
                    self.repost(first.m);
                    Some(Ok(Packet { chain, offload }))
                }
                None => Some(self.give_away(Chain::from(first.m), offload, pool)),
            };
        }
        Some(self.give_away(Chain::from(first.m), offload, pool))
    }

    /// A frame in several buffers.
    fn harvest_long(&mut self, first: Buffer, pool: &mut Pool) -> Result<Packet, DropReason> {
        let mut chain = Chain::from(first.m);
        // The hardware completes frames whole, so the last buffer is there.
        while let Some(b) = self.rings.rx.reap() {
            chain.push_back(b.m);
            if let Some(offload) = b.end {
                return self.give_away(chain, offload, pool);
            }
        }
        pool.free(chain);
        Err(DropReason::Truncated)
    }

    /// Hands a frame over in the buffers that it lies in, if these can be replaced; else the buffers
    /// stay, so that the ring never runs dry for good.
    fn give_away(
        &mut self,
        mut chain: Chain,
        offload: fulmar_base::Offload,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        if self.rings.rx.waiting() == 0 && !self.can_post(pool) {
            while let Some(m) = chain.pop_front() {
                self.repost(m);
            }
            return Err(DropReason::NoBuffer);
        }
        Ok(Packet { chain, offload })
    }

    fn repost(&mut self, mut m: Mbuf) {
        m.set_len(0);
        // Its place was just reaped.
        let _ = self.rings.rx.post(Buffer { m, end: None });
    }

    /// Posted buffers take at most a quarter of the receive share, and one at the least.
    fn can_post(&self, pool: &Pool) -> bool {
        let posted = self.rings.rx.capacity() - self.rings.rx.room();
        let bytes = posted * self.config.rx_buffer_bytes;
        pool.available(Purpose::Receive) >= (3 * bytes).max(self.config.rx_buffer_bytes)
    }

    /// Posts buffers in the place of those that were taken, many at a time.
    fn refill(&mut self, pool: &mut Pool) {
        let room = self.rings.rx.room();
        let batch = self.rings.rx.capacity() / 8;
        if room < batch && self.rings.rx.waiting() > 0 {
            return;
        }
        for _ in 0..room {
            if !self.can_post(pool) {
                return;
            }
            let Ok(m) = pool.alloc(self.config.rx_buffer_bytes, 0, Purpose::Receive) else {
                return;
            };
            self.repost(m);
        }
    }
}

/// A small frame in a buffer of its own size.
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

impl Device for SimNic {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let posted = self.post(pool, burst, counters);
        self.doorbell(now, &posted, counters);
        let mut taken = posted.taken;
        if !burst.is_empty() {
            self.stats.tx_refusals += 1;
            self.reap(now, pool);
            let posted = self.post(pool, burst, counters);
            self.doorbell(now, &posted, counters);
            taken += posted.taken;
        }
        self.is_blocked = !burst.is_empty();
        taken
    }

    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        if self.is_reap_due(now) { self.reap(now, pool) } else { 0 }
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        self.refill(pool);
        self.run_hardware(now);
        self.tx_reap(now, pool);
        let mut tally = Tally::default();
        let before = self.hardware.rx().pending;
        let mut left = before;
        while (tally.frames as usize) < budget.min(out.room())
            && let Some(frame) = self.harvest(pool)
        {
            left -= 1;
            match frame {
                Ok(p) => {
                    tally.add(&p);
                    // There is room: the number of rounds was bounded by it.
                    let _ = out.push(p);
                }
                Err(reason) => counters.drop_packet(reason),
            }
        }
        self.hardware.rx_mut().taken(left, now);
        self.stats.rx_crossings += 1;
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    fn arm(&mut self) -> bool {
        self.is_armed = true;
        self.board.bell.arm();
        self.rings.rx.done() == 0 && !self.hardware.is_due(self.last_now, &self.rings)
    }

    fn disarm(&mut self) {
        // Whether an interrupt came is found out when the hardware runs next.
        self.board.bell.disarm();
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.board.bell.fd())
    }

    fn next_deadline(&self) -> Option<Instant> {
        let room = self.reap_at();
        let others = [self.hardware.rx().interrupt_at(), self.hardware.next_event(), room];
        others.into_iter().flatten().min()
    }

    fn link_state(&self) -> LinkState {
        LinkState::Up
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}
