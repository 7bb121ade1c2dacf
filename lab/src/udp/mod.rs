//! `bench udp`: the cost of a datagram.
//!
//! Connected, unconnected, many in a call, cut by the device; on the simulated device and over TAP to a
//! kernel socket, beside the kernel's `send`, `sendto`, `sendmmsg` and UDP_SEGMENT on veth; by one
//! thread and by several: on the simulated device each with a shard of one stack and a queue of one NIC,
//! elsewhere each with a device of its own. What a datagram costs who takes it, one by one and many in a
//! call, is measured on the simulated device. What a frame costs that crosses TAP and AF_PACKET, in bursts
//! of 1 to 64, is measured without a stack (`frames`).

mod account;
mod frames;
mod rig;
#[allow(unsafe_code)]
pub(crate) mod sys;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::io;
use std::sync::Barrier;
use std::time::Duration;

pub use account::accounts;
use rig::{Cost, Kernel, Ours, Rig, Shards};

use crate::cpu;
use crate::harness::options::{Common, Stack, one_of, or, within};
use crate::harness::report::{Chart, Report, Shape, label, number};
use crate::harness::{self, Pace, Plan, Ratio, Sample, Scenario, Term};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick: what users wait for stays under 20 s, opening the devices included.
const QUICK: Duration = Duration::from_secs(12);
/// With Ethernet, IPv4 and UDP header the shortest Ethernet frame; middling; all that a packet holds.
const BYTES: [usize; 3] = [SMALL, 256, MOST_BYTES];
/// The payload that the ratios are about.
const SMALL: usize = 18;
/// Payload of one packet of MTU 1500.
const MOST_BYTES: usize = 1472;

/// CPU per datagram: one per call, many per call, segmentation offload, several threads; CPU per frame in bursts
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench udp [OPTIONS]",
    after_help = "Measures send, send_to, send_many of 64 and send_segmented on a simulated device
and over TAP; send, sendto, sendmmsg and UDP_SEGMENT of the kernel on veth, to a
socket that receives all datagrams. With TAP, also frames over TAP and AF_PACKET
without a stack, in bursts of 1, 8 and 64. Takes 60 seconds.
The command creates its own namespaces and removes them."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// The devices of fulmar [default: both]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "sim|tap")]
    pub device: Vec<Device>,
    /// Bytes of payload [default: 18, 256, 1472; with --quick 18]
    #[arg(long, value_parser = within(1, MOST_BYTES), value_delimiter = ',', value_name = "BYTES")]
    pub bytes: Vec<usize>,
    /// Largest number of threads; every number from 1 is measured [default: 2, at most the number of CPUs]
    #[arg(long, value_parser = within(1usize, 64))]
    pub threads: Option<usize>,
    /// The stack to measure
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    pub stack: Stack,
}

fn device(text: &str) -> Result<Device, String> {
    one_of([Device::Sim, Device::Tap], Device::name, text)
}

impl Options {
    fn devices(&self) -> Vec<Device> {
        let ours = or(&self.device, &[Device::Sim, Device::Tap]);
        let is_wanted = |d: &Device| match d {
            Device::Veth => self.stack.has_kernel(),
            ours_too => self.stack.has_fulmar() && ours.contains(ours_too),
        };
        Device::ALL.into_iter().filter(is_wanted).collect()
    }

    fn bytes(&self) -> Vec<usize> {
        or(&self.bytes, if self.common.quick { &BYTES[..1] } else { &BYTES })
    }

    fn threads(&self) -> usize {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.unwrap_or(cpus.min(2))
    }
}

/// The device of the datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// A simulated NIC with a modelled peer that discards.
    Sim,
    /// A TAP to a kernel socket.
    Tap,
    /// The kernel's own sockets on veth.
    Veth,
}

impl Device {
    /// Every one, in the order of the table.
    pub const ALL: [Device; 3] = [Device::Sim, Device::Tap, Device::Veth];

    /// The name in scenarios and options.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Sim => "sim",
            Device::Tap => "tap",
            Device::Veth => "veth",
        }
    }

    /// Whether datagrams can go, or come, this way over it.
    const fn can(self, method: Method) -> bool {
        match method {
            Method::Apart => !matches!(self, Device::Veth),
            Method::Received | Method::ReceivedMany => matches!(self, Device::Sim),
            _ => true,
        }
    }

    /// Opens it for the thread of this number, to which `shards` has a shard.
    fn open(self, shards: &Shards, thread: usize) -> io::Result<Box<dyn Rig>> {
        Ok(match self {
            Device::Sim => Box::new(shards.rig(thread)?),
            Device::Tap => Box::new(Ours::tap()?),
            Device::Veth => Box::new(Kernel::new()?),
        })
    }
}

/// How datagrams are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// `send`, one by one.
    Connected,
    /// `send_to`, one by one.
    Unconnected,
    /// `send_many`, 64 of equal size; the kernel's `sendmmsg`.
    Many,
    /// The same of two sizes in turn, so that no more than two can leave as one run.
    Apart,
    /// `send_segmented`, runs of 64, or what 64 KiB hold; the kernel's UDP_SEGMENT.
    Segmented,
    /// `recv`, one by one, of what the simulated peer sends.
    Received,
    /// `recv_many`, 64 at most.
    ReceivedMany,
}

impl Method {
    /// Every one, in the order of the table.
    pub const ALL: [Method; 7] = [
        Method::Connected,
        Method::Unconnected,
        Method::Many,
        Method::Apart,
        Method::Segmented,
        Method::Received,
        Method::ReceivedMany,
    ];

    /// The name in ways.
    pub const fn name(self) -> &'static str {
        match self {
            Method::Connected => "connected",
            Method::Unconnected => "unconnected",
            Method::Many => "batch64",
            Method::Apart => "batch64_apart",
            Method::Segmented => "segmented",
            Method::Received => "received",
            Method::ReceivedMany => "received_batch64",
        }
    }

    /// Whether it takes datagrams; else it sends them.
    pub const fn receives(self) -> bool {
        matches!(self, Method::Received | Method::ReceivedMany)
    }

    /// The call, as the two know it.
    const fn title(self, device: Device) -> &'static str {
        match (self, matches!(device, Device::Veth)) {
            (Method::Connected, _) => "send, connected",
            (Method::Unconnected, false) => "send_to",
            (Method::Unconnected, true) => "sendto",
            (Method::Many, false) => "send_many of 64",
            (Method::Many, true) => "sendmmsg of 64",
            (Method::Apart, _) => "send_many of 64, two sizes",
            (Method::Segmented, false) => "send_segmented",
            (Method::Segmented, true) => "UDP_SEGMENT",
            (Method::Received, _) => "recv",
            (Method::ReceivedMany, _) => "recv_many of 64",
        }
    }
}

/// CPU nanoseconds per datagram and thread.
const NS: &str = "ns_per_datagram";
/// By the clock, all threads together.
const RATE: &str = "datagrams_per_s";

/// A stable dotted name: `tap.batch64.18b.t1`.
fn name(device: Device, method: Method, bytes: usize, threads: usize) -> String {
    format!("{}.{}.{bytes}b.t{threads}", device.name(), method.name())
}

/// A device as every thread has it.
type Opened = (Device, RefCell<Vec<Box<dyn Rig>>>);

/// Measures; `isolated` says whether this process has namespaces of its own. What cannot be opened
/// here is said on standard error and left out.
///
/// # Errors
/// The options select nothing that can be measured here.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    let mut devices = options.devices();
    if let Err(e) = isolated {
        eprintln!("not measured: variants that need the kernel: {e}");
        devices.retain(|d| *d == Device::Sim);
    }
    let threads = options.threads();
    let shards = Shards::open(threads)?;
    let open = |device: Device| -> io::Result<Opened> {
        let rigs = (0..threads).map(|thread| device.open(&shards, thread));
        Ok((device, RefCell::new(rigs.collect::<io::Result<_>>()?)))
    };
    let opened: Vec<Opened> = devices
        .iter()
        .filter_map(|&d| open(d).inspect_err(|e| eprintln!("not measured: {}: {e}", d.name())).ok())
        .collect();
    if opened.is_empty() {
        return Err(io::Error::other("the options select nothing that can be measured here"));
    }
    let frames = if devices.contains(&Device::Tap) { frames::open() } else { Vec::new() };
    let mut scenarios: Vec<Scenario<'_>> =
        opened.iter().flat_map(|o| of_device(options, o)).collect();
    scenarios.extend(frames.iter().flat_map(frames::scenarios));
    let mut ratios = ratios();
    ratios.retain(|r| r.is_measured(&scenarios));
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let plan = Plan { scenarios, ratios, budget, max_runs, pace: Pace::Calls };
    Ok(Report::of(&SHAPE, harness::run(plan)))
}

/// Every way of one device, the numbers of threads next to each other.
fn of_device<'a>(options: &Options, (device, rigs): &'a Opened) -> Vec<Scenario<'a>> {
    let mut all = Vec::new();
    for bytes in options.bytes() {
        for method in Method::ALL {
            if !device.can(method) || (method == Method::Apart && bytes <= 1) {
                continue;
            }
            all.extend((1..=options.threads()).map(|threads| {
                let run = move |slice| {
                    let rigs = &mut rigs.borrow_mut()[..threads];
                    among_threads(rigs, |rig| rig::run(rig, method, bytes, slice))
                };
                let (call, device) = (method.title(*device), *device);
                Scenario::new(name(device, method, bytes, threads), call, run)
                    .in_table(format!("Datagrams of {bytes} bytes"))
                    .label("device", device.name())
                    .label("method", method.name())
                    .label("payload_bytes", bytes)
                    .label("threads", threads)
            }));
        }
    }
    all
}

/// Every rig on a thread and a CPU of its own, at the same time: the mean of what a datagram costs, and the
/// sum of the rates.
fn among_threads(
    rigs: &mut [Box<dyn Rig>],
    run: impl Fn(&mut dyn Rig) -> io::Result<Cost> + Sync,
) -> io::Result<Sample> {
    let (barrier, cpus) = (Barrier::new(rigs.len()), cpu::allowed_cpus()?);
    let (barrier, cpus, run) = (&barrier, &cpus, &run);
    let each: Vec<io::Result<Cost>> = std::thread::scope(|scope| {
        let on_thread = |(i, rig): (usize, &mut Box<dyn Rig>)| {
            // The last CPUs first: interrupts tend to go to the first. Unpinned the figures are wider.
            let pinned = cpu::pin_to(cpus[cpus.len() - 1 - i % cpus.len()]);
            barrier.wait();
            pinned.and_then(|()| run(&mut **rig))
        };
        let spawn = |one| scope.spawn(move || on_thread(one));
        let handles: Vec<_> = rigs.iter_mut().enumerate().map(spawn).collect();
        let panicked = |_| Err(io::Error::other("a measuring thread panicked"));
        handles.into_iter().map(|h| h.join().unwrap_or_else(panicked)).collect()
    });
    let costs = each.into_iter().collect::<io::Result<Vec<Cost>>>()?;
    let mean = costs.iter().map(Cost::ns).sum::<f64>() / costs.len() as f64;
    let sample = Sample::of(NS, mean).with(RATE, costs.iter().map(Cost::pps).sum());
    Ok(sample.with("lost", costs.iter().map(|c| c.lost as f64).sum()))
}

fn of(device: Device, method: Method, threads: usize) -> Term {
    (name(device, method, SMALL, threads), NS)
}

/// The figures asked for, and others that say why.
fn ratios() -> Vec<Ratio> {
    let mut all = beside_the_kernel();
    all.extend(on_the_simulated_device());
    all.extend(frames::ratios());
    all
}

/// Over TAP, the kernel on veth above.
fn beside_the_kernel() -> Vec<Ratio> {
    let kernel = |method| of(Device::Veth, method, 1);
    let ours = |method| of(Device::Tap, method, 1);
    let best = |name, sentence, method| {
        let terms = vec![ours(method), kernel(Method::Connected), kernel(Method::Many)];
        Ratio::new(name, sentence, terms, |t| t[1].min(t[2]) / t[0])
    };
    let over = |name, sentence, method| {
        Ratio::new(name, sentence, vec![kernel(method), ours(method)], |t| t[0] / t[1])
    };
    let all = vec![
        best(
            "udp.tap.batch64.kernel_vs_fulmar",
            "ns per datagram of 18 bytes, the kernel's best of send and sendmmsg on veth ÷ send_many \
             of 64 over TAP",
            Method::Many,
        )
        .goals(2.5, 3.5),
        best(
            "udp.tap.batch64_apart.kernel_vs_fulmar",
            "the same, of two sizes in turn: frames of two datagrams",
            Method::Apart,
        ),
        over(
            "udp.tap.connected.kernel_vs_fulmar",
            "one by one: the kernel's send on veth ÷ send over TAP",
            Method::Connected,
        ),
        over(
            "udp.tap.segmented.kernel_vs_fulmar",
            "cut below: the kernel's UDP_SEGMENT on veth ÷ send_segmented over TAP",
            Method::Segmented,
        ),
    ];
    all.into_iter().map(Ratio::more_is_better).collect()
}

/// fulmar alone.
fn on_the_simulated_device() -> Vec<Ratio> {
    let (connected, many) = (Method::Connected, Method::Many);
    let over = |name, sentence, above: (Method, usize), below: (Method, usize)| {
        let terms = [above, below].map(|(method, threads)| of(Device::Sim, method, threads));
        Ratio::new(name, sentence, terms.to_vec(), |t| t[0] / t[1])
    };
    vec![
        over(
            "udp.sim.two_threads_vs_one",
            "ns per datagram and thread, connected, simulated device: two threads on two shards ÷ one",
            (connected, 2),
            (connected, 1),
        )
        .goals(1.1, 1.0),
        over(
            "udp.sim.batch64.two_threads_vs_one",
            "the same, 64 per call",
            (many, 2),
            (many, 1),
        ),
        over(
            "udp.sim.batch64_vs_connected",
            "ns per datagram, simulated device: send_many of 64 ÷ send",
            (many, 1),
            (connected, 1),
        ),
        over(
            "udp.sim.unconnected_vs_connected",
            "ns per datagram, simulated device: send_to ÷ send",
            (Method::Unconnected, 1),
            (connected, 1),
        ),
        over(
            "udp.sim.recv_many_vs_recv",
            "ns per datagram taken, simulated device: recv_many of 64 ÷ recv",
            (Method::ReceivedMany, 1),
            (Method::Received, 1),
        ),
        over(
            "udp.sim.recv_many.two_threads_vs_one",
            "ns per datagram taken and thread, recv_many: two threads on two shards ÷ one",
            (Method::ReceivedMany, 2),
            (Method::ReceivedMany, 1),
        ),
    ]
}

const SHAPE: Shape = Shape {
    name: "udp",
    title: "Cost of a datagram",
    lead: "CPU time of the sending or receiving thread per datagram, by the call and by the number of threads.",
    columns: &[
        label("device", "device"),
        label("title", "call"),
        label("threads", "threads"),
        number(NS, "ns per\ndatagram", 1, "CPU, of each thread").with_interval(),
        number(RATE, "packets/s", 0, "by the clock, all threads"),
        number("lost", "lost", 0, "datagrams lost, where this is counted"),
        number("runs", "runs", 0, "number of measurements"),
    ],
    across: None,
    chart: Some(Chart {
        unit: "ns of CPU per datagram",
        parts: &[NS],
        group: &["device", "threads"],
        x: None,
    }),
    legend: LEGEND,
};

const LEGEND: &str = "\
ns per datagram is CPU time of the thread that sends or takes it, without simulated hardware; of several threads the
  mean. packets/s is by the clock, all threads together, while they send; hardware that runs inside
  the sender's calls slows it down.
sim is a simulated device whose peer discards. Over TAP and veth a kernel socket receives: what the
  kernel does up to its queue runs inside the sender's calls and is in the figure; reading the queue
  is not.
send_many and send_segmented of equal sizes cross a TAP as one frame of many datagrams, which the
  kernel takes apart on its side; of two sizes in turn only two at a time can, since only the last
  datagram of such a frame may be shorter.
Threads on the simulated device have a shard each, of one stack on one NIC with a queue for each;
  one thread is measured on the same stack. Over TAP and veth they have a device of their own each.
recv and recv_many take what the simulated peer has sent, packet by packet; polling the device and
  finding the socket are in the figure.
Frames cross the device without a stack. Those of any kind are discarded by the kernel; those of one flow
  are datagrams that a kernel socket receives, and cross joined. Received, the kernel's sender has joined
  those of a burst.";
