//! `fulmar nc`: standard input to a socket, the socket to standard output.
//!
//! Two threads per connection: one reads standard input and ends the sending direction when it
//! ends, the other writes what arrives. A connection is over when both directions are; on a
//! terminal, when the peer is done.

use crate::device::{Role, Session, StackArgs, TcpArgs};
use crate::failure::{During, Failure, Outcome};
use crate::interrupt::end_in_order;
use crate::resolve::{Family, connectable, resolve};
use crate::say::write_out;
use fulmar::{TcpListener, TcpStream, UdpSocket};
use std::io::{self, IsTerminal, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes per read of standard input and of the socket.
const CHUNK_BYTES: usize = 128 * 1024;
/// Bytes of standard input per datagram: fits an IPv6 packet of 1280 bytes, which every path
/// carries (RFC 8200 section 5).
const DATAGRAM_BYTES: usize = 1232;
/// How long a connection may take where the user gives no -w.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an idle reader checks the time-out of -w.
const IDLE_TICK: Duration = Duration::from_millis(100);

/// Connect or listen over TCP or UDP; send standard input and print received data
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar nc [OPTIONS] HOST PORT
       fulmar nc [OPTIONS] -l [HOST] PORT
       fulmar nc [OPTIONS] -z HOST PORT[-PORT]",
    after_help = "Examples:
  fulmar nc -l 8000                     accept a connection, print its data
  fulmar nc 10.77.0.1 8000 < file       send a file
  fulmar nc -u -w 1 10.77.0.1 53        datagrams; exit after 1 s without any
  fulmar nc -zv 10.77.0.1 20-80         report which of these ports are open
  in two terminals, without the kernel's network:
  fulmar nc --device shm:demo -l 8000
  fulmar nc --device shm:demo 10.77.0.1 8000"
)]
pub struct Args {
    /// Listen for a connection instead of connecting
    #[arg(short, long)]
    listen: bool,
    /// Use UDP instead of TCP
    #[arg(short, long)]
    udp: bool,
    /// The local port
    #[arg(short = 'p', long = "port", value_name = "PORT")]
    local_port: Option<u16>,
    /// Time limit for connecting, and for an idle connection
    #[arg(short = 'w', long = "timeout", value_name = "SECONDS", value_parser = crate::bounds::seconds)]
    timeout: Option<Duration>,
    /// Accepted for compatibility: the end of input always shuts down sending
    #[arg(short = 'N')]
    shutdown: bool,
    /// With -l: accept the next connection when one ends
    #[arg(short, long, requires = "listen")]
    keep: bool,
    /// Only connect, to one port or a range (20-80), and exit with status 0 if any port is open, else 1; with -v,
    /// report each port
    #[arg(short = 'z', conflicts_with_all = ["listen", "udp"])]
    scan: bool,
    /// Report connections on standard error
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    family: Family,
    #[command(flatten)]
    tcp: TcpArgs,
    /// HOST PORT; with -l, HOST is optional, and so is PORT if -p is given
    #[arg(value_name = "HOST PORT", num_args = 0..=2)]
    target: Vec<String>,
    #[command(flatten)]
    stack: StackArgs,
}

/// The address to connect to or to listen on.
#[derive(PartialEq, Eq, Debug)]
struct Target {
    host: Option<String>,
    port: u16,
    /// With -z: the last port.
    last_port: u16,
}

impl Target {
    fn of(host: Option<&str>, port: u16) -> Target {
        Target { host: host.map(str::to_owned), port, last_port: port }
    }
}

impl Args {
    fn target(&self) -> Outcome<Target> {
        let words: Vec<&str> = self.target.iter().map(String::as_str).collect();
        let (host, port) = match (self.listen, words.as_slice(), self.local_port) {
            (true, [], Some(port)) => return Ok(Target::of(None, port)),
            (true, [host], Some(port)) => return Ok(Target::of(Some(host), port)),
            (true, [port], None) => (None, *port),
            (_, [host, port], _) => (Some(*host), *port),
            (true, ..) => return Err(Failure::new("missing port; usage: fulmar nc -l PORT")),
            (false, ..) => {
                return Err(Failure::new("missing host or port; usage: fulmar nc HOST PORT"));
            }
        };
        let number = |text: &str| {
            let what =
                || Failure::new(format!("invalid port `{text}`: expected a number up to 65535"));
            let port = text.parse().map_err(|_| what())?;
            // A listener at port 0 gets a free one.
            if !self.listen {
                connectable(port).map_err(Failure::new)?;
            }
            Ok(port)
        };
        match port.split_once('-') {
            Some((first, last)) if self.scan => {
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return Err(Failure::new(format!(
                        "invalid range `{port}`: its end is below its start"
                    )));
                }
                Ok(Target { last_port: last, ..Target::of(host, first) })
            }
            _ => Ok(Target::of(host, number(port)?)),
        }
    }

    fn say(&self, text: impl FnOnce() -> String) {
        if self.verbose {
            eprintln!("{}", text());
        }
    }

    fn local(&self, target: &Target) -> Outcome<SocketAddr> {
        match &target.host {
            Some(host) => Ok(resolve(host, target.port, self.family)?[0]),
            None => Ok(SocketAddr::new(self.family.unspecified(), target.port)),
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome<ExitCode> {
    let target = args.target()?;
    end_in_order()?;
    let role = if args.listen { Role::Listens } else { Role::Connects };
    let session = args.stack.open_with(role, &args.tcp)?;
    if args.scan {
        return scan(args, &session, &target);
    }
    match (args.listen, args.udp) {
        (false, false) => call_tcp(args, &session, &target)?,
        (true, false) => wait_tcp(args, &session, &target)?,
        (false, true) => call_udp(args, &session, &target)?,
        (true, true) => wait_udp(args, &session, &target)?,
    }
    session.close();
    Ok(ExitCode::SUCCESS)
}

/// `-z`: the ports one after the other, the addresses of the host as one.
fn scan(args: &Args, session: &Session, target: &Target) -> Outcome<ExitCode> {
    let host = target.host.as_deref().unwrap_or_default();
    let timeout = args.timeout.unwrap_or(CONNECT_TIMEOUT);
    let mut is_any_open = false;
    for port in target.port..=target.last_port {
        let addresses = resolve(host, port, args.family)?;
        match connect_any(session, &addresses, args.local_port, timeout) {
            Ok(_) => {
                is_any_open = true;
                args.say(|| format!("{host} port {port}: open"));
            }
            Err(failure) => args.say(|| failure.to_string()),
        }
    }
    Ok(ExitCode::from(u8::from(!is_any_open)))
}

fn call_tcp(args: &Args, session: &Session, target: &Target) -> Outcome {
    let host = target.host.as_deref().unwrap_or_default();
    let timeout = args.timeout.unwrap_or(CONNECT_TIMEOUT);
    let addresses = resolve(host, target.port, args.family)?;
    let stream = connect_any(session, &addresses, args.local_port, timeout)?;
    args.say(|| format!("connected to {host} port {}", target.port));
    pump_tcp(stream, args.timeout)
}

/// Connects to the first of `addresses` that accepts.
pub fn connect_any(
    session: &Session,
    addresses: &[SocketAddr],
    local_port: Option<u16>,
    timeout: Duration,
) -> Outcome<TcpStream> {
    let mut last = Failure::new("no address to connect to");
    for to in addresses {
        match session.connect(*to, local_port, timeout) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = Failure::io(format_args!("cannot connect to {to}"), &e),
        }
    }
    Err(last)
}

fn wait_tcp(args: &Args, session: &Session, target: &Target) -> Outcome {
    let local = args.local(target)?;
    let listener = TcpListener::bind(session.stack(), local)
        .during(format_args!("cannot listen on {local}"))?;
    args.say(|| format!("listening on {local}"));
    loop {
        let (stream, peer) = listener.accept().during("cannot accept a connection")?;
        args.say(|| format!("connection from {peer}"));
        let done = pump_tcp(stream, args.timeout);
        if !args.keep {
            return done;
        }
        if let Err(failure) = done {
            eprintln!("fulmar: {failure}");
        }
    }
}

/// The time of the last byte, for the idle time-out of -w.
#[derive(Clone)]
struct Activity {
    started: Instant,
    last_ms: Arc<AtomicU64>,
}

impl Activity {
    fn new() -> Activity {
        Activity { started: Instant::now(), last_ms: Arc::default() }
    }

    fn mark(&self) {
        let now = self.started.elapsed().as_millis() as u64;
        self.last_ms.store(now, Ordering::Relaxed);
    }

    fn idle(&self) -> Duration {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(last)
    }

    /// Whether the idle time-out has passed.
    fn is_over(&self, limit: Option<Duration>) -> bool {
        limit.is_some_and(|limit| self.idle() >= limit)
    }
}

fn pump_tcp(stream: TcpStream, limit: Option<Duration>) -> Outcome {
    let activity = Activity::new();
    let writer = stream.try_clone().during("cannot share the connection")?;
    let sending = {
        let activity = activity.clone();
        thread::spawn(move || send_input(writer, &activity))
    };
    let is_over = print_stream(stream, &activity, limit)?;
    if is_over || io::stdin().is_terminal() {
        return Ok(());
    }
    sending.join().unwrap_or_else(|_| Err(Failure::new("the sending thread panicked")))
}

/// Standard input to the peer, then the end of it.
fn send_input(mut stream: TcpStream, activity: &Activity) -> Outcome {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut input = io::stdin().lock();
    loop {
        let n = match input.read(&mut chunk) {
            Ok(n) => n,
            Err(e) => {
                // The peer must not take this for the end of the input.
                let _ = stream.set_linger(Some(Duration::ZERO));
                let _ = stream.shutdown(Shutdown::Read);
                return Err(Failure::io("cannot read standard input", &e));
            }
        };
        if n == 0 {
            // Fails only where the peer has broken the connection, which the reader reports.
            let _ = stream.shutdown(Shutdown::Write);
            return Ok(());
        }
        stream.write_all(&chunk[..n]).during("cannot send")?;
        activity.mark();
    }
}

/// Copies the stream to standard output until its end. True: the time-out of -w has passed, or standard output is
/// closed.
fn print_stream(
    mut stream: TcpStream,
    activity: &Activity,
    limit: Option<Duration>,
) -> Outcome<bool> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut output = io::stdout().lock();
    stream.set_read_timeout(limit.map(|_| IDLE_TICK)).during("cannot set the timeout")?;
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(false),
            Ok(n) => {
                activity.mark();
                if !write_out(&mut output, &chunk[..n])? {
                    return Ok(true);
                }
            }
            Err(e) if is_timeout(&e) => {
                if activity.is_over(limit) {
                    return Ok(true);
                }
            }
            Err(e) => return Err(Failure::io("cannot receive", &e)),
        }
    }
}

/// Whether an error is the socket's time-out: EAGAIN or ETIMEDOUT.
pub fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn call_udp(args: &Args, session: &Session, target: &Target) -> Outcome {
    let host = target.host.as_deref().unwrap_or_default();
    let to = resolve(host, target.port, args.family)?[0];
    let any = if to.is_ipv6() { "::" } else { "0.0.0.0" };
    let local = SocketAddr::new(
        any.parse().map_err(|_| Failure::new("no local address"))?,
        args.local_port.unwrap_or(0),
    );
    let socket = UdpSocket::bind(session.stack(), local)
        .during(format_args!("cannot use local port {}", local.port()))?;
    socket.connect(to).during(format_args!("cannot reach {to}"))?;
    pump_udp(&socket, args.timeout)
}

fn wait_udp(args: &Args, session: &Session, target: &Target) -> Outcome {
    let local = args.local(target)?;
    let socket =
        UdpSocket::bind(session.stack(), local).during(format_args!("cannot listen on {local}"))?;
    args.say(|| format!("listening on {local}"));
    if args.keep {
        return print_datagrams(&socket, &Activity::new(), args.timeout);
    }
    let (_, peer) = socket.peek_from(&mut [0; 1]).during("cannot receive")?;
    args.say(|| format!("datagrams from {peer}"));
    socket.connect(peer).during(format_args!("cannot reach {peer}"))?;
    pump_udp(&socket, args.timeout)
}

fn pump_udp(socket: &UdpSocket, limit: Option<Duration>) -> Outcome {
    let activity = Activity::new();
    let sender = socket.try_clone().during("cannot share the socket")?;
    let marks = activity.clone();
    thread::spawn(move || {
        if let Err(failure) = send_datagrams(&sender, &marks) {
            eprintln!("fulmar: {failure}");
        }
    });
    print_datagrams(socket, &activity, limit)
}

fn send_datagrams(socket: &UdpSocket, activity: &Activity) -> Outcome {
    let mut chunk = [0; DATAGRAM_BYTES];
    let mut input = io::stdin().lock();
    loop {
        let n = input.read(&mut chunk).during("cannot read standard input")?;
        if n == 0 {
            return Ok(());
        }
        socket.send(&chunk[..n]).during("cannot send")?;
        activity.mark();
    }
}

fn print_datagrams(socket: &UdpSocket, activity: &Activity, limit: Option<Duration>) -> Outcome {
    let mut datagram = vec![0; u16::MAX.into()];
    let mut output = io::stdout().lock();
    socket.set_read_timeout(limit.map(|_| IDLE_TICK)).during("cannot set the timeout")?;
    loop {
        match socket.recv_from(&mut datagram) {
            Ok((n, _)) => {
                activity.mark();
                if !write_out(&mut output, &datagram[..n])? {
                    return Ok(());
                }
            }
            Err(e) if is_timeout(&e) => {
                if activity.is_over(limit) {
                    return Ok(());
                }
            }
            Err(e) => return Err(Failure::io("cannot receive", &e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;

    fn target(line: &str) -> Outcome<Target> {
        let words = std::iter::once("nc").chain(line.split_whitespace());
        parse::<Args>(words).expect("it parses").target()
    }

    #[test]
    fn listening_takes_a_port_in_every_usual_place() {
        for line in ["-l 80", "-l -p 80", "-lp 80"] {
            assert_eq!(target(line), Ok(Target::of(None, 80)), "{line}");
        }
        for line in ["-l 10.0.0.2 80", "-l -p 80 10.0.0.2"] {
            assert_eq!(target(line), Ok(Target::of(Some("10.0.0.2"), 80)), "{line}");
        }
    }

    #[test]
    fn calling_needs_host_and_port() {
        assert_eq!(target("h 80"), Ok(Target::of(Some("h"), 80)));
        for line in ["", "h", "h x", "h 65536", "h 0", "-z h 0-9", "-l"] {
            assert!(target(line).is_err(), "{line}");
        }
    }

    #[test]
    fn only_a_scan_has_a_range_of_ports() {
        let range = Target { last_port: 30, ..Target::of(Some("h"), 20) };
        assert_eq!(target("-z h 20-30"), Ok(range));
        assert_eq!(target("-z h 20"), Ok(Target::of(Some("h"), 20)));
        for line in ["h 20-30", "-z h 20-", "-z h -30", "-z h 20-70000"] {
            assert!(parse::<Args>(line.split(' ')).is_err() || target(line).is_err(), "{line}");
        }
        assert!(parse::<Args>(["nc", "-z", "-u", "h", "80"]).is_err());
    }

    #[test]
    fn keep_requires_listen() {
        assert!(parse::<Args>(["nc", "-k", "h", "80"]).is_err());
    }

    #[test]
    fn activity_ends_only_with_a_limit() {
        let activity = Activity::new();
        assert!(!activity.is_over(None));
        assert!(activity.is_over(Some(Duration::ZERO)));
        assert!(!activity.is_over(Some(Duration::from_secs(60))));
    }
}
