//! Configuration of a connection: each option with its default and the reason for it.

use crate::base::Duration;
use crate::tcp::CongestionControl;

/// Configuration of a connection. Every Tcb holds a copy. Options that can change during the
/// connection have setters on [`Tcb`](crate::tcp::Tcb), and on a program's `TcpStream`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Send buffer, bytes. Default 1 MiB: several 64 KiB super-segments in flight while the writer
    /// fills the next ones, and the buffer fits an L2 cache. Autotuning grows it up to
    /// `max_buffer_bytes` on paths with a larger bandwidth-delay product: see `tuning.rs`.
    pub send_buffer_bytes: usize,
    /// Receive buffer, bytes: the largest window. Default 1 MiB, as above. Autotuning grows it up
    /// to `max_buffer_bytes` while the peer is limited by the window: see `tuning.rs`.
    pub recv_buffer_bytes: usize,
    /// Upper bound of both buffers, set by the user or by autotuning, bytes. It determines the
    /// window scale, which the SYN fixes (RFC 7323 section 2.2). Default 16 MiB.
    pub max_buffer_bytes: usize,
    /// Disables the Nagle algorithm (RFC 9293 section 3.7.4): small segments are sent at once.
    /// Default off, as Linux.
    pub nodelay: bool,
    /// Initial window, segments. Default 10 (RFC 6928).
    pub initial_window_segments: u32,
    /// Lower bound of the variance term of the retransmission time-out: the time-out is at least
    /// `srtt + min_rto`. Default 200 ms as Linux. RFC 6298 section 2.4 says 1 s, a bound for coarse
    /// clocks that costs a second per lost tail.
    pub min_rto: Duration,
    /// Upper bound of the retransmission time-out. Default 60 s, the least that RFC 6298 section
    /// 2.5 allows.
    pub max_rto: Duration,
    /// Time-out before the first round-trip sample. Default 1 s (RFC 6298 section 2.1).
    pub initial_rto: Duration,
    /// Retransmissions of a SYN or SYN,ACK. Default 6: with `initial_rto` a connection attempt
    /// fails after 127 s, as on Linux. RFC 9293 section 3.8.3 asks for an R2 of at least 3 min for
    /// SYNs.
    pub syn_retries: u32,
    /// How long data may stay unacknowledged before the connection fails with
    /// [`ConnError::TimedOut`](crate::tcp::ConnError::TimedOut) (R2). Default 120 s, a little over the 100 s that RFC
    /// 9293 section 3.8.3 asks for. Linux waits about 924 s.
    pub user_timeout: Duration,
    /// Length of TIME-WAIT (2 MSL). Default 60 s as Linux. RFC 9293 section 3.4.2 suggests an MSL
    /// of 2 min; with timestamps PAWS rejects old duplicates anyway.
    pub time_wait: Duration,
    /// How long an orphaned connection (its user has closed it) waits in FIN-WAIT-2 for the peer's
    /// FIN. Default 60 s as Linux. A half-closed connection that is still read has no such limit.
    pub fin_wait2_timeout: Duration,
    /// Delayed-ACK time-out. Default 40 ms, well below both the 500 ms of RFC 9293 section 3.8.6.3
    /// and common minimum retransmission time-outs.
    pub delayed_ack: Duration,
    /// Segments acknowledged immediately at the start of a connection (quick ACKs), so that delayed
    /// ACKs do not slow down the peer's slow start. Default 16, as Linux. FreeBSD delays from the first on.
    pub quick_acks: u8,
    /// How long `set_cork` and MSG_MORE hold back a partial segment. Default 200 ms as Linux.
    pub cork_timeout: Duration,
    /// Offer timestamps (RFC 7323). Default on.
    pub timestamps: bool,
    /// Offer selective acknowledgements (RFC 2018). Default on.
    pub sack: bool,
    /// Congestion control. Default CUBIC, as Linux.
    pub congestion: CongestionControl,
    /// Explicit congestion notification (RFC 9768, RFC 3168). Default: if the peer asks, as Linux.
    pub ecn: crate::tcp::EcnPolicy,
    /// Packetisation-layer path MTU discovery (RFC 4821). Default: after a black hole was found. A path that drops
    /// large packets silently then delays the connection by seconds instead of stalling it. Other paths cost
    /// nothing. Linux: off by default.
    pub mtu_probing: crate::tcp::MtuProbing,
    /// The largest rate of sending, bytes per second
    /// ([`Tcb::set_max_pacing_rate`](crate::tcp::Tcb::set_max_pacing_rate)). Default none.
    pub max_pacing_rate: Option<u64>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            send_buffer_bytes: 1 << 20,
            recv_buffer_bytes: 1 << 20,
            max_buffer_bytes: 16 << 20,
            nodelay: false,
            initial_window_segments: 10,
            min_rto: Duration::from_millis(200),
            max_rto: Duration::from_secs(60),
            initial_rto: Duration::from_secs(1),
            syn_retries: 6,
            user_timeout: Duration::from_secs(120),
            time_wait: Duration::from_secs(60),
            fin_wait2_timeout: Duration::from_secs(60),
            delayed_ack: Duration::from_millis(40),
            quick_acks: crate::tcp::tcb::QUICK_ACKS,
            cork_timeout: Duration::from_millis(200),
            timestamps: true,
            sack: true,
            congestion: CongestionControl::Cubic,
            ecn: crate::tcp::EcnPolicy::Accept,
            mtu_probing: crate::tcp::MtuProbing::BlackHole,
            max_pacing_rate: None,
        }
    }
}

impl Config {
    /// The window scale to offer: the smallest shift that can express the largest buffer, at most
    /// 14 (RFC 7323 section 2.3).
    pub fn window_scale(&self) -> u8 {
        (0..14u8).find(|s| 65_535usize << s >= self.max_buffer_bytes).unwrap_or(14)
    }
}
