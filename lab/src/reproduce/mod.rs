//! Published tables, measured again: each in its own shape, beside today's kernel, fulmar over a
//! real device and over a simulated one, and the limit, with a verdict per row.
//!
//! [`Published`] is what was printed then. [`Reproduction::of`] joins it with what a bench measured
//! now ([`crate::harness::Row`], found by its [`crate::transfer::Cell`]) and judges it
//! ([`verdict`]); [`show`] makes a report of it. A table of another shape gets a
//! module of its own beside these ([`placement`]); what they share is [`verdict`].

pub mod netperf;
pub mod path;
pub mod placement;
pub mod profile;
pub mod run;
pub mod sendfile;
pub mod show;
pub mod sosend;
pub mod verdict;

use crate::harness::{Figure, Outcome, Row};
use crate::send::bench::What;
use crate::stats::Estimate;
use crate::transfer::{BOTH, Cell, Side, THREAD};
use netperf::Netperf;
use verdict::Verdict;

/// Every table that can be measured again.
pub const ALL: [Table; 5] = [
    Table::Sending(&sosend::TABLE),
    Table::Sending(&sendfile::TABLE),
    Table::Placement,
    Table::Profile,
    Table::Path,
];

/// A published table.
#[derive(Clone, Copy, Debug)]
pub enum Table {
    /// Ways of sending, in pairs of rows.
    Sending(&'static Published),
    /// Receiving into posted buffers.
    Placement,
    /// The parts of a load's CPU time.
    Profile,
    /// The cost of a datagram up to each point of its path.
    Path,
}

impl Table {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Table::Sending(table) => table.name,
            Table::Placement => placement::NAME,
            Table::Profile => profile::NAME,
            Table::Path => path::NAME,
        }
    }

    /// One sentence.
    pub const fn title(self) -> &'static str {
        match self {
            Table::Sending(table) => table.title,
            Table::Placement => placement::TITLE,
            Table::Profile => profile::TITLE,
            Table::Path => path::TITLE,
        }
    }

    /// The authors, the work and its date.
    pub const fn source(self) -> &'static str {
        match self {
            Table::Sending(table) => table.source,
            Table::Placement => placement::SOURCE,
            Table::Profile => profile::SOURCE,
            Table::Path => path::SOURCE,
        }
    }
}

/// A published comparison of an old way with a new one.
#[derive(Debug)]
pub struct Published {
    /// The name on the command line.
    pub name: &'static str,
    /// Writes or files.
    pub what: What,
    /// One sentence.
    pub title: &'static str,
    /// The authors, the work and its date.
    pub source: &'static str,
    /// The machines and the command then.
    pub setup: &'static str,
    /// What is different here, before any figure.
    pub differs: &'static str,
    /// The old way (a), the new way (b) and a third way for comparison (c).
    pub methods: [Method; 3],
    /// The pairs of rows, in the published order.
    pub pairs: &'static [Pair],
    /// The kernel's way for comparison: the method of a way's cell.
    pub kernel: &'static str,
}

/// A way of sending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Method {
    /// The name in a scenario.
    pub name: &'static str,
    /// The title in tables.
    pub title: &'static str,
}

/// Two rows: the same work in the old way (a) and in the new way (b).
#[derive(Debug)]
pub struct Pair {
    /// The number of both rows: `3` of 3a and 3b.
    pub number: u32,
    /// Bytes of each write and of both socket buffers.
    pub bytes: usize,
    /// Whether the interface cut super-segments.
    pub tso: bool,
    /// Both rows as printed, if they were.
    pub rows: Option<[Netperf; 2]>,
    /// The process's CPU time per KB, old over new.
    pub cpu_ratio: f64,
    /// The whole sending machine's CPU per KB, old over new, if it was published.
    pub machine_ratio: Option<f64>,
}

/// Where something was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SystemUnderTest {
    /// The machine's own kernel against itself.
    Kernel,
    /// fulmar over a real device to a kernel peer.
    Tap,
    /// fulmar over a simulated device.
    Simulated,
}

impl SystemUnderTest {
    /// All, in the order of the tables.
    pub const ALL: [SystemUnderTest; 3] =
        [SystemUnderTest::Kernel, SystemUnderTest::Tap, SystemUnderTest::Simulated];

    /// The device of a way's cell.
    pub const fn device(self) -> &'static str {
        match self {
            SystemUnderTest::Kernel => "veth",
            SystemUnderTest::Tap => "tap",
            SystemUnderTest::Simulated => "sim",
        }
    }

    /// The title in tables.
    pub const fn title(self) -> &'static str {
        match self {
            SystemUnderTest::Kernel => "kernel today, veth",
            SystemUnderTest::Tap => "fulmar, TAP",
            SystemUnderTest::Simulated => "fulmar, simulated device",
        }
    }

    /// The short title, for the wide table.
    pub const fn short(self) -> &'static str {
        match self {
            SystemUnderTest::Kernel => "kernel",
            SystemUnderTest::Tap => "TAP",
            SystemUnderTest::Simulated => "simulated",
        }
    }
}

/// One line: a published row, measured at one site; or the published row itself.
#[derive(Clone, Debug)]
pub struct Line {
    /// Which pair.
    pub pair: u32,
    /// `a` the old way, `b` the new way, `c` the third.
    pub letter: char,
    /// Where; `None` for what was published.
    pub site: Option<SystemUnderTest>,
    /// How it was sent, in words.
    pub way: String,
    /// The columns.
    pub netperf: Netperf,
}

/// A pair judged at one site.
#[derive(Clone, Debug)]
pub struct Judged {
    /// Which pair.
    pub pair: u32,
    /// Where.
    pub site: SystemUnderTest,
    /// The sending thread's CPU, old over new.
    pub cpu: Option<Estimate>,
    /// The machine's CPU, old over new.
    pub machine: Option<Estimate>,
    /// The thread's CPU, old over the third way.
    pub third: Option<Estimate>,
    /// What becomes of the published ratio.
    pub verdict: Verdict,
}

/// Whether the old way was slower with super-segments than without, as published.
#[derive(Clone, Debug)]
pub struct Surprise {
    /// Bytes of each write.
    pub bytes: usize,
    /// Where.
    pub site: SystemUnderTest,
    /// Throughput with super-segments over throughput without, published.
    pub published: f64,
    /// The same here.
    pub measured: Estimate,
    /// What becomes of it.
    pub verdict: Verdict,
}

/// A published table and what was measured for it.
#[derive(Debug)]
pub struct Reproduction {
    /// The table.
    pub published: &'static Published,
    /// Lines in the published order, each published row followed by what was measured for it.
    pub lines: Vec<Line>,
    /// Every pair at every site of fulmar's.
    pub judged: Vec<Judged>,
    /// Where throughput was published.
    pub surprises: Vec<Surprise>,
    /// The cost of one copy per size: bytes and ns per KB.
    pub limits: Vec<(usize, f64)>,
}

/// The name of a figure: `reproduce.sosend.3.sim.cpu`. The account is `cpu` (the thread, old over
/// new), `machine` (all CPUs, old over new), `third` (the thread, old over the third way) or
/// `old_tso_speed` (throughput of the old way, with super-segments over without).
pub fn figure_name(table: &Published, pair: &Pair, site: SystemUnderTest, account: &str) -> String {
    format!("reproduce.{}.{}.{}.{account}", table.name, pair.number, site.device())
}

/// The name of the way that measures the limit for a size.
pub fn limit_name(bytes: usize) -> String {
    format!("limit.memcpy.{}k", bytes >> 10)
}

/// The row of that method, size and segmentation at that site.
fn row_at<'a>(
    rows: &'a [Row],
    method: &'static str,
    pair: &Pair,
    site: SystemUnderTest,
) -> Option<&'a Row> {
    cell_of(method, pair, site).row(rows)
}

fn cell_of(method: &'static str, pair: &Pair, site: SystemUnderTest) -> Cell {
    Cell {
        side: Side::Sends,
        device: site.device(),
        method,
        write_bytes: pair.bytes,
        super_segments: pair.tso,
        source: "hot",
    }
}

impl Reproduction {
    /// Joins what was published with what was measured on `cpus` CPUs.
    pub fn of(published: &'static Published, outcome: &Outcome, cpus: usize) -> Reproduction {
        let rows = &outcome.rows;
        let limits = limits(published, rows);
        let lines = published.pairs.iter().flat_map(|p| lines(published, p, rows, cpus)).collect();
        let judge = |pair: &Pair| {
            let sites = [SystemUnderTest::Tap, SystemUnderTest::Simulated];
            let limit = limits.iter().find(|l| l.0 == pair.bytes).map(|l| l.1);
            sites.map(|site| judged(published, pair, site, outcome, limit))
        };
        Reproduction {
            lines,
            judged: published.pairs.iter().flat_map(judge).collect(),
            surprises: surprises(published, &outcome.figures),
            limits,
            published,
        }
    }
}

fn limits(published: &Published, rows: &[Row]) -> Vec<(usize, f64)> {
    let mut limits: Vec<(usize, f64)> = Vec::new();
    for bytes in published.pairs.iter().map(|p| p.bytes) {
        let row = rows.iter().find(|r| r.name == limit_name(bytes));
        let cost = row.and_then(|r| r.median(BOTH));
        if let Some(cost) = cost.filter(|_| limits.iter().all(|l| l.0 != bytes)) {
            limits.push((bytes, cost));
        }
    }
    limits
}

fn lines(table: &Published, pair: &Pair, rows: &[Row], cpus: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for (i, (letter, method)) in ['a', 'b', 'c'].into_iter().zip(table.methods).enumerate() {
        let line = |site, way: &str, netperf| Line {
            pair: pair.number,
            letter,
            site,
            way: way.to_owned(),
            netperf,
        };
        if let Some(then) = pair.rows.as_ref().and_then(|r| r.get(i)) {
            lines.push(line(None, method.title, *then));
        }
        for site in SystemUnderTest::ALL {
            // The kernel has one way only; it stands beside the new one.
            let (name, title) = match (site, letter) {
                (SystemUnderTest::Kernel, 'b') => (table.kernel, "the kernel's own"),
                (SystemUnderTest::Kernel, _) => continue,
                _ => (method.name, method.title),
            };
            let measured = row_at(rows, name, pair, site).and_then(|r| Netperf::of(r, cpus));
            lines.extend(measured.map(|netperf| line(Some(site), title, netperf)));
        }
    }
    lines
}

fn estimate(figures: &[Figure], name: &str) -> Option<Estimate> {
    figures.iter().find(|f| f.ratio.name == name)?.estimate
}

fn judged(
    table: &Published,
    pair: &Pair,
    site: SystemUnderTest,
    outcome: &Outcome,
    copy_ns_per_kb: Option<f64>,
) -> Judged {
    let of = |account| estimate(&outcome.figures, &figure_name(table, pair, site, account));
    let cost = |method: &Method| {
        let row = row_at(&outcome.rows, method.name, pair, site)?;
        row.median(THREAD)
    };
    let [old, new, _] = &table.methods;
    let cpu = of("cpu");
    let verdict = match cpu {
        None => Verdict::NotMeasured(not_measured(table, pair, site, outcome)),
        Some(cpu) => {
            let costs = cost(old).zip(cost(new));
            let why = costs.map(|c| verdict::why_shrunk(c, copy_ns_per_kb, pair.tso, site));
            verdict::judge(pair.cpu_ratio, cpu, &why.unwrap_or_default())
        }
    };
    Judged { pair: pair.number, site, cpu, machine: of("machine"), third: of("third"), verdict }
}

/// Why there is no ratio: the first error among the pair's ways.
fn not_measured(
    table: &Published,
    pair: &Pair,
    site: SystemUnderTest,
    outcome: &Outcome,
) -> String {
    let rows = table.methods.iter().filter_map(|m| row_at(&outcome.rows, m.name, pair, site));
    let error = rows.filter_map(|r| r.error.clone()).next();
    error.unwrap_or_else(|| "this run left it out".to_owned())
}

fn surprises(table: &Published, figures: &[Figure]) -> Vec<Surprise> {
    let mut found = Vec::new();
    for with in table.pairs.iter().filter(|p| p.tso) {
        let Some(published) = published_speed_ratio(table, with) else { continue };
        for site in [SystemUnderTest::Tap, SystemUnderTest::Simulated] {
            let name = figure_name(table, with, site, "old_tso_speed");
            let Some(measured) = estimate(figures, &name) else { continue };
            let verdict = verdict::of_surprise(measured, site);
            found.push(Surprise { bytes: with.bytes, site, published, measured, verdict });
        }
    }
    found
}

/// The pair of the same size without super-segments.
fn without_tso<'a>(table: &'a Published, with: &Pair) -> Option<&'a Pair> {
    table.pairs.iter().find(|p| p.bytes == with.bytes && !p.tso && with.tso)
}

/// Published throughput of the old way, with super-segments over without.
fn published_speed_ratio(table: &Published, with: &Pair) -> Option<f64> {
    let (fast, slow) = with.rows.zip(without_tso(table, with)?.rows)?;
    Some(fast[0].mbit_per_s / slow[0].mbit_per_s)
}

impl Line {
    /// `3b`.
    fn row(&self) -> String {
        format!("{}{}", self.pair, self.letter)
    }

    /// Where, in words.
    fn place(&self) -> &'static str {
        self.site.map_or("published", SystemUnderTest::short)
    }
}

impl Reproduction {
    /// What becomes of one line of the table.
    fn verdict_of(&self, line: &Line) -> &str {
        match (line.site, line.letter) {
            (None, _) => "",
            (Some(SystemUnderTest::Kernel), _) => "not comparable",
            (_, 'a') => "the baseline",
            (_, 'c') => "beyond the table",
            (Some(site), _) => {
                let judged = self.judged.iter().find(|j| j.pair == line.pair && j.site == site);
                judged.map_or("", |j| j.verdict.word())
            }
        }
    }

    /// The pair of that number.
    fn pair_of(&self, number: u32) -> Option<&Pair> {
        self.published.pairs.iter().find(|p| p.number == number)
    }
}

#[cfg(test)]
mod tests;
