//! Header templates: the Ethernet and IP header of a flow, built once and copied for each packet.
//!
//! ```text
//!  | dst 6 | src 6 | type 2 | IPv4 20: length, identification, checksum patched, or IPv6 40: length patched |
//! ```
//!
//! Input: a flow of which a packet was just sent by the slow path ([`Ip::output`]). The template is
//! built from the destination cache entry of that packet, so building one sends nothing. Output:
//! headers for the following packets. The sender of the flow owns the template.
//!
//! It is valid while [`Ip::generation`] is unchanged (no change of addresses, routes, neighbours or
//! path MTUs) and until the neighbour's state expires. After that, and for packets that exceed the
//! path MTU, the slow path runs.
//!
//! Cost: two comparisons, a copy of 34 or 54 bytes and three patched fields, instead of an address
//! look-up and two headers built field by field.

use core::net::IpAddr;

use crate::base::{Instant, MtuDiscovery, Offload, Zone};
use crate::route::Traffic;
use crate::wire::{checksum, eth, ipv4, ipv6};

use crate::ip::destination::{Destination, Key};
use crate::ip::engine::Ip;
use crate::ip::pmtu::Limit;
use crate::ip::routing::flow_hash_of_ports;

/// A flow: the constant header fields of its packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// Source address.
    pub src: IpAddr,
    /// Destination address, of the same IP version.
    pub dst: IpAddr,
    /// The interface of a link-local `dst`; 0: the only interface.
    pub zone: Zone,
    /// Source and destination port.
    pub ports: (u16, u16),
    /// The transport protocol.
    pub protocol: u8,
    /// TTL or hop limit; `None`: the configured default.
    pub ttl: Option<u8>,
    /// Differentiated services (upper 6 bits) and ECN (lower 2).
    pub dscp_ecn: u8,
    /// Path MTU discovery: whether IPv4 packets have DF, and which MTU limits them.
    pub mtu_discovery: MtuDiscovery,
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

/// The header template of a flow: see the module.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    link: [u8; eth::HEADER_BYTES],
    network: Network,
    /// Length of both headers, bytes.
    header_bytes: usize,
    /// Packets are atomic: identification 0, or IPv6.
    is_atomic: bool,
    /// Path MTU.
    mtu: usize,
    /// Largest transport packet that needs no segmentation offload, bytes.
    most_bytes: usize,
    generation: u64,
    fresh_until: Instant,
}

impl Template {
    /// Length of the Ethernet and IP header, bytes.
    #[inline]
    pub const fn header_bytes(&self) -> usize {
        self.header_bytes
    }

    /// Length of the IP header, bytes.
    const fn network_bytes(&self) -> usize {
        self.header_bytes.saturating_sub(eth::HEADER_BYTES)
    }

    /// Whether a transport packet of this length fits without segmentation offload.
    #[inline]
    pub(crate) const fn fits_without_gso(&self, transport_bytes: usize) -> bool {
        transport_bytes <= self.most_bytes
    }

    /// Whether a transport packet of this length fits: it, or each of its segments, fits the path
    /// MTU, and its length fits the length field.
    #[inline]
    pub fn fits(&self, transport_bytes: usize, offload: &Offload) -> bool {
        let Some(gso) = offload.gso else { return self.fits_without_gso(transport_bytes) };
        let segment = usize::from(gso.header_bytes).saturating_add(gso.segment_bytes.into());
        let largest_bytes = segment.min(transport_bytes);
        let whole_bytes = transport_bytes.saturating_add(self.network_bytes());
        largest_bytes.saturating_add(self.network_bytes()) <= self.mtu
            && whole_bytes <= usize::from(u16::MAX)
    }

    /// Writes the headers of a packet with `payload_bytes` of IP payload into the first
    /// [`Template::header_bytes`] bytes of `headers`. `None` if `headers` is shorter. `ident` is the IPv4
    /// identification, from [`Ip::draw_ident_for`].
    #[inline(always)]
    pub fn emit(&self, payload_bytes: u16, ident: u16, headers: &mut [u8]) -> Option<()> {
        let (link, network) = headers.split_first_chunk_mut::<{ eth::HEADER_BYTES }>()?;
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

impl Template {
    /// Sets ECT(0) (RFC 3168 section 5) in headers that [`Template::emit`] has written, for a template whose ECN
    /// field is 0.
    #[inline]
    pub fn set_ect(&self, headers: &mut [u8]) {
        self.patch_service(headers, |dscp_ecn| dscp_ecn | 2);
    }

    /// Replaces differentiated services and ECN in headers that [`Template::emit`] has written.
    #[inline]
    pub fn set_dscp_ecn(&self, headers: &mut [u8], dscp_ecn: u8) {
        self.patch_service(headers, |_| dscp_ecn);
    }

    #[inline(always)]
    fn patch_service(&self, headers: &mut [u8], change: impl FnOnce(u8) -> u8) {
        let Some((_, network)) = headers.split_first_chunk_mut::<{ eth::HEADER_BYTES }>() else {
            return;
        };
        match (&self.network, network) {
            (Network::V4(_), [_, service, _, _, _, _, _, _, _, _, sum_hi, sum_lo, ..]) => {
                let before = !u16::from(*service);
                *service = change(*service);
                // RFC 1624: ~C + ~m + m'.
                let sum = !u16::from_be_bytes([*sum_hi, *sum_lo]);
                let sum = checksum::added([sum, before, u16::from(*service)]);
                [*sum_hi, *sum_lo] = (!sum).to_be_bytes();
            }
            (Network::V6(_), [class_high, class_low, ..]) => {
                let class = change(*class_high << 4 | *class_low >> 4);
                *class_high = *class_high & 0xf0 | class >> 4;
                *class_low = class << 4 | *class_low & 0x0f;
            }
            _ => {}
        }
    }
}

impl Ip {
    /// Whether a template is still valid.
    #[inline]
    pub fn is_template_valid(&self, template: &Template, now: Instant) -> bool {
        template.generation == self.generation() && now < template.fresh_until
    }

    /// Draws the identification of the next packet. Segmentation offload increments it for each
    /// segment.
    #[inline]
    pub fn draw_ident_for(&mut self, template: &Template) -> u16 {
        self.draw_ident(template.is_atomic)
    }

    /// Builds the template of a flow after a packet was sent by the slow path. `None` if the slow
    /// path must continue: the neighbour is not resolved, or the destination is this host.
    pub fn build_template(&self, flow: &Flow, now: Instant) -> Option<Template> {
        if flow.zone != 0 && flow.zone != self.config.zone || !self.accepts(flow.src) {
            return None;
        }
        let found = self.cached_destination(flow, now).filter(|d| !d.is_local)?;
        let ethertype = if flow.dst.is_ipv4() { eth::IPV4 } else { eth::IPV6 };
        let mut link = [0; eth::HEADER_BYTES];
        let header = eth::Header { dst: found.ether, src: self.config.ether, ethertype };
        header.emit(&mut link).ok()?;
        let Limit { mtu, clear_df } = found.limits.of(flow.protocol, flow.mtu_discovery);
        let sets_df = flow.mtu_discovery.forbids_fragments() && !clear_df;
        let network = self.network_of(flow, sets_df)?;
        let network_bytes = network.bytes();
        Some(Template {
            link,
            network,
            header_bytes: eth::HEADER_BYTES.saturating_add(network_bytes),
            is_atomic: flow.dst.is_ipv6() || sets_df,
            mtu,
            most_bytes: mtu.min(u16::MAX.into()).saturating_sub(network_bytes),
            generation: found.generation,
            fresh_until: found.fresh_until,
        })
    }

    /// The destination cache entry of the flow.
    fn cached_destination(&self, flow: &Flow, now: Instant) -> Option<&Destination> {
        let (dst, generation) = (flow.dst, self.generation());
        let table = self.tables.table_for(Some(flow.src));
        let key = Key { dst, table, flow: 0 };
        let known = self.destinations.find(key, Traffic::Own, generation, now);
        if known.is_some() || !self.tables.is_multipath() {
            return known;
        }
        let ports = u32::from(flow.ports.0) << 16 | u32::from(flow.ports.1);
        let hash = flow_hash_of_ports(&self.next_hop_key, flow.src, dst, ports);
        self.destinations.find(Key { flow: hash, ..key }, Traffic::Own, generation, now)
    }

    fn network_of(&self, flow: &Flow, dont_fragment: bool) -> Option<Network> {
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
                    dont_fragment,
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
