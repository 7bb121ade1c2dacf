//! The options of `fulmar-lab bench wake`.

use crate::bench::placement;
use crate::stream::Stack;
use fulmar_cli::bounds::{runs, within};
use fulmar_lab::cpu::Placement;
use fulmar_lab::wake::{Chapter, Device, Options};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for everything without --quick or --seconds.
const FULL: Duration = Duration::from_secs(240);
/// Time for everything but the first round with --quick: what users wait for stays under a minute.
const QUICK: Duration = Duration::from_secs(12);
/// Rounds at most.
const MAX_RUNS: usize = 100;
/// Datagrams per second, 0 for as many as go.
const RATES: [u64; 8] = [1, 100, 1_000, 10_000, 50_000, 100_000, 200_000, 0];
/// The least and the most time of looking at the idle stack.
const IDLE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// A stack has as many ports of its own for connections to one listener.
const MOST_CONNECTIONS: usize = 16_000;
/// More than goes over any device here.
const MOST_PPS: u64 = 10_000_000;
const QUICK_RATES: [u64; 3] = [1_000, 100_000, 0];

/// What waiting costs and adds: wake-ups, CPU and latency, moderated or not, beside the kernel
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench wake [OPTIONS]",
    after_help = "Ways of waiting: moderated (the policy that stacks have unless they are told
otherwise), unmoderated (asleep at once, woken by every frame), polling (never
asleep), the kernel's, and on the simulated card its registers set by hand (64
frames or 50 us). Threads that look at a device use CPU: it is printed.
It makes its own namespaces and leaves nothing behind."
)]
pub struct WakeArgs {
    /// Be done in under a minute: one round, three loads (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for everything but the first round [default: 240]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every cell runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// Only these parts
    #[arg(long, value_parser = chapter, value_delimiter = ',', value_name = "rr|bulk|sweep|transmit|idle")]
    part: Vec<Chapter>,
    /// Where the two ends run; same-cpu and two-cpus by default
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    placement: Vec<Placement>,
    /// Over which devices of fulmar's [default: tap, shm, sim]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "tap|packet|shm|sim")]
    device: Vec<Device>,
    /// Whose stack
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
    /// Datagrams per second of the sweep, 0 for as many as go
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = within(0, MOST_PPS))]
    rates: Vec<u64>,
    /// Connections of the idle stack, 1 to 16000; opening them takes seconds beyond --seconds
    #[arg(long, default_value_t = 10_000, value_parser = within(1, MOST_CONNECTIONS))]
    connections: usize,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Write fulmar's frames on kernel devices to this file (pcapng); the figures then mean little
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
}

fn device(text: &str) -> Result<Device, String> {
    let all = [Device::Tap, Device::Packet, Device::Shm, Device::Sim];
    let found = all.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| format!("`{text}` is not one of tap, packet, shm, sim"))
}

fn chapter(text: &str) -> Result<Chapter, String> {
    let found = Chapter::ALL.into_iter().find(|c| c.name() == text);
    found.ok_or_else(|| format!("`{text}` is not one of rr, bulk, sweep, transmit, idle"))
}

fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

impl WakeArgs {
    /// What to measure.
    pub fn options(&self) -> Options {
        let slice = if self.quick { 120 } else { 300 };
        let budget = if self.quick { QUICK } else { self.seconds.unwrap_or(FULL) };
        let rates: &[u64] = if self.quick { &QUICK_RATES } else { &RATES };
        Options {
            chapters: or(&self.part, &Chapter::ALL),
            devices: or(&self.device, &[Device::Tap, Device::Shm, Device::Sim]),
            placements: or(&self.placement, &[Placement::SameCpu, Placement::TwoCpus]),
            rates: or(&self.rates, rates),
            fulmar: self.stack != Stack::Kernel,
            kernel: self.stack != Stack::Fulmar,
            slice: Duration::from_millis(slice),
            idle: (self.idle_time(), self.connections),
            budget,
            runs: self.runs,
            pcap: self.pcap.clone(),
        }
    }

    /// How long the idle stack is looked at; in less the few ticks that it takes say nothing.
    fn idle_time(&self) -> Duration {
        match (self.quick, self.seconds) {
            (true, _) => IDLE.0,
            (false, Some(all)) => all.clamp(IDLE.0, IDLE.1),
            (false, None) => IDLE.1,
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
        args: WakeArgs,
    }

    fn options(line: &str) -> Options {
        let words = std::iter::once("wake").chain(line.split_whitespace());
        Line::try_parse_from(words).expect("it parses").args.options()
    }

    #[test]
    fn everything_is_measured_unless_a_part_is_asked_for() {
        let all = options("");
        assert_eq!((all.devices.len(), all.placements.len()), (3, 2));
        assert_eq!(all.rates.first(), Some(&1));
        let part = options("--device shm --placement two-cpus --rates 7,0 --stack fulmar");
        assert_eq!((part.devices, part.rates), (vec![Device::Shm], vec![7, 0]));
        assert!(part.fulmar && !part.kernel);
        assert_eq!(options("--part rr,idle").chapters, [Chapter::Rr, Chapter::Idle]);
        assert!(Line::try_parse_from(["wake", "--device", "link"]).is_err());
        assert!(Line::try_parse_from(["wake", "--connections", "0"]).is_err());
        assert!(Line::try_parse_from(["wake", "--rates", "99999999999"]).is_err());
        assert!(Line::try_parse_from(["wake", "--runs", "0"]).is_err());
    }

    #[test]
    fn the_idle_stack_is_looked_at_for_no_longer_than_there_is_time() {
        assert_eq!(options("").idle.0, Duration::from_secs(10));
        assert_eq!(options("--quick").idle.0, Duration::from_secs(2));
        assert_eq!(options("--seconds 5").idle.0, Duration::from_secs(5));
        assert_eq!(options("--seconds 0.1").idle.0, Duration::from_secs(2));
    }
}
