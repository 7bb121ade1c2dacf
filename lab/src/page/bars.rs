//! Horizontal stacked bars, one per way, each with the interval of its total.
//!
//! ```text
//! TAP, two CPUs                       (a group's heading)
//!   kernel to kernel   ████████▒▒▒├─┤      363
//!   fulmar             ██████▒▒▒┤          353
//!                      0      100      200 ns per KB
//! ```

use super::svg::{self, Anchor, Scale, WIDTH};
use std::fmt::Write;

/// The height of a row, of its bar, of a group's heading, of the axis.
const ROW: f64 = 24.0;
const BAR: f64 = 15.0;
const HEADING: f64 = 30.0;
const AXIS: f64 = 40.0;
const LEGEND: f64 = 30.0;
const LEGEND_LINE: f64 = 20.0;
/// The room for labels at the left, at the most, and for numbers at the right.
const LABELS: f64 = 340.0;
const NUMBERS: f64 = 96.0;
/// Colours that the style sheet has.
pub(super) const COLOURS: usize = 21;
/// The one that is for what is not the host's.
pub(super) const NOT_OURS: usize = 7;

/// A chart.
#[derive(Clone, Debug, Default)]
pub struct Bars {
    /// Shown below the chart: what it says and how it was made.
    pub caption: String,
    /// The unit of the axis: `ns of CPU per KB`.
    pub unit: String,
    /// The parts of which bars are stacked, in order, each with the number of its colour: 7 for
    /// what is not the host's, [`colour`] of the others.
    pub parts: Vec<(String, usize)>,
    /// The bars, top down.
    pub bars: Vec<Bar>,
    /// Values to compare every bar with.
    pub marks: Vec<Mark>,
}

/// The number of the colour of part `i` of a chart: 20 parts have one each.
pub const fn colour(i: usize) -> usize {
    let of_ours = i % (COLOURS - 1);
    if of_ours < NOT_OURS { of_ours } else { of_ours + 1 }
}

/// One bar.
#[derive(Clone, Debug, Default)]
pub struct Bar {
    /// Bars of one group stand together below its name.
    pub group: String,
    /// What it is.
    pub label: String,
    /// One value per part of the chart; what was not measured is 0.
    pub values: Vec<f64>,
    /// The interval of the total.
    pub interval: Option<(f64, f64)>,
    /// Stands at the end instead of the total.
    pub note: Option<String>,
}

/// A dashed line across all bars.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Where.
    pub value: f64,
    /// What it is: `memcpy`.
    pub label: String,
}

impl Bar {
    fn total(&self) -> f64 {
        self.values.iter().filter(|v| v.is_finite()).sum()
    }

    fn reach(&self) -> f64 {
        self.interval.map_or(self.total(), |(_, high)| self.total().max(high))
    }

    fn said(&self) -> String {
        self.note.clone().unwrap_or_else(|| svg::short(self.total()))
    }
}

/// Where things are.
struct Layout {
    left: f64,
    right: f64,
    top: f64,
    scale: Scale,
}

impl Layout {
    fn x(&self, value: f64) -> f64 {
        self.left + self.scale.at(value) * (self.right - self.left)
    }
}

impl Bars {
    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let layout = self.layout();
        let body = self.body_height();
        let height = layout.top + body + AXIS;
        let mut out = svg::open(height, &format!("{}: {}", self.unit, self.caption));
        self.write_legend(&mut out);
        self.write_axis(&mut out, &layout, body);
        self.write_rows(&mut out, &layout);
        self.write_marks(&mut out, &layout, body);
        out += "</svg>\n";
        out
    }

    fn layout(&self) -> Layout {
        let longest = self.bars.iter().map(|b| svg::width_of(&b.label)).fold(60.0, f64::max);
        let numbers = self.bars.iter().map(|b| svg::width_of(&b.said())).fold(0.0, f64::max);
        let marks = self.marks.iter().map(|m| m.value);
        let most = self.bars.iter().map(Bar::reach).chain(marks).fold(0.0, f64::max);
        let lines = self.legend().last().map_or(0, |(_, line, _)| line + 1);
        let legend = if lines == 0 { 0.0 } else { LEGEND + (lines - 1) as f64 * LEGEND_LINE };
        let names = if self.marks.is_empty() { 0.0 } else { 18.0 };
        Layout {
            left: longest.min(LABELS) + 12.0,
            right: WIDTH - NUMBERS.max(numbers + 24.0),
            top: legend + names,
            scale: Scale::linear(most),
        }
    }

    /// The parts with their places: from the left, and in which line. One part needs no name.
    fn legend(&self) -> Vec<(f64, usize, &(String, usize))> {
        let (mut x, mut line) = (0.0, 0);
        let place = |part| {
            let (name, _): &(String, usize) = part;
            let width = 19.0 + svg::width_of(name);
            if x > 0.0 && x + width > WIDTH {
                (x, line) = (0.0, line + 1);
            }
            let at = (x, line, part);
            x += width + 16.0;
            at
        };
        if self.parts.len() > 1 { self.parts.iter().map(place).collect() } else { Vec::new() }
    }

    fn starts_group(&self, i: usize) -> bool {
        let group = |i: usize| self.bars.get(i).map(|b| b.group.as_str());
        group(i) != Some("") && (i == 0 || group(i) != group(i - 1))
    }

    fn body_height(&self) -> f64 {
        let headings = (0..self.bars.len()).filter(|i| self.starts_group(*i)).count();
        self.bars.len() as f64 * ROW + headings as f64 * HEADING
    }

    fn write_legend(&self, out: &mut String) {
        for (x, line, (name, colour)) in self.legend() {
            let y = line as f64 * LEGEND_LINE;
            svg::rect(out, (x, y + 3.0), (13.0, 13.0), &format!("s{}", colour % COLOURS), "");
            svg::text(out, x + 19.0, y + 14.0, Anchor::Start, "label", name);
        }
    }

    fn write_axis(&self, out: &mut String, layout: &Layout, body: f64) {
        let bottom = layout.top + body;
        for tick in layout.scale.ticks() {
            let x = layout.x(tick);
            svg::line(out, (x, layout.top), (x, bottom + 4.0), "grid");
            svg::text(out, x, bottom + 18.0, Anchor::Middle, "tick", &svg::short(tick));
        }
        let middle = (layout.left + layout.right) / 2.0;
        svg::text(out, middle, bottom + 35.0, Anchor::Middle, "unit", &self.unit);
    }

    fn write_rows(&self, out: &mut String, layout: &Layout) {
        let mut y = layout.top;
        for (i, bar) in self.bars.iter().enumerate() {
            if self.starts_group(i) {
                svg::text(out, 0.0, y + 20.0, Anchor::Start, "group", &bar.group);
                y += HEADING;
            }
            self.write_bar(out, layout, bar, y);
            y += ROW;
        }
    }

    fn write_bar(&self, out: &mut String, layout: &Layout, bar: &Bar, y: f64) {
        let (top, base) = (y + (ROW - BAR) / 2.0, y + ROW / 2.0 + 4.5);
        let label = svg::fitted(&bar.label, layout.left - 12.0);
        svg::text(out, layout.left - 10.0, base, Anchor::End, "label", &label);
        let mut sum = 0.0;
        for (value, (name, colour)) in bar.values.iter().zip(&self.parts) {
            if !value.is_finite() || *value <= 0.0 {
                continue;
            }
            let (from, to) = (layout.x(sum), layout.x(sum + value));
            let title = format!("{}: {} {} {}", bar.label, name, svg::short(*value), self.unit);
            let class = format!("s{}", colour % COLOURS);
            svg::rect(out, (from, top), ((to - from).max(0.6), BAR), &class, &title);
            sum += value;
        }
        let mut end = layout.x(sum);
        if let Some((low, high)) = bar.interval {
            whisker(out, (layout.x(low), layout.x(high)), y + ROW / 2.0);
            end = end.max(layout.x(high));
        }
        svg::text(out, end + 8.0, base, Anchor::Start, "value", &bar.said());
    }

    fn write_marks(&self, out: &mut String, layout: &Layout, body: f64) {
        for mark in &self.marks {
            let x = layout.x(mark.value);
            svg::line(out, (x, layout.top - 2.0), (x, layout.top + body), "mark");
            let label = format!("{} {}", mark.label, svg::short(mark.value));
            svg::text(out, x, layout.top - 6.0, Anchor::Middle, "tick", &label);
        }
    }
}

fn whisker(out: &mut String, (low, high): (f64, f64), y: f64) {
    let _ = writeln!(
        out,
        "<path d=\"M{low:.1} {:.1}v8m0-4H{high:.1}m0-4v8\" class=\"whisker\"/>",
        y - 4.0
    );
}
