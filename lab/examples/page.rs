//! Makes the page of a report again from its JSON: `page report.json > report.html`.

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(file) = std::env::args().nth(1) else {
        eprintln!("usage: page REPORT.json > REPORT.html");
        return ExitCode::from(2);
    };
    let report = std::fs::read_to_string(&file).map_err(|e| e.to_string());
    match report.and_then(|text| serde_json::from_str(&text).map_err(|e| e.to_string())) {
        Ok(report) => {
            let html = fulmar_lab::page::report::page(&report).html();
            let written = std::io::stdout().write_all(html.as_bytes());
            if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(e) => {
            eprintln!("cannot read {file}: {e}");
            ExitCode::FAILURE
        }
    }
}
