//! Socket calls as Linux has them, over the shard. Each is a step: it does what can be done now and otherwise
//! answers [`Refusal::WouldBlock`]; [`crate::interface`] waits, on the clock of the script.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::task::Poll;

use fulmar_stack::base::SlotId;
use fulmar_stack::mbuf::Chain;
use fulmar_stack::shard::{ListenOptions, Reserved};
use fulmar_stack::socket::{Attempt, Least, Ready, Shutdown, SocketError};
use fulmar_stack::tcp::State;

use crate::options::Options;
use crate::poll::{Epoll, Readiness};
use crate::world::World;

/// Descriptors at most.
const MAX_FILES: usize = 1024;

/// Why a call did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// It failed with this errno.
    Errno(i32),
    /// It has to wait.
    WouldBlock,
}

impl From<SocketError> for Refusal {
    fn from(e: SocketError) -> Refusal {
        match e {
            SocketError::WouldBlock => Refusal::WouldBlock,
            e => Refusal::Errno(e.errno()),
        }
    }
}

/// The answer of a step.
pub type Answer<T> = Result<T, Refusal>;

fn refused<T>(errno: i32) -> Answer<T> {
    Err(Refusal::Errno(errno))
}

/// What a socket is at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Neither connected nor listening.
    Fresh,
    Listener(SlotId),
    Stream(SlotId),
    /// A connection attempt whose outcome `connect` has not told yet.
    Connecting(SlotId),
    /// A connect with TCP_FASTOPEN_CONNECT, whose SYN waits for the first write.
    Deferred(SocketAddr),
    /// An attempt that failed, or a listener that was shut down.
    Over,
}

/// A TCP socket.
#[derive(Debug)]
pub struct Socket {
    pub(crate) role: Role,
    pub(crate) bound: Option<SocketAddr>,
    /// O_NONBLOCK.
    pub nonblocking: bool,
    /// Options that were set, for the connection that the socket becomes.
    pub options: Box<Options>,
}

impl Socket {
    fn new(role: Role, options: Box<Options>) -> Socket {
        Socket { role, bound: None, nonblocking: false, options }
    }

    /// The connection, once there is one.
    pub fn stream(&self) -> Option<SlotId> {
        match self.role {
            Role::Stream(id) | Role::Connecting(id) => Some(id),
            _ => None,
        }
    }

    /// The listener.
    pub fn listener(&self) -> Option<SlotId> {
        match self.role {
            Role::Listener(id) => Some(id),
            _ => None,
        }
    }
}

/// A descriptor.
#[derive(Debug)]
pub enum File {
    /// A TCP socket.
    Socket(Socket),
    /// An epoll set.
    Epoll(Epoll),
}

/// How a write treats the bytes after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Follows {
    /// Nothing that is known.
    Nothing,
    /// Another write (MSG_MORE).
    More,
    /// Another record (MSG_EOR).
    Record,
}

/// The machine under test: a world and the descriptors of its program.
#[derive(Default)]
pub struct Machine {
    /// The shard and the clock.
    pub world: World,
    files: BTreeMap<i32, File>,
    /// Chooses the number of a new descriptor; `None`: the lowest that is free.
    number: Option<fn() -> Option<i32>>,
}

impl Machine {
    /// A machine in a world.
    pub fn new(world: World) -> Machine {
        Machine { world, ..Machine::default() }
    }

    /// The same with numbers of descriptors that `number` chooses.
    #[must_use]
    pub fn with_numbers(self, number: fn() -> Option<i32>) -> Machine {
        Machine { number: Some(number), ..self }
    }

    /// Adds a descriptor.
    pub fn add(&mut self, file: File) -> Answer<i32> {
        let fd = match self.number {
            Some(number) => number(),
            None => (3..).find(|fd| !self.files.contains_key(fd)),
        };
        let Some(fd) = fd.filter(|_| self.files.len() < MAX_FILES) else {
            return refused(libc::EMFILE);
        };
        self.files.insert(fd, file);
        Ok(fd)
    }

    /// Whether a descriptor is the machine's.
    pub fn has(&self, fd: i32) -> bool {
        self.files.contains_key(&fd)
    }

    /// A descriptor.
    pub fn file(&mut self, fd: i32) -> Answer<&mut File> {
        self.files.get_mut(&fd).ok_or(Refusal::Errno(libc::EBADF))
    }

    /// A socket.
    pub fn socket_of(&mut self, fd: i32) -> Answer<&mut Socket> {
        match self.file(fd)? {
            File::Socket(socket) => Ok(socket),
            File::Epoll(_) => refused(libc::ENOTSOCK),
        }
    }

    /// socket(2): TCP over either version.
    pub fn socket(&mut self, domain: i32, kind: i32, protocol: i32) -> Answer<i32> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        match (domain, kind & !flags, protocol) {
            (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {}
            (libc::AF_INET | libc::AF_INET6, _, _) => return refused(libc::EPROTONOSUPPORT),
            _ => return refused(libc::EAFNOSUPPORT),
        }
        let options = Box::new(Options::new(self.world.settings()));
        let mut socket = Socket::new(Role::Fresh, options);
        socket.nonblocking = kind & libc::SOCK_NONBLOCK != 0;
        self.add(File::Socket(socket))
    }

    /// bind(2). The address is taken when the socket listens or connects.
    pub fn bind(&mut self, fd: i32, at: SocketAddr) -> Answer<()> {
        let socket = self.socket_of(fd)?;
        if socket.bound.is_some() || socket.role != Role::Fresh {
            return refused(libc::EINVAL);
        }
        socket.bound = Some(at);
        Ok(())
    }

    /// listen(2).
    pub fn listen(&mut self, fd: i32, backlog: i32) -> Answer<()> {
        let cookies = self.world.settings().syn_cookies();
        let own = self.socket_of(fd)?.options.fast_open.clone();
        let fast_open = self.world.settings().fast_open(&own);
        let socket = self.socket_of(fd)?;
        match socket.role {
            Role::Listener(_) => return Ok(()),
            Role::Fresh => {}
            _ => return refused(libc::EINVAL),
        }
        let local = socket.bound.unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)));
        let options = ListenOptions {
            // A backlog of n lets n + 1 wait, as on Linux and the BSDs.
            backlog: usize::try_from(backlog).unwrap_or(0) + 1,
            syn_cookies: cookies,
            fast_open,
            ..socket.options.for_listener()
        };
        let id = self.world.call(|shard, _| shard.tcp_listen(local, options))?;
        self.socket_of(fd)?.role = Role::Listener(id);
        Ok(())
    }

    /// accept(2).
    pub fn accept(&mut self, fd: i32) -> Answer<(i32, SocketAddr)> {
        let socket = self.socket_of(fd)?;
        let Some(id) = socket.listener() else { return refused(libc::EINVAL) };
        let options = socket.options.clone();
        let step = self.world.call(|shard, _| shard.tcp_accept(id))?;
        let Poll::Ready((child, peer)) = step else { return Err(Refusal::WouldBlock) };
        self.world.call(|shard, now| shard.with_tcb(now, child, |entry| options.apply(entry)))?;
        Ok((self.add(File::Socket(Socket::new(Role::Stream(child), options)))?, peer))
    }

    /// Begins a connection attempt; [`Machine::connected`] tells how it went.
    pub fn connect(&mut self, fd: i32, remote: SocketAddr) -> Answer<()> {
        let socket = self.socket_of(fd)?;
        match socket.role {
            Role::Fresh | Role::Over => {}
            Role::Connecting(_) => return self.connected(fd),
            Role::Stream(_) | Role::Deferred(_) => return refused(libc::EISCONN),
            Role::Listener(_) => return refused(libc::EISCONN),
        }
        if socket.options.fast_open.connect {
            return self.connect_lazily(fd, remote);
        }
        let (local, options) = (socket.bound, socket.options.clone());
        let id = self.world.call(|shard, now| {
            shard.tcp_connect_with(now, remote, local, |entry| options.apply(entry))
        })?;
        self.socket_of(fd)?.role = Role::Connecting(id);
        Err(Refusal::WouldBlock)
    }

    /// The outcome of a connection attempt, told once.
    pub fn connected(&mut self, fd: i32) -> Answer<()> {
        let Role::Connecting(id) = self.socket_of(fd)?.role else { return refused(libc::EISCONN) };
        match self.world.call(|shard, _| shard.tcp_connected(id)) {
            Ok(Poll::Ready(())) => {
                self.socket_of(fd)?.role = Role::Stream(id);
                Ok(())
            }
            Ok(_) => Err(Refusal::WouldBlock),
            Err(e) => {
                self.world.call(|shard, now| shard.close(now, id));
                self.socket_of(fd)?.role = Role::Over;
                Err(e.into())
            }
        }
    }

    /// connect(2) to AF_UNSPEC: the connection is reset, and the socket may connect again.
    pub fn disconnect(&mut self, fd: i32) -> Answer<()> {
        let socket = self.socket_of(fd)?;
        let id = socket.stream();
        socket.role = Role::Fresh;
        if let Some(id) = id {
            self.world.call(|shard, now| {
                if let Ok(entry) = shard.tcp_entry(id) {
                    entry.tcb.abort();
                }
                shard.close(now, id);
            });
        }
        Ok(())
    }

    /// Whether the socket has a connection whose handshake is over.
    pub fn is_connected(&mut self, fd: i32) -> Answer<bool> {
        let Some(id) = self.socket_of(fd)?.stream() else { return Ok(false) };
        let state = self.world.shard().tcp_entry(id)?.tcb.state();
        Ok(!matches!(state, State::SynSent | State::SynReceived | State::Closed))
    }

    /// Whether a connect of this socket is under way.
    pub fn is_connecting(&mut self, fd: i32) -> bool {
        self.socket_of(fd).is_ok_and(|s| matches!(s.role, Role::Connecting(_)))
    }

    /// Sends what fits.
    pub fn send(
        &mut self,
        fd: i32,
        bytes: &[u8],
        follows: Follows,
        attempt: Attempt,
    ) -> Answer<usize> {
        let Some(id) = self.socket_of(fd)?.stream() else { return refused(libc::EPIPE) };
        if bytes.is_empty() {
            return Ok(0);
        }
        let more = follows == Follows::More;
        // A write of which more follows is not small, however short: it may have to wait for the next.
        let first = if follows == Follows::Nothing { bytes } else { &[][..] };
        let step = self.world.call(|shard, now| -> Result<_, SocketError> {
            Ok(match shard.sosend(id).reserve(now, first, bytes.len(), attempt)? {
                Poll::Ready(Reserved::Sent(n)) => Some(n),
                Poll::Ready(Reserved::Space(mut reservation)) => {
                    let n = reservation.len();
                    reservation.chain.fill([&bytes[..n]]);
                    reservation.more = more;
                    reservation.ends_record = follows == Follows::Record && n == bytes.len();
                    shard.sosend(id).commit(now, reservation);
                    Some(n)
                }
                _ => None,
            })
        })?;
        step.ok_or(Refusal::WouldBlock)
    }

    /// Receives at most `max` bytes, of which none is the end of the stream, once `least` are there.
    pub fn recv(&mut self, fd: i32, max: usize, least: usize) -> Answer<Vec<u8>> {
        let id = self.readable_stream(fd)?;
        if max == 0 {
            return Ok(Vec::new());
        }
        let wait = if least > 1 { Least::LowWater } else { Least::OneByte };
        let step = self.world.call(|shard, now| -> Result<_, SocketError> {
            if least > 1 {
                shard.tcp_entry(id)?.tcb.set_recv_low_water(least);
            }
            let step = shard.tcp_take_more(id, max, 0, wait);
            if least > 1 {
                shard.tcp_entry(id)?.tcb.set_recv_low_water(1);
            }
            Ok(if let Poll::Ready(chain) = step? {
                let bytes = chain.to_vec();
                shard.tcp_read_done(now, id, chain);
                Some(bytes)
            } else {
                None
            })
        })?;
        step.ok_or(Refusal::WouldBlock)
    }

    /// As [`Machine::recv`] with MSG_PEEK.
    pub fn peek(&mut self, fd: i32, max: usize) -> Answer<Vec<u8>> {
        let id = self.readable_stream(fd)?;
        let step = self.world.call(|shard, _| -> Result<_, SocketError> {
            Ok(match shard.tcp_peek_at(id, 0, max, 1)? {
                Poll::Ready(chain) => Some(copy_out(shard, chain)),
                _ => None,
            })
        })?;
        step.ok_or(Refusal::WouldBlock)
    }

    fn readable_stream(&mut self, fd: i32) -> Answer<SlotId> {
        let socket = self.socket_of(fd)?;
        match socket.role {
            Role::Deferred(_) => Err(Refusal::WouldBlock),
            _ => socket.stream().ok_or(Refusal::Errno(libc::ENOTCONN)),
        }
    }

    /// close(2).
    pub fn close(&mut self, fd: i32) -> Answer<()> {
        self.file(fd)?;
        let Some(File::Socket(socket)) = self.files.remove(&fd) else { return Ok(()) };
        if let Some(id) = socket.stream().or(socket.listener()) {
            self.world.call(|shard, now| shard.close(now, id));
        }
        Ok(())
    }

    /// shutdown(2).
    pub fn shutdown(&mut self, fd: i32, how: i32) -> Answer<()> {
        let how = match how {
            libc::SHUT_RD => Shutdown::Read,
            libc::SHUT_WR => Shutdown::Write,
            libc::SHUT_RDWR => Shutdown::Both,
            _ => return refused(libc::EINVAL),
        };
        let socket = self.socket_of(fd)?;
        if let Some(listener) = socket.listener().filter(|_| how != Shutdown::Write) {
            socket.role = Role::Over;
            self.world.call(|shard, now| shard.close(now, listener));
            return Ok(());
        }
        let Some(id) = socket.stream() else { return refused(libc::ENOTCONN) };
        Ok(self.world.call(|shard, now| shard.tcp_shutdown(now, id, how))?)
    }

    /// What a descriptor is ready for.
    pub fn readiness(&mut self, fd: i32) -> Answer<Readiness> {
        let socket = self.socket_of(fd)?;
        let Some(id) = socket.stream().or(socket.listener()) else {
            if matches!(socket.role, Role::Deferred(_)) {
                let events = libc::POLLOUT | libc::POLLWRNORM;
                return Ok(Readiness { events, ..Readiness::default() });
            }
            return Ok(Readiness { events: libc::POLLOUT | libc::POLLHUP, ..Readiness::default() });
        };
        let shard = self.world.shard();
        let ready = shard.ready(id).unwrap_or(Ready::CLOSED);
        let received = shard.tcp_entry(id).map_or(0, |e| e.tcb.info().received_bytes);
        Ok(Readiness { events: poll_events(ready), received_bytes: received })
    }

    /// Everything that watches readiness looks at it, for edges.
    pub fn note_edges(&mut self) {
        let is_epoll = |(fd, file): (&i32, &File)| matches!(file, File::Epoll(_)).then_some(*fd);
        let sets: Vec<i32> = self.files.iter().filter_map(is_epoll).collect();
        for fd in sets {
            // The set exists: nothing was closed since.
            let _ = self.with_epoll(fd, |epoll, machine| {
                epoll.note_edges(|fd| machine.readiness(fd).ok());
            });
        }
    }

    /// Runs `f` on an epoll set and the readiness of all descriptors.
    pub fn with_epoll<T>(
        &mut self,
        fd: i32,
        f: impl FnOnce(&mut Epoll, &mut Machine) -> T,
    ) -> Answer<T> {
        let File::Epoll(epoll) = self.file(fd)? else { return refused(libc::EINVAL) };
        let mut taken = std::mem::take(epoll);
        let answer = f(&mut taken, self);
        if let File::Epoll(epoll) = self.file(fd)? {
            *epoll = taken;
        }
        Ok(answer)
    }
}

fn copy_out(shard: &mut fulmar_stack::shard::Shard, chain: Chain) -> Vec<u8> {
    let bytes = chain.to_vec();
    shard.pool().free(chain);
    bytes
}

/// Readiness as poll(2) has it.
fn poll_events(ready: Ready) -> i16 {
    let pairs = [
        (ready.is_readable(), libc::POLLIN | libc::POLLRDNORM),
        (ready.is_writable(), libc::POLLOUT | libc::POLLWRNORM),
        (ready.is_peer_closed(), libc::POLLRDHUP),
        (ready.is_error(), libc::POLLERR),
        (ready.is_closed(), libc::POLLHUP),
    ];
    pairs.iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, events)| all | events)
}
