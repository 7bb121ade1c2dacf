//! The stage table, and the published one beside it.

use fulmar::base::Stage;

use super::kernel::Depth;
use super::{Found, Path, Spread, Threads};
use crate::page::{Bar, Bars, Cell};
use crate::sheet::{Ratio, Sheet};

/// A difference counts if the runs of the two stages do not overlap, and it is more than this share of
/// the larger one; the published text draws the same line.
const SIGNIFICANT: f64 = 0.05;

/// The table of a path.
pub fn sheet(found: &Found) -> Sheet {
    let mut sheet = Sheet {
        name: "path",
        title: format!("{}, {} bytes: ns per packet up to each stage", found.path.name(), found.bytes),
        lead: "The path returns at the stage and undoes what it has built, which is part of the figure. \
               Simulated device; the time of its hardware is measured by itself and taken off. A \
               difference is that of the least figures, as in the published table; it counts where the runs \
               of two stages do not overlap and differ by 5 %."
            .to_owned(),
        columns: vec![
            ("threads", "threads"),
            ("stage", "stage"),
            ("min_ns", "min"),
            ("median_ns", "median"),
            ("max_ns", "max"),
            ("difference_ns", "to the stage\nbefore"),
            ("significant", "counts"),
            ("sentence", "what lies between"),
        ],
        words: 2,
        ..Sheet::default()
    };
    for threads in &found.by_threads {
        sheet.rows.extend(rows(found, threads));
    }
    sheet.bars = Some(bars(found));
    sheet.notes = notes(found);
    sheet.ratios = ratios(found);
    sheet
}

fn rows(found: &Found, threads: &Threads) -> Vec<Vec<Cell>> {
    let whole = ("whole", "The lock released, back in the program.");
    let stages = found.path.stages(found.bytes);
    let named = stages.iter().map(|s| (s.name(), s.sentence().trim()));
    let spreads = threads.stages.iter().chain([&threads.whole]);
    let mut before: Option<&Spread> = None;
    let mut rows = Vec::new();
    for ((name, sentence), spread) in named.chain([whole]).zip(spreads) {
        let mut row = vec![Cell::Text(threads.threads.to_string()), Cell::Text(name.to_owned())];
        row.extend([spread.min(), spread.median(), spread.max()].map(|n| Cell::Number(n, Some(1))));
        row.push(Cell::Number(difference(before, spread), Some(1)));
        row.push(Cell::Text(significance(before, spread).to_owned()));
        row.push(Cell::Text(sentence.to_owned()));
        rows.push(row);
        before = Some(spread);
    }
    rows
}

/// As published: the least of one over the least of the other.
fn difference(before: Option<&Spread>, now: &Spread) -> f64 {
    now.min() - before.map_or(0.0, Spread::min)
}

fn significance(before: Option<&Spread>, now: &Spread) -> &'static str {
    // Of one round nobody knows how far the next would be off.
    if now.runs.len() < 2 {
        return "one round";
    }
    let Some(before) = before else { return "yes" };
    let apart = now.min() > before.max() || now.max() < before.min();
    let large = (now.min() - before.min()).abs() > SIGNIFICANT * now.min().max(before.min());
    if apart && large { "yes" } else { "no" }
}

fn bars(found: &Found) -> Bars {
    let stages = found.path.stages(found.bytes);
    let names = stages.iter().map(|s| s.name().to_owned()).chain(["whole".to_owned()]);
    let bar = |t: &Threads| {
        let spreads: Vec<&Spread> = t.stages.iter().chain([&t.whole]).collect();
        let parts = spreads.iter().enumerate().map(|(i, s)| {
            let before = i.checked_sub(1).map(|b| spreads[b]);
            (s.median() - before.map_or(0.0, Spread::median)).max(0.0)
        });
        Bar {
            label: if t.threads == 1 {
                "1 thread".into()
            } else {
                format!("{} threads", t.threads)
            },
            values: parts.collect(),
            note: Some(crate::page::short(t.whole.median())),
            ..Bar::default()
        }
    };
    Bars {
        caption: "What each stage adds, in ns per packet; medians.".to_owned(),
        unit: "ns per packet".to_owned(),
        parts: names.enumerate().map(|(i, n)| (n, crate::page::colour(i))).collect(),
        bars: found.by_threads.iter().map(bar).collect(),
        marks: Vec::new(),
    }
}

fn notes(found: &Found) -> Vec<String> {
    let mut notes = vec![format!(
        "A bare system call costs {:.1} ns here; the simulated hardware takes {:.1} ns per packet, which \
         are not in the table.",
        found.syscall.median(),
        found.by_threads.first().map_or(0.0, |t| t.hardware.median())
    )];
    notes.extend(found.ablations.iter().map(|a| {
        let (with, without) = (a.with.median(), a.without.median());
        format!(
            "{}: {with:.1} ns, unchanged {without:.1} ns ({:+.1}, {:.2} times)",
            a.what,
            with - without,
            with / without
        )
    }));
    if found.by_threads.len() > 1 {
        notes
            .push("Threads have a stack, a device and buffers each: nothing is shared.".to_owned());
    }
    notes
}

/// The named figures; of datagrams sent, by one thread.
fn ratios(found: &Found) -> Vec<Ratio> {
    let (Path::UdpSend, Some(one)) = (found.path, found.by_threads.first()) else {
        return Vec::new();
    };
    let over_syscall = |spread: &Spread| {
        spread.runs.iter().zip(&found.syscall.runs).map(|(ns, call)| ns / call).collect::<Vec<_>>()
    };
    let device = found.path.stages(found.bytes).iter().position(|s| *s == Stage::DeviceTaken);
    let to_device = device.and_then(|i| one.stages.get(i)).cloned().unwrap_or_default();
    vec![
        Ratio {
            name: "path.udp_send.sim.to_device_vs_syscall".into(),
            what: "from the call to the device's ring, over one bare system call".into(),
            values: over_syscall(&to_device),
            published: Some("509 ns, five system calls' worth".into()),
            reach_and_aim: Some((0.6, 0.2)),
        },
        Ratio {
            name: "path.udp_send.sim.whole_vs_syscall".into(),
            what: "handed over and completed, over one bare system call".into(),
            values: over_syscall(&one.whole),
            published: Some("1,300 ns".into()),
            reach_and_aim: Some((1.2, 0.4)),
        },
        Ratio {
            name: "path.ledger.sum_vs_total".into(),
            what: "how far the ledger's sum, with its own cost, is from the measured total".into(),
            values: found.ledger.clone(),
            published: None,
            reach_and_aim: Some((0.1, 0.05)),
        },
    ]
}

/// The table of the kernel's depths.
pub fn kernel_sheet(depths: &[Depth], bytes: usize) -> Sheet {
    let mut sheet = Sheet {
        name: "path",
        title: format!("udp-send, {bytes} bytes, this machine's kernel over veth: ns per call"),
        lead:
            "Calls that fail at a known depth stand for exit points: nothing is traced. What lies \
               below the look-up of the route is one row, since no error comes from there."
                .to_owned(),
        columns: vec![
            ("depth", "depth"),
            ("min_ns", "min"),
            ("median_ns", "median"),
            ("max_ns", "max"),
            ("sentence", "what it is"),
        ],
        words: 1,
        ..Sheet::default()
    };
    for d in depths {
        let mut row = vec![Cell::Text(d.name.to_owned())];
        row.extend([d.ns.min(), d.ns.median(), d.ns.max()].map(|n| Cell::Number(n, Some(1))));
        row.push(Cell::Text(d.sentence.to_owned()));
        sheet.rows.push(row);
    }
    sheet.notes = vec![
        "Every error has a way back of its own, which is in its row: a deeper point may cost a few ns \
         less than the one above."
            .to_owned(),
        "For what the kernel does below that, sample it: perf record -a -g -e cpu-clock (its own \
         tracing needs kprobes and root)."
            .to_owned(),
    ];
    sheet
}
