//! A bench's report as one HTML page that needs nothing else: the same rows and ratios as the JSON
//! from which it is made, with a bar for each cost.

use serde_json::Value;
use std::fmt::Write;

const STYLE: &str = "body{font:15px/1.4 system-ui,sans-serif;margin:2em auto;max-width:70em;\
padding:0 1em}table{border-collapse:collapse;margin:1em 0}th,td{padding:.3em .8em;\
text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}th:first-child,td:first-child\
{text-align:left}.bar{background:#4a7ebb;height:.8em;display:inline-block}.far{background:#b9cde5}\
code{background:#f4f4f4;padding:.1em .3em}";

/// What a row shows: its title, the key in the JSON, decimals.
const COLUMNS: [(&str, &str, usize); 5] = [
    ("Gb/s", "throughput_gbps", 1),
    ("this end, ns/KB", "thread_cpu_ns_per_kb", 0),
    ("other end, ns/KB", "peer_cpu_ns_per_kb", 0),
    ("both ends, ns/KB", "both_ends_cpu_ns_per_kb", 0),
    ("machine, ns/KB", "machine_cpu_ns_per_kb", 0),
];
/// Width in pixels of the bar of the most expensive row.
const BAR_PIXELS: f64 = 300.0;

/// The page for a report in the JSON of [`fulmar_lab::report`].
pub fn page(report: &Value) -> String {
    let command = list(&report["command"]).iter().map(text).collect::<Vec<_>>().join(" ");
    let machine = &report["machine"];
    format!(
        "<!doctype html>\n<html lang=en><meta charset=utf-8><title>fulmar bench</title>\n\
         <style>{STYLE}</style>\n<h1>fulmar {}</h1>\n\
         <p>{}, {} CPUs, Linux {}<br><code>{}</code></p>\n{}{}\
         <p>CPU time per KB (1024 bytes) moved; less is better. Stopped because {}.</p>\n</html>\n",
        text(&machine["fulmar"]),
        text(&machine["cpu"]),
        text(&machine["cpus"]),
        text(&machine["kernel"]),
        command,
        rows(list(&report["rows"])),
        ratios(&report["ratios"]),
        text(&report["stopped_because"]),
    )
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A value without quotes, safe inside HTML.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "\u{2013}".to_owned(),
        Value::String(s) => escape(s),
        other => escape(&other.to_string()),
    }
}

fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn number(value: &Value, decimals: usize) -> String {
    value.as_f64().map_or_else(|| text(value), |n| format!("{n:.decimals$}"))
}

fn rows(rows: &[Value]) -> String {
    let cost = |row: &Value| row["both_ends_cpu_ns_per_kb"].as_f64().unwrap_or(0.0);
    let most = rows.iter().map(cost).fold(1.0, f64::max);
    let mut html = "<table><tr><th>way<th>placement".to_owned();
    COLUMNS.iter().for_each(|c| html += &format!("<th>{}", c.0));
    html += "<th>\u{b1}\u{a0}%<th></tr>\n";
    for row in rows {
        let _ = write!(html, "<tr><td>{}<td>{}", text(&row["title"]), text(&row["placement"]));
        COLUMNS.iter().for_each(|c| html += &format!("<td>{}", number(&row[c.1], c.2)));
        let near = bar(&row["thread_cpu_ns_per_kb"], most, "bar");
        let far = bar(&row["peer_cpu_ns_per_kb"], most, "bar far");
        let width = number(&row["ci95_half_width_pct"], 1);
        let _ = writeln!(html, "<td>{width}<td style='text-align:left'>{near}{far}</tr>");
    }
    html + "</table>\n"
}

fn bar(value: &Value, most: f64, class: &str) -> String {
    let pixels = value.as_f64().unwrap_or(0.0) / most * BAR_PIXELS;
    format!("<span class='{class}' style='width:{pixels:.0}px'></span>")
}

fn ratios(ratios: &Value) -> String {
    let mut html = "<table><tr><th>ratio<th>median<th>low<th>high<th>runs</tr>\n".to_owned();
    for (name, r) in ratios.as_object().into_iter().flatten() {
        let cells = ["median", "low", "high"].map(|k| number(&r[k], 3)).join("<td>");
        let _ = writeln!(html, "<tr><td>{}<td>{cells}<td>{}</tr>", escape(name), text(&r["runs"]));
    }
    html + "</table>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_page_shows_every_row_and_ratio() {
        let report = json!({
            "machine": {"cpu": "A & B", "cpus": 2, "kernel": "6.1", "fulmar": "0.1.0"},
            "command": ["fulmar", "bench", "<stream>"],
            "rows": [{"title": "kernel to kernel", "placement": "same_cpu",
                "throughput_gbps": 50.54, "thread_cpu_ns_per_kb": 89.2,
                "peer_cpu_ns_per_kb": 73.0, "both_ends_cpu_ns_per_kb": 162.2}],
            "ratios": {"stream.x": {"median": 1.05, "low": 1.0, "high": 1.1, "runs": 9}},
            "stopped_because": "the time was over",
        });
        let html = page(&report);
        for part in [
            "A &amp; B",
            "&lt;stream&gt;",
            "<tr><td>kernel to kernel<td>same_cpu<td>50.5<td>89<td>73<td>162<td>\u{2013}",
            "<tr><td>stream.x<td>1.050<td>1.000<td>1.100<td>9</tr>",
        ] {
            assert!(html.contains(part), "{part} is not in {html}");
        }
    }

    #[test]
    fn a_failed_row_has_dashes() {
        let html = page(&json!({"rows": [{"title": "t", "error": "no TAP"}]}));
        assert!(html.contains("<tr><td>t<td>\u{2013}"));
    }
}
