//! The tunables of a connection, each with its default and the reason for it.

use fulmar_base::Duration;

/// How a connection behaves. Every Tcb keeps a copy; options that a user may change later have
/// setters on [`crate::Tcb`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Send buffer, bytes. Default 1 MiB: several 64 KiB super-segments in flight while the writer
    /// fills the next ones, and still within a second-level cache. It grows by itself, up to
    /// `max_buffer_bytes`, where the path has room for more: see `tuning.rs`.
    pub send_buffer_bytes: usize,
    /// Receive buffer, bytes: the largest window. Default 1 MiB, as above. It grows by itself, up to
    /// `max_buffer_bytes`, where the window is what holds the peer back: see `tuning.rs`.
    pub recv_buffer_bytes: usize,
    /// The largest buffer that a user may set later, and that the buffers grow to, bytes. It decides the window scale,
    /// which is fixed by the SYN (RFC 7323 section 2.2). Default 16 MiB.
    pub max_buffer_bytes: usize,
    /// Send small segments at once (no Nagle, RFC 9293 section 3.7.4). Default off, as Linux.
    pub nodelay: bool,
    /// Initial window, segments. Default 10 (RFC 6928).
    pub initial_window_segments: u32,
    /// Shortest retransmission time-out beyond the round-trip time. Default 200 ms as Linux; RFC
    /// 6298 section 2.4 says 1 s, which costs a second per lost tail for no gain on today's clocks.
    pub min_rto: Duration,
    /// Longest retransmission time-out. Default 60 s, the least that RFC 6298 section 2.5 allows.
    pub max_rto: Duration,
    /// Time-out before the first round-trip sample. Default 1 s (RFC 6298 section 2.1).
    pub initial_rto: Duration,
    /// How often a SYN or SYN,ACK is sent again. Default 6: with `initial_rto` a connection
    /// attempt fails after 127 s, as on Linux (RFC 9293 section 3.8.3 asks for at least 3 min of
    /// R2 for SYN, which nobody waits for).
    pub syn_retries: u32,
    /// How long data may stay unacknowledged before the connection fails with
    /// [`crate::ConnError::TimedOut`]. Default 120 s, a little over the 100 s that RFC 9293 section
    /// 3.8.3 asks for R2; Linux waits about 924 s.
    pub user_timeout: Duration,
    /// TIME-WAIT. Default 60 s as Linux (2 MSL of 30 s; RFC 9293 section 3.4.2 suggests an MSL of
    /// 2 min); with timestamps an old duplicate is caught by PAWS anyway.
    pub time_wait: Duration,
    /// How long a connection that its user has closed waits in FIN-WAIT-2 for the peer's FIN.
    /// Default 60 s as Linux. A half-closed connection that is still read waits for ever.
    pub fin_wait2_timeout: Duration,
    /// How long an ACK is held back. Default 40 ms, well below both the 500 ms of RFC 9293
    /// section 3.8.6.3 and a peer's shortest retransmission time-out.
    pub delayed_ack: Duration,
    /// How long a corked partial segment is held back. Default 200 ms as Linux.
    pub cork_timeout: Duration,
    /// Offer timestamps (RFC 7323). Default on.
    pub timestamps: bool,
    /// Offer selective acknowledgements (RFC 2018). Default on.
    pub sack: bool,
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
            cork_timeout: Duration::from_millis(200),
            timestamps: true,
            sack: true,
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
