//! The peer is whoever is asked for: ARP (RFC 826) and neighbour discovery (RFC 4861).

use std::net::IpAddr;

use fulmar_wire::checksum::Sum;
use fulmar_wire::icmpv6::{CHECKSUM_OFFSET, Message, NdpOption};
use fulmar_wire::{arp, eth, protocol};

use super::{Arrival, Out, Peer};
use crate::sim::frame::{HeaderBuf, Rest, Seen, WireFrame};

impl Peer {
    /// Answers a question, unless it is about the asker itself or a probe (RFC 5227): the stack's
    /// own addresses are the only ones that are not the peer's.
    pub(super) fn arp(&self, a: &Arrival<'_>, out: &mut Out<'_>) -> Option<()> {
        let q = arp::Packet::parse(a.front.get(eth::HEADER_BYTES..)?).ok()?;
        let is_own = q.sender_ip.is_unspecified() || q.sender_ip == q.target_ip;
        if q.operation != arp::Operation::Request || is_own {
            return Some(());
        }
        let answer = arp::Packet {
            operation: arp::Operation::Reply,
            sender_ether: self.config.ether,
            sender_ip: q.target_ip,
            target_ether: q.sender_ether,
            target_ip: q.sender_ip,
        };
        let mut bytes = [0; eth::HEADER_BYTES + arp::BYTES];
        let ether =
            eth::Header { dst: q.sender_ether, src: self.config.ether, ethertype: eth::ARP };
        ether.emit(&mut bytes).ok()?;
        answer.emit(bytes.get_mut(eth::HEADER_BYTES..)?).ok()?;
        if out.has_room() {
            out.send(a.at, WireFrame::new(&bytes, Rest::None));
        }
        Some(())
    }

    pub(super) fn icmpv6(&self, a: &Arrival<'_>, seen: &Seen, out: &mut Out<'_>) -> Option<()> {
        let message = Message::parse(a.front.get(seen.l4..)?).ok()?;
        let IpAddr::V6(asker) = seen.src else { return None };
        match message {
            Message::NeighbourSolicitation { target } if !asker.is_unspecified() => {
                let advertisement = Message::NeighbourAdvertisement {
                    target,
                    router: false,
                    solicited: true,
                    override_: true,
                };
                let option = NdpOption::TargetLinkLayer(self.config.ether);
                let ends = self.ends(target.into(), seen.src);
                let bytes = advertisement.header_bytes() + option.bytes();
                let mut buf = HeaderBuf::ip(&ends, protocol::ICMPV6, bytes)?;
                let l4 = buf.l4_mut().get_mut(..bytes)?;
                advertisement.emit(l4).ok()?;
                option.emit(l4.get_mut(advertisement.header_bytes()..)?).ok()?;
                let mut sum = Sum::new();
                sum.add_pseudo(ends.src, ends.dst, protocol::ICMPV6, bytes as u32);
                sum.add_bytes(l4);
                let at = CHECKSUM_OFFSET..CHECKSUM_OFFSET + 2;
                l4.get_mut(at)?.copy_from_slice(&sum.finish().to_be_bytes());
                if out.has_room() {
                    out.send(a.at, WireFrame::new(buf.with_l4(bytes), Rest::None));
                }
            }
            _ => {}
        }
        Some(())
    }
}
