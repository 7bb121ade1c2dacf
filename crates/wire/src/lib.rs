//! Wire formats: one file per header, and the Internet checksum.
//!
//! **What enters and leaves.** A `parse` takes the first bytes of a header, checks every length
//! once, and returns a small `Copy` representation in native types. An `emit` writes a
//! representation into the caller's buffer. **Memory:** everything is borrowed for the length of
//! the call, nothing is kept. **Invariants:** no input of any kind panics; a representation that
//! came from `parse` describes bytes that were there. **What it does not do:** it judges form,
//! never meaning: whether an address may be a source, a hop limit is right or a sequence number
//! acceptable is the engines' business. Checksums are verified where the whole packet is at hand,
//! with [`checksum`]. **Cost:** a few nanoseconds per header, no allocation, no copy of payload.
//! **Sources:** named beside each header.

#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic
    )
)]

pub mod arp;
pub mod checksum;
pub mod eth;
pub mod familiar;
pub mod icmpv4;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
pub mod protocol;
pub mod tcp;
#[cfg(test)]
mod testing;
pub mod udp;
pub mod virtio_net;
mod writer;

/// Why a header could not be read or written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WireError {
    /// The bytes end before the header does; in `emit`, the buffer is too short.
    Truncated,
    /// A field contradicts the format; in `emit`, the representation cannot be expressed.
    Malformed,
}

impl core::fmt::Display for WireError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            WireError::Truncated => "the bytes end before the header does",
            WireError::Malformed => "a field contradicts the format",
        })
    }
}

impl core::error::Error for WireError {}
