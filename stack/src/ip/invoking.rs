//! ICMP errors that the caller decides on, about packets that were consumed already.
//!
//! A transport that has consumed a packet keeps its addresses and a few fields. The quote of the invoking
//! packet (RFC 792, RFC 4443 section 2.4) is rebuilt from them: a receiver matches an error by addresses,
//! protocol, and the first 8 bytes of the transport header. Header fields that were not kept (TTL,
//! identification, checksums) have plausible values.

use core::net::{IpAddr, SocketAddr};

use crate::base::IpVersion;
use crate::wire::{icmpv4, icmpv6, ipv4, ipv6, protocol};

use crate::ip::engine::Ip;
use crate::ip::frame::Context;
use crate::ip::icmp::{Message, Quote};
use crate::ip::{EchoId, FrameSink};

/// Bytes of the transport header that are quoted (RFC 792).
pub(crate) const TRANSPORT_BYTES: usize = 8;
/// IPv6 header and 8 bytes: the longest rebuilt start of a packet.
const MOST_BYTES: usize = ipv6::HEADER_BYTES + TRANSPORT_BYTES;

/// A received packet that an error is sent about.
#[derive(Clone, Copy, Debug)]
pub struct InvokingPacket<'a> {
    /// Source address; the error is sent to it.
    pub src: IpAddr,
    /// Its destination.
    pub dst: IpAddr,
    /// Its transport protocol.
    pub protocol: u8,
    /// The first 8 bytes of its transport header.
    pub transport: [u8; TRANSPORT_BYTES],
    /// The bytes after these, possibly only the first ones or none.
    pub payload: &'a [u8],
    /// Length of the packet from its transport header on, bytes.
    pub transport_bytes: usize,
}

impl<'a> InvokingPacket<'a> {
    /// A datagram that was received. `payload` is the start of its payload, of `payload_bytes`.
    pub fn datagram(
        src: SocketAddr,
        dst: SocketAddr,
        payload: &'a [u8],
        payload_bytes: usize,
    ) -> InvokingPacket<'a> {
        let transport_bytes = payload_bytes.saturating_add(TRANSPORT_BYTES);
        let length = u16::try_from(transport_bytes).unwrap_or(u16::MAX);
        let ([s0, s1], [d0, d1]) = (src.port().to_be_bytes(), dst.port().to_be_bytes());
        let [l0, l1] = length.to_be_bytes();
        InvokingPacket {
            src: src.ip(),
            dst: dst.ip(),
            protocol: protocol::UDP,
            transport: [s0, s1, d0, d1, l0, l1, 0, 0],
            payload,
            transport_bytes,
        }
    }

    /// A received SYN with a header of `header_bytes` bytes.
    pub fn syn(src: SocketAddr, dst: SocketAddr, seq: u32, header_bytes: usize) -> Self {
        let ([s0, s1], [d0, d1]) = (src.port().to_be_bytes(), dst.port().to_be_bytes());
        let [n0, n1, n2, n3] = seq.to_be_bytes();
        InvokingPacket {
            src: src.ip(),
            dst: dst.ip(),
            protocol: protocol::TCP,
            transport: [s0, s1, d0, d1, n0, n1, n2, n3],
            payload: &[],
            transport_bytes: header_bytes,
        }
    }

    /// An echo request that was received. `payload` is the start of its payload, of `payload_bytes`.
    pub fn echo_request(
        src: IpAddr,
        dst: IpAddr,
        id: EchoId,
        payload: &'a [u8],
        payload_bytes: usize,
    ) -> InvokingPacket<'a> {
        let (kind, protocol) = match src {
            IpAddr::V4(_) => (8, protocol::ICMP),
            IpAddr::V6(_) => (128, protocol::ICMPV6),
        };
        let ([i0, i1], [s0, s1]) = (id.ident.to_be_bytes(), id.seq.to_be_bytes());
        InvokingPacket {
            src,
            dst,
            protocol,
            transport: [kind, 0, 0, 0, i0, i1, s0, s1],
            payload,
            transport_bytes: payload_bytes.saturating_add(TRANSPORT_BYTES),
        }
    }
}

/// An ICMP error to send about a received packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SentError {
    /// Destination unreachable: ICMP type 3, ICMPv6 type 1.
    Unreachable {
        /// Its code; the meaning depends on the IP version.
        code: u8,
    },
    /// Port unreachable: code 3 of ICMP, code 4 of ICMPv6.
    PortUnreachable,
    /// Fragmentation needed (RFC 1191), or packet too big (RFC 8201).
    TooBig {
        /// MTU of the next hop, bytes.
        mtu: usize,
    },
    /// Time exceeded: ICMP type 11, ICMPv6 type 3.
    TimeExceeded {
        /// 0: in transit; 1: reassembly.
        code: u8,
    },
}

impl SentError {
    fn message(self, version: IpVersion) -> Message {
        use icmpv4::Message as V4;
        use icmpv6::Message as V6;
        match (self, version) {
            (SentError::Unreachable { code }, IpVersion::V4) => {
                Message::V4(V4::Unreachable { code, next_hop_mtu: 0 })
            }
            (SentError::Unreachable { code }, IpVersion::V6) => {
                Message::V6(V6::Unreachable { code })
            }
            (SentError::PortUnreachable, IpVersion::V4) => {
                let code = icmpv4::unreachable::PORT;
                Message::V4(V4::Unreachable { code, next_hop_mtu: 0 })
            }
            (SentError::PortUnreachable, IpVersion::V6) => {
                Message::V6(V6::Unreachable { code: icmpv6::unreachable::PORT })
            }
            (SentError::TooBig { mtu }, IpVersion::V4) => {
                let code = icmpv4::unreachable::FRAGMENTATION_NEEDED;
                let next_hop_mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
                Message::V4(V4::Unreachable { code, next_hop_mtu })
            }
            (SentError::TooBig { mtu }, IpVersion::V6) => {
                Message::V6(V6::PacketTooBig { mtu: u32::try_from(mtu).unwrap_or(u32::MAX) })
            }
            (SentError::TimeExceeded { code }, IpVersion::V4) => {
                Message::V4(V4::TimeExceeded { code })
            }
            (SentError::TimeExceeded { code }, IpVersion::V6) => {
                Message::V6(V6::TimeExceeded { code })
            }
        }
    }
}

/// The rebuilt start of a packet: IP header and the first bytes of the transport header.
struct Rebuilt {
    bytes: [u8; MOST_BYTES],
    len: usize,
}

impl Rebuilt {
    /// `None` if the addresses are of different IP versions, or the length fits no header.
    fn new(packet: &InvokingPacket<'_>, ttl: u8) -> Option<Rebuilt> {
        let mut bytes = [0; MOST_BYTES];
        let header_bytes = match (packet.src, packet.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let header = ipv4::Header {
                    src,
                    dst,
                    protocol: packet.protocol,
                    ttl,
                    dscp_ecn: 0,
                    ident: 0,
                    dont_fragment: true,
                    more_fragments: false,
                    fragment_offset: 0,
                    header_bytes: ipv4::HEADER_BYTES,
                    total_bytes: packet.transport_bytes.saturating_add(ipv4::HEADER_BYTES),
                };
                header.emit(&mut bytes).ok()?;
                ipv4::HEADER_BYTES
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let header = ipv6::Header {
                    src,
                    dst,
                    next_header: packet.protocol,
                    hop_limit: ttl,
                    traffic_class: 0,
                    flow_label: 0,
                    payload_bytes: packet.transport_bytes,
                };
                header.emit(&mut bytes).ok()?;
                ipv6::HEADER_BYTES
            }
            _ => return None,
        };
        let len = header_bytes.saturating_add(TRANSPORT_BYTES);
        bytes.get_mut(header_bytes..len)?.copy_from_slice(&packet.transport);
        Some(Rebuilt { bytes, len })
    }

    fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

impl Ip {
    /// Sends an error about a packet that was delivered earlier, with source address `from`; `None`: the
    /// destination of the packet. Nothing is sent about a packet to a group or from an address that no
    /// host can have (RFC 1122 section 3.2.2, RFC 4443 section 2.4), nor above the rate limit of errors.
    /// Drops are counted.
    pub fn send_error_about_packet<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        about: &InvokingPacket<'_>,
        error: SentError,
        from: Option<IpAddr>,
    ) {
        let from = from.unwrap_or(about.dst);
        let is_group = about.dst.is_multicast() || self.is_broadcast(about.dst);
        let is_answerable = crate::ip::address::is_possible_source(about.src) && self.accepts(from);
        if is_group || !is_answerable || from.is_ipv4() != about.src.is_ipv4() {
            return;
        }
        let Some(start) = Rebuilt::new(about, self.config.ttl) else { return };
        let message = error.message(IpVersion::of(&about.src));
        let quote = Quote::Rebuilt(start.as_slice(), about.payload);
        self.send_error(cx, Some(from), about.src, &message, quote);
    }
}
