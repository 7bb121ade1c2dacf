//! `Medium::Ip`: an interface without a link layer, whose neighbours are all the one peer.

use crate::ip::rig::*;
use fulmar_stack::base::{DropReason, Medium, MtuDiscovery};
use fulmar_stack::ip::{Config, Flow};
use fulmar_stack::wire::{eth, protocol};

fn host() -> Host {
    Host::with(Config { medium: Medium::Ip, ether: Medium::OWN, ..config() })
}

#[test]
fn the_first_packet_to_any_destination_is_sent_at_once() {
    let mut h = host();
    for (src, dst, ethertype) in
        [(OUR4, PEER4, eth::IPV4), (OUR4, FAR4, eth::IPV4), (OUR6, PEER6, eth::IPV6)]
    {
        h.send_udp(src, dst, 10).unwrap();
        let link = eth::Header::parse(&h.sent_one()).unwrap();
        assert_eq!(link, eth::Header { dst: Medium::PEER, src: Medium::OWN, ethertype });
    }
    assert_eq!((h.ip.queued_pkts(), h.ip.neighbours().count()), (0, 0));
    h.advance(600_000);
    assert!(h.sent().is_empty(), "a neighbour was probed");
    h.end();
}

#[test]
fn replies_to_many_sources_are_not_limited_as_resolutions() {
    let mut h = host();
    for i in 0..600u32 {
        let src = format!("10.0.0.{}", 2 + i % 250);
        let echo = icmp(&src, OUR4, [8, 0, 0, 0, 0, 1, 0, 1], b"x");
        h.receive(&frame(&packet(&src, OUR4, protocol::ICMP, &echo)));
    }
    assert_eq!((h.sent().len(), h.counters.total_drops()), (600, 0));
    h.end();
}

#[test]
fn arp_and_neighbour_discovery_are_dropped_and_nothing_is_learned() {
    let mut h = host();
    h.drops(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)), DropReason::UnknownEtherType);
    h.drops(&crate::ip::ndp::solicitation(PEER6, OUR6), DropReason::NdpInvalid);
    h.call(|ip, cx| ip.announce(cx));
    assert!(h.sent().is_empty());
    assert_eq!(h.ip.neighbours().count(), 0);
    h.end();
}

#[test]
fn foreign_addresses_are_not_accepted() {
    let mut h = host();
    h.drops(&udp_frame(PEER4, FAR4, b"x"), DropReason::IpDestination);
    h.drops(&udp_frame(PEER6, "2001:db8::9", b"x"), DropReason::IpDestination);
    let lying = udp_frame(PEER4, OUR4, b"length");
    h.drops(&lying[..lying.len() - 1], DropReason::Truncated);
    h.end();
}

#[test]
fn the_template_of_a_flow_has_the_headers_of_the_slow_path() {
    let mut h = host();
    for (src, dst) in [(OUR4, PEER4), (OUR6, PEER6), (OUR4, FAR4)] {
        h.send_udp(src, dst, 100).unwrap();
        let slow = h.sent_one();
        let flow = Flow {
            src: ip(src),
            dst: ip(dst),
            zone: 0,
            ports: (1000, 53),
            protocol: protocol::UDP,
            ttl: None,
            dscp_ecn: 0,
            mtu_discovery: MtuDiscovery::On,
        };
        let template = h.ip.build_template(&flow, h.now).unwrap();
        let mut fast = slow.clone();
        fast[..template.header_bytes()].fill(0);
        let ident = h.ip.draw_ident_for(&template);
        template.emit(108, ident, &mut fast).unwrap();
        assert_eq!(fast, slow);
        h.advance(3_600_000);
        assert!(h.ip.is_template_valid(&template, h.now), "no neighbour state ends it");
    }
    h.end();
}
