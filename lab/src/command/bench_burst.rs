//! The options of `fulmar-lab bench burst`.

use crate::stream::Stack;
use fulmar_cli::bounds::{runs, within};
use fulmar_lab::burst::{BURSTS, Device, FRAME_BYTES, Options};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for the rounds without --quick or --seconds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick: what users wait for stays under 20 s, opening the devices included.
const QUICK: Duration = Duration::from_secs(12);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 200;
/// The longest frame that every device takes and no device cuts.
const MOST_BYTES: usize = 1514;
/// Ethernet, IPv4 and UDP headers of the kernel's datagrams, and one byte.
const LEAST_BYTES: usize = 43;

/// What a frame costs against the number of frames that cross together
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench burst [OPTIONS]",
    after_help = "Ways: bursts (what the device does with a vector; over TAP io_uring where that is
cheaper), writev (TAP, one frame per call), old (one frame per crossing, header
and cluster from the general allocator), kernel (sendmmsg and recvmmsg on veth).
It makes its own namespaces and leaves nothing behind."
)]
pub struct BurstArgs {
    /// Be done in under 20 seconds: small frames, bursts of 1, 8, 64 and 256 (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for the rounds [default: 60]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// Over which devices [default: all]
    #[arg(long, value_parser = device, value_delimiter = ',', value_name = "tap|packet|sim|...")]
    device: Vec<Device>,
    /// Bytes of a frame, Ethernet header included [default: 64, 1514]
    #[arg(long, value_parser = within(LEAST_BYTES, MOST_BYTES), value_delimiter = ',', value_name = "BYTES")]
    bytes: Vec<usize>,
    /// Frames per burst, 1 to 256 [default: 1, 2, 4 and so on to 256]
    #[arg(long, value_parser = within(1usize, 256), value_delimiter = ',', value_name = "FRAMES")]
    burst: Vec<usize>,
    /// Whose frames
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
    let names: Vec<&str> = Device::ALL.iter().map(|d| d.name()).collect();
    let found = Device::ALL.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| format!("`{text}` is not one of {}", names.join(", ")))
}

fn or(given: &[usize], default: &[usize]) -> Vec<usize> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

impl BurstArgs {
    /// What to measure.
    pub fn options(&self) -> Options {
        let (bytes, bursts): (&[usize], &[usize]) =
            if self.quick { (&[64], &[1, 8, 64, 256]) } else { (&FRAME_BYTES, &BURSTS) };
        Options {
            devices: if self.device.is_empty() {
                Device::ALL.to_vec()
            } else {
                self.device.clone()
            },
            frame_bytes: or(&self.bytes, bytes),
            bursts: or(&self.burst, bursts),
            fulmar: self.stack != Stack::Kernel,
            kernel: self.stack != Stack::Fulmar,
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
        args: BurstArgs,
    }

    fn options(line: &str) -> Result<Options, String> {
        let words = std::iter::once("burst").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|l| l.args.options()).map_err(|e| e.to_string())
    }

    #[test]
    fn everything_is_measured_unless_a_part_is_asked_for() {
        let all = options("").unwrap();
        assert_eq!((all.devices, all.frame_bytes), (Device::ALL.to_vec(), vec![64, 1514]));
        assert_eq!(all.bursts, BURSTS);
        let part = options("--device tap,link --bytes 200 --burst 1,64 --stack fulmar").unwrap();
        assert_eq!(part.devices, [Device::Tap, Device::Link]);
        assert_eq!((part.frame_bytes, part.bursts), (vec![200], vec![1, 64]));
        assert!(part.fulmar && !part.kernel);
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_what_can() {
        assert!(options("--burst 257").unwrap_err().contains("1 to 256"));
        assert!(options("--bytes 9000").unwrap_err().contains("43 to 1514"));
        assert!(options("--device ether").unwrap_err().contains("tap, packet, sim, shm, link"));
    }

    #[test]
    fn quick_stays_under_twenty_seconds() {
        assert!(options("--quick").unwrap().budget < Duration::from_secs(20));
        assert!(options("--quick --seconds 5").is_err());
    }
}
