//! `bench burst`: what a frame costs against the number of frames that cross together.
//!
//! Every device of ours and the kernel's own sockets, sending and receiving, small frames and full
//! ones, bursts of 1 to 256; and the old way: one frame per crossing, a header and a cluster from the
//! general allocator for each. Every way runs once per round for a short slice, the bursts of one
//! device moments apart, so that a figure is the median of pairs. Only one end is timed ([`rig`]).

mod account;
pub mod buffers;
mod flow;
mod found;
pub mod joining;
pub mod rig;
#[allow(unsafe_code)]
pub(crate) mod sys;

use std::io;
use std::time::{Duration, Instant};

pub use account::accounts;
pub use found::Found;
use rig::{Cost, DeviceRig, KernelRig, Load, Rig};

use crate::bench::{Figure, Ratio, Stop};
use crate::cpu::{self, Placement};
use crate::on_pinned_thread;
use crate::stats::Estimate;
use crate::stream::Over;

/// Frames of a burst, in the order of the columns.
pub const BURSTS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// A small frame, and a full one of MTU 1500.
pub const FRAME_BYTES: [usize; 2] = [64, 1514];
/// Frames of one run of a way.
const PACKETS: usize = 2 * rig::SECTION;
/// Rounds that an interval needs, whatever the budget says.
const LEAST_ROUNDS: usize = 3;

/// What bursts go through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// A TAP to the kernel, crossing as is cheapest.
    Tap,
    /// AF_PACKET on veth.
    Packet,
    /// Two simulated NICs on one wire.
    Sim,
    /// Shared memory, both ends in this process.
    Shm,
    /// Two stacks in one process.
    Link,
}

impl Device {
    /// Every device, in the order of the table.
    pub const ALL: [Device; 5] =
        [Device::Tap, Device::Packet, Device::Sim, Device::Shm, Device::Link];

    /// The name in ways and options.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Tap => "tap",
            Device::Packet => "packet",
            Device::Sim => "sim",
            Device::Shm => "shm",
            Device::Link => "link",
        }
    }

    const fn needs_kernel(self) -> bool {
        matches!(self, Device::Tap | Device::Packet)
    }
}

/// What to measure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Over which devices.
    pub devices: Vec<Device>,
    /// Frames of which lengths, Ethernet header included.
    pub frame_bytes: Vec<usize>,
    /// Frames per burst.
    pub bursts: Vec<usize>,
    /// Measure fulmar's devices.
    pub fulmar: bool,
    /// Measure the kernel's sockets.
    pub kernel: bool,
    /// Time for the rounds; opening the devices comes on top.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
}

/// Which way frames go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Out.
    Send,
    /// In.
    Receive,
}

impl Direction {
    const BOTH: [Direction; 2] = [Direction::Send, Direction::Receive];

    /// The name in ways.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Send => "send",
            Direction::Receive => "receive",
        }
    }
}

/// One way: a point of one curve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Way {
    /// The device's name, `veth` for the kernel's sockets.
    pub device: &'static str,
    /// How frames cross: `ours`, `writev`, `flow`, `old`, `kernel`.
    pub method: &'static str,
    /// Which way they go.
    pub direction: Direction,
    /// Bytes of a frame.
    pub frame_bytes: usize,
    /// Frames of a burst.
    pub burst: usize,
}

impl Way {
    /// A stable dotted name: `tap.ours.send.64b.x8`.
    pub fn name(&self) -> String {
        let Way { device, method, direction, frame_bytes, burst } = self;
        format!("{device}.{method}.{}.{frame_bytes}b.x{burst}", direction.name())
    }

    /// The name of the curve that it is a point of.
    fn curve(&self) -> (&'static str, &'static str, Direction, usize) {
        (self.device, self.method, self.direction, self.frame_bytes)
    }
}

/// A way with what was found.
pub struct Lane {
    /// Which.
    pub way: Way,
    /// Nanoseconds per frame, one value per round.
    values: Vec<f64>,
    frames: u64,
    crossings: u64,
    slow_allocs: u64,
}

impl Lane {
    /// Nanoseconds per frame.
    pub fn ns(&self) -> Option<Estimate> {
        Estimate::of(&self.values)
    }

    /// Frames that cross together, as counted; the old way's buffers do not cross.
    pub fn frames_per_crossing(&self) -> Option<f64> {
        (self.crossings > 0).then(|| self.frames as f64 / self.crossings as f64)
    }
}

/// A rig, by whose names its ways go.
struct Opened {
    device: &'static str,
    method: &'static str,
    has_old: bool,
    rig: Box<dyn Rig>,
}

/// Measures, on one CPU; `isolated` says whether this process has namespaces of its own. What cannot
/// be opened here is said on standard error and left out.
///
/// # Errors
/// Nothing of what was asked for can be measured here.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Found> {
    let has_kernel = match isolated {
        Ok(()) => true,
        Err(e) => {
            eprintln!("what needs the kernel cannot be measured here: {e}");
            false
        }
    };
    let (near_cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
    let overs = [(Device::Tap, Over::Tap), (Device::Packet, Over::Packet)];
    let overs: Vec<Over> = overs
        .into_iter()
        .filter(|(d, _)| has_kernel && options.fulmar && options.devices.contains(d))
        .map(|(_, over)| over)
        .collect();
    let mut joining = joining::Joining::open(&overs);
    on_pinned_thread(near_cpu, || {
        let mut rigs = open(options, has_kernel);
        if rigs.is_empty() {
            return Err(io::Error::other("nothing of what was asked for can be measured here"));
        }
        Ok(rounds(options, &mut rigs, &mut joining))
    })
    .map(|found| Found { joining: Some(joining), ..found })
}

fn open(options: &Options, has_kernel: bool) -> Vec<Opened> {
    let mut rigs = Vec::new();
    let mut add = |device, method, has_old, rig: io::Result<Box<dyn Rig>>| match rig {
        Ok(rig) => rigs.push(Opened { device, method, has_old, rig }),
        Err(e) => eprintln!("no {device} ({method}): {e}"),
    };
    fn boxed<R: Rig + 'static>(rig: io::Result<R>) -> io::Result<Box<dyn Rig>> {
        rig.map(|r| Box::new(r) as Box<dyn Rig>)
    }
    let wanted =
        options.devices.iter().filter(|d| options.fulmar && (has_kernel || !d.needs_kernel()));
    for device in wanted {
        let name = device.name();
        match device {
            Device::Tap => {
                add(name, "ours", true, boxed(DeviceRig::tap(false)));
                add(name, "writev", false, boxed(DeviceRig::tap(true)));
                add(name, "flow", false, boxed(DeviceRig::tap_flow()));
            }
            Device::Packet => {
                add(name, "ours", true, boxed(DeviceRig::packet()));
                add(name, "flow", false, boxed(DeviceRig::packet_flow()));
            }
            Device::Sim => add(name, "ours", true, boxed(DeviceRig::sim())),
            Device::Shm => add(name, "ours", true, boxed(DeviceRig::shm())),
            Device::Link => add(name, "ours", true, boxed(DeviceRig::link())),
        }
    }
    if options.kernel && has_kernel {
        add("veth", "kernel", false, boxed(KernelRig::new()));
    }
    rigs
}

/// Runs rounds until the time is over.
fn rounds(options: &Options, rigs: &mut [Opened], joining: &mut joining::Joining) -> Found {
    let began = Instant::now();
    let (mut lanes, mut errors) = (Vec::new(), Vec::new());
    let mut buffers = buffers::Buffers::default();
    let mut done = 0;
    while done < options.runs && (done < LEAST_ROUNDS || began.elapsed() < options.budget) {
        for opened in rigs.iter_mut() {
            round(options, opened, &mut lanes, &mut errors);
        }
        if options.fulmar {
            buffers.round();
            joining.round();
        }
        done += 1;
    }
    let stop = if done == options.runs { Stop::Runs } else { Stop::Budget };
    let mut figures = figures(&lanes);
    figures.extend(buffers.figures());
    figures.extend(joining.figures());
    let paths = rigs.iter().map(|r| (r.device, r.method, r.rig.path())).collect();
    Found { lanes, buffers, joining: None, figures, paths, errors, stop, elapsed: began.elapsed() }
}

/// Every way of one rig, once.
fn round(
    options: &Options,
    opened: &mut Opened,
    lanes: &mut Vec<Lane>,
    errors: &mut Vec<(String, String)>,
) {
    for &frame_bytes in &options.frame_bytes {
        for direction in Direction::BOTH {
            let way = |method, burst| Way {
                device: opened.device,
                method,
                direction,
                frame_bytes,
                burst,
            };
            let old = opened.has_old.then(|| (way("old", 1), true));
            let ours = options.bursts.iter().map(|&burst| (way(opened.method, burst), false));
            let ways: Vec<(Way, bool)> = old.into_iter().chain(ours).collect();
            for (way, is_old) in ways {
                if errors.iter().any(|(name, _)| *name == way.name()) {
                    continue;
                }
                let load = Load { burst: way.burst, bytes: frame_bytes, packets: PACKETS, is_old };
                let cost = match direction {
                    Direction::Send => opened.rig.send(load),
                    Direction::Receive => opened.rig.receive(load),
                };
                match cost {
                    Ok(cost) => note(lanes, way, cost),
                    Err(e) => errors.push((way.name(), e.to_string())),
                }
            }
        }
    }
}

fn note(lanes: &mut Vec<Lane>, way: Way, cost: Cost) {
    let lane = match lanes.iter_mut().position(|l| l.way == way) {
        Some(at) => &mut lanes[at],
        None => {
            lanes.push(Lane { way, values: Vec::new(), frames: 0, crossings: 0, slow_allocs: 0 });
            let last = lanes.len() - 1;
            &mut lanes[last]
        }
    };
    lane.values.push(cost.ns_per_packet());
    lane.frames += cost.packets as u64;
    lane.crossings += cost.crossings;
    // The first round warms up.
    if lane.values.len() > 1 {
        lane.slow_allocs += cost.slow_allocs;
    }
}

/// One way over another, round by round.
fn ratio(lanes: &[Lane], above: &str, below: &str) -> Option<Estimate> {
    let values = |name: &str| lanes.iter().find(|l| l.way.name() == name).map(|l| &l.values);
    let pairs = values(above)?.iter().zip(values(below)?);
    Estimate::of(&pairs.map(|(a, b)| a / b).collect::<Vec<_>>())
}

/// What a figure is judged by.
struct Goal {
    reach_and_aim: Option<(f64, f64)>,
    more_is_better: bool,
}

fn figure(name: &str, sentence: &str, estimate: Option<Estimate>, goal: Goal) -> Figure {
    let ratio = Ratio {
        name: name.into(),
        sentence: sentence.into(),
        way: String::new(),
        over: None,
        measure: |_| f64::NAN,
        reach_and_aim: goal.reach_and_aim,
        more_is_better: goal.more_is_better,
        published: None,
    };
    Figure { ratio, estimate }
}

const LESS: Goal = Goal { reach_and_aim: None, more_is_better: false };
const MORE: Goal = Goal { reach_and_aim: None, more_is_better: true };

/// The figures asked for, and the same of the other devices; those that were not measured are left
/// out.
fn figures(lanes: &[Lane]) -> Vec<Figure> {
    let mut all = flow_figures(lanes);
    all.extend(frame_figures(lanes));
    all.extend(old_figures(lanes));
    all.extend(kernel_figures(lanes));
    all.push(slow_path(lanes));
    all.retain(|f| f.estimate.is_some());
    all
}

/// Datagrams of one flow, which may cross as one frame.
fn flow_figures(lanes: &[Lane]) -> Vec<Figure> {
    let mut all = vec![
        figure(
            "burst.tap.64_vs_1",
            "ns per 64-byte datagram of one flow over TAP, read by a kernel socket, bursts of 64 ÷ of 1",
            ratio(lanes, "tap.flow.send.64b.x64", "tap.flow.send.64b.x1"),
            Goal { reach_and_aim: Some((0.68, 0.6)), more_is_better: false },
        ),
        figure(
            "burst.packet.flow.64_vs_1",
            "the same, packet",
            ratio(lanes, "packet.flow.send.64b.x64", "packet.flow.send.64b.x1"),
            LESS,
        ),
    ];
    for device in ["tap", "packet"] {
        let point = |burst| format!("{device}.flow.receive.64b.x{burst}");
        all.push(figure(
            &format!("burst.{device}.flow.receive.64_vs_1"),
            &format!("ns per 64-byte datagram received, 64 joined by the sender ÷ 1, {device}"),
            ratio(lanes, &point(64), &point(1)),
            LESS,
        ));
    }
    all
}

/// Frames of any kind.
fn frame_figures(lanes: &[Lane]) -> Vec<Figure> {
    let ours = Device::ALL.map(|d| (d.name(), "ours"));
    let devices: Vec<_> = ours.into_iter().chain([("veth", "kernel")]).collect();
    let mut all = Vec::new();
    for &(device, method) in &devices {
        let point = |burst| format!("{device}.{method}.send.64b.x{burst}");
        let name = if device == "tap" { "tap.any" } else { device };
        all.push(figure(
            &format!("burst.{name}.64_vs_1"),
            &format!("ns per 64-byte frame of any kind, bursts of 64 ÷ bursts of 1, {device}"),
            ratio(lanes, &point(64), &point(1)),
            LESS,
        ));
    }
    for &(device, method) in &devices {
        let point = |burst| format!("{device}.{method}.receive.64b.x{burst}");
        all.push(figure(
            &format!("burst.{device}.receive.64_vs_1"),
            &format!("ns per 64-byte frame received, bursts of 64 ÷ bursts of 1, {device}"),
            ratio(lanes, &point(64), &point(1)),
            LESS,
        ));
    }
    all
}

/// One frame per crossing and memory from the general allocator, beside bursts.
fn old_figures(lanes: &[Lane]) -> Vec<Figure> {
    let mut all = Vec::new();
    for device in Device::ALL.map(Device::name) {
        for direction in Direction::BOTH.map(Direction::name) {
            all.push(figure(
                &format!("burst.{device}.{direction}.old_vs_64"),
                &format!("ns per 64-byte frame, the old way ÷ bursts of 64, {device}, {direction}"),
                ratio(
                    lanes,
                    &format!("{device}.old.{direction}.64b.x1"),
                    &format!("{device}.ours.{direction}.64b.x64"),
                ),
                MORE,
            ));
        }
    }
    all
}

fn kernel_figures(lanes: &[Lane]) -> Vec<Figure> {
    vec![
        figure(
            "burst.kernel_vs_tap.64",
            "ns per 64-byte frame sent, the kernel's sendmmsg of 64 on veth ÷ bursts of 64 over TAP",
            ratio(lanes, "veth.kernel.send.64b.x64", "tap.ours.send.64b.x64"),
            MORE,
        ),
        figure(
            "burst.kernel_vs_tap.flow.64",
            "the same with datagrams of one flow over TAP that a kernel socket reads",
            ratio(lanes, "veth.kernel.send.64b.x64", "tap.flow.send.64b.x64"),
            MORE,
        ),
    ]
}

/// In every measured way together: not one buffer may come from the general lists.
fn slow_path(lanes: &[Lane]) -> Figure {
    let ours: Vec<&Lane> = lanes.iter().filter(|l| l.values.len() > 1).collect();
    let slow: u64 = ours.iter().map(|l| l.slow_allocs).sum();
    let estimate = if ours.is_empty() { None } else { Estimate::of(&[slow as f64]) };
    figure(
        "burst.slow_path_allocations",
        "buffers that the general lists or a new slab had to give after the first round, all ways",
        estimate,
        Goal { reach_and_aim: Some((0.0, 0.0)), more_is_better: false },
    )
}

#[cfg(test)]
mod tests;
