//! The harness of every bench: scenarios that run in turn until the figures are firm or the time is over.
//!
//! A [`Scenario`] is data (which device, method, sizes, CPUs: its labels) with a closure that runs it once, for about
//! the requested time, and returns a [`Sample`]: values and counts by name. A round runs every scenario once, in the
//! order given, so that the values that a [`Ratio`] compares are measured moments apart. Each round gives each ratio
//! one value. A scenario whose ratios are all closed ([`crate::stats`]) is left out of later rounds, and its time goes
//! to the others.
//!
//! The harness itself adds, where bytes are moved, the busy time around a run that reports none, and the soaker's
//! figures from one more run of each scenario at the end.

pub mod options;
pub mod page;
pub mod report;
pub mod text;

use crate::cpu::{self, MachineClock, Soaker};
use crate::stats::{Estimate, RUNS_FOR_INTERVAL};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::io;
use std::time::{Duration, Instant};

/// How long the runs of a bench are at the least.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// Transfers: in shorter runs the start and the end of a connection weigh too much.
    Transfers,
    /// Calls that need no set-up.
    Calls,
    /// Whole programs between the ends, which adapt to a load before they carry it.
    Programs,
    /// Paths with delay and loss, over which a window takes many round trips to settle.
    Paths,
}

impl Pace {
    const fn shortest(self) -> Duration {
        match self {
            Pace::Transfers => Duration::from_millis(60),
            Pace::Calls => Duration::from_millis(20),
            Pace::Programs => Duration::from_millis(250),
            Pace::Paths => Duration::from_secs(2),
        }
    }

    /// Rounds that are made whatever the budget says: where they are short, fewer say nothing.
    const fn least_rounds(self) -> usize {
        match self {
            Pace::Transfers | Pace::Programs | Pace::Paths => 1,
            Pace::Calls => 3,
        }
    }
}

/// A run that is longer than the shortest useful one by this factor only delays the next pair.
const LONGEST: u32 = 5;
/// Set-up around each run: starting peers, handshake, warm-up, closing.
const AROUND_A_RUN: Duration = Duration::from_millis(20);
const CALIBRATION: Duration = Duration::from_millis(150);
/// From this budget on every scenario that moves bytes also runs once beside a soaker.
const SOAK_FROM: Duration = Duration::from_secs(60);

/// Busy time of all CPUs per KB, in ns; from /proc/stat, which counts in ticks.
pub const MACHINE: &str = "machine_cpu_ns_per_kb";
/// The same as the soaker saw it, in one run of its own.
pub const SOAKER: &str = "soaker_cpu_ns_per_kb";

/// One run of one scenario.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// The measured values, by their names in JSON, the most important first.
    pub values: Vec<(&'static str, f64)>,
    /// The counts; summed over the rounds.
    pub counts: Vec<(&'static str, u64)>,
    /// Bytes moved in the whole run, warm-up included; 0 if bytes are not measured.
    pub bytes: u64,
}

impl Sample {
    /// A sample of one value.
    pub fn of(key: &'static str, value: f64) -> Sample {
        Sample::default().with(key, value)
    }

    /// Adds a value. A value that is not a finite number counts as not measured.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: f64) -> Sample {
        if value.is_finite() {
            self.values.push((key, value));
        }
        self
    }

    /// Adds a count.
    #[must_use]
    pub fn count(mut self, name: &'static str, n: u64) -> Sample {
        self.counts.push((name, n));
        self
    }

    /// A value by its name.
    pub fn value(&self, key: &str) -> Option<f64> {
        self.values.iter().find(|(k, _)| *k == key).map(|(_, value)| *value)
    }

    /// The count of that name, 0 if there is none.
    pub fn counted(&self, name: &str) -> u64 {
        self.counts.iter().find(|(n, _)| *n == name).map_or(0, |(_, count)| *count)
    }
}

/// The run of a scenario, for about this time.
pub type Run<'a> = Box<dyn FnMut(Duration) -> io::Result<Sample> + 'a>;

/// The labels of a scenario: keys for JSON and options, and their values.
pub type Labels = Vec<(&'static str, Value)>;

/// One way of doing the work.
pub struct Scenario<'a> {
    /// A stable dotted name, unique in its bench: `floor.tap.send.same_cpu`.
    pub name: String,
    /// For a person: `do-nothing TCP + memcpy, TAP, sending`.
    pub title: String,
    /// The title of the table in which it stands.
    pub table: String,
    /// Device, method, sizes, CPUs.
    pub labels: Labels,
    /// Maximum number of rounds in which it runs; long or constant scenarios run once.
    pub most_runs: usize,
    /// Runs it once.
    pub run: Run<'a>,
}

impl<'a> Scenario<'a> {
    /// A scenario that runs in every round.
    pub fn new(
        name: impl Into<String>,
        title: impl Into<String>,
        run: impl FnMut(Duration) -> io::Result<Sample> + 'a,
    ) -> Scenario<'a> {
        Scenario {
            name: name.into(),
            title: title.into(),
            table: String::new(),
            labels: Vec::new(),
            most_runs: usize::MAX,
            run: Box::new(run),
        }
    }

    /// Puts it in the table of this title.
    #[must_use]
    pub fn in_table(mut self, table: impl Into<String>) -> Scenario<'a> {
        self.table = table.into();
        self
    }

    /// With one more label.
    #[must_use]
    pub fn label(mut self, key: &'static str, value: impl Into<Value>) -> Scenario<'a> {
        self.labels.push((key, value.into()));
        self
    }

    /// Limits it to the first `runs` rounds.
    #[must_use]
    pub fn at_most(mut self, runs: usize) -> Scenario<'a> {
        self.most_runs = runs;
        self
    }

    /// A label that is a word.
    pub fn word(&self, key: &str) -> Option<&str> {
        label_of(&self.labels, key)?.as_str()
    }
}

/// A label by its key.
pub fn label_of<'l>(labels: &'l Labels, key: &str) -> Option<&'l Value> {
    labels.iter().find(|(k, _)| *k == key).map(|(_, value)| value)
}

/// A value of a scenario: its name and the value's.
pub type Term = (String, &'static str);

/// A figure: values of scenarios of one round put together.
#[derive(Clone)]
pub struct Ratio {
    /// A stable dotted name: `stream.send.same_cpu.vs_floor`.
    pub name: String,
    /// One sentence for a person.
    pub sentence: String,
    /// The values that the figure is computed from.
    pub terms: Vec<Term>,
    /// Computes the figure. A term that was not measured is NaN, and so is the result, unless the function handles it.
    pub of: fn(&[f64]) -> f64,
    /// The value that is good enough, and the goal: upper bounds, or lower bounds if more is better.
    pub reach_and_aim: Option<(f64, f64)>,
    /// A larger value is a better one (an old cost over a new one, a throughput, packets per call).
    pub more_is_better: bool,
    /// The value of the published work, if there is one.
    pub published: Option<f64>,
    /// A count that is the same in every round: one round is judged.
    pub is_exact: bool,
}

impl Ratio {
    /// A figure of these terms.
    pub fn new(
        name: impl Into<String>,
        sentence: impl Into<String>,
        terms: Vec<Term>,
        of: fn(&[f64]) -> f64,
    ) -> Ratio {
        Ratio {
            name: name.into(),
            sentence: sentence.into(),
            terms,
            of,
            reach_and_aim: None,
            more_is_better: false,
            published: None,
            is_exact: false,
        }
    }

    /// The value of one scenario over the same of another.
    pub fn over(
        name: impl Into<String>,
        sentence: impl Into<String>,
        key: &'static str,
        [above, below]: [impl Into<String>; 2],
    ) -> Ratio {
        let terms = vec![(above.into(), key), (below.into(), key)];
        Ratio::new(name, sentence, terms, |t| t[0] / t[1])
    }

    /// A value of one scenario.
    pub fn value(
        name: impl Into<String>,
        sentence: impl Into<String>,
        key: &'static str,
        of: impl Into<String>,
    ) -> Ratio {
        Ratio::new(name, sentence, vec![(of.into(), key)], |t| t[0])
    }

    /// With goals: good enough, and wanted.
    #[must_use]
    pub fn goals(mut self, reach: f64, aim: f64) -> Ratio {
        self.reach_and_aim = Some((reach, aim));
        self
    }

    /// A larger value is a better one.
    #[must_use]
    pub fn more_is_better(mut self) -> Ratio {
        self.more_is_better = true;
        self
    }

    /// One round is enough to judge it.
    #[must_use]
    pub fn exact(mut self) -> Ratio {
        self.is_exact = true;
        self
    }

    /// Compares it with a published value.
    #[must_use]
    pub fn published(mut self, value: f64) -> Ratio {
        self.published = Some(value);
        self
    }

    /// Whether one of these scenarios at least is measured for each of its terms.
    pub fn is_measured(&self, scenarios: &[Scenario<'_>]) -> bool {
        self.terms.iter().all(|(name, _)| scenarios.iter().any(|s| s.name == *name))
    }
}

/// A bench.
pub struct Plan<'a> {
    /// The scenarios, in the order in which a round runs them; compared ones stand side by side.
    pub scenarios: Vec<Scenario<'a>>,
    /// The figures asked for.
    pub ratios: Vec<Ratio>,
    /// Time for everything.
    pub budget: Duration,
    /// Rounds at most.
    pub max_runs: usize,
    /// How long a run is.
    pub pace: Pace,
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
            Stop::Budget => "the time ended before every interval was narrow enough",
        }
    }
}

/// The results of one scenario.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// As in [`Scenario`].
    pub name: String,
    /// As in [`Scenario`].
    pub title: String,
    /// As in [`Scenario`].
    pub table: String,
    /// As in [`Scenario`].
    pub labels: Labels,
    /// Every value, in the order of the samples.
    pub values: Vec<(&'static str, Estimate)>,
    /// Sums over all runs.
    pub counts: Vec<(&'static str, u64)>,
    /// Bytes over all runs, to which the counts belong.
    pub counted_bytes: u64,
    /// Rounds in which it ran.
    pub runs: usize,
    /// Why it has no figures, if it failed.
    pub error: Option<String>,
}

impl Row {
    /// A value by its name.
    pub fn value(&self, key: &str) -> Option<Estimate> {
        self.values.iter().find(|(k, _)| *k == key).map(|(_, e)| *e)
    }

    /// The median of a value.
    pub fn median(&self, key: &str) -> Option<f64> {
        self.value(key).map(|e| e.median)
    }

    /// Whether it has all of these labels.
    pub fn is(&self, labels: &[(&str, Value)]) -> bool {
        labels.iter().all(|(key, value)| label_of(&self.labels, key) == Some(value))
    }
}

/// A figure as measured.
#[derive(Clone)]
pub struct Figure {
    /// The requested ratio.
    pub ratio: Ratio,
    /// The result; `None` if one of its scenarios failed.
    pub estimate: Option<Estimate>,
}

impl Figure {
    /// A figure from values that were measured elsewhere.
    pub fn of(ratio: Ratio, values: &[f64]) -> Figure {
        Figure { ratio, estimate: Estimate::of(values) }
    }
}

/// The results of a bench.
#[derive(Clone)]
pub struct Outcome {
    /// One per scenario.
    pub rows: Vec<Row>,
    /// One per ratio.
    pub figures: Vec<Figure>,
    /// Why it stopped.
    pub stop: Stop,
    /// How long it took.
    pub elapsed: Duration,
}

impl Outcome {
    /// A figure by its name, if it was measured.
    pub fn figure(&self, name: &str) -> Option<Estimate> {
        self.figures.iter().find(|f| f.ratio.name == name)?.estimate
    }
}

/// A scenario and its results so far.
struct Series<'a> {
    scenario: Scenario<'a>,
    /// One entry per round in which it ran.
    samples: Vec<(usize, Sample)>,
    soaker_ns_per_kb: Option<f64>,
    error: Option<String>,
}

impl Series<'_> {
    fn value(&self, round: usize, key: &str) -> Option<f64> {
        let at = self.samples.binary_search_by_key(&round, |(r, _)| *r).ok()?;
        self.samples.get(at).and_then(|(_, s)| s.value(key))
    }

    fn values(&self, key: &str) -> Vec<f64> {
        self.samples.iter().filter_map(|(_, s)| s.value(key)).collect()
    }

    /// Whether its first value is firm.
    fn is_closed(&self) -> bool {
        let first = self.samples.first().and_then(|(_, s)| s.values.first());
        let estimate = first.and_then(|(key, _)| Estimate::of(&self.values(key)));
        estimate.is_some_and(|e| e.is_closed())
    }

    /// Runs once. A scenario that fails is not tried again.
    fn run(&mut self, round: usize, slice: Duration) {
        let before = MachineClock::read().unwrap_or_default();
        match (self.scenario.run)(slice) {
            Ok(sample) => {
                let busy = MachineClock::read().unwrap_or_default().since(before).busy;
                self.samples.push((round, with_machine(sample, busy)));
            }
            Err(e) => self.error = Some(e.to_string()),
        }
    }

    fn soak(&mut self, soaker: &Soaker, slice: Duration) {
        let before = soaker.read();
        if let Ok(sample) = (self.scenario.run)(slice) {
            let load = soaker.load_between(&before, &soaker.read());
            self.soaker_ns_per_kb = per_kb(load, sample.bytes);
        }
    }

    fn into_row(self) -> Row {
        let mut keys: Vec<&'static str> = Vec::new();
        for (key, _) in self.samples.iter().flat_map(|(_, s)| &s.values) {
            if !keys.contains(key) {
                keys.push(key);
            }
        }
        let estimate = |key: &'static str| {
            let values = self.values(key);
            let e = Estimate::of(&values)?;
            let median = if key == MACHINE { without_extremes(values)? } else { e.median };
            Some((key, Estimate { median, ..e }))
        };
        let mut values: Vec<_> = keys.into_iter().filter_map(estimate).collect();
        values.extend(self.soaker_ns_per_kb.and_then(|ns| Some((SOAKER, Estimate::of(&[ns])?))));
        Row {
            values,
            counts: summed_counts(&self.samples),
            counted_bytes: self.samples.iter().map(|(_, s)| s.bytes).sum(),
            runs: self.samples.len(),
            name: self.scenario.name,
            title: self.scenario.title,
            table: self.scenario.table,
            labels: self.scenario.labels,
            error: self.error,
        }
    }
}

/// Busy time of the whole run stands in where a sample of moved bytes has none of its own.
fn with_machine(sample: Sample, busy: Duration) -> Sample {
    match per_kb(busy, sample.bytes) {
        Some(ns) if sample.value(MACHINE).is_none() => sample.with(MACHINE, ns),
        _ => sample,
    }
}

/// The mean of all rounds but the fifth that cost most and the fifth that cost least: ticks are too coarse for
/// a median of short rounds, and whatever else a machine does falls into few of them.
fn without_extremes(mut rounds: Vec<f64>) -> Option<f64> {
    rounds.sort_by(f64::total_cmp);
    let left_out = rounds.len() / 5;
    let kept = rounds.get(left_out..rounds.len().saturating_sub(left_out))?;
    (!kept.is_empty()).then(|| kept.iter().sum::<f64>() / kept.len() as f64)
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

/// The value of a ratio in every round that gives it one.
fn ratio_values(ratio: &Ratio, all: &[Series<'_>], rounds: usize) -> Vec<f64> {
    let series = |name: &str| all.iter().find(|s| s.scenario.name == name);
    let terms: Vec<_> = ratio.terms.iter().map(|(name, key)| (series(name), *key)).collect();
    let of_round = |round| {
        let value = |(s, key): &(Option<&Series<'_>>, &str)| {
            s.and_then(|s| s.value(round, key)).unwrap_or(f64::NAN)
        };
        (ratio.of)(&terms.iter().map(value).collect::<Vec<_>>())
    };
    (0..rounds).map(of_round).filter(|v| v.is_finite()).collect()
}

/// Shows the progress on standard error, if that is a terminal.
pub struct Progress(ProgressBar);

impl Progress {
    /// Of `steps` steps.
    pub fn new(steps: usize) -> Progress {
        let style = ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg:50!}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        Progress(ProgressBar::new(steps as u64).with_style(style))
    }

    /// Shows the current run, its progress and the expected end.
    pub fn show(&self, what: impl Into<String>, done: usize, all: usize) {
        self.0.set_length(all as u64);
        self.0.set_position(done as u64);
        self.0.set_message(what.into());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

struct Bench<'a> {
    all: Vec<Series<'a>>,
    ratios: Vec<Ratio>,
    max_runs: usize,
    least_rounds: usize,
    rounds: usize,
    slice: Duration,
    budget: Duration,
    deadline: Instant,
    progress: Progress,
    started: Instant,
}

/// Runs the plan. Shows its progress on standard error if that is a terminal.
pub fn run(plan: Plan<'_>) -> Outcome {
    let started = Instant::now();
    let soaks = plan.budget >= SOAK_FROM && plan.pace == Pace::Transfers;
    let soak_time = if soaks { plan.budget.mul_f64(0.12) } else { Duration::ZERO };
    let series =
        |scenario| Series { scenario, samples: Vec::new(), soaker_ns_per_kb: None, error: None };
    let mut bench = Bench {
        slice: slice(plan.budget.saturating_sub(soak_time), plan.scenarios.len(), plan.pace),
        deadline: started + plan.budget.saturating_sub(soak_time),
        budget: plan.budget,
        progress: Progress::new(1),
        all: plan.scenarios.into_iter().map(series).collect(),
        ratios: plan.ratios,
        max_runs: plan.max_runs.max(1),
        least_rounds: plan.pace.least_rounds(),
        rounds: 0,
        started,
    };
    let stop = bench.run_rounds();
    if soaks {
        bench.deadline = started + plan.budget;
        bench.soak(plan.pace.shortest());
    }
    bench.finish(stop)
}

/// Time of one run, such that every scenario can run often enough for an interval.
fn slice(budget: Duration, scenarios: usize, pace: Pace) -> Duration {
    let (runs, shortest) = ((scenarios.max(1) * (RUNS_FOR_INTERVAL + 1)) as u32, pace.shortest());
    (budget / runs).saturating_sub(AROUND_A_RUN).clamp(shortest, shortest * LONGEST)
}

impl Bench<'_> {
    fn run_rounds(&mut self) -> Stop {
        while self.rounds < self.max_runs {
            let wanted: Vec<bool> = (0..self.all.len()).map(|i| self.is_wanted(i)).collect();
            if !wanted.contains(&true) {
                return Stop::Closed;
            }
            let round = self.rounds;
            self.rounds += 1;
            for (i, _) in wanted.iter().enumerate().filter(|(_, w)| **w) {
                let is_late = Instant::now() + self.slice + AROUND_A_RUN > self.deadline;
                if round >= self.least_rounds && is_late {
                    return Stop::Budget;
                }
                self.show(i, round);
                self.all[i].run(round, self.slice);
            }
        }
        Stop::Runs
    }

    /// A scenario runs while one of its ratios is open; one that is in no ratio, while its own value is.
    fn is_wanted(&self, i: usize) -> bool {
        let Series { scenario, samples, error, .. } = &self.all[i];
        if error.is_some() || samples.len() >= scenario.most_runs {
            return false;
        }
        let mut own = self
            .ratios
            .iter()
            .filter(|r| r.terms.iter().any(|(name, _)| *name == scenario.name))
            .filter(|r| !self.is_hopeless(r))
            .peekable();
        if own.peek().is_none() {
            return !self.all[i].is_closed();
        }
        let is_open = |r: &Ratio| {
            let values = ratio_values(r, &self.all, self.rounds);
            !Estimate::of(&values).is_some_and(|e| e.is_closed())
        };
        own.any(is_open)
    }

    /// One of its scenarios failed or is not in this bench.
    fn is_hopeless(&self, ratio: &Ratio) -> bool {
        let works =
            |name: &String| self.all.iter().any(|s| s.scenario.name == *name && s.error.is_none());
        !ratio.terms.iter().all(|(name, _)| works(name))
    }

    /// One more run of each scenario, beside a soaker; none on a busy machine, where a calibration that
    /// should be idle would make every later reading wrong.
    fn soak(&mut self, slice: Duration) {
        self.progress.show("calibrating the soaker", 1, 1);
        if cpu::busy_share_over(CALIBRATION).is_ok_and(|share| share > cpu::BUSY_SHARE) {
            return;
        }
        let soaker = cpu::allowed_cpus().and_then(|cpus| Soaker::start(&cpus, CALIBRATION));
        let Ok(soaker) = soaker else { return };
        for i in 0..self.all.len() {
            if Instant::now() + slice + AROUND_A_RUN > self.deadline {
                return;
            }
            if self.all[i].error.is_none() {
                self.show(i, self.rounds);
                self.all[i].soak(&soaker, slice);
            }
        }
    }

    fn show(&self, i: usize, round: usize) {
        let Scenario { title, labels, .. } = &self.all[i].scenario;
        let placement = label_of(labels, "placement").and_then(Value::as_str).unwrap_or_default();
        let what = format!("run {}: {title} {}", round + 1, placement.replace('_', " "));
        let ms = |d: Duration| d.as_millis() as usize;
        self.progress.show(what, ms(self.started.elapsed()), ms(self.budget));
    }

    fn finish(self, stop: Stop) -> Outcome {
        let figure = |r: &Ratio| Figure {
            estimate: Estimate::of(&ratio_values(r, &self.all, self.rounds)),
            ratio: r.clone(),
        };
        Outcome {
            figures: self.ratios.iter().map(figure).collect(),
            rows: self.all.into_iter().map(Series::into_row).collect(),
            stop,
            elapsed: self.started.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests;
