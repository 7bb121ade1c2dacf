//! The table printer: every table of every command.
//!
//! A table that is wider than a line is cut between words first, then into parts that stand below each other,
//! each with the labels at its left.

use serde_json::{Map, Value};

use super::report::{Column, Kind, Table, WIDTH};

/// A column of words is not made narrower than this.
const LEAST_WORDS: usize = 16;
/// Between columns.
const GAP: usize = 2;

/// A column as printed: its head and its cells.
struct Printed {
    kind: Kind,
    head: Vec<String>,
    cells: Vec<String>,
    width: usize,
}

impl Table {
    /// The table with its title.
    pub(crate) fn text(&self) -> String {
        let mut rest = self.printed();
        if rest.iter().all(|c| c.kind == Kind::Label) {
            return String::new();
        }
        shrink(&mut rest);
        let (labels, mut rest): (Vec<Printed>, Vec<Printed>) =
            rest.into_iter().partition(|c| c.kind == Kind::Label);
        let mut parts = vec![self.title.clone()];
        while !rest.is_empty() {
            let mut wide = width(labels.iter());
            let fits = |c: &Printed| {
                wide += c.width + GAP;
                wide <= WIDTH
            };
            let n = rest.iter().map(fits).take_while(|fits| *fits).count();
            // An interval stays beside its number.
            let is_parted = rest.get(n).is_some_and(|c| matches!(c.kind, Kind::Interval(_)));
            let n = n.saturating_sub(usize::from(is_parted)).max(1);
            let others = rest.split_off(n);
            let shown: Vec<&Printed> = labels.iter().chain(&rest).collect();
            parts.push(lines(&shown));
            rest = others;
        }
        parts.retain(|p| !p.is_empty());
        parts.join("\n\n")
    }

    fn printed(&self) -> Vec<Printed> {
        let (columns, rows) = match self.across {
            Some((label, value)) => return self.printed_across(label, value),
            None => (&self.columns, &self.rows),
        };
        let mut all = Vec::new();
        for column in columns.iter().filter(|c| rows.iter().any(|r| has(r, c.key))) {
            let cells = rows.iter().map(|r| shown(r, column)).collect();
            let Kind::Interval(decimals) = column.kind else {
                all.push(Printed::new(column.kind, column.head, cells));
                continue;
            };
            let intervals = rows.iter().map(|r| interval(r, column.key, decimals)).collect();
            all.push(Printed::new(Kind::Number(decimals), column.head, cells));
            all.push(Printed::new(column.kind, "95 %", intervals));
        }
        all
    }

    /// Rows that differ in one label only become one, with a column for each value of the label.
    fn printed_across(&self, label: &str, value: &str) -> Vec<Printed> {
        let Some(of_value) = self.columns.iter().find(|c| c.key == value) else {
            return Vec::new();
        };
        let labels: Vec<&Column> =
            self.columns.iter().filter(|c| c.kind == Kind::Label && c.key != label).collect();
        let name = |r: &Map<String, Value>| -> Vec<String> {
            labels.iter().map(|c| shown(r, c)).collect()
        };
        let (mut names, mut across): (Vec<Vec<String>>, Vec<u64>) = (Vec::new(), Vec::new());
        for row in &self.rows {
            if !names.contains(&name(row)) {
                names.push(name(row));
            }
            across.extend(row.get(label).and_then(Value::as_u64));
        }
        across.sort_unstable();
        across.dedup();
        let mut all = Vec::new();
        for (i, column) in labels.iter().enumerate() {
            let cells = names.iter().map(|n| n[i].clone()).collect();
            all.push(Printed::new(Kind::Label, column.head, cells));
        }
        for n in across {
            let cell = |wanted: &Vec<String>| {
                let is_it = |r: &&Map<String, Value>| {
                    name(r) == *wanted && r.get(label).and_then(Value::as_u64) == Some(n)
                };
                self.rows.iter().find(is_it).map_or("–".to_owned(), |r| shown(r, of_value))
            };
            let cells = names.iter().map(cell).collect();
            all.push(Printed::new(Kind::Number(0), &format!("x{n}"), cells));
        }
        all
    }
}

impl Printed {
    fn new(kind: Kind, head: &str, cells: Vec<String>) -> Printed {
        let head: Vec<String> = head.lines().map(str::to_owned).collect();
        let width = head.iter().chain(&cells).map(|t| t.chars().count()).max().unwrap_or(0);
        Printed { kind, head, cells, width }
    }

    fn is_words(&self) -> bool {
        matches!(self.kind, Kind::Label | Kind::Words)
    }

    fn longest_word(&self) -> usize {
        let words = self.head.iter().chain(&self.cells).flat_map(|t| t.split_whitespace());
        words.map(|w| w.chars().count()).max().unwrap_or(0)
    }

    fn aligned(&self, text: &str) -> String {
        let n = self.width;
        if self.is_words() { format!("{text:<n$}") } else { format!("{text:>n$}") }
    }
}

fn width<'p>(columns: impl Iterator<Item = &'p Printed>) -> usize {
    columns.map(|c| c.width + GAP).sum::<usize>().saturating_sub(GAP)
}

/// The widest columns of words are cut until the table fits or no word may be cut further.
fn shrink(columns: &mut [Printed]) {
    loop {
        let excess = width(columns.iter()).saturating_sub(WIDTH);
        let least = |c: &Printed| c.longest_word().max(LEAST_WORDS);
        let widest = columns.iter_mut().filter(|c| c.is_words() && c.width > least(c));
        match widest.max_by_key(|c| c.width) {
            Some(column) if excess > 0 => {
                column.width = (column.width - 1).max(least(column));
            }
            _ => return,
        }
    }
}

fn lines(columns: &[&Printed]) -> String {
    let mut out = Vec::new();
    let heads: Vec<Vec<String>> = columns.iter().map(|c| cut(&c.head.join(" "), c)).collect();
    let heads: Vec<Vec<String>> = heads
        .into_iter()
        .zip(columns)
        .map(|(cut, c)| if c.head.len() > cut.len() { c.head.clone() } else { cut })
        .collect();
    put(&mut out, columns, &heads);
    out.push("─".repeat(width(columns.iter().copied())));
    let rows = columns.iter().map(|c| c.cells.len()).max().unwrap_or(0);
    for row in 0..rows {
        let cells: Vec<Vec<String>> = columns.iter().map(|c| cut(&c.cells[row], c)).collect();
        put(&mut out, columns, &cells);
    }
    out.join("\n")
}

/// A cell's lines.
fn cut(text: &str, column: &Printed) -> Vec<String> {
    wrapped_to(column.width, text).lines().map(str::to_owned).collect()
}

fn put(out: &mut Vec<String>, columns: &[&Printed], cells: &[Vec<String>]) {
    let height = cells.iter().map(Vec::len).max().unwrap_or(0);
    for at in 0..height {
        let cell = |(c, lines): (&&Printed, &Vec<String>)| {
            c.aligned(lines.get(at).map_or("", String::as_str))
        };
        let line: Vec<String> = columns.iter().zip(cells).map(cell).collect();
        out.push(line.join(&" ".repeat(GAP)).trim_end().to_owned());
    }
}

fn has(row: &Map<String, Value>, key: &str) -> bool {
    row.get(key).is_some_and(|v| !v.is_null() && v != "")
}

fn shown(row: &Map<String, Value>, column: &Column) -> String {
    match (row.get(column.key), column.kind) {
        (Some(Value::Number(n)), Kind::Number(decimals) | Kind::Interval(decimals)) => {
            n.as_f64().map_or_else(|| n.to_string(), |n| format!("{n:.decimals$}"))
        }
        (Some(Value::Number(n)), _) if column.key.ends_with("_bytes") => {
            n.as_u64().map_or_else(|| n.to_string(), size)
        }
        (Some(Value::Number(n)), _) => n.as_f64().map_or_else(|| n.to_string(), short),
        (Some(Value::Bool(on)), _) => (if *on { "yes" } else { "no" }).to_owned(),
        (Some(Value::String(text)), _) if column.key == "placement" => {
            text.replace('_', " ").replace("cpu", "CPU")
        }
        (Some(Value::String(text)), _) => text.clone(),
        (_, Kind::Label | Kind::Words) => String::new(),
        _ => "–".to_owned(),
    }
}

fn interval(row: &Map<String, Value>, key: &str, decimals: usize) -> String {
    let of = |end: &str| row.get(&format!("{key}_{end}")).and_then(Value::as_f64);
    match of("low").zip(of("high")) {
        Some((low, high)) => format!("{low:.decimals$}–{high:.decimals$}"),
        None if has(row, key) => crate::stats::ONE_ROUND.to_owned(),
        None => String::new(),
    }
}

/// Bytes in the largest unit that leaves no rest.
fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// A number with about three significant digits.
pub fn short(value: f64) -> String {
    let trimmed = |text: String| text.trim_end_matches('0').trim_end_matches('.').to_owned();
    match value.abs() {
        m if !m.is_finite() => "–".to_owned(),
        0.0 => "0".to_owned(),
        m if m >= 99.95 => format!("{value:.0}"),
        m if m >= 9.995 => trimmed(format!("{value:.1}")),
        m if m >= 0.0995 => trimmed(format!("{value:.2}")),
        m if m >= 0.001 => trimmed(format!("{value:.4}")),
        _ => format!("{value:.1e}"),
    }
}

/// Cut into lines of at most [`WIDTH`] characters, between words.
pub fn wrapped(text: &str) -> String {
    wrapped_to(WIDTH, text)
}

fn wrapped_to(most: usize, text: &str) -> String {
    let (mut out, mut width) = (String::new(), 0);
    for word in text.split_whitespace() {
        let n = word.chars().count();
        if width > 0 && width + 1 + n > most {
            out.push('\n');
            width = 0;
        } else if width > 0 {
            out.push(' ');
            width += 1;
        }
        out += word;
        width += n;
    }
    out
}

/// The same of a text of several lines, each by itself, but for those that go on: indented ones below a line that
/// is not. A line that is indented goes on with two columns more, or, if it has columns itself, in the last of
/// them; so does what has a name before two spaces.
pub fn wrapped_lines(text: &str) -> String {
    let line = |line: String| match line.chars().count() {
        n if n <= WIDTH => line,
        _ if line.starts_with(' ') || line.contains("  ") => hung(&line),
        _ => wrapped(&line),
    };
    joined(text).into_iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Lines with what goes on from them, where that is too wide as it is.
fn joined(text: &str) -> Vec<String> {
    let is_wide = text.lines().any(|l| l.chars().count() > WIDTH);
    let mut all: Vec<String> = Vec::new();
    for line in text.lines() {
        // A line with columns is a row, not a continuation of the previous line.
        let is_row = line.trim_start().contains("  ");
        match all.last_mut().filter(|above| is_wide && !above.starts_with(' ')) {
            Some(above) if line.starts_with(' ') && !is_row => {
                above.push(' ');
                above.push_str(line.trim_start());
            }
            _ => all.push(line.to_owned()),
        }
    }
    all
}

fn hung(line: &str) -> String {
    let indent = line.len() - line.trim_start().len();
    let column = line.rfind("  ").map_or(0, |at| at + 2);
    let (head, margin) = match line.get(..column) {
        Some(head) if column > indent && head.chars().count() <= WIDTH / 2 => {
            (head.to_owned(), head.chars().count())
        }
        _ => (" ".repeat(indent), indent + 2),
    };
    let rest = line.get(head.len()..).unwrap_or_default();
    let cut = wrapped_to(WIDTH.saturating_sub(margin), rest);
    format!("{head}{}", cut.replace('\n', &format!("\n{}", " ".repeat(margin))))
}
