//! The client: one thread in a process of its own, which keeps connections open and has one request under way on
//! each, as wrk does.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use serde_json::{Value, json};

use super::server::RESPONSE;
use crate::child::Handle;
use crate::latency::Latencies;
use crate::{cpu, sys};
use fulmar_gateway::netns::Netns;

/// The role of the child.
pub(crate) const ROLE: &str = "http";
const REQUEST: &[u8] =
    b"GET / HTTP/1.1\r\nHost: hello\r\nUser-Agent: fulmar-lab\r\nAccept: */*\r\n\r\n";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time that a client may take beyond its run.
const PATIENCE: Duration = Duration::from_secs(8);
/// Requests per connection before the server's account and the client's time start.
pub const WARM_REQUESTS: u64 = 2;

/// The work of a client.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The server.
    pub to: SocketAddr,
    /// Connections that are open at the same time.
    pub connections: usize,
    /// How long it asks.
    pub time: Duration,
    /// The CPU to which it is pinned.
    pub cpu: Option<usize>,
}

/// A client at work.
pub struct Client {
    child: Handle,
    time: Duration,
}

impl Client {
    /// Starts one in a namespace.
    pub fn start(spec: &Spec, netns: &Netns) -> io::Result<Client> {
        let child = json!({
            "role": ROLE, "to": spec.to.to_string(), "connections": spec.connections,
            "time_ns": spec.time.as_nanos() as u64, "cpu": spec.cpu,
        });
        Ok(Client { child: Handle::spawn(&child, netns)?, time: spec.time })
    }

    /// The median and the 99th percentile of the time to an answer, in ns.
    pub fn finish(mut self) -> io::Result<[u64; 2]> {
        let report = self.child.report(self.time + PATIENCE)?;
        Ok(["p50_ns", "p99_ns"].map(|key| report[key].as_u64().unwrap_or(0)))
    }
}

/// The child's part.
pub(crate) fn serve(spec: &Value) -> io::Result<()> {
    if let Some(cpu) = spec["cpu"].as_u64() {
        cpu::pin_to(cpu as usize)?;
    }
    let n = |key: &str| spec[key].as_u64().unwrap_or(0);
    let to = spec["to"].as_str().and_then(|a| a.parse().ok());
    let to = to.ok_or_else(|| io::Error::other("no address"))?;
    let latencies = ask(to, n("connections") as usize, Duration::from_nanos(n("time_ns")))?;
    let [p50, p99] = latencies.percentiles();
    crate::peer::print_line(&json!({ "p50_ns": p50, "p99_ns": p99 }))
}

/// A connection with one request under way.
struct Connection {
    stream: TcpStream,
    sent: Instant,
    missing: usize,
}

impl Connection {
    fn ask(&mut self) -> io::Result<()> {
        (self.sent, self.missing) = (Instant::now(), RESPONSE.len());
        self.stream.write_all(REQUEST)
    }

    /// The time to the answer, if that is complete.
    fn take(&mut self) -> io::Result<Option<Duration>> {
        let mut buffer = [0; 4096];
        let n = match self.stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            read => read?,
        };
        self.missing = self.missing.saturating_sub(n);
        Ok((self.missing == 0).then(|| self.sent.elapsed()))
    }
}

fn ask(to: SocketAddr, connections: usize, time: Duration) -> io::Result<Latencies> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut all = Vec::with_capacity(connections);
    for token in 0..connections {
        let stream = TcpStream::connect_timeout(&to, CONNECT_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        sys::reset_on_close(stream.as_fd())?;
        epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, token as u64))?;
        all.push(Connection { stream, sent: Instant::now(), missing: 0 });
    }
    let mut latencies = Latencies::new()?;
    all.iter_mut().try_for_each(Connection::ask)?;
    let mut events = vec![EpollEvent::empty(); 1024];
    let warm = connections as u64 * WARM_REQUESTS;
    let mut end = None;
    while end.is_none_or(|end| Instant::now() < end) {
        if end.is_none() && latencies.len() >= warm {
            end = Some(Instant::now() + time);
        }
        let timeout = EpollTimeout::try_from(CONNECT_TIMEOUT).map_err(io::Error::other)?;
        let n = epoll.wait(&mut events, timeout)?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the server does not answer"));
        }
        for event in &events[..n] {
            let connection = &mut all[event.data() as usize];
            if let Some(latency) = connection.take()? {
                latencies.record(latency);
                connection.ask()?;
            }
        }
    }
    Ok(latencies)
}
