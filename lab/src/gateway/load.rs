//! The loads: both ends are threads of this process, with sockets in the host's and the guest's namespace.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fulmar_gateway::netns::Netns;

use super::program::{HOST_IP, Instance, Kind};
use crate::cpu::MachineClock;
use crate::harness::{MACHINE, Sample};
use crate::latency::Latencies;
use crate::sys;
use crate::transfer::GBPS;

/// Bytes per write and read of a stream, as iperf3 has them.
const STREAM_BYTES: usize = 128 << 10;
/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a transaction, or a datagram's way, may take.
const ANSWER: Duration = Duration::from_secs(2);
/// How often an end that receives nothing checks whether the run is over.
const LOOK: Duration = Duration::from_millis(50);
/// Part of a run that is not measured: slow start, and whatever adapts itself.
const WARM_UP: f64 = 0.3;

/// Transactions per second.
pub const RATE: &str = "transactions_per_s";
/// CPU of the gateway's processes.
pub const GATEWAY_PER_KB: &str = "gateway_cpu_ns_per_kb";
/// Datagrams that did not arrive, percent of those sent.
pub const LOST: &str = "lost_pct";

/// The direction in which flows begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The guest, to the host.
    Out,
    /// The host, to a published port.
    In,
    /// The host, by its loopback, to a published port.
    Loopback,
}

impl Direction {
    /// The name in scenarios.
    pub const fn name(self) -> &'static str {
        match self {
            Direction::Out => "out",
            Direction::In => "in",
            Direction::Loopback => "loopback",
        }
    }
}

/// The work of one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// This many TCP streams.
    Streams(Direction, usize),
    /// One byte there and back on one connection.
    TcpRr,
    /// The same on a new connection each time.
    TcpCrr,
    /// One byte there and back by datagrams.
    UdpRr,
    /// Datagrams of this many bytes, as fast as they can be sent.
    Datagrams(Direction, usize),
}

/// Runs a load for about this long.
///
/// # Errors
/// The error of the sockets; TimedOut if nothing passes the gateway.
pub fn run(gateway: &Instance, load: Load, time: Duration) -> io::Result<Sample> {
    match load {
        Load::Streams(direction, n) => streams(gateway, direction, n, time),
        Load::TcpRr => transactions(gateway, time, tcp_rr),
        Load::TcpCrr => transactions(gateway, time, tcp_crr),
        Load::UdpRr => transactions(gateway, time, udp_rr),
        Load::Datagrams(direction, bytes) => datagrams(gateway, direction, bytes, time),
    }
}

/// Where the two ends of a load are.
struct Ends<'a> {
    connects: Option<&'a Netns>,
    listens: Option<&'a Netns>,
    /// Where the one listens, and what the other connects to; port 0: the one that it got.
    at: SocketAddr,
    to: SocketAddr,
}

/// Runs `work` in a namespace, or here.
fn run_in<T: Send>(
    netns: Option<&Netns>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    match netns {
        Some(netns) => netns.run(work),
        None => work(),
    }
}

impl Ends<'_> {
    fn of(gateway: &Instance, direction: Direction) -> Ends<'_> {
        let any = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port);
        let published = gateway.published();
        let guest = Some(&gateway.guest);
        match (direction, gateway.kind) {
            (Direction::Out, _) => {
                let host = SocketAddr::new(IpAddr::V4(HOST_IP), 0);
                Ends { connects: guest, listens: None, at: host, to: host }
            }
            (Direction::In, _) => {
                Ends { connects: None, listens: guest, at: any(published.port()), to: published }
            }
            // The kernel's own loopback stands beside published ports on it.
            (Direction::Loopback, Kind::Veth) => {
                let lo = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), published.port());
                Ends { connects: None, listens: None, at: lo, to: lo }
            }
            (Direction::Loopback, _) => {
                let lo = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), published.port());
                Ends { connects: None, listens: guest, at: any(published.port()), to: lo }
            }
        }
    }

    fn listener(&self) -> io::Result<(TcpListener, SocketAddr)> {
        let listener = run_in(self.listens, || TcpListener::bind(self.at))?;
        let port = listener.local_addr()?.port();
        Ok((listener, SocketAddr::new(self.to.ip(), port)))
    }

    fn receiver(&self) -> io::Result<(UdpSocket, SocketAddr)> {
        let socket = run_in(self.listens, || UdpSocket::bind(self.at))?;
        socket.set_read_timeout(Some(LOOK))?;
        let port = socket.local_addr()?.port();
        Ok((socket, SocketAddr::new(self.to.ip(), port)))
    }

    fn sender(&self, to: SocketAddr) -> io::Result<UdpSocket> {
        let socket = run_in(self.connects, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.connect(to)?;
        Ok(socket)
    }
}

/// A connection whose first bytes are sent. They fill a cache line: after fewer than 16 first bytes, the following
/// bytes have a larger page offset in the kernel than in the sender, by a few bytes. With that `rep movsb` of some
/// processors takes ten times as long.
fn connected(to: &SocketAddr) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(to, CONNECT)?;
    stream.write_all(&[0; 64])?;
    Ok(stream)
}

/// The next connection.
fn accepted(listener: &TcpListener, timeout: Duration) -> io::Result<TcpStream> {
    let ms = timeout.as_millis() as i32;
    if !sys::wait_readable(listener.as_fd(), ms)? {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "no connection passes the gateway"));
    }
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The clocks of the machine and of the gateway.
struct Clocks {
    at: Instant,
    machine: MachineClock,
    gateway: Duration,
}

impl Clocks {
    fn now(gateway: &Instance) -> io::Result<Clocks> {
        let (machine, gateway) = (MachineClock::read()?, gateway.cpu()?);
        Ok(Clocks { machine, gateway, at: Instant::now() })
    }

    /// Time, the machine's busy time and the gateway's CPU time since.
    fn elapsed(&self, gateway: &Instance) -> io::Result<[Duration; 3]> {
        let now = Clocks::now(gateway)?;
        let machine = now.machine.since(self.machine).busy;
        Ok([now.at - self.at, machine, now.gateway.saturating_sub(self.gateway)])
    }
}

/// A sample of bytes that have arrived.
fn carried(bytes: u64, [time, machine, gateway]: [Duration; 3]) -> Sample {
    let per_kb = |cpu: Duration| cpu.as_nanos() as f64 * 1024.0 / bytes as f64;
    let mut sample = Sample::of(GBPS, bytes as f64 * 8.0 / time.as_nanos() as f64)
        .with(MACHINE, per_kb(machine))
        .with(GATEWAY_PER_KB, per_kb(gateway));
    sample.bytes = bytes;
    sample
}

fn streams(
    gateway: &Instance,
    direction: Direction,
    n: usize,
    time: Duration,
) -> io::Result<Sample> {
    let ends = Ends::of(gateway, direction);
    let (listener, to) = ends.listener()?;
    // The client speaks first, as iperf3's: pasta of January 2025 acknowledges a guest's SYN-ACK with data only.
    let connect = || (0..n).map(|_| connected(&to)).collect();
    let sources: Vec<TcpStream> = run_in(ends.connects, connect)?;
    let sinks: io::Result<Vec<_>> = (0..n).map(|_| accepted(&listener, CONNECT)).collect();
    let (sinks, bytes) = (sinks?, AtomicU64::new(0));
    let measured = thread::scope(|scope| {
        for source in &sources {
            scope.spawn(|| write_until_closed(source));
        }
        for sink in &sinks {
            scope.spawn(|| read_until_closed(sink, &bytes));
        }
        thread::sleep(time.mul_f64(WARM_UP));
        let measured = Clocks::now(gateway).and_then(|start| {
            let before = bytes.load(Ordering::Relaxed);
            thread::sleep(time);
            Ok((bytes.load(Ordering::Relaxed) - before, start.elapsed(gateway)?))
        });
        for end in sources.iter().chain(&sinks) {
            let _ = end.shutdown(Shutdown::Both);
        }
        measured
    });
    let (bytes, clocks) = measured?;
    if bytes == 0 {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "no byte passes the gateway"));
    }
    Ok(carried(bytes, clocks))
}

fn write_until_closed(mut stream: &TcpStream) {
    let buffer = vec![0x5a; STREAM_BYTES];
    while stream.write(&buffer).is_ok_and(|n| n > 0) {}
}

fn read_until_closed(mut stream: &TcpStream, bytes: &AtomicU64) {
    let mut buffer = vec![0; STREAM_BYTES];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        bytes.fetch_add(n as u64, Ordering::Relaxed);
    }
}

/// Makes transactions until the time is over, each within a call.
type Transactions = fn(&Ends<'_>, &mut Asker) -> io::Result<()>;

/// Asks again and again, and notes how long each answer takes.
struct Asker {
    end: Instant,
    latencies: Latencies,
}

impl Asker {
    fn ask(&mut self, mut transaction: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        loop {
            let start = Instant::now();
            transaction()?;
            let now = Instant::now();
            self.latencies.record(now - start);
            if now >= self.end {
                return Ok(());
            }
        }
    }
}

fn transactions(gateway: &Instance, time: Duration, run: Transactions) -> io::Result<Sample> {
    let ends = Ends::of(gateway, Direction::Out);
    let start = Clocks::now(gateway)?;
    let mut asker = Asker { end: start.at + time, latencies: Latencies::new()? };
    run(&ends, &mut asker)?;
    let [elapsed, machine, gateway] = start.elapsed(gateway)?;
    let n = asker.latencies.len() as f64;
    let [p50, p99] = asker.latencies.percentiles().map(|ns| ns as f64 / 1000.0);
    Ok(Sample::of(RATE, n / elapsed.as_secs_f64())
        .with("p50_us", p50)
        .with("p99_us", p99)
        .with("machine_us_per_transaction", machine.as_nanos() as f64 / 1000.0 / n)
        .with("gateway_us_per_transaction", gateway.as_nanos() as f64 / 1000.0 / n))
}

fn tcp_rr(ends: &Ends<'_>, asker: &mut Asker) -> io::Result<()> {
    let (listener, to) = ends.listener()?;
    thread::scope(|scope| {
        scope.spawn(|| accepted(&listener, CONNECT).map(echo));
        run_in(ends.connects, || {
            let mut stream = TcpStream::connect_timeout(&to, CONNECT)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER))?;
            asker.ask(|| {
                stream.write_all(&[1])?;
                stream.read_exact(&mut [0])
            })
        })
    })
}

/// Sends back each byte until the stream ends.
fn echo(mut stream: TcpStream) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte)).is_ok() {}
}

fn tcp_crr(ends: &Ends<'_>, asker: &mut Asker) -> io::Result<()> {
    let (listener, to) = ends.listener()?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // The side that answers closes first, so that TIME-WAIT holds none of the guest's ports.
                let _ = accepted(&listener, LOOK).and_then(|mut stream| {
                    stream.set_read_timeout(Some(ANSWER))?;
                    stream.read_exact(&mut [0])?;
                    stream.write_all(&[1])
                });
            }
        });
        let asked = run_in(ends.connects, || {
            asker.ask(|| {
                let mut stream = TcpStream::connect_timeout(&to, CONNECT)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(ANSWER))?;
                stream.write_all(&[1])?;
                stream.read_to_end(&mut Vec::with_capacity(1)).map(drop)
            })
        });
        is_over.store(true, Ordering::Relaxed);
        asked
    })
}

fn udp_rr(ends: &Ends<'_>, asker: &mut Asker) -> io::Result<()> {
    let (receiver, to) = ends.receiver()?;
    let is_over = AtomicBool::new(false);
    let sender = ends.sender(to)?;
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let _ =
                    receiver.recv_from(&mut [0]).and_then(|(_, from)| receiver.send_to(&[1], from));
            }
        });
        // A lost datagram is a transaction that took as long as the wait for it.
        let asked = asker.ask(|| {
            sender.send(&[1])?;
            match sender.recv(&mut [0]) {
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => Err(e),
                _ => Ok(()),
            }
        });
        is_over.store(true, Ordering::Relaxed);
        asked
    })
}

fn datagrams(
    gateway: &Instance,
    direction: Direction,
    bytes: usize,
    time: Duration,
) -> io::Result<Sample> {
    let ends = Ends::of(gateway, direction);
    let (receiver, to) = ends.receiver()?;
    let sender = ends.sender(to)?;
    let (arrived, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let (sent, clocks) = thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = vec![0; 65_536];
            while !is_over.load(Ordering::Relaxed) {
                if let Ok(n) = receiver.recv(&mut buffer) {
                    arrived.fetch_add(u64::from(n == bytes), Ordering::Relaxed);
                }
            }
        });
        let sent = flood(gateway, &sender, &vec![0x5a; bytes], &arrived, time);
        is_over.store(true, Ordering::Relaxed);
        sent
    })?;
    let arrived = arrived.load(Ordering::Relaxed) - sent.before;
    if arrived == 0 {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "no datagram passes the gateway"));
    }
    let lost = sent.datagrams.saturating_sub(arrived) as f64 * 100.0 / sent.datagrams as f64;
    Ok(carried(arrived * bytes as u64, clocks)
        .with("packets_per_s", arrived as f64 / clocks[0].as_secs_f64())
        .with(LOST, lost))
}

/// Sent datagrams, and datagrams received before.
struct Sent {
    datagrams: u64,
    before: u64,
}

/// Sends as fast as the socket takes them; one first, so that flow and neighbours are known.
fn flood(
    gateway: &Instance,
    sender: &UdpSocket,
    datagram: &[u8],
    arrived: &AtomicU64,
    time: Duration,
) -> io::Result<(Sent, [Duration; 3])> {
    let end = Instant::now() + ANSWER;
    while arrived.load(Ordering::Relaxed) == 0 && Instant::now() < end {
        let _ = sender.send(datagram);
        thread::sleep(Duration::from_millis(5));
    }
    let before = arrived.load(Ordering::Relaxed);
    let start = Clocks::now(gateway)?;
    let mut datagrams = 0;
    while start.at.elapsed() < time {
        // A full queue, or an error of an earlier datagram, does not end the run.
        datagrams += u64::from(sender.send(datagram).is_ok());
    }
    let clocks = start.elapsed(gateway)?;
    thread::sleep(LOOK);
    Ok((Sent { datagrams, before }, clocks))
}
