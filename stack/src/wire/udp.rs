//! The UDP header (RFC 768).
//!
//! ```text
//!  0               2               4               6               8
//! +---------------+---------------+---------------+---------------+--------
//! | source port   | dest. port    | length        | checksum      | payload
//! +---------------+---------------+---------------+---------------+--------
//! ```
//!
//! `length` is that of header and payload. A checksum of zero means none, which IPv6 does not allow (RFC
//! 8200 section 8.1).

use crate::wire::WireError;

/// Length of the header.
pub const HEADER_BYTES: usize = 8;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 6;

/// A UDP header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Header {
    /// Source port, 0 if no reply is expected.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Length of header and payload in bytes, at least 8. The caller compares it with the length of the IP
    /// payload.
    pub length: u16,
    /// The checksum field; 0 means none.
    pub checksum: u16,
}

impl Header {
    /// Parses a header.
    ///
    /// Errors: [`WireError::Truncated`] under 8 bytes; [`WireError::Malformed`] if `length` is
    /// under 8.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Header, WireError> {
        let h = bytes.first_chunk::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let length = u16::from_be_bytes([h[4], h[5]]);
        if usize::from(length) < HEADER_BYTES {
            return Err(WireError::Malformed);
        }
        Ok(Header {
            src_port: u16::from_be_bytes([h[0], h[1]]),
            dst_port: u16::from_be_bytes([h[2], h[3]]),
            length,
            checksum: u16::from_be_bytes([h[6], h[7]]),
        })
    }

    /// Writes the header with `checksum` as is.
    ///
    /// Errors: [`WireError::Truncated`] under 8 bytes; [`WireError::Malformed`] if `length` is
    /// under 8.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let h = bytes.first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        if usize::from(self.length) < HEADER_BYTES {
            return Err(WireError::Malformed);
        }
        h[0..2].copy_from_slice(&self.src_port.to_be_bytes());
        h[2..4].copy_from_slice(&self.dst_port.to_be_bytes());
        h[4..6].copy_from_slice(&self.length.to_be_bytes());
        h[6..8].copy_from_slice(&self.checksum.to_be_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::testing::{needs_exactly, refuses_every_prefix};

    const SAMPLE: [u8; 8] = [0x12, 0x34, 0, 53, 0x01, 0x02, 0xab, 0xcd];

    fn sample() -> Header {
        Header { src_port: 0x1234, dst_port: 53, length: 0x0102, checksum: 0xabcd }
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

    #[test]
    fn length_below_the_header_length_is_malformed() {
        let mut bytes = SAMPLE;
        bytes[4..6].copy_from_slice(&[0, 7]);
        assert_eq!(Header::parse(&bytes), Err(WireError::Malformed));
        let header = Header { length: 7, ..sample() };
        assert_eq!(header.emit(&mut bytes), Err(WireError::Malformed));
        bytes[4..6].copy_from_slice(&[0, 8]);
        assert_eq!(Header::parse(&bytes).map(|h| h.length), Ok(8));
    }
}
