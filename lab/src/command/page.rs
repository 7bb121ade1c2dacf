//! `fulmar-lab page`: the page of a report, made again from its JSON.

use crate::outcome::{During, Outcome, say};
use fulmar_lab::harness::page;
use std::path::PathBuf;
use std::process::ExitCode;

/// Convert JSON reports to HTML pages
#[derive(clap::Args, Debug)]
#[command(after_help = "fulmar-lab page results/send/send.json > send.html
fulmar-lab page results/*/*.json      writes FILE.html beside each FILE.json")]
pub struct Args {
    /// Reports written by --json. The page of a single report is printed; the pages of several are written next to them
    #[arg(required = true, value_name = "FILE.json")]
    files: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    for file in &args.files {
        let text = std::fs::read_to_string(file);
        let text = text.during(format_args!("cannot read {}", file.display()))?;
        let report = serde_json::from_str(&text)
            .map_err(|e| format!("{} is not a report: {e}", file.display()))?;
        match &args.files[..] {
            [_] => say(page::html(&report).trim_end())?,
            _ => crate::bench::write(&file.with_extension("html"), &page::html(&report))?,
        }
    }
    Ok(ExitCode::SUCCESS)
}
