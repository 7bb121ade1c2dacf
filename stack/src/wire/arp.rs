//! ARP for IPv4 over Ethernet (RFC 826).
//!
//! ```text
//!  0        2        4     5     6        8
//! +--------+--------+-----+-----+--------+
//! | hw = 1 | 0x0800 |  6  |  4  | opcode |
//! +--------+--------+-----+-----+--------+
//!  8              14          18              24          28
//! +--------------+-----------+--------------+-----------+
//! | sender ether | sender ip | target ether | target ip |
//! +--------------+-----------+--------------+-----------+
//! ```

use crate::base::EtherAddr;
use crate::wire::WireError;
use core::net::Ipv4Addr;

/// Length of the packet, without Ethernet padding.
pub const BYTES: usize = 28;

/// Hardware type Ethernet, protocol type IPv4, address lengths 6 and 4: the only supported format.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];

/// The opcode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Opcode 1: resolve `target_ip`.
    Request,
    /// Opcode 2: `sender_ip` is at `sender_ether`.
    Reply,
}

/// An ARP packet for IPv4 over Ethernet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Packet {
    /// Request or reply.
    pub operation: Operation,
    /// Hardware address of the sender.
    pub sender_ether: EtherAddr,
    /// Protocol address of the sender; unspecified in a probe (RFC 5227).
    pub sender_ip: Ipv4Addr,
    /// Hardware address of the target; undefined in a request.
    pub target_ether: EtherAddr,
    /// Protocol address of the target.
    pub target_ip: Ipv4Addr,
}

impl Packet {
    /// Parses the payload of an Ethernet frame; padding is ignored.
    ///
    /// Errors: [`WireError::Truncated`] under 28 bytes; [`WireError::Malformed`] if it is not for IPv4 over
    /// Ethernet or has an unknown opcode.
    pub fn parse(bytes: &[u8]) -> Result<Packet, WireError> {
        let p = bytes.first_chunk::<BYTES>().ok_or(WireError::Truncated)?;
        if p[0..6] != ETHERNET_IPV4 {
            return Err(WireError::Malformed);
        }
        let operation = match u16::from_be_bytes([p[6], p[7]]) {
            1 => Operation::Request,
            2 => Operation::Reply,
            _ => return Err(WireError::Malformed),
        };
        Ok(Packet {
            operation,
            sender_ether: EtherAddr([p[8], p[9], p[10], p[11], p[12], p[13]]),
            sender_ip: Ipv4Addr::new(p[14], p[15], p[16], p[17]),
            target_ether: EtherAddr([p[18], p[19], p[20], p[21], p[22], p[23]]),
            target_ip: Ipv4Addr::new(p[24], p[25], p[26], p[27]),
        })
    }

    /// Writes the packet.
    ///
    /// Errors: [`WireError::Truncated`] under 28 bytes.
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let p = bytes.first_chunk_mut::<BYTES>().ok_or(WireError::Truncated)?;
        let opcode: u16 = match self.operation {
            Operation::Request => 1,
            Operation::Reply => 2,
        };
        p[0..6].copy_from_slice(&ETHERNET_IPV4);
        p[6..8].copy_from_slice(&opcode.to_be_bytes());
        p[8..14].copy_from_slice(&self.sender_ether.0);
        p[14..18].copy_from_slice(&self.sender_ip.octets());
        p[18..24].copy_from_slice(&self.target_ether.0);
        p[24..28].copy_from_slice(&self.target_ip.octets());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::testing::{needs_exactly, refuses_every_prefix};

    #[rustfmt::skip]
    const SAMPLE: [u8; 28] = [
        0, 1, 8, 0, 6, 4, 0, 2,
        2, 0, 0, 0, 0, 1, 10, 0, 0, 1,
        2, 0, 0, 0, 0, 2, 10, 0, 0, 2,
    ];

    fn sample() -> Packet {
        Packet {
            operation: Operation::Reply,
            sender_ether: EtherAddr([2, 0, 0, 0, 0, 1]),
            sender_ip: Ipv4Addr::new(10, 0, 0, 1),
            target_ether: EtherAddr([2, 0, 0, 0, 0, 2]),
            target_ip: Ipv4Addr::new(10, 0, 0, 2),
        }
    }

    #[test]
    fn packet_round_trips() {
        assert_eq!(Packet::parse(&SAMPLE), Ok(sample()));
        assert_eq!(needs_exactly(BYTES, |b| sample().emit(b)), SAMPLE);
        let request = Packet { operation: Operation::Request, ..sample() };
        let bytes = needs_exactly(BYTES, |b| request.emit(b));
        assert_eq!((bytes[7], Packet::parse(&bytes)), (1, Ok(request)));
    }

    #[test]
    fn truncated_packet_is_rejected() {
        refuses_every_prefix(&SAMPLE, Packet::parse);
    }

    #[test]
    fn ethernet_padding_is_ignored() {
        let mut padded = [0xee; 46];
        padded[..BYTES].copy_from_slice(&SAMPLE);
        assert_eq!(Packet::parse(&padded), Ok(sample()));
    }

    #[test]
    fn other_hardware_protocol_or_operation_is_malformed() {
        for at in 0..8 {
            let mut bytes = SAMPLE;
            bytes[at] ^= 0x40;
            assert_eq!(Packet::parse(&bytes), Err(WireError::Malformed), "byte {at}");
        }
        for opcode in [0, 3] {
            let mut bytes = SAMPLE;
            bytes[7] = opcode;
            assert_eq!(Packet::parse(&bytes), Err(WireError::Malformed));
        }
    }
}
