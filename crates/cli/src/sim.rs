//! `fulmar sim`: the whole stack over bad networks on a virtual clock, one scenario per seed.

use crate::failure::{Failure, Outcome};
use crate::format;
use crate::say::say;
use fulmar_lab::simulation::{self, Report};
use indicatif::{ProgressBar, ProgressStyle};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Failures after which the rest is not worth the time.
const ENOUGH_FAILURES: usize = 5;

/// Play two stacks over bad networks on a virtual clock; every seed is another scenario
#[derive(clap::Args, Debug)]
#[command(after_help = "Exit status: 0 if every seed held every promise, 1 if one did not.

Examples:
  fulmar sim --seeds 100000           as many scenarios
  fulmar sim --seed 4711 --verbose    one again, event by event")]
pub struct Args {
    /// Play this seed alone
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
    /// Print every event of it
    #[arg(short, long, requires = "seed")]
    verbose: bool,
    /// How many seeds
    #[arg(long, value_name = "N", default_value_t = 1000)]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    first: u64,
    /// Threads [default: one per CPU]
    #[arg(short, long)]
    jobs: Option<usize>,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    match args.seed {
        Some(seed) => one(seed, args.verbose),
        None => many(args),
    }
}

fn one(seed: u64, verbose: bool) -> Outcome<ExitCode> {
    let (result, story) = simulation::run_with_story(seed);
    if verbose {
        story.iter().try_for_each(say)?;
    }
    match result {
        Ok(report) => {
            say(format_args!("seed {seed} held every promise: {}", sentence(&report)))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            say(failure)?;
            Ok(ExitCode::FAILURE)
        }
    }
}

fn many(args: &Args) -> Outcome<ExitCode> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or(cpus);
    if jobs == 0 || args.seeds == 0 {
        return Err(Failure::new("nothing to play: --jobs and --seeds must be at least 1"));
    }
    let (bar, started, failed) = (progress(args.seeds), Instant::now(), AtomicUsize::new(0));
    let summary = simulation::run_many(args.first, args.seeds, jobs, |_, outcome| {
        bar.inc(1);
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

/// The whole story of the first failure; of the others what was violated, since stories are long.
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
        "{} connections, {} in {} frames, {} sent again, {} time-outs, {:.0} virtual seconds, \
         digest {:016x}",
        r.connections,
        format::bytes(r.bytes),
        r.frames,
        format::bytes(r.retransmitted_bytes),
        r.timeouts,
        Duration::from_nanos(r.virtual_ns).as_secs_f64(),
        r.digest
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn one_seed_and_many_exclude_each_other() {
        assert!(Line::try_parse_from(["sim", "--seed", "7", "--verbose"]).is_ok());
        assert!(Line::try_parse_from(["sim", "--seed", "7", "--seeds", "9"]).is_err());
        assert!(Line::try_parse_from(["sim", "--verbose"]).is_err());
    }

    #[test]
    fn nothing_to_play_is_refused() {
        let line = Line::try_parse_from(["sim", "--seeds", "0"]).unwrap();
        assert!(run(&line.args).is_err());
    }
}
