//! The options of `fulmar-lab bench scale`.

use fulmar_cli::bounds::{runs, within};
use fulmar_lab::scale::Options;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for the rounds without --quick or --seconds.
const FULL: Duration = Duration::from_secs(40);
/// The same with --quick: with the opening of the sockets, about 20 seconds.
const QUICK: Duration = Duration::from_secs(8);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 100;
/// Sockets, or routes: a few gigabytes of memory.
const MOST: usize = 4_000_000;
/// The same of connections, of which both ends are here.
const MOST_CONNECTIONS: usize = 400_000;
const MOST_THREADS: usize = 64;

/// What a packet, a request and a look-up cost among few and among a million
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench scale [OPTIONS]",
    after_help = "Datagrams of 18 bytes to sockets drawn at random, over a device that only hands
frames over; requests over established connections between two shards, all others
idle; look-ups among routes; floods to closed ports. Needs about 2 GB of memory for
a million sockets and 100,000 connections."
)]
pub struct ScaleArgs {
    /// Be done in about 20 seconds; the intervals are wider (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for the rounds [default: 40]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// The most sockets
    #[arg(long, default_value_t = 1_000_000, value_parser = within(1, MOST))]
    sockets: usize,
    /// The most connections that are open at once; 0 opens none
    #[arg(long, default_value_t = 100_000, value_parser = within(0, MOST_CONNECTIONS))]
    connections: usize,
    /// The most routes [default: 1000000, with --quick 100000]
    #[arg(long, value_parser = within(1, MOST))]
    routes: Option<usize>,
    /// Threads with a shard each, at most
    #[arg(long, default_value_t = 2, value_parser = within(1, MOST_THREADS))]
    threads: usize,
    /// What flows are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

/// What is being made, on a terminal; nothing elsewhere.
pub fn progress() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar
}

impl ScaleArgs {
    /// What to measure.
    pub fn options(&self) -> Options {
        Options {
            budget: if self.quick { QUICK } else { self.seconds.unwrap_or(FULL) },
            runs: self.runs,
            sockets: self.sockets,
            connections: self.connections,
            routes: self.routes.unwrap_or(if self.quick { 100_000 } else { 1_000_000 }),
            threads: self.threads,
            seed: self.seed,
        }
    }

    /// Where the JSON and the page go.
    pub fn files(&self) -> (Option<&Path>, Option<&Path>) {
        (self.json.as_deref(), self.report.as_deref())
    }
}
