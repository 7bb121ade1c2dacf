//! The table of congestion control over shared bottlenecks is what the repository says it is: a change that
//! costs throughput, fairness or delay shows up as a difference.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use fulmar_simulation::dumbbell::{HEADING, Row, cells, run};

const KEPT: &str = include_str!("../../../results/wan/simulation.txt");

#[test]
fn the_kept_table_is_what_the_stack_does() {
    let cells = cells();
    let next = AtomicUsize::new(0);
    let differences = Mutex::new(Vec::new());
    let kept: Vec<&str> = KEPT.lines().collect();
    assert_eq!((kept.first(), kept.len()), (Some(&HEADING), cells.len() + 1), "{AGAIN}");
    let work = || {
        while let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
            let line = Row(cell, &run(cell)).to_string();
            if !kept.contains(&line.as_str()) {
                differences.lock().unwrap().push(line);
            }
        }
    };
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    let differences = differences.into_inner().unwrap();
    assert!(differences.is_empty(), "now:\n{}\n{AGAIN}", differences.join("\n"));
}

const AGAIN: &str = "if that is what the change is for: \
    cargo run -p fulmar-lab -- sim --dumbbell > results/wan/simulation.txt";

#[test]
fn one_flow_fills_a_bottleneck_and_eight_share_it() {
    let cells = cells();
    let find = |name: &str, flows: usize| {
        cells.iter().find(|c| c.name == name && c.controllers.len() == flows).expect("in the table")
    };
    let alone = run(find("20 Mb/s, 40 ms, queue 1 BDP", 1));
    assert!(alone.goodput_bps[0] > 18_000_000, "{alone:?}");
    let eight = run(find("50 Mb/s, 40 ms, queue 1 BDP", 8));
    assert!(
        eight.fairness() > 0.9 && eight.goodput_bps.iter().sum::<u64>() > 46_000_000,
        "{eight:?}"
    );
}
