//! Flows that share a bottleneck, on a virtual clock: goodput, fairness, retransmissions, standing queue and
//! completion times of each congestion controller over a set of paths ([`cells`]).
//!
//! ```text
//!   senders, one shard ──► queue, rate ──► delay, loss ──► receivers, one shard
//!                      ◄──────────── delay, loss ◄────────
//! ```
//!
//! The same cell gives the same figures on every machine: `results/wan/simulation.txt` keeps them, and a test
//! compares.

mod cells;

use std::fmt;
use std::task::Poll;

use fulmar::internals::drivers::link::{Impairments, LinkConfig, SentPath, sim_pair_each_way};
use fulmar_stack::base::{Counter, Duration, Instant, Secrets, SlotId};
use fulmar_stack::device::impair::PathCounts;
use fulmar_stack::shard::{ListenOptions, Reserved, StackConfig};
use fulmar_stack::socket::Attempt;
use fulmar_stack::tcp::{CongestionControl, EcnPolicy};
use fulmar_testbed::stations::{self, at};
use fulmar_testbed::world::{START, World};

pub use cells::cells;

const PORT: u16 = 9;
/// Both buffers of a connection at the most: five times the largest product of rate and delay.
const BUFFER_BYTES: usize = 8 << 20;
const POOL_BYTES: usize = 512 << 20;
/// Between the starts of two flows: no round number, so that flows do not move in step.
const BETWEEN_STARTS: Duration = Duration::from_micros(41_037);
/// Free space of a send buffer worth a write.
const WRITE_BYTES: usize = 16 << 10;

/// The load of the senders.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// As much as they can, all the time.
    Bulk,
    /// A new connection after every interval, with this many bytes each.
    Transfers {
        /// Bytes of each.
        bytes: usize,
        /// From the start of one to the start of the next.
        every: Duration,
    },
}

/// An experiment.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Its name in the table.
    pub name: String,
    /// The controller of each flow; of transfers, each in turn.
    pub controllers: Vec<CongestionControl>,
    /// What is sent.
    pub load: Load,
    /// The impairments of data.
    pub path: Impairments,
    /// For how long. The first quarter is not counted in goodput, fairness and queue.
    pub time: Duration,
    /// The seed of the path's random numbers.
    pub seed: u64,
}

/// The result.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Bits per second that each flow's reader got.
    pub goodput_bps: Vec<u64>,
    /// Bytes that the senders sent again, and all bytes that readers got.
    pub resent_bytes: u64,
    /// See `resent_bytes`.
    pub read_bytes: u64,
    /// Mean time that a packet took to pass the bottleneck.
    pub queue: Duration,
    /// Time-outs of the senders.
    pub timeouts: u64,
    /// The path's counts for data.
    pub path: PathCounts,
    /// Completion times of transfers, from the SYN to the end of the stream at the reader, in order of length.
    pub completions: Vec<Duration>,
    /// Transfers that were not complete at the end.
    pub incomplete: usize,
}

impl Outcome {
    /// Jain's index of fairness: 1 if all flows are equal, 1/n if one has all.
    pub fn fairness(&self) -> f64 {
        let sum: f64 = self.goodput_bps.iter().map(|b| *b as f64).sum();
        let squares: f64 = self.goodput_bps.iter().map(|b| (*b as f64).powi(2)).sum();
        if squares == 0.0 { 0.0 } else { sum * sum / (squares * self.goodput_bps.len() as f64) }
    }

    /// The completion time that `percent` of the transfers do not exceed.
    pub fn percentile(&self, percent: usize) -> Option<Duration> {
        let last = self.completions.len().checked_sub(1)?;
        self.completions.get((last * percent).div_ceil(100)).copied()
    }
}

/// A cell with its outcome as a line of the table.
pub struct Row<'a>(pub &'a Cell, pub &'a Outcome);

/// The heading of the table.
pub const HEADING: &str = "path                                     controllers        Mb/s   % of rate  Jain   resent %  RTO  queue ms  p50 ms  p99 ms";

impl fmt::Display for Row<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row(cell, o) = self;
        let total: u64 = o.goodput_bps.iter().sum();
        write!(f, "{:<40} {:<16} ", cell.name, mix(&cell.controllers))?;
        match cell.load {
            Load::Bulk => {
                write!(f, "{:>6.1} ", total as f64 / 1e6)?;
                match cell.path.rate_bps {
                    Some(rate) => write!(f, "{:>11.1} ", total as f64 * 100.0 / rate as f64)?,
                    None => write!(f, "{:>11} ", "-")?,
                }
                write!(f, "{:>5.2} ", o.fairness())?;
            }
            Load::Transfers { .. } => write!(f, "{:>6} {:>11} {:>5} ", "-", "-", "-")?,
        }
        let resent = o.resent_bytes as f64 * 100.0 / o.read_bytes.max(1) as f64;
        write!(f, "{resent:>10.2} {:>4} {:>9.1}", o.timeouts, o.queue.as_secs_f64() * 1e3)?;
        for percent in [50, 99] {
            match o.percentile(percent) {
                Some(t) => write!(f, " {:>7.1}", t.as_secs_f64() * 1e3)?,
                None => write!(f, " {:>7}", "-")?,
            }
        }
        if o.incomplete > 0 {
            write!(f, "  {} incomplete", o.incomplete)?;
        }
        Ok(())
    }
}

/// `8 cubic`, or `4 cubic, 4 reno`.
fn mix(controllers: &[CongestionControl]) -> String {
    let count = |which| controllers.iter().filter(|c| **c == which).count();
    let parts = CongestionControl::ALL.iter().map(|c| (count(*c), c)).filter(|(n, _)| *n > 0);
    parts.map(|(n, c)| format!("{n} {c}")).collect::<Vec<_>>().join(", ")
}

/// Runs a cell.
pub fn run(cell: &Cell) -> Outcome {
    let mut dumbbell = Dumbbell::new(cell);
    let quarter = START + cell.time / 4;
    dumbbell.play(quarter, true);
    let before = dumbbell.measure();
    dumbbell.play(START + cell.time, true);
    let after = dumbbell.measure();
    if let Load::Transfers { .. } = cell.load {
        // Those under way are waited for.
        dumbbell.play(START + cell.time * 2, false);
    }
    dumbbell.outcome(&before, &after)
}

/// The counters that are read at two moments of an experiment.
struct Measure {
    at: Instant,
    read: Vec<u64>,
    path: PathCounts,
}

struct Flow {
    id: SlotId,
    /// The local port: by it the receiver's end is found.
    port: u16,
    left: u64,
    begun: Instant,
    is_closed: bool,
}

struct Receiver {
    id: SlotId,
    flow: usize,
    is_open: bool,
}

/// The senders on station 0, the path, the receivers on station 1.
struct Dumbbell<'a> {
    world: World,
    path: SentPath,
    traffic: Traffic<'a>,
}

/// The connections and their programs.
struct Traffic<'a> {
    cell: &'a Cell,
    listener: SlotId,
    flows: Vec<Flow>,
    receivers: Vec<Receiver>,
    read: Vec<u64>,
    completed: Vec<Option<Duration>>,
    next_start: Instant,
}

fn config(station: u8, cell: &Cell) -> StackConfig {
    let mut config = stations::config(station, POOL_BYTES);
    config.secrets = Some(Secrets::for_simulation(u64::from(station) + 1));
    // Senders ask for ECN where the queue marks.
    let asks = station == 0 && cell.path.ecn;
    config.tcp.ecn = if asks { EcnPolicy::Ask } else { EcnPolicy::Accept };
    config.tcp.send_buffer_bytes = BUFFER_BYTES;
    config.tcp.recv_buffer_bytes = BUFFER_BYTES;
    config
}

impl<'a> Dumbbell<'a> {
    fn new(cell: &'a Cell) -> Dumbbell<'a> {
        // ACKs meet the same delay and the same losses, and no bottleneck.
        let back = Impairments {
            delay: cell.path.delay,
            jitter: cell.path.jitter,
            loss: cell.path.loss,
            loss_run_pkts: cell.path.loss_run_pkts,
            ..Impairments::default()
        };
        let link = LinkConfig { mtu: 1500, ..LinkConfig::default() };
        let (near, far) = sim_pair_each_way(cell.seed, [&cell.path, &back], &link);
        let path = near.sent_path();
        let devices = [Box::new(near) as _, Box::new(far) as _];
        let mut world = World::new(devices, |station| config(station, cell));
        let options = ListenOptions { backlog: 1024, ..ListenOptions::default() };
        let listener = world.shards[1].tcp_listen(at(1, PORT), options).expect("a free port");
        let traffic = Traffic {
            cell,
            listener,
            flows: Vec::new(),
            receivers: Vec::new(),
            read: Vec::new(),
            completed: Vec::new(),
            next_start: START,
        };
        Dumbbell { world, path, traffic }
    }

    /// Until `end`; `begins`: flows begin meanwhile.
    fn play(&mut self, end: Instant, begins: bool) {
        let Dumbbell { world, traffic, .. } = self;
        loop {
            let starts = traffic.next_start().filter(|at| begins && *at <= end);
            let until = starts.unwrap_or(end);
            world.pass_with(until.since(world.now), |world, station| match station {
                0 => traffic.write(world),
                _ => {
                    traffic.accept(world);
                    traffic.read(world);
                }
            });
            if starts.is_none() {
                return;
            }
            traffic.begin_flow(world);
            traffic.write(world);
        }
    }

    fn measure(&self) -> Measure {
        let read = self.traffic.read.clone();
        Measure { at: self.world.now, read, path: self.path.counts() }
    }

    fn outcome(&self, before: &Measure, after: &Measure) -> Outcome {
        let seconds = after.at.since(before.at).as_secs_f64();
        let flow = |f: usize| after.read[f] - before.read.get(f).copied().unwrap_or(0);
        let Traffic { cell, flows, completed, read, .. } = &self.traffic;
        let bulk = matches!(cell.load, Load::Bulk);
        let readers = if bulk { after.read.len() } else { 0 };
        let passed = (after.path.passed - before.path.passed).max(1);
        let mut completions: Vec<_> = completed.iter().flatten().copied().collect();
        completions.sort_unstable();
        let counters = self.world.shards[0].counters();
        Outcome {
            goodput_bps: (0..readers).map(|f| (flow(f) as f64 * 8.0 / seconds) as u64).collect(),
            resent_bytes: counters.value(Counter::TcpRetransmitBytes),
            read_bytes: read.iter().sum(),
            queue: Duration::from_nanos((after.path.passed_ns - before.path.passed_ns) / passed),
            timeouts: counters.value(Counter::TcpTimeouts),
            path: after.path,
            incomplete: if bulk { 0 } else { flows.len() - completions.len() },
            completions: if bulk { Vec::new() } else { completions },
        }
    }
}

impl Traffic<'_> {
    fn next_start(&self) -> Option<Instant> {
        let more = match self.cell.load {
            Load::Bulk => self.flows.len() < self.cell.controllers.len(),
            Load::Transfers { .. } => true,
        };
        more.then_some(self.next_start)
    }

    fn begin_flow(&mut self, world: &mut World) {
        let n = self.flows.len();
        let (left, between) = match self.cell.load {
            Load::Bulk => (u64::MAX, BETWEEN_STARTS),
            Load::Transfers { bytes, every } => (bytes as u64, every),
        };
        let port = 10_000 + u16::try_from(n).expect("fewer flows than ports");
        let which = self.cell.controllers[n % self.cell.controllers.len()];
        let World { now, shards: [sender, _] } = world;
        let id = sender
            .tcp_connect_with(*now, at(1, PORT), Some(at(0, port)), |entry| {
                entry.tcb.set_congestion(which);
            })
            .expect("a connection");
        self.flows.push(Flow { id, port, left, begun: *now, is_closed: false });
        self.read.push(0);
        self.completed.push(None);
        self.next_start = self.next_start + between;
    }

    fn write(&mut self, world: &mut World) {
        let World { now, shards: [sender, _] } = world;
        for flow in self.flows.iter_mut().filter(|f| !f.is_closed) {
            while flow.left > 0 {
                let space = sender.sosend(flow.id).space().expect("it lives");
                let want = flow.left.min(64 << 10) as usize;
                if space < want.min(WRITE_BYTES) {
                    break;
                }
                let len = want.min(space);
                match sender.sosend(flow.id).reserve(*now, &[], len, Attempt::First) {
                    Ok(Poll::Ready(Reserved::Space(r))) => {
                        flow.left -= r.len() as u64;
                        sender.sosend(flow.id).commit(*now, r);
                    }
                    _ => break,
                }
            }
            if flow.left == 0 {
                flow.is_closed = true;
                sender.close(*now, flow.id);
            }
        }
    }

    fn accept(&mut self, world: &mut World) {
        while let Ok(Poll::Ready((id, peer))) = world.shards[1].tcp_accept(self.listener) {
            let flow = self.flows.iter().position(|f| f.port == peer.port()).expect("its flow");
            self.receivers.push(Receiver { id, flow, is_open: true });
        }
    }

    fn read(&mut self, world: &mut World) {
        let World { now, shards: [_, receiver] } = world;
        for r in self.receivers.iter_mut().filter(|r| r.is_open) {
            while let Ok(Poll::Ready(chain)) = receiver.tcp_take(r.id, 1 << 20) {
                let bytes = chain.len();
                self.read[r.flow] += bytes as u64;
                receiver.tcp_read_done(*now, r.id, chain);
                if bytes == 0 {
                    self.completed[r.flow] = Some(now.since(self.flows[r.flow].begun));
                    r.is_open = false;
                    receiver.close(*now, r.id);
                    break;
                }
            }
        }
    }
}
