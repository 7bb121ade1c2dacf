//! Data transfer: acknowledgements, segmentation, windows, Nagle, probes.

use super::support::*;
use fulmar_stack::base::{Counter, DropReason, Duration, Instant};
use fulmar_stack::tcp::*;

/// An established connection after quick-ACK mode, which ends once data flows both ways.
fn settled() -> Trace {
    settled_with(plain())
}

fn settled_with(cfg: Config) -> Trace {
    let mut t = Trace::established_with(cfg);
    t.write(1000);
    send!(t, "PA", seq = 1, len = 1000);
    recv!(t, "A", seq = 1, ack = 1001);
    t.input(seg!("A", seq = 1, ack = 1001, len = 1000));
    t.read(1000);
    t.wait(40);
    send!(t, "A", ack = 1001);
    t.expect_silence();
    t
}

#[test]
fn every_second_full_segment_is_acknowledged_immediately() {
    let mut t = settled();
    recv!(t, "A", seq = 1001, ack = 1001, len = 1000);
    t.expect_silence();
    recv!(t, "A", seq = 2001, ack = 1001, len = 1000);
    send!(t, "A", ack = 3001);
    t.expect_silence();
}

#[test]
fn a_lone_segment_is_acknowledged_after_40_ms() {
    let mut t = settled();
    recv!(t, "A", seq = 1001, ack = 1001, len = 10);
    t.wait(39);
    t.expect_silence();
    t.wait(1);
    send!(t, "A", ack = 1011);
}

/// The peer has two segments in flight and, unlike with one, does not expect a delay: it would probe.
#[test]
fn more_than_one_full_segment_is_acknowledged_within_a_millisecond() {
    let mut t = settled();
    recv!(t, "A", seq = 1001, ack = 1001, len = 1000);
    t.wait(10);
    t.expect_silence();
    recv!(t, "PA", seq = 2001, ack = 1001, len = 10);
    t.expect_silence(); // a response may carry it
    t.wait(1);
    send!(t, "A", ack = 2011);
    t.wait(100);
    t.expect_silence();
}

#[test]
fn a_response_within_a_millisecond_carries_the_acknowledgement() {
    let mut t = settled();
    recv!(t, "A", seq = 1001, ack = 1001, len = 1000);
    recv!(t, "PA", seq = 2001, ack = 1001, len = 999);
    t.write(10);
    send!(t, "PA", seq = 1001, ack = 3000, len = 10);
    t.wait(100);
    t.expect_silence();
}

#[test]
fn a_super_segment_is_acknowledged_immediately_and_once() {
    let mut t = settled();
    recv!(t, "A", seq = 1001, ack = 1001, len = 40_000);
    send!(t, "A", ack = 41_001);
    t.expect_silence();
}

#[test]
fn a_batch_before_one_output_gets_one_acknowledgement() {
    let mut t = settled();
    for i in 0..10 {
        t.input(seg!("A", seq = 1001 + i * 1000, ack = 1001, len = 1000));
    }
    t.output();
    send!(t, "A", ack = 11_001);
    t.expect_silence();
}

#[test]
fn a_young_connection_acknowledges_every_segment() {
    let mut t = Trace::established();
    for i in 0..5 {
        recv!(t, "A", seq = 1 + i * 100, ack = 1, len = 100);
        send!(t, "A", ack = 101 + i * 100);
    }
}

#[test]
fn data_carries_a_pending_acknowledgement() {
    let mut t = settled();
    recv!(t, "PA", seq = 1001, ack = 1001, len = 10);
    t.write(10);
    send!(t, "PA", seq = 1001, ack = 1011, len = 10);
    t.wait(100);
    t.expect_silence();
}

#[test]
fn a_pushed_segment_is_acknowledged_when_it_has_been_read() {
    let mut t = settled();
    recv!(t, "PA", seq = 1001, ack = 1001, len = 10);
    t.expect_silence();
    t.read(5);
    t.expect_silence();
    t.read(5);
    send!(t, "A", ack = 1011);
    t.expect_silence();
}

#[test]
fn in_interactive_use_acks_wait_for_the_response() {
    let mut t = settled();
    for i in 0..3 {
        recv!(t, "PA", seq = 1001 + i * 10, ack = 1001 + i * 10, len = 10);
        if i > 0 {
            t.read(10);
            t.expect_silence();
        }
        t.write(10);
        send!(t, "PA", seq = 1001 + i * 10, ack = 1011 + i * 10, len = 10);
    }
    t.read(10);
    recv!(t, "PA", seq = 1031, ack = 1031, len = 10);
    t.wait(40); // no answer this time
    send!(t, "A", ack = 1041);
    recv!(t, "PA", seq = 1041, ack = 1031, len = 10);
    t.read(20);
    send!(t, "A", ack = 1051);
}

/// A message of ten bytes, which is read.
fn message(t: &mut Trace, number: u32, answers: u32) {
    recv!(t, "PA", seq = 1001 + number * 10, ack = 1001 + answers * 10, len = 10);
    t.read(10);
}

/// A message of ten bytes, read and acknowledged at once, and an answer a millisecond later.
fn exchange(t: &mut Trace, number: u32) {
    message(t, number, number);
    send!(t, "A", ack = 1011 + number * 10);
    t.wait(1);
    t.write(10);
    send!(t, "PA", seq = 1001 + number * 10, ack = 1011 + number * 10, len = 10);
}

#[test]
fn where_the_ends_take_turns_acks_wait_for_a_response_that_comes_later() {
    let mut t = settled();
    (0..4).for_each(|number| exchange(&mut t, number));
    for number in 4..8 {
        message(&mut t, number, number);
        t.expect_silence();
        t.wait(1);
        t.write(10);
        send!(t, "PA", seq = 1001 + number * 10, ack = 1011 + number * 10, len = 10);
    }
}

#[test]
fn a_peer_that_sends_two_messages_for_a_response_is_acknowledged_at_once() {
    let mut t = settled();
    for number in 0..8 {
        message(&mut t, 2 * number, number);
        send!(t, "A", ack = 1011 + 20 * number);
        message(&mut t, 2 * number + 1, number);
        send!(t, "A", ack = 1021 + 20 * number);
        t.write(10);
        send!(t, "PA", seq = 1001 + number * 10, ack = 1021 + 20 * number, len = 10);
    }
}

#[test]
fn a_second_message_before_the_response_ends_interactive_use() {
    let mut t = settled();
    (0..4).for_each(|number| exchange(&mut t, number));
    message(&mut t, 4, 4);
    t.expect_silence();
    message(&mut t, 5, 4);
    send!(t, "A", ack = 1061);
    t.write(10);
    send!(t, "PA", seq = 1041, ack = 1061, len = 10);
    message(&mut t, 6, 5);
    send!(t, "A", ack = 1071);
}

#[test]
fn a_push_behind_a_gap_does_not_hide_one_before_it() {
    let mut t = settled();
    t.input(seg!("PA", seq = 1001, ack = 1001, len = 100));
    assert!(t.tcb.is_pushed());
    t.input(seg!("PA", seq = 2001, ack = 1001, len = 100));
    assert!(t.tcb.is_pushed(), "the in-order bytes are still all that was pushed");
    t.input(seg!("A", seq = 1101, ack = 1001, len = 900));
    assert!(t.tcb.is_pushed(), "the gap is filled: up to the later push");
    t.input(seg!("A", seq = 2101, ack = 1001, len = 100));
    assert!(!t.tcb.is_pushed());
    t.output();
    assert_eq!(t.read(5000), 1200);
}

#[test]
fn out_of_order_data_is_reported_at_once_latest_first() {
    let mut t = settled();
    recv!(t, "A", seq = 2001, ack = 1001, len = 100);
    send!(t, "A", ack = 1001, sack = vec![(2001, 2101)]);
    recv!(t, "A", seq = 3001, ack = 1001, len = 100);
    send!(t, "A", ack = 1001, sack = vec![(3001, 3101), (2001, 2101)]);
    recv!(t, "A", seq = 2101, ack = 1001, len = 100);
    send!(t, "A", ack = 1001, sack = vec![(2001, 2201), (3001, 3101)]);
    recv!(t, "A", seq = 1001, ack = 1001, len = 1000);
    send!(t, "A", ack = 2201, sack = vec![(3001, 3101)]);
    assert_eq!(t.count(Counter::TcpOutOfOrderBytes), 300);
    recv!(t, "A", seq = 2201, ack = 1001, len = 800);
    send!(t, "A", ack = 3101, sack = vec![]);
    assert_eq!(t.read(5000), 2100);
}

#[test]
fn duplicates_are_acknowledged_and_counted_and_their_new_bytes_accepted() {
    let mut t = settled();
    recv!(t, "A", seq = 1, ack = 1001, len = 1000);
    send!(t, "A", ack = 1001);
    assert_eq!(t.drops(DropReason::TcpDuplicate), 1);
    recv!(t, "A", seq = 501, ack = 1001, len = 1000);
    send!(t, "A", ack = 1501);
    assert_eq!(t.read(5000), 500);
    assert_eq!(t.drops(DropReason::TcpDuplicate), 1);
}

#[test]
fn data_beyond_the_window_is_trimmed_or_dropped() {
    let mut t = settled_with(Config { recv_buffer_bytes: 4000, ..plain() });
    let edge = 1001 + 4000;
    recv!(t, "A", seq = edge, ack = 1001, len = 10);
    send!(t, "A", ack = 1001);
    assert_eq!(t.drops(DropReason::TcpOutOfWindow), 1);
    recv!(t, "FA", seq = 1001, ack = 1001, len = 4500);
    send!(t, "A", ack = edge, win = 0);
    assert_eq!(t.tcb.state(), State::Established); // the FIN was cut off too
    assert_eq!(t.tcb.recv_queue().readable(), 4000);
}

#[test]
fn the_window_closes_with_unread_bytes_and_opens_in_large_steps() {
    let mut t = settled_with(Config { recv_buffer_bytes: 8000, ..plain() });
    recv!(t, "A", seq = 1001, ack = 1001, len = 4000);
    recv!(t, "A", seq = 5001, ack = 1001, len = 4000);
    send!(t, "A", ack = 5001, win = 4000);
    send!(t, "A", ack = 9001, win = 0);
    assert_eq!(t.read(500), 500);
    t.expect_silence(); // silly window avoidance
    assert_eq!(t.read(1500), 1500);
    send!(t, "A", ack = 9001, win = 2000);
    assert_eq!(t.read(10_000), 6000);
}

#[test]
fn a_window_probe_is_answered_and_its_byte_discarded() {
    let mut t = settled_with(Config { recv_buffer_bytes: 4000, ..plain() });
    recv!(t, "A", seq = 1001, ack = 1001, len = 4000);
    t.out.segs.clear();
    recv!(t, "A", seq = 5001, ack = 1001, len = 1);
    send!(t, "A", ack = 5001, win = 0);
    recv!(t, "A", seq = 5000, ack = 1001);
    send!(t, "A", ack = 5001, win = 0);
    assert_eq!(t.tcb.recv_queue().readable(), 4000);
}

#[test]
fn the_advertised_window_never_shrinks() {
    let mut t = settled();
    t.window.limit_bytes = 0;
    recv!(t, "A", seq = 1001, ack = 1001, len = 2000);
    // 65535 were advertised from 1001 on: the right edge stays.
    send!(t, "A", ack = 3001, win = 63_535);
    t.tcb.set_recv_buffer(4000);
    recv!(t, "A", seq = 3001, ack = 1001, len = 2000);
    send!(t, "A", ack = 5001, win = 61_535);
}

#[test]
fn the_budget_limits_windows_but_guarantees_a_minimum() {
    let mut t = Trace::passive(plain(), seg!("S", seq = 0, mss = Some(1000)));
    t.window = WindowBudget::new(10_000);
    t.output();
    send!(t, "SA", win = 10_000);
    // The SYN may be spoofed: the window is charged once the peer answers.
    assert_eq!(t.window.granted_bytes, 0);
    recv!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.window.granted_bytes, 10_000);
    let mut t = Trace::passive(plain(), seg!("S", seq = 0, mss = Some(1000)));
    t.window = WindowBudget { limit_bytes: 10_000, granted_bytes: 10_000 };
    t.output();
    send!(t, "SA", win = 4000);
    t.window.granted_bytes -= 10_000;
}

#[test]
fn windows_are_scaled_both_ways() {
    let mut t = Trace::connect(Config { timestamps: false, ..Config::default() });
    t.output();
    send!(t, "S", win = 65_535, scale = Some(9));
    recv!(t, "SA", ack = 1, win = 1000, scale = Some(4), mss = Some(1000));
    send!(t, "A", win = 2048);
    assert_eq!(t.tcb.info().snd_wnd_bytes, 1000);
    recv!(t, "A", seq = 1, ack = 1, win = 1000);
    assert_eq!(t.tcb.info().snd_wnd_bytes, 16_000);
}

#[test]
fn the_initial_window_is_ten_segments_and_grows_by_what_is_acknowledged() {
    let mut t = Trace::established();
    t.write(40_000);
    assert_eq!(t.out.segs.len(), 10);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 2001);
    assert_eq!(t.out.segs.len(), 4);
    assert_eq!(t.tcb.info().cwnd_bytes, 12_000);
}

#[test]
fn cwnd_does_not_grow_unless_the_sender_is_cwnd_limited() {
    let mut t = Trace::established();
    for i in 0..20 {
        t.write(1000);
        recv!(t, "A", seq = 1, ack = 1 + (i + 1) * 1000);
    }
    assert_eq!(t.tcb.info().cwnd_bytes, 10_000);
}

#[test]
fn cwnd_restarts_after_an_idle_timeout() {
    let mut t = Trace::established();
    t.write(40_000);
    let mut acked = 1;
    while acked < 40_001 {
        acked += 2000;
        recv!(t, "A", seq = 1, ack = acked);
    }
    assert!(t.tcb.info().cwnd_bytes > 20_000);
    t.out.segs.clear();
    t.wait(1000);
    t.write(30_000);
    assert_eq!(t.out.segs.len(), 10);
}

#[test]
fn nagle_holds_a_second_small_segment_until_the_first_is_acknowledged() {
    let mut t = Trace::established();
    t.write(10);
    send!(t, "PA", seq = 1, len = 10);
    t.write(10);
    t.write(10);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 11);
    send!(t, "PA", seq = 11, len = 20);
    t.write(1500);
    send!(t, "A", seq = 31, len = 1000); // a full one may always go
    t.expect_silence();
}

#[test]
fn nodelay_sends_small_segments_at_once() {
    let mut t = Trace::established_with(Config { nodelay: true, ..plain() });
    t.write(10);
    t.write(10);
    send!(t, "PA", seq = 1, len = 10);
    send!(t, "PA", seq = 11, len = 10);
}

#[test]
fn the_tail_of_a_single_message_is_not_held_back() {
    let mut t = Trace::established();
    t.write(5100);
    assert_eq!(t.out.segs.len(), 6);
    assert_eq!(t.out.segs.back().unwrap().len, 100);
}

#[test]
fn the_tail_of_a_stream_waits_for_an_acknowledgement_that_is_sure_to_come() {
    let mut t = Trace::established();
    t.write(3000);
    t.out.segs.clear();
    t.write(1100);
    send!(t, "A", seq = 3001, len = 1000);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 3001); // one segment left in flight: it may be delayed
    send!(t, "PA", seq = 4001, len = 100);
}

#[test]
fn nodelay_releases_what_a_cork_holds_and_the_cork_stays() {
    let mut t = Trace::established();
    t.tcb.set_cork(true);
    t.write(80);
    t.expect_silence();
    t.tcb.set_nodelay(true);
    t.output();
    send!(t, "AP", seq = 1, len = 80);
    t.write(80);
    t.expect_silence();
}

#[test]
fn cork_holds_a_partial_segment_until_uncorked_or_200_ms() {
    let mut t = Trace::established_with(Config { nodelay: true, ..plain() });
    t.tcb.set_cork(true);
    t.write(1500);
    send!(t, "A", seq = 1, len = 1000);
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 1001);
    t.wait(199);
    t.expect_silence();
    t.wait(1);
    send!(t, "PA", seq = 1001, len = 500);
    t.write(10);
    t.expect_silence();
    t.tcb.set_cork(false);
    t.output();
    send!(t, "PA", seq = 1501, len = 10);
}

fn with_tso() -> Trace {
    let mut t = Trace::established();
    t.path.tso_bytes = Some(65_535);
    t
}

#[test]
fn a_super_segment_is_whole_segments_or_empties_the_queue() {
    let mut t = with_tso();
    t.write(9500);
    send!(t, "PA", seq = 1, len = 9500, gso = Some(1000));
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 9501);
    t.write(40_500);
    send!(t, "A", seq = 9501, gso = Some(1000), len = 19_000);
}

#[test]
fn a_super_segment_never_carries_fin() {
    let mut t = with_tso();
    t.queue(5000);
    t.shutdown();
    send!(t, "PA", seq = 1, len = 5000, gso = Some(1000));
    send!(t, "FA", seq = 5001, len = 0, gso = None);
}

#[test]
fn a_small_usable_window_defers_a_large_super_segment() {
    let mut t = with_tso();
    t.write(40_000);
    send!(t, "A", seq = 1, len = 10_000);
    recv!(t, "A", seq = 1, ack = 1001); // 2 of 11 segments free: less than a quarter
    t.expect_silence();
    recv!(t, "A", seq = 1, ack = 2001);
    send!(t, "A", seq = 10_001, len = 4000, gso = Some(1000));
}

#[test]
fn data_reports_sack_blocks_with_an_ack_that_is_due_and_then_goes_as_super_segments() {
    let mut t = with_tso();
    t.queue(4960);
    recv!(t, "A", seq = 2001, ack = 1, len = 100);
    send!(t, "A", seq = 1, len = 960, gso = None, sack = vec![(2001, 2101)]);
    send!(t, "PA", seq = 961, len = 4000, gso = Some(1000), sack = vec![]);
    // The gap stays open for as long as the peer likes.
    t.write(3000);
    send!(t, "PA", seq = 4961, len = 3000, gso = Some(1000), sack = vec![]);
    recv!(t, "A", seq = 2101, ack = 7961, len = 1);
    send!(t, "A", seq = 7961, ack = 1, len = 0, sack = vec![(2001, 2102)]);
}

#[test]
fn a_payload_of_very_many_mbufs_is_linearized() {
    let mut t = Trace::established_with(Config { nodelay: true, ..plain() });
    (0..500).for_each(|_| t.queue(1));
    t.output();
    send!(t, "PA", len = 500);
}

#[test]
fn a_closed_window_is_probed_with_backoff_for_as_long_as_the_peer_answers() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, len = 1, win = 0);
    t.out.segs.clear();
    t.write(5000);
    t.expect_silence();
    for (i, ms) in [201, 400, 800, 1600, 3200].into_iter().enumerate() {
        t.wait(ms);
        send!(t, "A", seq = 0, len = 0);
        t.expect_silence();
        recv!(t, "A", seq = 2, ack = 1, win = 0);
        assert_eq!(t.count(Counter::TcpWindowProbes), i as u64 + 1);
    }
    for _ in 0..20 {
        t.wait(60_000);
        recv!(t, "A", seq = 2, ack = 1, win = 0);
    }
    assert_eq!(t.tcb.state(), State::Established);
    t.out.segs.clear();
    recv!(t, "A", seq = 2, ack = 1, win = 3000);
    assert_eq!(t.out.segs.len(), 3);
}

#[test]
fn a_peer_that_does_not_answer_probes_times_out() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, len = 1, win = 0);
    t.write(5000);
    t.wait(300_000);
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
}

#[test]
fn an_orphan_with_a_closed_window_times_out() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, win = 0, len = 1);
    t.read(1);
    t.write(5000);
    t.close();
    for _ in 0..40 {
        t.wait(10_000);
        recv!(t, "A", seq = 2, ack = 1, win = 0);
    }
    assert!(t.tcb.is_closed());
}

#[test]
fn a_window_smaller_than_a_segment_is_used_when_the_override_timer_expires() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, len = 1, win = 300);
    t.out.segs.clear();
    t.write(5000);
    t.expect_silence();
    t.wait(201);
    send!(t, "A", seq = 1, len = 300);
    t.expect_silence();
}

#[test]
fn the_peer_may_shrink_its_window_below_the_flight() {
    let mut t = Trace::established();
    t.write(5000);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 1, len = 1, win = 100);
    t.wait(201);
    t.out.segs.retain(|s| s.len > 0);
    send!(t, "A", seq = 1, len = 1000);
    recv!(t, "A", seq = 2, ack = 5001, win = 9000);
    t.write(100);
    t.out.segs.retain(|s| s.len > 0);
    send!(t, "PA", seq = 5001, len = 100);
}

#[test]
fn an_old_timestamp_is_dropped_and_answered() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    recv!(t, "A", seq = 1, ack = 1, len = 10, ts = Some((499, 1000)));
    send!(t, "A", ack = 1, ts = Some((1000, 500)));
    assert_eq!(t.drops(DropReason::TcpPaws), 1);
    recv!(t, "A", seq = 1, ack = 1, len = 10, ts = Some((500, 1000)));
    send!(t, "A", ack = 11);
}

#[test]
fn segments_without_the_timestamps_that_were_negotiated_are_taken() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    t.write(10);
    send!(t, "PA", seq = 1, len = 10, ts = Some((1000, 500)));
    recv!(t, "PA", seq = 1, ack = 11, len = 10, ts = None);
    assert_eq!((t.read(100), t.drops(DropReason::TcpPaws)), (10, 0));
    send!(t, "A", ack = 11, ts = Some((1000, 500))); // ours have them all the same
    recv!(t, "FA", seq = 11, ack = 11, ts = None);
    assert!(t.tcb.peer_closed());
}

#[test]
fn tsecr_is_that_of_the_segment_that_advanced_rcv_nxt() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    recv!(t, "A", seq = 101, ack = 1, len = 10, ts = Some((700, 1000)));
    send!(t, "A", ack = 1, ts = Some((1000, 500))); // behind a hole: not taken
    recv!(t, "A", seq = 1, ack = 1, len = 100, ts = Some((600, 1000)));
    send!(t, "A", ack = 111, ts = Some((1000, 600)));
}

#[test]
fn a_ts_recent_24_days_old_is_invalid() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    t.now = t.now + Duration::from_secs(25 * 24 * 3600);
    recv!(t, "A", seq = 1, ack = 1, len = 10, ts = Some((3, 1000)));
    assert_eq!(t.tcb.recv_queue().readable(), 10);
}

#[test]
fn urgent_data_stays_in_line() {
    let mut t = settled();
    recv!(t, "UA", seq = 1001, ack = 1001, len = 10, urgent = 5);
    assert!(t.events.contains(Events::URGENT | Events::READABLE));
    assert_eq!(t.read(100), 10);
}

#[test]
fn a_vanished_peer_fails_the_connection_after_the_user_timeout() {
    let mut t =
        Trace::established_with(Config { user_timeout: Duration::from_secs(30), ..plain() });
    t.write(10);
    let written = t.now;
    while t.tcb.send_error().is_none() {
        t.wait(1000);
        assert!(t.now < Instant::from_millis(100_000));
    }
    assert!((29..=31).contains(&t.now.since(written).as_secs()), "{:?}", t.now.since(written));
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    assert!(t.events.contains(Events::ERROR | Events::CLOSED));
}

#[test]
fn writable_is_reported_while_a_third_of_the_buffer_is_free() {
    let mut t = Trace::established_with(Config { send_buffer_bytes: 9000, ..plain() });
    t.write(9000);
    recv!(t, "A", seq = 1, ack = 1001);
    assert!(!t.events.contains(Events::WRITABLE));
    recv!(t, "A", seq = 1, ack = 4001);
    assert!(t.events.contains(Events::WRITABLE));
}

#[test]
fn output_stops_at_a_full_transmit_queue_and_resumes_later() {
    let mut t = Trace::established();
    t.out.room = 3;
    t.queue(5000);
    assert_eq!(t.pass(), Sent::More);
    assert_eq!(t.out.segs.len(), 3);
    assert!(t.tcb.wants_output());
    t.out.room = 10;
    t.output();
    assert_eq!(t.out.segs.len(), 5);
    assert_eq!(t.out.segs.back().unwrap().seq, 4001);
}

#[test]
fn one_byte_segments_do_not_pin_a_buffer_each() {
    let mut t = settled();
    for i in 0..5000u32 {
        t.input(seg!("A", seq = 1001 + i, ack = 1001, len = 1));
    }
    assert_eq!(t.tcb.recv_queue().readable(), 5000);
    // Twenty blocks of 256 bytes with their descriptors.
    assert!(t.tcb.recv_queue().storage_bytes() <= 20 * 1024);
    assert_eq!(t.read(9000), 5000);
}

#[test]
fn storage_is_bounded_when_every_byte_pins_a_buffer() {
    let mut t = Trace::established_with(Config { recv_buffer_bytes: 8192, ..plain() });
    for i in 0..2000u32 {
        t.input(seg!("A", seq = 3 + 2 * i, ack = 1, len = 1));
    }
    t.output();
    assert!(t.tcb.recv_queue().storage_bytes() <= 2 * 8192);
    assert!(t.drops(DropReason::TcpReassemblyFull) > 1000);
    recv!(t, "A", seq = 1, ack = 1, len = 2);
    assert!(t.tcb.recv_queue().readable() > 2);
}
