//! A peer that lies, a clock that runs backwards, and paths that change: no controller grows faster than the
//! data that arrives, stalls beyond the bound of its RFC, or divides by zero.

use super::support::*;
use fulmar::internals::drivers::link::Impairments;
use fulmar_stack::base::{Counter, Duration};
use fulmar_stack::tcp::*;
use fulmar_testbed::connection::Connection;

const MS: Duration = Duration::from_millis(1);

fn each(mut test: impl FnMut(Config)) {
    for congestion in CongestionControl::ALL {
        test(Config { congestion: *congestion, ..plain() });
    }
}

/// Ten segments in flight, of an unlimited amount to be sent.
fn in_flight(cfg: Config) -> Trace {
    let mut t = Trace::established_after(cfg, 20);
    t.write(60_000);
    t.wait(15);
    assert!(t.tcb.info().in_flight_bytes >= 9000);
    t
}

#[test]
fn acks_split_into_a_thousand_grow_the_window_no_faster_than_one() {
    // RFC 3465 section 2.3: bytes are counted, not ACKs.
    each(|cfg| {
        let (mut whole, mut split) = (in_flight(cfg), in_flight(cfg));
        recv!(whole, "A", seq = 1, ack = 9001);
        for part in 1..=1000u32 {
            recv!(split, "A", seq = 1, ack = 1 + part * 9);
        }
        let (a, b) = (whole.tcb.info(), split.tcb.info());
        assert!(b.cwnd_bytes <= a.cwnd_bytes.max(19_000), "{a:?}\n{b:?}");
        assert!(b.cwnd_bytes <= 19_000, "{b:?}");
    });
}

#[test]
fn acks_of_half_a_segment_deliver_half_a_segment() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        let before = t.tcb.info();
        recv!(t, "A", seq = 1, ack = 501);
        let after = t.tcb.info();
        assert_eq!(after.acked_bytes, 500);
        assert!(after.cwnd_bytes <= before.cwnd_bytes + 500);
    });
}

#[test]
fn acks_of_data_never_sent_change_nothing() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        t.out.segs.clear();
        let before = t.tcb.info();
        for ahead in [1, 1000, 1 << 20, 1 << 30] {
            let ack = 1 + before.in_flight_bytes as u32 + ahead;
            recv!(t, "A", seq = 1, ack = ack);
        }
        let after = t.tcb.info();
        assert_eq!(after.acked_bytes, 0);
        assert_eq!(
            (after.cwnd_bytes, after.in_flight_bytes),
            (before.cwnd_bytes, before.in_flight_bytes)
        );
        // RFC 5961 section 5.2 and 7: challenge ACKs, and few of them.
        assert!(t.out.segs.len() <= 4);
    });
}

#[test]
fn duplicates_at_line_rate_send_no_more_than_was_in_flight() {
    each(|cfg| {
        for sack in [true, false] {
            let mut t = in_flight(Config { sack, ..cfg });
            t.out.segs.clear();
            let flight = t.tcb.info().in_flight_bytes;
            for _ in 0..100_000 {
                recv!(t, "A", seq = 1, ack = 1);
            }
            let sent: usize = t.out.segs.iter().map(|s| s.len).sum();
            // Each duplicate stands for one segment that has left the network, and there were ten.
            assert!(sent as u64 <= 2 * flight + 5000, "{:?} sack {sack}: {sent}", cfg.congestion);
        }
    });
}

#[test]
fn a_flood_of_dsacks_is_a_bounded_state_and_no_window() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        recv!(t, "A", seq = 1, ack = 5001);
        let before = t.tcb.info();
        for n in 0..50_000u32 {
            let start = 1 + n * 7 % 5000;
            let blocks = vec![(start, (start + 700).min(5001))];
            t.recv(seg!("A", seq = 1, ack = 5001, sack = blocks));
        }
        let after = t.tcb.info();
        assert_eq!(after.cwnd_bytes, before.cwnd_bytes);
        assert_eq!(t.count(Counter::TcpSpuriousRecoveries), 0);
        // The stream goes on.
        let end = 1 + after.in_flight_bytes as u32 + 5000;
        recv!(t, "A", seq = 1, ack = end);
        assert!(!t.tcb.info().recovering);
    });
}

#[test]
fn forged_overlapping_and_reneged_blocks_end_in_everything_sent_again() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        let flight = t.tcb.info().in_flight_bytes as u32;
        for n in 0..2000u32 {
            let left = 1 + n * 37 % flight;
            let right = (left + 1 + n * 91 % 3000).min(flight + 1);
            let lie = (flight + 5000, flight + 9000);
            let backwards = (right, left);
            t.recv(seg!("A", seq = 1, ack = 1, sack = vec![(left, right), lie, backwards]));
            let info = t.tcb.info();
            assert!(info.sacked_bytes + info.lost_bytes <= info.in_flight_bytes);
        }
        // None of it is there: RFC 2018 section 8.
        t.out.segs.clear();
        t.wait(20_000);
        assert!(t.out.segs.iter().any(|s| s.seq == 1), "{:?}", cfg.congestion);
        recv!(t, "A", seq = 1, ack = flight + 1);
        assert_eq!(t.tcb.info().acked_bytes, u64::from(flight));
    });
}

#[test]
fn timestamps_that_run_backwards_neither_stall_nor_give_a_round_trip_time() {
    for congestion in CongestionControl::ALL {
        let cfg = Config { timestamps: true, congestion: *congestion, ..plain() };
        let mut t = Trace::established_after(cfg, 20);
        t.write(60_000);
        t.wait(20);
        let mut ack = 1;
        for n in 0..50u32 {
            ack += 100;
            // The value falls, and the echo is of the future or of long ago.
            let echo = [1000, 4_000_000_000, 1, 2_000_000][n as usize % 4];
            t.recv(seg!("A", seq = 1, ack = ack, ts = Some((500u32.wrapping_sub(n), echo))));
        }
        // RFC 7323 section 5.3: what is older than TS.Recent is dropped, and the first one was not.
        let info = t.tcb.info();
        assert!(
            info.rtt < Duration::from_secs(3) && info.rto < Duration::from_secs(10),
            "{info:?}"
        );
        t.recv(seg!("A", seq = 1, ack = 6001, ts = Some((600, 1030))));
        assert_eq!(t.tcb.info().acked_bytes, 6000);
    }
}

#[test]
fn a_storm_of_icmp_messages_sends_the_flight_at_most_once() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        let flight = t.tcb.info().in_flight_bytes as usize;
        t.out.segs.clear();
        for n in 0..20_000u32 {
            let what = match n % 3 {
                0 => IcmpError::TooBig { mtu: 576 + (n as usize * 31) % 900 },
                1 => IcmpError::Unreachable { hard: true },
                _ => IcmpError::Unreachable { hard: false },
            };
            t.icmp(what, 1 + n % 12_000);
        }
        let sent: usize = t.out.segs.iter().map(|s| s.len).sum();
        assert!(sent <= flight + 1000, "{:?}: {sent}", cfg.congestion);
        assert_eq!(t.tcb.state(), State::Established);
    });
}

#[test]
fn a_receiver_that_shrinks_its_window_is_probed_and_served() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        for win in [30_000, 5000, 700, 1, 0, 0] {
            t.recv(seg!("A", seq = 1, ack = 2001, win = win));
        }
        t.wait(300_000);
        assert_eq!(t.tcb.state(), State::Closed, "nothing was acknowledged for two minutes");
        let mut t = in_flight(cfg);
        let end = 1 + t.tcb.info().in_flight_bytes as u32;
        t.recv(seg!("A", seq = 1, ack = end, win = 0));
        t.out.segs.clear();
        for _ in 0..100 {
            t.wait(5000);
            t.recv(seg!("A", seq = 1, ack = end, win = 0));
        }
        assert!(t.count(Counter::TcpWindowProbes) >= 4);
        t.out.segs.clear();
        t.recv(seg!("A", seq = 1, ack = end, win = 50_000));
        t.wait(100);
        assert!(t.out.segs.iter().any(|s| s.seq == end && s.len > 0), "{:?}", cfg.congestion);
    });
}

#[test]
fn a_window_closed_below_the_flight_for_long_is_no_time_out_while_the_peer_answers() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        t.recv(seg!("A", seq = 1, ack = 2001, win = 0));
        t.out.segs.clear();
        let mut sent = 0;
        for _ in 0..300 {
            t.wait(1000);
            sent += t.out.segs.len();
            if !t.out.segs.is_empty() {
                t.out.segs.clear();
                t.recv(seg!("A", seq = 1, ack = 2001, win = 0));
                t.out.segs.clear();
            }
        }
        assert!(sent < 20, "{sent} segments in five minutes: they back off");
        t.recv(seg!("A", seq = 1, ack = 2001, win = 9000));
        t.wait(1000);
        assert_eq!(t.tcb.state(), State::Established, "the window opened, the peer is there");
        assert!(t.out.segs.iter().any(|s| s.seq == 2001 && s.len > 0), "{:?}", cfg.congestion);
    });
}

#[test]
fn segments_without_data_stay_within_a_window_that_was_shrunk() {
    each(|cfg| {
        let mut t = in_flight(cfg);
        t.recv(seg!("A", seq = 1, ack = 2001, win = 700));
        t.out.segs.clear();
        t.recv(seg!("A", seq = 5, ack = 2001, win = 700, len = 10));
        assert_eq!(t.out.segs.pop_back().map(|s| (s.seq, s.len)), Some((2701, 0)));
        t.tcb.abort();
        t.output();
        assert_eq!(
            t.out.segs.pop_back().map(|s| (s.flags == flags("RA"), s.seq)),
            Some((true, 2701))
        );
    });
}

/// A path of 20 Mb/s.
fn path(one_way: Duration) -> Impairments {
    bottleneck(20_000_000, 100_000, one_way)
}

/// A stream of 20 Mb/s, after some seconds.
fn bulk(congestion: CongestionControl, one_way: Duration) -> Connection {
    let mut c = stream_over(11, &path(one_way), Config { congestion, ..Config::default() });
    c.stream(Duration::from_secs(3));
    c
}

#[test]
fn a_round_trip_time_that_jumps_from_1_ms_to_2_s_and_back_is_followed() {
    for congestion in CongestionControl::ALL {
        let mut c = bulk(*congestion, MS / 2);
        assert!(c.stream(Duration::from_secs(1)).mbps > 15.0, "{congestion}");
        c.set_path(&path(Duration::from_secs(1)));
        c.stream(Duration::from_secs(30));
        let rtt = c.tcb(0).info().rtt;
        assert!(rtt > Duration::from_millis(1500), "{congestion}: {rtt:?}");
        let long = c.stream(Duration::from_secs(60)).mbps;
        // BBR's window is four segments a round trip until the shorter round-trip time has been forgotten, and then
        // grows by a quarter with each probe for bandwidth.
        let least = if *congestion == CongestionControl::Bbr { 0.02 } else { 0.3 };
        assert!(long > least, "{congestion}: {long}");
        c.set_path(&path(MS / 2));
        c.stream(Duration::from_secs(15));
        let short = c.stream(Duration::from_secs(5)).mbps;
        assert!(short > 10.0, "{congestion}: {short}");
    }
}

#[test]
fn a_link_that_vanishes_for_30_s_is_found_again_within_its_time_out() {
    for congestion in CongestionControl::ALL {
        for one_way in [MS, MS * 50] {
            let mut c = bulk(*congestion, one_way);
            c.set_path(&Impairments { loss: 1.0, ..path(one_way) });
            c.stream(Duration::from_secs(30));
            c.set_path(&path(one_way));
            // The time-out has doubled to no more than the outage.
            c.stream(Duration::from_secs(35));
            let rate = c.stream(Duration::from_secs(10)).mbps;
            assert!(rate > 10.0, "{congestion} {one_way:?}: {rate}");
        }
    }
}
