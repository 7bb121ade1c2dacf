//! BBR on virtual time: what it delivers through a bottleneck, and what it queues there.

use super::support::world::{Bottleneck, Link, Net, World};
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A stream through a bottleneck of `mbps` with a queue of `bdp_percent` percent of its BDP.
fn stream(which: CongestionControl, mbps: u64, one_way: Duration, bdp_percent: u64) -> World {
    let cfg = Config { congestion: which, ..Config::default() };
    World::bulk(net(mbps, one_way, bdp_percent), &cfg, 1)
}

fn net(mbps: u64, one_way: Duration, bdp_percent: u64) -> Net {
    let bytes_per_s = mbps * 125_000;
    let bdp = bytes_per_s * one_way.as_micros() as u64 * 2 / 1_000_000;
    let queue_bytes = (bdp * bdp_percent / 100).max(6000);
    Net { bottleneck: Some(Bottleneck { bytes_per_s, queue_bytes }), ..Net::clean(one_way) }
}

#[test]
fn a_bottleneck_is_filled_and_its_queue_kept_short() {
    for (mbps, ms) in [(10, 5), (100, 20), (400, 20)] {
        let mut w = stream(CongestionControl::Bbr, mbps, MS * ms, 200);
        w.goodput(SECOND * 2);
        w.link = Link { free_at: w.link.free_at, ..Link::default() };
        let rate = w.goodput(SECOND * 4);
        assert!(rate > mbps as f64 * 0.85, "{rate} of {mbps} Mb/s");
        let queue_ms = w.link.mean_queue_bytes() * 8 / mbps / 1000;
        assert!(queue_ms <= 5 + u64::from(ms) / 2, "{queue_ms} ms");
        assert_eq!(w.sides[0].counters.value(Counter::TcpTimeouts), 0);
    }
}

#[test]
fn a_queue_four_times_the_bdp_stays_empty_where_cubic_fills_it() {
    let queue_of = |which| {
        let mut w = stream(which, 100, MS * 20, 400);
        w.goodput(SECOND * 2);
        w.link = Link { free_at: w.link.free_at, ..Link::default() };
        w.goodput(SECOND * 4);
        w.link.mean_queue_bytes()
    };
    let (bbr, cubic) = (queue_of(CongestionControl::Bbr), queue_of(CongestionControl::Cubic));
    assert!(bbr * 5 < cubic, "{bbr} and {cubic} bytes");
}

#[test]
fn random_losses_of_a_percent_cost_little_where_cubic_stops() {
    let rate_of = |congestion| {
        let cfg = Config { congestion, ..Config::default() };
        let mut w = World::bulk(Net { loss: 10, ..net(100, MS * 20, 100) }, &cfg, 1);
        w.goodput(SECOND * 2);
        w.goodput(SECOND * 5)
    };
    let (bbr, cubic) = (rate_of(CongestionControl::Bbr), rate_of(CongestionControl::Cubic));
    assert!(bbr > 60.0 && bbr > 5.0 * cubic, "{bbr} and {cubic} Mb/s");
}

#[test]
fn a_bottleneck_that_widens_or_narrows_is_found() {
    let mut w = stream(CongestionControl::Bbr, 10, MS * 20, 200);
    w.goodput(SECOND * 5);
    w.net = net(100, MS * 20, 100);
    w.goodput(SECOND * 20);
    let wide = w.goodput(SECOND * 3);
    assert!(wide > 75.0, "{wide} Mb/s");
    w.net = net(10, MS * 20, 200);
    w.goodput(SECOND * 10);
    w.link = Link { free_at: w.link.free_at, ..Link::default() };
    let narrow = w.goodput(SECOND * 4);
    assert!(narrow > 8.0, "{narrow} Mb/s");
    let packets = w.link.packets.max(1);
    assert!(w.link.dropped * 20 < packets, "{} of {packets} dropped", w.link.dropped);
}

#[test]
fn a_program_that_writes_little_does_not_make_the_path_look_slow() {
    let mut w = stream(CongestionControl::Bbr, 100, MS * 20, 100);
    w.goodput(SECOND * 3);
    let before = w.sides[0].tcb.info().delivery_rate.expect("samples");
    // 20 KB every 100 ms for four seconds.
    w.sides[0].to_send = w.sides[0].written;
    for _ in 0..40 {
        w.sides[0].to_send += 20_000;
        w.pump(0);
        w.goodput(MS * 100);
    }
    w.sides[0].to_send = u64::MAX / 2;
    w.pump(0);
    w.goodput(MS * 200);
    let after = w.goodput(SECOND);
    assert!(after > 75.0, "{after} Mb/s; {before} B/s before");
}

#[test]
fn a_change_of_controller_under_way_takes_over_the_window() {
    let mut w = stream(CongestionControl::Cubic, 100, MS * 20, 100);
    w.goodput(SECOND * 2);
    assert_eq!(w.sides[0].tcb.pacing_rate(), None);
    w.sides[0].tcb.set_congestion(CongestionControl::Bbr);
    w.goodput(SECOND);
    let rate = w.goodput(SECOND * 2);
    assert!(rate > 80.0, "{rate} Mb/s");
    assert!(w.sides[0].tcb.pacing_rate().is_some());
    w.sides[0].tcb.set_congestion(CongestionControl::Cubic);
    assert_eq!(w.sides[0].tcb.pacing_rate(), None);
    let rate = w.goodput(SECOND * 2);
    assert!(rate > 60.0, "{rate} Mb/s");
}

#[test]
#[ignore = "prints figures"]
fn the_goodput_of_bbr_is_printed() {
    for (mbps, ms, percent, loss) in [
        (1, 10, 200, 0),
        (10, 10, 100, 0),
        (100, 20, 100, 0),
        (100, 20, 400, 0),
        (100, 20, 50, 0),
        (100, 20, 10, 0),
        (500, 20, 100, 0),
        (100, 20, 100, 1),
        (100, 20, 100, 10),
        (100, 20, 100, 30),
        (100, 1, 100, 10),
        (100, 150, 100, 0),
    ] {
        for c in CongestionControl::ALL {
            let cfg = Config { congestion: *c, ..Config::default() };
            let net = Net { loss, ..net(mbps, MS * ms, percent) };
            let mut w = World::bulk(net, &cfg, 1);
            let first = w.goodput(SECOND * 2);
            w.link = Link { free_at: w.link.free_at, ..Link::default() };
            let rate = w.goodput(SECOND * 20);
            let s = &w.sides[0];
            println!(
                "{mbps} Mb/s {ms} ms queue {percent}% loss {loss}: {c:5} first {first:.1} then {rate:.1}; mean queue {:.2} ms longest {:.2} dropped {} rtx {} timeouts {}",
                w.link.mean_queue_bytes() as f64 * 8.0 / mbps as f64 / 1000.0,
                w.link.longest_queue_bytes as f64 * 8.0 / mbps as f64 / 1000.0,
                w.link.dropped,
                s.counters.value(Counter::TcpRetransmitBytes),
                s.counters.value(Counter::TcpTimeouts),
            );
        }
    }
}
