use super::*;
use crate::harness::report::Machine;
use crate::harness::{MACHINE, Ratio, Stop};
use crate::transfer::{GBPS, PEER, THIS_END};
use std::time::Duration;

fn sure(value: f64) -> Estimate {
    Estimate { median: value, low: value, high: value, runs: 9, confidence: 0.96 }
}

fn row(method: &'static str, site: SystemUnderTest, pair: &Pair, ns: f64) -> Row {
    let values = [
        (BOTH, ns + 50.0),
        (GBPS, 8.192),
        (THREAD, ns),
        (THIS_END, ns),
        (PEER, 50.0),
        (MACHINE, ns + 60.0),
    ];
    Row {
        name: format!("{method}.{}", site.device()),
        title: method.into(),
        labels: cell_of(method, pair, site).labels(),
        values: values.map(|(key, value)| (key, sure(value))).to_vec(),
        counts: vec![("user_cpu_ns", 1), ("cpu_ns", 4)],
        runs: 9,
        ..Row::default()
    }
}

fn figure(name: String, value: f64) -> Figure {
    Figure { ratio: Ratio::value(name, "", BOTH, ""), estimate: Some(sure(value)) }
}

pub fn outcome() -> Outcome {
    let pair = &sosend::TABLE.pairs[3];
    let limit = Row {
        name: limit_name(pair.bytes),
        labels: Vec::new(),
        ..row("", SystemUnderTest::Tap, pair, -20.0)
    };
    let name = |account| figure_name(&sosend::TABLE, pair, SystemUnderTest::Simulated, account);
    Outcome {
        rows: vec![
            row("old", SystemUnderTest::Simulated, pair, 200.0),
            row("published", SystemUnderTest::Simulated, pair, 100.0),
            row("kernel_write", SystemUnderTest::Kernel, pair, 300.0),
            limit,
        ],
        figures: vec![figure(name("cpu"), 2.0), figure(name("machine"), 1.5)],
        stop: Stop::Runs,
        elapsed: Duration::from_secs(1),
    }
}

#[test]
fn the_published_rows_give_the_published_ratios() {
    // Computed by hand from the printed rows: (user + sys) / Mbit/s, and service demand.
    let cpu = [2.20, 2.59, 2.90, 2.92, 3.19, 2.97];
    let machine = [1.16, 1.59, 1.17, 1.63, 1.18, 1.61];
    for (pair, (cpu, machine)) in sosend::TABLE.pairs.iter().zip(cpu.into_iter().zip(machine)) {
        assert!((pair.cpu_ratio - cpu).abs() < 0.01, "{pair:?}");
        assert!((pair.machine_ratio.expect("published") - machine).abs() < 0.01, "{pair:?}");
    }
}

#[test]
fn the_published_columns_agree_with_each_other() {
    for pair in sosend::TABLE.pairs {
        for row in pair.rows.as_ref().expect("all twelve are printed") {
            // Service demand is utilisation of one CPU over KB per second, and time % is the
            // process's time over ten seconds: a wrong digit here would break one of them.
            let kb_per_s = row.mbit_per_s * 1e6 / 8.0 / 1024.0;
            let local = row.util_local_pct * 1e4 / kb_per_s;
            let remote = row.util_remote_pct * 1e4 / kb_per_s;
            assert!((local - row.sd_local_us_per_kb).abs() < 0.004, "{row:?}");
            assert!((remote - row.sd_remote_us_per_kb).abs() < 0.004, "{row:?}");
            let time = (row.user_s + row.sys_s) / row.real_s * 100.0;
            assert!((time - row.time_pct).abs() < 0.2, "{time} in {row:?}");
        }
    }
}

#[test]
fn a_measured_row_has_netperfs_columns() {
    let pair = &sosend::TABLE.pairs[0];
    let n = Netperf::of(&row("old", SystemUnderTest::Tap, pair, 500.0), 2).expect("it has figures");
    // 8.192 Gb/s are a million KB per second, each 0.5 us: half of one CPU, a quarter of two.
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
    near(n.mbit_per_s, 8192.0);
    near(n.util_local_pct, 25.0);
    near(n.sd_local_us_per_kb, 0.5);
    near(n.user_s, 1.25);
    near(n.sys_s, 3.75);
    near(n.time_pct, 50.0);
    // As netperf defines it: util% x 10000 x CPUs / KB per second.
    near(n.util_local_pct * 1e4 * 2.0 / 1e6, n.sd_local_us_per_kb);
}

#[test]
fn a_row_that_failed_has_no_line_and_its_pair_says_why() {
    let mut outcome = outcome();
    outcome.figures.clear();
    outcome.rows[1].values.clear();
    outcome.rows[1].error = Some("no device".into());
    let found = Reproduction::of(&sosend::TABLE, &outcome, 2);
    let at = |site| found.judged.iter().find(|j| j.pair == 4 && j.site == site).expect("judged");
    assert_eq!(at(SystemUnderTest::Simulated).verdict, Verdict::NotMeasured("no device".into()));
    assert_eq!(
        at(SystemUnderTest::Tap).verdict,
        Verdict::NotMeasured("this run left it out".into())
    );
    assert!(
        !found.lines.iter().any(|l| l.letter == 'b' && l.site == Some(SystemUnderTest::Simulated))
    );
}

#[test]
fn lines_stand_in_the_published_order_each_with_what_was_measured_for_it() {
    let found = Reproduction::of(&sosend::TABLE, &outcome(), 2);
    let of_four: Vec<_> =
        found.lines.iter().filter(|l| l.pair == 4).map(|l| (l.letter, l.site)).collect();
    let expected = [
        ('a', None),
        ('a', Some(SystemUnderTest::Simulated)),
        ('b', None),
        ('b', Some(SystemUnderTest::Kernel)),
        ('b', Some(SystemUnderTest::Simulated)),
    ];
    assert_eq!(of_four, expected);
    assert_eq!(found.lines.iter().filter(|l| l.site.is_none()).count(), 12);
    assert_eq!(found.limits, [(64 << 10, 30.0)]);
}

#[test]
fn a_smaller_ratio_is_explained_by_what_both_ways_share() {
    let found = Reproduction::of(&sosend::TABLE, &outcome(), 2);
    let judged = found.judged.iter().find(|j| j.pair == 4 && j.site == SystemUnderTest::Simulated);
    let Some(Judged { verdict: Verdict::Shrunk(why), .. }) = judged else { panic!("{judged:?}") };
    // 200 and 100 with a copy of 30 in each: 170 over 70.
    assert!(why.contains("30 of the new way's 100 ns/KB (30 %)"), "{why}");
    assert!(why.ends_with("the ratio is 2.43"), "{why}");
}

#[test]
fn verdicts_are_given_by_the_bounds_of_the_interval() {
    let within = |low, high| {
        let median = (low + high) / 2.0;
        let e = Estimate { median, low, high, runs: 9, confidence: 0.95 };
        verdict::judge(2.9, e, "so").word()
    };
    assert_eq!(within(3.3, 3.6), "exceeded");
    assert_eq!(within(2.0, 3.6), "reproduced");
    assert_eq!(within(2.0, 2.62), "reproduced");
    assert_eq!(within(2.0, 2.5), "shrunk");
    assert_eq!(within(0.8, 0.97), "gone");
    let hasty = Estimate { runs: 2, ..sure(2.9) };
    assert_eq!(verdict::judge(2.9, hasty, "so").word(), "not measured");
    assert_eq!(Verdict::Shrunk("of it".into()).to_string(), "shrunk because of it");
    assert_eq!(Verdict::Exceeded.to_string(), "exceeded");
}

#[test]
fn the_published_surprise_is_looked_for_at_every_size_and_judged_by_its_interval() {
    let pairs = sosend::TABLE.pairs;
    let speed = |pair: &Pair, site, value| {
        figure(figure_name(&sosend::TABLE, pair, site, "old_tso_speed"), value)
    };
    let mut outcome = outcome();
    outcome.figures = vec![
        speed(&pairs[1], SystemUnderTest::Tap, 0.8),
        speed(&pairs[3], SystemUnderTest::Simulated, 1.2),
        speed(&pairs[5], SystemUnderTest::Simulated, 1.0),
    ];
    let found = Reproduction::of(&sosend::TABLE, &outcome, 2).surprises;
    let told: Vec<_> = found.iter().map(|s| (s.bytes >> 10, s.verdict.word())).collect();
    assert_eq!(told, [(32, "reproduced"), (64, "gone"), (128, "not comparable")]);
    assert!((found[0].published - 0.974).abs() < 0.001);
}

#[test]
fn the_report_has_every_published_row_each_verdict_and_its_reason() {
    let report = show::report(&Reproduction::of(&sosend::TABLE, &outcome(), 2), outcome());
    let told = report.text(&Machine::here());
    for part in ["921.3", "939.1", "fulmar, simulated device", "kernel", "baseline"] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    let words = told.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("4 on fulmar, simulated device: shrunk because the copy"), "{words}");
    assert!(words.contains("64 KiB 30 ns/KB"), "{words}");
    assert!(!told.contains("NaN"), "{told}");
}

#[test]
fn the_json_has_the_lines_the_verdicts_and_what_was_measured() {
    let report = show::report(&Reproduction::of(&sosend::TABLE, &outcome(), 2), outcome());
    let v = report.json(&Machine::here(), &[]);
    assert_eq!(v["name"], "sosend");
    let first = &v["rows"][0];
    assert_eq!((&first["row"], &first["site"]), (&"1a".into(), &"published".into()));
    assert_eq!(first["mbit_per_s"], 921.28);
    assert!(first["hardware_ns_per_kb"].is_null());
    let rows = v["rows"].as_array().expect("rows");
    let judged = rows.iter().filter(|r| r["table"] == "Verdicts");
    assert_eq!(judged.clone().count(), 12);
    assert!(judged.clone().any(|j| j["verdict"] == "shrunk" && j["process_a_vs_b"] == 2.0));
    assert!(rows.iter().any(|r| r["name"] == "old.sim" && r[BOTH] == 250.0));
}
