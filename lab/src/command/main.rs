//! The command `fulmar-lab`: one file per subcommand, each with its own declaration of options.

#![forbid(unsafe_code)]

mod bench;
mod netsend;
mod netserver;
mod network;
mod outcome;
mod page;
mod path;
mod profile;
mod reproduce;
mod sim;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Measure fulmar against the kernel, profile it, reproduce published tables, and simulate networks
#[derive(Parser, Debug)]
#[command(
    name = "fulmar-lab",
    version,
    after_help = "A first try, without root:
  fulmar-lab bench stream --quick"
)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Bench(bench::Args),
    Page(page::Args),
    Path(path::Args),
    Profile(profile::Args),
    Reproduce(reproduce::Args),
    Sim(sim::Args),
    Netserver(netserver::Args),
    Netsend(netsend::Args),
}

/// Exit status of an error; clap exits with the same status on a usage error.
const FAILED: u8 = 2;

/// Counts allocations, so that the bench can tell whether the data path makes any.
#[global_allocator]
static HEAP: fulmar_lab::heap::Counting = fulmar_lab::heap::Counting;

fn main() -> ExitCode {
    // In a kernel peer of a bench this does not return.
    fulmar_lab::child::dispatch();
    let outcome = match &Line::parse().command {
        Command::Bench(args) => bench::run(args),
        Command::Page(args) => page::run(args),
        Command::Path(args) => path::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Reproduce(args) => reproduce::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Netserver(args) => netserver::run(args),
        Command::Netsend(args) => netsend::run(args),
    };
    // A thread that does not end keeps its stack; the control socket must go all the same.
    fulmar::stat::control::remove_own();
    outcome.unwrap_or_else(|why| {
        eprintln!("fulmar-lab: {why}");
        ExitCode::from(FAILED)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_option_is_declared_soundly() {
        Line::command().debug_assert();
    }
}
