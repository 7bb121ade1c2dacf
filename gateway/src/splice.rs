//! Connections between the loopback interfaces of the host and the guest: socket to socket by `splice(2)`; and
//! datagrams, by copies.
//!
//! A [`Splicer`] is a thread that connects from the network namespace in which it was started. Connections come to
//! it accepted ([`Splicer::carry`]) or by listeners ([`Splicer::listen`]), which may be of another namespace. Bytes
//! move from one socket to a pipe and on to the other socket without being copied or seen.
//!
//! - **Half-close, reset.** The end of one direction is passed on when its last byte has been; a reset at once.
//! - **Back-pressure.** At most one pipe of bytes per direction is in flight; what the reader does not take is
//!   not read.
//! - **Bounds.** [`MAX_CONNECTIONS`]; a connection above it is reset and counted. An idle connection has no pipe.
//! - **Fairness.** A ready connection moves [`TURN_BYTES`] per direction, then the others have their turn.
//!
//! UDP ports have a table of their own ([`datagrams`]).
//!
//! Sources: splice(2), pipe(7), epoll(7).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

mod connection;
pub mod datagrams;

use crate::policy::Protocol;
use crate::published::{self, PublishedPort, PublishedStat};
use crate::relay::host_socket::{self, Linger};
use crate::relay::streams::{Stream, Streams, Undelivered};
use connection::{Connection, Progress};
use datagrams::Datagrams;

/// Connections of a splicer at most.
pub const MAX_CONNECTIONS: usize = 16_384;
/// Bytes that a ready connection moves in one direction before it is another's turn.
pub const TURN_BYTES: usize = 1 << 20;
/// Connections that a ready listener accepts before it is another's turn.
const ACCEPTS_PER_TURN: usize = 64;
/// Events of one wait.
const EVENTS: usize = 256;
/// Programs that have exited have no more bytes on the way if nothing has moved for this time.
const QUIET: Duration = Duration::from_millis(500);
/// Empty pipes that are kept for the next connection with something to move.
const SPARE_PIPES: usize = 16;
/// After a failed accept (EMFILE, ENFILE, ENOMEM) it is tried again.
const RETRY_MS: u16 = 100;
const WAKE: u64 = u64::MAX;

/// The kind of an event's owner: the two lowest bits of its token. Above them is a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Listener = 0,
    Connection = 1,
    /// A UDP port.
    Port = 2,
    /// A client of a UDP port.
    Flow = 3,
}

const KINDS: [Kind; 4] = [Kind::Listener, Kind::Connection, Kind::Port, Kind::Flow];

fn token(kind: Kind, number: u64) -> u64 {
    number << 2 | kind as u64
}

/// The counts of a splicer.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections whose both ends were connected.
    pub connections: AtomicU64,
    /// Connections that were reset because the destination refused.
    pub refused: AtomicU64,
    /// Connections that were reset because of [`MAX_CONNECTIONS`] or for want of descriptors.
    pub dropped: AtomicU64,
    /// Bytes from the accepted sockets to the connected ones: *there*, the other direction being *back*.
    pub bytes_there: AtomicU64,
    /// Bytes back.
    pub bytes_back: AtomicU64,
    /// Datagrams from the clients of UDP ports.
    pub datagrams_there: AtomicU64,
    /// Datagrams back.
    pub datagrams_back: AtomicU64,
    /// Datagrams that a socket did not take, or that had none for want of descriptors.
    pub datagrams_lost: AtomicU64,
    /// Clients of UDP ports that gave way to others ([`datagrams::MAX_FLOWS`]).
    pub displaced: AtomicU64,
}

/// Destinations to try in order until one accepts.
pub type Destinations = Vec<SocketAddr>;

enum Command {
    Carry(TcpStream, Destinations, Arc<PublishedPort>),
    Listen(u64, TcpListener, Destinations, Arc<PublishedPort>),
    Unlisten(u64),
    ListenDatagrams(u64, UdpSocket, SocketAddr, Arc<PublishedPort>),
    Bind(Vec<SocketAddr>, Sender<Vec<TcpListener>>),
    BindDatagrams(Vec<SocketAddr>, Sender<Vec<UdpSocket>>),
    Finish(Side, Sender<()>),
}

/// An end of the connections of a splicer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Side {
    /// The end of the connections that it has accepted.
    Accepted,
    /// The end of the connections that it has made.
    Connected,
}

/// The last phase of a loop: what one side has sent is delivered before it ends.
#[derive(Debug)]
struct Finish {
    side: Side,
    /// The streams of that side.
    streams: Streams,
    /// When something moved last.
    moved: Instant,
    /// Dropped at the end, which wakes the receiver of [`Splicer::finish`].
    _done: Sender<()>,
}

/// The handle of a splicing thread. The thread ends with its last handle.
#[derive(Clone, Debug)]
pub struct Splicer {
    // Dropped in this order: the loop wakes up after the last sender is gone.
    commands: Sender<Command>,
    wake: Wake,
    counters: Arc<Counters>,
    ports: Arc<Mutex<Ports>>,
}

/// The ports of a splicer's own listeners.
#[derive(Debug, Default)]
struct Ports {
    next: u64,
    open: BTreeMap<u64, (Protocol, Arc<PublishedPort>)>,
}

/// Wakes the loop when it is dropped.
#[derive(Clone, Debug)]
struct Wake(Arc<EventFd>);

/// A splicer that has not begun. [`Loop::run`] connects from the namespace of the thread that calls it.
#[derive(Debug)]
pub struct Loop {
    epoll: Epoll,
    wake: Arc<EventFd>,
    commands: Receiver<Command>,
    counters: Arc<Counters>,
    listeners: HashMap<u64, Listener>,
    connections: HashMap<u64, Spliced>,
    datagrams: Datagrams,
    next_connection: u64,
    pipes: Pipes,
    /// Connections that have used up their turn.
    ready: VecDeque<u64>,
    /// Listeners whose last accept failed.
    stalled: Vec<u64>,
    has_no_handles: bool,
    finish: Option<Finish>,
}

/// A connection, and the published port to which it came.
#[derive(Debug)]
struct Spliced {
    connection: Connection,
    port: Arc<PublishedPort>,
    /// It is in the queue of connections that have used up their turn.
    is_queued: bool,
    /// The state under which [`Finish::streams`] counts its stream.
    counted: Stream,
}

#[derive(Debug)]
struct Listener {
    socket: TcpListener,
    to: Destinations,
    port: Arc<PublishedPort>,
}

/// Empty pipes.
#[derive(Debug, Default)]
pub(crate) struct Pipes(Vec<Pipe>);

/// A pipe and what is in it.
#[derive(Debug)]
pub(crate) struct Pipe {
    pub reader: OwnedFd,
    pub writer: OwnedFd,
    pub truesize: usize,
}

impl Pipes {
    pub(crate) fn take(&mut self) -> Result<Pipe, Errno> {
        if let Some(pipe) = self.0.pop() {
            return Ok(pipe);
        }
        let flags = nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK;
        let (reader, writer) = nix::unistd::pipe2(flags)?;
        Ok(Pipe { reader, writer, truesize: 0 })
    }

    /// Takes a pipe back; one with bytes in it is closed.
    pub(crate) fn put(&mut self, pipe: Pipe) {
        if pipe.truesize == 0 && self.0.len() < SPARE_PIPES {
            self.0.push(pipe);
        }
    }
}

/// Makes a splicer: its handle and the loop for a thread.
///
/// # Errors
/// No descriptors left.
pub fn splicer() -> io::Result<(Splicer, Loop)> {
    let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
    let (send, receive) = channel();
    let counters = Arc::new(Counters::default());
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(&*wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
    let handle = Splicer {
        commands: send,
        wake: Wake(wake.clone()),
        counters: counters.clone(),
        ports: Arc::default(),
    };
    let run = Loop {
        epoll,
        wake,
        commands: receive,
        counters,
        listeners: HashMap::new(),
        connections: HashMap::new(),
        datagrams: Datagrams::new(datagrams::MAX_FLOWS),
        next_connection: 0,
        pipes: Pipes::default(),
        ready: VecDeque::new(),
        stalled: Vec::new(),
        has_no_handles: false,
        finish: None,
    };
    Ok((handle, run))
}

impl Splicer {
    /// Ends the thread once everything is delivered that the programs of one side, which have exited, have sent. The
    /// sender of the returned receiver is dropped then. A connection that the side has not ended is reset.
    pub fn finish(&self, side: Side) -> Receiver<()> {
        let (done, is_done) = channel();
        self.send(Command::Finish(side, done));
        is_done
    }

    /// Connects what was accepted at a published port with the first of the destinations that accepts. If none does it
    /// is reset, and counted at the port.
    pub fn carry(&self, accepted: TcpStream, to: Destinations, port: Arc<PublishedPort>) {
        self.send(Command::Carry(accepted, to, port));
    }

    /// Carries what a listener accepts until [`Splicer::unlisten`], and counts it at its port.
    pub fn listen(&self, listener: TcpListener, to: Destinations, port: Arc<PublishedPort>) -> u64 {
        let id = self.enter(Protocol::Tcp, &port);
        self.send(Command::Listen(id, listener, to, port));
        id
    }

    /// Carries the datagrams of a bound socket to a destination until [`Splicer::unlisten`], and the answers back. Its
    /// clients are counted at its port.
    pub fn listen_datagrams(
        &self,
        socket: UdpSocket,
        to: SocketAddr,
        port: Arc<PublishedPort>,
    ) -> u64 {
        let id = self.enter(Protocol::Udp, &port);
        self.send(Command::ListenDatagrams(id, socket, to, port));
        id
    }

    fn enter(&self, protocol: Protocol, port: &Arc<PublishedPort>) -> u64 {
        let mut ports = self.ports();
        ports.next += 1;
        let id = ports.next;
        ports.open.insert(id, (protocol, Arc::clone(port)));
        id
    }

    fn ports(&self) -> MutexGuard<'_, Ports> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ports of its listeners, TCP first, and the counts of each.
    pub fn published(&self) -> Vec<PublishedStat> {
        let ports = self.ports();
        let of = |wanted: Protocol| {
            let open = ports.open.values().filter(move |(protocol, _)| *protocol == wanted);
            published::stat(wanted, open.map(|(_, port)| port))
        };
        let mut all = of(Protocol::Tcp);
        all.extend(of(Protocol::Udp));
        all
    }

    /// Closes a listener, whose connections stay, or a UDP port.
    pub fn unlisten(&self, id: u64) {
        self.ports().open.remove(&id);
        self.send(Command::Unlisten(id));
    }

    /// Binds listeners in the namespace of the splicer's thread, which must be running. `None`: it has ended.
    /// Addresses that cannot be bound are left out.
    pub fn bind(&self, addresses: Vec<SocketAddr>) -> Option<Vec<TcpListener>> {
        let (reply, made) = channel();
        self.send(Command::Bind(addresses, reply));
        made.recv().ok()
    }

    /// The same of UDP sockets.
    pub fn bind_datagrams(&self, addresses: Vec<SocketAddr>) -> Option<Vec<UdpSocket>> {
        let (reply, made) = channel();
        self.send(Command::BindDatagrams(addresses, reply));
        made.recv().ok()
    }

    /// The counts so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn send(&self, command: Command) {
        // A thread that has ended has no use for the command.
        let _ = self.commands.send(command);
        let _ = self.wake.0.write(1);
    }
}

impl Drop for Wake {
    fn drop(&mut self) {
        let _ = self.0.write(1);
    }
}

impl Loop {
    /// Splices until the last handle is gone and every connection has ended.
    ///
    /// # Errors
    /// Those of `epoll_wait`.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout()) {
                Err(Errno::EINTR) => 0,
                count => count?,
            };
            for event in &events[..count] {
                self.on_event(event.data(), event.events());
            }
            for _ in 0..self.ready.len() {
                let Some(id) = self.ready.pop_front() else { break };
                if let Some(spliced) = self.connections.get_mut(&id) {
                    spliced.is_queued = false;
                }
                self.pump(id);
            }
            for listener in std::mem::take(&mut self.stalled) {
                self.accept(listener);
            }
            self.datagrams.expire(Instant::now());
            if self.has_no_handles && self.connections.is_empty() || self.is_finished() {
                return Ok(());
            }
        }
    }

    /// Whether what is to be delivered before the end is delivered.
    fn is_finished(&self) -> bool {
        let Some(Finish { side, moved, streams, .. }) = &self.finish else { return false };
        let is_over = match streams.undelivered() {
            Undelivered::Nothing => true,
            Undelivered::MayCome => moved.elapsed() >= QUIET,
            Undelivered::Held => false,
        };
        if is_over {
            let connections = self.connections.values().map(|spliced| &spliced.connection);
            connections.filter(|c| c.has_ended(*side)).for_each(Connection::end_in_order);
        }
        is_over
    }

    /// Delivers what one side has sent, and ends.
    fn finish(&mut self, side: Side, done: Sender<()>) {
        self.listeners.clear();
        let mut streams = Streams::default();
        for spliced in self.connections.values_mut() {
            streams.recount(spliced.connection.stream(side), &mut spliced.counted);
        }
        self.finish = Some(Finish { side, streams, moved: Instant::now(), _done: done });
    }

    /// How long it may sleep.
    fn timeout(&self) -> EpollTimeout {
        let rest = self.datagrams.next_deadline().map(|at| {
            let time = at.saturating_duration_since(Instant::now());
            // Rounded up: to wake too early would be to wake twice.
            u16::try_from(time.as_millis() + 1).unwrap_or(u16::MAX)
        });
        let rest = if self.finish.is_some() { Some(RETRY_MS) } else { rest };
        match (self.ready.is_empty(), self.stalled.is_empty(), rest) {
            (false, ..) => EpollTimeout::ZERO,
            (true, false, rest) => EpollTimeout::from(rest.unwrap_or(RETRY_MS).min(RETRY_MS)),
            (true, true, Some(rest)) => EpollTimeout::from(rest),
            (true, true, None) => EpollTimeout::NONE,
        }
    }

    fn on_event(&mut self, token: u64, events: EpollFlags) {
        if token == WAKE {
            let _ = self.wake.read();
            return self.take_commands();
        }
        let id = token >> 2;
        match KINDS[(token & 3) as usize] {
            Kind::Listener => self.accept(id),
            Kind::Connection => {
                if let Some(spliced) = self.connections.get_mut(&id) {
                    spliced.connection.on_events(events);
                    self.pump(id);
                }
            }
            Kind::Port => self.datagrams.port_ready(id, &self.epoll, &self.counters),
            Kind::Flow => self.datagrams.flow_ready(id, &self.counters),
        }
    }

    /// Executes the commands of the handles.
    fn take_commands(&mut self) {
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.has_no_handles = true;
                    return;
                }
            };
            match command {
                Command::Carry(accepted, to, port) => self.begin(accepted, &to, port),
                Command::Listen(id, socket, to, port) => {
                    let watch = EpollEvent::new(EpollFlags::EPOLLIN, token(Kind::Listener, id));
                    let registered = socket.set_nonblocking(true).is_ok()
                        && self.epoll.add(&socket, watch).is_ok();
                    if registered {
                        self.listeners.insert(id, Listener { socket, to, port });
                    }
                }
                Command::Finish(side, done) => self.finish(side, done),
                Command::Bind(addresses, reply) => {
                    let made = addresses.iter().filter_map(|a| TcpListener::bind(a).ok());
                    // The thread that asked may have ended.
                    let _ = reply.send(made.collect());
                }
                Command::BindDatagrams(addresses, reply) => {
                    let made = addresses.iter().filter_map(|a| UdpSocket::bind(a).ok());
                    let _ = reply.send(made.collect());
                }
                Command::ListenDatagrams(id, socket, to, port) => {
                    self.datagrams.listen(id, datagrams::Port { socket, to, port }, &self.epoll);
                }
                Command::Unlisten(id) => {
                    self.listeners.remove(&id);
                    self.datagrams.unlisten(id);
                }
            }
        }
    }

    fn accept(&mut self, id: u64) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = self.listeners.get(&id) else { return };
            match listener.socket.accept() {
                Ok((accepted, _)) => {
                    let (to, port) = (listener.to.clone(), Arc::clone(&listener.port));
                    port.count_connection();
                    self.begin(accepted, &to, port);
                }
                Err(e) if host_socket::is_shortage(host_socket::errno_of(&e)) => {
                    // Level-triggered readiness would spin until descriptors are free.
                    self.set_listening(id, false);
                    self.stalled.push(id);
                    return;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                // The client is gone already.
                Err(_) => {}
            }
        }
        self.set_listening(id, true);
    }

    fn set_listening(&self, id: u64, on: bool) {
        let flags = if on { EpollFlags::EPOLLIN } else { EpollFlags::empty() };
        if let Some(listener) = self.listeners.get(&id) {
            let mut event = EpollEvent::new(flags, token(Kind::Listener, id));
            let _ = self.epoll.modify(&listener.socket, &mut event);
        }
    }

    fn begin(&mut self, accepted: TcpStream, to: &[SocketAddr], port: Arc<PublishedPort>) {
        if self.connections.len() >= MAX_CONNECTIONS {
            host_socket::set_linger(&accepted, Linger::Reset);
            return self.count_failure(Errno::ENOBUFS, &port);
        }
        let id = self.next_connection;
        self.next_connection += 1;
        match Connection::begin(accepted, to, &self.epoll, token(Kind::Connection, id)) {
            Ok(connection) => {
                let (is_queued, counted) = (false, Stream::default());
                self.connections.insert(id, Spliced { connection, port, is_queued, counted });
                self.pump(id);
            }
            Err(e) => self.count_failure(e, &port),
        }
    }

    fn count_failure(&self, e: Errno, port: &PublishedPort) {
        let counter = if host_socket::is_shortage(e) {
            &self.counters.dropped
        } else {
            &self.counters.refused
        };
        counter.fetch_add(1, Relaxed);
        port.count_refused();
    }

    /// Moves what a connection has to move, for one turn.
    fn pump(&mut self, id: u64) {
        let Some(spliced) = self.connections.get_mut(&id) else { return };
        let token = token(Kind::Connection, id);
        let progress = spliced.connection.pump(&mut self.pipes, &self.epoll, token, &self.counters);
        if let Some(finish) = &mut self.finish {
            let is = match progress {
                Progress::Waits | Progress::HasMore => spliced.connection.stream(finish.side),
                Progress::Done | Progress::Failed(_) => Stream::Ended,
            };
            finish.streams.recount(is, &mut spliced.counted);
            finish.moved = Instant::now();
        }
        match progress {
            Progress::Waits => {}
            Progress::HasMore => {
                if !std::mem::replace(&mut spliced.is_queued, true) {
                    self.ready.push_back(id);
                }
            }
            Progress::Done => {
                self.connections.remove(&id);
            }
            Progress::Failed(e) => {
                if let Some(spliced) = self.connections.remove(&id) {
                    self.count_failure(e, &spliced.port);
                }
            }
        }
    }
}
