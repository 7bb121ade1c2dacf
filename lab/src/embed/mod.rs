//! `bench embed`: what a proxy in place of every server costs, whose packets come from the program's own loop.
//!
//! A guest's kernel sends to any address; its packets of at most 1,500 bytes come out of the descriptor of a TUN, one by
//! one. A program passes them to a stack, accepts the connection, and relays it to a server over the kernel's loopback.
//! Only the stack differs: fulmar by a channel, netstack-smoltcp, ipstack.

mod proxies;
mod world;

use std::io;
use std::time::Duration;

use fulmar_gateway::netns;

use crate::cpu::{self, Placement};
use crate::harness::options::Common;
use crate::harness::report::{Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Ratio, Sample, Scenario};
use crate::on_pinned_thread;
use proxies::Proxy;
pub use world::bare_tun;
use world::{Direction, World};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick.
const QUICK: Duration = Duration::from_secs(12);

/// CPU time of the proxy's process without guest and server.
const CPU: &str = "proxy_cpu_s_per_gb";
/// The part of it outside of the kernel.
const USER: &str = "proxy_user_s_per_gb";
const RATE: &str = "gbit_per_s";
const MACHINE: &str = "machine_cpu_s_per_gb";
const FLOW_BYTES: &str = "bytes_per_flow";
const LINES: &str = "lines";

const IDLE_TABLE: &str = "1,000 connections without traffic";
const LINES_TABLE: &str = "The program that accepts any connection and proxies it";
/// That program.
const PROGRAM: &str = include_str!("../../../tokio/examples/proxy_any.rs");

/// Packets of a program's own loop: a proxy for every address, compared with netstack-smoltcp and ipstack
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench embed [OPTIONS]",
    after_help = "The guest is the kernel of a namespace behind a TUN; the proxy reads and writes
its packets one by one, on a runtime of one thread, whichever the stack is. The
command creates its own namespaces and removes them."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
}

/// Measures; `isolated` says whether this process has namespaces of its own.
///
/// # Errors
/// No namespaces, no TUN, or fewer than two CPUs.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    isolated?;
    // The loopback of a new namespace is down.
    netns::loopback_up()?;
    let (near, far) = Placement::TwoCpus.cpus(&cpu::allowed_cpus()?)?;
    let cpus = (near, far);
    let mut scenarios = Vec::new();
    for direction in [Direction::Up, Direction::Down] {
        scenarios.extend(Proxy::ALL.map(|proxy| bulk(cpus, proxy, direction)));
    }
    scenarios.push(idle(cpus));
    scenarios.push(lines());
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let plan = Plan { ratios: ratios(), scenarios, budget, max_runs, pace: Pace::Programs };
    Ok(Report::of(&SHAPE, harness::run(plan)))
}

/// The CPUs of the proxy, and of guest and server.
type Cpus = (Option<usize>, Option<usize>);

fn bulk((near, far): Cpus, proxy: Proxy, direction: Direction) -> Scenario<'static> {
    let run = move |time| {
        on_pinned_thread(near, || {
            let world = World::new(far)?;
            let runtime = proxy.runtime()?;
            let cost = runtime.block_on(world.bulk(proxy, direction, time));
            // Streams of ipstack that are dropped with their runtime wait for ever.
            runtime.shutdown_background();
            let cost = cost?;
            let gigabytes = cost.bytes as f64 / 1e9;
            Ok(Sample::of(CPU, cost.cpu.as_secs_f64() / gigabytes)
                .with(RATE, 8.0 * gigabytes / cost.elapsed.as_secs_f64())
                .with(USER, cost.user.as_secs_f64() / gigabytes)
                .with(MACHINE, cost.machine.as_secs_f64() / gigabytes))
        })
    };
    Scenario::new(format!("{}.{}", proxy.name(), direction.name()), proxy.title(), run)
        .in_table(direction.title())
}

fn idle((near, far): Cpus) -> Scenario<'static> {
    let run = move |_| {
        on_pinned_thread(near, || {
            let (world, proxy) = (World::new(far)?, Proxy::Batched);
            Ok(Sample::of(FLOW_BYTES, proxy.runtime()?.block_on(world.idle(proxy))?))
        })
    };
    Scenario::new("fulmar.idle", "fulmar", run).in_table(IDLE_TABLE).at_most(3)
}

/// Lines of code: neither empty nor comments.
fn lines() -> Scenario<'static> {
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    let count = PROGRAM.lines().filter(is_code).count();
    let run = move |_| Ok(Sample::of(LINES, count as f64));
    Scenario::new("fulmar.lines", "fulmar", run).in_table(LINES_TABLE).at_most(1)
}

fn ratios() -> Vec<Ratio> {
    let over = |name: &str, ours: Proxy, direction: Direction, what: &str, reach, aim| {
        let ways = [ours, Proxy::Smoltcp].map(|p| format!("{}.{}", p.name(), direction.name()));
        let sentence =
            format!("CPU per GB, {}, {what}: fulmar ÷ netstack-smoltcp", direction.title());
        Ratio::over(name, &sentence, CPU, ways).goals(reach, aim)
    };
    let ipstack = [Proxy::Ipstack, Proxy::IpstackFacade].map(|p| format!("{}.up", p.name()));
    let alone = "each packet alone";
    let joined = "packets joined and split at the edge";
    let by_kernel = "packets joined and split by the kernel";
    let user = |name: &str, direction: Direction| {
        let ways =
            [Proxy::Batched, Proxy::Smoltcp].map(|p| format!("{}.{}", p.name(), direction.name()));
        let sentence = format!(
            "CPU per GB outside of the kernel, {}, {joined}: fulmar ÷ netstack-smoltcp",
            direction.title()
        );
        Ratio::over(name, &sentence, USER, ways)
    };
    vec![
        over("embed.1500.up.cpu_vs_smoltcp", Proxy::Single, Direction::Up, alone, 0.7, 0.5),
        over("embed.1500.down.cpu_vs_smoltcp", Proxy::Single, Direction::Down, alone, 0.7, 0.5),
        over("embed.super.up.cpu_vs_smoltcp", Proxy::Batched, Direction::Up, joined, 0.4, 0.25),
        over("embed.super.down.cpu_vs_smoltcp", Proxy::Batched, Direction::Down, joined, 0.4, 0.25),
        over("embed.tun.up.cpu_vs_smoltcp", Proxy::Tun, Direction::Up, by_kernel, 0.4, 0.25),
        over("embed.tun.down.cpu_vs_smoltcp", Proxy::Tun, Direction::Down, by_kernel, 0.4, 0.25),
        user("embed.super.up.user_vs_smoltcp", Direction::Up),
        user("embed.super.down.user_vs_smoltcp", Direction::Down),
        Ratio::over(
            "facade.ipstack.cpu",
            "CPU per GB from the guest: ipstack ÷ ipstack's API over fulmar",
            CPU,
            ipstack,
        )
        .more_is_better()
        .goals(8.0, 12.0),
        Ratio::value(
            "embed.lines",
            "lines of the program that accepts any connection and proxies it",
            LINES,
            "fulmar.lines",
        )
        .goals(25.0, 18.0),
        Ratio::value(
            "embed.idle.bytes_per_flow",
            "memory of a proxied connection without traffic, both ends",
            FLOW_BYTES,
            "fulmar.idle",
        )
        .goals(4096.0, 3000.0),
    ]
}

const SHAPE: Shape = Shape {
    name: "embed",
    title: "Packets of a program's own loop",
    lead: "A proxy for every address over the plain descriptor of a TUN, MTU 1500, in one thread of tokio.",
    columns: &[
        label("title", "stack"),
        number(CPU, "proxy\ns/GB", 2, "CPU time of the proxy").with_interval(),
        number(USER, "in user\nspace", 2, "the part of it outside of the kernel").with_interval(),
        number(MACHINE, "machine\ns/GB", 2, "busy time of all CPUs"),
        number(RATE, "Gbit/s", 2, "received by the other end").with_interval(),
        number(FLOW_BYTES, "bytes\nper flow", 0, "heap and buffers"),
        number(LINES, "lines", 0, "neither empty nor comments"),
        number("runs", "runs", 0, ""),
    ],
    across: None,
    chart: None,
    legend: "\
proxy    CPU time of the threads that read and write the TUN, run the stack and relay to the server.
         The guest's kernel receives a packet within the call that writes it to the TUN.
machine  busy time of all CPUs from /proc/stat, which counts in ticks: guest and server, too.
The proxy is pinned to one CPU, guest and server to another.",
};
