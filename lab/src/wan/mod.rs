//! `bench wan`: fulmar and Linux, each as sender and as receiver, over the same impaired path.
//!
//! ```text
//!  fulmar ── link ──┐                                                          ┌── TAP ─── Linux, reading
//!                   ├── wire (a thread): policer, queue, rate, loss, delay ────┤
//!  Linux ─── TAP ───┘                                                          └── link ── fulmar, reading
//! ```
//!
//! Each path is written as `--faults` takes it: data meets all of it, ACKs its delay, jitter and loss.

mod conn;
mod curves;
mod ends;
mod paths;
mod wire;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use fulmar::device::Device;
use fulmar::devices::FaultSpec;
use fulmar::internals::drivers::link::{self, LinkConfig};
use fulmar::internals::drivers::tap::{Tap, TapConfig};
use fulmar::tcp::{EcnPolicy, TcpConfig};
use fulmar::{CongestionControl, Stack};
use fulmar_gateway::netns::Netns;
use fulmar_stack::base::EtherAddr;
use fulmar_stack::device::impair::{Impairments, PathCounts};
use serde_json::Value;

use crate::harness::options::Common;
use crate::harness::report::{Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Ratio, Sample, Scenario};
use ends::{FAR, FAR_FULMAR, FULMAR, Flood, NEAR, Receiver, Sender, Server, Side};
use paths::{ANSWERS, CABLE, DRAWN, Ecn, PATHS, PathOf, QUICK_DRAWN, QUICK_PATHS, SHARED, SHORT};
use wire::Wire;

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(1200);
/// The same with --quick.
const QUICK: Duration = Duration::from_secs(50);
/// A run that a page shows over time, if its path needs no longer one.
const DRAWN_TIME: Duration = Duration::from_secs(4);
const GOODPUT: &str = "goodput_mbps";
const QUEUE: &str = "queue_ms";
const P50: &str = "p50_ms";
const P99: &str = "p99_ms";
const JAIN: &str = "jain";
const RETRANSMITTED: &str = "retransmitted_pct";
const SENDER_CPU: &str = "sender_cpu_ns_per_kb";
/// Clients that fetch answers at the same time.
const CLIENTS: usize = 16;
/// Flows of the fairness scenarios, half of them fulmar's.
const FLOWS: usize = 8;

/// fulmar and Linux as senders over paths with loss, delay, reordering and bottlenecks
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench wan [OPTIONS]",
    after_help = "A thread between senders and receivers delays, drops, reorders and queues packets
in the same way for each stack.
The command creates its own namespaces and removes them.

Examples:
  fulmar-lab bench wan --quick
  fulmar-lab bench wan --path codel-ecn --receiver linux --receiver fulmar
  fulmar-lab bench wan --path delay=20ms,loss=0.1% --path rate=10mbit,queue=64k,delay=30ms"
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// Measure only this path: a name from the table, or faults in the syntax of `fulmar nc --faults`
    #[arg(long, value_name = "NAME|FAULTS", value_parser = path)]
    pub path: Vec<NamedPath>,
    /// The receiver; may be repeated
    #[arg(long, default_value = "linux")]
    pub receiver: Vec<Receiver>,
}

/// A path of the table or of the user.
#[derive(Clone, Debug)]
pub struct NamedPath {
    name: String,
    faults: String,
    ecn: Ecn,
}

impl From<&PathOf> for NamedPath {
    fn from(p: &PathOf) -> NamedPath {
        NamedPath { name: p.name.to_owned(), faults: p.faults.to_owned(), ecn: p.ecn }
    }
}

impl NamedPath {
    fn impairments(&self) -> Impairments {
        spec(&self.faults)
    }
}

fn path(text: &str) -> Result<NamedPath, String> {
    if let Some(known) = PATHS.iter().find(|p| p.name == text) {
        return Ok(known.into());
    }
    if !text.contains('=') {
        let names: Vec<_> = PATHS.iter().map(|p| p.name).collect();
        return Err(format!("unknown path; expected faults or one of {}", names.join(", ")));
    }
    text.parse::<FaultSpec>()?;
    Ok(NamedPath { name: text.to_owned(), faults: text.to_owned(), ecn: Ecn::Classic })
}

fn paths_of(options: &Options) -> Vec<NamedPath> {
    if !options.path.is_empty() {
        return options.path.clone();
    }
    let is_wanted = |p: &&PathOf| !options.common.quick || QUICK_PATHS.contains(&p.name);
    PATHS.iter().filter(is_wanted).map(NamedPath::from).collect()
}

/// The senders and the receiver of a run.
#[derive(Clone)]
struct Pairing {
    who: String,
    flows: Vec<Sender>,
    receiver: Receiver,
}

impl Pairing {
    fn one(sender: Sender, receiver: Receiver) -> Pairing {
        let who = match receiver {
            Receiver::Linux => sender.name(),
            Receiver::Fulmar => format!("{}-to-fulmar", sender.name()),
        };
        Pairing { who, flows: vec![sender], receiver }
    }
}

/// Measures; `isolated` says whether this process has namespaces of its own.
///
/// # Errors
/// No namespaces, or no TAP.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    isolated?;
    let topology = Topology::new()?;
    let paths = paths_of(options);
    let pairings = topology.pairings(&options.receiver);
    let mut scenarios = Vec::new();
    for path in &paths {
        scenarios.extend(pairings.iter().map(|p| topology.bulk(path, p)));
    }
    if options.path.is_empty() {
        let answers = if options.common.quick { &ANSWERS[..1] } else { ANSWERS };
        for answer in answers {
            scenarios.extend(pairings.iter().map(|p| topology.answers(p, *answer)));
        }
        scenarios.extend(topology.mixes());
    }
    let names: Vec<&str> = paths.iter().map(|p| p.name.as_str()).collect();
    let mut ratios = ratios(&names);
    ratios.retain(|r| r.is_measured(&scenarios));
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let outcome = harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Paths });
    let plots = match options.common.report.is_some() || options.common.json.is_some() {
        true => topology.plots(&drawn(options, &paths), &pairings),
        false => Vec::new(),
    };
    let mut report = Report { plots, ..Report::of(&SHAPE, outcome) };
    if !topology.has_accurate_ecn && paths.iter().any(|p| p.ecn == Ecn::Accurate) {
        report.notes.push(NO_ACCURATE_ECN.to_owned());
    }
    Ok(report)
}

/// The paths that a page shows over time.
fn drawn(options: &Options, paths: &[NamedPath]) -> Vec<NamedPath> {
    let chosen = if options.common.quick { QUICK_DRAWN } else { DRAWN };
    let is_drawn = |p: &&NamedPath| !options.path.is_empty() || chosen.contains(&p.name.as_str());
    paths.iter().filter(is_drawn).cloned().collect()
}

/// The ends and the wire between them.
struct Topology {
    near: Side,
    far: Side,
    wire: Mutex<Wire>,
    senders: Vec<Sender>,
    /// This kernel can ask for accurate feedback (`tcp_ecn` of 3).
    has_accurate_ecn: bool,
    /// The number of the next run: each has a port and random numbers of its own.
    next_run: AtomicU16,
}

fn kernel_end(address: IpAddr) -> io::Result<(Netns, Box<dyn Device>)> {
    let netns = Netns::new()?;
    let tap = netns.run(|| {
        // State learned about the path in one run would affect the next.
        std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1")?;
        let config = TapConfig { name: "wan0".to_owned(), ..TapConfig::default() };
        Tap::open(&config).map_err(io::Error::other)
    })?;
    netns.set_address("wan0", address, 24)?;
    Ok((netns, Box::new(tap)))
}

/// A kernel and a fulmar of one side, and their ends of the wire.
fn side(
    kernel: IpAddr,
    fulmar: Ipv4Addr,
    ecn: EcnPolicy,
) -> io::Result<(Side, Vec<Box<dyn Device>>)> {
    let (kernel, tap) = kernel_end(kernel)?;
    // Two fulmars on one wire are two stations.
    let [.., last] = fulmar.octets();
    let ether = [EtherAddr([2, 0, 0, 0, 1, last]), EtherAddr([2, 0, 0, 0, 2, last])];
    let config = LinkConfig { ether, ..LinkConfig::default() };
    let (ours, wires) = link::pair(&config).map_err(io::Error::other)?;
    let cidr = format!("{fulmar}/24").parse().map_err(io::Error::other)?;
    let tcp = TcpConfig { ecn, ..TcpConfig::default() };
    let stack = Stack::builder().device(Box::new(ours)).address(cidr).tcp(tcp).build();
    let stack = stack.map_err(io::Error::other)?;
    Ok((Side { stack, kernel }, vec![Box::new(wires), tap]))
}

impl Topology {
    fn new() -> io::Result<Topology> {
        let (near, near_devices) = side(NEAR.into(), FULMAR, EcnPolicy::Accept)?;
        // A receiver asks for ECN.
        let (far, far_devices) = side(FAR.into(), FAR_FULMAR, EcnPolicy::Ask)?;
        let wire = Mutex::new(Wire::new(near_devices, far_devices)?);
        let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")?;
        let is_known = |name: &str| known.split_whitespace().any(|k| k == name);
        let fulmars =
            ["cubic", "bbr"].into_iter().filter_map(|name| name.parse::<CongestionControl>().ok());
        let linux = ["cubic", "bbr"].into_iter().filter(|name| is_known(name));
        let senders = fulmars.map(Sender::Fulmar).chain(linux.map(Sender::Linux)).collect();
        let has_accurate_ecn = far.set_ecn(Ecn::Accurate).is_ok();
        Ok(Topology { near, far, wire, senders, has_accurate_ecn, next_run: AtomicU16::new(0) })
    }

    /// Each sender with each of these receivers.
    fn pairings(&self, receivers: &[Receiver]) -> Vec<Pairing> {
        let of = |r: &Receiver| self.senders.iter().map(|s| Pairing::one(*s, *r)).collect();
        receivers.iter().flat_map::<Vec<_>, _>(of).collect()
    }

    fn bulk<'a>(&'a self, path: &NamedPath, pairing: &Pairing) -> Scenario<'a> {
        let (owned, who) = ((path.clone(), pairing.clone()), &pairing.who);
        let run = move |time| self.run_bulk(&owned.1, &owned.0, time);
        Scenario::new(format!("{who}.{}", path.name), who.clone(), run)
            .label("path", path.name.clone())
            .label("faults", path.faults.clone())
    }

    fn answers(
        &self,
        pairing: &Pairing,
        answer: (&'static str, usize, &'static str),
    ) -> Scenario<'_> {
        let ((name, bytes, text), who) = (answer, &pairing.who);
        let (path, pairing) = (spec(text), pairing.clone());
        let title = who.clone();
        let run = move |time| self.run_answers(&pairing, bytes, &path, time);
        Scenario::new(format!("{title}.{name}"), title, run)
            .label("path", name)
            .label("faults", text)
    }

    /// Flows of fulmar and of Linux on one bottleneck.
    fn mixes(&self) -> Vec<Scenario<'_>> {
        let cubic = |n| match n % 2 {
            0 => Sender::Fulmar(CongestionControl::Cubic),
            _ => Sender::Linux("cubic"),
        };
        let of = |who: &str, flows| {
            let pairing = Pairing { who: who.to_owned(), flows, receiver: Receiver::Linux };
            self.bulk(&NamedPath::from(&SHARED), &pairing)
        };
        vec![
            of("4-fulmar-4-linux-cubic", (0..FLOWS).map(cubic).collect()),
            of("8-linux-cubic", vec![Sender::Linux("cubic"); FLOWS]),
        ]
    }

    fn port(&self) -> u16 {
        10_000 + self.next_run.fetch_add(1, Ordering::Relaxed) % 20_000
    }

    /// Runs `work` while the wire carries frames over a path; returns the statistics of data frames.
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
        let mut wire =
            self.wire.lock().map_err(|_| io::Error::other("the thread of the wire panicked"))?;
        let wire = &mut *wire;
        thread::scope(|scope| {
            let wire = scope.spawn(|| wire.run(seed, [path, &back], &stop));
            let worked = work();
            stop.store(true, Ordering::Relaxed);
            let counts =
                wire.join().map_err(|_| io::Error::other("the thread of the wire panicked"))??;
            Ok((worked?, counts))
        })
    }

    fn servers(&self, flows: &[Sender]) -> io::Result<Vec<Server>> {
        flows.iter().map(|s| Server::listen(*s, &self.near, self.port())).collect()
    }

    fn run_bulk(&self, who: &Pairing, path: &NamedPath, time: Duration) -> io::Result<Sample> {
        let impairments = path.impairments();
        let time = paths::run_time(impairments.delay, time);
        let run = self.flood(who, path, time, None)?;
        let total: f64 = run.goodput_mbps.iter().sum();
        let squares: f64 = run.goodput_mbps.iter().map(|g| g * g).sum();
        let counts = run.counts;
        let sum = |of: fn(&Flood) -> f64| run.floods.iter().map(of).sum::<f64>();
        let resent = sum(|f| f.last.retransmitted_bytes as f64) * 100.0;
        let cpu_ns = sum(|f| f.cpu.as_nanos() as f64);
        let sample = Sample::of(GOODPUT, total)
            .with(QUEUE, counts.passed_ns as f64 / 1e6 / counts.passed.max(1) as f64)
            .with(JAIN, total * total / (squares * run.goodput_mbps.len() as f64))
            .with(RETRANSMITTED, resent / sum(|f| f.last.sent_bytes as f64))
            .with(SENDER_CPU, cpu_ns * 1024.0 / run.read_bytes as f64)
            .count("queue_drops", counts.queue_drops)
            .count("lost", counts.lost)
            .count("marked", counts.marked);
        Ok(Sample { bytes: run.read_bytes, ..sample })
    }

    /// Has each flow send as much as it can for `time`.
    fn flood(
        &self,
        who: &Pairing,
        path: &NamedPath,
        time: Duration,
        every: Option<Duration>,
    ) -> io::Result<BulkRun> {
        let ecn = if self.has_accurate_ecn { path.ecn } else { Ecn::Classic };
        self.near.set_ecn(ecn)?;
        self.far.set_ecn(ecn)?;
        let servers = self.servers(&who.flows)?;
        let read: Vec<AtomicU64> = who.flows.iter().map(|_| AtomicU64::new(0)).collect();
        let ends = addresses(&servers)?.into_iter().zip(&read);
        let (far, bytes) = ((&self.far, who.receiver), |r: &AtomicU64| r.load(Ordering::Relaxed));
        let ((read_bytes, floods), counts) = self.over(&path.impairments(), || {
            let (done, over) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                let (done, over) = (&done, &over);
                let serve = |s| scope.spawn(move || Server::flood(s, done, every));
                let servings: Vec<_> = servers.iter().map(serve).collect();
                let fetch = |(at, read)| scope.spawn(move || ends::read_flood(far, at, read, over));
                let clients: Vec<_> = ends.map(fetch).collect();
                thread::sleep(time);
                let read_bytes: Vec<u64> = read.iter().map(bytes).collect();
                // First the servers: a connection is asked for its figures before its client resets it.
                done.store(true, Ordering::Relaxed);
                let floods = join_all(servings);
                over.store(true, Ordering::Relaxed);
                join_all(clients)?;
                Ok((read_bytes, floods?.into_iter().flatten().collect()))
            })
        })?;
        let mbps = |n: &u64| *n as f64 * 8.0 / 1e6 / time.as_secs_f64();
        let goodput_mbps = read_bytes.iter().map(mbps).collect();
        let read_bytes = read.iter().map(bytes).sum();
        Ok(BulkRun { goodput_mbps, read_bytes, counts, floods })
    }

    /// One more run of each pairing over these paths, watched: apart from the rounds, which it would disturb. One that
    /// fails has no curve.
    fn plots(&self, paths: &[NamedPath], pairings: &[Pairing]) -> Vec<Value> {
        let mut plots = Vec::new();
        for path in paths {
            let time = paths::run_time(path.impairments().delay, DRAWN_TIME);
            let mut courses = Vec::new();
            for who in pairings {
                let run = self.flood(who, path, time, Some(curves::every(time)));
                let course = run.ok().and_then(|r| r.floods.into_iter().next()).map(|f| f.course);
                courses.push((who.who.clone(), course.unwrap_or_default()));
            }
            plots.extend(curves::plots(&path.name, &path.faults, &courses));
        }
        plots
    }

    fn run_answers(
        &self,
        who: &Pairing,
        bytes: usize,
        path: &Impairments,
        time: Duration,
    ) -> io::Result<Sample> {
        let servers = self.servers(&who.flows)?;
        let (at, far) = (servers[0].address()?, (&self.far, who.receiver));
        let (mut times, _) = self.over(path, || {
            let (done, over) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                let server = scope.spawn(|| servers[0].answer(bytes, &over));
                let fetch = |_| scope.spawn(|| ends::fetch_many(far, at, &done));
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

/// The result of a bulk run.
struct BulkRun {
    goodput_mbps: Vec<f64>,
    read_bytes: u64,
    counts: PathCounts,
    floods: Vec<Flood>,
}

fn addresses(servers: &[Server]) -> io::Result<Vec<SocketAddr>> {
    servers.iter().map(Server::address).collect()
}

/// Waits for all, then tells the first error.
fn join_all<'scope, T>(
    threads: impl IntoIterator<Item = ScopedJoinHandle<'scope, io::Result<T>>>,
) -> io::Result<Vec<T>> {
    let joined: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    let panicked = |_| io::Error::other("the thread of an end panicked");
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

/// Goodput without a limit of the rate, fulmar over Linux: each controller over each path, and the median of both
/// controllers under 1 ms. Over 10 ms Linux's default send buffer is what limits it.
fn at_cable_speed() -> Vec<Ratio> {
    let pair = |which: &str, path: &str| {
        ["fulmar", "linux"].map(|who| (format!("{who}-{which}.{path}"), GOODPUT))
    };
    let ratio = |name: String, terms: Vec<(String, &'static str)>, of: String| {
        let sentence = format!("goodput at cable speed, {of}: fulmar ÷ Linux");
        Ratio::new(format!("wan.cable.{name}.vs_kernel"), sentence, terms, median).more_is_better()
    };
    let both = ["cubic", "bbr"];
    let mut all = Vec::new();
    for (what, [short, long]) in CABLE {
        let terms = both.iter().flat_map(|which| pair(which, short)).collect();
        let median = ratio(what.to_owned(), terms, format!("{what}, under 1 ms, cubic and bbr"));
        all.push(median.goals(0.9, 1.1));
        for (rtt, path) in [("0ms", short), ("10ms", long)] {
            all.extend(both.map(|which| {
                let name = format!("{what}.{which}.{rtt}");
                ratio(name, pair(which, path).to_vec(), format!("{what}, {rtt}, {which}"))
            }));
        }
    }
    all
}

fn ratios(paths: &[&str]) -> Vec<Ratio> {
    let mut all = Vec::from(vs_kernel("cubic", paths, (1.0, 1.1), (0.8, 0.95)));
    all.extend(vs_kernel("bbr", paths, (0.95, 1.05), (0.7, 0.9)));
    all.extend(at_cable_speed());
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
            of("4-fulmar-4-linux-cubic", SHARED.name),
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
    lead: "One sender at a time (or eight flows) to a receiver, over a path that a thread impairs.",
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
        number(
            RETRANSMITTED,
            "resent\n%",
            2,
            "retransmitted bytes of those sent, as the sender counts",
        ),
        number(SENDER_CPU, "CPU\nns/KB", 0, "CPU time of the thread that writes, per KB read"),
        number(harness::MACHINE, "machine\nns/KB", 0, "busy time of all CPUs, the wire's included"),
        number(JAIN, "Jain", 2, "fairness among the flows"),
        number(P50, "p50\nms", 0, "from the SYN to the end of the answer, median"),
        number(P99, "p99\nms", 0, "the same, 99th percentile"),
        number("runs", "runs", 0, ""),
    ],
    across: None,
    chart: None,
    legend: LEGEND,
};

/// Linux 6.18 is one.
const NO_ACCURATE_ECN: &str =
    "This kernel does not support accurate ECN: its receiver requested RFC 3168 on all paths.";

const LEGEND: &str = "\
Each path as --faults writes it is in the JSON (`faults`). Data meets all of it, ACKs its delay, jitter and loss.
fulmar reaches the wire by a link within the process, Linux by a TAP. The receiver is Linux where none is named.
What ACKs cost a Linux sender is the wire's work, since a TAP is written to: the machine's column has it.
1k to 10m: 16 clients fetch answers of that size, one connection each.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_named_or_written_out() {
        assert_eq!(path("codel-accurate-ecn").map(|p| p.ecn == Ecn::Accurate), Ok(true));
        assert_eq!(path("loss=1%").map(|p| p.name), Ok("loss=1%".to_owned()));
        assert!(path("no-such-path").is_err());
    }

    #[test]
    fn the_middle_and_the_worst_are_those_of_the_pairs() {
        let terms = [3.0, 1.0, 1.0, 2.0, 4.0, 4.0];
        assert_eq!((median(&terms), worst(&terms)), (1.0, 0.5));
        assert_eq!(median(&terms[..4]), 1.75);
        assert!(median(&[f64::NAN, 1.0]).is_nan());
    }
}
