//! `fulmar-lab reproduce`: published tables, measured again on this machine.

use crate::bench::{add_accounts, check_files, publish};
use crate::outcome::{During, Outcome, say};
use fulmar_lab::cpu::{self, Placement};
use fulmar_lab::harness::options::{Stack, budget, placement, runs};
use fulmar_lab::harness::report::{Report, busy_warning};
use fulmar_lab::lock::BenchLock;
use fulmar_lab::reproduce::run::Options;
use fulmar_lab::reproduce::{self, Published, Reproduction, Table, placement as placed};
use fulmar_lab::send::account;
use fulmar_lab::send::bench::What;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Time for everything without --quick or --seconds.
const FULL: Duration = Duration::from_secs(150);
/// Time for everything with --quick: what users wait for stays under 20 s, set-up included.
const QUICK: Duration = Duration::from_secs(15);
const MAX_RUNS: usize = 200;

/// Measure a published table on this machine, and compare it row by row
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab reproduce [NAME] [OPTIONS]",
    after_help = "Without a name, the command lists the tables. Each is compared with:

  sosend, sendfile  today's kernel, fulmar over TAP and over a simulated device,
                    and the cost of one copy
  placement         the same, for receiving into buffers posted in advance
  path              fulmar's stages (over a simulated device) and the stages of
                    today's kernel, for each published point of the send path
  profile           today's kernel over veth and fulmar over TAP, with a verdict
                    on the three published bounds on savings

path and profile do not accept --placement and --pcap; profile does not accept
--runs. The command creates its own namespaces and removes them."
)]
pub struct Args {
    /// The table to reproduce
    #[arg(value_parser = table)]
    name: Option<Table>,
    /// Finish in under 20 seconds, with wider intervals (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Total time in seconds [default: 150; path 50, profile 40]
    #[arg(long, value_parser = budget)]
    seconds: Option<Duration>,
    /// Maximum number of rounds; each variant runs once per round [default: 200; path 7]
    #[arg(long, value_parser = runs)]
    runs: Option<usize>,
    /// CPUs of the two ends [default: two-cpus if available, else same-cpu; the published tests used two machines]
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    placement: Option<Placement>,
    /// The TCP to measure
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
    /// Write the figures to this file (JSON)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report to this file (HTML)
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Write fulmar's frames to this file (pcapng); this distorts the figures
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
}

fn table(name: &str) -> Result<Table, String> {
    let found = reproduce::ALL.into_iter().find(|t| t.name() == name);
    let names = || reproduce::ALL.map(Table::name).join(", ");
    found.ok_or_else(|| format!("expected one of {}", names()))
}

impl Args {
    fn options(&self, cpus: usize) -> Options {
        let two = if cpus > 1 { Placement::TwoCpus } else { Placement::SameCpu };
        Options {
            budget: if self.quick { QUICK } else { self.seconds.unwrap_or(FULL) },
            runs: self.runs.unwrap_or(MAX_RUNS),
            placement: self.placement.unwrap_or(two),
            stack: self.stack,
            pcap: self.pcap.clone(),
        }
    }

    /// Refuses options that the table does not support.
    fn check(&self, table: Table) -> Outcome {
        let profile = matches!(table, Table::Profile);
        let stages = profile || matches!(table, Table::Path);
        let refused = if stages && self.placement.is_some() {
            "--placement: the CPUs of its threads are fixed"
        } else if stages && self.pcap.is_some() {
            "--pcap: it cannot capture frames"
        } else if profile && self.runs.is_some() {
            "--runs: it runs each stack once, for --seconds"
        } else {
            return Ok(());
        };
        let name = table.name();
        Err(format!("`reproduce {name}` does not accept {refused}; omit it"))
    }
}

/// Runs the command. Must run while the process has one thread.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let Some(table) = args.name else {
        return say(listed().trim_end()).map(|()| ExitCode::SUCCESS);
    };
    args.check(table)?;
    check_files((args.json.as_deref(), args.report.as_deref()))?;
    // Before the namespaces: the lock's name belongs to the one we come from.
    let _lock = BenchLock::take().during("cannot start the bench")?;
    let cpus = cpu::allowed_cpus().during("cannot read the available CPUs")?.len();
    let isolated = fulmar_gateway::netns::enter();
    if let Some(warning) = busy_warning() {
        eprintln!("{warning}");
    }
    let found = match table {
        Table::Sending(table) => sending(table, args, cpus, isolated),
        Table::Placement => placement_table(args, cpus, isolated),
        Table::Profile => profile(args, isolated),
        Table::Path => path(args, cpus, isolated),
    }?;
    publish((args.json.as_deref(), args.report.as_deref()), &[found])
}

fn sending(
    table: &'static Published,
    args: &Args,
    cpus: usize,
    isolated: io::Result<()>,
) -> Outcome<Report> {
    let measured = reproduce::run::run(table, &args.options(cpus), isolated);
    let measured = measured.during("cannot measure")?;
    let found = Reproduction::of(table, &measured, cpus);
    let mut report = reproduce::show::report(&found, measured);
    let is_written = args.json.is_some() || args.report.is_some();
    if table.what == What::Send && args.stack.has_fulmar() && is_written {
        add_accounts(&mut report, account::accounts());
    }
    Ok(report)
}

fn placement_table(args: &Args, cpus: usize, isolated: io::Result<()>) -> Outcome<Report> {
    let measured = placed::run(&args.options(cpus), isolated).during("cannot measure")?;
    let found = placed::Reproduction::of(&measured);
    Ok(placed::report(&found, measured))
}

/// Seconds of each phase, sending and receiving, of each stack; as published.
const PHASE: Duration = Duration::from_secs(10);

fn profile(args: &Args, isolated: io::Result<()>) -> Outcome<Report> {
    isolated.during("cannot create a namespace to measure in")?;
    let time = match (args.quick, args.seconds) {
        (true, _) => PHASE / 4,
        (false, Some(all)) => all / 4,
        (false, None) => PHASE,
    };
    let found = reproduce::profile::run(time, args.stack).during("cannot measure")?;
    Ok(reproduce::profile::report(&found))
}

fn path(args: &Args, cpus: usize, isolated: io::Result<()>) -> Outcome<Report> {
    if args.stack.has_kernel() {
        isolated.during("cannot create a namespace to measure the kernel in")?;
    }
    let budget = if args.quick { QUICK } else { args.seconds.unwrap_or(FULL / 3) };
    let runs = args.runs.unwrap_or(reproduce::path::RUNS);
    let found = reproduce::path::run((budget, runs), cpus, args.stack);
    let found = found.during("cannot measure")?;
    Ok(reproduce::path::report(&found))
}

fn listed() -> String {
    let line =
        |t: Table| format!("  {:<10} {}\n             {}\n", t.name(), t.title(), t.source());
    let lines: String = reproduce::ALL.into_iter().map(line).collect();
    format!("Published tables that can be reproduced:\n\n{lines}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let words = std::iter::once("reproduce").chain(line.split_whitespace());
        crate::outcome::parse(words)
    }

    #[test]
    fn a_wrong_name_is_answered_with_the_right_ones() {
        assert!(parse("").expect("no name lists").name.is_none());
        assert_eq!(parse("sosend").expect("a name").name.map(Table::name), Some("sosend"));
        let error = parse("sosnd").expect_err("no such table").to_string();
        assert!(error.contains("expected one of sosend, sendfile"), "{error}");
    }

    #[test]
    fn every_reproducible_work_is_listed() {
        let list = listed();
        assert!(reproduce::ALL.iter().all(|t| list.contains(t.name()) && list.contains(t.title())));
    }

    #[test]
    fn unsupported_options_of_a_table_are_refused_by_name() {
        let check = |line: &str| {
            let args = parse(line).expect("it parses");
            args.check(args.name.expect("a table")).map_err(|e| e.to_string())
        };
        for (line, option) in [
            ("path --placement same-cpu", "--placement"),
            ("path --pcap x", "--pcap"),
            ("profile --runs 3", "--runs"),
            ("profile --pcap x", "--pcap"),
            ("profile --placement two-cpus", "--placement"),
        ] {
            let said = check(line).expect_err(line);
            assert!(said.contains(option) && said.contains("does not accept"), "{said}");
        }
        for line in ["path --runs 3 --quick", "profile --seconds 8", "sosend --runs 3 --pcap x"] {
            assert_eq!(check(line), Ok(()), "{line}");
        }
        assert!(parse("path --runs 0").is_err());
    }

    #[test]
    fn the_ends_have_a_cpu_each_where_there_are_two() {
        let args = parse("sosend --quick").expect("it parses");
        assert_eq!(args.options(1).placement, Placement::SameCpu);
        assert_eq!(args.options(2).placement, Placement::TwoCpus);
        assert!(args.options(2).budget < Duration::from_secs(20));
        let named = parse("sosend --placement same-cpu").expect("it parses");
        assert_eq!(named.options(2).placement, Placement::SameCpu);
    }
}
