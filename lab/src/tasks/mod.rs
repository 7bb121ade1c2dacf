//! `bench async`: what an async program costs on fulmar and on the kernel.
//!
//! hyper and tokio on both sides of a ratio: HTTP with both ends in one thread over a link of fulmar's and over the
//! kernel's loopback, a server over TAP and over veth with the client in another process, round trips, and idle
//! connections. quinn on both sides of another: QUIC with both ends in one thread.

mod quic;
mod requests;
mod ways;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use fulmar_gateway::netns::{self, Netns};
use fulmar_tokio::Net;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};

use crate::cpu::{self, Placement};
use crate::harness::options::Common;
use crate::harness::report::{Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Ratio, Sample, Scenario};
use crate::kernel::Pair;
use crate::latency::Latencies;
use crate::on_pinned_thread;
use crate::serve::client::{Client, Spec, WARM_REQUESTS};
use crate::stream::{Over, Testbed};
use crate::topology::{MTU, OUR_IP};
use requests::Cost;
use ways::{Linked, Listen, Loopback, Way};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick.
const QUICK: Duration = Duration::from_secs(12);
/// Connections with a request under way.
const CONNECTIONS: [usize; 2] = [1, 64];
/// Connections of the server over a device.
const SERVED: usize = 64;
/// Connections that wait.
const IDLE: usize = 1000;
/// Bytes of a question and of its answer.
const ROUND_TRIP_BYTES: usize = 64;

/// CPU time of the process per request, in ns: of both ends, or of the server.
const CPU: &str = "process_cpu_ns_per_request";
const RATE: &str = "requests_per_s";
const P50: &str = "p50_us";
const IDLE_CPU: &str = "idle_cpu_pct";
/// CPU time of both ends of QUIC per KiB.
const BULK_CPU: &str = "process_cpu_ns_per_kib";
const GBPS: &str = "gbps";

const BOTH_TABLE: &str = "HTTP, both ends in one thread";
const SERVER_TABLE: &str = "HTTP, the server; the client is a process on another CPU";
const TRIP_TABLE: &str = "Round trips of 64 bytes, both ends in one thread";
const BULK_TABLE: &str = "QUIC, one stream of bulk data, both ends in one thread";
const IDLE_TABLE: &str = "1,000 connections without traffic";

/// Async programs: HTTP by hyper on tokio, QUIC by quinn, round trips and idle connections, compared with the kernel's sockets
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench async [OPTIONS]",
    after_help = "hyper, quinn and tokio (current_thread) on both sides of each ratio. Both ends of a
connection run in one thread over a link of fulmar's, and over the kernel's
loopback; a server runs over a TAP and over veth, with its client in another
process. The command creates its own namespaces and removes them."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
}

/// Measures; `isolated` says whether this process has namespaces of its own.
///
/// # Errors
/// No namespaces, no TAP, or fewer than two CPUs.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    isolated?;
    // The loopback of a new namespace is down.
    netns::loopback_up()?;
    let (near, far) = Placement::TwoCpus.cpus(&cpu::allowed_cpus()?)?;
    let served = Served {
        fulmar: Testbed::new(Over::Tap, Placement::TwoCpus, None)?,
        kernel: Pair::new(MTU, true)?,
        near,
        far,
    };
    let mut scenarios = Vec::new();
    for n in CONNECTIONS {
        scenarios.extend([both::<Linked>(near, n), both::<Loopback>(near, n)]);
    }
    scenarios.extend(served.scenarios());
    scenarios.extend([trips::<Linked>(near), trips::<Loopback>(near)]);
    scenarios.extend([
        bulk(near, "fulmar.quinn", Linked::TITLE, quic::linked),
        bulk(near, "kernel.quinn", Loopback::TITLE, quic::loopback),
        idle(near),
    ]);
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let plan = Plan { ratios: ratios(), scenarios, budget, max_runs, pace: Pace::Programs };
    Ok(Report::of(&SHAPE, harness::run(plan)))
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn sample(cost: &Cost) -> Sample {
    let requests = cost.count as f64;
    let per_request = |time: Duration| time.as_nanos() as f64 / requests;
    Sample::of(CPU, per_request(cost.cpu))
        .with(RATE, requests / cost.elapsed.as_secs_f64())
        .with("machine_cpu_ns_per_request", per_request(cost.machine))
}

/// HTTP over a way with both ends in one thread.
fn both<W: Way>(cpu: Option<usize>, connections: usize) -> Scenario<'static> {
    let run = move |time| {
        let measured = || runtime()?.block_on(requests::measure::<W>(connections, time));
        Ok(sample(&on_pinned_thread(cpu, measured)?))
    };
    Scenario::new(format!("{}.http.{connections}", W::NAME), W::TITLE, run)
        .in_table(BOTH_TABLE)
        .label("connections", connections)
}

/// The devices of a server.
struct Served {
    fulmar: Testbed,
    kernel: Pair,
    near: Option<usize>,
    far: Option<usize>,
}

impl Served {
    fn scenarios(&self) -> [Scenario<'_>; 2] {
        let ours = Scenario::new("fulmar.tap.64", "fulmar, TAP", |time| self.on_fulmar(time));
        let theirs = Scenario::new("kernel.veth.64", "kernel, veth", |time| self.on_kernel(time));
        [ours, theirs].map(|s| s.in_table(SERVER_TABLE).label("connections", SERVED))
    }

    fn on_fulmar(&self, time: Duration) -> io::Result<Sample> {
        // A port of its own, so that no connection of the run before is met.
        static NEXT_PORT: AtomicU16 = AtomicU16::new(8000);
        let to = SocketAddr::new(IpAddr::V4(OUR_IP), NEXT_PORT.fetch_add(1, Ordering::Relaxed));
        let (stack, netns) = (self.fulmar.stack.clone(), &self.fulmar.topology.peer_netns);
        let spec = Spec { to, connections: SERVED, time, cpu: self.far };
        let cost = on_pinned_thread(self.near, || {
            runtime()?.block_on(async {
                let net = Net::new(stack)?;
                serve(fulmar_tokio::TcpListener::bind(&net, to).await?, &spec, netns).await
            })
        })?;
        Ok(sample(&cost))
    }

    fn on_kernel(&self, time: Duration) -> io::Result<Sample> {
        let bound = self.kernel.near().run(|| std::net::TcpListener::bind((Pair::NEAR, 0)))?;
        bound.set_nonblocking(true)?;
        let (to, netns) = (bound.local_addr()?, self.kernel.far());
        let spec = Spec { to, connections: SERVED, time, cpu: self.far };
        let cost = on_pinned_thread(self.near, || {
            runtime()?.block_on(async {
                serve(tokio::net::TcpListener::from_std(bound)?, &spec, netns).await
            })
        })?;
        Ok(sample(&cost))
    }
}

/// Serves the client of a namespace.
async fn serve(listener: impl Listen, spec: &Spec, netns: &Netns) -> io::Result<Cost> {
    let client = Client::start(spec, netns)?;
    let warm = spec.connections as u64 * WARM_REQUESTS;
    let cost = requests::serve(listener, spec.connections, warm).await?;
    client.finish()?;
    Ok(cost)
}

/// Round trips over a way.
fn trips<W: Way>(cpu: Option<usize>) -> Scenario<'static> {
    let run = move |time| on_pinned_thread(cpu, || runtime()?.block_on(round_trips::<W>(time)));
    Scenario::new(format!("{}.rr", W::NAME), W::TITLE, run).in_table(TRIP_TABLE)
}

async fn round_trips<W: Way>(time: Duration) -> io::Result<Sample> {
    let (way, listener) = W::open().await?;
    tokio::spawn(async move {
        let mut stream = Listen::accept(&listener).await?;
        let mut bytes = [0; ROUND_TRIP_BYTES];
        loop {
            stream.read_exact(&mut bytes).await?;
            stream.write_all(&bytes).await?;
        }
        #[allow(unreachable_code)]
        io::Result::Ok(())
    });
    let mut stream = way.connect().await?;
    let mut bytes = [0x5a; ROUND_TRIP_BYTES];
    let (begun, mut latencies) = (Instant::now(), Latencies::new()?);
    while begun.elapsed() < time {
        let sent = Instant::now();
        stream.write_all(&bytes).await?;
        stream.read_exact(&mut bytes).await?;
        latencies.record(sent.elapsed());
    }
    let [p50, p99] = latencies.percentiles();
    Ok(Sample::of(P50, p50 as f64 / 1000.0).with("p99_us", p99 as f64 / 1000.0))
}

/// Bulk data by QUIC over these sockets.
fn bulk<F: Future<Output = io::Result<quic::Sockets>> + 'static>(
    cpu: Option<usize>,
    name: &str,
    title: &str,
    open: fn() -> F,
) -> Scenario<'static> {
    let run = move |time| {
        let measured = || runtime()?.block_on(async { quic::bulk(open().await?, time).await });
        let cost = on_pinned_thread(cpu, measured)?;
        let kib = cost.count as f64 / 1024.0;
        Ok(Sample::of(BULK_CPU, cost.cpu.as_nanos() as f64 / kib)
            .with(GBPS, cost.count as f64 * 8.0 / 1e9 / cost.elapsed.as_secs_f64())
            .with("machine_cpu_ns_per_kib", cost.machine.as_nanos() as f64 / kib))
    };
    Scenario::new(name, title, run).in_table(BULK_TABLE)
}

/// Connections without traffic, whose tasks wait to read.
fn idle(cpu: Option<usize>) -> Scenario<'static> {
    let run = move |time: Duration| {
        on_pinned_thread(cpu, || runtime()?.block_on(idle_for(time.max(Duration::from_secs(1)))))
    };
    Scenario::new("fulmar.idle", "fulmar, link", run).in_table(IDLE_TABLE).at_most(3)
}

async fn idle_for(time: Duration) -> io::Result<Sample> {
    let (way, listener) = Linked::open().await?;
    tokio::spawn(async move {
        while let Ok(mut stream) = Listen::accept(&listener).await {
            tokio::spawn(async move { stream.read(&mut [0; 1]).await });
        }
    });
    let mut waiting = Vec::new();
    for _ in 0..IDLE {
        let mut stream = way.connect().await?;
        waiting.push(tokio::spawn(async move { stream.read(&mut [0; 1]).await }));
    }
    // Timers of the handshakes end.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let (begun, before) = (Instant::now(), cpu::process_cpu(None)?);
    tokio::time::sleep(time).await;
    let cpu = cpu::process_cpu(None)?.saturating_sub(before);
    Ok(Sample::of(IDLE_CPU, 100.0 * cpu.as_secs_f64() / begun.elapsed().as_secs_f64()))
}

fn ratios() -> Vec<Ratio> {
    let over = |name: &str, sentence: &str, key, [ours, theirs]: [String; 2], reach, aim| {
        Ratio::over(name, sentence, key, [ours, theirs]).goals(reach, aim)
    };
    let http = |n: usize, reach, aim| {
        let ways = ["fulmar", "kernel"].map(|way| format!("{way}.http.{n}"));
        let connections = if n == 1 { "1 connection".into() } else { format!("{n} connections") };
        let sentence = format!(
            "CPU of both ends per request, {connections}: fulmar over a link ÷ the kernel's loopback"
        );
        over(&format!("async.http.{n}.cpu_vs_loopback"), &sentence, CPU, ways, reach, aim)
    };
    vec![
        http(1, 0.8, 0.6),
        http(64, 0.7, 0.5),
        over(
            "async.http.tap.64.cpu_vs_veth",
            "the server's CPU per request, 64 connections: fulmar over TAP ÷ the kernel over veth",
            CPU,
            ["fulmar.tap.64", "kernel.veth.64"].map(str::to_owned),
            1.0,
            0.75,
        ),
        over(
            "async.rr.p50_vs_loopback",
            "round trip of 64 bytes, median: fulmar over a link ÷ the kernel's loopback",
            P50,
            ["fulmar.rr", "kernel.rr"].map(str::to_owned),
            0.7,
            0.5,
        ),
        over(
            "async.quinn.gbps_vs_kernel",
            "CPU of both ends of QUIC per byte: fulmar over a link ÷ the kernel's loopback",
            BULK_CPU,
            ["fulmar.quinn", "kernel.quinn"].map(str::to_owned),
            1.0,
            0.8,
        ),
        Ratio::value(
            "async.idle.cpu_pct",
            "CPU of 1,000 connections without traffic, percent of one CPU",
            IDLE_CPU,
            "fulmar.idle",
        )
        .goals(0.5, 0.1),
    ]
}

const SHAPE: Shape = Shape {
    name: "async",
    title: "Async programs",
    lead: "hyper and quinn on tokio's current_thread runtime, over fulmar and over the kernel's sockets.",
    columns: &[
        label("connections", "connections"),
        label("title", "way"),
        number(RATE, "requests\nper s", 0, "answered in the measured interval").with_interval(),
        number(CPU, "process\nns/req", 0, "CPU time of the process").with_interval(),
        number("machine_cpu_ns_per_request", "machine\nns/req", 0, "busy time of all CPUs"),
        number(GBPS, "Gbit/s", 2, "payload of the stream").with_interval(),
        number(BULK_CPU, "process\nns/KiB", 0, "CPU time of the process").with_interval(),
        number("machine_cpu_ns_per_kib", "machine\nns/KiB", 0, "busy time of all CPUs"),
        number(P50, "p50\nµs", 2, "round trip, median").with_interval(),
        number("p99_us", "p99\nµs", 2, "round trip, 99th percentile"),
        number(IDLE_CPU, "CPU\n%", 2, "CPU time of the process, of one CPU"),
        number("runs", "runs", 0, ""),
    ],
    across: None,
    chart: None,
    legend: "\
process  CPU time of the process: both ends, or the server and fulmar's threads. Over veth the kernel's
         receive softirq runs in the client's calls and is in machine only.
machine  busy time of all CPUs from /proc/stat, which counts in ticks.
The runtime is pinned to one CPU; the client in a process of its own to another.",
};
