//! The runner against ways whose figures are known.

use super::*;
use std::cell::{Cell, RefCell};

/// A run in which each end needed so many ns of CPU per KB.
fn sample(near: u64, far: u64) -> Sample {
    let end = |ns| Report {
        bytes: 1024 * 1024,
        elapsed: Duration::from_millis(1),
        cpu: Duration::from_nanos(ns * 1024),
        calls: 8,
        ..Report::default()
    };
    Sample::of_ends(end(near), end(far), 0).count("frames", 2)
}

fn way<'a>(name: &str, run: impl FnMut(Duration) -> io::Result<Sample> + 'a) -> Way<'a> {
    Way {
        name: name.into(),
        title: name.into(),
        placement: Placement::Unpinned,
        cell: None,
        run: Box::new(run),
    }
}

fn ratio(way: &str, over: Option<&str>) -> Ratio {
    Ratio {
        name: format!("{way}.figure"),
        sentence: String::new(),
        way: way.into(),
        over: over.map(Into::into),
        measure: Sample::both_ns_per_kb,
        reach_and_aim: None,
        more_is_better: false,
        published: None,
    }
}

fn plan<'a>(ways: Vec<Way<'a>>, ratios: Vec<Ratio>, max_runs: usize) -> Plan<'a> {
    Plan { ways, ratios, budget: Duration::from_secs(60), max_runs, soak: false }
}

#[test]
fn ways_alternate_and_each_round_gives_one_ratio() {
    let order = RefCell::new(String::new());
    let note = |c: char, near| {
        order.borrow_mut().push(c);
        Ok(sample(near, 20))
    };
    let ways = vec![way("a", |_| note('a', 100)), way("b", |_| note('b', 40))];
    let out = run(plan(ways, vec![ratio("a", Some("b"))], 50));
    assert_eq!(out.stop, Stop::Closed);
    assert_eq!(*order.borrow(), "abababababab");
    let e = out.figures[0].estimate.expect("both ran");
    assert_eq!((e.median, e.runs), (2.0, RUNS_FOR_INTERVAL));
    assert_eq!(out.rows[0].counts, [("frames", 12)]);
    assert_eq!(out.rows[0].both_ns_per_kb.expect("ran").median, 120.0);
}

#[test]
fn drift_that_hits_both_ways_leaves_the_ratio_alone() {
    let tick = Cell::new(100);
    let drifting = |times: u64| {
        tick.set(tick.get() + 1);
        Ok(sample(tick.get() / 2 * times, 0))
    };
    let ways = vec![way("b", |_| drifting(1)), way("a", |_| drifting(2))];
    let out = run(plan(ways, vec![ratio("a", Some("b"))], 50));
    let e = out.figures[0].estimate.expect("both ran");
    assert!((e.median - 2.0).abs() < 0.05 && e.half_width_pct() < 2.5);
}

#[test]
fn a_noisy_figure_stops_at_the_number_of_runs_and_says_so() {
    let n = Cell::new(0);
    let noisy = |_| {
        n.set(n.get() + 1);
        Ok(sample(if n.get() % 2 == 0 { 100 } else { 200 }, 0))
    };
    let out = run(plan(vec![way("a", noisy)], vec![ratio("a", None)], 9));
    assert_eq!((out.stop, n.get()), (Stop::Runs, 9));
}

#[test]
fn a_closed_way_leaves_its_time_to_the_others() {
    let (steady, noisy) = (Cell::new(0), Cell::new(0u64));
    let ways = vec![
        way("steady", |_| {
            steady.set(steady.get() + 1);
            Ok(sample(10, 10))
        }),
        way("noisy", |_| {
            noisy.set(noisy.get() + 1);
            Ok(sample(noisy.get() * 10, 0))
        }),
    ];
    run(plan(ways, vec![ratio("steady", None), ratio("noisy", None)], 12));
    assert_eq!((steady.get(), noisy.get()), (RUNS_FOR_INTERVAL, 12));
}

#[test]
fn a_failing_way_is_reported_once_and_the_others_go_on() {
    let tries = Cell::new(0);
    let ways = vec![
        way("broken", |_| {
            tries.set(tries.get() + 1);
            Err(io::Error::other("no device"))
        }),
        way("good", |_| Ok(sample(1, 1))),
    ];
    let out = run(plan(ways, vec![ratio("good", Some("broken"))], 30));
    assert_eq!(tries.get(), 1);
    assert_eq!(out.rows[0].error.as_deref(), Some("no device"));
    assert!(out.figures[0].estimate.is_none());
    assert!(out.rows[1].both_ns_per_kb.is_some());
}

#[test]
fn the_budget_ends_a_bench_after_at_least_one_round() {
    let n = Cell::new(0u64);
    let slow = |slice: Duration| {
        std::thread::sleep(slice);
        n.set(n.get() + 1);
        Ok(sample(n.get() * 100, 0))
    };
    let budget = Duration::from_millis(300);
    let out =
        run(Plan { budget, ..plan(vec![way("a", slow)], vec![ratio("a", None)], usize::MAX) });
    assert_eq!(out.stop, Stop::Budget);
    assert!(n.get() >= 1 && out.rows[0].both_ns_per_kb.is_some());
}

#[test]
fn the_slice_is_divided_out_of_the_budget_within_bounds() {
    assert_eq!(slice(Duration::from_secs(1), 20), SLICE.0);
    assert_eq!(slice(Duration::from_secs(1000), 2), SLICE.1);
    let middle = slice(Duration::from_secs(14), 14);
    assert!(middle > SLICE.0 && middle < SLICE.1);
}

#[test]
fn one_round_beside_a_stranger_does_not_make_the_machine_dear() {
    let ms = Duration::from_millis;
    let mut rounds = vec![(ms(10), 1 << 20); 6];
    assert_eq!(without_extremes(rounds.clone()), per_kb(ms(60), 6 << 20));
    rounds.push((ms(300), 1 << 20));
    assert_eq!(without_extremes(rounds), per_kb(ms(50), 5 << 20));
    assert_eq!(without_extremes(vec![(ms(7), 1024)]), Some(7e6), "one alone is what there is");
    assert_eq!(without_extremes(Vec::new()), None);
}
