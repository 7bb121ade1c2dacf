//! The harness against scenarios whose figures are known, and the report of what it found.

use super::report::{Kind, Machine, Report, Shape, Table, WIDTH, label, number, words};
use super::*;
use serde_json::{Map, json};
use std::cell::{Cell, RefCell};

const COST: &str = "ns_per_kb";

fn scenario<'a>(name: &str, mut cost: impl FnMut(Duration) -> f64 + 'a) -> Scenario<'a> {
    Scenario::new(name, name, move |slice| Ok(Sample::of(COST, cost(slice)).count("frames", 2)))
        .in_table("costs")
        .label("device", "sim")
}

fn plan<'a>(scenarios: Vec<Scenario<'a>>, ratios: Vec<Ratio>, max_runs: usize) -> Plan<'a> {
    let budget = Duration::from_secs(60);
    Plan { scenarios, ratios, budget, max_runs, pace: Pace::Calls }
}

fn value(name: &str) -> Ratio {
    Ratio::value(format!("{name}.figure"), "what it is", COST, name)
}

#[test]
fn scenarios_alternate_and_each_round_gives_one_ratio() {
    let order = RefCell::new(String::new());
    let note = |c: char, cost| {
        order.borrow_mut().push(c);
        cost
    };
    let all = vec![scenario("a", |_| note('a', 120.0)), scenario("b", |_| note('b', 60.0))];
    let out = run(plan(all, vec![Ratio::over("a_vs_b", "", COST, ["a", "b"])], 50));
    assert_eq!(out.stop, Stop::Closed);
    assert_eq!(*order.borrow(), "abababababab");
    let e = out.figure("a_vs_b").expect("both ran");
    assert_eq!((e.median, e.runs), (2.0, RUNS_FOR_INTERVAL));
    assert_eq!(out.rows[0].counts, [("frames", 12)]);
    assert_eq!(out.rows[0].median(COST), Some(120.0));
}

#[test]
fn drift_that_hits_both_scenarios_leaves_the_ratio_alone() {
    let tick = Cell::new(100);
    let drifting = |times: u32| {
        tick.set(tick.get() + 1);
        f64::from(tick.get() / 2 * times)
    };
    let all = vec![scenario("b", |_| drifting(1)), scenario("a", |_| drifting(2))];
    let out = run(plan(all, vec![Ratio::over("r", "", COST, ["a", "b"])], 50));
    let e = out.figure("r").expect("both ran");
    assert!((e.median - 2.0).abs() < 0.05 && e.half_width_pct() < 2.5);
}

#[test]
fn a_noisy_figure_stops_at_the_number_of_runs_and_says_so() {
    let n = Cell::new(0);
    let noisy = |_| {
        n.set(n.get() + 1);
        if n.get() % 2 == 0 { 100.0 } else { 200.0 }
    };
    let out = run(plan(vec![scenario("a", noisy)], vec![value("a")], 9));
    assert_eq!((out.stop, n.get()), (Stop::Runs, 9));
}

#[test]
fn a_closed_scenario_leaves_its_time_to_the_others_and_one_may_run_once() {
    let (steady, noisy, once) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let counted = |n: &Cell<usize>| {
        n.set(n.get() + 1);
        n.get() as f64
    };
    let all = vec![
        scenario("steady", |_| {
            counted(&steady);
            10.0
        }),
        scenario("noisy", |_| counted(&noisy)),
        scenario("once", |_| counted(&once)).at_most(1),
    ];
    let out = run(plan(all, ["steady", "noisy", "once"].map(value).to_vec(), 12));
    assert_eq!((steady.get(), noisy.get(), once.get()), (RUNS_FOR_INTERVAL, 12, 1));
    assert_eq!(out.figure("once.figure").map(|e| e.runs), Some(1));
}

#[test]
fn a_failing_scenario_is_reported_once_and_the_others_go_on() {
    let tries = Cell::new(0);
    let broken = Scenario::new("broken", "broken", |_| {
        tries.set(tries.get() + 1);
        Err(io::Error::other("no device"))
    });
    let all = vec![broken, scenario("good", |_| 1.0)];
    let out = run(plan(all, vec![Ratio::over("r", "", COST, ["good", "broken"])], 30));
    assert_eq!(tries.get(), 1);
    assert_eq!(out.rows[0].error.as_deref(), Some("no device"));
    assert!(out.figure("r").is_none() && out.rows[1].median(COST) == Some(1.0));
}

#[test]
fn a_figure_of_several_terms_may_do_without_one_that_is_not_measured() {
    let all = vec![scenario("a", |_| 3.0), scenario("b", |_| 2.0)];
    let terms = ["a", "b", "absent"].map(|n| (n.to_owned(), COST)).to_vec();
    let least = Ratio::new("least", "", terms.clone(), |t| t[0] / t[1].min(t[2]));
    let sum = Ratio::new("sum", "", terms, |t| t.iter().sum());
    let out = run(plan(all, vec![least, sum], 3));
    assert_eq!(out.figure("least").map(|e| e.median), Some(1.5));
    assert!(out.figure("sum").is_none());
}

#[test]
fn the_budget_ends_a_bench_after_its_least_rounds() {
    for (pace, least) in [(Pace::Transfers, 1), (Pace::Calls, 3)] {
        let n = Cell::new(0);
        let growing = |_| {
            n.set(n.get() + 1);
            f64::from(n.get())
        };
        let all = plan(vec![scenario("a", growing)], vec![value("a")], usize::MAX);
        let out = run(Plan { budget: Duration::ZERO, pace, ..all });
        assert_eq!((out.stop, n.get()), (Stop::Budget, least));
    }
}

#[test]
fn the_slice_is_divided_out_of_the_budget_within_bounds() {
    let (shortest, of) = (Pace::Transfers.shortest(), |s| Duration::from_secs(s));
    assert_eq!(slice(of(1), 20, Pace::Transfers), shortest);
    assert_eq!(slice(of(1000), 2, Pace::Transfers), shortest * LONGEST);
    let middle = slice(of(14), 14, Pace::Transfers);
    assert!(middle > shortest && middle < shortest * LONGEST);
}

#[test]
fn one_disturbed_round_does_not_raise_the_cost_of_the_machine() {
    let mut rounds = vec![10.0; 6];
    rounds.push(300.0);
    assert_eq!(without_extremes(rounds), Some(10.0));
    assert_eq!(without_extremes(vec![7.0]), Some(7.0), "one alone is what there is");
    assert_eq!(without_extremes(Vec::new()), None);
    let busy = Duration::from_micros(1);
    let moved = |sample| with_machine(Sample { bytes: 1024, ..sample }, busy).value(MACHINE);
    assert_eq!(moved(Sample::default()), Some(1000.0));
    assert_eq!(moved(Sample::of(MACHINE, 5.0)), Some(5.0), "its own is better");
    assert_eq!(with_machine(Sample::default(), busy).value(MACHINE), None);
}

const SHAPE: Shape = Shape {
    name: "test",
    title: "A test",
    lead: "What a test costs.",
    columns: &[
        label("title", "way"),
        label("device", "device"),
        number(COST, "cost\nns/KB", 1, "what it costs").with_interval(),
        number("runs", "runs", 0, ""),
        number("absent", "absent", 0, ""),
    ],
    across: None,
    chart: None,
    legend: "cost   what it costs,\n       in ns.\nway    how.",
};

fn found(values: &[f64], goals: (f64, f64)) -> Report {
    let estimate = Estimate::of(values);
    let row = Row {
        name: "a.sim".into(),
        title: "a way".into(),
        table: "costs".into(),
        labels: vec![("device", json!("sim"))],
        values: estimate.map(|e| (COST, e)).into_iter().collect(),
        counts: vec![("frames", 3)],
        runs: values.len(),
        ..Row::default()
    };
    let failed = Row { error: Some("no device".into()), values: Vec::new(), ..row.clone() };
    let ratio = value("a").goals(goals.0, goals.1);
    let rows = vec![row, Row { name: "b.sim".into(), ..failed }];
    let (stop, elapsed) = (Stop::Budget, Duration::from_secs(3));
    Report::of(&SHAPE, Outcome { rows, figures: vec![Figure { ratio, estimate }], stop, elapsed })
}

#[test]
fn a_report_says_the_same_as_text_and_as_json() {
    let report = found(&[1.0, 1.1, 1.2], (1.15, 1.05));
    let machine = Machine::here();
    let json = report.json(&machine, &["fulmar-lab".into(), "bench".into()]);
    assert_eq!(json["ratios"]["a.figure"]["median"], 1.1);
    assert_eq!(
        (&json["rows"][0][COST], &json["rows"][0]["ns_per_kb_low"]),
        (&json!(1.1), &json!(1.0))
    );
    assert_eq!(
        (&json["rows"][0]["counts"]["frames"], &json["rows"][0]["device"]),
        (&json!(3), &json!("sim"))
    );
    assert_eq!(
        (&json["rows"][1]["error"], &json["command"][1]),
        (&json!("no device"), &json!("bench"))
    );
    assert_eq!(json["legend"], json!(["cost what it costs, in ns.", "way how."]));
    assert_eq!(json["tables"][0]["columns"][2]["hint"], "what it costs");
    assert!(json["machine"]["kernel"].is_string());
    let text = report.text(&machine);
    for part in [
        "a way",
        "sim",
        "1.1",
        "1.0–1.2",
        "not measured: a way (b.sim): no device",
        "the time ended",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(!text.contains("absent"), "a column without a value is left out: {text}");
    assert!(text.contains("reached (reach 1.15, aim 1.05,"), "{text}");
    assert!(text.contains("within the noise)"), "{text}");
    let page = page::html(&json);
    assert!(page.contains("a.figure") && page.contains("no device"));
}

#[test]
fn one_round_shows_neither_an_interval_nor_a_verdict() {
    let text = found(&[447.85], (1.15, 1.05)).text(&Machine::here());
    assert!(!text.contains("447.85–") && text.contains("one round: not judged"), "{text}");
}

#[test]
fn a_figure_that_should_be_large_is_judged_from_below() {
    let judged = |reach, aim| {
        let mut report = found(&[1.0, 1.1, 1.2], (reach, aim));
        report.figures[0].ratio.more_is_better = true;
        report.text(&Machine::here())
    };
    assert!(judged(1.05, 1.3).contains("reached (reach 1.05, aim 1.30,"));
    assert!(judged(1.05, 1.3).contains("within the noise)"));
    assert!(judged(1.2, 1.3).contains("missed"));
    assert!(judged(0.5, 1.0).contains("aim met (reach 0.50, aim 1.00)"));
}

fn row(cells: &[(&str, Value)]) -> Map<String, Value> {
    cells.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

fn widest(text: &str) -> usize {
    text.lines().map(|l| l.chars().count()).max().unwrap_or(0)
}

#[test]
fn a_wide_table_is_cut_between_words_and_then_into_parts_and_loses_nothing() {
    let sentence = "a sentence that goes on and on ".repeat(4);
    let mut columns = vec![label("name", "stage"), words("what", "what it is")];
    let mut cells = vec![("name", json!("transport_output")), ("what", json!(sentence))];
    for key in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"] {
        columns.push(number(key, "to the stage\nbefore", 1, ""));
        cells.push((key, json!(1234.5)));
    }
    let text = Table { columns, rows: vec![row(&cells)], ..Table::default() }.text();
    assert!(widest(&text) <= WIDTH, "{text}");
    assert_eq!(text.matches("1234.5").count(), 12, "{text}");
    assert!(text.matches("transport_output").count() > 1, "each part has the labels: {text}");
    let goes_on = text.split_whitespace().filter(|w| *w == "goes").count();
    assert_eq!(goes_on, 4, "{text}");
}

#[test]
fn an_interval_stays_beside_its_number_where_a_table_is_cut() {
    let keys = ["a", "b", "c", "d", "e", "f", "g"];
    let mut columns = vec![label("name", "stage")];
    columns.extend(keys.map(|key| number(key, "CPU of both ends", 1, "").with_interval()));
    let mut cells = vec![("name".to_owned(), json!("locked"))];
    for key in keys {
        cells.extend(
            [("", 2.0), ("_low", 1.0), ("_high", 3.0)]
                .map(|(end, n)| (format!("{key}{end}"), json!(n))),
        );
    }
    let table = Table { columns, rows: vec![cells.into_iter().collect()], ..Table::default() };
    let text = table.text();
    let heads = text.lines().filter(|l| l.starts_with("stage"));
    assert!(heads.clone().count() > 1, "{text}");
    for head in heads {
        assert_eq!(head.matches("95 %").count(), head.matches("both").count(), "{text}");
        assert!(head.trim_end().ends_with("95 %"), "{text}");
    }
}

#[test]
fn a_label_may_go_across() {
    let columns = vec![label("way", "way"), label("burst", "burst"), number("ns", "ns", 1, "")];
    let cell = |way: &str, burst: u64, ns: f64| {
        row(&[("way", json!(way)), ("burst", json!(burst)), ("ns", json!(ns))])
    };
    let rows = vec![cell("a", 8, 5.0), cell("a", 1, 9.0), cell("b", 1, 7.0)];
    let text = Table { columns, rows, across: Some(("burst", "ns")), ..Table::default() }.text();
    let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["way", "x1", "x8"]);
    assert_eq!((&lines[2][..], &lines[3][..]), (&["a", "9.0", "5.0"][..], &["b", "7.0", "–"][..]));
}

#[test]
fn cells_are_printed_as_what_they_are() {
    let columns = vec![
        label("write_bytes", "write"),
        label("placement", "ends on"),
        words("tso", "TSO"),
        number("n", "n", 0, ""),
    ];
    let rows = vec![
        row(&[
            ("write_bytes", json!(65536)),
            ("placement", json!("same_cpu")),
            ("tso", json!(true)),
        ]),
        row(&[("write_bytes", json!(100)), ("placement", json!("two_cpus")), ("n", json!(3))]),
    ];
    let text = Table { columns, rows, ..Table::default() }.text();
    for part in ["64 KiB", "same CPU", "yes", "100 B", "two CPUs", "3", "–"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(Kind::Number(0), number("n", "n", 0, "").kind);
}

#[test]
fn a_line_that_goes_on_below_is_wrapped_as_one() {
    let long = "of the process ".repeat(6);
    let text = format!("cpu  {}\n     and goes on\nrate short", long.trim_end());
    let said = text::wrapped_lines(&text);
    assert!(widest(&said) <= WIDTH, "{said}");
    assert!(said.lines().nth(1).is_some_and(|l| l.starts_with("     ") && l.ends_with("goes on")));
    assert_eq!(said.lines().last(), Some("rate short"));
}

#[test]
fn numbers_have_three_digits() {
    let cases = [(0.0, "0"), (1.0, "1"), (2.94, "2.94"), (9.9999, "10"), (35.17, "35.2")];
    let more = [(237.4, "237"), (0.052, "0.052"), (1e-5, "1.0e-5"), (f64::NAN, "–")];
    for (value, said) in cases.into_iter().chain(more) {
        assert_eq!(text::short(value), said);
    }
}

#[test]
fn text_in_columns_keeps_its_columns_and_wraps_in_the_last() {
    let sentence = "a sentence that goes on ".repeat(5);
    let said =
        text::wrapped_lines(&format!("  locked     2.3 %  {sentence}\n  ip        12.3 %  short"));
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("  locked     2.3 %  a sentence"), "{said}");
    assert!(lines[1].starts_with(&format!("{}that goes", " ".repeat(20))), "{said}");
    assert_eq!(lines.last(), Some(&"  ip        12.3 %  short"));
    assert!(widest(&said) <= WIDTH, "{said}");
}
