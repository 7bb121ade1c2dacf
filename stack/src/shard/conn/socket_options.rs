//! Options of a connection that are set before its SYN or SYN,ACK: by the call that connects, or inherited from
//! the listener.

use crate::base::{Duration, MtuDiscovery};
use crate::tcp::{Config, CongestionControl, EcnPolicy, Keepalive, MtuProbing, PathInfo};
use crate::udp::UdpSocket;
use crate::wire::tcp::HEADER_BYTES;

/// The ECN field of TOS and traffic class (Linux: INET_ECN_MASK).
pub(crate) const ECN_MASK: u8 = 3;

/// Options of a connection. What is `None` is as configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SocketOptions {
    /// Disables Nagle's algorithm (TCP_NODELAY).
    pub nodelay: bool,
    /// TCP_QUICKACK: whether the first segments are acknowledged at once.
    pub quickack: Option<bool>,
    /// TCP_CONGESTION.
    pub congestion: Option<CongestionControl>,
    /// Whether explicit congestion notification is requested, or accepted.
    pub ecn: Option<EcnPolicy>,
    /// When larger or smaller segments are tried without ICMP (RFC 4821).
    pub mtu_probing: Option<MtuProbing>,
    /// SO_MAX_PACING_RATE, bytes per second.
    pub max_pacing_rate: Option<u64>,
    /// SO_KEEPALIVE; `None`: off. Times of zero count as `TcpConfig::min_rto`, a count of zero as one probe (Linux:
    /// EINVAL).
    pub keepalive: Option<Keepalive>,
    /// TCP_USER_TIMEOUT; zero: as `None`.
    pub user_timeout: Option<Duration>,
    /// Time to live (hop limit) of the packets, 1 to 255.
    pub ttl: Option<u8>,
    /// TOS (traffic class) of the packets: the DSCP in its upper six bits (RFC 2474). The ECN field in the lower two
    /// is the connection's, and ignored here, as on Linux.
    pub tos: u8,
    /// TCP_MAXSEG, 88 to 32,767 bytes.
    pub max_segment: Option<u16>,
    /// TCP_NOTSENT_LOWAT, bytes; 0: as `None`.
    pub notsent_low_water: Option<u32>,
    /// SO_SNDBUF, bytes: 2 KiB to 16 MiB; what is outside counts as the nearer end, as on Linux.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF, bytes: likewise.
    pub recv_buffer: Option<usize>,
}

impl SocketOptions {
    /// The configuration of a passive open, which answers a received SYN.
    pub(crate) fn config(&self, base: &Config) -> Config {
        Config {
            congestion: self.congestion.unwrap_or(base.congestion),
            ecn: self.ecn.unwrap_or(base.ecn),
            mtu_probing: self.mtu_probing.unwrap_or(base.mtu_probing),
            max_pacing_rate: self.max_pacing_rate.or(base.max_pacing_rate),
            recv_buffer_bytes: self.recv_buffer.unwrap_or(base.recv_buffer_bytes),
            ..*base
        }
    }

    /// The path as the MSS option of a SYN cookie shall show it.
    pub(crate) fn limit_path(&self, path: PathInfo) -> PathInfo {
        let most = self
            .max_segment
            .map_or(usize::MAX, |bytes| path.ip_header_bytes + HEADER_BYTES + usize::from(bytes));
        PathInfo { route_mtu: path.route_mtu.min(most), ..path }
    }
}

/// The options of a socket that appear in the headers of its datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HeaderOptions {
    pub ttl: Option<u8>,
    pub dscp_ecn: u8,
    pub mtu_discovery: MtuDiscovery,
}

impl HeaderOptions {
    /// Of segments that belong to no socket.
    pub(crate) const SEGMENT: HeaderOptions =
        HeaderOptions { ttl: None, dscp_ecn: 0, mtu_discovery: MtuDiscovery::On };

    /// Of the segments of a listener that belong to no connection yet.
    pub(crate) fn of_segments(options: &SocketOptions) -> HeaderOptions {
        let dscp_ecn = options.tos & !ECN_MASK;
        HeaderOptions { ttl: options.ttl, dscp_ecn, ..HeaderOptions::SEGMENT }
    }

    pub(crate) fn of(socket: &UdpSocket) -> HeaderOptions {
        let UdpSocket { ttl, dscp_ecn, mtu_discovery, .. } = *socket;
        HeaderOptions { ttl, dscp_ecn, mtu_discovery }
    }
}
