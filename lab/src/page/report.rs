//! The page of a bench, made of its JSON ([`crate::report::json`]) and of nothing else, so that a
//! page can be made again from a file that was kept.
//!
//! Beside what every report has, these keys are understood:
//!
//! - in a row `device` (devices that are compared share a chart), `group` (rows of one group stand
//!   together; without it the group is made of size, segments and placement), `label` (shorter than
//!   `title`, for charts) and `hardware_ns_per_kb` (time of a simulated device, not the host's);
//! - `breakdowns`: where time goes, each `{title, caption, unit, bars: [{label, group?, parts:
//!   [{name, value}]}]}`. Parts of the same name have the same colour in all bars; a part named
//!   *hardware* is drawn as what is not the host's;
//! - `accounts`: what the stages of a stack cost a packet ([`crate::account::Figures::json`]), a bar each
//!   ([`super::stages`]);
//! - `ways`: what has a name, a `median` and its interval in nanoseconds, and nothing else; names that
//!   differ in a number only (`demux.100.burst64`) become a curve over it;
//! - `notes`: paragraphs for the end of the page.
//!
//! Any number in a row becomes a column, known to this file or not.

mod ways;

use super::{Bar, Bars, Block, Cell, Gauge, Gauges, Mark, Page, Section, Table, stages};
use serde_json::Value;

/// What a column of rows shows.
struct Column {
    key: &'static str,
    head: &'static str,
    hint: &'static str,
    decimals: usize,
}

const fn column(
    key: &'static str,
    head: &'static str,
    hint: &'static str,
    decimals: usize,
) -> Column {
    Column { key, head, hint, decimals }
}

/// The columns that every bench has, in the order of the table.
const COLUMNS: &[Column] = &[
    column("throughput_gbps", "Gb/s", "throughput as the end that finishes last saw it", 1),
    column("write_bytes", "bytes", "bytes per call", 0),
    column("buffer_bytes", "bytes", "bytes of each of the reader's buffers", 0),
    column("thread_cpu_ns_per_kb", "thread, ns/KB", "CPU time of the thread under test", 0),
    column("this_end_cpu_ns_per_kb", "this end, ns/KB", "CPU time of the end under test", 0),
    column("peer_cpu_ns_per_kb", "other end, ns/KB", "CPU time of the other end", 0),
    column("both_ends_cpu_ns_per_kb", "both ends, ns/KB", "the sum of both ends", 0),
    column("both_ends_cpu_low_ns_per_kb", "from", "lower end of the sum's 95 % interval", 0),
    column("both_ends_cpu_high_ns_per_kb", "to", "upper end of the sum's 95 % interval", 0),
    column("hardware_ns_per_kb", "hardware, ns/KB", "time of the simulated device", 0),
    column("machine_cpu_ns_per_kb", "machine, ns/KB", "all CPUs, from /proc/stat", 0),
    column("soaker_cpu_ns_per_kb", "soaker, ns/KB", "all CPUs, as idle-class spinners saw it", 0),
    column("ci95_half_width_pct", "\u{b1} %", "half the interval's width", 1),
    column("runs", "runs", "how often it was measured", 0),
    column("thread_cpu_low_ns_per_kb", "thread from", "lower end of the thread's interval", 0),
    column("thread_cpu_high_ns_per_kb", "thread to", "upper end of the thread's interval", 0),
    column(
        "service_demand_us_per_kb",
        "SD, \u{b5}s/KB",
        "service demand: all CPUs, measured part",
        3,
    ),
    column("service_demand_low_us_per_kb", "SD from", "lower end of its interval", 3),
    column("service_demand_high_us_per_kb", "SD to", "upper end of its interval", 3),
    column("output_calls_per_write", "outputs per write", "passes of TCP's output per call", 2),
    column("packets_per_output", "packets per output", "packets of MTU size per pass", 1),
    column("frames_per_crossing", "frames per crossing", "frames per call into the device", 2),
    column("mbufs_per_write", "mbufs per write", "buffers taken per call", 1),
    column("copies_per_byte", "copies per byte", "in user space, at the end under test", 2),
    column("bytes_per_read", "bytes per read", "bytes that a call returned", 0),
    column("bytes_per_wait", "bytes per wait", "bytes received per wait of a thread", 0),
    column("bytes_per_rx_frame", "bytes per frame", "bytes of a frame as the device gave it", 0),
    column("frames_per_rx_crossing", "frames per look", "frames per call to receive", 2),
    column("placed_share", "placed", "share of bytes that landed where they belong", 3),
    column("placement_hit_rate", "hit rate", "the same, from the first byte on", 3),
    column("slow_allocations_per_mb", "slow buffers/MB", "buffers that were not ready-made", 2),
];
/// Keys of a row that are no columns.
const WORDS: &[&str] = &[
    "name",
    "title",
    "label",
    "group",
    "placement",
    "error",
    "counts",
    "device",
    "method",
    "source",
    "super_segments",
];

/// The heading of the section that comes first where there are ratios.
pub const GLANCE: &str = "At a glance";

/// What stands below the title, unless the report has a `lead` of its own.
const LEAD: &str = "Every figure is one way measured against another in the same run, in turn. CPU \
                    time is given per KB (1024 bytes) moved; both ends are in the account.";

/// The same for what is not measured per byte.
const PLAIN_LEAD: &str =
    "Every figure is one way measured against another in the same run, in turn.";

/// The page of a report.
pub fn page(report: &Value) -> Page {
    let sections = [
        at_a_glance(report),
        cost(report),
        breakdowns(report),
        stages::section(report),
        ways::section(report),
        throughput(report),
        figures(report),
        counts(report),
        how(report),
    ];
    let command = words(&report["command"]).join(" ");
    Page {
        title: title_of(&command),
        lead: lead(report).to_owned(),
        facts: facts(report, &command),
        sections: sections.into_iter().flatten().collect(),
    }
}

fn lead(report: &Value) -> &str {
    let is_per_kb =
        || list(&report["rows"]).iter().any(|r| r.get("both_ends_cpu_ns_per_kb").is_some());
    report["lead"].as_str().unwrap_or_else(|| if is_per_kb() { LEAD } else { PLAIN_LEAD })
}

/// `fulmar-lab bench send` of a command line.
fn title_of(command: &str) -> String {
    let options = command.split(" -").next().unwrap_or_default();
    let program = options.split(' ').next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default();
    let title = options.replacen(program, name, 1);
    if title.is_empty() { "fulmar-lab bench".to_owned() } else { title }
}

/// Machine and command, as names and values.
pub fn facts(report: &Value, command: &str) -> Vec<(String, String)> {
    let machine = &report["machine"];
    let of = |key: &str| machine[key].as_str().unwrap_or("unknown").to_owned();
    let cpus = machine["cpus"].as_u64().unwrap_or(0);
    let mut facts = vec![
        ("command".to_owned(), command.to_owned()),
        ("machine".to_owned(), format!("{cpus} \u{d7} {}", of("cpu"))),
        ("kernel".to_owned(), format!("Linux {}", of("kernel"))),
        ("fulmar".to_owned(), of("fulmar")),
    ];
    let stop = report["stopped_because"].as_str();
    let took = report["elapsed_s"].as_f64();
    if let (Some(took), Some(stop)) = (took, stop) {
        facts.push(("took".to_owned(), format!("{took:.0} s: {stop}")));
    }
    facts
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn words(value: &Value) -> Vec<&str> {
    list(value).iter().filter_map(Value::as_str).collect()
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// What a placement is called in tables.
fn placement(row: &Value) -> String {
    match row["placement"].as_str() {
        Some("same_cpu") => "same CPU".to_owned(),
        Some("two_cpus") => "two CPUs".to_owned(),
        other => other.unwrap_or_default().to_owned(),
    }
}

fn at_a_glance(report: &Value) -> Option<Section> {
    let gauges = Gauges {
        caption: "Each ratio on a logarithmic axis. The coloured zone is what was hoped for: the \
                  pale part is good enough, the deep part what is wanted. Point at a dot for its \
                  figures; the table of ratios is below."
            .to_owned(),
        gauges: ratios(report).map(|(name, r)| gauge(name, r)).collect(),
    };
    (!gauges.is_empty()).then(|| Section::new(GLANCE, vec![Block::Gauges(gauges)]))
}

fn ratios(report: &Value) -> impl Iterator<Item = (&String, &Value)> {
    report["ratios"].as_object().into_iter().flatten()
}

fn gauge(name: &str, ratio: &Value) -> Gauge {
    let of = |key: &str| ratio[key].as_f64();
    let median = of("median").unwrap_or(f64::NAN);
    Gauge {
        name: name.to_owned(),
        what: word(&ratio["what"]),
        median,
        interval: (of("low").unwrap_or(median), of("high").unwrap_or(median)),
        published: of("published"),
        goals: of("reach").zip(of("aim")),
        more_is_better: ratio["more_is_better"].as_bool().unwrap_or(false),
        verdict: word(&ratio["verdict"]),
    }
}

fn label_of(row: &Value) -> String {
    row["label"].as_str().or(row["title"].as_str()).unwrap_or_default().to_owned()
}

fn group_of(row: &Value) -> String {
    if let Some(group) = row["group"].as_str() {
        return group.to_owned();
    }
    let segments = match row["super_segments"].as_bool() {
        Some(true) => Some("super-segments"),
        Some(false) => Some("single segments"),
        None => None,
    };
    let buffers = || row["buffer_bytes"].as_u64().map(|b| format!("buffers of {}", size(b)));
    let bytes = row["write_bytes"].as_u64().map(size).or_else(buffers);
    let at = Some(placement(row)).filter(|p| !p.is_empty());
    let segments = segments.map(str::to_owned);
    let source = row["source"].as_str().and_then(bytes_are);
    [bytes, segments, source, at].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Where a sender's bytes come from, or what becomes of a receiver's; nothing where that is as usual.
fn bytes_are(source: &str) -> Option<String> {
    match source {
        "hot" => None,
        "touched" => Some("reader looks at the bytes".to_owned()),
        "untouched" => Some("nobody looks at the bytes".to_owned()),
        "bursty" => Some("sent in bursts".to_owned()),
        file => Some(format!("{file} file")),
    }
}

/// The chart in which a device's rows stand: what is compared stands together.
fn family(device: &str) -> &str {
    match device {
        "sim" => "Simulated device, its peer modelled in the hardware.",
        "tap" | "packet" | "veth" => {
            "A real device: fulmar over TAP or AF_PACKET to a kernel peer, the kernel's own ways \
             over veth."
        }
        "shm" | "link" | "loopback" | "unix" => {
            "On one host: fulmar through shared memory or between two stacks, the kernel's own ways \
             over loopback and AF_UNIX."
        }
        other => other,
    }
}

fn size(bytes: u64) -> String {
    if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) {
        format!("{} MiB", bytes >> 20)
    } else if bytes >= 1024 && bytes.is_multiple_of(1024) {
        format!("{} KiB", bytes / 1024)
    } else {
        format!("{bytes} bytes")
    }
}

/// Rows with figures, those of a group beside each other, groups in the order of their first row.
fn measured(report: &Value) -> Vec<&Value> {
    let rows = list(&report["rows"]).iter().filter(|r| r["both_ends_cpu_ns_per_kb"].is_number());
    let rows: Vec<&Value> = rows.collect();
    let mut groups: Vec<String> = Vec::new();
    for group in rows.iter().map(|r| group_of(r)) {
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let of = |group: &String| -> Vec<&Value> {
        rows.iter().copied().filter(|r| group_of(r) == *group).collect()
    };
    groups.iter().flat_map(of).collect()
}

const MEMCPY: &str = "limit.memcpy";

/// Rows that are measured and are no limit, one list per device, so that a chart stays short enough
/// to be taken in; one list of all where rows have no device.
fn by_device(report: &Value) -> Vec<(String, Vec<&Value>)> {
    let mut charts: Vec<(String, Vec<&Value>)> = Vec::new();
    let name_of = |row: &Value| word(&row["name"]);
    for row in measured(report).into_iter().filter(|r| !name_of(r).starts_with(MEMCPY)) {
        let title = row["device"].as_str().map_or_else(String::new, |d| family(d).to_owned());
        match charts.iter_mut().find(|(t, _)| *t == title) {
            Some((_, rows)) => rows.push(row),
            None => charts.push((title, vec![row])),
        }
    }
    charts
}

fn cost(report: &Value) -> Option<Section> {
    let charts = by_device(report);
    let rows = list(&report["rows"]);
    let limit = rows.iter().find(|r| r["name"] == MEMCPY);
    let limit = limit.and_then(|r| r["both_ends_cpu_ns_per_kb"].as_f64());
    let mark = limit.map(|value| Mark { value, label: "one memcpy".to_owned() });
    let explained = "CPU time for each KB moved; shorter is better. The whisker is the 95 % interval \
                     of both ends together. Work that one end does inside its own system calls for \
                     the other is in the account of the one that called, so compare sums.";
    let mut blocks = vec![Block::Prose(explained.to_owned())];
    blocks.extend(charts.iter().map(|(title, rows)| Block::Bars(cost_bars(title, rows, &mark))));
    (blocks.len() > 1).then(|| Section::new("CPU per KB", blocks))
}

fn cost_bars(title: &str, rows: &[&Value], limit: &Option<Mark>) -> Bars {
    let mut parts = vec![("this end".to_owned(), 0), ("other end".to_owned(), 1)];
    if rows.iter().any(|r| r["hardware_ns_per_kb"].as_f64() > Some(0.0)) {
        parts.push(("simulated hardware, not the host's".to_owned(), 7));
    }
    Bars {
        caption: title.to_owned(),
        unit: "ns of CPU per KB".to_owned(),
        parts,
        bars: rows.iter().map(|r| cost_bar(r)).collect(),
        marks: limit.iter().cloned().collect(),
    }
}

fn cost_bar(row: &Value) -> Bar {
    let of = |key: &str| row[key].as_f64();
    let value = |key: &str| of(key).unwrap_or(0.0);
    let both = value("both_ends_cpu_ns_per_kb");
    let half = of("ci95_half_width_pct").map(|p| both * p / 100.0);
    let ends = of("both_ends_cpu_low_ns_per_kb").zip(of("both_ends_cpu_high_ns_per_kb"));
    Bar {
        group: group_of(row),
        label: label_of(row),
        values: vec![
            of("this_end_cpu_ns_per_kb").unwrap_or(value("thread_cpu_ns_per_kb")),
            value("peer_cpu_ns_per_kb"),
            value("hardware_ns_per_kb"),
        ],
        interval: ends.or(half.map(|h| (both - h, both + h))).filter(|_| row["runs"] != 1),
        note: Some(super::short(both)),
    }
}

fn throughput(report: &Value) -> Option<Section> {
    let bar = |row: &&Value| Bar {
        group: group_of(row),
        label: label_of(row),
        values: vec![row["throughput_gbps"].as_f64().unwrap_or(0.0)],
        ..Bar::default()
    };
    let explained = "Longer is better. On one CPU it is the cost in other words; on two the slower \
                     end and the wake-ups decide.";
    let mut blocks = vec![Block::Prose(explained.to_owned())];
    blocks.extend(by_device(report).iter().map(|(title, rows)| {
        Block::Bars(Bars {
            caption: title.clone(),
            unit: "Gb/s".to_owned(),
            parts: vec![("Gb/s".to_owned(), 3)],
            bars: rows.iter().map(bar).collect(),
            marks: Vec::new(),
        })
    }));
    (blocks.len() > 1).then(|| Section::new("Throughput", blocks))
}

fn breakdowns(report: &Value) -> Option<Section> {
    let all = list(&report["breakdowns"]);
    let blocks: Vec<Block> = all.iter().map(|b| Block::Bars(breakdown(b))).collect();
    (!blocks.is_empty()).then(|| Section::new("Where the nanoseconds go", blocks))
}

/// Stacked bars of a breakdown's parts, in the order in which the parts first appear.
pub fn breakdown(of: &Value) -> Bars {
    let bars = list(&of["bars"]);
    let mut names: Vec<String> = Vec::new();
    for part in bars.iter().flat_map(|b| list(&b["parts"])) {
        let name = word(&part["name"]);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let value = |bar: &Value, name: &String| {
        let part = list(&bar["parts"]).iter().find(|p| p["name"] == **name);
        part.and_then(|p| p["value"].as_f64()).unwrap_or(0.0)
    };
    let bar = |bar: &Value| Bar {
        group: word(&bar["group"]),
        label: word(&bar["label"]),
        values: names.iter().map(|name| value(bar, name)).collect(),
        ..Bar::default()
    };
    let bars = grouped(bars.iter().map(bar).collect());
    let colour = |(i, name): (usize, &String)| {
        let first = [2, 0, 3, 4, 5, 6, 1];
        let theirs = name.contains("hardware");
        let ours = first.get(i).copied().unwrap_or_else(|| super::colour(i));
        (name.clone(), if theirs { 7 } else { ours })
    };
    let parts = names.iter().enumerate().map(colour).collect();
    let caption = [word(&of["title"]), word(&of["caption"])].join(". ");
    Bars { caption, unit: word(&of["unit"]), parts, bars, marks: Vec::new() }
}

/// Bars of one group beside each other, groups in the order of their first bar.
fn grouped(mut bars: Vec<Bar>) -> Vec<Bar> {
    let mut groups: Vec<String> = Vec::new();
    for bar in &bars {
        if !groups.contains(&bar.group) {
            groups.push(bar.group.clone());
        }
    }
    bars.sort_by_key(|b| groups.iter().position(|g| *g == b.group));
    bars
}

fn figures(report: &Value) -> Option<Section> {
    let rows = list(&report["rows"]);
    let mut blocks = Vec::new();
    if !rows.is_empty() {
        blocks.push(Block::Table(rows_table(rows)));
        blocks.extend(failures(rows));
    }
    if ratios(report).next().is_some() {
        blocks.push(Block::Table(ratios_table(report)));
    }
    (!blocks.is_empty()).then(|| Section::new("All figures", blocks))
}

fn failures(rows: &[Value]) -> impl Iterator<Item = Block> {
    rows.iter().filter_map(|row| {
        let error = row["error"].as_str()?;
        let (title, at) = (word(&row["title"]), placement(row));
        Some(Block::Prose(format!("Not measured: {title}, {at}: {error}")))
    })
}

fn rows_table(rows: &[Value]) -> Table {
    let others = other_numbers(rows);
    let words = ["way", "group", "device", "TSO", "source", "ends on"];
    let mut head = words.map(|h| (h.to_owned(), String::new())).to_vec();
    head.extend(COLUMNS.iter().map(|c| (c.head.to_owned(), c.hint.to_owned())));
    head.extend(others.iter().map(|key| (key.replace('_', " "), key.clone())));
    let cells = |row: &Value| {
        let text =
            |key: &str| row[key].as_str().map_or(Cell::Nothing, |t| Cell::Text(t.to_owned()));
        let tso = row["super_segments"].as_bool().map(|on| if on { "yes" } else { "no" });
        let tso = tso.map_or(Cell::Nothing, |t| Cell::Text(t.to_owned()));
        let mut cells = vec![Cell::Text(word(&row["title"])), text("group"), text("device"), tso];
        cells.extend([text("source"), Cell::Text(placement(row))]);
        cells.extend(COLUMNS.iter().map(|c| Cell::number(row[c.key].as_f64(), c.decimals)));
        let other = |key: &String| row[key].as_f64().map(|v| Cell::Number(v, None));
        cells.extend(others.iter().map(|key| other(key).unwrap_or(Cell::Nothing)));
        cells
    };
    let rows = rows.iter().map(cells).collect();
    let caption = "Medians. Click a column's head to sort by it; point at it for what it is.";
    Table { caption: caption.to_owned(), head, rows }.without_empty_columns()
}

/// Numbers that rows have and this file does not know.
fn other_numbers(rows: &[Value]) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    for (key, value) in rows.iter().filter_map(Value::as_object).flatten() {
        let known = COLUMNS.iter().any(|c| c.key == key) || WORDS.contains(&key.as_str());
        if value.is_number() && !known && key != "counted_bytes" && !keys.contains(key) {
            keys.push(key.clone());
        }
    }
    keys
}

fn ratios_table(report: &Value) -> Table {
    const HEAD: [(&str, &str); 10] = [
        ("ratio", "the stable name"),
        ("what", ""),
        ("median", "of the pairs of one run"),
        ("from", "lower end of the 95 % interval"),
        ("to", "upper end of the 95 % interval"),
        ("runs", "pairs measured"),
        ("published", "what the published work found"),
        ("reach", "good enough from here on"),
        ("aim", "what is wanted"),
        ("verdict", ""),
    ];
    let cells = |(name, r): (&String, &Value)| {
        let text = |key: &str| r[key].as_str().map_or(Cell::Nothing, |t| Cell::Text(t.to_owned()));
        let mut cells = vec![Cell::Text(name.clone()), text("what")];
        // One round has no interval.
        let number = |k: &str| r[k].as_f64().filter(|_| k == "median" || r["runs"] != 1);
        cells.extend(["median", "low", "high"].map(|k| Cell::number(number(k), 3)));
        cells.push(Cell::number(r["runs"].as_f64(), 0));
        let goals = ["published", "reach", "aim"];
        cells.extend(goals.map(|k| r[k].as_f64().map_or(Cell::Nothing, |v| Cell::Number(v, None))));
        let verdict = r["verdict"].as_str().and_then(|v| v.split(" (").next());
        cells.push(verdict.map_or(Cell::Nothing, |v| Cell::Text(v.to_owned())));
        cells
    };
    let head = HEAD.map(|(h, t)| (h.to_owned(), t.to_owned())).to_vec();
    let caption = "Ratios: medians of pairs measured in the same run.".to_owned();
    Table { caption, head, rows: ratios(report).map(cells).collect() }.without_empty_columns()
}

/// Counts per MiB, since runs are of different length.
fn counts(report: &Value) -> Option<Section> {
    let rows = list(&report["rows"]);
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in rows.iter().filter_map(|r| r["counts"].as_object()).flatten() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() {
        return None;
    }
    let mut head = ["way", "ends on"].map(|h| (h.to_owned(), String::new())).to_vec();
    head.extend(names.iter().map(|n| (n.replace('_', " "), String::new())));
    let cells = |row: &Value| {
        let bytes = row["counted_bytes"].as_f64().filter(|b| *b > 0.0);
        let per_mib = |name: &&String| {
            let count = row["counts"][name.as_str()].as_f64().zip(bytes);
            count.map_or(Cell::Nothing, |(n, b)| Cell::Number(n * 1_048_576.0 / b, None))
        };
        let mut cells = vec![Cell::Text(word(&row["title"])), Cell::Text(placement(row))];
        cells.extend(names.iter().map(per_mib));
        cells
    };
    let with_counts = |r: &&Value| r["counts"].as_object().is_some_and(|c| !c.is_empty());
    let rows = rows.iter().filter(with_counts).map(cells).collect();
    let caption =
        "Per MiB moved, over all runs. Counts are exact where times are noisy.".to_owned();
    let table = Table { caption, head, rows }.without_empty_columns();
    Some(Section::new("What was counted", vec![Block::Table(table)]))
}

const HOW: [&str; 4] = [
    "Ways run in turn, A B A B, so that what disturbs the machine disturbs both of a pair. A ratio \
     is the median of the pairs; its interval holds the true median with 95 % confidence and \
     assumes nothing about the distribution (order statistics).",
    "This end is the thread or process under test, the other end its peer's process. \"Machine\" \
     is the busy time of all CPUs in /proc/stat, which counts in ticks and includes the start of \
     the peers; \"soaker\" is the same as spinners of the lowest priority saw it.",
    "Same CPU: both ends are pinned to one CPU. Two CPUs: each to one of its own, so that wake-ups \
     and cache lines cross. The placement changes a result more than the stack does.",
    "A simulated device is a program that plays the hardware. Its own time is not the host's: it is \
     measured, subtracted and shown apart.",
];

fn how(report: &Value) -> Option<Section> {
    let prose = |text: &str| Block::Prose(text.to_owned());
    let mut blocks: Vec<Block> = HOW.iter().map(|t| prose(t)).collect();
    blocks.extend(words(&report["notes"]).into_iter().map(prose));
    Some(Section::new("How to read this", blocks))
}
