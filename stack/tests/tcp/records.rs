//! Ends of records (MSG_EOR): no segment has bytes of both sides.

use super::support::*;
use fulmar_stack::base::Counter;
use fulmar_stack::tcp::*;

fn write_record(t: &mut Trace, len: usize) {
    t.queue(len);
    t.tcb.end_record();
    t.output();
}

fn sent(t: &mut Trace) -> Vec<(u32, usize, bool)> {
    let is_pushed = |s: &Seg| s.flags == flags("PA");
    t.out.segs.drain(..).map(|s| (s.seq, s.len, is_pushed(&s))).collect()
}

/// Ten segments in flight, then three records of 400 bytes and 1500 bytes that wait for the window.
fn records_behind_a_full_window() -> Trace {
    let mut t = Trace::established_after(plain(), 20);
    t.write(10_000);
    t.out.segs.clear();
    for _ in 0..3 {
        write_record(&mut t, 400);
    }
    t.write(1500);
    t.expect_silence();
    t
}

#[test]
fn no_segment_crosses_the_end_of_a_record() {
    let mut t = records_behind_a_full_window();
    recv!(t, "A", seq = 1, ack = 10_001);
    let records = [(10_001, 400, true), (10_401, 400, true), (10_801, 400, true)];
    let sent = sent(&mut t);
    assert_eq!(sent[..3], records);
    assert_eq!((sent[3].0, sent[3].1), (11_201, 1000));
}

#[test]
fn super_segments_end_with_a_record() {
    let mut t = Trace::established_after(plain(), 20);
    t.path.tso_bytes = Some(65_535);
    write_record(&mut t, 3400);
    t.write(5000);
    let sent = sent(&mut t);
    assert_eq!(sent.iter().map(|s| (s.0, s.1)).collect::<Vec<_>>(), [(1, 3400), (3401, 5000)]);
}

#[test]
fn retransmissions_do_not_cross_the_end_of_a_record_either() {
    let mut t = records_behind_a_full_window();
    recv!(t, "A", seq = 1, ack = 10_001);
    t.out.segs.clear();
    // A tail loss probe, then the time-out.
    t.wait(2000);
    assert!(t.count(Counter::TcpTimeouts) > 0);
    for (seq, len, _) in sent(&mut t) {
        assert!([10_401, 10_801, 11_201].iter().all(|end| seq >= *end || seq + len as u32 <= *end));
    }
    recv!(t, "A", seq = 1, ack = 10_401);
    let sent = sent(&mut t);
    assert_eq!(sent[0], (10_401, 400, true));
}

#[test]
fn cork_and_nagle_hold_back_the_last_record_only() {
    let mut t = Trace::established_after(plain(), 20);
    t.tcb.set_cork(true);
    write_record(&mut t, 300);
    t.expect_silence();
    t.write(200);
    assert_eq!(sent(&mut t), [(1, 300, true)]);
}

#[test]
fn a_writer_waits_while_too_many_records_are_not_acknowledged() {
    let mut t = Trace::established_after(plain(), 20);
    t.out.room = 10_000;
    for _ in 0..1024 {
        assert!(t.tcb.write_space() > 0);
        write_record(&mut t, 1);
    }
    assert_eq!(t.tcb.write_space(), 0);
    let end = t.out.segs.back().unwrap().seq + 1;
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = end);
    assert!(t.tcb.write_space() > 0);
    assert!(t.events.contains(Events::WRITABLE));
}
