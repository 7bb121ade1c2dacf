//! Every parser of room `wire` on the same bytes: nothing panics, what is returned lies inside what
//! was given, and what was parsed is emitted and parsed again as the same.

use fulmar_stack::wire::checksum::checksum;
use fulmar_stack::wire::{arp, eth, icmpv4, icmpv6, ipv4, ipv6, tcp, udp, virtio_net};

/// Gives the bytes behind the first to every parser; the first is the length of the packet beyond
/// what was received of it.
pub fn parsers(input: &[u8]) {
    let Some((&beyond, bytes)) = input.split_first() else { return };
    let packet_bytes = bytes.len() + usize::from(beyond);
    small_headers(bytes);
    icmp(bytes);
    ip(bytes, packet_bytes);
    tcp_header(bytes);
    let sum = checksum(bytes);
    let reversed: Vec<u8> = bytes.chunks(2).flat_map(|pair| pair.iter().rev().copied()).collect();
    if bytes.len() % 2 == 0 {
        assert_eq!(sum.swap_bytes(), checksum(&reversed), "the sum depends on byte order");
    }
}

fn small_headers(bytes: &[u8]) {
    let mut out = [0; 64];
    if let Ok(h) = eth::Header::parse(bytes) {
        h.emit(&mut out).expect("an Ethernet header fits into 64 bytes");
        assert_eq!(eth::Header::parse(&out).ok(), Some(h));
    }
    if let Ok(p) = arp::Packet::parse(bytes) {
        p.emit(&mut out).expect("an ARP packet fits into 64 bytes");
        assert_eq!(arp::Packet::parse(&out).ok(), Some(p));
    }
    if let Ok(h) = udp::Header::parse(bytes) {
        h.emit(&mut out).expect("a UDP header fits into 64 bytes");
        assert_eq!(udp::Header::parse(&out).ok(), Some(h));
    }
    if let Ok(h) = virtio_net::Header::parse(bytes) {
        h.emit(&mut out).expect("a virtio-net header fits into 64 bytes");
        assert_eq!(virtio_net::Header::parse(&out).ok(), Some(h));
    }
}

fn icmp(bytes: &[u8]) {
    let mut out = [0; 64];
    if let Ok(m) = icmpv4::Message::parse(bytes) {
        m.emit(&mut out).expect("8 bytes fit into 64");
        assert_eq!(icmpv4::Message::parse(&out).ok(), Some(m));
    }
    if let Ok(m) = icmpv6::Message::parse(bytes) {
        assert!(m.header_bytes() <= bytes.len());
        m.emit(&mut out).expect("40 bytes fit into 64");
        assert_eq!(icmpv6::Message::parse(&out).ok(), Some(m));
    }
    assert!(icmpv6::ndp_options(bytes).count() <= bytes.len() / 8 + 1);
}

fn ip(bytes: &[u8], packet_bytes: usize) {
    let mut out = [0; 64];
    if let Ok(h) = ipv4::Header::parse(bytes, packet_bytes) {
        assert!(h.header_bytes <= bytes.len().min(h.total_bytes));
        assert!(h.total_bytes <= packet_bytes);
        ipv4::checksum_ok(bytes, h.header_bytes);
        // Options are not emitted: only a header without them comes back as it was.
        if h.header_bytes == ipv4::HEADER_BYTES {
            h.emit(&mut out).expect("a header that was parsed can be emitted");
            assert!(ipv4::checksum_ok(&out, ipv4::HEADER_BYTES));
            assert_eq!(ipv4::Header::parse(&out, packet_bytes).ok(), Some(h));
        }
    }
    if let Ok(h) = ipv6::Header::parse(bytes, packet_bytes) {
        assert!(h.payload_bytes + ipv6::HEADER_BYTES <= packet_bytes);
        h.emit(&mut out).expect("a header that was parsed can be emitted");
        assert_eq!(ipv6::Header::parse(&out, packet_bytes).ok(), Some(h));
        if let Ok(upper) = ipv6::walk_extensions(bytes, &h) {
            assert!(upper.offset <= bytes.len() && upper.offset <= packet_bytes);
        }
    }
}

fn tcp_header(bytes: &[u8]) {
    let Ok((h, header_bytes)) = tcp::Header::parse(bytes) else { return };
    assert!((20..=60).contains(&header_bytes) && header_bytes <= bytes.len());
    let peeked = tcp::Header::peek(bytes);
    assert_eq!(peeked, Some((h.seq, h.flags, header_bytes)));
    let mut out = [0; tcp::MAX_HEADER_BYTES];
    let written_bytes = h.emit(&mut out).expect("60 bytes hold any header");
    let (again, again_bytes) = tcp::Header::parse(&out).expect("what was emitted parses");
    assert_eq!(again_bytes, written_bytes);
    assert_eq!(again.options.timestamps, h.options.timestamps);
    assert_eq!(again.options.mss, h.options.mss);
    assert_eq!(again.options.window_scale, h.options.window_scale);
}
