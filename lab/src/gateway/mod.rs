//! `bench gateway`: user-mode gateways beside each other, and beside a veth pair of root's.
//!
//! Every gateway has a guest of its own per MTU, all started before the first round; a load runs through each in
//! turn. Loads: TCP out and in, transactions, datagrams both ways, a published port on loopback, idle flows.

pub(crate) mod idle;
mod load;
pub(crate) mod program;

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::harness::options::{Common, one_of};
use crate::harness::report::{Chart, Report, Shape, label, number};
use crate::harness::{self, MACHINE, Pace, Plan, Ratio, Sample, Scenario, Term};
use crate::transfer::GBPS;
use load::{Direction, Load};
use program::{Host, Instance, Kind, Programs};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(300);
/// The same with --quick: one round, the idle flows on top.
const QUICK: Duration = Duration::from_secs(18);
/// MTUs of the guests: that of Ethernet, and the largest that rootless containers are given.
const MTUS: [u32; 2] = [1500, 65_520];
/// The one on which everything but TCP in bulk is measured: Podman's and RootlessKit's default.
const LARGE: u32 = 65_520;
const STREAMS: [usize; 3] = [1, 8, 64];
const DATAGRAM_BYTES: [usize; 3] = [64, 1400, 8000];
const IDLE_FLOWS: usize = 10_000;
/// With --quick.
const FEWER_IDLE_FLOWS: usize = 1000;
/// Published ports count in tens from here.
const FIRST_PORT: u16 = 20_000;
/// Rounds in which idle flows are measured: they take ten seconds each.
const IDLE_RUNS: usize = 1;

/// The gateway compared with pasta, slirp4netns, gvisor-tap-vsock and a veth pair made by root
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench gateway [OPTIONS]",
    after_help = "Loads for each gateway: TCP out of and into the guest at MTU 1500 and 65520 with
1, 8 and 64 streams, TCP_RR, TCP_CRR and UDP_RR, datagrams in both directions, a
published port on loopback, and 10,000 idle flows. A gateway that is not installed
is skipped with a message. `scripts/setup peers` installs pasta and slirp4netns;
gvproxy and vm are commands of github.com/containers/gvisor-tap-vsock."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// Measure only these: fulmar, fulmar-queues-2, pasta, slirp4netns, gvisor, veth
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = kind)]
    gateway: Vec<Kind>,
    /// Run only loads whose name begins with one of these, such as tcp.out.1500 or udp
    #[arg(long, value_name = "LOAD", value_delimiter = ',')]
    load: Vec<String>,
    /// Path of a program: pasta, slirp4netns, gvproxy, vm or fulmar [default: in scripts/peers, else in PATH]
    #[arg(long, value_name = "NAME=FILE", value_parser = program)]
    program: Vec<(String, PathBuf)>,
}

fn kind(text: &str) -> Result<Kind, String> {
    one_of(Kind::ALL, Kind::name, text)
}

fn program(text: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = text.split_once('=').ok_or("expected NAME=FILE")?;
    let file = PathBuf::from(file);
    file.is_file().then_some(()).ok_or_else(|| format!("{} is not a file", file.display()))?;
    Ok((name.to_owned(), file))
}

impl Options {
    fn has(&self, load: &str) -> bool {
        self.load.is_empty() || self.load.iter().any(|l| load.starts_with(l.as_str()))
    }

    fn kinds(&self) -> Vec<Kind> {
        let wanted = |k: &Kind| self.gateway.is_empty() || self.gateway.contains(k);
        Kind::ALL.into_iter().filter(wanted).collect()
    }
}

/// The name of the load of idle flows, which is not in [`loads`].
const IDLE_LOAD: &str = "idle";

/// A load by its name, the MTU on which it runs, and the table in which it stands.
struct Named {
    name: String,
    mtu: u32,
    load: Load,
    table: &'static str,
    size: String,
}

/// The loads, in the order in which a round runs them.
fn loads(is_quick: bool) -> Vec<Named> {
    let mut all = Vec::new();
    let streams = if is_quick { vec![1, 64] } else { STREAMS.to_vec() };
    for mtu in MTUS {
        for direction in [Direction::Out, Direction::In] {
            // In a short run 64 streams at the large MTU only, of which there is a ratio.
            for &n in streams.iter().filter(|n| !is_quick || **n == 1 || mtu == LARGE) {
                let name = format!("tcp.{}.{mtu}.x{n}", direction.name());
                let size = format!("{} {mtu}, {n}", direction.name());
                let load = Load::Streams(direction, n);
                all.push(Named { name, mtu, load, table: BULK, size });
            }
        }
    }
    let mut large = |name: String, load, table, size: String| {
        all.push(Named { name, mtu: LARGE, load, table, size });
    };
    let loopback = Load::Streams(Direction::Loopback, 1);
    large("tcp.loopback".into(), loopback, BULK, "loopback, 1".into());
    for (name, load) in
        [("tcp_rr", Load::TcpRr), ("tcp_crr", Load::TcpCrr), ("udp_rr", Load::UdpRr)]
    {
        large(name.into(), load, TRANSACTIONS, name.to_uppercase());
    }
    for direction in [Direction::Out, Direction::In] {
        for bytes in DATAGRAM_BYTES.into_iter().filter(|b| !is_quick || *b == 1400) {
            let name = format!("udp.{}.{bytes}", direction.name());
            let size = format!("{} {bytes}", direction.name());
            large(name, Load::Datagrams(direction, bytes), DATAGRAMS, size);
        }
    }
    all
}

/// The loads that the options ask for.
fn chosen(options: &Options) -> io::Result<Vec<Named>> {
    let (chosen, others): (Vec<Named>, _) =
        loads(options.common.quick).into_iter().partition(|l| options.has(&l.name));
    if !chosen.is_empty() || options.has(IDLE_LOAD) {
        return Ok(chosen);
    }
    let names: Vec<String> = others.into_iter().map(|l: Named| l.name).collect();
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!(
            "no load begins with `{}`; expected one of {}, {IDLE_LOAD}",
            options.load.join("`, `"),
            names.join(", ")
        ),
    ))
}

/// Measures; `isolated` says whether this process has namespaces of its own. What cannot be started here is said
/// on standard error and left out.
///
/// # Errors
/// No namespaces.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    isolated?;
    idle::raise_limit()?;
    let (host, programs) = (Host::new()?, Programs { given: options.program.clone() });
    let is_quick = options.common.quick;
    let loads = chosen(options)?;
    let starter = Starter { host: &host, programs: &programs, next_port: Cell::new(FIRST_PORT) };
    let mut left_out = Vec::new();
    let mut instances = Vec::new();
    for kind in options.kinds() {
        let wanted = MTUS.into_iter().filter(|mtu| loads.iter().any(|l| l.mtu == *mtu));
        let started: io::Result<Vec<Instance>> =
            wanted.map(|mtu| starter.start(kind, mtu)).collect();
        match started {
            Ok(of_kind) => instances.push((kind, of_kind)),
            Err(e) => left_out.push(format!("not measured: {}: {e}", kind.title())),
        }
    }
    for sentence in &left_out {
        eprintln!("{sentence}");
    }
    let mut scenarios = Vec::new();
    for named in &loads {
        for (kind, of_kind) in &instances {
            let instance = of_kind.iter().find(|i| i.mtu == named.mtu);
            scenarios.extend(instance.map(|i| scenario(programs.title(*kind), named, i)));
        }
    }
    let flows = if is_quick { FEWER_IDLE_FLOWS } else { IDLE_FLOWS };
    if options.has(IDLE_LOAD) {
        let others = instances.iter().map(|(kind, _)| *kind).filter(|k| *k != Kind::Veth);
        scenarios.extend(others.map(|kind| starter.idle(kind, flows)));
    }
    let mut ratios = ratios(&scenarios);
    ratios.retain(|r| r.is_measured(&scenarios));
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let outcome = harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Programs });
    let mut report = Report::of(&SHAPE, outcome);
    report.notes.extend(left_out);
    Ok(report)
}

/// Starts gateways, each with a published port of its own.
struct Starter<'a> {
    host: &'a Host,
    programs: &'a Programs,
    next_port: Cell<u16>,
}

impl<'a> Starter<'a> {
    fn start(&self, kind: Kind, mtu: u32) -> io::Result<Instance> {
        let port = self.next_port.get();
        self.next_port.set(port + 10);
        Instance::start(kind, mtu, port, self.host, self.programs)
    }

    /// Idle flows need a gateway that has done nothing yet.
    fn idle(&'a self, kind: Kind, flows: usize) -> Scenario<'a> {
        let run = move |_| idle::measure(&self.start(kind, LARGE)?, flows);
        Scenario::new(format!("{}.idle", kind.name()), self.programs.title(kind), run)
            .at_most(IDLE_RUNS)
            .in_table(IDLE)
            .label("load", format!("{flows} flows"))
    }
}

fn scenario<'a>(title: String, named: &Named, instance: &'a Instance) -> Scenario<'a> {
    let (load, kind) = (named.load, instance.kind);
    let run = move |time| -> io::Result<Sample> {
        let sample = load::run(instance, load, time)?;
        Ok(sample.with("resident_kb", instance.resident_bytes()? as f64 / 1024.0))
    };
    Scenario::new(format!("{}.{}", kind.name(), named.name), title, run)
        .in_table(named.table)
        .label("load", named.size.clone())
        .label("gateway", kind.name())
        .label("mtu", named.mtu)
}

/// The first term over the largest of the others that were measured.
fn over_largest(t: &[f64]) -> f64 {
    t[0] / t[1..].iter().copied().fold(f64::NAN, f64::max)
}

/// The worse direction of: fulmar's value over the smallest of the peers'. Terms: every gateway's out, then in.
fn worse_over_smallest(t: &[f64]) -> f64 {
    let over_smallest = |t: &[f64]| t[0] / t[1..].iter().copied().fold(f64::NAN, f64::min);
    let (out, into) = t.split_at(t.len() / 2);
    over_smallest(out).max(over_smallest(into))
}

/// Peers that are measured under this load.
fn peers(scenarios: &[Scenario<'_>], load: &str) -> Vec<String> {
    let name = |k: Kind| format!("{}.{load}", k.name());
    let is_there = |n: &String| scenarios.iter().any(|s| s.name == *n);
    Kind::PEERS.into_iter().map(name).filter(is_there).collect()
}

fn vs_best_peer(
    scenarios: &[Scenario<'_>],
    name: &str,
    load: &str,
    (key, what): (&'static str, &str),
    (reach, aim): (f64, f64),
) -> Option<Ratio> {
    let peers = peers(scenarios, load);
    if peers.is_empty() {
        return None;
    }
    let terms: Vec<Term> =
        std::iter::once(format!("fulmar.{load}")).chain(peers).map(|n| (n, key)).collect();
    let sentence = format!("{what}: fulmar ÷ the best of the other gateways");
    let name = format!("gateway.{name}.vs_best_peer");
    Some(Ratio::new(name, sentence, terms, over_largest).goals(reach, aim).more_is_better())
}

/// A value that is compared with the best of the other gateways: the figure's name, the load, the value and its
/// description, the goals.
type VsBestPeer = (&'static str, &'static str, (&'static str, &'static str), (f64, f64));

const VS_BEST_PEER: &[VsBestPeer] = &[
    ("tcp.out.1500", "tcp.out.1500.x1", (GBPS, "TCP out of the guest, MTU 1500"), (6.0, 10.0)),
    ("tcp.in.1500", "tcp.in.1500.x1", (GBPS, "TCP into the guest, MTU 1500"), (5.0, 6.0)),
    ("tcp.out.65520", "tcp.out.65520.x1", (GBPS, "TCP out, MTU 65520"), (1.7, 2.2)),
    ("tcp.in.65520", "tcp.in.65520.x1", (GBPS, "TCP in, MTU 65520"), (1.4, 1.6)),
    ("tcp_rr", "tcp_rr", (load::RATE, "TCP round trips per second"), (1.0, 1.2)),
    (
        "tcp_crr",
        "tcp_crr",
        (load::RATE, "TCP connections with one round trip, per second"),
        (1.5, 2.0),
    ),
    ("udp_rr", "udp_rr", (load::RATE, "UDP round trips per second"), (1.0, 1.2)),
    ("udp.out.1400", "udp.out.1400", (GBPS, "datagrams of 1400 bytes that arrived"), (2.2, 3.0)),
    ("loopback", "tcp.loopback", (GBPS, "a published port on loopback"), (1.0, 1.1)),
];

/// Values of fulmar alone when nothing is transferred: the figure's name, its description, the value, the goals.
const IDLE_VALUES: &[(&str, &str, &str, (f64, f64))] = &[
    ("gateway.idle.kb", "resident memory after the start", idle::START_KB, (12_000.0, 6_000.0)),
    (
        "gateway.idle.bytes_per_flow",
        "resident bytes per idle TCP flow",
        idle::PER_FLOW,
        (4096.0, 2048.0),
    ),
    ("gateway.idle.cpu_pct", "CPU while all flows are idle, percent", idle::CPU_PCT, (0.1, 0.0)),
];

/// Comparisons of 64 streams with one: the figure's name, the gateway, its description.
const MANY_STREAMS: &[[&str; 3]] = &[
    ["gateway.64_streams.vs_1", "fulmar", "throughput of 64 streams ÷ of one"],
    [
        "gateway.64_streams.queues_2.vs_1",
        "fulmar-queues-2",
        "with two queues: throughput of 64 streams ÷ of one",
    ],
];

fn many_streams([name, gateway, what]: &[&str; 3]) -> Ratio {
    let of = |d: &str| ["x64", "x1"].map(|n| (format!("{gateway}.tcp.{d}.65520.{n}"), GBPS));
    let worse = |t: &[f64]| (t[0] / t[1]).min(t[2] / t[3]);
    let sentence = format!("{what}, MTU 65520, the worse direction");
    let ratio = Ratio::new(*name, sentence, ["out", "in"].map(of).concat(), worse);
    ratio.goals(0.9, 1.0).more_is_better()
}

fn ratios(scenarios: &[Scenario<'_>]) -> Vec<Ratio> {
    let mut all: Vec<Ratio> = VS_BEST_PEER
        .iter()
        .filter_map(|(name, load, what, goals)| vs_best_peer(scenarios, name, load, *what, *goals))
        .collect();
    for (direction, goals) in [("out", (0.7, 0.9)), ("in", (1.0, 1.2))] {
        let ways = ["fulmar", "veth"].map(|g| format!("{g}.tcp.{direction}.1500.x1"));
        let sentence = format!("TCP {direction}, MTU 1500: fulmar ÷ root's veth");
        let ratio =
            Ratio::over(format!("gateway.tcp.{direction}.1500.vs_veth"), sentence, GBPS, ways);
        all.push(ratio.goals(goals.0, goals.1).more_is_better());
    }
    let cpu = ["tcp.out.65520.x1", "tcp.in.65520.x1"];
    if !peers(scenarios, cpu[0]).is_empty() {
        let of = |load: &str| {
            let all = std::iter::once(format!("fulmar.{load}")).chain(peers(scenarios, load));
            all.map(|n| (n, MACHINE)).collect::<Vec<Term>>()
        };
        let sentence = "CPU of the whole machine per KB, MTU 65520, the worse direction: fulmar ÷ the best \
                        of the others";
        let terms = cpu.map(of).concat();
        let ratio =
            Ratio::new("gateway.tcp.cpu.65520.vs_best_peer", sentence, terms, worse_over_smallest);
        all.push(ratio.goals(0.8, 0.5));
    }
    all.extend(MANY_STREAMS.iter().map(many_streams));
    for (name, sentence, key, (reach, aim)) in IDLE_VALUES {
        all.push(Ratio::value(*name, *sentence, key, "fulmar.idle").goals(*reach, *aim));
    }
    all
}

const BULK: &str = "TCP in bulk: direction, MTU, streams";
const TRANSACTIONS: &str = "Transactions out of the guest, one byte each way, MTU 65520";
const DATAGRAMS: &str = "Datagrams at full speed: direction, bytes, MTU 65520";
const IDLE: &str = "Idle TCP flows";

const SHAPE: Shape = Shape {
    name: "gateway",
    title: "A network without root: user-mode gateways compared",
    lead: "A process in a network namespace reaches the host through a gateway, and the host reaches its published \
        ports. Both ends of each load are sockets of this kernel. A veth pair, which only root can create, is the \
        upper bound.",
    columns: &[
        label("load", "load"),
        label("title", "gateway"),
        number(GBPS, "Gb/s", 2, "received payload").with_interval(),
        number("packets_per_s", "packets\nper s", 0, "received datagrams"),
        number(load::LOST, "lost\n%", 1, "of the sent datagrams"),
        number(load::RATE, "per\nsecond", 0, "transactions").with_interval(),
        number("p50_us", "p50\nµs", 0, "of a transaction, median"),
        number("p99_us", "p99\nµs", 0, "of a transaction, 99th percentile"),
        number(MACHINE, "machine\nns/KB", 0, "busy time of all CPUs"),
        number(load::GATEWAY_PER_KB, "gateway\nns/KB", 0, "CPU time of its processes"),
        number("machine_us_per_transaction", "machine\nµs each", 1, "busy time of all CPUs"),
        number("gateway_us_per_transaction", "gateway\nµs each", 1, "CPU time of its processes"),
        number(idle::START_KB, "start\nKB", 0, "resident memory after the start"),
        number(idle::PER_FLOW, "bytes\nper flow", 0, "resident memory per idle flow"),
        number(idle::CPU_PCT, "idle\nCPU %", 2, "of one CPU, with all flows open"),
        number("resident_kb", "resident\nKB", 0, "memory of its processes after the run"),
        number("runs", "runs", 0, ""),
    ],
    across: None,
    chart: Some(Chart { unit: "Gb/s", parts: &[GBPS], group: &["load"], x: None }),
    legend: LEGEND,
};

const LEGEND: &str = "\
out      from the guest to the host's address; in: from the host to a port that is published to the guest.
loopback the host to 127.0.0.1 and a published port; in the row of veth the kernel's own loopback.
Gb/s     payload that the receiving socket returned, by the clock; of datagrams what arrived.
machine  busy time of all CPUs per KB (1024 bytes) or per transaction, both ends and the gateway, from
         /proc/stat, which counts in ticks. gateway: CPU time of the gateway's own processes.
RR       one byte there and back; CRR: the same on a new connection each time, closing included.
resident VmRSS of the gateway's processes; what the kernel holds for their sockets is not in it.
figures  best of the others: the largest (of costs the smallest) of pasta, slirp4netns and
         gvisor-tap-vsock in the same round.";

#[cfg(test)]
mod tests {
    use super::*;

    fn scenarios(kinds: &[Kind]) -> Vec<Scenario<'static>> {
        let name = |k: &Kind, load: &str| format!("{}.{load}", k.name());
        let mut all = Vec::new();
        for load in loads(false) {
            all.extend(
                kinds
                    .iter()
                    .map(|k| Scenario::new(name(k, &load.name), "", |_| Ok(Sample::default()))),
            );
        }
        all.extend(
            kinds.iter().map(|k| Scenario::new(name(k, "idle"), "", |_| Ok(Sample::default()))),
        );
        all
    }

    #[test]
    fn with_every_gateway_every_ratio_is_measured() {
        let all = scenarios(&Kind::ALL);
        let ratios = ratios(&all);
        assert_eq!(ratios.len(), 17);
        for ratio in &ratios {
            assert!(ratio.is_measured(&all), "{}", ratio.name);
        }
    }

    #[test]
    fn without_peers_what_compares_with_them_is_left_out() {
        let all = scenarios(&[Kind::Fulmar, Kind::Veth]);
        let mut ratios = ratios(&all);
        ratios.retain(|r| r.is_measured(&all));
        assert!(ratios.iter().all(|r| !r.name.ends_with("vs_best_peer")));
        assert!(ratios.iter().any(|r| r.name == "gateway.tcp.out.1500.vs_veth"));
    }

    #[test]
    fn a_peer_that_failed_is_not_the_best() {
        assert_eq!(over_largest(&[6.0, f64::NAN, 2.0]), 3.0);
        assert!(over_largest(&[6.0, f64::NAN]).is_nan());
        assert_eq!(worse_over_smallest(&[1.0, 4.0, 2.0, 1.0, 2.0, f64::NAN]), 0.5);
    }

    #[test]
    fn loads_are_chosen_by_the_beginning_of_their_names() {
        let options: Options = crate::harness::options::parsed("--load tcp.out,udp").expect("good");
        assert!(options.has("tcp.out.1500.x1") && options.has("udp_rr") && !options.has("tcp_crr"));
        assert!(chosen(&options).is_ok_and(|loads| loads.iter().any(|l| l.name == "udp_rr")));
    }

    #[test]
    fn a_load_that_does_not_exist_is_refused_with_the_names_of_those_that_do() {
        let options: Options = crate::harness::options::parsed("--load udp_crr").expect("good");
        let error = chosen(&options).err().expect("no such load").to_string();
        assert!(
            error.starts_with("no load begins with `udp_crr`; expected one of tcp.out.1500.x1,"),
            "{error}"
        );
        assert!(error.ends_with(", idle"), "{error}");
    }
}
