//! A table that is shown as text, as JSON and as a page, for reports that are not pairs of ways.

use comfy_table::{CellAlignment, ColumnConstraint, Width};
use serde_json::{Map, Value, json};

use crate::page::{Bars, Block, Cell, Page, Section, Table, report::facts};
use crate::report::{Machine, new_table};
use crate::reproduce::text::{WIDTH, wrapped_lines};

/// A figure that issue texts and scripts ask for by name.
#[derive(Clone, Debug)]
pub struct Ratio {
    /// A stable dotted name.
    pub name: String,
    /// What over what.
    pub what: String,
    /// The figures of the single runs.
    pub values: Vec<f64>,
    /// What was published, in words.
    pub published: Option<String>,
    /// The goals.
    pub reach_and_aim: Option<(f64, f64)>,
}

/// A table with what belongs to it.
#[derive(Clone, Debug, Default)]
pub struct Sheet {
    /// What it is, in JSON: `profile`, `path`.
    pub name: &'static str,
    /// One line.
    pub title: String,
    /// Two or three sentences above.
    pub lead: String,
    /// The columns: a key for JSON, with its unit, and what people read.
    pub columns: Vec<(&'static str, &'static str)>,
    /// How many of the columns are words.
    pub words: usize,
    /// The cells.
    pub rows: Vec<Vec<Cell>>,
    /// A chart.
    pub bars: Option<Bars>,
    /// Sentences below.
    pub notes: Vec<String>,
    /// Named figures.
    pub ratios: Vec<Ratio>,
    /// The account of a stack, for JSON ([`crate::account::Figures::json`]).
    pub account: Option<Value>,
}

impl Ratio {
    fn to_json(&self) -> Option<Value> {
        let e = crate::stats::Estimate::of(&self.values)?;
        Some(json!({
            "what": self.what, "published": self.published, "median": e.median, "low": e.low,
            "high": e.high, "runs": e.runs, "confidence": e.confidence,
            "reach": self.reach_and_aim.map(|g| g.0), "aim": self.reach_and_aim.map(|g| g.1),
        }))
    }

    /// As a line of text.
    fn line(&self) -> Option<String> {
        let e = crate::stats::Estimate::of(&self.values)?;
        let goals = self
            .reach_and_aim
            .map_or(String::new(), |(reach, aim)| format!(", to reach {reach}, to aim at {aim}"));
        let published =
            self.published.as_ref().map_or(String::new(), |p| format!("; published: {p}"));
        let (name, what) = (&self.name, &self.what);
        let interval = match e.runs {
            1 => "in one round".to_owned(),
            n => format!("[{:.3}, {:.3}] in {n} runs", e.low, e.high),
        };
        Some(format!("{name} {:.3} {interval}{goals}{published}\n  {what}", e.median))
    }
}

impl Sheet {
    /// For people.
    pub fn text(&self) -> String {
        let mut table = new_table(self.columns.iter().map(|c| c.1), self.words);
        for row in &self.rows {
            table.add_row(row.iter().map(shown));
        }
        let last = self.rows.first().and_then(|r| r.last());
        if let (Some(Cell::Text(_)), Some(column)) = (last, table.column_iter_mut().last()) {
            column.set_cell_alignment(CellAlignment::Left);
            narrow(&mut table);
            self.wrap_words(&mut table);
        }
        let mut parts = vec![wrapped_lines(&self.title), wrapped_lines(&self.lead)];
        parts.push(table.to_string());
        parts.extend(self.notes.iter().map(|n| wrapped_lines(n)));
        parts.extend(self.ratios.iter().filter_map(Ratio::line).map(|l| wrapped_lines(&l)));
        parts.retain(|p| !p.is_empty());
        parts.join("\n\n")
    }

    /// Where the table is still wider than a text, its columns stand closer; where that is not enough, all
    /// columns of words go on in next lines, between words.
    fn wrap_words(&self, table: &mut comfy_table::Table) {
        if width_of(table) <= WIDTH {
            return;
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 1));
        }
        narrow(table);
        if width_of(table) <= WIDTH {
            return;
        }
        let last = self.columns.len().saturating_sub(1);
        for (i, column) in table.column_iter_mut().enumerate() {
            if i < self.words || i == last {
                let most = self.longest_word(i).max(LEAST_WORDS) as u16;
                column.set_constraint(ColumnConstraint::UpperBoundary(Width::Fixed(most + 1)));
            }
        }
    }

    /// Characters of the longest word of a column, its heading included.
    fn longest_word(&self, column: usize) -> usize {
        let head = self.columns.get(column).map_or("", |c| c.1);
        let cells = self.rows.iter().filter_map(|row| match row.get(column)? {
            Cell::Text(text) => Some(text.as_str()),
            Cell::Number(..) | Cell::Nothing => None,
        });
        let words = cells.chain([head]).flat_map(str::split_whitespace);
        words.map(|w| w.chars().count()).max().unwrap_or(0)
    }

    /// For programs: `machine`, `command`, `rows`, `ratios`, `notes`.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|row| self.row_json(row)).collect();
        let ratios: Map<String, Value> =
            self.ratios.iter().filter_map(|r| Some((r.name.clone(), r.to_json()?))).collect();
        let mut json = json!({
            "machine": machine.to_json(),
            "command": command,
            "name": self.name,
            "title": self.title,
            "rows": rows,
            "ratios": ratios,
            "notes": self.notes,
        });
        if let Some(account) = &self.account {
            json["accounts"] = json!([account]);
        }
        json
    }

    fn row_json(&self, row: &[Cell]) -> Value {
        let value = |cell: &Cell| match cell {
            Cell::Text(text) => json!(text),
            Cell::Number(n, _) => json!(n),
            Cell::Nothing => Value::Null,
        };
        let pairs = self.columns.iter().zip(row).map(|(c, cell)| (c.0.to_owned(), value(cell)));
        Value::Object(pairs.collect())
    }

    /// For a browser.
    pub fn page(&self, json: &Value) -> Page {
        let words = json["command"].as_array().map(Vec::as_slice).unwrap_or_default();
        let command: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
        let head = self.columns.iter().map(|c| (c.1.replace('\n', " "), String::new())).collect();
        let table = Table { caption: String::new(), head, rows: self.rows.clone() };
        let mut blocks: Vec<Block> = self.bars.clone().map(Block::Bars).into_iter().collect();
        blocks.push(Block::Table(table));
        let lines = self.ratios.iter().filter_map(Ratio::line);
        blocks.extend(self.notes.iter().cloned().chain(lines).map(Block::Prose));
        Page {
            title: self.title.clone(),
            lead: self.lead.clone(),
            facts: facts(json, &command.join(" ")),
            sections: vec![Section::new("The table", blocks)],
        }
    }
}

/// Characters of a column of words at least, whatever stands in it.
const LEAST_WORDS: usize = 10;

/// Characters of its longest line.
fn width_of(table: &comfy_table::Table) -> usize {
    table.to_string().lines().map(|l| l.trim_end().chars().count()).max().unwrap_or(0)
}

/// Lets the words of the last column go on in a next line where the table would be wider than a text.
fn narrow(table: &mut comfy_table::Table) {
    const LEAST: usize = 30;
    if let Some(column) = table.column_iter_mut().last() {
        column.remove_constraint();
    }
    let wide = width_of(table);
    let Some(last) = table.column_max_content_widths().last().map(|w| usize::from(*w)) else {
        return;
    };
    let mut most = last.saturating_sub(wide.saturating_sub(WIDTH)).max(LEAST);
    while width_of(table) > WIDTH && most >= LEAST {
        if let Some(column) = table.column_iter_mut().last() {
            column.set_constraint(ColumnConstraint::UpperBoundary(Width::Fixed(most as u16 + 2)));
        }
        most -= 1;
    }
}

fn shown(cell: &Cell) -> String {
    match cell {
        Cell::Text(text) => text.clone(),
        Cell::Number(n, decimals) => match decimals {
            Some(d) => format!("{n:.d$}"),
            None => crate::page::short(*n),
        },
        Cell::Nothing => "–".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_read_on_a_terminal_is_cut_between_words() {
        let long = "a sentence that goes on and on ".repeat(12);
        let sheet = Sheet {
            name: "test",
            title: "A title".into(),
            lead: long.clone(),
            columns: vec![("stage", "stage"), ("what", "what it is")],
            words: 1,
            rows: vec![vec![Cell::Text("locked".into()), Cell::Text(long.clone())]],
            notes: vec![format!("{long}\n  12.5 %  {long}\n  3.0 %  short")],
            ..Sheet::default()
        };
        let text = sheet.text();
        let widest = text.lines().map(|l| l.trim_end().chars().count()).max();
        assert!(widest <= Some(WIDTH), "{widest:?} columns:\n{text}");
        assert!(text.contains("\n  3.0 %  short"), "{text}");
    }

    #[test]
    fn a_table_of_many_columns_fits_a_text_and_loses_no_word() {
        let heads = ["exit point", "published\n1 CPU", "kernel\ntoday", "stage", "what", "verdict"];
        let row = ["a point that is far down", "1252–1286", "1690–1690", "transport_output"];
        let texts = row.into_iter().chain(["some more words than fit", "not comparable at all"]);
        let columns = heads.map(|h| ("key", h)).into_iter().cycle().take(8).collect();
        let rows = vec![texts.cycle().take(8).map(|t| Cell::Text(t.to_owned())).collect()];
        let text = Sheet { columns, words: 8, rows, ..Sheet::default() }.text();
        let widest = text.lines().map(|l| l.trim_end().chars().count()).max();
        assert!(widest <= Some(WIDTH), "{widest:?} columns:\n{text}");
        for word in row.iter().flat_map(|t| t.split(' ')) {
            assert!(text.contains(word), "{word}:\n{text}");
        }
    }

    #[test]
    fn sentences_behind_many_numbers_are_not_cut_into_single_words() {
        let heads =
            ["threads", "stage", "min", "median", "max", "to the stage\nbefore", "counts", "what"];
        let sentence =
            "what its owner may say of the stage in a line or two of words that all fit there";
        let texts = ["1", "transport_output", "164.3", "178.3", "187.1", "113.8", "yes", sentence];
        let columns = heads.map(|h| ("key", h)).to_vec();
        let rows = vec![texts.map(|t| Cell::Text(t.to_owned())).to_vec()];
        let text = Sheet { columns, words: 2, rows, ..Sheet::default() }.text();
        let widest = text.lines().map(|l| l.trim_end().chars().count()).max();
        assert!(widest <= Some(WIDTH), "{widest:?} columns:\n{text}");
        assert!(text.lines().count() <= 6, "{text}");
    }

    #[test]
    fn what_stands_in_columns_stays_there_and_goes_on_in_the_last() {
        let sentence = "a sentence that goes on ".repeat(5);
        let text =
            wrapped_lines(&format!("  locked     2.3 %  {sentence}\n  ip        12.3 %  short"));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("  locked     2.3 %  a sentence"), "{text}");
        assert!(lines[1].starts_with(&format!("{}goes", " ".repeat(20))), "{text}");
        assert_eq!(lines[2], "  ip        12.3 %  short");
        assert!(lines.iter().all(|l| l.chars().count() <= WIDTH), "{text}");
    }

    #[test]
    fn a_sheet_says_the_same_in_all_three_forms() {
        let sheet = Sheet {
            name: "test",
            title: "A title".into(),
            columns: vec![("stage", "stage"), ("ns_per_packet", "ns")],
            words: 1,
            rows: vec![vec![Cell::Text("locked".into()), Cell::Number(12.34, Some(1))]],
            notes: vec!["A note.".into()],
            ratios: vec![Ratio {
                name: "test.ratio".into(),
                what: "one over the other".into(),
                values: vec![0.5; 7],
                published: None,
                reach_and_aim: Some((0.6, 0.2)),
            }],
            ..Sheet::default()
        };
        let json = sheet.json(&Machine::here(), &["fulmar".into(), "path".into()]);
        assert_eq!(json["rows"][0]["ns_per_packet"], 12.34);
        assert_eq!(json["ratios"]["test.ratio"]["median"], 0.5);
        for text in [sheet.text(), sheet.page(&json).html()] {
            assert!(text.contains("A title") && text.contains("locked") && text.contains("12.3"));
            assert!(text.contains("A note.") && text.contains("test.ratio"));
        }
    }
}
