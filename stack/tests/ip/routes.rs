//! Multipath routes, policy routing, gateways that are down, deprecated addresses.

use crate::ip::rig::*;
use fulmar_stack::base::EtherAddr;
use fulmar_stack::ip::{ConfigError, IfAddr, NextHop, OutputError, Prefix, Route};

const ROUTERS: [&str; 3] = ["10.0.0.11", "10.0.0.12", "10.0.0.13"];

fn prefix(text: &str) -> Prefix {
    let (addr, len) = text.split_once('/').unwrap();
    Prefix::new(ip(addr), len.parse().unwrap()).unwrap()
}

fn hop(via: &str) -> NextHop {
    NextHop { via: Some(ip(via)), src: None, mtu: None }
}

fn ether_of(router: usize) -> EtherAddr {
    EtherAddr([2, 0, 0, 0, 1, router as u8])
}

/// A host with resolved gateways and a multipath route over all of them.
fn spread() -> Host {
    let mut h = Host::with_resolved_neighbours();
    for (n, router) in ROUTERS.into_iter().enumerate() {
        h.receive(&crate::ip::arp::request(ether_of(n), v4(router), v4(OUR4)));
    }
    h.sent();
    h.ip.add_multipath_route_to(0, prefix("192.0.2.0/24"), &ROUTERS.map(hop)).unwrap();
    h
}

/// The gateway that receives the packets of a flow.
fn router_of(h: &mut Host, port: u16) -> usize {
    let mut packet = h.udp_to(OUR4, "192.0.2.9", 10);
    packet.chain.copy_from(0, &port.to_be_bytes()).unwrap();
    h.send(packet).unwrap();
    let (link, ..) = parse_sent(&h.sent_one());
    (0..ROUTERS.len()).find(|n| ether_of(*n) == link.dst).unwrap()
}

#[test]
fn flows_are_spread_over_next_hops_and_each_keeps_its_own() {
    let mut h = spread();
    let first: Vec<usize> = (0..300).map(|port| router_of(&mut h, port)).collect();
    let again: Vec<usize> = (0..300).map(|port| router_of(&mut h, port)).collect();
    assert_eq!(first, again);
    for n in 0..ROUTERS.len() {
        let flows = first.iter().filter(|r| **r == n).count();
        assert!((60..140).contains(&flows), "{flows} flows by router {n}");
    }
    h.end();
}

#[test]
fn a_next_hop_loses_its_flows_while_down_and_gets_them_back() {
    let mut h = spread();
    let before: Vec<usize> = (0..100).map(|port| router_of(&mut h, port)).collect();
    h.ip.set_gateway_up(ip(ROUTERS[1]), false);
    let during: Vec<usize> = (0..100).map(|port| router_of(&mut h, port)).collect();
    for (old, new) in before.iter().zip(&during) {
        assert!(*new != 1 && (old == new || *old == 1));
    }
    h.ip.set_gateway_up(ip(ROUTERS[1]), true);
    let after: Vec<usize> = (0..100).map(|port| router_of(&mut h, port)).collect();
    assert_eq!(before, after);
    h.end();
}

#[test]
fn with_every_next_hop_down_packets_take_a_shorter_prefix_or_no_route() {
    let mut h = spread();
    ROUTERS.iter().for_each(|r| h.ip.set_gateway_up(ip(r), false));
    assert_eq!(h.ip.route(ip("192.0.2.9"), 0).unwrap().next_hop, ip(GATEWAY4));
    h.ip.remove_route(Prefix::DEFAULT_V4).unwrap();
    assert_eq!(h.send_udp(OUR4, "192.0.2.9", 1), Err(OutputError::NoRoute));
    h.ip.set_gateway_up(ip(ROUTERS[0]), true);
    assert_eq!(h.send_udp(OUR4, "192.0.2.9", 1), Ok(()));
    h.end();
}

#[test]
fn an_unreachable_next_hop_is_skipped_while_others_are_reachable() {
    let mut h = spread();
    let silent = "10.0.0.99";
    let hops = [hop(silent), hop(ROUTERS[0])];
    h.ip.add_multipath_route_to(0, prefix("198.51.100.0/24"), &hops).unwrap();
    // Enough flows that some use the silent gateway, whose resolution fails.
    let send = |h: &mut Host| {
        for port in 0..40u16 {
            let mut packet = h.udp_to(OUR4, "198.51.100.9", 10);
            packet.chain.copy_from(0, &port.to_be_bytes()).unwrap();
            h.send(packet).unwrap();
        }
    };
    send(&mut h);
    (0..3).for_each(|_| h.advance(1000));
    assert!(h.ip.drain_resolution_failures().count() > 0);
    h.sent();
    send(&mut h);
    let frames = h.sent();
    assert_eq!(frames.len(), 40);
    assert!(frames.iter().all(|f| parse_sent(f).0.dst == ether_of(0)));
    h.end();
}

#[test]
fn a_source_policy_selects_another_table() {
    let mut h = Host::with_resolved_neighbours();
    let other = "10.0.7.1";
    h.ip.add_address(IfAddr { addr: ip(other), prefix_len: 24 }).unwrap();
    let table = 7;
    h.ip.add_route_to(table, Route::default_via(ip(ROUTERS[0]))).unwrap();
    let next_hop = |h: &Host, src: Option<&str>, dst: &str| {
        h.ip.route_from(src.map(ip), ip(dst), 0).map(|p| p.next_hop)
    };
    assert_eq!(next_hop(&h, Some(other), "192.0.2.9"), Ok(ip(GATEWAY4)));
    let before = h.ip.generation();
    assert!(h.ip.set_source_policy(prefix("10.0.7.0/24"), Some(table)));
    assert_ne!(h.ip.generation(), before);
    assert_eq!(next_hop(&h, Some(other), "192.0.2.9"), Ok(ip(ROUTERS[0])));
    assert_eq!(next_hop(&h, Some(OUR4), "192.0.2.9"), Ok(ip(GATEWAY4)));
    assert_eq!(next_hop(&h, None, "192.0.2.9"), Ok(ip(GATEWAY4)));
    // Packets too, even with a cached destination.
    h.receive(&crate::ip::arp::request(ether_of(0), v4(ROUTERS[0]), v4(OUR4)));
    h.sent();
    for (src, ether) in [(OUR4, PEER), (other, ether_of(0)), (OUR4, PEER), (other, ether_of(0))] {
        h.send_udp(src, "192.0.2.9", 10).unwrap();
        assert_eq!(parse_sent(&h.sent_one()).0.dst, ether, "from {src}");
    }
    assert!(h.ip.set_source_policy(prefix("10.0.7.0/24"), None));
    h.send_udp(other, "192.0.2.9", 10).unwrap();
    assert_eq!(parse_sent(&h.sent_one()).0.dst, PEER);
    assert!(h.ip.remove_route_from(table, Prefix::DEFAULT_V4).is_some());
    h.end();
}

#[test]
fn a_rule_can_be_changed_when_there_are_as_many_as_may_be() {
    let mut h = Host::with_resolved_neighbours();
    let source = |n: u32| prefix(&format!("10.{}.{}.0/24", 1 + n / 256, n % 256));
    let count = (0..1000).take_while(|n| h.ip.set_source_policy(source(*n), Some(3))).count();
    assert!((1..1000).contains(&count), "{count} rules");
    assert!(h.ip.set_source_policy(source(0), Some(4)));
    assert!(!h.ip.set_source_policy(source(1000), Some(4)));
    h.end();
}

#[test]
fn a_table_without_a_route_falls_back_to_the_main_one() {
    let mut h = Host::with_resolved_neighbours();
    h.ip.add_route_to(
        3,
        Route { via: Some(ip(ROUTERS[0])), ..Route::on_link(prefix("192.0.2.0/24")) },
    )
    .unwrap();
    h.ip.set_source_policy(prefix("10.0.0.0/8"), Some(3));
    let path = |dst: &str| h.ip.route_from(Some(ip(OUR4)), ip(dst), 0).unwrap().next_hop;
    assert_eq!(path("192.0.2.9"), ip(ROUTERS[0]));
    assert_eq!(path("198.51.100.9"), ip(GATEWAY4));
    h.end();
}

#[test]
fn a_thousand_routes_are_found_while_routes_change() {
    let mut h = Host::with_resolved_neighbours();
    let net = |n: u32| prefix(&format!("172.{}.{}.0/24", 16 + n / 256, n % 256));
    let via = |n: u32| ip(ROUTERS[n as usize % 3]);
    for n in 0..1000 {
        h.ip.add_route(Route { via: Some(via(n)), ..Route::on_link(net(n)) }).unwrap();
    }
    for n in 0..1000 {
        let dst = format!("172.{}.{}.77", 16 + n / 256, n % 256);
        assert_eq!(h.ip.route(ip(&dst), 0).unwrap().next_hop, via(n));
        let before = h.ip.generation();
        assert!(h.ip.remove_route(net(n)).is_some());
        assert_ne!(h.ip.generation(), before);
        assert_eq!(h.ip.route(ip(&dst), 0).unwrap().next_hop, ip(GATEWAY4));
    }
    h.end();
}

#[test]
fn invalid_next_hops_are_refused() {
    let mut h = Host::new();
    let dst = prefix("192.0.2.0/24");
    let add = |h: &mut Host, table, hops: &[NextHop]| h.ip.add_multipath_route_to(table, dst, hops);
    assert_eq!(add(&mut h, 0, &[]), Err(ConfigError::NextHops(dst)));
    assert_eq!(add(&mut h, 0, &[hop(PEER6)]), Err(ConfigError::MixedVersions(dst)));
    for table in 1..=256 {
        assert_eq!(add(&mut h, table, &[hop(GATEWAY4)]), Ok(()));
    }
    assert_eq!(add(&mut h, 257, &[hop(GATEWAY4)]), Err(ConfigError::RoutesFull(dst)));
    h.end();
}
