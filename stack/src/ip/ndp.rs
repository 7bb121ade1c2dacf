//! Neighbour discovery (RFC 4861): solicitations and advertisements of neighbours.
//!
//! Router advertisements and redirects are ignored: default routers are configured. Duplicate
//! address detection (RFC 4862 section 5.4) is not performed; an address conflict is counted.

use core::net::{IpAddr, Ipv6Addr};

use crate::base::{DropReason, EtherAddr, Medium, MtuDiscovery, Offload};
use crate::mbuf::{Chain, NoBuffer, Pool};
use crate::route::{Advertisement, Learned, Traffic};
use crate::wire::icmpv6::{Message, NdpOption, ndp_options};
use crate::wire::protocol;

use crate::ip::address::{ALL_NODES, solicited_node};
use crate::ip::engine::Ip;
use crate::ip::frame::{Context, Frame, control_chain, first, sum_of_icmp};
use crate::ip::input::Network;
use crate::ip::output::NetworkHeader;
use crate::ip::{Egress, FrameSink};

/// Hop limit of every message: proves that no router forwarded it (RFC 4861 section 7.1.1).
const HOP_LIMIT: u8 = 255;
/// Length of a solicitation or advertisement with its link-layer address option.
const MESSAGE_BYTES: usize = 32;

/// An outgoing solicitation or advertisement.
struct Outbound {
    src: Ipv6Addr,
    dst: Ipv6Addr,
    ether: EtherAddr,
    message: Message,
    option: NdpOption,
}

impl Ip {
    /// Processes a neighbour discovery message. The chain starts at the ICMPv6 header; the checksum
    /// was verified.
    pub(crate) fn ndp_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &Frame,
        network: &Network,
        message: Message,
    ) -> Result<(), DropReason> {
        // RFC 6980 section 5: never fragmented, not even as an atomic fragment.
        if network.hop_limit != HOP_LIMIT || network.was_fragment {
            return Err(DropReason::NdpInvalid);
        }
        let options = first(&frame.chain).get(message.header_bytes()..).unwrap_or(&[]);
        let lladdr = link_layer_option(options, &message)?;
        match message {
            // Without a link layer there is no address to resolve (RFC 4861 section 3.2, point-to-point).
            Message::NeighbourSolicitation { .. } | Message::NeighbourAdvertisement { .. }
                if self.config.medium == Medium::Ip =>
            {
                Err(DropReason::NdpInvalid)
            }
            Message::NeighbourSolicitation { target } => {
                self.on_solicitation(cx, network, target, lladdr)
            }
            Message::NeighbourAdvertisement { target, router, solicited, override_ } => {
                let advert = Advertisement {
                    ether: lladdr,
                    solicited,
                    replaces: override_,
                    is_router: router,
                };
                self.on_advertisement(cx, network, target, advert)
            }
            Message::Redirect { .. } => Err(DropReason::IcmpIgnored),
            // Router solicitations and advertisements: ignored, not counted as drops.
            _ => Ok(()),
        }
    }

    /// RFC 4861 sections 7.1.1 (validation), 7.2.3 and 7.2.4 (reply).
    fn on_solicitation<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        network: &Network,
        target: Ipv6Addr,
        source_ether: Option<EtherAddr>,
    ) -> Result<(), DropReason> {
        let is_probe = network.src.is_unspecified();
        let to_group = network.dst == IpAddr::V6(solicited_node(target));
        if target.is_multicast() || (is_probe && (source_ether.is_some() || !to_group)) {
            return Err(DropReason::NdpInvalid);
        }
        let is_own = self.is_local(IpAddr::V6(target));
        if !is_own && (is_probe || !self.answers_for(IpAddr::V6(target))) {
            // Valid, and about an address of another host: RFC 4862 section 5.4.3, RFC 4861 section 7.2.3.
            return Ok(());
        }
        if is_probe {
            // Duplicate address detection for an own address: defend it.
            cx.counters.drop_packet(DropReason::DuplicateAddress);
            return self.advertise(cx, target, ALL_NODES, None);
        }
        let IpAddr::V6(asker) = network.src else { return Err(DropReason::NdpInvalid) };
        let learned = match source_ether.filter(|_| self.is_on_link(network.src)) {
            Some(ether) => self.neighbours.on_solicit(network.src, ether, cx.now),
            None => Learned::Nothing,
        };
        if learned == Learned::Usable {
            self.send_waiting(cx, network.src);
        }
        self.advertise(cx, target, asker, source_ether)?;
        result_of(learned)
    }

    /// RFC 4861 sections 7.1.2 (validation) and 7.2.5.
    fn on_advertisement<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        network: &Network,
        target: Ipv6Addr,
        advert: Advertisement,
    ) -> Result<(), DropReason> {
        if target.is_multicast() || (network.is_group && advert.solicited) {
            return Err(DropReason::NdpInvalid);
        }
        let target = IpAddr::V6(target);
        if self.is_local(target) {
            self.defend(cx, target);
            return Err(DropReason::DuplicateAddress);
        }
        let learned = self.neighbours.on_advertisement(target, advert, cx.now);
        if learned == Learned::Usable {
            self.send_waiting(cx, target);
        }
        result_of(learned)
    }

    /// Sends an advertisement for `target`: to `ether`, the source link-layer address of a
    /// solicitation, or to a group. Without either, `dst` is routed and resolved like any
    /// destination.
    fn advertise<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        target: Ipv6Addr,
        dst: Ipv6Addr,
        ether: Option<EtherAddr>,
    ) -> Result<(), DropReason> {
        let to_all = dst.is_multicast();
        let message = Message::NeighbourAdvertisement {
            target,
            // A host drops its default route to a neighbour that says that it is none (RFC 4861 section 7.2.5).
            router: self.config.any_ip,
            solicited: !to_all,
            override_: true,
        };
        let option = NdpOption::TargetLinkLayer(self.config.ether);
        let group = to_all.then(|| EtherAddr::for_ipv6_multicast(dst));
        let (src, direct) = (target, ether.or(group));
        let outbound = Outbound { src, dst, ether: direct.unwrap_or_default(), message, option };
        if direct.is_some() {
            return self.ndp_output(cx, &outbound);
        }
        let chain = build(&outbound, cx.pool).map_err(|NoBuffer| DropReason::NoBuffer)?;
        let header = header_of(&outbound);
        // `ip_output` counts its own errors, except a full sink.
        let sent = self.ip_output(cx, header, 0, chain, Offload::default());
        if sent == Err(crate::ip::OutputError::Full) {
            Err(DropReason::TxQueueFull)
        } else {
            Ok(())
        }
    }

    /// Sends a neighbour solicitation (RFC 4861 section 7.2.2).
    pub(crate) fn neighbour_solicitation<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        target: Ipv6Addr,
        unicast: Option<EtherAddr>,
    ) -> Result<(), DropReason> {
        let ip = IpAddr::V6(target);
        let Some(IpAddr::V6(src)) = self.addresses.source_for(ip, ip) else {
            return Err(DropReason::NoRoute);
        };
        let group = solicited_node(target);
        let (dst, ether) = match unicast {
            Some(ether) => (target, ether),
            None => (group, EtherAddr::for_ipv6_multicast(group)),
        };
        let message = Message::NeighbourSolicitation { target };
        let option = NdpOption::SourceLinkLayer(self.config.ether);
        self.ndp_output(cx, &Outbound { src, dst, ether, message, option })
    }

    /// Sends an unsolicited advertisement for `own` to all nodes (RFC 4861 section 7.2.6).
    pub(crate) fn unsolicited_advertisement<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        own: Ipv6Addr,
    ) -> Result<(), DropReason> {
        self.advertise(cx, own, ALL_NODES, None)
    }

    fn ndp_output<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        outbound: &Outbound,
    ) -> Result<(), DropReason> {
        let mut chain = build(outbound, cx.pool).map_err(|NoBuffer| DropReason::NoBuffer)?;
        if self.encapsulate(cx, &header_of(outbound), outbound.ether, &mut chain).is_err() {
            cx.pool.free(chain);
            return Err(DropReason::NoBuffer);
        }
        let sent = cx.send(chain, Offload::default(), Egress::Device);
        sent.map_err(|_| DropReason::TxQueueFull)
    }
}

fn result_of(learned: Learned) -> Result<(), DropReason> {
    match learned {
        Learned::Usable | Learned::Nothing => Ok(()),
        Learned::Claim => Err(DropReason::NeighbourClaim),
    }
}

/// The link-layer address option of the message. Every option must be well formed (RFC 4861 section
/// 7.1).
fn link_layer_option(options: &[u8], message: &Message) -> Result<Option<EtherAddr>, DropReason> {
    let wants_source = matches!(message, Message::NeighbourSolicitation { .. });
    let mut found = None;
    for option in ndp_options(options) {
        match option.map_err(|_| DropReason::NdpInvalid)? {
            NdpOption::SourceLinkLayer(ether) if wants_source => found = Some(ether),
            NdpOption::TargetLinkLayer(ether) if !wants_source => found = Some(ether),
            _ => {}
        }
    }
    match found {
        Some(ether) if !ether.is_unicast() => Err(DropReason::NdpInvalid),
        found => Ok(found),
    }
}

fn header_of(outbound: &Outbound) -> NetworkHeader {
    NetworkHeader {
        src: IpAddr::V6(outbound.src),
        dst: IpAddr::V6(outbound.dst),
        protocol: protocol::ICMPV6,
        ttl: HOP_LIMIT,
        dscp_ecn: 0,
        traffic: Traffic::Reply,
        mtu_discovery: MtuDiscovery::On,
    }
}

fn build(outbound: &Outbound, pool: &mut Pool) -> Result<Chain, NoBuffer> {
    let mut chain = control_chain(MESSAGE_BYTES, pool, |bytes| {
        outbound.message.emit(bytes).ok()?;
        outbound.option.emit(bytes.get_mut(outbound.message.header_bytes()..)?).ok()?;
        Some(())
    })?;
    let (src, dst) = (IpAddr::V6(outbound.src), IpAddr::V6(outbound.dst));
    let sum = sum_of_icmp(&chain, src, dst).finish();
    crate::ip::icmp::set_checksum(&mut chain, sum);
    Ok(chain)
}
