//! The bottleneck of a path: a rate, the queue in front of it, and its active queue management.
//!
//! The queue is FIFO and its rate constant, so the dequeue time of a packet is known when it is enqueued, and no timer
//! is needed. The length of the queue at that time is not known: CoDel's rule that the queue must exceed one packet is
//! replaced by a target of at least the transmission time of one.

use crate::base::{Duration, Instant};

use super::Impairments;
use crate::device::Packet;

/// Bytes of a packet on the wire beside its frame: preamble, FCS and interpacket gap (IEEE 802.3).
const WIRE_OVERHEAD_BYTES: u64 = 24;

/// A packet of the usual MTU on the wire: CoDel does not drop from a shorter queue (RFC 8289 section 5).
const MAX_PACKET_BYTES: u64 = 1500 + 14 + WIRE_OVERHEAD_BYTES;

/// Active queue management of the queue in front of a limited rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Aqm {
    /// None: the queue drops when it is full.
    #[default]
    DropTail,
    /// CoDel (RFC 8289), with its target and its interval.
    CoDel {
        /// The acceptable standing queue delay.
        target: Duration,
        /// How long a larger delay is accepted.
        interval: Duration,
    },
    /// Marks or drops every packet that has waited longer: the step marking of DCTCP (RFC 8257 section 3.1).
    Step {
        /// The delay.
        above: Duration,
    },
}

impl Aqm {
    /// CoDel with the parameters of RFC 8289 section 4.4.
    pub const CODEL: Aqm =
        Aqm::CoDel { target: Duration::from_millis(5), interval: Duration::from_millis(100) };
}

/// A token bucket without a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policer {
    /// Bits per second.
    pub rate_bps: u64,
    /// Size of the bucket, bytes.
    pub burst_bytes: u64,
}

/// The result for a packet at the bottleneck.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Passage {
    /// Its last bit leaves at this time.
    At(Instant),
    /// As `At`, but the AQM has selected it to be marked or dropped.
    Selected(Instant),
    /// The queue is full, or the policer refuses it.
    Dropped,
}

/// The state of a bottleneck.
pub(super) struct Bottleneck {
    /// When the last bit of all accepted packets has left.
    busy_until: Instant,
    codel: CoDel,
    /// The policer's tokens, in bits times nanoseconds per second; `None`: full.
    tokens: Option<u128>,
    /// When the tokens were counted.
    counted_at: Instant,
}

impl Bottleneck {
    pub(super) const fn new() -> Bottleneck {
        Bottleneck {
            busy_until: Instant::ZERO,
            codel: CoDel::new(),
            tokens: None,
            counted_at: Instant::ZERO,
        }
    }

    /// Enqueues a packet.
    pub(super) fn pass(&mut self, now: Instant, p: &Packet, how: &Impairments) -> Passage {
        if how.policer.is_some_and(|policer| !self.conforms(now, wire_bytes(p), &policer)) {
            return Passage::Dropped;
        }
        let Some(rate_bps) = how.rate_bps else { return Passage::At(now) };
        if self.busy_until.since(now) > time_of(how.queue_bytes as u64, rate_bps) {
            return Passage::Dropped;
        }
        let dequeued_at = self.busy_until.max(now);
        let sojourn = dequeued_at.since(now);
        self.busy_until = dequeued_at + time_of(wire_bytes(p), rate_bps);
        let is_selected = match how.aqm {
            Aqm::DropTail => false,
            Aqm::CoDel { target, interval } => {
                let target = target.max(time_of(MAX_PACKET_BYTES, rate_bps));
                self.codel.selects(dequeued_at, sojourn, target, interval)
            }
            Aqm::Step { above } => sojourn > above,
        };
        if is_selected { Passage::Selected(self.busy_until) } else { Passage::At(self.busy_until) }
    }

    /// Takes the last packet out of the queue: it was selected and dropped, so it takes no time of the link.
    pub(super) fn withdraw(&mut self, left: Instant, p: &Packet, how: &Impairments) {
        let Some(rate_bps) = how.rate_bps else { return };
        let began =
            left.as_nanos().saturating_sub(time_of(wire_bytes(p), rate_bps).as_nanos() as u64);
        self.busy_until = Instant::from_nanos(began);
    }

    fn conforms(&mut self, now: Instant, bytes: u64, policer: &Policer) -> bool {
        let bits = |bytes: u64| u128::from(bytes) * 8 * 1_000_000_000;
        let full = bits(policer.burst_bytes);
        let filled = now.since(self.counted_at).as_nanos() * u128::from(policer.rate_bps);
        let tokens = self.tokens.map_or(full, |t| t.saturating_add(filled).min(full));
        self.counted_at = self.counted_at.max(now);
        let left = tokens.checked_sub(bits(bytes));
        self.tokens = Some(left.unwrap_or(tokens));
        left.is_some()
    }
}

/// Bytes of all packets of a frame on the wire.
fn wire_bytes(p: &Packet) -> u64 {
    let per_packet = p.offload.gso.map_or(0, |g| u64::from(g.header_bytes));
    let pkts = p.wire_packets() as u64;
    p.chain.len() as u64 + (pkts - 1) * per_packet + pkts * WIRE_OVERHEAD_BYTES
}

fn time_of(bytes: u64, rate_bps: u64) -> Duration {
    let ns = u128::from(bytes) * 8_000_000_000 / u128::from(rate_bps.max(1));
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}

/// The state machine of RFC 8289 section 5, one packet at a time.
struct CoDel {
    /// When the delay will have been above the target for an interval.
    first_above: Option<Instant>,
    drop_next: Instant,
    count: u64,
    last_count: u64,
    dropping: bool,
}

impl CoDel {
    const fn new() -> CoDel {
        CoDel {
            first_above: None,
            drop_next: Instant::ZERO,
            count: 0,
            last_count: 0,
            dropping: false,
        }
    }

    /// Whether the packet that is dequeued `at` is to be marked or dropped.
    fn selects(
        &mut self,
        at: Instant,
        sojourn: Duration,
        target: Duration,
        interval: Duration,
    ) -> bool {
        let may_drop = self.is_standing(at, sojourn, target, interval);
        if self.dropping {
            if !may_drop {
                self.dropping = false;
            } else if at >= self.drop_next {
                self.count += 1;
                self.drop_next = control_law(self.drop_next, interval, self.count);
                return true;
            }
            return false;
        }
        if may_drop {
            self.dropping = true;
            // Soon after the last dropping state CoDel resumes at about its last drop rate.
            let delta = self.count - self.last_count;
            let is_recent = at.since(self.drop_next) < interval.saturating_mul(16);
            self.count = if delta > 1 && is_recent { delta } else { 1 };
            self.last_count = self.count;
            self.drop_next = control_law(at, interval, self.count);
        }
        may_drop
    }

    fn is_standing(
        &mut self,
        at: Instant,
        sojourn: Duration,
        target: Duration,
        interval: Duration,
    ) -> bool {
        if sojourn < target {
            self.first_above = None;
            return false;
        }
        let due = *self.first_above.get_or_insert(at + interval);
        at >= due
    }
}

/// The time of the next drop: the interval divided by the square root of the number of drops.
fn control_law(from: Instant, interval: Duration, count: u64) -> Instant {
    let squared = interval.as_nanos() * interval.as_nanos() / u128::from(count.max(1));
    from + Duration::from_nanos(squared.isqrt() as u64)
}
