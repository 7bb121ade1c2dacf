//! The Ethernet and IP header of a flow, written once and copied for each packet.
//!
//! ```text
//!  | dst 6 | src 6 | type 2 | IPv4 20: length, identification, checksum open, or IPv6 40: length open |
//! ```
//!
//! Enters: the flow of a packet that has just been sent the long way ([`Ip::output`]); the template is
//! made of what that left in the cache of destinations, so that making one asks nobody and sends
//! nothing. Leaves: headers for the packets behind it. A template belongs to whoever sends the flow.
//!
//! It holds while [`Ip::generation`] stays the same (no address, route, neighbour or path MTU has
//! changed) and until the neighbour's state has to be looked at again. Then, and for whatever is larger
//! than the path, the packet goes the long way.
//!
//! Cost: two compares, a copy of 34 or 54 bytes and three patches, instead of a look-up by address and
//! two headers field by field.

use core::net::IpAddr;

use fulmar_base::{Instant, Offload, Zone};
use fulmar_wire::{eth, ipv4, ipv6};

use crate::destination::Destination;
use crate::engine::Ip;
use crate::pmtu::Limit;
use crate::routing::hash_of_flow;

/// What the packets of one flow have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// From which address of ours.
    pub src: IpAddr,
    /// To whom; the same IP version as `src`.
    pub dst: IpAddr,
    /// The interface of a link-local `dst`; 0: the only one.
    pub zone: Zone,
    /// Source and destination port.
    pub ports: (u16, u16),
    /// What follows the IP header.
    pub protocol: u8,
    /// Time to live or hop limit; `None`: as configured.
    pub ttl: Option<u8>,
    /// Differentiated services (upper 6 bits) and ECN (lower 2).
    pub dscp_ecn: u8,
    /// No packet may be fragmented.
    pub dont_fragment: bool,
}

#[derive(Clone, Copy, Debug)]
enum Network {
    V4(ipv4::Template),
    V6([u8; ipv6::HEADER_BYTES]),
}

impl Network {
    /// Length of the header.
    const fn bytes(&self) -> usize {
        match self {
            Network::V4(_) => ipv4::HEADER_BYTES,
            Network::V6(_) => ipv6::HEADER_BYTES,
        }
    }
}

/// The headers of a flow: see the module.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    link: [u8; eth::HEADER_BYTES],
    network: Network,
    /// Length of both headers.
    header_bytes: usize,
    /// Its packets are never fragmented: their identification is 0, or there is none.
    is_atomic: bool,
    /// Largest IP packet that may go by it.
    mtu: usize,
    /// Largest transport packet that may go by it in one piece.
    most_bytes: usize,
    generation: u64,
    fresh_until: Instant,
}

impl Template {
    /// Length of the headers, Ethernet's first.
    #[inline]
    pub const fn header_bytes(&self) -> usize {
        self.header_bytes
    }

    /// Length of the IP header.
    const fn network_bytes(&self) -> usize {
        self.header_bytes.saturating_sub(eth::HEADER_BYTES)
    }

    /// Whether a transport packet of so many bytes may go by this template in one piece.
    #[inline]
    pub const fn fits_whole(&self, transport_bytes: usize) -> bool {
        transport_bytes <= self.most_bytes
    }

    /// Whether a transport packet of so many bytes may go by this template: it, or each segment that it
    /// is cut into, fits the path, and its length fits the field.
    #[inline]
    pub fn fits(&self, transport_bytes: usize, offload: &Offload) -> bool {
        let Some(gso) = offload.gso else { return self.fits_whole(transport_bytes) };
        let segment = usize::from(gso.header_bytes).saturating_add(gso.segment_bytes.into());
        let largest_bytes = segment.min(transport_bytes);
        let whole_bytes = transport_bytes.saturating_add(self.network_bytes());
        largest_bytes.saturating_add(self.network_bytes()) <= self.mtu
            && whole_bytes <= usize::from(u16::MAX)
    }

    /// Writes the headers of a packet with `payload_bytes` behind them into the first
    /// [`Template::header_bytes`] bytes of `room`; `None` if that is shorter. `ident` is the IPv4
    /// identification, from [`Ip::ident_by`].
    #[inline(always)]
    pub fn emit(&self, payload_bytes: u16, ident: u16, room: &mut [u8]) -> Option<()> {
        let (link, network) = room.split_first_chunk_mut::<{ eth::HEADER_BYTES }>()?;
        *link = self.link;
        match &self.network {
            Network::V4(header) => {
                let total_bytes = payload_bytes.checked_add(ipv4::HEADER_BYTES as u16)?;
                header.emit(total_bytes, ident, network.first_chunk_mut()?);
            }
            Network::V6(header) => {
                let network = network.first_chunk_mut::<{ ipv6::HEADER_BYTES }>()?;
                *network = *header;
                network[4..6].copy_from_slice(&payload_bytes.to_be_bytes());
            }
        }
        Some(())
    }
}

impl Ip {
    /// Whether packets may still go by a template.
    #[inline]
    pub fn holds(&self, template: &Template, now: Instant) -> bool {
        template.generation == self.generation() && now < template.fresh_until
    }

    /// The identification of the next packet by a template; the packets that a device cuts from it count
    /// on from there.
    #[inline]
    pub fn ident_by(&mut self, template: &Template) -> u16 {
        self.draw_ident(template.is_atomic)
    }

    /// The template of a flow of which a packet has just gone the long way. `None` if it has to go on
    /// that way: the neighbour is not known yet, or the packets are for this stack itself.
    pub fn template_of(&self, flow: &Flow, now: Instant) -> Option<Template> {
        if flow.zone != 0 && flow.zone != self.config.zone || !self.is_local(flow.src) {
            return None;
        }
        let found = self.remembered(flow, now).filter(|d| !d.is_own)?;
        let ethertype = if flow.dst.is_ipv4() { eth::IPV4 } else { eth::IPV6 };
        let mut link = [0; eth::HEADER_BYTES];
        let header = eth::Header { dst: found.ether, src: self.config.ether, ethertype };
        header.emit(&mut link).ok()?;
        let Limit { mtu, must_fragment } = found.limits.for_protocol(flow.protocol);
        let network = self.network_of(flow, !must_fragment)?;
        let network_bytes = network.bytes();
        Some(Template {
            link,
            network,
            header_bytes: eth::HEADER_BYTES.saturating_add(network_bytes),
            is_atomic: flow.dst.is_ipv6() || flow.dont_fragment && !must_fragment,
            mtu,
            most_bytes: mtu.min(u16::MAX.into()).saturating_sub(network_bytes),
            generation: found.generation,
            fresh_until: found.fresh_until,
        })
    }

    /// Where the flow's last packet went.
    fn remembered(&self, flow: &Flow, now: Instant) -> Option<&Destination> {
        let (dst, generation) = (flow.dst, self.generation());
        let table = self.tables.table_for(Some(flow.src));
        let known = self.destinations.find((dst, table, 0), generation, now);
        if known.is_some() || !self.tables.is_spread() {
            return known;
        }
        let ports = u32::from(flow.ports.0) << 16 | u32::from(flow.ports.1);
        let hash = hash_of_flow(&self.next_hop_key, flow.src, dst, ports);
        self.destinations.find((dst, table, hash), generation, now)
    }

    fn network_of(&self, flow: &Flow, may_forbid: bool) -> Option<Network> {
        let ttl = flow.ttl.unwrap_or(self.config.ttl);
        match (flow.src, flow.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let header = ipv4::Header {
                    src,
                    dst,
                    protocol: flow.protocol,
                    ttl,
                    dscp_ecn: flow.dscp_ecn,
                    ident: 0,
                    dont_fragment: flow.dont_fragment && may_forbid,
                    more_fragments: false,
                    fragment_offset: 0,
                    header_bytes: ipv4::HEADER_BYTES,
                    total_bytes: ipv4::HEADER_BYTES,
                };
                ipv4::Template::new(&header).ok().map(Network::V4)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let header = ipv6::Header {
                    src,
                    dst,
                    next_header: flow.protocol,
                    hop_limit: ttl,
                    traffic_class: flow.dscp_ecn,
                    flow_label: 0,
                    payload_bytes: 0,
                };
                let mut bytes = [0; ipv6::HEADER_BYTES];
                header.emit(&mut bytes).ok()?;
                Some(Network::V6(bytes))
            }
            _ => None,
        }
    }
}
