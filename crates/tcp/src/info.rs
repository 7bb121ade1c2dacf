//! What a connection tells about itself, for `fulmar stat` and `TCP_INFO`.

use crate::Tcb;
use crate::contract::State;
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
    /// The retransmission time-out, backing off included.
    pub rto: Duration,
    /// How often the time-out doubled since the last progress.
    pub backoff: u32,
    /// Congestion window, bytes.
    pub cwnd_bytes: u64,
    /// Slow start threshold, bytes.
    pub ssthresh_bytes: u64,
    /// Payload of a full segment, bytes.
    pub mss_bytes: u32,
    /// The peer's window, bytes.
    pub snd_wnd_bytes: u64,
    /// The window offered to the peer, bytes.
    pub rcv_wnd_bytes: u64,
    /// Sequence numbers sent and not acknowledged.
    pub in_flight_bytes: u64,
    /// Of those, reported as received out of order.
    pub sacked_bytes: u64,
    /// In fast recovery, or recovering from a time-out.
    pub recovering: bool,
    /// Segments sent again.
    pub retransmits: u64,
    /// Bytes sent again.
    pub retransmitted_bytes: u64,
    /// Bytes in the send buffer, claimed ones included.
    pub send_queue_bytes: usize,
    /// Bytes of them not yet sent.
    pub unsent_bytes: u64,
    /// Bytes to be read.
    pub recv_queue_bytes: usize,
    /// Bytes that the user holds by reference.
    pub lent_bytes: usize,
    /// Bytes received behind a gap.
    pub out_of_order_bytes: usize,
    /// Send buffer, bytes.
    pub send_buffer_bytes: usize,
    /// Receive buffer, bytes.
    pub recv_buffer_bytes: usize,
    /// Timestamps are in use.
    pub timestamps: bool,
    /// SACK is in use.
    pub sack: bool,
    /// Shifts of our and the peer's window field.
    pub window_scales: (u8, u8),
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
            cwnd_bytes: self.cubic.cwnd(),
            ssthresh_bytes: self.cubic.ssthresh(),
            mss_bytes: self.mss,
            snd_wnd_bytes: self.snd_wnd,
            rcv_wnd_bytes: self.visible_window(),
            in_flight_bytes: self.flight(),
            sacked_bytes: self.sacked.bytes(),
            recovering: !matches!(self.recovery.mode, crate::recovery::Mode::Open),
            retransmits: self.again.segments,
            retransmitted_bytes: self.again.bytes,
            send_queue_bytes: self.send.claimed_bytes(),
            unsent_bytes: self.send_end().saturating_sub(self.snd_nxt),
            recv_queue_bytes: self.recv.readable(),
            lent_bytes: self.lent.bytes,
            out_of_order_bytes: self.recv.out_of_order_bytes(),
            send_buffer_bytes: self.send.limit(),
            recv_buffer_bytes: self.recv_limit,
            timestamps: self.stamps.on,
            sack: self.sack_on,
            window_scales: (self.scale.rcv, self.scale.snd),
        }
    }
}
