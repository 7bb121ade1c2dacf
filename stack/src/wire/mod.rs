//! Wire formats: one file per header, and the Internet checksum.
//!
//! **Input and output.** `parse` reads a header, checks every length once, and returns a `Copy`
//! representation in native types. `emit` writes a representation into the caller's buffer.
//! **Memory:** buffers are borrowed for the call only. **Invariants:** no input panics; lengths and offsets
//! in a parsed representation are inside the input. **Limits:** only the format is checked; whether a source
//! address, a hop limit or a sequence number is acceptable is decided by the protocol engines. Checksums are
//! verified by the caller, which has the whole packet, with [`checksum`]. **Cost:** a few nanoseconds per
//! header, no allocation, no copy of payload. **Sources:** cited in each file.

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
pub mod dissect;
pub mod eth;
pub mod icmpv4;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
pub mod predict;
pub mod protocol;
pub mod tcp;
#[cfg(test)]
mod testing;
pub mod udp;
pub mod virtio_net;
mod writer;

/// Why a header could not be parsed or emitted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WireError {
    /// The input is shorter than the header; in `emit`, the buffer is too short.
    Truncated,
    /// A field violates the format; in `emit`, the representation cannot be encoded.
    Malformed,
}

impl core::fmt::Display for WireError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            WireError::Truncated => "the input is shorter than the header",
            WireError::Malformed => "a field violates the format",
        })
    }
}

impl core::error::Error for WireError {}
