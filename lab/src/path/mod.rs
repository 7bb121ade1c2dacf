//! Where a packet's nanoseconds go, by ending its path at one stage after the other.
//!
//! A stack with exit points ([`crate::exit`]), which only the laboratory has, returns at a stage as if everything
//! behind it were done, and undoes what it has built so far. A loop of such calls costs what the path costs up to that
//! stage; the difference to the stage before is the cost of that step. The published measurement did this to a kernel
//! (Rizzo 2012). What undoing costs (a buffer that is freed) is part of the figure, as it was there.
//!
//! The device is simulated and its hardware runs inside of the calls; its time is measured by itself
//! and taken off. [`kernel`] asks the machine's own kernel for as many depths as it can be asked for.

pub mod kernel;
mod measured;
mod recv;
mod send;
pub mod show;
mod stack;

use std::io;
use std::time::Duration;

use crate::harness::Progress;
use fulmar::base::Stage;
use fulmar_stack::socket::sosend::SMALL_WRITE_BYTES;

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

/// What is copied under the lock has no stages of its own for that.
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

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which path.
    pub path: Path,
    /// Payload of a datagram, or bytes of a write.
    pub bytes: usize,
    /// Threads at most, each with a stack and a device of its own; every number from 1 on is measured.
    pub threads: usize,
    /// Packets per second that each thread sends at most, evenly: one by one, or as many together as are due
    /// in 50 us; 0 for as many as it can. The time in between is in no figure.
    pub rate_pps: u64,
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
            rate_pps: 0,
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
    /// What the simulated hardware took of it.
    pub hardware: Spread,
}

/// A variation of the whole path, one thing left out or added.
#[derive(Clone, Debug)]
pub struct Ablation {
    /// What is different.
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
    /// Variations.
    pub ablations: Vec<Ablation>,
    /// The sum of the ledger's stages over the measured total, minus one, without its sign: one per
    /// run of a stack that keeps an account.
    pub ledger: Vec<f64>,
}

/// Measures.
///
/// # Errors
/// Too many open descriptors; a connection that fails.
pub fn run(options: &Options) -> io::Result<Found> {
    let mut by_threads = Vec::new();
    let mut syscall = Spread::default();
    let most = options.threads.max(1);
    let (progress, steps) = (Progress::new(most + 2), most + 2);
    for threads in 1..=most {
        let what = format!("{}: {threads} of {most} threads", options.path.name());
        progress.show(what, threads - 1, steps);
        by_threads.push(measured::with_threads(options, threads, &mut syscall)?);
    }
    let (ablations, ledger) = match options.path {
        Path::UdpSend => {
            progress.show("without single steps", most, steps);
            let ablations = send::ablations(options)?;
            progress.show("the account of the stages", most + 1, steps);
            (ablations, send::ledger(options)?)
        }
        _ => (Vec::new(), Vec::new()),
    };
    let bytes = match options.path {
        // The peer decides.
        Path::TcpRecv => recv::SEGMENT_BYTES as usize,
        _ => options.bytes,
    };
    Ok(Found { path: options.path, bytes, by_threads, syscall, ablations, ledger })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times are not judged; that every stage was reached and the path has an end is behaviour.
    #[test]
    fn every_path_ends_at_each_of_its_stages() {
        for path in Path::ALL {
            for bytes in [18, if path == Path::TcpSend { 64 << 10 } else { 18 }] {
                let slice = Duration::from_millis(1);
                let options = Options { path, bytes, runs: 1, slice, ..Options::default() };
                let found = run(&options).unwrap_or_else(|e| panic!("{}: {e}", path.name()));
                let one = &found.by_threads[0];
                assert_eq!(one.stages.len(), path.stages(bytes).len());
                for (stage, spread) in path.stages(bytes).iter().zip(&one.stages) {
                    assert!(spread.median() >= 0.0, "{} {stage:?}: {spread:?}", path.name());
                }
                assert!(one.whole.median() > 0.0);
            }
        }
    }

    /// The wait is outside of every batch by its type; here it is there at all. A slow machine sends
    /// fewer.
    #[test]
    fn at_a_rate_no_more_datagrams_go_than_are_due_in_a_slice() {
        let options = Options { rate_pps: 10_000, ..Options::default() };
        let mut datagrams = send::Datagrams::new(&options).unwrap();
        let slice = Duration::from_millis(10);
        let timed = measured::Driven::run(&mut datagrams, Some(Stage::SendCall), slice).unwrap();
        assert!((1..=101).contains(&timed.packets), "{timed:?}");
    }

    #[test]
    fn datagrams_go_one_by_one_unless_the_rate_leaves_no_time_between_them() {
        let bursts = [1, 20_000, 100_000, 1_000_000, 100_000_000].map(send::burst_at);
        assert_eq!(bursts, [1, 1, 5, 50, 64]);
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
