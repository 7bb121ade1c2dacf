//! `fulmar-lab netserver`: what a stock netperf on the other side measures.

use fulmar::Stack;
use fulmar_cli::device::{Role, StackArgs};
use fulmar_cli::failure::{During, Failure, Outcome};
use fulmar_cli::interrupt;
use fulmar_cli::resolve::Family;
use fulmar_lab::netperf::CONTROL_PORT;
use fulmar_lab::netperf::server::{Rules, Server};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Run a netserver: the server side of netperf's tests, for a stock netperf
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  fulmar-lab netserver                             in one terminal, on fulmar
  netperf -H 10.77.0.2 -t TCP_STREAM -c -C     in another, a stock netperf on the kernel
docs/netperf.md has more.")]
pub struct Args {
    /// The port of the control connection
    #[arg(short, long, default_value_t = CONTROL_PORT)]
    port: u16,
    /// Listen on this address only
    #[arg(short = 'L', long = "listen", value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Accepted for compatibility: it always stays in the foreground
    #[arg(short = 'D')]
    foreground: bool,
    /// Clients at the same time at most
    #[arg(long, default_value_t = 32)]
    max_clients: usize,
    /// Allow clients to name files of this machine (-F), whose contents they receive
    #[arg(long)]
    fill_files: bool,
    #[command(flatten)]
    family: Family,
    #[command(flatten)]
    stack: StackArgs,
}

/// Runs the command until a signal ends it.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let stop = interrupt::stop_flag()?;
    while serve(args, &stop)? == Served::PeerHasEnded {
        eprintln!("netserver: the process on the other end has ended");
    }
    Ok(ExitCode::SUCCESS)
}

/// Why a server ended.
#[derive(PartialEq, Eq)]
enum Served {
    /// A signal.
    Stopped,
    /// The one process that shared memory joins it to is gone; there may be another.
    PeerHasEnded,
}

fn serve(args: &Args, stop: &Arc<AtomicBool>) -> Outcome<Served> {
    let session = interrupt::exiting_at_once(|| args.stack.open_as(Role::Listens))?;
    let server = bind(args, session.stack())?;
    let at = server.local_addr().during("cannot listen")?;
    eprintln!("netserver: listening on {at}");
    let ended = server.run(stop);
    drop(server);
    session.close();
    match ended {
        Err(e) if e.kind() == io::ErrorKind::NetworkDown && args.stack.is_shared_memory() => {
            Ok(Served::PeerHasEnded)
        }
        ended => ended.during("cannot accept clients").map(|()| Served::Stopped),
    }
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
    let candidates: Vec<IpAddr> = match args.address {
        Some(address) => vec![address],
        None => any.into_iter().filter(|a| args.family.admits(*a)).collect(),
    };
    let mut failure = Failure::new("there is no address to listen on");
    for ip in candidates {
        let at = SocketAddr::new(ip, args.port);
        match Server::bind(stack.clone(), at, rules(args)) {
            Ok(server) => return Ok(server),
            Err(e) => {
                failure = Failure::io(format_args!("cannot listen on {at}"), &e);
                // A port that is taken must not be had quietly for the other version alone.
                if e.kind() == io::ErrorKind::AddrInUse {
                    break;
                }
            }
        }
    }
    Err(failure)
}
