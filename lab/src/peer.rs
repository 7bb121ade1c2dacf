//! Kernel TCP peers as child processes: a sink that reads and discards, a source that writes one
//! hot buffer again and again.
//!
//! Both ends of a stream measure the same stretch of it: from byte `warm_bytes` (slow start and
//! buffer tuning are over by then) to the end of the stream. The source writes for `time` after
//! the warm-up, then half-closes and waits until the sink has closed too, so that whatever its
//! socket buffer held is part of the account. Congestion control is set explicitly, because the
//! machine's default may be another than the one that fulmar speaks.

use crate::child::Handle;
use crate::cpu::{self, MachineClock};
use crate::kernel::receive::{Receiver, Receiving};
use crate::kernel::send::{Pauses, Sender, Sending};
use crate::sys;
use crate::topology::PEER_IP;
use fulmar_gateway::netns::Netns;
use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// The congestion control on both sides of every comparison.
const CONGESTION_CONTROL: &[u8] = b"cubic";
/// Placeholder for the address of an AF_UNIX socket.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
/// How long a peer may stay silent: starting takes milliseconds, a run takes its time plus this.
const PATIENCE: Duration = Duration::from_secs(5);

/// Work of a peer on its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Reads and discards.
    Sink,
    /// Writes one hot buffer again and again.
    Source,
}

/// Which side opens the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// Listens here; port 0 lets the kernel choose.
    Listen(SocketAddr),
    /// Connects to there.
    Connect(SocketAddr),
    /// Listens on the AF_UNIX name of this number, in its network namespace.
    ListenLocal(u32),
    /// Connects to the AF_UNIX name of this number.
    ConnectLocal(u32),
}

/// A peer to start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spec {
    /// Its work.
    pub role: Role,
    /// Where.
    pub endpoint: Endpoint,
    /// The CPU to which it pins itself.
    pub cpu: Option<usize>,
    /// Bytes per read or write call.
    pub buffer_bytes: usize,
    /// Bytes of the stream before measuring starts, the same at both ends.
    pub warm_bytes: u64,
    /// How long a source writes after the warm-up.
    pub time: Duration,
    /// How a source sends.
    pub sending: Sending,
    /// How a sink receives.
    pub receiving: Receiving,
}

/// Measurements of one end of a stream after the warm-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Bytes moved.
    pub bytes: u64,
    /// Time from the first to the last of them.
    pub elapsed: Duration,
    /// CPU of the whole process (user and system) in that time.
    pub cpu: Duration,
    /// Read or write calls that moved them.
    pub calls: u64,
    /// CPU of the one thread that moved them, without simulated hardware that ran on it, where it is
    /// known; else zero.
    pub thread: Duration,
    /// Busy time of all CPUs of the machine in that time, where it was looked at; else zero.
    pub machine: Duration,
    /// The part of `cpu` in user mode; `None`: not measured.
    pub user: Option<Duration>,
    /// Sends with MSG_ZEROCOPY over the whole run, and the number of them that the kernel copied.
    pub zerocopy: (u64, u64),
    /// Voluntary context switches of the process's threads.
    pub waits: u64,
}

impl Report {
    /// CPU time per KB (1024 bytes), in ns; not a number without bytes.
    pub fn cpu_ns_per_kb(&self) -> f64 {
        self.ns_per_kb(self.cpu)
    }

    /// A time per KB (1024 bytes) of these bytes, in ns; not a number without bytes.
    pub fn ns_per_kb(&self, time: Duration) -> f64 {
        time.as_nanos() as f64 * 1024.0 / self.bytes as f64
    }
}

/// A running peer.
pub struct Peer {
    handle: Handle,
    address: SocketAddr,
    patience: Duration,
}

impl Peer {
    /// Starts a peer in `netns`; returns when a listener listens or a connector has been started.
    pub fn spawn(spec: &Spec, netns: &Netns) -> io::Result<Peer> {
        let mut handle = Handle::spawn(&spec.to_json(), netns)?;
        let address = match spec.endpoint {
            Endpoint::Connect(to) => to,
            Endpoint::ConnectLocal(_) => NOWHERE,
            Endpoint::ListenLocal(_) => {
                handle.report(PATIENCE)?;
                NOWHERE
            }
            Endpoint::Listen(mut at) => {
                let hello = handle.report(PATIENCE)?;
                let port = hello.get("port").and_then(Value::as_u64).unwrap_or(0);
                at.set_port(u16::try_from(port).unwrap_or(0));
                at
            }
        };
        Ok(Peer { handle, address, patience: PATIENCE + spec.time })
    }

    /// Where it listens, with the port that it was given, or where it connects to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.handle.id()
    }

    /// Waits for the end of its stream.
    pub fn finish(mut self) -> io::Result<Report> {
        Ok(Report::from_json(&self.handle.report(self.patience)?))
    }
}

impl Report {
    /// As a child prints it.
    pub(crate) fn to_json(self) -> Value {
        let ns = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        json!({
            "bytes": self.bytes,
            "elapsed_ns": ns(self.elapsed),
            "cpu_ns": ns(self.cpu),
            "calls": self.calls,
            "thread_ns": ns(self.thread),
            "machine_ns": ns(self.machine),
            "user_ns": self.user.map(ns),
            "zerocopy_sends": self.zerocopy.0,
            "zerocopy_copied": self.zerocopy.1,
            "waits": self.waits,
        })
    }

    pub(crate) fn from_json(v: &Value) -> Report {
        let field = |name: &str| v.get(name).and_then(Value::as_u64).unwrap_or(0);
        Report {
            bytes: field("bytes"),
            elapsed: Duration::from_nanos(field("elapsed_ns")),
            cpu: Duration::from_nanos(field("cpu_ns")),
            calls: field("calls"),
            thread: Duration::from_nanos(field("thread_ns")),
            machine: Duration::from_nanos(field("machine_ns")),
            user: v.get("user_ns").and_then(Value::as_u64).map(Duration::from_nanos),
            zerocopy: (field("zerocopy_sends"), field("zerocopy_copied")),
            waits: field("waits"),
        }
    }
}

impl Spec {
    /// A peer that listens at [`PEER_IP`] and is not pinned.
    pub fn new(role: Role, buffer_bytes: usize, warm_bytes: u64, time: Duration) -> Spec {
        Spec {
            role,
            endpoint: Endpoint::Listen(SocketAddr::new(IpAddr::V4(PEER_IP), 0)),
            cpu: None,
            buffer_bytes,
            warm_bytes,
            time,
            sending: Sending::default(),
            receiving: Receiving::default(),
        }
    }

    fn to_json(self) -> Value {
        let (side, address) = match self.endpoint {
            Endpoint::Listen(a) => ("listen", a.to_string()),
            Endpoint::Connect(a) => ("connect", a.to_string()),
            Endpoint::ListenLocal(n) => ("listen_local", n.to_string()),
            Endpoint::ConnectLocal(n) => ("connect_local", n.to_string()),
        };
        json!({
            "role": match self.role { Role::Sink => "sink", Role::Source => "source" },
            "side": side,
            "address": address,
            "sending": self.sending.to_json(),
            "receiving": self.receiving.to_json(),
            "cpu": self.cpu,
            "buffer_bytes": self.buffer_bytes,
            "warm_bytes": self.warm_bytes,
            "time_ns": u64::try_from(self.time.as_nanos()).unwrap_or(u64::MAX),
        })
    }

    fn from_json(v: &Value) -> Option<Spec> {
        let number = |name: &str| v.get(name).and_then(Value::as_u64);
        let address = v.get("address")?.as_str()?;
        Some(Spec {
            role: match v.get("role")?.as_str()? {
                "sink" => Role::Sink,
                "source" => Role::Source,
                _ => return None,
            },
            endpoint: match v.get("side")?.as_str()? {
                "listen" => Endpoint::Listen(address.parse().ok()?),
                "connect" => Endpoint::Connect(address.parse().ok()?),
                "listen_local" => Endpoint::ListenLocal(address.parse().ok()?),
                "connect_local" => Endpoint::ConnectLocal(address.parse().ok()?),
                _ => return None,
            },
            cpu: number("cpu").and_then(|c| usize::try_from(c).ok()),
            buffer_bytes: usize::try_from(number("buffer_bytes")?).ok()?.max(1),
            warm_bytes: number("warm_bytes")?,
            time: Duration::from_nanos(number("time_ns")?),
            sending: Sending::from_json(v.get("sending")?)?,
            receiving: Receiving::from_json(v.get("receiving")?)?,
        })
    }
}

/// The child's side: runs `spec` and prints the report.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    let spec = Spec::from_json(spec).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "invalid specification of a peer")
    })?;
    if let Some(cpu) = spec.cpu {
        cpu::pin_to(cpu)?;
    }
    let report = match spec.endpoint {
        Endpoint::ListenLocal(n) | Endpoint::ConnectLocal(n) => act(local(&spec, n)?, &spec)?,
        Endpoint::Listen(_) | Endpoint::Connect(_) => act(connection(&spec)?, &spec)?,
    };
    print_line(&report.to_json())
}

fn act<S: Stream>(stream: S, spec: &Spec) -> io::Result<Report> {
    match spec.role {
        Role::Sink => sink(stream, spec),
        Role::Source => source(stream, spec),
    }
}

/// A stream of the kernel's, TCP or AF_UNIX.
trait Stream: Read + Write + AsFd {
    /// Ends sending.
    fn end(&self) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn end(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

impl Stream for UnixStream {
    fn end(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

/// An AF_UNIX connection by an abstract name, which belongs to the network namespace.
fn local(spec: &Spec, number: u32) -> io::Result<UnixStream> {
    let name = unix::SocketAddr::from_abstract_name(format!("fulmar-bench-peer-{number}"))?;
    let stream = if matches!(spec.endpoint, Endpoint::ListenLocal(_)) {
        let listener = UnixListener::bind_addr(&name)?;
        print_line(&json!({ "port": 0 }))?;
        listener.accept()?.0
    } else {
        UnixStream::connect_addr(&name)?
    };
    set_buffer(stream.as_fd(), spec)?;
    Ok(stream)
}

fn set_buffer(fd: BorrowedFd<'_>, spec: &Spec) -> io::Result<()> {
    let Some(bytes) = spec.sending.socket_buffer_bytes else { return Ok(()) };
    let option = if spec.role == Role::Sink { libc::SO_RCVBUF } else { libc::SO_SNDBUF };
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    sys::setsockopt(fd, libc::SOL_SOCKET, option, &bytes.to_ne_bytes())
}

pub(crate) fn print_line(v: &Value) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{v}")?;
    out.flush()
}

fn connection(spec: &Spec) -> io::Result<TcpStream> {
    let set_congestion =
        |fd| sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, CONGESTION_CONTROL);
    match spec.endpoint {
        Endpoint::Connect(to) => {
            let stream = TcpStream::connect(to)?;
            set_congestion(stream.as_fd())?;
            set_buffer(stream.as_fd(), spec)?;
            Ok(stream)
        }
        Endpoint::ListenLocal(_) | Endpoint::ConnectLocal(_) => {
            Err(io::ErrorKind::InvalidInput.into())
        }
        Endpoint::Listen(at) => {
            let listener = TcpListener::bind(at)?;
            set_congestion(listener.as_fd())?; // an accepted socket inherits it
            set_buffer(listener.as_fd(), spec)?;
            print_line(&json!({ "port": listener.local_addr()?.port() }))?;
            Ok(listener.accept()?.0)
        }
    }
}

/// Clocks and counts from the end of the warm-up on.
struct Meter {
    bytes: u64,
    calls: u64,
    warm_bytes: u64,
    started: Option<Started>,
}

/// The clocks and counts when the warm-up was over.
struct Started {
    at: Instant,
    cpu: Duration,
    machine: MachineClock,
    user: Duration,
    waits: u64,
    bytes: u64,
    calls: u64,
}

impl Meter {
    fn new(warm_bytes: u64) -> Meter {
        Meter { bytes: 0, calls: 0, warm_bytes, started: None }
    }

    /// Counts `n` bytes more. The moment when the warm-up ended, once it has.
    fn moved(&mut self, n: usize) -> io::Result<Option<Instant>> {
        self.bytes += n as u64;
        self.calls += 1;
        if self.started.is_none() && self.bytes >= self.warm_bytes {
            self.started = Some(Started {
                machine: MachineClock::read()?,
                user: cpu::process_user_cpu()?,
                waits: cpu::process_waits()?,
                cpu: cpu::process_cpu(None)?,
                bytes: self.bytes,
                calls: self.calls,
                at: Instant::now(),
            });
        }
        Ok(self.started.as_ref().map(|s| s.at))
    }

    fn finish(self) -> io::Result<Report> {
        let Some(start) = self.started else { return Ok(Report::default()) };
        let elapsed = start.at.elapsed();
        let cpu = cpu::process_cpu(None)?.saturating_sub(start.cpu);
        Ok(Report {
            bytes: self.bytes - start.bytes,
            elapsed,
            cpu,
            calls: self.calls - start.calls,
            thread: cpu,
            machine: MachineClock::read()?.since(start.machine).busy,
            user: Some(cpu::process_user_cpu()?.saturating_sub(start.user)),
            zerocopy: (0, 0),
            waits: cpu::process_waits()?.saturating_sub(start.waits),
        })
    }
}

fn sink<S: Stream>(mut stream: S, spec: &Spec) -> io::Result<Report> {
    let mut receiver = Receiver::new(&spec.receiving, spec.buffer_bytes, &stream)?;
    let mut meter = Meter::new(spec.warm_bytes);
    loop {
        match receiver.call(&mut stream)? {
            0 => return meter.finish(),
            n => meter.moved(n)?,
        };
    }
}

fn source<S: Stream>(mut stream: S, spec: &Spec) -> io::Result<Report> {
    let mut sender = Sender::new(&spec.sending, spec.buffer_bytes, stream.as_fd())?;
    let mut meter = Meter::new(spec.warm_bytes);
    let mut pauses = spec.sending.burst.map(Pauses::new);
    loop {
        let n = sender.call(&mut stream)?;
        if let Some(pauses) = &mut pauses {
            pauses.sent(n as u64);
        }
        if meter.moved(n)?.is_some_and(|start| start.elapsed() >= spec.time) {
            break;
        }
    }
    stream.end()?;
    // The sink closes when it has everything: only then is the cost of these bytes complete.
    while stream.read(&mut [0; 512])? > 0 {}
    let zerocopy = (sender.zerocopy_sends, sender.zerocopy_copied);
    Ok(Report { zerocopy, ..meter.finish()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::CacheState;
    use crate::kernel::receive::ReceiveCall;
    use crate::kernel::send::{Burst, FileOf, KernelCall};

    #[test]
    fn a_specification_survives_the_command_line() {
        let spec = Spec {
            role: Role::Source,
            endpoint: Endpoint::Connect("[::1]:80".parse().expect("an address")),
            cpu: Some(1),
            buffer_bytes: 7,
            warm_bytes: 9,
            time: Duration::from_millis(3),
            sending: Sending {
                call: KernelCall::SendFile,
                file: Some(FileOf { pid: 1, fd: 2, bytes: 3, heat: CacheState::Cold }),
                socket_buffer_bytes: Some(4),
                burst: Some(Burst { bytes: 5, gap: Duration::from_micros(6) }),
            },
            receiving: Receiving {
                call: ReceiveCall::Uring,
                buffers: 2,
                touch: true,
                wait_all: true,
            },
        };
        assert_eq!(Spec::from_json(&spec.to_json()), Some(spec));
        assert_eq!(Spec::from_json(&json!({ "role": "juggler" })), None);
    }

    #[test]
    fn both_ends_measure_the_same_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let to = listener.local_addr().expect("bound");
        let spec = Spec {
            role: Role::Sink,
            endpoint: Endpoint::Connect(to),
            cpu: None,
            buffer_bytes: 10_000,
            warm_bytes: 0,
            time: Duration::from_millis(5),
            sending: Sending::default(),
            receiving: Receiving::default(),
        };
        let far = std::thread::spawn(move || sink(listener.accept()?.0, &spec));
        let near = source(TcpStream::connect(to).expect("connect"), &spec).expect("source");
        let far = far.join().expect("no panic").expect("sink");
        // The first call ends the warm-up and is not counted, at either end.
        assert!(near.bytes > 0 && near.bytes.abs_diff(far.bytes) <= 10_000);
    }
}
