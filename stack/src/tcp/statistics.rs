//! Counts of a connection for [`Info`](crate::tcp::Info) alone: packets, reordering, and how long each limit held
//! sending back (Linux: `tcp_chrono`).
//!
//! Values that follow from the control block are computed on request. Times are added when the limit changes, and
//! counts of rare events where those are handled; so a segment of a bulk transfer costs a few additions and one
//! comparison.

use crate::base::{Duration, Instant};
use crate::tcp::Tcb;
use crate::tcp::rtt::nanos;

/// What limits sending.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum SendLimit {
    /// Nothing is unsent or unacknowledged.
    #[default]
    Idle,
    /// The network: congestion control and pacing.
    Network,
    /// The peer's window.
    PeerWindow,
    /// The send buffer: it is full, and all of it is in flight, though the congestion window has space.
    SendBuffer,
}

/// Counts of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Statistics {
    limit: SendLimit,
    /// When `limit` began.
    since: Instant,
    /// For how long each limit held: network, peer's window, send buffer; nanoseconds.
    times_ns: [u64; 3],
    /// MTU-sized packets sent: a super-segment counts as its segments. Packet counts wrap, as on
    /// Linux.
    pub packets_out: u32,
    /// Packets with payload sent, retransmissions included.
    pub data_packets_out: u32,
    /// Segments received, as the device and GRO give them.
    pub segments_in: u32,
    /// Those with payload.
    pub data_segments_in: u32,
    /// DSACK blocks received (RFC 2883).
    pub dsacks_in: u32,
    /// Times that a segment was delivered after one that was sent later.
    pub reorderings: u32,
    /// Bytes delivered by ACKs that echo a mark of congestion.
    pub delivered_ce_bytes: u64,
    /// When the last payload arrived; before the first, when the handshake completed.
    pub last_data_at: Instant,
}

/// How long each limit held sending back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SendTimes {
    /// Data was unsent or unacknowledged (`tcpi_busy_time`); the others are parts of it.
    pub busy: Duration,
    /// The peer's window held data back (`tcpi_rwnd_limited`).
    pub peer_window: Duration,
    /// The send buffer was full and all of it in flight, though the congestion window had space
    /// (`tcpi_sndbuf_limited`).
    pub send_buffer: Duration,
}

impl Statistics {
    /// `times_ns` up to `now`.
    fn times_to(&self, now: Instant) -> [u64; 3] {
        let [mut network, mut peer_window, mut send_buffer] = self.times_ns;
        let total = match self.limit {
            SendLimit::Idle => return self.times_ns,
            SendLimit::Network => &mut network,
            SendLimit::PeerWindow => &mut peer_window,
            SendLimit::SendBuffer => &mut send_buffer,
        };
        *total = total.saturating_add(nanos(now.since(self.since)));
        [network, peer_window, send_buffer]
    }
}

impl Tcb {
    /// What limits sending now.
    #[inline]
    fn send_limit(&self) -> SendLimit {
        let unsent = self.unsent_bytes();
        if unsent > 0 && self.is_synchronized() {
            let edge = self.snd.una.saturating_add(self.snd.wnd);
            let window = edge.saturating_sub(self.snd.nxt);
            let congestion = || self.congestion.cwnd().saturating_sub(self.pipe());
            let is_held_by_peer = window < unsent.min(self.smss()) && window <= congestion();
            return if is_held_by_peer { SendLimit::PeerWindow } else { SendLimit::Network };
        }
        if self.flight() == 0 || self.snd.nxt <= 1 {
            return SendLimit::Idle;
        }
        let is_full = self.send.space() < self.mss as usize;
        let has_window = || self.pipe().saturating_add(self.smss()) <= self.congestion.cwnd();
        if is_full && has_window() { SendLimit::SendBuffer } else { SendLimit::Network }
    }

    /// After output, an ACK or a write: a change of the limit ends the time of the one before.
    #[inline]
    pub(crate) fn record_send_limit(&mut self, now: Instant) {
        let limit = self.send_limit();
        if limit != self.statistics.limit {
            let s = &mut self.statistics;
            s.times_ns = s.times_to(now);
            (s.limit, s.since) = (limit, now);
        }
    }

    /// How long each limit held sending back, up to `now`.
    pub fn send_times(&self, now: Instant) -> SendTimes {
        let [network, peer_window, send_buffer] =
            self.statistics.times_to(now).map(Duration::from_nanos);
        let busy = network.saturating_add(peer_window).saturating_add(send_buffer);
        SendTimes { busy, peer_window, send_buffer }
    }

    /// The last delivery rate, bytes per second, and whether the application limited it: the last sample of a
    /// controller that takes samples, else what was acknowledged in the last round trip. `None` before the first.
    pub(crate) fn delivery_rate(&self) -> Option<(u64, bool)> {
        let (rate, is_app_limited) = match self.delivery.is_on() {
            true => (self.delivery.rate(), self.delivery.is_app_limited()),
            false => self.tuning.last_rate(),
        };
        (rate > 0).then_some((rate, is_app_limited))
    }
}
