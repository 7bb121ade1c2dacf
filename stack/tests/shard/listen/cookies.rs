//! SYN cookies as a listener sends and takes them.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::task::Poll;

use fulmar_stack::base::{Counter, DropReason, Secrets, SeqNum};
use fulmar_stack::shard::{ListenOptions, Reserved, StackConfig, SynCookies};
use fulmar_stack::socket::Attempt;
use fulmar_stack::tcp::State;
use fulmar_stack::wire::tcp::{Flags, Header, Options};

use fulmar_testbed::listener::{Rig, ack, syn, syn_options};

const PEER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 5), 4000);
const ISS: SeqNum = SeqNum(0xffff_fff0);

fn always() -> ListenOptions {
    ListenOptions { syn_cookies: SynCookies::Always, ..ListenOptions::default() }
}

/// The SYN,ACK to a SYN of the peer with these options.
fn syn_ack(rig: &mut Rig, options: Options) -> Header {
    rig.send_from(PEER, &syn(ISS, options), &[]);
    rig.pass(1);
    let replies = rig.replies_to(PEER);
    assert_eq!(replies.len(), 1, "{replies:?}");
    assert_eq!(replies[0].flags, Flags::SYN | Flags::ACK);
    replies[0]
}

#[test]
fn every_honest_client_connects_at_its_first_syn_during_a_flood() {
    const CLIENTS: usize = 100;
    let mut rig = Rig::new(ListenOptions::default());
    // 100,000 SYNs a second.
    let connections = rig.connect_under(CLIENTS, 100);
    assert!(connections.iter().all(|c| c.syns == 1), "{connections:?}");
    let stat = rig.stat();
    assert_eq!((stat.embryos, stat.embryo_limit), (1024, 1024));
    assert_eq!(stat.cookies_valid, CLIENTS as u64);
    assert!(stat.cookies_sent > 40_000, "{stat:?}");
    for connection in connections {
        let server = connection.server.expect("accepted");
        let c = rig.client.tcp_entry(connection.client).unwrap().tcb.info();
        let s = rig.server.tcp_entry(server).unwrap().tcb.info();
        assert_eq!((c.state, s.state), (State::Established, State::Established));
        assert!(c.timestamps && s.timestamps && c.sack && s.sack);
        assert_eq!(c.window_scales, (s.window_scales.1, s.window_scales.0));
        assert!(s.window_scales.0 > 0 && s.window_scales.1 > 0, "{:?}", s.window_scales);
        assert_eq!((c.mss_bytes, s.mss_bytes), (1448, 1448));
    }
}

#[test]
fn bulk_arrives_whole_through_a_cookie_under_fire() {
    const BYTES: usize = 2 << 20;
    let mut rig = Rig::new(ListenOptions::default());
    rig.pass_under(20, 100);
    let client = rig.connect();
    rig.pass_under(4, 100);
    let server = rig.accept().expect("a connection");
    let (mut sent, mut received) = (0, Vec::new());
    let byte = |i: usize| (i ^ (i >> 9)) as u8;
    for _ in 0..2000 {
        let most = (BYTES - sent).min(64 << 10);
        if most > 0
            && let Ok(Poll::Ready(Reserved::Space(mut r))) =
                rig.client.sosend(client).reserve(rig.now, &[], most, Attempt::First)
        {
            let bytes: Vec<u8> = (sent..sent + r.len()).map(byte).collect();
            r.chain.copy_from(0, &bytes);
            sent += r.len();
            rig.client.sosend(client).commit(rig.now, r);
        }
        rig.pass_under(1, 10);
        rig.replies();
        received.extend(rig.read(server));
        if received.len() == BYTES {
            break;
        }
    }
    assert!(received == (0..BYTES).map(byte).collect::<Vec<_>>(), "{} bytes", received.len());
    assert_eq!(rig.client.counters().value(Counter::TcpRetransmitBytes), 0);
}

#[test]
fn a_flood_leaves_nothing_behind_but_a_full_syn_queue() {
    let options = ListenOptions { syn_backlog: Some(16), ..ListenOptions::default() };
    let mut rig = Rig::new(options);
    rig.fill_syn_queue();
    let sockets = rig.server.stat().sockets.len();
    let out = |rig: &mut Rig| rig.server.stat().pool.mbufs_in_use;
    let mbufs = out(&mut rig);
    rig.pass_under(100, 100);
    assert_eq!(rig.replies().len(), 10_000);
    assert_eq!(rig.server.stat().sockets.len(), sockets);
    assert_eq!(out(&mut rig), mbufs);
    assert_eq!(rig.stat().cookies_sent, 10_000);
    assert_eq!(rig.count(Counter::TcpSynCookiesSent), 10_000);
}

#[test]
fn embryos_take_nothing_from_the_windows_of_connections() {
    let mut rig = Rig::new(ListenOptions::default());
    let granted = rig.server.stat().window.granted_bytes;
    rig.fill_syn_queue();
    assert_eq!(rig.server.stat().window.granted_bytes, granted);
    rig.connect();
    rig.pass(4);
    let server = rig.accept().expect("a connection");
    let offered = rig.server.tcp_entry(server).unwrap().tcb.info().rcv_wnd_bytes as usize;
    assert!(offered >= 14_000, "{offered}");
    // What the SYN,ACK offered is charged to the byte; the snapshot has it in units of the scale.
    let charged = rig.server.stat().window.granted_bytes - granted;
    assert!((offered..=14_600).contains(&charged), "{charged} for {offered}");
}

#[test]
fn the_answers_to_a_burst_of_syns_cross_into_the_device_together() {
    let mut rig = Rig::new(always());
    let before = rig.bursts();
    rig.pass_under(1, 640);
    assert_eq!(rig.replies().len(), 640);
    assert_eq!(rig.bursts() - before, 10);
}

#[test]
fn cookies_are_sent_only_over_the_limit_and_expected_only_after_that() {
    let mut rig = Rig::new(ListenOptions { syn_backlog: Some(8), ..ListenOptions::default() });
    let reply = syn_ack(&mut rig, syn_options(7));
    rig.send_from(PEER, &ack(&reply), &[]);
    rig.pass(1);
    assert!(rig.accept().is_some());
    assert_eq!(rig.stat().cookies_sent, 0);
    // A bare ACK is what it always was: no cookie is expected.
    let stranger = SocketAddrV4::new(*PEER.ip(), 4001);
    rig.send_from(stranger, &ack(&reply), &[]);
    rig.pass(1);
    assert_eq!(rig.replies_to(stranger)[0].flags, Flags::RST);
    assert_eq!(rig.drops(DropReason::TcpBadFlags), 1);
    assert_eq!(rig.stat().cookies_failed, 0);
    rig.fill_syn_queue();
    rig.pass_under(1, 5);
    let stat = rig.stat();
    assert_eq!((stat.cookies_sent, stat.embryos), (5, 8));
}

#[test]
fn an_ack_that_brings_a_cookie_back_opens_the_connection_with_its_data_and_its_fin() {
    let mut rig = Rig::new(always());
    let reply = syn_ack(&mut rig, syn_options(7));
    let first = Header { flags: Flags::ACK | Flags::FIN | Flags::PSH, ..ack(&reply) };
    rig.send_from(PEER, &first, b"request");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    assert_eq!(rig.read(server), b"request");
    assert_eq!(rig.server.tcp_entry(server).unwrap().tcb.state(), State::CloseWait);
    let answer = rig.replies_to(PEER);
    assert_eq!(answer.last().unwrap().ack, SeqNum(ISS.0.wrapping_add(1 + 7 + 1)));
    // Once more: the connection answers, and there is no second one.
    rig.send_from(PEER, &first, b"request");
    rig.pass(1);
    assert!(rig.accept().is_none());
    assert_eq!(rig.stat().cookies_valid, 1);
}

#[test]
fn a_repeated_syn_gets_the_same_cookie_and_a_repeated_ack_no_second_connection() {
    let mut rig = Rig::new(always());
    let (first, second) = (syn_ack(&mut rig, syn_options(7)), syn_ack(&mut rig, syn_options(1007)));
    assert_eq!(first.seq, second.seq);
    for _ in 0..3 {
        rig.send_from(PEER, &ack(&first), &[]);
    }
    rig.pass(1);
    assert!(rig.accept().is_some() && rig.accept().is_none());
}

#[test]
fn a_peer_without_timestamps_gets_neither_scale_nor_sack() {
    let mut rig = Rig::new(always());
    let reply = syn_ack(&mut rig, Options { timestamps: None, ..syn_options(7) });
    let o = reply.options;
    assert_eq!((o.window_scale, o.sack_permitted, o.timestamps), (None, false, None));
    assert_eq!(o.mss, Some(1460));
    rig.send_from(PEER, &ack(&reply), b"x");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    let info = rig.server.tcp_entry(server).unwrap().tcb.info();
    assert_eq!((info.window_scales, info.sack, info.timestamps), ((0, 0), false, false));
    assert_eq!((info.mss_bytes, info.snd_wnd_bytes), (1460, 502));
    assert_eq!(rig.read(server), b"x");
}

#[test]
fn forged_acks_open_nothing_and_their_resets_are_limited() {
    let mut rig = Rig::new(always());
    let reply = syn_ack(&mut rig, syn_options(7));
    let mut x = 1u64;
    for n in 0..100_000u32 {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let forged = Header { ack: SeqNum((x >> 32) as u32), ..ack(&reply) };
        let from = SocketAddrV4::new(*PEER.ip(), 1024 + (n % 50_000) as u16);
        rig.send_from(from, &forged, &[]);
        if n % 1000 == 999 {
            rig.pass(1);
        }
    }
    let stat = rig.stat();
    assert_eq!((stat.cookies_valid, stat.cookies_failed), (0, 100_000));
    assert_eq!(rig.drops(DropReason::SynCookieFailed), 100_000);
    assert!(rig.accept().is_none());
    let resets = rig.replies().iter().filter(|r| r.header.flags == Flags::RST).count();
    assert!((450..1300).contains(&resets), "{resets} resets");
    // The one cookie that was asked for is still good.
    rig.send_from(PEER, &ack(&reply), &[]);
    rig.pass(1);
    assert!(rig.accept().is_some());
}

#[test]
fn a_cookie_is_bound_to_its_flow() {
    let mut rig = Rig::new(always());
    let reply = syn_ack(&mut rig, syn_options(7));
    let others = [
        SocketAddrV4::new(*PEER.ip(), PEER.port() + 1),
        SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 6), PEER.port()),
    ];
    for other in others {
        rig.send_from(other, &ack(&reply), &[]);
    }
    rig.pass(1);
    assert!(rig.accept().is_none());
    assert_eq!(rig.stat().cookies_failed, 2);
}

#[test]
fn an_old_cookie_is_answered_by_a_reset() {
    let mut rig = Rig::new(always());
    let old = syn_ack(&mut rig, syn_options(7));
    rig.pass(130_000);
    // Another one, so that the listener still expects some.
    let other = SocketAddrV4::new(*PEER.ip(), 4001);
    rig.send_from(other, &syn(ISS, syn_options(7)), &[]);
    rig.pass(1);
    rig.replies();
    rig.send_from(PEER, &ack(&old), &[]);
    rig.pass(1);
    let reset = rig.replies_to(PEER);
    assert_eq!((reset[0].flags, reset[0].seq), (Flags::RST, SeqNum(old.seq.0.wrapping_add(1))));
    assert!(rig.accept().is_none());
    assert_eq!(rig.stat().cookies_failed, 1);
}

#[test]
fn a_stack_that_was_started_again_does_not_know_the_cookies_of_before() {
    let config = |seed| StackConfig {
        secrets: Some(Secrets::for_simulation(seed)),
        ..StackConfig::default()
    };
    let mut before = Rig::with(always(), config(1));
    let reply = syn_ack(&mut before, syn_options(7));
    for (seed, accepted) in [(1, true), (2, false)] {
        let mut after = Rig::with(always(), config(seed));
        syn_ack(&mut after, syn_options(7));
        after.send_from(PEER, &ack(&reply), &[]);
        after.pass(1);
        assert_eq!(after.accept().is_some(), accepted, "seed {seed}");
    }
}

#[test]
fn data_behind_a_lost_first_segment_is_not_answered_by_a_reset() {
    let mut rig = Rig::new(always());
    let reply = syn_ack(&mut rig, syn_options(7));
    let first = ack(&reply);
    let second = Header { seq: SeqNum(first.seq.0.wrapping_add(5)), ..first };
    rig.send_from(PEER, &second, b"second");
    rig.pass(1);
    assert_eq!(rig.replies_to(PEER), []);
    rig.send_from(PEER, &first, b"first");
    rig.send_from(PEER, &second, b"second");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    assert_eq!(rig.read(server), b"firstsecond");
}

#[test]
fn an_ack_of_a_cookie_counts_although_a_later_syn_has_made_an_embryo() {
    let mut rig = Rig::new(ListenOptions { syn_backlog: Some(8), ..ListenOptions::default() });
    rig.fill_syn_queue();
    let cookie = syn_ack(&mut rig, syn_options(7));
    // The embryos of the flood give up; the peer's SYN comes again and finds room.
    rig.pass(8_000);
    assert_eq!(rig.stat().embryos, 0);
    let embryo = syn_ack(&mut rig, syn_options(8007));
    assert_eq!(rig.stat().embryos, 1);
    assert_ne!(cookie.seq, embryo.seq);
    rig.send_from(PEER, &ack(&cookie), b"hello");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    assert_eq!(rig.read(server), b"hello");
    let stat = rig.stat();
    assert_eq!((stat.embryos, stat.cookies_valid), (0, 1));
    assert!(rig.replies_to(PEER).iter().all(|h| !h.flags.contains(Flags::RST)));
}

#[test]
fn data_behind_an_ack_of_a_cookie_is_not_reset_by_the_embryo_of_a_later_syn() {
    let mut rig = Rig::new(ListenOptions { syn_backlog: Some(8), ..ListenOptions::default() });
    rig.fill_syn_queue();
    let cookie = syn_ack(&mut rig, syn_options(7));
    rig.pass(8_000);
    syn_ack(&mut rig, syn_options(8007));
    let first = ack(&cookie);
    let second = Header { seq: SeqNum(first.seq.0.wrapping_add(5)), ..first };
    rig.send_from(PEER, &second, b"second");
    rig.pass(1);
    assert!(rig.replies_to(PEER).iter().all(|h| !h.flags.contains(Flags::RST)));
    rig.send_from(PEER, &first, b"first");
    rig.send_from(PEER, &second, b"second");
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    assert_eq!(rig.read(server), b"firstsecond");
}

#[test]
fn a_syn_that_follows_a_connection_in_time_wait_gets_an_embryo_with_a_later_number() {
    let mut rig = Rig::new(ListenOptions { syn_backlog: Some(8), ..ListenOptions::default() });
    let reply = syn_ack(&mut rig, syn_options(7));
    let first = ack(&reply);
    rig.send_from(PEER, &first, &[]);
    rig.pass(1);
    let server = rig.accept().expect("a connection");
    // The server closes first, so TIME-WAIT is its.
    rig.server.close(rig.now, server);
    let fin = Header { flags: Flags::ACK | Flags::FIN, ack: SeqNum(first.ack.0 + 1), ..first };
    rig.send_from(PEER, &fin, &[]);
    rig.pass(1);
    assert_eq!(rig.server.stat().time_wait, 1);
    rig.fill_syn_queue();
    let next = Header { seq: SeqNum(ISS.0.wrapping_add(100_000)), ..syn(ISS, syn_options(5000)) };
    // The peers of the embryos may have answered already: none is given up for it.
    rig.send_from(PEER, &next, &[]);
    rig.pass(1);
    assert!(rig.replies_to(PEER).is_empty());
    assert_eq!((rig.stat().embryos_replaced, rig.stat().syns_dropped), (0, 1));
    // They have not answered within the time-out.
    rig.pass(1500);
    rig.send_from(PEER, &next, &[]);
    rig.pass(1);
    let replies = rig.replies_to(PEER);
    assert_eq!(replies[0].flags, Flags::SYN | Flags::ACK);
    assert!(replies[0].seq.after(SeqNum(first.ack.0 + 1)));
    let stat = rig.stat();
    assert_eq!((stat.embryos, stat.embryos_replaced, stat.cookies_sent), (8, 1, 0));
}

#[test]
fn the_answer_has_the_time_to_live_of_the_listener() {
    let mut rig = Rig::new(always());
    rig.server.listener(rig.listener).map(|l| l.options.ttl = Some(3)).unwrap();
    rig.send_from(PEER, &syn(ISS, syn_options(7)), &[]);
    rig.pass(1);
    assert_eq!(rig.replies()[0].ttl, 3);
}
