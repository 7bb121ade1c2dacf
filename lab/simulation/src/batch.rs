//! Many seeds, on several threads; each seed on one.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Case, Failure, Report, run};

/// The result of a run over many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seeds played.
    pub seeds: u64,
    /// Sums over the seeds that passed.
    pub total: Report,
    /// Cases that failed, by seed.
    pub failures: Vec<Failure>,
}

impl Summary {
    fn add(&mut self, outcome: Result<Report, Box<Failure>>) {
        self.seeds += 1;
        match outcome {
            Ok(r) => {
                let t = &mut self.total;
                t.virtual_ns += r.virtual_ns;
                t.steps += r.steps;
                t.frames += r.frames;
                t.bytes += r.bytes;
                t.retransmitted_bytes += r.retransmitted_bytes;
                t.timeouts += r.timeouts;
                t.connections += r.connections;
                t.errors += r.errors;
                t.slowest_permille = t.slowest_permille.max(r.slowest_permille);
                t.idle_steps += r.idle_steps;
                // The order in which threads finish must not show.
                t.digest ^= r.digest;
            }
            Err(f) => self.failures.push(*f),
        }
    }
}

/// Plays `count` cases from `first` on `jobs` threads, and calls `told` after every case. Stops early when `told`
/// returns false.
pub fn run_many(
    first: Case,
    count: u64,
    jobs: usize,
    told: impl Fn(Case, &Result<Report, Box<Failure>>) -> bool + Sync,
) -> Summary {
    let next = AtomicU64::new(0);
    let summary = Mutex::new(Summary::default());
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= count {
                return;
            }
            let case = first.after(n);
            let outcome = run(case);
            let goes_on = told(case, &outcome);
            if let Ok(mut s) = summary.lock() {
                s.add(outcome);
            }
            if !goes_on {
                next.store(count, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        (1..jobs.max(1)).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let mut summary = summary.into_inner().unwrap_or_default();
    summary.failures.sort_by_key(|f| f.case.seed);
    summary
}
