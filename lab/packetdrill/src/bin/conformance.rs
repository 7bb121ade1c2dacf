//! Runs the public packetdrill suites against fulmar and prints the table of docs/conformance.md. `make
//! conformance` finds or fetches what this needs.

use std::path::PathBuf;
use std::process::ExitCode;

use fulmar_packetdrill::suite::{self, Place};

const USAGE: &str = "usage: conformance --packetdrill PROGRAM --library LIBFULMAR_PACKETDRILL_SO \
                     [--google DIR] [--freebsd DIR] [--own DIR] [--only TEXT]";

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<bool, String> {
    let mut arguments = std::env::args().skip(1);
    let (mut program, mut library, mut only) = (None, None, String::new());
    let mut suites = Vec::new();
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(USAGE)?;
        match name.as_str() {
            "--packetdrill" => program = Some(PathBuf::from(value)),
            "--library" => library = Some(PathBuf::from(value)),
            "--only" => only = value,
            _ => {
                let suite = name.strip_prefix("--").and_then(suite::by_name).ok_or(USAGE)?;
                suites.push((suite, PathBuf::from(value)));
            }
        }
    }
    let place = Place { program: program.ok_or(USAGE)?, library: library.ok_or(USAGE)?, only };
    suite::run_all(&place, &suites)
}
