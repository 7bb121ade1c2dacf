//! ICMP for IPv4 (RFC 792).
//!
//! ```text
//!  0      1      2          4                          8
//! +------+------+----------+--------------------------+--------------------------
//! | type | code | checksum | depends on type          | echoed data, or the start of
//! +------+------+----------+--------------------------+ the packet that is complained about
//! ```

use crate::WireError;
use core::net::Ipv4Addr;

/// Length of every message's header; echo data or the invoking packet follows.
pub const HEADER_BYTES: usize = 8;
/// Where the checksum stands.
pub const CHECKSUM_OFFSET: usize = 2;

const ECHO_REPLY: u8 = 0;
const UNREACHABLE: u8 = 3;
const REDIRECT: u8 = 5;
const ECHO_REQUEST: u8 = 8;
const TIME_EXCEEDED: u8 = 11;
const PARAMETER_PROBLEM: u8 = 12;

/// Codes of [`Message::Unreachable`] (RFC 792, RFC 1122 section 3.2.2.1).
pub mod unreachable {
    /// No route to the network.
    pub const NET: u8 = 0;
    /// The host does not answer.
    pub const HOST: u8 = 1;
    /// The host does not speak the protocol.
    pub const PROTOCOL: u8 = 2;
    /// Nobody listens on the port.
    pub const PORT: u8 = 3;
    /// Larger than the next hop's MTU, and may not be fragmented (RFC 1191).
    pub const FRAGMENTATION_NEEDED: u8 = 4;
    /// Forbidden by an administrator (RFC 1812 section 5.2.7.1).
    pub const ADMIN_PROHIBITED: u8 = 13;
}

/// An ICMP message, without what follows its first 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Message {
    /// Ping. The code is not looked at.
    EchoRequest {
        /// Names the pinging program.
        ident: u16,
        /// Counts its pings.
        seq: u16,
    },
    /// The answer to a ping, with the same numbers and data.
    EchoReply {
        /// As in the request.
        ident: u16,
        /// As in the request.
        seq: u16,
    },
    /// The packet could not be delivered.
    Unreachable {
        /// Why, see [`mod@unreachable`].
        code: u8,
        /// With [`unreachable::FRAGMENTATION_NEEDED`]: the MTU of the hop that refused, in bytes;
        /// 0 from routers older than RFC 1191. Meaningless with other codes.
        next_hop_mtu: u16,
    },
    /// Hops (code 0) or time for reassembly (code 1) ran out.
    TimeExceeded {
        /// Which of the two.
        code: u8,
    },
    /// A header field is wrong.
    ParameterProblem {
        /// 0: `pointer` says which byte.
        code: u8,
        /// Offset into the invoking packet.
        pointer: u8,
    },
    /// A better first hop exists.
    Redirect {
        /// For a network (0), a host (1), or either with a type of service (2, 3).
        code: u8,
        /// The better first hop.
        gateway: Ipv4Addr,
    },
    /// Anything else; `emit` writes zeros behind the checksum.
    Other {
        /// The type.
        kind: u8,
        /// The code.
        code: u8,
    },
}

impl Message {
    /// Reads the first 8 bytes of a message. The checksum is not verified.
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

    /// Writes the first 8 bytes of the message, the checksum field zero.
    ///
    /// Errors: [`WireError::Truncated`] under 8 bytes.
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let out = bytes.first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let (kind, code, [a, b, c, d]) = self.fields();
        *out = [kind, code, 0, 0, a, b, c, d];
        Ok(())
    }

    /// Whether the message is about another packet: no error may answer it (RFC 1122 section
    /// 3.2.2).
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

fn pair(upper: u16, lower: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (upper.to_be_bytes(), lower.to_be_bytes());
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{needs_exactly, refuses_every_prefix};

    /// Each kind of message beside its bytes.
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
    fn each_message_is_read_and_written_alike() {
        for (bytes, message) in samples() {
            assert_eq!(Message::parse(&bytes), Ok(message));
            assert_eq!(needs_exactly(HEADER_BYTES, |b| message.emit(b)), bytes);
            refuses_every_prefix(&bytes, Message::parse);
        }
    }

    #[test]
    fn checksum_is_not_part_of_the_message() {
        for (mut bytes, message) in samples() {
            bytes[CHECKSUM_OFFSET..4].copy_from_slice(&[0xab, 0xcd]);
            assert_eq!(Message::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn echoes_and_unknown_kinds_are_no_errors() {
        let errors = samples().map(|(_, m)| m.is_error());
        assert_eq!(errors, [false, false, true, true, true, true, false]);
    }
}
