//! Packets of QUIC with a long header, and what an Initial packet carries (RFC 9000 section 17.2, RFC 9001 section 5).
//!
//! The keys of Initial packets follow from a connection ID that is in the clear, so that they protect nothing from a
//! reader on the path.

use aes_gcm::aead::AeadInPlace;
use aes_gcm::aes::Aes128;
use aes_gcm::aes::cipher::{BlockEncrypt, KeyInit};
use aes_gcm::{Aes128Gcm, Nonce, Tag};
use hkdf::Hkdf;
use sha2::Sha256;

use super::walk::Walk;

/// Most bytes of a connection ID of these versions.
const MOST_ID_BYTES: usize = 20;
const SAMPLE_BYTES: usize = 16;
const TAG_BYTES: usize = 16;

/// The versions that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// RFC 9000.
    V1,
    /// RFC 9369.
    V2,
}

impl Version {
    /// Of the number in a packet.
    pub(super) fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Version::V1),
            0x6b33_43cf => Some(Version::V2),
            _ => None,
        }
    }

    fn salt(self) -> [u8; 20] {
        match self {
            Version::V1 => [
                0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8,
                0x0c, 0xad, 0xcc, 0xbb, 0x7f, 0x0a,
            ],
            Version::V2 => [
                0x0d, 0xed, 0xe3, 0xde, 0xf7, 0x00, 0xa6, 0xdb, 0x81, 0x93, 0x81, 0xbe, 0x6e, 0x26,
                0x9d, 0xcb, 0xf9, 0xbd, 0x2e, 0xd9,
            ],
        }
    }

    /// The labels of key, IV and header protection.
    fn labels(self) -> [&'static str; 3] {
        match self {
            Version::V1 => ["quic key", "quic iv", "quic hp"],
            Version::V2 => ["quicv2 key", "quicv2 iv", "quicv2 hp"],
        }
    }

    fn kind(self, first: u8) -> Kind {
        let bits = first >> 4 & 3;
        // RFC 9369 section 3.2 moves each by one.
        match (self, bits) {
            (Version::V1, 0) | (Version::V2, 1) => Kind::Initial,
            (Version::V1, 1) | (Version::V2, 2) => Kind::ZeroRtt,
            (Version::V1, 2) | (Version::V2, 3) => Kind::Handshake,
            _ => Kind::Retry,
        }
    }
}

/// The type of a packet with a long header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Initial,
    ZeroRtt,
    Handshake,
    Retry,
}

/// A packet with a long header.
pub(super) struct Packet<'a> {
    pub version: Version,
    pub kind: Kind,
    pub dcid: &'a [u8],
    /// From the first byte to the end that its length gives.
    bytes: &'a [u8],
    /// Where the packet number begins.
    number_at: usize,
}

impl<'a> Packet<'a> {
    /// Takes the packet from the front of a datagram.
    pub(super) fn take(datagram: &mut &'a [u8]) -> Option<Self> {
        let mut rest = Walk(datagram);
        let first = rest.u8()?;
        let version = Version::of(rest.u32()?)?;
        let (dcid, scid) = (rest.vec8()?, rest.vec8()?);
        let kind = version.kind(first);
        if dcid.len() > MOST_ID_BYTES || scid.len() > MOST_ID_BYTES || kind == Kind::Retry {
            return None;
        }
        if kind == Kind::Initial {
            let token_bytes = rest.length()?;
            rest.bytes(token_bytes)?;
        }
        let length = rest.length()?;
        let number_at = datagram.len().checked_sub(rest.0.len())?;
        let (bytes, next) = datagram.split_at_checked(number_at.checked_add(length)?)?;
        *datagram = next;
        Some(Packet { version, kind, dcid, bytes, number_at })
    }
}

/// The keys of the client's Initial packets (RFC 9001 section 5.2).
pub(super) struct Keys {
    pub aead: Aes128Gcm,
    iv: [u8; 12],
    pub header: Aes128,
}

impl Keys {
    /// Of the connection whose first packet had this destination.
    pub(super) fn derive(version: Version, dcid: &[u8]) -> Option<Self> {
        let initial = Hkdf::<Sha256>::new(Some(&version.salt()), dcid);
        let client: [u8; 32] = expand(&initial, "client in")?;
        let client = Hkdf::<Sha256>::from_prk(&client).ok()?;
        let [key, iv, header] = version.labels();
        let key: [u8; 16] = expand(&client, key)?;
        let header: [u8; 16] = expand(&client, header)?;
        Some(Keys {
            aead: Aes128Gcm::new(&key.into()),
            iv: expand(&client, iv)?,
            header: Aes128::new(&header.into()),
        })
    }

    /// Removes the protection of a packet (RFC 9001 section 5.4). Returns its number and its frames. `largest`: the largest
    /// number of the connection.
    pub(super) fn open(&self, packet: &Packet<'_>, largest: Option<u64>) -> Option<(u64, Vec<u8>)> {
        let sample = packet.bytes.get(packet.number_at.checked_add(4)?..)?;
        let mut mask = aes_gcm::aes::Block::clone_from_slice(sample.get(..SAMPLE_BYTES)?);
        self.header.encrypt_block(&mut mask);
        let (mask_first, mask_number) = mask.split_first()?;
        let mut bytes = packet.bytes.to_vec();
        let first = bytes.first_mut()?;
        *first ^= mask_first & 0x0f;
        let number_bytes = usize::from(*first & 3) + 1;
        // Reserved bits are zero (RFC 9000 section 17.2).
        let is_reserved_zero = *first & 0x0c == 0;
        let payload_at = packet.number_at.checked_add(number_bytes)?;
        let field = bytes.get_mut(packet.number_at..payload_at)?;
        field.iter_mut().zip(mask_number).for_each(|(byte, mask)| *byte ^= mask);
        let truncated = field.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let number = decode_number(largest, truncated, number_bytes);
        let (header, payload) = bytes.split_at_mut_checked(payload_at)?;
        let tag_at = payload.len().checked_sub(TAG_BYTES)?;
        let (payload, tag) = payload.split_at_mut_checked(tag_at)?;
        let nonce = self.nonce(number);
        let opened = self.aead.decrypt_in_place_detached(
            Nonce::from_slice(&nonce),
            header,
            payload,
            Tag::from_slice(tag),
        );
        (opened.is_ok() && is_reserved_zero).then(|| (number, payload.to_vec()))
    }

    pub(super) fn nonce(&self, number: u64) -> [u8; 12] {
        let mut nonce = self.iv;
        let last = nonce.iter_mut().rev().zip(number.to_le_bytes());
        last.for_each(|(byte, of_number)| *byte ^= of_number);
        nonce
    }
}

/// HKDF-Expand-Label without a context (RFC 8446 section 7.1).
fn expand<const N: usize>(secret: &Hkdf<Sha256>, label: &str) -> Option<[u8; N]> {
    let length = u16::try_from(N).ok()?.to_be_bytes();
    let label_bytes = u8::try_from("tls13 ".len() + label.len()).ok()?;
    let mut out = [0; N];
    let parts: [&[u8]; 5] = [&length, &[label_bytes], b"tls13 ", label.as_bytes(), &[0]];
    secret.expand_multi_info(&parts, &mut out).ok()?;
    Some(out)
}

/// The whole packet number (RFC 9000 appendix A.3).
fn decode_number(largest: Option<u64>, truncated: u64, number_bytes: usize) -> u64 {
    let expected = largest.map_or(0, |n| n.saturating_add(1));
    let window = 1_u64 << (8 * number_bytes as u32);
    let candidate = expected & !(window - 1) | truncated;
    if candidate.saturating_add(window / 2) <= expected && candidate < (1 << 62) - window {
        return candidate + window;
    }
    if candidate > expected.saturating_add(window / 2) && candidate >= window {
        return candidate - window;
    }
    candidate
}

/// A frame of an Initial packet that matters here.
pub(super) struct CryptoFrame<'a> {
    pub offset: usize,
    pub data: &'a [u8],
}

/// The CRYPTO frames of an Initial packet. `None`: a frame is wrong, or may not be in an Initial packet (RFC 9000 section
/// 12.4).
pub(super) fn crypto_frames(payload: &[u8]) -> Option<Vec<CryptoFrame<'_>>> {
    let mut rest = Walk(payload);
    let mut frames = Vec::new();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        match rest.varint()? {
            // PADDING and PING.
            0 | 1 => {}
            // ACK, the second kind with counts of ECN.
            kind @ (2 | 3) => skip_ack(&mut rest, kind == 3)?,
            6 => {
                let offset = rest.length()?;
                let length = rest.length()?;
                frames.push(CryptoFrame { offset, data: rest.bytes(length)? });
            }
            // CONNECTION_CLOSE.
            0x1c => {
                rest.varint()?;
                rest.varint()?;
                let reason_bytes = rest.length()?;
                rest.bytes(reason_bytes)?;
            }
            _ => return None,
        }
    }
    Some(frames)
}

fn skip_ack(rest: &mut Walk<'_>, has_ecn: bool) -> Option<()> {
    rest.varint()?;
    rest.varint()?;
    let ranges = rest.varint()?;
    rest.varint()?;
    let more = ranges.checked_mul(2)?.checked_add(if has_ecn { 3 } else { 0 })?;
    // Each takes a byte or more, so that the payload bounds the loop.
    for _ in 0..more {
        rest.varint()?;
    }
    Some(())
}
