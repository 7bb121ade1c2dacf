//! The way out: destination, size, headers, sink.

use core::net::IpAddr;

use fulmar_base::{Counters, DropReason, EtherAddr, Instant, Offload, Stage, Variation, Zone};
use fulmar_mbuf::{Chain, Pool, Purpose};
use fulmar_route::{Resolution, Traffic};
use fulmar_wire::{WireError, eth, ipv4, ipv6};

use crate::destination::{Destination, Key, Path, Way};
use crate::engine::Ip;
use crate::frame::Context;
use crate::pmtu::Limit;
use crate::routing::flow_hash;
use crate::waiting::Held;
use crate::{FrameSink, Outgoing, OutputError};

/// What the IP header of a packet says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NetworkHeader {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) ttl: u8,
    pub(crate) dscp_ecn: u8,
    pub(crate) traffic: Traffic,
    pub(crate) dont_fragment: bool,
}

/// A frame that is built.
struct Prepared {
    hop: Hop,
    offload: Offload,
    /// It is larger than this, the MTU of its path, and to be sent in fragments.
    cut_to: Option<usize>,
}

/// Why a packet is not sent.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// It cannot be.
    Refused(OutputError, DropReason),
    /// A probe measures the way up to here.
    ByProbe,
}

impl From<(OutputError, DropReason)> for Stopped {
    fn from((error, reason): (OutputError, DropReason)) -> Stopped {
        Stopped::Refused(error, reason)
    }
}

/// Shows a stage to the sink's probe.
#[inline(always)]
fn pass<S: FrameSink>(cx: &mut Context<'_, S>, stage: Stage) -> Result<(), Stopped> {
    if cx.out.stage(stage).is_break() { Err(Stopped::ByProbe) } else { Ok(()) }
}

/// Where a packet goes next.
enum Hop {
    /// The Ethernet address is known.
    Known(Destination),
    /// The neighbour is being asked; the packet waits.
    Wait { next_hop: IpAddr, path: Path, solicit: bool, displaced: Option<IpAddr> },
}

impl Ip {
    /// Sends one transport packet: puts the IP and Ethernet headers in front and gives the frame to
    /// the sink, or keeps it while its neighbour is asked for its address.
    ///
    /// A super-segment counts as one packet; what must fit the MTU are its segments. A packet that is
    /// larger than its path takes goes in fragments, unless [`Outgoing::dont_fragment`] is set.
    ///
    /// # Errors
    /// See [`OutputError`]; the packet is freed.
    pub fn output<S: FrameSink>(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        counters: &mut Counters,
        packet: Outgoing,
        out: &mut S,
    ) -> Result<(), OutputError> {
        let header = NetworkHeader {
            src: packet.src,
            dst: packet.dst,
            protocol: packet.protocol,
            ttl: packet.ttl.unwrap_or(self.config.ttl),
            dscp_ecn: packet.dscp_ecn,
            traffic: packet.traffic,
            dont_fragment: packet.dont_fragment,
        };
        let cx = &mut Context { now, pool, counters, out };
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
            Err(Stopped::Refused(error, reason)) => {
                cx.discard(chain, reason);
                Err(error)
            }
            Err(Stopped::ByProbe) => {
                cx.pool.free(chain);
                Ok(())
            }
        }
    }

    /// Finds the destination and builds the frame. After an error the chain may have been changed
    /// and is good for nothing but freeing.
    fn prepare<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        mut header: NetworkHeader,
        zone: Zone,
        chain: &mut Chain,
        offload: Offload,
    ) -> Result<Prepared, Stopped> {
        if header.src.is_ipv4() != header.dst.is_ipv4() {
            return Err(Stopped::Refused(OutputError::NoRoute, DropReason::NoRoute));
        }
        let forgets = cx.out.varies(Variation::TablesEachTime);
        let hop = match forgets {
            false => self.hop_to(&header, zone, cx.now, chain)?,
            true => self.hop_by_tables(&header, zone, cx.now, chain)?,
        };
        pass(cx, Stage::RouteFound)?;
        let (ether, limits, is_own) = match &hop {
            Hop::Known(d) => (d.ether, &d.limits, d.is_own),
            Hop::Wait { path, .. } => (EtherAddr::default(), &path.limits, false),
        };
        let Limit { mtu, must_fragment } = limits.for_protocol(header.protocol);
        let may_cut = !header.dont_fragment && offload.gso.is_none();
        header.dont_fragment &= !must_fragment;
        // With the DF bit clear it is the routers that cut what TCP sent for a larger path: what leaves
        // here has to fit the link.
        let routers_cut = header.dst.is_ipv4() && !header.dont_fragment && !is_own && !may_cut;
        let mtu = if routers_cut { self.config.mtu } else { mtu };
        let is_too_big = largest_packet(chain, &offload, header.dst) > mtu;
        if (is_too_big && !may_cut) || is_too_long(chain, header.dst) {
            return Err(Stopped::Refused(OutputError::TooBig { mtu }, DropReason::PacketTooBig));
        }
        let pushed = self.encapsulate(cx, &header, ether, chain)?;
        Ok(Prepared { hop, offload: offload.shift(pushed), cut_to: is_too_big.then_some(mtu) })
    }

    /// Gives a frame to the sink, or keeps it.
    fn transmit<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        Prepared { hop, offload, cut_to }: Prepared,
        traffic: Traffic,
        chain: Chain,
    ) -> Result<(), OutputError> {
        match hop {
            Hop::Known(d) => match cut_to {
                Some(mtu) => self.send_fragments(cx, chain, offload, mtu, d.is_own),
                None => cx.send(chain, offload, d.is_own),
            },
            Hop::Wait { next_hop, solicit, displaced, .. } => {
                if let Some(displaced) = displaced {
                    self.waiting.discard(displaced, cx.pool, cx.counters);
                }
                let is_reply = traffic == Traffic::Reply;
                let held = Held { next_hop, chain, offload, cut_to, is_reply };
                self.waiting.push(held, cx.pool, cx.counters);
                if solicit {
                    self.solicit(cx, next_hop, None);
                }
                Ok(())
            }
        }
    }

    /// Where packets to `dst` go: from the cache, else from the tables.
    #[inline]
    fn hop_to(
        &mut self,
        header: &NetworkHeader,
        zone: Zone,
        now: Instant,
        packet: &Chain,
    ) -> Result<Hop, (OutputError, DropReason)> {
        let NetworkHeader { src, dst, .. } = *header;
        let generation = self.generation();
        let is_zone_ours = zone == 0 || zone == self.config.zone;
        let table = self.tables.table_for(Some(src));
        match self.destinations.find((dst, table, 0), generation, now) {
            Some(d) if is_zone_ours => return Ok(Hop::Known(*d)),
            _ if !self.tables.is_spread() => {
                return self.find_hop(header, (dst, table, 0), zone, now);
            }
            _ => {}
        }
        let flow = flow_hash(&self.next_hop_key, src, dst, packet);
        match self.destinations.find((dst, table, flow), generation, now) {
            Some(d) if is_zone_ours => Ok(Hop::Known(*d)),
            _ => self.find_hop(header, (dst, table, flow), zone, now),
        }
    }

    /// As [`Ip::hop_to`], without the cache.
    fn hop_by_tables(
        &mut self,
        header: &NetworkHeader,
        zone: Zone,
        now: Instant,
        packet: &Chain,
    ) -> Result<Hop, (OutputError, DropReason)> {
        let NetworkHeader { src, dst, .. } = *header;
        let table = self.tables.table_for(Some(src));
        let flow = if self.tables.is_spread() {
            flow_hash(&self.next_hop_key, src, dst, packet)
        } else {
            0
        };
        self.find_hop(header, (dst, table, flow), zone, now)
    }

    /// Asks the tables, and remembers the answer if packets can go at once.
    fn find_hop(
        &mut self,
        header: &NetworkHeader,
        (dst, table, flow): Key,
        zone: Zone,
        now: Instant,
    ) -> Result<Hop, (OutputError, DropReason)> {
        let no_route = (OutputError::NoRoute, DropReason::NoRoute);
        let path = self.path_to(dst, zone, (Some(header.src), flow), now).ok_or(no_route)?;
        let (ether, fresh_until, in_doubt) = match path.way {
            Way::Own => (self.config.ether, Instant::FAR_FUTURE, false),
            Way::Group(ether) => (ether, Instant::FAR_FUTURE, false),
            Way::Neighbour(next_hop) => match self.resolve(next_hop, header.traffic, now)? {
                Resolution::Known { ether, fresh_until, in_doubt } => {
                    (ether, fresh_until, in_doubt)
                }
                Resolution::Queue { solicit, displaced } => {
                    return Ok(Hop::Wait { next_hop, path, solicit, displaced });
                }
                Resolution::Failed => {
                    return Err((OutputError::HostUnreachable, DropReason::NeighbourUnreachable));
                }
            },
        };
        let flow = if path.is_spread { flow } else { 0 };
        let destination = Destination {
            key: (dst, table, flow),
            ether,
            is_own: path.way == Way::Own,
            limits: path.limits,
            in_doubt,
            generation: self.generation(),
            fresh_until,
        };
        self.destinations.store(destination);
        Ok(Hop::Known(destination))
    }

    /// Puts an IP and an Ethernet header in front, in one piece, and returns their length.
    pub(crate) fn encapsulate<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        header: &NetworkHeader,
        ether: EtherAddr,
        chain: &mut Chain,
    ) -> Result<u16, Stopped> {
        let no_buffer = || Stopped::Refused(OutputError::NoBuffer, DropReason::NoBuffer);
        let payload_bytes = chain.len();
        let (ip_bytes, ethertype) = ip_header_of(header.dst);
        let bytes = ip_bytes.saturating_add(eth::HEADER_BYTES);
        let room = chain.prepend(bytes, cx.pool, Purpose::Control).map_err(|_| no_buffer())?;
        let parts = room.split_at_mut_checked(eth::HEADER_BYTES);
        let (link, network) = parts.ok_or_else(no_buffer)?;
        self.emit_network(header, payload_bytes, network).map_err(|_| no_buffer())?;
        pass(cx, Stage::IpOutput)?;
        let link_header = eth::Header { dst: ether, src: self.config.ether, ethertype };
        link_header.emit(link).map_err(|_| no_buffer())?;
        pass(cx, Stage::EtherOutput)?;
        Ok(bytes as u16)
    }

    /// The identification of an IPv4 datagram: 0 for an atomic one (RFC 6864 section 4.1), which is
    /// never reassembled; any other gets a random number. A counter would tell each destination how much
    /// is sent to the others.
    ///
    /// RFC 6864 section 4.3 asks that a number does not come twice within two minutes for the same
    /// addresses and protocol, which no sender of more than 546 datagrams per second can keep. A random
    /// one meets that of a datagram that is still incomplete at the receiver once in 65,536 times, and
    /// then the checksum of the transport tells.
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
                let ident = self.draw_ident(header.dont_fragment);
                ipv4::Header {
                    src,
                    dst,
                    protocol: header.protocol,
                    ttl: header.ttl,
                    dscp_ecn: header.dscp_ecn,
                    ident,
                    dont_fragment: header.dont_fragment,
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

    /// The neighbour is known now: sends what waited for it, in order.
    pub(crate) fn flush_waiting<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        next_hop: IpAddr,
    ) {
        // Asking for the address counts as using it, which only a packet may do.
        if !self.waiting.holds(next_hop) {
            return;
        }
        let resolution = self.neighbours.resolve(next_hop, Traffic::Reply, cx.now);
        let Resolution::Known { ether, .. } = resolution else { return };
        while let Some(mut held) = self.waiting.pop(next_hop) {
            if set_destination(&mut held.chain, ether).is_none() {
                cx.discard(held.chain, DropReason::NoBuffer);
                continue;
            }
            let sent = match held.cut_to {
                Some(mtu) => self.send_fragments(cx, held.chain, held.offload, mtu, false),
                None => cx.send(held.chain, held.offload, false),
            };
            if sent == Err(OutputError::Full) {
                cx.counters.drop_packet(DropReason::TxQueueFull);
            }
        }
    }
}

/// Length of the IP header that is written for a destination, and its Ethernet type.
fn ip_header_of(dst: IpAddr) -> (usize, u16) {
    if dst.is_ipv4() { (ipv4::HEADER_BYTES, eth::IPV4) } else { (ipv6::HEADER_BYTES, eth::IPV6) }
}

/// The largest IP packet that will be on the wire for this chain: the chain itself, or the largest
/// segment that it is cut into.
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

/// Whether the length does not fit its field, which even a super-segment needs.
fn is_too_long(chain: &Chain, dst: IpAddr) -> bool {
    let counted_bytes = if dst.is_ipv4() { ipv4::HEADER_BYTES } else { 0 };
    chain.len().saturating_add(counted_bytes) > usize::from(u16::MAX)
}

/// Writes the Ethernet destination of a frame that was built without one.
fn set_destination(chain: &mut Chain, ether: EtherAddr) -> Option<()> {
    let mut first = chain.front_mut()?;
    first.as_mut_slice()?.get_mut(..6)?.copy_from_slice(&ether.0);
    Some(())
}
