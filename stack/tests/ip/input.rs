//! Which packets are accepted, and why others are dropped.

use crate::ip::rig::*;
use fulmar_stack::base::{DropReason, EtherAddr, Gso, GsoKind, Offload};
use fulmar_stack::ip::{IfAddr, Verdict};
use fulmar_stack::mbuf::Purpose;
use fulmar_stack::wire::{eth, protocol, tcp};

const PAIRS: [(&str, &str); 2] = [(PEER4, OUR4), (PEER6, OUR6)];

fn tcp_segment(payload: usize) -> Vec<u8> {
    let options = tcp::Options {
        mss: Some(1460),
        timestamps: Some(tcp::Timestamps { value: 1, echo: 2 }),
        ..tcp::Options::default()
    };
    let header = tcp::Header {
        src_port: 1,
        dst_port: 2,
        seq: fulmar_stack::base::SeqNum(3),
        ack: fulmar_stack::base::SeqNum(4),
        flags: tcp::Flags::ACK,
        window: 5,
        urgent: 0,
        options,
    };
    let mut bytes = vec![0; header.header_bytes()];
    header.emit(&mut bytes).unwrap();
    bytes.resize(bytes.len() + payload, 0x77);
    bytes
}

#[test]
fn a_packet_for_this_host_is_delivered_without_padding() {
    for (src, dst) in PAIRS {
        let mut h = Host::new();
        let mut frame = udp_frame(src, dst, b"hi");
        frame.resize(frame.len() + 18, 0);
        let got = h.delivers(&frame);
        assert_eq!((got.src, got.dst, got.zone), (ip(src), ip(dst), 0));
        assert_eq!(got.bytes, udp(ip(src), ip(dst), b"hi"));
        assert!(!got.is_group);
        assert_eq!(h.counters.total_drops(), 0);
        h.end();
    }
}

#[test]
fn the_transport_header_is_contiguous_wherever_the_frame_is_cut() {
    for (src, dst) in PAIRS {
        let segment = tcp_segment(300);
        let bytes = frame(&packet(src, dst, protocol::TCP, &segment));
        let mut h = Host::new();
        for cut in 1..130 {
            let mut c = h.chain(&bytes[..cut], 0);
            let rest = h.chain(&bytes[cut..], 0);
            c.append(rest);
            let Verdict::Deliver(d) = h.receive_chain(c, Offload::default()) else {
                panic!("cut at {cut}");
            };
            let first = d.chain.front().unwrap().as_slice();
            assert!(tcp::Header::parse(first).is_ok(), "cut at {cut}");
            assert_eq!(d.chain.to_vec(), segment);
            h.pool.free(d.chain);
        }
        h.end();
    }
}

#[test]
fn every_truncation_is_one_counted_drop() {
    for (src, dst) in PAIRS {
        let bytes = udp_frame(src, dst, b"payload");
        let mut h = Host::new();
        for cut in 0..bytes.len() {
            h.drops(&bytes[..cut], DropReason::Truncated);
        }
        h.end();
    }
}

#[test]
fn a_wrong_header_checksum_is_dropped() {
    let mut h = Host::new();
    let mut frame = udp_frame(PEER4, OUR4, b"hi");
    frame[14 + 8] ^= 1;
    h.drops(&frame, DropReason::IpChecksum);
    h.end();
}

#[test]
fn wrong_versions_and_lengths_are_dropped() {
    let mut h = Host::new();
    let good = udp_frame(PEER4, OUR4, b"hi");
    for first_byte in [0x55, 0x44, 0x65] {
        let mut frame = good.clone();
        frame[14] = first_byte;
        h.drops(&frame, DropReason::IpHeader);
    }
    let mut frame = udp_frame(PEER6, OUR6, b"hi");
    frame[14] = 0x45;
    h.drops(&frame, DropReason::IpHeader);
    h.end();
}

#[test]
fn frames_for_other_stations_and_protocols_are_dropped() {
    let mut h = Host::new();
    let packet = packet(PEER4, OUR4, protocol::UDP, &udp(ip(PEER4), ip(OUR4), b"hi"));
    let other = EtherAddr([2, 0, 0, 0, 0, 7]);
    h.drops(&framed(other, &packet), DropReason::NotForUs);
    h.drops(&ether(US, PEER, 0x88cc, &packet), DropReason::UnknownEtherType);
    h.end();
}

#[test]
fn packets_for_other_hosts_are_not_forwarded() {
    let mut h = Host::new();
    h.drops(&udp_frame(PEER4, FAR4, b"hi"), DropReason::IpDestination);
    h.drops(&udp_frame(PEER6, "2001:db8::77", b"hi"), DropReason::IpDestination);
    h.drops(&udp_frame(PEER6, "ff02::2", b"hi"), DropReason::IpDestination);
    h.end();
}

#[test]
fn invalid_source_addresses_are_dropped() {
    let mut h = Host::new();
    for src in
        ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "10.0.0.255", "240.0.0.1", OUR4]
    {
        h.drops(&udp_frame(src, OUR4, b"hi"), DropReason::IpSource);
    }
    for src in ["::", "::1", "ff02::1", "::ffff:10.0.0.2", OUR6] {
        h.drops(&udp_frame(src, OUR6, b"hi"), DropReason::IpSource);
    }
    h.end();
}

#[test]
fn a_loopback_address_is_not_reached_from_the_device() {
    let address = |a: &str, prefix_len| IfAddr { addr: ip(a), prefix_len };
    let mut own = config();
    own.addresses.extend([address("127.0.0.1", 8), address("::1", 128)]);
    let mut h = Host::with(own);
    for (src, dst) in [(PEER4, "127.0.0.1"), (PEER6, "::1")] {
        h.drops(&udp_frame(src, dst, b"hi"), DropReason::IpDestination);
        let looped = udp_frame(dst, dst, b"hi");
        let c = h.chain(&looped, 0);
        let Verdict::Deliver(d) = h.receive_looped(c, Offload::default()) else { panic!("{dst}") };
        h.pool.free(d.chain);
    }
    h.end();
}

#[test]
fn a_looped_back_packet_must_have_an_own_source_address() {
    let mut h = Host::new();
    let own = packet(OUR4, OUR4, protocol::UDP, &udp(ip(OUR4), ip(OUR4), b"hi"));
    let own = h.chain(&ether(US, US, eth::IPV4, &own), 0);
    let Verdict::Deliver(d) = h.receive_looped(own, Offload::default()) else { panic!() };
    h.got(d);
    let other = packet(PEER4, OUR4, protocol::UDP, &udp(ip(PEER4), ip(OUR4), b"hi"));
    let other = h.chain(&ether(US, US, eth::IPV4, &other), 0);
    assert!(matches!(h.receive_looped(other, Offload::default()), Verdict::Consumed));
    assert_eq!(h.counters.drops(DropReason::IpSource), 1);
    h.end();
}

#[test]
fn a_received_frame_with_the_own_ethernet_source_is_dropped() {
    let mut h = Host::new();
    for src in [OUR4, PEER4] {
        let forged = packet(src, OUR4, protocol::UDP, &udp(ip(src), ip(OUR4), b"hi"));
        h.drops(&ether(US, US, eth::IPV4, &forged), DropReason::EtherSource);
    }
    h.end();
}

#[test]
fn an_atomic_fragment_is_delivered() {
    let mut h = Host::new();
    let mut body = vec![17, 0, 0, 0, 0, 0, 0, 9];
    body.extend(udp(ip(PEER6), ip(OUR6), b"hi"));
    let got = h.delivers(&frame(&packet(PEER6, OUR6, protocol::FRAGMENT, &body)));
    assert_eq!(got.bytes, udp(ip(PEER6), ip(OUR6), b"hi"));
    h.end();
}

#[test]
fn extension_headers_are_skipped() {
    let mut h = Host::new();
    let mut body = vec![60, 0, 1, 4, 0, 0, 0, 0, 17, 0, 1, 4, 0, 0, 0, 0];
    body.extend(udp(ip(PEER6), ip(OUR6), b"hi"));
    let got = h.delivers(&frame(&packet(PEER6, OUR6, protocol::HOP_BY_HOP, &body)));
    assert_eq!(got.bytes, udp(ip(PEER6), ip(OUR6), b"hi"));
    assert_eq!(got.header.as_slice().len(), 40 + 16 + 8);
    h.end();
}

#[test]
fn ipv4_options_are_skipped() {
    let mut h = Host::new();
    let datagram = udp(ip(PEER4), ip(OUR4), b"hi");
    let mut packet = packet(PEER4, OUR4, protocol::UDP, &[&[1; 8][..], &datagram].concat());
    packet[0] = 0x47;
    packet[10..12].fill(0);
    let sum = fulmar_stack::wire::checksum::checksum(&packet[..28]).to_be_bytes();
    packet[10..12].copy_from_slice(&sum);
    let got = h.delivers(&frame(&packet));
    assert_eq!(got.bytes, datagram);
    assert_eq!(got.header.as_slice(), &packet[..36]);
    h.end();
}

#[test]
fn broadcast_and_multicast_reach_udp_only() {
    let mut h = Host::new();
    for (dst, ether_dst) in [
        ("255.255.255.255", ALL),
        ("10.0.0.255", ALL),
        ("224.0.0.1", EtherAddr::for_ipv4_multicast(v4("224.0.0.1"))),
    ] {
        let datagram = udp(ip(PEER4), ip(dst), b"hi");
        let got = h.delivers(&framed(ether_dst, &packet(PEER4, dst, protocol::UDP, &datagram)));
        assert!(got.is_group);
        let segment = packet(PEER4, dst, protocol::TCP, &tcp_segment(0));
        h.drops(&framed(ether_dst, &segment), DropReason::IpDestination);
    }
    let group = EtherAddr::for_ipv6_multicast(v6("ff02::1"));
    let datagram = udp(ip("fe80::9"), ip("ff02::1"), b"hi");
    let got = h.delivers(&framed(group, &packet("fe80::9", "ff02::1", protocol::UDP, &datagram)));
    assert_eq!((got.is_group, got.zone), (true, 1));
    h.end();
}

#[test]
fn a_unicast_packet_in_a_group_frame_is_dropped() {
    let mut h = Host::new();
    let packet = packet(PEER4, OUR4, protocol::UDP, &udp(ip(PEER4), ip(OUR4), b"hi"));
    h.drops(&framed(ALL, &packet), DropReason::IpDestination);
    h.end();
}

#[test]
fn offload_offsets_count_from_the_transport_header() {
    for ((src, dst), l3) in PAIRS.into_iter().zip([20, 40]) {
        let mut h = Host::new();
        let bytes = frame(&packet(src, dst, protocol::TCP, &tcp_segment(5000)));
        let gso = Gso {
            kind: GsoKind::TcpV4,
            segment_bytes: 1448,
            header_bytes: 14 + l3 + 36,
            ecn: false,
        };
        let offload = Offload {
            needs_csum: true,
            csum_start: 14 + l3,
            csum_offset: 16,
            csum_valid: false,
            gso: Some(gso),
        };
        let Verdict::Deliver(d) = h.receive_with(&bytes, offload) else { panic!() };
        let got = h.got(d);
        assert_eq!((got.offload.csum_start, got.offload.csum_offset), (0, 16));
        assert_eq!(got.offload.gso.unwrap().header_bytes, 36);
        for csum_start in [0, 13, 15 + l3, 9000] {
            let wrong = Offload { csum_start, ..offload };
            assert!(matches!(h.receive_with(&bytes, wrong), Verdict::Consumed));
        }
        assert_eq!(h.counters.drops(DropReason::BadOffload), 4);
        h.end();
    }
}

#[test]
fn without_memory_a_packet_that_must_be_pulled_up_is_a_counted_drop() {
    let mut h = Host::new();
    let bytes = udp_frame(PEER4, OUR4, b"hi");
    let mut c = h.chain(&bytes[..20], 0);
    let rest = h.chain(&bytes[20..], 0);
    c.append(rest);
    let mut hoard = Vec::new();
    for bytes in [65_536, 16_000, 4000, 2000, 200] {
        for purpose in [Purpose::Send, Purpose::Receive, Purpose::Control] {
            while let Ok(m) = h.pool.alloc(bytes, 0, purpose) {
                hoard.push(m);
            }
        }
    }
    assert!(matches!(h.receive_chain(c, Offload::default()), Verdict::Consumed));
    assert_eq!(h.counters.drops(DropReason::NoBuffer), 1);
    hoard.into_iter().for_each(|m| h.pool.free_mbuf(m));
    h.end();
}
