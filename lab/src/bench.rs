//! Runs ways of moving bytes interleaved, until the figures are firm or the time is over.
//!
//! A [`Way`] is a closure that moves bytes for about as long as it is told and returns a
//! [`Sample`]. A round runs every way once, in the order given, so that the two ways of a
//! [`Ratio`] are measured moments apart; each round gives each ratio one value. A way whose ratios
//! are all closed ([`crate::stats`]) is left out of later rounds, and its time goes to the others.
//! Three accounts are kept: the two ends' own CPU time, the machine's (`/proc/stat`, all runs of a
//! way together because it counts in ticks), and, in one more run of each way at the end, the
//! soaker's.
//!
//! To add a way over a device, open the device on a [`crate::site`], and in the closure start a
//! [`crate::peer::Peer`] in the site's namespace, move bytes on [`crate::on_pinned_thread`] while
//! reading [`cpu::thread_cpu`] around the part after `warm_bytes`, and join both [`Report`]s with
//! [`Sample::of_ends`]; `floor::Ground::stream` is the model.

use crate::cpu::{self, MachineClock, Placement, Soaker};
use crate::peer::Report;
use crate::stats::{Estimate, RUNS_FOR_INTERVAL};
use indicatif::{ProgressBar, ProgressStyle};
use std::io;
use std::time::{Duration, Instant};

/// The longest and the shortest useful run: longer only delays the next pair, in a shorter one the
/// start and the end of a connection weigh too much.
const SLICE: (Duration, Duration) = (Duration::from_millis(60), Duration::from_millis(300));
/// Set-up around each run: starting peers, handshake, warm-up, closing.
const AROUND_A_RUN: Duration = Duration::from_millis(20);
const CALIBRATION: Duration = Duration::from_millis(150);

/// One run of one way.
#[derive(Clone, Debug, Default)]
pub struct Sample {
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

impl Sample {
    /// A sample of the two ends of a stream.
    pub fn of_ends(near: Report, far: Report, warm_bytes: u64) -> Sample {
        Sample { near, far, warm_bytes, ..Sample::default() }
    }

    /// Adds a count.
    #[must_use]
    pub fn count(mut self, name: &'static str, n: u64) -> Sample {
        self.counts.push((name, n));
        self
    }

    /// One count over another; not a number where the second is 0 or not counted.
    pub fn quotient(&self, above: &str, below: &str) -> f64 {
        match self.counted(below) {
            0 => f64::NAN,
            n => self.counted(above) as f64 / n as f64,
        }
    }

    /// The count of that name, 0 if there is none.
    pub fn counted(&self, name: &str) -> u64 {
        self.counts.iter().find(|(n, _)| *n == name).map_or(0, |(_, count)| *count)
    }

    /// CPU of the end under test, in ns per KB (1024 bytes), without simulated hardware.
    pub fn near_ns_per_kb(&self) -> f64 {
        self.near.ns_per_kb(self.near.cpu.saturating_sub(self.hardware))
    }

    /// CPU of the thread that sends (what `time` shows), in ns per KB, without simulated hardware.
    pub fn thread_ns_per_kb(&self) -> f64 {
        self.near.ns_per_kb(self.near.thread)
    }

    /// Time of the simulated hardware, in ns per KB.
    pub fn hardware_ns_per_kb(&self) -> f64 {
        self.near.ns_per_kb(self.hardware)
    }

    /// Busy time of all CPUs, in ns per KB; simulated hardware is busy time of this machine too and
    /// is taken off.
    pub fn machine_ns_per_kb(&self) -> f64 {
        self.near.ns_per_kb(self.near.machine.saturating_sub(self.hardware))
    }

    /// CPU of the other end, in ns per KB.
    pub fn far_ns_per_kb(&self) -> f64 {
        self.far.cpu_ns_per_kb()
    }

    /// CPU of both ends together, in ns per KB: what stacks are compared by.
    pub fn both_ns_per_kb(&self) -> f64 {
        self.near_ns_per_kb() + self.far_ns_per_kb()
    }

    /// Throughput in Gb/s, as the end that finishes last saw it.
    pub fn gbps(&self) -> f64 {
        let slower = self.near.elapsed.max(self.far.elapsed).as_nanos().max(1) as f64;
        self.near.bytes.min(self.far.bytes) as f64 * 8.0 / slower
    }

    /// Bytes moved in the whole run.
    pub fn all_bytes(&self) -> u64 {
        self.near.bytes + self.warm_bytes
    }
}

/// What a way does: moves bytes for about this long.
pub type Run<'a> = Box<dyn FnMut(Duration) -> io::Result<Sample> + 'a>;

/// Which end of a connection is under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The one that sends.
    Sends,
    /// The one that receives.
    Receives,
}

/// Which cell of a table a way is, for benches that are tables of several dimensions.
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

/// One way of doing the same work.
pub struct Way<'a> {
    /// A stable dotted name, unique in its bench: `floor.tap.send.same_cpu`.
    pub name: String,
    /// For a person: `do-nothing TCP + memcpy, TAP, sending`.
    pub title: String,
    /// Where its ends run.
    pub placement: Placement,
    /// Its place in a table of several dimensions.
    pub cell: Option<Cell>,
    /// Runs it once.
    pub run: Run<'a>,
}

/// A figure: one way over another, both of the same round, or a value of one way.
#[derive(Clone)]
pub struct Ratio {
    /// A stable dotted name: `stream.send.same_cpu.vs_floor`.
    pub name: String,
    /// One sentence for a person.
    pub sentence: String,
    /// The name of the way above the line.
    pub way: String,
    /// The name of the way below the line; without one the value itself is the figure.
    pub over: Option<String>,
    /// What is taken of each sample.
    pub measure: fn(&Sample) -> f64,
    /// What is good enough, and what we want: at most, or at least if more is better.
    pub reach_and_aim: Option<(f64, f64)>,
    /// A larger value is a better one (an old cost over a new one, a throughput, packets per call).
    pub more_is_better: bool,
    /// What the published work found, where there is one.
    pub published: Option<f64>,
}

/// A bench.
pub struct Plan<'a> {
    /// The ways, in the order in which a round runs them; compared ways stand side by side.
    pub ways: Vec<Way<'a>>,
    /// The figures asked for.
    pub ratios: Vec<Ratio>,
    /// Time for everything.
    pub budget: Duration,
    /// Rounds at most.
    pub max_runs: usize,
    /// Also run every way once beside a soaker.
    pub soak: bool,
}

/// Why a bench stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// Every interval is narrower than the rule asks.
    Closed,
    /// The number of runs that was asked for.
    Runs,
    /// The time was over.
    Budget,
}

impl Stop {
    /// One sentence for a person.
    pub const fn sentence(self) -> &'static str {
        match self {
            Stop::Closed => "every interval has a half-width under 2.5 %",
            Stop::Runs => "the number of runs was reached",
            Stop::Budget => "the time was over before every interval closed",
        }
    }
}

/// What is known about one way.
#[derive(Clone, Debug)]
pub struct Row {
    /// As in [`Way`].
    pub name: String,
    /// As in [`Way`].
    pub title: String,
    /// As in [`Way`].
    pub placement: Placement,
    /// As in [`Way`].
    pub cell: Option<Cell>,
    /// Gb/s.
    pub gbps: Option<Estimate>,
    /// CPU of the end under test, ns per KB.
    pub near_ns_per_kb: Option<Estimate>,
    /// CPU of the sending thread alone, ns per KB, where it is known.
    pub thread_ns_per_kb: Option<Estimate>,
    /// Time of simulated hardware, ns per KB, where there is some; in none of the other columns.
    pub hardware_ns_per_kb: Option<Estimate>,
    /// CPU of the other end, ns per KB.
    pub far_ns_per_kb: Option<Estimate>,
    /// CPU of both ends, ns per KB.
    pub both_ns_per_kb: Option<Estimate>,
    /// Busy time of the whole machine over all runs, ns per KB: of the measured stretch where the
    /// way reports it, else with starting the peers.
    pub machine_ns_per_kb: Option<f64>,
    /// Service demand as netperf has it: busy time of all CPUs in the measured stretch, µs per KB,
    /// where the way reports it.
    pub service_demand_us_per_kb: Option<Estimate>,
    /// Of the near end's CPU, the share in user mode over all runs, 0 to 1.
    pub user_share: Option<f64>,
    /// The same as the soaker saw it, in one run of its own.
    pub soaker_ns_per_kb: Option<f64>,
    /// Sums over all runs.
    pub counts: Vec<(&'static str, u64)>,
    /// Bytes over all runs, to which the counts belong.
    pub counted_bytes: u64,
    /// Why it has no figures, if it failed.
    pub error: Option<String>,
}

/// Counts over other counts that tables show: a key in JSON, and which counts.
pub const QUOTIENTS: [(&str, &str, &str); 12] = [
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
    ("slow_allocations_per_mb", "slow_allocations", "call_mb"),
];

impl Row {
    /// The sum of a count, if it was counted.
    pub fn count(&self, name: &str) -> Option<u64> {
        self.counts.iter().find(|(n, _)| *n == name).map(|(_, n)| *n)
    }

    /// One of [`QUOTIENTS`], by its key.
    pub fn quotient(&self, key: &str) -> Option<f64> {
        let (_, above, below) = QUOTIENTS.iter().find(|(k, _, _)| *k == key)?;
        let below = self.count(below).filter(|n| *n > 0)?;
        Some(self.count(above)? as f64 / below as f64)
    }
}

/// A figure as measured.
#[derive(Clone)]
pub struct Figure {
    /// What was asked for.
    pub ratio: Ratio,
    /// What came out; `None` when one of its ways failed.
    pub estimate: Option<Estimate>,
}

/// What a bench found.
#[derive(Clone)]
pub struct Outcome {
    /// One per way.
    pub rows: Vec<Row>,
    /// One per ratio.
    pub figures: Vec<Figure>,
    /// Why it stopped.
    pub stop: Stop,
    /// How long it took.
    pub elapsed: Duration,
}

/// A way and what it gave so far.
struct Lane<'a> {
    way: Way<'a>,
    /// One entry per round in which it ran.
    samples: Vec<(usize, Sample)>,
    machine_busy: Duration,
    soaker_ns_per_kb: Option<f64>,
    error: Option<String>,
}

impl Lane<'_> {
    fn sample(&self, round: usize) -> Option<&Sample> {
        let at = self.samples.binary_search_by_key(&round, |(r, _)| *r).ok()?;
        self.samples.get(at).map(|(_, s)| s)
    }

    fn estimate(&self, measure: fn(&Sample) -> f64) -> Option<Estimate> {
        Estimate::of(&self.samples.iter().map(|(_, s)| measure(s)).collect::<Vec<_>>())
    }

    /// Runs once. A way that fails is not tried again.
    fn run(&mut self, round: usize, slice: Duration) {
        let before = MachineClock::read().unwrap_or_default();
        match (self.way.run)(slice) {
            Ok(sample) => {
                let after = MachineClock::read().unwrap_or_default();
                self.machine_busy += after.since(before).busy;
                self.samples.push((round, sample));
            }
            Err(e) => self.error = Some(e.to_string()),
        }
    }

    fn soak(&mut self, soaker: &Soaker, slice: Duration) {
        let before = soaker.read();
        if let Ok(sample) = (self.way.run)(slice) {
            let load = soaker.load_between(&before, &soaker.read());
            self.soaker_ns_per_kb = per_kb(load, sample.all_bytes());
        }
    }

    /// An estimate of a measure that is 0 where the way does not know it.
    fn known(&self, measure: fn(&Sample) -> f64) -> Option<Estimate> {
        self.estimate(measure).filter(|e| e.high > 0.0)
    }

    fn user_share(&self) -> Option<f64> {
        let known = || self.samples.iter().filter_map(|(_, s)| Some((s.near.user?, s.near.cpu)));
        let user: Duration = known().map(|(user, _)| user).sum();
        let all: Duration = known().map(|(_, all)| all).sum();
        (!all.is_zero()).then(|| (user.as_secs_f64() / all.as_secs_f64()).min(1.0))
    }

    fn machine_ns_per_kb(&self, counted_bytes: u64) -> Option<f64> {
        let busy = |s: &Sample| s.near.machine.saturating_sub(s.hardware);
        let rounds: Vec<_> = self.samples.iter().map(|(_, s)| (busy(s), s.near.bytes)).collect();
        if self.samples.iter().all(|(_, s)| s.near.machine.is_zero()) {
            return per_kb(self.machine_busy, counted_bytes);
        }
        without_extremes(rounds)
    }

    fn into_row(self) -> Row {
        let counted_bytes = self.samples.iter().map(|(_, s)| s.all_bytes()).sum();
        Row {
            thread_ns_per_kb: self.known(Sample::thread_ns_per_kb),
            hardware_ns_per_kb: self.known(Sample::hardware_ns_per_kb),
            service_demand_us_per_kb: self.known(|s| s.machine_ns_per_kb() / 1000.0),
            user_share: self.user_share(),
            gbps: self.estimate(Sample::gbps),
            near_ns_per_kb: self.estimate(Sample::near_ns_per_kb),
            far_ns_per_kb: self.estimate(Sample::far_ns_per_kb),
            both_ns_per_kb: self.estimate(Sample::both_ns_per_kb),
            machine_ns_per_kb: self.machine_ns_per_kb(counted_bytes),
            soaker_ns_per_kb: self.soaker_ns_per_kb,
            counts: summed_counts(&self.samples),
            counted_bytes,
            name: self.way.name,
            title: self.way.title,
            placement: self.way.placement,
            cell: self.way.cell,
            error: self.error,
        }
    }
}

/// ns per KB of all rounds but the fifth that cost most and the fifth that cost least: ticks are too coarse
/// for a median of short rounds, and whatever else a machine does falls into few of them.
fn without_extremes(mut rounds: Vec<(Duration, u64)>) -> Option<f64> {
    let cost = |(time, bytes): &(Duration, u64)| per_kb(*time, *bytes).unwrap_or(0.0);
    rounds.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    let left_out = rounds.len() / 5;
    let kept = rounds.get(left_out..rounds.len().saturating_sub(left_out))?;
    let (time, bytes) = (kept.iter().map(|r| r.0).sum(), kept.iter().map(|r| r.1).sum());
    per_kb(time, bytes)
}

fn per_kb(time: Duration, bytes: u64) -> Option<f64> {
    (bytes > 0).then(|| time.as_nanos() as f64 * 1024.0 / bytes as f64)
}

fn summed_counts(samples: &[(usize, Sample)]) -> Vec<(&'static str, u64)> {
    let mut sums: Vec<(&'static str, u64)> = Vec::new();
    for (name, n) in samples.iter().flat_map(|(_, s)| &s.counts) {
        match sums.iter_mut().find(|(known, _)| known == name) {
            Some((_, sum)) => *sum += n,
            None => sums.push((name, *n)),
        }
    }
    sums
}

/// The value of a ratio in every round that has both of its ways.
fn ratio_values(ratio: &Ratio, lanes: &[Lane<'_>]) -> Vec<f64> {
    let lane = |name: &str| lanes.iter().find(|l| l.way.name == name);
    let Some(upper) = lane(&ratio.way) else { return Vec::new() };
    let value = |(round, s): &(usize, Sample)| {
        let above = (ratio.measure)(s);
        match &ratio.over {
            None => Some(above),
            Some(over) => Some(above / (ratio.measure)(lane(over)?.sample(*round)?)),
        }
    };
    upper.samples.iter().filter_map(value).collect()
}

struct Bench<'a> {
    lanes: Vec<Lane<'a>>,
    ratios: Vec<Ratio>,
    max_runs: usize,
    slice: Duration,
    deadline: Instant,
    progress: ProgressBar,
    started: Instant,
}

/// Runs the plan. Shows its progress on standard error if that is a terminal.
pub fn run(plan: Plan<'_>) -> Outcome {
    let started = Instant::now();
    let soak_time = if plan.soak { plan.budget.mul_f64(0.12) } else { Duration::ZERO };
    let mut bench = Bench {
        slice: slice(plan.budget.saturating_sub(soak_time), plan.ways.len()),
        deadline: started + plan.budget.saturating_sub(soak_time),
        progress: progress_bar(plan.budget),
        lanes: plan.ways.into_iter().map(lane).collect(),
        ratios: plan.ratios,
        max_runs: plan.max_runs.max(1),
        started,
    };
    let stop = bench.rounds();
    if plan.soak {
        bench.deadline = started + plan.budget;
        bench.soak();
    }
    bench.finish(stop)
}

fn lane(way: Way<'_>) -> Lane<'_> {
    Lane {
        way,
        samples: Vec::new(),
        machine_busy: Duration::ZERO,
        soaker_ns_per_kb: None,
        error: None,
    }
}

/// Time of one run, such that every way can run often enough for an interval.
fn slice(budget: Duration, ways: usize) -> Duration {
    let runs = (ways.max(1) * (RUNS_FOR_INTERVAL + 1)) as u32;
    (budget / runs).saturating_sub(AROUND_A_RUN).clamp(SLICE.0, SLICE.1)
}

fn progress_bar(budget: Duration) -> ProgressBar {
    // indicatif draws nothing when standard error is not a terminal.
    let bar = ProgressBar::new(u64::try_from(budget.as_millis()).unwrap_or(u64::MAX));
    let style = ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg:50!}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

impl Bench<'_> {
    fn rounds(&mut self) -> Stop {
        for round in 0..self.max_runs {
            let wanted: Vec<bool> = (0..self.lanes.len()).map(|i| self.is_wanted(i)).collect();
            if !wanted.contains(&true) {
                return Stop::Closed;
            }
            for (i, _) in wanted.iter().enumerate().filter(|(_, w)| **w) {
                if round > 0 && Instant::now() + self.slice + AROUND_A_RUN > self.deadline {
                    return Stop::Budget;
                }
                self.show(i, round);
                self.lanes[i].run(round, self.slice);
            }
        }
        Stop::Runs
    }

    /// A way runs while one of its ratios is open; one that is in no ratio, while its own figure is.
    fn is_wanted(&self, i: usize) -> bool {
        let lane = &self.lanes[i];
        if lane.error.is_some() {
            return false;
        }
        let mut own = self
            .ratios
            .iter()
            .filter(|r| r.way == lane.way.name || r.over.as_ref() == Some(&lane.way.name))
            .filter(|r| !self.is_hopeless(r))
            .peekable();
        if own.peek().is_none() {
            return !lane.estimate(Sample::both_ns_per_kb).is_some_and(|e| e.is_closed());
        }
        let is_open =
            |r: &Ratio| !Estimate::of(&ratio_values(r, &self.lanes)).is_some_and(|e| e.is_closed());
        own.any(is_open)
    }

    /// One of its ways failed or is not in this bench.
    fn is_hopeless(&self, ratio: &Ratio) -> bool {
        let works =
            |name: &String| self.lanes.iter().any(|l| l.way.name == *name && l.error.is_none());
        !works(&ratio.way) || !ratio.over.as_ref().is_none_or(works)
    }

    /// One more run of each way, beside a soaker; none on a busy machine, where a calibration that
    /// should be idle would make every later reading wrong.
    fn soak(&mut self) {
        self.progress.set_message("calibrating the soaker");
        if cpu::busy_share_over(CALIBRATION).is_ok_and(|share| share > cpu::BUSY_SHARE) {
            return;
        }
        let soaker = cpu::allowed_cpus().and_then(|cpus| Soaker::start(&cpus, CALIBRATION));
        let Ok(soaker) = soaker else { return };
        for i in 0..self.lanes.len() {
            if Instant::now() + SLICE.0 + AROUND_A_RUN > self.deadline {
                return;
            }
            if self.lanes[i].error.is_none() {
                self.show(i, 0);
                self.lanes[i].soak(&soaker, SLICE.0);
            }
        }
    }

    fn show(&self, i: usize, round: usize) {
        let way = &self.lanes[i].way;
        let ms = self.started.elapsed().as_millis();
        self.progress.set_position(u64::try_from(ms).unwrap_or(u64::MAX));
        let title = format!("run {}: {}, {}", round + 1, way.title, way.placement.title());
        self.progress.set_message(title);
    }

    fn finish(self, stop: Stop) -> Outcome {
        self.progress.finish_and_clear();
        let figure = |r: &Ratio| Figure {
            estimate: Estimate::of(&ratio_values(r, &self.lanes)),
            ratio: r.clone(),
        };
        Outcome {
            figures: self.ratios.iter().map(figure).collect(),
            rows: self.lanes.into_iter().map(Lane::into_row).collect(),
            stop,
            elapsed: self.started.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests;
