//! ARP for IPv4 over Ethernet (RFC 826).
//!
//! ```text
//!  0        2        4     5     6        8              14          18              24          28
//! +--------+--------+-----+-----+--------+--------------+-----------+--------------+-----------+
//! | hw = 1 | 0x0800 |  6  |  4  | opcode | sender ether | sender ip | target ether | target ip |
//! +--------+--------+-----+-----+--------+--------------+-----------+--------------+-----------+
//! ```

use crate::WireError;
use core::net::Ipv4Addr;
use fulmar_base::EtherAddr;

/// Length of the packet, without Ethernet padding.
pub const BYTES: usize = 28;

/// Hardware type Ethernet, protocol type IPv4, address lengths 6 and 4: the only kind spoken here.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];

/// What the sender wants.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Who has `target_ip`?
    Request,
    /// `sender_ip` is at `sender_ether`.
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
    /// Hardware address of the target; meaningless in a request.
    pub target_ether: EtherAddr,
    /// Protocol address of the target.
    pub target_ip: Ipv4Addr,
}

impl Packet {
    /// Reads the packet behind an Ethernet header; padding behind it is ignored.
    ///
    /// Errors: [`WireError::Truncated`] under 28 bytes; [`WireError::Malformed`] if it is not
    /// about IPv4 over Ethernet or is neither request nor reply.
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
