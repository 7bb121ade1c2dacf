//! A simulated network path: loss, reordering, duplication, bit errors, delay, and a bottleneck with its queue (as
//! tc-netem(8)).
//!
//! A [`Path`] is one direction. It holds each frame until it is due. Its behaviour is a function of the seed, the
//! frames and their times. [`impaired`](crate::device::impaired) puts two paths in front of a device, and the simulated
//! link of `drivers` connects two stacks by two.
//!
//! ```text
//! sender ─► size ─► policer ─► queue with its AQM, rate ─► loss ─► bit flips, duplicates
//!        ─► delay, jitter, reordering ─► receiver
//! ```

mod bottleneck;
mod runs;
mod strike;

use alloc::collections::VecDeque;

use crate::base::{Counters, DropReason, Duration, Instant};
use crate::mbuf::{NoBuffer, Pool};
use crate::wire::eth;

use crate::device::delay::DelayQueue;
use crate::device::offload::{self, Refusal};
use crate::device::{Burst, Chance, Packet, Rng};
pub use bottleneck::{Aqm, Policer};
use bottleneck::{Bottleneck, Passage};
pub use strike::{corrupt, duplicate, mark_congestion};

/// Longest run of losses: a fading link recovers before a retransmission time-out.
const LONGEST_RUN: Duration = Duration::from_millis(10);
/// Most packets that one call segments from a super-frame.
const CUT_PKTS: usize = 64;

/// The impairments of one direction. The default is a perfect path without delay.
#[derive(Clone, PartialEq, Debug)]
pub struct Impairments {
    /// Bits per second of the bottleneck; `None`: no limit.
    pub rate_bps: Option<u64>,
    /// Limit of the bytes queued for a limited rate. A packet that would exceed it is dropped.
    pub queue_bytes: usize,
    /// What else the queue drops or marks.
    pub aqm: Aqm,
    /// The queue marks ECN-capable packets (RFC 3168) where its AQM would drop them.
    pub ecn: bool,
    /// Drops what exceeds a rate, without a queue.
    pub policer: Option<Policer>,
    /// Time from the last bit sent to delivery.
    pub delay: Duration,
    /// Upper bound of the additional delay, which is uniform from 0. The delay does not reorder packets.
    pub jitter: Duration,
    /// Larger IP packets (bytes) are dropped without an ICMP error: a black hole (RFC 2923 section 2.1). `None`: no
    /// limit.
    pub mtu: Option<usize>,
    /// Fraction of packets that are lost, 0 to 1; so with the other fractions.
    pub loss: f64,
    /// Mean number of packets that are lost in a row (a Gilbert model); up to 1: each on its own. A run ends after 10
    /// ms, so that packets further apart are lost each on its own, and fewer of them.
    pub loss_run_pkts: f64,
    /// Fraction of packets that later ones overtake.
    pub reorder: f64,
    /// By how many packets at most; 0: by those sent in the next `reorder_delay`.
    pub reorder_pkts: u32,
    /// The longest further delay of an overtaken packet.
    pub reorder_delay: Duration,
    /// Fraction of packets that arrive twice.
    pub duplicate: f64,
    /// Fraction of packets of which one bit is flipped.
    pub corrupt: f64,
    /// Fraction of super-frames that are segmented first, so that impairments hit packets and not whole super-frames.
    /// One that is to be corrupted is always segmented.
    pub cut: f64,
}

/// Upper bound of every configured time.
const HOUR: Duration = Duration::from_secs(3600);

impl Impairments {
    /// The same with fractions limited to 0 to 1 and times to an hour.
    fn bounded(&self) -> Impairments {
        let share = |s: f64| if s.is_nan() { 0.0 } else { s.clamp(0.0, 1.0) };
        Impairments {
            loss: share(self.loss),
            loss_run_pkts: if self.loss_run_pkts >= 1.0 { self.loss_run_pkts } else { 1.0 },
            delay: self.delay.min(HOUR),
            jitter: self.jitter.min(HOUR),
            reorder_delay: self.reorder_delay.min(HOUR),
            aqm: match self.aqm {
                Aqm::CoDel { target, interval } => {
                    Aqm::CoDel { target: target.min(HOUR), interval: interval.min(HOUR) }
                }
                other => other,
            },
            ..self.clone()
        }
    }
}

impl Default for Impairments {
    fn default() -> Impairments {
        Impairments {
            rate_bps: None,
            queue_bytes: 256 << 10,
            aqm: Aqm::DropTail,
            ecn: false,
            policer: None,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            mtu: None,
            loss: 0.0,
            loss_run_pkts: 1.0,
            reorder: 0.0,
            reorder_pkts: 0,
            reorder_delay: Duration::from_millis(1),
            duplicate: 0.0,
            corrupt: 0.0,
            cut: 0.0,
        }
    }
}

/// Counters of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PathCounts {
    /// Lost at random.
    pub lost: u64,
    /// Dropped because they were larger than the MTU.
    pub oversized: u64,
    /// Dropped by the queue, its AQM or the policer.
    pub queue_drops: u64,
    /// Marked with Congestion Experienced.
    pub marked: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Overtaken.
    pub reordered: u64,
    /// With one bit flipped.
    pub corrupted: u64,
    /// Frames that passed the bottleneck.
    pub passed: u64,
    /// The sum of their times in the bottleneck, nanoseconds.
    pub passed_ns: u64,
}

/// The memory of packets that are segmented from a super-frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cuts {
    /// They refer to the super-frame.
    Shared,
    /// A packet that would pin more than four times its length is copied: a receiver is charged by truesize.
    Own,
    /// As [`Cuts::Own`]. Where no bottleneck spaces them, packets in a row that nothing befalls stay one super-frame.
    Runs,
}

/// A packet that waits until `overtakers` others have overtaken it, or until `due`.
struct Waiting {
    overtakers: u32,
    due: Instant,
    packet: Packet,
}

/// One direction of a path.
pub struct Path {
    rng: Rng,
    how: Impairments,
    loss: Chance,
    loss_ends: Chance,
    /// The latest end of the present run of losses.
    loses_until: Option<Instant>,
    reorder: Chance,
    duplicate: Chance,
    corrupt: Chance,
    cut: Chance,
    cuts_are: Cuts,
    bottleneck: Bottleneck,
    waiting: VecDeque<Waiting>,
    capacity: usize,
    in_flight: DelayQueue,
    cuts: Burst,
    /// When the last packet that is not reordered is delivered.
    last_due: Instant,
    counts: PathCounts,
}

impl Path {
    /// A path that holds at most `capacity` frames and drops any further.
    pub fn new(seed: u64, how: &Impairments, capacity: usize, cuts_are: Cuts) -> Path {
        let never = Chance::default();
        let mut path = Path {
            rng: Rng::new(seed),
            how: how.clone(),
            loss: never,
            loss_ends: never,
            loses_until: None,
            reorder: never,
            duplicate: never,
            corrupt: never,
            cut: never,
            cuts_are,
            bottleneck: Bottleneck::new(),
            waiting: VecDeque::new(),
            capacity,
            in_flight: DelayQueue::with_capacity(capacity),
            cuts: Burst::with_capacity(CUT_PKTS),
            last_due: Instant::ZERO,
            counts: PathCounts::default(),
        };
        path.set(how);
        path
    }

    /// Changes the impairments of the frames that are sent from now on.
    pub fn set(&mut self, how: &Impairments) {
        let how = how.bounded();
        // The mean run and the rate at which runs begin give the loss rate. A loss rate near 1 needs longer runs.
        let run = how.loss_run_pkts.max(how.loss / (1.0 - how.loss).max(1e-9));
        let begins = how.loss / (run * (1.0 - how.loss)).max(1e-9);
        self.loss = Chance::new(if how.loss_run_pkts > 1.0 { begins } else { how.loss });
        self.loss_ends = Chance::new(1.0 / run);
        self.reorder = Chance::new(how.reorder);
        self.duplicate = Chance::new(how.duplicate);
        self.corrupt = Chance::new(how.corrupt);
        self.cut = Chance::new(how.cut);
        self.how = how;
    }

    /// The counters.
    pub fn counts(&self) -> PathCounts {
        self.counts
    }

    /// Frames that the path holds.
    pub fn held_frames(&self) -> usize {
        self.in_flight.len() + self.waiting.len()
    }

    /// Sends a frame, segmented or as it is.
    pub fn send(&mut self, now: Instant, p: Packet, pool: &mut Pool, counters: &mut Counters) {
        let is_super = p.offload.gso.is_some();
        let flips = self.rng.happens(self.corrupt);
        // The last packet of a super-frame that is too large may be small enough.
        let is_cut = is_super && (flips || self.rng.happens(self.cut) || self.is_too_large(&p));
        if !is_cut {
            return self.send_packet(now, p, flips, pool, counters);
        }
        // Of a super-frame that is to be corrupted one packet is.
        let victim = flips.then(|| self.rng.below(p.wire_packets() as u64));
        if self.cuts_are == Cuts::Runs && runs::is_possible(&self.how) {
            return self.send_runs(now, p, victim, pool, counters);
        }
        let mut index = 0;
        let mut rest = Some(p);
        while let Some(p) = rest.take() {
            match offload::segment(p, pool, &mut self.cuts, counters) {
                Ok(()) => {}
                Err(u) if u.why == Refusal::NoSpace => rest = Some(u.packet),
                Err(u) => u.packet.discard(reason(u.why), pool, counters),
            }
            while let Some(mut p) = self.cuts.pop_front() {
                self.own(&mut p, pool);
                self.send_packet(now, p, victim == Some(index), pool, counters);
                index += 1;
            }
        }
    }

    /// Sends a packet, or a super-frame that is not segmented. The random numbers are drawn here, in this order.
    fn send_packet(
        &mut self,
        now: Instant,
        mut p: Packet,
        flips: bool,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        if self.is_too_large(&p) {
            self.counts.oversized += 1;
            return p.discard(DropReason::Injected, pool, counters);
        }
        let left = match self.bottleneck.pass(now, &p, &self.how) {
            Passage::Dropped => {
                self.counts.queue_drops += p.wire_packets() as u64;
                return p.discard(DropReason::TxQueueFull, pool, counters);
            }
            Passage::Selected(left) if !(self.how.ecn && mark_congestion(&mut p, pool)) => {
                self.bottleneck.withdraw(left, &p, &self.how);
                self.counts.queue_drops += p.wire_packets() as u64;
                return p.discard(DropReason::TxQueueFull, pool, counters);
            }
            Passage::Selected(left) => {
                self.counts.marked += p.wire_packets() as u64;
                left
            }
            Passage::At(left) => left,
        };
        self.counts.passed += 1;
        self.counts.passed_ns += left.since(now).as_nanos() as u64;
        if self.is_lost(now) {
            self.counts.lost += 1;
            return p.discard(DropReason::Injected, pool, counters);
        }
        if flips {
            match corrupt(&mut p, &mut self.rng, pool) {
                Ok(is_flipped) => self.counts.corrupted += u64::from(is_flipped),
                Err(NoBuffer) => return p.discard(DropReason::NoBuffer, pool, counters),
            }
        }
        if self.rng.happens(self.duplicate) {
            match duplicate(&p, pool) {
                Ok(twin) => {
                    self.counts.duplicated += 1;
                    self.deliver(left, twin, pool, counters);
                }
                Err(_) => counters.drop_packet(DropReason::NoBuffer),
            }
        }
        self.deliver(left, p, pool, counters);
    }

    /// Whether a packet of the frame is larger than the MTU of the path.
    fn is_too_large(&self, p: &Packet) -> bool {
        let packet = p
            .offload
            .gso
            .map_or(p.chain.len(), |g| usize::from(g.header_bytes) + usize::from(g.segment_bytes));
        self.how.mtu.is_some_and(|mtu| packet > mtu + eth::HEADER_BYTES)
    }

    fn is_lost(&mut self, now: Instant) -> bool {
        if self.how.loss_run_pkts <= 1.0 {
            return self.rng.happens(self.loss);
        }
        self.loses_until = match self.loses_until.filter(|until| now < *until) {
            Some(until) => (!self.rng.happens(self.loss_ends)).then_some(until),
            None => self.rng.happens(self.loss).then_some(now + LONGEST_RUN),
        };
        self.loses_until.is_some()
    }

    fn deliver(&mut self, left: Instant, p: Packet, pool: &mut Pool, counters: &mut Counters) {
        let due = left + self.how.delay + self.jitter();
        let is_overtaken = self.rng.happens(self.reorder);
        self.counts.reordered += u64::from(is_overtaken);
        if is_overtaken && self.how.reorder_pkts > 0 {
            let overtakers = 1 + self.rng.below(u64::from(self.how.reorder_pkts)) as u32;
            let due = due + self.how.reorder_delay;
            if self.held_frames() >= self.capacity {
                return p.discard(DropReason::TxQueueFull, pool, counters);
            }
            return self.waiting.push_back(Waiting { overtakers, due, packet: p });
        }
        if is_overtaken {
            return self.hold(due + self.how.reorder_delay, p, pool, counters);
        }
        self.last_due = self.last_due.max(due);
        self.hold(self.last_due, p, pool, counters);
        self.overtake(1, pool, counters);
    }

    fn jitter(&mut self) -> Duration {
        Duration::from_nanos(self.rng.below(self.how.jitter.as_nanos() as u64 + 1))
    }

    fn hold(&mut self, due: Instant, p: Packet, pool: &mut Pool, counters: &mut Counters) {
        if let Err(p) = self.in_flight.push(due, p) {
            p.discard(DropReason::TxQueueFull, pool, counters);
        }
    }

    /// Packets have overtaken the waiting ones. Those that enough packets have overtaken are due right after them.
    fn overtake(&mut self, packets: u32, pool: &mut Pool, counters: &mut Counters) {
        self.waiting.iter_mut().for_each(|w| w.overtakers -= packets);
        while let Some(at) = self.waiting.iter().position(|w| w.overtakers == 0) {
            let Some(w) = self.waiting.remove(at) else { break };
            self.hold(self.last_due.min(w.due), w.packet, pool, counters);
        }
    }

    /// Takes the next frame that is due.
    pub fn pop_due(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Option<Packet> {
        while let Some(at) = self.waiting.iter().position(|w| w.due <= now) {
            let w = self.waiting.remove(at)?;
            self.hold(w.due, w.packet, pool, counters);
        }
        self.in_flight.pop_due(now)
    }

    /// When the next frame is due.
    pub fn next_due(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|w| w.due).min();
        waiting.into_iter().chain(self.in_flight.next_due()).min()
    }
}

const fn reason(why: Refusal) -> DropReason {
    match why {
        Refusal::Drop(reason) => reason,
        Refusal::NoBuffer | Refusal::NoSpace => DropReason::NoBuffer,
    }
}

#[cfg(test)]
mod tests;
