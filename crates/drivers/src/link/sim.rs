//! The link on a virtual clock: what happens to a frame is decided when it is sent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_base::{Counters, DropReason, Duration, Instant};
use fulmar_mbuf::Pool;
use fulmar_netdev::delay::DelayQueue;
use fulmar_netdev::fault::{corrupt, duplicate};
use fulmar_netdev::offload::{self, Refusal};
use fulmar_netdev::{Burst, Caps, Chance, Device, DeviceStats, Packet, Rng, Tally, WakeFd};

use super::LinkConfig;

/// What a packet on the wire occupies beside its frame: preamble, check sequence and gap (IEEE 802.3).
const WIRE_OVERHEAD_BYTES: u64 = 24;
/// Frames on their way in one direction: more than any window holds, so that only the queue in front
/// of a limited rate overflows. The memory is the sending pool's, which bounds it.
const IN_FLIGHT_PKTS: usize = 1 << 16;
/// Frames cut at a time.
const CUT_PKTS: usize = 64;

/// What happens on the way, in one direction. The default is a perfect wire without delay.
#[derive(Clone, Debug)]
pub struct Impairments {
    /// Bits per second; `None`: no limit.
    pub rate_bps: Option<u64>,
    /// Bytes that may wait for a limited rate; what comes on top is dropped.
    pub queue_bytes: usize,
    /// Time from the last bit sent to delivery.
    pub delay: Duration,
    /// Up to so much more, drawn evenly; order is kept.
    pub jitter: Duration,
    /// Part of the packets that are lost, 0 to 1.
    pub loss: f64,
    /// Part of the packets that are overtaken by those sent in the next `reorder_delay`.
    pub reorder: f64,
    /// How much later an overtaken packet arrives.
    pub reorder_delay: Duration,
    /// Part of the packets that arrive twice.
    pub duplicate: f64,
    /// Part of the packets of which one bit is flipped.
    pub corrupt: f64,
    /// Part of the super-frames that are cut into packets first, so that trouble strikes packets
    /// and not whole super-frames. One chosen for corruption is always cut.
    pub cut: f64,
}

impl Default for Impairments {
    fn default() -> Impairments {
        Impairments {
            rate_bps: None,
            queue_bytes: 256 << 10,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            reorder: 0.0,
            reorder_delay: Duration::from_millis(1),
            duplicate: 0.0,
            corrupt: 0.0,
            cut: 0.0,
        }
    }
}

/// One direction.
struct Lane {
    rng: Rng,
    how: Impairments,
    loss: Chance,
    reorder: Chance,
    duplicate: Chance,
    corrupt: Chance,
    cut: Chance,
    way: DelayQueue,
    cuts: Burst,
    /// When the last bit that was accepted has left the sender.
    busy_until: Instant,
    /// When the last packet that keeps its place is delivered.
    last_due: Instant,
}

impl Lane {
    fn new(seed: u64, how: &Impairments) -> Lane {
        Lane {
            rng: Rng::new(seed),
            loss: Chance::new(how.loss),
            reorder: Chance::new(how.reorder),
            duplicate: Chance::new(how.duplicate),
            corrupt: Chance::new(how.corrupt),
            cut: Chance::new(how.cut),
            how: how.clone(),
            way: DelayQueue::with_capacity(IN_FLIGHT_PKTS),
            cuts: Burst::with_capacity(CUT_PKTS),
            busy_until: Instant::ZERO,
            last_due: Instant::ZERO,
        }
    }

    /// Sends one frame on its way, or several if it is cut.
    fn accept(&mut self, now: Instant, p: Packet, pool: &mut Pool, counters: &mut Counters) {
        let is_super = p.offload.gso.is_some();
        let flips = self.rng.happens(self.corrupt);
        if !is_super || !(flips || self.rng.happens(self.cut)) {
            return self.send(now, p, flips, pool, counters);
        }
        // One of the packets that a corrupted super-frame is cut into is struck.
        let victim = flips.then(|| self.rng.below(p.wire_packets() as u64));
        let mut index = 0;
        let mut rest = Some(p);
        while let Some(p) = rest.take() {
            match offload::segment(p, pool, &mut self.cuts, counters) {
                Ok(()) => {}
                Err(u) if u.why == Refusal::NoRoom => rest = Some(u.packet),
                Err(u) => drop_frame(u.packet, reason(u.why), pool, counters),
            }
            while let Some(p) = self.cuts.pop_front() {
                self.send(now, p, victim == Some(index), pool, counters);
                index += 1;
            }
        }
    }

    /// One packet, or one super-frame that stays whole: every draw happens here, in this order.
    fn send(
        &mut self,
        now: Instant,
        mut p: Packet,
        flips: bool,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let Some(left) = self.transmit(now, &p) else {
            return drop_frame(p, DropReason::TxQueueFull, pool, counters);
        };
        if self.rng.happens(self.loss) {
            return drop_frame(p, DropReason::Injected, pool, counters);
        }
        if flips && corrupt(&mut p, &mut self.rng, pool).is_err() {
            return drop_frame(p, DropReason::NoBuffer, pool, counters);
        }
        if self.rng.happens(self.duplicate) {
            match duplicate(&p, pool) {
                Ok(twin) => self.deliver(left, twin, pool, counters),
                Err(_) => counters.drop_packet(DropReason::NoBuffer),
            }
        }
        self.deliver(left, p, pool, counters);
    }

    /// When the last bit has left the sender; `None` if the queue in front of the wire is full.
    fn transmit(&mut self, now: Instant, p: &Packet) -> Option<Instant> {
        let Some(rate_bps) = self.how.rate_bps else { return Some(now) };
        let per_packet = p.offload.gso.map_or(0, |g| u64::from(g.header_bytes));
        let pkts = p.wire_packets() as u64;
        let bytes = p.chain.len() as u64 + (pkts - 1) * per_packet + pkts * WIRE_OVERHEAD_BYTES;
        let ns = |bytes: u64| {
            let ns = u128::from(bytes) * 8_000_000_000 / u128::from(rate_bps.max(1));
            Duration::from_nanos(ns as u64)
        };
        if self.busy_until.since(now) > ns(self.how.queue_bytes as u64) {
            return None;
        }
        self.busy_until = self.busy_until.max(now) + ns(bytes);
        Some(self.busy_until)
    }

    fn deliver(&mut self, left: Instant, p: Packet, pool: &mut Pool, counters: &mut Counters) {
        let jitter = self.rng.below(self.how.jitter.as_nanos() as u64 + 1);
        let due = left + self.how.delay + Duration::from_nanos(jitter);
        let due = if self.rng.happens(self.reorder) {
            due + self.how.reorder_delay
        } else {
            self.last_due = self.last_due.max(due);
            self.last_due
        };
        if let Err(p) = self.way.push(due, p) {
            drop_frame(p, DropReason::TxQueueFull, pool, counters);
        }
    }
}

fn drop_frame(p: Packet, reason: DropReason, pool: &mut Pool, counters: &mut Counters) {
    counters.drop_packet(reason);
    pool.free(p.chain);
}

const fn reason(why: Refusal) -> DropReason {
    match why {
        Refusal::Drop(reason) => reason,
        Refusal::NoBuffer | Refusal::NoRoom => DropReason::NoBuffer,
    }
}

/// One end of a simulated link. Deterministic: what arrives when follows from the seed and from
/// what was sent when. No object of the operating system, no clock.
pub struct SimLink {
    lanes: Arc<[Mutex<Lane>; 2]>,
    side: usize,
    caps: Caps,
    stats: DeviceStats,
}

/// Joins two stacks by a wire that treats both directions alike.
pub fn sim_pair(seed: u64, how: &Impairments, config: &LinkConfig) -> (SimLink, SimLink) {
    sim_pair_each_way(seed, [how, how], config)
}

/// Joins two stacks; `how[0]` is what happens to frames from the first end to the second.
pub fn sim_pair_each_way(
    seed: u64,
    how: [&Impairments; 2],
    config: &LinkConfig,
) -> (SimLink, SimLink) {
    let mut seeds = Rng::new(seed);
    let (there, back) = (seeds.number(), seeds.number());
    let lanes =
        Arc::new([Mutex::new(Lane::new(there, how[0])), Mutex::new(Lane::new(back, how[1]))]);
    let end = |side: usize| SimLink {
        lanes: Arc::clone(&lanes),
        side,
        caps: config.caps(side),
        stats: DeviceStats { name: format!("sim-link{side}"), ..DeviceStats::default() },
    };
    (end(0), end(1))
}

impl SimLink {
    /// Lane 0 carries what side 0 sends.
    fn lane(&self, index: usize) -> MutexGuard<'_, Lane> {
        self.lanes[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for SimLink {
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
        let taken = burst.len();
        let mut tally = Tally::default();
        let mut lane = self.lane(self.side);
        while let Some(p) = burst.pop_front() {
            if let Err(reason) = offload::check(&p, &self.caps) {
                drop_frame(p, reason, pool, counters);
                continue;
            }
            tally.add(&p);
            lane.accept(now, p, pool, counters);
        }
        drop(lane);
        self.stats.tx_crossings += 1;
        tally.sent(counters, &mut self.stats);
        taken
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        _pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let mut tally = Tally::default();
        let mut lane = self.lane(1 - self.side);
        for _ in 0..budget.min(out.space()) {
            let Some(p) = lane.way.pop_due(now) else { break };
            tally.add(&p);
            // There is room: the number of rounds was bounded by it.
            let _ = out.push(p);
        }
        drop(lane);
        self.stats.rx_crossings += 1;
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    /// Frames come by time only.
    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.lane(1 - self.side).way.next_due()
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}
