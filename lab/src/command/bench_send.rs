//! The options of `fulmar-lab bench send` and `fulmar-lab bench sendfile`.

use crate::bench::placement;
use crate::stream::Stack;
use fulmar_cli::bounds::{runs, within};
use fulmar_lab::cpu::Placement;
use fulmar_lab::matrix::Device;
use fulmar_lab::send::bench::{Options, What};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for everything without --quick or --seconds.
const FULL: Duration = Duration::from_secs(240);
/// Time for everything with --quick: what users wait for stays under 20 s, set-up included.
const QUICK: Duration = Duration::from_secs(15);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 200;
const KIB: usize = 1 << 10;
/// KiB of a write, or of the socket's buffer.
const MOST_KIB: usize = 16 << 10;

/// Ways of writing: the old way, the published one, fulmar's, the kernel's
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench send [OPTIONS]",
    after_help = "Ways: old (one 2 KiB buffer, one protocol send each, as before 2006), published
(all buffers, one copy loop, one send), ours (TcpStream::write), owned (send_owned,
no copy), kernel_write, kernel_zerocopy; and one change at a time, only if named:
each_4k, each_64k (larger buffers, one send each), whole_2k, whole_64k (one send).
It makes its own namespaces and leaves nothing behind."
)]
pub struct SendArgs {
    #[command(flatten)]
    pub matrix: Matrix,
}

/// Ways of sending a file: page at a time, fulmar's, read and write, the kernel's sendfile
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench sendfile [OPTIONS]",
    after_help = "Ways: old (one page, one protocol send each, as before 2006), read_write,
ours_read (send_file), ours_mapped (send_mapped; on tap and packet by reference,
elsewhere it reads), kernel_sendfile, kernel_read_write. Each with
a hot part of the file (always the same) and a cold one (walking through 512 MiB
that are in the page cache but not in the CPU's).
It makes its own namespaces and leaves nothing behind."
)]
pub struct SendFileArgs {
    #[command(flatten)]
    pub matrix: Matrix,
}

/// What both have.
#[derive(clap::Args, Debug)]
pub struct Matrix {
    /// Be done in under 20 seconds: 64 KiB on one CPU, wider intervals (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for everything [default: 240]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// Where the two ends run; both by default
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    placement: Vec<Placement>,
    /// Over which devices [default: sim, tap, and shm for writes]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "sim|tap|packet|shm|link")]
    device: Vec<Device>,
    /// Whose TCP
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
    /// Only these ways: see below
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    way: Vec<String>,
    /// KiB per write or sendfile call, 1 to 16384 [default: 32, 64, 128; files 64, 1024]
    #[arg(long, value_delimiter = ',', value_name = "KiB", value_parser = within(1, MOST_KIB))]
    bytes: Vec<usize>,
    /// Super-segments (TSO) on or off; both by default
    #[arg(long, value_name = "on|off", value_parser = on_or_off)]
    super_segments: Option<bool>,
    /// KiB of the sender's socket buffer, 1 to 16384 [default: 1024, the kernel's own choice there]
    #[arg(long, value_name = "KiB", value_parser = within(1, MOST_KIB))]
    buffer: Option<usize>,
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
    let names: Vec<&str> = Device::ALL.iter().map(|d| d.name()).collect();
    let found = Device::ALL.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| format!("`{text}` is not one of {}", names.join(", ")))
}

pub fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("`{text}` is neither on nor off")),
    }
}

pub fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

impl SendArgs {
    pub fn options(&self) -> Options {
        let sizes: &[usize] = if self.matrix.quick { &[64] } else { &[32, 64, 128] };
        self.matrix.options(What::Send, &[Device::Sim, Device::Tap, Device::Shm], sizes)
    }
}

impl SendFileArgs {
    pub fn options(&self) -> Options {
        let sizes: &[usize] = if self.matrix.quick { &[64] } else { &[64, 1024] };
        self.matrix.options(What::SendFile, &[Device::Sim, Device::Tap], sizes)
    }
}

impl Matrix {
    /// Where the JSON and the page go.
    pub fn files(&self) -> (Option<&Path>, Option<&Path>) {
        (self.json.as_deref(), self.report.as_deref())
    }

    fn options(&self, what: What, devices: &[Device], sizes: &[usize]) -> Options {
        let placements: &[Placement] = match self.quick {
            true => &[Placement::SameCpu],
            false => &[Placement::SameCpu, Placement::TwoCpus],
        };
        Options {
            what,
            devices: or(&self.device, devices),
            write_bytes: or(&self.bytes, sizes).into_iter().map(|k| k * KIB).collect(),
            super_segments: self.super_segments.map_or(vec![true, false], |on| vec![on]),
            placements: or(&self.placement, placements),
            ways: self.way.clone(),
            buffer_bytes: self.buffer.map(|k| k * KIB),
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
        args: SendArgs,
    }

    fn options(line: &str) -> Options {
        let words = std::iter::once("send").chain(line.split_whitespace());
        Line::try_parse_from(words).expect("it parses").args.options()
    }

    #[test]
    fn the_whole_matrix_is_measured_unless_a_part_is_asked_for() {
        let all = options("");
        assert_eq!(all.write_bytes, [32 << 10, 64 << 10, 128 << 10]);
        assert_eq!(all.super_segments, [true, false]);
        assert_eq!(all.placements, [Placement::SameCpu, Placement::TwoCpus]);
        let part = options("--bytes 16,48 --super-segments off --way old,ours --device tap");
        assert_eq!(part.write_bytes, [16 << 10, 48 << 10]);
        assert_eq!((part.super_segments, part.devices), (vec![false], vec![Device::Tap]));
        assert_eq!(part.ways, ["old", "ours"]);
        assert!(Line::try_parse_from(["send", "--device", "ether"]).is_err());
    }

    #[test]
    fn quick_stays_under_twenty_seconds_and_full_is_a_few_minutes() {
        assert!(options("--quick").budget < Duration::from_secs(20));
        assert!(options("").budget <= Duration::from_secs(300));
        assert!(Line::try_parse_from(["send", "--quick", "--seconds", "5"]).is_err());
    }
}
