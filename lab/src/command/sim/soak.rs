//! `fulmar-lab sim --soak`: new seeds of the swarm until the time is up or Ctrl-C comes. Each failing case is
//! written to a file of its own, reduced, with how to play it again.

use super::{Args, sentence};
use crate::outcome::{During, Outcome, say, stop_flag};
use fulmar_simulation::Case;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(10);
/// Failures after which the rest is not worth the time.
const ENOUGH_FAILURES: u64 = 200;

/// The first seed: microseconds, so that no later run plays the same ones.
pub fn base() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_micros() as u64)
}

/// Plays from `first` on.
pub fn run(first: Case, jobs: usize, args: &Args) -> Outcome<ExitCode> {
    if !(args.minutes > 0.0 && args.minutes < 1e6) {
        return Err("--minutes must be more than 0".to_owned());
    }
    let stop = stop_flag()?;
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.minutes * 60.0);
    say(format_args!(
        "soak from seed {} for {} minutes on {jobs} threads",
        first.seed, args.minutes
    ))?;
    let (played, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let told_at = Mutex::new(started);
    let summary = fulmar_simulation::run_many(first, u64::MAX, jobs, |_, outcome| {
        let seeds = played.fetch_add(1, Ordering::Relaxed) + 1;
        if let Err(failure) = outcome {
            failed.fetch_add(1, Ordering::Relaxed);
            let told = keep(failure, &args.failures).and_then(say);
            if told.is_err() {
                return false;
            }
        }
        let failures = failed.load(Ordering::Relaxed);
        let now = Instant::now();
        let mut told_at = told_at.lock().unwrap_or_else(PoisonError::into_inner);
        if now.duration_since(*told_at) >= PROGRESS {
            *told_at = now;
            let seconds = started.elapsed().as_secs_f64();
            let rate = seeds as f64 / seconds;
            let line =
                format!("{seconds:6.0} s: {seeds} seeds, {rate:.0} per second, {failures} failed");
            if say(line).is_err() {
                return false;
            }
        }
        now < end && !stop.load(Ordering::SeqCst) && failures < ENOUGH_FAILURES
    });
    say(format_args!(
        "{} seeds from {} in {:.1} s, {} failed: {}",
        summary.seeds,
        first.seed,
        started.elapsed().as_secs_f64(),
        summary.failures.len(),
        sentence(&summary.total)
    ))?;
    if summary.failures.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    say(format_args!("the failing cases are in {}", args.failures.display()))?;
    Ok(ExitCode::FAILURE)
}

/// Writes a failing case into `directory`, reduced; returns a line about it.
fn keep(failure: &fulmar_simulation::Failure, directory: &Path) -> Outcome<String> {
    let reduced = fulmar_simulation::reduce(failure.clone());
    fs::create_dir_all(directory).during(format_args!("cannot create {}", directory.display()))?;
    let file = directory.join(format!("seed-{}.txt", failure.case.seed));
    let text = format!(
        "Replay:  fulmar-lab sim {}\nReduced: fulmar-lab sim {}\n\n{reduced}\n",
        failure.case, reduced.case
    );
    fs::write(&file, text).during(format_args!("cannot write {}", file.display()))?;
    let what: String = format!("{:?}", failure.violation).chars().take(160).collect();
    Ok(format!("seed {} failed: {what}; see {}", failure.case.seed, file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_simulation::Violation;

    #[test]
    fn a_failing_case_is_written_with_the_command_that_plays_it_again() {
        let directory = std::env::temp_dir().join(format!("fulmar-soak-{}", std::process::id()));
        let failure = fulmar_simulation::Failure {
            case: Case::swarm(5),
            violation: Violation::Panic("why".into()),
            trace: Vec::new(),
            replays: true,
        };
        let line = keep(&failure, &directory).unwrap();
        let text = fs::read_to_string(directory.join("seed-5.txt")).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert!(line.contains("seed 5 failed") && line.contains("why"), "{line}");
        assert!(text.contains("fulmar-lab sim --swarm --seed 5") && text.contains("why"), "{text}");
    }
}
