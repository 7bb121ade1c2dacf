//! Path MTU discovery by ICMP, and when a message is adopted (RFC 5927 section 7.2).

use super::support::*;
use fulmar_stack::base::{Counter, DropReason};
use fulmar_stack::tcp::*;

/// A connection with segments of 1000 bytes, two of them in flight.
fn two_in_flight() -> Trace {
    let mut t = Trace::established();
    t.write(2000);
    send!(t, "A", seq = 1, len = 1000);
    send!(t, "PA", seq = 1001, len = 1000);
    t
}

fn too_big(t: &mut Trace, mtu: usize, seq: u32) {
    t.icmp(IcmpError::TooBig { mtu }, seq);
}

/// Bytes sent since the last call.
fn bytes_sent(t: &mut Trace) -> usize {
    t.out.segs.drain(..).map(|s| s.len).sum()
}

#[test]
fn a_message_before_any_confirmed_size_is_adopted_immediately() {
    let mut t = two_in_flight();
    t.icmp(IcmpError::TooBig { mtu: 640 }, 1);
    assert_eq!(t.adopted, [640]);
}

#[test]
fn a_message_about_a_syn_ack_is_dropped() {
    let mut t = Trace::passive(plain(), seg!("S", mss = Some(1000)));
    t.output();
    too_big(&mut t, 640, 0);
    assert_eq!((t.adopted.len(), t.drops(DropReason::IcmpMtuKnown)), (0, 1));
}

#[test]
fn a_message_that_an_acknowledgement_has_disproved_forbids_no_tail_loss_probe() {
    let mut t = two_in_flight();
    recv!(t, "A", seq = 1, ack = 1001);
    too_big(&mut t, 576, 1001);
    recv!(t, "A", seq = 1, ack = 2001);
    t.write(2000);
    t.out.segs.clear();
    t.wait(1100);
    assert_eq!((t.count(Counter::TcpTailLossProbes), t.adopted.len()), (1, 0));
}

#[test]
fn a_message_about_bytes_not_in_flight_is_dropped() {
    let mut t = two_in_flight();
    for seq in [0, 2001, 1 << 31] {
        t.icmp(IcmpError::TooBig { mtu: 640 }, seq);
    }
    assert_eq!((t.adopted.len(), t.drops(DropReason::IcmpNoFlow)), (0, 3));
    t.expect_silence();
}

#[test]
fn a_message_against_a_confirmed_size_waits_for_the_timeout() {
    let mut t = two_in_flight();
    recv!(t, "A", seq = 1, ack = 1001);
    too_big(&mut t, 640, 1001);
    t.expect_silence();
    t.wait(500);
    assert_eq!(t.count(Counter::TcpTimeouts), 1);
    assert_eq!(t.adopted, [640]);
    assert_eq!(t.out.segs.front().map(|s| (s.seq, s.len)), Some((1001, 600)));
}

#[test]
fn an_acknowledgement_discards_a_forged_message_against_a_confirmed_size() {
    let mut t = two_in_flight();
    recv!(t, "A", seq = 1, ack = 1001);
    too_big(&mut t, 576, 1001);
    recv!(t, "A", seq = 1, ack = 2001);
    t.write(1000);
    send!(t, "PA", seq = 2001, len = 1000);
    // The segment lost later is not the quoted one.
    t.wait(500);
    assert_eq!((t.count(Counter::TcpTimeouts), t.adopted.len()), (1, 0));
    send!(t, "PA", seq = 2001, len = 1000);
}

#[test]
fn many_messages_retransmit_the_flight_once() {
    let mut t = two_in_flight();
    for mtu in (577..1000).rev() {
        too_big(&mut t, mtu, 1);
    }
    assert_eq!(bytes_sent(&mut t), 2000);
}

#[test]
fn messages_below_the_smallest_mtu_retransmit_once() {
    let mut t = two_in_flight();
    for mtu in [500, 499, 300, 68, 0] {
        too_big(&mut t, mtu, 1);
    }
    assert_eq!(bytes_sent(&mut t), 2000);
    assert_eq!((t.path.mtu, t.tcb.info().mss_bytes), (576, 536));
    assert_eq!(t.drops(DropReason::IcmpMtuKnown), 4);
}

#[test]
fn a_message_below_the_smallest_mtu_has_an_effect_only_once() {
    let mut t = Trace::established();
    t.path.mtu = 576;
    t.write(500);
    send!(t, "PA", seq = 1, len = 500);
    too_big(&mut t, 300, 1);
    assert_eq!(bytes_sent(&mut t), 500);
    too_big(&mut t, 299, 1);
    assert_eq!((bytes_sent(&mut t), t.drops(DropReason::IcmpMtuKnown)), (0, 1));
}

#[test]
fn a_larger_path_mtu_must_be_confirmed_again() {
    let mut t = two_in_flight();
    too_big(&mut t, 640, 1);
    bytes_sent(&mut t);
    recv!(t, "A", seq = 1, ack = 2001);
    t.path.mtu = 1040;
    t.write(1000);
    send!(t, "PA", seq = 2001, len = 1000);
    too_big(&mut t, 640, 2001);
    assert_eq!(bytes_sent(&mut t), 1000);
}
