//! Output, and its errors.

use crate::ip::rig::*;
use fulmar_stack::base::{DropReason, EtherAddr, Gso, GsoKind, MtuDiscovery, Offload, Secrets};
use fulmar_stack::ip::{
    Config, ConfigError, IfAddr, Ip, NoRoute, Outgoing, OutputError, Prefix, Route, Verdict,
};
use fulmar_stack::wire::{ipv4, ipv6};

#[test]
fn what_one_host_sends_the_other_delivers() {
    for (src, dst) in [(OUR4, PEER4), (OUR6, PEER6)] {
        let mut a = Host::with_resolved_neighbours();
        a.send_udp(src, dst, 300).unwrap();
        let frame = a.sent_one();
        let address = |a: &str, prefix_len| IfAddr { addr: ip(a), prefix_len };
        let addresses = vec![address(PEER4, 24), address(PEER6, 64)];
        let mut b = Host::with(Config { ether: PEER, addresses, ..Config::default() });
        let got = b.delivers(&frame);
        assert_eq!((got.src, got.dst), (ip(src), ip(dst)));
        assert_eq!(got.bytes, udp(ip(src), ip(dst), &[0x5a; 300]));
        a.end();
        b.end();
    }
}

#[test]
fn header_fields_are_as_requested() {
    let mut h = Host::with_resolved_neighbours();
    for (ttl, dscp_ecn, mtu_discovery) in [
        (None, 0, MtuDiscovery::On),
        (Some(3), 0xb9, MtuDiscovery::Off),
        (None, 0, MtuDiscovery::Probe),
    ] {
        let p = h.udp_to(OUR4, PEER4, 10);
        h.send(Outgoing { ttl, dscp_ecn, mtu_discovery, ..p }).unwrap();
        let frame = h.sent_one();
        let header = ipv4::Header::parse(&frame[14..], frame.len() - 14).unwrap();
        assert_eq!((header.ttl, header.dscp_ecn), (ttl.unwrap_or(64), dscp_ecn));
        assert_eq!(header.dont_fragment, mtu_discovery.forbids_fragments());
        let p = h.udp_to(OUR6, PEER6, 10);
        h.send(Outgoing { ttl, dscp_ecn, ..p }).unwrap();
        let frame = h.sent_one();
        let header = ipv6::Header::parse(&frame[14..], frame.len() - 14).unwrap();
        assert_eq!((header.hop_limit, header.traffic_class), (ttl.unwrap_or(64), dscp_ecn));
    }
    h.end();
}

#[test]
fn headers_are_written_into_the_headroom_and_offsets_follow() {
    for (src, dst, l3) in [(OUR4, PEER4, 20), (OUR6, PEER6, 40)] {
        let mut h = Host::with_resolved_neighbours();
        let p = h.udp_to(src, dst, 10);
        let offload = Offload { needs_csum: true, csum_offset: 6, ..Offload::default() };
        h.send(Outgoing { offload, ..p }).unwrap();
        let (chain, offload) = h.sink.frames.pop().unwrap();
        assert_eq!((chain.segs(), offload.csum_start, offload.csum_offset), (1, 14 + l3, 6));
        h.pool.free(chain);
        h.end();
    }
}

#[test]
fn a_packet_larger_than_the_mtu_is_refused_and_a_super_segment_is_not() {
    let mut h = Host::with_resolved_neighbours();
    assert_eq!(h.send_udp(OUR4, PEER4, 1472), Ok(()));
    assert_eq!(h.send_udp(OUR4, PEER4, 1473), Err(OutputError::TooBig { mtu: 1500 }));
    assert_eq!(h.send_udp(OUR6, PEER6, 1453), Err(OutputError::TooBig { mtu: 1500 }));
    assert_eq!(h.counters.drops(DropReason::PacketTooBig), 2);
    let gso = |segment_bytes| {
        let gso = Gso { kind: GsoKind::Udp, segment_bytes, header_bytes: 8, ecn: false };
        Offload { gso: Some(gso), ..Offload::default() }
    };
    let p = h.udp_to(OUR4, PEER4, 60_000);
    assert_eq!(h.send(Outgoing { offload: gso(1472), ..p }), Ok(()));
    let p = h.udp_to(OUR4, PEER4, 60_000);
    let refused = h.send(Outgoing { offload: gso(1473), ..p });
    assert_eq!(refused, Err(OutputError::TooBig { mtu: 1500 }));
    h.end();
}

#[test]
fn without_a_route_nothing_is_sent() {
    let mut h = Host::new();
    for (src, dst) in [
        (OUR6, "2001:db8:9::1"),
        (OUR4, "127.0.0.1"),
        (OUR4, "0.0.0.0"),
        (OUR6, "::ffff:10.0.0.2"),
        (OUR4, PEER6),
    ] {
        assert_eq!(h.send_udp(src, dst, 1), Err(OutputError::NoRoute), "{dst}");
    }
    assert_eq!(h.counters.drops(DropReason::NoRoute), 5);
    assert_eq!(h.ip.route(ip("2001:db8:9::1"), 0), Err(NoRoute));
    h.end();
}

#[test]
fn a_full_sink_is_not_counted_as_a_drop() {
    let mut h = Host::with_resolved_neighbours();
    h.sink.full = true;
    assert_eq!(h.send_udp(OUR4, PEER4, 1), Err(OutputError::Full));
    assert_eq!(h.send_udp(OUR4, OUR4, 1), Err(OutputError::Full));
    assert_eq!(h.counters.total_drops(), 0);
    // Replies of the engine itself are dropped and counted here.
    h.drops(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)), DropReason::TxQueueFull);
    h.end();
}

#[test]
fn own_addresses_are_reached_by_loopback() {
    for own in [OUR4, OUR6, LOCAL6] {
        let mut h = Host::new();
        h.send_udp(own, own, 30_000).unwrap();
        assert_eq!(h.sent().len(), 0);
        let (chain, offload) = h.sink.looped.pop().unwrap();
        let Verdict::Deliver(d) = h.receive_looped(chain, offload) else { panic!() };
        let got = h.got(d);
        assert_eq!((got.src, got.dst, got.bytes.len()), (ip(own), ip(own), 30_008));
        assert!(h.ip.route(ip(own), 0).unwrap().is_local);
        h.end();
    }
}

#[test]
fn broadcast_and_multicast_need_no_resolution() {
    let mut h = Host::new();
    for (src, dst, ether) in [
        (OUR4, "255.255.255.255", ALL),
        (OUR4, "10.0.0.255", ALL),
        (OUR4, "224.0.0.251", EtherAddr([0x01, 0, 0x5e, 0, 0, 0xfb])),
        (LOCAL6, "ff02::fb", EtherAddr([0x33, 0x33, 0, 0, 0, 0xfb])),
    ] {
        h.send_udp(src, dst, 1).unwrap();
        assert_eq!(parse_sent(&h.sent_one()).0.dst, ether);
        let path = h.ip.route(ip(dst), 0).unwrap();
        assert_eq!((path.src, path.is_broadcast), (ip(src), ether == ALL));
    }
    h.end();
}

#[test]
fn an_unknown_zone_has_no_route() {
    let h = Host::new();
    assert_eq!(h.ip.route(ip("fe80::9"), 0).unwrap().src, ip(LOCAL6));
    assert_eq!(h.ip.route(ip("fe80::9"), 1).unwrap().src, ip(LOCAL6));
    assert_eq!(h.ip.route(ip("fe80::9"), 2), Err(NoRoute));
    h.end();
}

#[test]
fn a_route_determines_gateway_source_and_mtu() {
    let mut h = Host::new();
    let path = h.ip.route(ip(FAR4), 0).unwrap();
    assert_eq!((path.src, path.next_hop, path.mtu), (ip(OUR4), ip(GATEWAY4), 1500));
    h.ip.add_address(IfAddr { addr: ip("10.0.0.77"), prefix_len: 24 }).unwrap();
    let dst = Prefix::new(ip(FAR4), 24).unwrap();
    let via = Some(ip("10.0.0.3"));
    h.ip.add_route(Route { dst, via, src: Some(ip("10.0.0.77")), mtu: Some(1400) }).unwrap();
    let path = h.ip.route(ip(FAR4), 0).unwrap();
    assert_eq!((path.src, path.next_hop, path.mtu), (ip("10.0.0.77"), ip("10.0.0.3"), 1400));
    h.end();
}

#[test]
fn every_change_advances_the_generation_and_invalidates_the_cache() {
    let mut h = Host::with_resolved_neighbours();
    h.send_udp(OUR4, FAR4, 1).unwrap();
    assert_eq!(parse_sent(&h.sent_one()).0.dst, PEER);
    let before = h.ip.generation();
    let dst = Prefix::new(ip(FAR4), 32).unwrap();
    h.ip.add_route(Route { via: Some(ip("10.0.0.3")), ..Route::on_link(dst) }).unwrap();
    assert_ne!(h.ip.generation(), before);
    h.send_udp(OUR4, FAR4, 1).unwrap();
    assert_eq!(h.ip.queued_pkts(), 1);
    let before = h.ip.generation();
    assert!(h.ip.remove_address(ip(OUR6)) && !h.ip.is_local(ip(OUR6)));
    assert_ne!(h.ip.generation(), before);
    assert_eq!(h.ip.route(ip(PEER6), 0), Err(NoRoute));
    h.end();
}

#[test]
fn an_invalid_configuration_is_refused() {
    let refused = |c: Config| Ip::new(c, &Secrets::for_simulation(0)).err().unwrap();
    assert_eq!(refused(Config { mtu: 500, ..config() }), ConfigError::Mtu { least: 576 });
    assert_eq!(refused(Config { mtu: 1000, ..config() }), ConfigError::Mtu { least: 1280 });
    assert_eq!(refused(Config { ether: ALL, ..config() }), ConfigError::EtherAddr);
    let addresses = vec![IfAddr { addr: ip("10.0.0.1"), prefix_len: 40 }];
    let expected = ConfigError::PrefixLength(ip("10.0.0.1"));
    assert_eq!(refused(Config { addresses, ..config() }), expected);
    let routes = vec![Route { dst: Prefix::DEFAULT_V6, ..Route::default_via(ip(GATEWAY4)) }];
    let expected = ConfigError::MixedVersions(Prefix::DEFAULT_V6);
    assert_eq!(refused(Config { routes, ..config() }), expected);
    assert!(expected.to_string().contains("::/0"));
}
