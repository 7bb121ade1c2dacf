//! TCP Fast Open (RFC 7413): listeners that take SYNs with data, and clients that send them.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::task::Poll;

use fulmar_stack::base::{Counter, SeqNum, SlotId};
use fulmar_stack::shard::{
    FastOpenKeys, FastOpenOptions, FirstData, ListenOptions, SourceLimits, StackConfig, SynCookies,
};
use fulmar_stack::socket::{Attempt, SocketError};
use fulmar_stack::tcp::State;
use fulmar_stack::wire::tcp::{FastOpen, FastOpenCookie, Flags, Header, Options};
use fulmar_testbed::listener::{PORT, Rig, ack, syn, syn_options};

const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 5), 4000);
const ISS: SeqNum = SeqNum(0xffff_fff0);
const DATA: &[u8] = b"GET / HTTP/1.0\r\n\r\n";

fn port(n: u16) -> SocketAddrV4 {
    SocketAddrV4::new(*PEER.ip(), 4000 + n)
}

fn with(fast_open: FastOpenOptions) -> ListenOptions {
    ListenOptions { fast_open: Some(fast_open), ..ListenOptions::default() }
}

fn of(cookie: Option<FastOpenCookie>) -> Options {
    let fast_open = Some(FastOpen { cookie, is_experimental: false });
    Options { fast_open, ..syn_options(1) }
}

/// The SYN,ACK to a SYN with these options and data.
fn answer(rig: &mut Rig, from: SocketAddrV4, options: Options, data: &[u8]) -> Header {
    rig.send_from(from, &syn(ISS, options), data);
    rig.pass(1);
    let replies = rig.replies_to(from);
    assert_eq!(replies.len(), 1, "{replies:?}");
    assert_eq!(replies[0].flags, Flags::SYN | Flags::ACK);
    replies[0]
}

/// How much of a SYN a SYN,ACK acknowledges.
fn acked(syn_ack: &Header) -> u32 {
    syn_ack.ack.since(ISS)
}

fn cookie_in(syn_ack: &Header) -> Option<FastOpenCookie> {
    syn_ack.options.fast_open.and_then(|o| o.cookie)
}

/// A listener, and the cookie that it gives to the peer.
fn rig(options: ListenOptions) -> (Rig, FastOpenCookie) {
    let mut rig = Rig::new(options);
    let cookie = cookie_in(&answer(&mut rig, port(900), of(None), &[])).expect("a cookie");
    (rig, cookie)
}

fn all_of(n: usize) -> u32 {
    n as u32 + 1
}

#[test]
fn a_valid_cookie_brings_its_data_into_the_accept_queue_before_the_handshake_is_over() {
    let (mut rig, cookie) = rig(with(FastOpenOptions::default()));
    let syn_ack = answer(&mut rig, PEER, of(Some(cookie)), DATA);
    assert_eq!((acked(&syn_ack), syn_ack.options.fast_open), (all_of(DATA.len()), None));
    let id = rig.accept().expect("a connection");
    assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.state(), State::SynReceived);
    assert_eq!(rig.read(id), DATA);
    assert_eq!((rig.stat().fast_open_pending, rig.stat().fast_opens), (1, 1));
    // The answer goes out before the last ACK comes in.
    let sent = rig.server.sosend(id).reserve(rig.now, b"200 OK", 6, Attempt::First);
    assert!(matches!(sent, Ok(Poll::Ready(_))));
    rig.pass(1);
    assert_eq!(rig.replies_to(PEER).len(), 1);
    rig.send_from(PEER, &ack(&syn_ack), &[]);
    rig.pass(1);
    assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.state(), State::Established);
    assert_eq!((rig.stat().fast_open_pending, rig.count(Counter::TcpFastOpensPassive)), (0, 1));
}

#[test]
fn without_the_option_of_the_listener_data_and_cookies_are_ignored() {
    let mut rig = Rig::new(ListenOptions::default());
    let cookie = FastOpenCookie::new(&[1; 8]);
    for (n, options) in [of(None), of(cookie), syn_options(1)].into_iter().enumerate() {
        let syn_ack = answer(&mut rig, port(n as u16), options, DATA);
        assert_eq!((acked(&syn_ack), syn_ack.options.fast_open), (1, None));
    }
    assert_eq!(rig.accept(), None);
}

#[test]
fn a_forged_cookie_is_answered_with_a_right_one_and_its_data_is_not_kept() {
    let (mut rig, cookie) = rig(with(FastOpenOptions::default()));
    for (n, forged) in [&[0; 8][..], &[7; 4], &[7; 16]].iter().enumerate() {
        let options = of(FastOpenCookie::new(forged));
        let syn_ack = answer(&mut rig, port(n as u16), options, DATA);
        assert_eq!((acked(&syn_ack), cookie_in(&syn_ack)), (1, Some(cookie)));
    }
    // A cookie is of no use from another address.
    let other = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 6), 4000);
    let syn_ack = answer(&mut rig, other, of(Some(cookie)), DATA);
    assert_eq!(acked(&syn_ack), 1);
    assert_ne!(cookie_in(&syn_ack), Some(cookie));
    assert_eq!((rig.accept(), rig.stat().fast_open_invalid), (None, 4));
}

#[test]
fn the_experimental_option_is_answered_in_kind() {
    let (mut rig, cookie) = rig(with(FastOpenOptions::default()));
    let asks = |cookie| Options {
        fast_open: Some(FastOpen { cookie, is_experimental: true }),
        ..syn_options(1)
    };
    let syn_ack = answer(&mut rig, port(1), asks(None), &[]);
    let expected = FastOpen { cookie: Some(cookie), is_experimental: true };
    assert_eq!(syn_ack.options.fast_open, Some(expected));
    let syn_ack = answer(&mut rig, port(2), asks(Some(cookie)), DATA);
    assert_eq!(acked(&syn_ack), all_of(DATA.len()));
}

#[test]
fn a_cookie_of_the_day_before_is_taken_and_replaced_and_an_older_one_is_not() {
    let (mut rig, old) = rig(with(FastOpenOptions::default()));
    let day = fulmar_stack::base::Duration::from_secs(24 * 3600);
    rig.now = rig.now + day;
    let syn_ack = answer(&mut rig, port(1), of(Some(old)), DATA);
    let new = cookie_in(&syn_ack).expect("a new cookie");
    assert_eq!(acked(&syn_ack), all_of(DATA.len()));
    assert_ne!(new, old);
    let syn_ack = answer(&mut rig, port(2), of(Some(new)), DATA);
    assert_eq!((acked(&syn_ack), cookie_in(&syn_ack)), (all_of(DATA.len()), None));
    rig.now = rig.now + day;
    assert_eq!(acked(&answer(&mut rig, port(3), of(Some(old)), DATA)), 1);
    assert_eq!(acked(&answer(&mut rig, port(4), of(Some(new)), DATA)), all_of(DATA.len()));
}

#[test]
fn a_listener_with_keys_of_its_own_takes_cookies_of_both() {
    let keys = |current, previous| {
        let keys = Some(FastOpenKeys::from_bytes(current, previous));
        FastOpenOptions { keys, ..FastOpenOptions::default() }
    };
    let (mut rig, old) = rig(with(keys([1; 16], None)));
    let listener = rig.server.listener(rig.listener).unwrap();
    listener.set_fast_open(Some(keys([2; 16], Some([1; 16]))));
    let syn_ack = answer(&mut rig, port(1), of(Some(old)), DATA);
    assert_eq!(acked(&syn_ack), all_of(DATA.len()));
    assert!(cookie_in(&syn_ack).is_some_and(|new| new != old));
    let listener = rig.server.listener(rig.listener).unwrap();
    listener.set_fast_open(Some(keys([2; 16], None)));
    assert_eq!(acked(&answer(&mut rig, port(2), of(Some(old)), DATA)), 1);
    rig.server.listener(rig.listener).unwrap().set_fast_open(None);
    assert_eq!(answer(&mut rig, port(3), of(None), DATA).options.fast_open, None);
}

#[test]
fn connections_beyond_the_limit_take_the_usual_handshake() {
    let (mut rig, cookie) = rig(with(FastOpenOptions { backlog: 3, ..Default::default() }));
    for n in 0..5 {
        let syn_ack = answer(&mut rig, port(n), of(Some(cookie)), DATA);
        let expected = if n < 3 { all_of(DATA.len()) } else { 1 };
        assert_eq!((acked(&syn_ack), syn_ack.options.fast_open), (expected, None));
    }
    let stat = rig.stat();
    assert_eq!((stat.fast_open_pending, stat.fast_open_limit), (3, 3));
    assert_eq!((stat.accept_queue, stat.fast_open_overflows), (3, 2));
    // They are still pending once the program has accepted and closed them.
    for _ in 0..3 {
        let id = rig.accept().unwrap();
        rig.read(id);
        rig.server.close(rig.now, id);
    }
    rig.replies();
    assert_eq!(acked(&answer(&mut rig, port(6), of(Some(cookie)), DATA)), 1);
    // They end when their SYN,ACK stays without an answer.
    rig.pass(130_000);
    rig.replies();
    assert_eq!(rig.stat().fast_open_pending, 0);
    assert_eq!(acked(&answer(&mut rig, port(7), of(Some(cookie)), DATA)), all_of(DATA.len()));
}

/// The reset of a peer for a connection whose SYN,ACK this is.
fn reset(syn_ack: &Header) -> Header {
    Header { seq: syn_ack.ack, flags: Flags::RST, ..Header::default() }
}

#[test]
fn a_connection_that_its_peer_resets_counts_for_a_minute_more() {
    let (mut rig, cookie) = rig(with(FastOpenOptions { backlog: 2, ..Default::default() }));
    for n in 0..2 {
        let syn_ack = answer(&mut rig, port(n), of(Some(cookie)), DATA);
        rig.send_from(port(n), &reset(&syn_ack), &[]);
        rig.pass(1);
    }
    assert_eq!((rig.stat().fast_open_pending, rig.stat().accept_queue), (0, 2));
    assert_eq!(acked(&answer(&mut rig, port(2), of(Some(cookie)), DATA)), 1);
    // What the SYN brought can be read, then the reset shows.
    let id = rig.accept().unwrap();
    assert_eq!(rig.read(id), DATA);
    assert!(matches!(rig.server.tcp_take(id, 9), Err(SocketError::ConnectionReset)));
    rig.pass(60_000);
    rig.replies();
    assert_eq!(acked(&answer(&mut rig, port(3), of(Some(cookie)), DATA)), all_of(DATA.len()));
}

#[test]
fn a_flood_with_a_valid_cookie_is_bounded_and_others_connect_as_usual() {
    let (mut rig, cookie) = rig(with(FastOpenOptions { backlog: 64, ..Default::default() }));
    for n in 0..2000 {
        rig.send_from(port(n), &syn(ISS, of(Some(cookie))), &[7; 1400]);
        rig.pass(usize::from(n % 50 == 0));
    }
    rig.pass(1);
    let stat = rig.stat();
    assert_eq!((stat.fast_open_pending, stat.accept_queue), (64, 64));
    assert!(stat.embryos <= stat.embryo_limit && stat.fast_open_overflows > 1000, "{stat:?}");
    let client = rig.connect();
    rig.pass(20);
    assert!(matches!(rig.client.tcp_connected(client), Ok(Poll::Ready(()))));
}

#[test]
fn where_syns_get_syn_cookies_the_option_is_ignored() {
    let options = FastOpenOptions { without_cookie: true, ..FastOpenOptions::default() };
    let mut rig = Rig::new(ListenOptions { syn_cookies: SynCookies::Always, ..with(options) });
    for (n, asked) in [of(None), of(FastOpenCookie::new(&[1; 8]))].into_iter().enumerate() {
        let syn_ack = answer(&mut rig, port(n as u16), asked, DATA);
        assert_eq!((acked(&syn_ack), syn_ack.options.fast_open), (1, None));
    }
    assert_eq!(rig.accept(), None);
}

#[test]
fn each_source_has_as_many_connections_as_it_may() {
    let limits = SourceLimits { connections: Some(2), ..SourceLimits::default() };
    let config = StackConfig { source_limits: limits, ..StackConfig::default() };
    let mut rig = Rig::with(with(FastOpenOptions::default()), config);
    let cookie = cookie_in(&answer(&mut rig, port(900), of(None), &[])).unwrap();
    for n in 0..2 {
        let syn_ack = answer(&mut rig, port(n), of(Some(cookie)), DATA);
        assert_eq!(acked(&syn_ack), all_of(DATA.len()));
    }
    rig.send_from(port(3), &syn(ISS, of(Some(cookie))), DATA);
    rig.pass(1);
    assert!(rig.replies_to(port(3)).is_empty());
    let id = rig.accept().unwrap();
    rig.server.close(rig.now, id);
    rig.pass(1);
    rig.replies();
    assert_eq!(acked(&answer(&mut rig, port(4), of(Some(cookie)), DATA)), all_of(DATA.len()));
}

#[test]
fn without_cookies_any_syn_with_data_opens() {
    let options = FastOpenOptions { without_cookie: true, ..Default::default() };
    let mut rig = Rig::new(with(options));
    let syn_ack = answer(&mut rig, PEER, syn_options(1), DATA);
    assert_eq!((acked(&syn_ack), syn_ack.options.fast_open), (all_of(DATA.len()), None));
    assert!(rig.accept().is_some());
}

#[test]
fn a_listener_that_is_closed_resets_what_it_has_not_accepted() {
    let (mut rig, cookie) = rig(with(FastOpenOptions::default()));
    let syn_ack = answer(&mut rig, PEER, of(Some(cookie)), DATA);
    rig.server.close(rig.now, rig.listener);
    rig.pass(1);
    let replies = rig.replies_to(PEER);
    assert_eq!(replies.len(), 1, "{replies:?}");
    assert_eq!((replies[0].flags, replies[0].ack), (Flags::RST | Flags::ACK, syn_ack.ack));
}

fn to_server() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], PORT))
}

/// The client opens with first data.
fn open(rig: &mut Rig, bytes: &[u8]) -> SlotId {
    let first = FirstData { bytes, without_cookie: false };
    let opened = rig.client.tcp_connect_fast(rig.now, to_server(), None, first, |_| ());
    let (id, accepted) = opened.unwrap();
    assert_eq!(accepted, bytes.len());
    id
}

#[test]
fn a_client_asks_for_a_cookie_once_and_then_sends_with_the_syn() {
    let mut rig = Rig::new(with(FastOpenOptions::default()));
    let long: Vec<u8> = (0..5000u32).map(|n| ((n * n) >> 3) as u8).collect();
    for round in 0..3 {
        let client = open(&mut rig, &long);
        rig.pass(2);
        let at_once = rig.accept();
        assert_eq!(at_once.is_some(), round > 0);
        let mut got = at_once.map_or(Vec::new(), |id| rig.read(id));
        assert_eq!(got.len(), if round > 0 { 1460 - 40 } else { 0 });
        rig.pass(20);
        let server = at_once.or_else(|| rig.accept()).expect("a connection");
        got.extend(rig.read(server));
        assert!(got == long, "every byte once and in order");
        let info = rig.client.tcp_entry(client).unwrap().tcb.info();
        assert_eq!((info.syn_data, info.state), (round > 0, State::Established));
        rig.client.close(rig.now, client);
        rig.server.close(rig.now, server);
        rig.pass(20);
    }
    let counters = rig.client.counters();
    assert_eq!(counters.value(Counter::TcpFastOpensActive), 2);
    assert_eq!(counters.value(Counter::TcpFastOpensFailed), 0);
    let space =
        rig.client.fast_open_space(rig.now, to_server(), None, FirstData::default(), |_| ());
    assert_eq!(space.unwrap(), Some(1420));
}

#[test]
fn a_server_without_fast_open_is_asked_once() {
    let mut rig = Rig::new(ListenOptions::default());
    for _ in 0..2 {
        let client = open(&mut rig, DATA);
        rig.pass(20);
        let server = rig.accept().expect("a connection");
        assert_eq!(rig.read(server), DATA);
        rig.client.close(rig.now, client);
        rig.server.close(rig.now, server);
        rig.pass(20);
    }
    assert_eq!(rig.client.counters().value(Counter::TcpFastOpensFailed), 1);
}
