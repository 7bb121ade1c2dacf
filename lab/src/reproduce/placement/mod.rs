//! The table of direct data placement at 40 Gbit/s: CPU of the receiving host, stock, offloaded and
//! placed, into two buffers of 64 KiB and of 1 MiB by asynchronous reads, beside `read`.
//!
//! It was printed in percent of a CPU at the line's rate. Here nothing limits the rate, so a cell is
//! what the cost that was measured would come to at that rate: ns per KB times KB per second.

mod run;
mod show;

pub use run::run;
pub use show::report;

use super::SystemUnderTest;
use super::verdict::{self, Verdict};
use crate::harness::{Outcome, Row};
use crate::stats::Estimate;
use crate::transfer::{BOTH, Cell, GBPS, HARDWARE, Side, THIS_END};

/// As on the command line.
pub const NAME: &str = "placement";
/// One sentence.
pub const TITLE: &str = "receiving into buffers that were posted before, placed by the device";
/// The authors, the work and its date.
pub const SOURCE: &str = "TOE and direct data placement with aio_read in FreeBSD, May 2016: netperf, \
                          TCP stream, the receiver's two buffers in turn; CPU as read off, \u{b1} a tenth";
/// The machines then.
pub const SETUP: &str = "Xeon E5-1620 v3 (3.5 GHz), a 40 Gbit/s adapter that does TCP in hardware \
                         (TOE) and places payload (DDP)";
/// What is different here, before any figure.
pub const DIFFERS: &str = "Then the line was the limit and CPU was what it took; here nothing limits the \
                           rate, so each cell is the cost per KB that was measured, at 40 Gbit/s. Then \
                           offloaded meant TCP in the card, which the host did not see at all; here it means \
                           aggregation: the host still runs TCP, on frames of 64 KiB. The host does not read the \
                           bytes, as netperf does not.";

/// Bits per second of the published line.
const RATE_BPS: f64 = 40e9;

/// What the device does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Offload {
    /// Packet by packet.
    Stock,
    /// It aggregates; the host copies.
    Offloaded,
    /// It also puts payload into posted buffers.
    Placed,
}

impl Offload {
    /// All, in the order of the table.
    pub const ALL: [Offload; 3] = [Offload::Stock, Offload::Offloaded, Offload::Placed];

    /// The title in tables.
    pub const fn title(self) -> &'static str {
        match self {
            Offload::Stock => "stock",
            Offload::Offloaded => "offloaded",
            Offload::Placed => "placed",
        }
    }
}

/// How the program asks for bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// Buffers are posted before their bytes come.
    Ahead,
    /// `read`.
    Read,
}

/// A row of the published table.
#[derive(Debug)]
pub struct Line {
    /// `a` to `c`.
    pub letter: char,
    /// How.
    pub ask: Ask,
    /// Bytes of each of the two buffers.
    pub bytes: usize,
    /// Percent of a CPU, by [`Offload`], if printed.
    pub percent: [Option<f64>; 3],
}

/// The published table. For `read` no size was given.
pub const LINES: [Line; 3] = [
    line('a', Ask::Ahead, 64 << 10, [Some(190.0), Some(110.0), Some(30.0)]),
    line('b', Ask::Ahead, 1 << 20, [Some(190.0), Some(110.0), Some(5.0)]),
    line('c', Ask::Read, 64 << 10, [Some(180.0), Some(70.0), None]),
];

const fn line(letter: char, ask: Ask, bytes: usize, percent: [Option<f64>; 3]) -> Line {
    Line { letter, ask, bytes, percent }
}

impl Line {
    /// The title in tables: `asynchronous read, 2 x 64 KiB`.
    pub fn title(&self) -> String {
        let ask = match self.ask {
            Ask::Ahead => "asynchronous read",
            Ask::Read => "read",
        };
        format!("{ask}, 2 x {} KiB", self.bytes >> 10)
    }

    /// The published ratio of two columns.
    pub fn ratio(&self, over: Offload, under: Offload) -> Option<f64> {
        Some(self.percent[over as usize]? / self.percent[under as usize]?)
    }
}

/// The method of a way's cell, and whether its device aggregates; `None`: there is no such way.
pub fn method(ask: Ask, offload: Offload, site: SystemUnderTest) -> Option<(&'static str, bool)> {
    let aggregates = offload != Offload::Stock;
    let name = match (site, ask, offload) {
        (SystemUnderTest::Kernel, _, Offload::Placed) | (_, Ask::Read, Offload::Placed) => {
            return None;
        }
        (SystemUnderTest::Kernel, Ask::Ahead, _) => "kernel_uring",
        (SystemUnderTest::Kernel, Ask::Read, _) => "kernel_read",
        (_, Ask::Ahead, Offload::Stock) => "posted_stock",
        (_, Ask::Ahead, Offload::Offloaded) => "posted_copied",
        (_, Ask::Ahead, Offload::Placed) => "posted",
        (_, Ask::Read, Offload::Stock) => "stock",
        (_, Ask::Read, Offload::Offloaded) => "copy",
    };
    Some((name, aggregates))
}

/// The way that is a cell of the table, if there is one.
fn cell_of(line: &Line, offload: Offload, site: SystemUnderTest) -> Option<Cell> {
    let (method, super_segments) = method(line.ask, offload, site)?;
    Some(Cell {
        side: Side::Receives,
        device: site.device(),
        method,
        write_bytes: line.bytes,
        super_segments,
        source: "untouched",
    })
}

/// What was measured for a cell of the table.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Measured {
    /// CPU of the receiver's process per KB.
    pub receiver_ns_per_kb: f64,
    /// CPU of both ends per KB.
    pub both_ns_per_kb: f64,
    /// Time of simulated hardware per KB.
    pub hardware_ns_per_kb: Option<f64>,
    /// What was reached.
    pub gbps: f64,
    /// Share of the bytes that landed where they belong, where that is counted.
    pub placed_share: Option<f64>,
}

impl Measured {
    fn of(row: &Row) -> Option<Measured> {
        Some(Measured {
            receiver_ns_per_kb: row.median(THIS_END)?,
            both_ns_per_kb: row.median(BOTH)?,
            hardware_ns_per_kb: row.median(HARDWARE),
            gbps: row.median(GBPS)?,
            placed_share: row.median("placed_share"),
        })
    }
}

/// Percent of a CPU that a cost per KB comes to at the published rate.
pub fn percent(ns_per_kb: f64) -> f64 {
    ns_per_kb * (RATE_BPS / 8.0 / 1024.0) / 1e9 * 100.0
}

/// A row of the table at one site.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which of [`LINES`].
    pub line: usize,
    /// Where.
    pub site: SystemUnderTest,
    /// By [`Offload`].
    pub cells: [Option<Measured>; 3],
}

/// A published ratio of two cells of a row, judged at one site.
#[derive(Clone, Debug)]
pub struct Judged {
    /// Which of [`LINES`].
    pub line: usize,
    /// Where.
    pub site: SystemUnderTest,
    /// What over what.
    pub over: Offload,
    /// See `over`.
    pub under: Offload,
    /// What was published.
    pub published: f64,
    /// What came out.
    pub measured: Option<Estimate>,
    /// What becomes of it.
    pub verdict: Verdict,
}

/// The table and what was measured for it.
#[derive(Clone, Debug)]
pub struct Reproduction {
    /// Row by row, each at every site.
    pub found: Vec<Found>,
    /// The ratios.
    pub judged: Vec<Judged>,
    /// One memcpy, ns per KB.
    pub copy_ns_per_kb: Option<f64>,
    /// The do-nothing peer without its copy, on TAP: its own end and both, ns per KB.
    pub floor_ns_per_kb: Option<(f64, f64)>,
}

/// Which cells are compared: each published step, and all of it.
const STEPS: [(Offload, Offload); 3] = [
    (Offload::Stock, Offload::Offloaded),
    (Offload::Offloaded, Offload::Placed),
    (Offload::Stock, Offload::Placed),
];

/// The name of a figure: `reproduce.placement.a.sim.stock_vs_placed`.
fn figure_name(line: &Line, site: SystemUnderTest, over: Offload, under: Offload) -> String {
    let (letter, device) = (line.letter, site.device());
    format!("reproduce.{NAME}.{letter}.{device}.{}_vs_{}", over.title(), under.title())
}

impl Reproduction {
    /// Joins what was published with what was measured.
    pub fn of(outcome: &Outcome) -> Reproduction {
        let row = |name: &str| outcome.rows.iter().find(|r| r.name == name);
        let cost = |r: &Row| Some((r.median(THIS_END)?, r.median(BOTH)?));
        let copy_ns_per_kb = row("limit.memcpy").and_then(cost).map(|c| c.1);
        let floor = outcome.rows.iter().find(|r| r.name.starts_with("floor.tap.recv.bare."));
        let each =
            || (0..LINES.len()).flat_map(|line| SystemUnderTest::ALL.map(|site| (line, site)));
        Reproduction {
            found: each().map(|(line, site)| found(line, site, &outcome.rows)).collect(),
            judged: each()
                .flat_map(|(line, site)| judged(line, site, outcome, copy_ns_per_kb))
                .collect(),
            copy_ns_per_kb,
            floor_ns_per_kb: floor.and_then(cost),
        }
    }

    /// What was measured for a cell.
    fn cell(&self, line: usize, site: SystemUnderTest, offload: Offload) -> Option<Measured> {
        let found = self.found.iter().find(|f| f.line == line && f.site == site)?;
        found.cells[offload as usize]
    }
}

fn found(line: usize, site: SystemUnderTest, rows: &[Row]) -> Found {
    let cell = |offload| cell_of(&LINES[line], offload, site)?.row(rows).and_then(Measured::of);
    Found { line, site, cells: Offload::ALL.map(cell) }
}

fn judged(line: usize, site: SystemUnderTest, outcome: &Outcome, copy: Option<f64>) -> Vec<Judged> {
    let of = &LINES[line];
    let judge = |(over, under): (Offload, Offload)| {
        let published = of.ratio(over, under)?;
        method(of.ask, over, site).and(method(of.ask, under, site))?;
        let name = figure_name(of, site, over, under);
        let figure = outcome.figures.iter().find(|f| f.ratio.name == name);
        let measured = figure.and_then(|f| f.estimate);
        let cells = found(line, site, &outcome.rows).cells;
        let verdict = match (measured, cells[over as usize], cells[under as usize]) {
            (Some(measured), Some(old), Some(new)) => {
                verdict::judge(published, measured, &why((&old, &new), copy, under, site))
            }
            _ => Verdict::NotMeasured("this run left it out".to_owned()),
        };
        Some(Judged { line, site, over, under, published, measured, verdict })
    };
    STEPS.into_iter().filter_map(judge).collect()
}

/// Why a ratio is smaller than it was.
fn why(
    (old, new): (&Measured, &Measured),
    copy: Option<f64>,
    under: Offload,
    site: SystemUnderTest,
) -> String {
    let share = new.placed_share.unwrap_or(1.0);
    let shared = match (site, under) {
        (_, Offload::Placed) if share < MOSTLY => {
            format!("only {:.0} % of the bytes could be placed and the others were copied", share * 100.0)
        }
        (SystemUnderTest::Simulated, Offload::Placed) => {
            "the host still runs TCP for each aggregate, where the card of then did it all".to_owned()
        }
        (_, Offload::Placed) => {
            "over a TAP the kernel copies each byte into the buffer itself, which no placement saves"
                .to_owned()
        }
        _ => match copy {
            Some(copy) => format!("both copy each byte, which costs {copy:.0} ns/KB alone"),
            None => "both copy each byte".to_owned(),
        },
    };
    let (old, new) = (old.receiver_ns_per_kb, new.receiver_ns_per_kb);
    format!("{shared}; {old:.0} ns/KB became {new:.0}")
}

/// Below this share placement is not what was measured.
const MOSTLY: f64 = 0.9;

#[cfg(test)]
mod tests;
