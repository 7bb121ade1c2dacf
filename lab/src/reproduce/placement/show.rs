//! The reproduction for the terminal, for programs and for the browser.

use super::{
    DIFFERS, Found, Judged, LINES, Measured, NAME, Offload, Reproduction, SETUP, SOURCE, TITLE,
    percent,
};
use crate::page::{self, Block, Cell, Gauge, Gauges, Page, Section, Table};
use crate::report::new_table;
use crate::reproduce::Site;
use crate::reproduce::text::wrapped;
use crate::reproduce::verdict::{between, unmeasured};
use crate::stats::Estimate;
use serde_json::{Value, json};

const LEGEND: &str = "\
%             of one CPU that receiving 40 Gbit/s takes, at the cost per KB that was measured.
receiver      CPU of the receiver's process; on the simulated device that is the whole host.
both ends     on one machine the sender's is added, with what the kernel does for both inside of it.
verdict       by the interval's bounds: reproduced within 10 % of the published ratio.";

/// The reproduction as text.
pub fn text(found: &Reproduction) -> String {
    let mut parts = vec![
        format!("{NAME}: {TITLE}"),
        wrapped(&format!("Published: {SOURCE}.")),
        wrapped(&format!("Then: {SETUP}.")),
        wrapped(&format!("Now: {DIFFERS}")),
        percent_table(found),
        ratio_table(found),
    ];
    parts.extend(reasons(found).iter().map(|r| wrapped(r)));
    parts.extend(limits(found).iter().map(|l| wrapped(l)));
    parts.push(LEGEND.to_owned());
    parts.join("\n\n")
}

fn rounded(value: Option<f64>) -> String {
    match value {
        Some(v) if v < 10.0 => format!("{v:.1}"),
        Some(v) => format!("{v:.0}"),
        None => "\u{2013}".to_owned(),
    }
}

/// A head and what stands under it.
type Column = (&'static str, fn(&Measured) -> f64);

/// The columns of the table behind `row` and `where`, by offload.
const COLUMNS: [Column; 3] = [
    ("receiver %", |m| percent(m.receiver_ns_per_kb)),
    ("both ends %", |m| percent(m.both_ns_per_kb)),
    ("ns/KB", |m| m.receiver_ns_per_kb),
];

/// Every line of the table as words and numbers: the published rows first among their own.
fn table_rows(found: &Reproduction) -> Vec<(Vec<String>, Vec<Option<f64>>)> {
    let mut rows = Vec::new();
    for (at, line) in LINES.iter().enumerate() {
        let words = |place: &str| vec![line.letter.to_string(), line.title(), place.to_owned()];
        let then = line.percent.iter().flat_map(|p| [*p, None, None]).chain([None]);
        rows.push((words("published"), then.collect()));
        for f in found.found.iter().filter(|f| f.line == at) {
            if f.cells.iter().any(Option::is_some) {
                rows.push((words(f.site.title()), numbers(f)));
            }
        }
    }
    rows
}

fn numbers(found: &Found) -> Vec<Option<f64>> {
    let of = |cell: &Option<Measured>| COLUMNS.map(|(_, value)| cell.as_ref().map(value));
    let hardware = found.cells[Offload::Placed as usize].and_then(|m| m.hardware_ns_per_kb);
    found.cells.iter().flat_map(of).chain([hardware]).collect()
}

fn heads() -> Vec<String> {
    let mut heads = ["row", "what", "where"].map(str::to_owned).to_vec();
    for offload in Offload::ALL {
        heads.extend(COLUMNS.map(|(head, _)| format!("{}\n{head}", offload.title())));
    }
    heads.push("placed, hardware\nns/KB".to_owned());
    heads
}

fn percent_table(found: &Reproduction) -> String {
    let heads = heads();
    let mut table = new_table(heads.iter().map(String::as_str), 3);
    for (mut cells, numbers) in table_rows(found) {
        cells.extend(numbers.into_iter().map(rounded));
        table.add_row(cells);
    }
    table.to_string()
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

fn ratio_table(found: &Reproduction) -> String {
    let head = ["row", "what", "where", "step", "published", "here (95 %)", "verdict"];
    let mut table = new_table(head, 4);
    for judged in looked_at(found) {
        let line = &LINES[judged.line];
        table.add_row([
            line.letter.to_string(),
            line.title(),
            judged.site.title().to_owned(),
            step(judged),
            format!("{:.1}", judged.published),
            between(judged.measured),
            word(judged).to_owned(),
        ]);
    }
    table.to_string()
}

/// The kernel's own ratios stand beside the published ones, and prove nothing of fulmar.
fn word(judged: &Judged) -> &'static str {
    if judged.site == Site::Kernel { "not comparable" } else { judged.verdict.word() }
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
    let ours: Vec<&Judged> = looked_at(found).filter(|j| j.site != Site::Kernel).collect();
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

fn estimate_json(estimate: Option<Estimate>) -> Value {
    estimate.map_or(
        Value::Null,
        |e| json!({"median": e.median, "low": e.low, "high": e.high, "runs": e.runs}),
    )
}

/// Adds the reproduction to a bench's JSON, under `reproduction`.
pub fn json(found: &Reproduction, mut report: Value) -> Value {
    let cell = |line: usize, site: Site, offload: Offload| {
        found.cell(line, site, offload).map(|m| {
            json!({
                "receiver_pct_of_a_cpu": percent(m.receiver_ns_per_kb),
                "both_ends_pct_of_a_cpu": percent(m.both_ns_per_kb),
                "receiver_cpu_ns_per_kb": m.receiver_ns_per_kb,
                "both_ends_cpu_ns_per_kb": m.both_ns_per_kb,
                "hardware_ns_per_kb": m.hardware_ns_per_kb,
                "throughput_gbps": m.gbps,
                "placed_share": m.placed_share,
            })
        })
    };
    let lines: Vec<Value> = (0..LINES.len())
        .flat_map(|line| Site::ALL.map(|site| (line, site)))
        .map(|(at, site)| {
            let line = &LINES[at];
            let of = |offload: Offload| cell(at, site, offload);
            json!({
                "row": line.letter.to_string(),
                "what": line.title(),
                "site": site.device(),
                "published_pct_of_a_cpu": line.percent,
                "stock": of(Offload::Stock),
                "offloaded": of(Offload::Offloaded),
                "placed": of(Offload::Placed),
            })
        })
        .collect();
    let judged: Vec<Value> = found
        .judged
        .iter()
        .map(|j| {
            json!({
                "row": LINES[j.line].letter.to_string(),
                "site": j.site.device(),
                "step": format!("{}_vs_{}", j.over.title(), j.under.title()),
                "published": j.published,
                "measured": estimate_json(j.measured),
                "verdict": word(j),
                "because": j.verdict.reason(),
            })
        })
        .collect();
    let of = json!({
        "name": NAME, "title": TITLE, "source": SOURCE, "setup": SETUP, "differs": DIFFERS,
        "lines": lines, "ratios": judged, "limits": limits(found),
    });
    if let Some(object) = report.as_object_mut() {
        object.insert("reproduction".to_owned(), of);
    }
    report
}

/// The page: the verdicts, the table, and then everything that the bench measured.
pub fn page(found: &Reproduction, report: &Value) -> Page {
    let bench = page::report::page(report);
    let mut facts =
        vec![("published".to_owned(), SOURCE.to_owned()), ("then".to_owned(), SETUP.to_owned())];
    facts.extend(bench.facts);
    let mut sections = vec![verdict_section(found), table_section(found)];
    let not_again = |s: &Section| !s.heading.starts_with("At a glance");
    sections.extend(bench.sections.into_iter().filter(not_again));
    let lead = "Receiving into buffers that were posted before, placed by the device.".to_owned();
    Page { title: format!("Reproducing {NAME}"), lead, facts, sections }
}

fn verdict_section(found: &Reproduction) -> Section {
    let gauge = |j: &Judged| {
        let e = j.measured.filter(|_| !j.verdict.is_unmeasured())?;
        Some(Gauge {
            name: format!("{} \u{b7} {}", LINES[j.line].title(), step(j)),
            what: j.site.title().to_owned(),
            median: e.median,
            interval: (e.low, e.high),
            published: Some(j.published),
            goals: None,
            more_is_better: true,
            verdict: word(j).to_owned(),
        })
    };
    let gauges = Gauges {
        caption:
            "CPU of the receiver, one way over the other, on a logarithmic axis; the diamond is \
                  what was published."
                .to_owned(),
        gauges: found.judged.iter().filter_map(gauge).collect(),
    };
    let mut blocks = vec![Block::Prose(DIFFERS.to_owned())];
    if !gauges.is_empty() {
        blocks.push(Block::Gauges(gauges));
    }
    blocks.extend(reasons(found).into_iter().map(Block::Prose));
    Section::new("Verdicts", blocks)
}

fn table_section(found: &Reproduction) -> Section {
    let head = heads().into_iter().map(|h| (h.replace('\n', " "), String::new())).collect();
    let row = |(words, numbers): (Vec<String>, Vec<Option<f64>>)| {
        let mut cells: Vec<Cell> = words.into_iter().map(Cell::Text).collect();
        cells.extend(numbers.into_iter().map(|n| Cell::number(n, 1)));
        cells
    };
    let rows = table_rows(found).into_iter().map(row).collect();
    let caption = "Percent of one CPU at 40 Gbit/s, and the cost per KB behind it.".to_owned();
    let table = Table { caption, head, rows }.without_empty_columns();
    let mut blocks = vec![Block::Table(table)];
    blocks.extend(limits(found).into_iter().map(Block::Prose));
    Section::new("The table", blocks)
}
