//! One connection: two sockets and, while there is something to move, a pipe for each direction.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;

use nix::errno::Errno;
use nix::fcntl::{SpliceFFlags, splice};
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, connect, recv, socket,
};
use nix::unistd::write;

use super::{Counters, Pipe, Pipes, Side, TURN_BYTES};
use crate::relay::host_socket::{self, Linger};
use crate::relay::poll::EDGES;
use crate::relay::streams::Stream;

/// Most bytes that one call moves: the default capacity of a pipe.
const CALL_BYTES: usize = 64 << 10;
/// Bytes that are copied at most where a splice moves none: what a pipe takes at once (PIPE_BUF).
const COPIED_BYTES: usize = 4096;

/// The next step of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// It waits for its sockets.
    Waits,
    /// It has used up its turn.
    HasMore,
    /// Both directions have ended, or one side was reset: then the close of the sockets resets both.
    Done,
    /// It was never connected, or there are no descriptors left; the accepted side has been reset.
    Failed(Errno),
}

#[derive(Debug)]
pub(super) struct Connection {
    accepted: TcpStream,
    connected: TcpStream,
    is_connected: bool,
    /// Destinations to try if this one refuses.
    others: Vec<SocketAddr>,
    there: Direction,
    back: Direction,
    has_error: bool,
}

#[derive(Debug, Default)]
struct Direction {
    pipe: Option<Pipe>,
    /// Urgent data may have come (EPOLLPRI), in front of which a splice stops.
    has_urgent: bool,
    is_ended: bool,
    is_shut: bool,
}

/// A socket that is being connected.
fn start_connect(to: SocketAddr) -> Result<TcpStream, Errno> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = TcpStream::from(socket(family, SockType::Stream, flags, None)?);
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {
            host_socket::set_stream_options(&socket);
            Ok(socket)
        }
        Err(e) => Err(e),
    }
}

impl Connection {
    /// Starts to connect to the first destination to which that is possible. `accepted` is reset otherwise.
    pub(super) fn begin(
        accepted: TcpStream,
        to: &[SocketAddr],
        epoll: &Epoll,
        token: u64,
    ) -> Result<Connection, Errno> {
        // Until both directions have ended: so the kernel resets the connections of a process that was killed.
        host_socket::set_stream_options(&accepted);
        let begun = (|| {
            accepted.set_nonblocking(true).map_err(|_| Errno::EBADF)?;
            let (connected, others) = first_that_starts(to)?;
            watch(epoll, &connected, token)?;
            watch(epoll, &accepted, token)?;
            Ok((connected, others))
        })();
        begun.map(|(connected, others)| Connection {
            accepted,
            connected,
            is_connected: false,
            others,
            there: Direction::default(),
            back: Direction::default(),
            has_error: false,
        })
    }

    pub(crate) fn on_events(&mut self, events: EpollFlags) {
        self.has_error |= events.contains(EpollFlags::EPOLLERR);
        // Of either socket.
        let has_urgent = events.contains(EpollFlags::EPOLLPRI);
        self.there.has_urgent |= has_urgent;
        self.back.has_urgent |= has_urgent;
    }

    /// Moves bytes both ways for one turn.
    pub(super) fn pump(
        &mut self,
        pipes: &mut Pipes,
        epoll: &Epoll,
        token: u64,
        counters: &Counters,
    ) -> Progress {
        if !self.is_connected {
            match self.finish_connect(epoll, token) {
                Ok(true) => {
                    counters.connections.fetch_add(1, Relaxed);
                }
                Ok(false) => return Progress::Waits,
                Err(e) => return Progress::Failed(e),
            }
        }
        let there = self.there.pump(&self.accepted, &self.connected, pipes);
        let back = self.back.pump(&self.connected, &self.accepted, pipes);
        let (Ok((moved_there, more_there)), Ok((moved_back, more_back))) = (there, back) else {
            return Progress::Done;
        };
        counters.bytes_there.fetch_add(moved_there as u64, Relaxed);
        counters.bytes_back.fetch_add(moved_back as u64, Relaxed);
        if self.there.is_shut && self.back.is_shut {
            self.end_in_order();
            return Progress::Done;
        }
        if self.has_error && !more_there && !more_back {
            // A reset after both ends were read.
            return Progress::Done;
        }
        if more_there || more_back { Progress::HasMore } else { Progress::Waits }
    }

    /// Whether the end of what a side has sent was passed on.
    pub(super) fn has_ended(&self, side: Side) -> bool {
        self.from(side).is_shut
    }

    /// The state of the stream that a side sends.
    pub(super) fn stream(&self, side: Side) -> Stream {
        let direction = self.from(side);
        match direction.pipe {
            _ if direction.is_shut => Stream::Ended,
            Some(_) => Stream::Held,
            None => Stream::Open,
        }
    }

    fn from(&self, side: Side) -> &Direction {
        match side {
            Side::Accepted => &self.there,
            Side::Connected => &self.back,
        }
    }

    /// The close of the sockets delivers what the kernel holds.
    pub(super) fn end_in_order(&self) {
        [&self.accepted, &self.connected]
            .into_iter()
            .for_each(|side| host_socket::set_linger(side, Linger::Deliver));
    }

    /// Whether the connection is established; starts the next one if the destination refused.
    fn finish_connect(&mut self, epoll: &Epoll, token: u64) -> Result<bool, Errno> {
        // SO_ERROR before the peer's name: a refusal between the two shows at the next event.
        let refusal = self.connected.take_error().ok().flatten();
        match refusal.and_then(|e| e.raw_os_error()) {
            None if self.connected.peer_addr().is_ok() => {
                self.is_connected = true;
                self.has_error = false;
                Ok(true)
            }
            None => Ok(false),
            Some(errno) if self.others.is_empty() => Err(Errno::from_raw(errno)),
            Some(_) => {
                let (next, others) = first_that_starts(&self.others)?;
                watch(epoll, &next, token)?;
                (self.connected, self.others, self.has_error) = (next, others, false);
                Ok(false)
            }
        }
    }
}

/// Connects to the first destination that does not refuse immediately; returns those after it, too.
fn first_that_starts(to: &[SocketAddr]) -> Result<(TcpStream, Vec<SocketAddr>), Errno> {
    let mut last = Errno::EADDRNOTAVAIL;
    for (at, address) in to.iter().enumerate() {
        match start_connect(*address) {
            Ok(socket) => return Ok((socket, to[at + 1..].to_vec())),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn watch(epoll: &Epoll, socket: &TcpStream, token: u64) -> Result<(), Errno> {
    epoll.add(socket, EpollEvent::new(EDGES, token))
}

impl Direction {
    /// Moves bytes until a socket blocks or the turn is over: how many were delivered, and whether there may be
    /// more to do without waiting.
    fn pump(
        &mut self,
        from: &TcpStream,
        to: &TcpStream,
        pipes: &mut Pipes,
    ) -> Result<(usize, bool), Errno> {
        let mut delivered_bytes = 0;
        while delivered_bytes < TURN_BYTES {
            if self.is_shut {
                return Ok((delivered_bytes, false));
            }
            let filled = self.fill(from, pipes)?;
            let drained = self.drain(to)?;
            delivered_bytes += drained;
            if self.pipe.as_ref().is_some_and(|p| p.truesize == 0) {
                self.pipe.take().into_iter().for_each(|p| pipes.put(p));
            }
            if self.is_ended && self.pipe.is_none() {
                // The reader may be gone already; its error shows on the other direction.
                let _ = to.shutdown(Shutdown::Write);
                self.is_shut = true;
            }
            if filled == 0 && drained == 0 {
                return Ok((delivered_bytes, false));
            }
        }
        Ok((delivered_bytes, true))
    }

    /// From the socket into the pipe, if the pipe is empty.
    fn fill(&mut self, from: &TcpStream, pipes: &mut Pipes) -> Result<usize, Errno> {
        if self.is_ended || self.pipe.as_ref().is_some_and(|p| p.truesize > 0) {
            return Ok(0);
        }
        let pipe = match self.pipe.take() {
            Some(pipe) => pipe,
            None => pipes.take()?,
        };
        let pipe = self.pipe.insert(pipe);
        match transfer(from.as_fd(), pipe.writer.as_fd())? {
            Some(n) if n > 0 => {
                pipe.truesize += n;
                Ok(n)
            }
            None if !self.has_urgent => Ok(0),
            // In front of urgent data a splice moves nothing, as at the end of the stream.
            _ => self.fill_by_copy(from),
        }
    }

    /// The same by a copy, which passes urgent data.
    fn fill_by_copy(&mut self, from: &TcpStream) -> Result<usize, Errno> {
        let Some(pipe) = self.pipe.as_mut() else { return Ok(0) };
        let mut bytes = [0; COPIED_BYTES];
        let received = loop {
            match recv(from.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EINTR) => {}
                done => break done,
            }
        };
        match received {
            Ok(0) => {
                self.is_ended = true;
                Ok(0)
            }
            Ok(n) => {
                // The pipe is empty, and has space for a page.
                let written = write(&pipe.writer, &bytes[..n])?;
                pipe.truesize += written;
                Ok(written)
            }
            Err(Errno::EAGAIN) => {
                self.has_urgent = false;
                Ok(0)
            }
            Err(e) => Err(e),
        }
    }

    /// From the pipe into the socket.
    fn drain(&mut self, to: &TcpStream) -> Result<usize, Errno> {
        let Some(pipe) = self.pipe.as_mut().filter(|p| p.truesize > 0) else { return Ok(0) };
        let moved = transfer(pipe.reader.as_fd(), to.as_fd())?.unwrap_or(0);
        pipe.truesize -= moved;
        Ok(moved)
    }
}

/// One splice: the bytes moved, 0 at the end of the source, `None` if it would block.
fn transfer(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<Option<usize>, Errno> {
    let flags = SpliceFFlags::SPLICE_F_MOVE | SpliceFFlags::SPLICE_F_NONBLOCK;
    loop {
        match splice(from, None, to, None, CALL_BYTES, flags) {
            Ok(n) => return Ok(Some(n)),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Ok(None),
            Err(e) => return Err(e),
        }
    }
}
