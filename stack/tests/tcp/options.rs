//! Socket options of Linux that change what is accepted and sent: TCP_NOTSENT_LOWAT, TCP_MAXSEG, TCP_QUICKACK.

use super::support::*;
use fulmar_stack::tcp::*;

#[test]
fn unsent_bytes_beyond_the_low_water_mark_leave_no_space_until_they_are_sent() {
    let mut t = Trace::established();
    let space = t.tcb.write_space();
    t.tcb.set_notsent_low_water(Some(2000));
    assert_eq!(t.tcb.write_space(), space, "nothing is unsent");
    // The initial window is ten segments; the rest is unsent.
    t.write(11_999);
    assert!(t.tcb.write_space() > 0);
    t.queue(1);
    assert_eq!(t.tcb.write_space(), 0);
    // What the ACK lets go leaves space; the event comes with the ACK of what went.
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 2001, win = 50_000);
    assert!(!t.events.contains(Events::WRITABLE), "2000 were unsent when the ACK came");
    assert!(t.tcb.write_space() > 0);
    recv!(t, "A", seq = 1, ack = 4001, win = 50_000);
    assert!(t.events.contains(Events::WRITABLE));
    t.tcb.set_notsent_low_water(None);
    t.queue(3000);
    assert!(t.tcb.write_space() > 0);
}

#[test]
fn a_low_water_mark_of_free_space_is_at_most_half_of_a_buffer_that_became_smaller() {
    let mut t = Trace::established();
    t.write(8000);
    t.tcb.set_send_low_water(Some(50_000));
    t.tcb.set_send_buffer(16_384);
    assert_eq!(t.tcb.send_low_water(), Some(8192));
    recv!(t, "A", seq = 1, ack = 8001, win = 50_000);
    assert!(t.events.contains(Events::WRITABLE), "all of it is free");
    t.tcb.set_send_low_water(None);
    assert_eq!(t.tcb.send_low_water(), None);
}

#[test]
fn a_maximum_segment_bounds_the_option_of_the_syn_and_what_is_sent() {
    let mut t = Trace::connect(plain());
    t.tcb.set_max_segment(Some(600));
    t.output();
    let syn = t.sent();
    assert_eq!(syn.mss, Some(600));
    recv!(t, "SA", seq = 0, ack = 1, win = 50_000, mss = Some(1000));
    t.out.segs.clear();
    t.write(1500);
    for len in [600, 600, 300] {
        assert_eq!(t.sent().len, len);
    }
    // Later changes hold for what is sent from then on; more than path and peer allow has no effect.
    recv!(t, "A", seq = 1, ack = 1501, win = 50_000);
    t.tcb.set_max_segment(Some(u16::MAX));
    t.out.segs.clear();
    t.write(1500);
    assert_eq!((t.sent().len, t.sent().len), (1000, 500));
}

#[test]
fn quickack_acknowledges_at_once_what_waits_and_what_comes_next() {
    let mut t = Trace::established();
    t.tcb.set_quickack(false);
    recv!(t, "A", seq = 1, ack = 1, len = 100);
    t.expect_silence();
    t.tcb.set_quickack(true);
    t.output();
    send!(t, "A", ack = 101);
    recv!(t, "A", seq = 101, ack = 1, len = 100);
    send!(t, "A", ack = 201);
    t.tcb.set_quickack(false);
    recv!(t, "A", seq = 201, ack = 1, len = 100);
    t.expect_silence();
}
