//! `fulmar-lab bench`: options, progress and reports around the laboratory's measurements.

use crate::bench_burst::BurstArgs;
use crate::bench_recv::RecvArgs;
use crate::bench_route::RouteArgs;
use crate::bench_scale::{self, ScaleArgs};
use crate::bench_send::{SendArgs, SendFileArgs};
use crate::bench_trust::TrustArgs;
use crate::bench_udp::UdpArgs;
use crate::bench_wake::WakeArgs;
use crate::stream::{self, Device, Options, Stack};
use clap::Subcommand;
use fulmar_cli::bounds::runs;
use fulmar_cli::failure::{During, Failure, Outcome};
use fulmar_cli::say::say;
use fulmar_lab::account::Figures;
use fulmar_lab::bench::Outcome as Measured;
use fulmar_lab::burst;
use fulmar_lab::cpu::Placement;
use fulmar_lab::lock::BenchLock;
use fulmar_lab::page;
use fulmar_lab::recv;
use fulmar_lab::report::{self, Machine};
use fulmar_lab::routes;
use fulmar_lab::scale;
use fulmar_lab::send;
use fulmar_lab::trust;
use fulmar_lab::udp;
use fulmar_lab::wake;
use serde_json::Value;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Time for everything without --quick or --seconds.
const FULL: Duration = Duration::from_secs(110);
/// Time for everything with --quick: what users wait for stays under 20 s, set-up included.
const QUICK: Duration = Duration::from_secs(16);
/// Rounds at most: far more than the intervals need.
const MAX_RUNS: usize = 200;

/// Measure one way of moving bytes against another, and against the kernel
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    Stream(StreamArgs),
    Send(SendArgs),
    Sendfile(SendFileArgs),
    Recv(RecvArgs),
    Burst(BurstArgs),
    Route(RouteArgs),
    Scale(ScaleArgs),
    Trust(TrustArgs),
    Udp(UdpArgs),
    Wake(WakeArgs),
}

/// Bulk TCP, both directions: fulmar and the kernel, the kernel alone, the floor of the device
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench stream [OPTIONS]",
    after_help = "Costs are CPU time per KB (1024 bytes) that was moved. The floor is the
least that any TCP over the same device against the same kernel peer can cost.
It makes its own namespaces and leaves nothing behind."
)]
struct StreamArgs {
    /// Be done in under 20 seconds; the intervals are wider (not with --seconds)
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// Seconds for everything [default: 110]
    #[arg(long, value_parser = fulmar_cli::bounds::budget)]
    seconds: Option<Duration>,
    /// Rounds at most; every way runs once per round
    #[arg(long, default_value_t = MAX_RUNS, value_parser = runs)]
    runs: usize,
    /// Where the two ends run; both by default
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    placement: Vec<Placement>,
    /// Over which device; auto takes TAP, else AF_PACKET on veth
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Whose TCP; kernel measures this machine alone
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page for the browser to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Write fulmar's frames to this file (pcapng); the figures then mean little
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
}

pub fn placement(text: &str) -> Result<Placement, String> {
    let all = [Placement::SameCpu, Placement::TwoCpus, Placement::Unpinned];
    let found = all.into_iter().find(|p| p.name() == text.replace('-', "_"));
    found.ok_or_else(|| format!("`{text}` is not one of same-cpu, two-cpus, unpinned"))
}

impl StreamArgs {
    fn options(&self) -> Options {
        let both = vec![Placement::SameCpu, Placement::TwoCpus];
        Options {
            budget: if self.quick { QUICK } else { self.seconds.unwrap_or(FULL) },
            runs: self.runs,
            placements: if self.placement.is_empty() { both } else { self.placement.clone() },
            device: self.device,
            stack: self.stack,
            pcap: self.pcap.clone(),
        }
    }
}

/// Runs the command. Must run while the process has one thread.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    check_files(args.what.files())?;
    // Before the namespaces: the lock's name belongs to the one we come from.
    let _lock = BenchLock::take().map_err(cannot_start)?;
    let isolated = fulmar_netns::enter();
    let is_isolated = isolated.is_ok();
    if let Some(warning) = report::busy_warning() {
        eprintln!("{warning}");
    }
    let measured = match &args.what {
        What::Stream(args) => stream::run(&args.options(), isolated),
        What::Send(args) => send::bench::run(&args.options(), isolated),
        What::Sendfile(args) => send::bench::run(&args.options(), isolated),
        What::Recv(args) => recv::bench::run(&args.options(), isolated),
        What::Burst(args) => return run_burst(args, isolated),
        What::Route(args) => return run_route(args),
        What::Scale(args) => return run_scale(args),
        What::Trust(args) => return run_trust(args, isolated),
        What::Udp(args) => return run_udp(args, isolated),
        What::Wake(args) => return run_wake(args, isolated),
    };
    let measured = measured.during("cannot measure")?;
    let machine = Machine::here();
    say(report::text(&machine, &measured))?;
    write_reports(&args.what, is_isolated, &machine, &measured)?;
    Ok(ExitCode::SUCCESS)
}

/// Tables have no ends and move no bytes: their report is their own.
fn run_route(args: &RouteArgs) -> Outcome<ExitCode> {
    let found = routes::run(&args.options()).during("cannot measure")?;
    let machine = Machine::here();
    say(found.text(&machine))?;
    write_own(args.files(), &found.json(&machine, &command_line()))
}

/// Sockets cost per packet: their report is their own.
fn run_scale(args: &ScaleArgs) -> Outcome<ExitCode> {
    let bar = bench_scale::progress();
    let found = scale::run(&args.options(), &mut |what, made, all| {
        bar.set_message(what);
        bar.set_length(all as u64);
        bar.set_position(made as u64);
    });
    bar.finish_and_clear();
    let found = found.during("cannot measure")?;
    let machine = Machine::here();
    say(found.text(&machine))?;
    write_own(args.files(), &found.json(&machine, &command_line()))
}

/// Frames cost, and connections are served or not: its report is its own.
fn run_trust(args: &TrustArgs, isolated: io::Result<()>) -> Outcome<ExitCode> {
    let bar = bench_scale::progress();
    let found = trust::run(&args.options(), isolated, &mut |what, done, all| {
        bar.set_message(what);
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let found = found.during("cannot measure")?;
    let machine = Machine::here();
    say(found.text(&machine))?;
    write_own(args.files(), &found.json(&machine, &command_line()))
}

/// Datagrams cost per packet: their report is their own.
fn run_udp(args: &UdpArgs, isolated: io::Result<()>) -> Outcome<ExitCode> {
    let options = args.options();
    let found = udp::run(&options, isolated).during("cannot measure")?;
    let machine = Machine::here();
    say(found.text(&machine))?;
    if !has_files(args.files()) {
        return Ok(ExitCode::SUCCESS);
    }
    let mut json = found.json(&machine, &command_line());
    add_accounts(&mut json, udp::accounts(&options));
    write_own(args.files(), &json)
}

/// Writes the reports of a bench that has its own.
fn write_own(
    (json_file, page_file): (Option<&Path>, Option<&Path>),
    json: &Value,
) -> Outcome<ExitCode> {
    if let Some(file) = json_file {
        write(file, &format!("{json:#}\n"))?;
    }
    if let Some(file) = page_file {
        write(file, &page::report::page(json).html())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What is waited for is frames, not bytes: its report is its own.
fn run_wake(args: &WakeArgs, isolated: io::Result<()>) -> Outcome<ExitCode> {
    let found = wake::run(&args.options(), isolated).during("cannot measure")?;
    let machine = Machine::here();
    say(found.text(&machine))?;
    let json = found.json(&machine, &command_line());
    let (json_file, page_file) = args.files();
    if let Some(file) = json_file {
        write(file, &format!("{json:#}\n"))?;
    }
    if let Some(file) = page_file {
        write(file, &found.page(&json).html())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Frames are no bytes of a stream: their report is their own.
fn run_burst(args: &BurstArgs, isolated: io::Result<()>) -> Outcome<ExitCode> {
    let options = args.options();
    let found = burst::run(&options, isolated).during("cannot measure")?;
    let machine = Machine::here();
    say(found.text(&machine))?;
    if !has_files(args.files()) {
        return Ok(ExitCode::SUCCESS);
    }
    let mut json = found.json(&machine, &command_line());
    add_accounts(&mut json, burst::accounts(&options));
    write_own(args.files(), &json)
}

/// Whether a report is asked for: what only reports show is not measured otherwise.
fn has_files((json_file, page_file): (Option<&Path>, Option<&Path>)) -> bool {
    json_file.or(page_file).is_some()
}

/// What the stages of the stack cost a packet, which takes a second or two to find out. A report without it
/// is still a report.
fn add_accounts(json: &mut Value, found: io::Result<Vec<Figures>>) {
    match found {
        Ok(all) => json["accounts"] = all.iter().map(Figures::json).collect(),
        Err(e) => eprintln!("the stages of the stack are not in the report: {e}"),
    }
}

impl What {
    /// Where the JSON and the page go.
    fn files(&self) -> (Option<&Path>, Option<&Path>) {
        match self {
            What::Stream(a) => (a.json.as_deref(), a.report.as_deref()),
            What::Send(a) => a.matrix.files(),
            What::Sendfile(a) => a.matrix.files(),
            What::Recv(a) => a.files(),
            What::Burst(a) => a.files(),
            What::Route(a) => a.files(),
            What::Scale(a) => a.files(),
            What::Trust(a) => a.files(),
            What::Udp(a) => a.files(),
            What::Wake(a) => a.files(),
        }
    }
}

impl Args {
    /// Leaves out what only stands beside the ways: limits and floors, which are not fulmar's work.
    pub fn be_profiled(&mut self) {
        match &mut self.what {
            What::Send(a) => a.matrix.is_profiled = true,
            What::Sendfile(a) => a.matrix.is_profiled = true,
            What::Recv(a) => a.is_profiled = true,
            _ => {}
        }
    }
}

/// Why a bench cannot start, with what to do.
pub fn cannot_start(error: io::Error) -> Failure {
    match error.kind() {
        // Not a port but the lock, which has its own words for it.
        io::ErrorKind::AddrInUse => Failure::new(format!("cannot start the bench: {error}")),
        _ => Failure::io("cannot start the bench", &error),
    }
}

fn write_reports(
    what: &What,
    is_isolated: bool,
    machine: &Machine,
    measured: &Measured,
) -> Outcome {
    let (json_file, page_file) = what.files();
    if !has_files(what.files()) {
        return Ok(());
    }
    let command = command_line();
    let mut json: Value = report::json(machine, &command, measured);
    match what {
        What::Send(_) => add_stages(&mut json),
        What::Recv(args) => {
            add_accounts(&mut json, recv::account::accounts(&args.options(), is_isolated))
        }
        _ => {}
    }
    if let Some(file) = json_file {
        write(file, &format!("{json:#}\n"))?;
    }
    if let Some(file) = page_file {
        write(file, &page::report::page(&json).html())?;
    }
    Ok(())
}

/// Where the time of one write goes, which takes about a second to find out. A report without it is
/// still a report.
pub fn add_stages(json: &mut Value) {
    if let Err(e) = send::stages::add_to(json) {
        eprintln!("the stages of a write are not in the report: {e}");
    }
}

/// Writes a report.
pub fn write(file: &Path, text: &str) -> Outcome {
    std::fs::write(file, text).during(format_args!("cannot write {}", file.display()))
}

/// Whether the reports can be written once there is something in them. What is there stays until then.
pub fn check_files((json, page): (Option<&Path>, Option<&Path>)) -> Outcome {
    if json.is_some() && json == page {
        return Err(Failure::new("--json and --report name the same file; give each its own"));
    }
    for file in [json, page].into_iter().flatten() {
        let is_new = !file.exists();
        let opened = OpenOptions::new().append(true).create(true).open(file);
        opened.during(format_args!("cannot write {}", file.display()))?;
        if is_new {
            // An empty one would be no report, should the bench be interrupted.
            let _ = std::fs::remove_file(file);
        }
    }
    Ok(())
}

/// The command as it is typed, wherever the program lies.
pub fn command_line() -> Vec<String> {
    std::iter::once("fulmar-lab".to_owned()).chain(std::env::args().skip(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: StreamArgs,
    }

    fn options(line: &str) -> Options {
        let words = std::iter::once("stream").chain(line.split_whitespace());
        Line::try_parse_from(words).expect("it parses").args.options()
    }

    #[test]
    fn both_placements_are_measured_unless_one_is_asked_for() {
        assert_eq!(options("").placements, [Placement::SameCpu, Placement::TwoCpus]);
        assert_eq!(options("--placement two-cpus").placements, [Placement::TwoCpus]);
        assert!(Line::try_parse_from(["stream", "--placement", "three"]).is_err());
    }

    #[test]
    fn a_second_bench_is_told_of_the_first() {
        let _first = BenchLock::take();
        let Err(second) = BenchLock::take().map_err(cannot_start) else { panic!("two locks") };
        assert!(second.to_string().contains("another fulmar-lab bench runs here"), "{second}");
    }

    #[test]
    fn quick_stays_under_twenty_seconds_and_full_under_two_minutes() {
        assert!(options("--quick").budget < Duration::from_secs(20));
        assert!(options("").budget < Duration::from_secs(120));
        assert_eq!(options("--seconds 5").budget, Duration::from_secs(5));
        assert!(Line::try_parse_from(["stream", "--quick", "--seconds", "5"]).is_err());
    }
}
