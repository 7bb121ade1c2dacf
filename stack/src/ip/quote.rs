//! Parsing the packet that an ICMP error quotes.

use core::net::IpAddr;

use crate::base::{IpVersion, Zone, with_zone};
use crate::wire::{icmpv4, icmpv6, ipv4, ipv6, protocol};

use crate::ip::pmtu::{plateau_below, smallest_mtu};
use crate::ip::{ErrorKind, QuotedError};

/// A quoted packet: its IP header and the first 8 bytes of the transport header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quoted {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    /// Length of the packet as sent.
    packet_bytes: usize,
    /// IPv4: the DF bit. IPv6: true.
    dont_fragment: bool,
    protocol: u8,
    src_port: u16,
    dst_port: u16,
    seq: u32,
}

impl Quoted {
    /// Parses a packet from its IP header on. `None` if it is too short, malformed, not a first
    /// fragment, or of a protocol that this stack does not send.
    pub(crate) fn parse(packet: &[u8], version: IpVersion) -> Option<Quoted> {
        let network = match version {
            IpVersion::V4 => parse_v4(packet)?,
            IpVersion::V6 => parse_v6(packet)?,
        };
        let Network { src, dst, protocol, header_bytes, packet_bytes, dont_fragment } = network;
        if packet_bytes < header_bytes.saturating_add(TRANSPORT_BYTES) {
            return None;
        }
        let &[a, b, c, d, e, f, g, h] = packet.get(header_bytes..)?.first_chunk()?;
        let words = [[a, b], [c, d], [e, f], [g, h]].map(u16::from_be_bytes);
        let [first, second, third, fourth] = words;
        let (src_port, dst_port, seq) = match protocol {
            protocol::TCP => (first, second, u32::from_be_bytes([e, f, g, h])),
            protocol::UDP => (first, second, 0),
            // Words: type and code, checksum, identifier, sequence number.
            protocol::ICMP if version == IpVersion::V4 && a == 8 => (third, 0, u32::from(fourth)),
            protocol::ICMPV6 if version == IpVersion::V6 && a == 128 => {
                (third, 0, u32::from(fourth))
            }
            _ => return None,
        };
        Some(Quoted { src, dst, packet_bytes, dont_fragment, protocol, src_port, dst_port, seq })
    }

    /// Whether this packet can have caused the error: a path MTU is reported only for a larger
    /// packet that may not be fragmented (RFC 1191 section 4, RFC 8201 section 4, RFC 5927 section
    /// 7.2). An MTU below the IPv6 minimum counts as the minimum (RFC 8200 section 5).
    pub(crate) fn can_cause(&self, kind: ErrorKind) -> bool {
        match kind {
            ErrorKind::TooBig { mtu } => {
                let least = if self.dst.is_ipv4() { 0 } else { smallest_mtu(IpVersion::V6) };
                self.dont_fragment && mtu.max(least) < self.packet_bytes
            }
            _ => true,
        }
    }

    /// The error about this packet.
    pub(crate) fn error(&self, kind: ErrorKind, zone: Zone) -> QuotedError {
        let least = smallest_mtu(IpVersion::of(&self.dst));
        let kind = match kind {
            // IPv4 keeps a smaller value: it means that routers must fragment.
            ErrorKind::TooBig { mtu } if self.dst.is_ipv6() => {
                ErrorKind::TooBig { mtu: mtu.max(least) }
            }
            kind => kind,
        };
        QuotedError {
            local: with_zone(self.src, self.src_port, zone),
            remote: with_zone(self.dst, self.dst_port, zone),
            protocol: self.protocol,
            seq: self.seq,
            packet_bytes: self.packet_bytes,
            kind,
        }
    }
}

/// Whether a packet, of which these are the first bytes from its IP header on, is an ICMP error or may be one: its ICMP
/// type is missing. A later fragment is taken for none, since its type is elsewhere.
pub(crate) fn quotes_icmp_error(packet: &[u8]) -> bool {
    match packet.first().map(|b| b >> 4) {
        Some(4) => ipv4::Header::parse(packet, usize::MAX).is_ok_and(|h| {
            let message = packet.get(h.header_bytes..).unwrap_or(&[]);
            let parsed = icmpv4::Message::parse(message);
            h.protocol == protocol::ICMP
                && h.fragment_offset == 0
                && parsed.map_or(message.len() < icmpv4::HEADER_BYTES, |m| m.is_error())
        }),
        // Errors and redirects (RFC 4443 section 2.4(e)).
        Some(6) => icmpv6_type(packet)
            .is_some_and(|kind| kind.is_none_or(|kind| kind < 128 || kind == 137)),
        _ => false,
    }
}

/// Extension headers that are skipped at most.
const MOST_EXTENSIONS: usize = 8;

/// The type of an ICMPv6 message; `Some(None)`: the packet ends before it or before it is known. `None`: it is
/// something else. The extension headers may be those that the error is about, so nothing but their lengths is looked
/// at.
fn icmpv6_type(packet: &[u8]) -> Option<Option<u8>> {
    let header = ipv6::Header::parse(packet, usize::MAX).ok()?;
    let (mut next, mut at) = (header.next_header, ipv6::HEADER_BYTES);
    for _ in 0..=MOST_EXTENSIONS {
        let bytes = packet.get(at..).unwrap_or(&[]);
        let is_extension = matches!(
            next,
            protocol::HOP_BY_HOP
                | protocol::ROUTING
                | protocol::DESTINATION_OPTIONS
                | protocol::FRAGMENT
        );
        if is_extension && bytes.len() < 4 {
            return Some(None);
        }
        let skipped = match next {
            protocol::ICMPV6 => return Some(bytes.first().copied()),
            protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DESTINATION_OPTIONS => {
                usize::from(*bytes.get(1)?).saturating_add(1).saturating_mul(8)
            }
            protocol::FRAGMENT if is_first_fragment(bytes)? => ipv6::FRAGMENT_BYTES,
            _ => return None,
        };
        (next, at) = (*bytes.first()?, at.saturating_add(skipped));
    }
    None
}

/// Whether the offset of a fragment header is 0 (RFC 8200 section 4.5).
fn is_first_fragment(header: &[u8]) -> Option<bool> {
    let offset_and_flags = u16::from_be_bytes([*header.get(2)?, *header.get(3)?]);
    Some(offset_and_flags >> 3 == 0)
}

/// Bytes of the transport header that every error quotes (RFC 792).
const TRANSPORT_BYTES: usize = 8;

/// The IP header of a quoted packet.
struct Network {
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    /// Offset of the transport header, bytes.
    header_bytes: usize,
    packet_bytes: usize,
    dont_fragment: bool,
}

fn parse_v4(packet: &[u8]) -> Option<Network> {
    let h = ipv4::Header::parse(packet, usize::MAX).ok()?;
    let is_first = h.fragment_offset == 0;
    is_first.then_some(Network {
        src: h.src.into(),
        dst: h.dst.into(),
        protocol: h.protocol,
        header_bytes: h.header_bytes,
        packet_bytes: h.total_bytes,
        dont_fragment: h.dont_fragment,
    })
}

fn parse_v6(packet: &[u8]) -> Option<Network> {
    let h = ipv6::Header::parse(packet, usize::MAX).ok()?;
    let upper = ipv6::walk_extensions(packet, &h).ok()?;
    let is_first = upper.fragment.is_none_or(|f| f.offset == 0);
    is_first.then_some(Network {
        src: h.src.into(),
        dst: h.dst.into(),
        protocol: upper.protocol,
        header_bytes: upper.offset,
        packet_bytes: h.payload_bytes.saturating_add(ipv6::HEADER_BYTES),
        dont_fragment: true,
    })
}

/// The kind of an ICMPv4 error; `None` for other messages. `bytes` is the message, for the length
/// of the quoted packet.
pub(crate) fn error_kind_v4(message: &icmpv4::Message, bytes: &[u8]) -> Option<ErrorKind> {
    use icmpv4::unreachable;
    match *message {
        icmpv4::Message::Unreachable { code: unreachable::PORT, .. } => {
            Some(ErrorKind::PortUnreachable)
        }
        icmpv4::Message::Unreachable { code: unreachable::FRAGMENTATION_NEEDED, next_hop_mtu } => {
            // Routers older than RFC 1191 send zero.
            let mtu = match next_hop_mtu {
                0 => plateau_below(quoted_total_bytes(bytes)),
                mtu => usize::from(mtu),
            };
            Some(ErrorKind::TooBig { mtu })
        }
        icmpv4::Message::Unreachable { code, .. } => {
            Some(ErrorKind::Unreachable { hard: is_hard_v4(code), code })
        }
        icmpv4::Message::TimeExceeded { .. } => Some(ErrorKind::TimeExceeded),
        icmpv4::Message::ParameterProblem { .. } => Some(ErrorKind::ParameterProblem),
        _ => None,
    }
}

/// The kind of an ICMPv6 error; `None` for other messages.
pub(crate) fn error_kind_v6(message: &icmpv6::Message) -> Option<ErrorKind> {
    match *message {
        icmpv6::Message::Unreachable { code: icmpv6::unreachable::PORT } => {
            Some(ErrorKind::PortUnreachable)
        }
        icmpv6::Message::Unreachable { code } => {
            Some(ErrorKind::Unreachable { hard: is_hard_v6(code), code })
        }
        icmpv6::Message::PacketTooBig { mtu } => {
            Some(ErrorKind::TooBig { mtu: usize::try_from(mtu).unwrap_or(usize::MAX) })
        }
        icmpv6::Message::TimeExceeded { .. } => Some(ErrorKind::TimeExceeded),
        icmpv6::Message::ParameterProblem { .. } => Some(ErrorKind::ParameterProblem),
        _ => None,
    }
}

/// Hard errors: protocol unreachable, network or host unknown, host isolated, administratively
/// prohibited, precedence (RFC 1122 section 4.2.3.9 lists protocol unreachable; Linux adds the
/// rest). Soft: network or host unreachable, source route failed, type of service.
fn is_hard_v4(code: u8) -> bool {
    matches!(code, 2 | 6..=10 | 13..=15)
}

/// Hard errors: administratively prohibited, beyond scope, policy, reject route (RFC 4443 section
/// 3.1, as Linux). Soft: no route, address unreachable.
fn is_hard_v6(code: u8) -> bool {
    matches!(code, 1 | 2 | 5 | 6)
}

fn quoted_total_bytes(message: &[u8]) -> usize {
    let field = message.get(icmpv4::HEADER_BYTES..).and_then(|q| q.get(2..4));
    match field {
        Some(&[high, low]) => usize::from(u16::from_be_bytes([high, low])),
        _ => 0,
    }
}
