//! The command `fulmar`: one file per subcommand, each with its own declaration of options. Public is what
//! `fulmar-lab` uses, too: devices, names of hosts, failures, output.

#![forbid(unsafe_code)]

pub mod bounds;
pub mod device;
mod exec;
pub mod failure;
pub mod faults;
pub mod format;
pub mod gateway;
pub mod interrupt;
pub mod manual;
mod metrics;
pub mod nc;
pub mod options;
pub mod ping;
pub mod resolve;
mod route_spec;
mod rtt;
pub mod run;
pub mod sandbox;
pub mod say;
pub mod stat;
pub mod top;
pub mod transfer;

use failure::Outcome;
use std::process::ExitCode;

/// Exit status of an error; clap exits with the same status on a usage error.
const FAILED: u8 = 2;

/// Ends a command: its status, or its failure as a sentence on standard error.
pub fn exit(command: &str, outcome: Outcome<ExitCode>) -> ExitCode {
    interrupt::wait_if_exiting();
    // A thread that still waits for standard input keeps its stack; the control socket must go all the same.
    fulmar::control::remove_own();
    outcome.unwrap_or_else(|failure| {
        eprintln!("{command}: {failure}");
        ExitCode::from(FAILED)
    })
}
