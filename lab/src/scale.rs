//! `bench scale`: what a packet, a request and a look-up cost among few and among very many.
//!
//! Datagrams of 18 bytes lie in a device that only hands them over; what is timed is one step of a
//! shard for a burst of them, up to the socket's queue (`sockets.rs`). Making the frames and reading the
//! sockets is not. Requests of 64 bytes go over established connections between two shards
//! (`connections.rs`), both ends timed together. Every way runs once per round, so that what is compared
//! is measured moments apart. What comes next is drawn at random, so that among many each packet meets
//! memory that is cold.

mod connections;
mod shards;
mod sockets;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fulmar_route::{Prefix, Route, Table};
use serde_json::{Value, json};

use crate::bench::{Figure, Outcome, Ratio, Stop};
use crate::cpu;
use crate::report::{self, Machine};
use crate::routes::internet;
use crate::stats::Estimate;
use connections::Connections;
use sockets::{BURST, Flood, Rig};

/// A run of one way.
const SLICE: Duration = Duration::from_millis(20);
/// Numbers of sockets and of routes that are measured, as far as asked for.
const COUNTS: [usize; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];
/// Numbers of connections that are measured, as far as asked for, beside the most.
const CONNECTIONS: [usize; 3] = [1, 100, 10_000];
/// Sockets of each shard where several threads have one each.
const SOCKETS_PER_THREAD: usize = 1000;
/// Addresses that are looked up among routes.
const PROBES: usize = 1 << 16;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Time for the rounds; opening the sockets comes on top.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
    /// The most sockets.
    pub sockets: usize,
    /// The most connections; 0: none are opened.
    pub connections: usize,
    /// The most routes.
    pub routes: usize,
    /// Threads with a shard each, at most.
    pub threads: usize,
    /// What flows are drawn from.
    pub seed: u64,
}

/// One way, and what it cost in each round.
pub struct Way {
    /// Stable dotted name: `demux.1000000.burst64`.
    pub name: String,
    values: Vec<f64>,
}

/// What was found.
pub struct Found {
    /// ns per packet.
    pub ways: Vec<Way>,
    /// The figures asked for, as every bench reports them.
    pub outcome: Outcome,
    memory: Memory,
}

/// Whether a way's values are no times.
fn is_count(name: &str) -> bool {
    name.ends_with("replies_per_drop") || name.ends_with("locks_per_packet")
}

#[derive(Default)]
struct Costs(Vec<Way>);

impl Costs {
    fn add(&mut self, name: String, value: f64) {
        match self.0.iter_mut().find(|w| w.name == name) {
            Some(way) => way.values.push(value),
            None => self.0.push(Way { name, values: vec![value] }),
        }
    }

    fn values(&self, name: &str) -> &[f64] {
        self.0.iter().find(|w| w.name == name).map_or(&[], |w| &w.values)
    }

    fn ratio(&self, above: &str, below: &str) -> Option<Estimate> {
        let pairs = self.values(above).iter().zip(self.values(below));
        Estimate::of(&pairs.map(|(a, b)| a / b).collect::<Vec<_>>())
    }
}

/// What is measured, all of it made.
struct Subjects {
    sockets: Vec<(usize, Rig)>,
    connections: Vec<(usize, Connections)>,
    routes: Vec<(usize, Table, Vec<IpAddr>)>,
    threads: Vec<Rig>,
    memory: Memory,
}

/// Bytes by which the process grew.
#[derive(Clone, Copy, Default)]
struct Memory {
    per_socket: f64,
    /// Per end; `None` if no connections were asked for.
    per_connection: Option<f64>,
}

/// Says what is being made, how many there are and how many there will be.
pub type Progress<'a> = &'a mut dyn FnMut(&'static str, usize, usize);

impl Subjects {
    fn new(options: &Options, progress: Progress<'_>) -> io::Result<Subjects> {
        let mut memory = Memory::default();
        // The most connections first, so that nothing that others gave back hides what they take.
        let connections = all_connections(options, progress, &mut memory)?;
        let mut sockets = Vec::new();
        for count in up_to(options.sockets) {
            progress("sockets", count, options.sockets);
            let before = resident_bytes()?;
            sockets.push((count, Rig::new(count, options.seed)?));
            memory.per_socket = resident_bytes()?.saturating_sub(before) as f64 / count as f64;
        }
        let mut routes = Vec::new();
        for count in up_to(options.routes) {
            progress("routes", count, options.routes);
            let (table, probes) = routes_of(count, options.seed)?;
            routes.push((count, table, probes));
        }
        let threads = (0..options.threads)
            .map(|n| Rig::new(SOCKETS_PER_THREAD.min(options.sockets), options.seed + n as u64));
        let threads = threads.collect::<io::Result<_>>()?;
        Ok(Subjects { sockets, connections, routes, threads, memory })
    }

    /// Every way, once.
    fn round(&mut self, cpus: &[usize], costs: &mut Costs) -> io::Result<()> {
        for (count, rig) in &mut self.sockets {
            for burst in [BURST, 1] {
                costs.add(format!("demux.{count}.burst{burst}"), rig.delivered(burst)?);
            }
        }
        for (count, all) in &mut self.connections {
            costs.add(format!("request.{count}"), all.asked(SLICE)?);
        }
        for (count, table, probes) in &self.routes {
            costs.add(format!("route.{count}"), looked_up(table, probes)?);
        }
        for threads in 1..=self.threads.len() {
            let ns = among_threads(&mut self.threads[..threads], cpus)?;
            costs.add(format!("threads.{threads}"), ns);
        }
        if let Some((_, rig)) = self.sockets.last_mut() {
            for (name, flood) in [("closed_port", Flood::Udp), ("closed_port.tcp", Flood::Tcp)] {
                let (ns, replies) = rig.refused(flood)?;
                costs.add(format!("{name}.ns_per_drop"), ns);
                costs.add(format!("{name}.replies_per_drop"), replies);
            }
        }
        Ok(())
    }
}

fn up_to(most: usize) -> impl Iterator<Item = usize> {
    COUNTS.into_iter().filter(move |n| *n <= most)
}

/// Connections in all numbers that are measured; how much memory each end of the most takes, when each
/// was asked once and nothing happens any more.
fn all_connections(
    options: &Options,
    progress: Progress<'_>,
    memory: &mut Memory,
) -> io::Result<Vec<(usize, Connections)>> {
    let most = options.connections;
    if most == 0 {
        return Ok(Vec::new());
    }
    let mut all = Connections::new(most, options.seed)?;
    // What one connection brings with it, buffers above all, is there beforehand.
    all.open(1, |_| ())?;
    all.ask_all()?;
    let before = resident_bytes()?;
    all.open(most, |open| progress("connections", open, most))?;
    all.ask_all()?;
    all.rest();
    let ends = 2 * (most - 1).max(1);
    memory.per_connection = Some(resident_bytes()?.saturating_sub(before) as f64 / ends as f64);
    let mut made = vec![(most, all)];
    for count in CONNECTIONS.into_iter().filter(|n| *n < most) {
        let mut few = Connections::new(count, options.seed)?;
        few.open(count, |_| ())?;
        made.push((count, few));
    }
    made.sort_by_key(|m| m.0);
    Ok(made)
}

/// A table of a host with so many routes, and addresses within them.
fn routes_of(count: usize, seed: u64) -> io::Result<(Table, Vec<IpAddr>)> {
    let prefixes = internet::ipv4(count, seed);
    let mut table = Table::new();
    for (start, len, hop) in &prefixes {
        let dst = Prefix { addr: Ipv4Addr::from_bits(*start).into(), len: *len };
        let via = Some(Ipv4Addr::new(10, 1, 0, *hop as u8).into());
        let added = table.insert(Route { via, ..Route::on_link(dst) });
        added.map_err(|e| io::Error::other(format!("a route to {dst}: {e:?}")))?;
    }
    let probes = internet::probes(&prefixes, PROBES, seed + 1, internet::within_v4);
    Ok((table, probes.into_iter().map(|a| Ipv4Addr::from_bits(a).into()).collect()))
}

/// ns to find the next hops of an address.
fn looked_up(table: &Table, probes: &[IpAddr]) -> io::Result<f64> {
    let (start, mut done, mut found) = (Instant::now(), 0usize, 0usize);
    for piece in probes.chunks(1024).cycle() {
        found += piece.iter().filter(|ip| table.lookup(**ip).is_some()).count();
        done += piece.len();
        if start.elapsed() >= SLICE {
            break;
        }
    }
    if found != done {
        return Err(io::Error::other("an address within a route has no route; please report this"));
    }
    Ok(start.elapsed().as_nanos() as f64 / done as f64)
}

/// ns per packet and thread, a shard for each.
fn among_threads(rigs: &mut [Rig], cpus: &[usize]) -> io::Result<f64> {
    let barrier = Barrier::new(rigs.len());
    let each: Vec<io::Result<f64>> = std::thread::scope(|s| {
        let barrier = &barrier;
        let run = |(number, rig): (usize, &mut Rig)| {
            if let Some(cpu) = cpus.get(number % cpus.len().max(1)) {
                // Unpinned the figures are wider, not wrong.
                let _ = cpu::pin_to(*cpu);
            }
            barrier.wait();
            rig.delivered(BURST)
        };
        let all: Vec<_> = rigs.iter_mut().enumerate().map(|r| s.spawn(move || run(r))).collect();
        let lost = || Err(io::Error::other("a thread of the bench ended early"));
        all.into_iter().map(|t| t.join().unwrap_or_else(|_| lost())).collect()
    });
    let count = each.len().max(1) as f64;
    Ok(each.into_iter().sum::<io::Result<f64>>()? / count)
}

/// Measures.
///
/// # Errors
/// What the system refuses; connections that do not answer.
pub fn run(options: &Options, progress: Progress<'_>) -> io::Result<Found> {
    let start = Instant::now();
    let cpus = cpu::allowed_cpus()?;
    let mut subjects = Subjects::new(options, progress)?;
    let (mut costs, began, mut rounds) = (Costs::default(), Instant::now(), 0);
    while rounds < options.runs && (rounds < 3 || began.elapsed() < options.budget) {
        subjects.round(&cpus, &mut costs)?;
        rounds += 1;
    }
    let shared = shards::shared_locks_per_packet(options.threads)?;
    costs.add("shards.shared_locks_per_packet".into(), shared);
    let stop = if rounds == options.runs { Stop::Runs } else { Stop::Budget };
    let figures = figures(&costs, &subjects.memory, options);
    let outcome = Outcome { rows: Vec::new(), figures, stop, elapsed: start.elapsed() };
    Ok(Found { ways: costs.0, outcome, memory: subjects.memory })
}

/// Bytes of memory that the process has.
fn resident_bytes() -> io::Result<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok());
    Ok(pages.unwrap_or(0) * 4096)
}

fn figures(costs: &Costs, memory: &Memory, options: &Options) -> Vec<Figure> {
    let among_many = costs.ratio("demux.1000000.burst64", "demux.1.burst64");
    let together = costs.ratio("demux.1000000.burst64", "demux.1000000.burst1");
    let requests = costs.ratio(&format!("request.{}", options.connections), "request.1");
    let all = [
        (
            "demux.1m_vs_1",
            "ns per packet in bursts of 64, 1,000,000 sockets and random flows over one socket",
            among_many,
            Some((8.0, 4.0)),
        ),
        (
            "demux.1m.burst64_vs_1",
            "ns per packet among 1,000,000 sockets, bursts of 64 over packets one by one",
            together,
            None,
        ),
        (
            "idle.bytes_per_connection",
            "resident bytes per end of a connection that was asked once and is idle, tables included",
            memory.per_connection.and_then(|bytes| Estimate::of(&[bytes])),
            Some((4096.0, 2048.0)),
        ),
        (
            "shards.shared_locks_per_packet",
            "locks per packet that threads on different shards take from each other",
            Estimate::of(costs.values("shards.shared_locks_per_packet")),
            Some((0.0, 0.0)),
        ),
        (
            "request.most_vs_1",
            "ns per question and answer among the most connections, drawn at random, over one",
            requests.filter(|_| options.connections > 1),
            None,
        ),
        (
            "scale.two_threads_vs_one",
            "ns per packet and thread, two threads with a shard each over one",
            costs.ratio("threads.2", "threads.1"),
            None,
        ),
    ];
    let figure = |(name, sentence, estimate, reach_and_aim): (&str, &str, _, _)| Figure {
        ratio: Ratio {
            name: name.into(),
            sentence: sentence.into(),
            way: String::new(),
            over: None,
            measure: |_| f64::NAN,
            reach_and_aim,
            more_is_better: false,
            published: None,
        },
        estimate,
    };
    all.into_iter().filter(|f| f.2.is_some()).map(figure).collect()
}

impl Found {
    /// The whole report as JSON. `command` is the command line as given.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let mut json = report::json(machine, command, &self.outcome);
        let ways = self.ways.iter().map(|way| {
            let e = Estimate::of(&way.values);
            json!({
                "name": way.name,
                "median": e.map(|e| e.median),
                "low": e.map(|e| e.low),
                "high": e.map(|e| e.high),
                "runs": e.map(|e| e.runs),
            })
        });
        json["ways"] = ways.collect::<Vec<_>>().into();
        json["resident_bytes_per_socket"] = self.memory.per_socket.into();
        json["resident_bytes_per_connection_end"] = self.memory.per_connection.into();
        json
    }

    /// The whole report as text.
    pub fn text(&self, machine: &Machine) -> String {
        let Machine { cpu, cpus, kernel, fulmar } = machine;
        let head = format!("fulmar {fulmar} on {cpus} CPUs, {cpu}, Linux {kernel}");
        let memory = format!("{:.0} bytes of memory per idle socket", self.memory.per_socket);
        let figures = report::figures_table(&self.outcome.figures);
        [head, self.table(), memory, figures, LEGEND.into()].join("\n\n")
    }

    fn table(&self) -> String {
        let mut table = report::new_table(["way", "ns per\npacket", "95 %", "runs"], 1);
        for way in &self.ways {
            let Some(e) = Estimate::of(&way.values) else { continue };
            let digits = if is_count(&way.name) { 4 } else { 1 };
            table.add_row([
                way.name.clone(),
                format!("{:.digits$}", e.median),
                e.interval(digits),
                e.runs.to_string(),
            ]);
        }
        table.to_string()
    }
}

const LEGEND: &str = "\
demux       datagram sockets of one shard, packets that come together; ns of the stack per packet,
            from the device's burst to the socket's queue, by the clock.
request     established connections, all idle but the one that is asked: ns for 64 bytes there and 64
            bytes back, both ends and the link between them, in one thread.
route       routes of a host: ns to find the next hops of an address within one of them.
threads     threads with a shard of 1,000 sockets each: ns per packet and thread.
closed_port a flood of datagrams (tcp: of SYNs) to a port that nobody has: ns per drop, and ICMP errors
            (resets) per drop, which are limited to 1,000 a second.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_bench_measures_every_way() {
        let options = Options {
            budget: Duration::ZERO,
            runs: 1,
            sockets: 10_000,
            connections: 200,
            routes: 1000,
            threads: 2,
            seed: 3,
        };
        let mut shown = Vec::new();
        let found = run(&options, &mut |what, done, all| shown.push((what, done, all))).unwrap();
        assert!(shown.contains(&("connections", 200, 200)));
        let costs = found.ways.iter().filter(|w| !is_count(&w.name));
        assert!(costs.clone().all(|w| w.values.iter().all(|ns| *ns > 0.0)));
        assert_eq!(costs.count(), 2 * 5 + 3 + 4 + 2 + 2);
        let machine = Machine::here();
        let text = found.text(&machine);
        assert!(text.contains("demux.10000.burst64") && text.contains("request.200"));
        let json = found.json(&machine, &[]);
        assert!(json["ways"][0]["median"].is_number());
        assert!(json["ratios"]["idle.bytes_per_connection"]["median"].is_number());
    }
}
