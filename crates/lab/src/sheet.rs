//! A table that is shown as text, as JSON and as a page, for reports that are not pairs of ways.

use comfy_table::CellAlignment;
use serde_json::{Map, Value, json};

use crate::page::{Bars, Block, Cell, Page, Section, Table, report::facts};
use crate::report::{Machine, new_table};

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
        Some(format!(
            "{name} {:.3} [{:.3}, {:.3}] in {} runs{goals}{published}\n  {what}",
            e.median, e.low, e.high, e.runs
        ))
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
        }
        let mut parts = vec![self.title.clone(), self.lead.clone(), table.to_string()];
        parts.extend(self.notes.iter().cloned());
        parts.extend(self.ratios.iter().filter_map(Ratio::line));
        parts.retain(|p| !p.is_empty());
        parts.join("\n\n")
    }

    /// For programs: `machine`, `command`, `rows`, `ratios`, `notes`.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|row| self.row_json(row)).collect();
        let ratios: Map<String, Value> =
            self.ratios.iter().filter_map(|r| Some((r.name.clone(), r.to_json()?))).collect();
        json!({
            "machine": machine.to_json(),
            "command": command,
            "name": self.name,
            "title": self.title,
            "rows": rows,
            "ratios": ratios,
            "notes": self.notes,
        })
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
