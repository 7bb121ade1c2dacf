//! The state of a connection for `fulmar stat` and `TCP_INFO`.

use crate::contract::State;
use crate::{CongestionControl, Tcb};
use fulmar_base::Duration;

/// A snapshot of a connection.
#[derive(Clone, Copy, Debug)]
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
    /// The last delivery-rate sample, bytes per second, if the controller takes samples.
    pub delivery_rate: Option<u64>,
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
    /// In fast recovery, or in loss recovery after a time-out.
    pub recovering: bool,
    /// In loss recovery after a time-out.
    pub timed_out: bool,
    /// Segments retransmitted.
    pub retransmits: u64,
    /// Bytes retransmitted.
    pub retransmitted_bytes: u64,
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
    /// The data of the SYN was accepted as a whole (RFC 7413): ours by the peer, or the peer's by us.
    pub syn_data: bool,
    /// Window scale: ours, the peer's.
    pub window_scales: (u8, u8),
    /// Bytes that the peer has acknowledged since the connection began. Its end counts as one.
    pub acked_bytes: u64,
    /// Bytes received in order. Their end counts as one.
    pub received_bytes: u64,
}

impl Tcb {
    /// A snapshot.
    pub fn info(&self) -> Info {
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
            delivery_rate: Some(self.delivery.rate()).filter(|r| *r > 0),
            mss_bytes: self.mss,
            snd_wnd_bytes: self.snd_wnd,
            rcv_wnd_bytes: self.advertised_window(),
            in_flight_bytes: self.flight(),
            sacked_bytes: self.sacked.sacked_bytes(),
            lost_bytes: self.sacked.lost_bytes(),
            timed_out: matches!(self.recovery.mode, crate::recovery::Mode::Loss),
            recovering: !matches!(self.recovery.mode, crate::recovery::Mode::Open),
            retransmits: self.retransmits.segments,
            retransmitted_bytes: self.retransmits.bytes,
            send_queue_bytes: self.send.claimed_bytes(),
            unsent_bytes: self.unsent_bytes(),
            recv_queue_bytes: self.recv.readable(),
            loaned_bytes: self.lent.bytes,
            out_of_order_bytes: self.recv.out_of_order_bytes(),
            send_buffer_bytes: self.send.limit(),
            recv_buffer_bytes: self.recv_limit,
            timestamps: self.ts.on,
            sack: self.sack_on,
            ecn: self.ecn.is_on,
            syn_data: self.fast_open.is_data_taken,
            window_scales: (self.scale.rcv, self.scale.snd),
            // The SYN is position 0.
            acked_bytes: self.snd_una.saturating_sub(1),
            received_bytes: self.rcv_nxt.saturating_sub(1),
        }
    }
}
