//! Neighbour discovery.

use crate::ip::rig::*;
use fulmar_stack::base::{DropReason, EtherAddr};
use fulmar_stack::ip::{ErrorKind, NeighbourState, Verdict};
use fulmar_stack::wire::protocol;

const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;

fn solicited_node(target: &str) -> String {
    let o = v6(target).octets();
    format!("ff02::1:ff{:02x}:{:02x}{:02x}", o[13], o[14], o[15])
}

fn message(kind: u8, flags: u8, src: &str, dst: &str, target: &str, option: &[u8]) -> Vec<u8> {
    let body = [&v6(target).octets()[..], option].concat();
    let message = icmp(src, dst, [kind, 0, 0, 0, flags, 0, 0, 0], &body);
    packet_with(src, dst, protocol::ICMPV6, 255, &message)
}

fn lladdr(kind: u8, ether: EtherAddr) -> Vec<u8> {
    [&[kind, 1][..], &ether.0].concat()
}

/// A solicitation from the peer for `target`.
pub fn solicitation(src: &str, target: &str) -> Vec<u8> {
    let dst = solicited_node(target);
    let group = EtherAddr::for_ipv6_multicast(v6(&dst));
    framed(group, &message(SOLICITATION, 0, src, &dst, target, &lladdr(1, PEER)))
}

/// Duplicate address detection of another host (RFC 4862 section 5.4.2).
pub fn probe(target: &str) -> Vec<u8> {
    let dst = solicited_node(target);
    let group = EtherAddr::for_ipv6_multicast(v6(&dst));
    framed(group, &message(SOLICITATION, 0, "::", &dst, target, &[]))
}

fn advertisement(flags: u8, target: &str) -> Vec<u8> {
    frame(&message(ADVERTISEMENT, flags, target, OUR6, target, &lladdr(2, PEER)))
}

#[test]
fn a_solicitation_for_an_own_address_is_answered_and_its_sender_learned() {
    for own in [OUR6, LOCAL6] {
        let mut h = Host::new();
        h.receive(&solicitation(PEER6, own));
        let frame = h.sent_one();
        let (src, dst, message) = parse_sent_icmp(&frame);
        assert_eq!((src, dst), (ip(own), ip(PEER6)));
        assert_eq!(parse_sent(&frame).0.dst, PEER);
        assert_eq!(frame[14 + 7], 255);
        // Solicited and override; the target, and where it is.
        assert_eq!((message[0], message[4]), (ADVERTISEMENT, 0x60));
        assert_eq!(message[8..24], v6(own).octets());
        assert_eq!(message[24..], lladdr(2, US));
        let n = *h.ip.neighbours().next().unwrap();
        assert_eq!((n.ip, n.ether, n.state), (ip(PEER6), PEER, NeighbourState::Stale));
        h.end();
    }
}

#[test]
fn a_message_with_another_hop_limit_than_255_is_dropped() {
    let mut h = Host::new();
    let mut frame = solicitation(PEER6, OUR6);
    frame[14 + 7] = 254;
    h.drops(&frame, DropReason::NdpInvalid);
    assert_eq!(h.sent().len(), 0);
    h.end();
}

#[test]
fn a_dad_probe_for_an_own_address_is_counted_and_answered_to_all_nodes() {
    let mut h = Host::new();
    h.drops(&probe(OUR6), DropReason::DuplicateAddress);
    let frame = h.sent_one();
    let (src, dst, message) = parse_sent_icmp(&frame);
    assert_eq!((src, dst), (ip(OUR6), ip("ff02::1")));
    assert_eq!((message[0], message[4]), (ADVERTISEMENT, 0x20));
    h.end();
}

#[test]
fn a_dad_probe_with_a_source_link_layer_option_is_dropped() {
    let mut h = Host::new();
    let mut probe = solicitation(PEER6, OUR6);
    let dst = solicited_node(OUR6);
    probe.truncate(14);
    probe.extend(message(SOLICITATION, 0, "::", &dst, OUR6, &lladdr(1, PEER)));
    h.drops(&probe, DropReason::NdpInvalid);
    h.end();
}

#[test]
fn an_option_of_length_zero_drops_the_message() {
    let mut h = Host::new();
    let bad = message(SOLICITATION, 0, PEER6, OUR6, OUR6, &[1, 0, 0, 0, 0, 0, 0, 0]);
    h.drops(&frame(&bad), DropReason::NdpInvalid);
    h.end();
}

#[test]
fn packets_are_queued_for_an_advertisement() {
    let mut h = Host::new();
    h.send_udp(OUR6, PEER6, 1).unwrap();
    let question = h.sent_one();
    let (src, dst, message) = parse_sent_icmp(&question);
    assert_eq!((src, dst), (ip(OUR6), ip(&solicited_node(PEER6))));
    assert_eq!(
        parse_sent(&question).0.dst,
        EtherAddr::for_ipv6_multicast(v6(&solicited_node(PEER6)))
    );
    assert_eq!((message[0], &message[24..]), (SOLICITATION, &lladdr(1, US)[..]));
    h.receive(&advertisement(0x60, PEER6));
    let frame = h.sent_one();
    assert_eq!((parse_sent(&frame).0.dst, parse_sent(&frame).2), (PEER, ip(PEER6)));
    let n = *h.ip.neighbours().next().unwrap();
    assert_eq!(n.state, NeighbourState::Reachable);
    h.end();
}

#[test]
fn an_unsolicited_advertisement_is_not_learned() {
    let mut h = Host::new();
    h.receive(&advertisement(0x20, PEER6));
    assert_eq!(h.ip.neighbours().count(), 0);
    h.drops(&advertisement(0x20, OUR6), DropReason::IpSource);
    h.end();
}

#[test]
fn an_advertisement_for_an_own_address_is_counted() {
    let mut h = Host::new();
    let claim = message(ADVERTISEMENT, 0x20, PEER6, OUR6, OUR6, &lladdr(2, PEER));
    h.drops(&frame(&claim), DropReason::DuplicateAddress);
    h.end();
}

#[test]
fn failed_resolution_is_reported_to_the_flow() {
    let mut h = Host::new();
    h.send_udp(OUR6, PEER6, 1).unwrap();
    (0..3).for_each(|_| h.advance(1000));
    assert_eq!(h.sent().len(), 3);
    let failed: Vec<_> = h.ip.drain_resolution_failures().collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].remote, "[2001:db8::2]:53".parse().unwrap());
    assert_eq!(failed[0].kind, ErrorKind::ResolutionFailed);
    h.end();
}

#[test]
fn router_messages_are_ignored_without_a_drop() {
    let mut h = Host::new();
    let body = icmp("fe80::9", "ff02::1", [134, 0, 0, 0, 64, 0, 7, 8], &[0; 8]);
    let packet = packet_with("fe80::9", "ff02::1", protocol::ICMPV6, 255, &body);
    let group = EtherAddr::for_ipv6_multicast(v6("ff02::1"));
    assert!(matches!(h.receive(&framed(group, &packet)), Verdict::Consumed));
    assert_eq!(h.counters.total_drops(), 0);
    h.end();
}

#[test]
fn a_changed_link_layer_address_is_adopted_only_if_the_old_one_is_silent() {
    let elsewhere = EtherAddr([2, 0, 0, 0, 0, 9]);
    let claim = message(ADVERTISEMENT, 0x20, PEER6, OUR6, PEER6, &lladdr(2, elsewhere));
    for answers in [true, false] {
        let mut h = Host::with_resolved_neighbours();
        h.send_udp(OUR6, PEER6, 1).unwrap();
        h.drops(&frame(&claim), DropReason::NeighbourClaim);
        h.sent();
        h.advance(0);
        let question = h.sent_one();
        assert_eq!(
            (parse_sent(&question).0.dst, parse_sent_icmp(&question).2[0]),
            (PEER, SOLICITATION)
        );
        if answers {
            h.receive(&advertisement(0x60, PEER6));
        }
        h.advance(500);
        h.advance(500);
        h.sent();
        h.send_udp(OUR6, PEER6, 1).unwrap();
        assert_eq!(parse_sent(&h.sent_one()).0.dst, if answers { PEER } else { elsewhere });
        h.end();
    }
}

#[test]
fn a_report_to_multicast_routers_is_not_an_error() {
    let mut h = Host::new();
    // Router alert (RFC 2711) and padding.
    let hop_by_hop = [protocol::ICMPV6, 0, 5, 2, 0, 0, 1, 0];
    let report = icmp("fe80::9", "ff02::16", [143, 0, 0, 0, 0, 0, 0, 0], &[]);
    let bytes = [&hop_by_hop[..], &report].concat();
    let packet = packet_with("fe80::9", "ff02::16", protocol::HOP_BY_HOP, 1, &bytes);
    h.receive(&framed(EtherAddr::for_ipv6_multicast(v6("ff02::16")), &packet));
    assert_eq!(h.counters.total_drops(), 0);
    h.end();
}
