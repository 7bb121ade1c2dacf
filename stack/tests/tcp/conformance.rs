//! Conformance to RFC 9293 and the RFCs that amend it: which segment may change which state.

use super::support::*;
use fulmar_stack::base::{Counter, DropReason, Duration};
use fulmar_stack::tcp::*;

#[test]
fn a_segment_whose_acknowledgement_is_refused_does_not_move_the_timestamp() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    recv!(t, "A", seq = 1, ack = 99_999, len = 10, ts = Some((0x7000_0000, 1000)));
    send!(t, "A", seq = 1, ack = 1, ts = Some((1000, 500)));
    assert_eq!(t.drops(DropReason::TcpBadAck), 1);
    recv!(t, "A", seq = 1, ack = 1, len = 10, ts = Some((501, 1000)));
    send!(t, "A", ack = 11, ts = Some((1000, 501)));
    assert_eq!((t.read(100), t.drops(DropReason::TcpPaws)), (10, 0));
}

#[test]
fn an_entirely_old_segment_does_not_move_the_timestamp() {
    let mut t = Trace::established_with(Config { timestamps: true, ..plain() });
    recv!(t, "PA", seq = 1, ack = 1, len = 100, ts = Some((501, 1000)));
    t.wait(300);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 1, len = 1, ts = Some((0x7000_0000, 1000)));
    t.out.segs.clear();
    recv!(t, "A", seq = 101, ack = 1, len = 10, ts = Some((502, 1000)));
    assert_eq!((t.read(1000), t.drops(DropReason::TcpPaws)), (110, 0));
    // One that reaches Last.ACK.sent repeats what we acknowledged last: our ACK was lost.
    t.wait(300);
    t.out.segs.clear();
    recv!(t, "A", seq = 101, ack = 1, len = 10, ts = Some((900, 1000)));
    send!(t, "A", ack = 111, ts = Some((1600, 900)));
}

#[test]
fn a_segment_older_than_any_window_is_challenged_and_its_acknowledgement_ignored() {
    let mut t = Trace::established();
    t.write(1000);
    t.out.segs.clear();
    let old = 1_u32.wrapping_sub(65_536);
    recv!(t, "A", seq = old, ack = 1001, len = 1);
    send!(t, "A", seq = 1001, ack = 1);
    assert_eq!(t.drops(DropReason::TcpOutOfWindow), 1);
    assert_eq!(t.tcb.info().acked_bytes, 0);
    recv!(t, "A", seq = old + 1, ack = 1001, len = 1);
    assert_eq!(t.tcb.info().acked_bytes, 1000);
}

#[test]
fn a_syn_with_the_acknowledgement_ends_no_passive_handshake() {
    let mut t = Trace::passive(plain(), seg!("S", mss = Some(1000)));
    t.output();
    t.out.segs.clear();
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000));
    assert_eq!(t.tcb.state(), State::SynReceived);
    recv!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn a_refused_acknowledgement_in_syn_received_does_not_move_the_timestamp() {
    let cfg = Config { timestamps: true, ..plain() };
    let mut t = Trace::passive(cfg, Seg { ts: Some((500, 0)), ..seg!("S", mss = Some(1000)) });
    t.output();
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 77, ts = Some((0x7000_0000, 1000)));
    send!(t, "R", seq = 77);
    recv!(t, "A", seq = 1, ack = 1, ts = Some((500, 1000)));
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn the_mss_option_follows_the_route_and_not_a_learned_path_mtu() {
    let mut t = Trace::connect(plain());
    t.path.mtu = 600;
    t.output();
    send!(t, "S", mss = Some(1000));
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000));
    assert_eq!(t.tcb.info().mss_bytes, 560);
}

#[test]
fn a_lost_syn_leaves_a_timeout_of_three_seconds_for_data() {
    let mut t = Trace::connect(plain());
    t.output();
    t.wait(1000);
    t.out.segs.clear();
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000));
    t.out.segs.clear();
    t.write(10);
    send!(t, "PA", seq = 1, len = 10);
    t.wait(2999);
    t.expect_silence();
    t.wait(1);
    send!(t, "PA", seq = 1, len = 10);
}

#[test]
fn a_lost_syn_ack_leaves_a_timeout_of_three_seconds_for_data() {
    let mut t = Trace::passive(plain(), seg!("S", mss = Some(1000)));
    t.output();
    t.wait(1000);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 1);
    t.write(10);
    send!(t, "PA", seq = 1, len = 10);
    t.wait(2999);
    t.expect_silence();
    t.wait(1);
    send!(t, "PA", seq = 1, len = 10);
}

/// The SYN of an active or a passive open is sent at 0, 1, 3 and 7 s; 50 ms later the peer's answer to the first
/// (0) to fourth (3) of them is there.
fn answered(passive: bool, which: usize) -> Trace {
    let cfg = Config { timestamps: true, ..plain() };
    let syn = seg!("S", mss = Some(1000), ts = Some((500, 0)));
    let mut t = if passive { Trace::passive(cfg, syn) } else { Trace::connect(cfg) };
    t.output();
    t.wait(7050);
    let stamps: Vec<_> = t.out.segs.drain(..).map(|s| s.ts.unwrap().0).collect();
    assert_eq!(stamps.len(), 4);
    let ts = Some((501, stamps[which]));
    t.recv(match passive {
        true => seg!("A", seq = 1, ack = 1, ts = ts),
        false => seg!("SA", ack = 1, mss = Some(1000), ts = ts),
    });
    t.out.segs.clear();
    t
}

#[test]
fn an_answer_to_the_last_of_several_syns_gives_an_rtt_sample() {
    for passive in [true, false] {
        let rtt = answered(passive, 3).tcb.info().rtt;
        assert_eq!(rtt, Duration::from_millis(50), "passive {passive}");
    }
}

#[test]
fn an_answer_that_echoes_an_earlier_syn_gives_no_rtt_sample_but_three_seconds_for_data() {
    // Of the first copy that arrived, if the peer repeats an answer that was lost or refused: it came 7 s later.
    for (passive, which) in [(true, 0), (true, 2), (false, 0), (false, 2)] {
        let info = answered(passive, which).tcb.info();
        assert_eq!((info.rtt, info.rto), (Duration::ZERO, Duration::from_secs(3)), "{which}");
    }
}

#[test]
fn a_second_lost_syn_reduces_the_initial_window_and_the_first_does_not() {
    for (lost, cwnd) in [(1, 10_000), (2, 1000)] {
        let mut t = Trace::connect(plain());
        t.output();
        for n in 0..lost {
            t.wait(1000 << n);
        }
        t.out.segs.clear();
        recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000));
        assert_eq!(t.tcb.info().cwnd_bytes, cwnd, "{lost} lost");
    }
}

#[test]
fn a_bare_fin_behind_a_gap_is_acknowledged_at_once() {
    let mut t = Trace::established();
    recv!(t, "FA", seq = 101, ack = 1);
    send!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.tcb.state(), State::Established);
    recv!(t, "A", seq = 1, ack = 1, len = 100);
    send!(t, "A", ack = 102);
    assert_eq!(t.tcb.state(), State::CloseWait);
}

#[test]
fn a_reset_at_the_right_edge_is_outside_of_the_window() {
    let mut t = Trace::established();
    let edge = 1 + 65_535;
    recv!(t, "R", seq = edge);
    t.expect_silence();
    assert_eq!(t.drops(DropReason::TcpOutOfWindow), 1);
    recv!(t, "R", seq = edge - 1);
    send!(t, "A", seq = 1, ack = 1);
    assert_eq!(t.drops(DropReason::TcpBlindReset), 1);
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn a_reset_at_rcv_nxt_is_valid_while_the_window_is_closed() {
    let mut t = Trace::established_with(Config { recv_buffer_bytes: 4000, ..plain() });
    recv!(t, "A", seq = 1, ack = 1, len = 4000);
    send!(t, "A", ack = 4001, win = 0);
    recv!(t, "R", seq = 4002);
    assert_eq!(t.tcb.state(), State::Established);
    recv!(t, "R", seq = 4001);
    assert_eq!(t.tcb.take_error(), Some(ConnError::Reset));
}

#[test]
fn a_reset_in_syn_sent_carries_no_option_that_was_not_negotiated() {
    let mut t = Trace::connect(Config::default());
    t.output();
    t.out.segs.clear();
    recv!(t, "A", seq = 0, ack = 77, ts = Some((9, 1000)));
    send!(t, "R", seq = 77, ts = None);
}

/// TIME-WAIT with the socket still open. Our FIN and the peer's are position 1.
fn time_wait(timestamps: bool) -> Trace {
    let mut t = Trace::established_with(Config { timestamps, ..plain() });
    t.shutdown();
    recv!(t, "FA", seq = 1, ack = 2, ts = timestamps.then_some((500, 1000)));
    t.out.segs.clear();
    assert_eq!(t.tcb.state(), State::TimeWait);
    t
}

#[test]
fn time_wait_of_an_open_socket_answers_segments_in_sequence_space_but_no_reset() {
    let mut t = time_wait(false);
    recv!(t, "FA", seq = 1, ack = 2);
    send!(t, "A", seq = 2, ack = 2);
    recv!(t, "A", seq = 2, ack = 2, len = 10);
    send!(t, "A", seq = 2, ack = 2);
    recv!(t, "FA", seq = 2, ack = 2);
    send!(t, "A", seq = 2, ack = 2);
    recv!(t, "A", seq = 2, ack = 2);
    t.expect_silence();
    // An ACK would elicit the next reset.
    recv!(t, "R", seq = 2);
    t.expect_silence();
    assert_eq!(t.tcb.state(), State::TimeWait);
}

#[test]
fn only_a_syn_that_may_open_a_connection_ends_time_wait() {
    let mut t = time_wait(true);
    let now = t.now;
    let syn = |letters: &str, seq, ts| {
        header(&Seg { flags: flags(letters), seq, ts: Some((ts, 0)), ..Seg::default() })
    };
    // An old one, a SYN,ACK, a SYN with a reset.
    for refused in [syn("S", 1, 400), syn("SA", 9000, 900), syn("SR", 9000, 900)] {
        assert!(t.tcb.leave_time_wait(now, &refused).is_none());
        assert_eq!(t.tcb.state(), State::TimeWait);
    }
    let expires = t.tcb.next_deadline();
    t.wait(10_000);
    let now = t.now;
    let entry = t.tcb.leave_time_wait(now, &syn("S", 9000, 900)).unwrap();
    assert_eq!((Some(entry.expires()), t.tcb.state()), (expires, State::Closed));
    assert!(t.tcb.leave_time_wait(now, &syn("S", 9000, 900)).is_none());
}

#[test]
fn only_the_peers_own_fin_restarts_time_wait() {
    let mut t = time_wait(true);
    let first = t.tcb.next_deadline();
    t.wait(10_000);
    recv!(t, "FA", seq = 0u32.wrapping_sub(5000), ack = 2, ts = Some((500, 1000)));
    recv!(t, "FA", seq = 1, ack = 99_999, ts = Some((500, 1000)));
    recv!(t, "FA", seq = 1, ack = 2, ts = Some((499, 1000)));
    recv!(t, "FA", seq = 2, ack = 2, ts = Some((500, 1000)));
    assert_eq!(t.tcb.next_deadline(), first);
    recv!(t, "FA", seq = 1, ack = 2, ts = Some((500, 1000)));
    assert!(t.tcb.next_deadline() > first);
}

#[test]
fn data_that_arrives_after_close_is_answered_with_a_reset_in_fin_wait_2() {
    let mut t = Trace::established();
    t.close();
    send!(t, "FA", seq = 1, ack = 1);
    recv!(t, "A", seq = 1, ack = 2);
    recv!(t, "A", seq = 1, ack = 2, len = 10);
    send!(t, "RA", seq = 2);
    assert!(t.tcb.is_closed());
}

#[test]
fn an_acknowledgement_of_data_never_sent_is_answered_and_changes_nothing() {
    let mut t = Trace::established();
    t.write(100);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 102, len = 10, win = 7);
    send!(t, "A", seq = 101, ack = 1);
    let info = t.tcb.info();
    assert_eq!((info.in_flight_bytes, info.snd_wnd_bytes, t.read(100)), (100, 50_000, 0));
    assert_eq!(t.count(Counter::TcpChallengeAcks), 1);
}

#[test]
fn forged_segments_do_not_silence_the_answers_to_probes() {
    let mut t = Trace::established();
    for _ in 0..20 {
        recv!(t, "A", seq = 0x4000_0000, ack = 1);
    }
    assert_eq!(t.count(Counter::TcpChallengeAcks), 10);
    t.out.segs.clear();
    for _ in 0..10 {
        recv!(t, "A", seq = 0, ack = 1);
        send!(t, "A", seq = 1, ack = 1);
    }
    recv!(t, "A", seq = 0, ack = 1);
    t.expect_silence();
    t.wait(1000);
    recv!(t, "A", seq = 0, ack = 1);
    send!(t, "A", seq = 1, ack = 1);
}

#[test]
fn the_ack_of_a_zero_window_probe_is_processed() {
    let mut t = Trace::established_with(Config { recv_buffer_bytes: 4000, ..plain() });
    t.write(100);
    recv!(t, "A", seq = 1, ack = 1, len = 4000);
    recv!(t, "UA", seq = 4001, ack = 101, len = 1, urgent = 1);
    assert_eq!(t.tcb.info().in_flight_bytes, 0);
    assert!(t.events.contains(Events::URGENT));
    assert_eq!(t.read(5000), 4000);
}

#[test]
fn a_syn_inside_the_window_is_challenged_and_its_data_discarded() {
    let mut t = Trace::established();
    recv!(t, "SA", seq = 1, ack = 1, len = 10);
    send!(t, "A", seq = 1, ack = 1);
    recv!(t, "S", seq = 30_000);
    send!(t, "A", seq = 1, ack = 1);
    assert_eq!((t.read(100), t.drops(DropReason::TcpBlindSyn)), (0, 2));
}
