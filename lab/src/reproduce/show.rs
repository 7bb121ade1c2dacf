//! A reproduction as a report.

use super::netperf::COLUMNS;
use super::verdict::unmeasured;
use super::{Judged, Line, Reproduction, SystemUnderTest};
use crate::harness::Outcome;
use crate::harness::report::{Report, Shape, Table, label, number, words};
use crate::stats::Estimate;
use crate::transfer;
use serde_json::{Value, json};

const LEGEND: &str = "\
util, SD      as netperf defines them: % of the whole machine, and CPU time per KB (1024 bytes). Then
              each end was a machine; here each end is its process.
user, sys     of the sending process (here its thread), for ten seconds of sending; time % is their sum.
              The kernel tells user from sys by sampling, coarsely in short runs.
machine       busy time of all CPUs; then of the sending machine, here of the one that holds both ends.
hardware      time of the simulated device, which is not the host's and in no other column.
verdict       by the interval's bounds: reproduced within 10 % of the published ratio; exceeded: a larger
              gain than published; shrunk: a smaller one; gone: none. Rows of the simulated device compare
              a model of hardware with the published machine.";

/// The published figures, the figures here, the verdicts, and all measurements for them.
pub fn report(found: &Reproduction, outcome: Outcome) -> Report {
    let table = found.published;
    let shape = Shape { name: table.name, title: table.title, lead: "", ..transfer::SEND };
    let bench = Report::of(&shape, outcome);
    let [old, new, third] = table.methods.map(|m| m.title);
    let mut notes = reasons(found);
    notes.extend(surprises(found));
    notes.extend(limits(found));
    notes.extend(bench.notes);
    Report {
        title: format!("Reproducing {}: {}", table.name, table.title),
        facts: vec![
            ("Published", table.source.to_owned()),
            ("Then", table.setup.to_owned()),
            ("Now", table.differs.to_owned()),
        ],
        lead: format!("Rows: a {old}; b {new}; c {third}. The kernel has its own way only."),
        tables: [lines(found), pairs(found)].into_iter().chain(bench.tables).collect(),
        notes,
        legend: LEGEND.to_owned(),
        ..bench
    }
}

fn shape_of(found: &Reproduction, number: u32) -> [String; 2] {
    let pair = found.pair_of(number);
    let tso = if pair.is_some_and(|p| p.tso) { "yes" } else { "no" };
    [pair.map_or(0, |p| p.bytes).to_string(), tso.to_owned()]
}

fn lines(found: &Reproduction) -> Table {
    let row = |line: &Line| {
        let mut cells = line.netperf.json();
        let [bytes, tso] = shape_of(found, line.pair);
        cells["row"] = line.row().into();
        cells["bytes"] = bytes.into();
        cells["tso"] = tso.into();
        cells["where"] = line.place().into();
        cells["site"] = line.site.map_or("published", SystemUnderTest::device).into();
        cells["way"] = line.way.clone().into();
        cells["verdict"] = found.verdict_of(line).into();
        cells
    };
    let place = [
        label("row", "row"),
        label("bytes", "bytes"),
        label("tso", "TSO"),
        label("where", "where"),
    ];
    let columns = place.into_iter().chain(COLUMNS).chain([words("verdict", "verdict")]);
    Table::of("The table", columns, found.lines.iter().map(row))
}

/// An estimate under this key; one of too few rounds says nothing.
fn put(cells: &mut Value, key: &str, estimate: Option<Estimate>) {
    for (end, of) in [
        ("", estimate.map(|e| e.median)),
        ("_low", estimate.map(|e| e.low)),
        ("_high", estimate.map(|e| e.high)),
    ] {
        cells[format!("{key}{end}")] = of.into();
    }
}

fn pairs(found: &Reproduction) -> Table {
    let row = |judged: &Judged| {
        let pair = found.pair_of(judged.pair);
        let [bytes, tso] = shape_of(found, judged.pair);
        let mut cells = json!({
            "pair": judged.pair.to_string(),
            "bytes": bytes,
            "tso": tso,
            "site": judged.site.device(),
            "where": judged.site.title(),
            "published_process": pair.map(|p| p.cpu_ratio),
            "published_machine": pair.and_then(|p| p.machine_ratio),
            "verdict": judged.verdict.word(),
            "because": judged.verdict.reason(),
        });
        put(&mut cells, "process_a_vs_b", judged.cpu);
        put(&mut cells, "machine_a_vs_b", judged.machine);
        put(&mut cells, "process_a_vs_c", judged.third);
        cells
    };
    let columns = [
        label("pair", "pair"),
        label("bytes", "bytes"),
        label("tso", "TSO"),
        label("where", "where"),
        number("published_process", "process, a/b\npublished", 2, ""),
        number("process_a_vs_b", "process, a/b\nhere", 2, "").with_interval(),
        number("published_machine", "machine, a/b\npublished", 2, ""),
        number("machine_a_vs_b", "machine, a/b\nhere", 2, "").with_interval(),
        number("process_a_vs_c", "process, a/c\nhere", 2, "").with_interval(),
        words("verdict", "verdict"),
    ];
    Table::of("Verdicts", columns, found.judged.iter().map(row))
}

/// One sentence for each verdict that has a reason; what was not measured is said once.
fn reasons(found: &Reproduction) -> Vec<String> {
    let reason = |j: &Judged| {
        let has_one = !j.verdict.is_unmeasured() && !j.verdict.reason().is_empty();
        has_one.then(|| format!("{} on {}: {}.", j.pair, j.site.title(), j.verdict))
    };
    let told = found.judged.iter().filter_map(reason);
    told.chain(unmeasured(found.judged.iter().map(|j| &j.verdict))).collect()
}

/// What was found odd then, and what became of it; the reasons each once, with where they hold.
fn surprises(found: &Reproduction) -> Vec<String> {
    let mut told = Vec::new();
    if !found.surprises.is_empty() {
        told.push(
            "The published surprise: with TSO the old way was slower than without.".to_owned(),
        );
    }
    for s in &found.surprises {
        told.push(format!(
            "Old way, {} KiB, {}: throughput with TSO \u{f7} without was {:.3}, is {} here: {}.",
            s.bytes >> 10,
            s.site.title(),
            s.published,
            super::verdict::between(Some(s.measured)),
            s.verdict.word()
        ));
    }
    for s in found.surprises.iter().filter(|s| !s.verdict.reason().is_empty()) {
        let reason = format!("On {} because {}.", s.site.title(), s.verdict.reason());
        if !told.contains(&reason) {
            told.push(reason);
        }
    }
    told
}

fn limits(found: &Reproduction) -> Option<String> {
    let cost = |(bytes, ns): &(usize, f64)| format!("{} KiB {ns:.0} ns/KB", bytes >> 10);
    let costs = found.limits.iter().map(cost).collect::<Vec<_>>().join(", ");
    let told = format!("The limit, one memcpy through a ring of that size: {costs}.");
    (!costs.is_empty()).then_some(told)
}
