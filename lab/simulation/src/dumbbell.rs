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
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::Poll;

use fulmar::internals::drivers::link::{
    Impairments, LinkConfig, SentPath, SimLink, sim_pair_each_way,
};
use fulmar_stack::base::{Counter, Duration, Instant, Secrets, SlotId};
use fulmar_stack::device::impair::PathCounts;
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::{ListenOptions, Reserved, Shard, StackConfig};
use fulmar_stack::socket::Attempt;
use fulmar_stack::tcp::{CongestionControl, EcnPolicy};

pub use cells::cells;

const PORT: u16 = 9;
/// Both buffers of a connection at the most: five times the largest product of rate and delay.
const BUFFER_BYTES: usize = 8 << 20;
const POOL_BYTES: usize = 512 << 20;
const START: Instant = Instant::from_millis(1_000);
/// Between the starts of two flows: no round number, so that flows do not move in step.
const BETWEEN_STARTS: Duration = Duration::from_micros(41_037);
/// Free space of a send buffer worth a write.
const WRITE_BYTES: usize = 16 << 10;
/// Steps of an experiment that are taken for a livelock.
const MOST_STEPS: u64 = 200_000_000;

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
    let mut world = World::new(cell);
    let quarter = START + cell.time / 4;
    world.play(quarter, true);
    let before = world.measure();
    world.play(START + cell.time, true);
    let after = world.measure();
    if let Load::Transfers { .. } = cell.load {
        // Those under way are waited for.
        world.play(START + cell.time * 2, false);
    }
    world.outcome(cell, &before, &after)
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

/// Senders, path, receivers.
struct World<'a> {
    cell: &'a Cell,
    now: Instant,
    sender: Shard,
    receiver: Shard,
    path: SentPath,
    listener: SlotId,
    flows: Vec<Flow>,
    receivers: Vec<Receiver>,
    read: Vec<u64>,
    completed: Vec<Option<Duration>>,
    next_start: Instant,
}

fn address(station: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, station + 1))
}

fn shard(station: u8, device: SimLink, ecn: EcnPolicy) -> Shard {
    let pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(POOL_BYTES) };
    let mut config = StackConfig {
        addresses: vec![IfAddr { addr: address(station), prefix_len: 24 }],
        pool,
        secrets: Some(Secrets::for_simulation(u64::from(station) + 1)),
        ..StackConfig::default()
    };
    config.tcp.ecn = ecn;
    config.tcp.send_buffer_bytes = BUFFER_BYTES;
    config.tcp.recv_buffer_bytes = BUFFER_BYTES;
    Shard::new(config, Box::new(device), START).expect("a shard")
}

impl<'a> World<'a> {
    fn new(cell: &'a Cell) -> World<'a> {
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
        // Senders ask for ECN where the queue marks.
        let ecn = if cell.path.ecn { EcnPolicy::Ask } else { EcnPolicy::Accept };
        let mut receiver = shard(1, far, EcnPolicy::Accept);
        let at = SocketAddr::new(address(1), PORT);
        let options = ListenOptions { backlog: 1024, ..ListenOptions::default() };
        let listener = receiver.tcp_listen(at, options).expect("a free port");
        World {
            cell,
            now: START,
            path: near.sent_path(),
            sender: shard(0, near, ecn),
            receiver,
            listener,
            flows: Vec::new(),
            receivers: Vec::new(),
            read: Vec::new(),
            completed: Vec::new(),
            next_start: START,
        }
    }

    /// Until `end`; `begins`: flows begin meanwhile.
    fn play(&mut self, end: Instant, begins: bool) {
        for _ in 0..MOST_STEPS {
            let starts = self.next_start().filter(|_| begins);
            let due = [self.sender.next_deadline(), self.receiver.next_deadline(), starts];
            let Some(next) = due.into_iter().flatten().min().filter(|at| *at <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(next);
            if starts.is_some_and(|at| at <= self.now) {
                self.begin_flow();
            }
            if due[0].is_some_and(|at| at <= self.now) {
                self.sender.step(self.now, 256);
            }
            self.write();
            if due[1].is_some_and(|at| at <= self.now) {
                self.receiver.step(self.now, 256);
                self.accept();
                self.read();
            }
        }
        panic!("`{}` takes too many steps", self.cell.name);
    }

    fn next_start(&self) -> Option<Instant> {
        let more = match self.cell.load {
            Load::Bulk => self.flows.len() < self.cell.controllers.len(),
            Load::Transfers { .. } => true,
        };
        more.then_some(self.next_start)
    }

    fn begin_flow(&mut self) {
        let n = self.flows.len();
        let (left, between) = match self.cell.load {
            Load::Bulk => (u64::MAX, BETWEEN_STARTS),
            Load::Transfers { bytes, every } => (bytes as u64, every),
        };
        let port = 10_000 + u16::try_from(n).expect("fewer flows than ports");
        let (to, from) = (SocketAddr::new(address(1), PORT), SocketAddr::new(address(0), port));
        let which = self.cell.controllers[n % self.cell.controllers.len()];
        let id = self
            .sender
            .tcp_connect_with(self.now, to, Some(from), |entry| entry.tcb.set_congestion(which))
            .expect("a connection");
        self.flows.push(Flow { id, port, left, begun: self.now, is_closed: false });
        self.read.push(0);
        self.completed.push(None);
        self.next_start = self.next_start + between;
    }

    fn write(&mut self) {
        for flow in self.flows.iter_mut().filter(|f| !f.is_closed) {
            while flow.left > 0 {
                let space = self.sender.sosend(flow.id).space().expect("it lives");
                let want = flow.left.min(64 << 10) as usize;
                if space < want.min(WRITE_BYTES) {
                    break;
                }
                match self.sender.sosend(flow.id).reserve(
                    self.now,
                    &[],
                    want.min(space),
                    Attempt::First,
                ) {
                    Ok(Poll::Ready(Reserved::Space(r))) => {
                        flow.left -= r.len() as u64;
                        self.sender.sosend(flow.id).commit(self.now, r);
                    }
                    _ => break,
                }
            }
            if flow.left == 0 {
                flow.is_closed = true;
                self.sender.close(self.now, flow.id);
            }
        }
    }

    fn accept(&mut self) {
        while let Ok(Poll::Ready((id, peer))) = self.receiver.tcp_accept(self.listener) {
            let flow = self.flows.iter().position(|f| f.port == peer.port()).expect("its flow");
            self.receivers.push(Receiver { id, flow, is_open: true });
        }
    }

    fn read(&mut self) {
        for r in self.receivers.iter_mut().filter(|r| r.is_open) {
            while let Ok(Poll::Ready(chain)) = self.receiver.tcp_take(r.id, 1 << 20) {
                let bytes = chain.len();
                self.read[r.flow] += bytes as u64;
                self.receiver.tcp_read_done(self.now, r.id, chain);
                if bytes == 0 {
                    self.completed[r.flow] = Some(self.now.since(self.flows[r.flow].begun));
                    r.is_open = false;
                    self.receiver.close(self.now, r.id);
                    break;
                }
            }
        }
    }

    fn measure(&self) -> Measure {
        Measure { at: self.now, read: self.read.clone(), path: self.path.counts() }
    }

    fn outcome(&mut self, cell: &Cell, before: &Measure, after: &Measure) -> Outcome {
        let seconds = after.at.since(before.at).as_secs_f64();
        let flow = |f: usize| after.read[f] - before.read.get(f).copied().unwrap_or(0);
        let bulk = matches!(cell.load, Load::Bulk);
        let flows = if bulk { after.read.len() } else { 0 };
        let passed = (after.path.passed - before.path.passed).max(1);
        let mut completions: Vec<_> = self.completed.iter().flatten().copied().collect();
        completions.sort_unstable();
        let counters = self.sender.counters();
        Outcome {
            goodput_bps: (0..flows).map(|f| (flow(f) as f64 * 8.0 / seconds) as u64).collect(),
            resent_bytes: counters.value(Counter::TcpRetransmitBytes),
            read_bytes: self.read.iter().sum(),
            queue: Duration::from_nanos((after.path.passed_ns - before.path.passed_ns) / passed),
            timeouts: counters.value(Counter::TcpTimeouts),
            path: after.path,
            incomplete: if bulk { 0 } else { self.flows.len() - completions.len() },
            completions: if bulk { Vec::new() } else { completions },
        }
    }
}
