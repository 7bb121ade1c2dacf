//! The user time-out: what it covers, and the reset that follows.

use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::{ConnError, State};

use super::support::{self, Trace, plain};

const TEN: Option<Duration> = Some(Duration::from_secs(10));

/// A connection with unsent bytes and a closed peer window.
fn stuck() -> Trace {
    let mut t = Trace::established();
    t.write(1000);
    send!(t, "PA", seq = 1, len = 1000);
    recv!(t, "A", seq = 1, ack = 1001, win = 0);
    t.write(500);
    t.expect_silence();
    t
}

/// Advances the clock; every probe is answered with a closed window. True if the connection is
/// still open.
fn answer_probes(t: &mut Trace, seconds: u64) -> bool {
    for _ in 0..seconds * 10 {
        t.wait(100);
        while let Some(s) = t.out.segs.pop_front() {
            if s.flags == support::flags("RA") {
                return false;
            }
            recv!(t, "A", seq = 1, ack = 1001, win = 0);
        }
    }
    true
}

#[test]
fn a_closed_window_is_probed_indefinitely_unless_a_user_timeout_is_set() {
    let mut t = stuck();
    assert!(answer_probes(&mut t, 1000));
    assert_eq!(t.tcb.state(), State::Established);

    let mut t = stuck();
    t.tcb.set_user_timeout(TEN);
    t.output();
    assert!(answer_probes(&mut t, 9));
    assert!(!answer_probes(&mut t, 2), "the connection is reset");
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    assert_eq!(t.count(Counter::TcpUserTimeouts), 1);
}

#[test]
fn a_window_that_flaps_is_no_progress() {
    // With nothing in flight, and with a segment of which nothing is acknowledged.
    for (sent, window) in [(0, 1), (400, 500)] {
        let mut t = stuck();
        t.tcb.set_user_timeout(TEN);
        t.output();
        let mut was_stalled = false;
        for round in 1..100u32 {
            t.wait(300);
            // Acceptable, and each newer than the one before (SND.WL1).
            recv!(t, "A", seq = 2 * round, ack = 1001, win = window);
            recv!(t, "A", seq = 2 * round + 1, ack = 1001, win = 0);
            was_stalled |= round > 10 && t.tcb.is_stalled();
            t.out.segs.clear();
        }
        assert!(was_stalled, "{sent} in flight");
        assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut), "{sent} in flight");
    }
}

#[test]
fn a_window_that_opens_in_time_restarts_the_user_timeout() {
    let mut t = stuck();
    t.tcb.set_user_timeout(TEN);
    t.output();
    for round in 0..5u32 {
        let una = 1001 + 500 * round;
        for _ in 0..80 {
            t.wait(100);
            while t.out.segs.pop_front().is_some() {
                recv!(t, "A", seq = 1, ack = una, win = 0);
            }
        }
        recv!(t, "A", seq = 1, ack = una, win = 50_000);
        send!(t, "PA", seq = una, len = 500);
        recv!(t, "A", seq = 1, ack = una + 500, win = 0);
        t.write(500);
    }
    assert_eq!(t.tcb.state(), State::Established);
    assert_eq!(t.count(Counter::TcpUserTimeouts), 0);
}

#[test]
fn a_process_that_was_stopped_retransmits_before_it_gives_up() {
    let mut t = Trace::established();
    t.write(10);
    send!(t, "PA", seq = 1, len = 10);
    t.tcb.set_user_timeout(TEN);
    t.output();
    // No timer runs meanwhile.
    t.sleep_us(1_000_000_000);
    t.wait(1);
    assert_eq!(t.tcb.state(), State::Established);
    send!(t, "PA", seq = 1, len = 10);
    recv!(t, "A", seq = 1, ack = 11);
    t.wait(10_000);
    assert_eq!(t.count(Counter::TcpUserTimeouts), 0);
    // The peer is asked and does not answer.
    t.write(10);
    t.sleep_us(1_000_000_000);
    t.wait(10_000);
    assert_eq!(t.tcb.state(), State::Closed);
}

#[test]
fn a_vanished_peer_is_reset_after_the_user_timeout() {
    let mut t = Trace::established();
    t.write(10);
    t.tcb.set_user_timeout(TEN);
    t.output();
    t.wait(9_900);
    assert_eq!(t.tcb.state(), State::Established);
    t.out.segs.clear();
    t.wait(300);
    send!(t, "RA", seq = 11);
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
}

#[test]
fn an_unanswered_open_fails_after_the_user_timeout_without_a_reset() {
    let mut t = Trace::connect(plain());
    t.tcb.set_user_timeout(TEN);
    t.output();
    t.wait(9_900);
    assert_eq!(t.tcb.state(), State::SynSent);
    t.out.segs.clear();
    t.wait(300);
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    t.expect_silence();
    assert_eq!(t.count(Counter::TcpUserTimeouts), 1);
}

#[test]
fn zero_restores_the_configured_timeout() {
    let mut t = stuck();
    t.tcb.set_user_timeout(TEN);
    t.tcb.set_user_timeout(Some(Duration::ZERO));
    t.output();
    assert_eq!(t.tcb.user_timeout(), None);
    assert!(answer_probes(&mut t, 200));
}
