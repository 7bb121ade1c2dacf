//! What a bench prints: a table for people, JSON for programs.
//!
//! The JSON has `machine`, `command`, `rows` (one per way, units in the keys) and `ratios` (stable
//! dotted names to `{median, low, high, runs}`), plus `stopped_because` and `elapsed_s`.

use crate::bench::{Figure, Outcome, QUOTIENTS, Row, Side};
use crate::stats::Estimate;
use crate::{cells, cpu, recv};
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use serde_json::{Map, Value, json};
use std::fs;
use std::time::Duration;

/// One rule under the header, nothing else: many rows have to fit on a screen.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::new('─', '─', '─', '─'));

/// What the figures were measured on.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The CPU's name for itself.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// The kernel's release.
    pub kernel: String,
    /// The version of fulmar.
    pub fulmar: &'static str,
}

impl Machine {
    /// Looks at this machine.
    pub fn here() -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            cpu: name.map_or("unknown", |(_, n)| n).trim().into(),
            cpus: cpu::allowed_cpus().map_or(1, |c| c.len()),
            kernel: kernel.trim().into(),
            fulmar: env!("CARGO_PKG_VERSION"),
        }
    }

    /// In one line.
    pub fn sentence(&self) -> String {
        let Machine { cpu, cpus, kernel, fulmar } = self;
        format!("fulmar {fulmar} on {cpus} CPUs, {cpu}, Linux {kernel}")
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "cpu": self.cpu,
            "cpus": self.cpus,
            "kernel": self.kernel,
            "fulmar": self.fulmar,
        })
    }
}

/// A sentence to print before a bench if the machine has other things to do. Looks for 0.3 s.
pub fn busy_warning() -> Option<String> {
    let share = cpu::busy_share_over(Duration::from_millis(300)).ok()?;
    (share > cpu::BUSY_SHARE).then(|| {
        format!(
            "warning: the machine is {:.0} % busy before the bench starts; the figures will be noisy",
            share * 100.0
        )
    })
}

/// The whole report as JSON. `command` is the command line as given.
pub fn json(machine: &Machine, command: &[String], outcome: &Outcome) -> Value {
    let ratios: Map<String, Value> = outcome
        .figures
        .iter()
        .filter_map(|f| Some((f.ratio.name.clone(), figure_json(f, f.estimate?))))
        .collect();
    json!({
        "machine": machine.to_json(),
        "command": command,
        "rows": outcome.rows.iter().map(row_json).collect::<Vec<_>>(),
        "ratios": ratios,
        "stopped_because": outcome.stop.sentence(),
        "elapsed_s": outcome.elapsed.as_secs_f64(),
    })
}

fn figure_json(f: &Figure, e: Estimate) -> Value {
    json!({
        "what": f.ratio.sentence,
        "published": f.ratio.published,
        "reach": f.ratio.reach_and_aim.map(|g| g.0),
        "aim": f.ratio.reach_and_aim.map(|g| g.1),
        "more_is_better": f.ratio.more_is_better,
        "verdict": verdict(f),
        "median": e.median,
        "low": e.low,
        "high": e.high,
        "runs": e.runs,
        "confidence": e.confidence,
    })
}

fn row_json(row: &Row) -> Value {
    let mut json = figures_of(row);
    for (key, _, _) in QUOTIENTS {
        if let (Some(n), Some(object)) = (row.quotient(key), json.as_object_mut()) {
            object.insert(key.into(), n.into());
        }
    }
    json
}

fn figures_of(row: &Row) -> Value {
    let median = |e: Option<Estimate>| e.map(|e| e.median);
    let cell_of = |side| row.cell.filter(|c| c.side == side);
    let counts: Map<String, Value> =
        row.counts.iter().map(|(name, n)| ((*name).into(), (*n).into())).collect();
    json!({
        "name": row.name,
        "title": row.title,
        "placement": row.placement.name(),
        "device": row.cell.map(|c| c.device),
        "method": row.cell.map(|c| c.method),
        "write_bytes": cell_of(Side::Sends).map(|c| c.write_bytes),
        "buffer_bytes": cell_of(Side::Receives).map(|c| c.write_bytes),
        "super_segments": row.cell.map(|c| c.super_segments),
        "source": row.cell.map(|c| c.source),
        "throughput_gbps": median(row.gbps),
        "thread_cpu_ns_per_kb": median(row.thread_ns_per_kb.or(row.near_ns_per_kb)),
        "this_end_cpu_ns_per_kb": median(row.near_ns_per_kb),
        "hardware_ns_per_kb": median(row.hardware_ns_per_kb),
        "peer_cpu_ns_per_kb": median(row.far_ns_per_kb),
        "both_ends_cpu_ns_per_kb": median(row.both_ns_per_kb),
        "both_ends_cpu_low_ns_per_kb": row.both_ns_per_kb.map(|e| e.low),
        "both_ends_cpu_high_ns_per_kb": row.both_ns_per_kb.map(|e| e.high),
        "thread_cpu_low_ns_per_kb": row.thread_ns_per_kb.map(|e| e.low),
        "thread_cpu_high_ns_per_kb": row.thread_ns_per_kb.map(|e| e.high),
        "machine_cpu_ns_per_kb": row.machine_ns_per_kb,
        "service_demand_us_per_kb": median(row.service_demand_us_per_kb),
        "service_demand_low_us_per_kb": row.service_demand_us_per_kb.map(|e| e.low),
        "service_demand_high_us_per_kb": row.service_demand_us_per_kb.map(|e| e.high),
        "soaker_cpu_ns_per_kb": row.soaker_ns_per_kb,
        "ci95_half_width_pct": row.both_ns_per_kb.map(|e| e.half_width_pct()),
        "runs": row.both_ns_per_kb.map_or(0, |e| e.runs),
        "counts": counts,
        "counted_bytes": row.counted_bytes,
        "error": row.error,
    })
}

/// The whole report as text: machine, rows, ratios, legend.
pub fn text(machine: &Machine, outcome: &Outcome) -> String {
    let mut parts = vec![machine.sentence()];
    let tables = [cells::text(&outcome.rows), recv::table::text(&outcome.rows)];
    let tables: Vec<String> = tables.into_iter().filter(|t| !t.is_empty()).collect();
    if tables.is_empty() {
        parts.push(rows_table(outcome.rows.iter()));
    } else {
        parts.extend(tables);
        let others: Vec<&Row> = outcome.rows.iter().filter(|r| r.cell.is_none()).collect();
        if !others.is_empty() {
            parts.push(rows_table(others.into_iter()));
        }
    }
    let failures = outcome.rows.iter().filter_map(|r| {
        let error = r.error.as_ref()?;
        Some(format!("not measured: {}, {}: {error}", r.title, r.placement.title()))
    });
    parts.extend(failures);
    if !outcome.figures.is_empty() {
        parts.push(figures_table(&outcome.figures));
    }
    parts.push(legend(outcome));
    parts.join("\n\n")
}

pub(crate) fn new_table<'a>(header: impl IntoIterator<Item = &'a str>, left: usize) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.into_iter().collect::<Vec<_>>());
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn rows_table<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let header = [
        "way",
        "ends on",
        "Gb/s",
        "this end\nns/KB",
        "other end\nns/KB",
        "both ends\nns/KB",
        "95 %",
        "machine\nns/KB",
        "soaker\nns/KB",
        "runs",
    ];
    let mut table = new_table(header, 2);
    let number = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{v:.0}"));
    let median = |e: Option<Estimate>| number(e.map(|e| e.median));
    for r in rows {
        table.add_row([
            r.title.clone(),
            r.placement.title().into(),
            r.gbps.map_or_else(|| "–".into(), |e| format!("{:.1}", e.median)),
            median(r.near_ns_per_kb),
            median(r.far_ns_per_kb),
            median(r.both_ns_per_kb),
            cells::interval(r.both_ns_per_kb, 0),
            number(r.machine_ns_per_kb),
            number(r.soaker_ns_per_kb),
            r.both_ns_per_kb.map_or(0, |e| e.runs).to_string(),
        ]);
    }
    table.to_string()
}

pub(crate) fn figures_table(figures: &[Figure]) -> String {
    let header = ["figure", "what", "median", "95 %", "runs", "verdict"];
    let mut table = new_table(header, 2);
    for f in figures {
        let (median, interval, runs) = f.estimate.map_or_else(
            || ("–".into(), "–".into(), 0),
            |e| (format!("{:.2}", e.median), e.interval(2), e.runs),
        );
        table.add_row([
            Cell::new(&f.ratio.name),
            Cell::new(&f.ratio.sentence),
            Cell::new(median),
            Cell::new(interval),
            Cell::new(runs),
            Cell::new(verdict(f)),
        ]);
    }
    table.to_string()
}

/// Judged by the interval's bounds: a figure counts as reached when its median is, and as certain
/// when the whole interval is. One round has no interval and is not judged.
fn verdict(f: &Figure) -> String {
    let (Some(e), Some((reach, aim))) = (f.estimate, f.ratio.reach_and_aim) else {
        return String::new();
    };
    if e.runs == 1 {
        return format!("one round: not judged (reach {reach:.2}, aim {aim:.2})");
    }
    let meets = |value: f64, bound: f64| match f.ratio.more_is_better {
        true => value >= bound,
        false => value <= bound,
    };
    let word = if meets(e.median, aim) {
        "aim met"
    } else if meets(e.median, reach) {
        "reached"
    } else {
        "missed"
    };
    let bound = if meets(e.median, aim) { aim } else { reach };
    let certain = meets(e.low, bound) == meets(e.high, bound);
    let doubt = if certain { "" } else { ", within the noise" };
    format!("{word} (reach {reach:.2}, aim {aim:.2}{doubt})")
}

fn legend(outcome: &Outcome) -> String {
    let side = outcome.rows.iter().find_map(|r| Some(r.cell?.side));
    let mut lines = match side {
        Some(Side::Sends) => cells::LEGEND.to_vec(),
        Some(Side::Receives) => recv::table::LEGEND.to_vec(),
        None => plain_legend(outcome),
    };
    lines.push(
        "figures   one way over another, measured in turn in the same run; median of the pairs.",
    );
    let stop = format!("Took {:.0} s: {}.", outcome.elapsed.as_secs_f64(), outcome.stop.sentence());
    lines.push(&stop);
    lines.join("\n")
}

fn plain_legend(outcome: &Outcome) -> Vec<&'static str> {
    let mut lines = vec![
        "ns/KB     CPU time per 1024 bytes; smaller is better. This end is the thread (or, kernel to",
        "          kernel, the process) under test, the other end the kernel peer's process. Work that",
        "          one end does inside its system calls for the other counts for the one that called.",
        "95 %      the interval that holds the true median with 95 % confidence (order statistics);",
        "          of fewer than six runs the least and the most.",
        "machine   busy time of all CPUs from /proc/stat, which counts in ticks: coarse in short benches;",
        "          it includes starting the peers and whatever else the machine did.",
    ];
    if outcome.rows.iter().any(|r| r.soaker_ns_per_kb.is_some()) {
        lines.push(
            "soaker    the same as spinners of the lowest priority saw it, in one run of its own.",
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Ratio, Sample, Stop};
    use crate::cpu::Placement;

    fn outcome() -> Outcome {
        let e = Estimate::of(&[1.0, 1.1, 1.2]);
        let row = Row {
            name: "kernel.same_cpu".into(),
            title: "kernel to kernel".into(),
            placement: Placement::SameCpu,
            cell: None,
            gbps: e,
            near_ns_per_kb: e,
            thread_ns_per_kb: None,
            hardware_ns_per_kb: None,
            far_ns_per_kb: e,
            both_ns_per_kb: e,
            machine_ns_per_kb: Some(162.0),
            service_demand_us_per_kb: None,
            user_share: None,
            soaker_ns_per_kb: None,
            counts: vec![("frames", 3)],
            counted_bytes: 9,
            error: None,
        };
        let failed = Row { error: Some("no device".into()), both_ns_per_kb: None, ..row.clone() };
        let ratio = Ratio {
            name: "stream.send.same_cpu.vs_floor".into(),
            sentence: "what it is".into(),
            way: String::new(),
            over: None,
            measure: Sample::both_ns_per_kb,
            reach_and_aim: Some((1.15, 1.05)),
            more_is_better: false,
            published: None,
        };
        Outcome {
            rows: vec![row, failed],
            figures: vec![Figure { ratio, estimate: e }],
            stop: Stop::Budget,
            elapsed: Duration::from_secs(3),
        }
    }

    #[test]
    fn the_json_has_the_agreed_shape() {
        let v = json(&Machine::here(), &["fulmar".into(), "bench".into()], &outcome());
        assert_eq!(v["ratios"]["stream.send.same_cpu.vs_floor"]["median"], 1.1);
        assert_eq!(v["rows"][0]["machine_cpu_ns_per_kb"], 162.0);
        assert_eq!(v["rows"][0]["counts"]["frames"], 3);
        assert_eq!(v["rows"][1]["error"], "no device");
        assert_eq!(v["command"][1], "bench");
        assert!(v["machine"]["kernel"].is_string());
    }

    #[test]
    fn the_text_names_what_failed_why_it_stopped_and_the_verdict() {
        let t = text(&Machine::here(), &outcome());
        assert!(t.contains("not measured: kernel to kernel, same CPU: no device"), "{t}");
        assert!(t.contains("the time was over"), "{t}");
        assert!(t.contains("reached (reach 1.15, aim 1.05, within the noise)"), "{t}");
    }

    #[test]
    fn one_round_shows_neither_an_interval_nor_a_verdict() {
        let mut outcome = outcome();
        let once = Estimate::of(&[447.85]);
        outcome.figures[0].estimate = once;
        outcome.rows[0].both_ns_per_kb = once;
        let t = text(&Machine::here(), &outcome);
        assert!(!t.contains("447.85–") && !t.contains("448–448"), "{t}");
        assert!(t.contains("one round: not judged (reach 1.15, aim 1.05)"), "{t}");
    }

    #[test]
    fn a_figure_that_should_be_large_is_judged_from_below() {
        let mut figure = outcome().figures.remove(0);
        figure.ratio.reach_and_aim = Some((1.05, 1.3));
        figure.ratio.more_is_better = true;
        assert_eq!(verdict(&figure), "reached (reach 1.05, aim 1.30, within the noise)");
        figure.ratio.reach_and_aim = Some((1.2, 1.3));
        assert!(verdict(&figure).starts_with("missed"));
        figure.ratio.reach_and_aim = Some((0.5, 1.0));
        assert_eq!(verdict(&figure), "aim met (reach 0.50, aim 1.00)");
    }
}
