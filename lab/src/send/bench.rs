//! `bench send` and `bench sendfile`: which rigs are opened, which ways are measured at each, and
//! which of them are compared.
//!
//! The matrix is {device} x {super-segments} x {bytes per call} x {placement} x {way}; ways that are
//! compared stand side by side, so that a round runs them moments apart. A device that cannot be
//! opened here is said on standard error and left out, with its figures.

use super::file::FileMethod;
use super::shm::Shared;
use super::sim::Simulated;
use super::{Load, Method, Rig, sosend, tso_name};
use crate::cpu::Placement;
use crate::file::{BenchFile, CacheState};
use crate::harness::options::{Common, Stack, on_or_off, one_of, or, placement, within};
use crate::harness::report::{Report, Shape};
use crate::harness::{self, MACHINE, Outcome, Pace, Plan, Ratio, Scenario};
use crate::kernel::send::KernelCall;
use crate::kernel::{Local, Pair, Work};
use crate::matrix::{Device, Names, method_names};
use crate::stream::{Joined, Over, Testbed};
use crate::transfer::{self, BOTH, GBPS, THREAD};
use crate::{Bulk, limit};
use fulmar_gateway::netns::Netns;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Which of the two benches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum What {
    /// Writes.
    #[default]
    Send,
    /// Files.
    SendFile,
}

/// Variants of the send call: historical, published, fulmar's, the kernel's
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench send [OPTIONS]",
    after_help = "Variants for --way: old (buffers of 2 KiB, one protocol send each, as in stacks
before 2006), published (all buffers in one copy loop, one send), ours
(TcpStream::write), owned (send_owned, no copy), kernel_write, kernel_zerocopy.
Only if named, with one change each: each_4k, each_64k (larger buffers, one send
each), whole_2k, whole_64k (one send).
The command creates its own namespaces and removes them."
)]
pub struct Writes {
    /// What both have.
    #[command(flatten)]
    pub options: Options,
}

/// Variants of sending a file: page by page, fulmar's, read and write, the kernel's sendfile
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench sendfile [OPTIONS]",
    after_help = "Variants for --way: old (one page, one protocol send each, as before 2006),
read_write, ours_read (send_file), kernel_sendfile, kernel_read_write. Each sends
a hot part of the file (always the same bytes) and cold parts (advancing through
512 MiB that are in the page cache but not in the CPU caches).
The command creates its own namespaces and removes them."
)]
pub struct Files {
    /// What both have.
    #[command(flatten)]
    pub options: Options,
}

/// KiB of a write, or of the socket's buffer.
const MOST_KIB: usize = 16 << 10;

/// What is measured.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Options {
    /// How long, and where the report goes.
    #[command(flatten)]
    pub common: Common,
    /// CPUs of the two ends [default: same-cpu, two-cpus]
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    pub placement: Vec<Placement>,
    /// The devices [default: sim, tap, and shm for writes]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "sim|tap|packet|shm|link")]
    pub device: Vec<Device>,
    /// The TCP to measure
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    pub stack: Stack,
    /// Measure only these variants, listed below
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub way: Vec<String>,
    /// KiB per call, 1 to 16384 [default: writes 32, 64, 128; files 64, 1024]
    #[arg(long = "bytes", value_delimiter = ',', value_name = "KiB", value_parser = within(1, MOST_KIB))]
    pub kib: Vec<usize>,
    /// TSO on or off; both by default
    #[arg(long, value_name = "on|off", value_parser = on_or_off)]
    pub super_segments: Option<bool>,
    /// KiB of the sender's socket buffer, 1 to 16384 [default: fulmar 1024, kernel its own default]
    #[arg(long, value_name = "KiB", value_parser = within(1, MOST_KIB))]
    pub buffer: Option<usize>,
    /// Write fulmar's frames to this file (pcapng); this distorts the figures
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// The process itself is looked at, so that what fulmar is compared with stays away.
    #[arg(skip)]
    pub is_profiled: bool,
}

fn device(text: &str) -> Result<Device, String> {
    one_of(Device::ALL, Device::name, text)
}

impl Options {
    /// Time for the rounds.
    pub fn budget(&self) -> Duration {
        self.common.budget(Duration::from_secs(15), Duration::from_secs(240))
    }

    fn devices(&self, what: What) -> Vec<Device> {
        match what {
            What::Send => or(&self.device, &[Device::Sim, Device::Tap, Device::Shm]),
            What::SendFile => or(&self.device, &[Device::Sim, Device::Tap]),
        }
    }

    /// Bytes per call.
    fn sizes(&self, what: What) -> Vec<usize> {
        let kib: &[usize] = match (self.common.quick, what) {
            (true, _) => &[64],
            (false, What::Send) => &[32, 64, 128],
            (false, What::SendFile) => &[64, 1024],
        };
        or(&self.kib, kib).into_iter().map(|k| k << 10).collect()
    }

    fn super_segments(&self) -> Vec<bool> {
        self.super_segments.map_or(vec![true, false], |on| vec![on])
    }

    fn placements(&self) -> Vec<Placement> {
        match self.common.quick {
            true => or(&self.placement, &[Placement::SameCpu]),
            false => or(&self.placement, &[Placement::SameCpu, Placement::TwoCpus]),
        }
    }
}

const MTU: u32 = 1500;

/// Everything that was opened for a bench; ways borrow from it.
pub struct Testbeds {
    /// fulmar's rigs.
    pub rigs: Vec<RefCell<Box<dyn Rig>>>,
    /// The kernel's veth pairs, one with offloads, one without.
    pub pairs: Vec<Pair>,
    /// Where two kernel processes of one host talk.
    pub host: Option<Netns>,
    /// What file benches send.
    pub file: Option<BenchFile>,
}

impl Testbeds {
    /// Opens what the options ask for and this machine has; `isolated` says whether this process has
    /// namespaces of its own.
    ///
    /// # Errors
    /// The file to send cannot be made, or the kernel's pair cannot although namespaces work.
    pub fn open(what: What, options: &Options, isolated: io::Result<()>) -> io::Result<Testbeds> {
        let mut testbeds = Testbeds { rigs: Vec::new(), pairs: Vec::new(), host: None, file: None };
        let devices = options.devices(what);
        if what == What::SendFile {
            testbeds.file = Some(BenchFile::new()?);
        }
        let has_kernel = match isolated {
            Ok(()) => true,
            Err(e) => {
                eprintln!("cannot measure the kernel here: {e}");
                false
            }
        };
        // Beside real devices and the simulated one; between processes of one host there is no veth.
        let only_local = options.stack.has_fulmar() && devices.iter().all(|d| *d == Device::Shm);
        if options.stack.has_kernel() && has_kernel && !only_local {
            for super_segments in options.super_segments() {
                testbeds.pairs.push(Pair::new(MTU, super_segments)?);
            }
        }
        if options.stack.has_kernel() && has_kernel {
            testbeds.host = Some(Netns::current()?);
        }
        if options.stack.has_fulmar() {
            testbeds.open_places(&devices, options, has_kernel);
        }
        Ok(testbeds)
    }

    fn open_places(&mut self, devices: &[Device], options: &Options, has_kernel: bool) {
        for &device in devices {
            for super_segments in options.super_segments() {
                // Over the simulated device there is one end, and nothing to place.
                let placements = match device {
                    Device::Sim => vec![Placement::SameCpu],
                    _ => options.placements(),
                };
                for placement in placements {
                    let needs_kernel = matches!(device, Device::Tap | Device::Packet);
                    if needs_kernel && !has_kernel {
                        continue;
                    }
                    match open(device, super_segments, placement, options.pcap.as_ref()) {
                        Ok(rig) => self.rigs.push(RefCell::new(rig)),
                        Err(e) => {
                            eprintln!(
                                "not measured: {}, {}: {e}",
                                device.name(),
                                placement.title()
                            );
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
) -> io::Result<Box<dyn Rig>> {
    let over = |over| Testbed::with_super_segments(over, placement, super_segments, pcap);
    Ok(match device {
        Device::Sim => Box::new(Simulated::new(super_segments, pcap)?),
        Device::Tap => Box::new(over(Over::Tap)?),
        Device::Packet => Box::new(over(Over::Packet)?),
        Device::Shm => Box::new(Shared::new(placement, super_segments)?),
        Device::Link => Box::new(Joined::new(placement, super_segments)?),
    })
}

/// Measures.
///
/// # Errors
/// As [`Testbeds::open`]; a way that does not exist or cannot be measured here, by name.
pub fn run(what: What, options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    names(what).check_exist(&options.way)?;
    let testbeds = Testbeds::open(what, options, isolated)?;
    let mut scenarios = scenarios(what, options, &testbeds);
    Names::check_opened(&options.way, &method_names(&scenarios))?;
    scenarios.retain(|s| s.word("method").map_or(!options.is_profiled, |m| is_wanted(options, m)));
    let ratios = match what {
        What::Send => send_ratios(),
        What::SendFile => file_ratios(),
    };
    let outcome = measure(scenarios, ratios, options)?;
    let shape = match what {
        What::Send => transfer::SEND,
        What::SendFile => SENDFILE,
    };
    Ok(Report::of(&shape, outcome))
}

const SENDFILE: Shape =
    Shape { name: "sendfile", title: "Variants of sending files", ..transfer::SEND };

/// Runs these scenarios with the ratios whose scenarios are among them.
///
/// # Errors
/// No scenario has a method: only limits can be measured.
pub fn measure(
    scenarios: Vec<Scenario<'_>>,
    ratios: Vec<Ratio>,
    options: &Options,
) -> io::Result<Outcome> {
    if scenarios.iter().all(|s| s.word("method").is_none()) {
        return Err(io::Error::other("the options select nothing that can be measured here"));
    }
    let ratios = transfer::measured(ratios, &scenarios);
    let (budget, max_runs) = (options.budget(), options.common.runs);
    Ok(harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Transfers }))
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

/// Every way at every rig that is asked for; the limit first.
fn scenarios<'a>(what: What, options: &Options, testbeds: &'a Testbeds) -> Vec<Scenario<'a>> {
    let mut all = vec![limit::memcpy(Bulk { write_bytes: 64 << 10, ..Bulk::default() })];
    let has_shm = options.devices(what).contains(&Device::Shm);
    let file = testbeds.file.as_ref();
    for write_bytes in options.sizes(what) {
        let buffer_bytes = options.buffer.map(|kib| kib << 10);
        let load = Load { buffer_bytes, ..Load::of_writes(write_bytes) };
        for rig in &testbeds.rigs {
            all.extend(match file {
                Some(file) => file_scenarios(rig, file, load),
                None => Method::all().into_iter().map(|m| super::scenario(rig, m, load)).collect(),
            });
        }
        for pair in &testbeds.pairs {
            for placement in options.placements() {
                let works = kernel_works(what, file, load);
                all.extend(works.map(|work| work.between(pair.ends(), placement)));
            }
        }
        let host = testbeds.host.as_ref().filter(|_| has_shm && what == What::Send);
        for placement in options.placements() {
            let work = Work { call: KernelCall::Write, load, file: None };
            let both = |host| Local::ALL.map(|local| work.between(local.ends(host), placement));
            all.extend(host.into_iter().flat_map(both));
        }
    }
    all
}

fn is_wanted(options: &Options, method: &str) -> bool {
    let is_variant = sosend::VARIANTS.iter().any(|v| v.name() == method);
    if options.way.is_empty() { !is_variant } else { options.way.iter().any(|w| w == method) }
}

/// Sending a hot and a cold file at one rig, in every way.
fn file_scenarios<'a>(
    rig: &'a RefCell<Box<dyn Rig>>,
    file: &'a BenchFile,
    load: Load,
) -> Vec<Scenario<'a>> {
    let heats = [CacheState::Hot, CacheState::Cold];
    let each = heats.into_iter().flat_map(|heat| FileMethod::ALL.map(|method| (heat, method)));
    each.map(|(heat, method)| file_scenario(rig, method, file, heat, load)).collect()
}

/// A way of a bench: this file in this way at this rig.
pub fn file_scenario<'a>(
    rig: &'a RefCell<Box<dyn Rig>>,
    method: FileMethod,
    file: &'a BenchFile,
    heat: CacheState,
    load: Load,
) -> Scenario<'a> {
    let config = rig.borrow().config();
    let (cell, placement) = (config.cell(method.name(), &load, heat.name()), config.placement);
    let name = super::scenario_name(&cell, placement);
    cell.of(transfer::scenario(name, method.title(), placement, move |time| {
        let mut caller = method.caller(&load, file, heat)?;
        rig.borrow_mut().stream(&load, caller.as_mut(), time)
    }))
}

/// The kernel's works, for comparison.
fn kernel_works<'a>(
    what: What,
    file: Option<&'a BenchFile>,
    load: Load,
) -> impl Iterator<Item = Work<'a>> {
    let calls = kernel_calls(what);
    let files = match file {
        Some(file) => vec![Some((file, CacheState::Hot)), Some((file, CacheState::Cold))],
        None => vec![None],
    };
    let each = files.into_iter().flat_map(move |file| calls.map(|call| (call, file)));
    each.map(move |(call, file)| Work { call, load, file })
}

/// The name of a way at 64 KiB.
fn at_64k(method: &str, device: &str, super_segments: bool, source: &str, at: Placement) -> String {
    let tso = tso_name(super_segments);
    format!("{method}.{device}.64k.{tso}.{source}{}", at.name())
}

/// fulmar's write at 64 KiB, both ends on one CPU.
fn ours_64k(device: &str, tso: bool) -> String {
    at_64k("ours", device, tso, "", Placement::SameCpu)
}

fn send_ratios() -> Vec<Ratio> {
    let mut all = vec![
        Ratio::value(
            "send.outputs_per_64k_write",
            "output calls per 64 KiB write, fulmar's way (the old way: 32)",
            "output_calls_per_write",
            ours_64k("sim", true),
        )
        .goals(1.0, 1.0)
        .published(1.0),
        Ratio::over(
            "send.sim.64k.tso.new_vs_memcpy",
            "sending thread's CPU ÷ memcpy through a ring as large as the window",
            THREAD,
            [ours_64k("sim", true), "limit.memcpy".to_owned()],
        )
        .goals(1.5, 1.25),
    ];
    all.extend(old_over_ours());
    all.extend(shm_ratios());
    all
}

/// The old way against fulmar's.
fn old_over_ours() -> [Ratio; 4] {
    let over = |name, sentence, [device, new]: [&str; 2], tso, reach, aim| {
        let at = |method: &str| at_64k(method, device, tso, "", Placement::SameCpu);
        Ratio::over(name, sentence, THREAD, [at("old"), at(new)]).goals(reach, aim).more_is_better()
    };
    [
        over(
            "send.sim.64k.no_tso.old_vs_new",
            "sending thread's CPU, old way ÷ fulmar's, simulated device (published machine: 1.17)",
            ["sim", "ours"],
            false,
            1.5,
            2.9,
        )
        .published(2.9),
        over(
            "send.sim.64k.tso.old_vs_new",
            "the same with super-segments (published machine: 1.61)",
            ["sim", "ours"],
            true,
            2.8,
            4.0,
        )
        .published(2.8),
        over(
            "send.tap.64k.tso.old_vs_new",
            "the same over TAP: mostly crossings saved",
            ["tap", "ours"],
            true,
            4.0,
            10.0,
        ),
        over(
            "send.sim.64k.tso.old_vs_owned",
            "sending thread's CPU, old way ÷ send_owned, simulated device",
            ["sim", "owned"],
            true,
            10.0,
            30.0,
        ),
    ]
}

/// Two processes on two CPUs, against each of the kernel's ways, and against the better of them.
fn shm_ratios() -> [Ratio; 6] {
    let ours = at_64k("ours", "shm", true, "", Placement::TwoCpus);
    let kernel = |local: Local| at_64k("kernel_write", local.name(), true, "", Placement::TwoCpus);
    let [loopback, unix] = Local::ALL.map(kernel);
    let cost = |name, sentence, over: &String| {
        Ratio::over(name, sentence, BOTH, [&ours, over]).goals(0.6, 0.3)
    };
    let rate = |name, sentence, over: &String| {
        Ratio::over(name, sentence, GBPS, [&ours, over]).goals(1.3, 2.5).more_is_better()
    };
    let all = |key| [&ours, &loopback, &unix].map(|name| (name.clone(), key)).to_vec();
    [
        cost("send.shm.vs_loopback", "both ends' CPU, shm ÷ kernel loopback", &loopback),
        cost("send.shm.vs_unix", "both ends' CPU, shm ÷ AF_UNIX", &unix),
        rate("send.shm.throughput_vs_loopback", "throughput, shm ÷ kernel loopback", &loopback),
        rate("send.shm.throughput_vs_unix", "throughput, shm ÷ AF_UNIX", &unix),
        Ratio::new(
            "send.shm.vs_kernel",
            "both ends' CPU, shm ÷ the better of the kernel's two",
            all(BOTH),
            |t| t[0] / t[1].min(t[2]),
        )
        .goals(0.6, 0.3),
        Ratio::new(
            "send.shm.throughput_vs_kernel",
            "throughput, shm ÷ the better of the kernel's two",
            all(GBPS),
            |t| t[0] / t[1].max(t[2]),
        )
        .goals(1.3, 2.5)
        .more_is_better(),
    ]
}

fn file_ratios() -> Vec<Ratio> {
    let at = |method, tso| at_64k(method, "sim", tso, "", Placement::SameCpu);
    let old_over_new = |name, sentence, tso| {
        Ratio::over(name, sentence, THREAD, [at("old", tso), at("ours_read", tso)]).more_is_better()
    };
    let cold = |method, device| at_64k(method, device, true, "cold.", Placement::TwoCpus);
    vec![
        Ratio::value(
            "sendfile.packets_per_output",
            "packets per output call of send_file, 64 KiB per call, super-segments",
            "packets_per_output",
            at("ours_read", true),
        )
        .goals(44.0, 44.0)
        .published(44.0)
        .more_is_better(),
        old_over_new(
            "sendfile.sim.tso.old_vs_new",
            "sending thread's CPU, old sendfile ÷ send_file, both by read, super-segments",
            true,
        )
        .goals(3.0, 5.7)
        .published(5.7),
        old_over_new("sendfile.sim.no_tso.old_vs_new", "the same without super-segments", false)
            .goals(1.5, 1.81)
            .published(1.81),
        Ratio::over(
            "sendfile.tap.cold.vs_kernel",
            "machine's CPU, send_file over TAP ÷ kernel sendfile over veth, cold file, two CPUs",
            MACHINE,
            [cold("ours_read", "tap"), cold("kernel_sendfile", "veth")],
        )
        .goals(1.0, 0.6),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options::parsed;

    #[test]
    fn the_better_of_the_kernels_two_ways_is_the_one_that_is_judged() {
        let [.., cost, rate] = shm_ratios();
        assert_eq!((cost.of)(&[40.0, 100.0, 50.0]), 0.8);
        assert_eq!((rate.of)(&[30.0, 10.0, 20.0]), 1.5);
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
            "send.shm.vs_kernel",
            "send.shm.throughput_vs_kernel",
        ] {
            assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
        }
    }

    #[test]
    fn the_whole_matrix_is_measured_unless_a_part_is_asked_for() {
        let all: Options = parsed("").expect("nothing");
        assert_eq!(all.sizes(What::Send), [32 << 10, 64 << 10, 128 << 10]);
        assert_eq!(all.super_segments(), [true, false]);
        assert_eq!(all.placements(), [Placement::SameCpu, Placement::TwoCpus]);
        let part = "--bytes 16,48 --super-segments off --way old,ours --device tap";
        let part: Options = parsed(part).expect("a part");
        assert_eq!(part.sizes(What::Send), [16 << 10, 48 << 10]);
        assert_eq!(
            (part.super_segments(), part.devices(What::Send)),
            (vec![false], vec![Device::Tap])
        );
        assert_eq!(part.way, ["old", "ours"]);
        assert!(parsed::<Options>("--device ether").is_err());
    }

    #[test]
    fn quick_stays_under_twenty_seconds_and_full_is_a_few_minutes() {
        let budget = |line| parsed::<Options>(line).expect("options").budget();
        assert!(budget("--quick") < Duration::from_secs(20));
        assert!(budget("") <= Duration::from_secs(300));
    }
}
