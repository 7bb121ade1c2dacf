//! The command `fulmar`: one file per subcommand, each with its own declaration of options.

#![forbid(unsafe_code)]

mod bounds;
mod device;
mod exec;
mod failure;
mod format;
mod gateway;
mod interrupt;
mod manual;
mod metrics;
mod nc;
#[cfg(test)]
mod options;
mod ping;
mod policy;
mod resolve;
mod route_spec;
mod rtt;
mod run;
mod sandbox;
mod say;
mod stat;
mod top;
mod transfer;

use clap::{CommandFactory, Parser, Subcommand};
use failure::Outcome;
use std::process::ExitCode;

/// Exit status of an error; clap exits with the same status on a usage error.
const FAILED: u8 = 2;

/// A TCP/IP stack in user space: use it and inspect it
#[derive(Parser, Debug)]
#[command(
    name = "fulmar",
    version,
    after_help = "A first try, without root:
  fulmar sandbox -- fulmar ping -c 3 10.77.0.1

Man pages: fulmar man DIRECTORY. Completions: fulmar completions bash.
Benches, profiles and the simulation: fulmar-lab"
)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Nc(nc::Args),
    Ping(ping::Args),
    Send(transfer::SendArgs),
    Recv(transfer::RecvArgs),
    Stat(stat::Args),
    Top(top::Args),
    Sandbox(sandbox::Args),
    Run(run::Args),
    Policy(policy::Args),
    Gateway(Box<gateway::Args>),
    #[command(hide = true)]
    Completions(manual::CompletionArgs),
    #[command(hide = true)]
    Man(manual::ManArgs),
}

fn main() -> ExitCode {
    if let Some(line) = gateway::pasta_line(std::env::args_os()) {
        return gateway::pasta(line);
    }
    if let Some(line) = gateway::slirp::line(std::env::args_os()) {
        return gateway::slirp::run(line);
    }
    let outcome = match &Line::parse().command {
        Command::Nc(args) => nc::run(args),
        Command::Ping(args) => ping::run(args),
        Command::Send(args) => transfer::send(args),
        Command::Recv(args) => transfer::recv(args),
        Command::Stat(args) => stat::run(args),
        Command::Top(args) => top::run(args),
        Command::Sandbox(args) => sandbox::run(args),
        Command::Run(args) => run::run(args),
        Command::Policy(args) => policy::run(args),
        Command::Gateway(args) => gateway::run(args),
        Command::Completions(args) => manual::completions(args, Line::command()),
        Command::Man(args) => {
            let others = [gateway::pasta_command(), gateway::slirp::command()];
            manual::man(args, [Line::command()].into_iter().chain(others).collect())
        }
    };
    exit("fulmar", outcome)
}

/// Ends a command: its status, or its failure as a sentence on standard error.
fn exit(command: &str, outcome: Outcome<ExitCode>) -> ExitCode {
    interrupt::wait_if_exiting();
    // A thread that still waits for standard input keeps its stack; the control socket must go all the same.
    fulmar::stat::control::remove_own();
    outcome.unwrap_or_else(|failure| {
        eprintln!("{command}: {failure}");
        ExitCode::from(FAILED)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_declared_soundly() {
        Line::command().debug_assert();
    }

    /// Lines that are broken by hand and again by the terminal are hard to read, also in a man page.
    #[test]
    fn the_help_after_the_options_fits_a_terminal_of_80_columns() {
        let mut commands = vec![Line::command()];
        while let Some(command) = commands.pop() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in text.lines() {
                assert!(line.chars().count() < 80, "{}: {line}", command.get_name());
            }
            commands.extend(command.get_subcommands().cloned());
        }
    }
}
