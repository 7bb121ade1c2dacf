//! Curves over a load, both axes logarithmic: a name and a colour per curve, a dot per measured point.
//!
//! ```text
//!   ■ moderated  ■ polling
//!   µs
//!   100 ┤        ●──●
//!    10 ┤  ●──●─●
//!       └──┬────┬────┬─  datagrams per second
//! ```

use super::html::escape;
use super::svg::{self, Anchor, Scale, WIDTH};
use std::fmt::Write;

/// Room for the numbers of the axes, and the height between them.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const LEGEND: f64 = 30.0;
const UNIT: f64 = 20.0;
const PLOT: f64 = 250.0;
const AXIS: f64 = 42.0;
/// Colours that the style sheet has.
const COLOURS: usize = 8;

/// A chart.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    /// Shown below the chart: what it says and how it was made.
    pub caption: String,
    /// The units of the axes, across and up.
    pub units: (String, String),
    /// The curves.
    pub lines: Vec<Line>,
}

/// One curve.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// What it is.
    pub name: String,
    /// The number of its colour, 0 to 7.
    pub colour: usize,
    /// Its points. What is 0 stands on the lower axis.
    pub points: Vec<(f64, f64)>,
}

/// Where things are.
struct Layout {
    across: Scale,
    up: Scale,
    top: f64,
    bottom: f64,
}

impl Layout {
    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let width = WIDTH - LEFT - RIGHT;
        let height = self.bottom - self.top;
        (LEFT + self.across.at(x) * width, self.bottom - self.up.at(y) * height)
    }
}

impl Lines {
    /// Whether there is a curve to draw.
    pub fn is_empty(&self) -> bool {
        self.lines.iter().all(|l| l.points.len() < 2)
    }

    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|l| l.points.iter().copied());
        let top = LEGEND + UNIT;
        let layout = Layout {
            across: Scale::log(points().map(|p| p.0)),
            up: Scale::log(points().map(|p| p.1)),
            top,
            bottom: top + PLOT,
        };
        let label = format!("{} by {}: {}", self.units.1, self.units.0, self.caption);
        let mut out = svg::open(layout.bottom + AXIS, &label);
        self.write_legend(&mut out);
        self.write_axes(&mut out, &layout);
        self.lines.iter().for_each(|l| self.write_line(&mut out, &layout, l));
        out += "</svg>\n";
        out
    }

    fn write_legend(&self, out: &mut String) {
        let mut x = 0.0;
        for line in &self.lines {
            let class = format!("s{}", line.colour % COLOURS);
            svg::rect(out, (x, 3.0), (13.0, 13.0), &class, "");
            svg::text(out, x + 19.0, 14.0, Anchor::Start, "label", &line.name);
            x += 19.0 + svg::width_of(&line.name) + 24.0;
        }
    }

    fn write_axes(&self, out: &mut String, layout: &Layout) {
        let Layout { top, bottom, .. } = *layout;
        for tick in layout.across.ticks() {
            let (x, _) = layout.at((tick, 0.0));
            svg::line(out, (x, top), (x, bottom + 4.0), "grid");
            svg::text(out, x, bottom + 18.0, Anchor::Middle, "tick", &counted(tick));
        }
        for tick in layout.up.ticks() {
            let (_, y) = layout.at((0.0, tick));
            svg::line(out, (LEFT, y), (WIDTH - RIGHT, y), "grid");
            svg::text(out, LEFT - 8.0, y + 4.0, Anchor::End, "tick", &counted(tick));
        }
        svg::line(out, (LEFT, bottom), (WIDTH - RIGHT, bottom), "grid strong");
        svg::text(out, 0.0, LEGEND + 12.0, Anchor::Start, "unit", &self.units.1);
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        svg::text(out, middle, bottom + 36.0, Anchor::Middle, "unit", &self.units.0);
    }

    fn write_line(&self, out: &mut String, layout: &Layout, line: &Line) {
        let colour = line.colour % COLOURS;
        let at: Vec<(f64, f64)> = line.points.iter().map(|p| layout.at(*p)).collect();
        let path: Vec<String> = at.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ =
            writeln!(out, "<polyline points=\"{}\" class=\"curve c{colour}\"/>", path.join(" "));
        for ((x, y), (load, value)) in at.iter().zip(&line.points) {
            let (value, load) = (svg::short(*value), svg::short(*load));
            let title =
                format!("{}: {value} {} at {load} {}", line.name, self.units.1, self.units.0);
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"s{colour}\"><title>{}</title></circle>",
                escape(&title)
            );
        }
    }
}

/// A tick: thousands and millions by their letters.
fn counted(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", svg::short(v / 1e6)),
        v if v >= 1e4 => format!("{}k", svg::short(v / 1e3)),
        v => svg::short(v),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Lines {
        let line = Line { name: "a < b".into(), colour: 9, points };
        let units = ("datagrams per second".into(), "µs".into());
        Lines { caption: "c".into(), units, lines: vec![line] }
    }

    #[test]
    fn every_point_is_drawn_inside_of_the_axes_and_says_its_value() {
        let svg = chart(vec![(1.0, 20.0), (1000.0, 0.0), (1e6, 900.0)]).svg();
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("a &lt; b: 900 µs at 1000000 datagrams per second"), "{svg}");
        for part in svg.split("cx=\"").skip(1) {
            let x: f64 = part.split('"').next().unwrap().parse().unwrap();
            assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
        }
        assert!(svg.contains("class=\"curve c1\""), "colours go round");
    }

    #[test]
    fn both_axes_have_units_and_numbers() {
        let svg = chart(vec![(1.0, 20.0), (1e6, 900.0)]).svg();
        for text in [">µs<", ">datagrams per second<", ">100k<", ">1M<", ">100<"] {
            assert!(svg.contains(text), "{text} is missing: {svg}");
        }
    }

    #[test]
    fn one_point_is_no_curve() {
        assert!(chart(vec![(1.0, 1.0)]).is_empty() && Lines::default().is_empty());
        assert!(!chart(vec![(1.0, 1.0), (2.0, 1.0)]).is_empty());
    }
}
