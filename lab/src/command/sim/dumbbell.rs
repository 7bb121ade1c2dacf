//! `fulmar-lab sim --dumbbell`: every controller over every path of the table, one line each.

use crate::outcome::{Outcome, say};
use fulmar_simulation::dumbbell::{HEADING, Row, cells, run as play};
use indicatif::ProgressBar;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Plays all cells on `jobs` threads and prints them in the order of the table.
pub fn run(jobs: usize) -> Outcome<ExitCode> {
    let cells = cells();
    let bar = ProgressBar::new(cells.len() as u64);
    let next = AtomicUsize::new(0);
    let lines = Mutex::new(vec![String::new(); cells.len()]);
    let work = || {
        while let Some((n, cell)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|n| Some((n, cells.get(n)?)))
        {
            let line = Row(cell, &play(cell)).to_string();
            if let Ok(mut lines) = lines.lock() {
                lines[n] = line;
            }
            bar.inc(1);
        }
    };
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    bar.finish_and_clear();
    say(HEADING)?;
    lines.into_inner().unwrap_or_default().into_iter().try_for_each(say)?;
    Ok(ExitCode::SUCCESS)
}
