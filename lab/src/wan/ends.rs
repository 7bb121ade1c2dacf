//! The two ends of `bench wan`: servers that send and clients that read, each on fulmar or on the kernel.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::{CongestionControl, SocketOptions, Stack, TcpStream};
use fulmar_gateway::netns::Netns;

use super::conn::{Conn, Progress};
use super::paths::Ecn;
use crate::{cpu, sys};

/// The sending kernel.
pub(super) const NEAR: Ipv4Addr = Ipv4Addr::new(10, 73, 0, 1);
/// The kernel that reads.
pub(super) const FAR: Ipv4Addr = Ipv4Addr::new(10, 73, 0, 2);
/// The sending fulmar.
pub(super) const FULMAR: Ipv4Addr = Ipv4Addr::new(10, 73, 0, 3);
/// The reading fulmar.
pub(super) const FAR_FULMAR: Ipv4Addr = Ipv4Addr::new(10, 73, 0, 4);
/// How often an end that waits checks whether the run is over.
const PATIENCE: Duration = Duration::from_millis(200);
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
static WRITE: [u8; 64 << 10] = [0; 64 << 10];

/// The sending stack and its congestion control.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// fulmar, connected within the process.
    Fulmar(CongestionControl),
    /// The kernel, on a TAP of the wire; its own name of the congestion control.
    Linux(&'static str),
}

impl Sender {
    /// `fulmar-cubic`, `linux-bbr`.
    pub fn name(self) -> String {
        match self {
            Sender::Fulmar(which) => format!("fulmar-{which}"),
            Sender::Linux(which) => format!("linux-{which}"),
        }
    }
}

/// The receiving stack.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Receiver {
    /// The kernel, connected by a TAP.
    Linux,
    /// fulmar, connected within the process.
    Fulmar,
}

/// The stacks of one side.
pub(super) struct Side {
    pub stack: Stack,
    pub kernel: Netns,
}

impl Side {
    /// Sets the kind of ECN that the kernel requests (`tcp_ecn`).
    pub fn set_ecn(&self, ecn: Ecn) -> io::Result<()> {
        let value = (ecn as u8).to_string();
        self.kernel.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_ecn", value))
    }

    fn connect(&self, receiver: Receiver, server: SocketAddr) -> io::Result<Conn> {
        match receiver {
            Receiver::Fulmar => {
                let connected = TcpStream::connect_timeout(&self.stack, &server, CONNECT_PATIENCE);
                connected.map(Conn::Fulmar)
            }
            Receiver::Linux => self
                .kernel
                .run(|| std::net::TcpStream::connect_timeout(&server, CONNECT_PATIENCE))
                .map(Conn::Linux),
        }
    }
}

/// A server that listens.
pub(super) enum Server {
    Fulmar(fulmar::TcpListener, CongestionControl),
    Linux(std::net::TcpListener),
}

impl Server {
    pub fn listen(sender: Sender, near: &Side, port: u16) -> io::Result<Server> {
        match sender {
            Sender::Fulmar(which) => {
                let at = SocketAddr::new(IpAddr::V4(FULMAR), port);
                let listener = fulmar::TcpListener::bind(&near.stack, at)?;
                listener.set_accept_timeout(Some(PATIENCE))?;
                Ok(Server::Fulmar(listener, which))
            }
            Sender::Linux(which) => near.kernel.run(|| {
                let listener = std::net::TcpListener::bind((NEAR, port))?;
                // A connection takes it from its listener.
                let (tcp, name) = (libc::IPPROTO_TCP, libc::TCP_CONGESTION);
                sys::setsockopt(listener.as_fd(), tcp, name, which.as_bytes()).map_err(|e| {
                    io::Error::new(
                        e.kind(),
                        format!("this kernel does not have the congestion control {which}"),
                    )
                })?;
                sys::set_timeout(listener.as_fd(), libc::SO_RCVTIMEO, PATIENCE)?;
                Ok(Server::Linux(listener))
            }),
        }
    }

    /// Where a client finds it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Server::Fulmar(l, _) => l.local_addr(),
            Server::Linux(l) => l.local_addr(),
        }
    }

    /// The next connection; `None` once `done`.
    fn accept(&self, done: &AtomicBool) -> io::Result<Option<Conn>> {
        while !done.load(Ordering::Relaxed) {
            let accepted = match self {
                Server::Fulmar(l, which) => l.accept().and_then(|(stream, _)| {
                    let congestion = Some(*which);
                    stream.set_options(SocketOptions { congestion, ..stream.options()? })?;
                    Ok(Conn::Fulmar(stream))
                }),
                Server::Linux(l) => l.accept().map(|(stream, _)| Conn::Linux(stream)),
            };
            match accepted {
                Ok(conn) => {
                    conn.set_timeouts(PATIENCE)?;
                    return Ok(Some(conn));
                }
                Err(e) if is_timeout(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    /// Accepts one connection and writes until it breaks or `done`; `None`: there was none. With `every`, its state is
    /// noted as often.
    pub fn flood(&self, done: &AtomicBool, every: Option<Duration>) -> io::Result<Option<Flood>> {
        let Some(conn) = self.accept(done)? else { return Ok(None) };
        let (cpu, over) = (cpu::thread_cpu()?, AtomicBool::new(false));
        let course = thread::scope(|scope| {
            let (watched, ended) = (&conn, &over);
            let watch = |every| scope.spawn(move || watched.watch(every, ended));
            let watch = every.map(watch);
            write_until(&mut &conn, done);
            over.store(true, Ordering::Relaxed);
            watch.map_or(Ok(Vec::new()), |w| w.join())
        });
        let course = course.map_err(|_| io::Error::other("the sampling thread panicked"))?;
        Ok(Some(Flood {
            cpu: cpu::thread_cpu()? - cpu,
            last: conn.progress()?,
            course,
            _conn: conn,
        }))
    }

    /// Accepts connections and writes `bytes` to each, until `done`.
    pub fn answer(&self, bytes: usize, done: &AtomicBool) -> io::Result<()> {
        thread::scope(|scope| {
            while let Some(conn) = self.accept(done)? {
                scope.spawn(move || answer(&mut &conn, bytes));
            }
            Ok(())
        })
    }
}

/// A server's record of a connection that it has flooded. Dropping it closes the connection.
pub(super) struct Flood {
    /// CPU time of the thread that wrote.
    pub cpu: Duration,
    /// Its progress at the end.
    pub last: Progress,
    /// Its progress over time, if it was watched.
    pub course: Vec<Progress>,
    _conn: Conn,
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Writes `bytes`; a connection that breaks is the client's to report.
fn answer(stream: &mut impl Write, bytes: usize) {
    let mut left = bytes;
    while left > 0 {
        match stream.write(&WRITE[..left.min(WRITE.len())]) {
            Ok(n) => left -= n,
            Err(e) if is_timeout(&e) => {}
            Err(_) => return,
        }
    }
}

fn write_until(stream: &mut impl Write, done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        match stream.write(&WRITE) {
            Ok(_) => {}
            Err(e) if is_timeout(&e) => {}
            Err(_) => return,
        }
    }
}

/// Reads until `done`; counts from the connection's start on.
pub(super) fn read_flood(
    (far, receiver): (&Side, Receiver),
    server: SocketAddr,
    read: &AtomicU64,
    done: &AtomicBool,
) -> io::Result<()> {
    let conn = far.connect(receiver, server)?;
    conn.set_timeouts(PATIENCE)?;
    conn.reset_on_close()?;
    let mut buffer = vec![0; 256 << 10];
    while !done.load(Ordering::Relaxed) {
        match (&conn).read(&mut buffer) {
            Ok(n) if n > 0 => drop(read.fetch_add(n as u64, Ordering::Relaxed)),
            Err(e) if is_timeout(&e) => {}
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Fetches one answer after the other until `done`, the last one to its end: the time of each from the SYN on.
pub(super) fn fetch_many(
    (far, receiver): (&Side, Receiver),
    server: SocketAddr,
    done: &AtomicBool,
) -> io::Result<Vec<Duration>> {
    let mut times = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    while !done.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let conn = far.connect(receiver, server)?;
        conn.set_timeouts(CONNECT_PATIENCE)?;
        while (&conn).read(&mut buffer)? > 0 {}
        times.push(begun.elapsed());
    }
    Ok(times)
}
