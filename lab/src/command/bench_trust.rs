//! The options of `fulmar-lab bench trust`.

use fulmar_cli::bounds::runs;
use fulmar_lab::trust::{Options, way_names};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for the rounds without --quick or --seconds.
const FULL: Duration = Duration::from_secs(40);
/// The same with --quick: what users wait for stays under 20 s, the scenarios included.
const QUICK: Duration = Duration::from_secs(8);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 200;

/// Who is served beside slow peers and floods, and what a flooded frame costs beside the kernel
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench trust [OPTIONS]",
    after_help = "New connections beside 4,000 peers that offer no window, and during a flood of SYNs,
on a virtual clock; then CPU per flooded SYN and per stray segment, the kernel's on
veth and fulmar's on veth and TAP. It makes its own namespaces and leaves nothing
behind."
)]
pub struct TrustArgs {
    /// Be done in under 20 seconds; the intervals are wider (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for the rounds [default: 40]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// Only these ways of flooding, and nothing on a virtual clock
    #[arg(long, value_parser = way, value_delimiter = ',', value_name = "NAME")]
    way: Vec<&'static str>,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

fn way(text: &str) -> Result<&'static str, String> {
    way_names().find(|name| *name == text).ok_or_else(|| {
        format!("`{text}` is not one of {}", way_names().collect::<Vec<_>>().join(", "))
    })
}

impl TrustArgs {
    /// What to measure.
    pub fn options(&self) -> Options {
        Options {
            ways: self.way.clone(),
            budget: if self.quick { QUICK } else { self.seconds.unwrap_or(FULL) },
            runs: self.runs,
        }
    }

    /// Where the JSON and the page go.
    pub fn files(&self) -> (Option<&Path>, Option<&Path>) {
        (self.json.as_deref(), self.report.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: TrustArgs,
    }

    fn options(line: &str) -> Result<Options, String> {
        let words = std::iter::once("trust").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|l| l.args.options()).map_err(|e| e.to_string())
    }

    #[test]
    fn everything_is_measured_unless_ways_are_named() {
        assert!(options("").unwrap().ways.is_empty());
        assert_eq!(
            options("--way packet.syn,kernel.syn").unwrap().ways,
            ["packet.syn", "kernel.syn"]
        );
        let refused = options("--way packet").unwrap_err();
        assert!(way_names().all(|name| refused.contains(name)), "{refused}");
    }

    #[test]
    fn quick_stays_under_twenty_seconds() {
        assert!(options("--quick").unwrap().budget < Duration::from_secs(15));
        assert!(options("--quick --seconds 5").is_err());
    }
}
