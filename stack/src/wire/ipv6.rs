//! The IPv6 header and its extension headers (RFC 8200).
//!
//! ```text
//!  0         4             12                      32
//! +---------+-------------+-----------------------+
//! | 6       | traffic cl. | flow label            |   (bits)
//! +---------+-------------+-----------+-----------+
//! | payload length        | next hdr  | hop limit |   payload includes extension headers
//! +-----------------------+-----------+-----------+
//! | source, 16 bytes                              |
//! +-----------------------------------------------+
//! | destination, 16 bytes                         |
//! +-----------------------------------------------+
//! | extension headers: next hdr, length, ...      |
//! +-----------------------------------------------+
//! ```

use crate::wire::{WireError, protocol};
use core::net::Ipv6Addr;

/// Length of the fixed header.
pub const HEADER_BYTES: usize = 40;

/// Maximum extension headers of a packet. Each of the four types is useful at most twice; a limit on the work
/// per packet is allowed by RFC 8504 section 5.3.
pub(crate) const MAX_EXTENSIONS: usize = 8;

/// Maximum options of an extension header, padding included (RFC 8504 section 5.3).
pub(crate) const MAX_OPTIONS: usize = 32;

/// Offset of the Next Header field in the fixed header.
const NEXT_HEADER_OFFSET: usize = 6;

/// An IPv6 header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Header {
    /// Source address.
    pub src: Ipv6Addr,
    /// Destination address.
    pub dst: Ipv6Addr,
    /// Next Header: an extension header or a transport protocol.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// DSCP (upper 6 bits) and ECN (lower 2 bits).
    pub traffic_class: u8,
    /// Flow label, 20 bits (RFC 6437); `emit` ignores higher bits.
    pub flow_label: u32,
    /// Payload length, extension headers included, at most 65,535.
    pub payload_bytes: usize,
}

impl Header {
    /// Parses a fixed header.
    ///
    /// `bytes` starts with the header and may be only the first part of the packet. `packet_bytes` is the
    /// received length of the packet, Ethernet padding included. Jumbograms (RFC 2675) are not supported.
    ///
    /// Errors: [`WireError::Truncated`] under 40 bytes, or if `packet_bytes` is below the length of header and
    /// payload; [`WireError::Malformed`] for another version.
    #[inline]
    pub fn parse(bytes: &[u8], packet_bytes: usize) -> Result<Header, WireError> {
        let (h, rest) = bytes.split_first_chunk::<8>().ok_or(WireError::Truncated)?;
        let (src, rest) = rest.split_first_chunk::<16>().ok_or(WireError::Truncated)?;
        let dst = rest.first_chunk::<16>().ok_or(WireError::Truncated)?;
        let payload_bytes = usize::from(u16::from_be_bytes([h[4], h[5]]));
        let word = u32::from_be_bytes([h[0], h[1], h[2], h[3]]);
        if word >> 28 != 6 {
            return Err(WireError::Malformed);
        }
        if payload_bytes.saturating_add(HEADER_BYTES) > packet_bytes {
            return Err(WireError::Truncated);
        }
        Ok(Header {
            src: Ipv6Addr::from(*src),
            dst: Ipv6Addr::from(*dst),
            next_header: h[6],
            hop_limit: h[7],
            traffic_class: (word >> 20) as u8,
            flow_label: word & 0x000f_ffff,
            payload_bytes,
        })
    }

    /// Writes the fixed header.
    ///
    /// Errors: [`WireError::Truncated`] under 40 bytes; [`WireError::Malformed`] if `payload_bytes` exceeds
    /// 65,535.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) -> Result<(), WireError> {
        let h = bytes.first_chunk_mut::<HEADER_BYTES>().ok_or(WireError::Truncated)?;
        let payload = u16::try_from(self.payload_bytes).map_err(|_| WireError::Malformed)?;
        let word = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0x000f_ffff;
        h[0..4].copy_from_slice(&word.to_be_bytes());
        h[4..6].copy_from_slice(&payload.to_be_bytes());
        h[6] = self.next_header;
        h[7] = self.hop_limit;
        h[8..24].copy_from_slice(&self.src.octets());
        h[24..40].copy_from_slice(&self.dst.octets());
        Ok(())
    }
}

/// Length of a fragment header.
pub(crate) const FRAGMENT_BYTES: usize = 8;

/// A fragment header (RFC 8200 section 4.5).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fragment {
    /// Fragment offset in bytes, a multiple of 8.
    pub offset: u16,
    /// The M flag: more fragments follow.
    pub more: bool,
    /// Identification.
    pub ident: u32,
}

impl Fragment {
    /// Whether this is an atomic fragment: a whole packet, processed as if it had no fragment header (RFC
    /// 6946).
    pub(crate) const fn is_atomic(&self) -> bool {
        self.offset == 0 && !self.more
    }

    /// Writes the header, 8 bytes. `next_header` is the type of the first header of the fragmentable part.
    ///
    /// Errors: [`WireError::Truncated`] under 8 bytes; [`WireError::Malformed`] if `offset` is not a multiple
    /// of 8.
    pub fn emit(&self, next_header: u8, bytes: &mut [u8]) -> Result<(), WireError> {
        let h = bytes.first_chunk_mut::<FRAGMENT_BYTES>().ok_or(WireError::Truncated)?;
        if self.offset & 7 != 0 {
            return Err(WireError::Malformed);
        }
        h[0..2].copy_from_slice(&[next_header, 0]);
        h[2..4].copy_from_slice(&(self.offset | u16::from(self.more)).to_be_bytes());
        h[4..8].copy_from_slice(&self.ident.to_be_bytes());
        Ok(())
    }
}

/// The upper-layer header behind the extension headers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Upper {
    /// The transport protocol, `protocol::NO_NEXT_HEADER`, or an unknown header. In a fragment with a
    /// non-zero offset: the first header of the fragmentable part.
    pub protocol: u8,
    /// Offset of the upper-layer header from the start of the IPv6 header.
    pub offset: usize,
    /// Offset, from the start of the IPv6 header, of the Next Header field with `protocol`: the pointer of a
    /// parameter problem about an unknown protocol.
    pub next_header_at: usize,
    /// The fragment header, if there is one.
    pub fragment: Option<Fragment>,
    /// Offset of the fragment header from the start of the IPv6 header; 0 without one.
    pub fragment_at: usize,
}

/// The action for an unrecognized option: the two highest bits of the option type (RFC 8200 section 4.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OptionAction {
    /// 01: discard.
    Discard,
    /// 10: discard, and send a parameter problem even if the destination is multicast.
    DiscardAndReport,
    /// 11: discard, and send a parameter problem unless the destination is multicast.
    ReportUnlessMulticast,
}

/// Why the extension headers could not be processed. A `pointer` is an offset from the start of the IPv6
/// header, as in an ICMPv6 parameter problem (RFC 4443 section 3.4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ExtensionError {
    /// The packet, or the available part of it, ends within an extension header.
    Truncated,
    /// The packet is a first fragment and ends within its extension headers (parameter problem, code 3).
    IncompleteChain,
    /// Inconsistent lengths, too many headers or options, or a second fragment header.
    Malformed,
    /// A hop-by-hop header that is not the first extension header (parameter problem, code 1).
    UnrecognisedNextHeader {
        /// The Next Header field of the preceding header.
        pointer: u32,
    },
    /// An unrecognized option that may not be skipped (parameter problem, code 2).
    UnrecognisedOption {
        /// The type of the option.
        pointer: u32,
        /// The action that its type requires.
        action: OptionAction,
    },
    /// A routing header with segments left (parameter problem, code 0).
    BadRoutingHeader {
        /// The Routing Type field.
        pointer: u32,
    },
}

/// Processes the extension headers of a packet at its destination.
///
/// `bytes` starts with the IPv6 header and has the first part of the packet; `header` was parsed from it.
/// Without extension headers `bytes` is not accessed. In a first or atomic fragment the walk continues behind
/// the fragment header; in a later fragment it ends there.
///
/// RFC 8200 section 4.1 requires that extension headers are processed however often they occur. Two
/// deviations: a second fragment header is [`ExtensionError::Malformed`], since no legitimate sender fragments
/// a fragment and its offsets would be ambiguous; and there are limits, `MAX_EXTENSIONS` and
/// `MAX_OPTIONS`.
#[inline]
pub fn walk_extensions(bytes: &[u8], header: &Header) -> Result<Upper, ExtensionError> {
    let upper = Upper {
        protocol: header.next_header,
        offset: HEADER_BYTES,
        next_header_at: NEXT_HEADER_OFFSET,
        fragment: None,
        fragment_at: 0,
    };
    match header.next_header {
        protocol::TCP | protocol::UDP | protocol::ICMPV6 => Ok(upper),
        _ => walk(bytes, header, upper),
    }
}

#[cold]
fn walk(bytes: &[u8], header: &Header, mut at: Upper) -> Result<Upper, ExtensionError> {
    let end = HEADER_BYTES.saturating_add(header.payload_bytes);
    let (bytes, is_whole) = bytes.get(..end).map_or((bytes, false), |all| (all, true));
    let is_first = |at: &Upper| at.fragment.is_some_and(|f| f.offset == 0 && f.more);
    match skip_extensions(bytes, &mut at) {
        // RFC 8200 section 4.5, RFC 7112: the first fragment has the whole header chain.
        Err(ExtensionError::Truncated) if is_whole && is_first(&at) => {
            Err(ExtensionError::IncompleteChain)
        }
        Err(error) => Err(error),
        Ok(()) => Ok(at),
    }
}

/// Advances `at` over the extension headers.
fn skip_extensions(bytes: &[u8], at: &mut Upper) -> Result<(), ExtensionError> {
    for _ in 0..MAX_EXTENSIONS {
        let extension = bytes.get(at.offset..).unwrap_or(&[]);
        let passed_bytes = match at.protocol {
            protocol::HOP_BY_HOP if at.offset != HEADER_BYTES => return Err(misplaced(at)),
            protocol::HOP_BY_HOP | protocol::DESTINATION_OPTIONS => options(extension, at.offset)?,
            protocol::ROUTING => routing(extension, at.offset)?,
            protocol::FRAGMENT if at.fragment.is_some() => return Err(ExtensionError::Malformed),
            protocol::FRAGMENT => fragment(extension, at)?,
            _ => return Ok(()),
        };
        at.protocol = *extension.first().ok_or(ExtensionError::Truncated)?;
        at.next_header_at = at.offset;
        at.offset = at.offset.saturating_add(passed_bytes);
        if at.fragment.is_some_and(|f| f.offset != 0) {
            return Ok(());
        }
    }
    match at.protocol {
        protocol::HOP_BY_HOP => Err(misplaced(at)),
        protocol::DESTINATION_OPTIONS | protocol::ROUTING | protocol::FRAGMENT => {
            Err(ExtensionError::Malformed)
        }
        _ => Ok(()),
    }
}

/// RFC 8200 section 4.1: hop-by-hop options must immediately follow the IPv6 header.
fn misplaced(at: &Upper) -> ExtensionError {
    ExtensionError::UnrecognisedNextHeader { pointer: pointer(at.next_header_at, 0) }
}

/// The body of an extension header, behind its first two bytes, and its whole length. The length field is in
/// units of 8 bytes, not including the first 8.
fn body(extension: &[u8]) -> Result<(&[u8], usize), ExtensionError> {
    let (&[_, units], _) = extension.split_first_chunk().ok_or(ExtensionError::Truncated)?;
    let length_bytes = usize::from(units).saturating_add(1) << 3;
    let body = extension.get(2..length_bytes).ok_or(ExtensionError::Truncated)?;
    Ok((body, length_bytes))
}

/// Processes hop-by-hop or destination options (RFC 8200 section 4.2). None but padding is recognized.
fn options(extension: &[u8], offset: usize) -> Result<usize, ExtensionError> {
    let (mut rest, length_bytes) = body(extension)?;
    for _ in 0..MAX_OPTIONS {
        let option_at = offset.saturating_add(length_bytes).saturating_sub(rest.len());
        rest = match *rest {
            [] => return Ok(length_bytes),
            [0, ref tail @ ..] => tail,
            [kind, option_bytes, ref tail @ ..] => {
                if let Some(action) = action(kind) {
                    let pointer = pointer(option_at, 0);
                    return Err(ExtensionError::UnrecognisedOption { pointer, action });
                }
                tail.get(usize::from(option_bytes)..).ok_or(ExtensionError::Malformed)?
            }
            [_] => return Err(ExtensionError::Malformed),
        };
    }
    if rest.is_empty() { Ok(length_bytes) } else { Err(ExtensionError::Malformed) }
}

/// The action for an unrecognized option. `None` if it may be skipped, as PadN.
fn action(kind: u8) -> Option<OptionAction> {
    match kind >> 6 {
        0 => None,
        1 => Some(OptionAction::Discard),
        2 => Some(OptionAction::DiscardAndReport),
        _ => Some(OptionAction::ReportUnlessMulticast),
    }
}

/// Skips a routing header. No routing type is recognized, so one with segments left is rejected (RFC 8200
/// section 4.4, RFC 5095 for type 0).
fn routing(extension: &[u8], offset: usize) -> Result<usize, ExtensionError> {
    let (body, length_bytes) = body(extension)?;
    match body {
        [_, 0, ..] => Ok(length_bytes),
        _ => Err(ExtensionError::BadRoutingHeader { pointer: pointer(offset, 2) }),
    }
}

/// Parses a fragment header (RFC 8200 section 4.5):
///
/// ```text
/// | next hdr | reserved | offset (13 bits) 0 0 M | identification (32 bits) |
/// ```
fn fragment(extension: &[u8], at: &mut Upper) -> Result<usize, ExtensionError> {
    let f = extension.first_chunk::<FRAGMENT_BYTES>().ok_or(ExtensionError::Truncated)?;
    at.fragment_at = at.offset;
    let offset_more = u16::from_be_bytes([f[2], f[3]]);
    at.fragment = Some(Fragment {
        offset: offset_more & 0xfff8,
        more: offset_more & 1 != 0,
        ident: u32::from_be_bytes([f[4], f[5], f[6], f[7]]),
    });
    Ok(f.len())
}

/// An offset as a pointer. Offsets are below 40 + 65,535, so nothing saturates.
fn pointer(offset: usize, field: u32) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX).saturating_add(field)
}

#[cfg(test)]
mod tests;
