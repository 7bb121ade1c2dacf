//! How long an honest connection may take whatever other peers do: a bound on the virtual time, from what
//! the scenario makes the connection wait for. Generous in each term, since chance may not break it; a
//! connection that is starved or waits for something that never comes exceeds it all the same.

use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::Duration;

use super::case::Feature;
use super::scenario::{FlowKind, Scenario, Trouble};

const MS: Duration = Duration::from_millis(1);
/// The least segment without an MSS option (RFC 9293 section 3.7.1), without timestamps.
const DEFAULT_MSS: u64 = 536 - 12;
/// Headers of a frame, at most.
const HEADER_BYTES: u64 = 120;
/// Round trips of a connection without data, and of its slow start.
const ROUNDS: u64 = 30;
/// What an acknowledgement may wait for: the delayed ACK and the time between two looks of a reader.
const ACK_DELAY: Duration = Duration::from_millis(60);
/// The longest time for which a partial segment is held back (TCP_CORK of Linux).
const CORK: Duration = Duration::from_millis(200);
/// Between two takings of a device that is full.
const FULL: Duration = Duration::from_millis(2);
/// TIME-WAIT by default.
const TIME_WAIT: Duration = Duration::from_secs(60);
/// Steps without effect that are allowed in any case.
const IDLE_STEPS: u64 = 20_000;

/// How often an application calls, and what a wire carries.
#[derive(Clone, Copy)]
struct Load {
    bytes: u64,
    calls: u64,
    frames: u64,
}

impl Scenario {
    /// The longest time that a flow may take from when it begins to connect; `None`: no bound.
    pub fn service_bound(&self, flow: usize) -> Option<Duration> {
        if !self.case.is_swarm || self.may_fail(flow) {
            return None;
        }
        // Two that try to connect at the same instant may miss each other as often as chance will have it.
        if self.flows[flow].kind == FlowKind::SimultaneousOpen {
            return None;
        }
        // Where routes come and go the scenario decides how long.
        let trouble = match &self.trouble {
            Trouble::None => Duration::ZERO,
            Trouble::Pause { at, lasts } => *at + *lasts * 3,
            _ => return None,
        };
        let own = self.load(flow);
        let all = (0..self.flows.len()).map(|f| self.load(f).bytes).sum();
        let accepts = self.stations.iter().map(|s| s.accepts_after).max().unwrap_or_default();
        let jumps: Duration = self.swarm.jumps.iter().map(|j| j.1).sum();
        let attacked = self.swarm.attacks.iter().map(|a| a.end()).max().unwrap_or_default();
        let rounds = ROUNDS + own.calls + own.bytes / self.window();
        // The port is free again when TIME-WAIT is over.
        let port = if self.flows[flow].again.is_some() { TIME_WAIT * 3 } else { Duration::ZERO };
        let waits = port
            + self.decisions()
            + accepts * 3
            + self.pauses(flow)
            + self.round_trip() * rounds as u32;
        Some(trouble + jumps + attacked + waits + self.wire_time(all) + self.recovery(own))
    }

    fn segment_bytes(&self) -> u64 {
        let clamped = self.swarm.clamp_mss.iter().flatten().copied().min().unwrap_or(u16::MAX);
        // The least that a stack agrees to is not known here: as small as was asked for.
        let default = if self.has_no_mss() { DEFAULT_MSS } else { u64::MAX };
        u64::from(clamped).min(default).clamp(16, self.mtu as u64 - 76)
    }

    fn load(&self, flow: usize) -> Load {
        let f = &self.flows[flow];
        let bytes: u64 = f.ends.iter().map(|e| e.bytes).sum();
        let most = |bytes: u64, each: usize| 4 + 4 * bytes / each.max(1) as u64;
        let calls = f.ends.iter().map(|e| most(e.bytes, e.write_bytes) + most(bytes, e.read_bytes));
        let frames = 20 + 2 * bytes / self.segment_bytes();
        Load { bytes, calls: calls.sum(), frames }
    }

    /// What applications wait for between their calls, one after the other.
    fn pauses(&self, flow: usize) -> Duration {
        let f = &self.flows[flow];
        let mut sum = Duration::ZERO;
        for (i, e) in f.ends.iter().enumerate() {
            let other = f.ends[1 - i].bytes;
            let preempted = self.stations[f.station(i)].preempted;
            let writes = 4 + 4 * e.bytes / e.write_bytes.max(1) as u64;
            let segments = other / self.segment_bytes();
            let reads = 4 + 4 * other / e.read_bytes.max(1) as u64 + segments;
            // A partial segment that is held back keeps the next write waiting where little may be unsent.
            let is_held = e.cork && e.options.notsent_low_water.is_some();
            let cork = if is_held { CORK } else { Duration::ZERO };
            sum += e.read_after + (e.write_pause + preempted + cork) * writes as u32;
            sum += (e.read_pause + preempted) * reads as u32;
        }
        sum
    }

    /// The least that a connection with enough data has in flight, in bytes.
    fn window(&self) -> u64 {
        if self.has_ecn_manglers() {
            return self.segment_bytes();
        }
        let of = |s: &super::Station| {
            let buffers = s.tcp.send_buffer_bytes.min(s.tcp.recv_buffer_bytes);
            buffers.min(s.pool_bytes / 16 / self.flows.len()) as u64 / 2
        };
        let least = self.stations.iter().map(of).min().unwrap_or(1);
        least.max(self.segment_bytes())
    }

    fn round_trip(&self) -> Duration {
        let way = |w: &Impairments| {
            let reordered = if w.reorder > 0.0 { w.reorder_delay } else { Duration::ZERO };
            w.delay + w.jitter + reordered + transfer(w, w.queue_bytes as u64)
        };
        let holds = self.stations.iter().filter_map(|s| s.waits).map(|w| w.config.max_hold);
        self.paths.iter().map(way).sum::<Duration>() + holds.sum::<Duration>() + ACK_DELAY
    }

    /// All bytes of all flows, one after the other, over the slower direction.
    fn wire_time(&self, bytes: u64) -> Duration {
        let segment = self.segment_bytes();
        let whole = bytes * (segment + HEADER_BYTES) / segment;
        let slowest = self.paths.iter().map(|w| transfer(w, whole)).max().unwrap_or_default();
        let fills = self.stations.iter().any(|s| s.takes_pkts.is_some());
        let full = if fills { FULL * (bytes / segment + 20) as u32 } else { Duration::ZERO };
        slowest * 4 + full
    }

    /// Time-outs, with their backing off.
    fn recovery(&self, own: Load) -> Duration {
        let lost: f64 = self.paths.iter().map(|w| w.loss + w.corrupt).sum();
        let drops = self.paths.iter().any(|w| w.rate_bps.is_some() || w.mtu.is_some());
        let chance = Duration::from_millis((own.frames as f64 * lost * 4_000.0) as u64);
        let backoff = match lost {
            l if l > 0.02 => 1_200,
            l if l > 0.0 || drops => 400,
            _ => 60,
        };
        let has = |f| self.swarm.features.has(f);
        // Without memory a frame is lost as well.
        let short =
            has(Feature::SmallPools) || has(Feature::ZeroWindows) || has(Feature::ManyFlows);
        // Frames go to a forged address until it is found unreachable and the sender tries again.
        let forged = if has(Feature::ForgedNeighbours) { MS * 240_000 } else { Duration::ZERO };
        // A jump within the handshake is a round trip for the estimator: until a segment that was sent once is
        // measured, time-outs are as long as they can be, and a paced sender is as slow.
        let misled = if has(Feature::ClockJumps) { MS * 1_200_000 } else { Duration::ZERO };
        chance
            + misled
            + MS * backoff * 1_000
            + if short { MS * 400_000 } else { Duration::ZERO }
            + forged
    }

    /// Steps without effect that the scenario may take within a time in which `frames` frames went: a
    /// device that holds frames looks once more for each, and each may have had its timer.
    pub fn idle_steps(&self, within: Duration, frames: u64) -> u64 {
        let seconds = within.as_nanos() as u64 / 1_000_000_000;
        IDLE_STEPS + seconds * 4 * self.flows.len() as u64 + frames
    }
}

/// How long the wire takes for `bytes`.
fn transfer(w: &Impairments, bytes: u64) -> Duration {
    w.rate_bps.map_or(Duration::ZERO, |rate| {
        Duration::from_nanos(bytes.saturating_mul(8_000_000_000) / rate.max(1))
    })
}
