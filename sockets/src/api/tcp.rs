//! TCP sockets, shaped like `std::net`'s.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::Limit;
use fulmar_stack::shard::{SocketOptions, TcpEntry};
use fulmar_stack::socket::{Ready, SocketError};

use crate::api::error::invalid;
use crate::api::receive::RecvFlags;
use crate::api::send::SendFlags;
use crate::api::socket::{Socket, explain_unreachable, stack_of, to_io};
use crate::api::stack::Stack;
use crate::tcp::TcpInfo;

/// A TCP connection.
///
/// Threads may share it. Concurrent reads are serialized by the shard lock; concurrent writes are not
/// interleaved. Dropping the last handle closes the connection after the accepted bytes were sent. If received
/// bytes are unread, the connection is reset instead, as on Linux (RFC 2525 section 2.17).
///
/// A socket keeps its stack. If the last handle to the stack is gone, dropping the last socket ends the stack: **that
/// drop waits** until what was accepted is acknowledged, for at most [`Builder::exit_drain`](crate::Builder::exit_drain) (5 s), of a
/// non-blocking socket too. [`Stack::close`] does it at a time of the program's choice.
///
/// ```
/// # use std::io::{Read, Write};
/// # use std::time::Duration;
/// # use fulmar::{Stack, TcpListener, TcpStream, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
/// let mut stream = TcpStream::connect(&stack, "10.0.0.1:80")?;
/// stream.set_nodelay(true)?;
/// stream.set_read_timeout(Some(Duration::from_secs(10)))?;
/// stream.write_all(b"hello")?;
/// # let (mut peer, _) = listener.accept()?;
/// # peer.write_all(b"world")?;
/// let mut answer = [0; 5];
/// stream.read_exact(&mut answer)?;
/// println!("round-trip time {:?}", stream.info()?.rtt);
/// # Ok(())
/// # }
/// ```
pub struct TcpStream {
    pub(crate) socket: Arc<Socket>,
}

impl TcpStream {
    /// Another handle to the same connection.
    ///
    /// # Errors
    /// Never; the signature is that of `std::net`.
    pub fn try_clone(&self) -> io::Result<TcpStream> {
        Ok(TcpStream { socket: Arc::clone(&self.socket) })
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.addresses()?.1.ok_or_else(|| to_io(SocketError::NotConnected))
    }

    /// This end's address.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.addresses()?.0.ok_or_else(|| to_io(SocketError::NotConnected))
    }

    /// The stack that the connection belongs to.
    pub fn stack(&self) -> Stack {
        stack_of(&self.socket)
    }

    /// The name of the connection in its shard, for benches that drive the shard themselves.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub fn slot_id(&self) -> fulmar_stack::base::SlotId {
        self.socket.id
    }

    /// Closes one or both directions.
    ///
    /// # Errors
    /// `NotConnected`.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let how = match how {
            Shutdown::Read => fulmar_stack::socket::Shutdown::Read,
            Shutdown::Write => fulmar_stack::socket::Shutdown::Write,
            Shutdown::Both => fulmar_stack::socket::Shutdown::Both,
        };
        let id = self.socket.id;
        self.socket.call(|shard, now| shard.tcp_shutdown(now, id, how))
    }

    /// Calls return `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// Never; the signature is that of `std::net`.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        self.socket.set_nonblocking(on);
        Ok(())
    }

    /// Sets the read time-out: a read that waits longer fails with `WouldBlock`. `None`: no limit.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_read_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(t)
    }

    /// Sets the write time-out: a write that waits longer without accepting a byte fails with `WouldBlock`.
    /// `None`: no limit.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_write_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        self.socket.set_write_timeout(t)
    }

    /// The read time-out.
    ///
    /// # Errors
    /// Never.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.socket.read_timeout())
    }

    /// The write time-out.
    ///
    /// # Errors
    /// Never.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.socket.write_timeout())
    }

    /// Sets SO_LINGER, the behaviour when the last handle is dropped. `None`: accepted bytes are sent in the
    /// background. A time: the drop waits for their delivery at most so long. Zero: the connection is reset,
    /// also at the end of the process.
    ///
    /// # Errors
    /// Never.
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        self.socket.set_linger(linger);
        Ok(())
    }

    /// The linger time (SO_LINGER).
    ///
    /// # Errors
    /// Never.
    pub fn linger(&self) -> io::Result<Option<Duration>> {
        Ok(self.socket.linger())
    }

    /// Disables Nagle's algorithm (TCP_NODELAY): small segments are sent immediately.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_nodelay(on))
    }

    /// Whether Nagle's algorithm is disabled.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn nodelay(&self) -> io::Result<bool> {
        self.with_tcb(|t| t.tcb.nodelay())
    }

    /// TCP_QUICKACK: acknowledges received data and the next segments at once, instead of up to 40 ms later. As on
    /// Linux this is not permanent.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_quickack(&self, on: bool) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_quickack(on))
    }

    /// Time to live (hop limit) of the packets.
    ///
    /// # Errors
    /// The socket is gone; `InvalidInput` outside 1 to 255.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        let ttl = valid_ttl(ttl)?;
        self.with_tcb(|t| t.ttl = Some(ttl))
    }

    /// Time to live of the packets.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn ttl(&self) -> io::Result<u32> {
        self.with_tcb(|t| u32::from(t.ttl.unwrap_or(DEFAULT_TTL)))
    }

    /// The options in effect, also those that have methods of their own.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn options(&self) -> io::Result<SocketOptions> {
        self.with_tcb(|t| t.options())
    }

    /// Changes options: keepalive, congestion control, buffers, pacing and others. Options that are as before have no
    /// effect, so that a program changes some of those in effect:
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use fulmar::{Keepalive, SocketOptions, TcpStream};
    /// # fn watch(stream: &TcpStream) -> std::io::Result<()> {
    /// let keepalive = Keepalive { idle: Duration::from_secs(60), ..Keepalive::default() };
    /// stream.set_options(SocketOptions { keepalive: Some(keepalive), ..stream.options()? })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The socket is gone; `InvalidInput` for a time to live of 0, a segment outside 88 to 32,767 bytes, or a low-water
    /// mark of 0.
    pub fn set_options(&self, options: SocketOptions) -> io::Result<()> {
        let options = valid_options(options)?;
        self.with_tcb(|t| t.change_options(&options))
    }

    /// Takes the pending error (SO_ERROR).
    ///
    /// # Errors
    /// The socket is gone.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.socket.take_error()
    }

    /// The state of the connection (TCP_INFO): state, round-trip time, windows, rates, retransmissions, the times of
    /// each limit.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn info(&self) -> io::Result<TcpInfo> {
        let id = self.socket.id;
        self.socket.call(|shard, now| Ok(shard.tcp_entry(id)?.tcb.info_at(now)))
    }

    pub(crate) fn with_tcb<R>(&self, f: impl FnOnce(&mut TcpEntry) -> R) -> io::Result<R> {
        let id = self.socket.id;
        self.socket.call(|shard, now| shard.with_tcb(now, id, f))
    }
}

pub(crate) const DEFAULT_TTL: u8 = 64;

pub(crate) fn valid_ttl(ttl: u32) -> io::Result<u8> {
    let valid = u8::try_from(ttl).ok().filter(|t| *t > 0);
    valid.ok_or_else(|| invalid(format!("invalid time to live {ttl}: expected 1-255")))
}

/// As Linux takes it (TCP_MIN_MSS, MAX_TCP_WINDOW).
pub(crate) fn valid_segment(bytes: u16) -> io::Result<u16> {
    match bytes {
        88..=32_767 => Ok(bytes),
        _ => Err(invalid(format!("invalid maximum segment size {bytes}: expected 88-32767"))),
    }
}

pub(crate) fn valid_options(options: SocketOptions) -> io::Result<SocketOptions> {
    options.ttl.map(|ttl| valid_ttl(ttl.into())).transpose()?;
    options.max_segment.map(valid_segment).transpose()?;
    if options.recv_low_water == Some(0) {
        let why = "a low-water mark of 0 bytes would make a socket without data readable";
        return Err(invalid(why));
    }
    Ok(options)
}

pub(crate) fn open(
    stack: &Stack,
    local: Option<SocketAddr>,
    to: SocketAddr,
    set_options: impl FnOnce(&mut TcpEntry),
) -> io::Result<Arc<Socket>> {
    let owner = owner_of(stack, local, to)?;
    let connect = stack
        .inner
        .host(owner)
        .call(|shard, now| shard.tcp_connect_with(now, to, local, set_options));
    Ok(Socket::new(Arc::clone(&stack.inner), owner, connect.map_err(to_io)?))
}

/// The shard that opens a connection.
pub(crate) fn owner_of(
    stack: &Stack,
    local: Option<SocketAddr>,
    to: SocketAddr,
) -> io::Result<u16> {
    let owner = stack.shard_of_thread();
    if let Some(from) = local.filter(|l| l.port() != 0 && stack.shards() > 1) {
        // The port is given, and with it the shard that the answers belong to.
        let host = stack.inner.host(owner);
        return host.call(|shard, _| shard.owner_of_connection(to, from)).map_err(to_io);
    }
    Ok(owner)
}

/// Opens a connection and waits for its handshake.
pub(crate) fn connect(
    stack: &Stack,
    local: Option<SocketAddr>,
    to: SocketAddr,
    limit: Limit,
    set_options: impl FnOnce(&mut TcpEntry),
) -> io::Result<TcpStream> {
    let socket = open(stack, local, to, set_options)?;
    let id = socket.id;
    socket.wait(Ready::WRITABLE, limit, |shard, _| shard.tcp_connected(id)).map_err(|e| match e
        .kind()
    {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => explain_unreachable(e),
    })?;
    Ok(TcpStream { socket })
}

impl Read for &TcpStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv_with(&mut [IoSliceMut::new(buf)], RecvFlags::NONE)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.recv_with(bufs, RecvFlags::NONE)
    }
}

impl Write for &TcpStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.send_with(&[IoSlice::new(buf)], SendFlags::NONE)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_with(bufs, SendFlags::NONE)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for TcpStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.recv_with(bufs, RecvFlags::NONE)
    }
}

impl Write for TcpStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&*self).write(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_with(bufs, SendFlags::NONE)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for TcpStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut d = f.debug_struct("TcpStream");
        if let Ok((local, peer)) = self.socket.addresses() {
            d.field("local", &local).field("peer", &peer);
        }
        d.finish()
    }
}
