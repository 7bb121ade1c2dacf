//! `bench wan`: fulmar and Linux as senders over the same impaired path.
//!
//! ```text
//!  fulmar ── link ──┐
//!                   ├── wire (a thread): policer, queue, rate, loss, delay ── TAP ── Linux, reading
//!  Linux ─── TAP ───┘
//! ```
//!
//! Each path is written as `--faults` takes it: data meets all of it, ACKs its delay, jitter and loss.

mod ends;
mod wire;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use fulmar::{CongestionControl, Device, Stack};
use fulmar_cli::faults::FaultSpec;
use fulmar_drivers::link::{self, LinkConfig};
use fulmar_drivers::tap::{Tap, TapConfig};
use fulmar_netdev::impair::{Impairments, PathCounts};
use fulmar_netns::Netns;

use crate::harness::options::Common;
use crate::harness::report::{Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Ratio, Sample, Scenario};
use ends::{FAR, FULMAR, NEAR, Near, Sender, Server};
use wire::Wire;

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(600);
/// The same with --quick.
const QUICK: Duration = Duration::from_secs(20);
const GOODPUT: &str = "goodput_mbps";
const QUEUE: &str = "queue_ms";
const P50: &str = "p50_ms";
const P99: &str = "p99_ms";
const JAIN: &str = "jain";
/// Clients that fetch answers at the same time.
const CLIENTS: usize = 16;
/// Flows of the fairness scenarios, half of them fulmar's.
const FLOWS: usize = 8;

/// A path: its name, and what `--faults` would be told.
type PathOf = (&'static str, &'static str);

/// Paths with one bulk flow.
const PATHS: &[PathOf] = &[
    ("clean", "delay=10ms,rate=200mbit,queue=500k"),
    ("loss-0.01", "delay=10ms,rate=200mbit,queue=500k,loss=0.01%"),
    ("loss-0.1", "delay=10ms,rate=200mbit,queue=500k,loss=0.1%"),
    ("loss-1", "delay=10ms,rate=200mbit,queue=500k,loss=1%"),
    ("loss-3", "delay=10ms,rate=200mbit,queue=500k,loss=3%"),
    ("loss-runs", "delay=10ms,rate=200mbit,queue=500k,loss=1%,loss-run=4"),
    ("1ms-loss-1", "delay=500us,rate=200mbit,queue=100k,loss=1%"),
    ("100ms-loss-0.1", "delay=50ms,rate=200mbit,queue=2500k,loss=0.1%"),
    ("300ms", "delay=150ms,rate=100mbit,queue=3750k"),
    ("reordered", "delay=10ms,rate=200mbit,queue=500k,reorder=1%"),
    ("jitter", "delay=10ms,rate=200mbit,queue=500k,jitter=5ms"),
    ("10mbit-short-queue", "delay=20ms,rate=10mbit,queue=25k"),
    ("10mbit-long-queue", "delay=20ms,rate=10mbit,queue=200k"),
    ("50ms-2bdp", "delay=25ms,rate=50mbit,queue=625k"),
    ("codel", "delay=20ms,rate=50mbit,queue=1m,aqm=codel"),
    ("codel-ecn", "delay=20ms,rate=50mbit,queue=1m,aqm=codel+ecn"),
    ("policer", "delay=10ms,police=50mbit:64k"),
    ("no-delay-loss-1", "loss=1%"),
    ("no-delay-reordered", "reorder=1%"),
];
/// Those of `--quick`.
const QUICK_PATHS: &[&str] = &["clean", "reordered"];
/// Answers: a name, bytes, and the path. The first is that of `--quick`.
const ANSWERS: &[(&str, usize, &str)] = &[
    ("14k-loss-1", 14_000, "delay=25ms,loss=1%"),
    ("1k", 1_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("1k-loss-1", 1_000, "delay=25ms,loss=1%"),
    ("14k", 14_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("100k", 100_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("100k-loss-1", 100_000, "delay=25ms,loss=1%"),
    ("1m", 1_000_000, "delay=25ms,rate=200mbit,queue=1250k"),
    ("1m-loss-0.1", 1_000_000, "delay=25ms,loss=0.1%"),
    ("10m", 10_000_000, "delay=25ms,rate=1gbit,queue=6250k"),
];
/// The answers that [`ratios`] names.
const SHORT: &str = "14k-loss-1";
/// The path that flows of both stacks share.
const SHARED: PathOf = ("shared", "delay=20ms,rate=50mbit,queue=250k");

/// fulmar and Linux as senders over paths with loss, delay and bottlenecks
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench wan [OPTIONS]",
    after_help = "A thread between the senders and a Linux receiver delays, drops, reorders and queues packets, the
same for each sender. It makes its own namespaces and leaves nothing behind.

Examples:
  fulmar-lab bench wan --quick
  fulmar-lab bench wan --path delay=20ms,loss=0.1% --path rate=10mbit,queue=64k,delay=30ms"
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// A path of your own instead of the table's, as `fulmar nc --faults` takes it
    #[arg(long, value_name = "FAULTS", value_parser = path)]
    pub path: Vec<String>,
}

fn path(text: &str) -> Result<String, String> {
    text.parse::<FaultSpec>().map(|_| text.to_owned())
}

/// Measures; `isolated` says whether this process has namespaces of its own.
///
/// # Errors
/// No namespaces, or no TAP.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    isolated?;
    let topology = Topology::new()?;
    let mut paths: Vec<(String, String)> =
        options.path.iter().map(|text| (text.clone(), text.clone())).collect();
    let is_own = !paths.is_empty();
    if !is_own {
        let wanted = PATHS.iter().filter(|(n, _)| !options.common.quick || QUICK_PATHS.contains(n));
        paths = wanted.map(|(n, text)| ((*n).to_owned(), (*text).to_owned())).collect();
    }
    let mut scenarios = Vec::new();
    for (name, text) in &paths {
        scenarios
            .extend(topology.senders.iter().map(|s| topology.bulk(name, text, &[*s], &s.name())));
    }
    if !is_own {
        let answers = if options.common.quick { &ANSWERS[..1] } else { ANSWERS };
        for answer in answers {
            scenarios.extend(topology.senders.iter().map(|s| topology.answers(*s, *answer)));
        }
        scenarios.extend(topology.mixes());
    }
    let names: Vec<&str> = paths.iter().map(|(n, _)| n.as_str()).collect();
    let mut ratios = ratios(&names);
    ratios.retain(|r| r.is_measured(&scenarios));
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let outcome = harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Paths });
    Ok(Report::of(&SHAPE, outcome))
}

/// The ends and the wire between them.
struct Topology {
    stack: Stack,
    kernel: Netns,
    far: Netns,
    wire: Mutex<Wire>,
    senders: Vec<Sender>,
    /// Of the next run: a port that no connection of an earlier one has, and other random numbers.
    next_run: AtomicU16,
}

fn kernel_end(address: IpAddr) -> io::Result<(Netns, Box<dyn Device>)> {
    let netns = Netns::new()?;
    let tap = netns.run(|| {
        // What one run has learned of the path would help or hinder the next.
        std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1")?;
        // The receiver asks for ECN; by default Linux only answers.
        std::fs::write("/proc/sys/net/ipv4/tcp_ecn", "1")?;
        let config = TapConfig { name: "wan0".to_owned(), ..TapConfig::default() };
        Tap::open(&config).map_err(io::Error::other)
    })?;
    netns.set_address("wan0", address, 24)?;
    Ok((netns, Box::new(tap)))
}

impl Topology {
    fn new() -> io::Result<Topology> {
        let (kernel, near) = kernel_end(NEAR.into())?;
        let (far, far_device) = kernel_end(FAR.into())?;
        let (ours, wires) = link::pair(&LinkConfig::default()).map_err(io::Error::other)?;
        let cidr = format!("{FULMAR}/24").parse().map_err(io::Error::other)?;
        let stack = Stack::builder().device(Box::new(ours)).address(cidr).build();
        let stack = stack.map_err(io::Error::other)?;
        let wire = Mutex::new(Wire::new(vec![Box::new(wires), near], far_device)?);
        let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")?;
        let is_known = |name: &str| known.split_whitespace().any(|k| k == name);
        let fulmars = ["cubic", "bbr"].into_iter().filter_map(CongestionControl::from_name);
        let linux = ["cubic", "bbr"].into_iter().filter(|name| is_known(name));
        let senders = fulmars.map(Sender::Fulmar).chain(linux.map(Sender::Linux)).collect();
        Ok(Topology { stack, kernel, far, wire, senders, next_run: AtomicU16::new(0) })
    }

    fn bulk<'a>(&'a self, name: &str, text: &str, flows: &[Sender], who: &str) -> Scenario<'a> {
        let (path, flows) = (spec(text), flows.to_vec());
        let run = move |time| self.run_bulk(&flows, &path, time);
        Scenario::new(format!("{who}.{name}"), who.to_owned(), run)
            .label("path", name.to_owned())
            .label("faults", text.to_owned())
    }

    fn answers(&self, sender: Sender, answer: (&'static str, usize, &'static str)) -> Scenario<'_> {
        let (name, bytes, text) = answer;
        let path = spec(text);
        let run = move |time| self.run_answers(sender, bytes, &path, time);
        Scenario::new(format!("{}.{name}", sender.name()), sender.name(), run)
            .label("path", name)
            .label("faults", text)
    }

    /// Flows of fulmar and of Linux on one bottleneck.
    fn mixes(&self) -> Vec<Scenario<'_>> {
        let cubic = |n| match n % 2 {
            0 => Sender::Fulmar(CongestionControl::Cubic),
            _ => Sender::Linux("cubic"),
        };
        let flows: Vec<Sender> = (0..FLOWS).map(cubic).collect();
        let linux = vec![Sender::Linux("cubic"); FLOWS];
        vec![
            self.bulk(SHARED.0, SHARED.1, &flows, "4-fulmar-4-linux-cubic"),
            self.bulk(SHARED.0, SHARED.1, &linux, "8-linux-cubic"),
        ]
    }

    fn port(&self) -> u16 {
        10_000 + self.next_run.fetch_add(1, Ordering::Relaxed) % 20_000
    }

    /// Runs `work` while the wire carries frames over a path; what the path did to data.
    fn over<T>(
        &self,
        path: &Impairments,
        work: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<(T, PathCounts)> {
        let back = Impairments {
            delay: path.delay,
            jitter: path.jitter,
            loss: path.loss,
            loss_run_pkts: path.loss_run_pkts,
            cut: path.cut,
            ..Impairments::default()
        };
        let (stop, seed) =
            (AtomicBool::new(false), 2 * u64::from(self.next_run.load(Ordering::Relaxed)));
        let mut wire = self.wire.lock().map_err(|_| io::Error::other("the wire has panicked"))?;
        let wire = &mut *wire;
        thread::scope(|scope| {
            let wire = scope.spawn(|| wire.run(seed, [path, &back], &stop));
            let worked = work();
            stop.store(true, Ordering::Relaxed);
            let counts = wire.join().map_err(|_| io::Error::other("the wire has panicked"))??;
            Ok((worked?, counts))
        })
    }

    fn servers(&self, flows: &[Sender]) -> io::Result<Vec<Server>> {
        let near = Near { stack: &self.stack, kernel: &self.kernel };
        flows.iter().map(|s| Server::listen(*s, &near, self.port())).collect()
    }

    fn run_bulk(&self, flows: &[Sender], path: &Impairments, time: Duration) -> io::Result<Sample> {
        let servers = self.servers(flows)?;
        let read: Vec<AtomicU64> = flows.iter().map(|_| AtomicU64::new(0)).collect();
        let ends = addresses(&servers)?.into_iter().zip(&read);
        let (goodput, counts) = self.over(path, || {
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                let done = &done;
                let serve = |s| scope.spawn(move || Server::flood(s, done));
                let servings: Vec<_> = servers.iter().map(serve).collect();
                let fetch =
                    |(at, read)| scope.spawn(move || ends::read_flood(&self.far, at, read, done));
                let clients: Vec<_> = ends.map(fetch).collect();
                thread::sleep(time);
                let mbps = |r: &AtomicU64| r.load(Ordering::Relaxed) as f64 * 8.0 / 1e6;
                let goodput: Vec<f64> = read.iter().map(|r| mbps(r) / time.as_secs_f64()).collect();
                done.store(true, Ordering::Relaxed);
                join_all(clients.into_iter().chain(servings))?;
                Ok(goodput)
            })
        })?;
        let total: f64 = goodput.iter().sum();
        let squares: f64 = goodput.iter().map(|g| g * g).sum();
        Ok(Sample::of(GOODPUT, total)
            .with(QUEUE, counts.passed_ns as f64 / 1e6 / counts.passed.max(1) as f64)
            .with(JAIN, total * total / (squares * goodput.len() as f64))
            .count("queue_drops", counts.queue_drops)
            .count("lost", counts.lost)
            .count("marked", counts.marked))
    }

    fn run_answers(
        &self,
        sender: Sender,
        bytes: usize,
        path: &Impairments,
        time: Duration,
    ) -> io::Result<Sample> {
        let servers = self.servers(&[sender])?;
        let at = servers[0].address()?;
        let (mut times, _) = self.over(path, || {
            let (done, over) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                let server = scope.spawn(|| servers[0].answer(bytes, &over));
                let fetch = |_| scope.spawn(|| ends::fetch_many(&self.far, at, &done));
                let clients: Vec<_> = (0..CLIENTS).map(fetch).collect();
                thread::sleep(time);
                done.store(true, Ordering::Relaxed);
                let times = join_all(clients);
                over.store(true, Ordering::Relaxed);
                join_all([server])?;
                Ok(times?.concat())
            })
        })?;
        times.sort_unstable();
        let at = |percent: usize| {
            let n = (times.len().saturating_sub(1) * percent).div_ceil(100);
            times.get(n).map_or(f64::NAN, |t| t.as_secs_f64() * 1e3)
        };
        Ok(Sample::of(P50, at(50)).with(P99, at(99)).count("answers", times.len() as u64))
    }
}

fn addresses(servers: &[Server]) -> io::Result<Vec<SocketAddr>> {
    servers.iter().map(Server::address).collect()
}

/// Waits for all, then tells the first error.
fn join_all<'scope, T>(
    threads: impl IntoIterator<Item = ScopedJoinHandle<'scope, io::Result<T>>>,
) -> io::Result<Vec<T>> {
    let joined: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    let panicked = |_| io::Error::other("an end has panicked");
    joined.into_iter().map(|r| r.map_err(panicked)?).collect()
}

fn spec(text: &str) -> Impairments {
    text.parse::<FaultSpec>().expect("invariant: checked where it was written").path
}

/// The middle of quotients of pairs.
fn median(t: &[f64]) -> f64 {
    let mut quotients: Vec<f64> = t.chunks(2).map(|pair| pair[0] / pair[1]).collect();
    quotients.sort_by(f64::total_cmp);
    let n = quotients.len();
    if n % 2 == 1 { quotients[n / 2] } else { (quotients[n / 2 - 1] + quotients[n / 2]) / 2.0 }
}

/// The least quotient of pairs.
fn worst(t: &[f64]) -> f64 {
    t.chunks(2).map(|pair| pair[0] / pair[1]).min_by(f64::total_cmp).unwrap_or(f64::NAN)
}

/// Goodput of the same controller, fulmar over Linux: the median and the worst of all paths.
fn vs_kernel(
    which: &str,
    paths: &[&str],
    median_goals: (f64, f64),
    worst_goals: (f64, f64),
) -> [Ratio; 2] {
    let pair = |path: &&str| {
        [format!("fulmar-{which}.{path}"), format!("linux-{which}.{path}")].map(|n| (n, GOODPUT))
    };
    let terms: Vec<_> = paths.iter().flat_map(pair).collect();
    let name = |kind: &str| format!("wan.{which}.{kind}");
    let sentence = |kind: &str| format!("goodput by {which}, fulmar ÷ Linux, {kind} of all paths");
    [
        Ratio::new(name("vs_kernel"), sentence("median"), terms.clone(), median)
            .goals(median_goals.0, median_goals.1)
            .more_is_better(),
        Ratio::new(name("worst_vs_kernel"), sentence("worst"), terms, worst)
            .goals(worst_goals.0, worst_goals.1)
            .more_is_better(),
    ]
}

fn ratios(paths: &[&str]) -> Vec<Ratio> {
    let mut all = Vec::from(vs_kernel("cubic", paths, (1.0, 1.1), (0.8, 0.95)));
    all.extend(vs_kernel("bbr", paths, (0.95, 1.05), (0.7, 0.9)));
    let of = |who: &str, path: &str| format!("{who}.{path}");
    all.push(
        Ratio::over(
            "wan.short.p99.vs_kernel",
            "14 KB at 1 % loss and 50 ms, 99th percentile: fulmar ÷ Linux, both cubic",
            P99,
            [of("fulmar-cubic", SHORT), of("linux-cubic", SHORT)],
        )
        .goals(1.0, 0.9),
    );
    all.push(
        Ratio::over(
            "wan.reorder.vs_clean",
            "goodput of fulmar, 1 % of the packets reordered ÷ none",
            GOODPUT,
            [of("fulmar-cubic", "reordered"), of("fulmar-cubic", "clean")],
        )
        .goals(0.8, 0.95)
        .more_is_better(),
    );
    all.push(
        Ratio::value(
            "wan.fairness",
            "Jain's index of 4 flows of fulmar and 4 of Linux, cubic",
            JAIN,
            of("4-fulmar-4-linux-cubic", SHARED.0),
        )
        .goals(0.9, 0.95)
        .more_is_better(),
    );
    all.push(
        Ratio::over(
            "wan.bbr.queue_ms",
            "time in the queue of a path of 50 ms with 2 BDP of buffer: fulmar's bbr ÷ its cubic",
            QUEUE,
            [of("fulmar-bbr", "50ms-2bdp"), of("fulmar-cubic", "50ms-2bdp")],
        )
        .goals(0.4, 0.25),
    );
    all
}

const SHAPE: Shape = Shape {
    name: "wan",
    title: "The wide network",
    lead: "One sender at a time (or eight flows) to a Linux receiver, over a path that a thread impairs.",
    columns: &[
        label("path", "path"),
        label("title", "sender"),
        number(
            GOODPUT,
            "goodput\nMb/s",
            1,
            "bytes that the receiver's program read, start included",
        )
        .with_interval(),
        number(QUEUE, "queue\nms", 1, "mean time that a packet took to pass the bottleneck"),
        number(JAIN, "Jain", 2, "fairness among the flows"),
        number(P50, "p50\nms", 0, "from the SYN to the end of the answer, median"),
        number(P99, "p99\nms", 0, "the same, 99th percentile"),
        number("runs", "runs", 0, ""),
    ],
    across: None,
    chart: None,
    legend: LEGEND,
};

const LEGEND: &str = "\
Each path as --faults writes it is in the JSON (`faults`). Data meets all of it, ACKs its delay, jitter and loss.
fulmar reaches the wire by a link within the process, Linux by a TAP; the receiver is Linux on a TAP.
1k to 10m: 16 clients fetch answers of that size, one connection each.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_read_and_has_a_name_of_its_own() {
        let answers = ANSWERS.iter().map(|(name, _, text)| (*name, *text));
        let all: Vec<_> = PATHS.iter().copied().chain([SHARED]).chain(answers).collect();
        for (name, text) in &all {
            assert!(text.parse::<FaultSpec>().is_ok(), "{name}");
            assert_eq!(all.iter().filter(|(n, _)| n == name).count(), 1);
        }
        assert_eq!(ANSWERS[0].0, SHORT);
        assert!(QUICK_PATHS.iter().all(|q| PATHS.iter().any(|(n, _)| n == q)));
    }

    #[test]
    fn the_middle_and_the_worst_are_those_of_the_pairs() {
        let terms = [3.0, 1.0, 1.0, 2.0, 4.0, 4.0];
        assert_eq!((median(&terms), worst(&terms)), (1.0, 0.5));
        assert_eq!(median(&terms[..4]), 1.75);
        assert!(median(&[f64::NAN, 1.0]).is_nan());
    }
}
