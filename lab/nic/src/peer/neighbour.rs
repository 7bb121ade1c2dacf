//! The peer answers for every address: ARP (RFC 826), neighbour discovery (RFC 4861) and echo (RFC 792,
//! RFC 4443).

use std::net::{IpAddr, Ipv6Addr};
use std::ops::Range;

use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::icmpv6::{Message, NdpOption};
use fulmar_stack::wire::{arp, eth, icmpv4, protocol};

use super::{Arrival, Out, Peer};
use crate::frame::{HeaderBuf, Headers, Rest, WireFrame};

const ECHO_REPLY_V4: u8 = 0;
const ECHO_REPLY_V6: u8 = 129;
/// Where the checksum stands in both versions of ICMP.
const CHECKSUM: Range<usize> = 2..4;

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
        if out.has_space() {
            out.send(a.at, WireFrame::new(&bytes, Rest::None));
        }
        Some(())
    }

    pub(super) fn icmpv4(&self, a: &Arrival<'_>, seen: &Headers, out: &mut Out<'_>) -> Option<()> {
        match icmpv4::Message::parse(a.front.get(seen.network.l4..)?).ok()? {
            icmpv4::Message::EchoRequest { .. } => self.echo(a, seen, ECHO_REPLY_V4, out),
            _ => Some(()),
        }
    }

    pub(super) fn icmpv6(&self, a: &Arrival<'_>, seen: &Headers, out: &mut Out<'_>) -> Option<()> {
        match Message::parse(a.front.get(seen.network.l4..)?).ok()? {
            Message::EchoRequest { .. } => self.echo(a, seen, ECHO_REPLY_V6, out),
            Message::NeighbourSolicitation { target } => self.advertise(a, seen, target, out),
            _ => Some(()),
        }
    }

    /// The request itself with the ends exchanged.
    fn echo(&self, a: &Arrival<'_>, seen: &Headers, kind: u8, out: &mut Out<'_>) -> Option<()> {
        let mut l4 =
            a.chain.to_vec().get(seen.network.l4..seen.network.l4 + seen.payload_bytes)?.to_vec();
        let protocol = if seen.network.src.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 };
        let ends = self.ends(seen.network.dst, seen.network.src);
        *l4.first_mut()? = kind;
        l4.get_mut(CHECKSUM)?.fill(0);
        let mut sum = Sum::new();
        if seen.network.src.is_ipv6() {
            sum.add_pseudo(ends.src, ends.dst, protocol, l4.len() as u32);
        }
        sum.add_bytes(&l4);
        l4.get_mut(CHECKSUM)?.copy_from_slice(&sum.finish().to_be_bytes());
        let buf = HeaderBuf::ip(&ends, protocol, l4.len())?;
        out.moved_bytes += 4 * l4.len() as u64;
        if out.has_space() && seen.network.l4 - eth::HEADER_BYTES + l4.len() <= out.mtu {
            out.send(a.at, WireFrame::new(buf.with_l4(0), Rest::Bytes(l4)));
        }
        Some(())
    }

    /// Tells the station of an address, unless the question is a probe for it (RFC 4862).
    fn advertise(
        &self,
        a: &Arrival<'_>,
        seen: &Headers,
        target: Ipv6Addr,
        out: &mut Out<'_>,
    ) -> Option<()> {
        if seen.network.src == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
            || seen.network.src == IpAddr::V6(target)
        {
            return Some(());
        }
        let advertisement = Message::NeighbourAdvertisement {
            target,
            router: false,
            solicited: true,
            override_: true,
        };
        let option = NdpOption::TargetLinkLayer(self.config.ether);
        let ends = self.ends(target.into(), seen.network.src);
        let bytes = advertisement.header_bytes() + option.bytes();
        let mut buf = HeaderBuf::ip(&ends, protocol::ICMPV6, bytes)?;
        let l4 = buf.l4_mut().get_mut(..bytes)?;
        advertisement.emit(l4).ok()?;
        option.emit(l4.get_mut(advertisement.header_bytes()..)?).ok()?;
        let mut sum = Sum::new();
        sum.add_pseudo(ends.src, ends.dst, protocol::ICMPV6, bytes as u32);
        sum.add_bytes(l4);
        l4.get_mut(CHECKSUM)?.copy_from_slice(&sum.finish().to_be_bytes());
        if out.has_space() {
            out.send(a.at, WireFrame::new(buf.with_l4(bytes), Rest::None));
        }
        Some(())
    }
}
