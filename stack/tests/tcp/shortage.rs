//! Progress under small windows and memory shortage. Each trace is the minimal form of a failure
//! found by the simulation of the whole stack.

use super::support::*;
use fulmar_stack::base::{Counter, DropReason};
use fulmar_stack::mbuf::{Chain, Mbuf, Pool, PoolConfig, Purpose};
use fulmar_stack::tcp::{Config, ConnError, PathInfo, State, WindowBudget};

#[test]
fn the_window_of_a_syn_ack_in_a_simultaneous_open_is_not_scaled() {
    let mut t = Trace::connect(Config { max_buffer_bytes: 16 << 20, ..plain() });
    t.output();
    recv!(t, "S", seq = 0, mss = Some(1000), scale = Some(9), win = 4096);
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000), scale = Some(9), win = 4096);
    assert_eq!(t.tcb.state(), State::Established);
    assert_eq!(t.tcb.info().snd_wnd_bytes, 4096);
    recv!(t, "A", seq = 1, ack = 1, win = 8);
    assert_eq!(t.tcb.info().snd_wnd_bytes, 4096);
}

#[test]
fn a_corked_sender_does_not_wait_forever_for_a_larger_window() {
    let mut t = Trace::established();
    t.tcb.set_cork(true);
    t.write(3000);
    recv!(t, "A", seq = 1, ack = 3001, win = 100);
    t.out.segs.clear();
    t.write(2000);
    t.expect_silence();
    t.wait(1000);
    send!(t, "A", seq = 3001, len = 100);
}

#[test]
fn data_held_back_by_a_small_window_does_not_wait_for_the_next_probe() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 1, ack = 1, len = 1, win = 0);
    t.write(5000);
    // By now the probes are backed off.
    for _ in 0..8 {
        t.wait(60_000);
        recv!(t, "A", seq = 2, ack = 1, win = 0);
    }
    t.out.segs.clear();
    recv!(t, "A", seq = 2, ack = 1, win = 500);
    t.expect_silence();
    t.wait(1000);
    send!(t, "A", seq = 1, len = 500);
}

#[test]
fn a_sender_without_descriptors_sends_copies() {
    let mut t = Trace::established();
    t.path.tso_bytes = Some(65_535);
    t.queue(5000);
    let mut m = t.pool.alloc(1, 0, Purpose::Send).unwrap();
    m.append(1).unwrap()[0] = 0;
    let mut hoard: Vec<Mbuf> = Vec::new();
    while let Ok(reference) = t.pool.clone_ref(&m, 0, 1) {
        hoard.push(reference);
    }
    t.output();
    for n in 0..5 {
        assert_eq!((t.out.segs[n].seq, t.out.segs[n].len), (1 + 1000 * n as u32, 1000));
    }
    recv!(t, "A", seq = 1, ack = 5001);
    assert!(t.tcb.is_drained());
    hoard.into_iter().chain([m]).for_each(|m| t.pool.free_mbuf(m));
}

#[test]
fn tiny_out_of_order_segments_use_at_most_twice_the_window_of_storage() {
    let mut t = Trace::established();
    let window = t.tcb.info().rcv_wnd_bytes as usize;
    for n in 0..400 {
        recv!(t, "A", seq = 3 + 2 * n, ack = 1, len = 1);
    }
    let kept = t.tcb.info().out_of_order_bytes;
    assert!(kept > 50 && kept * 1024 <= 2 * window, "{kept}");
    assert_eq!(t.drops(DropReason::TcpReassemblyFull), 400 - kept as u64);
    // The bytes that fill the gap are accepted.
    recv!(t, "A", seq = 1, ack = 1, len = 2);
    assert_eq!(t.read(100), 3);
}

#[test]
fn out_of_order_segments_use_at_most_the_window_once_the_budget_is_exhausted() {
    let mut t = Trace::established();
    t.window.limit_bytes = t.window.granted_bytes;
    let window = t.tcb.info().rcv_wnd_bytes as usize;
    for n in 0..400 {
        recv!(t, "A", seq = 3 + 2 * n, ack = 1, len = 1);
    }
    let kept = t.tcb.info().out_of_order_bytes;
    assert!(kept > 25 && kept * 1024 <= window, "{kept}");
}

#[test]
fn out_of_order_bytes_never_use_the_control_reserve() {
    let mut t = Trace::established();
    let mut hoard: Vec<Mbuf> = Vec::new();
    while let Ok(m) = t.pool.alloc(1, 0, Purpose::Receive) {
        hoard.push(m);
    }
    t.reserve(true);
    recv!(t, "A", seq = 11, ack = 1, len = 10);
    assert_eq!(t.tcb.info().out_of_order_bytes, 0);
    recv!(t, "A", seq = 1, ack = 1, len = 10);
    assert_eq!(t.read(100), 10);
    assert_eq!(t.count(Counter::TcpOutOfOrderBytes), 0);
    hoard.into_iter().for_each(|m| t.pool.free_mbuf(m));
}

#[test]
fn in_order_bytes_leave_half_of_the_control_reserve() {
    let mut t = Trace::established();
    let mut hoard: Vec<Mbuf> = Vec::new();
    while let Ok(m) = t.pool.alloc(1, 0, Purpose::Receive) {
        hoard.push(m);
    }
    t.reserve(true);
    let mut seq = 1;
    while t.drops(DropReason::TcpReassemblyFull) == 0 {
        // Too large to be merged, so that each needs a block.
        recv!(t, "A", seq = seq, ack = 1, len = 255);
        seq += 255;
        assert!(seq < 1 << 20);
    }
    hoard.push(t.pool.alloc(1, 0, Purpose::Control).unwrap());
    assert!(t.tcb.recv_queue_ref().readable() > 0);
    hoard.into_iter().for_each(|m| t.pool.free_mbuf(m));
}

#[test]
fn segments_are_compacted_once_the_budget_is_exhausted() {
    let mut t = Trace::established();
    let storage_of_next_segments = |t: &mut Trace, first: u32| {
        let before = t.tcb.recv_queue_ref().storage_bytes();
        for n in 0..20 {
            recv!(t, "A", seq = first + 300 * n, ack = 1, len = 300);
        }
        t.tcb.recv_queue_ref().storage_bytes() - before
    };
    assert_eq!(storage_of_next_segments(&mut t, 1), 20 * 2048);
    t.window.limit_bytes = t.window.granted_bytes;
    assert!(storage_of_next_segments(&mut t, 6001) <= 4 * 2048);
    assert!(t.window.granted_bytes <= t.window.limit_bytes + 2 * 2048);
    assert_eq!(t.read(20_000), 12_000);
}

#[test]
fn segments_from_behind_a_gap_are_compacted_as_well_once_it_is_filled() {
    let mut t = Trace::established();
    t.window.limit_bytes = t.window.granted_bytes;
    let before = t.tcb.recv_queue_ref().storage_bytes();
    for n in 0..10 {
        recv!(t, "A", seq = 301 + 600 * n, ack = 1, len = 300);
        recv!(t, "A", seq = 1 + 600 * n, ack = 1, len = 300);
    }
    let storage = t.tcb.recv_queue_ref().storage_bytes() - before;
    assert!(storage <= 4 * 2048, "{storage} bytes of storage for 6000");
    assert!(t.window.granted_bytes <= t.window.limit_bytes + 2 * 2048);
    assert_eq!(t.read(20_000), 6000);
}

#[test]
fn short_segments_that_fill_the_receive_share_are_copied_into_each_others_buffers() {
    let mut t = Trace::established();
    t.window.limit_bytes = t.window.granted_bytes;
    let mut first = true;
    for seq in (1..).step_by(40 * 275).take(2) {
        let payload = t.joined(seq, 40, 275);
        let mut hoard: Vec<Mbuf> = Vec::new();
        while let Ok(m) = t.pool.alloc(1500, 0, Purpose::Receive) {
            hoard.push(m);
        }
        let seg = Seg { flags: flags("A"), seq, ack: 1, len: payload.len(), ..Seg::default() };
        t.input_chain(seg, payload);
        t.output();
        assert!(t.pool.available(Purpose::Receive) >= 33 * 2048, "for the frames of others");
        assert_eq!(t.count(Counter::TcpCollapsedBytes) > 34 * 275, !first);
        first = false;
        hoard.into_iter().for_each(|m| t.pool.free_mbuf(m));
    }
    assert!(t.tcb.recv_queue_ref().storage_bytes() <= 12 * 2048);
    assert_eq!(t.read(50_000), 80 * 275);
}

#[test]
fn segments_are_compacted_within_the_burst_that_exhausts_the_budget() {
    let mut t = Trace::established();
    t.window.limit_bytes = t.window.granted_bytes + 10 * 2048;
    for n in 0..60 {
        let payload = t.joined(1 + 300 * n, 1, 300);
        let seg = Seg { flags: flags("A"), seq: 1 + 300 * n, ack: 1, len: 300, ..Seg::default() };
        t.input_chain(seg, payload);
    }
    let storage = t.tcb.recv_queue_ref().storage_bytes();
    // Eleven in a buffer each, the others six in one.
    assert!(storage <= (12 + 49 / 6 + 1) * 2048, "{storage} bytes of storage for 18000");
    t.output();
    assert_eq!(t.read(20_000), 18_000);
}

#[test]
fn short_segments_behind_a_gap_need_no_storage_of_their_own_once_the_budget_is_exhausted() {
    for joined in [1, 20] {
        let mut t = Trace::established();
        t.window.limit_bytes = t.window.granted_bytes;
        let window = t.tcb.info().rcv_wnd_bytes as usize;
        for seq in (301..).step_by(joined * 300).take(140 / joined) {
            let payload = t.joined(seq, joined, 300);
            let seg = Seg { flags: flags("A"), seq, ack: 1, len: payload.len(), ..Seg::default() };
            t.input_chain(seg, payload);
            t.output();
        }
        let storage = t.tcb.recv_queue_ref().out_of_order_storage_bytes();
        assert!(storage <= window, "{storage} bytes of storage for a window of {window}");
        assert_eq!(t.tcb.info().out_of_order_bytes, 42_000);
        assert_eq!(t.drops(DropReason::TcpReassemblyFull), 0);
        recv!(t, "A", seq = 1, ack = 1, len = 300);
        assert_eq!(t.read(100_000), 42_300);
    }
}

/// To copy them is to walk over all that is unread, which a peer could cause with every second byte.
#[test]
fn segments_from_behind_gaps_are_compacted_once_they_have_an_eighth_of_the_storage() {
    let mut t = Trace::established();
    for n in 0..20 {
        recv!(t, "A", seq = 1 + 300 * n, ack = 1, len = 300);
    }
    let before = t.tcb.recv_queue_ref().storage_bytes();
    assert_eq!(before, 20 * 2048);
    t.window.limit_bytes = t.window.granted_bytes;
    for n in 0..20 {
        recv!(t, "A", seq = 6301 + 600 * n, ack = 1, len = 300);
        recv!(t, "A", seq = 6001 + 600 * n, ack = 1, len = 300);
        if n == 0 {
            assert_eq!(t.count(Counter::TcpCollapsedBytes), 300, "the gap's own bytes");
        }
    }
    let added = t.tcb.recv_queue_ref().storage_bytes() - before;
    assert!(added <= 7 * 2048 + before / 8, "{added} bytes of storage for 12000");
    assert_eq!(t.read(30_000), 18_000);
}

#[test]
fn the_part_of_a_segment_that_fits_is_acknowledged() {
    for is_behind_hole in [false, true] {
        let mut t = Trace::established();
        t.window.limit_bytes = t.window.granted_bytes;
        for n in 0..6 {
            recv!(t, "A", seq = 1 + 300 * n, ack = 1, len = 300);
        }
        assert_eq!(t.tcb.recv_queue_ref().storage_bytes(), 2048);
        if is_behind_hole {
            recv!(t, "A", seq = 5001, ack = 1, len = 10);
        }
        let mut hoard: Vec<Mbuf> = Vec::new();
        while let Ok(m) = t.pool.alloc(1, 0, Purpose::Receive) {
            hoard.push(m);
        }
        while t.pool.has_reserve() {
            hoard.push(t.pool.alloc(1, 0, Purpose::Control).unwrap());
        }
        t.reserve(true);
        t.out.segs.clear();
        recv!(t, "A", seq = 1801, ack = 1, len = 300);
        assert_eq!(t.drops(DropReason::TcpReassemblyFull), 1);
        assert_eq!(t.out.segs.back().map(|s| s.ack), Some(2049));
        assert_eq!(t.read(10_000), 2048);
        recv!(t, "A", seq = 2049, ack = 1, len = 52);
        assert_eq!(t.read(10_000), 52);
        hoard.into_iter().for_each(|m| t.pool.free_mbuf(m));
    }
}

#[test]
fn the_minimum_window_is_not_granted_again_before_it_is_read() {
    let mut t = Trace::connect(plain());
    // Other connections use the whole budget.
    t.window = WindowBudget { limit_bytes: 100_000, granted_bytes: 100_000 };
    t.output();
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(1000));
    assert_eq!(t.tcb.info().rcv_wnd_bytes, 4000);
    for n in 0..4 {
        recv!(t, "A", seq = 1 + 1000 * n, ack = 1, len = 1000);
    }
    assert_eq!(t.tcb.info().rcv_wnd_bytes, 0);
    assert_eq!(t.read(4000), 4000);
    assert_eq!(t.tcb.info().rcv_wnd_bytes, 4000);
    t.window.granted_bytes -= 100_000;
}

#[test]
fn beyond_the_limit_a_reader_is_granted_a_page_at_a_time() {
    let mut t = Trace::connect(plain());
    t.path = PathInfo { mtu: 9000, route_mtu: 9000, ..t.path };
    t.window = WindowBudget { limit_bytes: 100_000, granted_bytes: 100_000 };
    t.output();
    recv!(t, "SA", seq = 0, ack = 1, mss = Some(8960));
    let page = WindowBudget::MIN_BYTES as u32;
    for n in 0..5 {
        assert_eq!(t.tcb.info().rcv_wnd_bytes, u64::from(page));
        recv!(t, "A", seq = 1 + page * n, ack = 1, len = page as usize);
        assert_eq!(t.tcb.info().rcv_wnd_bytes, 0);
        t.out.segs.clear();
        assert_eq!(t.read(page as usize), page as usize);
        assert_eq!(t.out.segs.len(), 1, "a window update");
    }
    t.window.granted_bytes -= 100_000;
}

#[test]
fn unread_since_is_the_last_read_or_when_the_first_byte_was_there_to_be_read() {
    let mut t = Trace::established();
    t.wait(5000);
    // Behind a gap: nothing to read.
    let before = t.tcb.unread_since();
    recv!(t, "A", seq = 201, ack = 1, len = 100);
    assert_eq!(t.tcb.unread_since(), before);
    t.wait(5000);
    let first = t.now;
    for (seq, len) in [(1, 100), (101, 100), (301, 100)] {
        recv!(t, "A", seq = seq, ack = 1, len = len);
        assert_eq!(t.tcb.unread_since(), first, "{seq}");
        t.wait(1000);
    }
    assert_eq!(t.read(100), 100);
    assert_eq!(t.tcb.unread_since(), t.now);
    let read = t.now;
    t.wait(1000);
    recv!(t, "A", seq = 401, ack = 1, len = 100);
    assert_eq!(t.tcb.unread_since(), read);
    assert_eq!(t.read(400), 400);
    t.wait(1000);
    recv!(t, "A", seq = 501, ack = 1, len = 100);
    assert_eq!(t.tcb.unread_since(), t.now);
    assert_eq!(t.read(100), 100);
    // A gap is filled after a while. The bytes after the gap can be read from then on.
    recv!(t, "A", seq = 701, ack = 1, len = 100);
    t.wait(1000);
    recv!(t, "A", seq = 601, ack = 1, len = 100);
    assert_eq!(t.tcb.unread_since(), t.now);
    // A loan is a read.
    t.wait(1000);
    let lent = t.lend(100);
    assert_eq!(t.tcb.unread_since(), t.now);
    t.take_back(lent);
}

#[test]
fn bytes_behind_a_gap_that_are_discarded_are_accepted_again() {
    let mut t = Trace::established();
    recv!(t, "A", seq = 101, ack = 1, len = 100);
    recv!(t, "A", seq = 301, ack = 1, len = 100);
    assert_eq!(t.discard_out_of_order(), 200);
    assert_eq!(t.pool.outstanding(), 0);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 1, len = 100);
    t.wait(1000);
    send!(t, "A", ack = 101);
    recv!(t, "A", seq = 301, ack = 1, len = 100);
    recv!(t, "A", seq = 101, ack = 1, len = 200);
    assert_eq!(t.read(1000), 400);
}

#[test]
fn a_dsack_of_discarded_bytes_is_discarded_with_them() {
    for is_kept in [true, false] {
        let mut t = Trace::established();
        recv!(t, "A", seq = 2001, ack = 1, len = 1000);
        recv!(t, "A", seq = 4001, ack = 1, len = 1000);
        t.out.segs.clear();
        // Bytes 2501 to 3001 a second time, between the gaps; the ACK is not sent yet.
        t.input(seg!("A", seq = 2501, ack = 1, len = 1500));
        let mut expected = vec![(2501, 3001), (2001, 5001)];
        if !is_kept {
            t.discard_out_of_order();
            expected.clear();
        }
        t.output();
        send!(t, "A", ack = 1, sack = expected);
    }
}

#[test]
fn what_is_discarded_unread_is_an_error_and_no_end_of_the_stream() {
    // Open; closed by the peer; by both, in TIME-WAIT; by a reset whose error the user has taken.
    for end in ["", "FA", "both", "TIME-WAIT", "R"] {
        let mut t = Trace::established();
        recv!(t, "A", seq = 1, ack = 1, len = 100);
        recv!(t, "A", seq = 201, ack = 1, len = 100);
        match end {
            "" => {}
            "R" => {
                recv!(t, "RA", seq = 101, ack = 1);
                assert_eq!(t.tcb.take_error(), Some(ConnError::Reset));
            }
            "TIME-WAIT" => {
                t.shutdown();
                recv!(t, "FA", seq = 101, ack = 2, len = 200);
                assert_eq!(t.tcb.state(), State::TimeWait);
            }
            _ => recv!(t, "FA", seq = 101, ack = 1, len = 100),
        }
        if end == "both" {
            recv!(t, "FA", seq = 301, ack = 1);
            t.shutdown();
            recv!(t, "A", seq = 302, ack = 2);
            assert_eq!(t.tcb.state(), State::Closed);
        }
        t.out.segs.clear();
        t.abort_unread();
        let is_open = end.is_empty() || end == "FA";
        let resets = t.out.segs.iter().filter(|s| s.flags.contains(flags("R"))).count();
        assert_eq!(resets, usize::from(is_open), "{end}");
        // However often it is asked for.
        assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut), "{end}");
        assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut), "{end}");
        assert!(!t.tcb.at_eof(), "{end}");
        assert_eq!(t.tcb.recv_queue_ref().storage_bytes(), 0);
        let is_waiting = end == "TIME-WAIT";
        assert_eq!(t.pool.outstanding(), 0, "{end}");
        assert!(is_waiting || t.window.granted_bytes == 0, "{end}");
        assert_eq!(t.tcb.state(), if is_waiting { State::TimeWait } else { State::Closed });
    }
}

#[test]
fn tiny_segments_in_foreign_buffers_are_copied_and_returned() {
    let mut t = Trace::established();
    t.sender = Some(Pool::new(PoolConfig::with_budget(4 << 20)).unwrap());
    for n in 0..100 {
        recv!(t, "A", seq = 1 + n, ack = 1, len = 1);
        recv!(t, "A", seq = 1000 + 2 * n, ack = 1, len = 1);
    }
    let mut sender = t.sender.take().unwrap();
    sender.drain_remote();
    assert!(sender.outstanding() <= 1, "{} are kept", sender.outstanding());
    assert_eq!(t.read(1000), 100);
    sender.drain_remote();
    assert_eq!(sender.outstanding(), 0);
}

/// Over loopback each segment is a reference to the send queue of the other end. A reader that leaves thousands of tiny ones
/// unread must not hold a descriptor for each, also where the budget of windows is used up.
#[test]
fn tiny_segments_in_the_senders_storage_share_buffers() {
    for is_exhausted in [false, true] {
        let mut t = Trace::established();
        if is_exhausted {
            t.window.limit_bytes = t.window.granted_bytes;
        }
        let mut block = t.pool.alloc(2048, 0, Purpose::Send).unwrap();
        let space = block.append(1000).unwrap();
        space.iter_mut().zip(0..).for_each(|(to, at)| *to = pattern(at));
        let before = t.pool.stats().mbufs_in_use;
        for i in 0..1000 {
            let part = t.pool.clone_ref(&block, i, 1).unwrap();
            t.input_chain(seg!("A", seq = 1 + i as u32, ack = 1, len = 1), Chain::from(part));
        }
        assert!(t.pool.stats().mbufs_in_use < before + 5, "{is_exhausted}");
        t.pool.free(Chain::from(block));
        assert_eq!((t.read(2000), t.drops(DropReason::TcpReassemblyFull)), (1000, 0));
    }
}

/// Fills a receive buffer while memory is scarce, then reads until the window opens; at most a tenth of the buffer.
fn opens_its_window_by(mut read: impl FnMut(&mut Trace) -> usize) {
    const BUFFER: usize = 200_000;
    let cfg = Config { recv_buffer_bytes: BUFFER, max_buffer_bytes: BUFFER, ..plain() };
    let mut t = Trace::established_with(cfg);
    t.window.limit_bytes = t.window.granted_bytes + 50_000;
    let mut seq = 1;
    while t.tcb.info().rcv_wnd_bytes >= 1000 {
        recv!(t, "A", seq = seq, ack = 1, len = 1000);
        seq += 1000;
        t.wait(1000);
    }
    t.out.segs.clear();
    let mut bytes = 0;
    while t.out.segs.is_empty() {
        bytes += read(&mut t);
        assert!(bytes < BUFFER / 10, "the window is still closed after {bytes} bytes");
    }
    assert!(t.tcb.info().rcv_wnd_bytes >= 2000);
    assert!(t.window.granted_bytes <= t.window.limit_bytes);
}

#[test]
fn a_slow_reader_of_a_long_queue_opens_the_window_before_half_of_the_budget_is_free() {
    opens_its_window_by(|t| t.read(100));
}

#[test]
fn a_slow_reader_by_loans_opens_the_window_before_half_of_the_budget_is_free() {
    opens_its_window_by(|t| {
        let lent = t.lend(1000);
        t.take_back(lent);
        lent.bytes
    });
}
