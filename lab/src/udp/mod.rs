//! `bench udp`: what a datagram costs its sender.
//!
//! Connected, unconnected, many in a call, cut by the device; on the simulated device and over TAP to a
//! kernel socket, beside the kernel's `send`, `sendto`, `sendmmsg` and UDP_SEGMENT on veth; by one
//! thread and by several: on the simulated device each with a shard of one stack and a queue of one NIC,
//! elsewhere each with a device of its own. What a datagram costs who takes it, one by one and many in a
//! call, is measured on the simulated device. Every way runs once per round for a short slice, so that
//! what is compared is measured moments apart.

mod account;
mod found;
mod rig;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use account::accounts;
pub(crate) use account::of_calls;
pub use found::Found;
use rig::{Cost, Kernel, Ours, Rig, Shards};

use crate::bench::Stop;
use crate::cpu;
use crate::stats::Estimate;

/// With Ethernet, IPv4 and UDP header the shortest Ethernet frame; middling; all that a packet holds.
pub const BYTES: [usize; 3] = [18, 256, 1472];
/// A run of one way.
const SLICE: Duration = Duration::from_millis(20);
/// Rounds that an interval needs, whatever the budget says.
const LEAST_ROUNDS: usize = 3;

/// What datagrams go through.
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

    /// The name in ways and options.
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

/// What to measure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Over what.
    pub devices: Vec<Device>,
    /// Payload of a datagram.
    pub bytes: Vec<usize>,
    /// Threads at most; every number from 1 on is measured.
    pub threads: usize,
    /// Time for the rounds; opening the devices comes on top.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
}

/// One way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    /// Through what.
    pub device: Device,
    /// How.
    pub method: Method,
    /// Payload of a datagram.
    pub bytes: usize,
    /// Threads that do the same at the same time.
    pub threads: usize,
}

impl Way {
    /// A stable dotted name: `tap.batch64.18b.t1`.
    pub fn name(&self) -> String {
        let Way { device, method, bytes, threads } = self;
        format!("{}.{}.{bytes}b.t{threads}", device.name(), method.name())
    }
}

/// A way with what was found.
pub struct Lane {
    /// Which.
    pub way: Way,
    /// CPU nanoseconds per datagram and thread, one value per round.
    ns: Vec<f64>,
    /// Datagrams per second of all threads together, by the clock.
    pps: Vec<f64>,
    lost: u64,
}

impl Lane {
    /// CPU nanoseconds per datagram and thread.
    pub fn ns(&self) -> Option<Estimate> {
        Estimate::of(&self.ns)
    }

    /// Datagrams per second of all threads together.
    pub fn pps(&self) -> Option<Estimate> {
        Estimate::of(&self.pps)
    }
}

/// The ways of one device in the order in which they run, the numbers of threads next to each other.
fn ways(options: &Options, device: Device) -> Vec<Way> {
    let mut ways = Vec::new();
    for &bytes in &options.bytes {
        for method in Method::ALL {
            let is_possible = device.can(method) && (method != Method::Apart || bytes > 1);
            let threads = (1..=options.threads).filter(|_| is_possible);
            ways.extend(threads.map(|threads| Way { device, method, bytes, threads }));
        }
    }
    ways
}

/// What one thread found of one way in one round, or why nothing.
type Outcomes = Vec<Vec<Result<Option<Cost>, String>>>;

/// Measures; `isolated` says whether this process has namespaces of its own. What cannot be opened
/// here is said on standard error and left out.
///
/// # Errors
/// Nothing of what was asked for can be measured here.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Found> {
    let begin = Instant::now();
    let mut options = options.clone();
    if let Err(e) = isolated {
        eprintln!("what needs the kernel cannot be measured here: {e}");
        options.devices.retain(|d| *d == Device::Sim);
    }
    let shards = Shards::open(options.threads)?;
    options.devices.retain(|d| match d.open(&shards, 0) {
        Ok(_) => true,
        Err(e) => {
            eprintln!("no {}: {e}", d.name());
            false
        }
    });
    if options.devices.is_empty() {
        return Err(io::Error::other("nothing of what was asked for can be measured here"));
    }
    let cpus = cpu::allowed_cpus()?;
    let all: Vec<Way> = options.devices.iter().flat_map(|d| ways(&options, *d)).collect();
    let barrier = Barrier::new(options.threads);
    let clock = Clock { began: Instant::now(), is_over: AtomicBool::new(false) };
    let found: Vec<io::Result<Outcomes>> = std::thread::scope(|scope| {
        let spawn = |i: usize| {
            // The last CPUs first: interrupts tend to go to the first.
            let cpu = cpus[cpus.len() - 1 - i % cpus.len()];
            let (plan, barrier, clock) = ((&options, &all[..], &shards), &barrier, &clock);
            scope.spawn(move || thread(plan, (i, cpu), barrier, clock))
        };
        let handles: Vec<_> = (0..options.threads).map(spawn).collect();
        let panicked = |_| Err(io::Error::other("a measuring thread panicked"));
        handles.into_iter().map(|h| h.join().unwrap_or_else(panicked)).collect()
    });
    let found = found.into_iter().collect::<io::Result<Vec<Outcomes>>>()?;
    let rounds = found.iter().map(Vec::len).min().unwrap_or(0);
    let stop = if rounds == options.runs { Stop::Runs } else { Stop::Budget };
    Ok(Found::new(&all, &found, (stop, begin.elapsed())))
}

/// A device with its sockets, or why there is none.
type Opened = Result<Box<dyn Rig>, String>;

/// When the rounds began, and whether they are over.
struct Clock {
    began: Instant,
    is_over: AtomicBool,
}

/// One measuring thread: every round every way, in step with the others.
fn thread(
    (options, all, shards): (&Options, &[Way], &Shards),
    (index, cpu): (usize, usize),
    barrier: &Barrier,
    clock: &Clock,
) -> io::Result<Outcomes> {
    let pinned = cpu::pin_to(cpu);
    // Whoever fails still meets the others, or they would wait for ever.
    let mut rigs: Vec<(Device, Opened)> =
        options.devices.iter().map(|d| (*d, pinned_open(&pinned, *d, shards, index))).collect();
    let mut rounds = Vec::new();
    loop {
        let mut row = Vec::new();
        for way in all {
            barrier.wait();
            let rig = rigs.iter_mut().find(|(d, _)| *d == way.device);
            row.push(match rig {
                Some((_, Ok(rig))) if index < way.threads => {
                    let cost = rig::run(&mut **rig, way.method, way.bytes, SLICE);
                    cost.map(Some).map_err(|e| e.to_string())
                }
                Some((_, Err(e))) => Err(e.clone()),
                _ => Ok(None),
            });
        }
        rounds.push(row);
        let is_late = rounds.len() >= LEAST_ROUNDS && clock.began.elapsed() >= options.budget;
        // One looks at the clock for all, so that all go on or none.
        if index == 0 && (rounds.len() >= options.runs || is_late) {
            clock.is_over.store(true, Ordering::Release);
        }
        barrier.wait();
        if clock.is_over.load(Ordering::Acquire) {
            return Ok(rounds);
        }
    }
}

fn pinned_open(pinned: &io::Result<()>, device: Device, shards: &Shards, thread: usize) -> Opened {
    match pinned {
        Ok(()) => device.open(shards, thread).map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    }
}
