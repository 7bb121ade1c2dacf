//! `fulmar ping`: echo requests from this stack, printed as by ping(8).

use crate::device::StackArgs;
use crate::failure::{Failure, Outcome};
use crate::format::millis;
use crate::interrupt::Interrupt;
use crate::nc::is_timeout;
use crate::resolve::{Family, resolve};
use crate::rtt::Summary;
use crate::say::write_out;
use std::io;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Send ICMP echo requests and print the round-trip times
#[derive(clap::Args, Debug)]
#[command(after_help = "Exit status: 0 if a reply was received, 1 if none was, 2 on an error.

Examples:
  sudo fulmar ping -c 3 10.77.0.1             the local kernel, over a new TAP
  fulmar sandbox -- fulmar ping -6 fd77::1    the same without root
  sudo fulmar ping --device packet:eth0 --addr 192.0.2.9/24 \\
    --gateway 192.0.2.1 198.51.100.1          on a real network")]
pub struct Args {
    /// Stop after this many requests
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Seconds between requests
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = crate::bounds::seconds)]
    interval: Duration,
    /// Bytes of payload per request
    #[arg(short, long, value_name = "BYTES", default_value_t = 56)]
    size: u16,
    /// Seconds to wait for each reply
    #[arg(short = 'W', long, value_name = "SECONDS", default_value = "1", value_parser = crate::bounds::seconds)]
    wait: Duration,
    /// Print only the summary
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    family: Family,
    /// Address or name of the destination
    #[arg(default_value = "10.77.0.1")]
    host: String,
    #[command(flatten)]
    stack: StackArgs,
}

/// ping counts the ICMP header with the payload of a reply.
const ICMP_HEADER_BYTES: usize = 8;

/// Runs the command.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let to = resolve(&args.host, 0, args.family)?[0].ip();
    let session = args.stack.open()?;
    let interrupt = Interrupt::catch()?;
    // With the headers of IP and ICMP.
    let total = u32::from(args.size) + if to.is_ipv6() { 48 } else { 28 };
    let heading = format!("PING {} ({to}) {}({total}) bytes of data.\n", args.host, args.size);
    if !write_out(&mut io::stdout(), heading.as_bytes())? {
        return Ok(ExitCode::SUCCESS);
    }
    let (mut summary, started) = (Summary::default(), Instant::now());
    for sequence in 1..=args.count.unwrap_or(u64::MAX) {
        let due =
            started + args.interval.saturating_mul(u32::try_from(sequence).unwrap_or(u32::MAX));
        if !one(args, &session, to, sequence, &mut summary)? || interrupt.came() {
            break;
        }
        if Some(sequence) != args.count && !interrupt.sleep_until(due) {
            break;
        }
    }
    let closing = format!("\n{}", summary.lines(&args.host, started.elapsed()));
    write_out(&mut io::stdout(), closing.as_bytes())?;
    session.close();
    Ok(ExitCode::from(u8::from(!summary.has_replies())))
}

/// One request and its reply. False: standard output is closed.
fn one(
    args: &Args,
    session: &crate::device::Session,
    to: IpAddr,
    sequence: u64,
    summary: &mut Summary,
) -> Outcome<bool> {
    summary.sent();
    let line = match session.stack().ping(to, args.size.into(), args.wait) {
        Ok(echo) => {
            summary.received(echo.rtt);
            format!(
                "{} bytes from {to}: icmp_seq={sequence} ttl={} time={} ms\n",
                echo.bytes + ICMP_HEADER_BYTES,
                echo.ttl,
                millis(echo.rtt)
            )
        }
        Err(e) if is_timeout(&e) => format!("no answer from {to}: icmp_seq={sequence}\n"),
        // The next request may succeed.
        Err(e) if e.kind() == io::ErrorKind::HostUnreachable => {
            format!("{}: icmp_seq={sequence}\n", Failure::io(format_args!("from {to}"), &e))
        }
        Err(e) => return Err(Failure::io(format_args!("cannot ping {to}"), &e)),
    };
    if args.quiet { Ok(true) } else { write_out(&mut io::stdout(), line.as_bytes()) }
}
