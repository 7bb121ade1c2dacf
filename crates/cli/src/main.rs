//! The command `fulmar`: one file per subcommand, each with its own declaration of options.

#![forbid(unsafe_code)]

mod bench;
mod bench_burst;
mod bench_recv;
mod bench_route;
mod bench_scale;
mod bench_send;
mod bench_trust;
mod bench_udp;
mod bench_wake;
mod bounds;
mod device;
mod failure;
mod faults;
mod format;
mod interrupt;
mod nc;
mod netperf;
mod netsend;
mod netserver;
mod network;
mod path;
mod ping;
mod profile;
mod reproduce;
mod resolve;
mod route_spec;
mod rtt;
mod sandbox;
mod say;
mod sim;
mod stat;
mod stream;
mod transfer;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use std::time::Duration;

/// A TCP/IP stack in user space: use it, look into it, measure it
#[derive(Parser, Debug)]
#[command(
    name = "fulmar",
    version,
    after_help = "A first try, without root:
  fulmar sandbox -- fulmar ping -c 3 10.77.0.1"
)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Bench(bench::Args),
    Nc(nc::Args),
    Netperf(netperf::Args),
    Netreceive(netsend::ReceiveArgs),
    Netsend(netsend::SendArgs),
    Netserver(netserver::Args),
    Path(path::Args),
    Profile(profile::Args),
    Reproduce(reproduce::Args),
    Ping(ping::Args),
    Send(transfer::SendArgs),
    Recv(transfer::RecvArgs),
    Sim(sim::Args),
    Stat(stat::Args),
    Sandbox(sandbox::Args),
}

/// What an error that is not a usage error exits with; clap uses 2 for those as well.
const FAILED: u8 = 2;

/// Counts allocations, so that the bench can tell whether the data path makes any.
#[global_allocator]
static HEAP: fulmar_lab::heap::Counting = fulmar_lab::heap::Counting;

fn main() -> ExitCode {
    // In a kernel peer of a bench this does not return.
    fulmar_lab::child::dispatch();
    let outcome = match &Line::parse().command {
        Command::Bench(args) => bench::run(args),
        Command::Nc(args) => nc::run(args),
        Command::Netperf(args) => netperf::run(args),
        Command::Netreceive(args) => netsend::receive(args),
        Command::Netsend(args) => netsend::send(args),
        Command::Netserver(args) => netserver::run(args),
        Command::Path(args) => path::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Reproduce(args) => reproduce::run(args),
        Command::Ping(args) => ping::run(args),
        Command::Send(args) => transfer::send(args),
        Command::Recv(args) => transfer::recv(args),
        Command::Sim(args) => sim::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Sandbox(args) => sandbox::run(args),
    };
    interrupt::yield_to_end();
    // A thread that still waits for standard input keeps its stack; the door must go all the same.
    fulmar::control::remove_own();
    outcome.unwrap_or_else(|failure| {
        eprintln!("fulmar: {failure}");
        ExitCode::from(FAILED)
    })
}

/// Reads an option that is a number of seconds, with decimals, at most a year.
fn seconds(text: &str) -> Result<Duration, String> {
    const YEAR: f64 = 365.0 * 86_400.0;
    let number = text.parse::<f64>().ok().filter(|s| (0.0..=YEAR).contains(s));
    number
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("`{text}` is not a number of seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_option_is_declared_soundly() {
        Line::command().debug_assert();
    }

    #[test]
    fn seconds_have_decimals_and_a_limit() {
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for text in ["", "x", "-1", "NaN", "inf", "1e99"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
