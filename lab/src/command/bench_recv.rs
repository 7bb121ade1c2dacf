//! The options of `fulmar-lab bench recv`.

use crate::bench::placement;
use crate::bench_send::{on_or_off, or};
use crate::stream::Stack;
use fulmar_cli::bounds::{runs, within};
use fulmar_lab::cpu::Placement;
use fulmar_lab::matrix::Device;
use fulmar_lab::recv::Use;
use fulmar_lab::recv::bench::{DEVICES, Options};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for everything without --quick or --seconds.
const FULL: Duration = Duration::from_secs(300);
/// Time for everything with --quick: what users wait for stays under 20 s, set-up included.
const QUICK: Duration = Duration::from_secs(15);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 200;
const KIB: usize = 1 << 10;
/// KiB of a buffer: more than any cache holds, and than a connection has on its way.
const MOST_KIB: usize = 16 << 10;

/// Ways of receiving: the old way, by copy, on loan, into posted buffers, the kernel's
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench recv [OPTIONS]",
    after_help = "Ways: stock (a packet per crossing, no aggregation, one mbuf copied at a time), copy
(TcpStream::read that copies), posted (recv_ring: into the reader's buffers, without a copy where the
device can), loan (recv_owned, no copy), kernel_read, kernel_uring (io_uring, one receive
ahead), and kernel_uring_multishot (provided buffers). The reader has two buffers and uses
them in turn; a bursty sender sends 256 KiB and pauses for a millisecond. Only if named:
posted_copied (recv_ring, the device places nothing), posted_stock (on stock's device),
read (TcpStream::read that gives a large buffer to the device while it waits; copy never does).
The simulated device's modelled peer sends without a limit; over tap and packet the
kernel sends, over shm another process with fulmar.
It makes its own namespaces and leaves nothing behind."
)]
pub struct RecvArgs {
    /// Be done in under 20 seconds: 64 KiB, touched, on one CPU; wider intervals (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for everything [default: 300]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// Where the two ends run; both by default
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    placement: Vec<Placement>,
    /// Over which devices [default: sim, tap, shm]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "sim|tap|packet|shm")]
    device: Vec<Device>,
    /// Whose TCP
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
    /// Only these ways: see below
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    way: Vec<String>,
    /// KiB of each of the two buffers, 1 to 16384 [default: 64, 1024]
    #[arg(long, value_delimiter = ',', value_name = "KiB", value_parser = within(1, MOST_KIB))]
    buffers: Vec<usize>,
    /// Receive aggregation on or off; both by default
    #[arg(long, value_name = "on|off", value_parser = on_or_off)]
    aggregation: Option<bool>,
    /// What becomes of the bytes, and how they come; all by default
    #[arg(long = "use", value_parser = usage, value_delimiter = ',', value_name = "touched|untouched|bursty")]
    uses: Vec<Use>,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Write fulmar's frames to this file (pcapng); the figures then mean little
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// The process itself is looked at, so that what fulmar is compared with stays away.
    #[arg(skip)]
    pub is_profiled: bool,
}

fn device(text: &str) -> Result<Device, String> {
    let names: Vec<&str> = DEVICES.iter().map(|d| d.name()).collect();
    let found = DEVICES.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| format!("`{text}` is not one of {}", names.join(", ")))
}

fn usage(text: &str) -> Result<Use, String> {
    let names: Vec<&str> = Use::ALL.iter().map(|u| u.name()).collect();
    let found = Use::ALL.into_iter().find(|u| u.name() == text);
    found.ok_or_else(|| format!("`{text}` is not one of {}", names.join(", ")))
}

impl RecvArgs {
    /// Where the JSON and the page go.
    pub fn files(&self) -> (Option<&Path>, Option<&Path>) {
        (self.json.as_deref(), self.report.as_deref())
    }

    pub fn options(&self) -> Options {
        let sizes: &[usize] = if self.quick { &[64] } else { &[64, 1024] };
        let uses: &[Use] = if self.quick { &[Use::Touched] } else { &Use::ALL };
        let placements: &[Placement] = match self.quick {
            true => &[Placement::SameCpu],
            false => &[Placement::SameCpu, Placement::TwoCpus],
        };
        // The old way, which has none, is measured either way.
        let aggregation = if self.quick { vec![true] } else { vec![true, false] };
        Options {
            devices: or(&self.device, &[Device::Sim, Device::Tap, Device::Shm]),
            buffer_bytes: or(&self.buffers, sizes).into_iter().map(|k| k * KIB).collect(),
            aggregation: self.aggregation.map_or(aggregation, |on| vec![on]),
            uses: or(&self.uses, uses),
            placements: or(&self.placement, placements),
            ways: self.way.clone(),
            fulmar: self.stack != Stack::Kernel,
            kernel: self.stack != Stack::Fulmar,
            budget: if self.quick { QUICK } else { self.seconds.unwrap_or(FULL) },
            runs: self.runs,
            pcap: self.pcap.clone(),
            limits: !self.is_profiled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: RecvArgs,
    }

    fn options(line: &str) -> Options {
        let words = std::iter::once("recv").chain(line.split_whitespace());
        Line::try_parse_from(words).expect("it parses").args.options()
    }

    #[test]
    fn the_whole_matrix_is_measured_unless_a_part_is_asked_for() {
        let all = options("");
        assert_eq!(all.buffer_bytes, [64 << 10, 1 << 20]);
        assert_eq!((all.aggregation, all.uses), (vec![true, false], Use::ALL.to_vec()));
        let part = options("--buffers 16 --aggregation off --way copy --device tap --use bursty");
        assert_eq!(part.buffer_bytes, [16 << 10]);
        assert_eq!((part.aggregation, part.devices), (vec![false], vec![Device::Tap]));
        assert_eq!((part.ways, part.uses), (vec!["copy".to_owned()], vec![Use::Bursty]));
        assert!(Line::try_parse_from(["recv", "--use", "eaten"]).is_err());
        assert!(Line::try_parse_from(["recv", "--device", "link"]).is_err());
    }

    #[test]
    fn quick_stays_under_twenty_seconds_and_full_is_a_few_minutes() {
        assert!(options("--quick").budget < Duration::from_secs(20));
        assert!(options("").budget <= Duration::from_secs(300));
    }
}
