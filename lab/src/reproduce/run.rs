//! Measures what a published table needs: every pair's old way, new way and fulmar's own, over a simulated device and
//! over TAP, the kernel's way for comparison, and the limit.

use super::{Method, Pair, Published, SystemUnderTest, figure_name, limit_name};
use crate::cpu::Placement;
use crate::file::CacheState;
use crate::harness::options::{Common, Stack};
use crate::harness::{MACHINE, Outcome, Ratio, Scenario};
use crate::kernel::Work;
use crate::kernel::send::KernelCall;
use crate::matrix::Device;
use crate::send::bench::{Options as Matrix, Testbeds, What, file_scenario, measure};
use crate::send::file::FileMethod;
use crate::send::{self, Load};
use crate::transfer::{GBPS, THREAD};
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
    /// Which TCP is measured.
    pub stack: Stack,
    /// Where fulmar's frames are written.
    pub pcap: Option<PathBuf>,
}

/// Measures for `table`. `isolated`: whether this process has namespaces of its own; without them
/// only the simulated device can be measured, which is said on standard error.
///
/// # Errors
/// Nothing can be measured here, or the kernel's side could not be set up although namespaces work.
pub fn run(table: &Published, options: &Options, isolated: io::Result<()>) -> io::Result<Outcome> {
    let matrix = matrix(table, options);
    let testbeds = Testbeds::open(table.what, &matrix, isolated)?;
    let scenarios = scenarios(table, options, &testbeds);
    let ratios = table.pairs.iter().flat_map(|pair| ratios(table, pair, &scenarios)).collect();
    measure(scenarios, ratios, &matrix)
}

/// What has to be opened.
fn matrix(table: &Published, options: &Options) -> Matrix {
    Matrix {
        common: options.common(),
        device: vec![Device::Sim, Device::Tap],
        kib: table.pairs.iter().map(|p| p.bytes >> 10).collect(),
        placement: vec![options.placement],
        stack: options.stack,
        pcap: options.pcap.clone(),
        ..Matrix::default()
    }
}

impl Options {
    pub(super) fn common(&self) -> Common {
        Common { seconds: Some(self.budget), runs: self.runs, ..Common::default() }
    }
}

/// Socket buffers were as large as a write in the table of writes; the other says nothing of them.
fn load(table: &Published, pair: &Pair) -> Load {
    let buffer_bytes = (table.what == What::Send).then_some(pair.bytes);
    Load { buffer_bytes, ..Load::of_writes(pair.bytes) }
}

fn scenarios<'a>(
    table: &Published,
    options: &Options,
    testbeds: &'a Testbeds,
) -> Vec<Scenario<'a>> {
    let mut ways: Vec<Scenario<'a>> = Vec::new();
    for pair in table.pairs {
        if ways.iter().all(|w| w.name != limit_name(pair.bytes)) {
            ways.push(limit_of(pair.bytes));
        }
        ways.extend(ours(table, pair, testbeds));
        ways.extend(kernels(table, pair, options, testbeds));
    }
    ways
}

/// A copy through a ring as large as the published buffer.
fn limit_of(bytes: usize) -> Scenario<'static> {
    let mut limit =
        limit::memcpy(Bulk { write_bytes: bytes, window_bytes: bytes, ..Bulk::default() });
    limit.name = limit_name(bytes);
    limit.title += &format!(", {} KiB", bytes >> 10);
    limit
}

/// The three ways of a pair at every place that cuts as the pair says, side by side.
fn ours<'a>(table: &Published, pair: &Pair, testbeds: &'a Testbeds) -> Vec<Scenario<'a>> {
    let load = load(table, pair);
    let rigs = testbeds.rigs.iter().filter(|p| p.borrow().config().super_segments == pair.tso);
    let at = |place| {
        table.methods.iter().filter_map(move |Method { name, .. }| {
            match (table.what, testbeds.file.as_ref()) {
                (What::Send, _) => {
                    let method = send::Method::all().into_iter().find(|m| m.name() == *name)?;
                    Some(send::scenario(place, method, load))
                }
                (What::SendFile, file) => {
                    let method = FileMethod::ALL.into_iter().find(|m| m.name() == *name)?;
                    Some(file_scenario(place, method, file?, CacheState::Hot, load))
                }
            }
        })
    };
    rigs.flat_map(at).collect()
}

/// What the kernel does, with and without offloads as the pair says.
fn kernels<'a>(
    table: &Published,
    pair: &Pair,
    options: &Options,
    testbeds: &'a Testbeds,
) -> Option<Scenario<'a>> {
    let call = KernelCall::ALL.into_iter().find(|c| c.name() == table.kernel)?;
    let veth = testbeds.pairs.iter().find(|p| p.has_offloads() == pair.tso)?;
    let file = testbeds.file.as_ref().map(|file| (file, CacheState::Hot));
    let work = Work { call, load: load(table, pair), file };
    Some(work.between(veth.ends(), options.placement))
}

/// What a figure puts over what.
struct Asked<'a> {
    account: &'static str,
    sentence: &'static str,
    way: (Method, &'a Pair),
    over: (Method, &'a Pair),
    key: &'static str,
    published: Option<f64>,
}

/// The pair's figures at both sites of fulmar's, as far as their ways are measured.
fn ratios(table: &Published, pair: &Pair, ways: &[Scenario<'_>]) -> Vec<Ratio> {
    let sites = [SystemUnderTest::Simulated, SystemUnderTest::Tap];
    let asked = asked(table, pair);
    let each = sites.iter().flat_map(|site| asked.iter().map(move |asked| (*site, asked)));
    each.filter_map(|(site, asked)| ratio(table, pair, site, asked, ways)).collect()
}

fn asked<'a>(table: &'a Published, pair: &'a Pair) -> Vec<Asked<'a>> {
    let [old, new, third] = table.methods;
    let of_thread = Asked {
        account: "cpu",
        sentence: "sending thread's CPU",
        way: (old, pair),
        over: (new, pair),
        key: THREAD,
        published: Some(pair.cpu_ratio),
    };
    let mut all = vec![
        Asked {
            account: "machine",
            sentence: "whole machine's CPU",
            key: MACHINE,
            published: pair.machine_ratio,
            ..of_thread
        },
        Asked { account: "third", over: (third, pair), published: None, ..of_thread },
    ];
    if let Some(without) = super::without_tso(table, pair) {
        all.push(Asked {
            account: "old_tso_speed",
            sentence: "throughput with TSO over throughput without",
            over: (old, without),
            key: GBPS,
            published: super::published_speed_ratio(table, pair),
            ..of_thread
        });
    }
    all.insert(0, of_thread);
    all
}

fn ratio(
    table: &Published,
    pair: &Pair,
    site: SystemUnderTest,
    asked: &Asked<'_>,
    ways: &[Scenario<'_>],
) -> Option<Ratio> {
    let name_of = |(method, pair): (Method, &Pair)| {
        let cell = super::cell_of(method.name, pair, site);
        ways.iter().find(|s| cell.is(s)).map(|s| s.name.clone())
    };
    let both = [name_of(asked.way)?, name_of(asked.over)?];
    let name = figure_name(table, pair, site, asked.account);
    let ratio = Ratio::over(name, sentence(asked, pair, site), asked.key, both).more_is_better();
    Some(Ratio { published: asked.published, ..ratio })
}

fn sentence(asked: &Asked<'_>, pair: &Pair, site: SystemUnderTest) -> String {
    let (kib, tso) = (pair.bytes >> 10, if pair.tso { "TSO" } else { "no TSO" });
    let (way, over) = (asked.way.0.title, asked.over.0.title);
    format!("{}, {way} \u{f7} {over}, {kib} KiB, {tso}, {}", asked.sentence, site.title())
}
