//! The sockets of the server. Calls block for at most [`TICK`]: the caller then looks whether the
//! test is over.

use fulmar::tcp::TcpConfig;
use fulmar::zero_copy::{RecvBuf, RecvCompletion, ZeroCopy};
use fulmar::{SocketOptions, Stack, TcpListener, TcpStream, UdpSocket};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// How long a call blocks at most.
pub const TICK: Duration = Duration::from_millis(100);
/// The largest payload of a UDP datagram over IPv4, bytes; IPv6 would take 20 more.
pub const LARGEST_DATAGRAM: usize = 65_507;
/// Bytes that a UDP socket of fulmar keeps for its reader by default.
const DATAGRAM_BUFFER: usize = 256 << 10;

/// Requested options of a data socket; `None`: the default of the stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tuning {
    /// SO_SNDBUF, bytes.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF, bytes.
    pub recv_buffer: Option<usize>,
    /// No Nagle algorithm.
    pub nodelay: bool,
}

/// The socket buffers that a socket has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Buffers {
    /// Bytes for sending.
    pub send: usize,
    /// Bytes for receiving.
    pub recv: usize,
}

impl Buffers {
    /// Those of a new connection, before the stack adapts them.
    pub fn of_connections(tuning: &Tuning) -> Buffers {
        let config = TcpConfig::default();
        Buffers {
            send: tuning.send_buffer.unwrap_or(config.send_buffer_bytes),
            recv: tuning.recv_buffer.unwrap_or(config.recv_buffer_bytes),
        }
    }

    /// Those of a UDP socket.
    pub fn of_datagrams(tuning: &Tuning) -> Buffers {
        Buffers {
            send: tuning.send_buffer.unwrap_or(DATAGRAM_BUFFER),
            recv: tuning.recv_buffer.unwrap_or(DATAGRAM_BUFFER),
        }
    }

    /// Those that a connection has now.
    pub fn of(stream: &TcpStream) -> Buffers {
        let info = stream.info().ok();
        let (send, recv) =
            info.map(|i| (i.send_buffer_bytes, i.recv_buffer_bytes)).unwrap_or_default();
        Buffers { send, recv }
    }
}

/// Listens; port 0 lets the stack choose.
///
/// # Errors
/// The port is taken.
pub fn listen(stack: &Stack, at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(stack, at)?;
    listener.set_accept_timeout(Some(TICK))?;
    Ok(listener)
}

/// The next connection, or `WouldBlock` after [`TICK`].
///
/// # Errors
/// As `accept(2)`.
pub fn accept(listener: &TcpListener, tuning: &Tuning) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, peer) = listener.accept()?;
    let Tuning { send_buffer, recv_buffer, nodelay, .. } = *tuning;
    let options = stream.options()?;
    stream.set_options(SocketOptions { send_buffer, recv_buffer, nodelay, ..options })?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(TICK))?;
    Ok((stream, peer))
}

/// Makes a socket for datagrams; port 0 lets the stack choose.
///
/// # Errors
/// The port is taken.
pub fn datagrams(stack: &Stack, at: SocketAddr, tuning: &Tuning) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(stack, at)?;
    socket.set_read_timeout(Some(TICK))?;
    socket.set_write_timeout(Some(TICK))?;
    if let Some(bytes) = tuning.recv_buffer {
        socket.set_recv_buffer(bytes)?;
    }
    Ok(socket)
}

/// Receive buffers in the order in which they were posted; each is posted again when it is filled.
pub struct Posted<'a> {
    stream: &'a TcpStream,
    under_way: VecDeque<RecvCompletion>,
}

impl Posted<'_> {
    /// Posts `count` buffers of `bytes` each (netperf's `-A`).
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn new(stream: &TcpStream, count: usize, bytes: usize) -> io::Result<Posted<'_>> {
        let mut posted = Posted { stream, under_way: VecDeque::new() };
        for _ in 0..count.max(1) {
            posted.post(RecvBuf::try_with_capacity(bytes).map_err(io::Error::other)?)?;
        }
        Ok(posted)
    }

    fn post(&mut self, buffer: RecvBuf) -> io::Result<()> {
        self.under_way.push_back(self.stream.recv_posted(buffer)?);
        Ok(())
    }

    /// Bytes of the next buffer that is filled; 0 is the end.
    ///
    /// # Errors
    /// `WouldBlock` after [`TICK`]; as `read(2)`.
    pub fn next(&mut self) -> io::Result<usize> {
        // At the end of the stream they come back one after the other, with nothing.
        let Some(first) = self.under_way.front_mut() else { return Ok(0) };
        let Some(back) = first.wait_timeout(TICK) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        self.under_way.pop_front();
        let buffer = back?;
        let n = buffer.len();
        if n > 0 {
            self.post(buffer)?;
        }
        Ok(n)
    }
}

/// The call may be made again: nothing happened within [`TICK`], or a signal came.
pub fn is_tick(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::TimedOut
    )
}
