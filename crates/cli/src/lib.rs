//! The command `fulmar`: one file per subcommand, each with its own declaration of options. What other
//! commands share with it (devices, names of hosts, failures, output) is public.

#![forbid(unsafe_code)]

pub mod bounds;
pub mod device;
pub mod failure;
pub mod faults;
pub mod format;
pub mod gateway;
pub mod interrupt;
pub mod manual;
mod metrics;
pub mod nc;
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

/// What an error that is not a usage error exits with; clap uses 2 for those as well.
const FAILED: u8 = 2;

/// Ends a command: its status, or its failure as a sentence on standard error.
pub fn exit(command: &str, outcome: Outcome<ExitCode>) -> ExitCode {
    interrupt::yield_to_end();
    // A thread that still waits for standard input keeps its stack; the control socket must go all the same.
    fulmar::control::remove_own();
    outcome.unwrap_or_else(|failure| {
        eprintln!("{command}: {failure}");
        ExitCode::from(FAILED)
    })
}
