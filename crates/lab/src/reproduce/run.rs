//! Measures what a published table needs: every pair's old way, new way and fulmar's own, over a
//! simulated device and over TAP, the kernel's way beside them, and the limit.

use super::{Method, Pair, Published, Site, figure_name, limit_name};
use crate::bench::{self, Outcome, Plan, Ratio, Sample, Way};
use crate::cpu::Placement;
use crate::file::Heat;
use crate::kernel::Work;
use crate::kernel_calls::KernelCall;
use crate::send::bench::{Device, Grounds, Options as Matrix, What, file_way};
use crate::send::file::FileMethod;
use crate::send::{self, Load};
use crate::{Bulk, limit};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What is asked of a reproduction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Time for everything.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
    /// Where the two ends run where there are two.
    pub placement: Placement,
    /// Measure fulmar.
    pub fulmar: bool,
    /// Measure the kernel.
    pub kernel: bool,
    /// Where fulmar's frames are written.
    pub pcap: Option<PathBuf>,
}

/// Measures for `table`. `isolated`: whether this process has namespaces of its own; without them
/// only the simulated device can be measured, which is said on standard error.
///
/// # Errors
/// Nothing can be measured here, or the kernel's side could not be set up although namespaces work.
pub fn run(table: &Published, options: &Options, isolated: io::Result<()>) -> io::Result<Outcome> {
    let grounds = Grounds::open(&matrix(table, options), isolated)?;
    let ways = ways(table, options, &grounds);
    if ways.iter().all(|w| w.cell.is_none()) {
        return Err(io::Error::other("nothing of this table can be measured here"));
    }
    let ratios = table.pairs.iter().flat_map(|pair| ratios(table, pair, &ways)).collect();
    let Options { budget, runs: max_runs, .. } = *options;
    Ok(bench::run(Plan { ways, ratios, budget, max_runs, soak: false }))
}

/// What has to be opened.
fn matrix(table: &Published, options: &Options) -> Matrix {
    Matrix {
        what: table.what,
        devices: vec![Device::Sim, Device::Tap],
        write_bytes: table.pairs.iter().map(|p| p.bytes).collect(),
        super_segments: vec![false, true],
        placements: vec![options.placement],
        ways: Vec::new(),
        buffer_bytes: None,
        fulmar: options.fulmar,
        kernel: options.kernel,
        budget: options.budget,
        runs: options.runs,
        pcap: options.pcap.clone(),
    }
}

/// Socket buffers were as large as a write in the table of writes; the other says nothing of them.
fn load(table: &Published, pair: &Pair) -> Load {
    let buffer_bytes = (table.what == What::Send).then_some(pair.bytes);
    Load { buffer_bytes, ..Load::of_writes(pair.bytes) }
}

fn ways<'a>(table: &Published, options: &Options, grounds: &'a Grounds) -> Vec<Way<'a>> {
    let mut ways: Vec<Way<'a>> = Vec::new();
    for pair in table.pairs {
        if ways.iter().all(|w| w.name != limit_name(pair.bytes)) {
            ways.push(limit_of(pair.bytes));
        }
        ways.extend(ours(table, pair, grounds));
        ways.extend(kernels(table, pair, options, grounds));
    }
    ways
}

/// A copy through a ring as large as the published buffer.
fn limit_of(bytes: usize) -> Way<'static> {
    let way = limit::memcpy(Bulk { write_bytes: bytes, window_bytes: bytes, ..Bulk::default() });
    Way { name: limit_name(bytes), title: format!("{}, {} KiB", way.title, bytes >> 10), ..way }
}

/// The three ways of a pair at every place that cuts as the pair says, side by side.
fn ours<'a>(table: &Published, pair: &Pair, grounds: &'a Grounds) -> Vec<Way<'a>> {
    let load = load(table, pair);
    let places = grounds.places.iter().filter(|p| p.borrow().super_segments() == pair.tso);
    let at = |place| {
        table.methods.iter().filter_map(move |Method { name, .. }| {
            match (table.what, grounds.file.as_ref()) {
                (What::Send, _) => {
                    let method = send::Method::all().into_iter().find(|m| m.name() == *name)?;
                    Some(send::way(place, method, load))
                }
                (What::SendFile, file) => {
                    let method = FileMethod::ALL.into_iter().find(|m| m.name() == *name)?;
                    Some(file_way(place, method, file?, Heat::Hot, load))
                }
            }
        })
    };
    places.flat_map(at).collect()
}

/// What the kernel does, with and without offloads as the pair says.
fn kernels<'a>(
    table: &Published,
    pair: &Pair,
    options: &Options,
    grounds: &'a Grounds,
) -> Option<Way<'a>> {
    let call = KernelCall::ALL.into_iter().find(|c| c.name() == table.kernel)?;
    // As `matrix` asks: without offloads first.
    let veth = grounds.pairs.get(usize::from(pair.tso))?;
    let file = grounds.file.as_ref().map(|file| (file, Heat::Hot));
    let work = Work { call, load: load(table, pair), file };
    Some(veth.way(work, options.placement))
}

/// The pair's figures at both sites of fulmar's, as far as their ways are measured.
fn ratios(table: &Published, pair: &Pair, ways: &[Way<'_>]) -> Vec<Ratio> {
    let [old, new, third] = table.methods;
    let accounts = [
        ("cpu", new, Sample::thread_ns_per_kb as fn(&Sample) -> f64, Some(pair.cpu_ratio)),
        ("machine", new, Sample::machine_ns_per_kb, pair.machine_ratio),
        ("third", third, Sample::thread_ns_per_kb, None),
    ];
    let sites = [Site::Simulated, Site::Tap].into_iter();
    sites
        .flat_map(|site| accounts.map(|account| (site, account)))
        .filter_map(|(site, (account, over, measure, published))| {
            let name_of = |method: Method| {
                let found = ways.iter().find(|w| {
                    w.cell.is_some_and(|c| super::is_cell_of(&c, method.name, pair, site))
                });
                found.map(|w| w.name.clone())
            };
            Some(Ratio {
                name: figure_name(table, pair, site, account),
                sentence: sentence(account, &old, &over, pair, site),
                way: name_of(old)?,
                over: Some(name_of(over)?),
                measure,
                reach_and_aim: None,
                more_is_better: true,
                published,
            })
        })
        .collect()
}

fn sentence(account: &str, old: &Method, over: &Method, pair: &Pair, site: Site) -> String {
    let what = if account == "machine" { "whole machine's CPU" } else { "sending thread's CPU" };
    let tso = if pair.tso { "TSO" } else { "no TSO" };
    let kib = pair.bytes >> 10;
    format!("{what}, {} \u{f7} {}, {kib} KiB, {tso}, {}", old.title, over.title, site.title())
}
