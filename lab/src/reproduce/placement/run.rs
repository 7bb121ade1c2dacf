//! Measures what the table needs: each of its cells at every site, side by side.

use super::{LINES, Line, Offload, STEPS, cell_of, figure_name, method};
use crate::cpu::Placement;
use crate::harness::{Outcome, Ratio, Scenario};
use crate::matrix::Device;
use crate::recv::bench::{Options as Matrix, measure};
use crate::recv::{Use, scenario_name};
use crate::reproduce::SystemUnderTest;
use crate::reproduce::run::Options;
use crate::transfer::THIS_END;
use std::io;

/// Measures. `isolated`: whether this process has namespaces of its own; without them only the
/// simulated device can be measured, which is said on standard error.
///
/// # Errors
/// Nothing can be measured here, or the kernel's side could not be set up although namespaces work.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Outcome> {
    let in_table = |scenario: &Scenario<'_>| {
        let places = || SystemUnderTest::ALL.into_iter().flat_map(|s| Offload::ALL.map(|o| (s, o)));
        let is_it =
            |cell: Option<_>| cell.is_some_and(|cell: crate::transfer::Cell| cell.is(scenario));
        LINES.iter().any(|line| places().any(|(s, o)| is_it(cell_of(line, o, s))))
    };
    let each = LINES.iter().flat_map(|line| SystemUnderTest::ALL.map(|site| (line, site)));
    let ratios = each.flat_map(|(line, site)| ratios(line, site, options.placement)).collect();
    measure(&matrix(options), ratios, in_table, isolated)
}

/// What has to be opened.
fn matrix(options: &Options) -> Matrix {
    let cells = LINES.iter().flat_map(|line| Offload::ALL.map(|o| (line.ask, o)));
    let sites = SystemUnderTest::ALL.into_iter().filter(|site| match site {
        SystemUnderTest::Kernel => options.stack.has_kernel(),
        SystemUnderTest::Tap | SystemUnderTest::Simulated => options.stack.has_fulmar(),
    });
    let sites: Vec<SystemUnderTest> = sites.collect();
    let mut ways: Vec<String> = cells
        .flat_map(|(ask, o)| sites.iter().filter_map(move |site| method(ask, o, *site)))
        .map(|(name, _)| name.to_owned())
        .collect();
    ways.sort();
    ways.dedup();
    Matrix {
        common: options.common(),
        device: vec![Device::Sim, Device::Tap],
        uses: vec![Use::Untouched],
        placement: vec![options.placement],
        way: ways,
        stack: options.stack,
        pcap: options.pcap.clone(),
        ..Matrix::default()
    }
}

/// The ratios of a row at a site: the receiving host's CPU.
fn ratios(line: &Line, site: SystemUnderTest, placement: Placement) -> Vec<Ratio> {
    let at = if site == SystemUnderTest::Simulated { Placement::SameCpu } else { placement };
    let name = |offload| Some(scenario_name(&cell_of(line, offload, site)?, at));
    let ratio = |(over, under): (Offload, Offload)| {
        let (over_title, under_title) = (over.title(), under.title());
        let (what, place) = (line.title(), site.title());
        let sentence =
            format!("receiver's CPU, {over_title} \u{f7} {under_title}, {what}, {place}");
        let both = [name(over)?, name(under)?];
        let ratio = Ratio::over(figure_name(line, site, over, under), sentence, THIS_END, both);
        Some(Ratio { published: line.ratio(over, under), ..ratio.more_is_better() })
    };
    STEPS.into_iter().filter_map(ratio).collect()
}
