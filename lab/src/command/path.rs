//! `fulmar-lab path`: where a packet's nanoseconds go, stage by stage, or in a running stack.

use crate::bench::{check_files, publish};
use crate::outcome::{During, Outcome};
use fulmar::stat::Document;
use fulmar::stat::control;
use fulmar_lab::account::{Figures, Part};
use fulmar_lab::harness::options::{Stack, runs};
use fulmar_lab::harness::report::{Report, Table, busy_warning, label, number, words};
use fulmar_lab::lock::BenchLock;
use fulmar_lab::path::{self, Options, Path, kernel, show};
use serde_json::{Value, json};
use std::path::{Path as FilePath, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Times that every stage is measured.
const RUNS: usize = 7;

/// Print the cost of a packet up to each stage of its path
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab path <udp-send|udp-recv|tcp-send|tcp-recv> [OPTIONS]
       fulmar-lab path --live [OPTIONS]",
    after_help = "  fulmar-lab path udp-send                    18 bytes, over a simulated device
  fulmar-lab path tcp-send --bytes 65536      a large write
  fulmar-lab path udp-send --stack kernel     the kernel, by calls that fail
  FULMAR_LEDGER=64 fulmar-lab netserver &     a program that counts stages ...
  fulmar-lab path --live                      ... and its figures so far"
)]
pub struct Args {
    /// The path to measure
    #[arg(value_parser = named, required_unless_present = "live", value_name = "udp-send|udp-recv|tcp-send|tcp-recv")]
    path: Option<Path>,
    /// Show the cost of the stages in running programs instead (see FULMAR_LEDGER below)
    #[arg(long, conflicts_with_all = ["path", "quick", "bytes", "threads", "runs", "stack"])]
    live: bool,
    /// Payload of a datagram, or bytes per write [default: UDP 18, TCP 64]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    bytes: Option<u32>,
    /// Largest number of threads, each with a stack of its own; every number from 1 is measured
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Number of measurements of each stage
    #[arg(long, default_value_t = RUNS, value_parser = runs)]
    runs: usize,
    /// Finish in under 20 seconds
    #[arg(long)]
    quick: bool,
    /// The stack to measure (kernel: udp-send only)
    #[arg(long, value_enum, default_value_t = Stack::Fulmar)]
    stack: Stack,
    /// Write the figures to this file (JSON)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report to this file (HTML)
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

fn named(text: &str) -> Result<Path, String> {
    let found = Path::ALL.into_iter().find(|p| p.name() == text);
    found.ok_or_else(|| format!("expected one of {}", Path::ALL.map(Path::name).join(", ")))
}

impl Args {
    /// Refuses options that the path does not support.
    fn check(&self, path: Path) -> Outcome {
        let name = path.name();
        let is_datagrams = matches!(path, Path::UdpSend | Path::UdpRecv);
        let refused = if is_datagrams && self.bytes.is_some_and(|n| n > 1472) {
            "--bytes: an unfragmented datagram has at most 1472 bytes of payload".to_owned()
        } else if path == Path::TcpRecv && self.bytes.is_some() {
            "tcp-recv does not accept --bytes: the peer sends full-sized segments; omit it"
                .to_owned()
        } else if self.stack != Stack::Fulmar && path != Path::UdpSend {
            format!(
                "--stack kernel supports udp-send only, not {name}: other paths have no call that fails at a known \
                 stage"
            )
        } else if self.stack != Stack::Fulmar && self.threads > 1 {
            "--threads requires --stack fulmar: the kernel's calls are measured by one thread"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(refused)
    }

    fn files(&self) -> (Option<&FilePath>, Option<&FilePath>) {
        (self.json.as_deref(), self.report.as_deref())
    }

    fn options(&self, path: Path) -> Options {
        let bytes = match path {
            Path::UdpSend | Path::UdpRecv => 18,
            Path::TcpSend | Path::TcpRecv => 64,
        };
        Options {
            path,
            bytes: self.bytes.map_or(bytes, |b| b as usize),
            threads: self.threads.into(),
            runs: self.runs,
            slice: Duration::from_millis(if self.quick { 15 } else { 60 }),
        }
    }
}

/// Runs the command. Must run while the process has one thread.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let Some(path) = args.path else { return live(args) };
    let options = args.options(path);
    args.check(path)?;
    check_files(args.files())?;
    let _lock = BenchLock::take().during("cannot start the bench")?;
    let isolated = fulmar_gateway::netns::enter();
    if let Some(warning) = busy_warning() {
        eprintln!("{warning}");
    }
    let mut reports = Vec::new();
    if args.stack.has_fulmar() {
        reports.push(show::report(&path::run(&options).during("cannot measure")?));
    }
    if args.stack.has_kernel() {
        isolated.during("cannot create a namespace to measure the kernel in")?;
        let depths = kernel::run(options.bytes, options.runs, options.slice);
        let depths = depths.during("cannot measure the kernel")?;
        reports.push(show::kernel_report(&depths, options.bytes));
    }
    publish(args.files(), &reports)
}

/// The accounts of the running stacks that keep one.
fn live(args: &Args) -> Outcome<ExitCode> {
    let kept: Vec<Report> = documents().iter().filter_map(live_report).collect();
    if kept.is_empty() {
        return Err(
            "no running stack measures its stages; start the program with FULMAR_LEDGER=64 in its environment, or \
             build its \
             stack with Builder::account"
                .to_owned(),
        );
    }
    publish(args.files(), &kept)
}

/// The documents of all stacks that answer.
fn documents() -> Vec<Document> {
    let ask = |socket: PathBuf| control::ask(&socket).ok().flatten();
    let texts = control::sockets().into_iter().filter_map(ask);
    texts.filter_map(|text| serde_json::from_str(&text).ok()).collect()
}

/// The account in a stack's document, if there is one.
fn live_report(document: &Document) -> Option<Report> {
    let found = Figures::of_document(document.ledger.as_ref()?);
    let title = format!("{} (pid {})", document.name, document.pid);
    let found = Figures { title: title.clone(), ..found };
    let columns = [
        label("stage", "stage"),
        number("passes", "passes", 0, ""),
        number("ns_each", "ns each", 1, ""),
        number("ns_per_packet", "ns/packet", 1, ""),
        number("ns_per_byte", "ns/byte", 3, ""),
        number("share_pct", "% busy", 1, ""),
        words("sentence", "description"),
    ];
    let rows = found.parts.iter().map(live_row).chain([sum_row(&found)]);
    Some(Report {
        name: "path_live".to_owned(),
        title: format!("{title}: CPU time by stage"),
        tables: vec![Table::of("", columns, rows)],
        notes: found.sentences().to_vec(),
        accounts: vec![found.json()],
        ..Report::default()
    })
}

fn live_row(part: &Part) -> Value {
    json!({
        "stage": part.stage,
        "passes": part.passes,
        "ns_each": part.ns_each,
        "ns_per_packet": part.ns_per_packet,
        "ns_per_byte": part.ns_per_byte,
        "share_pct": part.share_pct,
        "sentence": part.sentence,
    })
}

/// All stages but sleep.
fn sum_row(found: &Figures) -> Value {
    let stages_ns = found.sum_ns - found.overhead_ns;
    json!({
        "stage": "sum",
        "ns_per_packet": found.ns_per_packet(),
        "ns_per_byte": stages_ns / found.bytes.max(1.0),
        "share_pct": if stages_ns > 0.0 { 100.0 } else { 0.0 },
        "sentence": "All stages except sleep.",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_lab::harness::report::Machine;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        crate::outcome::parse(line.split_whitespace())
    }

    #[test]
    fn a_path_or_live_is_needed() {
        assert!(parse("path").is_err());
        assert!(parse("path --live udp-send").is_err());
        assert!(parse("path udp-sned").expect_err("a typo").to_string().contains("udp-send"));
        let args = parse("path tcp-send --threads 2 --bytes 65536").expect("it parses");
        let options = args.options(Path::TcpSend);
        assert_eq!((options.threads, options.bytes), (2, 65536));
        assert!(parse("path udp-send --runs 0").is_err());
        assert!(parse("path --live --runs 5").is_err());
    }

    #[test]
    fn useless_options_of_a_path_are_refused_with_a_reason() {
        let check = |line: &str| {
            let args = parse(line).expect("it parses");
            args.check(args.path.expect("a path")).map_err(|e| e.to_string())
        };
        for (line, word) in [
            ("path udp-send --stack kernel --threads 2", "--threads"),
            ("path tcp-recv --bytes 64", "--bytes"),
            ("path udp-recv --bytes 1473", "1472"),
            ("path tcp-recv --stack kernel", "udp-send only"),
        ] {
            let said = check(line).expect_err(line);
            assert!(said.contains(word), "{said}");
        }
        for line in ["path udp-send --threads 2", "path tcp-send --bytes 65536"] {
            assert_eq!(check(line), Ok(()), "{line}");
        }
    }

    #[test]
    fn a_document_without_an_account_is_passed_over() {
        let live = |document| live_report(&serde_json::from_value(document).expect("a document"));
        assert!(live(json!({"name": "x", "pid": 1})).is_none());
        assert!(live(json!({"ledger": null})).is_none());
        let report = live(json!({"name": "x", "pid": 1, "ledger": {"stages": [
            {"stage": "locked", "layer": "lock", "passes": 10.0, "ns": 500.0, "sentence": "The lock."}],
            "packets": 10, "bytes": 100, "pass_ns": 30.0, "overhead_ns": 100.0, "total_ns": 500.0}}));
        let report = report.expect("an account");
        assert_eq!(report.accounts[0]["stages"][0]["stage"], "locked");
        let text = report.text(&Machine::here());
        assert!(text.contains("locked") && text.contains("50.0"), "{text}");
        assert!(text.contains("+20.0 % off"), "{text}");
    }
}
