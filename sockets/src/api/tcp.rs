//! TCP sockets, shaped like `std::net`'s.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::Limit;
use fulmar_stack::shard::{SocketOptions, TcpEntry};
use fulmar_stack::socket::{Ready, SocketError};
use fulmar_stack::tcp::{CongestionControl, Keepalive, MtuProbing};

use crate::api::TcpInfo;
use crate::api::error::invalid;
use crate::api::receive::RecvFlags;
use crate::api::send::SendFlags;
use crate::api::socket::{
    Socket, check_timeout, each_address, explain_unreachable, stack_of, to_io,
};
use crate::api::stack::Stack;

/// A TCP connection.
///
/// Threads may share it. Concurrent reads are serialized by the shard lock; concurrent writes are not
/// interleaved. Dropping the last handle closes the connection after the accepted bytes were sent. If received
/// bytes are unread, the connection is reset instead, as on Linux (RFC 2525 section 2.17).
///
/// A socket keeps its stack. If the last handle to the stack is gone, dropping the last socket ends the stack: **that
/// drop waits** until what was accepted is acknowledged, for at most [`crate::api::Builder::exit_drain`] (5 s), of a
/// non-blocking socket too. [`Stack::close`] does it at a time of the program's choice.
pub struct TcpStream {
    pub(crate) socket: Arc<Socket>,
}

impl TcpStream {
    /// Connects to the first address that answers. Names are resolved by the system's resolver.
    ///
    /// # Errors
    /// Those of `connect(2)`.
    pub fn connect(stack: &Stack, addr: impl ToSocketAddrs) -> io::Result<TcpStream> {
        each_address(addr, |a| connect(stack, None, a, Limit::Forever, |_| ()))
    }

    /// Connects, within `timeout`. [`TcpStream::connect_with`] does so with options.
    ///
    /// # Errors
    /// `TimedOut`, `InvalidInput` for zero, and the errors of `connect(2)`.
    pub fn connect_timeout(
        stack: &Stack,
        addr: &SocketAddr,
        timeout: Duration,
    ) -> io::Result<TcpStream> {
        check_timeout(timeout)?;
        connect(stack, None, *addr, Limit::For(timeout), |_| ())
    }

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

    /// Sets for how long data may stay unacknowledged, or the peer's window closed, before the connection
    /// fails with a time-out and is reset (TCP_USER_TIMEOUT). `None`, or zero: as configured
    /// (`TcpConfig::user_timeout`), and a peer that answers probes of its closed window is waited for.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_user_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_user_timeout(timeout))
    }

    /// The value of [`TcpStream::set_user_timeout`].
    ///
    /// # Errors
    /// The socket is gone.
    pub fn user_timeout(&self) -> io::Result<Option<Duration>> {
        self.with_tcb(|t| t.tcb.user_timeout())
    }

    /// Probes an idle peer (SO_KEEPALIVE with TCP_KEEPIDLE, TCP_KEEPINTVL and TCP_KEEPCNT); `None`, the default: no
    /// probes. If the probes are not answered, the connection fails with `TimedOut`, waiting reads included, and is
    /// reset. While data is queued or unacknowledged no probes are sent. A user time-out replaces the count of probes.
    /// Zero is not an error, unlike on Linux: it counts as the minimum, one probe or `TcpConfig::min_rto`.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_keepalive(keepalive))
    }

    /// What [`TcpStream::set_keepalive`] set, or the listener's; times count as at least
    /// `TcpConfig::min_rto`.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn keepalive(&self) -> io::Result<Option<Keepalive>> {
        self.with_tcb(|t| t.tcb.keepalive())
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

    /// Chooses the congestion control of this connection, at any time: the window stays. That of
    /// every new connection is `TcpConfig::congestion`.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_congestion(&self, which: CongestionControl) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_congestion(which))
    }

    /// The congestion control in effect.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn congestion(&self) -> io::Result<CongestionControl> {
        self.with_tcb(|t| t.tcb.congestion())
    }

    /// TCP_NOTSENT_LOWAT: writes wait, and the socket is not writable, while this number of bytes is written and not
    /// yet sent, so that a program can still choose its next data. `None`, the default, or 0: the send buffer alone
    /// limits. A write that begins below the mark may pass it.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_notsent_low_water(&self, bytes: Option<u32>) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_notsent_low_water(bytes))
    }

    /// TCP_NOTSENT_LOWAT as set.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn notsent_low_water(&self) -> io::Result<Option<u32>> {
        self.with_tcb(|t| t.tcb.notsent_low_water())
    }

    /// TCP_MAXSEG: limits segments to this number of bytes, the options of the TCP header included. The peer's segments
    /// are bounded by [`crate::api::SocketOptions::max_segment`].
    ///
    /// # Errors
    /// The socket is gone; `InvalidInput` outside 88 to 32,767, as on Linux.
    pub fn set_max_segment(&self, bytes: u16) -> io::Result<()> {
        let bytes = valid_segment(bytes)?;
        self.with_tcb(|t| t.tcb.set_max_segment(Some(bytes)))
    }

    /// TCP_QUICKACK: acknowledges received data and the next segments at once, instead of up to 40 ms later. As on
    /// Linux this is not permanent.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_quickack(&self, on: bool) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_quickack(on))
    }

    /// Whether the size of segments follows from what arrives, without ICMP (RFC 4821): never, after large
    /// segments were lost silently, or from the start. That of every new connection is
    /// `TcpConfig::mtu_probing`.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_mtu_probing(&self, mode: MtuProbing) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_mtu_probing(mode))
    }

    /// When larger or smaller segments are tried without ICMP.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn mtu_probing(&self) -> io::Result<MtuProbing> {
        self.with_tcb(|t| t.tcb.mtu_probing())
    }

    /// Limits the rate of sending, bytes per second (`SO_MAX_PACING_RATE`): segments leave evenly, in
    /// pieces of a millisecond, under any congestion control. `None`: no limit, the default. That of every
    /// new connection is `TcpConfig::max_pacing_rate`.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_max_pacing_rate(&self, limit: Option<u64>) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_max_pacing_rate(limit))
    }

    /// The limit of the rate of sending, bytes per second.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn max_pacing_rate(&self) -> io::Result<Option<u64>> {
        self.with_tcb(|t| t.tcb.max_pacing_rate())
    }

    /// TCP_CORK: delays partial segments until the option is cleared, or for 200 ms.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_cork(&self, on: bool) -> io::Result<()> {
        self.with_tcb(|t| t.tcb.set_cork(on))
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

    /// TOS (traffic class) of the packets, IP_TOS and IPV6_TCLASS: the DSCP in the upper six bits (RFC 2474), for
    /// example `46 << 2` for expedited forwarding. The lower two bits, the ECN field, are the connection's: they are
    /// ignored, as on Linux. [`crate::api::SocketOptions::tos`] sets it before the SYN.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_tos(&self, tos: u8) -> io::Result<()> {
        self.with_tcb(|t| t.set_tos(tos))
    }

    /// TOS (traffic class) of the packets, without the ECN field.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn tos(&self) -> io::Result<u8> {
        self.with_tcb(|t| t.tos())
    }

    /// Sets the size of the send buffer, 2 KiB to 16 MiB. Returns the size in effect, in bytes.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_send_buffer(&self, bytes: usize) -> io::Result<usize> {
        self.with_tcb(|t| t.tcb.set_send_buffer(bytes))
    }

    /// Sets the size of the receive buffer (the largest window), 2 KiB to 16 MiB. Returns the size in effect,
    /// in bytes.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_recv_buffer(&self, bytes: usize) -> io::Result<usize> {
        self.with_tcb(|t| t.tcb.set_recv_buffer(bytes))
    }

    /// The size of the send buffer in bytes.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn send_buffer(&self) -> io::Result<usize> {
        self.with_tcb(|t| t.tcb.send_queue_ref().limit())
    }

    /// The size of the receive buffer in bytes.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn recv_buffer(&self) -> io::Result<usize> {
        self.with_tcb(|t| t.tcb.recv_buffer())
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
