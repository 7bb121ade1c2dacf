//! Accurate ECN feedback (RFC 9768): negotiation, counters, what a path or a peer falsifies. Flags of ECN are `e` (AE),
//! `W` (CWR) and `E` (ECE): 4, 2 and 1 of the field ACE, which begins at 5.

use fulmar_stack::base::Counter;
use fulmar_stack::tcp::{Config, EcnField, EcnPolicy};

use super::support::{Seg, Trace, flags, plain};

use EcnField::{Ce, Ect0, Ect1, NotEct};

/// The letters of a value of ACE.
const ACE: [&str; 8] = ["", "E", "W", "EW", "e", "eE", "eW", "eEW"];

fn asking() -> Config {
    Config { ecn: EcnPolicy::Ask, nodelay: true, ..plain() }
}

fn syn_ack(ace: usize) -> Seg {
    let flags = flags(&format!("SA{}", ACE[ace]));
    Seg { flags, ack: 1, win: 50_000, mss: Some(1000), ..Default::default() }
}

/// A client that has agreed; the peer's options arrive if `has_options`.
fn client_with(cfg: Config, has_options: bool) -> Trace {
    let mut t = Trace::connect(cfg);
    t.output();
    send!(t, "SeEW", seq = 0, counters = None, ecn = NotEct);
    let counters = has_options.then_some((1, 0, 1));
    t.recv(Seg { counters, sack_ok: cfg.sack, ..syn_ack(2) });
    send!(t, "AW", ack = 1, counters = Some((1, 0, 1)), ecn = NotEct);
    assert!(t.tcb.info().accurate_ecn && t.tcb.info().ecn);
    t
}

fn client() -> Trace {
    client_with(asking(), true)
}

/// A client that has sent `n` segments of 1000 bytes, the first a little shorter: it has the option.
fn sender(n: usize, has_options: bool) -> Trace {
    let cfg = Config { initial_window_segments: 64, ..asking() };
    let mut t = client_with(cfg, has_options);
    t.write(n * 1000 - 40);
    assert!(t.out.segs.iter().all(|s| s.ecn == Ect0), "{:?}", t.out.segs);
    t.out.segs.clear();
    t
}

fn marked(t: &Trace) -> u64 {
    t.tcb.info().delivered_ce_bytes
}

/// Whether new data is still ECN-capable.
fn is_capable(t: &mut Trace) -> bool {
    t.out.segs.clear();
    t.write(10);
    t.out.segs.pop_back().expect("data").ecn == Ect0
}

#[test]
fn the_syn_ack_decides_for_the_client() {
    for (ace, ecn, accurate, capable) in [
        (0, false, false, false),
        (1, true, false, true),
        (2, true, true, true),
        // Our SYN was not ECN-capable: the path has changed its field.
        (3, true, true, false),
        (4, true, true, false),
        // Reserved: as if the field had not been changed.
        (5, true, true, true),
        (6, true, true, false),
        // A host that reflects the flags.
        (7, false, false, false),
    ] {
        let mut t = Trace::connect(asking());
        t.output();
        t.out.segs.clear();
        t.recv(syn_ack(ace));
        let info = t.tcb.info();
        assert_eq!((info.ecn, info.accurate_ecn), (ecn, accurate), "{ace}");
        assert_eq!(is_capable(&mut t), capable, "{ace}");
        let distrusted = u64::from(accurate && !capable);
        assert_eq!(t.count(Counter::TcpEcnDistrusted), distrusted, "{ace}");
    }
}

#[test]
fn the_first_ack_reflects_the_field_of_the_syn_ack_and_the_next_segment_counts() {
    for (field, code, count) in [(NotEct, 2, 5), (Ect1, 3, 5), (Ect0, 4, 5), (Ce, 6, 6)] {
        let mut t = Trace::connect(asking());
        t.output();
        t.out.segs.clear();
        t.recv(Seg { ecn: field, ..syn_ack(2) });
        assert_eq!(t.sent().flags, flags(&format!("A{}", ACE[code])), "{field:?}");
        t.write(10);
        let first = t.sent();
        assert_eq!(first.flags, flags(&format!("PA{}", ACE[count])), "{field:?}");
        // The ACK may be lost: the option is repeated once.
        assert_eq!(first.counters, Some((1, 0, 1)));
        t.write(10);
        assert_eq!(t.sent().counters, None);
    }
}

#[test]
fn the_syn_ack_reflects_the_field_of_the_syn() {
    for (ask, field, answer) in [
        ("SeEW", NotEct, 2),
        ("SeEW", Ect1, 3),
        ("SeEW", Ect0, 4),
        ("SeEW", Ce, 6),
        // Reserved combinations ask for it, too (section 3.1.3).
        ("SE", NotEct, 2),
        ("SeW", NotEct, 2),
        ("SEW", NotEct, 1),
        ("S", Ce, 0),
    ] {
        let syn = Seg { flags: flags(ask), win: 50_000, ..Default::default() };
        let mut t = Trace::passive(plain(), syn);
        t.tcb.set_syn_ecn(field);
        t.output();
        let sent = t.sent();
        assert_eq!(sent.flags, flags(&format!("SA{}", ACE[answer])), "{ask} {field:?}");
        assert_eq!(sent.counters.is_some(), answer > 1, "{ask}");
        assert_eq!(sent.ecn, NotEct);
    }
}

/// A server whose SYN,ACK is on its way.
fn server() -> Trace {
    let syn = seg!("SeEW", mss = Some(1000));
    let mut t = Trace::passive(Config { nodelay: true, ..plain() }, syn);
    t.output();
    send!(t, "SAW", counters = Some((1, 0, 1)));
    t
}

#[test]
fn the_ack_of_the_syn_ack_decides_for_the_server() {
    for (ace, capable) in [
        // Cleared, or of a client that has not agreed.
        (0, false),
        (1, true),
        (2, true),
        (3, false),
        (4, false),
        (5, true),
        (6, false),
        (7, true),
    ] {
        let mut t = server();
        let ack = Seg { flags: flags(&format!("A{}", ACE[ace])), ..seg!("A", seq = 1, ack = 1) };
        t.recv(ack);
        assert!(t.tcb.info().accurate_ecn);
        assert_eq!(is_capable(&mut t), capable, "{ace}");
        // Whatever it is, this side tells what it receives.
        let data = Seg { ecn: Ce, ..seg!("A", seq = 1, ack = 1, len = 10) };
        t.recv(data);
        let last = t.out.segs.pop_back().unwrap();
        assert_eq!(last.flags.ace(), 6, "{ace}");
    }
}

#[test]
fn repeated_syn_acks_lose_the_option_and_then_the_flags() {
    let mut t = server();
    t.wait(1000);
    send!(t, "SAW", counters = None);
    t.wait(2000);
    send!(t, "SA", counters = None);
    recv!(t, "AW", seq = 1, ack = 1);
    assert!(t.tcb.info().accurate_ecn);
    assert!(!is_capable(&mut t), "section 3.1.5");
}

#[test]
fn a_syn_repeated_without_flags_is_answered_without() {
    let mut t = server();
    recv!(t, "S", mss = Some(1000));
    send!(t, "SA", counters = None);
    recv!(t, "AW", seq = 1, ack = 1);
    assert!(!is_capable(&mut t));
    // Marks that the peer reports all the same are responded to (section 3.1.5).
    recv!(t, "AeW", seq = 1, ack = 11);
    assert_eq!((marked(&t), t.count(Counter::TcpEcnReductions)), (10, 0));
    t.write(100);
    recv!(t, "AeEW", seq = 1, ack = 61);
    assert_eq!(t.count(Counter::TcpEcnReductions), 1);
}

#[test]
fn a_client_that_had_to_drop_the_flags_is_not_capable_but_reports_marks() {
    let mut t = Trace::connect(asking());
    t.output();
    t.wait(3000);
    t.out.segs.clear();
    t.recv(syn_ack(2));
    assert!(t.tcb.info().accurate_ecn);
    send!(t, "AW", ack = 1);
    assert!(!is_capable(&mut t));
}

#[test]
fn a_syn_ack_that_comes_again_stops_the_option() {
    let mut t = client();
    t.recv(Seg { counters: Some((1, 0, 1)), ..syn_ack(2) });
    send!(t, "AeE", counters = None);
    recv!(t, "AeE", seq = 1, ack = 1, len = 1000, ecn = Ect0);
    send!(t, "AeE", ack = 1001, counters = None);
}

#[test]
fn ace_counts_packets_and_the_option_bytes() {
    let mut t = client();
    t.out.segs.clear();
    recv!(t, "AeE", seq = 1, ack = 1, len = 1000, ecn = Ect0);
    send!(t, "AeE", ack = 1001, counters = Some((1001, 0, 1)));
    recv!(t, "AeE", seq = 1001, ack = 1, len = 1000, ecn = Ce);
    send!(t, "AeW", ack = 2001, counters = Some((1001, 1000, 1)));
    // Two packets that the device has coalesced.
    recv!(t, "AeE", seq = 2001, ack = 1, len = 2000, ecn = Ce);
    send!(t, "A", ack = 4001, counters = Some((1001, 3000, 1)));
    recv!(t, "AeE", seq = 4001, ack = 1, len = 300, ecn = Ect1);
    send!(t, "A", ack = 4301, counters = Some((1001, 3000, 301)));
    assert_eq!((t.count(Counter::TcpEcnMarksIn), t.tcb.info().ce_received), (3, 3));
    // Not ECN-capable: the ACK reports only the change.
    recv!(t, "AeE", seq = 4301, ack = 1, len = 300);
    send!(t, "A", ack = 4601, counters = Some((1001, 3000, 301)));
}

#[test]
fn three_marked_acks_are_reported_and_fewer_are_not() {
    let mut t = client();
    t.out.segs.clear();
    recv!(t, "AeE", seq = 1, ack = 1, ecn = Ce);
    recv!(t, "AeE", seq = 1, ack = 1, ecn = Ce);
    t.expect_silence();
    recv!(t, "AeE", seq = 1, ack = 1, ecn = Ce);
    send!(t, "A", ack = 1);
    // Outside of the window, or of data never sent: of no connection.
    recv!(t, "AeE", seq = 900_000, ack = 1, len = 10, ecn = Ce);
    recv!(t, "AeE", seq = 1, ack = 9000, ecn = Ce);
    assert_eq!(t.count(Counter::TcpEcnMarksIn), 3);
}

#[test]
fn changing_counters_are_reported_three_times_per_round_trip() {
    let mut t = Trace::connect(Config { quick_acks: 0, ..asking() });
    t.output();
    t.wait(300);
    t.recv(Seg { counters: Some((1, 0, 1)), ..syn_ack(2) });
    t.out.segs.clear();
    let (mut with, mut without) = (0, 0);
    // Three round trips: an ACK every 10 ms.
    for n in 0..90u32 {
        recv!(t, "AeE", seq = 1 + 2000 * n, ack = 1, len = 2000, ecn = Ect0);
        t.read(10_000);
        t.wait(10);
        while let Some(ack) = t.out.segs.pop_front() {
            *if ack.counters.is_some() { &mut with } else { &mut without } += 1;
        }
    }
    assert!((9..=13).contains(&with), "{with} with the option, {without} without");
    assert!(without > 70);
}

#[test]
fn sack_blocks_go_before_the_counters() {
    let mut t = client_with(Config { sack: true, timestamps: false, ..asking() }, true);
    t.out.segs.clear();
    recv!(t, "AeE", seq = 1001, ack = 1, len = 1000, ecn = Ce);
    recv!(t, "AeE", seq = 3001, ack = 1, len = 1000, ecn = Ce);
    recv!(t, "AeE", seq = 5001, ack = 1, len = 1000, ecn = Ce);
    recv!(t, "AeE", seq = 7001, ack = 1, len = 1000, ecn = Ce);
    let last = t.out.segs.pop_back().unwrap();
    assert_eq!((last.sack.len(), last.counters), (4, None));
}

#[test]
fn marks_reported_by_ace_reduce_the_window_once_per_round_trip() {
    let mut t = sender(20, false);
    let before = t.tcb.info().cwnd_bytes;
    recv!(t, "AeW", seq = 1, ack = 2001);
    assert_eq!((marked(&t), t.count(Counter::TcpEcnReductions)), (1000, 1));
    assert!(t.tcb.info().cwnd_bytes < before);
    recv!(t, "A", seq = 1, ack = 4001);
    assert_eq!((marked(&t), t.count(Counter::TcpEcnReductions)), (3000, 1));
    // The same count, an old ACK, and one that repeats what is known.
    recv!(t, "A", seq = 1, ack = 6001);
    recv!(t, "AeE", seq = 1, ack = 2001);
    recv!(t, "AE", seq = 1, ack = 6001);
    assert_eq!(marked(&t), 3000);
    // CWR is a bit of ACE, and the peer has sent no marks: it stays at 5.
    t.write(1000);
    assert!(t.out.segs.iter().all(|s| s.flags.ace() == 5));
}

#[test]
fn the_option_reports_bytes_exactly_and_corrects_the_estimate() {
    let mut t = sender(20, true);
    recv!(t, "AeW", seq = 1, ack = 2001);
    assert_eq!(marked(&t), 1000, "estimated");
    recv!(t, "A", seq = 1, ack = 4001, counters = Some((2501, 1500, 1)));
    assert_eq!(marked(&t), 1500, "the rest of what the option tells");
    recv!(t, "AE", seq = 1, ack = 6001, counters = Some((2501, 3500, 1)));
    assert_eq!(marked(&t), 3500);
    // Fewer than estimated before: nothing is taken back.
    recv!(t, "AW", seq = 1, ack = 8001);
    recv!(t, "AW", seq = 1, ack = 10_001, counters = Some((6501, 3500, 1)));
    assert_eq!(marked(&t), 4500);
}

#[test]
fn an_ack_of_many_packets_is_read_by_the_option() {
    let mut t = sender(40, true);
    recv!(t, "AeE", seq = 1, ack = 961);
    // 20 packets, 11 of them marked: 5 + 11 = 16.
    recv!(t, "A", seq = 1, ack = 20_001, counters = Some((9001, 11_000, 1)));
    assert_eq!(marked(&t), 11_000);
    // Eight more: ACE is the same.
    recv!(t, "A", seq = 1, ack = 36_001, counters = Some((17_001, 19_000, 1)));
    assert_eq!(marked(&t), 19_000);
    assert!(is_capable(&mut t));
}

#[test]
fn without_options_an_ack_of_many_packets_is_read_with_caution() {
    let mut t = sender(40, false);
    // No marks so far: unchanged is unchanged.
    recv!(t, "AeE", seq = 1, ack = 10_001);
    assert_eq!(marked(&t), 0);
    recv!(t, "AeW", seq = 1, ack = 11_001);
    assert_eq!(marked(&t), 1000);
    // Marks have just arrived: ACE may have cycled once in ten packets.
    recv!(t, "AeW", seq = 1, ack = 21_001);
    assert_eq!(marked(&t), 9000);
}

#[test]
fn an_option_that_appears_later_is_used() {
    let mut t = sender(40, false);
    recv!(t, "AeW", seq = 1, ack = 2001, counters = Some((1001, 1000, 1)));
    assert_eq!(marked(&t), 1000, "by ACE");
    recv!(t, "AeW", seq = 1, ack = 22_001, counters = Some((21_001, 1000, 1)));
    assert_eq!(marked(&t), 1000);
}

#[test]
fn ace_that_is_cleared_ends_the_use_of_ecn() {
    let mut t = sender(20, true);
    let cwnd = t.tcb.info().cwnd_bytes;
    recv!(t, "A", seq = 1, ack = 2001);
    assert_eq!((marked(&t), t.count(Counter::TcpEcnDistrusted)), (0, 1));
    assert!(t.tcb.info().cwnd_bytes >= cwnd);
    recv!(t, "AE", seq = 1, ack = 4001);
    assert_eq!(marked(&t), 0, "reports are ignored from then on");
    assert!(!is_capable(&mut t));
}

#[test]
fn ace_of_zero_after_other_feedback_is_three_marks() {
    let mut t = sender(20, true);
    recv!(t, "AeE", seq = 1, ack = 2001);
    recv!(t, "A", seq = 1, ack = 5001);
    assert_eq!((marked(&t), t.count(Counter::TcpEcnDistrusted)), (3000, 0));
}

#[test]
fn counters_that_are_cleared_are_ignored() {
    let mut t = client_with(asking(), false);
    t.write(5000);
    t.out.segs.clear();
    recv!(t, "AeE", seq = 1, ack = 1001, counters = Some((0, 0, 0)));
    recv!(t, "AeW", seq = 1, ack = 2001, counters = Some((0, 0, 0)));
    assert_eq!((marked(&t), t.count(Counter::TcpEcnDistrusted)), (1000, 0), "by ACE");
    assert!(is_capable(&mut t));
}

#[test]
fn marked_bytes_without_marked_packets_end_the_use_of_ecn() {
    let mut t = sender(20, true);
    recv!(t, "AeE", seq = 1, ack = 2001, counters = Some((1001, 1000, 1)));
    assert_eq!((marked(&t), t.count(Counter::TcpEcnDistrusted)), (0, 1));
    assert!(!is_capable(&mut t));
}

#[test]
fn a_forged_count_costs_no_more_than_what_was_delivered() {
    let mut t = sender(20, true);
    recv!(t, "AE", seq = 1, ack = 1001);
    assert_eq!(marked(&t), 1000, "four marks on one packet");
    recv!(t, "AW", seq = 1, ack = 2001, counters = Some((1, 0x7f_ffff, 1)));
    assert_eq!(marked(&t), 2000);
    recv!(t, "AEW", seq = 1, ack = 3001, counters = Some((1, 0xff_ffff, 1)));
    recv!(t, "AEW", seq = 1, ack = 4001, counters = Some((1, 0, 1)));
    assert!(marked(&t) <= 4000);
    assert_eq!(t.count(Counter::TcpEcnReductions), 1);
}

#[test]
fn a_super_segment_keeps_its_ace() {
    let mut t = client();
    t.path.tso_bytes = Some(65_535);
    t.write(1);
    t.out.segs.clear();
    recv!(t, "AeE", seq = 1, ack = 2, counters = Some((2, 0, 1)));
    t.write(8000);
    assert!(t.out.segs.iter().any(|s| s.gso.is_some() && s.flags.ace() == 5));
    recv!(t, "AeE", seq = 1, ack = 8002, len = 10, ecn = Ce);
    t.out.segs.clear();
    // 6 has CWR, which offload would clear behind the first packet.
    t.write(8000);
    assert!(t.out.segs.iter().all(|s| s.gso.is_none() && s.flags.ace() == 6), "{:?}", t.out.segs);
}

#[test]
fn retransmissions_are_not_capable_and_a_second_time_out_stops_the_option() {
    let mut t = client();
    t.write(1000);
    t.out.segs.clear();
    t.wait(5000);
    assert!(t.out.segs.iter().all(|s| s.ecn == NotEct && s.flags.ace() == 5));
    recv!(t, "AeE", seq = 1, ack = 1001, len = 10, ecn = Ect0);
    t.wait(100);
    assert!(t.out.segs.iter().all(|s| s.counters.is_none()));
}
