//! The state of a connection for `fulmar stat` and `TCP_INFO`.

use crate::base::{Duration, Instant};
use crate::tcp::contract::State;
use crate::tcp::{CongestionControl, PathModel, SendTimes, Tcb};

/// A snapshot of a connection.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Info {
    /// The state.
    pub state: State,
    /// Smoothed round-trip time; zero before the first sample.
    pub rtt: Duration,
    /// Mean deviation of the round-trip time.
    pub rttvar: Duration,
    /// The smallest round-trip time seen.
    pub min_rtt: Option<Duration>,
    /// The retransmission time-out, backoff included.
    pub rto: Duration,
    /// Exponential backoffs since the last progress.
    pub backoff: u32,
    /// Congestion window, bytes.
    pub cwnd_bytes: u64,
    /// Slow start threshold, bytes.
    pub ssthresh_bytes: u64,
    /// The congestion control.
    pub congestion: CongestionControl,
    /// The rate of sending, bytes per second, if the connection is paced.
    pub pacing_rate: Option<u64>,
    /// The last delivery rate, bytes per second: the last sample of a controller that takes samples, else what was
    /// acknowledged in the last round trip. `None` before the first.
    pub delivery_rate: Option<u64>,
    /// The application limited `delivery_rate`.
    pub app_limited: bool,
    /// The controller's path model, if it keeps one (BBR).
    pub model: Option<PathModel>,
    /// The path MTU, bytes.
    pub pmtu_bytes: usize,
    /// The MSS option of our SYN, bytes.
    pub advmss_bytes: usize,
    /// Estimate of the peer's full segment, bytes.
    pub rcv_mss_bytes: u32,
    /// Payload of a full segment, bytes.
    pub mss_bytes: u32,
    /// The peer's window, bytes.
    pub snd_wnd_bytes: u64,
    /// The window offered to the peer, bytes.
    pub rcv_wnd_bytes: u64,
    /// Sequence numbers sent and not acknowledged.
    pub in_flight_bytes: u64,
    /// Part of `in_flight_bytes` that the peer has selectively acknowledged.
    pub sacked_bytes: u64,
    /// Part of `in_flight_bytes` that is considered lost and not yet retransmitted.
    pub lost_bytes: u64,
    /// RACK's reordering window (RFC 8985 section 6.2 step 4): how much later a segment may arrive than one sent after
    /// it. Zero: three later segments count as its loss.
    pub reordering_window: Duration,
    /// Times that a segment was delivered after one that was sent later.
    pub reorderings: u32,
    /// DSACK blocks received (RFC 2883): segments that arrived twice.
    pub dsacks: u32,
    /// In fast recovery, or in loss recovery after a time-out.
    pub recovering: bool,
    /// In loss recovery after a time-out.
    pub timed_out: bool,
    /// Window and keepalive probes unanswered.
    pub probes: u32,
    /// Segments retransmitted.
    pub retransmits: u64,
    /// Bytes retransmitted.
    pub retransmitted_bytes: u64,
    /// Bytes sent, retransmissions included.
    pub sent_bytes: u64,
    /// Delivered bytes that the peer reports as marked with CE (RFC 9768). With RFC 3168: all bytes delivered by
    /// ACKs with ECE.
    pub delivered_ce_bytes: u64,
    /// MTU-sized packets sent: a super-segment counts as its segments. Packet counts wrap, as on
    /// Linux.
    pub packets_out: u32,
    /// Those with payload.
    pub data_packets_out: u32,
    /// Segments received; a segment that the device or GRO coalesced counts once.
    pub segments_in: u32,
    /// Those with payload.
    pub data_segments_in: u32,
    /// How long each limit held sending back.
    pub send_times: SendTimes,
    /// Since the last payload, SYN, FIN or probe was sent.
    pub since_data_sent: Duration,
    /// Since the last payload arrived, or the handshake completed.
    pub since_data_received: Duration,
    /// Since the last acceptable segment arrived.
    pub since_ack_received: Duration,
    /// Bytes in the send buffer, claimed but uncommitted bytes included.
    pub send_queue_bytes: usize,
    /// Committed bytes not yet sent.
    pub unsent_bytes: u64,
    /// Readable bytes.
    pub recv_queue_bytes: usize,
    /// Bytes loaned to the user by reference.
    pub loaned_bytes: usize,
    /// Bytes in the reassembly queue.
    pub out_of_order_bytes: usize,
    /// Send buffer, bytes.
    pub send_buffer_bytes: usize,
    /// Receive buffer, bytes.
    pub recv_buffer_bytes: usize,
    /// Timestamps were negotiated.
    pub timestamps: bool,
    /// SACK was negotiated.
    pub sack: bool,
    /// ECN was negotiated (RFC 3168).
    pub ecn: bool,
    /// Accurate ECN feedback was negotiated (RFC 9768).
    pub accurate_ecn: bool,
    /// Packets that arrived with a CE mark.
    pub ce_received: u64,
    /// The data of the SYN was accepted as a whole (RFC 7413): ours by the peer, or the peer's by us.
    pub syn_data: bool,
    /// Window scale: ours, the peer's.
    pub window_scales: (u8, u8),
    /// Bytes that the peer has acknowledged since the connection began. A FIN counts as one.
    pub acked_bytes: u64,
    /// Bytes received in order. A FIN counts as one.
    pub received_bytes: u64,
}

impl Tcb {
    /// A snapshot whose times end with the last event of the connection.
    pub fn info(&self) -> Info {
        self.info_at(self.times.last_sent_at.max(self.times.last_received_at))
    }

    /// A snapshot at `now`.
    pub fn info_at(&self, now: Instant) -> Info {
        let delivery = self.delivery_rate();
        let s = &self.statistics;
        Info {
            state: self.state,
            rtt: self.rtt.srtt(),
            rttvar: self.rtt.rttvar(),
            min_rtt: self.rtt.min(),
            rto: self.rtt.rto(),
            backoff: self.rtt.backoff(),
            cwnd_bytes: self.congestion.cwnd(),
            ssthresh_bytes: self.congestion.ssthresh(),
            congestion: self.congestion.which(),
            pacing_rate: self.pacing_rate(),
            delivery_rate: delivery.map(|d| d.0),
            app_limited: delivery.is_some_and(|d| d.1),
            model: self.congestion.model(),
            pmtu_bytes: self.path.mtu,
            advmss_bytes: self.own_mss(),
            rcv_mss_bytes: self.rcv_mss,
            mss_bytes: self.mss,
            snd_wnd_bytes: self.snd.wnd,
            rcv_wnd_bytes: self.advertised_window(),
            in_flight_bytes: self.flight(),
            sacked_bytes: self.sacked.sacked_bytes(),
            lost_bytes: self.sacked.lost_bytes(),
            reordering_window: self.reordering_window(),
            reorderings: s.reorderings,
            dsacks: s.dsacks_in,
            probes: self.unanswered_probes,
            sent_bytes: self.snd.nxt.saturating_sub(1).saturating_add(self.retransmits.bytes),
            delivered_ce_bytes: s.delivered_ce_bytes.max(self.ecn.reported.marked_bytes),
            packets_out: s.packets_out,
            data_packets_out: s.data_packets_out,
            segments_in: s.segments_in,
            data_segments_in: s.data_segments_in,
            send_times: self.send_times(now),
            since_data_sent: now.since(self.times.last_sent_at),
            since_data_received: now.since(s.last_data_at),
            since_ack_received: now.since(self.times.last_received_at),
            timed_out: matches!(self.recovery.mode, crate::tcp::recovery::Mode::Loss),
            recovering: !matches!(self.recovery.mode, crate::tcp::recovery::Mode::Open),
            retransmits: self.retransmits.segments,
            retransmitted_bytes: self.retransmits.bytes,
            send_queue_bytes: self.send.claimed_bytes(),
            unsent_bytes: self.unsent_bytes(),
            recv_queue_bytes: self.recv.readable(),
            loaned_bytes: self.lent().bytes,
            out_of_order_bytes: self.recv.out_of_order_bytes(),
            send_buffer_bytes: self.send.limit(),
            recv_buffer_bytes: self.space.limit(),
            timestamps: self.ts.on,
            sack: self.sack_on,
            ecn: !matches!(self.ecn.mode, crate::tcp::EcnMode::Off),
            accurate_ecn: self.ecn.is_accurate(),
            ce_received: self.ecn.received.marked_packets,
            syn_data: self.fast_open.is_data_taken,
            window_scales: (self.scale.rcv, self.scale.snd),
            // The SYN is position 0.
            acked_bytes: self.snd.una.saturating_sub(1),
            received_bytes: self.rcv.nxt.saturating_sub(1),
        }
    }
}
