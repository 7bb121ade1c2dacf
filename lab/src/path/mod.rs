//! Where a packet's nanoseconds go, stage by stage.
//!
//! The account of the stack ([`fulmar::stat::ledger`]) gives the cost of each stage; the figure of a stage is the sum up to
//! it, as in the published measurement (Rizzo 2012), which ended a kernel's path at one point after the other. What
//! the account itself costs is measured by it and taken off. The whole path is measured with the account off.
//!
//! The device is simulated and its hardware runs inside the calls. Its time is measured separately and subtracted.
//! [`kernel`] asks the machine's own kernel for the depths at which its calls fail.

pub mod kernel;
mod loads;
mod measured;
pub mod show;

use std::io;
use std::time::Duration;

use crate::harness::Progress;
use fulmar::stat::ledger::Stage;
use fulmar_stack::socket::sosend::SMALL_WRITE_BYTES;
use loads::{Rig, Sends};
use measured::Load as _;

/// A path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// A datagram out.
    UdpSend,
    /// A datagram in.
    UdpRecv,
    /// A write out.
    TcpSend,
    /// A segment in, and the read of it.
    TcpRecv,
}

impl Path {
    /// All.
    pub const ALL: [Path; 4] = [Path::UdpSend, Path::UdpRecv, Path::TcpSend, Path::TcpRecv];

    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Path::UdpSend => "udp-send",
            Path::UdpRecv => "udp-recv",
            Path::TcpSend => "tcp-send",
            Path::TcpRecv => "tcp-recv",
        }
    }

    /// The stages at which it can end with `bytes` of payload, in the order in which it passes
    /// them.
    pub const fn stages(self, bytes: usize) -> &'static [Stage] {
        match self {
            Path::TcpSend if bytes > SMALL_WRITE_BYTES => LARGE_WRITE,
            Path::TcpSend => SMALL_WRITE,
            Path::UdpSend => UDP_SEND,
            Path::UdpRecv => UDP_RECV,
            Path::TcpRecv => TCP_RECV,
        }
    }
}

const LARGE_WRITE: &[Stage] = &[
    Stage::SendCall,
    Stage::Locked,
    Stage::SendChecked,
    Stage::SendReserved,
    Stage::SendCopied,
    Stage::SendCommitted,
    Stage::TransportOutput,
    Stage::RouteFound,
    Stage::IpOutput,
    Stage::EtherOutput,
    Stage::BurstQueued,
    Stage::DeviceTaken,
];

/// Bytes copied under the lock have no separate stage for the copy.
const SMALL_WRITE: &[Stage] = &[
    Stage::SendCall,
    Stage::Locked,
    Stage::SendChecked,
    Stage::SendCommitted,
    Stage::TransportOutput,
    Stage::RouteFound,
    Stage::IpOutput,
    Stage::EtherOutput,
    Stage::BurstQueued,
    Stage::DeviceTaken,
];

const UDP_SEND: &[Stage] = &[
    Stage::SendCall,
    Stage::Locked,
    Stage::SendChecked,
    Stage::PathChosen,
    Stage::SendReserved,
    Stage::SendCopied,
    Stage::TransportOutput,
    Stage::RouteFound,
    Stage::IpOutput,
    Stage::EtherOutput,
    Stage::BurstQueued,
    Stage::DeviceTaken,
];

const UDP_RECV: &[Stage] = &[
    Stage::DeviceReceived,
    Stage::EtherInput,
    Stage::IpInput,
    Stage::Demultiplexed,
    Stage::TransportInput,
    Stage::ReceiveTaken,
    Stage::ReceiveCopied,
];

const TCP_RECV: &[Stage] = &[
    Stage::DeviceReceived,
    Stage::EtherInput,
    Stage::IpInput,
    Stage::Demultiplexed,
    Stage::TransportInput,
    Stage::ReceiveTaken,
    Stage::ReceiveCopied,
    Stage::ReceiveFreed,
];

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which path.
    pub path: Path,
    /// Payload of a datagram, or bytes of a write.
    pub bytes: usize,
    /// Threads at most, each with a stack and a device of its own; every number from 1 on is measured.
    pub threads: usize,
    /// Times that every stage is measured.
    pub runs: usize,
    /// How long once.
    pub slice: Duration,
}

impl Default for Options {
    /// 18-byte datagrams, one thread, five runs of 30 ms, as published but for the time.
    fn default() -> Options {
        Options {
            path: Path::UdpSend,
            bytes: 18,
            threads: 1,
            runs: 5,
            slice: Duration::from_millis(30),
        }
    }
}

/// The least, the middle and the most of several runs, in ns per packet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spread {
    /// Every run, in the order of measuring.
    pub runs: Vec<f64>,
}

impl Spread {
    /// The smallest.
    pub fn min(&self) -> f64 {
        self.runs.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The largest.
    pub fn max(&self) -> f64 {
        self.runs.iter().copied().fold(0.0, f64::max)
    }

    /// The middle one.
    pub fn median(&self) -> f64 {
        crate::stats::Estimate::of(&self.runs).map_or(f64::NAN, |e| e.median)
    }
}

/// How one number of threads did.
#[derive(Clone, Debug)]
pub struct Threads {
    /// How many.
    pub threads: usize,
    /// Per stage of the path, in its order.
    pub stages: Vec<Spread>,
    /// The path to its end, handed over and completed.
    pub whole: Spread,
    /// Time of the simulated hardware, included in it.
    pub hardware: Spread,
}

/// A variant of the whole path, in which one thing differs.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The difference to the usual path.
    pub what: &'static str,
    /// The path with it.
    pub with: Spread,
    /// The unchanged path, measured in turn with it.
    pub without: Spread,
}

/// Everything that was measured of a path.
#[derive(Clone, Debug)]
pub struct Found {
    /// The path.
    pub path: Path,
    /// Payload.
    pub bytes: usize,
    /// By number of threads, from 1 on.
    pub by_threads: Vec<Threads>,
    /// One bare system call, measured in turn with the rest.
    pub syscall: Spread,
    /// Variants of a datagram's path out.
    pub variants: Vec<Variant>,
    /// How far the sum of the account is from the CPU time of the thread, as a share of it: one per run.
    pub ledger: Vec<f64>,
}

/// Measures.
///
/// # Errors
/// Too many open descriptors; a connection that fails.
pub fn run(options: &Options) -> io::Result<Found> {
    let (mut by_threads, mut ledger, mut syscall) = (Vec::new(), Vec::new(), Spread::default());
    let most = options.threads.max(1);
    let (progress, steps) = (Progress::new(most + 1), most + 1);
    for threads in 1..=most {
        let what = format!("{}: {threads} of {most} threads", options.path.name());
        progress.show(what, threads - 1, steps);
        by_threads.push(measured::with_threads(options, threads, (&mut syscall, &mut ledger))?);
    }
    let mut variants = Vec::new();
    if options.path == Path::UdpSend {
        progress.show("variants", most, steps);
        variants = self::variants(options)?;
    }
    let bytes = match options.path {
        // The peer decides.
        Path::TcpRecv => loads::SEGMENT_BYTES as usize,
        _ => options.bytes,
    };
    Ok(Found { path: options.path, bytes, by_threads, syscall, variants, ledger })
}

/// Variants of a datagram's path, each measured in turn with the usual one.
fn variants(options: &Options) -> io::Result<Vec<Variant>> {
    let usual = Rig::of(options);
    let all = [
        ("without payload (nothing to copy)", Rig { bytes: 0, ..usual }),
        ("every call names its destination (not connected)", Rig { names_peer: true, ..usual }),
        ("with 1000 more routes in the table", Rig { routes: 1000, ..usual }),
    ];
    let measure = |(what, rig): (&'static str, Rig)| {
        let (mut plain, mut other) = (Sends::new(&usual)?, Sends::new(&rig)?);
        let (mut with, mut without) = (Spread::default(), Spread::default());
        for run in 0..=options.runs {
            let pair = (plain.run(options.slice)?, other.run(options.slice)?);
            // The first warms caches.
            if run > 0 {
                without.runs.push(pair.0.ns_per_packet());
                with.runs.push(pair.1.ns_per_packet());
            }
        }
        Ok(Variant { what, with, without })
    };
    all.into_iter().map(measure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times are not judged. A stage that the account did not see would cost as much as the one before it.
    #[test]
    fn the_account_sees_every_stage_of_every_path() {
        for path in Path::ALL {
            for bytes in [18, if path == Path::TcpSend { 64 << 10 } else { 18 }] {
                let slice = Duration::from_millis(60);
                let options = Options { path, bytes, runs: 1, slice, ..Options::default() };
                let mut load = loads::of(&options).unwrap();
                load.stack().set_account(Some(1));
                load.run(slice).unwrap();
                let account = load.stack().account().unwrap().unwrap();
                for stage in path.stages(bytes) {
                    let passed = account.stages.iter().any(|s| s.stage == *stage);
                    assert!(passed, "{} {stage:?}: {account:?}", path.name());
                }
            }
        }
    }

    #[test]
    fn a_stage_costs_at_least_as_much_as_the_one_before_it() {
        for path in Path::ALL {
            let slice = Duration::from_millis(1);
            let found = run(&Options { path, runs: 1, slice, ..Options::default() });
            let found = found.unwrap_or_else(|e| panic!("{}: {e}", path.name()));
            let one = &found.by_threads[0];
            assert_eq!(one.stages.len(), path.stages(found.bytes).len());
            assert!(one.stages.is_sorted_by(|a, b| a.median() <= b.median()), "{one:?}");
            assert!(one.whole.median() > 0.0);
        }
    }

    #[test]
    fn the_stages_of_a_path_are_in_the_order_of_the_list() {
        for (path, bytes) in Path::ALL.iter().flat_map(|p| [(p, 18), (p, 64 << 10)]) {
            let stages = path.stages(bytes);
            assert!(stages.windows(2).all(|two| (two[0] as u8) < two[1] as u8));
        }
    }

    #[test]
    fn several_threads_have_a_stack_each() {
        let slice = Duration::from_millis(1);
        let options = Options { threads: 2, runs: 1, slice, ..Options::default() };
        let found = run(&options).unwrap();
        assert_eq!(found.by_threads.len(), 2);
        assert!(found.syscall.min() > 0.0);
    }
}
