//! The SYN queue and the accept queue: what each holds, and what happens when it is full.

use std::net::{Ipv4Addr, SocketAddrV4};

use fulmar_stack::base::{Counter, DropReason, SeqNum};
use fulmar_stack::shard::{ListenOptions, SourceLimits, StackConfig, SynCookies};
use fulmar_stack::wire::tcp::{Flags, Header};

use fulmar_testbed::listener::{Rig, ack, syn, syn_options};

fn peer(n: u16) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 5), 4000 + n)
}

/// The answers to a SYN of this peer.
fn answers_to_syn(rig: &mut Rig, from: SocketAddrV4) -> Vec<Header> {
    rig.replies();
    rig.send_from(from, &syn(SeqNum(77), syn_options(7)), &[]);
    rig.pass(1);
    rig.replies_to(from)
}

/// A peer that completes its handshake, or tries to.
fn complete(rig: &mut Rig, from: SocketAddrV4) -> bool {
    let Some(reply) = answers_to_syn(rig, from).first().copied() else { return false };
    rig.send_from(from, &ack(&reply), &[]);
    rig.pass(1);
    true
}

#[test]
fn embryos_take_no_place_in_the_accept_queue() {
    let options = ListenOptions { backlog: 2, ..ListenOptions::default() };
    let mut rig = Rig::new(options);
    // Eight, although the backlog is two.
    rig.fill_syn_queue();
    assert_eq!(rig.stat().embryo_limit, 8);
    assert!(complete(&mut rig, peer(0)) && complete(&mut rig, peer(1)));
    let stat = rig.stat();
    assert_eq!((stat.accept_queue, stat.accept_limit, stat.embryos), (2, 2, 8));
}

#[test]
fn a_full_accept_queue_drops_syns_and_takes_them_again_after_an_accept() {
    for syn_cookies in [SynCookies::Off, SynCookies::WhenFull, SynCookies::Always] {
        let options = ListenOptions { backlog: 1, syn_cookies, ..ListenOptions::default() };
        let mut rig = Rig::new(options);
        assert!(complete(&mut rig, peer(0)));
        assert_eq!(answers_to_syn(&mut rig, peer(1)), []);
        assert_eq!(rig.drops(DropReason::AcceptQueueFull), 1);
        assert_eq!(rig.stat().syns_dropped, 1);
        assert!(rig.accept().is_some());
        assert!(complete(&mut rig, peer(1)));
        assert!(rig.accept().is_some(), "{syn_cookies:?}");
    }
}

#[test]
fn the_last_ack_at_a_full_accept_queue_keeps_the_embryo() {
    let mut rig = Rig::new(ListenOptions { backlog: 1, ..ListenOptions::default() });
    let first = answers_to_syn(&mut rig, peer(0))[0];
    let second = answers_to_syn(&mut rig, peer(1))[0];
    rig.send_from(peer(0), &ack(&first), &[]);
    rig.send_from(peer(1), &ack(&second), b"data");
    rig.pass(1);
    let stat = rig.stat();
    assert_eq!((stat.accept_queue, stat.embryos, stat.acks_dropped), (1, 1, 1));
    assert_eq!(rig.drops(DropReason::AcceptQueueFull), 1);
    assert!(rig.accept().is_some());
    // The SYN,ACK goes again, the peer repeats its ACK with its data.
    rig.pass(1100);
    let again = rig.replies_to(peer(1));
    assert_eq!(again[0].flags, Flags::SYN | Flags::ACK);
    rig.send_from(peer(1), &ack(&second), b"data");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    assert_eq!(rig.read(server), b"data");
}

#[test]
fn pressure_does_not_shorten_the_wait_of_a_peer_that_has_answered() {
    let options = ListenOptions { backlog: 1, syn_backlog: Some(8), ..ListenOptions::default() };
    let mut rig = Rig::new(options);
    let first = answers_to_syn(&mut rig, peer(0))[0];
    let second = answers_to_syn(&mut rig, peer(1))[0];
    for n in 2..8 {
        answers_to_syn(&mut rig, peer(n));
    }
    rig.send_from(peer(0), &ack(&first), &[]);
    rig.send_from(peer(1), &ack(&second), b"data");
    rig.pass(1);
    assert!(rig.accept().is_some());
    assert_eq!(rig.stat().embryos, 7, "more than half of the limit");
    rig.pass(20_000);
    rig.send_from(peer(1), &ack(&second), b"data");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    assert_eq!(rig.read(server), b"data");
}

#[test]
fn a_cookie_at_a_full_accept_queue_is_dropped_and_good_later() {
    let options =
        ListenOptions { backlog: 1, syn_cookies: SynCookies::Always, ..ListenOptions::default() };
    let mut rig = Rig::new(options);
    let first = answers_to_syn(&mut rig, peer(0))[0];
    let second = answers_to_syn(&mut rig, peer(1))[0];
    rig.send_from(peer(0), &ack(&first), &[]);
    rig.send_from(peer(1), &ack(&second), b"data");
    rig.pass(1);
    assert_eq!(rig.replies_to(peer(1)), [], "nothing is sent to the peer");
    assert_eq!(rig.stat().acks_dropped, 1);
    assert!(rig.accept().is_some());
    rig.send_from(peer(1), &ack(&second), b"data");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    assert_eq!(rig.read(server), b"data");
}

#[test]
fn without_cookies_the_oldest_embryo_gives_way() {
    let options = ListenOptions {
        syn_backlog: Some(4),
        syn_cookies: SynCookies::Off,
        ..ListenOptions::default()
    };
    let mut rig = Rig::new(options);
    let replies: Vec<_> = (0..6).map(|n| answers_to_syn(&mut rig, peer(n))[0]).collect();
    let stat = rig.stat();
    assert_eq!((stat.embryos, stat.embryos_replaced, stat.cookies_sent), (4, 2, 0));
    assert_eq!(rig.count(Counter::TcpEmbryosReplaced), 2);
    for (n, reply) in (0..).zip(&replies) {
        rig.send_from(peer(n), &ack(reply), &[]);
        rig.pass(1);
        assert_eq!(rig.accept().is_some(), n >= 2, "peer {n}");
    }
    // A long flood: the order of embryos does not grow.
    rig.pass_under(20, 100);
    assert_eq!(rig.stat().embryos, 4);
}

#[test]
fn an_honest_client_connects_through_a_flood_without_cookies_if_it_is_quick() {
    let options = ListenOptions { syn_cookies: SynCookies::Off, ..ListenOptions::default() };
    let mut rig = Rig::new(options);
    rig.pass_under(20, 100);
    rig.connect();
    rig.pass_under(4, 100);
    assert!(rig.accept().is_some());
}

#[test]
fn under_pressure_an_embryo_is_gone_after_seven_seconds() {
    let options = ListenOptions { syn_backlog: Some(8), ..ListenOptions::default() };
    // How many SYN,ACKs go before the embryo is given up, and when that is.
    let life = |others: u16| {
        let mut rig = Rig::new(options);
        for n in 0..=others {
            answers_to_syn(&mut rig, peer(n));
        }
        let (mut syn_acks, mut seconds) = (1, 0);
        while rig.stat().embryos > 0 {
            rig.pass(1000);
            syn_acks += rig.replies_to(peer(0)).len();
            seconds += 1;
        }
        assert_eq!(rig.stat().embryos_expired, u64::from(others) + 1);
        (syn_acks, seconds)
    };
    // After 1 + 2 + 4 s, and the time of the handshake, which the eighth second begins with.
    assert_eq!(life(7), (3, 8));
    let (syn_acks, seconds) = life(0);
    assert!(syn_acks == 7 && seconds > 100, "{syn_acks} in {seconds} s");
}

#[test]
fn a_source_at_its_limit_of_embryos_is_answered_with_cookies() {
    let limits = SourceLimits { embryos: Some(2), connections: None };
    let config = StackConfig { source_limits: limits, ..StackConfig::default() };
    let mut rig = Rig::with(ListenOptions::default(), config.clone());
    let replies: Vec<_> = (0..5).map(|n| answers_to_syn(&mut rig, peer(n))[0]).collect();
    let stat = rig.stat();
    assert_eq!((stat.embryos, stat.cookies_sent), (2, 3));
    for (n, reply) in (0..).zip(&replies) {
        rig.send_from(peer(n), &ack(reply), &[]);
    }
    rig.pass(1);
    assert_eq!(rig.stat().accept_queue, 5);
    // Without cookies the SYN is dropped; another source is not touched.
    let off = ListenOptions { syn_cookies: SynCookies::Off, ..ListenOptions::default() };
    let mut rig = Rig::with(off, config);
    let answered = (0..5).filter(|n| !answers_to_syn(&mut rig, peer(*n)).is_empty()).count();
    assert_eq!((answered, rig.drops(DropReason::SourceLimit)), (2, 3));
    let other = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 6), 4000);
    assert_eq!(answers_to_syn(&mut rig, other).len(), 1);
}

#[test]
fn a_source_has_as_many_connections_as_it_may_and_a_closed_one_makes_room() {
    let limits = SourceLimits { embryos: None, connections: Some(2) };
    let config = StackConfig { source_limits: limits, ..StackConfig::default() };
    for syn_cookies in [SynCookies::WhenFull, SynCookies::Always] {
        let options = ListenOptions { syn_cookies, ..ListenOptions::default() };
        let mut rig = Rig::with(options, config.clone());
        // Three at the same time, of which the third completes too late.
        let replies: Vec<_> = (0..3).map(|n| answers_to_syn(&mut rig, peer(n))[0]).collect();
        for (n, reply) in (0..).zip(&replies) {
            rig.send_from(peer(n), &ack(reply), &[]);
        }
        rig.pass(1);
        assert_eq!((rig.stat().accept_queue, rig.stat().acks_dropped), (2, 1));
        assert_eq!(answers_to_syn(&mut rig, peer(9)), []);
        assert_eq!(rig.drops(DropReason::SourceLimit), 2);
        let other = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 6), 4000);
        assert!(complete(&mut rig, other));
        // A reset ends the first.
        let reset = Header { flags: Flags::RST, ..ack(&replies[0]) };
        rig.send_from(peer(0), &reset, &[]);
        let gone = rig.accept().expect("it was accepted before its reset came");
        rig.server.close(rig.now, gone);
        rig.pass(1);
        assert!(complete(&mut rig, peer(9)), "{syn_cookies:?}");
        assert_eq!(rig.stat().accept_queue, 3);
    }
}

#[test]
fn a_closed_listener_leaves_no_count_of_its_sources_behind() {
    let limits = SourceLimits { embryos: Some(1), connections: Some(1) };
    let config = StackConfig { source_limits: limits, ..StackConfig::default() };
    let off = ListenOptions { syn_cookies: SynCookies::Off, ..ListenOptions::default() };
    let mut rig = Rig::with(off, config);
    assert_eq!(answers_to_syn(&mut rig, peer(0)).len(), 1);
    assert_eq!(answers_to_syn(&mut rig, peer(1)), []);
    let local = rig.server.addresses(rig.listener).unwrap().0.unwrap();
    rig.server.close(rig.now, rig.listener);
    rig.pass(1);
    rig.listener = rig.server.tcp_listen(local, off).unwrap();
    assert!(complete(&mut rig, peer(2)));
    assert!(rig.accept().is_some());
}
