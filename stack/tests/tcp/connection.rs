//! Connection states (RFC 9293): opening, closing, resetting.

use super::support::{self, *};
use fulmar_stack::base::{Counter, DropReason, Duration};
use fulmar_stack::tcp::*;

#[test]
fn an_active_open_sends_syn_and_acknowledges_the_answer() {
    let mut t = Trace::connect(Config::default());
    t.output();
    send!(t, "S", seq = 0, mss = Some(1000), scale = Some(9), sack_ok = true, win = 65_535);
    t.expect_silence();
    recv!(
        t,
        "SA",
        seq = 0,
        ack = 1,
        mss = Some(1200),
        scale = Some(7),
        sack_ok = true,
        ts = Some((9, 1000))
    );
    assert!(t.events.contains(Events::CONNECTED));
    send!(t, "A", seq = 1, ack = 1, ts = Some((1000, 9)));
    assert_eq!(t.tcb.state(), State::Established);
    assert_eq!(t.tcb.info().mss_bytes, 988); // the path's 1000 less timestamps
    assert_eq!(t.tcb.info().snd_wnd_bytes, 50_000); // a SYN's window is not scaled
    assert_eq!(t.count(Counter::TcpActiveOpens), 1);
}

#[test]
fn a_passive_open_answers_only_the_options_that_were_offered() {
    let mut t = Trace::passive(Config::default(), seg!("S", seq = 0, mss = Some(600)));
    t.output();
    send!(t, "SA", seq = 0, ack = 1, scale = None, sack_ok = false, ts = None);
    recv!(t, "A", seq = 1, ack = 1, win = 1000);
    assert!(t.events.contains(Events::CONNECTED));
    assert_eq!(t.tcb.state(), State::Established);
    assert_eq!(t.tcb.info().mss_bytes, 600);
    assert_eq!(t.count(Counter::TcpPassiveOpens), 1);
}

#[test]
fn the_last_ack_of_a_handshake_may_lack_the_timestamps() {
    let cfg = Config { timestamps: true, ..plain() };
    let mut t = Trace::passive(cfg, seg!("S", seq = 0, ts = Some((9, 0))));
    t.output();
    send!(t, "SA", seq = 0, ack = 1, ts = Some((1000, 9)));
    recv!(t, "A", seq = 1, ack = 1, ts = None);
    assert_eq!((t.tcb.state(), t.drops(DropReason::TcpPaws)), (State::Established, 0));
    recv!(t, "PA", seq = 1, ack = 1, len = 10, ts = None);
    assert_eq!(t.read(100), 10);
}

#[test]
fn a_peer_without_mss_option_gets_536_bytes() {
    let mut t = Trace::passive(plain(), seg!("S", seq = 0));
    t.output();
    recv!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.tcb.info().mss_bytes, 536);
}

#[test]
fn a_tiny_mss_option_does_not_force_tiny_segments() {
    let t = Trace::passive(Config::default(), seg!("S", seq = 0, mss = Some(1), ts = Some((1, 0))));
    assert_eq!(t.tcb.info().mss_bytes, 76);
}

#[test]
fn a_syn_is_retransmitted_with_backoff_and_then_times_out() {
    let mut t = Trace::connect(Config { syn_retries: 2, ..plain() });
    t.output();
    send!(t, "S");
    t.wait(999);
    t.expect_silence();
    t.wait(1);
    send!(t, "S", seq = 0);
    t.wait(2000);
    send!(t, "S", seq = 0);
    t.wait(4000);
    t.expect_silence();
    assert!(t.events.contains(Events::ERROR | Events::CLOSED));
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    assert_eq!(t.tcb.take_error(), None);
}

#[test]
fn a_syn_ack_for_another_syn_is_answered_with_a_reset() {
    let mut t = Trace::connect(plain());
    t.output();
    send!(t, "S");
    recv!(t, "SA", seq = 0, ack = 77);
    send!(t, "R", seq = 77);
    assert_eq!(t.tcb.state(), State::SynSent);
    assert_eq!(t.drops(DropReason::TcpBadAck), 1);
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000));
    send!(t, "A", seq = 1, ack = 1);
}

#[test]
fn a_reset_refuses_only_if_it_acknowledges_our_syn() {
    let mut t = Trace::connect(plain());
    t.output();
    send!(t, "S");
    recv!(t, "R", seq = 0);
    recv!(t, "RA", seq = 0, ack = 9);
    assert_eq!(t.tcb.state(), State::SynSent);
    recv!(t, "RA", seq = 0, ack = 1);
    assert_eq!(t.tcb.take_error(), Some(ConnError::Refused));
    assert!(t.tcb.is_closed());
    t.expect_silence();
}

#[test]
fn simultaneous_open_establishes_one_connection() {
    let mut t = Trace::connect(plain());
    t.output();
    send!(t, "S", seq = 0);
    recv!(t, "S", seq = 0, mss = Some(1000), sack_ok = true);
    send!(t, "SA", seq = 0, ack = 1);
    assert_eq!(t.tcb.state(), State::SynReceived);
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000), sack_ok = true);
    assert_eq!(t.tcb.state(), State::Established);
    assert!(t.events.contains(Events::CONNECTED));
    t.write(100);
    send!(t, "PA", seq = 1, ack = 1, len = 100);
}

#[test]
fn a_retransmitted_syn_gets_the_syn_ack_again() {
    let mut t = Trace::passive(plain(), seg!("S", seq = 0));
    t.output();
    send!(t, "SA", seq = 0, ack = 1);
    recv!(t, "S", seq = 0);
    send!(t, "SA", seq = 0, ack = 1);
    t.expect_silence();
}

#[test]
fn a_retransmitted_syn_restarts_the_retransmission_timer() {
    let mut t = Trace::passive(Config { syn_retries: 1, ..plain() }, seg!("S", seq = 0));
    t.output();
    send!(t, "SA", seq = 0, ack = 1);
    t.wait(1_000);
    send!(t, "SA", seq = 0, ack = 1);
    // The connection would fail two seconds later.
    t.wait(1_990);
    recv!(t, "S", seq = 0);
    send!(t, "SA", seq = 0, ack = 1);
    t.wait(100);
    recv!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn a_syn_that_is_repeated_for_ever_does_not_keep_the_state() {
    let mut t = Trace::passive(plain(), seg!("S", seq = 0));
    t.output();
    for _ in 0..2000 {
        t.wait(150);
        recv!(t, "S", seq = 0);
    }
    assert!(t.tcb.is_closed());
}

#[test]
fn data_on_the_ack_that_completes_the_handshake_is_accepted() {
    let mut t = Trace::passive(plain(), seg!("S", seq = 0));
    t.output();
    send!(t, "SA");
    recv!(t, "PA", seq = 1, ack = 1, len = 50);
    assert!(t.events.contains(Events::CONNECTED | Events::READABLE));
    assert_eq!(t.read(100), 50);
}

#[test]
fn a_bad_acknowledgement_in_syn_received_is_reset() {
    let mut t = Trace::passive(plain(), seg!("S", seq = 0));
    t.output();
    send!(t, "SA");
    recv!(t, "A", seq = 1, ack = 500);
    send!(t, "R", seq = 500);
    assert_eq!(t.tcb.state(), State::SynReceived);
}

#[test]
fn our_close_goes_through_fin_wait_to_time_wait() {
    let mut t = Trace::established();
    t.shutdown();
    send!(t, "FA", seq = 1, ack = 1);
    assert_eq!(t.tcb.state(), State::FinWait1);
    recv!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::FinWait2);
    recv!(t, "A", seq = 1, ack = 2, len = 10);
    assert_eq!(t.read(100), 10);
    t.out.segs.clear();
    recv!(t, "FA", seq = 11, ack = 2);
    assert!(t.events.contains(Events::PEER_CLOSED | Events::CLOSED));
    send!(t, "A", seq = 2, ack = 12);
    assert_eq!(t.tcb.state(), State::TimeWait);
    assert!(t.tcb.at_eof());
    recv!(t, "FA", seq = 11, ack = 2);
    send!(t, "A", seq = 2, ack = 12);
    t.wait(60_000);
    assert!(t.tcb.is_closed());
}

#[test]
fn the_peers_close_goes_through_close_wait_and_last_ack() {
    let mut t = Trace::established();
    recv!(t, "FA", seq = 1, ack = 1);
    send!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::CloseWait);
    assert!(t.tcb.at_eof() && t.tcb.can_send());
    t.write(10);
    send!(t, "PA", seq = 1, ack = 2, len = 10);
    t.shutdown();
    send!(t, "FA", seq = 11, ack = 2);
    assert_eq!(t.tcb.state(), State::LastAck);
    recv!(t, "A", seq = 2, ack = 12);
    assert!(t.events.contains(Events::CLOSED) && t.tcb.is_closed());
    assert_eq!(t.tcb.take_error(), None);
}

#[test]
fn simultaneous_close_goes_through_closing() {
    let mut t = Trace::established();
    t.shutdown();
    send!(t, "FA", seq = 1, ack = 1);
    recv!(t, "FA", seq = 1, ack = 1);
    send!(t, "A", seq = 2, ack = 2);
    assert_eq!(t.tcb.state(), State::Closing);
    recv!(t, "A", seq = 2, ack = 2);
    assert_eq!(t.tcb.state(), State::TimeWait);
}

#[test]
fn a_fin_is_sent_with_the_last_data_and_retransmitted_with_it() {
    let mut t = Trace::established();
    t.queue(100);
    t.shutdown();
    send!(t, "FPA", seq = 1, len = 100);
    t.wait(201);
    send!(t, "FPA", seq = 1, len = 100);
    recv!(t, "A", seq = 1, ack = 101);
    t.wait(201);
    send!(t, "FA", seq = 101, len = 0);
}

#[test]
fn a_fin_waits_for_claimed_bytes_to_be_committed() {
    let mut t = Trace::established();
    let claim = t.tcb.send_queue().claim(10).unwrap();
    t.shutdown();
    t.expect_silence();
    t.tcb.send_queue().abandon(claim, &mut t.pool);
    t.output();
    send!(t, "FA", seq = 1);
}

#[test]
fn a_fin_before_missing_data_waits_for_it() {
    let mut t = Trace::established();
    recv!(t, "FA", seq = 101, ack = 1, len = 50);
    send!(t, "A", ack = 1, sack = vec![(101, 151)]);
    assert_eq!(t.tcb.state(), State::Established);
    recv!(t, "A", seq = 1, ack = 1, len = 100);
    assert!(t.events.contains(Events::PEER_CLOSED | Events::READABLE));
    send!(t, "A", ack = 152);
    assert_eq!(t.read(1000), 150);
    assert!(t.tcb.at_eof());
}

#[test]
fn closing_with_unread_data_resets() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, len = 100);
    t.out.segs.clear();
    t.close();
    send!(t, "RA", seq = 1, ack = 101);
    assert!(t.tcb.is_closed());
    assert_eq!(t.count(Counter::TcpResetsOut), 1);
}

#[test]
fn data_after_close_is_answered_with_a_reset() {
    let mut t = Trace::established();
    t.close();
    send!(t, "FA", seq = 1);
    recv!(t, "A", seq = 1, ack = 2, len = 10);
    send!(t, "RA", seq = 2);
    assert!(t.tcb.is_closed());
    assert_eq!(t.drops(DropReason::TcpAfterClose), 1);
}

#[test]
fn an_orphan_leaves_fin_wait_2_after_a_timeout() {
    let mut t = Trace::established();
    t.close();
    send!(t, "FA", seq = 1);
    recv!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::FinWait2);
    t.wait(59_999);
    assert!(!t.tcb.is_closed());
    t.wait(1);
    assert!(t.tcb.is_closed() && t.events.contains(Events::CLOSED));
}

#[test]
fn a_half_closed_connection_that_is_read_stays_in_fin_wait_2() {
    let mut t = Trace::established();
    t.shutdown();
    send!(t, "FA", seq = 1);
    recv!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.next_deadline(), None);
    recv!(t, "A", seq = 1, ack = 2, len = 10);
    assert_eq!(t.read(100), 10);
}

#[test]
fn a_connection_that_is_aborted_with_bytes_in_flight_has_no_timer() {
    let mut t = Trace::established();
    t.write(3000);
    assert!(t.tcb.next_deadline().is_some());
    t.out.segs.clear();
    t.abort();
    assert_eq!(t.sent().flags, support::flags("RA"));
    assert_eq!((t.tcb.state(), t.tcb.next_deadline()), (State::Closed, None));
    t.output();
    assert_eq!(t.tcb.next_deadline(), None);
    t.wait(200_000);
    t.expect_silence();
}

#[test]
fn abort_sends_a_reset_and_writes_fail() {
    let mut t = Trace::established();
    t.write(10);
    send!(t, "PA");
    t.abort();
    send!(t, "RA", seq = 11, ack = 1);
    assert_eq!(t.tcb.send_error(), Some(ConnError::Aborted));
}

#[test]
fn a_reset_at_rcv_nxt_ends_the_connection() {
    let mut t = Trace::established();
    recv!(t, "RA", seq = 1, ack = 1);
    assert!(t.events.contains(Events::ERROR | Events::CLOSED));
    assert_eq!(t.tcb.take_error(), Some(ConnError::Reset));
    assert_eq!(t.tcb.send_error(), Some(ConnError::Reset));
    t.expect_silence();
}

#[test]
fn a_reset_elsewhere_in_the_window_is_challenged() {
    let mut t = Trace::established();
    recv!(t, "R", seq = 2);
    send!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.drops(DropReason::TcpBlindReset), 1);
    assert_eq!(t.count(Counter::TcpChallengeAcks), 1);
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn rst_outside_window_is_dropped() {
    let mut t = Trace::established();
    recv!(t, "R", seq = 70_000);
    recv!(t, "R", seq = 0);
    t.expect_silence();
    assert_eq!(t.drops(DropReason::TcpOutOfWindow), 2);
}

#[test]
fn a_syn_on_an_established_connection_is_challenged_at_a_limited_rate() {
    let mut t = Trace::established();
    for _ in 0..50 {
        recv!(t, "S", seq = 30);
    }
    assert_eq!(t.out.segs.len(), 10);
    assert_eq!(t.drops(DropReason::TcpBlindSyn), 50);
    t.wait(1000);
    recv!(t, "S", seq = 30);
    assert_eq!(t.out.segs.len(), 11);
}

#[test]
fn an_ack_above_snd_nxt_or_far_below_snd_una_is_challenged() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 2);
    send!(t, "A", seq = 1, ack = 1);
    recv!(t, "A", seq = 1, ack = 0u32.wrapping_sub(60_000), len = 10);
    send!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.drops(DropReason::TcpBadAck), 2);
    assert_eq!(t.tcb.recv_queue().readable(), 0);
}

#[test]
fn a_segment_without_ack_is_dropped() {
    let mut t = Trace::established();
    recv!(t, "P", seq = 1, len = 10);
    assert_eq!(t.drops(DropReason::TcpBadFlags), 1);
    t.expect_silence();
}

#[test]
fn a_hard_icmp_error_refuses_an_open_but_not_an_established_connection() {
    let hard = IcmpError::Unreachable { hard: true };
    let mut t = Trace::connect(plain());
    t.output();
    t.icmp(hard, 5);
    assert_eq!(t.drops(DropReason::IcmpNoFlow), 1);
    t.icmp(hard, 0);
    assert_eq!(t.tcb.take_error(), Some(ConnError::Refused));

    let mut t = Trace::established_with(Config { user_timeout: Duration::from_secs(5), ..plain() });
    t.write(10);
    t.icmp(hard, 1);
    assert_eq!(t.tcb.state(), State::Established);
    t.wait(5000);
    assert_eq!(t.tcb.take_error(), Some(ConnError::HostUnreachable));
}

#[test]
fn failed_neighbour_resolution_aborts_an_open_but_not_an_established_connection() {
    let mut t = Trace::connect(plain());
    t.output();
    t.icmp(IcmpError::ResolutionFailed, 0);
    assert_eq!(t.tcb.state(), State::Closed);
    assert_eq!(t.tcb.take_error(), Some(ConnError::HostUnreachable));

    let mut t = Trace::established();
    t.write(10);
    t.icmp(IcmpError::ResolutionFailed, 1);
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn a_smaller_path_mtu_retransmits_everything_in_smaller_segments() {
    let mut t = Trace::established();
    t.write(2000);
    send!(t, "A", seq = 1, len = 1000);
    send!(t, "PA", seq = 1001, len = 1000);
    t.path.mtu = 640;
    t.icmp(IcmpError::TooBig { mtu: 640 }, 1);
    send!(t, "A", seq = 1, len = 600);
    send!(t, "A", seq = 601, len = 600);
    send!(t, "A", seq = 1201, len = 600);
    send!(t, "PA", seq = 1801, len = 200);
    t.expect_silence();
    // No sign of congestion.
    assert!(t.tcb.info().ssthresh_bytes > 1 << 30);
}

#[test]
fn after_shutdown_read_nothing_is_queued_and_the_window_takes_nothing_from_others() {
    let mut t = Trace::established();
    t.shutdown_read();
    recv!(t, "A", seq = 1, ack = 1, len = 1000);
    recv!(t, "A", seq = 1001, ack = 1, len = 1000);
    let last = t.out.segs.back().unwrap().clone();
    assert!((last.ack, t.window.granted_bytes) == (2001, 0) && last.win > 0);
    // Behind a gap: refused, and acknowledged at once.
    recv!(t, "A", seq = 3001, ack = 1, len = 1000);
    assert_eq!(t.out.segs.back().unwrap().ack, 2001);
    assert_eq!((t.drops(DropReason::TcpReassemblyFull), t.pool.outstanding()), (1, 0));
    recv!(t, "A", seq = 2001, ack = 1, len = 2000);
    assert_eq!((t.out.segs.back().unwrap().ack, t.pool.outstanding()), (4001, 0));
}

#[test]
fn shutdown_read_frees_what_was_not_read() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, len = 1000);
    assert_eq!(t.tcb.recv_queue().readable(), 1000);
    t.shutdown_read();
    assert_eq!(t.tcb.recv_queue().readable(), 0);
    assert_eq!((t.window.granted_bytes, t.pool.outstanding()), (0, 0));
}

#[test]
fn after_shutdown_read_reads_return_end_of_file_and_bytes_are_discarded() {
    let mut t = Trace::established();
    t.shutdown_read();
    recv!(t, "A", seq = 1, ack = 1, len = 1000);
    recv!(t, "A", seq = 1001, ack = 1, len = 1000);
    assert_eq!(t.out.segs.back().unwrap().ack, 2001);
    assert_eq!(t.tcb.recv_queue().readable(), 0);
    assert!(t.tcb.at_eof());
}
