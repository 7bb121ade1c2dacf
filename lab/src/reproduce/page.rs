//! A reproduction for the browser.

use super::netperf::{COLUMNS, Column};
use super::text::{SURPRISE, reasons, surprise_of, surprise_reasons, ways};
use super::{Judged, Line, Reproduction, Site};
use crate::page::{self, Bar, Bars, Block, Cell, Gauge, Gauges, Mark, Page, Section, Table};
use serde_json::Value;

/// The page: the verdicts, then and now, the table, and then everything that the bench measured.
pub fn page(found: &Reproduction, report: &Value) -> Page {
    let table = found.published;
    let bench = page::report::page(report);
    let mut sections = vec![verdicts(found)];
    sections.extend(then(found));
    sections.extend(now(found));
    sections.push(table_section(found));
    sections.extend(surprise_section(found));
    let not_again = |s: &Section| !s.heading.starts_with("At a glance");
    sections.extend(bench.sections.into_iter().filter(not_again));
    let mut facts = vec![
        ("published".to_owned(), table.source.to_owned()),
        ("then".to_owned(), table.setup.to_owned()),
    ];
    facts.extend(bench.facts);
    Page {
        title: format!("Reproducing {}", table.name),
        lead: format!("{}.", capital(table.title)),
        facts,
        sections,
    }
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

fn prose(text: &str) -> Block {
    Block::Prose(text.to_owned())
}

fn verdicts(found: &Reproduction) -> Section {
    let gauge = |j: &Judged| {
        let e = j.cpu.filter(|_| !j.verdict.is_unmeasured())?;
        let pair = found.pair_of(j.pair)?;
        let segments = if pair.tso { "TSO" } else { "no TSO" };
        Some(Gauge {
            name: format!("{} \u{b7} {} KiB, {segments}", j.pair, pair.bytes >> 10),
            what: j.site.title().to_owned(),
            median: e.median,
            interval: (e.low, e.high),
            published: Some(pair.cpu_ratio),
            goals: None,
            more_is_better: true,
            verdict: j.verdict.word().to_owned(),
        })
    };
    let gauges = Gauges {
        caption: "CPU of the sending process, old way over new way, on a logarithmic axis; the \
                  diamond is what was published."
            .to_owned(),
        gauges: found.judged.iter().filter_map(gauge).collect(),
    };
    let mut blocks = vec![prose(found.published.differs)];
    if !gauges.is_empty() {
        blocks.push(Block::Gauges(gauges));
    }
    blocks.extend(reasons(found).iter().map(|r| prose(r)));
    Section::new("Verdicts", blocks)
}

/// The published rows and the measured ones have charts of their own, since an old machine's bars
/// beside today's would say nothing about either.
fn then(found: &Reproduction) -> Option<Section> {
    let caption = "CPU of the sending process, as time(1) saw it, per KB; shorter is better.";
    let bars = cost(found, &[None], caption);
    (!bars.bars.is_empty()).then(|| Section::new("Then", vec![Block::Bars(bars)]))
}

fn now(found: &Reproduction) -> Option<Section> {
    let real = "fulmar over TAP, and the kernel's own write over veth: CPU of the sending thread \
                per KB.";
    let simulated = "fulmar over the simulated device: CPU of the sending thread per KB. The number \
                     leaves out the hardware.";
    let charts = [
        cost(found, &[Some(Site::Tap), Some(Site::Kernel)], real),
        cost(found, &[Some(Site::Simulated)], simulated),
    ];
    let blocks: Vec<Block> =
        charts.into_iter().filter(|c| !c.bars.is_empty()).map(Block::Bars).collect();
    (!blocks.is_empty()).then(|| Section::new("Now", blocks))
}

/// CPU per KB of the lines at these sites.
fn cost(found: &Reproduction, sites: &[Option<Site>], caption: &str) -> Bars {
    let bars: Vec<Bar> =
        found.lines.iter().filter(|l| sites.contains(&l.site)).map(|l| bar(found, l)).collect();
    let mut parts = vec![("sending process".to_owned(), 0)];
    if bars.iter().any(|b| b.values[1] > 0.0) {
        parts.push(("simulated hardware, not the host's".to_owned(), 7));
    }
    let marks = found.limits.last().filter(|_| !sites.contains(&None));
    Bars {
        caption: caption.to_owned(),
        unit: "ns of CPU per KB".to_owned(),
        parts,
        bars,
        marks: marks
            .map(|l| Mark { value: l.1, label: "one memcpy".to_owned() })
            .into_iter()
            .collect(),
    }
}

fn bar(found: &Reproduction, line: &Line) -> Bar {
    let (n, pair) = (&line.netperf, found.pair_of(line.pair));
    let tso = if pair.is_some_and(|p| p.tso) { "TSO" } else { "no TSO" };
    let hardware = if n.hardware_ns_per_kb.is_finite() { n.hardware_ns_per_kb } else { 0.0 };
    let row = if line.site == Some(Site::Kernel) { String::new() } else { line.row() };
    Bar {
        group: format!("{} KiB, {tso}", pair.map_or(0, |p| p.bytes) >> 10),
        label: format!("{row} {}", line.way),
        values: vec![n.process_ns_per_kb, hardware],
        note: Some(page::short(n.process_ns_per_kb)),
        ..Bar::default()
    }
}

fn table_section(found: &Reproduction) -> Section {
    let mut head = ["row", "bytes", "TSO", "where"].map(|h| (h.to_owned(), String::new())).to_vec();
    head.extend(COLUMNS.iter().map(|c| (c.head.replace('\n', " "), c.hint.to_owned())));
    head.push(("verdict".to_owned(), String::new()));
    let row = |line: &Line| {
        let (bytes, tso) = found.shape_of(line.pair);
        let words = [line.row(), bytes, tso.to_owned(), line.place().to_owned()];
        let mut cells: Vec<Cell> = words.into_iter().map(Cell::Text).collect();
        let number = |c: &Column| {
            let value = (c.of)(&line.netperf);
            Cell::number(Some(value).filter(|v| v.is_finite()), c.decimals)
        };
        cells.extend(COLUMNS.iter().map(number));
        cells.push(Cell::Text(found.verdict_of(line).to_owned()));
        cells
    };
    let rows = found.lines.iter().map(row).collect();
    let caption = "In the published shape. Point at a column's head for what it is.".to_owned();
    let table = Table { caption, head, rows }.without_empty_columns();
    let mut blocks = vec![prose(&ways(found.published)), Block::Table(table)];
    let limits = found.limits.iter().map(|(b, ns)| format!("{} KiB {ns:.0} ns/KB", b >> 10));
    let limits = limits.collect::<Vec<_>>().join(", ");
    if !limits.is_empty() {
        blocks.push(prose(&format!("One memcpy through a ring of that size: {limits}.")));
    }
    Section::new("The table", blocks)
}

fn surprise_section(found: &Reproduction) -> Option<Section> {
    if found.surprises.is_empty() {
        return None;
    }
    let mut blocks = vec![prose(SURPRISE)];
    blocks.extend(found.surprises.iter().map(|s| prose(&surprise_of(s))));
    blocks.extend(surprise_reasons(found).iter().map(|r| prose(r)));
    Some(Section::new("Slower with TSO?", blocks))
}
