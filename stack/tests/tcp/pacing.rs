//! Pacing: SO_MAX_PACING_RATE on any controller, and the rate of BBR.

use super::support::{Trace, path, plain};
use fulmar_stack::base::Duration;
use fulmar_stack::tcp::{Config, CongestionControl, PathInfo};

/// Segmentation offload, and a window that does not limit.
fn wide() -> Trace {
    let mut t = Trace::established_after(Config { initial_window_segments: 200, ..plain() }, 40);
    t.path = PathInfo { tso_bytes: Some(65_535), ..path() };
    t
}

/// Lengths and times of what is sent within `ms`.
fn sent_within(t: &mut Trace, ms: u64) -> Vec<(u64, usize)> {
    let (from, mut sent) = (t.now, Vec::new());
    let mut note = |t: &mut Trace| {
        let at = t.now.since(from).as_micros() as u64;
        sent.extend(t.out.segs.drain(..).filter(|s| s.len > 0).map(|s| (at, s.len)));
    };
    note(t);
    let end = t.now + Duration::from_millis(ms);
    while let Some(at) = t.tcb.next_deadline().filter(|at| *at <= end) {
        let us = at.since(t.now).as_micros() as u64;
        t.wait_us(us + 1);
        note(t);
    }
    sent
}

#[test]
fn without_a_limit_all_leaves_at_once_in_large_segments() {
    let mut t = wide();
    t.write(50_000);
    assert_eq!(sent_within(&mut t, 10), [(0, 50_000)]);
    assert_eq!(t.tcb.pacing_rate(), None);
}

#[test]
fn a_limit_cuts_a_stream_into_milliseconds() {
    let mut t = wide();
    t.tcb.set_max_pacing_rate(Some(8_000_000));
    t.write(40_000);
    let sent = sent_within(&mut t, 20);
    assert!(sent.iter().all(|s| s.1 == 8000), "{sent:?}");
    let times: Vec<_> = sent.iter().map(|s| s.0).collect();
    assert_eq!(times.len(), 5);
    for (i, at) in times.iter().enumerate() {
        assert!(at.abs_diff(i as u64 * 1000) < 20, "{times:?}");
    }
}

#[test]
fn a_slow_rate_sends_two_segments_at_a_time() {
    let mut t = wide();
    t.tcb.set_max_pacing_rate(Some(100_000));
    t.write(8000);
    let sent = sent_within(&mut t, 100);
    assert_eq!(sent.iter().map(|s| s.1).collect::<Vec<_>>(), [2000; 4]);
    assert!(sent[3].0.abs_diff(60_000) < 30, "{sent:?}");
}

#[test]
fn a_timer_runs_only_while_data_waits_for_its_time() {
    let mut t = wide();
    t.tcb.set_max_pacing_rate(Some(8_000_000));
    t.write(4000);
    let next = t.tcb.next_deadline().expect("the probe's timer");
    assert!(next.since(t.now) > Duration::from_millis(5));
    // The next write waits for its time.
    t.write(4000);
    assert_eq!(t.tcb.next_deadline().unwrap().since(t.now).as_micros(), 500);
    t.out.segs.clear();
    t.wait(1);
    send!(t, "PA", seq = 4001, len = 4000);
}

#[test]
fn a_late_wake_up_is_made_up_for_but_a_pause_is_not() {
    let mut t = wide();
    t.tcb.set_max_pacing_rate(Some(8_000_000));
    t.queue(50_000);
    t.output();
    t.out.segs.clear();
    // Due after a millisecond, woken after two and a half: the second leaves with it.
    t.sleep_us(2500);
    t.output();
    assert_eq!(t.out.segs.drain(..).map(|s| s.len).collect::<Vec<_>>(), [8000, 8000]);
    t.sleep_us(100_000);
    t.output();
    let burst: usize = t.out.segs.drain(..).map(|s| s.len).sum();
    assert!(burst <= 3 * 8000 + 1000, "{burst}");
}

#[test]
fn lifting_the_limit_sends_the_rest() {
    let mut t = wide();
    t.tcb.set_max_pacing_rate(Some(1_000_000));
    t.write(20_000);
    assert_eq!(t.out.segs.drain(..).map(|s| s.len).sum::<usize>(), 2000);
    t.tcb.set_max_pacing_rate(None);
    t.output();
    assert_eq!(t.out.segs.drain(..).map(|s| s.len).sum::<usize>(), 18_000);
    assert_eq!(t.tcb.max_pacing_rate(), None);
}

#[test]
fn a_closed_window_is_probed_although_the_connection_is_paced() {
    let mut t = wide();
    t.tcb.set_max_pacing_rate(Some(100_000));
    t.write(6000);
    send!(t, "A", seq = 1, len = 2000);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 2001, win = 0);
    t.wait(2000);
    assert!(t.out.segs.iter().any(|s| s.len == 0 && s.seq == 2000), "{:?}", t.out.segs);
}

#[test]
fn bbr_starts_at_the_initial_window_per_round_trip_time_times_its_gain() {
    let cfg = Config { congestion: CongestionControl::Bbr, ..plain() };
    let mut t = Trace::established_after(cfg, 40);
    t.path = PathInfo { tso_bytes: Some(65_535), ..path() };
    t.write(20_000);
    // 10 segments in 40 ms, 2.77 times as fast.
    assert_eq!(t.tcb.pacing_rate(), Some(692_500));
    assert_eq!(t.out.segs.drain(..).map(|s| s.len).collect::<Vec<_>>(), [2000]);
    let sent = sent_within(&mut t, 20);
    assert_eq!(sent.iter().map(|s| s.1).sum::<usize>(), 8000, "the initial window");
    assert!(sent[3].0.abs_diff(11_552) < 30, "{sent:?}");
}

#[test]
fn a_time_out_repeats_the_first_segment_however_low_the_rate_is() {
    let mut t = wide();
    t.tcb.set_max_pacing_rate(Some(100));
    t.write(2000);
    t.out.segs.clear();
    // The rate allows the next segment after 20 s.
    t.wait(5000);
    assert!(t.out.segs.iter().any(|s| s.seq == 1 && s.len > 0), "{:?}", t.out.segs);
}
