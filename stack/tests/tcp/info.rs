//! TCP_INFO: counts, times and rates of a connection.

use super::support::*;
use fulmar_stack::base::Duration;
use fulmar_stack::tcp::*;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn info(t: &Trace) -> Info {
    t.tcb.info_at(t.now)
}

#[test]
fn times_of_the_limits_end_where_the_limit_changes() {
    let mut t = Trace::established();
    t.output();
    assert_eq!(info(&t).send_times, SendTimes::default());
    t.wait(50);
    // The peer's window closes after the first segment.
    t.write(1000);
    t.wait(10);
    recv!(t, "A", seq = 1, ack = 1001, win = 0);
    assert_eq!(info(&t).send_times.busy, ms(10));
    t.wait(100);
    assert_eq!(info(&t).send_times.busy, ms(10), "idle time is not busy");
    t.write(1000);
    t.wait(100);
    let times = info(&t).send_times;
    assert_eq!((times.busy, times.peer_window), (ms(110), ms(100)));
    recv!(t, "A", seq = 1, ack = 1001, win = 65_535);
    t.output();
    t.wait(20);
    recv!(t, "A", seq = 1, ack = 2001, win = 65_535);
    t.wait(1000);
    let times = info(&t).send_times;
    assert_eq!((times.busy, times.peer_window, times.send_buffer), (ms(130), ms(100), ms(0)));
}

#[test]
fn a_full_buffer_that_is_all_in_flight_limits_while_the_congestion_window_has_space() {
    let mut t = Trace::established();
    t.tcb.set_send_buffer(4000);
    t.write(4000);
    t.wait(30);
    let times = info(&t).send_times;
    assert_eq!((times.busy, times.send_buffer), (ms(30), ms(30)));
    recv!(t, "A", seq = 1, ack = 2001);
    t.output();
    t.wait(30);
    let times = info(&t).send_times;
    assert_eq!((times.busy, times.send_buffer), (ms(60), ms(30)));
}

#[test]
fn bytes_packets_and_segments_are_counted_in_both_directions() {
    let mut t = Trace::established();
    t.out.segs.clear();
    let before = info(&t);
    t.write(2500);
    recv!(t, "A", seq = 1, ack = 2501, len = 100);
    t.wait(50);
    let i = info(&t);
    assert_eq!((i.sent_bytes, i.acked_bytes, i.received_bytes), (2500, 2500, 100));
    assert_eq!(i.data_packets_out - before.data_packets_out, 3);
    assert_eq!(i.packets_out - before.packets_out, 4, "three of data, one ACK");
    assert_eq!(i.segments_in - before.segments_in, 1);
    assert_eq!(i.data_segments_in - before.data_segments_in, 1);
    assert_eq!((i.advmss_bytes, i.pmtu_bytes), (path().mtu - 40, path().mtu));
}

#[test]
fn a_retransmission_counts_as_sent_and_its_dsack_as_one_of_those() {
    let mut t = Trace::established_with(Config { sack: true, ..plain() });
    t.write(1000);
    t.wait(1200);
    let i = info(&t);
    assert!(i.retransmits >= 1 && i.retransmitted_bytes >= 1000, "{i:?}");
    assert_eq!(i.sent_bytes, 1000 + i.retransmitted_bytes);
    recv!(t, "A", seq = 1, ack = 1001, sack = vec![(1, 1001)]);
    assert_eq!(info(&t).dsacks, u32::from(info(&t).sack));
}

#[test]
fn times_since_the_last_events_grow_with_time() {
    let mut t = Trace::established();
    t.wait(1000);
    assert_eq!(info(&t).since_data_received, ms(1000), "since the handshake");
    recv!(t, "A", seq = 1, ack = 1, len = 10);
    t.wait(7);
    t.write(10);
    t.wait(3);
    let i = info(&t);
    let since = (i.since_data_received, i.since_ack_received, i.since_data_sent);
    assert_eq!(since, (ms(10), ms(10), ms(3)));
}

#[test]
fn a_controller_without_samples_has_the_rate_of_the_last_round_trip() {
    let mut t = Trace::established_after(plain(), 100);
    assert_eq!(info(&t).delivery_rate, None);
    t.write(10_000);
    t.wait(100);
    recv!(t, "A", seq = 1, ack = 2001);
    t.write(10_000);
    t.wait(100);
    recv!(t, "A", seq = 1, ack = 10_001);
    let i = info(&t);
    assert_eq!(i.delivery_rate, Some(80_000), "8,000 bytes in 100 ms");
    assert!(!i.app_limited, "the congestion window limits");
    assert_eq!(i.model, None);
}

#[test]
fn bbr_shows_its_model() {
    let mut t =
        Trace::established_after(Config { congestion: CongestionControl::Bbr, ..plain() }, 100);
    t.write(3000);
    t.wait(100);
    recv!(t, "A", seq = 1, ack = 3001);
    let model = info(&t).model.expect("a model");
    assert_eq!((model.phase, model.pacing_gain, model.cwnd_gain), ("startup", 277, 200));
    assert!(model.min_rtt.is_some_and(|rtt| rtt <= ms(100)));
    assert!(model.rate > 0);
}
