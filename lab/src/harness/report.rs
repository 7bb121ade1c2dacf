//! The report of a command: one form, printed as text, written as JSON, shown as a page.
//!
//! A [`Report`] is tables, ratios and sentences. A bench makes one of its [`Outcome`] and a [`Shape`], which
//! says what its tables show; commands that measure otherwise fill in the tables themselves. In JSON every row of
//! every table is an entry of `rows` (units in the keys; of a value with an interval also `KEY_low` and
//! `KEY_high`), `ratios` has stable dotted names; `tables` say how to show them. The page is made
//! of the JSON alone ([`super::page`]).

use super::text::{wrapped, wrapped_lines};
use super::{Figure, Outcome, Row, Stop};
use crate::cpu;
use crate::stats::Estimate;
use serde_json::{Map, Value, json};
use std::fs;
use std::time::Duration;

/// Characters of a line of text at most: the least that a terminal has.
pub const WIDTH: usize = 80;

/// The machine of the measurements.
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

    /// The machine in one line.
    pub fn sentence(&self) -> String {
        let Machine { cpu, cpus, kernel, fulmar } = self;
        format!("fulmar {fulmar} on {cpus} CPUs, {cpu}, Linux {kernel}")
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({"cpu": self.cpu, "cpus": self.cpus, "kernel": self.kernel, "fulmar": self.fulmar})
    }
}

/// A sentence to print before a bench if the machine has other things to do. Looks for 0.3 s.
pub fn busy_warning() -> Option<String> {
    let share = cpu::busy_share_over(Duration::from_millis(300)).ok()?;
    (share > cpu::BUSY_SHARE).then(|| {
        format!(
            "warning: the machine is {:.0} % busy before the benchmark starts; the figures will be noisy",
            share * 100.0
        )
    })
}

/// How a column is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Labels of the row; repeated at the left of every part of a table that is too wide.
    Label,
    /// Words.
    Words,
    /// A number with this many decimals.
    Number(usize),
    /// A number with this many decimals, and its interval.
    Interval(usize),
}

/// A column of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Column {
    /// Its key in JSON, with its unit.
    pub key: &'static str,
    /// Its head, in one line or two.
    pub head: &'static str,
    /// Its meaning.
    pub hint: &'static str,
    /// How it is printed.
    pub kind: Kind,
}

/// A column of labels.
pub const fn label(key: &'static str, head: &'static str) -> Column {
    Column { key, head, hint: "", kind: Kind::Label }
}

/// A column of words.
pub const fn words(key: &'static str, head: &'static str) -> Column {
    Column { key, head, hint: "", kind: Kind::Words }
}

/// A column of numbers.
pub const fn number(
    key: &'static str,
    head: &'static str,
    decimals: usize,
    hint: &'static str,
) -> Column {
    Column { key, head, hint, kind: Kind::Number(decimals) }
}

impl Column {
    /// With the interval beside the number.
    pub const fn with_interval(self) -> Column {
        match self.kind {
            Kind::Number(decimals) => Column { kind: Kind::Interval(decimals), ..self },
            _ => self,
        }
    }

    fn decimals(&self) -> Option<usize> {
        match self.kind {
            Kind::Number(decimals) | Kind::Interval(decimals) => Some(decimals),
            Kind::Label | Kind::Words => None,
        }
    }
}

/// The chart of a table on a page: bars of parts, or, with `x`, curves of the first part over that label.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chart {
    /// The unit of the axis.
    pub unit: &'static str,
    /// The keys of the parts that are stacked.
    pub parts: &'static [&'static str],
    /// Labels of which rows of a group are alike.
    pub group: &'static [&'static str],
    /// The label across.
    pub x: Option<&'static str>,
}

/// The tables of a bench.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// As on the command line.
    pub name: &'static str,
    /// The title, one line.
    pub title: &'static str,
    /// One sentence or two.
    pub lead: &'static str,
    /// Columns; of a table those that have anything in it.
    pub columns: &'static [Column],
    /// Printed with a column for each of its values instead of a row: the label, and the value that is shown.
    pub across: Option<(&'static str, &'static str)>,
    /// Charts of the page.
    pub chart: Option<Chart>,
    /// Meaning of the columns.
    pub legend: &'static str,
}

/// A table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// The line above it.
    pub title: String,
    /// Its columns.
    pub columns: Vec<Column>,
    /// Its rows, by the columns' keys and more.
    pub rows: Vec<Map<String, Value>>,
    /// See [`Shape::across`].
    pub across: Option<(&'static str, &'static str)>,
    /// See [`Shape::chart`].
    pub chart: Option<Chart>,
}

impl Table {
    /// Makes a table of these rows, which are JSON objects with the columns' keys and others.
    pub fn of(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = Column>,
        rows: impl IntoIterator<Item = Value>,
    ) -> Table {
        let object = |row: Value| match row {
            Value::Object(cells) => Some(cells),
            _ => None,
        };
        Table {
            title: title.into(),
            columns: columns.into_iter().collect(),
            rows: rows.into_iter().filter_map(object).collect(),
            ..Table::default()
        }
    }

    fn json(&self) -> Value {
        let column = |c: &Column| json!({"key": c.key, "head": c.head, "hint": c.hint, "decimals": c.decimals()});
        let chart = self
            .chart
            .map(|c| json!({"unit": c.unit, "parts": c.parts, "group": c.group, "x": c.x}));
        json!({
            "title": self.title,
            "columns": self.columns.iter().map(column).collect::<Vec<_>>(),
            "chart": chart,
        })
    }
}

/// The report of a command.
#[derive(Clone, Default)]
pub struct Report {
    /// The name in JSON: `send`, `path`.
    pub name: String,
    /// The title, one line.
    pub title: String,
    /// Two or three sentences above the tables.
    pub lead: String,
    /// Names and sentences: where a published table comes from.
    pub facts: Vec<(&'static str, String)>,
    /// The tables.
    pub tables: Vec<Table>,
    /// Sentences below the tables.
    pub notes: Vec<String>,
    /// The ratios.
    pub figures: Vec<Figure>,
    /// Meaning of the columns, a line each; continuation lines are indented.
    pub legend: String,
    /// Accounts of stacks, stage by stage ([`crate::account::Figures::json`]).
    pub accounts: Vec<Value>,
    /// Curves over time: `title`, `x_unit`, `y_unit`, and `curves` of a `name` and `points`.
    pub plots: Vec<Value>,
    /// Why the bench stopped, and how long it took.
    pub ended: Option<(Stop, Duration)>,
}

impl Report {
    /// Makes the report of a bench.
    pub fn of(shape: &Shape, outcome: Outcome) -> Report {
        let mut tables: Vec<Table> = Vec::new();
        let mut notes = Vec::new();
        for row in &outcome.rows {
            if let Some(error) = &row.error {
                notes.push(format!("not measured: {} ({}): {error}", row.title, row.name));
            }
            let at = tables.iter().position(|t| t.title == row.table).unwrap_or_else(|| {
                tables.push(Table {
                    title: row.table.clone(),
                    columns: shape.columns.to_vec(),
                    across: shape.across,
                    chart: shape.chart,
                    rows: Vec::new(),
                });
                tables.len() - 1
            });
            tables[at].rows.push(row_json(row));
        }
        Report {
            name: shape.name.to_owned(),
            title: shape.title.to_owned(),
            lead: shape.lead.to_owned(),
            tables,
            notes,
            figures: outcome.figures.into_iter().filter(|f| f.estimate.is_some()).collect(),
            legend: shape.legend.to_owned(),
            ended: Some((outcome.stop, outcome.elapsed)),
            ..Report::default()
        }
    }

    /// For people.
    pub fn text(&self, machine: &Machine) -> String {
        let mut parts = vec![machine.sentence(), wrapped_lines(&self.title)];
        parts.extend(self.facts.iter().map(|(name, said)| wrapped(&format!("{name}: {said}"))));
        parts.push(wrapped_lines(&self.lead));
        parts.extend(self.tables.iter().map(Table::text));
        parts.extend(self.notes.iter().map(|n| wrapped_lines(n)));
        if !self.figures.is_empty() {
            parts.push(figures_table(&self.figures).text());
        }
        parts.push(wrapped_lines(&self.legend));
        parts.extend(self.ended.map(|(stop, elapsed)| {
            format!("Took {:.0} s: {}.", elapsed.as_secs_f64(), stop.sentence())
        }));
        parts.retain(|p| !p.is_empty());
        parts.join("\n\n")
    }

    /// For programs. `command` is the command line as given.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let ratios: Map<String, Value> = self
            .figures
            .iter()
            .filter_map(|f| Some((f.ratio.name.clone(), figure_json(f, f.estimate?))))
            .collect();
        let rows = self.tables.iter().flat_map(|t| {
            t.rows.iter().map(|row| {
                let mut row = row.clone();
                row.insert("table".to_owned(), t.title.clone().into());
                Value::Object(row)
            })
        });
        json!({
            "machine": machine.to_json(),
            "command": command,
            "name": self.name,
            "title": self.title,
            "lead": self.lead,
            "facts": self.facts,
            "tables": self.tables.iter().map(Table::json).collect::<Vec<_>>(),
            "rows": rows.collect::<Vec<_>>(),
            "ratios": ratios,
            "notes": self.notes,
            "legend": paragraphs(&self.legend),
            "accounts": self.accounts,
            "plots": self.plots,
            "stopped_because": self.ended.map(|(stop, _)| stop.sentence()),
            "elapsed_s": self.ended.map(|(_, elapsed)| elapsed.as_secs_f64()),
        })
    }

    /// A value of a row by the row's name.
    pub fn value(&self, row: &str, key: &str) -> Option<f64> {
        let mut rows = self.tables.iter().flat_map(|t| &t.rows);
        rows.find(|r| r.get("name").is_some_and(|n| n == row))?.get(key)?.as_f64()
    }

    /// A figure by its name.
    pub fn figure(&self, name: &str) -> Option<Estimate> {
        self.figures.iter().find(|f| f.ratio.name == name)?.estimate
    }
}

/// A paragraph for each line that is not indented.
fn paragraphs(legend: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for line in legend.lines().filter(|l| !l.trim().is_empty()) {
        let said = line.split_whitespace().collect::<Vec<_>>().join(" ");
        match all.last_mut() {
            Some(last) if line.starts_with(' ') => *last = format!("{last} {said}"),
            _ => all.push(said),
        }
    }
    all
}

fn row_json(row: &Row) -> Map<String, Value> {
    let mut json = Map::new();
    let mut put = |key: &str, value: Value| json.insert(key.to_owned(), value);
    put("name", row.name.clone().into());
    put("title", row.title.clone().into());
    for (key, value) in &row.labels {
        put(key, value.clone());
    }
    for (key, e) in &row.values {
        put(key, e.median.into());
        if e.runs > 1 {
            put(&format!("{key}_low"), e.low.into());
            put(&format!("{key}_high"), e.high.into());
        }
    }
    let first = row.values.first().filter(|(_, e)| e.runs > 1);
    put("ci95_half_width_pct", first.map(|(_, e)| e.half_width_pct()).into());
    put("runs", row.runs.into());
    if !row.counts.is_empty() {
        let counts = row.counts.iter().map(|(name, n)| ((*name).to_owned(), (*n).into()));
        put("counts", Value::Object(counts.collect()));
        put("counted_bytes", row.counted_bytes.into());
    }
    put("error", row.error.clone().into());
    json
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

/// Judged by the interval's bounds: a figure counts as reached when its median is, and as certain
/// when the whole interval is. One round has no interval and is not judged.
fn verdict(f: &Figure) -> String {
    let (Some(e), Some((reach, aim))) = (f.estimate, f.ratio.reach_and_aim) else {
        return String::new();
    };
    if e.runs == 1 && !f.ratio.is_exact {
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

fn figures_table(figures: &[Figure]) -> Table {
    let row = |f: &Figure| {
        let e = f.estimate;
        let published = f.ratio.published.map_or(String::new(), |p| format!("; published {p}"));
        let cells = json!({
            "figure": f.ratio.name,
            "what": f.ratio.sentence.clone() + &published,
            "median": e.map(|e| e.median),
            "median_low": e.filter(|e| e.runs > 1).map(|e| e.low),
            "median_high": e.filter(|e| e.runs > 1).map(|e| e.high),
            "runs": e.map_or(0, |e| e.runs),
            "verdict": verdict(f),
        });
        cells.as_object().cloned().unwrap_or_default()
    };
    let columns = vec![
        label("figure", "figure"),
        words("what", "what"),
        number("median", "median", 2, "").with_interval(),
        number("runs", "runs", 0, ""),
        words("verdict", "verdict"),
    ];
    Table { columns, rows: figures.iter().map(row).collect(), ..Table::default() }
}
