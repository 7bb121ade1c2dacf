//! The server: one thread, one event loop, the same code over either stack's sockets.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use fulmar::{Event, PollSet, Ready, Stack};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::cpu::{self, MachineClock};

/// The response to every request.
pub const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nServer: hello\r\nContent-Type: text/plain\r\n\
Content-Length: 14\r\nConnection: keep-alive\r\n\r\nHello, world!\n";
/// The token of the listener; connections count from 0.
const LISTENER: usize = usize::MAX;
/// Most events of one wait, the limit of a poll set.
const EVENTS: usize = 1024;
/// Bytes of requests read at a time.
const READ_BYTES: usize = 4096;
/// How long the server waits for its clients to act.
const PATIENCE: Duration = Duration::from_secs(5);

/// A stack's non-blocking sockets, with a poll set or epoll.
pub trait Sockets {
    /// A connection.
    type Stream: Read + Write;

    /// The next connection, already watched under `token`.
    ///
    /// # Errors
    /// WouldBlock if there is none.
    fn accept(&self, token: usize) -> io::Result<Self::Stream>;

    /// Replaces `tokens` by the tokens of the readable sockets; empty after a time-out.
    ///
    /// # Errors
    /// The errors of the stack's wait.
    fn wait(&mut self, tokens: &mut Vec<usize>, timeout: Duration) -> io::Result<()>;
}

/// The kernel's sockets with epoll.
pub struct OnKernel {
    listener: TcpListener,
    epoll: Epoll,
    events: Vec<EpollEvent>,
}

impl OnKernel {
    /// Listens in the calling thread's network namespace.
    pub fn listen(at: SocketAddr) -> io::Result<OnKernel> {
        let listener = TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER as u64))?;
        Ok(OnKernel { listener, epoll, events: vec![EpollEvent::empty(); EVENTS] })
    }

    /// Where it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Sockets for OnKernel {
    type Stream = TcpStream;

    fn accept(&self, token: usize) -> io::Result<TcpStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        self.epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, token as u64))?;
        Ok(stream)
    }

    fn wait(&mut self, tokens: &mut Vec<usize>, timeout: Duration) -> io::Result<()> {
        tokens.clear();
        let ms = EpollTimeout::try_from(timeout).map_err(io::Error::other)?;
        let n = self.epoll.wait(&mut self.events, ms)?;
        tokens.extend(self.events[..n].iter().map(|e| e.data() as usize));
        Ok(())
    }
}

/// fulmar's sockets with a poll set.
pub struct OnFulmar {
    listener: fulmar::TcpListener,
    set: PollSet,
    events: Vec<Event>,
}

impl OnFulmar {
    /// Listens on every address of the stack.
    pub fn listen(stack: &Stack, port: u16) -> io::Result<OnFulmar> {
        let listener = fulmar::TcpListener::bind(stack, ("0.0.0.0", port))?;
        listener.set_nonblocking(true)?;
        let set = stack.poll_set()?;
        set.add(&listener, LISTENER, Ready::READABLE)?;
        Ok(OnFulmar { listener, set, events: Vec::new() })
    }
}

impl Sockets for OnFulmar {
    type Stream = fulmar::TcpStream;

    fn accept(&self, token: usize) -> io::Result<fulmar::TcpStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        self.set.add(&stream, token, Ready::READABLE)?;
        Ok(stream)
    }

    fn wait(&mut self, tokens: &mut Vec<usize>, timeout: Duration) -> io::Result<()> {
        self.set.wait(&mut self.events, Some(timeout))?;
        tokens.clear();
        tokens.extend(self.events.iter().map(|e| e.token));
        Ok(())
    }
}

/// The cost of a run of the server, from the end of the warm-up to the end of the first connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Requests answered.
    pub requests: u64,
    /// Time in which they were.
    pub elapsed: Duration,
    /// CPU time of the whole process.
    pub cpu: Duration,
    /// Busy time of all CPUs.
    pub machine: Duration,
    /// Times that a thread of the process gave its CPU up to wait.
    pub waits: u64,
}

/// The clocks at a moment.
struct Clocks {
    at: Instant,
    cpu: Duration,
    machine: MachineClock,
    waits: u64,
    requests: u64,
}

impl Clocks {
    fn now(requests: u64) -> io::Result<Clocks> {
        Ok(Clocks {
            machine: MachineClock::read()?,
            waits: cpu::process_waits()?,
            cpu: cpu::process_cpu(None)?,
            at: Instant::now(),
            requests,
        })
    }

    fn until(&self, end: &Clocks) -> Cost {
        Cost {
            requests: end.requests - self.requests,
            elapsed: end.at - self.at,
            cpu: end.cpu.saturating_sub(self.cpu),
            machine: end.machine.since(self.machine).busy,
            waits: end.waits.saturating_sub(self.waits),
        }
    }
}

/// A server at work.
struct Server<S: Sockets> {
    sockets: S,
    connections: Vec<Option<S::Stream>>,
    requests: u64,
    closed: usize,
}

/// Serves `clients` connections until the last of them has been closed. The first `warm` requests are not
/// in the cost.
///
/// # Errors
/// Those of the sockets; TimedOut when the clients fall silent.
pub fn serve<S: Sockets>(sockets: S, clients: usize, warm: u64) -> io::Result<Cost> {
    let mut server = Server { sockets, connections: Vec::new(), requests: 0, closed: 0 };
    let (mut tokens, mut start, mut end) = (Vec::new(), None, None);
    while server.closed < clients {
        server.sockets.wait(&mut tokens, PATIENCE)?;
        if tokens.is_empty() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the clients stopped sending"));
        }
        for &token in &tokens {
            if token == LISTENER {
                server.accept()?;
            } else {
                server.answer(token);
            }
        }
        if start.is_none() && server.requests >= warm {
            start = Some(Clocks::now(server.requests)?);
        }
        if end.is_none() && server.closed > 0 {
            end = Some(Clocks::now(server.requests)?);
        }
    }
    let cost = start.zip(end).map(|(start, end)| start.until(&end));
    cost.ok_or_else(|| io::Error::other("the clients disconnected during the warm-up"))
}

impl<S: Sockets> Server<S> {
    fn accept(&mut self) -> io::Result<()> {
        loop {
            match self.sockets.accept(self.connections.len()) {
                Ok(stream) => self.connections.push(Some(stream)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }

    /// Answers every request that can be read now. A client sends whole requests only.
    fn answer(&mut self, token: usize) {
        let Some(Some(stream)) = self.connections.get_mut(token) else { return };
        match answered(stream) {
            Ok(n) => self.requests += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            // The clients end with a reset, so that neither side has a connection in TIME-WAIT.
            Err(_) => {
                self.connections[token] = None;
                self.closed += 1;
            }
        }
    }
}

/// Requests that were read and answered.
fn answered(stream: &mut (impl Read + Write)) -> io::Result<u64> {
    let mut buffer = [0; READ_BYTES];
    let n = match stream.read(&mut buffer)? {
        0 => return Err(ErrorKind::UnexpectedEof.into()),
        n => n,
    };
    let requests = buffer[..n].windows(4).filter(|w| w == b"\r\n\r\n").count();
    (0..requests).try_for_each(|_| stream.write_all(RESPONSE))?;
    Ok(requests as u64)
}
