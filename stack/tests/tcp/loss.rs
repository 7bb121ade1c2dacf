//! Loss recovery: fast retransmit with and without SACK, time-outs, limits.

use super::support::*;
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;

fn new_reno() -> Trace {
    Trace::established_with(Config { sack: false, ..plain() })
}

/// `n` full segments in flight from position 1, then `more` unsent bytes.
fn in_flight(mut t: Trace, n: usize, more: usize) -> Trace {
    assert_eq!(t.tcb.info().cwnd_bytes, 10_000);
    t.write(n * 1000 + more);
    assert_eq!(t.out.segs.len(), n);
    t.out.segs.clear();
    t
}

#[test]
fn limited_transmit_sends_new_data_on_the_first_two_duplicates() {
    let mut t = in_flight(new_reno(), 10, 10_000);
    recv!(t, "A", seq = 1, ack = 1);
    send!(t, "A", seq = 10_001, len = 1000);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 1);
    send!(t, "A", seq = 11_001, len = 1000);
    t.expect_silence();
}

#[test]
fn the_third_duplicate_retransmits_and_reduces_the_window() {
    let mut t = in_flight(new_reno(), 10, 0);
    for _ in 0..3 {
        t.expect_silence();
        recv!(t, "A", seq = 1, ack = 1);
    }
    send!(t, "A", seq = 1, len = 1000);
    t.expect_silence();
    assert_eq!(t.tcb.info().cwnd_bytes, 7000);
    assert_eq!(t.count(Counter::TcpFastRetransmits), 1);
    // A partial acknowledgement reveals the next hole (RFC 6582).
    recv!(t, "A", seq = 1, ack = 3001);
    send!(t, "A", seq = 3001, len = 1000);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 10_001);
    assert!(!t.tcb.info().recovering);
    assert_eq!(t.tcb.info().cwnd_bytes, 7000);
    assert_eq!(t.count(Counter::TcpFastRetransmits), 1);
}

#[test]
fn after_an_ack_of_part_of_a_segment_a_whole_one_is_retransmitted() {
    let mut t = in_flight(new_reno(), 10, 0);
    for _ in 0..3 {
        recv!(t, "A", seq = 1, ack = 1);
    }
    send!(t, "A", seq = 1, len = 1000);
    // Else each of these would cut the next retransmission shorter, to single bytes in the end.
    for acked in [400, 900, 950] {
        recv!(t, "A", seq = 1, ack = 1 + acked);
        send!(t, "A", seq = 1 + acked, len = 1000);
        t.expect_silence();
    }
}

#[test]
fn without_sack_further_duplicates_allow_new_data() {
    let mut t = in_flight(new_reno(), 10, 10_000);
    for _ in 0..3 {
        recv!(t, "A", seq = 1, ack = 1);
    }
    t.out.segs.clear();
    for _ in 0..7 {
        recv!(t, "A", seq = 1, ack = 1);
    }
    // 12 in flight, 10 left the network, 1 lost and retransmitted: the window admits 7.
    assert!(t.out.segs.iter().all(|s| s.seq > 12_000));
    assert!((4..=6).contains(&t.out.segs.len()), "{}", t.out.segs.len());
}

#[test]
fn a_partial_ack_deducts_the_duplicates_that_it_covers() {
    let mut t = in_flight(new_reno(), 10, 10_000);
    for _ in 0..9 {
        recv!(t, "A", seq = 1, ack = 1);
    }
    t.out.segs.clear();
    let sent = t.tcb.info().in_flight_bytes;
    // Covers the hole and six of the nine segments after it; only these have left the pipe.
    recv!(t, "A", seq = 1, ack = 7001);
    send!(t, "A", seq = 7001, len = 1000);
    let pipe = sent - 7000 - 3 * 1000;
    let room = (7000u64.saturating_sub(pipe) / 1000) as usize;
    assert_eq!(t.out.segs.len(), room, "{sent} sent");
}

#[test]
fn an_ack_that_advances_snd_una_can_reveal_a_loss() {
    let mut t = in_flight(Trace::established(), 10, 0);
    recv!(t, "A", seq = 1, ack = 2001, sack = vec![(3001, 8001)]);
    send!(t, "A", seq = 2001, len = 1000);
    assert_eq!(t.count(Counter::TcpFastRetransmits), 1);
}

#[test]
fn an_ack_with_data_or_another_window_is_no_duplicate() {
    let mut t = in_flight(new_reno(), 10, 0);
    for i in 0..5 {
        recv!(t, "A", seq = 1 + i, ack = 1, len = 1);
        recv!(t, "A", seq = 2 + i, ack = 1, win = 40_000 + i as u16);
    }
    assert_eq!(t.count(Counter::TcpFastRetransmits), 0);
}

#[test]
fn an_ack_whose_data_was_received_before_is_no_duplicate() {
    let mut t = in_flight(new_reno(), 10, 0);
    for _ in 0..5 {
        recv!(t, "A", seq = 1, ack = 1, len = 1);
    }
    assert_eq!(t.count(Counter::TcpFastRetransmits), 0);
}

#[test]
fn sack_retransmits_only_the_holes() {
    let mut t = in_flight(Trace::established_after(plain(), 40), 10, 0);
    // 1 and 3001 are lost.
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 2001)]);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 3001)]);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(4001, 5001), (1001, 3001)]);
    send!(t, "A", seq = 1, len = 1000);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(4001, 6001), (1001, 3001)]);
    send!(t, "A", seq = 3001, len = 1000);
    recv!(t, "A", seq = 1, ack = 3001, sack = vec![(4001, 10_001)]);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 10_001);
    assert_eq!(t.tcb.info().retransmits, 2);
    assert_eq!(t.count(Counter::TcpRetransmitBytes), 2000);
    assert!(!t.tcb.info().recovering);
}

#[test]
fn more_than_two_segments_sacked_above_a_hole_start_recovery() {
    let mut t = in_flight(Trace::established(), 10, 0);
    // One ACK for a super-segment reports nine segments.
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 10_001)]);
    send!(t, "A", seq = 1, len = 1000);
    assert_eq!(t.count(Counter::TcpFastRetransmits), 1);
}

#[test]
fn recovery_is_limited_by_the_pipe() {
    let mut t = in_flight(Trace::established(), 10, 20_000);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(4001, 10_001)]);
    // Lost: 1, 1001, 2001, 3001 (sent before what was delivered). The window is 7000, the pipe empty;
    // for six segments delivered six may be sent (RFC 9937 section 6.2).
    let seqs: Vec<_> = t.out.segs.iter().map(|s| s.seq).collect();
    assert_eq!(seqs, [1, 1001, 2001, 3001, 10_001, 11_001]);
}

#[test]
fn a_timeout_retransmits_one_segment_and_then_slow_starts() {
    let mut t = in_flight(new_reno(), 10, 0);
    t.wait(201);
    send!(t, "A", seq = 1, len = 1000);
    t.expect_silence();
    assert_eq!(t.tcb.info().cwnd_bytes, 1000);
    assert_eq!(t.tcb.info().ssthresh_bytes, 7000);
    recv!(t, "A", seq = 1, ack = 1001);
    send!(t, "A", seq = 1001, len = 1000);
    send!(t, "A", seq = 2001, len = 1000);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 10_001);
    t.expect_silence();
    assert!(!t.tcb.info().recovering);
    assert_eq!(t.count(Counter::TcpTimeouts), 1);
}

#[test]
fn after_a_timeout_sacked_bytes_are_not_retransmitted() {
    let mut t = in_flight(Trace::established(), 4, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 2001), (3001, 4001)]);
    t.out.segs.clear(); // retransmissions, which are lost
    t.wait(300);
    send!(t, "A", seq = 1, len = 1000);
    recv!(t, "A", seq = 1, ack = 2001, sack = vec![(3001, 4001)]);
    send!(t, "A", seq = 2001, len = 1000);
    t.expect_silence();
}

#[test]
fn a_second_timeout_doubles_the_rto_and_clears_the_scoreboard() {
    let mut t = in_flight(Trace::established(), 3, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 3001)]);
    send!(t, "A", seq = 1);
    t.wait(201);
    send!(t, "A", seq = 1);
    t.wait(399);
    t.expect_silence();
    t.wait(2);
    send!(t, "A", seq = 1);
    assert_eq!(t.tcb.info().sacked_bytes, 0);
    assert_eq!(t.tcb.info().ssthresh_bytes, 7000); // lowered once for one loss
    recv!(t, "A", seq = 1, ack = 1001);
    send!(t, "A", seq = 1001);
    send!(t, "PA", seq = 2001);
}

#[test]
fn invalid_sack_blocks_are_ignored() {
    let mut t = in_flight(Trace::established(), 10, 0);
    let far = vec![(1001, 90_000), (5001, 4001), (0u32.wrapping_sub(5000), 0), (11_001, 12_001)];
    recv!(t, "A", seq = 1, ack = 1, sack = far);
    assert_eq!(t.tcb.info().sacked_bytes, 0);
    t.expect_silence();
}

#[test]
fn a_retransmitted_segment_gives_no_rtt_sample() {
    let mut t = in_flight(Trace::established(), 1, 0);
    let before = t.tcb.info().rtt;
    t.wait(201);
    send!(t, "PA", seq = 1);
    t.wait(150);
    recv!(t, "A", seq = 1, ack = 1001);
    assert_eq!(t.tcb.info().rtt, before);
}

#[test]
fn a_segment_whose_sack_was_lost_gives_no_rtt_sample_with_the_retransmission_before_it() {
    let mut t = in_flight(Trace::established(), 3, 0);
    let before = t.tcb.info().rtt;
    // The first is lost, and so are the ACKs that report the others and the probe of the tail.
    t.wait(500);
    assert!(t.out.segs.iter().any(|s| s.seq == 1) && t.out.segs.iter().all(|s| s.seq != 1001));
    t.wait(20);
    recv!(t, "A", seq = 1, ack = 3001);
    assert_eq!(t.tcb.info().rtt, before);
}

#[test]
fn timestamps_give_an_rtt_sample_after_a_retransmission() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    t.write(900);
    t.out.segs.clear();
    t.wait(201);
    let again = t.sent().ts.unwrap().0;
    t.wait(150);
    recv!(t, "A", seq = 1, ack = 901, ts = Some((600, again)));
    assert!(t.tcb.info().rtt > Duration::from_millis(10));
}

#[test]
fn an_ack_with_a_dsack_answers_a_duplicate_and_gives_no_rtt_sample() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    let before = t.tcb.info().rtt;
    t.write(1976);
    let stamp = t.sent().ts.unwrap().0;
    // All ACKs are lost for 20 s. The first of two segments is less than the peer has acknowledged, so its
    // retransmission does not move the peer's TS.Recent.
    t.wait(20_000);
    recv!(t, "A", seq = 1, ack = 1977, ts = Some((600, stamp)), sack = vec![(1, 989)]);
    assert_eq!(t.tcb.info().rtt, before);
}

#[test]
fn a_timed_segment_gives_an_rtt_sample_in_nanoseconds() {
    let mut t = Trace::established();
    t.write(1000);
    t.now = t.now + Duration::from_micros(80);
    recv!(t, "A", seq = 1, ack = 1001);
    // The handshake took no time: 7/8 * 1 ns + 1/8 * 80 us.
    let rtt = t.tcb.info().rtt;
    assert!(rtt >= Duration::from_micros(10) && rtt < Duration::from_micros(11), "{rtt:?}");
    assert!(t.tcb.info().min_rtt < Some(Duration::from_micros(1)));
}

#[test]
fn a_lost_fin_is_retransmitted() {
    let mut t = Trace::established();
    t.shutdown();
    send!(t, "FA", seq = 1);
    t.wait(201);
    send!(t, "FA", seq = 1);
    recv!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::FinWait2);
    assert_eq!(t.tcb.next_deadline(), None);
}

#[test]
fn a_lost_fin_after_data_is_retransmitted_by_sack_recovery() {
    let mut t = Trace::established();
    t.write(9000);
    t.shutdown();
    assert_eq!(t.out.segs.len(), 10);
    t.out.segs.clear();
    t.wait(4);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 9001)]);
    send!(t, "A", seq = 1, len = 1000);
    t.expect_silence();
    // The retransmission was sent after the FIN and is delivered before it (RFC 8985 section 6.2).
    t.wait(4);
    recv!(t, "A", seq = 1, ack = 9001);
    send!(t, "FA", seq = 9001, len = 0);
    t.expect_silence();
}
