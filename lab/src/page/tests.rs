use super::*;
use serde_json::{Value, json};

fn stream_report() -> Value {
    json!({
        "machine": {"cpu": "A & B", "cpus": 2, "kernel": "6.1", "fulmar": "0.1.0"},
        "command": ["/opt/bin/fulmar-lab", "bench", "<stream>", "--json", "x"],
        "rows": [
            {"name": "limit.memcpy", "title": "memcpy", "placement": "same_cpu",
             "both_ends_cpu_ns_per_kb": 30.0},
            {"name": "kernel.same_cpu", "title": "kernel to kernel", "placement": "same_cpu",
             "throughput_gbps": 50.54, "thread_cpu_ns_per_kb": 89.2, "peer_cpu_ns_per_kb": 73.0,
             "both_ends_cpu_ns_per_kb": 162.2, "ci95_half_width_pct": 2.0,
             "outputs_per_write": 1.0, "counts": {"frames": 20}, "counted_bytes": 1_048_576},
            {"name": "t", "title": "TAP", "placement": "two_cpus", "error": "no <TAP>"},
        ],
        "ratios": {
            "stream.x": {"median": 1.05, "low": 1.0, "high": 1.1, "runs": 9, "reach": 1.15,
                "aim": 1.05, "what": "ours \u{f7} floor", "verdict": "aim met (reach 1.15)"},
            "stream.none": {"median": 0.0, "low": 0.0, "high": 0.0, "runs": 9},
        },
        "stopped_because": "the time was over",
        "elapsed_s": 3.2,
        "breakdowns": [{"title": "One write", "caption": "By counter", "unit": "ns per KB",
            "bars": [{"label": "old", "parts": [{"name": "copy", "value": 20.0},
                {"name": "hardware", "value": 5.0}]}]}],
    })
}

/// Every tag that is opened is closed, in order. Void elements and the doctype aside.
fn unclosed(html: &str) -> Vec<String> {
    let mut open: Vec<String> = Vec::new();
    let markup = html.split("<script>").next().unwrap_or_default();
    for part in markup.split('<').skip(1) {
        let tag = part.split('>').next().unwrap_or_default();
        let name = tag.split([' ', '/', '\n']).next().unwrap_or_default();
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(closed));
        } else if !tag.ends_with('/') && !["!doctype", "meta"].contains(&name) {
            open.push(name.to_owned());
        }
    }
    open
}

#[test]
fn the_page_of_a_bench_shows_every_row_ratio_and_stage() {
    let html = report::page(&stream_report()).html();
    for part in [
        "<h1>fulmar-lab bench &lt;stream&gt;</h1>",
        "A &amp; B",
        "<td class=\"k\">kernel to kernel</td><td class=\"k\">same CPU</td>",
        "data-n=\"50.54\">50.5</td>",
        "Not measured: TAP, two CPUs: no &lt;TAP&gt;",
        "<td class=\"k\">stream.x</td><td class=\"k\">ours \u{f7} floor</td>",
        "title=\"outputs_per_write\">outputs per write</th>",
        ">20</td>",
        "one memcpy 30",
        "old: hardware 5 ns per KB",
        "3 s: the time was over",
    ] {
        assert!(html.contains(part), "{part} is not in {html}");
    }
}

#[test]
fn a_page_is_whole_and_needs_nothing_from_elsewhere() {
    let html = report::page(&stream_report()).html();
    assert_eq!(unclosed(&html), ["html", "body"], "what the script stands in");
    for outside in ["src=", "href=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    let markup = html.split("<script>").next().unwrap_or_default();
    for nonsense in ["NaN", "inf\"", "Infinity"] {
        assert!(!markup.contains(nonsense), "{nonsense}");
    }
}

#[test]
fn a_report_without_anything_is_still_a_page() {
    for report in [json!(null), json!({}), json!({"rows": 3, "ratios": [], "command": {"a": 1}})] {
        let html = report::page(&report).html();
        assert!(html.contains("<h1>fulmar-lab bench</h1>"), "{html}");
        assert_eq!(unclosed(&html), ["html", "body"]);
    }
}

#[test]
fn bars_of_nothing_and_of_nonsense_stay_inside_the_chart() {
    let bar = |values: &[f64], interval| Bar {
        label: "a label that is much too long for the room that the chart has for labels".into(),
        values: values.to_vec(),
        interval,
        ..Bar::default()
    };
    let chart = Bars {
        unit: "ns".into(),
        parts: vec![("one".into(), 0), ("two".into(), 11)],
        bars: vec![
            bar(&[], None),
            bar(&[f64::NAN, f64::INFINITY], Some((f64::NAN, f64::INFINITY))),
            bar(&[-4.0, 0.0], Some((-1.0, 3.0))),
            bar(&[1e-12, 1e12], None),
        ],
        ..Bars::default()
    };
    let svg = chart.svg();
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    for x in svg.split("x=\"").skip(1).filter_map(|s| s.split('"').next()?.parse::<f64>().ok()) {
        assert!((0.0..=svg::WIDTH).contains(&x), "{x}");
    }
}

#[test]
fn ratios_stand_in_the_panel_of_their_direction_and_zero_in_none() {
    let gauge = |name: &str, median, goals: Option<(f64, f64)>| Gauge {
        name: name.into(),
        median,
        interval: (median, median),
        more_is_better: goals.is_some_and(|(reach, aim)| aim > reach),
        goals,
        ..Gauge::default()
    };
    let chart = Gauges {
        gauges: vec![
            gauge("less", 0.9, Some((1.1, 0.8))),
            gauge("more", 3.0, Some((2.8, 4.0))),
            gauge("zero", 0.0, Some((0.0, 0.0))),
        ],
        ..Gauges::default()
    };
    let svg = chart.svg();
    let at = |what: &str| svg.find(what);
    assert!(at("more is better") < at(">more<") && at(">more<") < at("less is better"));
    assert!(at("less is better") < at(">less<"));
    assert_eq!(at("zero"), None);
}

#[test]
fn an_axis_ends_at_a_round_number_and_has_ticks_inside() {
    for most in [0.0, 0.003, 1.0, 237.0, 999.0, 1e9, f64::NAN] {
        let scale = svg::Scale::linear(most);
        let ticks = scale.ticks();
        assert!((3..=12).contains(&ticks.len()), "{most}: {ticks:?}");
        assert!(ticks.windows(2).all(|w| w[0] < w[1]));
    }
    let log = svg::Scale::log([0.3, 44.0]);
    assert!(log.ticks().contains(&1.0) && log.ticks().contains(&20.0));
    assert!(log.at(0.3) < log.at(1.0) && log.at(1.0) < log.at(44.0));
    assert_eq!((log.at(0.0), log.at(1e9)), (0.0, 1.0));
}

#[test]
fn numbers_have_three_digits() {
    let cases = [(0.0, "0"), (1.0, "1"), (2.94, "2.94"), (9.9999, "10"), (35.17, "35.2")];
    let more = [(237.4, "237"), (0.052, "0.052"), (1e-5, "1.0e-5"), (f64::NAN, "\u{2013}")];
    for (value, text) in cases.into_iter().chain(more) {
        assert_eq!(short(value), text);
    }
}

#[test]
fn a_table_without_a_value_in_a_column_leaves_it_out() {
    let head = ["a", "b"].map(|h| (h.to_owned(), String::new())).to_vec();
    let rows = vec![vec![Cell::Text("x".into()), Cell::Nothing]];
    let table = Table { caption: String::new(), head, rows }.without_empty_columns();
    assert_eq!((table.head.len(), table.rows[0].len()), (1, 1));
}

#[test]
fn rows_of_a_receiver_stand_by_its_buffers_and_by_who_looks_at_the_bytes() {
    let row = |buffer: u64, source: &str| {
        json!({
            "name": format!("copy.{buffer}.{source}"), "title": "fulmar read", "device": "sim",
            "placement": "same_cpu", "super_segments": true, "buffer_bytes": buffer,
            "source": source, "both_ends_cpu_ns_per_kb": 100.0, "throughput_gbps": 1.0,
        })
    };
    let rows = [row(65_536, "touched"), row(1 << 20, "untouched"), row(65_536, "bursty")];
    let html = report::page(&json!({ "rows": rows })).html();
    for group in [
        "buffers of 64 KiB, super-segments, reader looks at the bytes, same CPU",
        "buffers of 1 MiB, super-segments, nobody looks at the bytes, same CPU",
        "buffers of 64 KiB, super-segments, sent in bursts, same CPU",
    ] {
        assert!(html.contains(group), "{group} is missing");
    }
}

/// The colours that a theme of the style sheet gives to `--s0` and so on.
fn colours(theme: &str) -> Vec<&str> {
    let of = |n: usize| {
        let name = format!("--s{n}: ");
        let at = theme.find(&name).unwrap_or_else(|| panic!("{name} is not in {theme}"));
        theme[at + name.len()..].split(';').next().expect("a value")
    };
    (0..bars::COLOURS).map(of).collect()
}

#[test]
fn twenty_parts_of_a_bar_have_twenty_colours_in_light_in_dark_and_in_print() {
    let themes: Vec<&str> = STYLE.split(":root").skip(1).collect();
    assert_eq!(themes.len(), 3);
    for theme in themes {
        let all = colours(theme.split('}').next().expect("a block"));
        let mut once = all.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), bars::COLOURS, "{all:?}");
    }
    let mut of_parts: Vec<usize> = (0..bars::COLOURS - 1).map(colour).collect();
    assert!(!of_parts.contains(&7), "7 is for what is not the host's");
    assert!(of_parts.iter().all(|n| STYLE.contains(&format!("svg .s{n} {{ fill: var(--s{n})"))));
    of_parts.dedup();
    assert_eq!(of_parts.len(), bars::COLOURS - 1);
}

#[test]
fn a_wide_table_scrolls_in_a_box_that_ends_inside_the_window() {
    let box_of = STYLE.lines().find(|l| l.starts_with(".wide")).expect("a rule");
    assert!(box_of.contains("overflow-x: auto"), "{box_of}");
    // Half of the window and half of the column: from the column's left edge to the window's right.
    assert!(box_of.contains("max-width: calc(50vw + 50% - 45px)"), "{box_of}");
}

/// An entry of a report's `accounts`.
fn account(hardware: Option<f64>) -> Value {
    let stage = |name: &str, layer: &str, ns: f64| json!({"stage": name, "layer": layer, "ns_per_packet": ns, "share_pct": ns});
    json!({
        "group": "sim", "title": "sim: <send>", "stages_ns_per_packet": 100.0,
        "total_ns_per_packet": 115.0, "overhead_ns_per_packet": 5.0, "sum_vs_total_pct": -8.7,
        "hardware_ns_per_packet": hardware, "copies_per_byte": 0.3,
        "stages": [stage("locked", "lock", 29.8), stage("device_taken", "device", 70.0),
            stage("timers_run", "stack", 0.2), stage("slept", "idle", 900.0)],
    })
}

#[test]
fn an_account_has_a_bar_for_each_stage_and_one_of_all_and_none_for_sleep() {
    let bars = stages::bars(&account(Some(40.0)));
    let labels: Vec<&str> = bars.bars.iter().map(|b| b.label.as_str()).collect();
    assert_eq!(labels, ["all stages", "locked", "device_taken", "within them, hardware"]);
    let sums: Vec<f64> = bars.bars.iter().map(|b| b.values.iter().sum()).collect();
    assert_eq!(sums, [100.0, 29.8, 70.0, 40.0]);
    let names: Vec<&str> = bars.parts.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["lock", "stack", "device", "simulated hardware"]);
    assert_eq!(bars.bars[0].values, [29.8, 0.2, 30.0, 40.0], "hardware is taken off the device");
    assert!(bars.caption.contains("-8.7 % off") && bars.caption.contains("timers_run"));
    // What is measured without stages has no reading in it.
    assert_eq!(bars.marks[0].value, 110.0);
}

#[test]
fn the_page_shows_every_account_and_all_beside_each_other() {
    let html = |accounts: Value| report::page(&json!({ "accounts": accounts })).html();
    let one = html(json!([account(None)]));
    assert!(one.contains("Stage by stage") && one.contains("sim: &lt;send&gt;"), "{one}");
    assert!(!one.contains("All accounts beside"));
    assert_eq!(unclosed(&one), ["html", "body"]);
    assert!(html(json!([account(None), account(None)])).contains("All accounts beside"));
    assert!(!html(json!([])).contains("Stage by stage"));
}
