//! A reproduction for programs.

use super::netperf::COLUMNS;
use super::{Judged, Line, Reproduction, Site, Surprise};
use crate::stats::Estimate;
use serde_json::{Map, Value, json};

/// Adds the reproduction to a bench's JSON, under `reproduction`.
pub fn json(found: &Reproduction, mut report: Value) -> Value {
    let table = found.published;
    let of = json!({
        "name": table.name,
        "title": table.title,
        "source": table.source,
        "setup": table.setup,
        "differs": table.differs,
        "lines": found.lines.iter().map(|l| line_json(found, l)).collect::<Vec<_>>(),
        "pairs": found.judged.iter().map(|j| judged_json(found, j)).collect::<Vec<_>>(),
        "surprises": found.surprises.iter().map(surprise_json).collect::<Vec<_>>(),
        "limits": found.limits.iter().map(|(bytes, ns)| {
            json!({"bytes": bytes, "memcpy_ns_per_kb": ns})
        }).collect::<Vec<_>>(),
    });
    if let Some(object) = report.as_object_mut() {
        object.insert("reproduction".to_owned(), of);
    }
    report
}

fn finite(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { Value::Null }
}

fn line_json(found: &Reproduction, line: &Line) -> Value {
    let mut object: Map<String, Value> =
        COLUMNS.iter().map(|c| (c.key.to_owned(), finite((c.of)(&line.netperf)))).collect();
    let (bytes, tso) = found.shape_of(line.pair);
    let site = line.site.map_or("published", Site::device);
    for (key, value) in [
        ("row", json!(line.row())),
        ("bytes", json!(bytes.parse::<u64>().unwrap_or(0))),
        ("tso", json!(tso == "yes")),
        ("site", json!(site)),
        ("way", json!(line.way)),
        ("verdict", json!(found.verdict_of(line))),
    ] {
        object.insert(key.to_owned(), value);
    }
    Value::Object(object)
}

fn estimate_json(estimate: Option<Estimate>) -> Value {
    estimate.map_or(
        Value::Null,
        |e| json!({"median": e.median, "low": e.low, "high": e.high, "runs": e.runs}),
    )
}

fn judged_json(found: &Reproduction, judged: &Judged) -> Value {
    let pair = found.pair_of(judged.pair);
    json!({
        "pair": judged.pair,
        "site": judged.site.device(),
        "published_process": pair.map(|p| p.cpu_ratio),
        "published_machine": pair.and_then(|p| p.machine_ratio),
        "process_a_vs_b": estimate_json(judged.cpu),
        "machine_a_vs_b": estimate_json(judged.machine),
        "process_a_vs_c": estimate_json(judged.third),
        "verdict": judged.verdict.word(),
        "because": judged.verdict.reason(),
    })
}

fn surprise_json(s: &Surprise) -> Value {
    json!({
        "bytes": s.bytes,
        "site": s.site.device(),
        "published": s.published,
        "measured": estimate_json(Some(s.measured)),
        "verdict": s.verdict.word(),
        "because": s.verdict.reason(),
    })
}
