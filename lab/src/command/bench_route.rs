//! The options of `fulmar-lab bench route`.

use fulmar_cli::bounds::{runs, within};
use fulmar_lab::routes::Options;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for the rounds without --quick or --seconds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick: with the making of the tables, about 20 seconds.
const QUICK: Duration = Duration::from_secs(8);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 100;
/// Several times the Internet's; 300 bytes of memory each, in all tables together.
const MOST_PREFIXES: usize = 4_000_000;
const MOST_THREADS: usize = 64;

/// Look-ups in forwarding tables: fulmar's, other crates', one behind a lock
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench route [OPTIONS]",
    after_help = "Full tables have a realistic distribution of prefix lengths and are made from
a seed; addresses are drawn within installed prefixes. Every table must give the
same answers. Needs about 300 MB of memory for a million prefixes."
)]
pub struct RouteArgs {
    /// Be done in about 20 seconds; the intervals are wider (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for the rounds [default: 60]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// IPv4 prefixes of the full table
    #[arg(long, default_value_t = 1_000_000, value_parser = within(1, MOST_PREFIXES))]
    ipv4: usize,
    /// IPv6 prefixes of the full table
    #[arg(long, default_value_t = 250_000, value_parser = within(1, MOST_PREFIXES))]
    ipv6: usize,
    /// Threads that look up at once, at most
    #[arg(long, default_value_t = 2, value_parser = within(1, MOST_THREADS))]
    threads: usize,
    /// What tables and addresses are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

impl RouteArgs {
    /// What to measure.
    pub fn options(&self) -> Options {
        Options {
            budget: if self.quick { QUICK } else { self.seconds.unwrap_or(FULL) },
            runs: self.runs,
            ipv4: self.ipv4,
            ipv6: self.ipv6,
            threads: self.threads,
            seed: self.seed,
        }
    }

    /// Where the JSON and the page go.
    pub fn files(&self) -> (Option<&Path>, Option<&Path>) {
        (self.json.as_deref(), self.report.as_deref())
    }
}
