//! `bench burst`: what a frame costs against the number of frames that cross together.
//!
//! Every device of ours and the kernel's own sockets, sending and receiving, small frames and full
//! ones, bursts of 1 to 256; and the old way: one frame per crossing, a header and a cluster from the
//! general allocator for each. Only one end is timed ([`rig`]). Beside them what a buffer costs by itself
//! (`buffers.rs`), and what joining received segments in software is worth where packets come one by one.

mod buffers;
mod flow;
pub mod rig;
#[allow(unsafe_code)]
pub(crate) mod sys;

use std::cell::RefCell;
use std::io;
use std::time::Duration;

use fulmar_cli::bounds::within;
use rig::{DeviceRig, KernelRig, Load, Rig};

use crate::account::Figures;
use crate::cpu::{self, Placement};
use crate::floor::Direction as Way;
use crate::harness::options::{Common, Stack, one_of, or};
use crate::harness::report::{Chart, Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Ratio, Sample, Scenario};
use crate::stream::{Over, Testbed};
use crate::transfer::THIS_END;
use crate::{Bulk, on_pinned_thread, udp};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick: what users wait for stays under 20 s, opening the devices included.
const QUICK: Duration = Duration::from_secs(12);
/// Frames of a burst, in the order of the columns.
const BURSTS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// A small frame, and a full one of MTU 1500.
const FRAME_BYTES: [usize; 2] = [64, 1514];
/// The longest frame that every device takes and no device cuts.
const MOST_BYTES: usize = 1514;
/// Ethernet, IPv4 and UDP headers of the kernel's datagrams, and one byte.
const LEAST_BYTES: usize = rig::HEADER_BYTES + 1;
/// Frames of one run of a way.
const PACKETS: usize = 2 * rig::SECTION;

/// What a frame costs against the number of frames that cross together
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench burst [OPTIONS]",
    after_help = "Ways: bursts (what the device does with a vector; over TAP io_uring where that is
cheaper), writev (TAP, one frame per call), old (one frame per crossing, header
and cluster from the general allocator), kernel (sendmmsg and recvmmsg on veth).
Takes 60 seconds. It makes its own namespaces and leaves nothing behind."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// Over which devices [default: all]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "tap|packet|sim|...")]
    pub device: Vec<Device>,
    /// Bytes of a frame, Ethernet header included [default: 64, 1514; with --quick 64]
    #[arg(long, value_parser = within(LEAST_BYTES, MOST_BYTES), value_delimiter = ',', value_name = "BYTES")]
    pub bytes: Vec<usize>,
    /// Frames per burst, 1 to 256 [default: 1, 2, 4 and so on to 256; with --quick 1, 8, 64, 256]
    #[arg(long, value_parser = within(1usize, 256), value_delimiter = ',', value_name = "FRAMES")]
    pub burst: Vec<usize>,
    /// Which stack is measured
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    pub stack: Stack,
}

fn device(text: &str) -> Result<Device, String> {
    one_of(Device::ALL, Device::name, text)
}

impl Options {
    fn devices(&self) -> Vec<Device> {
        or(&self.device, &Device::ALL)
    }

    fn frame_bytes(&self) -> Vec<usize> {
        or(&self.bytes, if self.common.quick { &FRAME_BYTES[..1] } else { &FRAME_BYTES })
    }

    fn bursts(&self) -> Vec<usize> {
        or(&self.burst, if self.common.quick { &[1, 8, 64, 256] } else { &BURSTS })
    }
}

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

    /// The name in scenarios and options.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Tap => "tap",
            Device::Packet => "packet",
            Device::Sim => "sim",
            Device::Shm => "shm",
            Device::Link => "link",
        }
    }

    /// As a real device with a stack on it.
    const fn over(self) -> Option<Over> {
        match self {
            Device::Tap => Some(Over::Tap),
            Device::Packet => Some(Over::Packet),
            Device::Sim | Device::Shm | Device::Link => None,
        }
    }
}

/// Which way frames go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    /// Sent.
    Send,
    /// Received.
    Receive,
}

impl Direction {
    const BOTH: [Direction; 2] = [Direction::Send, Direction::Receive];

    /// The name in ways.
    const fn name(self) -> &'static str {
        match self {
            Direction::Send => "send",
            Direction::Receive => "receive",
        }
    }
}

/// A rig, by whose names its ways go.
struct Opened {
    device: &'static str,
    /// How frames cross: `ours`, `writev`, `flow`, `kernel`.
    method: &'static str,
    rig: RefCell<Box<dyn Rig>>,
}

/// CPU nanoseconds per frame.
const NS: &str = "ns_per_frame";
const PER_CROSSING: &str = "frames_per_crossing";
/// Buffers that the general lists had to give, after the first round.
const SLOW: &str = "slow_path_allocations";
/// CPU of a receiver of a stream.
const PER_KB: &str = "this_end_cpu_ns_per_kb";

/// Measures, on one CPU; `isolated` says whether this process has namespaces of its own. What cannot
/// be opened here is said on standard error and left out.
///
/// # Errors
/// Nothing of what was asked for can be measured here.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    let has_kernel =
        isolated.inspect_err(|e| eprintln!("not measured: what needs the kernel: {e}")).is_ok();
    let testbeds = testbeds(options, has_kernel);
    let (near_cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
    on_pinned_thread(near_cpu, move || {
        let rigs = open(options, has_kernel);
        if rigs.is_empty() {
            return Err(io::Error::other("nothing that the options select can be measured here"));
        }
        let mut scenarios: Vec<Scenario<'_>> =
            rigs.iter().flat_map(|opened| of_rig(options, opened)).collect();
        let ours: Vec<String> = scenarios.iter().map(|s| s.name.clone()).collect();
        if options.stack.has_fulmar() {
            scenarios.push(buffers::scenario());
            scenarios.extend(testbeds.iter().map(joining));
        }
        let mut ratios = ratios(&ours);
        ratios.retain(|r| r.is_measured(&scenarios));
        let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
        let plan = Plan { scenarios, ratios, budget, max_runs, pace: Pace::Calls };
        let mut report = Report::of(&SHAPE, harness::run(plan));
        let paths = rigs.iter().map(|r| (r.device, r.method, r.rig.borrow().path()));
        let paths = paths.filter(|(_, _, path)| !path.is_empty());
        report
            .notes
            .extend(paths.map(|(device, method, path)| format!("{device}, {method}: {path}")));
        Ok(report)
    })
}

/// The accounts of a stack over those of the options' devices that datagrams are sent over: one in a call,
/// and 64. The rigs of this bench are devices without a stack.
///
/// # Errors
/// No CPU to run on; a device that fails.
pub fn accounts(options: &Options) -> io::Result<Vec<Figures>> {
    use udp::Method::{Connected, Many, Received, ReceivedMany};
    let of = |d: &Device| match d {
        Device::Sim => Some(udp::Device::Sim),
        Device::Tap => Some(udp::Device::Tap),
        Device::Packet | Device::Shm | Device::Link => None,
    };
    let devices = options.devices();
    let devices: Vec<_> =
        devices.iter().filter(|_| options.stack.has_fulmar()).filter_map(of).collect();
    let bytes = options.frame_bytes().into_iter().min().unwrap_or(FRAME_BYTES[0]);
    let payload = bytes.saturating_sub(rig::HEADER_BYTES).max(1);
    udp::of_calls(&devices, &[Connected, Many, Received, ReceivedMany], payload)
}

fn open(options: &Options, has_kernel: bool) -> Vec<Opened> {
    let mut rigs = Vec::new();
    let mut add = |device, method, rig: io::Result<DeviceRig>| match rig {
        Ok(rig) => rigs.push(Opened { device, method, rig: RefCell::new(Box::new(rig)) }),
        Err(e) => eprintln!("not measured: {device} ({method}): {e}"),
    };
    let devices = options
        .devices()
        .into_iter()
        .filter(|d| options.stack.has_fulmar() && (has_kernel || d.over().is_none()));
    for device in devices {
        let name = device.name();
        match device {
            Device::Tap => {
                add(name, "ours", DeviceRig::tap(false));
                add(name, "writev", DeviceRig::tap(true));
                add(name, "flow", DeviceRig::tap_flow());
            }
            Device::Packet => {
                add(name, "ours", DeviceRig::packet());
                add(name, "flow", DeviceRig::packet_flow());
            }
            Device::Sim => add(name, "ours", DeviceRig::sim()),
            Device::Shm => add(name, "ours", DeviceRig::shm()),
            Device::Link => add(name, "ours", DeviceRig::link()),
        }
    }
    if options.stack.has_kernel() && has_kernel {
        match KernelRig::new() {
            Ok(rig) => {
                let rig: RefCell<Box<dyn Rig>> = RefCell::new(Box::new(rig));
                rigs.push(Opened { device: "veth", method: "kernel", rig });
            }
            Err(e) => eprintln!("not measured: veth (kernel): {e}"),
        }
    }
    rigs
}

/// Every way of one rig, bursts beside each other.
fn of_rig<'a>(options: &Options, opened: &'a Opened) -> Vec<Scenario<'a>> {
    let mut all = Vec::new();
    for bytes in options.frame_bytes() {
        for direction in Direction::BOTH {
            let load = |burst, is_old| Load { burst, bytes, packets: PACKETS, is_old };
            if opened.method == "ours" {
                all.push(scenario(opened, direction, load(1, true)));
            }
            all.extend(
                options.bursts().into_iter().map(|b| scenario(opened, direction, load(b, false))),
            );
        }
    }
    all
}

fn scenario(opened: &Opened, direction: Direction, load: Load) -> Scenario<'_> {
    let method = if load.is_old { "old" } else { opened.method };
    let (device, burst, bytes) = (opened.device, load.burst, load.bytes);
    let mut is_warm = false;
    let run = move |_| {
        let mut rig = opened.rig.borrow_mut();
        let cost = match direction {
            Direction::Send => rig.send(load)?,
            Direction::Receive => rig.receive(load)?,
        };
        let mut sample = Sample::of(NS, cost.ns_per_packet());
        if cost.crossings > 0 {
            sample = sample.with(PER_CROSSING, cost.packets as f64 / cost.crossings as f64);
        }
        if std::mem::replace(&mut is_warm, true) {
            sample = sample.with(SLOW, cost.slow_allocs as f64);
        }
        Ok(sample)
    };
    let verb = direction.name();
    let name = format!("{device}.{method}.{verb}.{bytes}b.x{burst}");
    let table = match direction {
        Direction::Send => "Sending: ns of CPU per frame, by frames in a burst",
        Direction::Receive => "Receiving: ns of CPU per frame, by frames asked for at once",
    };
    Scenario::new(name, format!("{device}, {}, {verb}", title(method)), run)
        .in_table(table)
        .label("frame_bytes", bytes)
        .label("device", device)
        .label("method", method)
        .label("way", title(method))
        .label("burst", burst)
}

fn title(method: &str) -> &str {
    match method {
        "ours" => "bursts",
        "writev" => "writev, readv each",
        "flow" => "bursts of one flow",
        "old" => "old: one by one, general allocator",
        "kernel" => "kernel sendmmsg, recvmmsg",
        other => other,
    }
}

/// Where a kernel peer sends packets of MTU size, which the stack joins or does not.
struct Packets {
    name: String,
    title: String,
    testbed: RefCell<Testbed>,
}

fn testbeds(options: &Options, has_kernel: bool) -> Vec<Packets> {
    let wanted = options.devices().into_iter().filter_map(Device::over);
    let wanted = wanted.filter(|_| has_kernel && options.stack.has_fulmar());
    let each = wanted.flat_map(|over| [(over, "joined", true), (over, "single", false)]);
    let opened = each.filter_map(|(over, how, gro)| {
        let testbed = Testbed::of_packets(over, Placement::SameCpu, gro).inspect_err(|e| {
            eprintln!("not measured: receiving over {} packet by packet: {e}", over.name())
        });
        Some(Packets {
            name: format!("{}.stream.{how}", over.name()),
            title: format!("{}, a stream packet by packet, segments {how}", over.name()),
            testbed: RefCell::new(testbed.ok()?),
        })
    });
    opened.collect()
}

/// A stream from the kernel that comes packet by packet.
fn joining(packets: &Packets) -> Scenario<'_> {
    /// How long one stream is measured, and the bytes before that.
    const SLICE: Duration = Duration::from_millis(80);
    const WARM_BYTES: u64 = 4 << 20;
    let bulk = Bulk { warm_bytes: WARM_BYTES, ..Bulk::default() };
    let run = move |_| {
        let transfer = packets.testbed.borrow_mut().stream(&bulk, Way::Receive, SLICE)?;
        let this_end = transfer.sample().value(THIS_END).unwrap_or(f64::NAN);
        Ok(Sample::of(PER_KB, this_end))
    };
    Scenario::new(&*packets.name, &*packets.title, run).in_table(BY_ITSELF)
}

/// The table of what is no burst.
const BY_ITSELF: &str = "Buffers, and streams received packet by packet";

fn point(device: &str, method: &str, direction: &str, burst: usize) -> String {
    format!("{device}.{method}.{direction}.64b.x{burst}")
}

/// Bursts of 64 over bursts of 1.
fn over_one(name: String, sentence: String, device: &str, method: &str, direction: &str) -> Ratio {
    Ratio::over(name, sentence, NS, [64, 1].map(|burst| point(device, method, direction, burst)))
}

/// The figures; those that are not measured are left out.
fn ratios(ours: &[String]) -> Vec<Ratio> {
    let mut all = flow_ratios();
    all.extend(frame_ratios());
    all.extend(old_ratios());
    let slow = ours.iter().filter(|name| !name.starts_with("veth")).map(|n| (n.clone(), SLOW));
    let sum = |t: &[f64]| t.iter().filter(|v| v.is_finite()).sum();
    let sentence =
        "buffers that the general lists or a new slab had to give after the first round, all ways";
    all.push(
        Ratio::new("burst.slow_path_allocations", sentence, slow.collect(), sum).goals(0.0, 0.0),
    );
    all.extend(buffers::ratios());
    for device in ["tap", "packet"] {
        let way = |how| format!("{device}.stream.{how}");
        let sentence = "CPU per KB received packet by packet, segments joined in software ÷ not";
        let name = format!("burst.{device}.joined_vs_single");
        all.push(Ratio::over(name, sentence, PER_KB, [way("joined"), way("single")]));
    }
    all
}

/// Datagrams of one flow, which may cross as one frame.
fn flow_ratios() -> Vec<Ratio> {
    let sent = "ns per 64-byte datagram of one flow over TAP, read by a kernel socket, bursts of 64 ÷ of 1";
    let mut all = vec![
        over_one("burst.tap.64_vs_1".into(), sent.into(), "tap", "flow", "send").goals(0.68, 0.6),
        over_one(
            "burst.packet.flow.64_vs_1".into(),
            "the same, packet".into(),
            "packet",
            "flow",
            "send",
        ),
    ];
    all.extend(["tap", "packet"].map(|device| {
        let sentence =
            format!("ns per 64-byte datagram received, 64 joined by the sender ÷ 1, {device}");
        over_one(
            format!("burst.{device}.flow.receive.64_vs_1"),
            sentence,
            device,
            "flow",
            "receive",
        )
    }));
    all
}

/// Frames of any kind.
fn frame_ratios() -> Vec<Ratio> {
    let ours = Device::ALL.map(|d| (d.name(), "ours"));
    let devices: Vec<_> = ours.into_iter().chain([("veth", "kernel")]).collect();
    let sending = devices.iter().map(|(device, method)| {
        let name = if *device == "tap" { "tap.any" } else { device };
        let sentence =
            format!("ns per 64-byte frame of any kind, bursts of 64 ÷ bursts of 1, {device}");
        over_one(format!("burst.{name}.64_vs_1"), sentence, device, method, "send")
    });
    let receiving = devices.iter().map(|(device, method)| {
        let sentence =
            format!("ns per 64-byte frame received, bursts of 64 ÷ bursts of 1, {device}");
        over_one(format!("burst.{device}.receive.64_vs_1"), sentence, device, method, "receive")
    });
    sending.chain(receiving).collect()
}

/// One frame per crossing and memory from the general allocator, and the kernel, beside bursts.
fn old_ratios() -> Vec<Ratio> {
    let each =
        Device::ALL.into_iter().flat_map(|d| Direction::BOTH.map(|way| (d.name(), way.name())));
    let old = each.map(|(device, way)| {
        let sentence = format!("ns per 64-byte frame, the old way ÷ bursts of 64, {device}, {way}");
        let ways = [point(device, "old", way, 1), point(device, "ours", way, 64)];
        Ratio::over(format!("burst.{device}.{way}.old_vs_64"), sentence, NS, ways)
    });
    let kernel = [
        (
            "burst.kernel_vs_tap.64",
            "ns per 64-byte frame sent, the kernel's sendmmsg of 64 on veth ÷ bursts of 64 over TAP",
            "ours",
        ),
        (
            "burst.kernel_vs_tap.flow.64",
            "the same with datagrams of one flow over TAP that a kernel socket reads",
            "flow",
        ),
    ];
    let kernel = kernel.into_iter().map(|(name, sentence, method)| {
        let ways = [point("veth", "kernel", "send", 64), point("tap", method, "send", 64)];
        Ratio::over(name, sentence, NS, ways)
    });
    old.chain(kernel).map(Ratio::more_is_better).collect()
}

const SHAPE: Shape = Shape {
    name: "burst",
    title: "What a frame costs against the number of frames that cross together",
    lead: "CPU time of the end that is timed, in nanoseconds.",
    columns: &[
        label("frame_bytes", "frame"),
        label("device", "device"),
        label("way", "way"),
        label("burst", "burst"),
        number(NS, "ns per\nframe", 1, "CPU of the thread under test").with_interval(),
        number(PER_CROSSING, "frames per\ncrossing", 1, "as counted"),
        number(SLOW, "slow\nbuffers", 0, "not ready-made, after the first round"),
        number(buffers::POOL, "pool\nns", 1, "a buffer taken and freed, ready-made"),
        number(buffers::HEAP, "allocator\nns", 1, "the same from the general allocator"),
        number(PER_KB, "ns/KB", 0, "CPU of the receiver").with_interval(),
        number("runs", "runs", 0, "how often it was measured"),
    ],
    across: Some(("burst", NS)),
    chart: Some(Chart {
        unit: "ns of CPU per frame",
        parts: &[NS],
        group: &["device", "way", "frame_bytes"],
        x: Some("burst"),
    }),
    legend: "\
ns        is CPU time of the thread that sends or receives, without simulated hardware, per frame:
          taking and filling a buffer, crossing, freeing it. The other end makes the frames, or takes
          them away, between the timed parts; frames from and to the kernel wait in its queues.
bursts    are what the device does with a vector; over TAP by io_uring from the third small frame on.
flow      is datagrams from one socket to one of the kernel's. Sent, those of a burst cross as one; all
          that the kernel does until the socket has every one of them is in the figure. Received, the
          kernel's sender has joined so many of them (UDP_SEGMENT), and cutting them is in it.
old       is one frame per crossing; for each a header and a cluster from the general allocator.
kernel    is UDP sockets on veth: it also makes headers and looks up routes, which the others here
          do not, so it stands beside them for scale. Frames over TAP have an unclaimed EtherType.",
};

#[cfg(test)]
mod tests;
