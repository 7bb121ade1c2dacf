//! `bench serve`: the cost of an ordinary event-driven server on fulmar and on the kernel.
//!
//! The same single-threaded hello-world HTTP server runs over a poll set of fulmar's on a TAP, and over epoll on the
//! kernel's sockets on veth. The client is a kernel process on the other CPU, the same for both.

pub(crate) mod client;
mod server;

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::cpu::{self, Placement};
use crate::harness::options::{Common, Stack, or};
use crate::harness::report::{Chart, Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Ratio, Sample, Scenario};
use crate::kernel::Pair;
use crate::on_pinned_thread;
use crate::stream::{Over, Testbed};
use crate::topology::{MTU, OUR_IP};
use client::{Client, Spec, WARM_REQUESTS};
use fulmar_gateway::netns::Netns;
use server::{Cost, OnFulmar, OnKernel};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(40);
/// The same with --quick.
const QUICK: Duration = Duration::from_secs(12);
/// Connections that are open at the same time.
const CONNECTIONS: [usize; 3] = [1, 64, 1000];
const MOST_CONNECTIONS: usize = 5000;

/// CPU of the server's process per request, in ns.
const CPU: &str = "process_cpu_ns_per_request";
/// Requests answered per second.
const RATE: &str = "requests_per_s";

/// An event-driven HTTP server on a poll set, compared with epoll on the kernel's sockets
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench serve [OPTIONS]",
    after_help = "A single-threaded server answers hello-world requests: with a poll set on fulmar
over a TAP, and with epoll on the kernel's sockets over veth. The client, on the
other CPU, keeps one request in flight on each of 1, 64 or 1,000 connections.
The command creates its own namespaces and removes them."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// The stack of the server's sockets
    #[arg(long, value_enum, default_value_t)]
    pub stack: Stack,
    /// Number of concurrent connections [default: 1,64,1000]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = connections)]
    pub connections: Vec<usize>,
}

fn connections(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (1..=MOST_CONNECTIONS).contains(n));
    n.ok_or_else(|| format!("expected a number from 1 to {MOST_CONNECTIONS}"))
}

/// Measures; `isolated` says whether this process has namespaces of its own.
///
/// # Errors
/// No namespaces, no TAP, or fewer than two CPUs.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    isolated?;
    let (server_cpu, client_cpu) = Placement::TwoCpus.cpus(&cpu::allowed_cpus()?)?;
    let topology = Topology {
        fulmar: RefCell::new(match options.stack.has_fulmar() {
            true => Some(Testbed::new(Over::Tap, Placement::TwoCpus, None)?),
            false => None,
        }),
        kernel: match options.stack.has_kernel() {
            true => Some(Pair::new(MTU, true)?),
            false => None,
        },
        server_cpu,
        client_cpu,
    };
    let mut scenarios = Vec::new();
    for n in or(&options.connections, &CONNECTIONS) {
        scenarios.extend(topology.scenarios(n));
    }
    let mut ratios: Vec<Ratio> = CONNECTIONS.into_iter().flat_map(ratios).collect();
    ratios.retain(|r| r.is_measured(&scenarios));
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let outcome = harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Programs });
    Ok(Report::of(&SHAPE, outcome))
}

/// The open devices and sockets of each stack.
struct Topology {
    fulmar: RefCell<Option<Testbed>>,
    kernel: Option<Pair>,
    server_cpu: Option<usize>,
    client_cpu: Option<usize>,
}

impl Topology {
    fn scenarios(&self, connections: usize) -> Vec<Scenario<'_>> {
        let name = |stack: &str| format!("{stack}.http.{connections}");
        let mut all = Vec::new();
        if self.fulmar.borrow().is_some() {
            let run = move |time| self.on_fulmar(connections, time);
            all.push(Scenario::new(name("fulmar"), "fulmar, poll set, TAP", run));
        }
        if self.kernel.is_some() {
            let run = move |time| self.on_kernel(connections, time);
            all.push(Scenario::new(name("kernel"), "kernel, epoll, veth", run));
        }
        all.into_iter().map(|s| s.label("connections", connections)).collect()
    }

    fn on_fulmar(&self, connections: usize, time: Duration) -> io::Result<Sample> {
        // A port of its own, so that no connection of the run before is met.
        static NEXT_PORT: AtomicU16 = AtomicU16::new(8000);
        let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
        let testbed = self.fulmar.borrow();
        let Some(testbed) = &*testbed else { return Err(io::ErrorKind::NotFound.into()) };
        let to = SocketAddr::new(IpAddr::V4(OUR_IP), port);
        let server = OnFulmar::listen(&testbed.stack, port)?;
        let client = self.client(to, connections, time, &testbed.topology.peer_netns)?;
        let cost = on_pinned_thread(self.server_cpu, || {
            server::serve(server, connections, connections as u64 * WARM_REQUESTS)
        })?;
        Ok(sample(&cost, client.finish()?))
    }

    fn on_kernel(&self, connections: usize, time: Duration) -> io::Result<Sample> {
        let Some(pair) = &self.kernel else { return Err(io::ErrorKind::NotFound.into()) };
        let server = pair.near().run(|| OnKernel::listen(SocketAddr::new(Pair::NEAR, 0)))?;
        let client = self.client(server.address()?, connections, time, pair.far())?;
        let cost = on_pinned_thread(self.server_cpu, || {
            server::serve(server, connections, connections as u64 * WARM_REQUESTS)
        })?;
        Ok(sample(&cost, client.finish()?))
    }

    fn client(
        &self,
        to: SocketAddr,
        connections: usize,
        time: Duration,
        netns: &Netns,
    ) -> io::Result<Client> {
        Client::start(&Spec { to, connections, time, cpu: self.client_cpu }, netns)
    }
}

fn sample(cost: &Cost, [p50, p99]: [u64; 2]) -> Sample {
    let requests = cost.requests as f64;
    let per_request = |time: Duration| time.as_nanos() as f64 / requests;
    Sample::of(CPU, per_request(cost.cpu))
        .with(RATE, requests / cost.elapsed.as_secs_f64())
        .with("machine_cpu_ns_per_request", per_request(cost.machine))
        .with("waits_per_request", cost.waits as f64 / requests)
        .with("p50_us", p50 as f64 / 1000.0)
        .with("p99_us", p99 as f64 / 1000.0)
}

fn ratios(n: usize) -> [Ratio; 2] {
    let ways = || [format!("fulmar.http.{n}"), format!("kernel.http.{n}")];
    let connections = if n == 1 { "1 connection".into() } else { format!("{n} connections") };
    let cpu = format!("process CPU per request, {connections}: fulmar on TAP ÷ kernel on veth");
    let rate = format!("requests per second, {connections}: fulmar on TAP ÷ kernel on veth");
    let cpu = Ratio::over(format!("serve.http.{n}.cpu_vs_kernel"), cpu, CPU, ways());
    let rate = Ratio::over(format!("serve.http.{n}.rate_vs_kernel"), rate, RATE, ways());
    let rate = rate.more_is_better();
    match n {
        64 => [cpu.goals(1.0, 0.75), rate.goals(1.0, 1.2)],
        1000 => [cpu.goals(1.0, 0.75), rate.goals(1.1, 1.3)],
        _ => [cpu, rate],
    }
}

const SHAPE: Shape = Shape {
    name: "serve",
    title: "An event-driven HTTP server",
    lead: "One thread answers hello-world requests; the client has one request in flight on each connection.",
    columns: &[
        label("connections", "connections"),
        label("title", "server"),
        number(RATE, "requests\nper s", 0, "answered in the measured interval").with_interval(),
        number(CPU, "process\nns/req", 0, "CPU time of the server's process").with_interval(),
        number(
            "machine_cpu_ns_per_request",
            "machine\nns/req",
            0,
            "busy time of all CPUs, both ends",
        ),
        number("waits_per_request", "waits\nper req", 3, "times that a thread of the server slept"),
        number("p50_us", "p50\nµs", 0, "time to the answer, median"),
        number("p99_us", "p99\nµs", 0, "time to the answer, 99th percentile"),
        number("runs", "runs", 0, ""),
    ],
    across: None,
    chart: Some(Chart {
        unit: "ns of process CPU per request",
        parts: &[CPU],
        group: &["connections"],
        x: None,
    }),
    legend: LEGEND,
};

const LEGEND: &str = "\
process  CPU time of the server's process: its one thread, and the service thread of fulmar's stack.
         Over veth the kernel's receive softirq runs in the client's calls and is in machine only.
machine  busy time of all CPUs, client included, from /proc/stat, which counts in ticks.
waits    voluntary context switches of the server's process per request.
p50, p99 from the request's write to the last byte of the answer, at the client.
The server is pinned to one CPU and the client to another.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratios_that_have_goals_are_those_of_64_and_1000_connections() {
        let all: Vec<Ratio> = CONNECTIONS.into_iter().flat_map(ratios).collect();
        let goals = all.iter().filter(|r| r.reach_and_aim.is_some()).map(|r| r.name.as_str());
        assert_eq!(
            goals.collect::<Vec<_>>(),
            [
                "serve.http.64.cpu_vs_kernel",
                "serve.http.64.rate_vs_kernel",
                "serve.http.1000.cpu_vs_kernel",
                "serve.http.1000.rate_vs_kernel"
            ]
        );
    }

    #[test]
    fn connections_have_bounds() {
        assert_eq!(connections("64"), Ok(64));
        assert!(connections("0").is_err() && connections("5001").is_err());
    }
}
