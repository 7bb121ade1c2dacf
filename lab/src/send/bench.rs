//! `bench send` and `bench sendfile`: which places are opened, which ways are measured at each, and
//! which of them are compared.
//!
//! The matrix is {device} x {super-segments} x {bytes per call} x {placement} x {way}; ways that are
//! compared stand side by side, so that a round runs them moments apart. A device that cannot be
//! opened here is said on standard error and left out, with its figures.

use super::file::FileMethod;
use super::shm::Shared;
use super::sim::Simulated;
use super::{Load, Method, Place, sosend, tso_name};
use crate::bench::{self, Cell, Outcome, Plan, Ratio, Sample, Side, Way};
use crate::cpu::Placement;
use crate::file::{BenchFile, Heat};
use crate::kernel::{Local, Pair, Work};
use crate::kernel_calls::KernelCall;
use crate::matrix::{Asked, Device, Names, choose_better, is_measured, method_names};
use crate::stream::{Ground, Joined, Over};
use crate::{Bulk, limit};
use fulmar_netns::Netns;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Which of the two benches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// Writes.
    Send,
    /// Files.
    SendFile,
}

/// What is measured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Which bench.
    pub what: What,
    /// Over which devices.
    pub devices: Vec<Device>,
    /// Bytes per call.
    pub write_bytes: Vec<usize>,
    /// With and without super-segments.
    pub super_segments: Vec<bool>,
    /// Where the ends run.
    pub placements: Vec<Placement>,
    /// Names of the ways to measure (`old`, `ours`, ...); empty: all but the single changes.
    pub ways: Vec<String>,
    /// The socket buffer of the sender; see [`Load`].
    pub buffer_bytes: Option<usize>,
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
    /// Measure the limit and the floors beside them.
    pub limits: bool,
}

/// From this budget on every way also runs once beside a soaker.
const SOAK_FROM: Duration = Duration::from_secs(60);
const MTU: u32 = 1500;

/// Everything that was opened for a bench; ways borrow from it.
pub struct Grounds {
    /// fulmar's places.
    pub places: Vec<RefCell<Box<dyn Place>>>,
    /// The kernel's veth pairs, one with offloads, one without.
    pub pairs: Vec<Pair>,
    /// Where two kernel processes of one host talk.
    pub host: Option<Netns>,
    /// What file benches send.
    pub file: Option<BenchFile>,
}

impl Grounds {
    /// Opens what the options ask for and this machine has; `isolated` says whether this process has
    /// namespaces of its own.
    ///
    /// # Errors
    /// The file to send cannot be made, or the kernel's pair cannot although namespaces work.
    pub fn open(options: &Options, isolated: io::Result<()>) -> io::Result<Grounds> {
        let mut grounds = Grounds { places: Vec::new(), pairs: Vec::new(), host: None, file: None };
        if options.what == What::SendFile {
            grounds.file = Some(BenchFile::new()?);
        }
        let has_kernel = match isolated {
            Ok(()) => true,
            Err(e) => {
                eprintln!("the kernel cannot be measured here: {e}");
                false
            }
        };
        // Beside real devices and the simulated one; between processes of one host there is no veth.
        let only_local = options.fulmar && options.devices.iter().all(|d| *d == Device::Shm);
        if options.kernel && has_kernel && !only_local {
            for &super_segments in &options.super_segments {
                grounds.pairs.push(Pair::new(MTU, super_segments)?);
            }
        }
        if options.kernel && has_kernel {
            grounds.host = Some(Netns::current()?);
        }
        if options.fulmar {
            grounds.open_places(options, has_kernel);
        }
        Ok(grounds)
    }

    fn open_places(&mut self, options: &Options, has_kernel: bool) {
        for &device in &options.devices {
            for &super_segments in &options.super_segments {
                // Over the simulated device there is one end, and nothing to place.
                let placements = match device {
                    Device::Sim => &[Placement::SameCpu][..],
                    _ => &options.placements,
                };
                for &placement in placements {
                    let needs_kernel = matches!(device, Device::Tap | Device::Packet);
                    if needs_kernel && !has_kernel {
                        continue;
                    }
                    match open(device, super_segments, placement, options.pcap.as_ref()) {
                        Ok(place) => self.places.push(RefCell::new(place)),
                        Err(e) => {
                            eprintln!("no {} {}: {e}", device.name(), placement.title());
                        }
                    }
                }
            }
        }
    }
}

fn open(
    device: Device,
    super_segments: bool,
    placement: Placement,
    pcap: Option<&PathBuf>,
) -> io::Result<Box<dyn Place>> {
    let over = |over| Ground::with_super_segments(over, placement, super_segments, pcap);
    Ok(match device {
        Device::Sim => Box::new(Simulated::new(super_segments, pcap)?),
        Device::Tap => Box::new(over(Over::Tap)?),
        Device::Packet => Box::new(over(Over::Packet)?),
        Device::Shm => Box::new(Shared::new(placement, super_segments)?),
        Device::Link => Box::new(Joined::with_super_segments(placement, super_segments)?),
    })
}

/// Measures.
///
/// # Errors
/// As [`Grounds::open`]; a way that does not exist or cannot be measured here, by name.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Outcome> {
    names(options.what).check_exist(&options.ways)?;
    let grounds = Grounds::open(options, isolated)?;
    let mut ways = ways(options, &grounds);
    Names::check_opened(&options.ways, &method_names(&ways))?;
    ways.retain(|w| w.cell.map_or(options.limits, |c| is_wanted(options, c.method)));
    if ways.iter().all(|w| w.cell.is_none()) {
        return Err(io::Error::other("nothing of what was asked for can be measured here"));
    }
    let ratios = match options.what {
        What::Send => send_ratios(),
        What::SendFile => file_ratios(),
    };
    let ratios = ratios.into_iter().filter(|r| is_measured(r, &ways)).collect();
    let Options { budget, runs: max_runs, .. } = *options;
    let plan = Plan { ways, ratios, budget, max_runs, soak: budget >= SOAK_FROM };
    let mut outcome = bench::run(plan);
    choose_better(&mut outcome.figures);
    Ok(outcome)
}

/// What can be asked for.
fn names(what: What) -> Names {
    Names {
        fulmar: match what {
            What::Send => Method::all().into_iter().map(Method::name).collect(),
            What::SendFile => FileMethod::ALL.map(FileMethod::name).to_vec(),
        },
        kernel: kernel_calls(what).map(KernelCall::name).to_vec(),
    }
}

const fn kernel_calls(what: What) -> [KernelCall; 2] {
    match what {
        What::Send => [KernelCall::Write, KernelCall::ZeroCopy],
        What::SendFile => [KernelCall::SendFile, KernelCall::ReadWrite],
    }
}

/// Every way at every place that is asked for; the limit first.
fn ways<'a>(options: &'a Options, grounds: &'a Grounds) -> Vec<Way<'a>> {
    let mut ways = vec![limit::memcpy(Bulk { write_bytes: 64 << 10, ..Bulk::default() })];
    for &write_bytes in &options.write_bytes {
        let load = Load { buffer_bytes: options.buffer_bytes, ..Load::of_writes(write_bytes) };
        for place in &grounds.places {
            ways.extend(ways_at(options, place, grounds.file.as_ref(), load));
        }
        for pair in &grounds.pairs {
            for &placement in &options.placements {
                let works = kernel_works(options, grounds.file.as_ref(), load);
                ways.extend(works.map(|work| pair.way(work, placement)));
            }
        }
        let host = grounds.host.as_ref().filter(|_| options.what == What::Send);
        if let Some(host) = host.filter(|_| options.devices.contains(&Device::Shm)) {
            for &placement in &options.placements {
                let work = Work { call: KernelCall::Write, load, file: None };
                ways.extend(Local::ALL.map(|local| local.way(host, work, placement)));
            }
        }
    }
    ways
}

fn is_wanted(options: &Options, method: &str) -> bool {
    let is_variant = sosend::VARIANTS.iter().any(|v| v.name() == method);
    if options.ways.is_empty() { !is_variant } else { options.ways.iter().any(|w| w == method) }
}

/// fulmar's ways at one place.
fn ways_at<'a>(
    options: &Options,
    place: &'a RefCell<Box<dyn Place>>,
    file: Option<&'a BenchFile>,
    load: Load,
) -> Vec<Way<'a>> {
    match (options.what, file) {
        (What::SendFile, Some(file)) => file_ways(place, file, load),
        _ => Method::all().into_iter().map(|m| super::way(place, m, load)).collect(),
    }
}

/// Sending a hot and a cold file at one place, in every way.
pub fn file_ways<'a>(
    place: &'a RefCell<Box<dyn Place>>,
    file: &'a BenchFile,
    load: Load,
) -> Vec<Way<'a>> {
    let heats = [Heat::Hot, Heat::Cold];
    let by_reference = {
        let place = place.borrow();
        place.super_segments() && ["tap", "packet"].contains(&place.device())
    };
    let each = heats.into_iter().flat_map(|heat| FileMethod::ALL.map(|method| (heat, method)));
    let each = each.filter(|(_, method)| by_reference || *method != FileMethod::Mapped);
    each.map(|(heat, method)| file_way(place, method, file, heat, load)).collect()
}

/// A way of a bench: this file in this way at this place.
pub fn file_way<'a>(
    place: &'a RefCell<Box<dyn Place>>,
    method: FileMethod,
    file: &'a BenchFile,
    heat: Heat,
    load: Load,
) -> Way<'a> {
    let cell = {
        let place = place.borrow();
        Cell {
            side: Side::Sends,
            device: place.device(),
            method: method.name(),
            write_bytes: load.write_bytes,
            super_segments: place.super_segments(),
            source: heat.name(),
        }
    };
    let make = move |load: &Load| method.caller(load, file, heat);
    super::way_of(place, cell, method.title().to_owned(), load, make)
}

/// What the kernel does beside it.
fn kernel_works<'a>(
    options: &Options,
    file: Option<&'a BenchFile>,
    load: Load,
) -> impl Iterator<Item = Work<'a>> {
    let calls = kernel_calls(options.what);
    let files = match (options.what, file) {
        (What::SendFile, Some(file)) => vec![Some((file, Heat::Hot)), Some((file, Heat::Cold))],
        _ => vec![None],
    };
    let each = files.into_iter().flat_map(move |file| calls.map(|call| (call, file)));
    each.map(move |(call, file)| Work { call, load, file })
}

/// The name of a way at 64 KiB.
fn at_64k(method: &str, device: &str, super_segments: bool, source: &str, at: Placement) -> String {
    let tso = tso_name(super_segments);
    format!("{method}.{device}.64k.{tso}.{source}{}", at.name())
}

fn send_ratios() -> Vec<Ratio> {
    let all = counted_ratios().into_iter().chain(old_over_ours()).chain(shm_ratios());
    all.map(Ratio::from).collect()
}

/// fulmar's write at 64 KiB, both ends on one CPU.
fn ours_64k(device: &str, tso: bool) -> String {
    at_64k("ours", device, tso, "", Placement::SameCpu)
}

/// fulmar's write against what is known of it without another way of writing.
fn counted_ratios() -> [Asked; 2] {
    [
        Asked {
            name: "send.outputs_per_64k_write",
            sentence: "output calls per 64 KiB write, fulmar's way (the old way: 32)",
            way: ours_64k("sim", true),
            over: None,
            measure: |s| s.quotient("send_outputs", "calls"),
            published: Some(1.0),
            goals: (1.0, 1.0),
            more_is_better: false,
        },
        Asked {
            name: "send.sim.64k.tso.new_vs_memcpy",
            sentence: "sending thread's CPU ÷ memcpy through a ring as large as the window",
            way: ours_64k("sim", true),
            over: Some("limit.memcpy".to_owned()),
            measure: Sample::thread_ns_per_kb,
            published: None,
            goals: (1.5, 1.25),
            more_is_better: false,
        },
    ]
}

/// The old way against fulmar's.
fn old_over_ours() -> [Asked; 4] {
    let over_ours = |name, sentence, device, tso, published, goals| Asked {
        name,
        sentence,
        way: at_64k("old", device, tso, "", Placement::SameCpu),
        over: Some(ours_64k(device, tso)),
        measure: Sample::thread_ns_per_kb,
        published,
        goals,
        more_is_better: true,
    };
    let to_owned = "sending thread's CPU, old way ÷ send_owned, simulated device";
    [
        over_ours(
            "send.sim.64k.no_tso.old_vs_new",
            "sending thread's CPU, old way ÷ fulmar's, simulated device (published machine: 1.17)",
            "sim",
            false,
            Some(2.9),
            (1.5, 2.9),
        ),
        over_ours(
            "send.sim.64k.tso.old_vs_new",
            "the same with super-segments (published machine: 1.61)",
            "sim",
            true,
            Some(2.8),
            (2.8, 4.0),
        ),
        over_ours(
            "send.tap.64k.tso.old_vs_new",
            "the same over TAP: mostly crossings saved",
            "tap",
            true,
            None,
            (4.0, 10.0),
        ),
        Asked {
            over: Some(at_64k("owned", "sim", true, "", Placement::SameCpu)),
            ..over_ours("send.sim.64k.tso.old_vs_owned", to_owned, "sim", true, None, (10.0, 30.0))
        },
    ]
}

/// Two processes on two CPUs, against each of the kernel's ways.
fn shm_ratios() -> [Asked; 4] {
    let two = Placement::TwoCpus;
    let cost = |name, sentence, local: Local| Asked {
        name,
        sentence,
        way: at_64k("ours", "shm", true, "", two),
        over: Some(at_64k("kernel_write", local.name(), true, "", two)),
        measure: Sample::both_ns_per_kb,
        published: None,
        goals: (0.6, 0.3),
        more_is_better: false,
    };
    let faster = |name, sentence, local| Asked {
        measure: Sample::gbps,
        goals: (1.3, 2.5),
        more_is_better: true,
        ..cost(name, sentence, local)
    };
    [
        cost("send.shm.vs_loopback", "both ends' CPU, shm ÷ kernel loopback", Local::Loopback),
        cost("send.shm.vs_unix", "both ends' CPU, shm ÷ AF_UNIX", Local::Unix),
        faster(
            "send.shm.throughput_vs_loopback",
            "throughput, shm ÷ kernel loopback",
            Local::Loopback,
        ),
        faster("send.shm.throughput_vs_unix", "throughput, shm ÷ AF_UNIX", Local::Unix),
    ]
}

fn file_ratios() -> Vec<Ratio> {
    let same = Placement::SameCpu;
    let over_ours = |name, sentence, tso, published, goals| Asked {
        name,
        sentence,
        way: at_64k("old", "sim", tso, "", same),
        over: Some(at_64k("ours_read", "sim", tso, "", same)),
        measure: Sample::thread_ns_per_kb,
        published: Some(published),
        goals,
        more_is_better: true,
    };
    let all = [
        Asked {
            name: "sendfile.packets_per_output",
            sentence: "packets per output call of send_file, 64 KiB per call, super-segments",
            way: at_64k("ours_read", "sim", true, "", same),
            over: None,
            measure: |s| s.quotient("send_packets", "send_outputs"),
            published: Some(44.0),
            goals: (44.0, 44.0),
            more_is_better: true,
        },
        over_ours(
            "sendfile.sim.tso.old_vs_new",
            "sending thread's CPU, old sendfile ÷ send_file, both by read, super-segments",
            true,
            5.7,
            (3.0, 5.7),
        ),
        over_ours(
            "sendfile.sim.no_tso.old_vs_new",
            "the same without super-segments",
            false,
            1.81,
            (1.5, 1.81),
        ),
        Asked {
            name: "sendfile.tap.cold.vs_kernel",
            sentence: "machine's CPU, send_file over TAP ÷ kernel sendfile over veth, cold file, two CPUs",
            way: at_64k("ours_read", "tap", true, "cold.", Placement::TwoCpus),
            over: Some(at_64k("kernel_sendfile", "veth", true, "cold.", Placement::TwoCpus)),
            measure: Sample::machine_ns_per_kb,
            published: None,
            goals: (1.0, 0.6),
            more_is_better: false,
        },
    ];
    all.into_iter().map(Ratio::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Figure;
    use crate::stats::Estimate;

    fn figure(ratio: Asked, value: f64) -> Figure {
        Figure { ratio: ratio.into(), estimate: Estimate::of(&[value]) }
    }

    #[test]
    fn the_better_of_the_kernels_two_ways_is_the_one_that_is_judged() {
        let [loopback, unix, faster_loopback, faster_unix] = shm_ratios();
        let mut figures = vec![
            figure(loopback, 0.4),
            figure(unix, 0.7),
            figure(faster_loopback, 3.0),
            figure(faster_unix, 1.5),
        ];
        choose_better(&mut figures);
        let of = |name: &str| {
            let found = figures.iter().find(|f| f.ratio.name == name);
            found.and_then(|f| f.estimate).map(|e| e.median)
        };
        assert_eq!(of("send.shm.vs_kernel"), Some(0.7));
        assert_eq!(of("send.shm.throughput_vs_kernel"), Some(1.5));
    }

    #[test]
    fn every_figure_that_was_asked_for_has_its_name() {
        let mut names: Vec<String> = send_ratios().into_iter().map(|r| r.name).collect();
        names.extend(file_ratios().into_iter().map(|r| r.name));
        for name in [
            "send.outputs_per_64k_write",
            "sendfile.packets_per_output",
            "send.sim.64k.no_tso.old_vs_new",
            "send.sim.64k.tso.old_vs_new",
            "send.tap.64k.tso.old_vs_new",
            "send.sim.64k.tso.old_vs_owned",
            "send.sim.64k.tso.new_vs_memcpy",
            "sendfile.sim.tso.old_vs_new",
            "sendfile.sim.no_tso.old_vs_new",
            "sendfile.tap.cold.vs_kernel",
            "send.shm.vs_loopback",
            "send.shm.throughput_vs_unix",
        ] {
            assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
        }
    }
}
