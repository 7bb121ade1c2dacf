//! The stage table, and the published table for comparison.

use fulmar::stat::ledger::Stage;

use super::kernel::Depth;
use super::{Found, Path, Spread, Threads};
use crate::harness::report::{Chart, Report, Table, label, number, words};
use crate::harness::{Figure, Ratio};
use serde_json::{Value, json};

/// A difference counts if the runs of the two stages do not overlap, and it is more than this share of
/// the larger one; the published text draws the same line.
const SIGNIFICANT: f64 = 0.05;

/// The table of a path.
pub fn report(found: &Found) -> Report {
    let columns = [
        label("threads", "threads"),
        label("stage", "stage"),
        number("min_ns", "min", 1, ""),
        number("median_ns", "median", 1, ""),
        number("max_ns", "max", 1, ""),
        number("difference_ns", "to the stage\nbefore", 1, ""),
        words("significant", "counts"),
        words("sentence", "work of the step"),
    ];
    let chart =
        Chart { unit: "ns per packet", parts: &["difference_ns"], group: &["threads"], x: None };
    let rows = found.by_threads.iter().flat_map(|threads| rows(found, threads));
    let (name, bytes) = (found.path.name(), found.bytes);
    Report {
        name: "path".to_owned(),
        title: format!("{name}, {bytes} bytes: ns per packet up to each stage"),
        lead: "The sum of the stages up to this one, by the account of the stack, whose cost is subtracted. The \
            last row is the thread's CPU time without the account. The device is simulated; the time of its \
            hardware is measured separately and subtracted. A difference is between the minima, as in the published \
            table; it is significant if the runs of the two stages do not overlap and differ by 5 %."
            .to_owned(),
        tables: vec![Table { chart: Some(chart), ..Table::of("", columns, rows) }],
        notes: notes(found),
        figures: figures(found),
        ..Report::default()
    }
}

fn rows(found: &Found, threads: &Threads) -> Vec<Value> {
    let whole = ("whole", "The lock released, back in the program.");
    let stages = found.path.stages(found.bytes);
    let named = stages.iter().map(|s| (s.name(), s.sentence().trim()));
    let spreads = threads.stages.iter().chain([&threads.whole]);
    let mut before: Option<&Spread> = None;
    let mut rows = Vec::new();
    for ((name, sentence), spread) in named.chain([whole]).zip(spreads) {
        rows.push(json!({
            "threads": threads.threads.to_string(),
            "stage": name,
            "min_ns": spread.min(),
            "median_ns": spread.median(),
            "max_ns": spread.max(),
            "difference_ns": difference(before, spread),
            "significant": significance(before, spread),
            "sentence": sentence,
        }));
        before = Some(spread);
    }
    rows
}

/// As published: the least of one over the least of the other.
fn difference(before: Option<&Spread>, now: &Spread) -> f64 {
    now.min() - before.map_or(0.0, Spread::min)
}

fn significance(before: Option<&Spread>, now: &Spread) -> &'static str {
    // One round has no interval.
    if now.runs.len() < 2 {
        return "one round";
    }
    let Some(before) = before else { return "yes" };
    let apart = now.min() > before.max() || now.max() < before.min();
    let large = (now.min() - before.min()).abs() > SIGNIFICANT * now.min().max(before.min());
    if apart && large { "yes" } else { "no" }
}

fn notes(found: &Found) -> Vec<String> {
    let mut notes = vec![format!(
        "A bare system call costs {:.1} ns here; the simulated hardware takes {:.1} ns per packet, not included in \
         the table.",
        found.syscall.median(),
        found.by_threads.first().map_or(0.0, |t| t.hardware.median())
    )];
    notes.extend(found.variants.iter().map(|a| {
        let (with, without) = (a.with.median(), a.without.median());
        format!(
            "{}: {with:.1} ns, unchanged {without:.1} ns ({:+.1}, {:.2} times)",
            a.what,
            with - without,
            with / without
        )
    }));
    if found.by_threads.len() > 1 {
        notes.push(
            "Each thread has its own stack, device and buffers; nothing is shared.".to_owned(),
        );
    }
    notes
}

/// The named figures; of datagrams sent, by one thread.
pub fn figures(found: &Found) -> Vec<Figure> {
    let (Path::UdpSend, Some(one)) = (found.path, found.by_threads.first()) else {
        return Vec::new();
    };
    let over_syscall = |spread: &Spread| {
        spread.runs.iter().zip(&found.syscall.runs).map(|(ns, call)| ns / call).collect::<Vec<_>>()
    };
    let device = found.path.stages(found.bytes).iter().position(|s| *s == Stage::DeviceTaken);
    let to_device = device.and_then(|i| one.stages.get(i)).cloned().unwrap_or_default();
    let figure = |name, what, values: &[f64], reach, aim| {
        Figure::of(Ratio::value(name, what, "", "").goals(reach, aim), values)
    };
    vec![
        figure(
            "path.udp_send.sim.to_device_vs_syscall",
            "from the call to the device's ring, over one bare system call; published: 509 ns, five \
             system calls' worth",
            &over_syscall(&to_device),
            0.6,
            0.2,
        ),
        figure(
            "path.udp_send.sim.whole_vs_syscall",
            "handed over and completed, over one bare system call; published: 1,300 ns",
            &over_syscall(&one.whole),
            1.2,
            0.4,
        ),
        figure(
            "path.ledger.sum_vs_total",
            "how far the ledger's sum, with its own cost, is from the measured total",
            &found.ledger,
            0.1,
            0.05,
        ),
    ]
}

/// The table of the kernel's depths.
pub fn kernel_report(depths: &[Depth], bytes: usize) -> Report {
    let columns = [
        label("depth", "depth"),
        number("min_ns", "min", 1, ""),
        number("median_ns", "median", 1, ""),
        number("max_ns", "max", 1, ""),
        words("sentence", "description"),
    ];
    let row = |d: &Depth| {
        json!({
            "depth": d.name,
            "min_ns": d.ns.min(),
            "median_ns": d.ns.median(),
            "max_ns": d.ns.max(),
            "sentence": d.sentence,
        })
    };
    Report {
        name: "path".to_owned(),
        title: format!("udp-send, {bytes} bytes, this machine's kernel over veth: ns per call"),
        lead:
            "The points are calls that fail at a known depth; nothing is traced. Everything below the look-up of \
             the route is one row, since no call fails there."
                .to_owned(),
        tables: vec![Table::of("", columns, depths.iter().map(row))],
        notes: vec![
            "Each row includes the return path of its error, so a deeper point may cost a few ns less than the one \
             above."
                .to_owned(),
            "To see the kernel's work below that, sample it: perf record -a -g -e cpu-clock (tracing requires \
             kprobes and root)."
                .to_owned(),
        ],
        ..Report::default()
    }
}
