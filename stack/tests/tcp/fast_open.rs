//! TCP Fast Open (RFC 7413): data on the SYN, from both ends.

use super::support::*;
use fulmar_stack::base::Counter;
use fulmar_stack::tcp::*;
use fulmar_stack::wire::tcp::{FastOpen, FastOpenCookie};

const COOKIE: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// An active open with `len` bytes of first data; the SYN is sent.
fn client(syn: FastOpenSyn, len: usize) -> Trace {
    let mut t = Trace::connect(plain());
    t.queue(len);
    t.tcb.set_fast_open(syn);
    t.output();
    t
}

fn with_cookie(len: usize) -> Trace {
    let cookie = FastOpenCookie::new(&COOKIE).unwrap();
    client(FastOpenSyn::Cookie { cookie, mss: 1000 }, len)
}

fn report(verdict: FastOpenVerdict, cookie: &[u8], mss: u16) -> Option<FastOpenReport> {
    Some(FastOpenReport { verdict, cookie: FastOpenCookie::new(cookie), mss })
}

/// A passive open of a SYN with a valid cookie and `len` bytes; the SYN,ACK is sent.
fn server(len: usize) -> Trace {
    let mut t = Trace::passive_fast_open(plain(), seg!("S", mss = Some(1000), len = len));
    t.output();
    t
}

#[test]
fn without_a_cookie_the_syn_asks_for_one_and_the_data_follows_the_handshake() {
    let mut t = client(FastOpenSyn::Request, 300);
    send!(t, "S", len = 0, fo = fast_open(&[]));
    recv!(t, "SA", ack = 1, mss = Some(900), fo = fast_open(&COOKIE));
    send!(t, "PA", seq = 1, len = 300, fo = None);
    assert_eq!(t.tcb.take_fast_open_report(), report(FastOpenVerdict::Taken, &COOKIE, 900));
    assert_eq!((t.tcb.take_fast_open_report(), t.tcb.info().syn_data), (None, false));
}

#[test]
fn with_a_cookie_data_goes_with_the_syn_and_its_acknowledgement_frees_it() {
    let mut t = with_cookie(300);
    send!(t, "S", seq = 0, len = 300, fo = fast_open(&COOKIE));
    t.expect_silence();
    recv!(t, "SA", ack = 301, mss = Some(1000));
    send!(t, "A", seq = 301, ack = 1);
    assert_eq!(t.tcb.take_fast_open_report(), report(FastOpenVerdict::Taken, &[], 1000));
    assert!(t.tcb.info().syn_data && t.tcb.is_drained());
    t.write(100);
    send!(t, "PA", seq = 301, len = 100);
}

#[test]
fn data_on_the_syn_is_at_most_a_segment_of_the_cached_mss_less_the_longest_options() {
    for (cached, most) in [(500, 460), (1000, 960), (9000, 960)] {
        let cookie = FastOpenCookie::new(&COOKIE).unwrap();
        let mut t = client(FastOpenSyn::Cookie { cookie, mss: cached }, 3000);
        assert_eq!(t.tcb.syn_data_limit(), most);
        send!(t, "S", len = most, gso = None);
        t.expect_silence();
    }
    let mut t = client(FastOpenSyn::WithoutCookie, 3000);
    send!(t, "S", len = 960, fo = None);
    recv!(t, "SA", ack = 961, fo = fast_open(&COOKIE));
    assert_eq!(t.tcb.take_fast_open_report(), None, "cookies that were not asked for are ignored");
}

#[test]
fn what_the_syn_ack_leaves_out_of_the_data_is_sent_again_at_once() {
    for (ack, verdict) in [(1, FastOpenVerdict::Refused), (101, FastOpenVerdict::Taken)] {
        let mut t = with_cookie(300);
        send!(t, "S", len = 300);
        recv!(t, "SA", ack = ack, mss = Some(1000));
        send!(t, "PA", seq = ack, len = (301 - ack) as usize);
        t.expect_silence();
        assert_eq!(t.tcb.take_fast_open_report(), report(verdict, &[], 1000));
        let info = t.tcb.info();
        assert_eq!((info.syn_data, info.retransmitted_bytes), (false, u64::from(301 - ack)));
        recv!(t, "A", seq = 1, ack = 301);
        assert!(t.tcb.is_drained());
    }
}

#[test]
fn a_new_cookie_for_an_old_one_is_no_refusal() {
    let mut t = with_cookie(300);
    recv!(t, "SA", ack = 1, mss = Some(1000), fo = fast_open(&[9; 4]));
    assert_eq!(t.tcb.take_fast_open_report(), report(FastOpenVerdict::Taken, &[9; 4], 1000));
}

#[test]
fn a_repeated_syn_has_neither_option_nor_data() {
    let mut t = with_cookie(300);
    send!(t, "S", len = 300);
    t.wait(1000);
    send!(t, "S", seq = 0, len = 0, fo = None);
    // The first SYN was late, not lost.
    recv!(t, "SA", ack = 301);
    send!(t, "A", seq = 301);
    assert_eq!(t.tcb.take_fast_open_report(), report(FastOpenVerdict::Taken, &[], 536));
    assert!(t.tcb.is_drained());
}

#[test]
fn a_syn_that_is_only_answered_without_option_and_data_counts_as_lost() {
    let mut t = with_cookie(300);
    t.wait(1000);
    t.out.segs.clear();
    recv!(t, "SA", ack = 1, mss = Some(1000));
    send!(t, "PA", seq = 1, len = 300);
    assert_eq!(t.tcb.take_fast_open_report(), report(FastOpenVerdict::Lost, &[], 1000));
    let mut t = with_cookie(300);
    t.wait(127_000);
    assert_eq!(t.tcb.take_error(), Some(ConnError::TimedOut));
    assert_eq!(t.tcb.take_fast_open_report(), report(FastOpenVerdict::Lost, &[], 0));
}

#[test]
fn a_syn_too_large_for_the_path_is_repeated_at_once_without_data() {
    let mut t = with_cookie(900);
    send!(t, "S", len = 900);
    t.icmp(IcmpError::TooBig { mtu: 700 }, 0);
    send!(t, "S", len = 0, fo = None);
    t.icmp(IcmpError::TooBig { mtu: 600 }, 0);
    t.expect_silence();
    recv!(t, "SA", ack = 1, mss = Some(1000));
    send!(t, "A", seq = 1, len = 660);
    send!(t, "PA", seq = 661, len = 240);
}

#[test]
fn data_beyond_the_window_of_the_syn_ack_waits_for_it() {
    let mut t = with_cookie(960);
    send!(t, "S", len = 960);
    recv!(t, "SA", ack = 1, win = 0, mss = Some(1000));
    send!(t, "A", seq = 1, len = 0);
    recv!(t, "A", seq = 1, ack = 1, win = 5000);
    send!(t, "PA", seq = 1, len = 960);
}

#[test]
fn an_acknowledgement_of_more_than_the_data_of_the_syn_is_reset() {
    let mut t = with_cookie(300);
    send!(t, "S", len = 300);
    recv!(t, "SA", ack = 302);
    send!(t, "R", seq = 302);
    assert_eq!(t.tcb.state(), State::SynSent);
    assert_eq!(t.tcb.take_fast_open_report(), None);
}

#[test]
fn a_simultaneous_open_acknowledges_the_syn_and_resends_its_own_data() {
    let mut t = with_cookie(300);
    send!(t, "S", len = 300);
    recv!(t, "S", seq = 0, len = 200, mss = Some(1000), fo = fast_open(&[7; 4]));
    send!(t, "SA", seq = 0, ack = 1, len = 0, fo = None);
    recv!(t, "SA", seq = 0, ack = 1);
    send!(t, "PA", seq = 1, len = 300);
    recv!(t, "PA", seq = 1, ack = 301, len = 200);
    assert_eq!(t.read(1000), 200);
}

#[test]
fn a_client_that_closes_after_its_first_data_still_delivers_it() {
    let mut t = client(FastOpenSyn::Request, 300);
    send!(t, "S", len = 0);
    t.close();
    t.expect_silence();
    recv!(t, "SA", ack = 1, mss = Some(1000));
    send!(t, "FPA", seq = 1, len = 300);
    recv!(t, "A", seq = 1, ack = 302);
    assert_eq!(t.tcb.state(), State::FinWait2);
}

#[test]
fn a_client_without_first_data_forgets_the_attempt_at_close() {
    let mut t = client(FastOpenSyn::Request, 0);
    t.close();
    assert!(t.tcb.is_closed());
}

#[test]
fn the_syn_ack_acknowledges_the_data_and_the_server_answers_before_the_handshake_is_over() {
    let mut t = server(300);
    send!(t, "SA", seq = 0, ack = 301, fo = None);
    assert!(t.tcb.is_open_early() && t.tcb.can_send() && t.tcb.info().syn_data);
    assert_eq!(t.read(1000), 300);
    t.write(500);
    send!(t, "PA", seq = 1, ack = 301, len = 500);
    recv!(t, "A", seq = 301, ack = 501);
    assert!(t.events.contains(Events::CONNECTED));
    assert_eq!((t.tcb.state(), t.tcb.is_drained()), (State::Established, true));
    t.expect_silence();
}

#[test]
fn the_rate_of_early_data_is_measured_from_when_it_was_sent() {
    let config = Config { congestion: CongestionControl::Bbr, ..plain() };
    let mut t = Trace::passive_fast_open(config, seg!("S", mss = Some(1000), len = 1));
    t.output();
    send!(t, "SA", ack = 2);
    t.write(2000);
    t.wait(10);
    t.out.segs.clear();
    recv!(t, "A", seq = 2, ack = 2001, win = 50_000);
    // Ten milliseconds, and not the age of the clock.
    assert_eq!(t.tcb.info().delivery_rate, Some(200_000));
}

#[test]
fn a_server_sends_at_most_an_initial_window_before_the_handshake_is_over() {
    let mut t = server(1);
    send!(t, "SA", ack = 2);
    t.write(40_000);
    let bytes: usize = std::iter::from_fn(|| t.out.segs.pop_front()).map(|s| s.len).sum();
    assert_eq!(bytes, 10 * 1000, "all of the initial window");
    t.wait(30_000);
    assert!(t.out.segs.iter().all(|s| s.flags == flags("SA")), "{:?}", t.out.segs);
}

#[test]
fn the_syn_ack_is_repeated_and_the_data_after_it_recovered_once_it_is_acknowledged() {
    let mut t = server(300);
    send!(t, "SA");
    t.write(500);
    send!(t, "PA", seq = 1, len = 500);
    t.wait(1000);
    send!(t, "SA", seq = 0, ack = 301);
    t.expect_silence();
    recv!(t, "A", seq = 301, ack = 1);
    assert_eq!(t.tcb.state(), State::Established);
    t.wait(3000);
    send!(t, "PA", seq = 1, len = 500);
    recv!(t, "A", seq = 301, ack = 501);
    assert!(t.tcb.is_drained());
}

#[test]
fn the_round_trip_of_the_handshake_is_not_taken_from_data_sent_meanwhile() {
    let mut t = server(300);
    t.wait(90);
    t.write(500);
    t.wait(10);
    recv!(t, "A", seq = 301, ack = 1);
    assert_eq!(t.tcb.info().rtt.as_millis(), 100);
    assert_ne!(t.tcb.info().min_rtt.map(|d| d.as_millis()), Some(10));
}

#[test]
fn a_repeated_syn_with_data_is_a_duplicate() {
    let mut t = server(300);
    send!(t, "SA", ack = 301);
    recv!(t, "S", mss = Some(1000), len = 300);
    send!(t, "SA", ack = 301);
    assert_eq!(t.read(1000), 300);
    recv!(t, "PA", seq = 301, ack = 1, len = 100);
    assert_eq!(t.read(1000), 100);
}

#[test]
fn data_beyond_our_mss_is_left_to_be_sent_again() {
    let mut t = server(3000);
    send!(t, "SA", ack = 1001);
    recv!(t, "PA", seq = 1001, ack = 1, len = 2000 - 1000);
    assert_eq!(t.read(5000), 2000);
}

#[test]
fn a_reset_before_the_handshake_is_over_leaves_the_data_to_the_reader() {
    let mut t = server(300);
    recv!(t, "RA", seq = 301, ack = 1);
    assert_eq!((t.tcb.state(), t.tcb.take_error()), (State::Closed, Some(ConnError::Reset)));
    assert_eq!(t.read(1000), 300);
}

#[test]
fn a_reset_that_does_not_count_the_data_is_challenged_or_dropped() {
    let mut t = server(300);
    send!(t, "SA");
    recv!(t, "R", seq = 1);
    assert!(t.tcb.is_open_early());
    recv!(t, "R", seq = 302);
    send!(t, "A", seq = 1, ack = 301);
    assert_eq!(t.count(Counter::TcpResetsIn), 0);
}

#[test]
fn a_server_that_closes_sends_its_answer_and_fin_at_once() {
    let mut t = server(300);
    send!(t, "SA");
    assert_eq!(t.read(1000), 300);
    t.queue(200);
    t.close();
    send!(t, "FPA", seq = 1, ack = 301, len = 200);
    recv!(t, "A", seq = 301, ack = 202);
    assert_eq!(t.tcb.state(), State::FinWait2);
}

#[test]
fn a_server_that_closes_with_unread_data_resets() {
    let mut t = server(300);
    send!(t, "SA");
    t.close();
    send!(t, "RA", seq = 1, ack = 301);
}

#[test]
fn a_server_that_aborts_before_its_syn_ack_has_left_resets_the_client_in_syn_sent() {
    for len in [0, 300] {
        let mut t = Trace::passive_fast_open(plain(), seg!("S", mss = Some(1000), len = len));
        t.abort();
        send!(t, "RA", seq = 0, ack = 1 + len as u32);
        assert!(t.tcb.is_closed());
    }
}

#[test]
fn a_valid_cookie_without_data_opens_early_too() {
    let mut t = server(0);
    send!(t, "SA", ack = 1);
    assert!(t.tcb.is_open_early() && !t.tcb.info().syn_data);
    t.write(10);
    send!(t, "PA", seq = 1, len = 10);
}

#[test]
fn an_embryo_sends_the_given_cookie_and_no_early_data() {
    let mut t = Trace::passive(plain(), seg!("S", mss = Some(1000)));
    t.tcb.offer_cookie(FastOpen { cookie: FastOpenCookie::new(&COOKIE), is_experimental: false });
    t.output();
    send!(t, "SA", ack = 1, fo = fast_open(&COOKIE));
    t.wait(1000);
    send!(t, "SA", fo = None);
    t.write(10);
    t.expect_silence();
    assert!(!t.tcb.can_send());
}
