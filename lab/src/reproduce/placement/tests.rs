use super::*;
use crate::harness::report::Machine;
use crate::harness::{Figure, Ratio, Stop};
use std::time::Duration;

fn sure(value: f64) -> Option<Estimate> {
    Some(Estimate { median: value, low: value, high: value, runs: 9, confidence: 0.96 })
}

fn row(line: usize, offload: Offload, site: SystemUnderTest, ns: f64) -> Row {
    let cell = cell_of(&LINES[line], offload, site).expect("there is one");
    let values = [(BOTH, ns + 50.0), (THIS_END, ns), (GBPS, 20.0)];
    Row {
        name: format!("{}.{}", cell.method, site.device()),
        labels: cell.labels(),
        values: values.into_iter().filter_map(|(key, value)| Some((key, sure(value)?))).collect(),
        runs: 9,
        ..Row::default()
    }
}

fn figure(
    line: usize,
    site: SystemUnderTest,
    (over, under): (Offload, Offload),
    value: f64,
) -> Figure {
    let name = figure_name(&LINES[line], site, over, under);
    Figure { ratio: Ratio::value(name, "", THIS_END, ""), estimate: sure(value) }
}

fn outcome() -> Outcome {
    let site = SystemUnderTest::Simulated;
    let costs = [(Offload::Stock, 300.0), (Offload::Offloaded, 60.0), (Offload::Placed, 10.0)];
    Outcome {
        rows: costs.map(|(offload, ns)| row(0, offload, site, ns)).to_vec(),
        figures: vec![
            figure(0, site, (Offload::Stock, Offload::Placed), 30.0),
            figure(0, site, (Offload::Stock, Offload::Offloaded), 1.2),
        ],
        stop: Stop::Budget,
        elapsed: Duration::from_secs(1),
    }
}

#[test]
fn a_cost_per_kb_becomes_the_published_percent_at_the_published_rate() {
    // 190 % at 5 GB/s are 389 ns per KB.
    assert!((percent(389.0) - 190.0).abs() < 0.1, "{}", percent(389.0));
}

#[test]
fn each_step_is_judged_where_it_was_published_and_can_be_made() {
    let found = Reproduction::of(&outcome());
    let of = |over, under| {
        let mut judged =
            found.judged.iter().filter(|j| j.site == SystemUnderTest::Simulated && j.line == 0);
        judged.find(|j| (j.over, j.under) == (over, under)).expect("judged")
    };
    assert_eq!(of(Offload::Stock, Offload::Placed).verdict, Verdict::Exceeded);
    let shrunk = of(Offload::Stock, Offload::Offloaded);
    assert_eq!(shrunk.verdict.word(), "shrunk", "{shrunk:?}");
    assert!(shrunk.verdict.reason().contains("both copy each byte"));
    assert_eq!(of(Offload::Offloaded, Offload::Placed).verdict.word(), "not measured");
    // `read` has nothing placed, the kernel neither.
    let without = |j: &&Judged| {
        j.under == Offload::Placed && (j.line == 2 || j.site == SystemUnderTest::Kernel)
    };
    assert_eq!(found.judged.iter().filter(without).count(), 0);
}

#[test]
fn a_run_of_one_round_says_so_once_and_shows_no_intervals() {
    let mut outcome = outcome();
    for figure in &mut outcome.figures {
        figure.estimate = Estimate::of(&[6.5]);
    }
    let found = Reproduction::of(&outcome);
    let report = report(&found, outcome);
    let text = report.text(&Machine::here());
    assert!(!text.contains("6.50\u{2013}"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let told = "Not measured: 2 of 3 ratios, since a verdict requires three rounds";
    assert_eq!(words.matches(told).count(), 1, "{text}");
    assert_eq!(words.matches("three rounds").count(), 1, "{text}");
    // What the run left out has no rows in the table of steps.
    assert!(!text.contains("fulmar, TAP"), "{text}");
}

#[test]
fn the_report_has_the_published_row_and_the_measured_one() {
    let report = report(&Reproduction::of(&outcome()), outcome());
    let text = report.text(&Machine::here());
    assert!(text.contains("190") && text.contains("exceeded") && text.contains("146"), "{text}");
    let json = report.json(&Machine::here(), &["fulmar".to_owned()]);
    let rows = json["rows"].as_array().expect("rows");
    let is_it = |r: &&serde_json::Value| r["site"] == "sim" && r["row"] == "a";
    let first = rows.iter().find(is_it).expect("a row");
    assert_eq!(first["placed_receiver_ns_per_kb"], 10.0);
    assert_eq!(first["what"], "asynchronous read, 2 x 64 KiB");
}

#[test]
fn every_cell_has_one_way_and_no_way_two_cells_of_a_row() {
    for line in &LINES {
        for site in SystemUnderTest::ALL {
            let mut names: Vec<_> =
                Offload::ALL.iter().filter_map(|o| method(line.ask, *o, site)).collect();
            let all = names.len();
            names.dedup();
            assert_eq!(names.len(), all, "{line:?} {site:?}");
        }
    }
}
