//! IPv4 input (RFC 791, RFC 1122 section 3.2).

use core::net::IpAddr;

use fulmar_base::DropReason;
use fulmar_wire::ipv4;

use super::{Network, reason_of};
use crate::address::{Scope, is_possible_source};
use crate::engine::Ip;
use crate::frame::{Context, Frame, pull};
use crate::{FrameSink, Verdict};

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
            ecn: header.dscp_ecn & 3,
            is_group,
            next_header_at: 9,
            was_fragment: false,
        };
        self.transport_input(cx, frame, &network)
    }

    /// Drops sources that no other host can have (RFC 1122 section 3.2.1.3), and our own unless we
    /// sent the frame.
    pub(super) fn check_source(&self, src: IpAddr, frame: &Frame) -> Result<(), DropReason> {
        let is_right = if frame.is_own {
            self.is_local(src)
        } else {
            is_possible_source(src) && !self.is_local(src) && !self.is_broadcast(src)
        };
        if is_right { Ok(()) } else { Err(DropReason::IpSource) }
    }

    /// Whether the packet is for us at all; returns whether it is for others too. A packet to one
    /// host that came in a frame to many is not what its sender would have sent (RFC 1122 section
    /// 3.3.6).
    pub(super) fn check_destination(&self, dst: IpAddr, frame: &Frame) -> Result<bool, DropReason> {
        match self.addresses.classify(dst) {
            Scope::Own if frame.is_group => Err(DropReason::IpDestination),
            Scope::Own => Ok(false),
            Scope::Broadcast | Scope::Group => Ok(true),
            Scope::Foreign => Err(DropReason::IpDestination),
        }
    }
}

fn read_header<S>(cx: &mut Context<'_, S>, frame: &mut Frame) -> Result<ipv4::Header, DropReason> {
    let packet_bytes = frame.chain.len();
    let first = pull(&mut frame.chain, ipv4::HEADER_BYTES, cx.pool)?;
    let said_bytes = first.first().map_or(0, |b| usize::from(b & 0xf).saturating_mul(4));
    let first = pull(&mut frame.chain, said_bytes.max(ipv4::HEADER_BYTES), cx.pool)?;
    let header = ipv4::Header::parse(first, packet_bytes).map_err(reason_of)?;
    if !ipv4::checksum_ok(first, header.header_bytes) {
        return Err(DropReason::IpChecksum);
    }
    Ok(header)
}
