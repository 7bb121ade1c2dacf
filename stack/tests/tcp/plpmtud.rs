//! Packetisation-layer path MTU discovery (RFC 4821): black holes and probes.

use super::support::*;
use fulmar::internals::drivers::link::{Impairments, LinkConfig};
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;
use fulmar_testbed::connection::Connection;
use fulmar_testbed::stations;

const MS: Duration = Duration::from_millis(1);

fn always() -> Config {
    Config { mtu_probing: MtuProbing::Always, ..plain() }
}

/// Both ends take segments of `mss` bytes, over a path that would carry 1460.
fn established_with_mss(cfg: Config, mss: u16) -> Trace {
    let mut t = Trace::connect(cfg);
    t.path = PathInfo { mtu: 1500, route_mtu: 1500, ..t.path };
    t.output();
    let sack_ok = cfg.sack;
    t.recv(seg!("SA", ack = 1, mss = Some(mss), sack_ok = sack_ok));
    t.out.segs.clear();
    t
}

fn lengths(t: &mut Trace) -> Vec<usize> {
    t.out.segs.drain(..).map(|s| s.len).collect()
}

/// Black-hole detection has lowered segments of 1460 bytes to 1024, and everything is acknowledged.
fn lowered() -> Trace {
    let mut t = established_with_mss(plain(), 1460);
    t.write(5000);
    t.wait(1500);
    recv!(t, "A", seq = 1, ack = 5001);
    // Slow start, with too little data for a probe.
    for at in [8001, 11_001, 14_001, 17_001, 20_001] {
        t.write(3000);
        recv!(t, "A", seq = 1, ack = at);
    }
    t.out.segs.clear();
    assert_eq!((t.tcb.info().mss_bytes, t.count(Counter::TcpMtuProbes)), (1024, 0));
    t
}

/// Everything sent arrives, and what it lets be sent, but for segments of more than `most` bytes.
fn lose_probes(t: &mut Trace, most: usize) {
    let mut una = t.out.segs.front().map_or(0, |s| s.seq);
    while let Some(end) = t.out.segs.iter().map(|s| s.seq + s.len as u32).max() {
        let lost = t.out.segs.iter().find(|s| s.len > most).map(|s| (s.seq, s.seq + s.len as u32));
        t.out.segs.clear();
        match lost {
            Some((from, to)) => {
                una = from;
                t.recv(seg!("A", seq = 1, ack = una, sack = vec![(to, end)]));
            }
            None => {
                una = una.max(end);
                t.recv(seg!("A", seq = 1, ack = una));
            }
        }
    }
}

#[test]
fn the_third_time_out_of_a_large_segment_lowers_the_size() {
    let mut t = established_with_mss(plain(), 1460);
    t.write(5000);
    assert_eq!(lengths(&mut t), [1460, 1460, 1460, 620]);
    t.wait(1000);
    assert_eq!((t.count(Counter::TcpTimeouts), t.count(Counter::TcpBlackHoles)), (2, 0));
    t.out.segs.clear();
    t.wait(500);
    assert_eq!((t.count(Counter::TcpTimeouts), t.count(Counter::TcpBlackHoles)), (3, 1));
    send!(t, "A", seq = 1, len = 1024);
    // One more, and it is the least that each host accepts.
    t.wait(1600);
    assert_eq!((t.count(Counter::TcpTimeouts), t.count(Counter::TcpBlackHoles)), (4, 2));
    send!(t, "A", seq = 1, len = 536);
    t.wait(60_000);
    assert_eq!((t.tcb.info().mss_bytes, t.count(Counter::TcpBlackHoles)), (536, 2));
}

#[test]
fn time_outs_of_a_small_segment_say_nothing_about_the_path_mtu() {
    let mut t = established_with_mss(plain(), 1460);
    t.write(500);
    t.wait(60_000);
    assert!(t.count(Counter::TcpTimeouts) > 5);
    assert_eq!((t.count(Counter::TcpBlackHoles), t.tcb.info().mss_bytes), (0, 1460));
}

#[test]
fn a_lone_segment_that_the_base_size_would_hold_shrinks_to_the_least() {
    let mut t = established_with_mss(plain(), 1460);
    t.write(825);
    // A tail loss probe after a second, and then the time-outs.
    t.wait(4000);
    assert_eq!((t.count(Counter::TcpBlackHoles), t.tcb.info().mss_bytes), (1, 536));
    let sent = lengths(&mut t);
    assert_eq!(sent[sent.len() - 1], 536, "{sent:?}");
}

#[test]
fn without_probing_only_icmp_lowers_the_size() {
    let mut t = established_with_mss(Config { mtu_probing: MtuProbing::Off, ..plain() }, 1460);
    t.write(5000);
    t.wait(60_000);
    assert_eq!(t.tcb.info().mss_bytes, 1460);
}

#[test]
fn the_size_that_was_in_use_is_probed_for_first_and_used_once_acknowledged() {
    let mut t = lowered();
    t.write(8000);
    send!(t, "A", seq = 20_001, len = 1460);
    assert!(lengths(&mut t).iter().all(|len| *len <= 1024));
    recv!(t, "A", seq = 1, ack = 21_461);
    assert_eq!(t.tcb.info().mss_bytes, 1460);
    assert_eq!((t.count(Counter::TcpMtuProbes), t.count(Counter::TcpMtuProbesAcked)), (1, 1));
}

#[test]
fn a_lost_probe_is_repaired_in_small_segments_without_congestion() {
    for sack in [true, false] {
        let mut t = established_with_mss(Config { sack, ..always() }, 1460);
        t.write(10_000);
        let cwnd = t.tcb.info().cwnd_bytes;
        send!(t, "A", seq = 1, len = 1460);
        t.out.segs.clear();
        for n in 1..=4 {
            let end = 1461 + n * 1024;
            let blocks = if sack { vec![(1461, end)] } else { vec![] };
            t.recv(seg!("A", seq = 1, ack = 1, sack = blocks));
        }
        let sent: Vec<_> = t.out.segs.drain(..).map(|s| (s.seq, s.len)).collect();
        // What leaves room for the second is not known without SACK.
        let expected = [(1, 1024), (1025, 436)];
        assert_eq!(sent, expected[..if sack { 2 } else { 1 }], "sack {sack}");
        assert_eq!(t.count(Counter::TcpMtuProbesLost), 1);
        assert_eq!((t.count(Counter::TcpFastRetransmits), t.count(Counter::TcpTimeouts)), (0, 0));
        recv!(t, "A", seq = 1, ack = 10_001);
        let info = t.tcb.info();
        assert!(info.cwnd_bytes >= cwnd && !info.recovering && info.mss_bytes == 1024, "{info:?}");
    }
}

#[test]
fn a_size_lost_three_times_is_given_up_and_the_search_halves_the_rest() {
    let mut t = established_with_mss(always(), 1460);
    let mut at = 1u32;
    let mut sizes = Vec::new();
    for _ in 0..5 {
        t.write(10_000);
        let probe = t.sent();
        sizes.push(probe.len);
        let end = at + 10_000;
        t.recv(seg!("A", seq = 1, ack = at, sack = vec![(at + probe.len as u32, end)]));
        t.wait(2);
        recv!(t, "A", seq = 1, ack = end);
        t.out.segs.clear();
        at = end;
    }
    assert_eq!(sizes, [1460, 1460, 1460, 1241, 1241]);
}

#[test]
fn a_loss_beside_the_probe_is_congestion_and_decides_nothing() {
    let mut t = established_with_mss(always(), 1460);
    t.write(10_000);
    let cwnd = t.tcb.info().cwnd_bytes;
    t.out.segs.clear();
    // The probe and the segment after it.
    t.recv(seg!("A", seq = 1, ack = 1, sack = vec![(2485, 9653)]));
    t.wait(2);
    assert_eq!((t.count(Counter::TcpFastRetransmits), t.count(Counter::TcpMtuProbesLost)), (1, 0));
    recv!(t, "A", seq = 1, ack = 10_001);
    assert!(t.tcb.info().cwnd_bytes < cwnd);
    assert_eq!((t.count(Counter::TcpMtuProbesAcked), t.tcb.info().mss_bytes), (0, 1024));
}

#[test]
fn a_probe_that_a_time_out_retransmits_decides_nothing() {
    let mut t = established_with_mss(Config { sack: false, ..always() }, 1460);
    t.write(10_000);
    t.wait(400);
    assert_eq!(t.count(Counter::TcpTimeouts), 1);
    recv!(t, "A", seq = 1, ack = 10_001);
    assert_eq!((t.count(Counter::TcpMtuProbesAcked), t.tcb.info().mss_bytes), (0, 1024));
}

#[test]
fn a_probe_needs_data_behind_it_and_the_peers_window() {
    let mut t = established_with_mss(always(), 1460);
    t.write(1460 + 3 * 1024);
    assert_eq!(lengths(&mut t).first(), Some(&1024));
    let mut t = Trace::connect(always());
    t.path = PathInfo { mtu: 1500, route_mtu: 1500, ..t.path };
    t.output();
    t.recv(seg!("SA", ack = 1, mss = Some(1460), win = 5000));
    t.out.segs.clear();
    t.write(20_000);
    assert_eq!(lengths(&mut t).first(), Some(&1024));
    assert_eq!(t.count(Counter::TcpMtuProbes), 0);
}

#[test]
fn a_router_that_answers_a_probe_ends_the_search_at_its_mtu() {
    let mut t = established_with_mss(always(), 1460);
    t.write(2048);
    recv!(t, "A", seq = 1, ack = 2049);
    t.write(10_000);
    let cwnd = t.tcb.info().cwnd_bytes;
    t.out.segs.clear();
    // Below what has passed already: a lie, or a route that changed. It waits for a time-out.
    t.icmp(IcmpError::TooBig { mtu: 700 }, 2049);
    assert!(t.adopted.is_empty() && t.out.segs.is_empty());
    t.icmp(IcmpError::TooBig { mtu: 1340 }, 2049);
    assert_eq!(t.adopted, [1340]);
    assert_eq!(lengths(&mut t), [1024]);
    recv!(t, "A", seq = 1, ack = 12_049);
    assert!(t.tcb.info().cwnd_bytes >= cwnd);
    t.write(10_000);
    send!(t, "A", seq = 12_049, len = 1300);
}

#[test]
fn a_completed_search_is_repeated_after_ten_minutes() {
    let mut t = established_with_mss(always(), 1460);
    t.write(10_000);
    recv!(t, "A", seq = 1, ack = 10_001);
    assert_eq!(t.tcb.info().mss_bytes, 1460);
    // The path came to allow more, and the peer does not.
    t.path.mtu = 9000;
    t.out.segs.clear();
    t.write(20_000);
    assert!(lengths(&mut t).iter().all(|len| *len <= 1460));
    recv!(t, "A", seq = 1, ack = 30_001);
    // A black hole between both sizes.
    let mut t = lowered();
    for _ in 0..40 {
        t.write(10_000);
        lose_probes(&mut t, 1100);
    }
    let (probes, mss) = (t.count(Counter::TcpMtuProbes), t.tcb.info().mss_bytes);
    assert!((1090..=1100).contains(&mss), "{mss}");
    t.wait(590_000);
    t.write(10_000);
    lose_probes(&mut t, 1100);
    assert_eq!(t.count(Counter::TcpMtuProbes), probes);
    t.wait(20_000);
    t.write(10_000);
    assert_eq!(t.sent().len, 1460);
}

/// A path of 1.6 Mb/s that loses larger packets.
fn path(mtu: usize) -> Impairments {
    Impairments { mtu: Some(mtu), ..bottleneck(1_600_000, 20_000, 10 * MS) }
}

/// A stream over a path, after some seconds.
fn bulk(cfg: Config, mtu: usize) -> Connection {
    let mut c = stream_over(7, &path(mtu), cfg);
    c.stream(Duration::from_secs(8));
    c
}

#[test]
fn every_controller_survives_a_black_hole_and_finds_its_size() {
    for congestion in CongestionControl::ALL {
        for timestamps in [true, false] {
            let cfg = Config { congestion: *congestion, timestamps, ..Config::default() };
            let mut c = bulk(cfg, 1300);
            let mss = c.tcb(0).info().mss_bytes + if timestamps { 12 } else { 0 };
            assert!((1252..=1260).contains(&mss), "{congestion}: {mss}");
            let rate = c.stream(Duration::from_secs(2)).mbps;
            assert!(rate > 1.2, "{congestion}: {rate} Mb/s");
        }
    }
}

#[test]
fn a_path_whose_mtu_falls_and_rises_again_is_followed() {
    for congestion in CongestionControl::ALL {
        let mut c = bulk(Config { congestion: *congestion, ..Config::default() }, 1500);
        let full = c.tcb(0).info().mss_bytes;
        assert_eq!(full, 1448);
        for mtu in [1100, 700, 1400] {
            c.set_path(&path(mtu));
            c.stream(Duration::from_secs(610));
            let mss = c.tcb(0).info().mss_bytes as usize;
            assert!(mss <= mtu - 52 && mss >= mtu - 62, "{congestion}: {mss} for {mtu}");
        }
        c.set_path(&path(1500));
        c.stream(Duration::from_secs(605));
        assert_eq!(c.tcb(0).info().mss_bytes, full, "{congestion}");
    }
}

#[test]
fn an_outage_costs_no_segment_size() {
    for congestion in CongestionControl::ALL {
        let mut c = bulk(Config { congestion: *congestion, ..Config::default() }, 1500);
        c.set_path(&Impairments { loss: 1.0, ..path(1500) });
        assert!(c.stream(Duration::from_secs(30)).mbps < 1.0);
        assert_eq!(c.tcb(0).info().mss_bytes, 524);
        c.set_path(&path(1500));
        // The time-out of RFC 6298 has doubled to 30 s at the most.
        c.stream(Duration::from_secs(32));
        assert_eq!(c.tcb(0).info().mss_bytes, 1448, "{congestion}");
        assert!(c.stream(Duration::from_secs(2)).mbps > 1.2, "{congestion}");
    }
}

#[test]
fn a_search_over_a_path_of_64_kib_ends_at_its_size() {
    let how = bottleneck(400_000_000, 400_000, MS);
    let link = LinkConfig { mtu: 65_535, ..LinkConfig::default() };
    let config = |station| {
        let mut config = stations::config(station, 256 << 20);
        config.tcp.mtu_probing = MtuProbing::Always;
        config
    };
    let mut c = Connection::over(3, &how, &link, config, |end| Box::new(end));
    c.stream(Duration::from_secs(3));
    assert!(c.tcb(0).info().mss_bytes > 1024);
}

#[test]
fn random_losses_do_not_bind_a_connection_to_a_small_size() {
    let mut small = 0;
    for seed in 1..=20 {
        let cfg = Config { mtu_probing: MtuProbing::Always, ..Config::default() };
        let how = Impairments { loss: 0.01, delay: 20 * MS, ..Impairments::default() };
        let mut c = stream_over(seed, &how, cfg);
        c.stream(Duration::from_secs(5));
        small += u32::from(c.tcb(0).info().mss_bytes < 1448);
    }
    assert!(small <= 1, "{small} of 20");
}
