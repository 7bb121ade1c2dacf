//! `bench recv`: which places are opened, which ways are measured at each, and which of them are
//! compared.
//!
//! The matrix is {device} x {aggregation} x {bytes per buffer} x {use} x {placement} x {way}; ways
//! that are compared stand side by side, so that a round runs them moments apart. The old way has no
//! aggregation by its nature, and bursts are for the others, where a wake-up is what they cost. A
//! device that cannot be opened here is said on standard error and left out, with its figures.

use super::kernel::{Work, local_way, pair_way};
use super::place::Real;
use super::shm::Shared;
use super::sim::Simulated;
use super::{Load, Method, Offloads, Place, Use, size_name};
use crate::bench::{self, Cell, Outcome, Plan, Ratio, Sample, Way};
use crate::cpu::Placement;
use crate::floor::{self, Direction, Kind};
use crate::kernel::{Local, Pair};
use crate::kernel_receive::ReceiveCall;
use crate::limit::ring::{self, Taking};
use crate::matrix::{Asked, Device, Names, is_measured, method_names};
use crate::site::MTU;
use crate::stream::Over;
use crate::{Bulk, limit};
use fulmar_netns::Netns;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Devices over which fulmar can be measured here.
pub const DEVICES: [Device; 4] = [Device::Sim, Device::Tap, Device::Packet, Device::Shm];

/// What is measured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Over which devices; those of [`DEVICES`].
    pub devices: Vec<Device>,
    /// Bytes of each of the two buffers.
    pub buffer_bytes: Vec<usize>,
    /// With and without receive aggregation.
    pub aggregation: Vec<bool>,
    /// What the reader does with the bytes, and how they come.
    pub uses: Vec<Use>,
    /// Where the ends run.
    pub placements: Vec<Placement>,
    /// Names of the ways to measure (`stock`, `copy`, ...); empty: all.
    pub ways: Vec<String>,
    /// Measure fulmar's ways.
    pub fulmar: bool,
    /// Measure the kernel's.
    pub kernel: bool,
    /// Time for everything.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
    /// Where fulmar's frames are written.
    pub pcap: Option<PathBuf>,
    /// Measure the limit and the floor beside them.
    pub limits: bool,
}

/// From this budget on every way also runs once beside a soaker.
const SOAK_FROM: Duration = Duration::from_secs(60);

/// Everything that was opened for a bench; ways borrow from it.
pub struct Grounds {
    /// fulmar's places.
    places: Vec<RefCell<Box<dyn Place>>>,
    /// The kernel's veth pairs, as aggregation is asked for.
    pairs: Vec<Pair>,
    /// Where two kernel processes of one host talk.
    host: Option<Netns>,
    /// Where the do-nothing peer receives.
    floor: Option<RefCell<floor::Ground>>,
}

impl Grounds {
    /// Opens what the options ask for and this machine has; `isolated` says whether this process has
    /// namespaces of its own.
    ///
    /// # Errors
    /// The kernel's pair cannot be made although namespaces work.
    pub fn open(options: &Options, isolated: io::Result<()>) -> io::Result<Grounds> {
        let mut grounds =
            Grounds { places: Vec::new(), pairs: Vec::new(), host: None, floor: None };
        let has_kernel =
            isolated.inspect_err(|e| eprintln!("the kernel cannot be measured here: {e}")).is_ok();
        let only_local = options.fulmar && options.devices.iter().all(|d| *d == Device::Shm);
        if options.kernel && has_kernel {
            if !only_local {
                for &aggregation in &options.aggregation {
                    grounds.pairs.push(Pair::new(MTU, aggregation)?);
                }
            }
            grounds.host = Some(Netns::current()?);
        }
        if options.fulmar {
            grounds.open_places(options, has_kernel);
        }
        if options.fulmar && has_kernel && options.devices.contains(&Device::Tap) {
            grounds.floor = floor::Ground::new(Kind::Tap).map(RefCell::new).ok();
        }
        Ok(grounds)
    }

    /// fulmar's places.
    pub(super) fn places(&self) -> &[RefCell<Box<dyn Place>>] {
        &self.places
    }

    fn open_places(&mut self, options: &Options, has_kernel: bool) {
        for &device in &options.devices {
            let placements = match device {
                // There is one end, and nothing to place.
                Device::Sim => &[Placement::SameCpu][..],
                _ => &options.placements,
            };
            if matches!(device, Device::Tap | Device::Packet) && !has_kernel {
                continue;
            }
            for &placement in placements {
                for offloads in offloads(options) {
                    match open(device, offloads, placement, options.pcap.as_ref()) {
                        Ok(place) => self.places.push(RefCell::new(place)),
                        Err(e) => eprintln!("no {} {}: {e}", device.name(), placement.title()),
                    }
                }
            }
        }
    }
}

/// What a device does, in every way that is asked for. The old way is measured without aggregation,
/// whatever is asked of the others: it is what they are compared with.
fn offloads(options: &Options) -> Vec<Offloads> {
    let each = |all: fn(bool) -> Offloads| options.aggregation.iter().map(move |a| all(*a));
    let possible =
        std::iter::once(Offloads::STOCK).chain(each(Offloads::all)).chain(each(Offloads::unplaced));
    let is_used =
        |o: &Offloads| Method::ALL.into_iter().any(|m| m.fits(*o) && is_wanted(options, m.name()));
    possible.filter(is_used).collect()
}

fn open(
    device: Device,
    offloads: Offloads,
    placement: Placement,
    pcap: Option<&PathBuf>,
) -> io::Result<Box<dyn Place>> {
    Ok(match device {
        Device::Sim => Box::new(Simulated::new(offloads, pcap)?),
        Device::Tap => Box::new(Real::new(Over::Tap, placement, offloads, pcap)?),
        Device::Packet => Box::new(Real::new(Over::Packet, placement, offloads, pcap)?),
        Device::Shm => Box::new(Shared::new(placement, offloads)?),
        Device::Link => return Err(io::Error::other("two stacks in one process: not measured")),
    })
}

/// Measures what the options ask for.
///
/// # Errors
/// As [`measure`].
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Outcome> {
    measure(options, ratios(), |_| true, isolated)
}

/// Measures those ways of the options that are to be kept, and of the figures those whose ways are
/// there.
///
/// # Errors
/// As [`Grounds::open`]; a way or a device that does not exist, by name.
pub fn measure(
    options: &Options,
    ratios: Vec<Ratio>,
    keep: impl Fn(&Cell) -> bool,
    isolated: io::Result<()>,
) -> io::Result<Outcome> {
    names().check_exist(&options.ways)?;
    let grounds = Grounds::open(options, isolated)?;
    let mut ways = ways(options, &grounds);
    Names::check_opened(&options.ways, &method_names(&ways))?;
    let is_kept = |c: Cell| is_wanted(options, c.method) && keep(&c);
    ways.retain(|w| w.cell.map_or(options.limits, is_kept));
    if ways.iter().all(|w| w.cell.is_none()) {
        return Err(io::Error::other("nothing of what was asked for can be measured here"));
    }
    let ratios = ratios.into_iter().filter(|r| is_measured(r, &ways)).collect();
    let Options { budget, runs: max_runs, .. } = *options;
    let soak = budget >= SOAK_FROM;
    Ok(bench::run(Plan { ways, ratios, budget, max_runs, soak }))
}

/// What can be asked for.
fn names() -> Names {
    Names {
        fulmar: Method::ALL.map(Method::name).to_vec(),
        kernel: ReceiveCall::ALL.map(ReceiveCall::name).to_vec(),
    }
}

/// Every way at every place that is asked for; the limit and the floor first.
fn ways<'a>(options: &'a Options, grounds: &'a Grounds) -> Vec<Way<'a>> {
    let mut ways = vec![limit::memcpy(Bulk { write_bytes: 64 << 10, ..Bulk::default() })];
    if options.fulmar && options.devices.contains(&Device::Shm) {
        ways.extend(ring_ways(&options.placements));
    }
    for &buffer_bytes in &options.buffer_bytes {
        for &usage in &options.uses {
            let load = Load::of_buffers(buffer_bytes, usage);
            ways.extend(grounds.places.iter().flat_map(|place| ways_at(place, load)));
            ways.extend(kernel_ways(options, grounds, load));
        }
    }
    let same = options.placements.contains(&Placement::SameCpu);
    let floor = grounds.floor.as_ref().filter(|_| same);
    // After the ways of the first size, which it is compared with.
    ways.extend(floor.map(|ground| {
        floor::way(ground, Bulk::default(), Direction::Receive, false, Placement::SameCpu)
    }));
    ways
}

/// What two processes cannot do for less, beside what they do over shared memory.
fn ring_ways(placements: &[Placement]) -> Vec<Way<'static>> {
    let both = |at: &Placement| Taking::ALL.map(|taking| ring::way(Bulk::default(), taking, *at));
    placements.iter().flat_map(both).collect()
}

/// fulmar's ways at one place.
fn ways_at(place: &RefCell<Box<dyn Place>>, load: Load) -> Vec<Way<'_>> {
    let offloads = place.borrow().offloads();
    let is_there = offloads.aggregation || load.usage != Use::Bursty;
    let methods = Method::ALL.into_iter().filter(|m| is_there && m.fits(offloads));
    methods.map(|method| super::way(place, method, load)).collect()
}

/// What the kernel does beside it.
fn kernel_ways<'a>(options: &Options, grounds: &'a Grounds, load: Load) -> Vec<Way<'a>> {
    let mut ways = Vec::new();
    for &placement in &options.placements {
        for call in ReceiveCall::ALL {
            let work = Work { call, load };
            let pairs = grounds.pairs.iter();
            let pairs = pairs.filter(|p| p.has_offloads() || load.usage != Use::Bursty);
            ways.extend(pairs.map(|pair| pair_way(pair, work, placement)));
            let has_shm = options.devices.contains(&Device::Shm);
            if let Some(host) = grounds.host.as_ref().filter(|_| has_shm) {
                ways.extend(Local::ALL.map(|local| local_way(local, host, work, placement)));
            }
        }
    }
    ways
}

pub(super) fn is_wanted(options: &Options, method: &str) -> bool {
    let is_variant = Method::ALL.into_iter().any(|m| m.is_variant() && m.name() == method);
    if options.ways.is_empty() { !is_variant } else { options.ways.iter().any(|w| w == method) }
}

/// The name of a way at 2 x `bytes`.
fn named(method: &str, device: &str, bytes: usize, usage: Use, at: Placement) -> String {
    let aggregation = if method == Method::Stock.name() { "no_agg" } else { "agg" };
    let size = size_name(bytes);
    format!("{method}.{device}.2x{size}.{aggregation}.{}.{}", usage.name(), at.name())
}

const SMALL: usize = 64 << 10;
const LARGE: usize = 1 << 20;

/// The figures that are asked for.
fn ratios() -> Vec<Ratio> {
    let all = simulated_ratios().into_iter().chain(tap_ratios()).chain(shm_ratios());
    all.map(Ratio::from).collect()
}

/// What a way costs the whole host over what another one does.
fn cost_over(
    name: &'static str,
    sentence: &'static str,
    [way, over]: [String; 2],
    published: Option<f64>,
    goals: (f64, f64),
) -> Asked {
    Asked {
        name,
        sentence,
        way,
        over: Some(over),
        measure: Sample::both_ns_per_kb,
        published,
        goals,
        more_is_better: true,
    }
}

fn simulated_ratios() -> [Asked; 4] {
    let of = |method, bytes, usage| named(method, "sim", bytes, usage, Placement::SameCpu);
    let touched = |method| of(method, SMALL, Use::Touched);
    let untouched = |method| of(method, LARGE, Use::Untouched);
    [
        cost_over(
            "recv.sim.2x64k.stock_vs_posted",
            "whole host's CPU, no aggregation and copy ÷ aggregated and placed, simulated device",
            [touched("stock"), touched("posted")],
            Some(6.3),
            (6.3, 10.0),
        ),
        cost_over(
            "recv.sim.2x64k.copy_vs_posted",
            "aggregated both, copied ÷ placed: placement alone",
            [touched("copy"), touched("posted")],
            Some(3.7),
            (2.0, 3.7),
        ),
        cost_over(
            "recv.sim.2x1m.stock_vs_posted",
            "no aggregation and copy ÷ aggregated and placed, nobody looks at the bytes",
            [untouched("stock"), untouched("posted")],
            Some(38.0),
            (20.0, 38.0),
        ),
        Asked {
            name: "recv.slow_path_allocations",
            sentence: "buffers that did not come ready-made in the measured stretch, copying read",
            way: touched("copy"),
            over: None,
            measure: |s| s.counted("slow_allocations") as f64,
            published: None,
            goals: (0.0, 0.0),
            more_is_better: false,
        },
    ]
}

fn tap_ratios() -> [Asked; 3] {
    let posted = named("posted", "tap", SMALL, Use::Untouched, Placement::SameCpu);
    let counted = |name, sentence, measure, goals, more_is_better| Asked {
        name,
        sentence,
        way: named("posted", "tap", LARGE, Use::Touched, Placement::SameCpu),
        over: None,
        measure,
        published: None,
        goals,
        more_is_better,
    };
    [
        counted(
            "recv.tap.posted.hit_rate",
            "bytes that landed where they belong ÷ bytes, from the first on, kernel sender",
            |s| s.quotient("whole_placed_bytes", "whole_bytes"),
            (0.95, 0.99),
            true,
        ),
        counted(
            "recv.tap.posted.user_copies_per_byte",
            "copies that fulmar made of each byte, misses included",
            |s| s.quotient("whole_copied_bytes", "whole_bytes"),
            (0.05, 0.01),
            false,
        ),
        Asked {
            more_is_better: false,
            ..cost_over(
                "recv.tap.same_cpu.posted_vs_do_nothing",
                "both ends' CPU, posted ÷ the do-nothing peer without its memcpy",
                [posted, "floor.tap.recv.bare.same_cpu".to_owned()],
                None,
                (1.15, 1.05),
            )
        },
    ]
}

/// Two processes, on two CPUs as they would be; beside it what the same is worth on one CPU, and what
/// it is worth to two ends that have nothing else to do.
fn shm_ratios() -> [Asked; 4] {
    let of = |at| ["loan", "copy"].map(|method| named(method, "shm", SMALL, Use::Touched, at));
    let bare = |at| [Taking::Loan, Taking::Copy].map(|taking| ring::name(taking, at));
    let figure = |name, sentence, ways| Asked {
        more_is_better: false,
        ..cost_over(name, sentence, ways, None, (0.7, 0.5))
    };
    [
        figure(
            "recv.shm.loan_vs_copy",
            "whole host's CPU, on loan ÷ copied, between two processes",
            of(Placement::TwoCpus),
        ),
        figure(
            "recv.shm.loan_vs_copy.limit",
            "the same of a ring of memory without any stack",
            bare(Placement::TwoCpus),
        ),
        figure(
            "recv.shm.same_cpu.loan_vs_copy",
            "whole host's CPU, on loan ÷ copied, two processes on one CPU",
            of(Placement::SameCpu),
        ),
        figure(
            "recv.shm.same_cpu.loan_vs_copy.limit",
            "the same of a ring of memory without any stack",
            bare(Placement::SameCpu),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_that_was_asked_for_has_its_name() {
        let names: Vec<String> = ratios().into_iter().map(|r| r.name).collect();
        for name in [
            "recv.sim.2x64k.stock_vs_posted",
            "recv.sim.2x64k.copy_vs_posted",
            "recv.sim.2x1m.stock_vs_posted",
            "recv.tap.posted.hit_rate",
            "recv.tap.posted.user_copies_per_byte",
            "recv.tap.same_cpu.posted_vs_do_nothing",
            "recv.shm.loan_vs_copy",
            "recv.shm.loan_vs_copy.limit",
            "recv.slow_path_allocations",
        ] {
            assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
        }
    }
}
