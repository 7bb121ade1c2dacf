//! One connection of each sender over time, for the page: bytes acknowledged, window, round-trip time, rate.

use std::time::Duration;

use serde_json::{Value, json};

use super::conn::Progress;

/// Points of a curve: the number that the width of a page can show.
pub(super) const POINTS: u32 = 120;

/// The interval between two samples of a connection that lasts `time`.
pub(super) fn every(time: Duration) -> Duration {
    time / POINTS
}

/// What is drawn of a point and the one before it, in the unit of the axis.
struct Kind {
    title: &'static str,
    unit: &'static str,
    of: fn(&Progress, &Progress) -> f64,
}

const KINDS: &[Kind] = &[
    Kind { title: "bytes acknowledged", unit: "MB", of: |_, p| p.acked_bytes as f64 / 1e6 },
    Kind { title: "congestion window", unit: "KB", of: |_, p| p.cwnd_bytes as f64 / 1e3 },
    Kind { title: "smoothed round-trip time", unit: "ms", of: |_, p| p.rtt.as_secs_f64() * 1e3 },
    Kind {
        title: "rate at which bytes are acknowledged",
        unit: "Mb/s",
        of: |before, p| {
            let bytes = p.acked_bytes.saturating_sub(before.acked_bytes);
            let time = p.at.saturating_sub(before.at);
            bytes as f64 * 8.0 / 1e6 / time.as_secs_f64().max(1e-9)
        },
    },
];

/// The plots of one path: a curve for each connection.
pub(super) fn plots(path: &str, faults: &str, courses: &[(String, Vec<Progress>)]) -> Vec<Value> {
    let curve = |kind: &Kind, (name, course): &(String, Vec<Progress>)| {
        let point = |w: &[Progress]| match w {
            [before, now] => Some([rounded(now.at.as_secs_f64()), rounded((kind.of)(before, now))]),
            _ => None,
        };
        let points: Vec<[f64; 2]> = course.windows(2).filter_map(point).collect();
        json!({"name": name, "points": points})
    };
    let plot = |kind: &Kind| {
        json!({
            "title": format!("{path}: {} ({faults})", kind.title),
            "x_unit": "s since the connection was accepted",
            "y_unit": kind.unit,
            "curves": courses.iter().map(|c| curve(kind, c)).collect::<Vec<_>>(),
        })
    };
    KINDS.iter().map(plot).collect()
}

/// To a thousandth: more only makes a file longer.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_course_becomes_four_plots_with_a_curve_each() {
        let at = |ms, acked_bytes| Progress {
            at: Duration::from_millis(ms),
            acked_bytes,
            cwnd_bytes: 14_480,
            rtt: Duration::from_micros(20_500),
            ..Progress::default()
        };
        let courses = [("fulmar-cubic".to_owned(), vec![at(0, 0), at(10, 12_500), at(20, 50_000)])];
        let plots = plots("clean", "delay=10ms", &courses);
        let curve = |n: usize| plots[n]["curves"][0]["points"].clone();
        assert_eq!(plots.len(), 4);
        assert_eq!(curve(0), json!([[0.01, 0.013], [0.02, 0.05]]));
        assert_eq!(curve(1), json!([[0.01, 14.48], [0.02, 14.48]]));
        assert_eq!(curve(2), json!([[0.01, 20.5], [0.02, 20.5]]));
        assert_eq!(curve(3), json!([[0.01, 10.0], [0.02, 30.0]]));
    }

    #[test]
    fn a_connection_that_was_not_seen_twice_has_no_points() {
        let courses = [("linux-bbr".to_owned(), vec![Progress::default()])];
        assert_eq!(plots("p", "", &courses)[0]["curves"][0]["points"], json!([]));
    }
}
