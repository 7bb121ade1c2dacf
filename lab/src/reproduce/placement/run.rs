//! Measures what the table needs: each of its cells at every site, side by side.

use super::{LINES, Line, Offload, STEPS, figure_name, is_cell_of, method};
use crate::bench::{Outcome, Ratio, Sample};
use crate::cpu::Placement;
use crate::matrix::Device;
use crate::recv::bench::{Options as Matrix, measure};
use crate::recv::{Use, size_name};
use crate::reproduce::Site;
use crate::reproduce::run::Options;
use std::io;

/// Measures. `isolated`: whether this process has namespaces of its own; without them only the
/// simulated device can be measured, which is said on standard error.
///
/// # Errors
/// Nothing can be measured here, or the kernel's side could not be set up although namespaces work.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Outcome> {
    let in_table = |cell: &crate::bench::Cell| {
        let places = || Site::ALL.into_iter().flat_map(|s| Offload::ALL.map(|o| (s, o)));
        LINES.iter().any(|line| places().any(|(s, o)| is_cell_of(cell, line, o, s)))
    };
    let each = LINES.iter().flat_map(|line| Site::ALL.map(|site| (line, site)));
    let ratios = each.flat_map(|(line, site)| ratios(line, site, options.placement)).collect();
    measure(&matrix(options), ratios, in_table, isolated)
}

/// What has to be opened.
fn matrix(options: &Options) -> Matrix {
    let cells = LINES.iter().flat_map(|line| Offload::ALL.map(|o| (line.ask, o)));
    let sites = Site::ALL.into_iter().filter(|site| match site {
        Site::Kernel => options.kernel,
        Site::Tap | Site::Simulated => options.fulmar,
    });
    let sites: Vec<Site> = sites.collect();
    let mut ways: Vec<String> = cells
        .flat_map(|(ask, o)| sites.iter().filter_map(move |site| method(ask, o, *site)))
        .map(|(name, _)| name.to_owned())
        .collect();
    ways.sort();
    ways.dedup();
    Matrix {
        devices: vec![Device::Sim, Device::Tap],
        buffer_bytes: vec![64 << 10, 1 << 20],
        aggregation: vec![false, true],
        uses: vec![Use::Untouched],
        placements: vec![options.placement],
        ways,
        fulmar: options.fulmar,
        kernel: options.kernel,
        budget: options.budget,
        runs: options.runs,
        pcap: options.pcap.clone(),
        limits: true,
    }
}

/// The ratios of a row at a site: the receiving host's CPU.
fn ratios(line: &Line, site: Site, placement: Placement) -> Vec<Ratio> {
    let at = if site == Site::Simulated { Placement::SameCpu } else { placement };
    let name = |offload| {
        let (name, aggregates) = method(line.ask, offload, site)?;
        let aggregation = if aggregates { "agg" } else { "no_agg" };
        let (device, size) = (site.device(), size_name(line.bytes));
        Some(format!("{name}.{device}.2x{size}.{aggregation}.untouched.{}", at.name()))
    };
    let ratio = |(over, under): (Offload, Offload)| {
        Some(Ratio {
            name: figure_name(line, site, over, under),
            sentence: format!(
                "receiver's CPU, {} \u{f7} {}, {}, {}",
                over.title(),
                under.title(),
                line.title(),
                site.title()
            ),
            way: name(over)?,
            over: Some(name(under)?),
            measure: Sample::near_ns_per_kb,
            reach_and_aim: None,
            more_is_better: true,
            published: line.ratio(over, under),
        })
    };
    STEPS.into_iter().filter_map(ratio).collect()
}
