//! `fulmar-lab sim`: the whole stack over bad networks on a virtual clock, one scenario per seed.

use crate::outcome::{Outcome, say};
use fulmar_simulation::{Case, Feature, Report};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

mod dumbbell;
mod soak;

/// Seeds per line of progress where standard error is not a terminal.
const SEEDS_PER_LINE: u64 = 100_000;

/// Failures after which the rest is not worth the time.
const ENOUGH_FAILURES: usize = 5;

/// Simulate two stacks over impaired networks on a virtual clock, one scenario per seed
#[derive(clap::Args, Debug)]
#[command(after_help = "Exit status: 0 if every seed passed, 1 if any failed.

Examples:
  fulmar-lab sim --seeds 100000           100,000 scenarios
  fulmar-lab sim --seed 4711 --verbose    replay one seed, event by event
  fulmar-lab sim --swarm --seeds 10000    scenarios with hostile peers
  fulmar-lab sim --soak --minutes 60      new seeds of the swarm for an hour
  fulmar-lab sim --dumbbell               congestion control over shared bottlenecks")]
pub struct Args {
    /// Run only this seed
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
    /// Print every event of the seed
    #[arg(short, long, requires = "seed")]
    verbose: bool,
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 1000)]
    seeds: u64,
    /// The first seed
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    first: u64,
    /// Add hostile peers, attackers and small memory budgets (the swarm)
    #[arg(long)]
    swarm: bool,
    /// Omit these features of the swarm
    #[arg(long, value_name = "FEATURES", value_delimiter = ',')]
    without: Vec<Feature>,
    /// Run new seeds of the swarm, starting from the current time
    #[arg(long, conflicts_with_all = ["seed", "seeds", "first"])]
    soak: bool,
    /// With --soak: number of minutes to run
    #[arg(long, value_name = "N", default_value_t = 10.0, requires = "soak")]
    minutes: f64,
    /// With --soak: the directory for failing cases
    #[arg(long, value_name = "DIRECTORY", default_value = "soak-failures", requires = "soak")]
    failures: PathBuf,
    /// Simulate flows over shared bottlenecks instead, and print the table of results/wan/simulation.txt
    #[arg(long, conflicts_with_all = ["seed", "seeds", "first", "swarm", "soak"])]
    dumbbell: bool,
    /// Number of threads [default: one per CPU]
    #[arg(short, long)]
    jobs: Option<usize>,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let without = args.without.iter().copied().collect();
    let case = |seed| Case { seed, is_swarm: args.swarm || args.soak, without };
    match args.seed {
        Some(seed) => one(case(seed), args.verbose),
        None if args.dumbbell => dumbbell::run(jobs(args)?),
        None if args.soak => soak::run(case(soak::base()), jobs(args)?, args),
        None => many(case(args.first), args),
    }
}

fn jobs(args: &Args) -> Outcome<usize> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    match args.jobs.unwrap_or(cpus) {
        0 => Err("--jobs must be at least 1".to_owned()),
        jobs => Ok(jobs),
    }
}

fn one(case: Case, verbose: bool) -> Outcome<ExitCode> {
    let (seed, (result, trace)) = (case.seed, fulmar_simulation::run_with_trace(case));
    if verbose {
        trace.iter().try_for_each(say)?;
    }
    match result {
        Ok(report) => {
            say(format_args!("seed {seed} passed: {}", sentence(&report)))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            say(failure)?;
            Ok(ExitCode::FAILURE)
        }
    }
}

fn many(first: Case, args: &Args) -> Outcome<ExitCode> {
    let jobs = jobs(args)?;
    if args.seeds == 0 {
        return Err("--seeds must be at least 1".to_owned());
    }
    let (bar, started, failed) = (progress(args.seeds), Instant::now(), AtomicUsize::new(0));
    let summary = fulmar_simulation::run_many(first, args.seeds, jobs, |_, outcome| {
        bar.inc(1);
        if bar.is_hidden() && bar.position().is_multiple_of(SEEDS_PER_LINE) {
            let seconds = started.elapsed().as_secs();
            let _ = say(format_args!("{} of {} seeds in {seconds} s", bar.position(), args.seeds));
        }
        let Err(failure) = outcome else { return true };
        let before = failed.fetch_add(1, Ordering::Relaxed);
        let told = bar.suspend(|| say(story_of(&failure.to_string(), before == 0)));
        told.is_ok() && before + 1 < ENOUGH_FAILURES
    });
    bar.finish_and_clear();
    say(format_args!(
        "{} seeds from {} in {:.1} s, {} failed: {}",
        summary.seeds,
        args.first,
        started.elapsed().as_secs_f64(),
        summary.failures.len(),
        sentence(&summary.total)
    ))?;
    Ok(if summary.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The whole trace of the first failure; only the violation of the others, since traces are long.
fn story_of(failure: &str, whole: bool) -> &str {
    if whole { failure } else { failure.lines().next().unwrap_or_default() }
}

fn progress(seeds: u64) -> ProgressBar {
    let bar = ProgressBar::new(seeds);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} seeds {eta}") {
        bar.set_style(style);
    }
    bar
}

fn sentence(r: &Report) -> String {
    format!(
        "{} connections, {} bytes in {} frames, {} bytes retransmitted, {} time-outs, {:.0} virtual seconds, \
         {} idle steps, slowest {} ‰ of its bound, digest {:016x}",
        r.connections,
        r.bytes,
        r.frames,
        r.retransmitted_bytes,
        r.timeouts,
        Duration::from_nanos(r.virtual_ns).as_secs_f64(),
        r.idle_steps,
        r.slowest_permille,
        r.digest
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::parse;

    #[test]
    fn one_seed_and_many_exclude_each_other() {
        assert!(parse::<Args>(["sim", "--seed", "7", "--verbose"]).is_ok());
        assert!(parse::<Args>(["sim", "--seed", "7", "--seeds", "9"]).is_err());
        assert!(parse::<Args>(["sim", "--verbose"]).is_err());
        assert!(parse::<Args>(["sim", "--soak", "--seed", "7"]).is_err());
        assert!(parse::<Args>(["sim", "--minutes", "7"]).is_err());
    }

    #[test]
    fn features_are_left_out_by_name() {
        let args: Args = parse(["sim", "--without", "syn-flood,replays"]).unwrap();
        assert_eq!(args.without, [Feature::SynFlood, Feature::Replays]);
        assert!(parse::<Args>(["sim", "--without", "nothing"]).is_err());
    }

    #[test]
    fn an_empty_range_of_seeds_is_refused() {
        assert!(run(&parse(["sim", "--seeds", "0"]).unwrap()).is_err());
    }
}
