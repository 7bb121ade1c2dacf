//! The Ethernet of the shard under test: the only neighbour answers for every address, and hands over and takes IP
//! packets.
//!
//! ARP requests and neighbour solicitations are answered at the time at which they are sent, so that resolution takes no
//! time and no script sees it. Packets that belong to the link alone (ARP, neighbour and router discovery, multicast
//! membership) do not leave it. The device computes nothing in hardware: every packet leaves as it would appear on a
//! wire.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::MutexGuard;

use fulmar_stack::base::{EtherAddr, Gso, GsoKind, Offload};
use fulmar_stack::device::Caps;
use fulmar_stack::device::memory::{MemoryDevice, MemoryPort, Wire};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{arp, eth, ipv6, protocol, tcp};

/// The station address of the shard.
pub const OWN: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 1]);
/// The station address of the neighbour that answers for every address.
const NEIGHBOUR: EtherAddr = EtherAddr([2, 0, 0, 0, 0, 2]);

/// The MSS of a peer that names none (RFC 9293 section 3.7.1).
const DEFAULT_MSS: u16 = 536;

/// The neighbour's end of the device.
pub struct Cable {
    wire: MemoryPort,
    mtu: usize,
    /// The MSS option of the last SYN injected: the size of the segments of which a larger packet was made.
    peer_mss: Option<u16>,
}

impl Cable {
    /// A device for packets of at most `mtu` bytes, and its other end.
    pub fn new(mtu: usize) -> (MemoryDevice, Cable) {
        let (device, wire) = MemoryDevice::new(Caps::plain(mtu, OWN));
        (device, Cable { wire, mtu, peer_mss: None })
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock()
    }

    /// Sends an IP packet to the shard.
    pub fn inject(&mut self, packet: &[u8]) {
        let is_v6 = packet.first().is_some_and(|b| b >> 4 == 6);
        let ethertype = if is_v6 { eth::IPV6 } else { eth::IPV4 };
        let options = tcp_of(packet).and_then(|(_, segment)| tcp::Header::parse(segment).ok());
        self.peer_mss = options.and_then(|(header, _)| header.options.mss).or(self.peer_mss);
        let bytes = frame(ethertype, packet);
        let offload = offload_of(&bytes, self.mtu, self.peer_mss.unwrap_or(DEFAULT_MSS));
        self.wire().arriving.push_back((bytes, offload).into());
    }

    /// Whether frames wait for the shard.
    pub fn has_arriving(&self) -> bool {
        !self.wire().arriving.is_empty()
    }

    /// The IP packets that the shard has sent since the last time. Questions of the link are answered.
    pub fn take_sent(&mut self) -> Vec<Vec<u8>> {
        let mut wire = self.wire();
        let Wire { sent, arriving, .. } = &mut *wire;
        let mut packets = Vec::new();
        for (frame, _) in sent.drain(..) {
            let Ok(header) = eth::Header::parse(&frame) else { continue };
            let packet = &frame[eth::HEADER_BYTES..];
            let answer = match header.ethertype {
                eth::ARP => arp_reply(packet),
                eth::IPV6 if is_link_only(packet) => neighbour_advertisement(packet),
                _ => {
                    packets.push(packet.to_vec());
                    continue;
                }
            };
            arriving.extend(answer.map(|frame| (frame, Offload::default()).into()));
        }
        packets
    }
}

/// The TCP segment of a packet without IPv6 extensions, and where it begins.
fn tcp_of(packet: &[u8]) -> Option<(usize, &[u8])> {
    let (protocol, at) = match packet.first()? >> 4 {
        4 => (*packet.get(9)?, usize::from(packet[0] & 15) * 4),
        6 => (*packet.get(6)?, ipv6::HEADER_BYTES),
        _ => return None,
    };
    Some((at, packet.get(at..)?)).filter(|_| protocol == protocol::TCP)
}

/// A packet larger than the MTU has been made of several (GRO), as packetdrill's are.
fn offload_of(frame: &[u8], mtu: usize, mss: u16) -> Offload {
    let packet = frame.get(eth::HEADER_BYTES..).unwrap_or(&[]);
    let Some((at, segment)) = tcp_of(packet).filter(|_| packet.len() > mtu) else {
        return Offload::default();
    };
    let is_v4 = packet[0] >> 4 == 4;
    let kind = if is_v4 { GsoKind::TcpV4 } else { GsoKind::TcpV6 };
    let header_bytes = segment.get(12).map_or(0, |b| usize::from(b >> 4) * 4);
    let header_bytes = (eth::HEADER_BYTES + at + header_bytes) as u16;
    let gso = Gso { kind, segment_bytes: mss, header_bytes, ecn: false };
    Offload { gso: Some(gso), ..Offload::default() }
}

/// A frame from the neighbour.
fn frame(ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; eth::HEADER_BYTES];
    let header = eth::Header { dst: OWN, src: NEIGHBOUR, ethertype };
    header.emit(&mut bytes).expect("invariant: the buffer has the length of the header");
    bytes.extend_from_slice(packet);
    bytes
}

/// The reply to an ARP request for another address than the sender's (RFC 826). A probe for an address of the
/// shard's own (RFC 5227) is not answered.
fn arp_reply(packet: &[u8]) -> Option<Vec<u8>> {
    let request = arp::Packet::parse(packet).ok()?;
    let is_probe = request.sender_ip.is_unspecified() || request.sender_ip == request.target_ip;
    if request.operation != arp::Operation::Request || is_probe {
        return None;
    }
    let reply = arp::Packet {
        operation: arp::Operation::Reply,
        sender_ether: NEIGHBOUR,
        sender_ip: request.target_ip,
        target_ether: OWN,
        target_ip: request.sender_ip,
    };
    let mut bytes = [0; arp::BYTES];
    reply.emit(&mut bytes).ok()?;
    Some(frame(eth::ARP, &bytes))
}

const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Multicast listener queries, reports and dones, and version 2 reports (RFC 2710, RFC 3810).
const MULTICAST_LISTENER: [u8; 4] = [130, 131, 132, 143];

/// The ICMPv6 type of a packet, behind a hop-by-hop header if it has one.
fn icmpv6_type(packet: &[u8]) -> Option<u8> {
    match (packet.get(6)?, packet.get(ipv6::HEADER_BYTES..)?) {
        (&protocol::ICMPV6, payload) => payload.first().copied(),
        (0, payload) if payload.first() == Some(&protocol::ICMPV6) => payload.get(8).copied(),
        _ => None,
    }
}

fn is_link_only(packet: &[u8]) -> bool {
    icmpv6_type(packet).is_some_and(|kind| {
        (ROUTER_SOLICITATION..=NEIGHBOUR_ADVERTISEMENT + 1).contains(&kind)
            || MULTICAST_LISTENER.contains(&kind)
    })
}

/// The answer to a neighbour solicitation (RFC 4861 section 4.4). Solicitations of duplicate address detection,
/// which come from `::`, are not answered.
fn neighbour_advertisement(packet: &[u8]) -> Option<Vec<u8>> {
    if icmpv6_type(packet)? != NEIGHBOUR_SOLICITATION {
        return None;
    }
    let address = |at: usize| packet.get(at..)?.first_chunk::<16>().copied().map(Ipv6Addr::from);
    let (asker, target) = (address(8)?, address(ipv6::HEADER_BYTES + 8)?);
    if asker.is_unspecified() {
        return None;
    }
    // Solicited and override; then the target link-layer address option.
    let mut message = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, 0x60, 0, 0, 0];
    message.extend_from_slice(&target.octets());
    message.extend_from_slice(&[2, 1]);
    message.extend_from_slice(&NEIGHBOUR.0);
    let mut sum = Sum::new();
    let (src, dst) = (IpAddr::V6(target), IpAddr::V6(asker));
    sum.add_pseudo(src, dst, protocol::ICMPV6, message.len() as u32);
    sum.add_bytes(&message);
    message[2..4].copy_from_slice(&sum.finish().to_be_bytes());
    let header = ipv6::Header {
        src: target,
        dst: asker,
        next_header: protocol::ICMPV6,
        hop_limit: 255,
        traffic_class: 0,
        flow_label: 0,
        payload_bytes: message.len(),
    };
    let mut bytes = vec![0; ipv6::HEADER_BYTES];
    header.emit(&mut bytes).ok()?;
    bytes.extend_from_slice(&message);
    Some(frame(eth::IPV6, &bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_any_address_is_answered_and_a_probe_is_not() {
        let request = |sender: [u8; 4]| {
            let packet = arp::Packet {
                operation: arp::Operation::Request,
                sender_ether: OWN,
                sender_ip: sender.into(),
                target_ether: EtherAddr([0; 6]),
                target_ip: [192, 0, 2, 77].into(),
            };
            let mut bytes = [0; arp::BYTES];
            packet.emit(&mut bytes).unwrap();
            arp_reply(&bytes)
        };
        let reply = request([192, 168, 0, 2]).expect("a reply");
        let reply = arp::Packet::parse(&reply[eth::HEADER_BYTES..]).unwrap();
        assert_eq!((reply.sender_ip, reply.sender_ether), ([192, 0, 2, 77].into(), NEIGHBOUR));
        assert!(request([0; 4]).is_none());
    }
}
