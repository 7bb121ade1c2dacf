//! `fulmar-lab profile`: runs a bench and prints its busy time by purpose.

use crate::bench::{self, check_files, publish};
use crate::outcome::{During, Outcome, say};
use clap::Parser;
use fulmar::stat::ledger;
use fulmar::stat::ledger::{Account, Stage};
use fulmar_lab::harness::report::{Chart, Report, Table, label, number, words};
use fulmar_lab::profile::perf::{FREQUENCY_HZ, Recording, Sample};
use fulmar_lab::profile::symbols::Symbols;
use fulmar_lab::profile::{Part, Shares, flame};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Run a benchmark and show how its busy time is divided
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:
  fulmar-lab profile -- send --quick

Two methods are reported side by side: the ledger measures the time between
stages in every fulmar stack of this process; `perf`, if installed, also samples
the kernel and provides the flame graph. For complete call stacks in the graph,
build with RUSTFLAGS=-Cforce-frame-pointers=yes.")]
pub struct Args {
    /// Write the flame graph to this file
    #[arg(long, value_name = "FILE.svg", default_value = "fulmar-profile.svg")]
    svg: PathBuf,
    /// Sample one in N calls into the stack for the time by stage
    #[arg(long, value_name = "N", default_value_t = ledger::DEFAULT_EVERY, value_parser = clap::value_parser!(u32).range(1..))]
    every: u32,
    /// Samples of `perf` per second
    #[arg(long, default_value_t = FREQUENCY_HZ, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    frequency: u32,
    /// Write the figures to this file (JSON)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report to this file (HTML)
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// The benchmark and its options, as after `fulmar-lab bench`
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
        eprintln!("fulmar-lab: {why}; reporting the ledger only");
    }
    let done = bench::run(&line.args)?;
    let samples = recording.and_then(Recording::finish);
    let own = std::process::id();
    let samples = samples.map(|all| all.into_iter().filter(|s| s.pid == own).collect::<Vec<_>>());
    let mut symbols = Symbols::of_this_program();
    let account = ledger::of_this_process();
    let report = report(&account, samples.as_deref().ok(), &mut symbols);
    publish((args.json.as_deref(), args.report.as_deref()), &[report])?;
    if let Ok(samples) = &samples {
        let title = format!("fulmar-lab bench {}", words.join(" "));
        let drawn =
            flame::svg(&title, &symbols.folded(samples)).during("cannot draw the flame graph")?;
        fulmar_lab::profile::perf::write(&args.svg, &drawn)
            .during("cannot write the flame graph")?;
        say(format_args!("\nflame graph: {}", args.svg.display()))?;
    }
    Ok(done)
}

fn report(account: &Account, samples: Option<&[Sample]>, symbols: &mut Symbols) -> Report {
    let ledger = Shares::of_account(account);
    let sampled = samples.map(|s| Sampled::of(s, symbols));
    let columns = [
        label("part", "part"),
        number("ledger_pct", "ledger\n%", 1, ""),
        number("sampled_pct", "samples\n%", 1, ""),
        number("sampled_user_pct", "of these\nuser", 1, ""),
        number("sampled_kernel_pct", "of these\nkernel", 1, ""),
        words("sentence", "functions"),
    ];
    let row = |part: Part| {
        json!({
            "part": part.name(),
            "ledger_pct": (ledger.total() > 0.0).then(|| ledger.percent(part)),
            "sampled_pct": sampled.as_ref().map(|s| s.user_percent(part) + s.kernel_percent(part)),
            "sampled_user_pct": sampled.as_ref().map(|s| s.user_percent(part)),
            "sampled_kernel_pct": sampled.as_ref().map(|s| s.kernel_percent(part)),
            "sentence": part.sentence().trim(),
        })
    };
    let parts = Table::of("By part", columns, Part::ALL.map(row));
    let mut notes = vec![told(account)];
    notes.extend(samples.map(|s| {
        format!("{} samples of this process; peers in other processes are not included.", s.len())
    }));
    Report {
        name: "profile".to_owned(),
        title: "Busy time by purpose".to_owned(),
        lead: "The two methods attribute the kernel's work differently. The ledger charges a system call to the \
            stage that makes it: its device row includes all work of the kernel in a read or a write. A sample in \
            the kernel is charged to the kernel's function, such as copying or waking a thread. The ledger excludes \
            sleep and the program's work between its calls; the samples cover the whole process, including the \
            benchmark's own work and simulated hardware."
            .to_owned(),
        tables: vec![parts, stages(account)],
        notes,
        ..Report::default()
    }
}

/// How samples divide, those in user mode and those in the kernel.
struct Sampled {
    user: Shares,
    kernel: Shares,
}

impl Sampled {
    fn of(samples: &[Sample], symbols: &mut Symbols) -> Sampled {
        let (kernel, user): (Vec<_>, Vec<_>) = samples.iter().partition(|s| s.is_in_kernel());
        Sampled { user: symbols.shares(user), kernel: symbols.shares(kernel) }
    }

    fn user_percent(&self, part: Part) -> f64 {
        self.user.percent(part) * self.user.total() / self.total()
    }

    fn kernel_percent(&self, part: Part) -> f64 {
        self.kernel.percent(part) * self.kernel.total() / self.total()
    }

    fn total(&self) -> f64 {
        (self.user.total() + self.kernel.total()).max(1.0)
    }
}

/// Every stage of the ledger that used CPU: sleep costs none, and is much longer than they are.
fn stages(account: &Account) -> Table {
    let all = account.busy_ns().max(1.0);
    let row = |c: &ledger::StageTime| {
        json!({
            "stage": c.stage.name(),
            "share_pct": c.ns * 100.0 / all,
            "ns_each": c.ns / c.passes.max(1.0),
            "sentence": c.stage.sentence().trim(),
        })
    };
    let columns = [
        label("stage", "stage"),
        number("share_pct", "% of the ledger", 1, ""),
        number("ns_each", "ns each", 1, ""),
        words("sentence", "description"),
    ];
    let rows = account.stages.iter().filter(|c| c.stage != Stage::Slept).map(row);
    let chart = Chart { unit: "percent", parts: &["share_pct"], group: &[], x: None };
    let rows: Vec<Value> = rows.collect();
    Table { chart: Some(chart), ..Table::of("The ledger, stage by stage", columns, rows) }
}

fn told(account: &Account) -> String {
    if account.measured == 0 {
        return "The ledger is empty: no stack of fulmar ran in this process.".to_owned();
    }
    format!(
        "The ledger timed {} of {} calls; reading the clock costs {:.1} ns, {:.1} ms in all, and is subtracted.",
        account.measured,
        account.visits,
        account.pass_ns,
        account.overhead_ns / 1e6
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::parse;
    use fulmar_lab::harness::report::Machine;

    #[test]
    fn arguments_after_the_dashes_are_the_bench() {
        let line = "profile --every 8 -- send --quick --placement same-cpu";
        let args: Args = parse(line.split(' ')).expect("it parses");
        assert_eq!(args.every, 8);
        assert_eq!(args.bench[0], "send");
        assert!(parse::<Args>(["profile"]).is_err(), "a bench is needed");
        assert!(parse::<Args>(["profile", "--every", "0", "--", "send"]).is_err());
    }

    #[test]
    fn without_samples_and_without_a_ledger_it_says_so() {
        let mut symbols = Symbols::of_this_program();
        let text = report(&Account::default(), None, &mut symbols).text(&Machine::here());
        assert!(text.contains("The ledger is empty"), "{text}");
    }

    #[test]
    fn sleep_is_not_among_the_stages_of_busy_time() {
        let cost = |stage, ns| ledger::StageTime { stage, ns, passes: 1.0 };
        let stages = vec![cost(Stage::Locked, 100.0), cost(Stage::Slept, 9e9)];
        let mut account = Account::default();
        (account.stages, account.measured, account.visits) = (stages, 1, 1);
        let rows = super::stages(&account).rows;
        assert_eq!((rows.len(), &rows[0]["share_pct"]), (1, &json!(100.0)));
    }
}
