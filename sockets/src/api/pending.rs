//! Pending connections: SYNs that the program answers or rejects.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use fulmar_stack::shard::{Decision, Pending, SynOptions};

use crate::api::socket::Socket;
use crate::api::tcp::TcpStream;

/// A connection whose SYN is not answered yet, of a [`TcpListener`](crate::TcpListener) with
/// [`ListenOptions::conditional_accept`](crate::ListenOptions::conditional_accept).
///
/// A gateway or proxy first connects on its other side, and answers with that result. Meanwhile retransmitted
/// SYNs are ignored. A pending connection that is dropped without an answer leaves no state: the next SYN is
/// pending again. It keeps its listener open.
///
/// ```
/// # use std::net::TcpStream as HostStream;
/// # use fulmar::tcp::ConditionalAccept;
/// # use fulmar::{ListenOptions, Stack, TcpListener, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _guest) = devices::link_pair()?;
/// let stack = Stack::builder()
///     .device(device)
///     .address("10.0.0.1/24".parse()?)
///     .any_ip(true)
///     .build()?;
/// let options = ListenOptions {
///     any_port: true,
///     conditional_accept: Some(ConditionalAccept::default()),
///     ..ListenOptions::default()
/// };
/// let listener = TcpListener::bind_with(&stack, "[::]:0", options)?;
/// # listener.set_nonblocking(true)?;
/// # let mut connections = std::iter::from_fn(|| listener.pending().ok());
/// # let mut serve = || -> std::io::Result<()> {
/// while let Some(pending) = connections.next() {
///     let host_unreachable = if pending.local_addr().is_ipv4() { 1 } else { 3 };
///     match HostStream::connect(pending.local_addr()) {
///         Ok(_host) => drop(pending.accept()?),
///         Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => pending.refuse()?,
///         Err(_) => pending.unreachable(host_unreachable)?,
///     }
/// }
/// # Ok(()) };
/// # serve()?;
/// # Ok(())
/// # }
/// ```
pub struct PendingConnection {
    listener: Arc<Socket>,
    pending: Pending,
    is_decided: bool,
}

impl PendingConnection {
    pub(crate) fn new(listener: &Arc<Socket>, pending: Pending) -> PendingConnection {
        PendingConnection { listener: Arc::clone(listener), pending, is_decided: false }
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.pending.remote
    }

    /// The destination of the SYN: for a listener on every address, the one that the peer connects to.
    pub fn local_addr(&self) -> SocketAddr {
        self.pending.local
    }

    /// The options of the SYN.
    pub fn syn_options(&self) -> SynOptions {
        self.pending.syn
    }

    /// Answers the SYN without waiting for the handshake. As after [`TcpStream::connect_nonblocking`] the stream
    /// is writable when the handshake has ended; then [`TcpStream::take_error`] has its result. The stream is
    /// blocking until [`TcpStream::set_nonblocking`].
    ///
    /// # Errors
    /// `ConnectionAborted`: the peer has reset it, or [`ConditionalAccept::timeout`](crate::tcp::ConditionalAccept::timeout) has passed.
    /// `NetworkUnreachable`; `AddrInUse` if this stack has connected between the same ends meanwhile; `ENOBUFS` if
    /// there are too many sockets.
    pub fn accept(mut self) -> io::Result<TcpStream> {
        let accepted = self.decide(Decision::Accept)?;
        let id = accepted.ok_or(io::ErrorKind::ConnectionAborted)?;
        let socket = Socket::new(Arc::clone(&self.listener.stack), self.listener.shard, id);
        Ok(TcpStream { socket })
    }

    /// Resets it: the peer's `connect` fails with `ConnectionRefused`.
    ///
    /// # Errors
    /// `ConnectionAborted` as for [`PendingConnection::accept`].
    pub fn refuse(mut self) -> io::Result<()> {
        self.decide(Decision::Refuse).map(drop)
    }

    /// Reports its destination as unreachable by ICMP (type 3) or ICMPv6 (type 1) with this code, within the stack's
    /// limit of ICMP errors: the `connect` of a Linux peer fails with `HostUnreachable` for code 1 of ICMP or 3 of ICMPv6,
    /// with `NetworkUnreachable` for code 0.
    ///
    /// # Errors
    /// `ConnectionAborted` as for [`PendingConnection::accept`].
    pub fn unreachable(mut self, code: u8) -> io::Result<()> {
        self.decide(Decision::Unreachable(code)).map(drop)
    }

    fn decide(&mut self, decision: Decision) -> io::Result<Option<fulmar_stack::base::SlotId>> {
        let id = self.pending.id;
        let decided = self.listener.call(|shard, now| shard.tcp_decide(now, id, decision))?;
        self.is_decided = true;
        Ok(decided)
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        let host = self.listener.host();
        if self.is_decided || !host.is_ours() {
            return;
        }
        let id = self.pending.id;
        host.in_destructor(|| {
            // An error means that the connection has stopped being pending.
            let _ = host.call(|shard, now| shard.tcp_decide(now, id, Decision::Drop));
        });
    }
}

impl fmt::Debug for PendingConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingConnection")
            .field("local", &self.local_addr())
            .field("peer", &self.peer_addr())
            .finish()
    }
}
