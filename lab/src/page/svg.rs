//! What the charts share: axes, numbers as text, and the pieces of SVG.
//!
//! Colours are classes of the page's style sheet, so that a chart follows light, dark and print.
//! One unit is one CSS pixel at the page's full width; widths of text are estimates from the number
//! of characters, since nothing here knows the reader's font.

use super::html::escape;
use std::fmt::Write;

/// The width of every chart.
pub const WIDTH: f64 = 960.0;
/// A character of a label at 13 px, on the generous side.
pub const CHAR_WIDTH: f64 = 6.9;

/// Maps a value to 0..1 of an axis.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scale {
    /// From 0 to `max`.
    Linear {
        /// The end of the axis.
        max: f64,
    },
    /// From `low` to `high`, both above 0.
    Log {
        /// The start of the axis.
        low: f64,
        /// The end of the axis.
        high: f64,
    },
}

impl Scale {
    /// A linear axis from 0 that ends at a round number not below `most`.
    pub fn linear(most: f64) -> Scale {
        let most = if most.is_finite() && most > 0.0 { most } else { 1.0 };
        let step = round_step(most / 5.0);
        Scale::Linear { max: (most / step).ceil() * step }
    }

    /// A logarithmic axis that holds all values above 0; from 0.5 to 2 without any.
    pub fn log(values: impl IntoIterator<Item = f64>) -> Scale {
        let usable = values.into_iter().filter(|v| v.is_finite() && *v > 0.0);
        let (low, high) =
            usable.fold((f64::MAX, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        if high == 0.0 {
            return Scale::Log { low: 0.5, high: 2.0 };
        }
        Scale::Log { low: low / 1.25, high: high * 1.25 }
    }

    /// Where `value` lies, clamped to the axis.
    pub fn at(&self, value: f64) -> f64 {
        let share = match *self {
            Scale::Linear { max } => value / max,
            Scale::Log { .. } if value <= 0.0 => 0.0,
            Scale::Log { low, high } => (value / low).ln() / (high / low).ln(),
        };
        if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Where labels stand.
    pub fn ticks(&self) -> Vec<f64> {
        match *self {
            Scale::Linear { max } => {
                let step = round_step(max / 5.0);
                let n = (max / step).round().min(20.0) as usize;
                (0..=n).map(|i| i as f64 * step).collect()
            }
            Scale::Log { low, high } => log_ticks(low, high),
        }
    }
}

/// 1, 2 or 5 times a power of ten, at or just above `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let mantissa = step / power;
    let rounded = [1.0, 2.0, 5.0].into_iter().find(|m| mantissa <= m * 1.000_001);
    rounded.unwrap_or(10.0) * power
}

fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let decades = (high / low).log10();
    let mantissas: &[f64] = match decades {
        d if d > 3.0 => &[1.0],
        d if d > 1.2 => &[1.0, 2.0, 5.0],
        _ => &[1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    };
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    powers
        .flat_map(|p| mantissas.iter().map(move |m| m * 10f64.powi(p)))
        .filter(|t| (low..=high).contains(t))
        .collect()
}

/// A number with about three significant digits.
pub fn short(value: f64) -> String {
    let magnitude = value.abs();
    match magnitude {
        m if !m.is_finite() => "\u{2013}".to_owned(),
        0.0 => "0".to_owned(),
        m if m >= 99.95 => format!("{value:.0}"),
        m if m >= 9.995 => trimmed(format!("{value:.1}")),
        m if m >= 0.0995 => trimmed(format!("{value:.2}")),
        m if m >= 0.001 => trimmed(format!("{value:.4}")),
        _ => format!("{value:.1e}"),
    }
}

fn trimmed(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Opens a chart of this height.
pub fn open(height: f64, label: &str) -> String {
    let label = escape(label);
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{label}\" \
         xmlns=\"http://www.w3.org/2000/svg\">\n"
    )
}

/// Where a text stands relative to its point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// Its middle is there.
    Middle,
    /// It ends there.
    End,
}

/// A text on its base line.
pub fn text(out: &mut String, x: f64, y: f64, anchor: Anchor, class: &str, content: &str) {
    let anchor = match anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    };
    let content = escape(content);
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{content}</text>"
    );
}

/// A rectangle that says `title` when pointed at.
pub fn rect(out: &mut String, (x, y): (f64, f64), (w, h): (f64, f64), class: &str, title: &str) {
    let _ = write!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{h:.1}\" class=\"{class}\"",
        w.max(0.0)
    );
    match title {
        "" => *out += "/>\n",
        title => {
            let _ = writeln!(out, "><title>{}</title></rect>", escape(title));
        }
    }
}

/// A straight line.
pub fn line(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>"
    );
}

/// The text, cut to about `width` with an ellipsis.
pub fn fitted(text: &str, width: f64) -> String {
    let room = (width / CHAR_WIDTH).max(4.0) as usize;
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room - 1).chain(['\u{2026}']).collect()
}

/// The estimated width of a label.
pub fn width_of(text: &str) -> f64 {
    text.chars().count() as f64 * CHAR_WIDTH
}
