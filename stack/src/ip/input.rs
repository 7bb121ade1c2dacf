//! Input: Ethernet, then one file per IP version, then transport or ICMP.
//!
//! Each step returns a verdict, or the reason to drop the packet. A chain that no step has taken
//! from the frame is freed at the end, in one place.

mod fragment;
mod v4;
mod v6;

use core::net::IpAddr;

use crate::base::{DropReason, Medium, Offload, Stage, Zone};
use crate::mbuf::{Chain, Pool};
use crate::wire::{WireError, eth, protocol};

use crate::ip::address::is_link_scoped;
use crate::ip::engine::Ip;
use crate::ip::frame::{Context, Frame, pull};
use crate::ip::{Delivered, FrameSink, SavedHeader, Verdict};

/// Where a frame comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The device.
    Device,
    /// The stack itself ([`FrameSink::loopback`]). Only such a frame may have an own address as its source.
    Loopback,
}

/// The parsed IP header, as later steps need it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    protocol: u8,
    /// Offset of the transport header: IP and extension headers, bytes.
    pub(crate) header_bytes: usize,
    pub(crate) hop_limit: u8,
    dscp_ecn: u8,
    /// The IP destination is a multicast or broadcast address.
    pub(crate) is_group: bool,
    /// IPv6: offset of the next header field that names `protocol`.
    pub(crate) next_header_at: usize,
    /// IPv6: the packet had a fragment header.
    pub(crate) was_fragment: bool,
}

impl Ip {
    /// Processes one frame.
    ///
    /// `frame` starts at the Ethernet header; it may be a super-frame (GRO). Drops are counted
    /// here. Replies of ARP, neighbour discovery and ICMP are sent to [`Context::out`].
    pub fn input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        origin: Origin,
        frame: Chain,
        offload: Offload,
    ) -> Verdict {
        let ether_src = self.config.ether;
        let is_own = origin == Origin::Loopback;
        let mut frame = Frame { chain: frame, offload, ether_src, is_group: false, is_own };
        let verdict = self.ether_input(cx, &mut frame);
        cx.pool.free(frame.chain);
        verdict.unwrap_or_else(|reason| {
            cx.counters.drop_packet(reason);
            Verdict::Consumed
        })
    }

    fn ether_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
    ) -> Result<Verdict, DropReason> {
        let bytes = pull(&mut frame.chain, eth::HEADER_BYTES, cx.pool)?;
        let header = eth::Header::parse(bytes).map_err(|_| DropReason::Truncated)?;
        frame.ether_src = header.src;
        frame.is_group = header.dst.is_multicast();
        // Only this host sends from its Ethernet address, and looped-back frames do not come from
        // the device.
        if header.src == self.config.ether && !frame.is_own {
            return Err(DropReason::EtherSource);
        }
        if header.dst != self.config.ether && !frame.is_group {
            return Err(DropReason::NotForUs);
        }
        frame.strip(eth::HEADER_BYTES, cx.pool)?;
        cx.out.pass(Stage::EtherInput);
        match header.ethertype {
            eth::IPV4 => self.ipv4_input(cx, frame),
            eth::IPV6 => self.ipv6_input(cx, frame),
            eth::ARP if self.config.medium == Medium::Ethernet => self.arp_input(cx, frame),
            _ => Err(DropReason::UnknownEtherType),
        }
    }

    /// Passes a packet to its transport or to ICMP. It is addressed to this host, reassembled, and
    /// starts at its IP header.
    fn transport_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        network: &Network,
    ) -> Result<Verdict, DropReason> {
        match (network.protocol, network.src) {
            // TCP is unicast only (RFC 9293 section 3.9.2.3).
            (protocol::TCP, _) if network.is_group => Err(DropReason::IpDestination),
            (protocol::TCP | protocol::UDP, _) => self.deliver(cx, frame, network),
            (protocol::ICMP, IpAddr::V4(_)) => self.icmpv4_input(cx, frame, network),
            (protocol::ICMPV6, IpAddr::V6(_)) => self.icmpv6_input(cx, frame, network),
            _ => {
                self.unknown_protocol(cx, frame, network);
                Err(DropReason::UnknownProtocol)
            }
        }
    }

    fn deliver<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        network: &Network,
    ) -> Result<Verdict, DropReason> {
        let is_tcp = network.protocol == protocol::TCP;
        let ip_header = if is_tcp {
            pull_tcp_header(frame, network.header_bytes, cx.pool)?;
            SavedHeader::EMPTY
        } else {
            let bytes = network.header_bytes.saturating_add(8).min(frame.chain.len());
            let first = pull(&mut frame.chain, bytes, cx.pool)?;
            SavedHeader {
                answerable: !frame.is_group && !network.is_group,
                ..SavedHeader::of(first, bytes)
            }
        };
        frame.strip(network.header_bytes, cx.pool)?;
        if frame.offload.needs_csum && frame.offload.csum_start != 0 {
            return Err(DropReason::BadOffload);
        }
        Ok(Verdict::Deliver(Delivered {
            src: network.src,
            dst: network.dst,
            zone: self.zone_of_packet(network),
            protocol: network.protocol,
            chain: frame.take(),
            offload: frame.offload,
            ip_header,
            is_group: frame.is_group || network.is_group,
            dscp_ecn: network.dscp_ecn,
            hop_limit: network.hop_limit,
        }))
    }

    pub(crate) fn zone_of_packet(&self, network: &Network) -> Zone {
        let is_scoped = |ip: IpAddr| ip.is_ipv6() && is_link_scoped(ip);
        if is_scoped(network.src) || is_scoped(network.dst) { self.config.zone } else { 0 }
    }
}

/// Makes a TCP header and its options contiguous, up to the end of the packet. TCP detects and
/// counts a malformed header.
fn pull_tcp_header(frame: &mut Frame, at: usize, pool: &mut Pool) -> Result<(), DropReason> {
    let most_bytes = frame.chain.len();
    let fixed_bytes = at.saturating_add(20).min(most_bytes);
    let first = pull(&mut frame.chain, fixed_bytes, pool)?;
    let words = first.get(at.saturating_add(12)).map_or(0, |b| usize::from(b >> 4));
    let bytes = at.saturating_add(words.saturating_mul(4)).min(most_bytes);
    if bytes > fixed_bytes {
        pull(&mut frame.chain, bytes, pool)?;
    }
    Ok(())
}

/// The drop reason of a parse error.
fn drop_reason(error: WireError) -> DropReason {
    match error {
        WireError::Truncated => DropReason::Truncated,
        WireError::Malformed => DropReason::IpHeader,
    }
}

impl SavedHeader {
    /// Saves the first bytes of a packet: at most `bytes`, limited by the packet and the space.
    pub(crate) fn of(packet: &[u8], bytes: usize) -> SavedHeader {
        let len = bytes.min(SavedHeader::BYTES).min(packet.len());
        let mut saved = SavedHeader { len: len as u8, ..SavedHeader::EMPTY };
        if let (Some(to), Some(from)) = (saved.bytes.get_mut(..len), packet.get(..len)) {
            to.copy_from_slice(from);
        }
        saved
    }
}
