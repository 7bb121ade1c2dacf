//! The user time-out (RFC 5482): what it covers, and that the peer is told.

mod support;

use fulmar_base::{Counter, Duration};
use fulmar_tcp::{ConnError, State};

use support::{Trace, plain};

const TEN: Option<Duration> = Some(Duration::from_secs(10));

/// A connection whose peer has closed its window on bytes that wait.
fn stuck() -> Trace {
    let mut t = Trace::established();
    t.write(1000);
    send!(t, "PA", seq = 1, len = 1000);
    recv!(t, "A", seq = 1, ack = 1001, win = 0);
    t.write(500);
    t.silent();
    t
}

/// Time passes; every probe is answered with a closed window. True if the connection lives.
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
fn a_peer_that_answers_probes_is_waited_for_unless_the_user_has_said_for_how_long() {
    let mut t = stuck();
    assert!(answer_probes(&mut t, 1000));
    assert_eq!(t.tcb.state(), State::Established);

    let mut t = stuck();
    t.tcb.set_user_timeout(TEN);
    t.output();
    assert!(answer_probes(&mut t, 9));
    assert!(!answer_probes(&mut t, 2), "the peer is told with a reset");
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    assert_eq!(t.count(Counter::TcpUserTimeouts), 1);
}

#[test]
fn a_window_that_opens_in_time_begins_a_new_time_out() {
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
fn a_vanished_peer_fails_the_connection_when_the_user_says_and_is_reset() {
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
fn an_open_that_nobody_answers_fails_when_the_user_says_without_a_reset() {
    let mut t = Trace::connect(plain());
    t.tcb.set_user_timeout(TEN);
    t.output();
    t.wait(9_900);
    assert_eq!(t.tcb.state(), State::SynSent);
    t.out.segs.clear();
    t.wait(300);
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    t.silent();
    assert_eq!(t.count(Counter::TcpUserTimeouts), 1);
}

#[test]
fn a_zero_is_the_configured_time_out() {
    let mut t = stuck();
    t.tcb.set_user_timeout(TEN);
    t.tcb.set_user_timeout(Some(Duration::ZERO));
    t.output();
    assert_eq!(t.tcb.user_timeout(), None);
    assert!(answer_probes(&mut t, 200));
}
