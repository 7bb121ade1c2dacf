//! Keepalive (RFC 9293 section 3.8.4): when an idle peer is probed, and when the connection fails.

use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::{ConnError, Events, Keepalive, State};

use super::support::{Trace, plain};

const SECOND: u64 = 1000;
const IDLE: u64 = 100 * SECOND;
const INTERVAL: u64 = 10 * SECOND;

fn keepalive(count: u32) -> Option<Keepalive> {
    let (idle, interval) = (Duration::from_millis(IDLE), Duration::from_millis(INTERVAL));
    Some(Keepalive { idle, interval, count })
}

/// An idle connection that fails after `count` unanswered probes.
fn idle(count: u32) -> Trace {
    let mut t = Trace::established();
    t.tcb.set_keepalive(keepalive(count));
    t.output();
    t
}

/// Asserts that the peer is probed after `ms`, and not earlier.
#[track_caller]
fn probed_after(t: &mut Trace, ms: u64, seq: u32) {
    t.wait(ms - 1);
    t.expect_silence();
    t.wait(1);
    send!(t, "A", seq = seq, len = 0);
    t.expect_silence();
}

#[test]
fn an_idle_connection_sends_nothing_unless_keepalive_is_enabled() {
    let mut t = Trace::established();
    assert_eq!(t.tcb.keepalive(), None);
    t.wait(100_000 * SECOND);
    t.expect_silence();
    assert_eq!(t.tcb.next_deadline(), None);
}

#[test]
fn the_defaults_are_those_of_linux() {
    let k = Keepalive::default();
    assert_eq!((k.idle.as_secs(), k.interval.as_secs(), k.count), (7200, 75, 9));
}

#[test]
fn an_idle_peer_is_probed_below_snd_una_and_the_connection_lasts_while_it_answers() {
    let mut t = idle(3);
    t.write(10);
    send!(t, "PA", seq = 1);
    recv!(t, "A", seq = 1, ack = 11);
    for _ in 0..20 {
        probed_after(&mut t, IDLE, 10);
        recv!(t, "A", seq = 1, ack = 11);
        t.expect_silence();
    }
    assert_eq!(t.tcb.state(), State::Established);
    assert_eq!(t.count(Counter::TcpKeepaliveProbes), 20);
    assert_eq!(t.count(Counter::TcpWindowProbes), 0);
}

#[test]
fn a_vanished_peer_is_probed_count_times_and_then_reset_and_the_reader_gets_a_time_out() {
    let mut t = idle(3);
    probed_after(&mut t, IDLE, 0);
    probed_after(&mut t, INTERVAL, 0);
    probed_after(&mut t, INTERVAL, 0);
    probe_ends(&mut t, INTERVAL);
    assert_eq!(t.count(Counter::TcpKeepaliveProbes), 3);
    assert_eq!(t.tcb.next_deadline(), None);
}

/// Asserts that the connection fails after `ms`, and not earlier.
#[track_caller]
fn probe_ends(t: &mut Trace, ms: u64) {
    t.wait(ms - 1);
    t.expect_silence();
    t.wait(1);
    assert!(t.events.contains(Events::ERROR | Events::CLOSED));
    send!(t, "RA", seq = 1);
    assert_eq!(t.tcb.state(), State::Closed);
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    assert_eq!(t.count(Counter::TcpKeepaliveTimeouts), 1);
}

#[test]
fn an_answer_to_the_last_probe_resets_the_count() {
    let mut t = idle(2);
    for _ in 0..5 {
        probed_after(&mut t, IDLE, 0);
        probed_after(&mut t, INTERVAL, 0);
        t.wait(INTERVAL - SECOND);
        recv!(t, "A", seq = 1, ack = 1);
        t.expect_silence();
    }
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn an_interval_longer_than_the_idle_time_does_not_count_answered_probes() {
    let mut t = Trace::established();
    let k = Keepalive { idle: Duration::from_secs(1), interval: Duration::from_secs(10), count: 1 };
    t.tcb.set_keepalive(Some(k));
    for _ in 0..5 {
        t.wait(10 * SECOND);
        send!(t, "A", seq = 0, len = 0);
        recv!(t, "A", seq = 1, ack = 1);
    }
    assert_eq!(t.tcb.state(), State::Established);
}

#[test]
fn data_of_the_peer_on_the_predicted_path_restarts_the_idle_time() {
    let mut t = idle(1);
    for i in 0..10 {
        t.wait(IDLE - SECOND);
        t.expect_silence();
        recv!(t, "PA", seq = 1 + 100 * i, ack = 1, len = 100);
        t.wait(40);
        send!(t, "A", seq = 1);
        t.read(100);
    }
    assert_eq!(t.count(Counter::TcpKeepaliveProbes), 0);
    probed_after(&mut t, IDLE - 40, 0);
}

#[test]
fn a_segment_outside_of_the_window_is_not_a_sign_of_life() {
    let mut t = idle(1);
    t.wait(IDLE - SECOND);
    recv!(t, "A", seq = 200_000, ack = 1);
    t.out.segs.clear();
    probed_after(&mut t, SECOND, 0);
}

#[test]
fn while_data_is_in_flight_the_retransmission_timer_supervises_the_peer() {
    let mut t = idle(1);
    t.tcb.set_keepalive(Some(Keepalive {
        idle: Duration::from_secs(1),
        interval: Duration::from_secs(1),
        count: 1,
    }));
    t.write(10);
    send!(t, "PA", seq = 1, len = 10);
    t.wait(60 * SECOND);
    assert_eq!(t.tcb.state(), State::Established);
    assert!(t.out.segs.drain(..).all(|s| s.len == 10), "retransmissions only");
    assert_eq!(t.count(Counter::TcpKeepaliveProbes), 0);
}

#[test]
fn while_a_closed_window_holds_data_back_the_persist_timer_supervises_the_peer() {
    let mut t = idle(1);
    t.write(1000);
    send!(t, "PA", seq = 1, len = 1000);
    recv!(t, "A", seq = 1, ack = 1001, win = 0);
    t.write(500);
    for _ in 0..2000 {
        t.wait(SECOND);
        while t.out.segs.pop_front().is_some() {
            recv!(t, "A", seq = 1, ack = 1001, win = 0);
        }
    }
    assert_eq!(t.tcb.state(), State::Established);
    assert_eq!(t.count(Counter::TcpKeepaliveProbes), 0);
}

#[test]
fn a_user_timeout_overrides_the_probe_count() {
    let mut t = idle(1);
    t.tcb.set_user_timeout(Some(Duration::from_millis(IDLE + 3 * INTERVAL)));
    t.output();
    probed_after(&mut t, IDLE, 0);
    probed_after(&mut t, INTERVAL, 0);
    probed_after(&mut t, INTERVAL, 0);
    probe_ends(&mut t, INTERVAL);
}

#[test]
fn a_user_timeout_shorter_than_the_idle_time_waits_for_one_probe() {
    let mut t = idle(9);
    t.tcb.set_user_timeout(Some(Duration::from_secs(1)));
    t.output();
    probed_after(&mut t, IDLE, 0);
    probe_ends(&mut t, INTERVAL);
}

#[test]
fn a_reset_that_answers_a_probe_ends_the_connection() {
    let mut t = idle(3);
    probed_after(&mut t, IDLE, 0);
    recv!(t, "R", seq = 1);
    assert_eq!(t.tcb.take_error(), Some(ConnError::Reset));
    assert_eq!(t.count(Counter::TcpKeepaliveTimeouts), 0);
}

#[test]
fn half_closed_connections_are_kept_alive_as_well() {
    let mut t = idle(1);
    recv!(t, "FA", seq = 1, ack = 1);
    send!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::CloseWait);
    probed_after(&mut t, IDLE, 0);
    probe_ends(&mut t, INTERVAL);

    let mut t = idle(1);
    t.shutdown();
    send!(t, "FA", seq = 1);
    recv!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::FinWait2);
    probed_after(&mut t, IDLE, 1);
    t.wait(INTERVAL);
    send!(t, "RA", seq = 2);
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
}

#[test]
fn keepalive_does_not_delay_the_end_of_an_orphan_or_of_time_wait() {
    let mut t = idle(9);
    t.shutdown();
    recv!(t, "A", seq = 1, ack = 2);
    t.close();
    t.out.segs.clear();
    t.wait(plain().fin_wait2_timeout.as_millis() as u64);
    t.expect_silence();
    assert_eq!(t.tcb.state(), State::Closed);

    let mut t = idle(9);
    t.shutdown();
    recv!(t, "FA", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::TimeWait);
    t.out.segs.clear();
    t.tcb.set_keepalive(keepalive(1));
    t.wait(plain().time_wait.as_millis() as u64);
    t.expect_silence();
    assert_eq!(t.tcb.state(), State::Closed);
}

#[test]
fn an_orphan_whose_fin_is_acknowledged_late_ends_in_time() {
    let mut t = idle(9);
    t.wait(IDLE - SECOND);
    t.close();
    send!(t, "FA", seq = 1);
    t.wait(3 * SECOND);
    recv!(t, "A", seq = 1, ack = 2);
    assert_eq!(t.tcb.state(), State::FinWait2);
    t.out.segs.clear();
    let lasts = plain().fin_wait2_timeout.as_millis() as u64;
    t.wait(lasts - 1);
    assert_eq!(t.tcb.state(), State::FinWait2);
    t.wait(1);
    assert_eq!(t.tcb.state(), State::Closed);
    t.expect_silence();
}

#[test]
fn enabled_before_the_handshake_it_starts_when_established() {
    let mut t = Trace::connect(plain());
    t.tcb.set_keepalive(keepalive(1));
    t.output();
    send!(t, "S");
    t.wait(500);
    recv!(t, "SA", ack = 1, mss = Some(1000));
    send!(t, "A", seq = 1);
    probed_after(&mut t, IDLE, 0);

    let mut t = Trace::passive(plain(), seg!("S", mss = Some(1000)));
    t.tcb.set_keepalive(keepalive(1));
    t.output();
    send!(t, "SA");
    t.wait(500);
    recv!(t, "A", seq = 1, ack = 1);
    probed_after(&mut t, IDLE, 0);
}

#[test]
fn disabling_it_stops_probes_and_clears_the_unanswered_count() {
    let mut t = idle(2);
    probed_after(&mut t, IDLE, 0);
    t.tcb.set_keepalive(None);
    t.wait(100 * IDLE);
    t.expect_silence();
    // The peer was idle for longer than the idle time: the probe is due immediately.
    t.tcb.set_keepalive(keepalive(2));
    t.wait(0);
    send!(t, "A", seq = 0, len = 0);
    probed_after(&mut t, INTERVAL, 0);
    probe_ends(&mut t, INTERVAL);
}

#[test]
fn times_of_zero_are_raised_to_min_rto() {
    let mut t = Trace::established();
    let zero = Keepalive { idle: Duration::ZERO, interval: Duration::ZERO, count: 0 };
    t.tcb.set_keepalive(Some(zero));
    let least = plain().min_rto;
    assert_eq!(t.tcb.keepalive(), Some(Keepalive { idle: least, interval: least, count: 1 }));
    t.wait(200);
    send!(t, "A", seq = 0, len = 0);
    t.expect_silence();
}
