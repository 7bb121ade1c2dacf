//! `fulmar-lab netsend`: numbered datagrams at a rate.
//!
//! The first four bytes of a payload are a counter, most significant byte first, as in FreeBSD's program of
//! this name; a receiver tells losses by it.

use crate::network::DeviceArgs;
use crate::outcome::{During, Outcome, say};
use clap::ValueEnum;
use fulmar::{Cidr, Stack};
use fulmar_lab::cpu;
use fulmar_lab::harness::Progress;
use fulmar_lab::harness::options::budget;
use fulmar_nic::SimConfig;
use fulmar_stack::ip::NeighbourState;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

/// Sends between two looks at the clock where no rate is to be kept.
const BATCH: u64 = 64;
/// How long a send blocks at most.
const TICK: Duration = Duration::from_millis(100);
/// How often the progress is shown.
const SHOWN_EVERY: Duration = Duration::from_millis(500);

/// Send numbered UDP datagrams at a rate, and print the cost of each
#[derive(clap::Args, Debug)]
#[command(
    after_help = "fulmar-lab netsend 10.77.0.1 5555 18 0 5       18 bytes, at full speed, 5 s
fulmar-lab netsend --stack kernel 127.0.0.1 5555 18 1000 5"
)]
pub struct Args {
    /// Address or name of the receiver
    host: String,
    /// UDP port of the receiver
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Bytes of payload per datagram, at least 4 for the sequence number
    #[arg(value_name = "BYTES", value_parser = clap::value_parser!(u32).range(4..=65_507))]
    size: u32,
    /// Datagrams per second; 0 for no limit
    #[arg(value_name = "PER_SECOND")]
    rate: u64,
    /// Duration in seconds
    #[arg(value_parser = budget)]
    seconds: Duration,
    /// The stack to send with; sim and kernel need no device
    #[arg(long = "stack", value_enum, default_value_t = Which::Fulmar)]
    which: Which,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Which {
    /// fulmar, on --device
    Fulmar,
    /// fulmar, on a simulated NIC: 10.77.0.2, with a simulated host at all other addresses that accepts all datagrams
    Sim,
    Kernel,
}

/// A socket with a fixed peer.
enum Socket {
    Fulmar(fulmar::UdpSocket),
    Kernel(std::net::UdpSocket),
}

impl Socket {
    /// On this stack, or on the kernel.
    fn connect(stack: Option<&Stack>, to: SocketAddr) -> io::Result<Socket> {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let any = SocketAddr::new(any, 0);
        Ok(match stack {
            Some(stack) => {
                let socket = fulmar::UdpSocket::bind(stack, any)?;
                socket.set_write_timeout(Some(TICK))?;
                socket.connect(to)?;
                Socket::Fulmar(socket)
            }
            None => {
                let socket = std::net::UdpSocket::bind(any)?;
                socket.set_write_timeout(Some(TICK))?;
                socket.connect(to)?;
                Socket::Kernel(socket)
            }
        })
    }

    /// Sends one datagram, or fails with `WouldBlock` after [`TICK`].
    fn send(&self, payload: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Fulmar(socket) => socket.send(payload),
            Socket::Kernel(socket) => socket.send(payload),
        }
    }
}

fn open(args: &Args) -> Outcome<Option<Stack>> {
    match args.which {
        Which::Kernel => Ok(None),
        Which::Fulmar => args.device.open().map(Some),
        Which::Sim => {
            let (nic, _) = fulmar_nic::open(SimConfig::default()).map_err(|e| e.to_string())?;
            let address = Cidr { address: Ipv4Addr::new(10, 77, 0, 2).into(), prefix_len: 24 };
            let stack = Stack::builder().device(nic).address(address).build();
            stack.map(Some).map_err(|e| e.to_string())
        }
    }
}

/// A neighbour that has not answered its resolution: datagrams to it or through it were not sent.
fn silent_neighbour(stack: Option<&Stack>) -> Option<IpAddr> {
    let stat = stack?.stat().ok()?;
    let is_silent = |s| matches!(s, NeighbourState::Incomplete | NeighbourState::Failed);
    stat.shard.neighbours.iter().find(|n| is_silent(n.state)).map(|n| n.ip)
}

/// Runs `netsend`.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let found = (args.host.as_str(), args.port).to_socket_addrs();
    let found = found.during(format_args!("cannot resolve `{}`", args.host))?.next();
    let to = found.ok_or_else(|| format!("`{}` has no address", args.host))?;
    let stack = open(args)?;
    let connected = Socket::connect(stack.as_ref(), to);
    let socket = connected.during(format_args!("cannot send to {to}"))?;
    let mut sent = Sent::default();
    let mut payload = vec![0; args.size as usize];
    let (start, cpu) = (Instant::now(), Worked::start());
    let (progress, mut shown) = (Progress::new(1), start);
    while start.elapsed() < args.seconds {
        for _ in 0..if args.rate == 0 { BATCH } else { 1 } {
            payload[..4].copy_from_slice(&(sent.tried as u32).to_be_bytes());
            sent.note(socket.send(&payload), to)?;
        }
        if shown.elapsed() >= SHOWN_EVERY {
            shown = Instant::now();
            let [done, all] = [start.elapsed(), args.seconds].map(|t| t.as_millis() as usize);
            progress.show(format!("{} datagrams sent", sent.good), done, all);
        }
        if let Some(ns) = sent.tried.saturating_mul(1_000_000_000).checked_div(args.rate) {
            let due = (start + Duration::from_nanos(ns)).min(start + args.seconds);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    let elapsed = start.elapsed();
    drop(progress);
    say(sent.line(elapsed, cpu.each_ns(sent.good)))?;
    let silent = silent_neighbour(stack.as_ref());
    if let Some(neighbour) = silent {
        eprintln!(
            "fulmar-lab: no datagram was sent: the neighbour {neighbour} does not answer; check it, --addr and \
             --gateway"
        );
    }
    Ok(ExitCode::from(u8::from(sent.good == 0 || silent.is_some())))
}

/// The CPU time that this program takes, all of its threads.
struct Worked(Option<Duration>);

impl Worked {
    fn start() -> Worked {
        Worked(cpu::process_cpu(None).ok())
    }

    /// ns for each of `count` units; 0 without an account.
    fn each_ns(&self, count: u64) -> f64 {
        let now = cpu::process_cpu(None).ok();
        let spent = now.zip(self.0).map_or(Duration::ZERO, |(now, then)| now.saturating_sub(then));
        spent.as_nanos() as f64 / count.max(1) as f64
    }
}

/// Results of the calls.
#[derive(Debug, Default)]
struct Sent {
    tried: u64,
    good: u64,
    /// The port is closed (an ICMP error came back).
    refused: u64,
    /// No room, for buffers or in the device.
    full: u64,
}

impl Sent {
    fn note(&mut self, result: io::Result<usize>, to: SocketAddr) -> Outcome {
        self.tried += 1;
        match result {
            Ok(_) => self.good += 1,
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => self.refused += 1,
            Err(e) if is_full(&e) => self.full += 1,
            Err(e) => return Err(format!("cannot send to {to}: {e}")),
        }
        Ok(())
    }

    fn line(&self, elapsed: Duration, cpu_ns: f64) -> String {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let costs = match self.good {
            0 => String::new(),
            n => {
                let (rate, each) = (n as f64 / seconds, elapsed.as_nanos() as f64 / n as f64);
                format!(
                    ": {rate:.0} datagrams/s, {each:.1} ns and {cpu_ns:.1} ns of CPU per datagram"
                )
            }
        };
        format!(
            "{} datagrams in {seconds:.3} s{costs}; {} refused (port closed), {} not sent (queue full)",
            self.good, self.refused, self.full
        )
    }
}

fn is_full(e: &io::Error) -> bool {
    const ENOBUFS: i32 = 105;
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
        || e.raw_os_error() == Some(ENOBUFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_that_were_not_sent_have_no_cost() {
        let none = Sent::default().line(Duration::from_secs(1), 3919.0);
        assert!(none.starts_with("0 datagrams in 1.000 s; 0 refused"), "{none}");
        let two = Sent { good: 2, ..Sent::default() }.line(Duration::from_secs(1), 250.0);
        assert!(
            two.contains("2 datagrams/s") && two.contains("250.0 ns of CPU per datagram"),
            "{two}"
        );
    }

    #[test]
    fn network_errors_are_counted_and_other_errors_end_the_run() {
        let to = SocketAddr::from(([10, 0, 0, 1], 5));
        let mut sent = Sent::default();
        sent.note(Ok(18), to).expect("sent");
        sent.note(Err(io::ErrorKind::ConnectionRefused.into()), to).expect("counted");
        sent.note(Err(io::Error::from_raw_os_error(105)), to).expect("counted");
        assert_eq!((sent.good, sent.refused, sent.full), (1, 1, 1));
        assert!(sent.note(Err(io::ErrorKind::NetworkUnreachable.into()), to).is_err());
    }
}
