//! Options of neighbour discovery (RFC 4861 section 4.6).
//!
//! ```text
//! +------+--------+---------------------------
//! | type | length | value, padded              length of the option in units of 8 bytes
//! +------+--------+---------------------------
//! ```

use crate::base::EtherAddr;
use crate::wire::{WireError, writer::Writer};
use core::net::Ipv6Addr;

const SOURCE_LINK_LAYER: u8 = 1;
const TARGET_LINK_LAYER: u8 = 2;
const PREFIX: u8 = 3;
const MTU: u8 = 5;

// Flags of a prefix information option (RFC 4861 section 4.6.2).
const ON_LINK: u8 = 0x80;
const AUTONOMOUS: u8 = 0x40;

/// A neighbour discovery option, for Ethernet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NdpOption {
    /// Source link-layer address.
    SourceLinkLayer(EtherAddr),
    /// Target link-layer address.
    TargetLinkLayer(EtherAddr),
    /// MTU of the link in bytes.
    Mtu(u32),
    /// Prefix information.
    Prefix {
        /// The prefix; bits behind `prefix_bits` are undefined.
        prefix: Ipv6Addr,
        /// Prefix length in bits, at most 128.
        prefix_bits: u8,
        /// The L flag: the prefix is on-link.
        on_link: bool,
        /// The A flag: the prefix can be used for address autoconfiguration (RFC 4862).
        autonomous: bool,
        /// Valid lifetime in seconds; `u32::MAX` is infinite.
        valid_s: u32,
        /// Preferred lifetime in seconds; `u32::MAX` is infinite.
        preferred_s: u32,
    },
    /// An unknown option, to be ignored (RFC 4861 section 4.6).
    Unknown,
}

/// An iterator over the options of a neighbour discovery message.
#[derive(Clone, Debug)]
pub struct NdpOptions<'a> {
    rest: &'a [u8],
}

/// Parses the options in `bytes`: all bytes behind [`Message::header_bytes`](super::Message::header_bytes).
///
/// Yields [`WireError::Malformed`] for an option with length zero (the packet must be discarded, RFC 4861
/// section 4.6) or with a wrong length for its type, [`WireError::Truncated`] for one that exceeds `bytes`,
/// and nothing after an error.
pub fn ndp_options(bytes: &[u8]) -> NdpOptions<'_> {
    NdpOptions { rest: bytes }
}

impl Iterator for NdpOptions<'_> {
    type Item = Result<NdpOption, WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let (option, rest) = match split(self.rest) {
            Ok((option, rest)) => (parse(option), rest),
            Err(e) => (Err(e), &[][..]),
        };
        self.rest = if option.is_ok() { rest } else { &[] };
        Some(option)
    }
}

/// The first option with its type and length, and the rest.
fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), WireError> {
    match *bytes {
        [_, 0, ..] => Err(WireError::Malformed),
        [_, units, ..] => {
            bytes.split_at_checked(usize::from(units) << 3).ok_or(WireError::Truncated)
        }
        _ => Err(WireError::Truncated),
    }
}

fn parse(option: &[u8]) -> Result<NdpOption, WireError> {
    let kind = *option.first().ok_or(WireError::Truncated)?;
    Ok(match kind {
        SOURCE_LINK_LAYER => NdpOption::SourceLinkLayer(ether(option)?),
        TARGET_LINK_LAYER => NdpOption::TargetLinkLayer(ether(option)?),
        MTU => match *option {
            [_, _, _, _, a, b, c, d] => NdpOption::Mtu(u32::from_be_bytes([a, b, c, d])),
            _ => return Err(WireError::Malformed),
        },
        PREFIX => prefix(option)?,
        _ => NdpOption::Unknown,
    })
}

/// A link-layer address, which must have the length of an Ethernet address.
fn ether(option: &[u8]) -> Result<EtherAddr, WireError> {
    match *option {
        [_, _, a, b, c, d, e, f] => Ok(EtherAddr([a, b, c, d, e, f])),
        _ => Err(WireError::Malformed),
    }
}

/// ```text
///  0      1     2             3       4              8                  12         16       32
/// +------+-----+-------------+-------+--------------+------------------+----------+--------+
/// |  3   |  4  | prefix bits | flags | valid life   | preferred life   | reserved | prefix |
/// +------+-----+-------------+-------+--------------+------------------+----------+--------+
/// ```
fn prefix(option: &[u8]) -> Result<NdpOption, WireError> {
    let (p, address) = option.split_first_chunk::<16>().ok_or(WireError::Malformed)?;
    let octets: [u8; 16] = address.try_into().map_err(|_| WireError::Malformed)?;
    if p[2] > 128 {
        return Err(WireError::Malformed);
    }
    Ok(NdpOption::Prefix {
        prefix: Ipv6Addr::from(octets),
        prefix_bits: p[2],
        on_link: p[3] & ON_LINK != 0,
        autonomous: p[3] & AUTONOMOUS != 0,
        valid_s: u32::from_be_bytes([p[4], p[5], p[6], p[7]]),
        preferred_s: u32::from_be_bytes([p[8], p[9], p[10], p[11]]),
    })
}

impl NdpOption {
    /// Length of the option in bytes; 0 for [`NdpOption::Unknown`].
    pub const fn bytes(&self) -> usize {
        match self {
            NdpOption::Prefix { .. } => 32,
            NdpOption::Unknown => 0,
            _ => 8,
        }
    }

    /// Writes the option and returns its length.
    ///
    /// Errors: [`WireError::Truncated`] if it does not fit; [`WireError::Malformed`] for
    /// [`NdpOption::Unknown`].
    pub fn emit(&self, bytes: &mut [u8]) -> Result<usize, WireError> {
        let mut out = Writer(bytes.get_mut(..self.bytes()).ok_or(WireError::Truncated)?);
        match *self {
            NdpOption::SourceLinkLayer(EtherAddr([a, b, c, d, e, f])) => {
                out.put([SOURCE_LINK_LAYER, 1, a, b, c, d, e, f])?;
            }
            NdpOption::TargetLinkLayer(EtherAddr([a, b, c, d, e, f])) => {
                out.put([TARGET_LINK_LAYER, 1, a, b, c, d, e, f])?;
            }
            NdpOption::Mtu(mtu) => {
                out.put([MTU, 1, 0, 0])?;
                out.put(mtu.to_be_bytes())?;
            }
            NdpOption::Prefix {
                prefix,
                prefix_bits,
                on_link,
                autonomous,
                valid_s,
                preferred_s,
            } => {
                let flags = super::bit(on_link, ON_LINK) | super::bit(autonomous, AUTONOMOUS);
                out.put([PREFIX, 4, prefix_bits, flags])?;
                out.put(valid_s.to_be_bytes())?;
                out.put(preferred_s.to_be_bytes())?;
                out.put([0; 4])?;
                out.put(prefix.octets())?;
            }
            NdpOption::Unknown => return Err(WireError::Malformed),
        }
        Ok(self.bytes())
    }
}
