//! Ethernet II (RFC 894 for IPv4, RFC 2464 for IPv6).
//!
//! ```text
//!  0               6              12        14
//! +---------------+---------------+---------+-----------------
//! |  destination  |    source     |  type   |  payload, maybe padded to 46
//! +---------------+---------------+---------+-----------------
//! ```
//!
//! Devices strip the frame check sequence. IEEE 802.3 length fields and VLAN tags are not interpreted: they
//! appear as an unknown `ethertype`.

use crate::base::EtherAddr;
use crate::wire::WireError;

/// Length of the header.
pub const HEADER_BYTES: usize = 14;

/// `ethertype` of IPv4.
pub const IPV4: u16 = 0x0800;
/// `ethertype` of ARP.
pub const ARP: u16 = 0x0806;
/// `ethertype` of IPv6.
pub const IPV6: u16 = 0x86dd;

/// An Ethernet II header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Header {
    /// Destination address.
    pub dst: EtherAddr,
    /// Source address.
    pub src: EtherAddr,
    /// EtherType: [`IPV4`], [`IPV6`], [`ARP`] or another protocol.
    pub ethertype: u16,
}

impl Header {
    /// Parses the header at the start of a frame.
    ///
    /// Errors: [`WireError::Truncated`] under 14 bytes.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Header, WireError> {
        let h = frame.first_chunk::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        Ok(Header {
            dst: EtherAddr([h[0], h[1], h[2], h[3], h[4], h[5]]),
            src: EtherAddr([h[6], h[7], h[8], h[9], h[10], h[11]]),
            ethertype: u16::from_be_bytes([h[12], h[13]]),
        })
    }

    /// Writes the header at the start of `frame`.
    ///
    /// Errors: [`WireError::Truncated`] under 14 bytes.
    #[inline]
    pub fn emit(&self, frame: &mut [u8]) -> Result<(), WireError> {
        let h = frame.first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        h[0..6].copy_from_slice(&self.dst.0);
        h[6..12].copy_from_slice(&self.src.0);
        h[12..14].copy_from_slice(&self.ethertype.to_be_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::testing::{needs_exactly, refuses_every_prefix};

    const SAMPLE: [u8; 14] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x86, 0xdd];

    fn sample() -> Header {
        let (dst, src) = (EtherAddr([1, 2, 3, 4, 5, 6]), EtherAddr([7, 8, 9, 10, 11, 12]));
        Header { dst, src, ethertype: IPV6 }
    }

    #[test]
    fn header_round_trips() {
        assert_eq!(Header::parse(&SAMPLE), Ok(sample()));
        assert_eq!(needs_exactly(HEADER_BYTES, |b| sample().emit(b)), SAMPLE);
    }

    #[test]
    fn truncated_header_is_rejected() {
        refuses_every_prefix(&SAMPLE, Header::parse);
    }
}
