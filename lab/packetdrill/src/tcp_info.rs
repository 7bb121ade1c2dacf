//! `struct tcp_info` of Linux (include/uapi/linux/tcp.h), of what [`fulmar_stack::tcp::Info`] has. Fields without a
//! counterpart are 0: of packets that Linux counts fulmar counts bytes, and whole segments are computed of them.

use fulmar_stack::tcp::{Info, State};

/// Bytes of the structure as of Linux 6.18, with the counters of accurate ECN.
const BYTES: usize = 280;

/// TCPI_OPT_TIMESTAMPS, TCPI_OPT_SACK and TCPI_OPT_WSCALE.
const OPTIONS: [u8; 3] = [1, 2, 4];

/// TCP_CLOSE and TCP_LISTEN (include/net/tcp_states.h).
const CLOSE: u8 = 7;
const LISTEN: u8 = 10;

/// TCP_INFINITE_SSTHRESH (include/net/tcp.h).
const INFINITE_SSTHRESH: u32 = 0x7fff_ffff;

struct Structure([u8; BYTES]);

impl Structure {
    fn word(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    fn long(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
}

/// The structure of a socket that is not connected.
pub fn of_no_connection(listens: bool) -> Vec<u8> {
    let mut s = Structure([0; BYTES]);
    s.0[0] = if listens { LISTEN } else { CLOSE };
    s.0.to_vec()
}

/// The number of a state (include/net/tcp_states.h).
fn state_number(state: State) -> u8 {
    match state {
        State::Established => 1,
        State::SynSent => 2,
        State::SynReceived => 3,
        State::FinWait1 => 4,
        State::FinWait2 => 5,
        State::TimeWait => 6,
        State::Closed => CLOSE,
        State::CloseWait => 8,
        State::LastAck => 9,
        State::Closing => 11,
    }
}

/// TCP_CA_Open, Disorder, Recovery and Loss (include/uapi/linux/tcp.h); fulmar has no state for ECN.
fn congestion_state(info: &Info) -> u8 {
    match (info.timed_out, info.recovering, info.sacked_bytes > 0) {
        (true, _, _) => 4,
        (_, true, _) => 3,
        (_, _, true) => 1,
        _ => 0,
    }
}

/// TCPI_OPT_SYN_DATA (include/uapi/linux/tcp.h).
const TCPI_OPT_SYN_DATA: u8 = 32;

/// tcpi_reordering: fulmar's threshold of duplicate ACKs does not adapt, its reordering window does.
const DUP_THRESH: u32 = 3;

/// The number of full-sized segments that hold `bytes` bytes.
fn segments(bytes: u64, mss: u32) -> u32 {
    bytes.div_ceil(u64::from(mss.max(1))) as u32
}

/// The congestion window in segments, as Linux counts.
fn window(bytes: u64, mss: u32) -> u32 {
    u32::try_from(bytes / u64::from(mss.max(1))).unwrap_or(u32::MAX)
}

/// A slow start threshold beyond every window is Linux's number for none.
fn threshold(bytes: u64, mss: u32) -> u32 {
    if bytes > u64::from(u32::MAX) / 4 { INFINITE_SSTHRESH } else { window(bytes, mss) }
}

/// The structure of a connection.
pub fn of_connection(info: &Info) -> Vec<u8> {
    let mut s = Structure([0; BYTES]);
    let mss = info.mss_bytes;
    let has_scale = info.window_scales != (0, 0);
    let flags = [info.timestamps, info.sack, has_scale];
    s.0[0] = state_number(info.state);
    s.0[1] = congestion_state(info);
    s.0[2] = info.backoff as u8;
    s.0[3] = info.probes.min(255) as u8;
    s.0[4] = info.backoff as u8;
    s.0[5] = flags.iter().zip(OPTIONS).filter(|(on, _)| **on).map(|(_, bit)| bit).sum();
    s.0[5] |= if info.syn_data { TCPI_OPT_SYN_DATA } else { 0 };
    s.0[6] = (info.window_scales.1 & 15) | (info.window_scales.0 << 4);
    s.word(8, info.rto.as_micros() as u32);
    s.0[7] = u8::from(info.app_limited);
    s.word(16, mss);
    s.word(20, info.rcv_mss_bytes);
    s.word(24, segments(info.in_flight_bytes, mss));
    s.word(28, segments(info.sacked_bytes, mss));
    s.word(32, segments(info.lost_bytes, mss));
    s.word(44, info.since_data_sent.as_millis() as u32);
    s.word(52, info.since_data_received.as_millis() as u32);
    s.word(56, info.since_ack_received.as_millis() as u32);
    s.word(60, info.pmtu_bytes as u32);
    s.word(68, info.rtt.as_micros() as u32);
    s.word(72, info.rttvar.as_micros() as u32);
    s.word(76, threshold(info.ssthresh_bytes, mss));
    s.word(80, window(info.cwnd_bytes, mss));
    s.word(84, mss);
    s.word(88, DUP_THRESH);
    s.word(92, info.advmss_bytes as u32);
    s.word(100, info.retransmits as u32);
    s.long(104, info.pacing_rate.unwrap_or(u64::MAX));
    s.long(112, u64::MAX);
    s.long(120, info.acked_bytes);
    s.long(128, info.received_bytes);
    s.word(136, info.packets_out);
    s.word(140, info.segments_in);
    s.word(144, info.unsent_bytes as u32);
    s.word(148, info.min_rtt.map_or(u32::MAX, |t| t.as_micros() as u32));
    s.word(152, info.data_segments_in);
    s.word(156, info.data_packets_out);
    s.long(160, info.delivery_rate.unwrap_or(0));
    let us = |d: std::time::Duration| d.as_micros() as u64;
    s.long(168, us(info.send_times.busy));
    s.long(176, us(info.send_times.peer_window));
    s.long(184, us(info.send_times.send_buffer));
    s.word(192, segments(info.acked_bytes + info.sacked_bytes, mss));
    s.word(196, segments(info.delivered_ce_bytes, mss));
    s.long(200, info.sent_bytes);
    s.long(208, info.retransmitted_bytes);
    s.word(216, info.dsacks);
    s.word(220, info.reorderings);
    s.word(228, info.snd_wnd_bytes as u32);
    s.word(232, info.rcv_wnd_bytes as u32);
    s.0.to_vec()
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(libc::tcp_info, tcpi_rto) == 8);
    assert!(offset_of!(libc::tcp_info, tcpi_unacked) == 24);
    assert!(offset_of!(libc::tcp_info, tcpi_rtt) == 68);
    assert!(offset_of!(libc::tcp_info, tcpi_snd_ssthresh) == 76);
    assert!(offset_of!(libc::tcp_info, tcpi_snd_cwnd) == 80);
    assert!(offset_of!(libc::tcp_info, tcpi_total_retrans) == 100);
};
