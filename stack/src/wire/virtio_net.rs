//! The virtio-net header in front of frames of TAP devices and packet sockets (VIRTIO 1.2 section 5.1.6.1,
//! `struct virtio_net_hdr_mrg_rxbuf` of `linux/virtio_net.h`). All fields are little-endian.
//!
//! ```text
//!  0      1         2         4          6            8             10            12
//! +------+---------+---------+----------+------------+-------------+-------------+--------
//! | flags| gso_type| hdr_len | gso_size | csum_start | csum_offset | num_buffers | frame
//! +------+---------+---------+----------+------------+-------------+-------------+--------
//! ```
//!
//! The offsets are not validated here, since the frame is not available.

use crate::wire::WireError;

/// Length of the header with `num_buffers`.
pub const HEADER_BYTES: usize = 12;

/// In `flags`: the checksum field holds the pseudo-header sum, not complemented; the sum from `csum_start` to
/// the end has to be added.
pub const F_NEEDS_CSUM: u8 = 1;
/// In `flags`: the device verified the checksum.
pub const F_DATA_VALID: u8 = 2;

/// In `gso_type`: no segmentation.
pub const GSO_NONE: u8 = 0;
/// In `gso_type`: a TCP super-segment over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// In `gso_type`: a TCP super-segment over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// In `gso_type`: UDP datagrams of equal size (USO).
pub const GSO_UDP_L4: u8 = 5;
/// In `gso_type`, combined with a TCP type: the first segment has CWR set.
pub const GSO_ECN: u8 = 0x80;

/// A virtio-net header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Header {
    /// [`F_NEEDS_CSUM`], [`F_DATA_VALID`].
    pub flags: u8,
    /// One of the `GSO_` types, optionally with [`GSO_ECN`].
    pub gso_type: u8,
    /// Length of all headers of the frame in bytes, as a hint.
    pub hdr_len: u16,
    /// Payload bytes per segment (the MSS); 0 without segmentation.
    pub gso_size: u16,
    /// Offset in the frame of the first byte to be summed.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
    /// Number of receive buffers of the frame; 0 on transmit.
    pub num_buffers: u16,
}

impl Header {
    /// Parses a header.
    ///
    /// Errors: [`WireError::Truncated`] under 12 bytes.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Header, WireError> {
        let h = bytes.first_chunk::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        Ok(Header {
            flags: h[0],
            gso_type: h[1],
            hdr_len: u16::from_le_bytes([h[2], h[3]]),
            gso_size: u16::from_le_bytes([h[4], h[5]]),
            csum_start: u16::from_le_bytes([h[6], h[7]]),
            csum_offset: u16::from_le_bytes([h[8], h[9]]),
            num_buffers: u16::from_le_bytes([h[10], h[11]]),
        })
    }

    /// Writes the header.
    ///
    /// Errors: [`WireError::Truncated`] under 12 bytes.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let h = bytes.first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        h[0] = self.flags;
        h[1] = self.gso_type;
        h[2..4].copy_from_slice(&self.hdr_len.to_le_bytes());
        h[4..6].copy_from_slice(&self.gso_size.to_le_bytes());
        h[6..8].copy_from_slice(&self.csum_start.to_le_bytes());
        h[8..10].copy_from_slice(&self.csum_offset.to_le_bytes());
        h[10..12].copy_from_slice(&self.num_buffers.to_le_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::testing::{needs_exactly, refuses_every_prefix};

    /// A TCP super-segment: hdr_len 54, gso_size 1460, checksum at 34 + 16.
    const SAMPLE: [u8; 12] = [1, 1, 54, 0, 0xb4, 0x05, 34, 0, 16, 0, 2, 1];

    fn sample() -> Header {
        Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1460,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0x0102,
        }
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
