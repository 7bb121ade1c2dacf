//! A device with trouble in front of another device: drops, duplicates, reordering, flipped bits,
//! delay, in each direction, reproducible from a seed.
//!
//! Enters and leaves: frames, both ways. A super-frame is cut into packets first (unless told not
//! to), so that rates are rates of packets; a packet that is to be corrupted is always single and
//! its checksum complete, so that a receiver can notice, and its storage is copied first, since
//! others may refer to it. Placement is refused: a frame that is dropped or overtaken here would have
//! been placed already. Frames held back are bounded in number; [`Device::next_deadline`] says
//! when the next one is due, and every poll moves those that are.

use alloc::collections::VecDeque;
use alloc::format;

use fulmar_base::{Counters, DropReason, Duration, Instant};
use fulmar_mbuf::{NoBuffer, Pool, Purpose};
use fulmar_wire::eth;

use crate::delay::DelayQueue;
use crate::offload::{self, Refusal};
use crate::{
    Burst, Caps, Chance, Device, DeviceStats, DirectPlacement, Packet, Rng, forward_device,
};

const ETHER_BYTES: usize = eth::HEADER_BYTES;
/// Frames held per direction before no more are accepted.
const HELD_PKTS: usize = 1024;
/// Beyond that the packets of one super-frame still fit (65,535 bytes cut by the smallest MSS).
const CAPACITY_PKTS: usize = HELD_PKTS + 1400;
const BURST_PKTS: usize = 64;
/// When to offer frames again that the device behind did not take.
const RETRY: Duration = Duration::from_millis(1);

/// How much trouble in one direction. The default is none.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Part of the packets that are dropped, 0 to 1.
    pub drop: f64,
    /// Part of the packets that are sent twice.
    pub duplicate: f64,
    /// Part of the packets that are held until others have overtaken them.
    pub reorder: f64,
    /// By how many packets at most.
    pub reorder_pkts: u32,
    /// A held packet that nothing overtakes leaves after so long.
    pub reorder_time: Duration,
    /// Part of the packets of which one bit is flipped.
    pub corrupt: f64,
    /// Delay of every packet.
    pub delay: Duration,
    /// Leave super-frames whole (one chosen for corruption is cut nevertheless).
    pub keep_super_frames: bool,
}

impl Default for Rates {
    fn default() -> Rates {
        Rates {
            drop: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            reorder_pkts: 4,
            reorder_time: Duration::from_millis(5),
            corrupt: 0.0,
            delay: Duration::ZERO,
            keep_super_frames: false,
        }
    }
}

/// What was done to the packets of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultCounts {
    /// Dropped.
    pub dropped: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Held until others overtook them.
    pub reordered: u64,
    /// With one bit flipped.
    pub corrupted: u64,
}

/// A packet that waits until `overtakers` others have passed, or until `due`.
struct Waiting {
    overtakers: u32,
    due: Instant,
    packet: Packet,
}

/// One direction.
struct Lane {
    rng: Rng,
    rates: Rates,
    drop: Chance,
    duplicate: Chance,
    reorder: Chance,
    corrupt: Chance,
    waiting: VecDeque<Waiting>,
    way: DelayQueue,
    cuts: Burst,
    counts: FaultCounts,
}

impl Lane {
    fn new(seed: u64, rates: Rates) -> Lane {
        Lane {
            rng: Rng::new(seed),
            drop: Chance::new(rates.drop),
            duplicate: Chance::new(rates.duplicate),
            reorder: Chance::new(rates.reorder),
            corrupt: Chance::new(rates.corrupt),
            rates,
            waiting: VecDeque::new(),
            way: DelayQueue::with_capacity(CAPACITY_PKTS),
            cuts: Burst::with_capacity(BURST_PKTS),
            counts: FaultCounts::default(),
        }
    }

    fn has_space(&self) -> bool {
        self.way.len() + self.waiting.len() < HELD_PKTS
    }

    fn strikes(&self) -> bool {
        [self.drop, self.duplicate, self.reorder, self.corrupt].into_iter().any(Chance::is_possible)
    }

    /// Takes one frame; whatever comes of it lies in `way` or `waiting` afterwards.
    fn admit(&mut self, now: Instant, p: Packet, pool: &mut Pool, counters: &mut Counters) {
        let flips = self.rng.happens(self.corrupt);
        let is_super = p.offload.gso.is_some();
        let cuts = flips || (self.strikes() && !self.rates.keep_super_frames);
        if !is_super || !cuts {
            return self.strike(now, p, flips, pool, counters);
        }
        // Each packet of a super-frame has its own chance; at least the one that was drawn is hit.
        let victim = flips.then(|| self.rng.below(p.wire_packets() as u64));
        let mut index = 0;
        let mut rest = Some(p);
        while let Some(p) = rest.take() {
            match offload::segment(p, pool, &mut self.cuts, counters) {
                Ok(()) => {}
                Err(u) if u.why == Refusal::NoRoom => rest = Some(u.packet),
                Err(u) => drop_frame(u.packet, refused(u.why), pool, counters),
            }
            while let Some(mut p) = self.cuts.pop_front() {
                // A packet of its own would not pin the storage of the whole super-frame, and so
                // it must not here, or a receiver's window would close for nothing. Without
                // memory it stays as it is.
                if p.chain.truesize() > 4 * p.chain.len() {
                    let _ = offload::make_unique(&mut p.chain, pool, Purpose::Receive);
                }
                self.strike(now, p, victim == Some(index), pool, counters);
                index += 1;
            }
        }
    }

    fn strike(
        &mut self,
        now: Instant,
        mut p: Packet,
        flips: bool,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        if self.rng.happens(self.drop) {
            self.counts.dropped += 1;
            return drop_frame(p, DropReason::Injected, pool, counters);
        }
        if flips {
            if corrupt(&mut p, &mut self.rng, pool).is_err() {
                return drop_frame(p, DropReason::NoBuffer, pool, counters);
            }
            self.counts.corrupted += 1;
        }
        if self.rng.happens(self.duplicate) {
            match duplicate(&p, pool) {
                Ok(twin) => {
                    self.counts.duplicated += 1;
                    self.forward(now, twin, pool, counters);
                }
                Err(NoBuffer) => counters.drop_packet(DropReason::NoBuffer),
            }
        }
        if self.rng.happens(self.reorder) {
            self.counts.reordered += 1;
            let overtakers = 1 + self.rng.below(u64::from(self.rates.reorder_pkts.max(1))) as u32;
            let due = now + self.rates.reorder_time;
            self.waiting.push_back(Waiting { overtakers, due, packet: p });
        } else {
            self.forward(now, p, pool, counters);
            self.overtake(now, pool, counters);
        }
    }

    fn forward(&mut self, now: Instant, p: Packet, pool: &mut Pool, counters: &mut Counters) {
        if let Err(p) = self.way.push(now + self.rates.delay, p) {
            drop_frame(p, DropReason::TxQueueFull, pool, counters);
        }
    }

    /// One packet has passed those that wait.
    fn overtake(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters) {
        self.waiting.iter_mut().for_each(|w| w.overtakers -= 1);
        self.let_go(now, pool, counters, |w| w.overtakers == 0);
    }

    fn let_go(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        counters: &mut Counters,
        is_free: impl Fn(&Waiting) -> bool,
    ) {
        while let Some(at) = self.waiting.iter().position(&is_free) {
            let Some(w) = self.waiting.remove(at) else { break };
            self.forward(now, w.packet, pool, counters);
        }
    }

    /// Moves what is due into `out`, at most `limit` frames; returns how many.
    fn release(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        limit: usize,
        counters: &mut Counters,
    ) -> usize {
        self.let_go(now, pool, counters, |w| w.due <= now);
        let mut count = 0;
        while count < limit.min(out.capacity()) && !out.is_full() {
            let Some(p) = self.way.pop_due(now) else { break };
            // There is room: the line above asked.
            let _ = out.push(p);
            count += 1;
        }
        count
    }

    fn next_due(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|w| w.due).min();
        earlier(waiting, self.way.next_due())
    }
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

fn drop_frame(p: Packet, reason: DropReason, pool: &mut Pool, counters: &mut Counters) {
    counters.drop_packet(reason);
    pool.free(p.chain);
}

const fn refused(why: Refusal) -> DropReason {
    match why {
        Refusal::Drop(reason) => reason,
        Refusal::NoBuffer | Refusal::NoRoom => DropReason::NoBuffer,
    }
}

/// A second frame that refers to the same bytes.
///
/// # Errors
/// [`NoBuffer`]: the pool has no references left.
pub fn duplicate(p: &Packet, pool: &mut Pool) -> Result<Packet, NoBuffer> {
    let chain = pool.clone_range(&p.chain, 0, p.chain.len())?;
    Ok(Packet { chain, offload: p.offload })
}

/// Flips one bit of an IP packet, after completing its checksum and copying it. The Ethernet header
/// and frames other than IP stay whole: on a wire their check sequence would have caught the flip,
/// and nothing else can. Not for super-frames.
///
/// # Errors
/// [`NoBuffer`]: no memory for the copy; the frame is as it was.
pub fn corrupt(p: &mut Packet, rng: &mut Rng, pool: &mut Pool) -> Result<(), NoBuffer> {
    let mut front = [0; ETHER_BYTES];
    p.chain.copy_to(0, &mut front);
    let is_ip = eth::Header::parse(&front)
        .is_ok_and(|h| h.ethertype == eth::IPV4 || h.ethertype == eth::IPV6);
    if !is_ip {
        return Ok(());
    }
    offload::finish_checksum(p, pool)?;
    offload::make_unique(&mut p.chain, pool, Purpose::Control)?;
    p.offload.csum_valid = false;
    let bits = p.chain.len().saturating_sub(ETHER_BYTES) as u64 * 8;
    let bit = rng.below(bits);
    let at = ETHER_BYTES + (bit / 8) as usize;
    let mut byte = [0];
    if p.chain.copy_to(at, &mut byte) == 1 {
        byte[0] ^= 1 << (bit % 8);
        p.chain.copy_from(at, &byte);
    }
    Ok(())
}

/// A device in front of another that makes trouble.
pub struct Faults<D: Device> {
    inner: D,
    caps: Caps,
    tx: Lane,
    rx: Lane,
    tx_ready: Burst,
    rx_fresh: Burst,
    /// The device behind left frames in `tx_ready`: offer them again then.
    retry_at: Option<Instant>,
}

impl<D: Device> Faults<D> {
    /// Puts trouble in front of `inner`: `tx` for sent packets, `rx` for received ones. What happens
    /// follows from `seed` and from the frames alone.
    pub fn new(inner: D, seed: u64, tx: Rates, rx: Rates) -> Faults<D> {
        let mut seeds = Rng::new(seed);
        let caps = Caps { places_on_receive: false, ..inner.caps().inspected() };
        Faults {
            inner,
            caps,
            tx: Lane::new(seeds.number(), tx),
            rx: Lane::new(seeds.number(), rx),
            tx_ready: Burst::with_capacity(BURST_PKTS),
            rx_fresh: Burst::with_capacity(BURST_PKTS),
            retry_at: None,
        }
    }

    /// What was done so far to sent and to received packets.
    pub fn counts(&self) -> (FaultCounts, FaultCounts) {
        (self.tx.counts, self.rx.counts)
    }

    /// The device behind.
    pub fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    /// Hands everything that is due to the device behind.
    fn flush(&mut self, now: Instant, pool: &mut Pool, counters: &mut Counters) {
        loop {
            self.tx.release(now, pool, &mut self.tx_ready, BURST_PKTS, counters);
            if self.tx_ready.is_empty() {
                self.retry_at = None;
                return;
            }
            self.inner.tx_burst(now, pool, &mut self.tx_ready, counters);
            if !self.tx_ready.is_empty() {
                self.retry_at = Some(now + RETRY);
                return;
            }
        }
    }
}

impl<D: Device> Device for Faults<D> {
    forward_device!(self => self.inner, except caps, tx_burst, rx_burst, next_deadline, placement, stats);

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
        let before = burst.len();
        while self.tx.has_space() {
            let Some(p) = burst.pop_front() else { break };
            match offload::check(&p, self.inner.caps()) {
                Ok(()) => self.tx.admit(now, p, pool, counters),
                Err(reason) => drop_frame(p, reason, pool, counters),
            }
        }
        self.flush(now, pool, counters);
        before - burst.len()
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        self.flush(now, pool, counters);
        if self.rx.has_space() {
            let budget = budget.min(BURST_PKTS);
            self.inner.rx_burst(now, pool, &mut self.rx_fresh, budget, counters);
        }
        while let Some(p) = self.rx_fresh.pop_front() {
            self.rx.admit(now, p, pool, counters);
        }
        self.rx.release(now, pool, out, budget, counters)
    }

    fn next_deadline(&self) -> Option<Instant> {
        // Frames that were refused wait for the next try, whatever else is due to be sent.
        let tx = self.retry_at.or_else(|| self.tx.next_due());
        earlier(earlier(tx, self.rx.next_due()), self.inner.next_deadline())
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        None
    }

    fn stats(&self) -> DeviceStats {
        let stats = self.inner.stats();
        DeviceStats { name: format!("faults({})", stats.name), ..stats }
    }
}

#[cfg(test)]
mod tests;
