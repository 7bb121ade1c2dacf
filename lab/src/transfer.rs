//! A transfer of bytes between two ends, and the figures that benches take from it.
//!
//! To add a scenario over a device, open the device on a [`crate::topology`], and in the closure start a
//! [`crate::peer::Peer`] in the topology's namespace, move bytes on [`crate::on_pinned_thread`] while
//! reading [`crate::cpu::thread_cpu`] around the part after `warm_bytes`, and join both [`Report`]s with
//! [`Transfer::of_ends`]; `floor::Testbed::stream` is the model.

use crate::cpu::Placement;
use crate::harness::report::{Chart, Column, Shape, label, number};
use crate::harness::{Labels, MACHINE, Ratio, Row, SOAKER, Sample, Scenario, label_of};
use crate::peer::Report;
use std::io;
use std::time::Duration;

/// CPU of both ends per KB, without simulated hardware: the figure for comparing stacks.
pub const BOTH: &str = "both_ends_cpu_ns_per_kb";
/// CPU of the end under test per KB.
pub const THIS_END: &str = "this_end_cpu_ns_per_kb";
/// CPU of the other end per KB.
pub const PEER: &str = "peer_cpu_ns_per_kb";
/// CPU of the thread under test per KB (what `time` shows), or of its end where only that is known.
pub const THREAD: &str = "thread_cpu_ns_per_kb";
/// Time of a simulated device's hardware per KB, which ran inside the calls of the end under test.
pub const HARDWARE: &str = "hardware_ns_per_kb";
/// As the end that finishes last saw it.
pub const GBPS: &str = "throughput_gbps";
/// Service demand as netperf has it: busy time of all CPUs per KB.
pub const DEMAND: &str = "service_demand_us_per_kb";

/// One run between two ends.
#[derive(Clone, Debug, Default)]
pub struct Transfer {
    /// The end under test.
    pub near: Report,
    /// The other end.
    pub far: Report,
    /// Bytes moved before either end started to measure.
    pub warm_bytes: u64,
    /// Time of a simulated device's hardware, which ran inside the near end's account and is not
    /// the near end's cost.
    pub hardware: Duration,
    /// What was counted, by name: over the whole run, warm-up included, unless its source says
    /// otherwise.
    pub counts: Vec<(&'static str, u64)>,
}

/// Counts over other counts: a key in JSON, and which counts.
const QUOTIENTS: [(&str, &str, &str); 14] = [
    ("output_calls_per_write", "send_outputs", "calls"),
    ("packets_per_output", "send_packets", "send_outputs"),
    ("frames_per_crossing", "tx_frames", "tx_crossings"),
    ("mbufs_per_write", "send_mbufs", "calls"),
    ("copies_per_byte", "all_copied_bytes", "call_bytes"),
    ("bytes_per_read", "call_bytes", "reads_made"),
    ("bytes_per_wait", "call_bytes", "waits"),
    ("frames_per_rx_crossing", "rx_frames", "rx_crossings"),
    ("bytes_per_rx_frame", "call_bytes", "rx_frames"),
    ("placed_share", "placed_bytes", "call_bytes"),
    ("placement_hit_rate", "whole_placed_bytes", "whole_bytes"),
    ("whole_copies_per_byte", "whole_copied_bytes", "whole_bytes"),
    ("slow_allocations_per_mb", "slow_allocations", "call_mb"),
    ("heap_allocations_per_packet", "heap_allocations", "packets"),
];

impl Transfer {
    /// A transfer between two ends.
    pub fn of_ends(near: Report, far: Report, warm_bytes: u64) -> Transfer {
        Transfer { near, far, warm_bytes, ..Transfer::default() }
    }

    /// Adds a count.
    #[must_use]
    pub fn count(mut self, name: &'static str, n: u64) -> Transfer {
        self.counts.push((name, n));
        self
    }

    fn known(&self, name: &str) -> Option<u64> {
        self.counts.iter().find(|(n, _)| *n == name).map(|(_, count)| *count)
    }

    /// The count of that name, 0 if there is none.
    pub fn counted(&self, name: &str) -> u64 {
        self.known(name).unwrap_or(0)
    }

    /// One count over another; not a number where one of them is not counted.
    pub fn quotient(&self, above: &str, below: &str) -> f64 {
        let both = self.known(above).zip(self.known(below));
        both.map_or(f64::NAN, |(above, below)| above as f64 / below as f64)
    }

    /// Bytes moved in the whole run.
    pub fn all_bytes(&self) -> u64 {
        self.near.bytes + self.warm_bytes
    }

    /// The figures that a bench keeps. An end without an account has no value, since it is not idle.
    pub fn sample(&self) -> Sample {
        let Transfer { near, far, hardware, .. } = self;
        let positive = |ns: f64| if ns > 0.0 { ns } else { f64::NAN };
        let of = |time: Duration| positive(near.ns_per_kb(time));
        let this_end = near.ns_per_kb(near.cpu.saturating_sub(*hardware));
        let slower = near.elapsed.max(far.elapsed).as_nanos().max(1) as f64;
        let thread = if near.thread.is_zero() { this_end } else { of(near.thread) };
        let machine = of(near.machine.saturating_sub(*hardware));
        let mut sample = Sample::of(BOTH, this_end + far.cpu_ns_per_kb())
            .with(GBPS, near.bytes.min(far.bytes) as f64 * 8.0 / slower)
            .with(THREAD, thread)
            .with(THIS_END, this_end)
            .with(HARDWARE, of(*hardware))
            .with(PEER, positive(far.cpu_ns_per_kb()))
            .with(MACHINE, machine)
            .with(DEMAND, machine / 1000.0);
        for (key, above, below) in QUOTIENTS {
            sample = sample.with(key, self.quotient(above, below));
        }
        if let Some(slow) = self.known("slow_allocations") {
            sample = sample.with("slow_allocations", slow as f64);
        }
        sample.counts.clone_from(&self.counts);
        if let Some(user) = near.user {
            let ns = |time: Duration| time.as_nanos() as u64;
            sample = sample.count("user_cpu_ns", ns(user)).count("cpu_ns", ns(near.cpu));
        }
        sample.bytes = self.all_bytes();
        sample
    }
}

/// A scenario that runs a transfer.
pub fn scenario<'a>(
    name: impl Into<String>,
    title: impl Into<String>,
    placement: Placement,
    mut run: impl FnMut(Duration) -> io::Result<Transfer> + 'a,
) -> Scenario<'a> {
    Scenario::new(name, title, move |time| Ok(run(time)?.sample()))
        .in_table("Limits, floors and bulk TCP")
        .label("placement", placement.name())
}

/// Which end of a connection is under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The one that sends.
    Sends,
    /// The one that receives.
    Receives,
}

/// Labels of a scenario of `bench send`, `sendfile` or `recv`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cell {
    /// Which end is under test.
    pub side: Side,
    /// The device's name: `sim`, `tap`, `shm`, `veth`, ...
    pub device: &'static str,
    /// The way of sending or receiving: `old`, `write`, `posted`, ...
    pub method: &'static str,
    /// Bytes per write (or per sendfile call); of a receiver, bytes of each of its buffers.
    pub write_bytes: usize,
    /// Whether TCP makes super-segments (TSO); of a receiver, whether its device gets them.
    pub super_segments: bool,
    /// Where the bytes come from: `hot`, `cold`, `none`; of a receiver what becomes of them, and how
    /// they come: `touched`, `untouched`, `bursty`.
    pub source: &'static str,
}

/// Devices whose rows share a table, so that the kernel's rows are in the table of the rows that they are compared
/// with.
const TABLES: [(&str, &[&str]); 5] = [
    ("Simulated device (modelled peer; no kernel)", &["sim"]),
    ("TAP to a kernel peer, compared with the kernel over veth", &["tap", "veth"]),
    ("AF_PACKET to a kernel peer, compared with the kernel over veth", &["packet"]),
    ("Two processes on one host", &["shm", "loopback", "unix"]),
    ("Two stacks in one process (link)", &["link"]),
];

impl Cell {
    /// The labels of its scenario.
    pub fn labels(&self) -> Labels {
        let size = match self.side {
            Side::Sends => "write_bytes",
            Side::Receives => "buffer_bytes",
        };
        vec![
            ("device", self.device.into()),
            ("method", self.method.into()),
            (size, self.write_bytes.into()),
            ("super_segments", self.super_segments.into()),
            ("source", self.source.into()),
        ]
    }

    /// Gives a scenario this place in the tables.
    pub fn of<'a>(&self, mut scenario: Scenario<'a>) -> Scenario<'a> {
        let kib = self.write_bytes >> 10;
        let (size, offload) = match self.side {
            Side::Sends => (format!("{kib} KiB"), "super-segments"),
            Side::Receives => (format!("2 x {kib} KiB"), "receive aggregation"),
        };
        let table = TABLES.iter().find(|(_, devices)| devices.contains(&self.device));
        let state = if self.super_segments { "on" } else { "off" };
        scenario.labels.extend(self.labels());
        let table = format!("{}; {offload} {state}", table.map_or(self.device, |t| t.0));
        scenario.label("size", size).in_table(table)
    }

    /// The row of the scenario of this place.
    pub fn row<'r>(&self, rows: &'r [Row]) -> Option<&'r Row> {
        rows.iter().find(|r| r.is(&self.labels()))
    }

    /// Whether a scenario has this place.
    pub fn is(&self, scenario: &Scenario<'_>) -> bool {
        self.labels().iter().all(|(key, value)| label_of(&scenario.labels, key) == Some(value))
    }
}

const PLACE: [Column; 4] = [
    label("size", "size"),
    label("source", "bytes"),
    label("title", "way"),
    label("placement", "ends on"),
];
const RATE: Column = number(GBPS, "Gb/s", 1, "");
const SHARES: [Column; 6] = [
    number(THREAD, "thread\nns/KB", 0, "CPU time of the thread under test per KB (1024 bytes)"),
    number(HARDWARE, "hardware\nns/KB", 0, "time of the simulated device, in no other column"),
    number(THIS_END, "this end\nns/KB", 0, "CPU of the end under test"),
    number(PEER, "other end\nns/KB", 0, "CPU of the other end's process"),
    number(BOTH, "both ends\nns/KB", 0, "CPU of both ends").with_interval(),
    number(MACHINE, "machine\nns/KB", 0, "busy time of all CPUs"),
];
const SOAKED: Column =
    number(SOAKER, "soaker\nns/KB", 0, "measured by spinners of the lowest priority");
const RUNS: Column = number("runs", "runs", 0, "");
const CHART: Chart =
    Chart { unit: "ns per KB", parts: &[THIS_END, PEER], group: &["size"], x: None };

const LEGEND: &str = "\
ns/KB     CPU time per 1024 bytes; smaller is better. This end is the thread (or, kernel to
          kernel, the process) under test, the other end the peer's process. Work that one end
          does inside its system calls for the other is charged to the caller.
hardware  time of the simulated device, which runs inside the calls of the end under test and is not
          in the other columns. The device places and aggregates; it writes no payload (as DMA does).
machine   busy time of all CPUs in the measured interval, from /proc/stat, which counts in ticks: coarse in
          short benches. The fifth of the rounds with the highest and the lowest cost are omitted.
soaker    the same, measured by spinners of the lowest priority in a separate run.
interval  contains the true median with 95 % confidence (order statistics); for fewer than six
          runs the minimum and the maximum.
figures   ratio of two variants, measured alternately in the same run; median of the pairs.";

/// Tables of `bench stream`.
pub const STREAM: Shape = Shape {
    name: "stream",
    title: "Bulk TCP, both directions",
    lead: "",
    columns: &[PLACE[2], PLACE[3], RATE, SHARES[2], SHARES[3], SHARES[4], SHARES[5], SOAKED, RUNS],
    across: None,
    chart: Some(Chart { group: &["placement"], ..CHART }),
    legend: LEGEND,
};

/// Tables of `bench send` and `bench sendfile`.
pub const SEND: Shape = Shape {
    name: "send",
    title: "Variants of sending",
    lead: "Size: bytes per call (write or sendfile). Hot: always the same bytes; cold: consecutive parts of a file \
        of 512 MiB. Outputs: passes of TCP's output made by the writes (ACKs cause others). Packets: packets of MTU \
        size sent by such a pass. Crossings: calls into the device, whose frames may be super-segments. Copies: \
        copies on the sending side before the device, the page cache included.",
    columns: &[
        PLACE[0],
        PLACE[1],
        PLACE[2],
        PLACE[3],
        RATE,
        SHARES[0].with_interval(),
        SHARES[1],
        SHARES[3],
        SHARES[4],
        number(DEMAND, "machine\nµs/KB", 3, "service demand as netperf has it, both ends")
            .with_interval(),
        SOAKED,
        RUNS,
        number("output_calls_per_write", "outputs\nper write", 2, ""),
        number("packets_per_output", "packets\nper output", 1, ""),
        number("frames_per_crossing", "frames per\ncrossing", 2, ""),
        number("mbufs_per_write", "mbufs\nper write", 1, ""),
        number("copies_per_byte", "copies\nper byte", 2, ""),
    ],
    across: None,
    chart: Some(CHART),
    legend: LEGEND,
};

/// Tables of `bench recv`.
pub const RECV: Shape = Shape {
    name: "recv",
    title: "Variants of receiving",
    lead: "Size: the alternating buffers of the reader. Touched: the reader reads a word of every cache line; \
        bursty: touched, and the sender pauses for a millisecond after every 256 KiB. A wait: a thread of the \
        receiver gave up its CPU. Crossings: calls into the device to receive, including calls without frames; \
        frames may be aggregates. Copies: copies by fulmar in user space, the reader's own included. Placed: bytes \
        that the device wrote into the reader's buffer, which are not copied again. Over tap this is the kernel's \
        own copy, which every variant has there; over shm it is the one copy from the peer's memory, made by fulmar \
        and counted under copies. Slow: buffers allocated outside the magazines. Stock: the historical variant, \
        described in the help of this command.",
    columns: &[
        PLACE[0],
        PLACE[1],
        PLACE[2],
        PLACE[3],
        RATE,
        SHARES[0],
        SHARES[1],
        SHARES[2],
        SHARES[3],
        SHARES[4],
        SHARES[5],
        SOAKED,
        RUNS,
        number("bytes_per_read", "bytes per\nread", 0, ""),
        number("bytes_per_wait", "bytes per\nwait", 0, ""),
        number("bytes_per_rx_frame", "bytes per\nframe", 0, ""),
        number("frames_per_rx_crossing", "frames per\ncrossing", 2, ""),
        number("copies_per_byte", "copies\nper byte", 2, ""),
        number("placed_share", "placed\nshare", 3, ""),
        number("slow_allocations_per_mb", "slow buffers\nper MB", 2, ""),
    ],
    across: None,
    chart: Some(CHART),
    legend: LEGEND,
};

/// The ratios whose scenarios are measured.
pub fn measured(ratios: Vec<Ratio>, scenarios: &[Scenario<'_>]) -> Vec<Ratio> {
    ratios.into_iter().filter(|r| r.is_measured(scenarios)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(cpu: u64, bytes: u64) -> Report {
        let elapsed = Duration::from_millis(1);
        Report { bytes, elapsed, cpu: Duration::from_nanos(cpu), ..Report::default() }
    }

    #[test]
    fn costs_are_per_kb_and_simulated_hardware_is_apart() {
        let mut transfer = Transfer::of_ends(end(9000, 8192), end(800, 8192), 100);
        transfer.hardware = Duration::from_nanos(1000);
        let sample = transfer.count("send_outputs", 64).count("calls", 2).sample();
        let of = |key| sample.value(key);
        assert_eq!((of(THIS_END), of(PEER), of(BOTH)), (Some(1000.0), Some(100.0), Some(1100.0)));
        assert_eq!((of(HARDWARE), of(THREAD)), (Some(125.0), Some(1000.0)));
        assert_eq!((of("output_calls_per_write"), of("mbufs_per_write")), (Some(32.0), None));
        assert_eq!((sample.values[0].0, sample.bytes), (BOTH, 8292));
    }

    #[test]
    fn an_end_without_an_account_has_no_value() {
        let sample = Transfer::of_ends(end(8000, 8192), end(0, 8192), 0).sample();
        assert_eq!((sample.value(PEER), sample.value(MACHINE)), (None, None));
    }

    #[test]
    fn the_kernel_stands_in_the_table_of_tap_and_a_cell_is_found_again() {
        let cell = Cell {
            side: Side::Receives,
            device: "veth",
            method: "kernel_read",
            write_bytes: 64 << 10,
            super_segments: true,
            source: "bursty",
        };
        let run = |_| Ok(Transfer::default());
        let made = cell.of(scenario("x", "y", Placement::SameCpu, run));
        assert!(made.table.starts_with("TAP") && made.table.ends_with("aggregation on"));
        assert_eq!(made.word("size"), Some("2 x 64 KiB"));
        assert!(cell.is(&made) && !Cell { super_segments: false, ..cell }.is(&made));
        let row = Row { labels: made.labels, ..Row::default() };
        assert!(cell.row(&[row]).is_some());
    }

    #[test]
    fn bytes_placed_over_shm_are_not_reported_as_free_of_copies() {
        assert!(
            !RECV.lead.contains("without a copy") && RECV.lead.contains("counted under copies")
        );
    }
}
