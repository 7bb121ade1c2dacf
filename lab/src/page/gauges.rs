//! Ratios beside their goals: each on a band of one logarithmic axis, with the zone that was hoped
//! for, what was published, and the interval that was measured.
//!
//! Ratios where less is better and ratios where more is better stand in panels of their own, since
//! the eye should have to learn one direction at a time.

use super::html::escape;
use super::svg::{self, Anchor, Scale, WIDTH};
use std::fmt::Write;

const ROW: f64 = 66.0;
const BAND: f64 = 16.0;
const LEGEND: f64 = 28.0;
const AXIS: f64 = 26.0;
const PANEL: f64 = 30.0;

/// A chart of ratios.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    /// Shown below the chart.
    pub caption: String,
    /// The ratios.
    pub gauges: Vec<Gauge>,
}

/// One ratio.
#[derive(Clone, Debug, Default)]
pub struct Gauge {
    /// Its stable name.
    pub name: String,
    /// What it is, in a sentence.
    pub what: String,
    /// What was measured.
    pub median: f64,
    /// The interval in which the true median lies.
    pub interval: (f64, f64),
    /// What was published.
    pub published: Option<f64>,
    /// Good enough from here on, and what is wanted.
    pub goals: Option<(f64, f64)>,
    /// On which side better values lie.
    pub more_is_better: bool,
    /// A word of judgement.
    pub verdict: String,
}

impl Gauge {
    fn values(&self) -> impl Iterator<Item = f64> {
        let goals = self.goals.map(|(reach, aim)| [reach, aim]);
        [self.median, self.interval.0, self.interval.1]
            .into_iter()
            .chain(self.published)
            .chain(goals.into_iter().flatten())
    }

    /// A logarithmic axis has no place for nothing.
    fn can_be_drawn(&self) -> bool {
        self.values().all(|v| v.is_finite() && v > 0.0)
    }

    fn goals_said(&self) -> String {
        let published = self.published.map(|p| format!("published {}", svg::short(p)));
        let goals = self
            .goals
            .map(|(reach, aim)| format!("reach {}, aim {}", svg::short(reach), svg::short(aim)));
        let word = self.verdict.split(" (").next().filter(|w| !w.is_empty()).map(str::to_owned);
        [published, goals, word].into_iter().flatten().collect::<Vec<_>>().join(" \u{b7} ")
    }
}

impl Gauges {
    /// True if there is nothing to draw.
    pub fn is_empty(&self) -> bool {
        !self.gauges.iter().any(Gauge::can_be_drawn)
    }

    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let (more, less): (Vec<&Gauge>, Vec<&Gauge>) =
            self.gauges.iter().filter(|g| g.can_be_drawn()).partition(|g| g.more_is_better);
        let panels: Vec<(&str, Vec<&Gauge>)> =
            [("more is better \u{2192}", more), ("\u{2190} less is better", less)]
                .into_iter()
                .filter(|p| !p.1.is_empty())
                .collect();
        let rows: usize = panels.iter().map(|p| p.1.len()).sum();
        let height = LEGEND + panels.len() as f64 * (PANEL + AXIS) + rows as f64 * ROW;
        let mut out = svg::open(height, &self.caption);
        write_legend(&mut out, &self.gauges);
        let mut y = LEGEND;
        for (title, gauges) in panels {
            y = write_panel(&mut out, y, title, &gauges);
        }
        out += "</svg>\n";
        out
    }
}

fn write_legend(out: &mut String, gauges: &[Gauge]) {
    let mut x = 8.0;
    let entry = |x: &mut f64, out: &mut String, text: &str| {
        svg::text(out, *x + 14.0, 14.5, Anchor::Start, "label", text);
        *x += 14.0 + svg::width_of(text) + 28.0;
    };
    dot(out, x, 10.0);
    entry(&mut x, out, "measured, with its 95 % interval");
    if gauges.iter().any(|g| g.published.is_some()) {
        diamond(out, x, 10.0);
        entry(&mut x, out, "published");
    }
    if gauges.iter().any(|g| g.goals.is_some()) {
        for (class, text) in [("reach", "good enough (reach)"), ("aim", "wanted (aim)")] {
            svg::rect(out, (x - 8.0, 3.0), (16.0, 14.0), class, "");
            entry(&mut x, out, text);
        }
    }
}

/// Returns where the next panel begins.
fn write_panel(out: &mut String, top: f64, title: &str, gauges: &[&Gauge]) -> f64 {
    let one = [1.0]; // equality is worth seeing
    let scale = Scale::log(gauges.iter().flat_map(|g| g.values()).chain(one));
    let anchor = if title.starts_with('\u{2190}') { Anchor::Start } else { Anchor::End };
    let x = if anchor == Anchor::Start { 0.0 } else { WIDTH };
    svg::text(out, x, top + 20.0, anchor, "group", title);
    let (rows, bottom) = (top + PANEL, top + PANEL + gauges.len() as f64 * ROW);
    for tick in scale.ticks() {
        let x = scale.at(tick) * WIDTH;
        let class = if tick == 1.0 { "grid strong" } else { "grid" };
        for i in 0..gauges.len() {
            let y = rows + i as f64 * ROW + 40.0;
            svg::line(out, (x, y), (x, y + BAND), class);
        }
        svg::text(out, x, bottom + 10.0, Anchor::Middle, "tick", &svg::short(tick));
    }
    for (i, gauge) in gauges.iter().enumerate() {
        write_gauge(out, rows + i as f64 * ROW, &scale, gauge);
    }
    bottom + AXIS
}

fn write_gauge(out: &mut String, y: f64, scale: &Scale, gauge: &Gauge) {
    let at = |v: f64| scale.at(v) * WIDTH;
    let (low, high) = gauge.interval;
    let measured = if low == high {
        svg::short(gauge.median)
    } else {
        let [m, l, h] = [gauge.median, low, high].map(svg::short);
        format!("{m}  ({l}\u{2013}{h})")
    };
    svg::text(out, 0.0, y + 16.0, Anchor::Start, "name", &gauge.name);
    svg::text(out, WIDTH, y + 16.0, Anchor::End, "value", &measured);
    let goals = gauge.goals_said();
    let what = svg::fitted(&gauge.what, WIDTH - svg::width_of(&goals) - 20.0);
    svg::text(out, 0.0, y + 33.0, Anchor::Start, "tick", &what);
    svg::text(out, WIDTH, y + 33.0, Anchor::End, "tick", &goals);
    let band = y + 40.0;
    svg::rect(out, (0.0, band), (WIDTH, BAND), "track", "");
    if let Some((reach, aim)) = gauge.goals {
        for (from, class) in [(reach, "reach"), (aim, "aim")] {
            let (from, to) = if gauge.more_is_better { (at(from), WIDTH) } else { (0.0, at(from)) };
            svg::rect(out, (from, band), (to - from, BAND), class, "");
        }
    }
    let middle = band + BAND / 2.0;
    if let Some(published) = gauge.published {
        diamond(out, at(published), middle);
    }
    svg::line(out, (at(low), middle), (at(high), middle), "interval");
    let _ = writeln!(out, "<g><title>{}: {}</title>", escape(&gauge.name), escape(&measured));
    dot(out, at(gauge.median), middle);
    *out += "</g>\n";
}

fn dot(out: &mut String, x: f64, y: f64) {
    let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5.5\" class=\"dot\"/>");
}

fn diamond(out: &mut String, x: f64, y: f64) {
    let top = y - 7.5;
    let _ =
        writeln!(out, "<path d=\"M{x:.1} {top:.1}l7 7.5l-7 7.5l-7-7.5z\" class=\"published\"/>");
}
