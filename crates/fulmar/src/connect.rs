//! Connections whose options are set before the SYN.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use fulmar_tcp::{CongestionControl, EcnPolicy, Keepalive, MtuProbing};

use fulmar_shard::SocketOptions;

use crate::stack::Stack;
use crate::tcp::{TcpStream, open, valid_segment, valid_ttl};

/// Options of a connection that is to be opened: see [`TcpStream::connect_with`]. What is `None` is as
/// configured.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectOptions {
    /// The local end; the unspecified address or port 0: of the stack's choice. With
    /// [`crate::Builder::any_ip`] the address of any host, as a gateway's that keeps the client's.
    pub local: Option<SocketAddr>,
    /// Turns Nagle's algorithm off ([`TcpStream::set_nodelay`]).
    pub nodelay: bool,
    /// See [`TcpStream::set_congestion`].
    pub congestion: Option<CongestionControl>,
    /// Whether the SYN asks for explicit congestion notification (RFC 3168); [`crate::TcpConfig::ecn`] else.
    pub ecn: Option<EcnPolicy>,
    /// See [`TcpStream::set_mtu_probing`]; [`crate::TcpConfig::mtu_probing`] else.
    pub mtu_probing: Option<MtuProbing>,
    /// See [`TcpStream::set_max_pacing_rate`]; bytes per second.
    pub max_pacing_rate: Option<u64>,
    /// See [`TcpStream::set_keepalive`].
    pub keepalive: Option<Keepalive>,
    /// See [`TcpStream::set_user_timeout`]; it bounds the handshake, too.
    pub user_timeout: Option<Duration>,
    /// Time to live (hop limit) of the packets, from 1 to 255.
    pub ttl: Option<u32>,
    /// TOS (traffic class) of the packets, the SYN's too: see [`TcpStream::set_tos`].
    pub tos: u8,
    /// See [`TcpStream::set_quickack`]; on for the first segments else.
    pub quickack: Option<bool>,
    /// See [`TcpStream::set_max_segment`]; bytes. The SYN asks the peer for no larger ones.
    pub max_segment: Option<u16>,
    /// See [`TcpStream::set_notsent_low_water`]; bytes.
    pub notsent_low_water: Option<u32>,
    /// See [`TcpStream::set_send_buffer`]; bytes.
    pub send_buffer: Option<usize>,
    /// See [`TcpStream::set_recv_buffer`]; bytes. The SYN announces its window scale.
    pub recv_buffer: Option<usize>,
}

impl ConnectOptions {
    fn of_socket(&self) -> io::Result<SocketOptions> {
        Ok(SocketOptions {
            nodelay: self.nodelay,
            quickack: self.quickack,
            congestion: self.congestion,
            ecn: self.ecn,
            mtu_probing: self.mtu_probing,
            max_pacing_rate: self.max_pacing_rate,
            keepalive: self.keepalive,
            user_timeout: self.user_timeout,
            ttl: self.ttl.map(valid_ttl).transpose()?,
            tos: self.tos,
            max_segment: self.max_segment.map(valid_segment).transpose()?,
            notsent_low_water: self.notsent_low_water,
            send_buffer: self.send_buffer,
            recv_buffer: self.recv_buffer,
        })
    }
}

impl TcpStream {
    /// Starts to connect with options that are set before the SYN, and returns at once a stream that does not
    /// wait. Writable means done: then see [`TcpStream::take_error`].
    ///
    /// # Errors
    /// What is known at once: no route, no port, `AddrInUse`; `AddrNotAvailable` for a local address that is not the
    /// stack's; `InvalidInput` for a time to live outside 1 to 255 or a segment outside 88 to 32,767 bytes.
    pub fn connect_with(
        stack: &Stack,
        remote: SocketAddr,
        options: &ConnectOptions,
    ) -> io::Result<TcpStream> {
        let set = options.of_socket()?;
        let socket = open(stack, options.local, remote, |entry| set.apply(entry))?;
        socket.set_nonblocking(true);
        Ok(TcpStream { socket })
    }
}
