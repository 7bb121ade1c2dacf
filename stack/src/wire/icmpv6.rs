//! ICMPv6 (RFC 4443) and neighbour discovery (RFC 4861).
//!
//! ```text
//!  0      1      2          4                 8
//! +------+------+----------+-----------------+-----------------------------------
//! | type | code | checksum | depends on type | echo data | invoking packet |
//! +------+------+----------+-----------------+ target address | options
//! ```
//!
//! The checksum covers the pseudo-header, so the addresses are needed to verify it.

mod ndp;

use crate::wire::{
    WireError,
    writer::{Writer, pair},
};
use core::net::Ipv6Addr;
pub use ndp::NdpOptions;
pub use ndp::{NdpOption, ndp_options};

/// Length of the shortest header, that of errors and echo messages.
pub const HEADER_BYTES: usize = 8;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 2;

const UNREACHABLE: u8 = 1;
const PACKET_TOO_BIG: u8 = 2;
const TIME_EXCEEDED: u8 = 3;
const PARAMETER_PROBLEM: u8 = 4;
const ECHO_REQUEST: u8 = 128;
const ECHO_REPLY: u8 = 129;
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;

// Flags of router and neighbour advertisements (RFC 4861 sections 4.2 and 4.4).
const MANAGED: u8 = 0x80;
const OTHER_CONFIGURATION: u8 = 0x40;
const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// Codes of [`Message::Unreachable`] (RFC 4443 section 3.1).
pub mod unreachable {
    /// No route to the destination.
    pub const NO_ROUTE: u8 = 0;
    /// Communication with the destination administratively prohibited.
    pub const ADMIN_PROHIBITED: u8 = 1;
    /// Beyond the scope of the source address.
    pub const BEYOND_SCOPE: u8 = 2;
    /// Address unreachable.
    pub const ADDRESS: u8 = 3;
    /// Port unreachable.
    pub const PORT: u8 = 4;
}

/// Codes of [`Message::ParameterProblem`] (RFC 4443 section 3.4).
pub mod parameter {
    /// Erroneous header field.
    pub const ERRONEOUS_FIELD: u8 = 0;
    /// Unrecognized Next Header.
    pub const UNRECOGNISED_NEXT_HEADER: u8 = 1;
    /// Unrecognized IPv6 option.
    pub const UNRECOGNISED_OPTION: u8 = 2;
    /// First fragment with an incomplete header chain (RFC 7112 section 7).
    pub const INCOMPLETE_HEADER_CHAIN: u8 = 3;
}

/// The header of an ICMPv6 message, without echo data, invoking packet or options.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Message {
    /// Destination unreachable.
    Unreachable {
        /// See [`mod@unreachable`].
        code: u8,
    },
    /// Packet too big (RFC 8201).
    PacketTooBig {
        /// The next-hop MTU in bytes, as received: it may be below 1280.
        mtu: u32,
    },
    /// Time exceeded.
    TimeExceeded {
        /// 0: hop limit exceeded in transit; 1: reassembly time exceeded.
        code: u8,
    },
    /// Parameter problem.
    ParameterProblem {
        /// See [`parameter`].
        code: u8,
        /// Offset of the error in the invoking packet.
        pointer: u32,
    },
    /// Echo request. The code is ignored.
    EchoRequest {
        /// Identifier.
        ident: u16,
        /// Sequence number.
        seq: u16,
    },
    /// Echo reply.
    EchoReply {
        /// Identifier of the request.
        ident: u16,
        /// Sequence number of the request.
        seq: u16,
    },
    /// Router solicitation; options follow.
    RouterSolicitation,
    /// Router advertisement; options follow. "Or 0" below means unspecified.
    RouterAdvertisement {
        /// Cur Hop Limit, or 0.
        hop_limit: u8,
        /// The M flag: addresses are available by DHCPv6.
        managed: bool,
        /// The O flag: other configuration is available by DHCPv6.
        other: bool,
        /// Router lifetime in seconds; 0 if it is not a default router.
        router_lifetime_s: u16,
        /// Reachable time in milliseconds, or 0.
        reachable_ms: u32,
        /// Retrans timer in milliseconds, or 0.
        retrans_ms: u32,
    },
    /// Neighbour solicitation; options follow.
    NeighbourSolicitation {
        /// The address to resolve.
        target: Ipv6Addr,
    },
    /// Neighbour advertisement; options follow.
    NeighbourAdvertisement {
        /// The advertised address.
        target: Ipv6Addr,
        /// The R flag: the sender is a router.
        router: bool,
        /// The S flag: a reply to a solicitation.
        solicited: bool,
        /// The O flag: overrides a cached link-layer address.
        override_: bool,
    },
    /// Redirect; options follow.
    Redirect {
        /// The first hop to use, or `destination` if it is on-link.
        target: Ipv6Addr,
        /// The destination that is redirected.
        destination: Ipv6Addr,
    },
    /// Another type; `emit` writes zeroes behind the checksum.
    Other {
        /// The type.
        kind: u8,
        /// The code.
        code: u8,
    },
}

impl Message {
    /// Parses the header of a message. The checksum is not verified, and of the validation of RFC 4861 only
    /// length and code are checked.
    ///
    /// Errors: [`WireError::Truncated`] if `bytes` ends within the header of its type;
    /// [`WireError::Malformed`] for a message of neighbour discovery with a non-zero code.
    pub fn parse(bytes: &[u8]) -> Result<Message, WireError> {
        let (&[kind, code, _, _, a, b, c, d], body) =
            bytes.split_first_chunk::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let word = u32::from_be_bytes([a, b, c, d]);
        let (upper, lower) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Ok(match kind {
            UNREACHABLE => Message::Unreachable { code },
            PACKET_TOO_BIG => Message::PacketTooBig { mtu: word },
            TIME_EXCEEDED => Message::TimeExceeded { code },
            PARAMETER_PROBLEM => Message::ParameterProblem { code, pointer: word },
            ECHO_REQUEST => Message::EchoRequest { ident: upper, seq: lower },
            ECHO_REPLY => Message::EchoReply { ident: upper, seq: lower },
            ROUTER_SOLICITATION..=REDIRECT if code != 0 => return Err(WireError::Malformed),
            ROUTER_SOLICITATION => Message::RouterSolicitation,
            ROUTER_ADVERTISEMENT => router_advertisement([a, b, c, d], body)?,
            NEIGHBOUR_SOLICITATION => Message::NeighbourSolicitation { target: address(body)?.0 },
            NEIGHBOUR_ADVERTISEMENT => Message::NeighbourAdvertisement {
                target: address(body)?.0,
                router: a & ROUTER != 0,
                solicited: a & SOLICITED != 0,
                override_: a & OVERRIDE != 0,
            },
            REDIRECT => {
                let (target, rest) = address(body)?;
                Message::Redirect { target, destination: address(rest)?.0 }
            }
            _ => Message::Other { kind, code },
        })
    }

    /// Length of the header, which echo data, the invoking packet, or options follow.
    pub const fn header_bytes(&self) -> usize {
        match self {
            Message::RouterAdvertisement { .. } => 16,
            Message::NeighbourSolicitation { .. } | Message::NeighbourAdvertisement { .. } => 24,
            Message::Redirect { .. } => 40,
            _ => HEADER_BYTES,
        }
    }

    /// Writes the header with a checksum field of zero.
    ///
    /// Errors: [`WireError::Truncated`] under [`Message::header_bytes`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let header = bytes.get_mut(..self.header_bytes()).ok_or(WireError::Truncated)?;
        let mut out = Writer(header);
        let (kind, code, [a, b, c, d]) = self.fields();
        out.put([kind, code, 0, 0, a, b, c, d])?;
        match *self {
            Message::RouterAdvertisement { reachable_ms, retrans_ms, .. } => {
                out.put(reachable_ms.to_be_bytes())?;
                out.put(retrans_ms.to_be_bytes())
            }
            Message::NeighbourSolicitation { target }
            | Message::NeighbourAdvertisement { target, .. } => out.put(target.octets()),
            Message::Redirect { target, destination } => {
                out.put(target.octets())?;
                out.put(destination.octets())
            }
            _ => Ok(()),
        }
    }

    /// Whether the message is an error or a redirect, in reply to which no error may be sent (RFC 4443
    /// section 2.4(e)).
    pub const fn is_error(&self) -> bool {
        match self {
            Message::Unreachable { .. }
            | Message::PacketTooBig { .. }
            | Message::TimeExceeded { .. }
            | Message::ParameterProblem { .. }
            | Message::Redirect { .. } => true,
            // Types below 128 are errors (RFC 4443 section 2.1).
            Message::Other { kind, .. } => *kind < 128,
            _ => false,
        }
    }

    /// Type, code, and the four bytes behind the checksum.
    fn fields(&self) -> (u8, u8, [u8; 4]) {
        match *self {
            Message::Unreachable { code } => (UNREACHABLE, code, [0; 4]),
            Message::PacketTooBig { mtu } => (PACKET_TOO_BIG, 0, mtu.to_be_bytes()),
            Message::TimeExceeded { code } => (TIME_EXCEEDED, code, [0; 4]),
            Message::ParameterProblem { code, pointer } => {
                (PARAMETER_PROBLEM, code, pointer.to_be_bytes())
            }
            Message::EchoRequest { ident, seq } => (ECHO_REQUEST, 0, pair(ident, seq)),
            Message::EchoReply { ident, seq } => (ECHO_REPLY, 0, pair(ident, seq)),
            Message::RouterSolicitation => (ROUTER_SOLICITATION, 0, [0; 4]),
            Message::RouterAdvertisement {
                hop_limit, managed, other, router_lifetime_s, ..
            } => {
                let flags = bit(managed, MANAGED) | bit(other, OTHER_CONFIGURATION);
                let [c, d] = router_lifetime_s.to_be_bytes();
                (ROUTER_ADVERTISEMENT, 0, [hop_limit, flags, c, d])
            }
            Message::NeighbourSolicitation { .. } => (NEIGHBOUR_SOLICITATION, 0, [0; 4]),
            Message::NeighbourAdvertisement { router, solicited, override_, .. } => {
                let flags =
                    bit(router, ROUTER) | bit(solicited, SOLICITED) | bit(override_, OVERRIDE);
                (NEIGHBOUR_ADVERTISEMENT, 0, [flags, 0, 0, 0])
            }
            Message::Redirect { .. } => (REDIRECT, 0, [0; 4]),
            Message::Other { kind, code } => (kind, code, [0; 4]),
        }
    }
}

fn router_advertisement(word: [u8; 4], body: &[u8]) -> Result<Message, WireError> {
    let [hop_limit, flags, c, d] = word;
    let t = body.first_chunk::<8>().ok_or(WireError::Truncated)?;
    Ok(Message::RouterAdvertisement {
        hop_limit,
        managed: flags & MANAGED != 0,
        other: flags & OTHER_CONFIGURATION != 0,
        router_lifetime_s: u16::from_be_bytes([c, d]),
        reachable_ms: u32::from_be_bytes([t[0], t[1], t[2], t[3]]),
        retrans_ms: u32::from_be_bytes([t[4], t[5], t[6], t[7]]),
    })
}

fn address(bytes: &[u8]) -> Result<(Ipv6Addr, &[u8]), WireError> {
    let (octets, rest) = bytes.split_first_chunk::<16>().ok_or(WireError::Truncated)?;
    Ok((Ipv6Addr::from(*octets), rest))
}

fn bit(set: bool, mask: u8) -> u8 {
    if set { mask } else { 0 }
}

#[cfg(test)]
mod tests;
