//! The TCP header (RFC 9293 section 3.1).
//!
//! ```text
//!  0               2               4
//! +---------------+---------------+
//! | source port   | dest. port    |
//! +---------------+---------------+
//! | sequence number               |
//! +-------------------------------+
//! | acknowledgement number        |
//! +-----+----+----+---------------+
//! |words| 0 | flags | window      |     data offset in words of 4 bytes, 5 to 15; nine flags
//! +-----+----+----+---------------+
//! | checksum      | urgent pointer|
//! +---------------+---------------+
//! | options, 0 to 40 bytes        |     see the module options
//! +-------------------------------+
//! ```

mod fast_open;
mod options;

use crate::base::SeqNum;
use crate::wire::WireError;
pub use fast_open::{FastOpen, FastOpenCookie};
pub use options::{EcnCounters, EcnOrder, Options, SackBlocks, Timestamps};

/// Length of a header without options.
pub const HEADER_BYTES: usize = 20;
/// Length of the longest header.
pub const MAX_HEADER_BYTES: usize = 60;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 16;

/// The control bits of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags(pub u16);

impl Flags {
    /// No more data from the sender.
    pub const FIN: Flags = Flags(0x01);
    /// Synchronize sequence numbers.
    pub const SYN: Flags = Flags(0x02);
    /// Reset the connection.
    pub const RST: Flags = Flags(0x04);
    /// Push.
    pub const PSH: Flags = Flags(0x08);
    /// The acknowledgment field is significant.
    pub const ACK: Flags = Flags(0x10);
    /// The urgent pointer field is significant.
    pub const URG: Flags = Flags(0x20);
    /// ECN echo (RFC 3168).
    pub const ECE: Flags = Flags(0x40);
    /// Congestion window reduced (RFC 3168).
    pub const CWR: Flags = Flags(0x80);
    /// Accurate ECN (RFC 9768).
    pub const AE: Flags = Flags(0x100);

    /// The flags of ECN. After a handshake that agreed on accurate feedback they are the field ACE
    /// (RFC 9768).
    pub const ECN: Flags = Flags(0x1c0);
    const ECN_SHIFT: u16 = 6;

    /// The letters of `Display`: `tcpdump`'s, but A for ACK and C for CWR.
    const LETTERS: [(Flags, &'static str); 9] = [
        (Flags::SYN, "S"),
        (Flags::FIN, "F"),
        (Flags::RST, "R"),
        (Flags::PSH, "P"),
        (Flags::ACK, "A"),
        (Flags::URG, "U"),
        (Flags::ECE, "E"),
        (Flags::CWR, "C"),
        (Flags::AE, "e"),
    ];

    /// The flags whose field ACE (RFC 9768 section 3.2) is the lower three bits of `count`.
    #[inline]
    pub const fn of_ace(count: u8) -> Flags {
        Flags((count as u16 & 7) << Flags::ECN_SHIFT)
    }

    /// The field ACE (RFC 9768 section 3.2): AE, CWR and ECE as a number below 8.
    #[inline]
    pub const fn ace(self) -> u8 {
        (self.0 >> Flags::ECN_SHIFT & 7) as u8
    }

    /// The flags in octets 12 and 13 of a header.
    #[inline]
    const fn of_octets(offset: u8, flags: u8) -> Flags {
        Flags(u16::from_be_bytes([offset & 1, flags]))
    }

    /// Whether all of `other` are set.
    #[inline]
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether at least one of `other` is set.
    #[inline]
    pub const fn intersects(self, other: Flags) -> bool {
        self.0 & other.0 != 0
    }

    /// The union of two sets, for constants.
    #[inline]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// The set without the flags of `other`.
    #[inline]
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }
}

impl core::ops::BitOr for Flags {
    type Output = Flags;
    #[inline]
    fn bitor(self, other: Flags) -> Flags {
        self.with(other)
    }
}

impl core::ops::BitOrAssign for Flags {
    #[inline]
    fn bitor_assign(&mut self, other: Flags) {
        *self = self.with(other);
    }
}

impl core::fmt::Display for Flags {
    /// One letter per flag, `SA` for SYN and ACK; `-` if none is set.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.0 == 0 {
            return f.write_str("-");
        }
        Flags::LETTERS
            .iter()
            .filter(|(flag, _)| self.contains(*flag))
            .try_for_each(|(_, letter)| f.write_str(letter))
    }
}

impl core::fmt::Debug for Flags {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

/// A TCP header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Header {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Sequence number of the first byte, or of the SYN.
    pub seq: SeqNum,
    /// Acknowledgment number, valid only with [`Flags::ACK`].
    pub ack: SeqNum,
    /// Control bits.
    pub flags: Flags,
    /// The window field, not scaled.
    pub window: u16,
    /// Urgent pointer, valid only with [`Flags::URG`].
    pub urgent: u16,
    /// Options.
    pub options: Options,
}

impl Header {
    /// Parses a header and returns it with its length, options included. The checksum is not verified.
    ///
    /// Errors: [`WireError::Truncated`] if `bytes` ends within the header; [`WireError::Malformed`] if the
    /// data offset is below 20 bytes or the length of an option is invalid.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(Header, usize), WireError> {
        let h = bytes.first_chunk::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let header_bytes = usize::from(h[12] >> 4) << 2;
        if header_bytes < HEADER_BYTES {
            return Err(WireError::Malformed);
        }
        let options = bytes.get(HEADER_BYTES..header_bytes).ok_or(WireError::Truncated)?;
        let header = Header {
            src_port: u16::from_be_bytes([h[0], h[1]]),
            dst_port: u16::from_be_bytes([h[2], h[3]]),
            seq: SeqNum(u32::from_be_bytes([h[4], h[5], h[6], h[7]])),
            ack: SeqNum(u32::from_be_bytes([h[8], h[9], h[10], h[11]])),
            flags: Flags::of_octets(h[12], h[13]),
            window: u16::from_be_bytes([h[14], h[15]]),
            urgent: u16::from_be_bytes([h[18], h[19]]),
            options: Options::parse(options)?,
        };
        Ok((header, header_bytes))
    }

    /// The sequence number, the control bits and the length of a header, without parsing its options. `None`
    /// if `bytes` or the data offset is below 20 bytes.
    #[inline]
    pub fn peek(bytes: &[u8]) -> Option<(SeqNum, Flags, usize)> {
        let h = bytes.first_chunk::<HEADER_BYTES>()?;
        let header_bytes = usize::from(h[12] >> 4) << 2;
        let seq = SeqNum(u32::from_be_bytes([h[4], h[5], h[6], h[7]]));
        (header_bytes >= HEADER_BYTES).then_some((
            seq,
            Flags::of_octets(h[12], h[13]),
            header_bytes,
        ))
    }

    /// Length of the header that [`Header::emit`] writes, a multiple of 4 from 20 to 60.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        self.options.bytes().saturating_add(HEADER_BYTES)
    }

    /// Writes the header with a checksum field of zero and returns its length.
    ///
    /// SACK blocks that do not fit in the 40 bytes of options are omitted, starting with the last. AccECN counters
    /// take what these leave.
    ///
    /// Errors: [`WireError::Truncated`] under [`Header::header_bytes`] bytes.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) -> Result<usize, WireError> {
        let header_bytes = self.header_bytes();
        let header = bytes.get_mut(..header_bytes).ok_or(WireError::Truncated)?;
        let (h, options) =
            header.split_first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        h[0..2].copy_from_slice(&self.src_port.to_be_bytes());
        h[2..4].copy_from_slice(&self.dst_port.to_be_bytes());
        h[4..8].copy_from_slice(&self.seq.0.to_be_bytes());
        h[8..12].copy_from_slice(&self.ack.0.to_be_bytes());
        // At most 60; in words of 4 bytes in the upper half of the byte: a shift by 2.
        let [flags_high, flags_low] = self.flags.0.to_be_bytes();
        h[12] = (header_bytes as u8) << 2 | flags_high & 1;
        h[13] = flags_low;
        h[14..16].copy_from_slice(&self.window.to_be_bytes());
        h[16..18].copy_from_slice(&[0, 0]);
        h[18..20].copy_from_slice(&self.urgent.to_be_bytes());
        self.options.emit(options)?;
        Ok(header_bytes)
    }
}

#[cfg(test)]
mod tests;
