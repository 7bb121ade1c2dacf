//! IPv4 input (RFC 791, RFC 1122 section 3.2).

use core::net::IpAddr;

use crate::base::DropReason;
use crate::wire::ipv4;

use super::{Network, drop_reason};
use crate::ip::address::{DstClass, is_possible_source, is_solicited_node};
use crate::ip::engine::Ip;
use crate::ip::frame::{Context, Frame, pull};
use crate::ip::{FrameSink, Verdict};

impl Ip {
    pub(super) fn ipv4_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
    ) -> Result<Verdict, DropReason> {
        let mut header = read_header(cx, frame)?;
        let (src, dst) = (IpAddr::V4(header.src), IpAddr::V4(header.dst));
        self.check_source(src, frame)?;
        let is_group = self.check_destination(dst, frame)?;
        let padding_bytes = frame.chain.len().saturating_sub(header.total_bytes);
        frame.chain.trim_back(padding_bytes, cx.pool);
        if header.is_fragment() {
            match self.fragment_v4(cx, frame, &header, is_group)? {
                Some(whole) => header = whole,
                None => return Ok(Verdict::Consumed),
            }
        }
        let network = Network {
            src,
            dst,
            protocol: header.protocol,
            header_bytes: header.header_bytes,
            hop_limit: header.ttl,
            dscp_ecn: header.dscp_ecn,
            is_group,
            next_header_at: 9,
            was_fragment: false,
        };
        self.transport_input(cx, frame, &network)
    }

    /// Drops invalid source addresses (RFC 1122 section 3.2.1.3), and own addresses unless looped
    /// back.
    pub(super) fn check_source(&self, src: IpAddr, frame: &Frame) -> Result<(), DropReason> {
        let is_right = if frame.is_own {
            self.is_local(src)
        } else {
            is_possible_source(src) && !self.is_local(src) && !self.is_broadcast(src)
        };
        if is_right { Ok(()) } else { Err(DropReason::IpSource) }
    }

    /// Drops packets not addressed to this host. Returns whether the destination is a group. A unicast packet in a
    /// multicast or broadcast frame is dropped (RFC 1122 section 3.3.6), and so is one to a loopback address that was
    /// not looped back (RFC 1122 section 3.2.1.3, RFC 4291 section 2.5.3).
    pub(super) fn check_destination(&self, dst: IpAddr, frame: &Frame) -> Result<bool, DropReason> {
        if dst.is_loopback() && !frame.is_own {
            return Err(DropReason::IpDestination);
        }
        match self.addresses.classify(dst) {
            DstClass::Own if frame.is_group => Err(DropReason::IpDestination),
            DstClass::Own => Ok(false),
            DstClass::Broadcast | DstClass::Group => Ok(true),
            DstClass::Foreign if frame.is_group => match dst {
                // A neighbour solicitation for an address that any-address mode answers for.
                IpAddr::V6(group) if self.config.any_ip && is_solicited_node(group) => Ok(true),
                group if group.is_multicast() => Err(DropReason::IpGroup),
                _ => Err(DropReason::IpDestination),
            },
            DstClass::Foreign if self.accepts(dst) => Ok(false),
            DstClass::Foreign => Err(DropReason::IpDestination),
        }
    }
}

fn read_header<S>(cx: &mut Context<'_, S>, frame: &mut Frame) -> Result<ipv4::Header, DropReason> {
    let packet_bytes = frame.chain.len();
    let first = pull(&mut frame.chain, ipv4::HEADER_BYTES, cx.pool)?;
    let claimed_bytes = first.first().map_or(0, |b| usize::from(b & 0xf).saturating_mul(4));
    let first = pull(&mut frame.chain, claimed_bytes.max(ipv4::HEADER_BYTES), cx.pool)?;
    let header = ipv4::Header::parse(first, packet_bytes).map_err(drop_reason)?;
    if !ipv4::checksum_ok(first, header.header_bytes) {
        return Err(DropReason::IpChecksum);
    }
    Ok(header)
}
