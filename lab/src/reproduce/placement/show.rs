//! The reproduction as a report.

use super::{
    DIFFERS, Found, Judged, LINES, Measured, NAME, Offload, Reproduction, SETUP, SOURCE, TITLE,
    percent,
};
use crate::harness::Outcome;
use crate::harness::report::{Column, Report, Shape, Table, label, number, words};
use crate::reproduce::SystemUnderTest;
use crate::reproduce::verdict::unmeasured;
use crate::transfer;
use serde_json::{Value, json};

const LEGEND: &str = "\
%             of one CPU that receiving 40 Gbit/s takes, at the cost per KB that was measured.
receiver      CPU of the receiver's process; on the simulated device this is the whole host.
both ends     on one machine, the sender's CPU is added, including the kernel's work for both ends.
verdict       by the interval's bounds: reproduced within 10 % of the published ratio.";

/// The published figures, the figures here, the verdicts, and all measurements for them.
pub fn report(found: &Reproduction, outcome: Outcome) -> Report {
    let shape = Shape { name: NAME, title: TITLE, lead: "", ..transfer::RECV };
    let bench = Report::of(&shape, outcome);
    let mut notes = reasons(found);
    notes.extend(limits(found));
    notes.extend(bench.notes);
    Report {
        title: format!("Reproducing {NAME}: {TITLE}"),
        facts: vec![
            ("Published", SOURCE.to_owned()),
            ("Then", SETUP.to_owned()),
            ("Now", DIFFERS.to_owned()),
        ],
        tables: [percents(found), ratios(found)].into_iter().chain(bench.tables).collect(),
        notes,
        legend: LEGEND.to_owned(),
        ..bench
    }
}

const COLUMNS: [Column; 13] = [
    label("row", "row"),
    label("what", "what"),
    label("where", "where"),
    number("stock_receiver_pct", "stock\nreceiver %", 1, ""),
    number("stock_both_ends_pct", "stock\nboth ends %", 1, ""),
    number("stock_receiver_ns_per_kb", "stock\nns/KB", 1, ""),
    number("offloaded_receiver_pct", "offloaded\nreceiver %", 1, ""),
    number("offloaded_both_ends_pct", "offloaded\nboth ends %", 1, ""),
    number("offloaded_receiver_ns_per_kb", "offloaded\nns/KB", 1, ""),
    number("placed_receiver_pct", "placed\nreceiver %", 1, ""),
    number("placed_both_ends_pct", "placed\nboth ends %", 1, ""),
    number("placed_receiver_ns_per_kb", "placed\nns/KB", 1, ""),
    number("placed_hardware_ns_per_kb", "placed, hardware\nns/KB", 1, ""),
];

/// Percent of one CPU at 40 Gbit/s, and the cost per KB that it follows from. The published row comes first in each
/// group.
fn percents(found: &Reproduction) -> Table {
    let of_line = |at: usize| {
        let line = &LINES[at];
        let place = |place: &str, site: &str| json!({"row": line.letter.to_string(), "what": line.title(), "where": place, "site": site});
        let mut then = place("published", "published");
        for (offload, percent) in Offload::ALL.into_iter().zip(line.percent) {
            then[format!("{}_receiver_pct", offload.title())] = percent.into();
        }
        let measured = found.found.iter().filter(move |f| f.line == at);
        let now = measured.filter(|f| f.cells.iter().any(Option::is_some)).map(move |f| {
            let mut row = place(f.site.title(), f.site.device());
            put_cells(&mut row, f);
            row
        });
        std::iter::once(then).chain(now).collect::<Vec<_>>()
    };
    let rows = (0..LINES.len()).flat_map(of_line);
    Table::of("Percent of one CPU at 40 Gbit/s, and the measured cost per KB", COLUMNS, rows)
}

fn put_cells(row: &mut Value, found: &Found) {
    for (offload, cell) in Offload::ALL.into_iter().zip(&found.cells) {
        let Some(Measured {
            receiver_ns_per_kb,
            both_ns_per_kb,
            hardware_ns_per_kb,
            gbps,
            placed_share,
        }) = cell
        else {
            continue;
        };
        for (key, value) in [
            ("receiver_pct", Some(percent(*receiver_ns_per_kb))),
            ("both_ends_pct", Some(percent(*both_ns_per_kb))),
            ("receiver_ns_per_kb", Some(*receiver_ns_per_kb)),
            ("both_ends_ns_per_kb", Some(*both_ns_per_kb)),
            ("hardware_ns_per_kb", *hardware_ns_per_kb),
            ("throughput_gbps", Some(*gbps)),
            ("placed_share", *placed_share),
        ] {
            row[format!("{}_{key}", offload.title())] = value.into();
        }
    }
}

fn ratios(found: &Reproduction) -> Table {
    let row = |judged: &Judged| {
        let line = &LINES[judged.line];
        json!({
            "row": line.letter.to_string(),
            "what": line.title(),
            "where": judged.site.title(),
            "site": judged.site.device(),
            "step": step(judged),
            "published": judged.published,
            "measured": judged.measured.map(|e| e.median),
            "measured_low": judged.measured.filter(|e| e.runs > 1).map(|e| e.low),
            "measured_high": judged.measured.filter(|e| e.runs > 1).map(|e| e.high),
            "verdict": word(judged),
            "because": judged.verdict.reason(),
        })
    };
    let columns = [
        label("row", "row"),
        label("what", "what"),
        label("where", "where"),
        label("step", "step"),
        number("published", "published", 1, ""),
        number("measured", "here", 2, "").with_interval(),
        words("verdict", "verdict"),
    ];
    Table::of("Verdicts", columns, looked_at(found).map(row))
}

fn step(judged: &Judged) -> String {
    format!("{} \u{f7} {}", judged.over.title(), judged.under.title())
}

/// The ratios where anything was measured; what a run left out has no rows.
fn looked_at(found: &Reproduction) -> impl Iterator<Item = &Judged> {
    let has_cells = |j: &&Judged| {
        let mut cells = Offload::ALL.into_iter().map(|o| found.cell(j.line, j.site, o));
        cells.any(|c| c.is_some())
    };
    found.judged.iter().filter(has_cells)
}

/// The kernel's own ratios stand beside the published ones, and prove nothing of fulmar.
fn word(judged: &Judged) -> &'static str {
    if judged.site == SystemUnderTest::Kernel { "not comparable" } else { judged.verdict.word() }
}

/// One sentence for each verdict that has a reason; what was not measured is said once.
fn reasons(found: &Reproduction) -> Vec<String> {
    let reason = |j: &&Judged| match j.verdict.reason() {
        "" => None,
        why => {
            let letter = LINES[j.line].letter;
            let (step, site) = (step(j), j.site.title());
            Some(format!("{letter}, {step}, {site}: {} because {why}.", j.verdict.word()))
        }
    };
    let ours: Vec<&Judged> =
        looked_at(found).filter(|j| j.site != SystemUnderTest::Kernel).collect();
    let told = ours.iter().filter(|j| !j.verdict.is_unmeasured()).filter_map(reason);
    told.chain(unmeasured(ours.iter().map(|j| &j.verdict))).collect()
}

/// What no way can beat.
fn limits(found: &Reproduction) -> Vec<String> {
    let mut out = Vec::new();
    if let Some(copy) = found.copy_ns_per_kb {
        let at = percent(copy);
        out.push(format!(
            "The limit of every way that copies, one memcpy: {copy:.0} ns/KB, {at:.0} % at 40 Gbit/s."
        ));
    }
    if let Some((near, both)) = found.floor_ns_per_kb {
        out.push(format!(
            "The limit over TAP, a peer that does nothing and copies nothing, on one CPU: {near:.0} ns/KB \
             ({:.0} %), with the kernel's end {both:.0} ({:.0} %).",
            percent(near),
            percent(both)
        ));
    }
    let kernel = "The kernel has no placement to show here: TCP_ZEROCOPY_RECEIVE maps whole pages, which \
                  takes an MTU of 4096 bytes and headers, or a card that splits headers off; so does \
                  io_uring's zero-copy receive.";
    out.push(kernel.to_owned());
    out
}
