//! Frames as a hostile station builds them: right where the script does not say otherwise.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fulmar_stack::base::EtherAddr;
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{eth, ipv4, ipv6, protocol, tcp, udp};

/// Station address of the stack.
pub const OURS: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);
/// Station address of the peer.
pub const PEERS: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 2]);

/// Address of the stack.
pub fn our_ip(v6: bool) -> IpAddr {
    if v6 {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into()
    } else {
        Ipv4Addr::new(10, 0, 0, 1).into()
    }
}

/// Address of a host on the peer's side; 2 is the peer.
pub fn peer_ip(v6: bool, host: u8) -> IpAddr {
    if v6 {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(host)).into()
    } else {
        Ipv4Addr::new(10, 0, 0, host).into()
    }
}

/// Ethernet and IP in front of a payload.
pub fn ip_frame(src: IpAddr, dst: IpAddr, proto: u8, payload: &[u8]) -> Vec<u8> {
    marked_ip_frame((src, dst), proto, payload, 0)
}

/// The same with an ECN field.
pub fn marked_ip_frame(ends: (IpAddr, IpAddr), proto: u8, payload: &[u8], ecn: u8) -> Vec<u8> {
    let (src, dst) = ends;
    let mut frame = ethernet(if src.is_ipv6() { eth::IPV6 } else { eth::IPV4 });
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let mut h = [0; ipv4::HEADER_BYTES];
            let total_bytes = (h.len() + payload.len()).min(65_535);
            let header = ipv4_header(src, dst, proto, total_bytes);
            ipv4::Header { dscp_ecn: ecn & 3, ..header }.emit(&mut h).expect("20 bytes");
            frame.extend_from_slice(&h);
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let mut h = [0; ipv6::HEADER_BYTES];
            let header = ipv6::Header {
                src,
                dst,
                next_header: proto,
                hop_limit: 255,
                traffic_class: ecn & 3,
                flow_label: 0,
                payload_bytes: payload.len().min(65_535),
            };
            header.emit(&mut h).expect("40 bytes");
            frame.extend_from_slice(&h);
        }
        _ => {}
    }
    frame.extend_from_slice(payload);
    frame
}

/// An IPv4 header without fragmentation.
pub fn ipv4_header(src: Ipv4Addr, dst: Ipv4Addr, proto: u8, total_bytes: usize) -> ipv4::Header {
    ipv4::Header {
        src,
        dst,
        protocol: proto,
        ttl: 64,
        dscp_ecn: 0,
        ident: 7,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: ipv4::HEADER_BYTES,
        total_bytes,
    }
}

/// An Ethernet header from the peer to the stack.
pub fn ethernet(ethertype: u16) -> Vec<u8> {
    let mut h = vec![0; eth::HEADER_BYTES];
    eth::Header { dst: OURS, src: PEERS, ethertype }.emit(&mut h).expect("14 bytes");
    h
}

/// A TCP segment with its checksum.
pub fn tcp_segment(src: SocketAddr, dst: SocketAddr, header: &tcp::Header, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; header.header_bytes()];
    header.emit(&mut bytes).expect("as long as the header says");
    bytes.extend_from_slice(data);
    complete(&mut bytes, tcp::CHECKSUM_OFFSET, (src.ip(), dst.ip()), protocol::TCP);
    bytes
}

/// A UDP datagram with its checksum.
pub fn udp_datagram(src: SocketAddr, dst: SocketAddr, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; udp::HEADER_BYTES];
    let length = (udp::HEADER_BYTES + data.len()).min(65_535) as u16;
    let header = udp::Header { src_port: src.port(), dst_port: dst.port(), length, checksum: 0 };
    header.emit(&mut bytes).expect("8 bytes");
    bytes.extend_from_slice(data);
    complete(&mut bytes, udp::CHECKSUM_OFFSET, (src.ip(), dst.ip()), protocol::UDP);
    bytes
}

/// Writes the checksum over a transport's bytes and its pseudo header.
pub fn complete(bytes: &mut [u8], at: usize, ends: (IpAddr, IpAddr), proto: u8) {
    let Some(field) = bytes.get_mut(at..at + 2) else { return };
    field.fill(0);
    let mut sum = Sum::new();
    if proto != protocol::ICMP {
        sum.add_pseudo(ends.0, ends.1, proto, bytes.len() as u32);
    }
    sum.add_bytes(bytes);
    bytes[at..at + 2].copy_from_slice(&sum.finish().to_be_bytes());
}
