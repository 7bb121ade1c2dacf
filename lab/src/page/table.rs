//! Tables: numbers to the right, sortable by a click on a column's head.

use super::html::escape;
use super::svg::short;
use std::fmt::Write;

/// Text of at most so many characters stays on one line.
const UNBROKEN: usize = 16;

/// A table.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Shown above.
    pub caption: String,
    /// Column heads; each with what stands when it is pointed at.
    pub head: Vec<(String, String)>,
    /// Cells, row by row.
    pub rows: Vec<Vec<Cell>>,
}

/// One cell.
#[derive(Clone, PartialEq, Debug)]
pub enum Cell {
    /// Words.
    Text(String),
    /// A number with that many decimals; `None` for about three significant digits.
    Number(f64, Option<usize>),
    /// Not measured.
    Nothing,
}

impl Cell {
    /// A number, or nothing.
    pub fn number(value: Option<f64>, decimals: usize) -> Cell {
        value.map_or(Cell::Nothing, |v| Cell::Number(v, Some(decimals)))
    }

    fn html(&self) -> String {
        match self {
            Cell::Text(text) if text.chars().count() <= UNBROKEN => {
                format!("<td class=\"k\">{}</td>", escape(text))
            }
            Cell::Text(text) => format!("<td class=\"w\">{}</td>", escape(text)),
            Cell::Nothing => "<td class=\"n\" data-n=\"\">\u{2013}</td>".to_owned(),
            Cell::Number(value, decimals) => {
                let shown = decimals.map_or_else(|| short(*value), |d| format!("{value:.d$}"));
                format!("<td class=\"n\" data-n=\"{value}\">{shown}</td>")
            }
        }
    }
}

impl Table {
    /// The table as HTML, in a box that scrolls sideways where the window is narrow.
    pub fn html(&self) -> String {
        let mut out = "<div class=\"wide\"><table>\n".to_owned();
        if !self.caption.is_empty() {
            let _ = writeln!(out, "<caption>{}</caption>", escape(&self.caption));
        }
        out += "<thead><tr>";
        for (i, (name, hint)) in self.head.iter().enumerate() {
            let class = if self.is_numeric(i) { " class=\"n\"" } else { "" };
            let title = if hint.is_empty() { name } else { hint };
            let (name, title) = (escape(name), escape(title));
            let _ = write!(out, "<th{class} scope=\"col\" title=\"{title}\">{name}</th>");
        }
        out += "</tr></thead>\n<tbody>\n";
        for row in &self.rows {
            out += "<tr>";
            row.iter().for_each(|cell| out += &cell.html());
            out += "</tr>\n";
        }
        out + "</tbody>\n</table></div>\n"
    }

    fn is_numeric(&self, column: usize) -> bool {
        let text = |row: &Vec<Cell>| matches!(row.get(column), Some(Cell::Text(_)));
        !self.rows.iter().any(text)
    }

    /// Leaves out the columns in which no row has anything.
    #[must_use]
    pub fn without_empty_columns(self) -> Table {
        let full: Vec<bool> = (0..self.head.len())
            .map(|i| self.rows.iter().any(|r| r.get(i).is_some_and(|c| *c != Cell::Nothing)))
            .collect();
        let head = self.head.into_iter().zip(&full).filter(|(_, k)| **k).map(|(h, _)| h).collect();
        let rows = self.rows.into_iter().map(|row| {
            let cells = row.into_iter().zip(&full).filter(|(_, k)| **k).map(|(c, _)| c);
            cells.collect()
        });
        Table { caption: self.caption, head, rows: rows.collect() }
    }
}
