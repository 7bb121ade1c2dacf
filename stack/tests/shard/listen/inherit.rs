//! What connections inherit from their listener.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::task::Poll;

use fulmar_stack::base::{Counter, Duration, SeqNum, SlotId};
use fulmar_stack::shard::{ListenOptions, Reserved, SocketOptions, StackConfig, SynCookies};
use fulmar_stack::socket::{Attempt, Shutdown, SocketError};
use fulmar_stack::tcp::{Config, CongestionControl, EcnPolicy, Keepalive};
use fulmar_stack::wire::tcp::{Flags, Header};

use fulmar_testbed::listener::{Rig, ack, syn, syn_options};

const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 5), 4000);
const KEEPALIVE: Keepalive =
    Keepalive { idle: Duration::from_secs(3), interval: Duration::from_secs(1), count: 2 };

fn options(syn_cookies: SynCookies) -> ListenOptions {
    ListenOptions { syn_cookies, ..ListenOptions::default() }
}

fn with(syn_cookies: SynCookies, socket: SocketOptions) -> ListenOptions {
    ListenOptions { socket, ..options(syn_cookies) }
}

/// A connection of a peer that sends nothing from then on.
fn silent_peer(rig: &mut Rig) -> SlotId {
    rig.send_from(PEER, &syn(SeqNum(1), syn_options(7)), &[]);
    rig.pass(1);
    let syn_ack = rig.replies_to(PEER)[0];
    rig.send_from(PEER, &ack(&syn_ack), &[]);
    rig.pass(1);
    rig.replies();
    rig.accept().expect("a connection")
}

fn flags(sent: &[Header]) -> Vec<Flags> {
    sent.iter().map(|h| h.flags).collect()
}

#[test]
fn a_listeners_keepalive_resets_an_accepted_peer_that_has_vanished() {
    for cookies in [SynCookies::Off, SynCookies::Always] {
        let mut rig = Rig::new(with(
            cookies,
            SocketOptions { keepalive: Some(KEEPALIVE), ..SocketOptions::default() },
        ));
        let id = silent_peer(&mut rig);
        assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.keepalive(), Some(KEEPALIVE));
        rig.pass(2_900);
        assert_eq!(flags(&rig.replies_to(PEER)), []);
        rig.pass(1_900);
        assert_eq!(flags(&rig.replies_to(PEER)), [Flags::ACK, Flags::ACK]);
        assert!(matches!(rig.server.tcp_take(id, 1), Ok(Poll::Pending)));
        rig.pass(500);
        assert_eq!(flags(&rig.replies_to(PEER)), [Flags::RST | Flags::ACK]);
        let e = rig.server.tcp_take(id, 1).expect_err("the peer is gone");
        assert_eq!(e, SocketError::TimedOut);
        assert_eq!(rig.count(Counter::TcpKeepaliveTimeouts), 1);
    }
}

#[test]
fn every_option_of_a_listener_is_in_its_syn_ack_and_in_its_connections() {
    for cookies in [SynCookies::Off, SynCookies::Always] {
        let socket = SocketOptions {
            nodelay: true,
            quickack: Some(false),
            congestion: Some(CongestionControl::Bbr),
            max_pacing_rate: Some(1 << 20),
            ttl: Some(9),
            tos: 46 << 2 | 1,
            max_segment: Some(1000),
            notsent_low_water: Some(5000),
            send_buffer: Some(50_000),
            recv_buffer: Some(8000),
            ..SocketOptions::default()
        };
        let mut rig = Rig::new(with(cookies, socket));
        rig.send_from(PEER, &syn(SeqNum(1), syn_options(7)), &[]);
        rig.pass(1);
        let syn_ack = rig.replies().remove(0);
        assert_eq!((syn_ack.ttl, syn_ack.tos), (9, 46 << 2));
        assert_eq!(syn_ack.header.options.mss, Some(1000));
        assert_eq!(syn_ack.header.window, 8000);
        rig.send_from(PEER, &ack(&syn_ack.header), &[]);
        rig.pass(1);
        let id = rig.accept().expect("a connection");
        let entry = rig.server.tcp_entry(id).unwrap();
        assert_eq!((entry.ttl, entry.tos()), (Some(9), 46 << 2));
        let tcb = &entry.tcb;
        let info = tcb.info();
        assert_eq!((tcb.nodelay(), tcb.max_segment()), (true, Some(1000)));
        assert_eq!(
            (tcb.congestion(), tcb.max_pacing_rate()),
            (CongestionControl::Bbr, Some(1 << 20))
        );
        assert_eq!(tcb.notsent_low_water(), Some(5000));
        assert_eq!((info.send_buffer_bytes, info.recv_buffer_bytes), (50_000, 8000));
        assert_eq!(info.mss_bytes, 988);
    }
}

#[test]
fn a_connection_from_a_cookie_has_the_ecn_of_its_listener() {
    let socket = SocketOptions { ecn: Some(EcnPolicy::Accept), ..SocketOptions::default() };
    let tcp = Config { ecn: EcnPolicy::Off, ..Config::default() };
    let stack = StackConfig { tcp, ..StackConfig::default() };
    let mut rig = Rig::with(with(SynCookies::Always, socket), stack);
    let plain = syn(SeqNum(1), syn_options(7));
    rig.send_from(PEER, &Header { flags: plain.flags | Flags::ECN, ..plain }, &[]);
    rig.pass(1);
    let syn_ack = rig.replies_to(PEER)[0];
    assert_eq!(syn_ack.flags, Flags::SYN | Flags::ACK | Flags::of_ace(2));
    // The SYN,ACK arrived with Not-ECT (RFC 9768 section 3.2.2.1).
    let last = ack(&syn_ack);
    rig.send_from(PEER, &Header { flags: last.flags | Flags::of_ace(2), ..last }, &[]);
    rig.pass(1);
    let id = rig.accept().expect("a connection");
    assert!(rig.server.tcp_entry(id).unwrap().tcb.info().accurate_ecn);
}

#[test]
fn the_service_of_a_listener_stays_with_ecn_and_may_change_during_a_connection() {
    let socket = SocketOptions { tos: 0xff, nodelay: true, ..SocketOptions::default() };
    let mut rig = Rig::new(with(SynCookies::Off, socket));
    let asks = Flags::ECE | Flags::CWR;
    let asking = syn(SeqNum(1), syn_options(7));
    rig.send_from(PEER, &Header { flags: asking.flags | asks, ..asking }, &[]);
    rig.pass(1);
    let syn_ack = rig.replies().remove(0);
    // The SYN,ACK is not ECN-capable (RFC 3168 section 6.1.1).
    assert_eq!((syn_ack.tos, syn_ack.header.flags), (0xfc, Flags::SYN | Flags::ACK | Flags::ECE));
    rig.send_from(PEER, &ack(&syn_ack.header), &[]);
    rig.pass(1);
    let id = rig.accept().expect("a connection");
    for tos in [None, Some(0xff), Some(0), Some(32)] {
        let now = rig.now;
        let set = |entry: &mut fulmar_stack::shard::TcpEntry| {
            tos.into_iter().for_each(|t| entry.set_tos(t))
        };
        rig.server.with_tcb(now, id, set).unwrap();
        rig.replies();
        for _ in 0..2 {
            let step = rig.server.sosend(id).reserve(now, b"x", 1, Attempt::First);
            assert!(matches!(step, Ok(Poll::Ready(Reserved::Sent(1)))));
        }
        rig.pass(1);
        let sent: Vec<u8> = rig.replies().iter().map(|r| r.tos).collect();
        // New data is ECT(0).
        assert!(
            !sent.is_empty() && sent.iter().all(|t| *t == tos.unwrap_or(0xff) & 0xfc | 2),
            "{sent:?}"
        );
    }
}

#[test]
fn without_it_an_idle_peer_is_left_alone() {
    let mut rig = Rig::new(options(SynCookies::Off));
    silent_peer(&mut rig);
    rig.pass(20_000);
    assert_eq!(flags(&rig.replies_to(PEER)), []);
}

#[test]
fn a_listeners_user_time_out_ends_a_connection_whose_fin_nobody_acknowledges() {
    for cookies in [SynCookies::Off, SynCookies::Always] {
        let user_timeout = Some(Duration::from_secs(2));
        let mut rig =
            Rig::new(with(cookies, SocketOptions { user_timeout, ..SocketOptions::default() }));
        let id = silent_peer(&mut rig);
        assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.user_timeout(), user_timeout);
        assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.keepalive(), None);
        let now = rig.now;
        rig.server.tcp_shutdown(now, id, Shutdown::Write).unwrap();
        rig.pass(1_900);
        assert!(!flags(&rig.replies_to(PEER)).contains(&(Flags::RST | Flags::ACK)));
        // The FIN is repeated once at least, and then has the least time-out.
        rig.pass(400);
        assert!(flags(&rig.replies_to(PEER)).contains(&(Flags::RST | Flags::ACK)));
        assert_eq!(rig.count(Counter::TcpUserTimeouts), 1);
    }
}
