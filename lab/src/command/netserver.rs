//! `fulmar-lab netserver`: the server for a stock netperf.

use crate::network::DeviceArgs;
use crate::outcome::{During, Outcome, stop_flag};
use fulmar::Stack;
use fulmar_lab::netperf::CONTROL_PORT;
use fulmar_lab::netperf::server::{Rules, Server};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;

/// Run a netserver, the server side of netperf's tests, for an unmodified netperf
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar-lab netserver                             in one terminal, on fulmar
  netperf -H 10.77.0.2 -t TCP_STREAM -c -C     in another, a stock netperf on the kernel
docs/netperf.md has more.")]
pub struct Args {
    /// Port of the control connection
    #[arg(short, long, default_value_t = CONTROL_PORT)]
    port: u16,
    /// Listen on this address only
    #[arg(short = 'L', long = "listen", value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Accepted for compatibility: the server always stays in the foreground
    #[arg(short = 'D')]
    foreground: bool,
    /// Maximum number of concurrent clients
    #[arg(long, default_value_t = 32)]
    max_clients: usize,
    /// Allow clients to request the contents of files of this machine (-F)
    #[arg(long)]
    fill_files: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs the command until a signal ends it.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let stack = args.device.open()?;
    let stop = stop_flag()?;
    let server = bind(args, &stack)?;
    let at = server.local_addr().during("cannot listen")?;
    eprintln!("netserver: listening on {at}");
    server.run(&stop).during("cannot accept clients")?;
    Ok(ExitCode::SUCCESS)
}

fn rules(args: &Args) -> Rules {
    Rules {
        max_clients: args.max_clients,
        may_read_files: args.fill_files,
        say: Arc::new(|sentence| eprintln!("netserver: {sentence}")),
    }
}

/// Binds to the given address, else to the unspecified address of each IP version that exists.
fn bind(args: &Args, stack: &Stack) -> Outcome<Server> {
    let any = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
    let mut failure = String::new();
    for ip in args.address.map_or(any.to_vec(), |address| vec![address]) {
        let at = SocketAddr::new(ip, args.port);
        match Server::bind(stack.clone(), at, rules(args)) {
            Ok(server) => return Ok(server),
            Err(e) => {
                failure = format!("cannot listen on {at}: {e}");
                // A port that is taken must not be had quietly for the other version alone.
                if e.kind() == io::ErrorKind::AddrInUse {
                    break;
                }
            }
        }
    }
    Err(failure)
}
