//! IPv4 and IPv6 input and output, ICMP, ARP, neighbour discovery, path MTU.
//!
//! Enters: whole Ethernet frames from the device ([`Ip::input`]), transport packets from the
//! engines ([`Ip::output`]), time. Leaves: a [`Verdict`] for every frame, frames through a
//! [`FrameSink`].
//!
//! ```text
//!  frame:   | Ethernet 14 | IPv4 20-60 or IPv6 40 + extensions | transport header | payload |
//!  Deliver:                                                    ^ the chain starts here, and the
//!                                                                transport header is contiguous
//!  output:  | headroom >= 54              | transport header | payload |   the chain starts at
//!                                         ^ the transport header; both lower headers are put
//!                                           in front in one piece
//! ```
//!
//! Memory: a chain passed in belongs to this room until it comes out in a verdict or goes into the
//! sink; what is dropped goes back to the pool and is counted here. Packets that wait for a
//! neighbour's address are bounded in number.
//!
//! Datagrams in fragments are put together before they are delivered, in a table that is bounded in
//! number, storage and time; what is too large for its path is cut where its sender allows it, which
//! TCP never does.
//!
//! Not built: forwarding, multicast groups, duplicate address detection and SLAAC (RFC 4862: addresses are configured; another
//! station that claims one is counted), router advertisements and redirects (ignored).
//!
//! Cost: a packet to a known destination costs one look-up in a small direct-mapped cache; route,
//! neighbour and path-MTU tables are consulted once per destination and change.
//!
//! Sources: RFC 791, 792, 826, 1122, 1191, 4291, 4443, 4861, 5722, 5927, 6724, 6946, 6980,
//! 8200, 8201.

#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

extern crate alloc;

mod address;
mod arp;
mod config;
mod destination;
mod engine;
mod fragment;
mod frame;
mod icmp;
mod input;
mod ndp;
mod neighbour;
mod output;
mod pmtu;
mod quote;
mod reassembly;
mod routing;
mod source;
mod template;
mod types;
mod waiting;

pub use config::{Config, ConfigError, IfAddr};
pub use engine::Ip;
pub use fulmar_route::{
    Advice, Neighbour, NeighbourConfig, NeighbourState, NextHop, Prefix, Route, RouteError, Traffic,
};
pub use source::AddressUse;
pub use template::{Flow, Template};
pub use types::{
    Delivered, EchoReply, ErrorKind, FrameSink, NoRoute, Outgoing, OutputError, PathChoice,
    QuotedError, SavedHeader, Verdict,
};
