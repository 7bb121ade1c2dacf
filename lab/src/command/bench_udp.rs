//! The options of `fulmar-lab bench udp`.

use crate::stream::Stack;
use fulmar_cli::bounds::{runs, within};
use fulmar_lab::udp::{BYTES, Device, Options};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for the rounds without --quick or --seconds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick: what users wait for stays under 20 s, opening the devices included.
const QUICK: Duration = Duration::from_secs(12);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 200;
/// What one packet of MTU 1500 carries.
const MOST_BYTES: usize = 1472;
/// Threads at most, each with a stack, a device and namespaces of its own.
const MOST_THREADS: usize = 64;

/// What a datagram costs its sender: one by one, many in a call, cut by the device; 1 to N threads
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench udp [OPTIONS]",
    after_help = "Ways: send, send_to, send_many of 64, send_segmented on a simulated device and over
TAP; send, sendto, sendmmsg and UDP_SEGMENT of the kernel on veth, to a socket
that receives all of it. It makes its own namespaces and leaves nothing behind."
)]
pub struct UdpArgs {
    /// Be done in under 20 seconds: 18 bytes only (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for the rounds [default: 60]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// Over which devices of fulmar's [default: both]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "sim|tap")]
    device: Vec<Device>,
    /// Bytes of payload [default: 18, 256, 1472]
    #[arg(long, value_parser = within(1, MOST_BYTES), value_delimiter = ',', value_name = "BYTES")]
    bytes: Vec<usize>,
    /// Threads at most; every number from 1 on is measured [default: 2, or as many as there are CPUs]
    #[arg(long, value_parser = within(1, MOST_THREADS))]
    threads: Option<usize>,
    /// Whose datagrams
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

fn device(text: &str) -> Result<Device, String> {
    match text {
        "sim" => Ok(Device::Sim),
        "tap" => Ok(Device::Tap),
        _ => Err(format!("`{text}` is not one of sim, tap")),
    }
}

impl UdpArgs {
    /// What to measure.
    pub fn options(&self) -> Options {
        let wanted = |d: &Device| match d {
            Device::Veth => self.stack != Stack::Fulmar,
            ours => {
                self.stack != Stack::Kernel
                    && (self.device.is_empty() || self.device.contains(ours))
            }
        };
        let bytes: &[usize] = if self.quick { &BYTES[..1] } else { &BYTES };
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Options {
            devices: Device::ALL.into_iter().filter(wanted).collect(),
            bytes: if self.bytes.is_empty() { bytes.to_vec() } else { self.bytes.clone() },
            threads: self.threads.unwrap_or(cpus.min(2)),
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
        args: UdpArgs,
    }

    fn options(line: &str) -> Result<Options, String> {
        let words = std::iter::once("udp").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|l| l.args.options()).map_err(|e| e.to_string())
    }

    #[test]
    fn everything_is_measured_unless_a_part_is_asked_for() {
        let all = options("").unwrap();
        assert_eq!((all.devices, all.bytes), (Device::ALL.to_vec(), BYTES.to_vec()));
        let part = options("--device tap --bytes 100 --threads 3 --stack fulmar").unwrap();
        assert_eq!((part.devices, part.bytes, part.threads), (vec![Device::Tap], vec![100], 3));
        assert_eq!(options("--stack kernel").unwrap().devices, [Device::Veth]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_what_can() {
        assert!(options("--bytes 0").unwrap_err().contains("1 to 1472"));
        assert!(options("--threads 65").unwrap_err().contains("1 to 64"));
        assert!(options("--device veth").unwrap_err().contains("sim, tap"));
        assert!(options("--runs 0").is_err());
    }

    #[test]
    fn quick_stays_under_twenty_seconds() {
        assert!(options("--quick").unwrap().budget < Duration::from_secs(20));
        assert!(options("--quick --seconds 5").is_err());
    }
}
