//! `bench wake`: the cost of waiting, and the latency that it adds.
//!
//! The bench measures four things, each in three modes of waiting ([`Mode`]) and for the kernel:
//!
//! - **request and reply** over each device: latency and CPU per transaction of both ends;
//! - **a flood** of datagrams of MTU size: frames per wake-up, and the latency that holding adds;
//! - **a sweep** of loads from one packet per second to the full rate; on a simulated card also with its coalescing
//!   registers set by hand;
//! - **completions** of sent frames on the simulated device, taken back one by one and lazily; and an
//!   **idle** stack with many connections.
//!
//! A wake-up is the end of a sleep of the thread that waits (for the kernel: a voluntary context switch). Latency is
//! one-way, from the sender's clock to the receiver's, or a round trip. The latency that holding adds is measured in
//! stretches of 10 ms, because the host may cause a hundredth of all latencies together (`wake/tally.rs`).

mod idle;
mod measures;
mod program;
pub mod rig;
mod sim;
mod tally;
mod transmit;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fulmar::config::ModerationConfig;

use crate::cpu::Placement;
use crate::harness::options::{Common, Stack, one_of, or, placement, within};
use crate::harness::report::Report;
use crate::harness::{self, Pace, Plan, Scenario};
use program::Flow;
use rig::{Load, Rig};
pub use sim::REGISTERS;

/// Time for everything.
const FULL: Duration = Duration::from_secs(240);
/// Time with --quick: with the idle stack and a first round, users wait for less than a minute.
const QUICK: Duration = Duration::from_secs(12);
/// Datagrams per second; 0: the full rate.
const RATES: [u64; 8] = [1, 100, 1_000, 10_000, 50_000, 100_000, 200_000, 0];
const QUICK_RATES: [u64; 3] = [1_000, 100_000, 0];
/// The shortest run in which stretches of 10 ms are meaningful.
const SLICE: Duration = Duration::from_millis(120);
/// The shortest and the longest measurement of the idle stack. A shorter one has too few ticks to be meaningful.
const IDLE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// Limit of the local ports that a stack has for connections to one listener.
const MOST_CONNECTIONS: usize = 16_000;
/// A rate above every device's here.
const MOST_PPS: u64 = 10_000_000;
/// Datagrams per second of the flood: more than half of what one CPU of these machines sends.
const FLOOD_PPS: u64 = 300_000;
/// A UDP payload that fills an MTU of 1500.
const MTU_PAYLOAD: usize = 1472;
/// Datagrams of the sweep.
const SWEEP_BYTES: usize = 64;
/// The highest slow rate: a run at a slow rate takes seconds, so each is run once.
const SLOW_PPS: u64 = 10;

/// Wake-ups, CPU and latency of waiting for packets, with and without interrupt mitigation, and of the kernel
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench wake [OPTIONS]",
    after_help = "Variants: moderated (the default of stacks), unmoderated (sleeps immediately, woken
by every frame), polling (never sleeps), the kernel's, and on the simulated NIC
fixed interrupt coalescing (64 frames or 50 us). The CPU of busy-polling is
reported. Takes 240 seconds; with --quick one round of three loads, under a minute.
The command creates its own namespaces and removes them."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// Measure only these parts
    #[arg(long, value_parser = chapter, value_delimiter = ',', value_name = "rr|bulk|sweep|transmit|idle")]
    pub part: Vec<Chapter>,
    /// CPUs of the two ends [default: same-cpu, two-cpus]
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    pub placement: Vec<Placement>,
    /// The devices of fulmar [default: tap, shm, sim]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "tap|packet|shm|sim")]
    pub device: Vec<Device>,
    /// The stack to measure
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    pub stack: Stack,
    /// Datagrams per second of the sweep; 0 for no limit
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = within(0, MOST_PPS))]
    pub rates: Vec<u64>,
    /// Connections of the idle stack, 1 to 16000; the time to open them is not part of --seconds
    #[arg(long, default_value_t = 10_000, value_parser = within(1, MOST_CONNECTIONS))]
    pub connections: usize,
    /// Write fulmar's frames on kernel devices to this file (pcapng); this distorts the figures
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
}

fn device(text: &str) -> Result<Device, String> {
    one_of([Device::Tap, Device::Packet, Device::Shm, Device::Sim], Device::name, text)
}

fn chapter(text: &str) -> Result<Chapter, String> {
    one_of(Chapter::ALL, Chapter::name, text)
}

impl Options {
    fn wants(&self, chapter: Chapter) -> bool {
        self.part.is_empty() || self.part.contains(&chapter)
    }

    fn rates(&self) -> Vec<u64> {
        or(&self.rates, if self.common.quick { &QUICK_RATES } else { &RATES })
    }

    /// How long the idle stack is looked at.
    fn idle_time(&self) -> Duration {
        self.common.budget(IDLE.0, IDLE.1).clamp(IDLE.0, IDLE.1)
    }
}

/// How fulmar's threads wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// As the policy says.
    Moderated,
    /// Asleep whenever there is nothing, woken by every frame.
    Unmoderated,
    /// Never asleep.
    Polling,
    /// As [`Mode::Unmoderated`], on a device whose coalescing registers were set by hand
    /// ([`REGISTERS`]).
    Registers,
    /// The kernel's own way.
    Kernel,
}

impl Mode {
    /// fulmar's, on every device.
    pub const OURS: [Mode; 3] = [Mode::Moderated, Mode::Unmoderated, Mode::Polling];
    /// fulmar's, on a device with coalescing registers.
    const COALESCED: [Mode; 4] =
        [Mode::Moderated, Mode::Unmoderated, Mode::Polling, Mode::Registers];

    /// The name in rows and options.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Moderated => "moderated",
            Mode::Unmoderated => "unmoderated",
            Mode::Polling => "polling",
            Mode::Registers => "registers",
            Mode::Kernel => "kernel",
        }
    }

    fn named(name: &str) -> Mode {
        Mode::OURS.into_iter().find(|m| m.name() == name).unwrap_or(Mode::Moderated)
    }

    const fn config(self) -> ModerationConfig {
        match self {
            Mode::Moderated | Mode::Kernel => ModerationConfig::ADAPTIVE,
            Mode::Unmoderated | Mode::Registers => ModerationConfig::NONE,
            Mode::Polling => ModerationConfig::POLLING,
        }
    }
}

/// The device of the datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// TAP, a kernel peer.
    Tap,
    /// AF_PACKET on veth, a kernel peer.
    Packet,
    /// Shared memory, another process with fulmar.
    Shm,
    /// A simulated card with hardware on a thread of its own, and a modelled sender as its peer.
    Sim,
    /// The kernel at both ends, over veth.
    Veth,
    /// The kernel at both ends, over loopback.
    Loopback,
}

impl Device {
    /// The name in rows and options.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Tap => "tap",
            Device::Packet => "packet",
            Device::Shm => "shm",
            Device::Sim => "sim",
            Device::Veth => "veth",
            Device::Loopback => "loopback",
        }
    }

    /// Whether it carries floods too.
    const fn takes_floods(self) -> bool {
        !matches!(self, Device::Loopback)
    }

    /// Whether the other end sends requests.
    const fn takes_questions(self) -> bool {
        !matches!(self, Device::Sim)
    }

    fn modes(self) -> &'static [Mode] {
        match self {
            Device::Veth | Device::Loopback => &[Mode::Kernel],
            Device::Tap | Device::Packet | Device::Shm => &Mode::OURS,
            Device::Sim => &Mode::COALESCED,
        }
    }
}

/// A part of the bench that can be asked for by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Chapter {
    /// Request and reply.
    Rr,
    /// The flood.
    Bulk,
    /// From few datagrams to many.
    Sweep,
    /// Completions of sent frames.
    Transmit,
    /// The idle stack.
    Idle,
}

impl Chapter {
    /// All of them.
    pub const ALL: [Chapter; 5] =
        [Chapter::Rr, Chapter::Bulk, Chapter::Sweep, Chapter::Transmit, Chapter::Idle];

    /// The name in options.
    pub const fn name(self) -> &'static str {
        match self {
            Chapter::Rr => "rr",
            Chapter::Bulk => "bulk",
            Chapter::Sweep => "sweep",
            Chapter::Transmit => "transmit",
            Chapter::Idle => "idle",
        }
    }
}

/// The work of the far end of a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Request and reply.
    Rr,
    /// The flood of MTU-size datagrams.
    Bulk,
    /// The sweep, at this many datagrams per second; 0: as fast as possible.
    Sweep(u64),
}

impl Part {
    fn name(self) -> String {
        match self {
            Part::Rr => "rr".into(),
            Part::Bulk => "bulk".into(),
            Part::Sweep(0) => "sweep.max".into(),
            Part::Sweep(pps) => format!("sweep.{pps}"),
        }
    }

    const fn table(self) -> &'static str {
        match self {
            Part::Rr => "Request and reply, UDP, 18 bytes, one question at a time",
            Part::Bulk => "A flood of datagrams of MTU size, no offloads",
            Part::Sweep(_) => measures::SWEEP,
        }
    }

    fn load(self, placement: Placement, slice: Duration) -> Load {
        let may_spin = placement != Placement::SameCpu;
        let flow = |pps, bytes, time| Load::Send(Flow { pps, bytes, time, may_spin });
        match self {
            Part::Rr => Load::Ask { time: slice },
            Part::Bulk => flow(FLOOD_PPS, MTU_PAYLOAD, slice),
            Part::Sweep(0) => flow(0, SWEEP_BYTES, slice),
            Part::Sweep(pps) => {
                let a_few = Duration::from_secs(3) / pps.min(3_000) as u32;
                flow(pps, SWEEP_BYTES, slice.max(a_few))
            }
        }
    }
}

/// Measures.
///
/// # Errors
/// The options select nothing that can be measured here.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    let rigs = open(options, isolated);
    let mut scenarios = Vec::new();
    let wants = |chapter| options.stack.has_fulmar() && options.wants(chapter);
    if wants(Chapter::Idle) {
        scenarios.push(idle::scenario(options.connections, options.idle_time()));
    }
    scenarios.extend(of_places(options, &rigs));
    if wants(Chapter::Transmit) {
        scenarios.extend(transmit::scenarios());
    }
    if scenarios.is_empty() {
        return Err(io::Error::other("the options select nothing that can be measured here"));
    }
    let ratios = measures::ratios(&scenarios);
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let plan = Plan { scenarios, ratios, budget, max_runs, pace: Pace::Transfers };
    Ok(Report::of(&measures::SHAPE, harness::run(plan)))
}

/// Opens the selected devices; reports those that this machine lacks on standard error.
fn open(options: &Options, isolated: io::Result<()>) -> Vec<Rig> {
    if ![Chapter::Rr, Chapter::Bulk, Chapter::Sweep].into_iter().any(|c| options.wants(c)) {
        return Vec::new();
    }
    let has_kernel = isolated.inspect_err(|e| eprintln!("cannot measure the kernel here: {e}"));
    let asked = or(&options.device, &[Device::Tap, Device::Shm, Device::Sim]);
    let mut devices = Vec::new();
    if options.stack.has_fulmar() {
        let needs_kernel = |d: &Device| matches!(d, Device::Tap | Device::Packet);
        devices.extend(asked.iter().filter(|d| has_kernel.is_ok() || !needs_kernel(d)));
    }
    if options.stack.has_kernel() && has_kernel.is_ok() {
        devices.extend([Device::Veth, Device::Loopback]);
    }
    let mut rigs = Vec::new();
    for device in devices {
        for placement in or(&options.placement, &[Placement::SameCpu, Placement::TwoCpus]) {
            // Its hardware needs a CPU of its own.
            if device == Device::Sim && placement == Placement::SameCpu {
                continue;
            }
            match Rig::open(device, placement, options.pcap.as_ref()) {
                Ok(rig) => rigs.push(rig),
                Err(e) => eprintln!("not measured: {}, {}: {e}", device.name(), placement.title()),
            }
        }
    }
    rigs
}

/// Every part at every rig; compared rigs run one after the other.
fn of_places<'a>(options: &Options, rigs: &'a [Rig]) -> Vec<Scenario<'a>> {
    // One host's flood has nothing to hold where sender and receiver take turns on a CPU.
    let is_apart = |p: &Rig| p.placement != Placement::SameCpu && p.device.takes_floods();
    let mut all = Vec::new();
    let mut add = |part, is_wanted: &dyn Fn(&Rig) -> bool| {
        for rig in rigs.iter().filter(|p| is_wanted(p)) {
            all.extend(rig.device.modes().iter().map(|&mode| scenario(part, rig, mode)));
        }
    };
    add(Part::Rr, &|p| options.wants(Chapter::Rr) && p.device.takes_questions());
    add(Part::Bulk, &|p| options.wants(Chapter::Bulk) && is_apart(p));
    for pps in options.rates() {
        add(Part::Sweep(pps), &|p| options.wants(Chapter::Sweep) && is_apart(p));
    }
    all
}

fn scenario(part: Part, rig: &Rig, mode: Mode) -> Scenario<'_> {
    let (device, placement) = (rig.device, rig.placement);
    let name = format!("{}.{}.{}.{}", part.name(), device.name(), mode.name(), placement.name());
    let run = move |slice: Duration| {
        let sample = rig.run(mode, part.load(placement, slice.max(SLICE)))?;
        Ok(measures::sample(&sample))
    };
    let scenario = Scenario::new(name, format!("{}, {}", device.name(), mode.name()), run)
        .in_table(part.table())
        .label("device", device.name())
        .label("mode", mode.name())
        .label("placement", placement.name());
    match part {
        Part::Sweep(pps @ ..=SLOW_PPS) if pps > 0 => scenario.label("pps", pps).at_most(1),
        Part::Sweep(0) => scenario.label("load", "at full speed"),
        Part::Sweep(pps) => scenario.label("pps", pps),
        Part::Rr | Part::Bulk => scenario,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options::parsed;

    #[test]
    fn all_parts_are_measured_by_default() {
        let options = |line: &str| parsed::<Options>(line).expect(line);
        assert_eq!(options("").rates(), RATES);
        assert_eq!(options("--quick --rates 7,0").rates(), [7, 0]);
        let part = options("--part rr,idle");
        assert!(part.wants(Chapter::Idle) && !part.wants(Chapter::Bulk));
        for refused in ["--device link", "--connections 0", "--rates 99999999999", "--runs 0"] {
            assert!(parsed::<Options>(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn the_idle_stack_is_looked_at_for_no_longer_than_there_is_time() {
        let seconds = |line: &str| parsed::<Options>(line).expect(line).idle_time().as_secs();
        assert_eq!(["", "--quick", "--seconds 5", "--seconds 0.1"].map(seconds), [10, 2, 5, 2]);
    }

    #[test]
    fn without_namespaces_what_needs_none_is_measured() {
        let line = "--part transmit,idle --connections 3 --seconds 0.1 --runs 1";
        let refused = Err(io::Error::other("none here"));
        let found = run(&parsed(line).expect("sound"), refused).expect("it runs");
        assert!(found.figure("wake.idle.cpu_pct").is_some());
        assert!(found.figure("wake.transmit.sim.lazy_vs_at_once").is_some());
        assert!(found.value("tx.sim.lazy.1000", "frames_per_reap").is_some());
    }
}
