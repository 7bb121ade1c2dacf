//! The IPv4 header (RFC 791 section 3.1).
//!
//! ```text
//!  0       1       2       3       4
//! +---+---+-------+---------------+
//! | 4 |ihl| tos   | total length  |     ihl in words of 4 bytes, 5 to 15
//! +---+---+-------+-+-+-----------+
//! | identification |0|DF|MF|offset|     offset in units of 8 bytes
//! +-------+-------+---------------+
//! |  ttl  | proto | checksum      |     of the header alone
//! +-------+-------+---------------+
//! | source                        |
//! +-------------------------------+
//! | destination                   |
//! +-------------------------------+
//! | options, 0 to 40 bytes        |     ignored on input, never sent
//! +-------------------------------+
//! ```

use crate::wire::{WireError, checksum};
use core::net::Ipv4Addr;

/// Length of a header without options.
pub const HEADER_BYTES: usize = 20;
/// Length of the longest header.
pub const MAX_HEADER_BYTES: usize = 60;
/// Offset of the header checksum.
pub const CHECKSUM_OFFSET: usize = 10;

const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;
const OFFSET_UNITS: u16 = 0x1fff;

/// An IPv4 header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Header {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// Protocol number, see [`protocol`](crate::wire::protocol).
    pub protocol: u8,
    /// Time to live.
    pub ttl: u8,
    /// DSCP (upper 6 bits) and ECN (lower 2 bits, RFC 3168).
    pub dscp_ecn: u8,
    /// Identification.
    pub ident: u16,
    /// The DF flag.
    pub dont_fragment: bool,
    /// The MF flag.
    pub more_fragments: bool,
    /// Fragment offset in bytes, a multiple of 8.
    pub fragment_offset: u16,
    /// Length of the header with options; ignored by `emit`, which writes 20 bytes.
    pub header_bytes: usize,
    /// Length of header and payload, `header_bytes <= total_bytes <= 65,535`.
    pub total_bytes: usize,
}

impl Header {
    /// Parses a header.
    ///
    /// `bytes` starts with the header and may be only the first part of the packet. `packet_bytes` is the
    /// received length of the packet, Ethernet padding included. The checksum is not verified, see
    /// [`checksum_ok`].
    ///
    /// Errors: [`WireError::Truncated`] if `bytes` ends within the header, or `packet_bytes` is below the total
    /// length; [`WireError::Malformed`] for another version or inconsistent lengths.
    #[inline]
    pub fn parse(bytes: &[u8], packet_bytes: usize) -> Result<Header, WireError> {
        let h = bytes.first_chunk::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let header_bytes = usize::from((h[0] & 0x0f) << 2);
        let total_bytes = usize::from(u16::from_be_bytes([h[2], h[3]]));
        if h[0] >> 4 != 4 || header_bytes < HEADER_BYTES || total_bytes < header_bytes {
            return Err(WireError::Malformed);
        }
        if header_bytes > bytes.len() || total_bytes > packet_bytes {
            return Err(WireError::Truncated);
        }
        let fragment = u16::from_be_bytes([h[6], h[7]]);
        Ok(Header {
            src: Ipv4Addr::new(h[12], h[13], h[14], h[15]),
            dst: Ipv4Addr::new(h[16], h[17], h[18], h[19]),
            protocol: h[9],
            ttl: h[8],
            dscp_ecn: h[1],
            ident: u16::from_be_bytes([h[4], h[5]]),
            dont_fragment: fragment & DONT_FRAGMENT != 0,
            more_fragments: fragment & MORE_FRAGMENTS != 0,
            fragment_offset: (fragment & OFFSET_UNITS) << 3,
            header_bytes,
            total_bytes,
        })
    }

    /// Writes a header of 20 bytes, without options, with its checksum.
    ///
    /// Errors: [`WireError::Truncated`] under 20 bytes; [`WireError::Malformed`] if `total_bytes` is not between
    /// 20 and 65,535 or `fragment_offset` is not a multiple of 8.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let h = bytes.first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let total = u16::try_from(self.total_bytes).map_err(|_| WireError::Malformed)?;
        if self.total_bytes < HEADER_BYTES || self.fragment_offset & 7 != 0 {
            return Err(WireError::Malformed);
        }
        let fragment = self.fragment_offset >> 3
            | if self.dont_fragment { DONT_FRAGMENT } else { 0 }
            | if self.more_fragments { MORE_FRAGMENTS } else { 0 };
        let first = u32::from_be_bytes([0x45, self.dscp_ecn, 0, 0]) | u32::from(total);
        let second = u32::from(self.ident) << 16 | u32::from(fragment);
        let third = u32::from_be_bytes([self.ttl, self.protocol, 0, 0]);
        let words = [first, second, third, self.src.to_bits(), self.dst.to_bits()];
        // Summed from registers: reading back the bytes just written would stall on store forwarding.
        let third = third | u32::from(checksum::of_words(&words));
        h[0..4].copy_from_slice(&first.to_be_bytes());
        h[4..8].copy_from_slice(&second.to_be_bytes());
        h[8..12].copy_from_slice(&third.to_be_bytes());
        h[12..16].copy_from_slice(&self.src.octets());
        h[16..20].copy_from_slice(&self.dst.octets());
        Ok(())
    }

    /// Whether the packet is a fragment.
    #[inline]
    pub const fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset != 0
    }

    /// Length of the payload.
    #[inline]
    pub const fn payload_bytes(&self) -> usize {
        self.total_bytes.saturating_sub(self.header_bytes)
    }
}

/// A header template of a flow: all fields but the length and the identification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Template {
    header: [u8; HEADER_BYTES],
    /// The one's complement sum of `header`, whose length, identification and checksum are zero.
    sum: u16,
}

impl Template {
    /// Creates a template from a header, whose length and identification are ignored.
    ///
    /// Errors: as [`Header::emit`], except for the length.
    pub fn new(header: &Header) -> Result<Template, WireError> {
        let mut bytes = [0; HEADER_BYTES];
        Header { ident: 0, total_bytes: HEADER_BYTES, ..*header }.emit(&mut bytes)?;
        bytes[2..4].fill(0);
        bytes[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 2].fill(0);
        Ok(Template { header: bytes, sum: !checksum::checksum(&bytes) })
    }

    /// Writes the header of a packet of `total_bytes`, header included, with its checksum.
    #[inline(always)]
    pub fn emit(&self, total_bytes: u16, ident: u16, h: &mut [u8; HEADER_BYTES]) {
        *h = self.header;
        h[2..4].copy_from_slice(&total_bytes.to_be_bytes());
        h[4..6].copy_from_slice(&ident.to_be_bytes());
        let sum = !checksum::added([self.sum, total_bytes, ident]);
        h[CHECKSUM_OFFSET..CHECKSUM_OFFSET + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Whether the checksum of a header is correct. `header_bytes` is that of [`Header::parse`]; false if `bytes`
/// is shorter.
#[inline]
pub fn checksum_ok(bytes: &[u8], header_bytes: usize) -> bool {
    let Some(header) = bytes.get(..header_bytes) else { return false };
    match <&[u8; HEADER_BYTES]>::try_from(header) {
        // The usual length is known to the compiler, which unrolls the loop.
        Ok(usual) => checksum::checksum(usual) == 0,
        Err(_) => checksum::checksum(header) == 0,
    }
}

#[cfg(test)]
mod tests;
