//! The headers of a frame, dissected once: the offset of each layer, and the flow.
//!
//! **What enters and leaves.** The first bytes of a frame, from its Ethernet header on, and its whole length.
//! [`Network`] has the fields of the Ethernet and IP headers, [`Headers`] adds TCP and UDP. Offsets count from the
//! first byte of the frame. **What it does not do:** checksums are not verified. Fragments, and packets whose headers
//! and lengths contradict each other, are not dissected.

use core::net::{IpAddr, SocketAddr};

use crate::base::FlowKey;

use crate::wire::{eth, ipv4, ipv6, protocol, tcp, udp};

/// The Ethernet and IP headers of a frame that carries a whole IP packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network {
    /// The Ethernet header.
    pub ether: eth::Header,
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Protocol of the header after IP and its extension headers, see [`protocol`].
    pub protocol: u8,
    /// Offset of the transport header in the frame, bytes.
    pub l4: usize,
    /// Offset of the end of the IP packet in the frame, bytes; padding may follow.
    pub end: usize,
}

impl Network {
    /// Reads the headers at the front of a frame of `frame_bytes`. `None`: no IP packet, a fragment of one, or
    /// headers and lengths contradict each other.
    #[inline]
    pub fn parse(front: &[u8], frame_bytes: usize) -> Option<Network> {
        let ether = eth::Header::parse(front).ok()?;
        let l3 = front.get(eth::HEADER_BYTES..)?;
        let l3_bytes_available = frame_bytes.checked_sub(eth::HEADER_BYTES)?;
        let (src, dst, protocol, l3_bytes, packet_bytes) = match ether.ethertype {
            eth::IPV4 => {
                let h = ipv4::Header::parse(l3, l3_bytes_available).ok()?;
                if h.more_fragments || h.fragment_offset != 0 {
                    return None;
                }
                (h.src.into(), h.dst.into(), h.protocol, h.header_bytes, h.total_bytes)
            }
            eth::IPV6 => {
                let h = ipv6::Header::parse(l3, l3_bytes_available).ok()?;
                let upper = ipv6::walk_extensions(l3, &h).ok()?;
                if upper.fragment.is_some_and(|f| !f.is_atomic()) {
                    return None;
                }
                let bytes = ipv6::HEADER_BYTES.checked_add(h.payload_bytes)?;
                (h.src.into(), h.dst.into(), upper.protocol, upper.offset, bytes)
            }
            _ => return None,
        };
        let l4 = eth::HEADER_BYTES.checked_add(l3_bytes)?;
        let end = eth::HEADER_BYTES.checked_add(packet_bytes)?;
        Some(Network { ether, src, dst, protocol, l4, end })
    }

    /// Source and destination port, of TCP and UDP alone.
    #[inline]
    pub fn ports(&self, front: &[u8]) -> Option<[u16; 2]> {
        if !matches!(self.protocol, protocol::TCP | protocol::UDP) {
            return None;
        }
        let [s0, s1, d0, d1] = *front.get(self.l4..)?.first_chunk::<4>()?;
        Some([u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1])])
    }

    /// The flow as its receiver sees it, with these ports.
    #[inline]
    pub fn flow(&self, [src_port, dst_port]: [u16; 2]) -> FlowKey {
        FlowKey::new(SocketAddr::new(self.dst, dst_port), SocketAddr::new(self.src, src_port))
    }
}

/// The fields of a transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// TCP.
    Tcp(tcp::Header),
    /// UDP.
    Udp(udp::Header),
    /// Anything else: its number.
    Other(u8),
}

/// All headers of a frame that carries a whole IP packet, and the range of its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Headers {
    /// Ethernet and IP.
    pub network: Network,
    /// The fields of the transport header.
    pub transport: Transport,
    /// Offset of the payload of the transport in the frame, bytes.
    pub payload_at: usize,
    /// Its length in bytes.
    pub payload_bytes: usize,
}

impl Headers {
    /// Reads the headers at the front of a frame of `frame_bytes`. `None`: as for [`Network::parse`], or the
    /// transport header is malformed or cut off.
    #[inline]
    pub fn parse(front: &[u8], frame_bytes: usize) -> Option<Headers> {
        let network = Network::parse(front, frame_bytes)?;
        let l4 = front.get(network.l4..)?;
        let (transport, l4_bytes) = match network.protocol {
            protocol::TCP => {
                let (h, bytes) = tcp::Header::parse(l4).ok()?;
                (Transport::Tcp(h), bytes)
            }
            protocol::UDP => (Transport::Udp(udp::Header::parse(l4).ok()?), udp::HEADER_BYTES),
            other => (Transport::Other(other), 0),
        };
        let payload_at = network.l4.checked_add(l4_bytes)?;
        let payload_bytes = network.end.checked_sub(payload_at)?;
        Some(Headers { network, transport, payload_at, payload_bytes })
    }

    /// The flow as its receiver sees it; `None` unless the transport is TCP or UDP.
    pub fn flow(&self) -> Option<FlowKey> {
        match &self.transport {
            Transport::Tcp(h) => Some(self.network.flow([h.src_port, h.dst_port])),
            Transport::Udp(h) => Some(self.network.flow([h.src_port, h.dst_port])),
            Transport::Other(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::tcp::Flags;
    use proptest::prelude::*;

    const ETHER: eth::Header = eth::Header {
        dst: crate::base::EtherAddr([2, 0, 0, 0, 0, 1]),
        src: crate::base::EtherAddr([2, 0, 0, 0, 0, 2]),
        ethertype: eth::IPV4,
    };

    fn end(is_v4: bool, host: u8, port: u16) -> SocketAddr {
        let v6 = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host];
        let ip = if is_v4 { IpAddr::from([10, 0, 0, host]) } else { IpAddr::from(v6) };
        SocketAddr::new(ip, port)
    }

    /// A TCP segment or a datagram from host 2 to host 1.
    fn frame(is_v4: bool, is_tcp: bool, payload_bytes: usize) -> Vec<u8> {
        let mut l4 = [0; 60];
        let l4_bytes = if is_tcp {
            let header =
                tcp::Header { src_port: 7, dst_port: 9, flags: Flags::ACK, ..Default::default() };
            header.emit(&mut l4).unwrap()
        } else {
            let length = (udp::HEADER_BYTES + payload_bytes) as u16;
            let header = udp::Header { src_port: 7, dst_port: 9, length, checksum: 0 };
            header.emit(&mut l4).unwrap();
            udp::HEADER_BYTES
        };
        let protocol = if is_tcp { protocol::TCP } else { protocol::UDP };
        let mut f = vec![0; eth::HEADER_BYTES + if is_v4 { 20 } else { 40 }];
        let (src, dst) = (end(is_v4, 2, 0).ip(), end(is_v4, 1, 0).ip());
        let total = l4_bytes + payload_bytes;
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                ETHER.emit(&mut f).unwrap();
                let h = ipv4::Header {
                    src,
                    dst,
                    protocol,
                    ttl: 64,
                    dscp_ecn: 0,
                    ident: 0,
                    dont_fragment: true,
                    more_fragments: false,
                    fragment_offset: 0,
                    header_bytes: 20,
                    total_bytes: 20 + total,
                };
                h.emit(&mut f[14..]).unwrap();
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                eth::Header { ethertype: eth::IPV6, ..ETHER }.emit(&mut f).unwrap();
                let h = ipv6::Header {
                    src,
                    dst,
                    next_header: protocol,
                    hop_limit: 64,
                    traffic_class: 0,
                    flow_label: 0,
                    payload_bytes: total,
                };
                h.emit(&mut f[14..]).unwrap();
            }
            _ => unreachable!(),
        }
        f.extend_from_slice(&l4[..l4_bytes]);
        f.resize(f.len() + payload_bytes, 0x5a);
        f
    }

    proptest! {
        #[test]
        fn headers_say_where_the_payload_of_which_flow_lies(
            is_v4: bool, is_tcp: bool, payload_bytes in 0usize..2000, padding in 0usize..50,
        ) {
            let mut f = frame(is_v4, is_tcp, payload_bytes);
            f.resize(f.len() + padding, 0);
            let h = Headers::parse(&f, f.len()).unwrap();
            prop_assert_eq!(h.payload_bytes, payload_bytes);
            prop_assert!(f[h.payload_at..][..payload_bytes].iter().all(|b| *b == 0x5a));
            prop_assert_eq!(matches!(h.transport, Transport::Tcp(_)), is_tcp);
            let flow = FlowKey::new(end(is_v4, 1, 9), end(is_v4, 2, 7));
            prop_assert_eq!(h.flow(), Some(flow));
            // The network alone says the same, from no more than headers and ports.
            let n = Network::parse(&f[..h.network.l4 + 4], f.len()).unwrap();
            prop_assert_eq!(n, h.network);
            prop_assert_eq!(n.ports(&f).map(|ports| n.flow(ports)), Some(flow));
        }

        #[test]
        fn any_bytes_are_dissected_within_their_length_or_not_at_all(
            bytes in prop::collection::vec(any::<u8>(), 0..120),
            kind in prop_oneof![Just(eth::IPV4), Just(eth::IPV6)],
            more in 0usize..2000,
        ) {
            let mut bytes = bytes;
            if let Some(field) = bytes.get_mut(12..14) {
                field.copy_from_slice(&kind.to_be_bytes());
            }
            let frame_bytes = bytes.len() + more;
            if let Some(h) = Headers::parse(&bytes, frame_bytes) {
                prop_assert!(h.network.l4 <= h.payload_at && h.network.end <= frame_bytes);
                prop_assert_eq!(h.payload_at + h.payload_bytes, h.network.end);
                prop_assert_eq!(h.flow(), h.network.ports(&bytes).map(|p| h.network.flow(p)));
            }
        }
    }

    #[test]
    fn fragments_cut_headers_and_frames_shorter_than_their_packet_are_not_dissected() {
        for (is_v4, is_tcp) in [(true, true), (true, false), (false, true), (false, false)] {
            let f = frame(is_v4, is_tcp, 100);
            let h = Headers::parse(&f, f.len()).unwrap();
            assert!((0..h.payload_at).all(|n| Headers::parse(&f[..n], f.len()).is_none()));
            assert_eq!(Headers::parse(&f, f.len() - 1), None);
        }
        let mut f = frame(true, true, 100);
        f[20] = 0x20;
        assert_eq!(Network::parse(&f, f.len()), None);
        f[20..22].copy_from_slice(&[0, 1]);
        assert_eq!(Network::parse(&f, f.len()), None);
    }

    #[test]
    fn a_packet_that_is_neither_tcp_nor_udp_has_no_flow() {
        let mut f = frame(true, false, 10);
        f[23] = 1;
        let h = Headers::parse(&f, f.len()).unwrap();
        assert_eq!(h.transport, Transport::Other(1));
        assert_eq!((h.flow(), h.network.ports(&f)), (None, None));
        assert_eq!((h.payload_at, h.payload_bytes), (34, 18));
    }
}
