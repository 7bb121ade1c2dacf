//! Sockets in the document.

use std::net::SocketAddr;
use std::time::Duration;

use fulmar_stack::shard::{ListenerStat, SocketStat};
use fulmar_stack::tcp::{Info, PathModel};
use serde::{Deserialize, Deserializer};

use super::{Name, part};

part! { "A socket."
r#"for socket in &document.sockets {
    println!("{} {} {:?} {:?}", socket.protocol, socket.state, socket.local, socket.remote);
}"#
Socket of s: SocketStat {
    protocol: Name = s.protocol.into(), "`tcp`, `udp` or `icmp`.";
    state: Name = s.state.into(), "Of a connection its state (RFC 9293), else `LISTEN`, `ESTABLISHED` or `UNCONNECTED`.";
    recv_queue_bytes: usize = s.recv_queue, "Bytes not yet read; of a listener, connections not yet accepted.";
    send_queue_bytes: usize = s.send_queue, "Bytes not yet acknowledged; of a listener, its backlog.";
    local: Option<SocketAddr>, "This end.";
    remote: Option<SocketAddr>, "The other end.";
    #[serde(flatten, deserialize_with = "present")]
    tcp: Option<Connection> = s.tcp.as_ref().map(Connection::from), "Of a connection.";
    #[serde(flatten, deserialize_with = "present")]
    listener: Option<Listener> = s.listener.as_ref().map(Listener::from), "Of a TCP listener.";
} }

/// Reads a part whose fields are beside those of others. `None`: the document has none of them.
pub(super) fn present<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default + PartialEq,
{
    let part = T::deserialize(from)?;
    Ok((part != T::default()).then_some(part))
}

part! { "The main figures of a TCP connection."
r#"for tcp in document.sockets.iter().filter_map(|socket| socket.tcp.as_ref()) {
    println!("round trip {} us, {} segments retransmitted", tcp.rtt_us, tcp.retransmits);
}"#
Connection of i: Info {
    rtt_us: f64 = tenths_us(i.rtt), "Smoothed round-trip time; 0 before the first sample.";
    rttvar_us: f64 = tenths_us(i.rttvar), "Mean deviation of the round-trip time.";
    rto_us: f64 = tenths_us(i.rto), "Retransmission time-out, backoff included.";
    mss_bytes: u32, "Payload of a full segment.";
    cwnd_bytes: u64, "Congestion window.";
    congestion: Name = i.congestion.name().into(), "Congestion control.";
    pacing_rate_bytes_per_s: Option<u64> = i.pacing_rate, "Rate of sending, if the connection is paced.";
    delivery_rate_bytes_per_s: Option<u64> = i.delivery_rate, "Last delivery rate; none before the first sample.";
    ssthresh_bytes: Option<u64> = (i.ssthresh_bytes < NO_SSTHRESH).then_some(i.ssthresh_bytes),
        "Slow start threshold; none before the first loss.";
    snd_wnd_bytes: u64, "The peer's window.";
    rcv_wnd_bytes: u64, "The window offered to the peer.";
    in_flight_bytes: u64, "Bytes sent and not acknowledged.";
    unsent_bytes: u64, "Committed bytes not yet sent.";
    acked_bytes: u64, "Bytes that the peer has acknowledged. A FIN counts as one.";
    received_bytes: u64, "Bytes received in order. A FIN counts as one.";
    out_of_order_bytes: usize, "Bytes in the reassembly queue.";
    retransmits: u64, "Segments retransmitted.";
    retransmitted_bytes: u64, "Bytes retransmitted.";
    recovering: bool, "In fast recovery, or in loss recovery after a time-out.";
    ecn: bool, "ECN was negotiated (RFC 3168).";
    syn_data: bool, "The data of the SYN was accepted as a whole (RFC 7413).";
    tcp_info: Details = Details::from(i), "Other fields of TCP_INFO.";
    accurate_ecn: bool, "Accurate ECN feedback was negotiated (RFC 9768).";
    ce_received: u64, "Packets that arrived with a CE mark.";
} }

part! { "The other figures of a TCP connection: `fulmar stat` prints them with `--json` only."
r#"for tcp in document.sockets.iter().filter_map(|socket| socket.tcp.as_ref()) {
    println!("path MTU {} bytes", tcp.tcp_info.pmtu_bytes);
}"#
Details of i: Info {
    min_rtt_us: Option<u64> = i.min_rtt.map(us), "Least round-trip time.";
    backoff: u32, "Exponential backoffs since the last progress.";
    probes: u32, "Window and keepalive probes unanswered.";
    timed_out: bool, "In loss recovery after a time-out.";
    app_limited: bool, "The application limited the delivery rate.";
    lost_bytes: u64, "Bytes in flight that are considered lost and not yet retransmitted.";
    sacked_bytes: u64, "Bytes in flight that the peer has selectively acknowledged.";
    reordering_window_us: u64 = us(i.reordering_window), "RACK's reordering window (RFC 8985).";
    reorderings: u32, "Times that a segment was delivered after one that was sent later.";
    dsacks: u32, "DSACK blocks received (RFC 2883).";
    busy_us: u64 = us(i.send_times.busy), "Time with data unsent or unacknowledged.";
    peer_window_limited_us: u64 = us(i.send_times.peer_window), "Part of `busy_us` in which the peer's window held data back.";
    send_buffer_limited_us: u64 = us(i.send_times.send_buffer), "Part of `busy_us` in which a full send buffer limited the rate.";
    sent_bytes: u64, "Bytes sent, retransmissions included.";
    delivered_ce_bytes: u64, "Delivered bytes that the peer reports as marked with CE.";
    packets_out: u32, "Packets sent. Packet counts wrap.";
    data_packets_out: u32, "Packets sent with payload.";
    segments_in: u32, "Segments received.";
    data_segments_in: u32, "Segments received with payload.";
    since_data_sent_us: u64 = us(i.since_data_sent), "Since the last payload, SYN, FIN or probe was sent.";
    since_data_received_us: u64 = us(i.since_data_received), "Since the last payload arrived.";
    since_ack_received_us: u64 = us(i.since_ack_received), "Since the last acceptable segment arrived.";
    pmtu_bytes: usize, "Path MTU.";
    advmss_bytes: usize, "MSS option of the own SYN.";
    rcv_mss_bytes: u32, "Estimate of the peer's full segment.";
    send_buffer_bytes: usize, "Send buffer.";
    recv_buffer_bytes: usize, "Receive buffer.";
    loaned_bytes: usize, "Bytes loaned to the program by reference.";
    timestamps: bool, "Timestamps were negotiated.";
    sack: bool, "SACK was negotiated.";
    window_scales: [u8; 2] = i.window_scales.into(), "Window scales: own, the peer's.";
    model: Option<Model> = i.model.as_ref().map(Model::from), "Path model of the congestion control, if it keeps one (BBR).";
} }

part! { "The path model of a congestion control."
r#"let connections = document.sockets.iter().filter_map(|socket| socket.tcp.as_ref());
for model in connections.filter_map(|tcp| tcp.tcp_info.model.as_ref()) {
    println!("{}: {} bytes per second", model.phase, model.rate_bytes_per_s);
}"#
Model of m: PathModel {
    phase: Name = m.phase.into(), "Phase of its state machine.";
    rate_bytes_per_s: u64 = m.rate, "Rate that the path delivers.";
    min_rtt_us: Option<u64> = m.min_rtt.map(us), "Least round-trip time of the path.";
    pacing_gain_percent: u64 = m.pacing_gain, "Factor of the rate for pacing.";
    cwnd_gain_percent: u64 = m.cwnd_gain, "Factor of the product of rate and round-trip time for the congestion window.";
} }

part! { "The queues of a TCP listener, their limits, and counts since it was opened."
r#"for listener in document.sockets.iter().filter_map(|socket| socket.listener.as_ref()) {
    println!("{} of {} connections wait", listener.accept_queue, listener.accept_limit);
}"#
Listener of l: ListenerStat whole {
    embryos: usize, "Connections whose handshake is under way.";
    embryo_limit: usize, "Maximum number of embryos.";
    accept_queue: usize, "Connections waiting to be accepted.";
    accept_limit: usize, "Maximum length of the accept queue.";
    pending: usize, "Connections that the program has yet to decide about.";
    pending_limit: usize, "Maximum number of pending connections.";
    pending_expired: u64, "Pending connections dropped by their time-out.";
    pending_reset: u64, "Pending connections that the peer has reset.";
    fast_open_pending: usize, "Fast Open connections whose handshake is not complete.";
    fast_open_limit: usize, "Maximum number of such Fast Open connections.";
    fast_opens: u64, "Connections opened with their SYN.";
    fast_open_invalid: u64, "SYNs with an invalid cookie.";
    fast_open_overflows: u64, "SYNs whose data was ignored at the limit.";
    cookies_sent: u64, "SYNs answered with a SYN cookie.";
    cookies_valid: u64, "ACKs that brought back a valid SYN cookie.";
    cookies_failed: u64, "ACKs without a connection and without a valid SYN cookie.";
    embryos_replaced: u64, "Embryos replaced by a later one.";
    embryos_expired: u64, "Embryos given up because no answer to their SYN,ACK came.";
    syns_dropped: u64, "SYNs dropped at a limit.";
    acks_dropped: u64, "Last ACKs of a handshake dropped at a limit.";
} }

/// No window is as large: before its first loss a connection has no threshold (RFC 5681 section 3.1: "arbitrarily
/// high").
const NO_SSTHRESH: u64 = 1 << 30;

fn us(time: Duration) -> u64 {
    time.as_micros() as u64
}

/// To a tenth: a clock that is read once per burst knows no more.
fn tenths_us(time: Duration) -> f64 {
    (time.as_nanos() / 100) as f64 / 10.0
}
