//! BBR on virtual time: what it delivers through a bottleneck, and what it queues there.

use super::support::{bottleneck, stream_over};
use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;
use fulmar_testbed::connection::Connection;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A stream through a bottleneck of `mbps` with a queue of `bdp_percent` percent of its BDP.
fn stream(which: CongestionControl, mbps: u64, one_way: Duration, bdp_percent: u64) -> Connection {
    over(which, &path(mbps, one_way, bdp_percent))
}

fn over(congestion: CongestionControl, how: &Impairments) -> Connection {
    stream_over(1, how, Config { congestion, ..Config::default() })
}

fn path(mbps: u64, one_way: Duration, bdp_percent: u64) -> Impairments {
    let bdp = mbps * 125_000 * one_way.as_micros() as u64 * 2 / 1_000_000;
    bottleneck(mbps * 1_000_000, (bdp * bdp_percent / 100).max(6000) as usize, one_way)
}

#[test]
fn a_bottleneck_is_filled_and_its_queue_kept_short() {
    for (mbps, ms) in [(10, 5), (100, 20), (400, 20)] {
        let mut c = stream(CongestionControl::Bbr, mbps, MS * ms, 200);
        c.stream(SECOND * 2);
        let seen = c.stream(SECOND * 4);
        assert!(seen.mbps > mbps as f64 * 0.85, "{} of {mbps} Mb/s", seen.mbps);
        assert!(seen.queue <= MS * (5 + ms / 2), "{:?}", seen.queue);
        assert_eq!(c.world.shards[0].counters().value(Counter::TcpTimeouts), 0);
    }
}

#[test]
fn a_queue_four_times_the_bdp_stays_empty_where_cubic_fills_it() {
    let queue_of = |which| {
        let mut c = stream(which, 100, MS * 20, 400);
        c.stream(SECOND * 2);
        c.stream(SECOND * 4).queue
    };
    let (bbr, cubic) = (queue_of(CongestionControl::Bbr), queue_of(CongestionControl::Cubic));
    assert!(bbr * 5 < cubic, "{bbr:?} and {cubic:?}");
}

#[test]
fn random_losses_of_a_percent_cost_little_where_cubic_stops() {
    let rate_of = |congestion| {
        let mut c = over(congestion, &Impairments { loss: 0.01, ..path(100, MS * 20, 100) });
        c.stream(SECOND * 2);
        c.stream(SECOND * 5).mbps
    };
    let (bbr, cubic) = (rate_of(CongestionControl::Bbr), rate_of(CongestionControl::Cubic));
    assert!(bbr > 60.0 && bbr > 5.0 * cubic, "{bbr} and {cubic} Mb/s");
}

#[test]
fn a_bottleneck_that_widens_or_narrows_is_found() {
    let mut c = stream(CongestionControl::Bbr, 10, MS * 20, 200);
    c.stream(SECOND * 5);
    c.set_path(&path(100, MS * 20, 100));
    c.stream(SECOND * 20);
    let wide = c.stream(SECOND * 3);
    assert!(wide.mbps > 75.0, "{wide:?}");
    c.set_path(&path(10, MS * 20, 200));
    c.stream(SECOND * 10);
    let narrow = c.stream(SECOND * 4);
    assert!(narrow.mbps > 8.0, "{narrow:?}");
    assert!(narrow.dropped * 20 < narrow.passed, "{narrow:?}");
}

#[test]
fn a_program_that_writes_little_does_not_make_the_path_look_slow() {
    let mut c = stream(CongestionControl::Bbr, 100, MS * 20, 100);
    c.stream(SECOND * 3);
    let before = c.tcb(0).info().delivery_rate.expect("samples");
    // 20 KB every 100 ms for four seconds.
    for _ in 0..40 {
        c.left = 20_000;
        c.stream(MS * 100);
    }
    c.left = u64::MAX;
    c.stream(MS * 200);
    let after = c.stream(SECOND).mbps;
    assert!(after > 75.0, "{after} Mb/s; {before} B/s before");
}

#[test]
fn a_change_of_controller_under_way_takes_over_the_window() {
    let mut c = stream(CongestionControl::Cubic, 100, MS * 20, 100);
    c.stream(SECOND * 2);
    assert_eq!(c.tcb(0).pacing_rate(), None);
    c.tcb(0).set_congestion(CongestionControl::Bbr);
    c.stream(SECOND);
    let rate = c.stream(SECOND * 2).mbps;
    assert!(rate > 80.0, "{rate} Mb/s");
    assert!(c.tcb(0).pacing_rate().is_some());
    c.tcb(0).set_congestion(CongestionControl::Cubic);
    assert_eq!(c.tcb(0).pacing_rate(), None);
    let rate = c.stream(SECOND * 2).mbps;
    assert!(rate > 60.0, "{rate} Mb/s");
}
