//! `bench recv`: which rigs are opened, which ways are measured at each, and which of them are
//! compared.
//!
//! The matrix is {device} x {aggregation} x {bytes per buffer} x {use} x {placement} x {way}; ways
//! that are compared stand side by side, so that a round runs them moments apart. The old way has no
//! aggregation by its nature, and bursts are for the others, where a wake-up is what they cost. A
//! device that cannot be opened here is said on standard error and left out, with its figures.

use super::rig::Real;
use super::shm::Shared;
use super::sim::Simulated;
use super::{Load, Method, Offloads, Rig, Use, size_name};
use crate::cpu::Placement;
use crate::floor::{self, Direction, Kind};
use crate::harness::options::{Common, Stack, on_or_off, one_of, or, placement, within};
use crate::harness::report::Report;
use crate::harness::{self, Outcome, Pace, Plan, Ratio, Scenario};
use crate::kernel::receive::{ReceiveCall, Work};
use crate::kernel::{Local, Pair};
use crate::limit::ring::{self, Taking};
use crate::matrix::{Device, Names, method_names};
use crate::stream::Over;
use crate::topology::MTU;
use crate::transfer::{self, BOTH};
use crate::{Bulk, limit};
use fulmar_gateway::netns::Netns;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Devices over which fulmar can be measured here.
const DEVICES: [Device; 4] = [Device::Sim, Device::Tap, Device::Packet, Device::Shm];
/// KiB of a buffer: more than any cache holds, and than a connection has on its way.
const MOST_KIB: usize = 16 << 10;

/// Variants of the receive call: historical, by copy, loaned buffers, posted buffers, the kernel's
#[derive(clap::Args, Clone, Debug, Default)]
#[command(
    override_usage = "fulmar-lab bench recv [OPTIONS]",
    after_help = "Variants for --way: stock (one packet per device call, no aggregation, one mbuf
copied at a time), copy (TcpStream::read), posted (recv_ring: into the reader's
buffers, without a copy if the device supports it), loan (recv_owned, no copy),
kernel_read, kernel_uring (io_uring, one receive ahead) and
kernel_uring_multishot (provided buffers). Only if named: posted_copied
(recv_ring without placement by the device), posted_stock (on stock's device).

The reader alternates between two buffers. Values of --use: touched (it reads a
word of every cache line), untouched, bursty (touched, and the sender pauses for
a millisecond after every 256 KiB). The sender is a model without a rate limit
over sim, the kernel over tap and packet, another fulmar process over shm.
The command creates its own namespaces and removes them."
)]
pub struct Options {
    /// How long, and where the report goes.
    #[command(flatten)]
    pub common: Common,
    /// CPUs of the two ends [default: same-cpu, two-cpus]
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    pub placement: Vec<Placement>,
    /// The devices [default: sim, tap, shm]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "sim|tap|packet|shm")]
    pub device: Vec<Device>,
    /// The TCP to measure
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    pub stack: Stack,
    /// Measure only these variants, listed below
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub way: Vec<String>,
    /// KiB of each of the two buffers, 1 to 16384 [default: 64, 1024]
    #[arg(long = "buffers", value_delimiter = ',', value_name = "KiB", value_parser = within(1, MOST_KIB))]
    pub kib: Vec<usize>,
    /// Receive aggregation on or off; both by default
    #[arg(long, value_name = "on|off", value_parser = on_or_off)]
    pub aggregation: Option<bool>,
    /// How the reader and the sender behave, explained below; all by default
    #[arg(long = "use", value_parser = usage, value_delimiter = ',', value_name = "touched|untouched|bursty")]
    pub uses: Vec<Use>,
    /// Write fulmar's frames to this file (pcapng); this distorts the figures
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// The process itself is looked at, so that what fulmar is compared with stays away.
    #[arg(skip)]
    pub is_profiled: bool,
}

fn device(text: &str) -> Result<Device, String> {
    one_of(DEVICES, Device::name, text)
}

fn usage(text: &str) -> Result<Use, String> {
    one_of(Use::ALL, Use::name, text)
}

impl Options {
    /// Time for the rounds.
    pub fn budget(&self) -> Duration {
        self.common.budget(Duration::from_secs(15), Duration::from_secs(300))
    }

    pub(super) fn devices(&self) -> Vec<Device> {
        or(&self.device, &[Device::Sim, Device::Tap, Device::Shm])
    }

    /// Bytes of each buffer.
    pub(super) fn sizes(&self) -> Vec<usize> {
        let kib: &[usize] = if self.common.quick { &[64] } else { &[64, 1024] };
        or(&self.kib, kib).into_iter().map(|k| k << 10).collect()
    }

    /// The old way, which has none, is measured either way.
    pub(super) fn aggregations(&self) -> Vec<bool> {
        let all = if self.common.quick { vec![true] } else { vec![true, false] };
        self.aggregation.map_or(all, |on| vec![on])
    }

    pub(super) fn uses(&self) -> Vec<Use> {
        if self.common.quick { or(&self.uses, &[Use::Touched]) } else { or(&self.uses, &Use::ALL) }
    }

    pub(super) fn placements(&self) -> Vec<Placement> {
        match self.common.quick {
            true => or(&self.placement, &[Placement::SameCpu]),
            false => or(&self.placement, &[Placement::SameCpu, Placement::TwoCpus]),
        }
    }
}

/// Everything that was opened for a bench; ways borrow from it.
pub struct Testbeds {
    /// fulmar's rigs.
    rigs: Vec<RefCell<Box<dyn Rig>>>,
    /// The kernel's veth pairs, as aggregation is asked for.
    pairs: Vec<Pair>,
    /// Where two kernel processes of one host talk.
    host: Option<Netns>,
    /// Where the do-nothing peer receives.
    floor: Option<RefCell<floor::Testbed>>,
}

impl Testbeds {
    /// Opens what the options ask for and this machine has; `isolated` says whether this process has
    /// namespaces of its own.
    ///
    /// # Errors
    /// The kernel's pair cannot be made although namespaces work.
    pub fn open(options: &Options, isolated: io::Result<()>) -> io::Result<Testbeds> {
        let mut testbeds =
            Testbeds { rigs: Vec::new(), pairs: Vec::new(), host: None, floor: None };
        let has_kernel =
            isolated.inspect_err(|e| eprintln!("cannot measure the kernel here: {e}")).is_ok();
        let has_fulmar = options.stack.has_fulmar();
        let only_local = has_fulmar && options.devices().iter().all(|d| *d == Device::Shm);
        if options.stack.has_kernel() && has_kernel {
            if !only_local {
                for aggregation in options.aggregations() {
                    testbeds.pairs.push(Pair::new(MTU, aggregation)?);
                }
            }
            testbeds.host = Some(Netns::current()?);
        }
        if has_fulmar {
            testbeds.open_places(options, has_kernel);
        }
        if has_fulmar && has_kernel && options.devices().contains(&Device::Tap) {
            testbeds.floor = floor::Testbed::new(Kind::Tap).map(RefCell::new).ok();
        }
        Ok(testbeds)
    }

    /// fulmar's rigs.
    pub(super) fn rigs(&self) -> &[RefCell<Box<dyn Rig>>] {
        &self.rigs
    }

    fn open_places(&mut self, options: &Options, has_kernel: bool) {
        for device in options.devices() {
            let placements = match device {
                // There is one end, and nothing to place.
                Device::Sim => vec![Placement::SameCpu],
                _ => options.placements(),
            };
            if matches!(device, Device::Tap | Device::Packet) && !has_kernel {
                continue;
            }
            for placement in placements {
                for offloads in offloads(options) {
                    match open(device, offloads, placement, options.pcap.as_ref()) {
                        Ok(rig) => self.rigs.push(RefCell::new(rig)),
                        Err(e) => {
                            eprintln!("not measured: {}, {}: {e}", device.name(), placement.title())
                        }
                    }
                }
            }
        }
    }
}

/// What a device does, in every way that is asked for. The old way is measured without aggregation,
/// whatever is asked of the others: it is what they are compared with.
fn offloads(options: &Options) -> Vec<Offloads> {
    let each = |all: fn(bool) -> Offloads| options.aggregations().into_iter().map(all);
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
) -> io::Result<Box<dyn Rig>> {
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
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    Ok(Report::of(&transfer::RECV, measure(options, ratios(), |_| true, isolated)?))
}

/// Measures those scenarios of the options that are to be kept, and of the figures those whose scenarios are
/// there.
///
/// # Errors
/// As [`Testbeds::open`]; a way or a device that does not exist, by name.
pub fn measure(
    options: &Options,
    ratios: Vec<Ratio>,
    keep: impl Fn(&Scenario<'_>) -> bool,
    isolated: io::Result<()>,
) -> io::Result<Outcome> {
    names().check_exist(&options.way)?;
    let testbeds = Testbeds::open(options, isolated)?;
    let mut scenarios = scenarios(options, &testbeds);
    Names::check_opened(&options.way, &method_names(&scenarios))?;
    scenarios.retain(|s| match s.word("method") {
        Some(method) => is_wanted(options, method) && keep(s),
        None => !options.is_profiled,
    });
    if scenarios.iter().all(|s| s.word("method").is_none()) {
        return Err(io::Error::other("the options select nothing that can be measured here"));
    }
    let ratios = transfer::measured(ratios, &scenarios);
    let (budget, max_runs) = (options.budget(), options.common.runs);
    Ok(harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Transfers }))
}

/// What can be asked for.
fn names() -> Names {
    Names {
        fulmar: Method::ALL.map(Method::name).to_vec(),
        kernel: ReceiveCall::ALL.map(ReceiveCall::name).to_vec(),
    }
}

/// Every way at every rig that is asked for; the limit and the floor first.
fn scenarios<'a>(options: &Options, testbeds: &'a Testbeds) -> Vec<Scenario<'a>> {
    let mut all = vec![limit::memcpy(Bulk { write_bytes: 64 << 10, ..Bulk::default() })];
    if options.stack.has_fulmar() && options.devices().contains(&Device::Shm) {
        all.extend(ring_scenarios(&options.placements()));
    }
    for buffer_bytes in options.sizes() {
        for usage in options.uses() {
            let load = Load::of_buffers(buffer_bytes, usage);
            all.extend(testbeds.rigs.iter().flat_map(|rig| ways_at(rig, load)));
            all.extend(kernel_scenarios(options, testbeds, load));
        }
    }
    let same = options.placements().contains(&Placement::SameCpu);
    let floor = testbeds.floor.as_ref().filter(|_| same);
    // After the ways of the first size, which it is compared with.
    all.extend(floor.map(|testbed| {
        floor::scenario(testbed, Bulk::default(), Direction::Receive, false, Placement::SameCpu)
    }));
    all
}

/// What two processes cannot do for less, beside what they do over shared memory.
fn ring_scenarios(placements: &[Placement]) -> Vec<Scenario<'static>> {
    let both =
        |at: &Placement| Taking::ALL.map(|taking| ring::scenario(Bulk::default(), taking, *at));
    placements.iter().flat_map(both).collect()
}

/// fulmar's ways at one rig.
fn ways_at(rig: &RefCell<Box<dyn Rig>>, load: Load) -> Vec<Scenario<'_>> {
    let offloads = rig.borrow().config().offloads;
    let is_there = offloads.aggregation || load.usage != Use::Bursty;
    let methods = Method::ALL.into_iter().filter(|m| is_there && m.fits(offloads));
    methods.map(|method| super::scenario(rig, method, load)).collect()
}

/// The kernel's scenarios, for comparison.
fn kernel_scenarios<'a>(
    options: &Options,
    testbeds: &'a Testbeds,
    load: Load,
) -> Vec<Scenario<'a>> {
    let mut ways = Vec::new();
    for placement in options.placements() {
        for call in ReceiveCall::ALL {
            let work = Work { call, load };
            let pairs = testbeds.pairs.iter();
            let pairs = pairs.filter(|p| p.has_offloads() || load.usage != Use::Bursty);
            ways.extend(pairs.map(|pair| work.between(pair.ends(), placement)));
            let has_shm = options.devices().contains(&Device::Shm);
            if let Some(host) = testbeds.host.as_ref().filter(|_| has_shm) {
                ways.extend(Local::ALL.map(|local| work.between(local.ends(host), placement)));
            }
        }
    }
    ways
}

pub(super) fn is_wanted(options: &Options, method: &str) -> bool {
    let is_variant = Method::ALL.into_iter().any(|m| m.is_variant() && m.name() == method);
    if options.way.is_empty() { !is_variant } else { options.way.iter().any(|w| w == method) }
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
    simulated_ratios().into_iter().chain(tap_ratios()).chain(shm_ratios()).collect()
}

fn simulated_ratios() -> [Ratio; 4] {
    let of = |method, bytes, usage| named(method, "sim", bytes, usage, Placement::SameCpu);
    let touched = |method| of(method, SMALL, Use::Touched);
    let untouched = |method| of(method, LARGE, Use::Untouched);
    [
        Ratio::over(
            "recv.sim.2x64k.stock_vs_posted",
            "whole host's CPU, no aggregation and copy ÷ aggregated and placed, simulated device",
            BOTH,
            [touched("stock"), touched("posted")],
        )
        .goals(6.3, 10.0)
        .published(6.3)
        .more_is_better(),
        Ratio::over(
            "recv.sim.2x64k.copy_vs_posted",
            "aggregated both, copied ÷ placed: placement alone",
            BOTH,
            [touched("copy"), touched("posted")],
        )
        .goals(2.0, 3.7)
        .published(3.7)
        .more_is_better(),
        Ratio::over(
            "recv.sim.2x1m.stock_vs_posted",
            "no aggregation and copy ÷ aggregated and placed, bytes not read",
            BOTH,
            [untouched("stock"), untouched("posted")],
        )
        .goals(20.0, 38.0)
        .published(38.0)
        .more_is_better(),
        Ratio::value(
            "recv.slow_path_allocations",
            "buffers allocated outside the magazines in the measured interval, copying read",
            "slow_allocations",
            touched("copy"),
        )
        .goals(0.0, 0.0),
    ]
}

fn tap_ratios() -> [Ratio; 3] {
    let posted = |bytes, usage| named("posted", "tap", bytes, usage, Placement::SameCpu);
    let touched = posted(LARGE, Use::Touched);
    [
        Ratio::value(
            "recv.tap.posted.hit_rate",
            "bytes placed at their position ÷ bytes, from the first on, kernel sender",
            "placement_hit_rate",
            &touched,
        )
        .goals(0.95, 0.99)
        .more_is_better(),
        Ratio::value(
            "recv.tap.posted.user_copies_per_byte",
            "copies that fulmar made of each byte, misses included",
            "whole_copies_per_byte",
            &touched,
        )
        .goals(0.05, 0.01),
        Ratio::over(
            "recv.tap.same_cpu.posted_vs_do_nothing",
            "both ends' CPU, posted ÷ the do-nothing peer without its memcpy",
            BOTH,
            [posted(SMALL, Use::Untouched), "floor.tap.recv.bare.same_cpu".to_owned()],
        )
        .goals(1.15, 1.05),
    ]
}

/// Two processes on two CPUs, as in use. For comparison: the same on one CPU, and two ends that do nothing else.
fn shm_ratios() -> [Ratio; 4] {
    let of = |at| ["loan", "copy"].map(|method| named(method, "shm", SMALL, Use::Touched, at));
    let bare = |at| [Taking::Loan, Taking::Copy].map(|taking| ring::name(taking, at));
    let figure = |name, sentence, both| Ratio::over(name, sentence, BOTH, both).goals(0.7, 0.5);
    let limit = "the same of a ring of memory without any stack";
    [
        figure(
            "recv.shm.loan_vs_copy",
            "whole host's CPU, on loan ÷ copied, between two processes",
            of(Placement::TwoCpus),
        ),
        figure("recv.shm.loan_vs_copy.limit", limit, bare(Placement::TwoCpus)),
        figure(
            "recv.shm.same_cpu.loan_vs_copy",
            "whole host's CPU, on loan ÷ copied, two processes on one CPU",
            of(Placement::SameCpu),
        ),
        figure("recv.shm.same_cpu.loan_vs_copy.limit", limit, bare(Placement::SameCpu)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options::parsed;

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

    #[test]
    fn the_whole_matrix_is_measured_unless_a_part_is_asked_for() {
        let all: Options = parsed("").expect("nothing");
        assert_eq!(all.sizes(), [64 << 10, 1 << 20]);
        assert_eq!((all.aggregations(), all.uses()), (vec![true, false], Use::ALL.to_vec()));
        let part = "--buffers 16 --aggregation off --way copy --device tap --use bursty";
        let part: Options = parsed(part).expect("a part");
        assert_eq!(part.sizes(), [16 << 10]);
        assert_eq!((part.aggregations(), part.devices()), (vec![false], vec![Device::Tap]));
        assert_eq!((part.way.clone(), part.uses()), (vec!["copy".to_owned()], vec![Use::Bursty]));
        assert!(parsed::<Options>("--use eaten").is_err());
        assert!(parsed::<Options>("--device link").is_err());
    }

    #[test]
    fn quick_stays_under_twenty_seconds_and_full_is_a_few_minutes() {
        let budget = |line| parsed::<Options>(line).expect("options").budget();
        assert!(budget("--quick") < Duration::from_secs(20));
        assert!(budget("") <= Duration::from_secs(300));
    }
}
