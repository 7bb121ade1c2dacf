//! ARP, and packets queued for resolution.

use std::net::Ipv4Addr;

use crate::ip::rig::*;
use fulmar_stack::base::{DropReason, EtherAddr, FlowKey};
use fulmar_stack::ip::{ErrorKind, IfAddr, NeighbourState, Outgoing, OutputError, Traffic};
use fulmar_stack::wire::arp::{self, Operation, Packet};
use fulmar_stack::wire::eth;

pub fn arp_frame(dst: EtherAddr, p: &Packet) -> Vec<u8> {
    let mut body = vec![0; arp::BYTES];
    p.emit(&mut body).unwrap();
    ether(dst, p.sender_ether, eth::ARP, &body)
}

pub fn request(from: EtherAddr, sender_ip: Ipv4Addr, target_ip: Ipv4Addr) -> Vec<u8> {
    let operation = Operation::Request;
    let target_ether = EtherAddr::default();
    arp_frame(ALL, &Packet { operation, sender_ether: from, sender_ip, target_ether, target_ip })
}

fn reply(sender_ip: &str) -> Vec<u8> {
    let p = Packet {
        operation: Operation::Reply,
        sender_ether: PEER,
        sender_ip: v4(sender_ip),
        target_ether: US,
        target_ip: v4(OUR4),
    };
    arp_frame(US, &p)
}

fn parse_sent_arp(frame: &[u8]) -> (eth::Header, Packet) {
    (eth::Header::parse(frame).unwrap(), Packet::parse(&frame[14..]).unwrap())
}

#[test]
fn a_request_for_an_own_address_is_answered_and_its_sender_learned() {
    let mut h = Host::new();
    h.receive(&request(PEER, v4(PEER4), v4(OUR4)));
    let frame = h.sent_one();
    let (link, p) = parse_sent_arp(&frame);
    assert_eq!((link.dst, link.src), (PEER, US));
    assert_eq!((p.operation, p.sender_ether, p.sender_ip), (Operation::Reply, US, v4(OUR4)));
    assert_eq!((p.target_ether, p.target_ip), (PEER, v4(PEER4)));
    let n = *h.ip.neighbours().next().unwrap();
    assert_eq!((n.ip, n.ether, n.state), (ip(PEER4), PEER, NeighbourState::Stale));
    h.end();
}

#[test]
fn a_request_for_another_address_is_neither_answered_nor_learned() {
    let mut h = Host::new();
    h.receive(&request(PEER, v4(PEER4), v4("10.0.0.9")));
    h.receive(&reply("10.0.0.3"));
    assert_eq!((h.sent().len(), h.ip.neighbours().count()), (0, 0));
    h.end();
}

#[test]
fn a_sender_that_is_not_on_the_link_is_answered_but_not_learned() {
    let mut h = Host::new();
    h.receive(&request(PEER, v4(FAR4), v4(OUR4)));
    assert_eq!((h.sent().len(), h.ip.neighbours().count()), (1, 0));
    // The same for an ARP probe, whose sender address is zero (RFC 5227).
    h.receive(&request(PEER, v4("0.0.0.0"), v4(OUR4)));
    assert_eq!((h.sent().len(), h.ip.neighbours().count()), (1, 0));
    h.end();
}

#[test]
fn an_address_conflict_is_counted() {
    let mut h = Host::new();
    h.drops(&request(PEER, v4(OUR4), v4(OUR4)), DropReason::DuplicateAddress);
    h.end();
}

#[test]
fn a_group_ethernet_address_is_not_learned() {
    let mut h = Host::new();
    h.drops(&request(ALL, v4(PEER4), v4(OUR4)), DropReason::ArpInvalid);
    h.end();
}

#[test]
fn packets_are_queued_for_resolution_and_sent_in_order() {
    let mut h = Host::new();
    for bytes in [1, 2, 3] {
        h.send_udp(OUR4, PEER4, bytes).unwrap();
    }
    let frame = h.sent_one();
    let (link, p) = parse_sent_arp(&frame);
    assert_eq!((link.dst, p.operation, p.target_ip), (ALL, Operation::Request, v4(PEER4)));
    assert_eq!(p.sender_ip, v4(OUR4));
    h.receive(&reply(PEER4));
    let frames = h.sent();
    let lengths: Vec<usize> = frames.iter().map(|f| parse_sent(f).4.len()).collect();
    assert_eq!(lengths, [9, 10, 11]);
    assert!(frames.iter().all(|f| parse_sent(f).0.dst == PEER));
    assert_eq!(h.ip.queued_pkts(), 0);
    h.end();
}

#[test]
fn a_learned_neighbour_without_queued_packets_is_not_probed() {
    let mut h = Host::new();
    h.send_udp(OUR4, PEER4, 1).unwrap();
    let other = "10.0.0.3";
    h.receive(&request(PEER, v4(other), v4(OUR4)));
    let n = *h.ip.neighbours().find(|n| n.ip == ip(other)).unwrap();
    assert_eq!(n.state, NeighbourState::Stale);
    assert_eq!(h.ip.queued_pkts(), 1);
    h.end();
}

#[test]
fn packets_via_a_gateway_wait_for_its_resolution() {
    let mut h = Host::new();
    h.send_udp(OUR4, FAR4, 1).unwrap();
    assert_eq!(parse_sent_arp(&h.sent_one()).1.target_ip, v4(GATEWAY4));
    h.receive(&reply(GATEWAY4));
    let frame = h.sent_one();
    let (link, _, dst, ..) = parse_sent(&frame);
    assert_eq!((link.dst, dst), (PEER, ip(FAR4)));
    h.end();
}

#[test]
fn a_full_queue_drops_its_oldest_packet() {
    let mut h = Host::new();
    for bytes in 1..=258 {
        h.send_udp(OUR4, PEER4, bytes).unwrap();
    }
    assert_eq!(h.counters.drops(DropReason::NeighbourQueueFull), 2);
    h.sent();
    h.receive(&reply(PEER4));
    let frames = h.sent();
    assert_eq!((frames.len(), parse_sent(&frames[0]).4.len()), (256, 8 + 3));
    h.end();
}

#[test]
fn the_queue_is_bounded_over_all_neighbours() {
    let mut h = Host::new();
    for n in 0..100 {
        for _ in 0..12 {
            h.send_udp(OUR4, &format!("10.0.0.{}", n + 100), 1).unwrap();
        }
    }
    assert_eq!(h.ip.queued_pkts(), 1024);
    assert_eq!(h.counters.drops(DropReason::NeighbourQueueFull), 176);
    h.end();
}

/// An echo request from a nonexistent host on the link.
fn spoofed_ping(n: u16) -> Vec<u8> {
    let [high, low] = (n + 0x100).to_be_bytes();
    icmp_frame(&format!("10.0.{high}.{low}"), OUR4, [8, 0, 0, 0, 1, 2, 3, 4], &[0; 32])
}

/// A host on a large link.
fn host_in_a_slash_16() -> Host {
    let mut config = config();
    config.addresses[0].prefix_len = 16;
    Host::with(config)
}

#[test]
fn replies_to_spoofed_neighbours_do_not_block_resolution_of_a_real_one() {
    let mut h = host_in_a_slash_16();
    for n in 0..600 {
        h.receive(&spoofed_ping(n));
    }
    h.sent();
    // A real neighbour that answers late.
    h.send_udp(OUR4, PEER4, 1).unwrap();
    assert_eq!(parse_sent_arp(&h.sent_one()).1.target_ip, v4(PEER4));
    for n in 600..2000 {
        h.receive(&spoofed_ping(n));
        h.now = h.now + fulmar_stack::base::Duration::from_millis(1);
    }
    h.sent();
    h.receive(&reply(PEER4));
    assert_eq!(parse_sent(&h.sent_one()).2, ip(PEER4));
    let asked = h.ip.neighbours().filter(|n| n.state == NeighbourState::Incomplete).count();
    assert_eq!((asked, h.ip.queued_pkts()), (256, 256));
    h.end();
}

#[test]
fn resolution_for_replies_is_rate_limited() {
    let mut h = host_in_a_slash_16();
    for n in 0..2000 {
        h.receive(&spoofed_ping(n));
    }
    let asked = h.sent().len();
    assert!((250..=750).contains(&asked), "{asked} in one burst");
    assert!(h.counters.drops(DropReason::RateLimited) >= 1250);
    // Resolution for own traffic is not limited.
    for n in 1..=200 {
        h.send_udp(OUR4, &format!("10.0.9.{n}"), 1).unwrap();
    }
    assert_eq!(h.sent().len(), 200);
    h.end();
}

#[test]
fn failed_resolution_drops_queued_packets_and_reports_their_flows() {
    let mut h = Host::new();
    h.send_udp(OUR4, PEER4, 1).unwrap();
    for _ in 0..3 {
        assert_eq!(h.sent().len(), 1);
        h.advance(1000);
    }
    assert_eq!(h.counters.drops(DropReason::NeighbourUnreachable), 1);
    let failed: Vec<_> = h.ip.drain_resolution_failures().collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].local, "10.0.0.1:1000".parse().unwrap());
    assert_eq!(failed[0].remote, "10.0.0.2:53".parse().unwrap());
    assert_eq!(failed[0].kind, ErrorKind::ResolutionFailed);
    assert_eq!(h.send_udp(OUR4, PEER4, 1), Err(OutputError::HostUnreachable));
    h.advance(1000);
    assert_eq!(h.send_udp(OUR4, PEER4, 1), Ok(()));
    assert_eq!(h.ip.drain_resolution_failures().count(), 0);
    h.end();
}

#[test]
fn a_neighbour_in_use_is_probed_unless_progress_is_reported() {
    for confirmed in [false, true] {
        let mut h = Host::with_resolved_neighbours();
        h.send_udp(OUR4, PEER4, 1).unwrap();
        h.advance(4000);
        assert!(h.ip.awaits_confirmation());
        if confirmed {
            let (ours, theirs) = ("10.0.0.1:1000", "10.0.0.2:53");
            let flow = FlowKey::new(ours.parse().unwrap(), theirs.parse().unwrap());
            h.ip.confirm(h.now, &flow);
            assert!(!h.ip.awaits_confirmation());
        }
        h.sent();
        h.advance(1000);
        assert_eq!(h.sent().len(), usize::from(!confirmed));
        h.end();
    }
}

#[test]
fn a_cached_destination_expires_with_the_reachability_of_its_neighbour() {
    let mut h = Host::new();
    h.send_udp(OUR4, PEER4, 1).unwrap();
    h.receive(&reply(PEER4));
    let state = |h: &Host| h.ip.neighbours().next().unwrap().state;
    h.send_udp(OUR4, PEER4, 1).unwrap();
    h.advance(10_000);
    h.send_udp(OUR4, PEER4, 1).unwrap();
    assert_eq!(state(&h), NeighbourState::Reachable);
    h.advance(50_000);
    h.send_udp(OUR4, PEER4, 1).unwrap();
    assert_eq!(state(&h), NeighbourState::Delay);
    h.end();
}

/// The destination Ethernet address of the next datagram to the peer.
fn next_frame_goes_to(h: &mut Host, from: &str, to: &str) -> EtherAddr {
    h.sent();
    h.send_udp(from, to, 1).unwrap();
    parse_sent(&h.sent_one()).0.dst
}

#[test]
fn a_changed_ethernet_address_is_adopted_only_if_the_old_one_is_silent() {
    let elsewhere = EtherAddr([2, 0, 0, 0, 0, 9]);
    for claim in [
        request(elsewhere, v4(PEER4), v4(PEER4)),
        request(elsewhere, v4(PEER4), v4(OUR4)),
        arp_frame(US, &Packet { sender_ether: elsewhere, ..parse_sent_arp(&reply(PEER4)).1 }),
    ] {
        for answers in [true, false] {
            let mut h = Host::with_resolved_neighbours();
            assert_eq!(next_frame_goes_to(&mut h, OUR4, PEER4), PEER);
            h.drops(&claim, DropReason::NeighbourClaim);
            h.sent();
            h.advance(0);
            let (link, p) = parse_sent_arp(&h.sent_one());
            assert_eq!((link.dst, p.operation, p.target_ip), (PEER, Operation::Request, v4(PEER4)));
            assert_eq!(next_frame_goes_to(&mut h, OUR4, PEER4), PEER);
            if answers {
                h.receive(&reply(PEER4));
            }
            h.advance(500);
            h.advance(500);
            let expected = if answers { PEER } else { elsewhere };
            assert_eq!(next_frame_goes_to(&mut h, OUR4, PEER4), expected);
            h.end();
        }
    }
}

/// The first packets of a passively opened connection are replies.
#[test]
fn a_neighbour_created_by_replies_is_protected_once_own_traffic_follows() {
    let elsewhere = EtherAddr([2, 0, 0, 0, 0, 9]);
    let claim = request(elsewhere, v4(PEER4), v4(PEER4));
    let mut h = Host::new();
    h.receive(&request(PEER, v4(PEER4), v4(OUR4)));
    for _ in 0..2 {
        h.sent();
        let reply = Outgoing { traffic: Traffic::Reply, ..h.udp_to(OUR4, PEER4, 1) };
        h.send(reply).unwrap();
        assert_eq!(parse_sent(&h.sent_one()).0.dst, PEER);
    }
    assert_eq!(next_frame_goes_to(&mut h, OUR4, PEER4), PEER);
    h.drops(&claim, DropReason::NeighbourClaim);
    assert_eq!(next_frame_goes_to(&mut h, OUR4, PEER4), PEER);
    h.end();
}

#[test]
fn an_own_address_is_defended_once_in_ten_seconds() {
    let mut h = Host::new();
    let claim = request(PEER, v4(OUR4), v4(OUR4));
    for (advance_ms, defences) in [(0, 1), (0, 0), (9_999, 0), (1, 1)] {
        h.advance(advance_ms);
        h.sent();
        h.receive(&claim);
        let sent = h.sent();
        assert_eq!(sent.len(), defences, "after {advance_ms} ms");
        for frame in sent {
            let (link, p) = parse_sent_arp(&frame);
            assert_eq!((link.dst, p.sender_ether, p.sender_ip), (ALL, US, v4(OUR4)));
            assert_eq!(p.target_ip, v4(OUR4));
        }
    }
    assert_eq!(h.counters.drops(DropReason::DuplicateAddress), 4);
    h.end();
}

#[test]
fn each_own_address_is_defended_for_itself() {
    let mut own = config();
    own.addresses.push(IfAddr { addr: ip("10.0.0.9"), prefix_len: 24 });
    let mut h = Host::with(own);
    for (address, defences) in [(OUR4, 1), ("10.0.0.9", 1), (OUR4, 0), ("10.0.0.9", 0)] {
        h.receive(&request(PEER, v4(address), v4(address)));
        assert_eq!(h.sent().len(), defences, "{address}");
    }
    h.end();
}

#[test]
fn announce_covers_all_own_addresses() {
    let mut h = Host::new();
    h.call(|ip, cx| ip.announce(cx));
    let frames = h.sent();
    assert_eq!(frames.len(), 3);
    let (link, p) = parse_sent_arp(&frames[0]);
    assert_eq!((link.dst, p.sender_ip, p.target_ip), (ALL, v4(OUR4), v4(OUR4)));
    for (frame, own) in frames[1..].iter().zip([OUR6, LOCAL6]) {
        let (src, dst, message) = parse_sent_icmp(frame);
        assert_eq!((src, dst, message[0]), (ip(own), ip("ff02::1"), 136));
    }
    h.end();
}
