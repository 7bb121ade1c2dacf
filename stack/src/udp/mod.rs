//! The UDP engine (RFC 768, RFC 8200 section 8.1, RFC 1122 section 4.1).
//!
//! Inputs: packets delivered by `ip` ([`input`]) and payload to send ([`output`]). Outputs:
//! datagrams with their addresses, and packets with a UDP header and a partial checksum. The crate
//! also holds the socket state ([`UdpSocket`]) and the port table (`UdpTable`).
//!
//! ```text
//!  input:   | UDP 8 | payload | (surplus)    bytes beyond the UDP length are trimmed
//!  output:  | headroom 72+ | UDP 8 | payload |
//! ```
//!
//! Memory: every function consumes the chain that it is given. A dropped chain is freed to the pool
//! and counted once, here. A socket's receive queue is bounded by storage and by count.
//!
//! Fragmentation and reassembly are in `ip`.
//!
//! Not implemented: UDP-Lite, and delivery of one broadcast to several sockets (the most specific
//! binding receives it).

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod datagram;
mod plpmtud;
mod socket;
mod table;
mod template;

pub(crate) use datagram::HEADROOM_BYTES;
pub use datagram::Incoming;
pub(crate) use datagram::max_payload;
pub use datagram::{Datagram, Dropped, OutputError, charge, input, output};
pub use plpmtud::{Plpmtud, PlpmtudState};
pub use socket::UdpError;
pub use socket::UdpSocket;
pub(crate) use table::BindError;
pub(crate) use table::PreparedLookup;
pub(crate) use table::UdpTable;
pub use table::{BindOptions, Bound};
pub use template::{Template, offload_of};
