//! `bench wake`: what waiting costs, and what it adds.
//!
//! Four things are measured, each in three modes of waiting ([`Mode`]) and beside the kernel, in
//! rounds, so that what is compared runs moments apart:
//!
//! - **request and reply** over each device: latency and CPU per transaction of both ends;
//! - **a flood** of datagrams of MTU size: frames per wake-up, and what holding adds to the latency;
//! - **a sweep** of loads from one packet per second to as many as go; on a simulated card
//!   also with its coalescing registers set by hand;
//! - **completions** of sent frames on the simulated device, taken back one by one, lazily, and as
//!   the policy says; and last an **idle** stack with many connections.
//!
//! A wake-up is the end of a sleep of the thread that waits (of the kernel's: a voluntary context
//! switch). Latency is the sender's clock to the receiver's, or there and back. What holding adds is
//! looked for in stretches of 10 ms, since of all latencies together a hundredth may be the host's
//! (`wake/tally.rs`).

mod bare;
mod curves;
mod figures;
mod idle;
pub mod place;
mod program;
mod report;
mod sim;
mod tally;
mod transmit;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fulmar::ModerationConfig;
use indicatif::{ProgressBar, ProgressStyle};

use crate::bench::{Outcome, Stop};
use crate::cpu::Placement;
pub use idle::Idle;
use place::{Load, Place, Sample};
use program::Flow;
pub use sim::REGISTERS;
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

/// What carries the datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// TAP, a kernel peer.
    Tap,
    /// AF_PACKET on veth, a kernel peer.
    Packet,
    /// TAP, a kernel peer, and a program without a stack in between: the floor.
    Bare,
    /// Shared memory, another process with fulmar.
    Shm,
    /// A simulated card with hardware on a thread of its own, and a modelled sender behind it.
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
            Device::Bare => "bare_tap",
            Device::Shm => "shm",
            Device::Sim => "sim",
            Device::Veth => "veth",
            Device::Loopback => "loopback",
        }
    }

    /// Whether it carries floods too.
    const fn takes_floods(self) -> bool {
        !matches!(self, Device::Bare | Device::Loopback)
    }

    /// Whether somebody at the other end asks questions.
    const fn takes_questions(self) -> bool {
        !matches!(self, Device::Sim)
    }

    fn modes(self) -> &'static [Mode] {
        match self {
            Device::Veth | Device::Loopback => &[Mode::Kernel],
            Device::Bare => &[Mode::Unmoderated, Mode::Polling],
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

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which parts.
    pub chapters: Vec<Chapter>,
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
    let wants = |chapter| options.fulmar && options.chapters.contains(&chapter);
    let mut completions = if wants(Chapter::Transmit) { transmit::ways() } else { Vec::new() };
    if cells.is_empty() && completions.is_empty() && !wants(Chapter::Idle) {
        return Err(io::Error::other("nothing of what was asked for can be measured here"));
    }
    let bar = progress(options);
    bar.set_message("idle connections");
    let (time, connections) = options.idle;
    let idle = wants(Chapter::Idle).then(|| idle::measure(connections, time)).transpose()?;
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
    let figures = figures::figures(&cells, &completions, idle.as_ref(), rounds);
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
    if !options.chapters.iter().any(|c| matches!(c, Chapter::Rr | Chapter::Bulk | Chapter::Sweep)) {
        return Vec::new();
    }
    let has_kernel = isolated.map_err(|e| eprintln!("the kernel cannot be measured here: {e}"));
    let mut devices = Vec::new();
    if options.fulmar {
        let needs_kernel = |d: &Device| matches!(d, Device::Tap | Device::Packet);
        devices.extend(options.devices.iter().filter(|d| has_kernel.is_ok() || !needs_kernel(d)));
    }
    if options.kernel && has_kernel.is_ok() {
        devices.extend([Device::Veth, Device::Loopback]);
        // The floor belongs to what it is the floor of.
        devices.extend(options.devices.contains(&Device::Tap).then_some(Device::Bare));
    }
    let mut places = Vec::new();
    for device in devices {
        for &placement in &options.placements {
            // Its hardware needs a CPU of its own.
            if device == Device::Sim && placement == Placement::SameCpu {
                continue;
            }
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
    let wants = |chapter| options.chapters.contains(&chapter);
    add(Part::Rr, &|p| wants(Chapter::Rr) && p.device.takes_questions());
    // One host's flood has nothing to hold where sender and receiver take turns on a CPU.
    let is_apart = |p: &Place| p.placement != Placement::SameCpu && p.device.takes_floods();
    add(Part::Bulk, &|p| wants(Chapter::Bulk) && is_apart(p));
    for &pps in &options.rates {
        add(Part::Sweep(pps), &|p| wants(Chapter::Sweep) && is_apart(p));
    }
    cells
}
