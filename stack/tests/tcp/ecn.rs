//! Explicit congestion notification with a peer of RFC 3168, with the smaller reduction of RFC 8511.

use fulmar_stack::base::Counter;
use fulmar_stack::tcp::{Config, CongestionControl, EcnField, EcnPolicy};

use super::support::{self, Trace, plain};

use EcnField::{Ce, Ect0, NotEct};

fn asking() -> Config {
    Config { ecn: EcnPolicy::Ask, ..plain() }
}

/// A connection that has agreed on ECN.
fn agreed_with(cfg: Config) -> Trace {
    let mut t = Trace::connect(Config { ecn: EcnPolicy::Ask, ..cfg });
    t.output();
    send!(t, "SeEW", seq = 0, ecn = NotEct);
    recv!(t, "SAE", ack = 1, mss = Some(1000), sack_ok = cfg.sack);
    t.out.segs.clear();
    assert!(t.tcb.info().ecn);
    t
}

fn agreed() -> Trace {
    agreed_with(plain())
}

#[test]
fn a_syn_asks_only_if_configured_and_one_repeated_twice_no_longer() {
    let mut t = Trace::connect(plain());
    t.output();
    send!(t, "S", seq = 0);
    let mut t = Trace::connect(asking());
    t.output();
    send!(t, "SeEW", seq = 0);
    t.wait(1000);
    send!(t, "SeEW", seq = 0);
    t.wait(2000);
    send!(t, "S", seq = 0);
    // The answer may be to the first.
    recv!(t, "SAE", ack = 1, mss = Some(1000));
    t.out.segs.clear();
    t.write(100);
    send!(t, "PA", ecn = NotEct);
}

#[test]
fn a_syn_ack_without_flags_or_with_those_of_the_syn_does_not_agree() {
    for (flags, is_on) in [("SA", false), ("SAE", true), ("SAeEW", false)] {
        let mut t = Trace::connect(asking());
        t.output();
        t.out.segs.clear();
        t.recv(support::Seg {
            flags: support::flags(flags),
            ack: 1,
            win: 50_000,
            mss: Some(1000),
            ..Default::default()
        });
        assert_eq!(t.tcb.info().ecn, is_on, "{flags}");
    }
    // Not what was asked for.
    let mut t = Trace::connect(plain());
    t.output();
    recv!(t, "SAE", ack = 1, mss = Some(1000));
    assert!(!t.tcb.info().ecn);
}

#[test]
fn a_syn_with_both_flags_is_agreed_to_unless_ecn_is_off() {
    let off = Config { ecn: EcnPolicy::Off, ..plain() };
    for (cfg, asks, answers) in [
        (plain(), "SEW", "SAE"),
        (asking(), "SEW", "SAE"),
        (off, "SEW", "SA"),
        (plain(), "S", "SA"),
    ] {
        let syn = support::Seg { flags: support::flags(asks), win: 50_000, ..Default::default() };
        let mut t = Trace::passive(cfg, syn);
        t.output();
        assert_eq!(t.sent().flags, support::flags(answers), "{asks}");
    }
}

#[test]
fn new_data_is_ecn_capable_and_nothing_else_is() {
    let mut t = agreed();
    t.write(1500);
    send!(t, "A", seq = 1, len = 1000, ecn = Ect0);
    send!(t, "PA", seq = 1001, len = 500, ecn = Ect0);
    recv!(t, "PA", seq = 1, ack = 1501, len = 10);
    t.wait(50);
    send!(t, "A", ack = 11, ecn = NotEct);
    t.write(1000);
    send!(t, "PA", seq = 1501, ecn = Ect0);
    t.wait(5000);
    assert!(!t.out.segs.is_empty());
    assert!(t.out.segs.iter().all(|s| s.seq == 1501 && s.ecn == NotEct), "retransmissions");
}

#[test]
fn a_mark_is_echoed_at_once_and_until_cwr() {
    let mut t = agreed();
    recv!(t, "A", seq = 1, ack = 1, len = 10, ecn = Ce);
    send!(t, "AE", ack = 11);
    recv!(t, "A", seq = 11, ack = 1, len = 1000, ecn = Ect0);
    recv!(t, "A", seq = 1011, ack = 1, len = 1000, ecn = Ect0);
    send!(t, "AE");
    t.out.segs.clear();
    t.write(10);
    send!(t, "PAE", len = 10);
    recv!(t, "AW", seq = 2011, ack = 11, len = 1000, ecn = Ect0);
    t.wait(50);
    send!(t, "A", ack = 3011);
    assert_eq!(t.count(Counter::TcpEcnMarksIn), 1);
    // One that is marked itself is echoed again.
    recv!(t, "AW", seq = 3011, ack = 11, len = 1000, ecn = Ce);
    t.wait(50);
    send!(t, "AE", ack = 4011);
}

#[test]
fn a_mark_on_what_was_received_before_or_on_a_pure_ack_is_ignored() {
    let mut t = agreed();
    recv!(t, "A", seq = 1, ack = 1, len = 10, ecn = Ect0);
    t.wait(50);
    t.out.segs.clear();
    recv!(t, "A", seq = 1, ack = 1, len = 10, ecn = Ce);
    recv!(t, "A", seq = 11, ack = 1, ecn = Ce);
    recv!(t, "A", seq = 900_000, ack = 1, len = 10, ecn = Ce);
    t.wait(50);
    while let Some(s) = t.out.segs.pop_front() {
        assert_eq!(s.flags, support::flags("A"));
    }
    assert_eq!(t.count(Counter::TcpEcnMarksIn), 0);
}

#[test]
fn echoes_reduce_the_window_once_per_round_trip() {
    let reductions =
        [(CongestionControl::Cubic, 8500, 7225), (CongestionControl::NewReno, 8000, 6400)];
    for (congestion, first, second) in reductions {
        let mut t = agreed_with(Config { congestion, ..plain() });
        t.write(20_000);
        assert_eq!((t.out.segs.len(), t.tcb.info().cwnd_bytes), (10, 10_000));
        t.out.segs.clear();
        recv!(t, "AE", seq = 1, ack = 2001);
        let cwnd = |t: &Trace| t.tcb.info().cwnd_bytes;
        let reduced = cwnd(&t);
        // The two acknowledged segments had enlarged the window first.
        assert!((first..=first + 2000).contains(&reduced), "{reduced}");
        recv!(t, "AE", seq = 1, ack = 4001);
        assert!(cwnd(&t) <= reduced + 1000, "the same round trip");
        assert_eq!(t.count(Counter::TcpEcnReductions), 1);
        // The first new data tells, and only that.
        let flags: Vec<_> = t.out.segs.iter().map(|s| s.flags).collect();
        let cwr = support::flags("AW");
        assert_eq!(flags.iter().filter(|f| f.contains(support::flags("W"))).count(), 1);
        assert_eq!(flags.first(), Some(&cwr));
        // All of the first flight is acknowledged: the next echo is of another round trip.
        recv!(t, "A", seq = 1, ack = 10_001);
        recv!(t, "AE", seq = 1, ack = 11_001);
        assert_eq!(t.count(Counter::TcpEcnReductions), 2);
        assert!(cwnd(&t) >= second);
    }
}

#[test]
fn an_echo_without_ecn_and_one_with_nothing_in_flight_change_nothing() {
    let mut t = Trace::established();
    t.write(5000);
    recv!(t, "AE", seq = 1, ack = 1001);
    assert_eq!(t.count(Counter::TcpEcnEchoesIn), 0);
    let mut t = agreed();
    let cwnd = t.tcb.info().cwnd_bytes;
    for _ in 0..1000 {
        recv!(t, "AE", seq = 1, ack = 1);
    }
    assert_eq!((t.tcb.info().cwnd_bytes, t.count(Counter::TcpEcnReductions)), (cwnd, 0));
}

#[test]
fn cwr_reports_a_loss_as_well_and_its_echo_reduces_no_further() {
    let mut t = agreed();
    t.write(20_000);
    t.out.segs.clear();
    for n in 1..=4u32 {
        let sack = vec![(1001, 1001 + 1000 * n)];
        recv!(t, "A", seq = 1, ack = 1, sack = sack);
    }
    assert!(t.tcb.info().recovering);
    recv!(t, "AE", seq = 1, ack = 5001);
    assert_eq!(t.count(Counter::TcpEcnReductions), 0);
    recv!(t, "A", seq = 1, ack = 10_001);
    let cwr = support::flags("W");
    let new = t.out.segs.iter().filter(|s| s.seq > 10_000 && s.flags.contains(cwr));
    assert_eq!(new.count(), 1);
}

#[test]
fn cwr_is_in_a_super_segment_once() {
    let mut t = agreed();
    t.path.tso_bytes = Some(65_535);
    t.write(20_000);
    t.out.segs.clear();
    recv!(t, "AE", seq = 1, ack = 5001);
    t.wait(1);
    recv!(t, "A", seq = 1, ack = 10_001);
    let marked = t.out.segs.iter().filter(|s| s.flags.contains(support::flags("W")));
    assert_eq!(marked.count(), 1);
}

#[test]
fn bbr_takes_an_echo_for_a_lossy_round() {
    let mut t = agreed_with(Config { congestion: CongestionControl::Bbr, ..plain() });
    t.write(5000);
    t.out.segs.clear();
    t.wait(10);
    recv!(t, "AE", seq = 1, ack = 1001);
    assert_eq!(t.count(Counter::TcpEcnReductions), 1);
}
