//! The sockets that netperf's two ends need, so that one program measures any stack: fulmar
//! ([`OnFulmar`]) and the kernel ([`OnKernel`]).
//!
//! Calls block, and return `WouldBlock` after [`TICK`]: the caller then looks whether the test is
//! over.

use super::ring::Ring;

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

pub use super::on_fulmar::OnFulmar;
pub use super::on_kernel::OnKernel;

/// How long a call blocks at most.
pub const TICK: Duration = Duration::from_millis(100);

/// What is asked of a data socket; `None`: as the stack has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tuning {
    /// SO_SNDBUF, bytes.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF, bytes.
    pub recv_buffer: Option<usize>,
    /// No Nagle algorithm.
    pub nodelay: bool,
}

/// The socket buffers that a socket has, as the stack reports them (Linux doubles what it is
/// asked for).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Buffers {
    /// Bytes for sending.
    pub send: usize,
    /// Bytes for receiving.
    pub recv: usize,
}

/// A stack.
pub trait Network: Send + Sync {
    /// Connects within `timeout`.
    ///
    /// # Errors
    /// As `connect(2)`.
    fn connect(
        &self,
        to: SocketAddr,
        tuning: &Tuning,
        timeout: Duration,
    ) -> io::Result<Box<dyn Stream>>;

    /// Listens; port 0 lets the stack choose.
    ///
    /// # Errors
    /// As `bind(2)`.
    fn listen(&self, at: SocketAddr, tuning: &Tuning) -> io::Result<Box<dyn Listener>>;

    /// What a connection begins with, before the stack adapts it.
    ///
    /// # Errors
    /// There is no socket to be had.
    fn first_buffers(&self, tuning: &Tuning) -> io::Result<Buffers>;

    /// Makes a socket for datagrams; port 0 lets the stack choose.
    ///
    /// # Errors
    /// As `bind(2)`.
    fn datagrams(&self, at: SocketAddr, tuning: &Tuning) -> io::Result<Box<dyn Datagrams>>;

    /// What the tables call it; empty for the kernel, whose tables are netperf's own.
    fn name(&self) -> &'static str;
}

/// The largest payload of a UDP datagram over IPv4, bytes; IPv6 would take 20 more.
pub const LARGEST_DATAGRAM: usize = 65_507;

/// A TCP listener.
pub trait Listener: Send {
    /// The next connection, or `WouldBlock` after [`TICK`].
    ///
    /// # Errors
    /// As `accept(2)`.
    fn accept(&self) -> io::Result<(Box<dyn Stream>, SocketAddr)>;

    /// Where it listens.
    ///
    /// # Errors
    /// The socket is gone.
    fn local_addr(&self) -> io::Result<SocketAddr>;

    /// What an accepted connection begins with.
    fn buffers(&self) -> Buffers;
}

/// A TCP connection. Dropping it closes it.
pub trait Stream: Send {
    /// Reads; 0 is the end.
    ///
    /// # Errors
    /// `WouldBlock` after [`TICK`]; as `read(2)`.
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes all of it or as much as was possible within [`TICK`].
    ///
    /// # Errors
    /// `WouldBlock` if nothing was; as `write(2)`.
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Posts `count` buffers of `bytes` each, to be filled with what comes (netperf's `-A`).
    ///
    /// # Errors
    /// The stack has no such thing, or no memory for it.
    fn posted(&self, count: usize, bytes: usize) -> io::Result<Box<dyn Posted + '_>>;

    /// Takes copies of the buffers of `ring`, to send them without another one (netperf's `-a`).
    ///
    /// # Errors
    /// The stack has no such thing.
    fn given(&self, ring: &mut Ring) -> io::Result<Box<dyn Given + '_>>;

    /// Sends a part of a file as [`Stream::write`] sends bytes.
    ///
    /// # Errors
    /// As [`Stream::write`]; what the file says.
    fn send_file(&self, file: &File, offset: u64, bytes: usize) -> io::Result<usize>;

    /// Ends sending.
    ///
    /// # Errors
    /// As `shutdown(2)`.
    fn shutdown_write(&self) -> io::Result<()>;

    /// The socket buffers now.
    fn buffers(&self) -> Buffers;

    /// Segments sent again so far.
    fn retransmits(&self) -> Option<u64>;

    /// Payload of a full segment, bytes.
    fn segment_bytes(&self) -> Option<u32>;

    /// This end's address.
    ///
    /// # Errors
    /// The socket is gone.
    fn local_addr(&self) -> io::Result<SocketAddr>;
}

/// Buffers that were posted before their bytes came, and are posted again when they are back.
pub trait Posted {
    /// Bytes of the next buffer that is back; 0 is the end.
    ///
    /// # Errors
    /// `WouldBlock` after [`TICK`]; as `read(2)`.
    fn next(&mut self) -> io::Result<usize>;
}

/// Buffers that are given away until they have arrived, in turn.
pub trait Given {
    /// Gives the next buffer away, once it is back from the last time; returns its bytes.
    ///
    /// # Errors
    /// `WouldBlock` after [`TICK`], nothing is sent then; as `write(2)`.
    fn next(&mut self) -> io::Result<usize>;
}

/// A UDP socket.
pub trait Datagrams: Send {
    /// Fixes the peer.
    ///
    /// # Errors
    /// As `connect(2)`.
    fn connect(&self, to: SocketAddr) -> io::Result<()>;

    /// Sends to the fixed peer.
    ///
    /// # Errors
    /// As `send(2)`.
    fn send(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Sends to an address.
    ///
    /// # Errors
    /// As `sendto(2)`.
    fn send_to(&self, bytes: &[u8], to: SocketAddr) -> io::Result<usize>;

    /// Receives one datagram.
    ///
    /// # Errors
    /// `WouldBlock` after [`TICK`]; as `recvfrom(2)`.
    fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)>;

    /// Where it is bound.
    ///
    /// # Errors
    /// The socket is gone.
    fn local_addr(&self) -> io::Result<SocketAddr>;

    /// The socket buffers.
    fn buffers(&self) -> Buffers;
}

/// The call may be made again: nothing happened within [`TICK`], or a signal came.
pub fn is_tick(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::TimedOut
    )
}
