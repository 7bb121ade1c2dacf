//! `fulmar-lab profile`: runs a bench and says what its busy time was spent for.

use crate::bench::{self, check_files, command_line, write};
use clap::Parser;
use fulmar::ledger::{self, Balance, Stage};
use fulmar_cli::failure::{During, Outcome};
use fulmar_cli::say::say;
use fulmar_lab::page::{self, Bar, Bars, Cell};
use fulmar_lab::profile::perf::{FREQUENCY_HZ, Recording, Sample};
use fulmar_lab::profile::symbols::Symbols;
use fulmar_lab::profile::{Part, Shares, flame};
use fulmar_lab::report::Machine;
use fulmar_lab::sheet::Sheet;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run a bench and say what fraction of busy time went where
#[derive(clap::Args, Debug)]
#[command(
    after_help = "fulmar-lab profile -- send --quick       what follows -- is as after `fulmar-lab bench`

Two accounts stand side by side: the ledger times the stages that paths pass in
every stack of this process; sampling (by `perf`, where it is installed) sees
the kernel as well, and draws a flame graph. For whole stacks in the graph build
with RUSTFLAGS=-Cforce-frame-pointers=yes."
)]
pub struct Args {
    /// Where the flame graph goes
    #[arg(long, value_name = "FILE.svg", default_value = "fulmar-profile.svg")]
    svg: PathBuf,
    /// One visit of a thread in so many is timed by the ledger
    #[arg(long, default_value_t = ledger::DEFAULT_EVERY, value_parser = clap::value_parser!(u32).range(1..))]
    every: u32,
    /// Samples per second
    #[arg(long, default_value_t = FREQUENCY_HZ, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    frequency: u32,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// The bench and its options
    #[arg(last = true, required = true, value_name = "BENCH ARGS")]
    bench: Vec<String>,
}

#[derive(Parser, Debug)]
#[command(name = "fulmar-lab bench")]
struct BenchLine {
    #[command(flatten)]
    args: bench::Args,
}

/// Runs the command. Must run while the process has one thread.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let words = args.bench.strip_prefix(&["bench".to_owned()]).unwrap_or(&args.bench);
    let mut line = BenchLine::parse_from(
        std::iter::once("fulmar-lab bench").chain(words.iter().map(String::as_str)),
    );
    check_files((args.json.as_deref(), args.report.as_deref()))?;
    check_files((Some(&args.svg), None))?;
    line.args.be_profiled();
    ledger::account_new_stacks(Some(args.every));
    let recording = Recording::start(args.frequency);
    if let Err(why) = &recording {
        eprintln!("fulmar: {why}; the ledger stands alone");
    }
    let done = bench::run(&line.args)?;
    let samples = recording.and_then(Recording::finish);
    let own = std::process::id();
    let samples = samples.map(|all| all.into_iter().filter(|s| s.pid == own).collect::<Vec<_>>());
    let mut symbols = Symbols::of_this_program();
    let balance = ledger::of_this_process();
    let sheet = sheet(&balance, samples.as_deref().ok(), &mut symbols);
    say(format_args!("\n{}", sheet.text()))?;
    if let Ok(samples) = &samples {
        let title = format!("fulmar-lab bench {}", words.join(" "));
        let drawn = flame::svg(&title, &symbols.folded(samples)).during("cannot draw")?;
        fulmar_lab::profile::perf::write(&args.svg, &drawn)
            .during("cannot write the flame graph")?;
        say(format_args!("\nflame graph: {}", args.svg.display()))?;
    }
    let json = sheet.json(&Machine::here(), &command_line());
    if let Some(file) = &args.json {
        write(file, &format!("{json:#}\n"))?;
    }
    if let Some(file) = &args.report {
        write(file, &sheet.page(&json).html())?;
    }
    Ok(done)
}

fn sheet(balance: &Balance, samples: Option<&[Sample]>, symbols: &mut Symbols) -> Sheet {
    let ledger = Shares::of_balance(balance);
    let sampled = samples.map(|s| symbols.shares(s));
    let rows = Part::ALL.iter().map(|part| {
        vec![
            Cell::Text(part.name().to_owned()),
            Cell::number((ledger.total() > 0.0).then(|| ledger.percent(*part)), 1),
            Cell::number(sampled.as_ref().map(|s| s.percent(*part)), 1),
            Cell::Text(part.sentence().trim().to_owned()),
        ]
    });
    let mut notes = vec![told(balance)];
    notes.extend(samples.map(|s| {
        format!("{} samples of this process; peers in other processes are not in them.", s.len())
    }));
    Sheet {
        name: "profile",
        title: "What busy time was spent for".to_owned(),
        lead: "In percent. The ledger leaves out what the program does between its calls, and sleep; \
               samples are all of the process, the bench's own work, the kernel's ways and simulated hardware \
               included."
            .to_owned(),
        columns: vec![
            ("part", "part"),
            ("ledger_pct", "ledger"),
            ("sampled_pct", "sampled"),
            ("sentence", "what belongs to it"),
        ],
        words: 1,
        rows: rows.collect(),
        bars: Some(bars(balance)),
        notes,
        ..Sheet::default()
    }
}

/// The stages that used CPU: sleep costs none, and is much longer than they are.
fn busy(balance: &Balance) -> impl Iterator<Item = &ledger::StageCost> {
    balance.stages.iter().filter(|c| c.stage != Stage::Slept)
}

/// Every stage of the ledger but sleep, a line each.
fn told(balance: &Balance) -> String {
    if balance.measured == 0 {
        return "The ledger is empty: no stack of fulmar ran in this process.".to_owned();
    }
    let all: f64 = balance.busy_ns();
    let line = |c: &ledger::StageCost| {
        let (each, share) = (c.ns / c.passes.max(1.0), c.ns * 100.0 / all.max(1.0));
        format!(
            "  {:16} {share:5.1} %  {each:9.1} ns each  {}",
            c.stage.name(),
            c.stage.sentence().trim()
        )
    };
    let lines: Vec<String> = busy(balance).map(line).collect();
    format!(
        "The ledger, stage by stage ({} visits timed of {}; a reading costs {:.1} ns, {:.1} ms in all, \
         and is taken off):\n{}",
        balance.measured,
        balance.visits,
        balance.pass_ns,
        balance.overhead_ns / 1e6,
        lines.join("\n")
    )
}

/// One bar: the stages of the ledger beside each other.
pub fn bars(balance: &Balance) -> Bars {
    let all = balance.busy_ns().max(1.0);
    let kept: Vec<_> = busy(balance).filter(|c| c.ns / all > 0.005).collect();
    let part = |(i, c): (usize, &&ledger::StageCost)| (c.stage.name().to_owned(), page::colour(i));
    Bars {
        caption: "Each stage's share of the time that the ledger has seen, sleep aside.".to_owned(),
        unit: "percent".to_owned(),
        parts: kept.iter().enumerate().map(part).collect(),
        bars: vec![Bar {
            label: "all stacks of the process".to_owned(),
            values: kept.iter().map(|c| c.ns * 100.0 / all).collect(),
            ..Bar::default()
        }],
        marks: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn what_follows_the_dashes_is_the_bench() {
        let line = "profile --every 8 -- send --quick --placement same-cpu";
        let args = Line::try_parse_from(line.split(' ')).expect("it parses").args;
        assert_eq!(args.every, 8);
        assert_eq!(args.bench[0], "send");
        assert!(Line::try_parse_from(["profile"]).is_err(), "a bench is needed");
        assert!(Line::try_parse_from(["profile", "--every", "0", "--", "send"]).is_err());
    }

    #[test]
    fn without_samples_and_without_a_ledger_it_says_so() {
        let mut symbols = Symbols::of_this_program();
        let text = sheet(&Balance::default(), None, &mut symbols).text();
        assert!(text.contains("The ledger is empty"), "{text}");
    }

    #[test]
    fn sleep_is_not_among_the_stages_of_busy_time() {
        let cost = |stage, ns| ledger::StageCost { stage, ns, passes: 1.0 };
        let stages = vec![cost(Stage::Locked, 100.0), cost(Stage::Slept, 9e9)];
        let balance = Balance { stages, measured: 1, visits: 1, ..Balance::default() };
        assert!(told(&balance).contains("locked           100.0 %"), "{}", told(&balance));
        assert!(!told(&balance).contains("slept"));
        assert_eq!(bars(&balance).bars[0].values, [100.0]);
    }
}
