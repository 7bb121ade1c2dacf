//! What `bench wake` prints: tables for people, JSON for programs, a page for the browser.

use serde_json::{Value, json};

use super::figures::{both_cpu_us, frames_per_wakeup};
use super::place::Sample;
use super::{Cell, Found, Part, curves};
use crate::page::{self, Block, Page, Section, Table};
use crate::report::{self, Machine, figures_table, new_table};

/// A column: its head, its key in JSON, its decimals, and what it is of one run.
type Column = (&'static str, &'static str, usize, fn(&Sample) -> Option<f64>);

const COLUMNS: [Column; 13] = [
    ("p50 µs", "p50_us", 1, |s| s.latency_ns().map(|l| l[0] as f64 / 1e3)),
    ("p99 µs", "p99_us", 1, |s| s.latency_ns().map(|l| l[1] as f64 / 1e3)),
    ("p99 in 10ms µs", "stretch_p99_us", 1, |s| s.near.stretch_p99_ns.map(|ns| ns as f64 / 1e3)),
    ("p99.9 µs", "p999_us", 1, |s| s.latency_ns().map(|l| l[2] as f64 / 1e3)),
    ("taken /s", "packets_per_second", 0, |s| per_second(s, s.near.packets as f64)),
    ("lost %", "lost_pct", 1, |s| {
        let sent = s.far.sent.max(1) as f64;
        Some((100.0 * (sent - s.near.packets as f64) / sent).max(0.0))
    }),
    ("wake-ups /s", "wakeups_per_second", 0, |s| per_second(s, s.near.wakeups as f64)),
    ("of them holds %", "held_wakeups_pct", 0, |s| {
        let wakeups = s.near.wakeups;
        (wakeups > 0).then(|| 100.0 * s.near.holds as f64 / wakeups as f64)
    }),
    ("frames per wake-up", "frames_per_wakeup", 1, frames_per_wakeup),
    ("looking %", "looking_pct", 0, |s| Some(100.0 * share(s, s.near.looked.as_secs_f64())?)),
    ("waiting thread's CPU %", "near_thread_cpu_pct", 0, |s| {
        Some(100.0 * share(s, s.near.thread.as_secs_f64())?)
    }),
    ("both ends' CPU µs per packet", "both_cpu_us_per_packet", 2, |s| Some(both_cpu_us(s))),
    ("machine µs per packet", "machine_us_per_packet", 1, |s| {
        Some(s.near.machine.as_secs_f64() * 1e6 / s.near.packets.max(1) as f64)
    }),
];

fn share(s: &Sample, seconds: f64) -> Option<f64> {
    let elapsed = s.near.elapsed.as_secs_f64();
    (elapsed > 0.0).then(|| seconds / elapsed)
}

pub(super) fn per_second(s: &Sample, n: f64) -> Option<f64> {
    let elapsed = s.near.elapsed.as_secs_f64();
    (elapsed > 0.0).then(|| n / elapsed)
}

impl Cell {
    /// The median of a column over all runs.
    pub(super) fn median(&self, of: fn(&Sample) -> Option<f64>) -> Option<f64> {
        let mut values: Vec<f64> = self.samples.iter().filter_map(|(_, s)| of(s)).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }

    /// What it is, in the first columns of a table.
    fn labels(&self) -> [String; 4] {
        let load = match self.part {
            Part::Rr => "one question at a time".to_owned(),
            Part::Bulk => "flood, MTU size".to_owned(),
            Part::Sweep(pps) => load(pps),
        };
        let names = [self.device.name(), self.mode.name(), self.placement.title()];
        let [device, mode, placement] = names.map(str::to_owned);
        [load, device, mode, placement]
    }
}

fn load(pps: u64) -> String {
    if pps == 0 { "as many as go".to_owned() } else { format!("{pps} /s") }
}

const TRANSMIT_TITLE: &str =
    "Sent frames taken back, simulated device, UDP of MTU size, without the hardware's time";
const TRANSMIT: [&str; 5] =
    ["load", "taken back", "times /s", "frames at once", "thread's CPU ns per frame"];

const LABELS: [&str; 4] = ["load", "device", "waiting", "ends on"];

/// What a table shows.
type Group = (&'static str, fn(Part) -> bool);

const GROUPS: [Group; 3] = [
    ("Request and reply, UDP, 18 bytes", |p| p == Part::Rr),
    ("A flood of datagrams of MTU size, no offloads", |p| p == Part::Bulk),
    ("From one packet per second to as many as go, UDP, 64 bytes", |p| matches!(p, Part::Sweep(_))),
];

impl Found {
    /// The report for people.
    pub fn text(&self, machine: &Machine) -> String {
        let mut parts = vec![machine.sentence()];
        for (title, belongs) in GROUPS {
            let cells: Vec<&Cell> =
                self.cells.iter().filter(|c| belongs(c.part) && !c.samples.is_empty()).collect();
            if !cells.is_empty() {
                parts.push(format!("{title}\n\n{}", text_table(&cells)));
            }
        }
        parts.extend(self.transmit_text());
        parts.extend(self.idle.map(|i| {
            format!(
                "Idle for {:.1} s with {} connections, both ends: {:.3} % of a CPU, {} wake-ups, {} timers",
                i.time.as_secs_f64(), i.connections, i.cpu_pct, i.wakeups, i.timers
            )
        }));
        parts.extend(self.failures());
        parts.push(figures_table(&self.outcome.figures).to_string());
        parts.push(self.legend());
        parts.join("\n\n")
    }

    fn transmit_text(&self) -> Option<String> {
        let head = TRANSMIT.map(|h| h.replacen(' ', "\n", 1));
        let mut table = new_table(head.iter().map(String::as_str), 2);
        for (load, way, values) in self.transmit_rows() {
            let values = values.map(|(v, decimals)| format!("{v:.decimals$}"));
            table.add_row([load, way].into_iter().chain(values));
        }
        (!self.completions.is_empty()).then(|| format!("{TRANSMIT_TITLE}\n\n{table}"))
    }

    /// Load, way, and the values of the other columns with their decimals.
    fn transmit_rows(&self) -> impl Iterator<Item = (String, String, [(f64, usize); 3])> {
        self.completions.iter().filter_map(|way| {
            let (reaps, frames, ns) =
                (way.reaps_per_second()?, way.frames_per_reap()?, way.ns_per_frame()?);
            let values = [(reaps.median, 0), (frames.median, 1), (ns.median, 0)];
            Some((load(way.pps), way.title.to_owned(), values))
        })
    }

    fn transmit_section(&self) -> Option<Section> {
        let row = |(load, way, values): (String, String, [(f64, usize); 3])| {
            let values = values.map(|(v, decimals)| page::Cell::Number(v, Some(decimals)));
            [load, way].into_iter().map(page::Cell::Text).chain(values).collect()
        };
        let head = TRANSMIT.map(|h| (h.to_owned(), String::new())).to_vec();
        let rows: Vec<Vec<page::Cell>> = self.transmit_rows().map(row).collect();
        let table = Table { caption: String::new(), head, rows };
        let is_empty = table.rows.is_empty();
        (!is_empty).then(|| Section::new(TRANSMIT_TITLE, vec![Block::Table(table)]))
    }

    fn failures(&self) -> Option<String> {
        let failed = self
            .cells
            .iter()
            .filter_map(|c| Some(format!("not measured: {}: {}", c.name(), c.error.as_ref()?)));
        let lines: Vec<String> = failed.collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    fn legend(&self) -> String {
        let lines = [
            "latency   one question and its answer; of a flow, from the sender's clock to the receiver's.",
            "          Of a flow also 99 % in each stretch of 10 ms, the median of the stretches: a host",
            "          that takes a CPU away now and then is in few of them.",
            "wake-up   the end of a sleep of the thread that waits; of the kernel's: a voluntary context",
            "          switch. Holds are sleeps for a fixed time in which frames gather.",
            "looking   time spent on looking at the device in vain, of the time that passed.",
            "CPU       of the thread that waits; of both processes; of the machine (/proc/stat, in ticks of",
            "          10 ms: coarse in short runs). Polling and looking are in all of them.",
            "lost      sent and not taken: queues that were full.",
        ];
        let Found { outcome, .. } = self;
        let seconds = outcome.elapsed.as_secs_f64();
        format!("{}\nTook {seconds:.0} s: {}.", lines.join("\n"), outcome.stop.sentence())
    }

    /// The report for programs.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let mut json = report::json(machine, command, &self.outcome);
        let rows = self.cells.iter().map(row_json).chain(self.completions.iter().map(|w| {
            json!({
                "name": w.name, "title": w.title, "pps": w.pps,
                "reaps_per_second": w.reaps_per_second().map(|e| e.median),
                "frames_per_reap": w.frames_per_reap().map(|e| e.median),
                "thread_cpu_ns_per_frame": w.ns_per_frame().map(|e| e.median),
            })
        }));
        json["rows"] = rows.collect();
        json["idle"] = self.idle.map_or(Value::Null, |i| {
            json!({
                "connections": i.connections, "seconds": i.time.as_secs_f64(),
                "cpu_pct": i.cpu_pct, "wakeups": i.wakeups, "timers": i.timers,
            })
        });
        json
    }

    /// The report as a page; `json` is that of [`Found::json`].
    pub fn page(&self, json: &Value) -> Page {
        let figures = Value::Object(
            json.as_object()
                .into_iter()
                .flatten()
                .filter(|(k, _)| *k != "rows")
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect(),
        );
        let base = page::report::page(&figures);
        let mut sections = base.sections;
        let at = usize::from(sections.first().is_some_and(|s| s.heading == page::report::GLANCE));
        let tables = GROUPS.iter().filter_map(|(title, belongs)| {
            let cells: Vec<&Cell> =
                self.cells.iter().filter(|c| belongs(c.part) && !c.samples.is_empty()).collect();
            let table = Block::Table(page_table(&cells));
            (!cells.is_empty()).then(|| Section::new(*title, vec![table]))
        });
        let curves = curves::section(&self.cells);
        let new = curves.into_iter().chain(tables).chain(self.transmit_section());
        sections.splice(at..at, new.collect::<Vec<_>>());
        Page {
            title: "What waiting costs, and what it adds".into(),
            lead: "Latency, wake-ups and CPU of threads that wait for a device: moderated, asleep \
                   at once, never asleep, and the kernel's own."
                .into(),
            sections,
            ..base
        }
    }
}

fn text_table(cells: &[&Cell]) -> String {
    let broken: Vec<String> = COLUMNS.iter().map(|c| c.0.replacen(' ', "\n", 1)).collect();
    let header = LABELS.into_iter().chain(broken.iter().map(String::as_str)).chain(["runs"]);
    let mut table = new_table(header, LABELS.len());
    for cell in cells {
        let values = COLUMNS.iter().map(|(_, _, decimals, of)| {
            cell.median(*of).map_or_else(|| "–".to_owned(), |v| format!("{v:.decimals$}"))
        });
        let runs = cell.samples.len().to_string();
        table.add_row(cell.labels().into_iter().chain(values).chain([runs]));
    }
    table.to_string()
}

fn page_table(cells: &[&Cell]) -> Table {
    let heads = LABELS.into_iter().chain(COLUMNS.iter().map(|c| c.0)).chain(["runs"]);
    let rows = cells.iter().map(|cell| {
        let values = COLUMNS.iter().map(|(_, _, d, of)| page::Cell::number(cell.median(*of), *d));
        let runs = page::Cell::number(Some(cell.samples.len() as f64), 0);
        let unbroken = |label: String| page::Cell::Text(label.replace(' ', "\u{a0}"));
        cell.labels().into_iter().map(unbroken).chain(values).chain([runs]).collect()
    });
    Table {
        caption: String::new(),
        head: heads.map(|h| (h.to_owned(), String::new())).collect(),
        rows: rows.collect(),
    }
    .without_empty_columns()
}

fn row_json(cell: &Cell) -> Value {
    let mut row = json!({
        "name": cell.name(),
        "device": cell.device.name(),
        "mode": cell.mode.name(),
        "placement": cell.placement.name(),
        "runs": cell.samples.len(),
        "error": cell.error,
    });
    for (_, key, _, of) in COLUMNS {
        row[key] = json!(cell.median(of));
    }
    row
}
