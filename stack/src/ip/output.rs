//! Output: destination, MTU, headers, sink.

use core::net::IpAddr;

use crate::base::{DropReason, EtherAddr, Instant, MtuDiscovery, Offload, Stage, Zone};
use crate::mbuf::{Chain, Purpose};
use crate::route::{Resolution, Traffic};
use crate::wire::{WireError, eth, ipv4, ipv6};

use crate::ip::destination::{Delivery, Destination, Key, Path};
use crate::ip::engine::Ip;
use crate::ip::frame::Context;
use crate::ip::pmtu::Limit;
use crate::ip::routing::flow_hash;
use crate::ip::waiting::QueuedFrame;
use crate::ip::{Egress, FrameSink, Outgoing, OutputError};

/// The variable fields of an IP header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NetworkHeader {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) ttl: u8,
    pub(crate) dscp_ecn: u8,
    pub(crate) traffic: Traffic,
    pub(crate) mtu_discovery: MtuDiscovery,
}

/// A frame with all headers.
struct Prepared {
    hop: Hop,
    offload: Offload,
    /// Fragment the packet to this path MTU.
    fragment_to: Option<usize>,
}

/// Why a packet cannot be sent: the caller's error, and the drop to count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) error: OutputError,
    pub(crate) reason: DropReason,
}

const NO_ROUTE: Refused = Refused { error: OutputError::NoRoute, reason: DropReason::NoRoute };

/// The next hop of a packet.
enum Hop {
    /// The Ethernet address is resolved.
    Resolved(Destination),
    /// The neighbour is being resolved; the packet is queued.
    Pending { next_hop: IpAddr, path: Path, solicit: bool, displaced: Option<IpAddr> },
}

impl Ip {
    /// Sends one transport packet: prepends the IP and Ethernet headers and passes the frame to the
    /// sink, or queues it for neighbour resolution.
    ///
    /// A super-segment counts as one packet; its segments must fit the path MTU. A packet that
    /// exceeds the path MTU is fragmented, unless [`Outgoing::mtu_discovery`] forbids it.
    ///
    /// # Errors
    /// See [`OutputError`]; the packet is freed.
    pub fn output<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        packet: Outgoing,
    ) -> Result<(), OutputError> {
        let header = NetworkHeader {
            src: packet.src,
            dst: packet.dst,
            protocol: packet.protocol,
            ttl: packet.ttl.unwrap_or(self.config.ttl),
            dscp_ecn: packet.dscp_ecn,
            traffic: packet.traffic,
            mtu_discovery: packet.mtu_discovery,
        };
        self.ip_output(cx, header, packet.zone, packet.chain, packet.offload)
    }

    pub(crate) fn ip_output<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        header: NetworkHeader,
        zone: Zone,
        chain: Chain,
        offload: Offload,
    ) -> Result<(), OutputError> {
        let mut chain = chain;
        let sent = self.prepare(cx, header, zone, &mut chain, offload);
        match sent {
            Ok(prepared) => self.transmit(cx, prepared, header.traffic, chain),
            Err(Refused { error, reason }) => {
                cx.discard(chain, reason);
                Err(error)
            }
        }
    }

    /// Resolves the destination and builds the frame. After an error the chain may be modified and
    /// can only be freed.
    fn prepare<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        mut header: NetworkHeader,
        zone: Zone,
        chain: &mut Chain,
        offload: Offload,
    ) -> Result<Prepared, Refused> {
        if header.src.is_ipv4() != header.dst.is_ipv4() {
            return Err(NO_ROUTE);
        }
        let hop = self.hop_to(&header, zone, cx.now, chain)?;
        cx.out.pass(Stage::RouteFound);
        let (ether, limits, is_local) = match &hop {
            Hop::Resolved(d) => (d.ether, &d.limits, d.is_local),
            Hop::Pending { path, .. } => (EtherAddr::default(), &path.limits, false),
        };
        let Limit { mtu, clear_df } = limits.of(header.protocol, header.mtu_discovery);
        let may_fragment = header.mtu_discovery == MtuDiscovery::Off && offload.gso.is_none();
        if clear_df {
            header.mtu_discovery = MtuDiscovery::Off;
        }
        let sets_df = header.mtu_discovery.forbids_fragments();
        // With DF clear, routers fragment packets that exceed the path MTU. The packet only has to
        // fit the link.
        let routers_fragment = header.dst.is_ipv4() && !sets_df && !is_local && !may_fragment;
        let mtu = if routers_fragment { self.config.mtu } else { mtu };
        let is_too_big = largest_packet(chain, &offload, header.dst) > mtu;
        if (is_too_big && !may_fragment) || exceeds_length_field(chain, header.dst) {
            let (error, reason) = (OutputError::TooBig { mtu }, DropReason::PacketTooBig);
            return Err(Refused { error, reason });
        }
        let pushed = self.encapsulate(cx, &header, ether, chain)?;
        Ok(Prepared { hop, offload: offload.shift(pushed), fragment_to: is_too_big.then_some(mtu) })
    }

    /// Passes a frame to the sink, or queues it.
    fn transmit<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        Prepared { hop, offload, fragment_to }: Prepared,
        traffic: Traffic,
        chain: Chain,
    ) -> Result<(), OutputError> {
        match hop {
            Hop::Resolved(d) => match fragment_to {
                Some(mtu) => self.send_fragments(cx, chain, offload, mtu, d.egress()),
                None => cx.send(chain, offload, d.egress()),
            },
            Hop::Pending { next_hop, solicit, displaced, .. } => {
                if let Some(displaced) = displaced {
                    self.waiting.discard(displaced, cx.pool, cx.counters);
                }
                let is_reply = traffic == Traffic::Reply;
                let queued = QueuedFrame { next_hop, chain, offload, fragment_to, is_reply };
                self.waiting.push(queued, cx.pool, cx.counters);
                if solicit {
                    self.solicit(cx, next_hop, None);
                }
                Ok(())
            }
        }
    }

    /// The next hop of a packet: from the destination cache, else from the tables.
    #[inline]
    fn hop_to(
        &mut self,
        header: &NetworkHeader,
        zone: Zone,
        now: Instant,
        packet: &Chain,
    ) -> Result<Hop, Refused> {
        let NetworkHeader { src, dst, .. } = *header;
        let generation = self.generation();
        let is_zone_ours = zone == 0 || zone == self.config.zone;
        let key = Key { dst, table: self.tables.table_for(Some(src)), flow: 0 };
        match self.destinations.find(key, header.traffic, generation, now) {
            Some(d) if is_zone_ours => return Ok(Hop::Resolved(*d)),
            _ if !self.tables.is_multipath() => {
                return self.look_up_hop(header, key, zone, now);
            }
            _ => {}
        }
        let flow = flow_hash(&self.next_hop_key, src, dst, packet);
        match self.destinations.find(Key { flow, ..key }, header.traffic, generation, now) {
            Some(d) if is_zone_ours => Ok(Hop::Resolved(*d)),
            _ => self.look_up_hop(header, Key { flow, ..key }, zone, now),
        }
    }

    /// Looks up the tables, and caches the destination if it is resolved.
    fn look_up_hop(
        &mut self,
        header: &NetworkHeader,
        key: Key,
        zone: Zone,
        now: Instant,
    ) -> Result<Hop, Refused> {
        let path = self.path_to(Some(header.src), key.dst, zone, key.flow, now).ok_or(NO_ROUTE)?;
        let (ether, fresh_until, awaits_confirmation) = match path.delivery {
            Delivery::Local => (self.config.ether, Instant::FAR_FUTURE, false),
            Delivery::Group(ether) => (ether, Instant::FAR_FUTURE, false),
            Delivery::Neighbour(next_hop) => match self.resolve(next_hop, header.traffic, now)? {
                Resolution::Known { ether, fresh_until, awaits_confirmation } => {
                    (ether, fresh_until, awaits_confirmation)
                }
                Resolution::Queue { solicit, displaced } => {
                    return Ok(Hop::Pending { next_hop, path, solicit, displaced });
                }
                Resolution::Failed => {
                    let reason = DropReason::NeighbourUnreachable;
                    return Err(Refused { error: OutputError::HostUnreachable, reason });
                }
            },
        };
        let flow = if path.is_multipath { key.flow } else { 0 };
        let destination = Destination {
            key: Key { flow, ..key },
            ether,
            is_local: path.delivery == Delivery::Local,
            created_by_reply: header.traffic == Traffic::Reply,
            limits: path.limits,
            awaits_confirmation,
            generation: self.generation(),
            fresh_until,
        };
        self.destinations.store(destination);
        Ok(Hop::Resolved(destination))
    }

    /// Prepends an IP and an Ethernet header, contiguous. Returns their length.
    pub(crate) fn encapsulate<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        header: &NetworkHeader,
        ether: EtherAddr,
        chain: &mut Chain,
    ) -> Result<u16, Refused> {
        let no_buffer = || Refused { error: OutputError::NoBuffer, reason: DropReason::NoBuffer };
        let payload_bytes = chain.len();
        let (ip_bytes, ethertype) = ip_header_of(header.dst);
        let bytes = ip_bytes.saturating_add(eth::HEADER_BYTES);
        let space = chain.prepend(bytes, cx.pool, Purpose::Control).map_err(|_| no_buffer())?;
        let parts = space.split_at_mut_checked(eth::HEADER_BYTES);
        let (link, network) = parts.ok_or_else(no_buffer)?;
        self.emit_network(header, payload_bytes, network).map_err(|_| no_buffer())?;
        cx.out.pass(Stage::IpOutput);
        let link_header = eth::Header { dst: ether, src: self.config.ether, ethertype };
        link_header.emit(link).map_err(|_| no_buffer())?;
        cx.out.pass(Stage::EtherOutput);
        Ok(bytes as u16)
    }

    /// Draws the identification of an IPv4 packet: 0 for an atomic one (RFC 6864 section 4.1), else
    /// random. A counter would reveal to each destination how much is sent to others.
    ///
    /// RFC 6864 section 4.3 forbids reuse within two minutes for the same addresses and protocol,
    /// which no sender of more than 546 datagrams per second can satisfy. A random identification
    /// equals that of a given incomplete datagram at the receiver with probability 1/65,536; the
    /// transport checksum then detects the mix-up.
    #[inline]
    pub(crate) fn draw_ident(&mut self, dont_fragment: bool) -> u16 {
        if dont_fragment { 0 } else { self.idents.number() as u16 }
    }

    /// Writes an IP header.
    fn emit_network(
        &mut self,
        header: &NetworkHeader,
        payload_bytes: usize,
        network: &mut [u8],
    ) -> Result<(), WireError> {
        match (header.src, header.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let dont_fragment = header.mtu_discovery.forbids_fragments();
                let ident = self.draw_ident(dont_fragment);
                ipv4::Header {
                    src,
                    dst,
                    protocol: header.protocol,
                    ttl: header.ttl,
                    dscp_ecn: header.dscp_ecn,
                    ident,
                    dont_fragment,
                    more_fragments: false,
                    fragment_offset: 0,
                    header_bytes: ipv4::HEADER_BYTES,
                    total_bytes: payload_bytes.saturating_add(ipv4::HEADER_BYTES),
                }
                .emit(network)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => ipv6::Header {
                src,
                dst,
                next_header: header.protocol,
                hop_limit: header.ttl,
                traffic_class: header.dscp_ecn,
                flow_label: 0,
                payload_bytes,
            }
            .emit(network),
            _ => Err(WireError::Malformed),
        }
    }

    /// Sends the packets queued for a resolved neighbour, in order.
    pub(crate) fn send_waiting<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, next_hop: IpAddr) {
        // `resolve` marks the neighbour as used, so it is called only if a packet is queued.
        if !self.waiting.holds(next_hop) {
            return;
        }
        let resolution = self.neighbours.resolve(next_hop, Traffic::Reply, cx.now);
        let Resolution::Known { ether, .. } = resolution else { return };
        while let Some(mut queued) = self.waiting.pop(next_hop) {
            if set_destination(&mut queued.chain, ether).is_none() {
                cx.discard(queued.chain, DropReason::NoBuffer);
                continue;
            }
            let sent = match queued.fragment_to {
                Some(mtu) => {
                    self.send_fragments(cx, queued.chain, queued.offload, mtu, Egress::Device)
                }
                None => cx.send(queued.chain, queued.offload, Egress::Device),
            };
            if sent == Err(OutputError::Full) {
                cx.counters.drop_packet(DropReason::TxQueueFull);
            }
        }
    }
}

/// IP header length and EtherType for a destination.
fn ip_header_of(dst: IpAddr) -> (usize, u16) {
    if dst.is_ipv4() { (ipv4::HEADER_BYTES, eth::IPV4) } else { (ipv6::HEADER_BYTES, eth::IPV6) }
}

/// The largest IP packet on the wire: the packet itself, or its largest segment after segmentation
/// offload.
fn largest_packet(chain: &Chain, offload: &Offload, dst: IpAddr) -> usize {
    let transport_bytes = match offload.gso {
        Some(gso) => {
            let segment = usize::from(gso.header_bytes).saturating_add(gso.segment_bytes.into());
            segment.min(chain.len())
        }
        None => chain.len(),
    };
    transport_bytes.saturating_add(ip_header_of(dst).0)
}

/// Whether the packet exceeds the length field, super-segments included.
fn exceeds_length_field(chain: &Chain, dst: IpAddr) -> bool {
    let counted_bytes = if dst.is_ipv4() { ipv4::HEADER_BYTES } else { 0 };
    chain.len().saturating_add(counted_bytes) > usize::from(u16::MAX)
}

/// Writes the Ethernet destination of a queued frame.
fn set_destination(chain: &mut Chain, ether: EtherAddr) -> Option<()> {
    let mut first = chain.front_mut()?;
    first.as_mut_slice()?.get_mut(..6)?.copy_from_slice(&ether.0);
    Some(())
}
