//! Options of a connection that are set before its SYN or SYN,ACK: by the call that connects, or inherited from
//! the listener.

use fulmar_base::Duration;
use fulmar_tcp::{Config, CongestionControl, EcnPolicy, Keepalive, MtuProbing, PathInfo};
use fulmar_wire::tcp::HEADER_BYTES;

use crate::sockets::TcpEntry;

/// Options of a connection. What is `None` is as configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SocketOptions {
    /// Disables Nagle's algorithm (TCP_NODELAY).
    pub nodelay: bool,
    /// TCP_QUICKACK: whether the first segments are acknowledged at once.
    pub quickack: Option<bool>,
    /// TCP_CONGESTION.
    pub congestion: Option<CongestionControl>,
    /// Whether explicit congestion notification is asked for, or agreed to.
    pub ecn: Option<EcnPolicy>,
    /// When larger or smaller segments are tried without ICMP (RFC 4821).
    pub mtu_probing: Option<MtuProbing>,
    /// SO_MAX_PACING_RATE, bytes per second.
    pub max_pacing_rate: Option<u64>,
    /// SO_KEEPALIVE; `None`: off.
    pub keepalive: Option<Keepalive>,
    /// TCP_USER_TIMEOUT.
    pub user_timeout: Option<Duration>,
    /// Time to live (hop limit) of the packets.
    pub ttl: Option<u8>,
    /// TOS (traffic class) of the packets: the DSCP in its upper six bits (RFC 2474). The ECN field in the lower two
    /// is the connection's, and ignored here, as on Linux.
    pub tos: u8,
    /// TCP_MAXSEG, bytes.
    pub max_segment: Option<u16>,
    /// TCP_NOTSENT_LOWAT, bytes.
    pub notsent_low_water: Option<u32>,
    /// SO_SNDBUF, bytes.
    pub send_buffer: Option<usize>,
    /// SO_RCVBUF, bytes.
    pub recv_buffer: Option<usize>,
}

impl SocketOptions {
    /// The configuration of a passive open: what a received SYN is answered by.
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

    /// Sets the options of a new connection.
    pub fn apply(&self, entry: &mut TcpEntry) {
        entry.ttl = self.ttl;
        entry.set_tos(self.tos);
        let tcb = &mut entry.tcb;
        tcb.set_keepalive(self.keepalive);
        tcb.set_user_timeout(self.user_timeout);
        tcb.set_notsent_low_water(self.notsent_low_water);
        if self.nodelay {
            tcb.set_nodelay(true);
        }
        if self.max_segment.is_some() {
            tcb.set_max_segment(self.max_segment);
        }
        if let Some(on) = self.quickack {
            tcb.set_quickack(on);
        }
        if let Some(which) = self.congestion {
            tcb.set_congestion(which);
        }
        if let Some(mode) = self.mtu_probing {
            tcb.set_mtu_probing(mode);
        }
        if let Some(policy) = self.ecn {
            tcb.set_ecn(policy);
        }
        if self.max_pacing_rate.is_some() {
            tcb.set_max_pacing_rate(self.max_pacing_rate);
        }
        if let Some(bytes) = self.send_buffer {
            tcb.set_send_buffer(bytes);
        }
        if let Some(bytes) = self.recv_buffer {
            tcb.set_recv_buffer(bytes);
        }
    }
}
