//! ICMP for IPv4 (RFC 792).
//!
//! ```text
//!  0      1      2          4                          8
//! +------+------+----------+--------------------------+--------------------------
//! | type | code | checksum | depends on type          | echo data, or the start of
//! +------+------+----------+--------------------------+ the invoking packet
//! ```

use crate::wire::{WireError, writer::pair};
use core::net::Ipv4Addr;

/// Length of the header of a message, which echo data or the invoking packet follows.
pub const HEADER_BYTES: usize = 8;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 2;

const ECHO_REPLY: u8 = 0;
const UNREACHABLE: u8 = 3;
const REDIRECT: u8 = 5;
const ECHO_REQUEST: u8 = 8;
const TIME_EXCEEDED: u8 = 11;
const PARAMETER_PROBLEM: u8 = 12;

/// Codes of [`Message::Unreachable`] (RFC 792, RFC 1122 section 3.2.2.1).
pub mod unreachable {
    /// Network unreachable.
    pub const NET: u8 = 0;
    /// Host unreachable.
    pub const HOST: u8 = 1;
    /// Protocol unreachable.
    pub(crate) const PROTOCOL: u8 = 2;
    /// Port unreachable.
    pub const PORT: u8 = 3;
    /// Fragmentation needed and DF set (RFC 1191).
    pub const FRAGMENTATION_NEEDED: u8 = 4;
}

/// The header of an ICMP message, its first 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Message {
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
    /// Destination unreachable.
    Unreachable {
        /// See [`mod@unreachable`].
        code: u8,
        /// With [`unreachable::FRAGMENTATION_NEEDED`]: the next-hop MTU in bytes, 0 from routers older than
        /// RFC 1191. Undefined with other codes.
        next_hop_mtu: u16,
    },
    /// Time exceeded.
    TimeExceeded {
        /// 0: TTL exceeded in transit; 1: reassembly time exceeded.
        code: u8,
    },
    /// Parameter problem.
    ParameterProblem {
        /// 0: `pointer` is valid.
        code: u8,
        /// Offset of the error in the invoking packet.
        pointer: u8,
    },
    /// Redirect.
    Redirect {
        /// For the network (0), the host (1), or either with a type of service (2, 3).
        code: u8,
        /// The first hop to use.
        gateway: Ipv4Addr,
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
    /// Parses the first 8 bytes of a message. The checksum is not verified.
    ///
    /// Errors: [`WireError::Truncated`] under 8 bytes.
    pub fn parse(bytes: &[u8]) -> Result<Message, WireError> {
        let &[kind, code, _, _, a, b, c, d] =
            bytes.first_chunk::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let (upper, lower) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Ok(match kind {
            ECHO_REQUEST => Message::EchoRequest { ident: upper, seq: lower },
            ECHO_REPLY => Message::EchoReply { ident: upper, seq: lower },
            UNREACHABLE => Message::Unreachable { code, next_hop_mtu: lower },
            TIME_EXCEEDED => Message::TimeExceeded { code },
            PARAMETER_PROBLEM => Message::ParameterProblem { code, pointer: a },
            REDIRECT => Message::Redirect { code, gateway: Ipv4Addr::new(a, b, c, d) },
            _ => Message::Other { kind, code },
        })
    }

    /// Writes the first 8 bytes of the message with a checksum field of zero.
    ///
    /// Errors: [`WireError::Truncated`] under 8 bytes.
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let out = bytes.first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let (kind, code, [a, b, c, d]) = self.fields();
        *out = [kind, code, 0, 0, a, b, c, d];
        Ok(())
    }

    /// Whether the message is an ICMP error, in reply to which no error may be sent (RFC 1122 section 3.2.2).
    pub const fn is_error(&self) -> bool {
        matches!(
            self,
            Message::Unreachable { .. }
                | Message::TimeExceeded { .. }
                | Message::ParameterProblem { .. }
                | Message::Redirect { .. }
        )
    }

    /// Type, code, and the four bytes behind the checksum.
    fn fields(&self) -> (u8, u8, [u8; 4]) {
        match *self {
            Message::EchoRequest { ident, seq } => (ECHO_REQUEST, 0, pair(ident, seq)),
            Message::EchoReply { ident, seq } => (ECHO_REPLY, 0, pair(ident, seq)),
            Message::Unreachable { code, next_hop_mtu } => {
                (UNREACHABLE, code, pair(0, next_hop_mtu))
            }
            Message::TimeExceeded { code } => (TIME_EXCEEDED, code, [0; 4]),
            Message::ParameterProblem { code, pointer } => {
                (PARAMETER_PROBLEM, code, [pointer, 0, 0, 0])
            }
            Message::Redirect { code, gateway } => (REDIRECT, code, gateway.octets()),
            Message::Other { kind, code } => (kind, code, [0; 4]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::testing::{needs_exactly, refuses_every_prefix};

    /// Each type of message with its bytes.
    fn samples() -> [([u8; 8], Message); 7] {
        let gateway = Ipv4Addr::new(192, 0, 2, 1);
        [
            ([8, 0, 0, 0, 1, 2, 3, 4], Message::EchoRequest { ident: 0x0102, seq: 0x0304 }),
            ([0, 0, 0, 0, 1, 2, 3, 4], Message::EchoReply { ident: 0x0102, seq: 0x0304 }),
            ([3, 4, 0, 0, 0, 0, 5, 0xdc], Message::Unreachable { code: 4, next_hop_mtu: 1500 }),
            ([11, 1, 0, 0, 0, 0, 0, 0], Message::TimeExceeded { code: 1 }),
            ([12, 0, 0, 0, 20, 0, 0, 0], Message::ParameterProblem { code: 0, pointer: 20 }),
            ([5, 1, 0, 0, 192, 0, 2, 1], Message::Redirect { code: 1, gateway }),
            ([13, 9, 0, 0, 0, 0, 0, 0], Message::Other { kind: 13, code: 9 }),
        ]
    }

    #[test]
    fn each_message_round_trips() {
        for (bytes, message) in samples() {
            assert_eq!(Message::parse(&bytes), Ok(message));
            assert_eq!(needs_exactly(HEADER_BYTES, |b| message.emit(b)), bytes);
            refuses_every_prefix(&bytes, Message::parse);
        }
    }

    #[test]
    fn checksum_is_ignored_by_parse() {
        for (mut bytes, message) in samples() {
            bytes[CHECKSUM_OFFSET..4].copy_from_slice(&[0xab, 0xcd]);
            assert_eq!(Message::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn echo_messages_and_unknown_types_are_not_errors() {
        let errors = samples().map(|(_, m)| m.is_error());
        assert_eq!(errors, [false, false, true, true, true, true, false]);
    }
}
