//! Two engines with ECN over a network that marks, and over paths that falsify marks and feedback.

use super::support::world::{self, Bottleneck, Mangles, Marks, Net, World};
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;

const MS: Duration = Duration::from_millis(1);

const MANGLES: [Mangles; 7] = [
    Mangles::Nothing,
    Mangles::ClearsField,
    Mangles::ForgesField,
    Mangles::ClearsFlags,
    Mangles::ForgesFlags,
    Mangles::StripsOptions,
    Mangles::ForgesOptions,
];

/// 10 Mb/s.
const LINK: Option<Bottleneck> = Some(Bottleneck { bytes_per_s: 1_250_000, queue_bytes: 100_000 });

fn world(congestion: CongestionControl, net: Net, marks: Marks) -> World {
    let cfg = Config { congestion, ecn: EcnPolicy::Ask, ..Config::default() };
    let mut w = World::bulk(net, &cfg, 3);
    w.marks = Some(marks);
    w
}

#[test]
fn a_stream_goes_on_whatever_is_falsified() {
    for mangles in MANGLES {
        for congestion in CongestionControl::ALL {
            for (loss, marked) in [(0, 20), (10, 20), (0, 1000)] {
                let net = Net { loss, reorder: 10, bottleneck: LINK, ..Net::clean(MS) };
                let mut w = world(*congestion, net, Marks::new(marked, mangles));
                let mbps = w.goodput(Duration::from_secs(3));
                assert!(mbps > 0.2, "{mangles:?} {congestion} {loss} {marked}: {mbps}");
            }
        }
    }
}

#[test]
fn what_is_reported_is_what_was_marked() {
    for (mangles, slack_percent) in [(Mangles::Nothing, 3), (Mangles::StripsOptions, 12)] {
        let bottleneck = Some(Bottleneck { bytes_per_s: 2_500_000, queue_bytes: 200_000 });
        let net = Net { bottleneck, ..Net::clean(5 * MS) };
        let mut w = world(CongestionControl::Dctcp, net, Marks::new(100, mangles));
        w.goodput(Duration::from_secs(10));
        let reported = w.sides[0].tcb.info().delivered_ce_bytes;
        let received = w.sides[1].tcb.info().ce_received * 1448;
        assert!(received > 100_000, "{received}");
        assert!(
            reported.abs_diff(received) * 100 < received * slack_percent,
            "{mangles:?}: {reported} of {received}"
        );
        assert!(w.sides[0].tcb.info().accurate_ecn);
    }
}

#[test]
fn a_path_that_clears_the_flags_is_detected() {
    // The SYN loses its flags: no ECN. Set in the middle of a connection: feedback that is cleared.
    let net = Net { bottleneck: LINK, ..Net::clean(MS) };
    let mut w = world(CongestionControl::Cubic, net, Marks::new(0, Mangles::Nothing));
    while !w.sides[0].connected {
        assert!(w.step());
    }
    assert!(w.sides[0].tcb.info().accurate_ecn);
    w.marks = Some(Marks::new(100, Mangles::ClearsFlags));
    w.goodput(Duration::from_secs(1));
    assert_eq!(w.sides[0].counters.value(Counter::TcpEcnDistrusted), 1);
}

/// Goodput in Mb/s, the mean queue in bytes, and drops, behind 100 Mb/s and 2 ms whose queue marks at 2 ms.
fn behind_a_step(congestion: CongestionControl) -> (f64, u64, u64) {
    let bottleneck = Some(Bottleneck { bytes_per_s: 12_500_000, queue_bytes: 500_000 });
    let net = Net { bottleneck, ..Net::clean(MS) };
    let marks = Marks { above_bytes: 25_000, ..Marks::new(0, Mangles::Nothing) };
    let mut w = world(congestion, net, marks);
    w.goodput(Duration::from_secs(2));
    w.link = world::Link::default();
    let mbps = w.goodput(Duration::from_secs(8));
    (mbps, w.link.mean_queue_bytes(), w.link.dropped)
}

#[test]
fn dctcp_and_bbr_keep_the_queue_of_a_step_short_and_the_link_busy() {
    for congestion in [CongestionControl::Dctcp, CongestionControl::Bbr] {
        let (mbps, queue, dropped) = behind_a_step(congestion);
        println!("{congestion}: {mbps:.1} Mb/s, {queue} bytes queued, {dropped} dropped");
        assert!(mbps > 75.0, "{congestion}: {mbps}");
        assert!(queue < 60_000 && dropped == 0, "{congestion}: {queue} bytes, {dropped} dropped");
    }
}
