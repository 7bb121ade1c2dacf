//! IPv6 input (RFC 8200).

use core::net::IpAddr;

use fulmar_base::DropReason;
use fulmar_wire::icmpv6::{Message, parameter};
use fulmar_wire::ipv6::{self, ExtensionError, Fragment, OptionAction, Upper};
use fulmar_wire::protocol;

use super::{Network, reason_of};
use crate::engine::Ip;
use crate::frame::{Context, Frame, first, pull};
use crate::{FrameSink, Verdict};

/// Bytes of a packet in which its extension headers must end. Whatever has more is not something
/// that a peer of this stack needs (RFC 8504 section 5.3 allows limits).
const EXTENSIONS_WITHIN_BYTES: usize = 512;

impl Ip {
    pub(super) fn ipv6_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
    ) -> Result<Verdict, DropReason> {
        let packet_bytes = frame.chain.len();
        let bytes = pull(&mut frame.chain, ipv6::HEADER_BYTES, cx.pool)?;
        let header = ipv6::Header::parse(bytes, packet_bytes).map_err(reason_of)?;
        let (src, dst) = (IpAddr::V6(header.src), IpAddr::V6(header.dst));
        if !header.src.is_unspecified() {
            self.check_source(src, frame)?;
        }
        let is_group = self.check_destination(dst, frame)?;
        let total_bytes = header.payload_bytes.saturating_add(ipv6::HEADER_BYTES);
        frame.chain.trim_back(packet_bytes.saturating_sub(total_bytes), cx.pool);
        let network = network_of(&header, is_group, false);
        self.ipv6_upper(cx, frame, &header, network)
    }

    /// Goes on behind the fixed header, of a packet as it came or of one put together from fragments.
    fn ipv6_upper<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
        header: &ipv6::Header,
        mut network: Network,
    ) -> Result<Verdict, DropReason> {
        if !is_upper(header.next_header) {
            let upper = self.extensions(cx, frame, header, &network)?;
            if let Some(fragment) = upper.fragment {
                // Nobody cuts fragments honestly.
                if network.was_fragment {
                    return Err(DropReason::ExtensionHeader);
                }
                network.was_fragment = true;
                // An atomic fragment is a whole packet (RFC 6946).
                if !fragment.is_atomic() {
                    return self.ipv6_part(cx, frame, header, network, upper, fragment);
                }
            }
            network.protocol = upper.protocol;
            network.header_bytes = upper.offset;
            network.next_header_at = upper.next_header_at;
        }
        // Only duplicate address detection has no source (RFC 4291 section 2.5.2).
        if header.src.is_unspecified() && network.protocol != protocol::ICMPV6 {
            return Err(DropReason::IpSource);
        }
        self.transport_input(cx, frame, &network)
    }

    /// A fragment, and the packet that it completes.
    fn ipv6_part<S: FrameSink>(
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
                let network = network_of(&whole, network.is_group, true);
                self.ipv6_upper(cx, frame, &whole, network)
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
        let bytes = frame.chain.len().min(EXTENSIONS_WITHIN_BYTES);
        let packet = pull(&mut frame.chain, bytes, cx.pool)?;
        match ipv6::walk_extensions(packet, header) {
            // A part of a packet: what follows is the table's business.
            Ok(upper) if upper.fragment.is_some_and(|f| !f.is_atomic()) => Ok(upper),
            Ok(upper) if upper.offset > first(&frame.chain).len() => Err(DropReason::Truncated),
            // Nothing follows, and nothing is wrong with that (RFC 8200 section 4.7).
            Ok(Upper { protocol: protocol::NO_NEXT_HEADER, .. }) => {
                Err(DropReason::UnknownProtocol)
            }
            Ok(upper) => Ok(upper),
            Err(error) => {
                self.report_extension(cx, frame, network, error);
                Err(DropReason::ExtensionHeader)
            }
        }
    }

    /// Says what was not understood, where the standard wants it said.
    fn report_extension<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &Frame,
        network: &Network,
        error: ExtensionError,
    ) {
        let (code, pointer, even_to_groups) = match error {
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
        self.answer_v6(cx, frame, network, message, even_to_groups);
    }
}

/// What the fixed header says; the walk over the extension headers corrects it.
fn network_of(header: &ipv6::Header, is_group: bool, was_fragment: bool) -> Network {
    Network {
        src: IpAddr::V6(header.src),
        dst: IpAddr::V6(header.dst),
        protocol: header.next_header,
        header_bytes: ipv6::HEADER_BYTES,
        hop_limit: header.hop_limit,
        ecn: header.traffic_class & 3,
        is_group,
        next_header_at: 6,
        was_fragment,
    }
}

/// Protocols that need no walk.
fn is_upper(next_header: u8) -> bool {
    matches!(next_header, protocol::TCP | protocol::UDP | protocol::ICMPV6)
}
