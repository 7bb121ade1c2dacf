//! `fulmar-lab bench`: the options are the benches' own; what they report is printed and written here.

use crate::outcome::{During, Outcome, say};
use clap::Subcommand;
use fulmar_lab::account::Figures;
use fulmar_lab::harness::options::Common;
use fulmar_lab::harness::page;
use fulmar_lab::harness::report::{Machine, Report, busy_warning};
use fulmar_lab::lock::BenchLock;
use fulmar_lab::send::bench::What;
use fulmar_lab::{
    bulk, egress, embed, gateway, recv, scale, send, serve, tasks, trust, udp, wake, wan,
};
use serde_json::Value;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Run a benchmark of fulmar against the kernel and other baselines
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: Bench,
}

#[derive(Subcommand, Debug)]
enum Bench {
    Async(tasks::Options),
    Embed(embed::Options),
    Stream(bulk::Options),
    Send(send::bench::Writes),
    Sendfile(send::bench::Files),
    Recv(recv::bench::Options),
    Egress(egress::Options),
    Gateway(gateway::Options),
    Scale(scale::Options),
    Serve(serve::Options),
    Trust(trust::Options),
    Udp(udp::Options),
    Wake(wake::Options),
    Wan(wan::Options),
}

/// Runs the command. Must run while the process has one thread.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let common = args.what.common();
    check_files(common.files())?;
    // Before the namespaces: the lock's name belongs to the one we come from.
    let _lock = BenchLock::take().during("cannot start the bench")?;
    let isolated = fulmar_gateway::netns::enter();
    let is_isolated = isolated.is_ok();
    if let Some(warning) = busy_warning() {
        eprintln!("{warning}");
    }
    let report = match &args.what {
        Bench::Async(a) => tasks::run(a, isolated),
        Bench::Embed(a) => embed::run(a, isolated),
        Bench::Stream(a) => bulk::run(a, isolated),
        Bench::Send(a) => send::bench::run(What::Send, &a.options, isolated),
        Bench::Sendfile(a) => send::bench::run(What::SendFile, &a.options, isolated),
        Bench::Recv(a) => recv::bench::run(a, isolated),
        Bench::Egress(a) => egress::run(a, isolated),
        Bench::Gateway(a) => gateway::run(a, isolated),
        Bench::Scale(a) => scale::run(a),
        Bench::Serve(a) => serve::run(a, isolated),
        Bench::Trust(a) => trust::run(a, isolated),
        Bench::Udp(a) => udp::run(a, isolated),
        Bench::Wake(a) => wake::run(a, isolated),
        Bench::Wan(a) => wan::run(a, isolated),
    };
    let mut report = report.during("cannot measure")?;
    if common.files() != (None, None) {
        add_accounts(&mut report, args.what.accounts(is_isolated));
    }
    publish(common.files(), &[report])
}

/// Adds what the stages of the stack cost. It takes a second or two to find out, so only files show it; a report
/// without it is still a report.
pub fn add_accounts(report: &mut Report, accounts: io::Result<Vec<Figures>>) {
    match accounts {
        Ok(all) => report.accounts = all.iter().map(Figures::json).collect(),
        Err(e) => eprintln!("the report does not include the stages of the stack: {e}"),
    }
}

/// Prints reports and writes their files, the JSON and the page.
pub fn publish(
    (json_file, page_file): (Option<&Path>, Option<&Path>),
    reports: &[Report],
) -> Outcome<ExitCode> {
    let (machine, command) = (Machine::here(), command_line());
    for report in reports {
        say(report.text(&machine))?;
    }
    let mut all: Vec<Value> = reports.iter().map(|r| r.json(&machine, &command)).collect();
    let json = match all.len() {
        1 => all.remove(0),
        _ => Value::Array(all),
    };
    if let Some(file) = json_file {
        write(file, &format!("{json:#}\n"))?;
    }
    if let Some(file) = page_file {
        write(file, &page::html(&json))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Bench {
    fn common(&self) -> &Common {
        match self {
            Bench::Async(a) => &a.common,
            Bench::Embed(a) => &a.common,
            Bench::Stream(a) => &a.common,
            Bench::Send(a) => &a.options.common,
            Bench::Sendfile(a) => &a.options.common,
            Bench::Recv(a) => &a.common,
            Bench::Egress(a) => &a.common,
            Bench::Gateway(a) => &a.common,
            Bench::Scale(a) => &a.common,
            Bench::Serve(a) => &a.common,
            Bench::Trust(a) => &a.common,
            Bench::Udp(a) => &a.common,
            Bench::Wake(a) => &a.common,
            Bench::Wan(a) => &a.common,
        }
    }

    /// Cost of the stack's stages per packet.
    fn accounts(&self, is_isolated: bool) -> io::Result<Vec<Figures>> {
        match self {
            Bench::Send(a) if a.options.stack.has_fulmar() => send::account::accounts(),
            Bench::Recv(a) if a.stack.has_fulmar() => recv::account::accounts(a, is_isolated),
            Bench::Udp(a) => udp::accounts(a),
            _ => Ok(Vec::new()),
        }
    }
}

impl Args {
    /// Omits limits and floors, which are not fulmar's work.
    pub fn be_profiled(&mut self) {
        match &mut self.what {
            Bench::Send(a) => a.options.is_profiled = true,
            Bench::Sendfile(a) => a.options.is_profiled = true,
            Bench::Recv(a) => a.is_profiled = true,
            _ => {}
        }
    }
}

/// Writes a report.
pub fn write(file: &Path, text: &str) -> Outcome {
    std::fs::write(file, text).during(format_args!("cannot write {}", file.display()))
}

/// Checks that the reports can be written later. Existing files are kept until then.
pub fn check_files((json, page): (Option<&Path>, Option<&Path>)) -> Outcome {
    if json.is_some() && json == page {
        return Err("--json and --report give the same file; use different files".to_owned());
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

    #[test]
    fn a_second_bench_reports_the_running_one() {
        let _first = BenchLock::take();
        let Err(second) = BenchLock::take().during("cannot start the bench") else {
            panic!("two locks")
        };
        assert!(second.contains("another fulmar-lab bench is running"), "{second}");
    }
}
