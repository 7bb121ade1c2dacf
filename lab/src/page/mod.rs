//! A report as one HTML page that needs nothing else: no script from elsewhere, no font, no image.
//!
//! A [`Page`] is a title, facts and sections; a section is prose, charts and tables. [`report`]
//! makes one from the JSON of any bench. Whoever has a report of another shape builds the page from
//! the same parts: [`Bars`] (stacked bars with intervals), [`Lines`] (curves over a load), [`Gauges`] (ratios with their goals on a
//! logarithmic axis) and [`Table`] (sortable by a click).
//!
//! The charts are SVG of our own, a few hundred lines. The chart crates that were looked at either
//! carry a JavaScript engine or library (charming), are made for bitmaps and bring dozens of
//! dependencies (plotters), or draw plain bars only (eb_bars, splot). None draws what these pages
//! are about, an interval on a stacked bar and a ratio beside its goals, and none takes its colours
//! from the page, as light, dark and print need.

mod bars;
mod gauges;
mod html;
mod lines;
pub mod report;
pub mod stages;
mod svg;
mod table;

pub use bars::{Bar, Bars, Mark, colour};
pub use gauges::{Gauge, Gauges};
pub use lines::{Line, Lines};
pub use svg::short;
pub use table::{Cell, Table};

use html::escape;
use std::fmt::Write;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("sort.js");

/// One page.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// What was measured.
    pub title: String,
    /// One or two sentences below the title.
    pub lead: String,
    /// Names and values: machine, kernel, command.
    pub facts: Vec<(String, String)>,
    /// The rest, in order.
    pub sections: Vec<Section>,
}

/// A heading and what stands below it.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// The heading.
    pub heading: String,
    /// What stands below, in order.
    pub blocks: Vec<Block>,
}

/// A part of a section.
#[derive(Clone, Debug)]
pub enum Block {
    /// A paragraph of plain text.
    Prose(String),
    /// Stacked bars.
    Bars(Bars),
    /// Curves.
    Lines(Lines),
    /// Ratios beside their goals.
    Gauges(Gauges),
    /// A table.
    Table(Table),
}

impl Page {
    /// The whole document.
    pub fn html(&self) -> String {
        let mut out = String::with_capacity(64 << 10);
        let title = escape(&self.title);
        let _ = write!(
            out,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n"
        );
        if !self.lead.is_empty() {
            let _ = writeln!(out, "<p class=\"lead\">{}</p>", escape(&self.lead));
        }
        self.write_facts(&mut out);
        out += "</header>\n<main>\n";
        self.sections.iter().for_each(|s| s.write(&mut out));
        let _ = write!(out, "</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n");
        out
    }

    fn write_facts(&self, out: &mut String) {
        if self.facts.is_empty() {
            return;
        }
        *out += "<dl>\n";
        for (name, value) in &self.facts {
            let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
        }
        *out += "</dl>\n";
    }
}

impl Section {
    /// A section of these blocks.
    pub fn new(heading: impl Into<String>, blocks: Vec<Block>) -> Section {
        Section { heading: heading.into(), blocks }
    }

    fn write(&self, out: &mut String) {
        let _ = writeln!(out, "<section>\n<h2>{}</h2>", escape(&self.heading));
        for block in &self.blocks {
            match block {
                Block::Prose(text) => {
                    let _ = writeln!(out, "<p>{}</p>", escape(text));
                }
                Block::Lines(lines) => *out += &figure(&lines.svg(), &lines.caption),
                Block::Bars(bars) => *out += &figure(&bars.svg(), &bars.caption),
                Block::Gauges(gauges) => *out += &figure(&gauges.svg(), &gauges.caption),
                Block::Table(table) => *out += &table.html(),
            }
        }
        *out += "</section>\n";
    }
}

fn figure(svg: &str, caption: &str) -> String {
    format!("<figure>\n{svg}<figcaption>{}</figcaption>\n</figure>\n", escape(caption))
}

#[cfg(test)]
mod tests;
