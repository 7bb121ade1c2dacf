//! The fast path sends what the slow path sends, whatever changes in between.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::Poll;

use fulmar_stack::base::{Duration, MtuDiscovery, SlotId};
use fulmar_stack::ip::{IfAddr, Prefix, Route};
use fulmar_stack::shard::{PendingError, SendMessage};
use fulmar_stack::socket::SocketError;
use proptest::option::of;
use proptest::prelude::*;

use crate::shard::udp::rig::{OURS, PEER, Rig, US, caps, peer};

/// A network behind routers, and its prefix.
const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

fn far_net() -> Prefix {
    Prefix { addr: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 0)), len: 24 }
}

fn router(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, number)
}

fn via(number: u8, mtu: Option<usize>) -> Route {
    Route { dst: far_net(), via: Some(router(number).into()), src: None, mtu }
}

/// A rig with a socket connected to the far host by way of router 3, whom it knows as router 4.
fn routed() -> (Rig, SlotId) {
    let mut rig = Rig::new(caps(false));
    let id = rig.bound();
    for number in [4, 3] {
        rig.shard.ip().add_route(via(number, None)).unwrap();
        rig.shard.udp().connect(id, SocketAddr::new(FAR.into(), 9)).unwrap();
        rig.send(id, b"first").unwrap();
        rig.answer_arp(router(number), number);
        rig.send(id, b"second").unwrap();
    }
    rig.take();
    (rig, id)
}

#[test]
fn the_next_datagram_goes_where_the_neighbour_has_moved_to() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.send(id, b"a").unwrap();
    rig.send(id, b"b").unwrap();
    assert_eq!(rig.stations(), [2, 2]);
    rig.claim(PEER, 77);
    rig.send(id, b"c").unwrap();
    assert_eq!(rig.stations(), [2]);
    rig.leave_unanswered();
    rig.send(id, b"d").unwrap();
    assert_eq!(rig.stations(), [77]);
}

#[test]
fn the_next_datagram_takes_the_new_route_and_without_one_there_is_none() {
    let (mut rig, id) = routed();
    rig.send(id, b"a").unwrap();
    rig.shard.ip().add_route(via(4, None)).unwrap();
    rig.send(id, b"b").unwrap();
    rig.send(id, b"c").unwrap();
    assert_eq!(rig.stations(), [3, 4, 4]);
    rig.shard.ip().remove_route(far_net());
    assert_eq!(rig.send(id, b"d"), Err(SocketError::NetworkUnreachable));
    rig.shard.ip().add_route(via(3, None)).unwrap();
    rig.send(id, b"e").unwrap();
    assert_eq!(rig.stations(), [3]);
}

#[test]
fn nothing_leaves_with_an_address_that_is_no_longer_ours() {
    let (mut rig, id) = routed();
    let other: IpAddr = router(99).into();
    rig.shard.ip().add_address(IfAddr { addr: other, prefix_len: 24 }).unwrap();
    rig.send(id, b"a").unwrap();
    assert!(rig.shard.ip().remove_address(US.into()));
    assert_eq!(rig.send(id, b"b"), Err(SocketError::NetworkUnreachable));
    assert_eq!(rig.stations(), [3]);
    rig.shard.ip().add_address(IfAddr { addr: US.into(), prefix_len: 24 }).unwrap();
    rig.send(id, b"c").unwrap();
    assert_eq!(rig.stations(), [3]);
}

#[test]
fn a_wildcard_socket_that_is_not_connected_takes_the_address_that_is_left() {
    let mut rig = Rig::new(caps(false));
    let id = rig.shard.udp().bind("0.0.0.0:4000".parse().unwrap(), Default::default()).unwrap();
    let send = |rig: &mut Rig| rig.shard.udp().send(rig.now, id, &[b"x"], Some(peer(9)));
    send(&mut rig).unwrap();
    rig.answer_arp(PEER, 2);
    send(&mut rig).unwrap();
    rig.take();
    let other = router(99);
    rig.shard.ip().add_address(IfAddr { addr: other.into(), prefix_len: 24 }).unwrap();
    rig.shard.ip().remove_address(US.into());
    send(&mut rig).unwrap();
    let sent = rig.take();
    assert_eq!(sent.last().unwrap().0[26..30], other.octets());
}

#[test]
fn a_named_datagram_leaves_with_the_address_that_connecting_has_fixed() {
    let mut rig = Rig::new(caps(false));
    let other = Ipv4Addr::new(10, 9, 9, 1);
    rig.shard.ip().add_address(IfAddr { addr: other.into(), prefix_len: 24 }).unwrap();
    let id = rig.shard.udp().bind("0.0.0.0:4000".parse().unwrap(), Default::default()).unwrap();
    let send = |rig: &mut Rig| rig.shard.udp().send(rig.now, id, &[b"x"], Some(peer(9))).unwrap();
    send(&mut rig);
    rig.answer_arp(PEER, 2);
    send(&mut rig);
    rig.take();
    rig.shard.udp().connect(id, SocketAddr::new(Ipv4Addr::new(10, 9, 9, 2).into(), 9)).unwrap();
    send(&mut rig);
    let sent = rig.take();
    assert_eq!(sent.last().unwrap().0[26..30], other.octets());
}

#[test]
fn a_destination_that_changes_under_a_template_is_another_one() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.send(id, b"a").unwrap();
    rig.shard.udp().connect(id, peer(10)).unwrap();
    rig.send(id, b"b").unwrap();
    rig.shard.udp().connect(id, SocketAddr::new(router(5).into(), 11)).unwrap();
    rig.send(id, b"c").unwrap();
    rig.answer_arp(router(5), 5);
    let ports = |f: &[u8]| u16::from_be_bytes([f[36], f[37]]);
    let sent = rig.take();
    let datagrams: Vec<_> = sent.iter().filter(|f| f.0[12..14] == [8, 0]).collect();
    let ends: Vec<(u8, u16)> = datagrams.iter().map(|f| (f.0[5], ports(&f.0))).collect();
    assert_eq!(ends, [(2, 9), (2, 10), (5, 11)]);
}

#[test]
fn options_that_change_are_in_the_next_datagram() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.send(id, b"a").unwrap();
    rig.shard
        .udp()
        .with_socket(id, |u| {
            (u.ttl, u.dscp_ecn, u.mtu_discovery) = (Some(3), 0x20, MtuDiscovery::On)
        })
        .unwrap();
    rig.send(id, b"b").unwrap();
    rig.send(id, b"c").unwrap();
    let sent = rig.take();
    let fields: Vec<_> = sent.iter().map(|f| (f.0[22], f.0[15], f.0[20] & 0x40)).collect();
    assert_eq!(fields, [(64, 0, 0), (3, 0x20, 0x40), (3, 0x20, 0x40)]);
}

/// Something that happens to a host.
#[derive(Clone, Debug)]
enum Event {
    Send(usize),
    SendTo(u8, usize),
    SendMany(Option<u8>, Vec<(usize, Option<u8>)>),
    Connect(u8),
    Told(u8, u8),
    AddRoute(u8, Option<usize>),
    RemoveRoute,
    AddAddress,
    RemoveAddress,
    Options(u8, MtuDiscovery, u8),
    NarrowPath(usize),
    Pass(u64),
}

/// Hosts on the link have the numbers 2 to 5; 0 is far away.
fn host(number: u8) -> SocketAddr {
    let ip = if number == 0 { FAR } else { router(number) };
    SocketAddr::new(ip.into(), 9)
}

fn mtu_discovery() -> impl Strategy<Value = MtuDiscovery> {
    prop_oneof![Just(MtuDiscovery::Off), Just(MtuDiscovery::On), Just(MtuDiscovery::Probe)]
}

fn event() -> impl Strategy<Value = Event> {
    let bytes = prop_oneof![Just(0usize), Just(18), Just(1472), Just(1473), 0..3000usize];
    let destination = prop_oneof![Just(0u8), 2..6u8];
    prop_oneof![
        6 => bytes.clone().prop_map(Event::Send),
        3 => (destination.clone(), bytes.clone()).prop_map(|(to, n)| Event::SendTo(to, n)),
        3 => (of(destination.clone()), prop::collection::vec((bytes, of(any::<u8>())), 1..4))
            .prop_map(|(to, messages)| Event::SendMany(to, messages)),
        1 => destination.prop_map(Event::Connect),
        4 => (2..6u8, 2..9u8).prop_map(|(who, station)| Event::Told(who, station)),
        2 => (2..5u8, prop_oneof![Just(None), Just(Some(1400))])
            .prop_map(|(router, mtu)| Event::AddRoute(router, mtu)),
        1 => Just(Event::RemoveRoute),
        1 => Just(Event::AddAddress),
        1 => Just(Event::RemoveAddress),
        1 => (1..9u8, mtu_discovery(), any::<u8>())
            .prop_map(|(ttl, discovery, tos)| Event::Options(ttl, discovery, tos)),
        1 => (600..1500usize).prop_map(Event::NarrowPath),
        2 => prop_oneof![0..10u64, 900..6000u64, 20_000..60_000u64].prop_map(Event::Pass),
    ]
}

/// What a host did about an event, as far as anybody can see.
fn happen(rig: &mut Rig, id: SlotId, event: &Event, forgets: bool) -> String {
    if forgets {
        rig.forget();
    }
    let payload = vec![0xa5; 3000];
    let done = match event {
        Event::Send(n) => format!("{:?}", rig.send(id, &payload[..*n])),
        Event::SendTo(to, n) => {
            format!("{:?}", rig.shard.udp().send(rig.now, id, &[&payload[..*n]], Some(host(*to))))
        }
        Event::SendMany(to, messages) => {
            let messages: Vec<_> = messages
                .iter()
                .map(|(n, tos)| {
                    let m = SendMessage::new(&payload[..*n]);
                    let m = tos.map_or(m, |tos| m.tos(tos));
                    to.map_or(m, |to| m.to(host(to)))
                })
                .collect();
            let sent = rig.shard.udp().send_many(rig.now, id, &messages, PendingError::Return);
            format!("{:?}", sent.map(|done| if let Poll::Ready(n) = done { Some(n) } else { None }))
        }
        Event::Connect(to) => format!("{:?}", rig.shard.udp().connect(id, host(*to))),
        Event::Told(who, station) => {
            rig.answer_arp(router(*who), *station);
            String::new()
        }
        Event::AddRoute(router, mtu) => {
            format!("{:?}", rig.shard.ip().add_route(via(*router, *mtu)))
        }
        Event::RemoveRoute => format!("{:?}", rig.shard.ip().remove_route(far_net())),
        Event::AddAddress => {
            let own = IfAddr { addr: US.into(), prefix_len: 24 };
            format!("{:?}", rig.shard.ip().add_address(own))
        }
        Event::RemoveAddress => format!("{:?}", rig.shard.ip().remove_address(US.into())),
        Event::Options(ttl, discovery, tos) => {
            let set = rig.shard.udp().with_socket(id, |u| {
                (u.ttl, u.mtu_discovery, u.dscp_ecn) = (Some(*ttl), *discovery, *tos);
            });
            format!("{set:?}")
        }
        Event::NarrowPath(mtu) => {
            rig.shard.ip().lower_path_mtu(rig.now, FAR.into(), *mtu);
            String::new()
        }
        Event::Pass(ms) => {
            rig.pass(Duration::from_millis(*ms));
            String::new()
        }
    };
    format!("{done} {:?}", rig.take())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_fast_path_sends_what_the_slow_path_sends(
        events in prop::collection::vec(event(), 1..60),
    ) {
        // The last host derives everything anew before each event.
        let mut hosts = [Rig::new(caps(false)), Rig::new(caps(false))];
        let ids = hosts.each_mut().map(|rig| {
            rig.shard.ip().add_address(IfAddr { addr: router(9).into(), prefix_len: 24 }).unwrap();
            let id = rig.shard.udp().bind("0.0.0.0:4000".parse().unwrap(), Default::default());
            id.unwrap()
        });
        for event in &events {
            let fast = happen(&mut hosts[0], ids[0], event, false);
            let slow = happen(&mut hosts[1], ids[1], event, true);
            prop_assert_eq!(fast, slow, "after {:?}", event);
        }
    }
}

#[test]
fn the_frames_of_a_template_are_correct_ones() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.send(id, b"learn").unwrap();
    rig.send(id, b"quick").unwrap();
    for (frame, offload) in rig.take() {
        assert_eq!((&frame[..6], &frame[6..12]), (&[2, 0, 0, 0, 0, 2][..], &OURS.0[..]));
        assert_eq!(fulmar_stack::wire::checksum::checksum(&frame[14..34]), 0);
        assert!(offload.needs_csum);
        assert_eq!((offload.csum_start, offload.csum_offset, frame.len()), (34, 6, 47));
    }
}

/// What was sent since the last time, by its payload.
fn payloads(rig: &mut Rig) -> Vec<Vec<u8>> {
    rig.take().into_iter().map(|(frame, _)| frame[42..].to_vec()).collect()
}

#[test]
fn no_datagram_overtakes_those_that_wait_for_the_device() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.send(id, b"learn").unwrap();
    rig.send(id, b"alone").unwrap();
    rig.wire.lock().is_full = true;
    rig.send(id, b"waits").unwrap();
    rig.wire.lock().is_full = false;
    rig.send(id, b"behind").unwrap();
    rig.send(id, b"alone again").unwrap();
    let want: [&[u8]; 5] = [b"learn", b"alone", b"waits", b"behind", b"alone again"];
    assert_eq!(payloads(&mut rig), want);
    rig.step();
    assert_eq!(rig.shard.pool().outstanding(), 0, "all buffers are home");
}

#[test]
fn a_sender_waits_once_the_burst_in_front_of_the_device_is_full() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.send(id, b"learn").unwrap();
    rig.wire.lock().is_full = true;
    let accepted = (0..1000).take_while(|_| rig.send(id, b"x").is_ok()).count();
    assert_eq!(accepted, 64, "what the burst holds");
    rig.wire.lock().is_full = false;
    rig.step();
    rig.send(id, b"x").unwrap();
    assert_eq!(rig.take().len(), 1 + 64 + 1);
}
