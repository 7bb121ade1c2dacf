//! `Config::any_ip`: the interface of a gateway, which answers for every host that its guests
//! address.

use crate::ip::rig::*;
use fulmar_stack::base::{DropReason, EtherAddr, MtuDiscovery};
use fulmar_stack::ip::{Config, Flow, Verdict};
use fulmar_stack::wire::arp::{Operation, Packet};
use fulmar_stack::wire::{eth, protocol};

const FAR6: &str = "2001:db8:ffff::7";

fn gateway() -> Host {
    Host::with(Config { any_ip: true, ..config() })
}

fn arp_reply_of(frame: &[u8]) -> Packet {
    Packet::parse(&frame[eth::HEADER_BYTES..]).unwrap()
}

#[test]
fn packets_to_any_unicast_address_are_delivered() {
    let mut h = gateway();
    for (src, dst) in [(PEER4, FAR4), (PEER4, OUR4), (PEER4, "10.0.0.77"), (PEER6, FAR6)] {
        let got = h.delivers(&udp_frame(src, dst, b"hello"));
        assert_eq!((got.src, got.dst), (ip(src), ip(dst)));
    }
    let mut plain = Host::new();
    plain.drops(&udp_frame(PEER4, FAR4, b"hello"), DropReason::IpDestination);
}

#[test]
fn addresses_that_no_host_has_are_not_accepted() {
    let mut h = gateway();
    for (src, dst) in [
        (PEER4, "127.0.0.1"),
        (PEER4, "0.0.0.0"),
        (PEER4, "240.0.0.1"),
        (PEER4, "224.0.0.251"),
        (PEER6, "::1"),
        (PEER6, "ff02::fb"),
    ] {
        h.drops(&udp_frame(src, dst, b"x"), DropReason::IpDestination);
    }
    let to_all = framed(ALL, &packet(PEER4, FAR4, protocol::UDP, &udp(ip(PEER4), ip(FAR4), b"x")));
    h.drops(&to_all, DropReason::IpDestination);
}

#[test]
fn arp_requests_for_any_address_are_answered() {
    let mut h = gateway();
    for target in [OUR4, GATEWAY4, FAR4] {
        h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(target)));
        let reply = arp_reply_of(&h.sent_one());
        assert_eq!(reply.operation, Operation::Reply);
        assert_eq!((reply.sender_ip, reply.sender_ether), (v4(target), US));
    }
}

#[test]
fn an_address_that_was_asked_for_in_vain_is_answered_for() {
    let mut h = gateway();
    for target in ["10.0.0.77", "10.0.0.78"] {
        // The answer to a packet with a forged source.
        let _ = h.send_udp(OUR4, target, 10);
        h.sent();
        h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(target)));
        let is_answer = |frame: &Vec<u8>| arp_reply_of(frame).operation == Operation::Reply;
        assert!(h.sent().iter().any(is_answer), "{target}");
    }
}

#[test]
fn a_guest_can_take_an_address_and_keeps_it() {
    let mut h = gateway();
    let probe = crate::ip::arp::request(PEER, v4("0.0.0.0"), v4(PEER4));
    let announcement = crate::ip::arp::request(PEER, v4(PEER4), v4(PEER4));
    for frame in [probe, announcement] {
        h.receive(&frame);
        assert!(h.sent().is_empty());
    }
    h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)));
    h.sent();
    let other = EtherAddr([2, 0, 0, 0, 0, 9]);
    h.receive(&crate::ip::arp::request(other, v4("10.0.0.9"), v4(PEER4)));
    assert!(h.sent().is_empty(), "the address belongs to a known neighbour");
    let own = crate::ip::arp::request(PEER, v4("0.0.0.0"), v4(OUR4));
    h.receive(&own);
    assert_eq!(arp_reply_of(&h.sent_one()).sender_ip, v4(OUR4), "an own address is defended");
}

#[test]
fn solicitations_for_any_address_are_answered_and_probes_are_not() {
    let mut h = gateway();
    for target in [OUR6, FAR6, "fe80::1"] {
        h.receive(&crate::ip::ndp::solicitation(PEER6, target));
        let frame = h.sent_one();
        let (src, dst, message) = parse_sent_icmp(&frame);
        assert_eq!((src, dst), (ip(target), ip(PEER6)));
        assert_eq!(message[4], 0xe0, "router, solicited, override");
    }
    h.receive(&crate::ip::ndp::solicitation("2001:db8::99", PEER6));
    assert!(h.sent().is_empty(), "the address belongs to a known neighbour");
    for probed in ["2001:db8::55", "fe80::1234"] {
        h.receive(&crate::ip::ndp::probe(probed));
        assert!(h.sent().is_empty());
    }
    assert_eq!(h.counters.total_drops(), 0, "what is valid and not for this host is no error");
}

#[test]
fn packets_are_sent_from_any_address_by_either_path() {
    let mut h = gateway();
    h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(FAR4)));
    h.sent();
    let packet = h.udp_to(FAR4, PEER4, 100);
    h.send(packet).unwrap();
    let frame = h.sent_one();
    let (header, src, dst, ..) = parse_sent(&frame);
    assert_eq!((header.dst, src, dst), (PEER, ip(FAR4), ip(PEER4)));
    let flow = Flow {
        src: ip(FAR4),
        dst: ip(PEER4),
        zone: 0,
        ports: (53, 1024),
        protocol: protocol::UDP,
        ttl: None,
        dscp_ecn: 0,
        mtu_discovery: MtuDiscovery::Off,
    };
    assert!(h.ip.build_template(&flow, h.now).is_some());
}

#[test]
fn pings_of_other_hosts_are_returned_and_not_answered() {
    let mut h = gateway();
    let request = |dst: &str| icmp_frame(PEER4, dst, [8, 0, 0, 0, 1, 2, 3, 4], b"ping");
    let Verdict::EchoRequest(asked) = h.receive(&request(FAR4)) else { panic!("no request") };
    assert_eq!((asked.src, asked.dst, asked.ident, asked.seq), (ip(PEER4), ip(FAR4), 0x102, 0x304));
    assert_eq!(asked.payload.to_vec(), b"ping");
    h.pool.free(asked.payload);
    assert!(h.sent().is_empty());
    h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)));
    h.sent();
    h.receive(&request(OUR4));
    assert_eq!(h.sent().len(), 1);
}
