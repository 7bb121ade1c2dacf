//! IPv6 input (RFC 8200).

use core::net::{IpAddr, Ipv6Addr};

use crate::base::DropReason;
use crate::wire::icmpv6::{Message, parameter};
use crate::wire::ipv6::{self, ExtensionError, Fragment, OptionAction, Upper};
use crate::wire::protocol;

use super::{Network, drop_reason};
use crate::ip::engine::Ip;
use crate::ip::frame::{Context, Frame, first, pull};
use crate::ip::{FrameSink, Verdict};

/// Limit of the extension header chain, bytes from the start of the packet. RFC 8504 section 5.3
/// permits limits.
const MAX_EXTENSION_CHAIN_BYTES: usize = 512;

const ALL_MLDV2_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);

impl Ip {
    pub(super) fn ipv6_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
    ) -> Result<Verdict, DropReason> {
        let packet_bytes = frame.chain.len();
        let bytes = pull(&mut frame.chain, ipv6::HEADER_BYTES, cx.pool)?;
        let header = ipv6::Header::parse(bytes, packet_bytes).map_err(drop_reason)?;
        let (src, dst) = (IpAddr::V6(header.src), IpAddr::V6(header.dst));
        if !header.src.is_unspecified() {
            self.check_source(src, frame)?;
        }
        if is_mldv2_report(&header) {
            return Ok(Verdict::Consumed);
        }
        let is_group = self.check_destination(dst, frame)?;
        let total_bytes = header.payload_bytes.saturating_add(ipv6::HEADER_BYTES);
        frame.chain.trim_back(packet_bytes.saturating_sub(total_bytes), cx.pool);
        let network = network_of(&header, is_group);
        self.ipv6_payload(cx, frame, &header, network)
    }

    /// Processes a packet after its fixed header, received or reassembled.
    fn ipv6_payload<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        header: &ipv6::Header,
        mut network: Network,
    ) -> Result<Verdict, DropReason> {
        if !is_transport(header.next_header) {
            let upper = self.extensions(cx, frame, header, &network)?;
            if let Some(fragment) = upper.fragment {
                // A fragment within a reassembled packet is an attack.
                if network.was_fragment {
                    return Err(DropReason::ExtensionHeader);
                }
                network.was_fragment = true;
                // An atomic fragment is a whole packet (RFC 6946).
                if !fragment.is_atomic() {
                    return self.ipv6_fragment(cx, frame, header, network, upper, fragment);
                }
            }
            network.protocol = upper.protocol;
            network.header_bytes = upper.offset;
            network.next_header_at = upper.next_header_at;
        }
        // Only duplicate address detection uses the unspecified source (RFC 4291 section 2.5.2).
        if header.src.is_unspecified() && network.protocol != protocol::ICMPV6 {
            return Err(DropReason::IpSource);
        }
        self.transport_input(cx, frame, &network)
    }

    /// Processes a fragment, and the packet that it completes.
    fn ipv6_fragment<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        header: &ipv6::Header,
        network: Network,
        upper: Upper,
        fragment: Fragment,
    ) -> Result<Verdict, DropReason> {
        match self.fragment_v6(cx, frame, header, &network, &upper, fragment)? {
            Some(whole) => {
                let network =
                    Network { was_fragment: true, ..network_of(&whole, network.is_group) };
                self.ipv6_payload(cx, frame, &whole, network)
            }
            None => Ok(Verdict::Consumed),
        }
    }

    fn extensions<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        header: &ipv6::Header,
        network: &Network,
    ) -> Result<Upper, DropReason> {
        let bytes = frame.chain.len().min(MAX_EXTENSION_CHAIN_BYTES);
        let packet = pull(&mut frame.chain, bytes, cx.pool)?;
        match ipv6::walk_extensions(packet, header) {
            // A fragment: the rest is opaque until reassembly.
            Ok(upper) if upper.fragment.is_some_and(|f| !f.is_atomic()) => Ok(upper),
            Ok(upper) if upper.offset > first(&frame.chain).len() => Err(DropReason::Truncated),
            // No next header: valid, but nothing to deliver (RFC 8200 section 4.7).
            Ok(Upper { protocol: protocol::NO_NEXT_HEADER, .. }) => {
                Err(DropReason::UnknownProtocol)
            }
            Ok(upper) => Ok(upper),
            Err(error) => {
                self.report_extension_error(cx, frame, network, error);
                Err(DropReason::ExtensionHeader)
            }
        }
    }

    /// Sends the parameter problem that RFC 8200 requires for an extension header error.
    fn report_extension_error<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &Frame,
        network: &Network,
        error: ExtensionError,
    ) {
        let (code, pointer, even_if_multicast) = match error {
            ExtensionError::Truncated | ExtensionError::Malformed => return,
            ExtensionError::IncompleteChain => (parameter::INCOMPLETE_HEADER_CHAIN, 0, false),
            ExtensionError::UnrecognisedNextHeader { pointer } => {
                (parameter::UNRECOGNISED_NEXT_HEADER, pointer, false)
            }
            ExtensionError::BadRoutingHeader { pointer } => {
                (parameter::ERRONEOUS_FIELD, pointer, false)
            }
            ExtensionError::UnrecognisedOption { pointer, action } => match action {
                OptionAction::Discard => return,
                OptionAction::DiscardAndReport => (parameter::UNRECOGNISED_OPTION, pointer, true),
                OptionAction::ReportUnlessMulticast => {
                    (parameter::UNRECOGNISED_OPTION, pointer, false)
                }
            },
        };
        let message = Message::ParameterProblem { code, pointer };
        if even_if_multicast {
            self.send_error_v6_even_if_multicast(cx, frame, network, message);
        } else {
            self.send_error_v6(cx, frame, network, message);
        }
    }
}

/// The fields of the fixed header. The extension header walk updates them.
fn network_of(header: &ipv6::Header, is_group: bool) -> Network {
    Network {
        src: IpAddr::V6(header.src),
        dst: IpAddr::V6(header.dst),
        protocol: header.next_header,
        header_bytes: ipv6::HEADER_BYTES,
        hop_limit: header.hop_limit,
        dscp_ecn: header.traffic_class,
        is_group,
        next_header_at: 6,
        was_fragment: false,
    }
}

/// Whether this is an MLDv2 report: to ff02::16, with a hop-by-hop header (RFC 3810 sections 5 and 5.2.14). Every IPv6
/// host sends some when it starts; they are not counted as drops.
fn is_mldv2_report(header: &ipv6::Header) -> bool {
    header.next_header == protocol::HOP_BY_HOP && header.dst == ALL_MLDV2_ROUTERS
}

/// Whether the next header is a transport, so that no extension header walk is needed.
fn is_transport(next_header: u8) -> bool {
    matches!(next_header, protocol::TCP | protocol::UDP | protocol::ICMPV6)
}
