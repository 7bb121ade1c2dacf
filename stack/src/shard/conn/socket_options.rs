//! Options of a connection that are set before its SYN or SYN,ACK: by the call that connects, or inherited from
//! the listener.

use crate::base::{Duration, MtuDiscovery};
use crate::tcp::{Config, CongestionControl, EcnPolicy, Keepalive, MtuProbing, PathInfo};
use crate::udp::UdpSocket;
use crate::wire::tcp::HEADER_BYTES;

/// The ECN field of TOS and traffic class (Linux: INET_ECN_MASK).
pub(crate) const ECN_MASK: u8 = 3;

/// Options of a connection. Before it is opened, what is `None` is as configured. Later, `None` takes a limit or
/// time-out away, and leaves an option as it is that cannot be without a value.
///
/// Fields are added in minor versions: end a literal with `..SocketOptions::default()`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SocketOptions {
    /// Disables Nagle's algorithm (TCP_NODELAY).
    pub nodelay: bool,
    /// TCP_CORK: delays partial segments while it is set, for 200 ms at most.
    pub cork: bool,
    /// TCP_QUICKACK: whether the next segments are acknowledged at once. As on Linux this is not permanent.
    pub quickack: Option<bool>,
    /// TCP_CONGESTION. It may change at any time: the window stays.
    pub congestion: Option<CongestionControl>,
    /// Whether explicit congestion notification is requested, or accepted. No effect after the handshake.
    pub ecn: Option<EcnPolicy>,
    /// When larger or smaller segments are tried without ICMP (RFC 4821): never, after large segments were lost silently,
    /// or from the start.
    pub mtu_probing: Option<MtuProbing>,
    /// SO_MAX_PACING_RATE, bytes per second: segments leave evenly, in pieces of a millisecond, under any congestion
    /// control.
    pub max_pacing_rate: Option<u64>,
    /// Probes an idle peer (SO_KEEPALIVE with TCP_KEEPIDLE, TCP_KEEPINTVL and TCP_KEEPCNT); `None`: no probes. If they
    /// are not answered, the connection fails with `TimedOut`, waiting reads included, and is reset. While data is
    /// queued or unacknowledged no probes are sent. A user time-out replaces the count of probes. Times of zero count as
    /// `TcpConfig::min_rto`, a count of zero as one probe (Linux: EINVAL).
    pub keepalive: Option<Keepalive>,
    /// TCP_USER_TIMEOUT: for how long data may stay unacknowledged, or the peer's window closed, before the connection
    /// fails with a time-out and is reset. `None`, or zero: `TcpConfig::user_timeout`, and a peer that answers probes of
    /// its closed window is waited for.
    pub user_timeout: Option<Duration>,
    /// Time to live (hop limit) of the packets, 1 to 255.
    pub ttl: Option<u8>,
    /// TOS (traffic class) of the packets, IP_TOS and IPV6_TCLASS: the DSCP in its upper six bits (RFC 2474), for example
    /// `46 << 2` for expedited forwarding. The ECN field in the lower two is the connection's, and ignored here, as on
    /// Linux.
    pub tos: u8,
    /// TCP_MAXSEG, 88 to 32,767 bytes: limits segments, the options of the TCP header included. The peer's segments are
    /// bounded if it is set before the SYN.
    pub max_segment: Option<u16>,
    /// TCP_NOTSENT_LOWAT, bytes: writes wait, and the socket is not writable, while so much is written and not yet sent,
    /// so that a program can still choose its next data. A write that begins below the mark may pass it. 0: as `None`,
    /// the send buffer alone limits.
    pub notsent_low_water: Option<u32>,
    /// SO_RCVLOWAT, bytes, at least 1: with fewer a read waits, and the connection is not readable in a poll set. Limited
    /// to half of the receive buffer. It does not apply to a read that does not wait or whose time-out has passed, nor
    /// when the stream has ended or its window is closed.
    pub recv_low_water: Option<usize>,
    /// SO_SNDBUF, bytes: 2 KiB to 16 MiB; what is outside counts as the nearer end, as on Linux. `None`: the stack tunes
    /// it.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF, the largest window, bytes: likewise.
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
