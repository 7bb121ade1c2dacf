//! The UDP engine (RFC 768, RFC 8200 section 8.1, RFC 1122 section 4.1).
//!
//! Enters: packets that room `ip` delivered ([`input`]), payload to send ([`output`]). Leaves:
//! datagrams with their addresses, packets with a UDP header and a partial checksum. Beside it
//! stand what a socket keeps ([`UdpSocket`]) and who owns which port ([`UdpTable`]).
//!
//! ```text
//!  input:   | UDP 8 | payload | (surplus)    surplus behind the UDP length is cut off
//!  output:  | headroom 72+ | UDP 8 | payload |
//! ```
//!
//! Memory: a chain belongs to whoever holds it; what is dropped goes back to the pool and is
//! counted here, once. A socket's receive queue is bounded by storage and by count.
//!
//! Fragments are room `ip`'s business, in both directions.
//!
//! Not built: UDP-Lite, delivery of one broadcast to several sockets (the most specific one gets it).

#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

extern crate alloc;

mod datagram;
mod socket;
mod table;
mod template;

pub use datagram::{
    Datagram, Dropped, HEADROOM_BYTES, Incoming, OutputError, charge, input, input_for,
    max_payload, output,
};
pub use socket::{UdpError, UdpSocket};
pub use table::{BindError, BindOptions, Bound, UdpProbe, UdpTable};
pub use template::{Template, offload_of};
