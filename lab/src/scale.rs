//! `bench scale`: what a packet, a request and a look-up cost among few and among very many.
//!
//! Datagrams of 18 bytes lie in a device that only hands them over; what is timed is one step of a
//! shard for a burst of them, up to the socket's queue (`sockets.rs`). Making the frames and reading the
//! sockets is not. Requests of 64 bytes go over established connections between two shards
//! (`connections.rs`), both ends timed together. Every way runs once per round, so that what is compared
//! is measured moments apart. Sockets, connections and addresses are chosen at random, so with large numbers each
//! packet misses the caches.

mod connections;
mod internet;
mod shards;
mod sockets;

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fulmar_stack::route::{Prefix, Route, Table};

use crate::cpu;
use crate::harness::options::{Common, within};
use crate::harness::report::{Chart, Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Progress, Ratio, Sample, Scenario};
use connections::Connections;
use sockets::{BURST, Flood, Rig};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(40);
/// The same with --quick: with the opening of the sockets, about 20 seconds.
const QUICK: Duration = Duration::from_secs(8);
/// Sockets, or routes: a few gigabytes of memory.
const MOST: usize = 4_000_000;
/// The same of connections, of which both ends are here.
const MOST_CONNECTIONS: usize = 400_000;
/// Numbers of sockets and of routes that are measured, as far as asked for.
const COUNTS: [usize; 7] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000];
/// Numbers of connections that are measured, as far as asked for, beside the most.
const CONNECTIONS: [usize; 3] = [1, 100, 10_000];
/// Sockets of each shard where several threads have one each.
const SOCKETS_PER_THREAD: usize = 1000;
/// Addresses that are looked up among routes.
const PROBES: usize = 1 << 16;

/// Cost of a packet, a request and a route look-up by the number of sockets, connections and routes
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench scale [OPTIONS]",
    after_help = "Measures datagrams of 18 bytes to random sockets, over a device without costs of
its own; requests on random established connections between two shards, the others
idle; route look-ups; floods to closed ports. A million sockets and 100,000
connections take about 2 GB of memory and 40 seconds."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// Largest number of sockets
    #[arg(long, default_value_t = 1_000_000, value_parser = within(1, MOST))]
    pub sockets: usize,
    /// Largest number of concurrent connections; 0 for none
    #[arg(long, default_value_t = 100_000, value_parser = within(0, MOST_CONNECTIONS))]
    pub connections: usize,
    /// Largest number of routes [default: 1000000, with --quick 100000]
    #[arg(long, value_parser = within(1, MOST))]
    pub routes: Option<usize>,
    /// Largest number of threads, each with a shard
    #[arg(long, default_value_t = 2, value_parser = within(1usize, 64))]
    pub threads: usize,
    /// Seed of the random choice of flows
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Nanoseconds of a packet, a request, a look-up.
const NS: &str = "ns_per_packet";
const REPLIES: &str = "replies_per_drop";
const LOCKS: &str = "locks_per_packet";
const BYTES: &str = "bytes";

const SHAPE: Shape = Shape {
    name: "scale",
    title: "Cost of a packet, a request and a look-up by the number of sockets, connections and routes",
    lead: "Sockets, connections and addresses are chosen at random, so with large numbers each packet misses the \
        caches.",
    columns: &[
        label("name", "way"),
        number(NS, "ns per\npacket", 1, "ns per packet, request or look-up, by the clock").with_interval(),
        number(REPLIES, "replies\nper drop", 4, "ICMP errors or resets per drop"),
        number(LOCKS, "shared locks\nper packet", 4, "locks that another thread took last"),
        number(BYTES, "bytes", 0, "growth of the process, per socket or connection"),
        number("runs", "runs", 0, "number of measurements"),
    ],
    across: None,
    chart: Some(Chart { unit: "ns", parts: &[NS], group: &["what"], x: Some("among") }),
    legend: "\
demux       datagram sockets of one shard, packets that come together; ns of the stack per packet,
            from the device's burst to the socket's queue, by the clock.
request     established connections, all idle except the one in use: ns for a request of 64 bytes and
            a reply of 64 bytes, both ends and the link between them, in one thread.
route       routes of a host: ns to look up the next hop of an address within one of them.
threads     threads with a shard of 1,000 sockets each: ns per packet and thread.
closed_port a flood of datagrams (tcp: of SYNs) to a closed port: ns per drop, and ICMP errors
            (resets) per drop, which are limited to 1,000 a second.
memory      growth of the resident memory per idle socket, and per end of a connection.",
};

/// What is measured, all of it made.
struct Fixtures {
    sockets: Vec<(usize, RefCell<Rig>)>,
    connections: Vec<(usize, Connections)>,
    routes: Vec<(usize, Table, Vec<IpAddr>)>,
    threads: RefCell<Vec<Rig>>,
    memory: Memory,
}

/// Bytes by which the process grew.
#[derive(Clone, Copy, Default)]
struct Memory {
    per_socket: f64,
    /// Per end; `None` if no connections were asked for.
    per_connection: Option<f64>,
}

impl Fixtures {
    fn new(options: &Options) -> io::Result<Fixtures> {
        let (mut memory, progress) = (Memory::default(), Progress::new(1));
        // The most connections first, so that nothing that others gave back hides what they take.
        let connections = all_connections(options, &progress, &mut memory)?;
        let mut sockets = Vec::new();
        for count in up_to(options.sockets) {
            progress.show("sockets", count, options.sockets);
            let before = cpu::resident_bytes(std::process::id())?;
            sockets.push((count, RefCell::new(Rig::new(count, options.seed)?)));
            memory.per_socket = cpu::resident_bytes(std::process::id())?.saturating_sub(before)
                as f64
                / count as f64;
        }
        let most = options.routes.unwrap_or(if options.common.quick { 100_000 } else { 1_000_000 });
        let mut routes = Vec::new();
        for count in up_to(most) {
            progress.show("routes", count, most);
            let (table, probes) = routes_of(count, options.seed)?;
            routes.push((count, table, probes));
        }
        let threads = (0..options.threads)
            .map(|n| Rig::new(SOCKETS_PER_THREAD.min(options.sockets), options.seed + n as u64));
        let threads = RefCell::new(threads.collect::<io::Result<_>>()?);
        Ok(Fixtures { sockets, connections, routes, threads, memory })
    }

    /// Everything that is measured, and what was found while it was made.
    fn scenarios(&mut self, options: &Options) -> Vec<Scenario<'_>> {
        let Fixtures { sockets, connections, routes, threads, memory } = self;
        let (threads, shards) = (&*threads, options.threads);
        let mut all = Vec::new();
        for (count, rig) in sockets.iter() {
            all.extend([BURST, 1].map(|burst| {
                let name = format!("demux.{count}.burst{burst}");
                among(name, *count, move |slice| rig.borrow_mut().delivered(burst, slice))
            }));
        }
        all.extend(connections.iter_mut().map(|(count, open)| {
            among(format!("request.{count}"), *count, move |slice| open.asked(slice))
        }));
        all.extend(routes.iter().map(|(count, table, probes)| {
            among(format!("route.{count}"), *count, move |slice| looked_up(table, probes, slice))
        }));
        for n in 1..=options.threads {
            let run = move |slice| among_threads(&mut threads.borrow_mut()[..n], slice);
            all.push(among(format!("threads.{n}"), n, run));
        }
        if let Some((_, rig)) = sockets.last() {
            all.extend([("closed_port", Flood::Udp), ("closed_port.tcp", Flood::Tcp)].map(
                |(name, flood)| {
                    Scenario::new(name, name, move |slice| {
                        let (ns, replies) = rig.borrow_mut().refused(flood, slice)?;
                        Ok(Sample::of(NS, ns).with(REPLIES, replies))
                    })
                },
            ));
        }
        let locks = move || Ok(Sample::of(LOCKS, shards::shared_locks_per_packet(shards)?));
        all.push(once("shards.shared_locks_per_packet", locks));
        let (per_socket, per_end) = (memory.per_socket, memory.per_connection);
        all.push(once("memory.socket", move || Ok(Sample::of(BYTES, per_socket))));
        all.extend(
            per_end.map(|n| once("memory.connection_end", move || Ok(Sample::of(BYTES, n)))),
        );
        all
    }
}

/// What something costs in a table of this many.
fn among<'a>(
    name: String,
    count: usize,
    mut cost: impl FnMut(Duration) -> io::Result<f64> + 'a,
) -> Scenario<'a> {
    let parts: Vec<&str> = name.split('.').filter(|p| p.parse::<usize>().is_err()).collect();
    let what = parts.join(" ");
    let run = move |slice| Ok(Sample::of(NS, cost(slice)?));
    Scenario::new(name.clone(), name, run).label("what", what).label("among", count)
}

fn once<'a>(name: &str, mut run: impl FnMut() -> io::Result<Sample> + 'a) -> Scenario<'a> {
    Scenario::new(name, name, move |_| run()).at_most(1)
}

fn up_to(most: usize) -> impl Iterator<Item = usize> {
    COUNTS.into_iter().filter(move |n| *n <= most)
}

/// Connections in all numbers that are measured; how much memory each end of the most takes, when each
/// was asked once and nothing happens any more.
fn all_connections(
    options: &Options,
    progress: &Progress,
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
    let before = cpu::resident_bytes(std::process::id())?;
    all.open(most, |open| progress.show("connections", open, most))?;
    all.ask_all()?;
    all.rest();
    let ends = 2 * (most - 1).max(1);
    memory.per_connection =
        Some(cpu::resident_bytes(std::process::id())?.saturating_sub(before) as f64 / ends as f64);
    let mut made = vec![(most, all)];
    for count in CONNECTIONS.into_iter().filter(|n| *n < most) {
        let mut few = Connections::new(count, options.seed)?;
        few.open(count, |_| ())?;
        made.push((count, few));
    }
    made.sort_by_key(|m| m.0);
    Ok(made)
}

/// The table of a host with `count` routes, and addresses within them.
fn routes_of(count: usize, seed: u64) -> io::Result<(Table, Vec<IpAddr>)> {
    let prefixes = internet::ipv4(count, seed);
    let mut table = Table::new();
    for (start, len, hop) in &prefixes {
        let dst = Prefix { addr: Ipv4Addr::from_bits(*start).into(), len: *len };
        let via = Some(Ipv4Addr::new(10, 1, 0, *hop as u8).into());
        let added = table.insert(Route { via, ..Route::on_link(dst) });
        added.map_err(|e| io::Error::other(format!("a route to {dst}: {e:?}")))?;
    }
    let probes = internet::probes(&prefixes, PROBES, seed + 1);
    Ok((table, probes.into_iter().map(|a| Ipv4Addr::from_bits(a).into()).collect()))
}

/// ns to find the next hops of an address.
fn looked_up(table: &Table, probes: &[IpAddr], slice: Duration) -> io::Result<f64> {
    let (start, mut done, mut found) = (Instant::now(), 0usize, 0usize);
    for piece in probes.chunks(1024).cycle() {
        found += piece.iter().filter(|ip| table.lookup(**ip).is_some()).count();
        done += piece.len();
        if start.elapsed() >= slice {
            break;
        }
    }
    if found != done {
        return Err(io::Error::other(
            "an address within a route has no route; please report this bug",
        ));
    }
    Ok(start.elapsed().as_nanos() as f64 / done as f64)
}

/// ns per packet and thread, a shard for each.
fn among_threads(rigs: &mut [Rig], slice: Duration) -> io::Result<f64> {
    let cpus = cpu::allowed_cpus()?;
    let barrier = Barrier::new(rigs.len());
    let each: Vec<io::Result<f64>> = std::thread::scope(|s| {
        let (barrier, cpus) = (&barrier, &cpus);
        let run = |(number, rig): (usize, &mut Rig)| {
            if let Some(cpu) = cpus.get(number % cpus.len().max(1)) {
                // Unpinned the figures are wider, not wrong.
                let _ = cpu::pin_to(*cpu);
            }
            barrier.wait();
            rig.delivered(BURST, slice)
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
pub fn run(options: &Options) -> io::Result<Report> {
    let mut fixtures = Fixtures::new(options)?;
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let scenarios = fixtures.scenarios(options);
    let mut ratios = ratios(options.connections);
    ratios.retain(|r| r.is_measured(&scenarios));
    let plan = Plan { scenarios, ratios, budget, max_runs, pace: Pace::Calls };
    Ok(Report::of(&SHAPE, harness::run(plan)))
}

fn ratios(connections: usize) -> Vec<Ratio> {
    let mut all = vec![
        Ratio::over(
            "demux.1m_vs_1",
            "ns per packet in bursts of 64, 1,000,000 sockets and random flows over one socket",
            NS,
            ["demux.1000000.burst64", "demux.1.burst64"],
        )
        .goals(8.0, 4.0),
        Ratio::over(
            "demux.1m.burst64_vs_1",
            "ns per packet among 1,000,000 sockets, bursts of 64 over packets one by one",
            NS,
            ["demux.1000000.burst64", "demux.1000000.burst1"],
        ),
        Ratio::value(
            "idle.bytes_per_connection",
            "resident bytes per end of an idle connection after one request, tables included",
            BYTES,
            "memory.connection_end",
        )
        .goals(4096.0, 2048.0),
        Ratio::value(
            "shards.shared_locks_per_packet",
            "locks per packet that threads on different shards take from each other",
            LOCKS,
            "shards.shared_locks_per_packet",
        )
        .goals(0.0, 0.0),
        Ratio::over(
            "request.most_vs_1",
            "ns per request among the largest number of connections, chosen at random, over one",
            NS,
            [format!("request.{connections}"), "request.1".to_owned()],
        ),
        Ratio::over(
            "scale.two_threads_vs_one",
            "ns per packet and thread, two threads with a shard each over one",
            NS,
            ["threads.2", "threads.1"],
        ),
    ];
    all.retain(|r| connections > 1 || r.name != "request.most_vs_1");
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options::parsed;

    #[test]
    fn a_small_bench_measures_every_way() {
        let small =
            "--seconds 0.001 --runs 1 --sockets 10000 --connections 200 --routes 1000 --seed 3";
        let found = run(&parsed(small).expect("sound options")).expect("it runs");
        let costs = found.tables[0].rows.iter().filter_map(|r| r.get(NS)?.as_f64());
        assert!(costs.clone().all(|ns| ns > 0.0));
        assert_eq!(costs.count(), 2 * 5 + 3 + 4 + 2 + 2);
        assert!(found.value("demux.10000.burst64", NS).is_some());
        assert!(
            found.value("request.200", NS).is_some()
                && found.value("closed_port", REPLIES).is_some()
        );
        assert!(found.figure("idle.bytes_per_connection").is_some());
        assert_eq!(found.figure("shards.shared_locks_per_packet").map(|e| e.runs), Some(1));
    }
}
