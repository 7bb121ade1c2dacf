//! Loss recovery with SACK: RACK-TLP (RFC 8985), PRR (RFC 9937), RTO restart (RFC 7765), spurious
//! recoveries (RFC 3522, RFC 3708, RFC 5682) and DSACK (RFC 2883).

use super::support::*;
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;

/// Round-trip time of the traces, milliseconds.
const RTT: u64 = 40;

/// `n` full segments in flight from position 1, `more` bytes unsent; the first ACKs are due now.
fn flight_with(cfg: Config, n: usize, more: usize) -> Trace {
    let mut t = Trace::established_after(cfg, RTT);
    t.write(n * 1000 + more);
    assert_eq!(t.out.segs.len(), n);
    t.out.segs.clear();
    t.wait(RTT);
    t
}

fn flight(n: usize, more: usize) -> Trace {
    flight_with(plain(), n, more)
}

fn with_timestamps() -> Config {
    Config { timestamps: true, ..plain() }
}

fn seqs(t: &mut Trace) -> Vec<u32> {
    t.out.segs.drain(..).map(|s| s.seq).collect()
}

#[test]
fn one_later_delivery_and_a_quarter_of_the_round_trip_time_mean_lost() {
    let mut t = flight(4, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 2001)]);
    t.wait(RTT / 4 - 1);
    t.expect_silence();
    t.wait(1);
    send!(t, "A", seq = 1, len = 1000);
    t.expect_silence();
    assert_eq!(t.count(Counter::TcpFastRetransmits), 1);
}

#[test]
fn losses_that_the_reordering_timer_finds_are_no_burst() {
    let mut t = flight(10, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(7001, 8001)]);
    t.wait(RTT / 4);
    // Seven segments are lost and two in flight; nothing was delivered since (RFC 9937 section 6.2).
    send!(t, "A", seq = 1, len = 1000);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(3001, 4001), (7001, 8001)]);
    send!(t, "A", seq = 1001, len = 1000);
    t.expect_silence();
}

#[test]
fn three_segments_delivered_above_a_hole_need_no_reordering_window() {
    let mut t = flight(6, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 3001)]);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 4001)]);
    send!(t, "A", seq = 1, len = 1000);
    t.expect_silence();
}

#[test]
fn a_segment_that_arrives_within_the_window_causes_no_recovery() {
    let mut t = flight(4, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 2001)]);
    t.wait(RTT / 4 - 1);
    recv!(t, "A", seq = 1, ack = 2001);
    t.wait(20);
    t.expect_silence();
    assert_eq!(t.count(Counter::TcpFastRetransmits), 0);
}

#[test]
fn once_reordering_was_seen_three_segments_no_longer_mean_lost() {
    let mut t = flight(10, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 2001)]);
    recv!(t, "A", seq = 1, ack = 2001);
    recv!(t, "A", seq = 1, ack = 2001, sack = vec![(3001, 9001)]);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 9001);
    t.wait(RTT / 4);
    t.expect_silence();
    assert_eq!(t.count(Counter::TcpFastRetransmits), 0);
}

#[test]
fn a_lost_retransmission_is_found_without_a_timeout() {
    let mut t = flight(10, 30_000);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 4001)]);
    send!(t, "A", seq = 1, len = 1000);
    // New data sent after the retransmission is delivered, the retransmission is not.
    t.wait(1);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 10_001)]);
    let new = t.sent().seq;
    assert_eq!(new, 10_001);
    t.out.segs.clear();
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 11_001)]);
    send!(t, "A", seq = 1, len = 1000);
    assert_eq!(t.count(Counter::TcpLostRetransmits), 1);
    assert_eq!(t.count(Counter::TcpTimeouts), 0);
}

#[test]
fn fast_recovery_lowers_the_flight_in_proportion_to_what_is_delivered() {
    let mut t = flight(10, 50_000);
    // A first round, so that the window is 20.
    recv!(t, "A", seq = 1, ack = 10_001);
    assert_eq!(seqs(&mut t).len(), 20);
    t.wait(RTT);
    // 10_001 is lost; each of the other 19 segments is delivered by an ACK of its own.
    let mut sent = Vec::new();
    for end in (12_001..=30_001).step_by(1000) {
        recv!(t, "A", seq = 1, ack = 10_001, sack = vec![(11_001, end)]);
        sent.push(t.out.segs.len());
        t.out.segs.clear();
        assert!(t.tcb.info().cwnd_bytes <= 20_000);
    }
    // The first two ACKs admit new data (RFC 3042), the third the retransmission.
    assert_eq!(sent[..3], [1, 1, 1]);
    // Then seven segments go for ten that arrive, neither none nor all at once.
    let during: usize = sent[3..].iter().sum();
    assert!((9..=12).contains(&during), "{sent:?}");
    assert!(sent.iter().all(|n| *n <= 2), "{sent:?}");
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 32_001);
    assert_eq!(t.tcb.info().cwnd_bytes, t.tcb.info().ssthresh_bytes.max(1));
}

#[test]
fn a_lost_tail_is_probed_after_two_round_trips_and_repaired_by_rack() {
    let mut t = flight(4, 0);
    recv!(t, "A", seq = 1, ack = 1001);
    t.wait(2 * RTT + 4);
    t.expect_silence();
    t.wait(1);
    send!(t, "PA", seq = 3001, len = 1000);
    t.expect_silence();
    assert_eq!(t.count(Counter::TcpTailLossProbes), 1);
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 1001, sack = vec![(3001, 4001)]);
    t.wait(RTT / 4);
    send!(t, "A", seq = 1001, len = 1000);
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 2001, sack = vec![(3001, 4001)]);
    send!(t, "A", seq = 2001, len = 1000);
    assert_eq!(t.count(Counter::TcpTimeouts), 0);
    recv!(t, "A", seq = 1, ack = 4001);
    assert!(!t.tcb.info().recovering);
}

#[test]
fn a_probe_is_new_data_if_the_peers_window_admits_it() {
    let mut t = Trace::established_after(plain(), RTT);
    t.write(10_000);
    t.out.segs.clear();
    t.wait(RTT);
    t.queue(1000);
    t.wait(RTT + 5);
    send!(t, "PA", seq = 10_001, len = 1000);
    assert_eq!(t.tcb.info().retransmits, 0);
    t.expect_silence();
}

#[test]
fn one_probe_then_the_timeout() {
    let mut t = flight(2, 0);
    t.wait(RTT + 5);
    send!(t, "PA", seq = 1001, len = 1000);
    t.wait(400);
    send!(t, "A", seq = 1, len = 1000);
    assert_eq!(t.count(Counter::TcpTailLossProbes), 1);
    assert_eq!(t.count(Counter::TcpTimeouts), 1);
}

#[test]
fn a_tail_that_the_probe_repaired_was_a_loss() {
    let mut t = flight(2, 0);
    t.wait(RTT + 5);
    send!(t, "PA", seq = 1001, len = 1000);
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 2001);
    let cwnd = t.tcb.info().cwnd_bytes;
    // Nothing tells that both copies arrived: the next ACK settles it.
    t.write(1000);
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 3001);
    assert!(t.tcb.info().cwnd_bytes < cwnd);
}

#[test]
fn a_probe_that_a_dsack_reports_was_needless() {
    let mut t = flight(2, 0);
    t.wait(RTT + 5);
    send!(t, "PA", seq = 1001, len = 1000);
    recv!(t, "A", seq = 1, ack = 2001);
    let cwnd = t.tcb.info().cwnd_bytes;
    recv!(t, "A", seq = 1, ack = 2001, sack = vec![(1001, 2001)]);
    t.write(1000);
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 3001);
    assert_eq!(t.tcb.info().cwnd_bytes, cwnd);
}

#[test]
fn the_timeout_of_a_short_flight_counts_from_its_transmission() {
    let mut t = Trace::established_after(Config { sack: false, ..plain() }, RTT);
    t.write(2000);
    t.out.segs.clear();
    // The ACK comes 30 ms late; the second segment was sent with the first (RFC 7765 section 4).
    t.wait(RTT + 30);
    recv!(t, "A", seq = 1, ack = 1001);
    let rto = t.tcb.info().rto;
    let left = t.tcb.next_deadline().unwrap().since(t.now);
    assert_eq!(left, rto - Duration::from_millis(RTT + 30));
}

#[test]
fn eifel_undoes_a_recovery_whose_original_arrives() {
    let mut t = flight_with(with_timestamps(), 10, 0);
    let cwnd = t.tcb.info().cwnd_bytes;
    recv!(t, "A", seq = 1, ack = 1, ts = Some((600, 1040)), sack = vec![(989, 3953)]);
    assert!(!seqs(&mut t).is_empty());
    assert!(t.tcb.info().recovering);
    // The ACK echoes a timestamp from before the retransmission (RFC 3522 section 3.2).
    recv!(t, "A", seq = 1, ack = 3953, ts = Some((601, 1040)));
    assert!(!t.tcb.info().recovering);
    assert_eq!(t.tcb.info().cwnd_bytes, cwnd);
    assert_eq!(t.count(Counter::TcpSpuriousRecoveries), 1);
}

#[test]
fn a_recovery_that_ends_before_anything_was_sent_again_is_undone() {
    let mut t = flight(10, 0);
    let before = (t.tcb.info().cwnd_bytes, t.tcb.info().ssthresh_bytes);
    // Both ACKs come in one batch: output runs after the second.
    t.input(seg!("A", seq = 1, ack = 1, sack = vec![(1001, 6001)]));
    assert!(t.tcb.info().recovering);
    t.input(seg!("A", seq = 1, ack = 6001));
    assert!(!t.tcb.info().recovering);
    assert!(t.tcb.info().cwnd_bytes >= before.0 && t.tcb.info().ssthresh_bytes == before.1);
    t.output();
    t.expect_silence();
}

#[test]
fn eifel_leaves_a_recovery_whose_retransmission_arrives() {
    let mut t = flight_with(with_timestamps(), 10, 0);
    let cwnd = t.tcb.info().cwnd_bytes;
    recv!(t, "A", seq = 1, ack = 1, ts = Some((600, 1040)), sack = vec![(989, 3953)]);
    let stamp = t.sent().ts.unwrap().0;
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 3953, ts = Some((601, stamp)));
    assert!(t.tcb.info().recovering);
    assert!(t.tcb.info().ssthresh_bytes < cwnd);
    // What the timestamps of later ACKs say is of no use any more, not even running backwards.
    recv!(t, "A", seq = 1, ack = 4941, ts = Some((602, 1)));
    assert!(t.tcb.info().recovering);
}

#[test]
fn dsack_undoes_a_recovery_all_of_whose_retransmissions_were_needless() {
    let mut t = flight(10, 0);
    let cwnd = t.tcb.info().cwnd_bytes;
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 2001), (3001, 6001)]);
    t.wait(1);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 2001), (3001, 7001)]);
    assert_eq!(seqs(&mut t), [1, 2001]);
    recv!(t, "A", seq = 1, ack = 10_001);
    assert!(t.tcb.info().cwnd_bytes < cwnd);
    recv!(t, "A", seq = 1, ack = 10_001, sack = vec![(1, 1001)]);
    assert_eq!(t.count(Counter::TcpSpuriousRecoveries), 0);
    recv!(t, "A", seq = 1, ack = 10_001, sack = vec![(2001, 3001)]);
    assert_eq!(t.count(Counter::TcpSpuriousRecoveries), 1);
    assert_eq!(t.tcb.info().cwnd_bytes, cwnd);
}

#[test]
fn a_needless_retransmission_widens_the_reordering_window() {
    let mut t = flight(10, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 5001)]);
    assert_eq!(seqs(&mut t), [1]);
    recv!(t, "A", seq = 1, ack = 10_001);
    recv!(t, "A", seq = 1, ack = 10_001, sack = vec![(1, 1001)]);
    t.write(4000);
    t.out.segs.clear();
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 10_001, sack = vec![(11_001, 12_001)]);
    // Two quarters of the round-trip time instead of one.
    t.wait(RTT / 2 - 1);
    t.expect_silence();
    t.wait(1);
    send!(t, "A", seq = 10_001, len = 1000);
}

#[test]
fn a_flood_of_dsacks_changes_nothing() {
    let mut t = flight(10, 30_000);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 5001)]);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 5001);
    let cwnd = t.tcb.info().cwnd_bytes;
    for i in 0..5000u32 {
        // Of bytes not retransmitted, never sent, or long gone; one of another connection.
        let lies =
            [(1001, 2001), (i, i + 7), (90_000, 91_000), (5001u32.wrapping_sub(i << 18), 5001)];
        recv!(t, "A", seq = 1, ack = 5001, sack = vec![lies[i as usize % 4]]);
    }
    assert!(t.count(Counter::TcpSpuriousRecoveries) <= 1);
    assert!(t.tcb.info().cwnd_bytes <= cwnd.max(10_000));
    assert!(t.out.segs.len() < 20);
}

#[test]
fn frto_undoes_a_timeout_after_which_originals_arrive() {
    let mut t = flight(6, 0);
    let cwnd = t.tcb.info().cwnd_bytes;
    // The probe, then the time-out: the path has become longer.
    t.wait(RTT + 400);
    let sent = seqs(&mut t);
    assert_eq!(sent.last(), Some(&1), "{sent:?}");
    assert_eq!(t.count(Counter::TcpTimeouts), 1);
    // Step 2: the ACK of the first segment admits two new ones instead of retransmissions.
    t.queue(5000);
    recv!(t, "A", seq = 1, ack = 1001);
    let sent = seqs(&mut t);
    assert!(sent.iter().all(|s| *s > 6000) && !sent.is_empty(), "{sent:?}");
    // Step 3: the ACK of an original that was not retransmitted.
    recv!(t, "A", seq = 1, ack = 2001);
    assert_eq!(t.count(Counter::TcpSpuriousRecoveries), 1);
    assert!(!t.tcb.info().recovering);
    assert!(t.tcb.info().cwnd_bytes >= cwnd);
    assert!(seqs(&mut t).iter().all(|s| *s > 6000));
}

#[test]
fn frto_lets_a_real_timeout_stand() {
    let mut t = flight(6, 0);
    t.wait(RTT + 400);
    t.out.segs.clear();
    t.queue(5000);
    recv!(t, "A", seq = 1, ack = 1001);
    let new = seqs(&mut t);
    // What was sent after the time-out arrives, the rest does not.
    t.wait(RTT);
    let first = new[0];
    recv!(t, "A", seq = 1, ack = 1001, sack = vec![(first, first + 1000)]);
    assert_eq!(t.count(Counter::TcpSpuriousRecoveries), 0);
    assert_eq!(seqs(&mut t)[0], 1001);
}

#[test]
fn a_peer_that_reneges_gets_everything_again() {
    let mut t = flight(10, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(1001, 10_001)]);
    t.out.segs.clear();
    // It acknowledges the hole and forgets the rest.
    t.wait(RTT);
    recv!(t, "A", seq = 1, ack = 1001);
    for _ in 0..40 {
        t.wait(500);
        let Some(last) = t.out.segs.drain(..).next_back() else { continue };
        recv!(t, "A", seq = 1, ack = last.seq + last.len as u32);
    }
    assert_eq!(t.tcb.info().in_flight_bytes, 0);
}

#[test]
fn bytes_received_twice_are_reported_once_before_the_other_blocks() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, len = 1000);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 1, len = 1000);
    send!(t, "A", ack = 1001, sack = vec![(1, 1001)]);
    recv!(t, "A", seq = 3001, ack = 1, len = 1000);
    send!(t, "A", ack = 1001, sack = vec![(3001, 4001)]);
    recv!(t, "A", seq = 5001, ack = 1, len = 1000);
    send!(t, "A", ack = 1001, sack = vec![(5001, 6001), (3001, 4001)]);
    // Above the acknowledgement the range that contains them follows (RFC 2883 section 4.2.1).
    recv!(t, "A", seq = 3001, ack = 1, len = 1000);
    send!(t, "A", ack = 1001, sack = vec![(3001, 4001), (3001, 4001), (5001, 6001)]);
    assert_eq!(t.count(Counter::TcpDsacksOut), 2);
}

#[test]
fn of_a_segment_received_in_part_the_first_part_received_twice_is_reported() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 2001, ack = 1, len = 1000);
    recv!(t, "A", seq = 4001, ack = 1, len = 1000);
    t.out.segs.clear();
    // Behind a gap: 2501 to 3001 and 4001 to 4501 are known (RFC 2883 section 4.2).
    recv!(t, "A", seq = 2501, ack = 1, len = 2000);
    send!(t, "A", ack = 1, sack = vec![(2501, 3001), (2001, 5001)]);
    // In order: all but the first 2000 bytes.
    recv!(t, "A", seq = 1, ack = 1, len = 3000);
    send!(t, "A", ack = 5001, sack = vec![(2001, 3001)]);
}

#[test]
fn a_peer_without_sack_gets_no_dsack() {
    let mut t = Trace::established_with(Config { sack: false, ..plain() });
    recv!(t, "A", seq = 1, ack = 1, len = 1000);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 1, len = 1000);
    send!(t, "A", ack = 1001, sack = vec![]);
}

#[test]
fn blocks_that_overlap_repeat_or_shrink_count_once() {
    let mut t = flight(10, 0);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(2001, 4001), (3001, 5001), (2501, 3501)]);
    assert_eq!(t.tcb.info().sacked_bytes, 3000);
    recv!(t, "A", seq = 1, ack = 1, sack = vec![(2001, 3001)]);
    assert_eq!(t.tcb.info().sacked_bytes, 3000);
    recv!(t, "A", seq = 1, ack = 3501, sack = vec![(4001, 10_001)]);
    assert_eq!(t.tcb.info().sacked_bytes, 6500);
}

#[test]
fn on_a_long_path_the_whole_window_is_used() {
    let path = PathInfo { tso_bytes: Some(65_535), ..path() };
    for (rtt, expected) in [(RTT, 2), (0, 0)] {
        let mut t = Trace::established_after(plain(), rtt);
        t.path = path;
        t.write(40_000);
        t.out.segs.clear();
        t.wait(rtt);
        // An ACK of two segments out of ten admits four in slow start, fewer than a quarter.
        recv!(t, "A", seq = 1, ack = 1001);
        let sent: usize = t.out.segs.iter().map(|s| s.len).sum();
        assert_eq!(sent, expected * 1000, "round-trip time {rtt} ms");
    }
}
