//! `fulmar-lab path`: where a packet's nanoseconds go, stage by stage, or in a running stack.

use crate::bench::{cannot_start, check_files, command_line, write};
use crate::stream::Stack;
use fulmar_cli::bounds::{self, within};
use fulmar_cli::failure::{During, Failure, Outcome};
use fulmar_cli::say::say;
use fulmar_cli::stat::documents;
use fulmar_lab::account::{Figures, Part};
use fulmar_lab::lock::BenchLock;
use fulmar_lab::page::{Cell, stages};
use fulmar_lab::path::{self, Options, Path, kernel, show};
use fulmar_lab::report::{self, Machine};
use fulmar_lab::sheet::Sheet;
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Times that every stage is measured.
const RUNS: usize = 7;
/// More than any path takes.
const MOST_PPS: u64 = 100_000_000;

/// Print what a packet costs up to each stage of its path
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab path <udp-send|udp-recv|tcp-send|tcp-recv> [OPTIONS]
       fulmar-lab path --live [OPTIONS]",
    after_help = "Every stage is measured by calls that return there and undo what they have built.

  fulmar-lab path udp-send                    18 bytes, over a simulated device
  fulmar-lab path tcp-send --bytes 65536      a large write
  fulmar-lab path udp-send --stack kernel     this machine's kernel, as deep as errors reach
  FULMAR_LEDGER=64 fulmar-lab netserver &     a stack that keeps an account ...
  fulmar-lab path --live                      ... and what it says so far"
)]
pub struct Args {
    /// Which path
    #[arg(value_parser = named, required_unless_present = "live", value_name = "udp-send|udp-recv|tcp-send|tcp-recv")]
    path: Option<Path>,
    /// Ask running stacks that keep an account instead (see FULMAR_LEDGER below)
    #[arg(long, conflicts_with_all = ["path", "quick", "bytes", "threads", "rate", "runs", "stack"])]
    live: bool,
    /// Payload of a datagram, or bytes of a write [default: 18; of TCP 64]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    bytes: Option<u32>,
    /// Threads at most, each with a stack of its own; measured from 1 on
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Packets per second of each thread, evenly: one by one, or as many together as are due in 50 us;
    /// 0 for as many as it can (udp-send of fulmar's only; the time in between is not measured)
    #[arg(long, default_value_t = 0, value_name = "PPS", value_parser = within(0, MOST_PPS))]
    rate: u64,
    /// Times that every stage is measured
    #[arg(long, default_value_t = RUNS, value_parser = bounds::runs)]
    runs: usize,
    /// Be done in under 20 seconds
    #[arg(long)]
    quick: bool,
    /// Whose stack (kernel: udp-send only)
    #[arg(long, value_enum, default_value_t = Stack::Fulmar)]
    stack: Stack,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

fn named(text: &str) -> Result<Path, String> {
    let found = Path::ALL.into_iter().find(|p| p.name() == text);
    found.ok_or_else(|| format!("there is {}", Path::ALL.map(Path::name).join(", ")))
}

impl Args {
    /// What the path has no use for is refused, and not passed over.
    fn check(&self, path: Path) -> Outcome {
        let name = path.name();
        let is_datagrams = matches!(path, Path::UdpSend | Path::UdpRecv);
        let refused = if is_datagrams && self.bytes.is_some_and(|n| n > 1472) {
            "a datagram that is not cut has at most 1472 bytes".to_owned()
        } else if path == Path::TcpRecv && self.bytes.is_some() {
            "tcp-recv knows no --bytes: the peer sends segments of full size; leave it out"
                .to_owned()
        } else if self.stack != Stack::Fulmar && path != Path::UdpSend {
            format!(
                "the kernel can be asked about udp-send only, not {name}: its other paths have no \
                 call that fails at a known depth"
            )
        } else if self.rate > 0 && path != Path::UdpSend {
            format!("{name} knows no --rate: only udp-send can be held to one; leave it out")
        } else if self.stack != Stack::Fulmar && (self.rate > 0 || self.threads > 1) {
            "the kernel's calls are measured by one thread at full rate: give --rate and --threads \
             with --stack fulmar only"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::new(refused))
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
            rate_pps: self.rate,
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
    check_files((args.json.as_deref(), args.report.as_deref()))?;
    let _lock = BenchLock::take().map_err(cannot_start)?;
    let isolated = fulmar_netns::enter();
    if let Some(warning) = report::busy_warning() {
        eprintln!("{warning}");
    }
    let mut sheets = Vec::new();
    if args.stack != Stack::Kernel {
        sheets.push(show::sheet(&path::run(&options).during("cannot measure")?));
    }
    if args.stack != Stack::Fulmar {
        isolated.during("cannot measure the kernel without namespaces of our own")?;
        let depths = kernel::run(options.bytes, options.runs, options.slice);
        sheets
            .push(show::kernel_sheet(&depths.during("cannot measure the kernel")?, options.bytes));
    }
    say(Machine::here().sentence())?;
    print_all(args, &sheets)
}

fn print_all(args: &Args, sheets: &[Sheet]) -> Outcome<ExitCode> {
    for sheet in sheets {
        say(format_args!("\n{}", sheet.text()))?;
    }
    let (machine, command) = (Machine::here(), command_line());
    let all: Vec<Value> = sheets.iter().map(|s| s.json(&machine, &command)).collect();
    let json = match &all[..] {
        [one] => one.clone(),
        _ => Value::Array(all.clone()),
    };
    if let Some(file) = &args.json {
        write(file, &format!("{json:#}\n"))?;
    }
    if let (Some(file), Some(first)) = (&args.report, sheets.first()) {
        let mut page = first.page(&all[0]);
        for (sheet, json) in sheets.iter().zip(&all).skip(1) {
            page.sections.extend(sheet.page(json).sections);
        }
        write(file, &page.html())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The accounts of the running stacks that keep one.
fn live(args: &Args) -> Outcome<ExitCode> {
    let kept: Vec<Sheet> = documents().iter().filter_map(live_sheet).collect();
    if kept.is_empty() {
        return Err(Failure::new(
            "no running stack keeps an account; start the program with FULMAR_LEDGER=64 in its \
             environment, or build its stack with Builder::account"
                .to_owned(),
        ));
    }
    print_all(args, &kept)
}

/// The account in a stack's document, if there is one.
fn live_sheet(document: &Value) -> Option<Sheet> {
    let found = Figures::of_document(document.get("ledger").filter(|l| l.is_object())?)?;
    let title = format!("{} (pid {})", word(&document["name"]), document["pid"]);
    let found = Figures { title: title.clone(), ..found };
    let mut rows: Vec<Vec<Cell>> = found.parts.iter().map(live_row).collect();
    rows.push(sum_row(&found));
    Some(Sheet {
        name: "path_live",
        title: format!("{title}: where its time went"),
        columns: vec![
            ("stage", "stage"),
            ("passes", "passes"),
            ("ns_each", "ns each"),
            ("ns_per_packet", "ns/packet"),
            ("ns_per_byte", "ns/byte"),
            ("share_pct", "% busy"),
            ("sentence", "what it is"),
        ],
        words: 1,
        rows,
        bars: Some(stages::bars(&found.json())),
        notes: found.sentences().to_vec(),
        account: Some(found.json()),
        ..Sheet::default()
    })
}

fn live_row(part: &Part) -> Vec<Cell> {
    vec![
        Cell::Text(part.stage.clone()),
        Cell::Number(part.passes, Some(0)),
        Cell::Number(part.ns_each, Some(1)),
        Cell::Number(part.ns_per_packet, Some(1)),
        Cell::Number(part.ns_per_byte, Some(3)),
        Cell::Number(part.share_pct, Some(1)),
        Cell::Text(part.sentence.clone()),
    ]
}

/// All stages but sleep.
fn sum_row(found: &Figures) -> Vec<Cell> {
    let stages_ns = found.sum_ns - found.overhead_ns;
    vec![
        Cell::Text("sum".to_owned()),
        Cell::Nothing,
        Cell::Nothing,
        Cell::Number(found.ns_per_packet(), Some(1)),
        Cell::Number(stages_ns / found.bytes.max(1.0), Some(3)),
        Cell::Number(if stages_ns > 0.0 { 100.0 } else { 0.0 }, Some(1)),
        Cell::Text("All stages but sleep.".to_owned()),
    ]
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use serde_json::json;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Line::try_parse_from(line.split_whitespace()).map(|l| l.args)
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
        assert!(parse("path --live --rate 5").is_err());
    }

    #[test]
    fn what_a_path_has_no_use_for_is_refused_with_a_reason() {
        let check = |line: &str| {
            let args = parse(line).expect("it parses");
            args.check(args.path.expect("a path")).map_err(|e| e.to_string())
        };
        for (line, word) in [
            ("path udp-recv --rate 1000", "--rate"),
            ("path tcp-send --rate 1000", "--rate"),
            ("path udp-send --stack kernel --rate 1000", "--rate"),
            ("path udp-send --stack kernel --threads 2", "--threads"),
            ("path tcp-recv --bytes 64", "--bytes"),
            ("path udp-recv --bytes 1473", "1472"),
            ("path tcp-recv --stack kernel", "udp-send only"),
        ] {
            let said = check(line).expect_err(line);
            assert!(said.contains(word), "{said}");
        }
        for line in ["path udp-send --rate 1000 --threads 2", "path tcp-send --bytes 65536"] {
            assert_eq!(check(line), Ok(()), "{line}");
        }
    }

    #[test]
    fn a_document_without_an_account_is_passed_over() {
        assert!(live_sheet(&json!({"name": "x", "pid": 1})).is_none());
        assert!(live_sheet(&json!({"ledger": null})).is_none());
        let sheet = live_sheet(&json!({"name": "x", "pid": 1, "ledger": {"stages": [
            {"stage": "locked", "layer": "lock", "passes": 10.0, "ns": 500.0, "sentence": "The lock."}],
            "packets": 10, "bytes": 100, "pass_ns": 30.0, "overhead_ns": 100.0, "total_ns": 500.0}}));
        let sheet = sheet.expect("an account");
        let bars = sheet.bars.as_ref().map(|b| b.bars.iter().map(|b| b.label.as_str()).collect());
        assert_eq!(bars, Some(vec!["all stages", "locked"]));
        let text = sheet.text();
        assert!(text.contains("locked") && text.contains("50.0"), "{text}");
        assert!(text.contains("+20.0 % off"), "{text}");
    }
}
