//! `bench wake`: what waiting costs, and what it adds.
//!
//! Four things are measured, each in three modes of waiting ([`Mode`]) and beside the kernel, in
//! rounds, so that what is compared runs moments apart:
//!
//! - **request and reply** over each device: latency and CPU per transaction of both ends;
//! - **a flood** of datagrams of MTU size: frames per wake-up, and what holding adds to the latency;
//! - **a sweep** of loads from one packet per second to as many as go;
//! - **completions** of sent frames on the simulated device, taken back one by one, lazily, and as
//!   the policy says; and last an **idle** stack with many connections.
//!
//! A wake-up is the end of a sleep of the thread that waits (of the kernel's: a voluntary context
//! switch). Latency is the sender's clock to the receiver's, or there and back.

mod idle;
pub mod place;
mod program;
mod report;
mod transmit;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fulmar::ModerationConfig;
use indicatif::{ProgressBar, ProgressStyle};

use crate::bench::{Figure, Outcome, Ratio, Sample as BenchSample, Stop};
use crate::cpu::Placement;
use crate::stats::Estimate;
pub use idle::Idle;
use place::{Load, Place, Sample};
use program::Flow;
pub use transmit::Completions;

/// How fulmar's threads wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// As the policy says.
    Moderated,
    /// Asleep whenever there is nothing, woken by every frame.
    Unmoderated,
    /// Never asleep.
    Polling,
    /// The kernel's own way.
    Kernel,
}

impl Mode {
    /// fulmar's.
    pub const OURS: [Mode; 3] = [Mode::Moderated, Mode::Unmoderated, Mode::Polling];

    /// The name in rows and options.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Moderated => "moderated",
            Mode::Unmoderated => "unmoderated",
            Mode::Polling => "polling",
            Mode::Kernel => "kernel",
        }
    }

    fn named(name: &str) -> Mode {
        Mode::OURS.into_iter().find(|m| m.name() == name).unwrap_or(Mode::Moderated)
    }

    const fn config(self) -> ModerationConfig {
        match self {
            Mode::Moderated | Mode::Kernel => ModerationConfig::ADAPTIVE,
            Mode::Unmoderated => ModerationConfig::NONE,
            Mode::Polling => ModerationConfig::POLLING,
        }
    }
}

/// What carries the datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// TAP, a kernel peer.
    Tap,
    /// AF_PACKET on veth, a kernel peer.
    Packet,
    /// Shared memory, another process with fulmar.
    Shm,
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
            Device::Veth => "veth",
            Device::Loopback => "loopback",
        }
    }

    const fn is_kernel(self) -> bool {
        matches!(self, Device::Veth | Device::Loopback)
    }

    fn modes(self) -> &'static [Mode] {
        if self.is_kernel() { &[Mode::Kernel] } else { &Mode::OURS }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// fulmar's devices.
    pub devices: Vec<Device>,
    /// Where the ends run.
    pub placements: Vec<Placement>,
    /// Datagrams per second of the sweep; 0: as many as go.
    pub rates: Vec<u64>,
    /// Measure fulmar.
    pub fulmar: bool,
    /// Measure the kernel.
    pub kernel: bool,
    /// A run of one cell.
    pub slice: Duration,
    /// How long an idle stack is watched, and how many connections it has.
    pub idle: (Duration, usize),
    /// Time for everything.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
    /// Where fulmar's frames are written.
    pub pcap: Option<PathBuf>,
}

/// Datagrams per second of the flood: more than half of what one CPU of these machines sends.
const FLOOD_PPS: u64 = 300_000;
/// A UDP payload that fills an MTU of 1500.
const MTU_PAYLOAD: usize = 1472;
/// Datagrams of the sweep.
const SWEEP_BYTES: usize = 64;
/// Rates so low that one run of them takes seconds: once is enough.
const SLOW_PPS: u64 = 10;

/// What part of the bench a cell belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// Request and reply.
    Rr,
    /// The flood of MTU-size datagrams.
    Bulk,
    /// The sweep, at so many datagrams per second.
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
}

/// One cell, and its runs.
pub struct Cell {
    /// Which part.
    pub part: Part,
    /// Over what.
    pub device: Device,
    /// Where.
    pub placement: Placement,
    /// How fulmar waits.
    pub mode: Mode,
    place: usize,
    /// One per round in which it ran.
    samples: Vec<(usize, Sample)>,
    error: Option<String>,
}

impl Cell {
    /// The name in JSON: `rr.tap.moderated.two_cpus`.
    pub fn name(&self) -> String {
        let (device, mode) = (self.device.name(), self.mode.name());
        format!("{}.{device}.{mode}.{}", self.part.name(), self.placement.name())
    }

    fn sample(&self, round: usize) -> Option<&Sample> {
        self.samples.iter().find(|(r, _)| *r == round).map(|(_, s)| s)
    }

    fn is_due(&self, round: usize) -> bool {
        let is_slow = matches!(self.part, Part::Sweep(1..=SLOW_PPS));
        self.error.is_none() && (round == 0 || !is_slow)
    }

    fn load(&self, slice: Duration) -> Load {
        let may_spin = self.placement != Placement::SameCpu;
        let flow = |pps, bytes, time| Load::Send(Flow { pps, bytes, time, may_spin });
        match self.part {
            Part::Rr => Load::Ask { time: slice },
            Part::Bulk => flow(FLOOD_PPS, MTU_PAYLOAD, slice),
            Part::Sweep(pps @ 1..) => {
                flow(pps, SWEEP_BYTES, slice.max(Duration::from_secs(3) / pps.min(3_000) as u32))
            }
            Part::Sweep(0) => flow(0, SWEEP_BYTES, slice),
        }
    }
}

/// What was found.
pub struct Found {
    /// Every cell.
    pub cells: Vec<Cell>,
    /// Completions of sent frames.
    pub completions: Vec<Completions>,
    /// The idle stack.
    pub idle: Option<Idle>,
    /// The figures asked for, as every bench reports them.
    pub outcome: Outcome,
}

/// Measures.
///
/// # Errors
/// Nothing of what was asked for can be measured here.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Found> {
    let start = Instant::now();
    let places = open(options, isolated);
    let mut cells = cells(options, &places);
    let mut completions = if options.fulmar { transmit::ways() } else { Vec::new() };
    if cells.is_empty() && completions.is_empty() {
        return Err(io::Error::other("nothing of what was asked for can be measured here"));
    }
    let bar = progress(options);
    bar.set_message("idle connections");
    let idle = options.fulmar.then(|| idle::measure(options.idle.1, options.idle.0)).transpose()?;
    let mut rounds = 0;
    while rounds < options.runs && (rounds == 0 || start.elapsed() < options.budget) {
        for cell in &mut cells {
            bar.set_position(start.elapsed().as_millis() as u64);
            if rounds > 0 && start.elapsed() >= options.budget {
                break;
            }
            bar.set_message(cell.name());
            run_cell(cell, &places, options, rounds);
        }
        for way in &mut completions {
            bar.set_message("completions of sent frames");
            way.run(options.slice)?;
        }
        rounds += 1;
    }
    bar.finish_and_clear();
    let stop = if rounds == options.runs { Stop::Runs } else { Stop::Budget };
    let figures = figures(&cells, &completions, idle.as_ref(), rounds);
    let outcome = Outcome { rows: Vec::new(), figures, stop, elapsed: start.elapsed() };
    Ok(Found { cells, completions, idle, outcome })
}

fn run_cell(cell: &mut Cell, places: &[Place], options: &Options, round: usize) {
    if !cell.is_due(round) {
        return;
    }
    let Some(place) = places.get(cell.place) else { return };
    match place.run(cell.mode, cell.load(options.slice)) {
        Ok(sample) => cell.samples.push((round, sample)),
        Err(e) => cell.error = Some(e.to_string()),
    }
}

fn progress(options: &Options) -> ProgressBar {
    // indicatif draws nothing when standard error is not a terminal.
    let bar = ProgressBar::new(options.budget.as_millis() as u64);
    let style = ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg:40!}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Opens what the options ask for and this machine has; what it has not is said on standard error.
fn open(options: &Options, isolated: io::Result<()>) -> Vec<Place> {
    let has_kernel = isolated.map_err(|e| eprintln!("the kernel cannot be measured here: {e}"));
    let mut devices = Vec::new();
    if options.fulmar {
        let needs_kernel = |d: &Device| matches!(d, Device::Tap | Device::Packet);
        devices.extend(options.devices.iter().filter(|d| has_kernel.is_ok() || !needs_kernel(d)));
    }
    if options.kernel && has_kernel.is_ok() {
        devices.extend([Device::Veth, Device::Loopback]);
    }
    let mut places = Vec::new();
    for device in devices {
        for &placement in &options.placements {
            match Place::open(device, placement, options.pcap.as_ref()) {
                Ok(place) => places.push(place),
                Err(e) => eprintln!("no {} {}: {e}", device.name(), placement.title()),
            }
        }
    }
    places
}

/// Every cell, what is compared side by side.
fn cells(options: &Options, places: &[Place]) -> Vec<Cell> {
    let mut cells = Vec::new();
    let mut add = |part, is_wanted: &dyn Fn(&Place) -> bool| {
        for (index, place) in places.iter().enumerate().filter(|(_, p)| is_wanted(p)) {
            let (device, placement) = (place.device, place.placement);
            cells.extend(device.modes().iter().map(|&mode| Cell {
                part,
                device,
                placement,
                mode,
                place: index,
                samples: Vec::new(),
                error: None,
            }));
        }
    };
    add(Part::Rr, &|_| true);
    // One host's flood has nothing to hold where sender and receiver take turns on a CPU.
    let is_apart = |p: &Place| p.placement != Placement::SameCpu;
    add(Part::Bulk, &|p| is_apart(p) && p.device != Device::Loopback);
    for &pps in &options.rates {
        add(Part::Sweep(pps), &|p| is_apart(p) && p.device != Device::Loopback);
    }
    cells
}

/// A value of one cell in one round.
fn value(
    cells: &[Cell],
    round: usize,
    name: &str,
    of: &dyn Fn(&Sample) -> Option<f64>,
) -> Option<f64> {
    cells.iter().find(|c| c.name() == name)?.sample(round).and_then(of)
}

fn median_ns(s: &Sample) -> Option<f64> {
    s.latency_ns().map(|l| l[0] as f64)
}

fn p99_ns(s: &Sample) -> Option<f64> {
    s.latency_ns().map(|l| l[1] as f64)
}

/// Frames per wake-up; every frame of a thread that never slept came at one.
fn frames_per_wakeup(s: &Sample) -> Option<f64> {
    Some(s.near.frames as f64 / s.near.wakeups.max(1) as f64)
}

/// One name, its sentence, its goals, and a value per round.
struct Asked<'a> {
    name: &'static str,
    sentence: String,
    goals: Option<(f64, f64)>,
    more_is_better: bool,
    published: Option<f64>,
    of: Box<dyn Fn(usize) -> Option<f64> + 'a>,
}

impl Asked<'_> {
    fn figure(&self, rounds: usize) -> Option<Figure> {
        let values: Vec<f64> = (0..rounds).filter_map(&self.of).collect();
        let estimate = Some(Estimate::of(&values)?);
        let ratio = Ratio {
            name: self.name.to_owned(),
            sentence: self.sentence.clone(),
            way: String::new(),
            over: None,
            measure: |_: &BenchSample| f64::NAN,
            reach_and_aim: self.goals,
            more_is_better: self.more_is_better,
            published: self.published,
        };
        Some(Figure { ratio, estimate })
    }
}

/// What holding adds to 99 % of the latencies of the flood, in µs.
fn added_p99_us(cells: &[Cell], round: usize) -> Option<f64> {
    let of = |mode: &str| value(cells, round, &format!("bulk.tap.{mode}.two_cpus"), &p99_ns);
    Some((of("moderated")? - of("unmoderated")?).max(0.0) / 1000.0)
}

fn figures(
    cells: &[Cell],
    completions: &[Completions],
    idle: Option<&Idle>,
    rounds: usize,
) -> Vec<Figure> {
    let over = |above: String, below: String| {
        Box::new(move |round| {
            let of = |name: &str| value(cells, round, name, &median_ns);
            Some(of(&above)? / of(&below)?)
        })
    };
    let rr = |device: &str, mode: &str, at: &str| format!("rr.{device}.{mode}.{at}");
    let vs_kernel = |name, ours: &str, theirs: &str, at: &str, goals| Asked {
        name,
        sentence: format!("UDP request-reply median, fulmar over {ours} ÷ kernel over {theirs}"),
        goals: Some(goals),
        more_is_better: false,
        published: None,
        of: over(rr(ours, "moderated", at), rr(theirs, "kernel", at)),
    };
    let mut asked = vec![
        bulk(cells),
        Asked {
            name: "wake.bulk.added_p99_us",
            sentence: "what moderation adds to 99 % of the latencies of that flood, µs".into(),
            goals: Some((100.0, 50.0)),
            more_is_better: false,
            published: None,
            of: Box::new(|round| added_p99_us(cells, round)),
        },
        Asked {
            name: "wake.rr.moderated_vs_unmoderated",
            sentence: "request-reply median over TAP, the worse of both placements".into(),
            goals: Some((1.05, 1.0)),
            more_is_better: false,
            published: None,
            of: Box::new(move |round| {
                let at = ["same_cpu", "two_cpus"].into_iter();
                let ratio = |at: &str| {
                    let of = |mode| value(cells, round, &rr("tap", mode, at), &median_ns);
                    Some(of("moderated")? / of("unmoderated")?)
                };
                at.filter_map(ratio).reduce(f64::max)
            }),
        },
        vs_kernel("wake.rr.tap.two_cpus.vs_kernel", "tap", "veth", "two_cpus", (0.95, 0.8)),
        vs_kernel("wake.rr.tap.same_cpu.vs_kernel", "tap", "veth", "same_cpu", (0.95, 0.85)),
        vs_kernel("wake.rr.shm.two_cpus.vs_kernel", "shm", "loopback", "two_cpus", (0.3, 0.1)),
    ];
    asked.extend(transmit::asked(completions));
    if let Some(idle) = idle {
        asked.push(Asked {
            name: "wake.idle.cpu_pct",
            sentence: format!("CPU of two idle stacks with {} connections, %", idle.connections),
            goals: Some((0.1, 0.0)),
            more_is_better: false,
            published: None,
            of: Box::new(|round| (round == 0).then_some(idle.cpu_pct)),
        });
    }
    asked.iter().filter_map(|a| a.figure(rounds)).collect()
}

fn bulk(cells: &[Cell]) -> Asked<'_> {
    Asked {
        name: "wake.bulk.frames_per_wakeup",
        sentence: format!(
            "device frames of MTU size per wake-up over TAP, {FLOOD_PPS} per second; 0 where \
             moderation adds more than 100 µs to 99 % of the latencies"
        ),
        goals: Some((16.0, 64.0)),
        more_is_better: true,
        published: Some(3.0),
        of: Box::new(|round| {
            let name = "bulk.tap.moderated.two_cpus";
            let frames = value(cells, round, name, &frames_per_wakeup)?;
            Some(if added_p99_us(cells, round)? <= 100.0 { frames } else { 0.0 })
        }),
    }
}
